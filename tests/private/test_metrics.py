"""Metrics by secure sums against the open estimator, and the coverage of their intervals."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from fedipw.calibration import Entropy
from fedipw.errors import InputError
from fedipw.evaluation.estimators import Estimate, HajekMean, population_means
from fedipw.evaluation.intervals import INTERVALS, Jeffreys, StudentT
from fedipw.evaluation.phases import CalibratedEnrollment
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics import BoolArray, FloatArray
from fedipw.private.metrics import (
    CALIBRATION,
    ERRORS,
    MetricPlan,
    OwnReplies,
    PrivateMetric,
    calibration_contribution,
    error_contribution,
    private_means,
)
from fedipw.private.sums import LocalSums, SumNotOpenedError, SumRequest, SumResult
from fedipw.weighting.balance import Balance

METRICS = (
    PrivateMetric(name="loss", low=0.0, high=8.0),
    PrivateMetric(name="wrong", share=True),
)


class World:
    """Clients of whom some reply, up to three times, by a tilt of two covariates."""

    def __init__(self, rng: Generator, size: int = 600, rounds: int = 3) -> None:
        self.b = np.column_stack(
            [rng.integers(0, 2, size).astype(float), rng.standard_normal(size).clip(-2.5, 2.5)]
        )
        each = 1.0 / (1.0 + np.exp(1.4 - 0.8 * self.b[:, 0] - 0.6 * self.b[:, 1]))
        self.replied: BoolArray = rng.random((rounds, size)) < each
        self.invite_prob = rng.uniform(0.4, 1.0, size)
        self.replied &= rng.random((rounds, size)) < self.invite_prob
        self.loss = np.exp(0.3 * self.b[:, 1] + 0.4 * rng.standard_normal(size)).clip(0.0, 8.0)
        self.wrong = (rng.random(size) < 0.2 + 0.1 * self.b[:, 0]).astype(float)

    @property
    def values(self) -> FloatArray:
        """Both metrics of every client, (N, 2); a client reports the same in all rounds."""
        return np.column_stack([self.loss, self.wrong])

    def plan(self) -> MetricPlan:
        """Return what respondents are told."""
        return MetricPlan(
            metrics=METRICS, mean=self.b.mean(axis=0), scale=self.b.std(axis=0), largest_base=20.0
        )

    def clients(self) -> list[OwnReplies]:
        """Return what each respondent knows."""
        out = []
        for i in np.flatnonzero(self.replied.any(axis=0)):
            k = int(self.replied[:, i].sum())
            out.append(
                OwnReplies(
                    balance=self.b[i], values=np.tile(self.values[i], (k, 1)),
                    base=np.full(k, 1.0 / self.invite_prob[i]),
                )
            )  # fmt: skip
        return out

    def open_estimates(self, interval: str) -> list[Estimate]:
        """Return what evaluation gives where everything is known, for both metrics."""
        heard: BoolArray = np.asarray(self.replied.any(axis=0))
        rounds, client = np.nonzero(self.replied)
        place = np.cumsum(heard) - 1
        prob = self.invite_prob[client] / self.invite_prob.max()
        counts = np.bincount(client, 1.0 / prob, len(self.b))[heard].astype(np.float64)
        balance = Balance(
            names=("a", "b"), matrix=self.b, enrolled=heard, mean=self.b.mean(axis=0),
            population_size=np.nan,
        )  # fmt: skip
        phase = CalibratedEnrollment.of(balance, Entropy(), counts)
        sample = TwoPhase(
            client=place[client], round=rounds, prob=prob, rounds=len(self.replied),
            enrollment=phase,
        )  # fmt: skip
        kinds = {"t": [StudentT(), Jeffreys()]}.get(interval, [INTERVALS[interval]] * 2)
        return [
            population_means(sample, column[client], [HajekMean()], interval=kind)[0]
            for column, kind in zip(self.values.T, kinds, strict=True)
        ]


def sums(clients: list[OwnReplies], *, bits: int = 64, minimum: int = 10) -> LocalSums:
    """Return sums in process over respondents."""
    functions = [
        {CALIBRATION: partial(calibration_contribution, own=own),
         ERRORS: partial(error_contribution, own=own)}
        for own in clients
    ]  # fmt: skip
    return LocalSums(functions, minimum=minimum, bits=bits)


def test_private_means_equal_the_open_ones() -> None:
    """Estimate, standard error, freedom, interval and effective number agree to 1e-6."""
    world = World(default_rng(1))
    found = private_means(sums(world.clients()), world.plan())
    for metric, expected in zip(METRICS, world.open_estimates("t"), strict=True):
        line = found.estimates[metric.name]
        for name in ("estimate", "se", "low", "high"):
            assert getattr(line, name) == pytest.approx(getattr(expected, name), rel=1e-6), name
        assert line.freedom == pytest.approx(expected.freedom, rel=1e-5)
        assert line.effective_sample_size == pytest.approx(expected.effective_sample_size, rel=1e-6)
        assert (line.clients, line.replies) == (expected.clients, expected.replies)
        assert line.interval == expected.interval
    assert found.cut == 0
    assert found.imbalance <= 1e-7
    assert len(set(found.respondents)) == 1


def test_words_too_coarse_for_a_standard_error_are_refused() -> None:
    """With 32 bits fourth powers of influences are rounding: the error says so."""
    world = World(default_rng(2))
    with pytest.raises(InputError, match="64 bits"):
        private_means(sums(world.clients(), bits=32), world.plan())


def test_a_start_saves_exchanges() -> None:
    """From a lambda that is already balanced one step of calibration is enough."""
    world = World(default_rng(3))
    first = private_means(sums(world.clients()), world.plan())
    again = private_means(sums(world.clients()), world.plan(), start=first.coefficients)
    assert again.exchanges == 2 < first.exchanges
    assert again.estimates["loss"].estimate == pytest.approx(
        first.estimates["loss"].estimate, rel=1e-9
    )


class Leaving:
    """Sums that lose some respondents after the first."""

    def __init__(self, clients: list[OwnReplies], lost: int) -> None:
        self._whole, self._rest, self._asked = sums(clients), sums(clients[lost:]), 0

    def sum(self, request: SumRequest) -> SumResult:
        """Return the sum over those who are still there."""
        self._asked += 1
        return (self._whole if self._asked == 1 else self._rest).sum(request)


def test_respondents_that_leave_between_two_sums() -> None:
    """The estimate is that of those who stayed."""
    world = World(default_rng(4))
    clients = world.clients()
    found = private_means(Leaving(clients, 20), world.plan())
    rest = private_means(sums(clients[20:]), world.plan())
    assert found.respondents[0] == found.respondents[-1] + 20
    assert found.estimates["loss"].estimate == pytest.approx(
        rest.estimates["loss"].estimate, rel=1e-9
    )


def test_what_is_beyond_a_bound_is_cut_and_counted() -> None:
    """A value outside of the metric's range and a far column are counted, not hidden."""
    world = World(default_rng(5))
    clients = world.clients()
    wild = OwnReplies(
        balance=np.array([0.0, 99.0]), values=np.array([[50.0, 1.0]]), base=np.ones(1)
    )
    found = private_means(sums([*clients, wild]), world.plan())
    assert found.cut >= 2
    inside = OwnReplies(
        balance=np.array([0.0, world.b[:, 1].mean() + 6.0 * world.b[:, 1].std()]),
        values=np.array([[8.0, 1.0]]), base=np.ones(1),
    )  # fmt: skip
    same = private_means(sums([*clients, inside]), world.plan())
    assert found.estimates["loss"].estimate == pytest.approx(same.estimates["loss"].estimate)


