"""The compiled sums of the calibration dual against plain NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fedipw.numerics import FloatArray
from fedipw.numerics.dual import (
    CLIPPED,
    EXPONENTIAL,
    LOGISTIC,
    column_moments,
    dense_sums,
    l1_quadratic_step,
    margin_sums,
)

FAMILIES = [
    (CLIPPED, -np.inf, np.inf),
    (CLIPPED, 0.0, np.inf),
    (CLIPPED, 0.3, 2.5),
    (EXPONENTIAL, 0.0, np.inf),
    (LOGISTIC, 0.0, 3.0),
    (LOGISTIC, 0.4, 1.7),
]
SIZES = [1, 2, 63, 64, 65, 129, 1000, 4097]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def plain(
    family: tuple[int, float, float], u: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the integral of F, F and F' at u; the integral up to a constant."""
    kind, low, high = family
    if kind == EXPONENTIAL:
        return np.exp(u), np.exp(u), np.exp(u)
    if kind == CLIPPED:
        g = np.clip(1.0 + u, low, high)
        return g * (1.0 + u) - 0.5 * g**2, g, ((low <= 1.0 + u) & (1.0 + u <= high)).astype(float)
    steep = (high - low) / ((1.0 - low) * (high - 1.0))
    e = np.exp(steep * u)
    g = (low * (high - 1.0) + high * (1.0 - low) * e) / (high - 1.0 + (1.0 - low) * e)
    value = low * u + (high - low) / steep * np.log1p((1.0 - low) / (high - 1.0) * e)
    return value, g, (g - low) * (high - g) / ((1.0 - low) * (high - 1.0))


def expected(
    family: tuple[int, float, float], x: FloatArray, base: FloatArray, point: FloatArray
) -> tuple[float, float, FloatArray, FloatArray, FloatArray]:
    wide = np.column_stack([x, np.ones(len(x))])
    u = wide @ point
    value, g, slope = plain(family, u)
    p = np.broadcast_to(base, u.shape)
    square = (wide * (p * slope)[:, None]).T @ wide
    return float(p @ value), float(u.max()), (p * g) @ wide, square, g


@each_family
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("q", [1, 6])
def test_sums_over_a_matrix_equal_their_formulas(
    family: tuple[int, float, float], n: int, q: int
) -> None:
    rng = np.random.default_rng(n + q)
    x, centre, scale = rng.normal(2.0, 3.0, (n, q)), rng.normal(size=q), rng.uniform(0.5, 4.0, q)
    point = 0.4 * rng.normal(size=q + 1)
    for base in (np.array([1.0 / n]), rng.uniform(0.0, 2.0, n) / n):
        value, largest, gradient, square, g = expected(family, (x - centre) / scale, base, point)
        for order in ("C", "F"):
            ratio = np.empty(n)
            got = dense_sums(
                np.asarray(x, order=order), base, centre, scale, point, family, ratio, hessian=True
            )
            size = np.abs(square).max()
            assert got[0] == pytest.approx(value, rel=1e-12, abs=1e-13)
            assert got[1] == pytest.approx(largest, rel=1e-12, abs=1e-13)
            np.testing.assert_allclose(got[2], gradient, rtol=1e-12, atol=1e-13)
            assert got[3] is not None
            np.testing.assert_allclose(got[3], square, rtol=1e-12, atol=1e-14 * size)
            np.testing.assert_allclose(ratio, g, rtol=1e-12, atol=1e-15)
        light = dense_sums(x, base, centre, scale, point, family, ratio, hessian=False)
        assert light[3] is None
        assert light[0] == pytest.approx(value, rel=1e-12, abs=1e-13)
        np.testing.assert_allclose(light[2], gradient, rtol=1e-12, atol=1e-13)


