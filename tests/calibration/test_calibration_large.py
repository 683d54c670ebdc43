"""Many rows: the start from a subsample leads to the same minimum, whatever order rows come in."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize, root

from fedipw.calibration import Box, Distance, Entropy, Linear, Logit, Margins, Quadratic, calibrated
from fedipw.calibration.feasibility import _MANY_ROWS
from fedipw.errors import InfeasibleError
from fedipw.numerics import FloatArray

N = 90_000
TARGET = np.array([0.3, 1.2, 0.25])
DISTANCES: list[Distance] = [
    Linear(),
    Quadratic(),
    Quadratic(0.3, 3.0),
    Entropy(),
    Logit(0.3, 3.0),
]
each_distance = pytest.mark.parametrize("distance", DISTANCES, ids=str)


@pytest.fixture(scope="module")
def columns() -> FloatArray:
    rng = np.random.default_rng(0)
    return np.column_stack([rng.normal(size=N), rng.exponential(size=N), rng.random(N) < 0.3])


@pytest.fixture(scope="module")
def base() -> FloatArray:
    return np.random.default_rng(1).uniform(0.5, 3.0, N)


def f(distance: Distance, u: FloatArray) -> FloatArray:
    if isinstance(distance, Entropy):
        return np.exp(u)
    low, high = distance.family[1:]
    if isinstance(distance, Logit):
        e = np.exp((high - low) / ((1.0 - low) * (high - 1.0)) * u)
        return np.asarray(
            (low * (high - 1.0) + high * (1.0 - low) * e) / (high - 1.0 + (1.0 - low) * e)
        )
    return np.clip(1.0 + u, low, high)


@each_distance
@pytest.mark.parametrize("with_base", [False, True])
def test_weights_equal_the_root_of_the_equations(
    columns: FloatArray, base: FloatArray, distance: Distance, with_base: bool
) -> None:
    share = base / base.sum() if with_base else np.full(N, 1.0 / N)
    x = np.column_stack([columns - TARGET, np.ones(N)])

    def equations(lam: FloatArray) -> FloatArray:
        sums = (share * f(distance, x @ lam)) @ x
        off: FloatArray = sums - np.array([0.0, 0.0, 0.0, 1.0])
        return off

    found = root(equations, np.zeros(4), tol=1e-13)
    assert np.abs(equations(found.x)).max() < 1e-11
    expected = share * f(distance, x @ found.x)
    result = calibrated(columns, TARGET, distance=distance, base=base if with_base else None)
    np.testing.assert_allclose(result.weights, expected, rtol=1e-8, atol=1e-8 / N)
    assert result.largest_violation < 1e-11


@each_distance
@pytest.mark.parametrize("by", [0, 1, 2])
def test_sorted_rows_give_the_same_weights(
    columns: FloatArray, base: FloatArray, distance: Distance, by: int
) -> None:
    order = np.argsort(columns[:, by], kind="stable")
    first = calibrated(columns, TARGET, distance=distance, base=base)
    other = calibrated(columns[order], TARGET, distance=distance, base=base[order])
    np.testing.assert_allclose(other.weights, first.weights[order], rtol=1e-9, atol=1e-9 / N)


@each_distance
def test_a_subsample_unlike_the_rest_does_no_harm(distance: Distance) -> None:
    """Every fourth row, all that the subsample sees, is far off in one column, fixed in another."""
    rng = np.random.default_rng(2)
    i = np.arange(N)
    b = np.column_stack(
        [np.where(i % 4 == 0, 4.0, 0.0) + rng.normal(size=N), (i % 4 > 0) * rng.normal(size=N)]
    )
    target = b.mean(axis=0) + np.array([0.3, 0.1])
    result = calibrated(b, target, distance=distance)
    assert result.largest_violation < 1e-11
    order = rng.permutation(N)
    other = calibrated(b[order], target, distance=distance)
    np.testing.assert_allclose(other.weights, result.weights[order], rtol=1e-9, atol=1e-9 / N)


def test_many_rows_have_the_weights_of_their_distinct_values() -> None:
    """30 copies of 3,000 rows are 3,000 rows: the two take different paths."""
    rng = np.random.default_rng(3)
    b = rng.normal(size=(3_000, 4))
    target = np.array([0.2, -0.1, 0.3, 0.0])
    for distance in DISTANCES:
        few = calibrated(b, target, distance=distance)
        many = calibrated(np.tile(b, (30, 1)), target, distance=distance)
        folded = many.weights.reshape(30, -1)
        np.testing.assert_allclose(folded[0], folded[-1], rtol=1e-12)
        np.testing.assert_allclose(
            folded.sum(axis=0), few.weights, rtol=1e-9, atol=1e-9 / len(few.weights)
        )


def test_a_box_equals_an_independent_minimum_of_the_dual(columns: FloatArray) -> None:
    """The dual split in positive and negative parts, by scipy's bounded quasi-Newton method."""
    sd = columns.std(axis=0, ddof=1)
    z = (columns - TARGET) / sd
    width = 0.05

    def dual(parts: FloatArray) -> tuple[float, FloatArray]:
        lam = parts[:3] - parts[3:6]
        g = np.exp(z @ lam + parts[6])
        slope = g @ z / N
        value = g.mean() - parts[6] + width * parts[:6].sum()
        return float(value), np.concatenate([slope + width, width - slope, [g.mean() - 1.0]])

    bounds = [(0.0, None)] * 6 + [(None, None)]
    found = minimize(
        dual, np.zeros(7), jac=True, bounds=bounds, method="L-BFGS-B",
        options={"ftol": 1e-16, "gtol": 1e-10, "maxiter": 500},
    )  # fmt: skip
    result = calibrated(columns, TARGET, distance=Entropy(), slack=Box(width))
    lam = found.x[:3] - found.x[3:6]
    np.testing.assert_allclose(result.multipliers[:3] * sd, lam, atol=1e-6)
    np.testing.assert_allclose(result.violation, width, atol=1e-10)


