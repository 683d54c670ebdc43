"""Maximum-likelihood logistic regression: score equations, closed forms, invariances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning

from fedipw.errors import InputError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.propensity import NewtonLogistic

seeds = st.integers(0, 2**32 - 1)


def overlapping(seed: int, n: int = 200, q: int = 3) -> tuple[FloatArray, BoolArray]:
    """Return covariates and labels that no direction separates."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, q)) * rng.uniform(0.5, 5.0, q) + rng.normal(size=q)
    y = rng.random(n) < expit(0.3 * X @ rng.normal(size=q) / np.abs(X).mean(axis=0).sum())
    mirrored = np.concatenate([X, X[:q]])  # the same rows with both labels
    return mirrored, np.concatenate([y, ~y[:q]])


def prob_of(model: NewtonLogistic, X: FloatArray) -> FloatArray:
    return model.predict_proba(X)[:, 1]


@settings(max_examples=60)
@given(seed=seeds, q=st.integers(1, 5))
def test_the_score_equations_hold(seed: int, q: int) -> None:
    X, y = overlapping(seed, q=q)
    model = NewtonLogistic().fit(X, y)
    assert model.converged_
    assert model.separation_ == ()
    residual = y - prob_of(model, X)
    assert abs(residual.sum()) <= 1e-9  # the mean probability is the mean label
    np.testing.assert_allclose(X.T @ residual, 0.0, atol=1e-9 * np.abs(X).max())


def test_a_binary_covariate_gives_the_shares() -> None:
    X = np.repeat([[0.0], [1.0]], [7, 11], axis=0)
    y = np.array([1] * 2 + [0] * 5 + [1] * 9 + [0] * 2)
    model = NewtonLogistic().fit(X, y)
    np.testing.assert_allclose(
        prob_of(model, np.array([[0.0], [1.0]])), [2 / 7, 9 / 11], rtol=1e-11
    )
    assert model.intercept_[0] == pytest.approx(np.log(2 / 5), rel=1e-11)
    assert model.coef_[0, 0] == pytest.approx(np.log(9 / 2) - np.log(2 / 5), rel=1e-11)


@settings(max_examples=40)
@given(seed=seeds)
def test_integer_weights_are_repeated_rows(seed: int) -> None:
    X, y = overlapping(seed, n=120, q=2)
    times = np.random.default_rng(seed).integers(0, 4, len(y))
    times[-2:] = times[:2] = 1  # keep the mirrored rows, so that both fits have a maximum
    weighted = NewtonLogistic().fit(X, y, sample_weight=times)
    repeated = NewtonLogistic().fit(np.repeat(X, times, axis=0), np.repeat(y, times))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(weighted.intercept_, repeated.intercept_, rtol=1e-9, atol=1e-10)


@settings(max_examples=40)
@given(seed=seeds, factor=st.floats(1e-3, 1e3))
def test_a_common_factor_of_the_weights_is_forgotten(seed: int, factor: float) -> None:
    X, y = overlapping(seed, q=2)
    weight = np.random.default_rng(seed).uniform(0.5, 2.0, len(y))
    one = NewtonLogistic().fit(X, y, sample_weight=weight)
    other = NewtonLogistic().fit(X, y, sample_weight=factor * weight)
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-9, atol=1e-10)


@settings(max_examples=40)
@given(seed=seeds, scale=st.floats(1e-4, 1e4), shift=st.floats(-1e3, 1e3))
def test_probabilities_forget_the_units_of_covariates(
    seed: int, scale: float, shift: float
) -> None:
    X, y = overlapping(seed, q=2)
    moved = X * scale + shift * scale
    expected = prob_of(NewtonLogistic().fit(X, y), X)
    np.testing.assert_allclose(prob_of(NewtonLogistic().fit(moved, y), moved), expected, rtol=1e-8)