def test_a_share_without_events_has_an_interval_within_zero_and_one() -> None:
    """Nobody is wrong: the interval starts at 0 and has the width of the effective number."""
    world = World(default_rng(6))
    world.wrong[:] = 0.0
    line = private_means(sums(world.clients()), world.plan()).estimates["wrong"]
    expected = world.open_estimates("t")[1]
    assert (line.estimate, line.low) == (0.0, 0.0)
    assert line.high == pytest.approx(expected.high, rel=1e-6)
    assert any("0 clients" in text for text in line.warnings)


def test_too_few_respondents_open_nothing() -> None:
    """A handful of respondents have no estimate."""
    with pytest.raises(SumNotOpenedError):
        private_means(sums(World(default_rng(7)).clients()[:6]), World(default_rng(7)).plan())


def test_a_share_outside_its_range_is_refused() -> None:
    """A share has the range 0 to 1."""
    with pytest.raises(InputError, match="between 0 and 1"):
        PrivateMetric(name="wrong", high=2.0, share=True)


def test_intervals_cover_the_population_mean() -> None:
    """Over 40 draws at 95%: fewer than 31 covered has a chance below 2e-5 for a right interval."""
    covered = {metric.name: 0 for metric in METRICS}
    for seed in range(40):
        world = World(default_rng(100 + seed), size=300, rounds=1)
        found = private_means(sums(world.clients()), world.plan())
        for name, truth in zip(covered, world.values.mean(axis=0), strict=True):
            line = found.estimates[name]
            covered[name] += line.low <= truth <= line.high
    assert min(covered.values()) >= 31
