"""The error of a mean when enrollment is fitted on a reference sample: limits, draws, coverage."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import polars as pl
import pytest
from scipy.special import expit

from fedipw.calibration import Entropy
from fedipw.evaluation.estimators import (
    Group,
    HajekMean,
    jackknife_means,
    moved_by_weights,
    population_means,
)
from fedipw.evaluation.phases import (
    CalibratedEnrollment,
    EnrollmentPhase,
    FittedEnrollment,
    ReferenceEnrollment,
    sampled_variance,
)
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.enrollment import ReferenceRows
from fedipw.selection.logistic import logistic_fit
from fedipw.tables.design import bound_design
from fedipw.tables.partitions import Blocks, Frame
from fedipw.weighting.balance import Balance

NAMES = ("z1", "z2")


def reference(Z: FloatArray, rows: FloatArray, weights: FloatArray) -> ReferenceRows:
    frame = pl.DataFrame(Z, schema=list(NAMES))
    design = bound_design("z1 + z2", frame.lazy(), list(NAMES))
    return ReferenceRows(design=design, columns=rows, weights=weights)


def people(size: int, rng: np.random.Generator) -> tuple[FloatArray, BoolArray, FloatArray]:
    """Covariates, who is enrolled, and a metric."""
    Z = rng.standard_normal((size, 2))
    inside = rng.random(size) < expit(-2.0 + 0.8 * Z[:, 0] - 0.4 * Z[:, 1])
    return Z, inside, 1.0 + 2.0 * Z[:, 0] + rng.standard_normal(size)


def answers(phase: EnrollmentPhase, y: FloatArray) -> TwoPhase:
    """One round to which all enrolled reply."""
    n = len(y)
    return TwoPhase(
        client=np.arange(n), round=np.zeros(n, dtype=np.int64), prob=np.ones(n), rounds=1,
        enrollment=phase,
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 5, 6])
def test_the_variance_of_a_sample_is_exact_for_simple_random_sampling(size: int) -> None:
    """Over all samples of 7 clients, its mean is the variance of the weighted sum."""
    y = np.array([[3.0], [-1.0], [4.0], [1.0], [5.0], [-9.0], [2.0]])
    weights = np.full(size, 7.0 / size)
    drawn = [list(rows) for rows in combinations(range(7), size)]
    sums = [float(weights @ y[rows, 0]) for rows in drawn]
    found = np.mean([sampled_variance(y[rows], weights)[0] for rows in drawn])
    assert found == pytest.approx(np.var(sums), rel=1e-12)
    assert sampled_variance(y, np.ones(7)).tolist() == [0.0]


def test_a_census_as_reference_is_the_model_of_the_population() -> None:
    Z, inside, y = people(3_000, np.random.default_rng(0))
    frame = Frame.of(Z.T)
    rows = Blocks.of_arrays((Z - frame.centre) / frame.scale, inside.astype(np.int8))
    fit = logistic_fit(rows, NAMES, frame=frame).checked()
    by_table = FittedEnrollment.of(rows, frame, fit, np.ascontiguousarray(Z[inside].T))
    by_sample = ReferenceEnrollment.of(reference(Z, Z, np.ones(len(Z))), Z[inside])
    groups = [Group(size=3_000.0), Group(name="some", inside=Z[inside, 0] > 0.0)]
    pairs = zip(
        *(
            population_means(answers(phase, y[inside]), y[inside], [HajekMean()], groups)
            for phase in (by_table, by_sample)
        ),
        strict=True,
    )
    for a, b in pairs:
        assert (a.estimate, a.se, a.freedom) == pytest.approx(
            (b.estimate, b.se, b.freedom), rel=1e-9
        )
    assert by_sample.superpopulation(y[inside, None], y[inside, None]) is None


def test_the_error_is_that_of_refits_on_moved_samples() -> None:
    """What one more of a client in either sample moves, by refitting, is its part of (E60)."""
    Z, inside, y = people(1_500, np.random.default_rng(1))
    chosen = np.arange(0, 1_500, 5)
    weights = np.full(300, 5.0) + np.linspace(0.0, 1.0, 300)
    given = reference(Z, Z[chosen], weights)
    phase = ReferenceEnrollment.of(given, Z[inside])
    totals = y[inside, None]
    (slope,) = phase._slope(totals).T

    def total(moved: FloatArray) -> float:
        there = ReferenceRows(design=given.design, columns=given.columns, weights=moved)
        return float(ReferenceEnrollment.of(there, Z[inside]).weights @ totals[:, 0])

    for j in (0, 7, 299):
        step = np.zeros(300)
        step[j] = 1e-4
        apart = (total(weights + step) - total(weights - step)) / 2e-4
        assert apart == pytest.approx(phase.sampled[j] @ slope, rel=1e-5)


def test_a_jackknife_over_the_enrolled_agrees() -> None:
    Z, inside, y = people(4_000, np.random.default_rng(2))
    rng = np.random.default_rng(3)
    chosen = rng.choice(4_000, 800, replace=False)
    phase = ReferenceEnrollment.of(reference(Z, Z[chosen], np.full(800, 5.0)), Z[inside])
    sample, size = answers(phase, y[inside]), Group(size=4_000.0)
    (linear,) = population_means(sample, y[inside], [HajekMean()], [size])
    (refitted,) = jackknife_means(sample, y[inside], [HajekMean()], [size], rng=rng, count=100)
    assert refitted.se == pytest.approx(linear.se, rel=0.1)
    known = float(sample.enrollment.target_variance(
        sample.totals(HajekMean().linear(sample, y[inside], size).values[:, None]))[0]
    )  # fmt: skip
    assert 0.1 * linear.se**2 < known < 0.9 * linear.se**2  # both samples matter here
    moved = moved_by_weights(sample, y[inside])
    alone = sample.influence(HajekMean().linear(sample, y[inside], size).values[:, None])
    assert moved.weighted_se**2 == pytest.approx(float((alone**2).sum()) + known, rel=1e-12)


@pytest.mark.parametrize("calibrated", [False, True])
def test_intervals_cover_when_both_samples_are_drawn(*, calibrated: bool) -> None:
    """400 draws of both samples from one population of 2,000.

    At a true coverage of 95% fewer than 368 (92%) or more than 392 (98%) intervals hold the mean
    with a chance below 0.6%; without the reference sample's part 61% and 51% do.
    """
    rng = np.random.default_rng(4)
    Z, _, y = people(2_000, rng)
    prob = expit(-1.5 + 0.8 * Z[:, 0] - 0.4 * Z[:, 1])
    held, without = 0, 0
    for _ in range(400):
        inside = rng.random(2_000) < prob
        chosen = rng.choice(2_000, 200, replace=False)
        rows = reference(Z, Z[chosen], np.full(200, 10.0))
        phase: EnrollmentPhase = ReferenceEnrollment.of(rows, Z[inside])
        if calibrated:
            balance = Balance(
                names=NAMES, matrix=Z[inside], enrolled=np.ones(int(inside.sum()), dtype=np.bool_),
                mean=Z[chosen].mean(axis=0), population_size=2_000.0,
            )  # fmt: skip
            phase = replace(CalibratedEnrollment.of(balance, Entropy()), reference=rows)
        sample = answers(phase, y[inside])
        (found,) = population_means(sample, y[inside], [HajekMean()])
        held += found.low <= y.mean() <= found.high
        u = HajekMean().linear(sample, y[inside], Group()).values[:, None]
        narrow = np.sqrt(found.se**2 - phase.target_variance(sample.totals(u))[0])
        without += abs(found.estimate - y.mean()) <= 1.96 * narrow
    assert 368 <= held <= 392, held
    assert without < 300
