"""The plain mean of replies, its clustered error, and what weighting does to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.evaluation.estimators import (
    Group,
    HajekMean,
    Moved,
    moved_by_weights,
    plain_means,
    population_means,
)
from fedipw.evaluation.phases import KnownEnrollment
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics import FloatArray


def drawn(seed: int, n: int = 20) -> tuple[TwoPhase, FloatArray]:
    rng = np.random.default_rng(seed)
    index, client = np.nonzero(rng.random((3, n)) < 0.6)
    sample = TwoPhase(
        client=client, round=index, prob=rng.uniform(0.3, 1.0, len(client)), rounds=3,
        enrollment=KnownEnrollment(weights=rng.uniform(1.0, 8.0, n)),
    )  # fmt: skip
    return sample, rng.normal(size=len(client))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_error_is_clustered_by_client(seed: int) -> None:
    sample, y = drawn(seed)
    inside = np.arange(20) % 2 == 0
    (line,) = plain_means(sample, y, [Group(inside=inside)])
    mine = inside[sample.client]
    mean, who = y[mine].mean(), sample.client[mine]
    sums = np.array([(y[mine] - mean)[who == c].sum() for c in np.unique(who)])
    n = len(sums)
    assert line.estimate == pytest.approx(mean, rel=1e-12)
    assert line.se == pytest.approx(np.sqrt(n / (n - 1) * (sums**2).sum()) / mine.sum(), rel=1e-12)
    assert (line.clients, line.replies, line.freedom) == (n, mine.sum(), n - 1)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), often=st.integers(1, 50))
def test_counts_weigh_replies_in_every_mean_and_equal_ones_change_nothing(
    seed: int, often: int
) -> None:
    sample, y = drawn(seed)
    rng = np.random.default_rng(seed)
    same, n = np.full(len(y), float(often)), rng.integers(1, 30, len(y)).astype(float)
    (plain,), (alike,) = (
        plain_means(sample, y, [Group()]),
        plain_means(sample, y, [Group()], 0.95, same),
    )
    assert alike.estimate == pytest.approx(plain.estimate, rel=1e-10)
    assert alike.se == pytest.approx(plain.se, rel=1e-10)
    first, second = population_means(sample, y, [HajekMean(), HajekMean(same)])
    assert (second.estimate, second.se) == pytest.approx((first.estimate, first.se), rel=1e-10)
    (counted,) = plain_means(sample, y, [Group()], 0.95, n)
    assert counted.estimate == pytest.approx(np.average(y, weights=n), rel=1e-10)
    (weighted,) = population_means(sample, y, [HajekMean(n)])
    mean = np.average(y, weights=n * sample.weights)
    assert weighted.estimate == pytest.approx(mean, rel=1e-10)
    moved = moved_by_weights(sample, y, n)
    assert moved.difference == pytest.approx(mean - counted.estimate, abs=1e-12)


def test_equal_weights_move_nothing() -> None:
    client = np.arange(9)
    sample = TwoPhase(
        client=client, round=0 * client, prob=np.full(9, 0.5), rounds=1,
        enrollment=KnownEnrollment(weights=np.full(9, 4.0)),
    )  # fmt: skip
    moved = moved_by_weights(sample, np.random.default_rng(1).normal(size=9))
    assert moved.difference == pytest.approx(0.0, abs=1e-15)
    assert moved.se == pytest.approx(0.0, abs=1e-15)
    assert moved.weighted_se == pytest.approx(moved.plain_se, rel=1e-12)
    assert moved.gain == pytest.approx(0.0, abs=1e-15)


def test_weighting_gains_the_bias_it_removes_less_the_variance_it_adds() -> None:
    moved = Moved(difference=0.5, se=0.3, weighted_se=0.4, plain_se=0.1)
    assert moved.bias_squared == pytest.approx(0.16)
    assert moved.gain == pytest.approx(0.16 + 0.01 - 0.16)
    assert Moved(difference=0.1, se=0.3, weighted_se=0.4, plain_se=0.1).bias_squared == 0.0


def test_the_error_of_the_difference_is_that_of_its_influences() -> None:
    sample, y = drawn(3, n=200)
    moved = moved_by_weights(sample, y)
    step, slopes = 1e-6, []
    for c in range(200):  # a client's replies count a little more in both means
        ends = []
        for w in (1 + step, 1 - step):
            own = np.where(sample.client == c, w, 1.0)
            hajek = np.average(y, weights=own * sample.weights)
            ends.append(hajek - np.average(y, weights=own))
        slopes.append((ends[0] - ends[1]) / (2 * step))
    assert moved.se == pytest.approx(np.sqrt(np.sum(np.square(slopes))), rel=1e-6)