def test_margins_of_many_rows_equal_raking_by_hand() -> None:
    rng = np.random.default_rng(4)
    codes = np.column_stack([rng.integers(0, 6, N), rng.integers(0, 3, N)])
    design = Margins(codes, (tuple("abcdef"), ("x", "y", "z")))
    rows, cols = rng.dirichlet(np.full(6, 5.0)), rng.dirichlet(np.full(3, 5.0))
    cells = np.zeros((6, 3))
    np.add.at(cells, (codes[:, 0], codes[:, 1]), 1.0 / N)
    counts = cells * N
    for _ in range(200):
        cells *= (rows / cells.sum(axis=1))[:, None]
        cells *= cols / cells.sum(axis=0)
    result = calibrated(design, np.append(rows, cols), distance=Entropy())
    expected = (cells / counts)[codes[:, 0], codes[:, 1]]
    np.testing.assert_allclose(result.weights, expected, rtol=1e-10)


def test_targets_outside_the_hull_are_refused_with_many_rows(columns: FloatArray) -> None:
    """A few more rows than what refusals call many: the time of their programme grows faster."""
    with pytest.raises(InfeasibleError, match="90000 enrolled clients"):
        calibrated(columns, [0.3, 1.2, 1.01])
    many = columns[: _MANY_ROWS + 2_000]
    with pytest.raises(InfeasibleError, match=r"ratios between 0\.5 and 1\.5") as caught:
        calibrated(many, [0.3, 1.2, 0.6], distance=Quadratic(0.5, 1.5), names=["x", "y", "z"])
    assert [name for name, *_ in caught.value.conflict] == ["z"]
    assert caught.value.nearest["z"] == pytest.approx(1.5 * many[:, 2].mean(), rel=1e-6)


@pytest.mark.parametrize("q", [20])
def test_refusals_with_bounds_take_seconds(q: int) -> None:
    """10,000 rows and 20 columns in one programme."""
    b = np.random.default_rng(2).normal(size=(10_000, q))
    with pytest.raises(InfeasibleError):
        calibrated(b, np.full(q, 0.5), distance=Quadratic(0.2, 3.0))
