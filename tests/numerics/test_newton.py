"""Newton's method: closed forms, and a status for every way to end."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import NotConvergedError
from fedipw.numerics import FloatArray
from fedipw.numerics.newton import NewtonStatus, Sums, newton_minimum


def log_cosh(x: FloatArray) -> Sums:
    """Sum of log cosh(x_i), whose full Newton steps overshoot beyond |x| = 1.09."""
    small = np.exp(-2.0 * np.abs(x))
    value = float((np.abs(x) + np.log1p(small) - np.log(2.0)).sum())
    return Sums(value, np.tanh(x), np.diag(4.0 * small / (1.0 + small) ** 2))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), q=st.integers(1, 6))
def test_a_quadratic_takes_one_step(seed: int, q: int) -> None:
    rng = np.random.default_rng(seed)
    root, optimum = rng.normal(size=(q + 3, q)), rng.normal(size=q)
    H = root.T @ root

    def quadratic(x: FloatArray) -> Sums:
        away = x - optimum
        return Sums(float(0.5 * away @ H @ away), H @ away, H)

    tol = 1e-10 * float(np.linalg.norm(H) + 1.0) * 10.0
    result = newton_minimum(quadratic, 10.0 * rng.normal(size=q), gradient_tol=tol)
    assert result.converged
    assert result.iterations == 1
    condition = np.linalg.cond(H)
    np.testing.assert_allclose(result.point, optimum, atol=1e-13 * condition * 10.0)


def test_an_unbounded_linear_objective_is_singular() -> None:
    slope = np.array([1.0, -2.0])
    result = newton_minimum(lambda x: Sums(float(slope @ x), slope, np.zeros((2, 2))), np.zeros(2))
    assert result.status is NewtonStatus.SINGULAR
    assert not result.converged
    np.testing.assert_array_equal(result.point, 0.0)
    assert result.gradient_norm == pytest.approx(np.sqrt(5.0), rel=1e-15)


def test_unbounded_along_one_direction_only_is_singular() -> None:
    H = np.diag([1.0, 0.0])

    def objective(x: FloatArray) -> Sums:
        return Sums(float(0.5 * x[0] ** 2 + x[1]), np.array([x[0], 1.0]), H)

    assert newton_minimum(objective, np.ones(2)).status is NewtonStatus.SINGULAR


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_derivative_that_is_not_a_number_is_singular(bad: float) -> None:
    result = newton_minimum(lambda _: Sums(0.0, np.ones(1), np.array([[bad]])), np.zeros(1))
    assert result.status is NewtonStatus.SINGULAR
    result = newton_minimum(lambda _: Sums(0.0, np.array([bad]), np.eye(1)), np.zeros(1))
    assert result.status is NewtonStatus.SINGULAR


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_iteration_limit_is_reported_as_such(limit: int) -> None:
    def quartic(x: FloatArray) -> Sums:  # Newton shrinks x by a third: never there in few steps
        return Sums(float(x[0] ** 4), 4.0 * x**3, np.array([[12.0 * x[0] ** 2]]))

    result = newton_minimum(quartic, np.ones(1), gradient_tol=1e-12, max_iterations=limit)
    assert result.status is NewtonStatus.MAX_ITERATIONS
    assert result.iterations == limit
    np.testing.assert_allclose(result.point, (2.0 / 3.0) ** limit, rtol=1e-14)
    assert result.gradient_norm == pytest.approx(4.0 * (2.0 / 3.0) ** (3 * limit), rel=1e-13)


def test_a_direction_that_never_lowers_the_value_is_stalled() -> None:
    def contradictory(x: FloatArray) -> Sums:  # the gradient has the wrong sign
        return Sums(float(x @ x), -2.0 * x, 2.0 * np.eye(1))

    result = newton_minimum(contradictory, np.ones(1))
    assert result.status is NewtonStatus.STALLED
    assert not result.converged
    np.testing.assert_array_equal(result.point, 1.0)


def test_a_consistent_singular_hessian_gives_the_least_norm_step() -> None:
    # 1/2 (x1 + x2 + x3 - 6)^2: every point of the plane is a minimiser, (2, 2, 2) the nearest
    H = np.ones((3, 3))

    def objective(x: FloatArray) -> Sums:
        off = x.sum() - 6.0
        return Sums(0.5 * off**2, np.full(3, off), H)

    result = newton_minimum(objective, np.zeros(3), gradient_tol=1e-12)
    assert result.converged
    assert result.iterations == 1
    np.testing.assert_allclose(result.point, 2.0, rtol=1e-13)


@settings(max_examples=40)
@given(st.lists(st.floats(1e-4, 1e4), min_size=3, max_size=3))
def test_the_step_of_a_singular_hessian_does_not_depend_on_units(units: list[float]) -> None:
    # x_j measured in other units: x_j = y_j / unit_j, the least norm is that of scaled coordinates
    scale = np.array(units)

    def objective(x: FloatArray) -> Sums:
        off = float((scale * x).sum()) - 6.0
        return Sums(0.5 * off**2, off * scale, np.outer(scale, scale))

    result = newton_minimum(objective, np.zeros(3), gradient_tol=1e-10 * scale.max())
    assert result.converged
    np.testing.assert_allclose(result.point * scale, 2.0, rtol=1e-9)


@pytest.mark.parametrize("start", [1.2, 3.0, 10.0])
def test_halving_tames_a_step_that_overshoots(start: float) -> None:
    begin = log_cosh(np.array([start]))
    full = start - float(begin.gradient[0] / begin.hessian[0, 0])
    assert log_cosh(np.array([full])).value > begin.value  # the full step is worse than none
    result = newton_minimum(log_cosh, np.array([start]), gradient_tol=1e-12)
    assert result.converged
    assert abs(result.point[0]) <= 1e-12
    assert result.gradient_norm <= 1e-12


def test_the_value_never_rises_from_step_to_step() -> None:
    start = np.array([8.0, -3.0, 0.5])
    results = [newton_minimum(log_cosh, start, max_iterations=k) for k in range(12)]
    values = [result.value for result in results]
    assert all(after <= before for before, after in pairwise(values))
    assert values[-1] <= 1e-20 < values[0]


def test_the_decrement_rule_ends_with_one_more_step() -> None:
    tight = newton_minimum(log_cosh, np.array([1.0]), gradient_tol=1e-15)
    loose = newton_minimum(log_cosh, np.array([1.0]), gradient_tol=0.0, decrement_tol=1e-3)
    assert loose.converged
    assert loose.iterations < tight.iterations
    # Newton is of third order here: |x+| = 2/3 |x|^3, from a point with decrement <= 1e-3
    assert abs(loose.point[0]) <= (2.0 / 3.0) * (1e-3) ** 1.5 * 1.01


def test_checked_passes_a_converged_result_on() -> None:
    result = newton_minimum(log_cosh, np.array([0.5]))
    assert result.checked() is result


def test_checked_raises_an_error_that_travels_between_processes() -> None:
    result = newton_minimum(log_cosh, np.array([5.0]), max_iterations=1, gradient_tol=1e-9)
    with pytest.raises(NotConvergedError) as caught:
        result.checked()
    error = caught.value
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is NotConvergedError
    assert str(copy) == str(error)
    assert (copy.iterations, copy.gradient_norm, copy.tolerance) == (1, result.gradient_norm, 1e-9)
    assert "after 1 iterations" in str(error)
    assert f"{result.gradient_norm:.3g}" in str(error)
    assert "Standardise covariates" in str(error)


def test_the_start_is_not_changed() -> None:
    start = np.array([3.0])
    newton_minimum(log_cosh, start)
    np.testing.assert_array_equal(start, 3.0)
