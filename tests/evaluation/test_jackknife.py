"""The jackknife over clients: its closed form, its agreement with (E23), and what stops it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from fedipw.calibration import Distance, Entropy, InverseLogit, Linear
from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    Estimate,
    GregMean,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    MeanEstimator,
    jackknife_means,
    population_means,
)
from fedipw.evaluation.phases import (
    CalibratedEnrollment,
    FittedEnrollment,
    KnownEnrollment,
    StepPhase,
)
from fedipw.evaluation.sample import TwoPhase
from fedipw.lab.two_phase import fitted_two_phase
from fedipw.numerics import FloatArray
from fedipw.selection.logistic import logistic_fit
from fedipw.tables.partitions import Block, Blocks, Partitions
from fedipw.weighting.balance import Balance


def known(y: FloatArray, kappa: FloatArray, prob: FloatArray) -> TwoPhase:
    """Every client replies once, in one round."""
    return TwoPhase(
        client=np.arange(len(y)), round=np.zeros(len(y), dtype=int), prob=prob, rounds=1,
        enrollment=KnownEnrollment(weights=kappa, population_size=round(kappa.sum())),
    )  # fmt: skip


def test_with_known_probabilities_it_is_that_of_a_ratio_without_each_client() -> None:
    rng = np.random.default_rng(1)
    n = 15
    y, kappa, p = rng.normal(size=n), rng.uniform(1.5, 5.0, n), rng.uniform(0.3, 0.9, n)
    w = kappa / p
    (got,) = jackknife_means(known(y, kappa, p), y, [HajekMean()], rng=rng, count=n)
    without = np.array([np.average(np.delete(y, i), weights=np.delete(w, i)) for i in range(n)])
    spread = (n - 1) / n * ((without - without.mean()) ** 2).sum()
    u = (y - got.estimate) / w.sum()
    finite = (kappa * ((u / p) ** 2 - (1 - p) / p**2 * u**2)).sum() * n / (n - 1)
    assert got.se**2 == pytest.approx(spread - finite, rel=1e-12)
    assert got.estimate == pytest.approx(np.average(y, weights=w), rel=1e-12)
    assert got.freedom <= n - 1
    assert finite > 0.1 * spread


def test_with_known_probabilities_the_sum_has_the_error_of_its_size_too() -> None:
    # Horvitz–Thompson with y = 1 estimates the number of clients: how many enrolled is chance
    n = 40
    kappa, ones = np.full(n, 3.0), np.ones(n)
    (got,) = jackknife_means(
        known(ones, kappa, ones), ones, [HorvitzThompsonMean()], [Group(size=120.0)],
        rng=np.random.default_rng(2), count=n,
    )  # fmt: skip
    expected = n * 3.0 * (3.0 - 1.0) / 120.0**2  # sum of kappa (kappa - 1)
    assert got.se**2 == pytest.approx(expected * n / (n - 1), rel=1e-9)


def test_a_census_has_no_error() -> None:
    rng = np.random.default_rng(3)
    y, ones = rng.normal(2.0, 1.0, size=25), np.ones(25)
    lines = jackknife_means(
        known(y, ones, ones), y, [HorvitzThompsonMean(), HajekMean()], [Group(size=25.0)],
        rng=rng, count=25,
    )  # fmt: skip
    for line in lines:
        assert line.se == pytest.approx(0.0, abs=1e-8)
        assert line.reason == ""


class Drawn:
    """A population with a metric that stands well above 0, enrollment and three rounds."""

    def __init__(self, seed: int, size: int) -> None:
        rng = np.random.default_rng(seed)
        self.Z = rng.normal(size=(size, 2))
        self.enrolled = rng.random(size) < expit(0.5 * self.Z[:, 0] - 1.2)
        ids = np.flatnonzero(self.enrolled)
        self.client, rounds = np.tile(ids, 3), np.repeat(np.arange(3), len(ids))
        X = np.column_stack([self.Z[self.client], rng.normal(size=len(self.client))])
        replied = rng.random(len(X)) < expit(0.4 * X[:, 0] + 0.4 * X[:, 2])
        own = rng.normal(3.0 + self.Z[:, 0], 1.0)
        self.y = (own[self.client] + X[:, 2])[replied]
        self.fitted = fitted_two_phase(
            self.Z, self.enrolled, X, self.client, rounds, replied=replied
        )

    @property
    def balance(self) -> Balance:
        return Balance(
            names=("a", "b"), matrix=self.Z, enrolled=self.enrolled, mean=self.Z.mean(axis=0),
            population_size=len(self.Z),
        )  # fmt: skip

    def calibrated(self, distance: Distance | InverseLogit) -> TwoPhase:
        s, phase = self.fitted, CalibratedEnrollment.of(self.balance, distance)
        return TwoPhase(
            client=s.client, round=s.round, prob=s.prob, rounds=s.rounds, enrollment=phase,
            steps=s.steps,
        )  # fmt: skip

    def penalised(self, l2: float) -> TwoPhase:
        """Both stages with a ridge penalty."""
        s, columns = self.fitted, np.ascontiguousarray(self.Z[self.enrolled].T)
        phase, (step,) = s.enrollment, s.steps
        assert isinstance(phase, FittedEnrollment)
        first, second = (
            logistic_fit(p.rows, p.fit.names, frame=p.frame, l2=l2).checked() for p in (phase, step)
        )
        here = StepPhase.of(
            step.rows, step.frame, second, codes=step.codes, replies=step.replies, n=s.clients
        )
        return TwoPhase(
            client=s.client, round=s.round, prob=here.reply_prob, rounds=s.rounds, steps=(here,),
            enrollment=FittedEnrollment.of(phase.rows, phase.frame, first, columns),
        )  # fmt: skip

    def both(self, sample: TwoPhase, count: int) -> list[tuple[Estimate, Estimate]]:
        """Each estimator's line by (E23) and by the jackknife."""
        greg = GregMean(self.Z[self.enrolled], self.Z.mean(axis=0))
        estimators: list[MeanEstimator] = [HorvitzThompsonMean(), HajekMean(), greg]
        groups = [Group(size=len(self.Z))]
        by_hand = population_means(sample, self.y, estimators, groups)
        rng = np.random.default_rng(7)
        again = jackknife_means(sample, self.y, estimators, groups, rng=rng, count=count)
        return list(zip(by_hand, again, strict=True))


