"""Clusters of clients: every outcome of small designs, one client a cluster, and from files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import fedipw
from cli.command import Files
from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    GregMean,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    jackknife_means,
    moved_by_weights,
    plain_means,
    population_means,
)
from fedipw.evaluation.phases import KnownEnrollment
from fedipw.evaluation.sample import Clusters, TwoPhase
from fedipw.lab.two_phase import fitted_two_phase
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.tables.population import Population
from worlds import MEASURED

PERSON = np.array([0, 0, 1, 2, 2])


@dataclass(frozen=True, kw_only=True, eq=False)
class Given(TwoPhase):
    """A sample for which it is known how members of a cluster are related."""

    alone: float = 0.0
    tied: float = 0.0

    @cached_property
    def _apart(self) -> float:
        return self.alone

    @cached_property
    def _meetings(self) -> tuple[IntArray, int, float]:
        place, size, _ = TwoPhase._meetings.func(self)  # type: ignore[attr-defined]
        return place, size, self.tied


def outcomes(prob: FloatArray, unit: IntArray) -> list[tuple[BoolArray, float]]:
    """Who is in, for draws of the units with the probability of their first member."""
    first = np.unique(unit, return_index=True)[1]
    out = []
    for chosen in product([True, False], repeat=len(first)):
        flags, p = np.array(chosen), prob[first]
        out.append((flags[unit], float(np.where(flags, p, 1 - p).prod())))
    return out


@pytest.mark.parametrize("replies", ["together", "apart"])
@pytest.mark.parametrize("enroll", ["together", "apart"])
def test_over_every_outcome_the_variance_is_unbiased(enroll: str, replies: str) -> None:
    """Devices of a person enroll, and reply, with the person or each by itself; one round."""
    by = {"together": PERSON, "apart": np.arange(5)}
    y = np.array([2.0, 1.5, -1.0, 0.5, 3.0])
    pi, p = np.array([0.4, 0.4, 0.7, 0.6, 0.6]), np.array([0.5, 0.5, 0.8, 0.3, 0.3])
    mean = second = variance = unclustered = total = 0.0
    for inside, first in outcomes(pi, by[enroll]):
        for answers, then in outcomes(p, by[replies]):
            prob, heard = first * then, inside & answers
            total += prob
            if not heard.any():
                continue
            ids = np.flatnonzero(inside)
            place = np.cumsum(inside) - 1
            sample = Given(
                client=place[heard], round=np.zeros(int(heard.sum()), dtype=int), prob=p[heard],
                rounds=1, enrollment=KnownEnrollment(weights=1 / pi[ids], population_size=5),
                clusters=Clusters(code=np.unique(PERSON[ids], return_inverse=True)[1], count=3),
                alone=float(enroll == "apart"), tied=float(replies == "together"),
            )  # fmt: skip
            linear = HorvitzThompsonMean().linear(sample, y[heard], Group(size=5))
            mean += prob * linear.estimate
            second += prob * linear.estimate**2
            variance += prob * float(sample.variance(linear.values[:, None]).variance[0])
            single = replace(sample, clusters=None).variance(linear.values[:, None])
            unclustered += prob * float(single.variance[0])
    assert total == pytest.approx(1.0, abs=1e-12)
    assert mean == pytest.approx(y.mean(), rel=1e-12)
    assert variance == pytest.approx(second - mean**2, rel=1e-12)
    if (enroll, replies) == ("apart", "apart"):
        assert unclustered == pytest.approx(variance, rel=1e-12)
    else:
        assert unclustered < 0.9 * variance


class Drawn:
    """Devices of persons, some enrolled; a person's own effect is in the metric."""

    def __init__(self, seed: int, size: int = 400, *, together: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.person = np.repeat(np.arange(size), rng.integers(1, 6, size))[:size]
        count = int(self.person[-1]) + 1
        self.Z = rng.normal(size=(count, 2))[self.person]
        chance = rng.random(count)[self.person] if together else rng.random(size)
        self.enrolled = chance < 1.0 / (1.0 + np.exp(0.3 - 0.5 * self.Z[:, 0]))
        self.ids = np.flatnonzero(self.enrolled)
        self.client = np.tile(self.ids, 3)
        self.round = np.repeat(np.arange(3), len(self.ids))
        self.replied = rng.random(len(self.client)) < 0.5
        self.metric = self.Z[:, 0] + rng.normal(size=count)[self.person]

    @property
    def code(self) -> IntArray:
        return np.unique(self.person[self.ids], return_inverse=True)[1]

    def sample(self, clusters: Clusters | None = None) -> TwoPhase:
        made = fitted_two_phase(
            self.Z, self.enrolled, self.Z[self.client], self.client, self.round,
            replied=self.replied,
        )  # fmt: skip
        return replace(made, clusters=clusters)

    def clusters(self) -> Clusters:
        sizes = np.bincount(self.person)
        return Clusters(
            code=self.code, count=len(sizes), pairs=float((sizes * (sizes - 1) / 2).sum())
        )


def test_one_client_a_cluster_is_no_cluster() -> None:
    drawn = Drawn(1)
    n = len(drawn.ids)
    single = Clusters(code=np.arange(n)[::-1].copy(), count=400, pairs=0.0)
    plain, clustered = drawn.sample(), drawn.sample(single)
    y = drawn.metric[drawn.ids][plain.client]
    means = [HorvitzThompsonMean(), HajekMean(), GregMean(drawn.Z[drawn.ids], drawn.Z.mean(axis=0))]
    groups = [Group(size=400.0), Group(name="some", inside=drawn.Z[drawn.ids, 1] > 0)]
    for one, other in zip(
        [*population_means(plain, y, means, groups), *plain_means(plain, y, groups)],
        [*population_means(clustered, y, means, groups), *plain_means(clustered, y, groups)],
        strict=True,
    ):
        for name in ("estimate", "se", "freedom", "low", "high", "effective_sample_size"):
            assert getattr(one, name) == pytest.approx(
                getattr(other, name), rel=1e-9, nan_ok=True
            ), name
        assert other.clusters == one.clients
    assert moved_by_weights(plain, y).se == pytest.approx(moved_by_weights(clustered, y).se)


def test_how_members_enroll_is_found_by_counting_pairs() -> None:
    for together, expected in ((True, 0.0), (False, 1.0)):
        drawn = Drawn(3, 6000, together=together)
        found = drawn.clusters().apart(drawn.sample().enrollment.weights)
        assert found == pytest.approx(expected, abs=0.15)
    # nobody knows the population's pairs: members enroll together
    assert Clusters(code=drawn.code).apart(drawn.sample().enrollment.weights) == 0.0


def test_jackknife_and_linearised_errors_agree_between_clusters() -> None:
    """Two estimates of one variance from the same draws: their ratio has a spread of about 10%.

    The mean of 6 logarithms of it is beyond 0.2 with probability below 1e-5.
    """
    ratios = []
    for seed in range(6):
        drawn = Drawn(seed, 600)
        sample = drawn.sample(drawn.clusters())
        y = drawn.metric[drawn.ids][sample.client]
        (linear,) = population_means(sample, y, [HajekMean()])
        (left_out,) = jackknife_means(
            sample, y, [HajekMean()], rng=np.random.default_rng(seed), count=40
        )
        ratios.append(np.log(left_out.se / linear.se))
        alone = population_means(drawn.sample(), y, [HajekMean()])[0]
        assert linear.se > 1.1 * alone.se
        assert linear.effective_sample_size < alone.effective_sample_size
    assert abs(np.mean(ratios)) < 0.2


def test_a_group_of_one_cluster_has_no_standard_error() -> None:
    drawn = Drawn(2)
    sample = drawn.sample(drawn.clusters())
    y = drawn.metric[drawn.ids][sample.client]
    heard = np.bincount(sample.unit, minlength=sample.units)
    sizes = np.bincount(drawn.code)
    person = int(np.flatnonzero((heard > 1) & (sizes > 1))[0])
    group = Group(name="one", inside=drawn.code == person)
    for line in (
        *population_means(sample, y, [HajekMean()], [group]),
        *plain_means(sample, y, [group]),
    ):
        assert line.reason == "1 cluster replied: no standard error"


def test_codes_of_clusters_are_checked() -> None:
    with pytest.raises(InputError, match="coded 0 to C - 1"):
        Clusters(code=np.array([0, 2]))
    drawn = Drawn(4)
    with pytest.raises(InputError, match="cluster"):
        drawn.sample(Clusters(code=np.zeros(3, dtype=int)))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files.of(MEASURED, tmp_path)
    person = pl.Series("person", [f"p{k // 3}" for k in range(made.people.height)])
    made.people = made.people.with_columns(person)
    return made.put()


def test_a_cluster_column_is_no_covariate_and_moves_only_errors(files: Files) -> None:
    found = files.evaluated("--cluster", "person", "--by", "rich")
    without = Files(people=files.people.drop("person"), rounds=files.rounds, metrics=files.metrics,
                    where=files.where).put().evaluated("--by", "rich")  # fmt: skip
    for one, other in zip(found["estimates"], without["estimates"], strict=True):
        assert one["estimate"] == pytest.approx(other["estimate"], rel=1e-10)
        assert one["clients"] == other["clients"]
        assert other["clusters"] is None
        assert one["clusters"] < one["clients"]
        assert one["se"] != other["se"]


def test_python_gives_the_same_numbers_as_the_command(files: Files) -> None:
    told = files.evaluated("--cluster", "person", "--interval", "bootstrap", "--resamples", 500)
    found = fedipw.evaluate(
        files.where / "loss.parquet", files.where / "people.parquet", files.where / "rounds",
        cluster="person", interval="bootstrap", resamples=500,
    )  # fmt: skip
    assert found.to_json()["estimates"] == told["estimates"]
    assert {line.interval for line in found.estimates} == {"bootstrap"}


def test_an_audit_takes_the_same_clusters(files: Files) -> None:
    people, rounds = files.where / "people.parquet", files.where / "rounds"
    metrics = files.where / "loss.parquet"
    report = fedipw.audit(people, rounds, metrics=metrics, cluster="person")
    assert report.audit.metric is not None
    told = fedipw.evaluate(metrics, people, rounds, cluster="person")
    (one,) = [e for e in report.audit.metric.estimates if e.estimator == "hajek"]
    assert one.standard_error == pytest.approx(told.of("hajek").se, rel=1e-9)
    assert one.interval == told.of("hajek").interval


def test_missing_clusters_and_unknown_columns_are_refused(files: Files) -> None:
    with pytest.raises(InputError, match="no column 'house' to cluster clients by; it has age"):
        Population(files.people).clustered("house")
    gaps = files.people.with_columns(
        person=pl.when(pl.int_range(pl.len()) < 4).then(None).otherwise("person")
    )
    with pytest.raises(InputError, match=r"4 clients have no 'person'.* a value of its own"):
        Population(gaps).clustered("person")
