"""Cases near the edge of what arithmetic allows, each of which failed once."""

from __future__ import annotations

import numpy as np
import pytest

from fedipw.calibration import (
    Box,
    Calibration,
    Distance,
    Entropy,
    InverseLogit,
    Linear,
    Logit,
    Quadratic,
    Ridge,
    calibrated,
)
from fedipw.errors import InfeasibleError, InputError
from fedipw.numerics import FloatArray


def holds(result: Calibration, b: FloatArray, target: FloatArray) -> None:
    """Sums and constraints hold to twice (C12), once for the solver's sums and once for these.

    Weights and columns have one more rounding each than the solver's terms. A column that follows
    from others, x_j = sum_k c_k x_k + c, misses by what they miss times the c.
    """
    n = len(b)
    x = (b - target) / b.std(axis=0, ddof=1)
    rounding = (n + 6) * np.finfo(np.float64).eps * float(np.abs(result.weights).sum())
    assert abs(result.weights.sum() - 1.0) <= rounding
    allowed, miss = rounding * np.abs(x).max(axis=0), np.abs(result.weights @ x)
    kept = np.array([name not in result.dropped for name in result.names])
    assert (miss <= allowed)[kept].all()
    others = np.column_stack([x[:, kept], np.ones(n)])
    relation = np.abs(np.linalg.lstsq(others, x[:, ~kept])[0])
    assert (miss[~kept] <= allowed[~kept] + np.append(allowed[kept], rounding) @ relation).all()


@pytest.mark.parametrize("distance", [Quadratic(), Entropy()], ids=str)
@pytest.mark.parametrize("size", [0.2, 0.5])
def test_a_box_with_a_population_smaller_than_the_base(distance: Distance, size: float) -> None:
    b = np.arange(10.0)[:, None]
    result = calibrated(b, [12.0], distance=distance, population_size=10 * size, slack=Box(1.5))
    assert result.largest_violation == pytest.approx(1.5, rel=1e-9)


def test_an_inverse_logit_box_just_wide_enough() -> None:
    b = np.arange(10.0)[:, None]
    with pytest.raises(InfeasibleError) as caught:
        calibrated(b, [6.5], distance=InverseLogit(), population_size=12)
    width = 1.01 * caught.value.least_slack
    calibrated(b, [6.5], distance=InverseLogit(), population_size=12, slack=Box(width))


@pytest.mark.parametrize("distance", [Linear(), Quadratic(), Entropy(), Logit(0.1, 5.0)], ids=str)
@pytest.mark.parametrize("size", [3e-5, 1e-5, 3e-6])
def test_nearly_collinear_columns(distance: Distance, size: float) -> None:
    """Above the rank check's 1e-6, so they are constraints of their own."""
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 50))
    b, target = np.column_stack([x, x + size * z]), np.array([0.1, 0.1 + 0.3 * size])
    holds(calibrated(b, target, distance=distance), b, target)


def test_nearly_collinear_columns_in_a_box() -> None:
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 50))
    calibrated(np.column_stack([x, x + 1e-3 * z]), [0.1, 0.1003], slack=Box(1e-4))


@pytest.mark.parametrize("shift", [1e4, 1e6])
def test_a_dependent_column_far_off_in_standard_deviations(shift: float) -> None:
    """Agreement is judged by the range of the column, not by its size."""
    x = np.random.default_rng(0).normal(size=50)
    b = np.column_stack([x, x + shift])
    with pytest.raises(InfeasibleError):
        calibrated(b, [0.1, shift + 0.1 + 1e-6 * shift / 2])


def test_the_least_slack_counts_dropped_columns() -> None:
    """A sum x + y follows from x and y, but a box holds it too: it needs 6.3, not 2.2."""
    rng = np.random.default_rng(1)
    x, z = rng.normal(size=(2, 40))
    y = -0.8 * x + 0.6 * z
    b = np.column_stack([x, y, x + y])
    target = np.array([2.2, 2.2, 4.4])
    with pytest.raises(InfeasibleError) as caught:
        calibrated(b, target)
    assert caught.value.least_slack == pytest.approx(6.308738, rel=1e-6)
    calibrated(b, target, slack=Box(1.05 * caught.value.least_slack))
    with pytest.raises(InfeasibleError):
        calibrated(b, target, slack=Box(0.99 * caught.value.least_slack))


def test_skewed_base_weights_in_a_dependence() -> None:
    """Five rows, five columns: b5 follows exactly, whatever the weights."""
    rng = np.random.default_rng(42)
    b = rng.normal(size=(5, 5))
    base = 10.0 ** rng.uniform(-5, 5, 5)
    target = rng.dirichlet(np.ones(5)) @ b
    holds(calibrated(b, target, base=base), b, target)