@each_family
@pytest.mark.parametrize("n", SIZES)
def test_sums_over_margins_equal_those_over_indicators(
    family: tuple[int, float, float], n: int
) -> None:
    rng = np.random.default_rng(n)
    levels, offsets = (2, 4, 3), np.array([0, 2, 6])
    codes = np.column_stack([rng.integers(0, k, n) for k in levels])
    x = np.zeros((n, 9))
    for v in range(3):
        x[np.arange(n), offsets[v] + codes[:, v]] = 1.0
    point = 0.4 * rng.normal(size=10)
    for base in (np.array([1.0 / n]), rng.uniform(0.0, 2.0, n) / n):
        value, largest, gradient, square, g = expected(family, x, base, point)
        ratio = np.empty(n)
        got = margin_sums(codes, offsets, base, point, family, ratio, hessian=True)
        assert got[0] == pytest.approx(value, rel=1e-12, abs=1e-13)
        assert got[1] == pytest.approx(largest, rel=1e-12, abs=1e-13)
        np.testing.assert_allclose(got[2], gradient, rtol=1e-12, atol=1e-14)
        assert got[3] is not None
        np.testing.assert_allclose(got[3], square, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(ratio, g, rtol=1e-12, atol=1e-15)
        light = margin_sums(codes, offsets, base, point, family, ratio, hessian=False)
        assert light[3] is None
        np.testing.assert_array_equal(light[2], got[2])


def test_margins_of_one_variable_have_the_constant_in_their_square() -> None:
    codes, family = np.array([[0], [1], [1], [2]]), (EXPONENTIAL, 0.0, np.inf)
    point, ratio = np.array([0.1, 0.2, -0.3, 0.05]), np.empty(4)
    got = margin_sums(codes, np.array([0]), np.ones(1), point, family, ratio, hessian=True)
    *_, square, _ = expected(family, np.eye(3)[codes[:, 0]], np.ones(1), point)
    assert got[3] is not None
    np.testing.assert_allclose(got[3], square, rtol=1e-14)


@each_family
def test_gradient_and_hessian_are_the_derivatives_of_value_and_gradient(
    family: tuple[int, float, float],
) -> None:
    """Central differences at a point where no row sits within a step of its bounds."""
    rng = np.random.default_rng(5)
    x, base = rng.normal(size=(80, 3)), rng.uniform(0.5, 1.5, 80) / 80
    frame, point, h = (np.zeros(3), np.ones(3)), 0.5 * rng.normal(size=4), 1e-5
    u = x @ point[:3] + point[3]
    for bound in family[1:]:
        assert np.abs(1.0 + u - bound).min() > 10.0 * h
    room = np.empty(80)

    def at(shift: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        value, _, gradient, square = dense_sums(
            x, base, *frame, point + shift, family, room, hessian=True
        )
        assert square is not None
        return value, gradient, square

    _, gradient, square = at(np.zeros(4))
    for j, step in enumerate(h * np.eye(4)):
        (up, slope_up, _), (down, slope_down, _) = at(step), at(-step)
        assert (up - down) / (2.0 * h) == pytest.approx(gradient[j], rel=1e-8, abs=1e-9)
        np.testing.assert_allclose(
            (slope_up - slope_down) / (2.0 * h), square[j], rtol=1e-7, atol=1e-9
        )


@each_family
def test_f_is_one_with_slope_one_at_zero(family: tuple[int, float, float]) -> None:
    ratio = np.empty(1)
    none = np.zeros((1, 1)), np.ones(1), np.zeros(1), np.ones(1), np.zeros(2)
    *_, gradient, square = dense_sums(*none, family, ratio, hessian=True)
    assert square is not None
    np.testing.assert_allclose([ratio[0], gradient[1], square[1, 1]], 1.0, rtol=1e-15)


@each_family
def test_far_arguments_stay_finite(family: tuple[int, float, float]) -> None:
    x, ratio = np.array([[-1.0], [1.0]]), np.empty(2)
    for size in (50.0, 600.0, 1e5):
        value, _, gradient, square = dense_sums(
            x, np.full(1, 0.5), np.zeros(1), np.ones(1), np.array([size, 0.0]), family, ratio,
            hessian=True,
        )  # fmt: skip
        assert square is not None
        assert np.isfinite([value, *gradient, *square.ravel(), *ratio]).all()
        assert ratio[0] >= family[1]
        assert ratio[1] <= family[2]


@pytest.mark.parametrize("n", [2, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("shift", [0.0, 1e8])
def test_moments_of_columns_equal_numpys(n: int, shift: float) -> None:
    rng = np.random.default_rng(n)
    x = np.column_stack([rng.normal(size=n), rng.standard_cauchy(n), rng.random(n) < 0.3]) + shift
    for order in ("C", "F"):
        mean, square, least, largest = column_moments(np.asarray(x, order=order))
        np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-13, atol=1e-13)
        centred = x - x[0]
        deviation = np.sqrt(square / (n - 1))
        np.testing.assert_allclose(deviation, centred.std(axis=0, ddof=1), rtol=1e-9)
        np.testing.assert_array_equal(least, x.min(axis=0))
        np.testing.assert_array_equal(largest, x.max(axis=0))


def test_moments_of_one_row_and_of_a_constant_are_exact() -> None:
    mean, square, least, largest = column_moments(np.array([[3.0, -1.0]]))
    np.testing.assert_array_equal([mean, least, largest], [[3.0, -1.0]] * 3)
    np.testing.assert_array_equal(square, 0.0)
    mean, square, *_ = column_moments(np.full((777, 1), 0.1))
    assert (mean[0], square[0]) == (0.1, 0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("row", [0, 70, 199])
def test_values_that_are_no_numbers_make_a_columns_moments_none(value: float, row: int) -> None:
    x = np.random.default_rng(6).normal(size=(200, 3))
    x[row, 1] = value
    mean, square, *_ = column_moments(x)
    finite = np.isfinite(mean) & np.isfinite(square)
    assert finite.tolist() == [True, False, True]


def by_signs(
    hessian: FloatArray, gradient: FloatArray, point: FloatArray, penalty: FloatArray
) -> FloatArray:
    """Return the minimum by trying every pattern of signs of point + step."""
    best, where = np.inf, np.zeros(len(gradient))
    for signs in product((-1.0, 0.0, 1.0), repeat=len(gradient)):
        s = np.array(signs)
        free = s != 0.0
        step = np.where(free, 0.0, -point)
        rest = gradient + hessian @ step + penalty * s
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], -rest[free])
        if (s * (point + step) < -1e-12).any():
            continue
        smooth = float(gradient @ step) + 0.5 * float(step @ hessian @ step)
        value = smooth + float(penalty @ np.abs(point + step))
        if value < best:
            best, where = value, step
    return where


@pytest.mark.parametrize("q", [1, 2, 3, 5])
def test_the_step_with_absolute_values_equals_the_best_pattern_of_signs(q: int) -> None:
    zeros = 0
    for seed in range(15):
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(q + 3, q))
        hessian, gradient = root.T @ root / (q + 3), rng.normal(size=q)
        point = rng.normal(size=q) * (rng.random(q) < 0.7)
        penalty = rng.uniform(0.0, 1.0, q) * (rng.random(q) < 0.8)
        step = l1_quadratic_step(hessian, gradient, point, penalty)
        best = by_signs(hessian, gradient, point, penalty)
        np.testing.assert_allclose(step, best, rtol=0.0, atol=1e-10 * (1.0 + np.abs(best).max()))
        zeros += int((point + step == 0.0).sum())
    assert zeros > 0


def test_the_step_without_penalties_is_newtons() -> None:
    rng = np.random.default_rng(7)
    root = rng.normal(size=(10, 4))
    hessian, gradient, point = root.T @ root, rng.normal(size=4), rng.normal(size=4)
    step = l1_quadratic_step(hessian, gradient, point, np.zeros(4))
    np.testing.assert_allclose(step, -np.linalg.solve(hessian, gradient), rtol=1e-10)
    gradient_before = gradient.copy()
    l1_quadratic_step(hessian, gradient, point, np.ones(4))
    np.testing.assert_array_equal(gradient, gradient_before)