@pytest.mark.parametrize("kind", ["fitted", "ridge", "entropy", "inverse-logit"])
def test_with_fits_it_agrees_with_the_linearised_error(kind: str) -> None:
    """N = 3000, 400 groups: its own error is 3.5% to 4%, and 10% are allowed.

    1/sqrt(2 * 399) is 3.5%; what the finite population takes off has little of its own. False
    alarm about 1% for each of twelve comparisons, which move together; the seeds are fixed.
    """
    drawn = Drawn(4, 3000)
    distances: dict[str, Distance | InverseLogit] = {
        "entropy": Entropy(), "inverse-logit": InverseLogit(),
    }  # fmt: skip
    if kind in distances:
        sample = drawn.calibrated(distances[kind])
    else:  # 300 is about the information of a column in either fit
        sample = drawn.penalised(300.0 if kind == "ridge" else 0.0)
    for linear, jackknife in drawn.both(sample, 400):
        assert jackknife.estimate == linear.estimate
        assert jackknife.se == pytest.approx(linear.se, rel=0.1), linear.estimator
        assert jackknife.freedom == min(linear.freedom, 399.0)
        assert jackknife.reason == ""


def test_weights_below_zero_can_be_left_out_too() -> None:
    drawn = Drawn(5, 120)
    balance = drawn.balance
    far = Balance(
        names=balance.names, matrix=balance.matrix, enrolled=balance.enrolled,
        mean=balance.mean - [1.0, 0.0], population_size=120,
    )  # fmt: skip
    s, phase = drawn.fitted, CalibratedEnrollment.of(far, Linear())
    assert (phase.weights < 0.0).any()
    sample = TwoPhase(
        client=s.client, round=s.round, prob=s.prob, rounds=s.rounds, enrollment=phase
    )
    (line,) = jackknife_means(
        sample, drawn.y, [HajekMean()], rng=np.random.default_rng(1), count=20
    )
    assert line.se > 0.0


def test_errors_of_targets_add_to_it_as_to_the_linearised_error() -> None:
    drawn = Drawn(6, 400)
    error = np.array([0.2, 0.0])
    phase = CalibratedEnrollment.of(drawn.balance, Entropy())
    s = drawn.fitted
    found = []
    for target_error in (None, error):
        here = replace(phase, target_error=target_error)
        sample = TwoPhase(
            client=s.client, round=s.round, prob=s.prob, rounds=3, enrollment=here, steps=s.steps
        )
        rng = np.random.default_rng(2)
        lines = [*population_means(sample, drawn.y, [HajekMean()])]
        lines += jackknife_means(sample, drawn.y, [HajekMean()], rng=rng, count=30)
        found.append([line.se**2 for line in lines])
    linear, jackknife = np.subtract(found[1], found[0])
    assert linear > 0.02  # 0.2 squared times a slope of about one
    assert jackknife == pytest.approx(linear, rel=1e-9)