@pytest.mark.parametrize(
    "distance", [Linear(), Quadratic(), Quadratic(0.0, 1e7), Entropy(), Logit(0.0, 1e7)], ids=str
)
@pytest.mark.parametrize("decades", [1, 3, 5])
def test_base_weights_over_many_decades(distance: Distance, decades: int) -> None:
    """How exactly constraints hold depends on the number of rows, not on the base weights."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(6, 60))
        b = rng.normal(size=(n, int(rng.integers(1, 5))))
        target = rng.dirichlet(np.ones(n)) @ b
        base = 10.0 ** rng.uniform(-decades, decades, n)
        holds(calibrated(b, target, base=base, distance=distance), b, target)


@pytest.mark.parametrize("distance", [Quadratic(), Entropy()], ids=str)
@pytest.mark.parametrize("decades", [2, 3, 5])
def test_a_box_with_base_weights_over_many_decades(distance: Distance, decades: int) -> None:
    """A multiplier that is 0 at first is brought in later, however uneven the others are."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(10, 60))
        b = rng.normal(size=(n, int(rng.integers(2, 8))))
        target = rng.dirichlet(np.ones(n)) @ b
        base = 10.0 ** rng.uniform(-decades, decades, n)
        result = calibrated(b, target, base=base, distance=distance, slack=Box(0.05))
        rounding = (n + 6) * np.finfo(np.float64).eps
        reach = (np.abs(b - target) / result.deviation).max()
        assert abs(result.weights.sum() - 1.0) <= rounding
        assert result.largest_violation <= 0.05 + rounding * reach


def test_the_quadratic_distance_with_base_weights_over_four_decades() -> None:
    """Multipliers of 650 across a flat stretch of the dual."""
    rng = np.random.default_rng(8)
    b = rng.normal(size=(10, 3))
    base = 10 ** rng.uniform(-2, 2, 10)
    p = base / base.sum()
    i = int(np.argmax(b @ rng.normal(size=3)))
    g = np.full(10, 0.1)
    g[i] += 0.9 / p[i]
    target = p * g @ b
    holds(calibrated(b, target, base=base), b, target)


@pytest.mark.parametrize("small", [1e-4, 1e-6])
def test_one_tiny_base_weight(small: float) -> None:
    b, target = np.arange(4.0)[:, None], np.array([2.5])
    holds(calibrated(b, target, base=[1.0, 1.0, 1.0, small]), b, target)


@pytest.mark.parametrize("seed", [4])
def test_a_start_from_a_subsample_of_heavy_tails(seed: int) -> None:
    """The subsample's multipliers give sums of 1e57 over all rows: start anew from zero."""
    b = np.random.default_rng(seed).standard_cauchy((100_000, 2))
    target = np.array([10.0, 10.0])
    holds(calibrated(b, target, distance=Entropy()), b, target)


@pytest.mark.parametrize("distance", [Linear(), Quadratic()], ids=str)
@pytest.mark.parametrize("ratio", [1e-6, 1e7, 1e8])
def test_populations_much_larger_or_smaller_than_the_base(distance: Distance, ratio: float) -> None:
    """The weights are those of any other population size."""
    b = np.random.default_rng(1).normal(size=(200, 3))
    result = calibrated(b, [0.1, 0.2, -0.1], distance=distance, population_size=200 * ratio)
    plain = calibrated(b, [0.1, 0.2, -0.1], distance=distance)
    np.testing.assert_allclose(result.weights, plain.weights, rtol=1e-8)


@pytest.mark.parametrize("penalty", [1e-6, 1e-9])
def test_a_small_ridge_at_a_mean_out_of_reach(penalty: float) -> None:
    b = np.random.default_rng(1).normal(size=(50, 2))
    result = calibrated(b, [0.1, 5.0], slack=Ridge(penalty))
    assert result.weights.max() > 0.9


def test_tiny_values_are_solved_or_refused_without_a_warning() -> None:
    b = np.random.default_rng(1).normal(size=(50, 2))
    with pytest.raises(InputError):
        calibrated(1e-200 * b, [1e-201, 1e-201])


def test_base_weights_whose_sum_overflows_are_refused() -> None:
    b = np.random.default_rng(1).normal(size=(50, 2))
    with pytest.raises(InputError):
        calibrated(b, [0.1, 0.1], base=np.full(50, 1e308))


def test_a_scalar_as_base_weights_is_refused() -> None:
    b = np.random.default_rng(1).normal(size=(50, 2))
    with pytest.raises(InputError):
        calibrated(b, [0.1, 0.1], base=2.0)


def test_a_rounded_target_of_a_level_nobody_has() -> None:
    b = np.column_stack([np.arange(5.0), np.zeros(5)])
    assert "b2" in calibrated(b, [2.1, 1e-17]).dropped