def penalised(beta: FloatArray, X: FloatArray, y: BoolArray, l2: float) -> tuple[float, FloatArray]:
    """Return (P1) plus the ridge term, and its gradient; the intercept is last and free."""
    u = X @ beta[:-1] + beta[-1]
    residual = expit(u) - y
    value = float(np.sum(np.logaddexp(0.0, u) - y * u) + 0.5 * l2 * beta[:-1] @ beta[:-1])
    return value, np.append(X.T @ residual + l2 * beta[:-1], residual.sum())


@pytest.mark.parametrize("l2", [1e-3, 0.5, 20.0])
def test_the_ridge_fit_is_the_direct_optimum(l2: float) -> None:
    X, y = overlapping(4, q=3)
    model = NewtonLogistic(l2=l2).fit(X, y)
    got = np.append(model.coef_[0], model.intercept_[0])
    gradient = penalised(got, X, y, l2)[1]
    np.testing.assert_allclose(gradient, 0.0, atol=1e-9)
    found = minimize(
        penalised, np.zeros(4), args=(X, y, l2), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    np.testing.assert_allclose(got, found.x, rtol=1e-6, atol=1e-8)
    assert penalised(got, X, y, l2)[0] <= found.fun + 1e-12 * abs(found.fun)


def test_the_ridge_fit_of_weighted_rows_solves_its_equation() -> None:
    X, y = overlapping(5, q=2)
    weight = np.random.default_rng(0).uniform(0.1, 3.0, len(y))
    model = NewtonLogistic(l2=0.7).fit(X, y, sample_weight=weight)
    residual = weight * (prob_of(model, X) - y)
    np.testing.assert_allclose(X.T @ residual + 0.7 * model.coef_[0], 0.0, atol=1e-8)
    assert abs(residual.sum()) <= 1e-9


def test_more_ridge_means_smaller_coefficients() -> None:
    X, y = overlapping(6)
    norms = [
        float(np.linalg.norm(NewtonLogistic(l2=l2).fit(X, y).coef_))
        for l2 in (0.0, 0.1, 1.0, 10.0, 100.0, 1e6)
    ]
    assert norms == sorted(norms, reverse=True)
    assert norms[-1] < 1e-3 * norms[0]


def test_a_ridge_makes_separated_classes_fit() -> None:
    X, y = np.arange(6.0)[:, None], np.arange(6) >= 3
    model = NewtonLogistic(l2=0.1).fit(X, y)  # warns of nothing
    assert model.converged_
    assert model.separation_ == ()


@pytest.mark.parametrize(
    ("extra", "dropped"),
    [
        (lambda X: X[:, :1], [3]),  # a copy
        (lambda X: 2.0 * X[:, [0]] - 3.0 * X[:, [1]] + 1.0, [3]),  # a combination
        (lambda X: np.full((len(X), 1), 7.0), [3]),  # a constant
        (lambda X: np.column_stack([np.zeros(len(X)), X[:, 2] + X[:, 1]]), [3, 4]),
    ],
    ids=["copy", "combination", "constant", "two"],
)
def test_columns_that_add_nothing_are_dropped_and_named(extra: Any, dropped: list[int]) -> None:
    X, y = overlapping(7, q=3)
    wide = np.column_stack([X, extra(X)])
    model, plain = NewtonLogistic().fit(wide, y), NewtonLogistic().fit(X, y)
    assert model.dropped_.tolist() == dropped  # the later of the columns involved
    assert model.converged_
    np.testing.assert_array_equal(model.coef_[0, dropped], 0.0)
    np.testing.assert_allclose(prob_of(model, wide), prob_of(plain, X), rtol=1e-10)


def test_collinear_columns_first_in_line_leave_later_ones_in() -> None:
    X, y = overlapping(8, q=2)
    wide = np.column_stack([X[:, 0], X[:, 0], X[:, 0] * 2.0, X[:, 1]])
    assert NewtonLogistic().fit(wide, y).dropped_.tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("power", range(1, 15))
def test_however_nearly_collinear_a_column_is_the_fit_converges(power: int, seed: int) -> None:
    X, y = overlapping(seed, q=2)
    noise = np.random.default_rng(seed).normal(size=len(y))
    close = X[:, 0] + 10.0**-power * X[:, 0].std() * noise
    model = NewtonLogistic().fit(np.column_stack([X, close]), y)  # a warning would be an error
    assert model.converged_
    expected: list[list[int]] = [[]] * (power <= 5) + [[2]] * (power >= 5)  # either at the limit
    assert model.dropped_.tolist() in expected


def test_a_copy_in_single_precision_is_a_copy() -> None:
    X, y = overlapping(9, q=2)
    single = X[:, 0].astype(np.float32).astype(np.float64)
    model = NewtonLogistic().fit(np.column_stack([X, single]), y)
    assert model.dropped_.tolist() == [2]


def test_only_constant_columns_give_the_rate() -> None:
    y = np.array([1, 0, 0, 1, 0])
    model = NewtonLogistic().fit(np.ones((5, 2)), y)
    assert model.dropped_.tolist() == [0, 1]
    np.testing.assert_allclose(prob_of(model, np.ones((3, 2))), 0.4, rtol=1e-13)


def test_classes_may_have_any_names() -> None:
    X, y = overlapping(10)
    names = np.where(y, "yes", "no")
    model = NewtonLogistic().fit(X, names)
    assert model.classes_.tolist() == ["no", "yes"]
    np.testing.assert_array_equal(prob_of(model, X), prob_of(NewtonLogistic().fit(X, y), X))
    likelier = np.where(prob_of(model, X) > 0.5, "yes", "no")
    np.testing.assert_array_equal(model.predict(X), likelier)


def test_both_probabilities_keep_their_digits() -> None:
    X, y = overlapping(11, q=1)
    model = NewtonLogistic().fit(X, y)
    far = np.sign(model.coef_[0, 0]) * np.array([[-1e4], [1e4]]) / abs(model.coef_[0, 0])
    prob = model.predict_proba(far / 25.0)  # log odds near -400 and 400
    np.testing.assert_allclose(
        np.log(prob[0, 1]), model.decision_function(far / 25.0)[0], rtol=1e-12
    )
    np.testing.assert_allclose(
        np.log(prob[1, 0]), -model.decision_function(far / 25.0)[1], rtol=1e-12
    )


def test_too_few_iterations_are_admitted() -> None:
    X, y = overlapping(12)
    with pytest.warns(ConvergenceWarning, match="Not converged: iteration limit reached, gradient"):
        model = NewtonLogistic(max_iter=1).fit(X, y)
    assert not model.converged_
    assert model.separation_ == ()
    assert model.n_iter_ == 1


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (np.ones(3), r"shape \(3,\), expected \(203,\)"),
        (np.ones((203, 1)), r"shape \(203, 1\), expected \(203,\)"),
        (np.full(203, -1.0), "finite, not negative, and not all zero"),
        (np.zeros(203), "finite, not negative, and not all zero"),
        (np.full(203, np.nan), "finite, not negative, and not all zero"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weight: FloatArray, said: str) -> None:
    X, y = overlapping(13)
    with pytest.raises(InputError, match=said):
        NewtonLogistic().fit(X, y, sample_weight=weight)


def test_weight_on_one_class_only_is_refused() -> None:
    X, y = overlapping(14)
    with pytest.raises(InputError, match="Every row with weight is of one class, True"):
        NewtonLogistic().fit(X, y, sample_weight=y.astype(float))


def test_one_class_is_refused() -> None:
    with pytest.raises(InputError, match="needs two classes in y; it has 1 class"):
        NewtonLogistic().fit(np.ones((3, 1)), np.zeros(3))


@pytest.mark.parametrize("l2", [-1.0, float("nan")])
def test_a_negative_penalty_is_refused(l2: float) -> None:
    X, y = overlapping(15)
    with pytest.raises(InputError, match=f"l2 must be 0 or more, not {l2}"):
        NewtonLogistic(l2=l2).fit(X, y)