def test_the_mean_over_samples_has_one_too() -> None:
    rng = np.random.default_rng(8)
    y, kappa, p = rng.normal(size=20), rng.uniform(1.5, 5.0, 20), np.full(20, 0.5)
    n = rng.integers(1, 9, 20).astype(float)
    (got,) = jackknife_means(known(y, kappa, p), y, [HajekMean(n)], rng=rng, count=20)
    w = n * kappa
    without = [np.average(np.delete(y, i), weights=np.delete(w, i)) for i in range(20)]
    assert got.estimate == pytest.approx(np.average(y, weights=w), rel=1e-12)
    assert got.se <= np.sqrt(19 * np.var(without)) * (1 + 1e-12)
    assert got.se > 0.5 * np.sqrt(19 * np.var(without))


def test_the_same_seed_gives_the_same_groups() -> None:
    drawn = Drawn(9, 150)
    first, again, other = (
        jackknife_means(
            drawn.fitted, drawn.y, [HajekMean()], rng=np.random.default_rng(seed), count=5
        )[0]
        for seed in (1, 1, 2)
    )
    assert first.se == again.se != other.se


def test_a_group_that_one_deletion_empties_has_no_error_and_says_so() -> None:
    rng = np.random.default_rng(10)
    y, kappa = rng.normal(size=12), np.full(12, 2.0)
    inside = np.arange(12) < 2
    few = Group(name="few", inside=inside)
    sample = known(y, kappa, np.full(12, 0.5))
    for seed in range(30):  # some seed puts both clients in one of two groups, some does not
        lines = jackknife_means(
            sample, y, [HajekMean()], [Group(), few], rng=np.random.default_rng(seed), count=2
        )
        assert lines[0].se > 0.0
        if np.isnan(lines[1].se):
            assert "use more of them" in lines[1].reason
            assert np.isnan([lines[1].low, lines[1].high, lines[1].freedom]).all()
            assert lines[1].estimate == pytest.approx(y[:2].mean())
            break
    else:
        pytest.fail("no seed emptied the group")


def test_what_cannot_be_left_out_is_said() -> None:
    y, one = np.ones(3), np.ones(1)
    with pytest.raises(InputError, match="two groups or more, not 1"):
        jackknife_means(known(y, y, y), y, [HajekMean()], rng=np.random.default_rng(), count=1)
    with pytest.raises(InputError, match="two groups or more, not 1"):
        jackknife_means(known(one, one, one), one, [HajekMean()], rng=np.random.default_rng())
    alone = TwoPhase(
        client=np.array([0]), round=np.array([0]), prob=one, rounds=1,
        enrollment=KnownEnrollment(weights=np.full(3, 2.0)),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"leave out one of its 3 groups.*no reply.*none \(0\)"):
        jackknife_means(alone, one, [HajekMean()], rng=np.random.default_rng(), count=3)


def test_rows_in_a_scratch_file_give_the_same_numbers(tmp_path: Path) -> None:
    drawn = Drawn(11, 300)
    s, phase = drawn.fitted, drawn.fitted.enrollment
    assert isinstance(phase, FittedEnrollment)
    assert isinstance(phase.rows, Blocks)
    rng = np.random.default_rng(1)
    groups = (rng.permutation(300) % 4)[: s.clients]
    on_disk = replace(phase, rows=spilled(phase.rows, tmp_path))
    step = s.steps[0]
    again = StepPhase.of(
        spilled(step.rows, tmp_path), step.frame, step.fit, codes=step.codes,
        replies=step.replies, n=s.clients,
    )  # fmt: skip
    other = TwoPhase(
        client=s.client, round=s.round, prob=s.prob, rounds=3, enrollment=on_disk, steps=(again,)
    )
    u = HajekMean().linear(s, drawn.y, Group()).values[:, None]
    got, expected = other.variance(u), s.variance(u)
    assert got.variance[0] == pytest.approx(expected.variance[0], rel=1e-10)
    assert got.superpopulation == pytest.approx(expected.superpopulation, rel=1e-10)
    pairs = zip(
        s.deleted(groups, 4, np.random.default_rng(2)),
        other.deleted(groups, 4, np.random.default_rng(2)), strict=True,
    )  # fmt: skip
    for (first, share), (second, same) in pairs:
        assert share == same == pytest.approx(0.75)
        np.testing.assert_allclose(second.weights, first.weights, rtol=1e-9)


def spilled(rows: Partitions, where: Path) -> Blocks:
    """The same rows in blocks of 70, none of them in memory."""
    assert isinstance(rows, Blocks)
    out = Blocks(memory=0, directory=where)
    for block in rows:
        for first in range(0, block.rows, 70):
            part = slice(first, first + 70)
            mine = block.columns[:, part].copy(), block.labels[part], np.empty(0)
            out.append(Block(*mine, clients=block.clients[part]))
    return out
