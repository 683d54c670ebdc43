"""Sums of the logistic log-likelihood: plain formulas, differences and invariances."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from fedipw.numerics import FloatArray, LabelArray
from fedipw.numerics.logistic import (
    logistic_losses,
    logistic_sums,
    sigmoid_mean,
    sigmoids,
    softplus_divergence,
)
from fedipw.numerics.newton import Sums

BLOCK_EDGES = (1, 2, 255, 256, 257, 512, 513, 700)


class Rows(NamedTuple):
    """Features (n, d), labels and weights (n,), and a point (d + 1,)."""

    features: FloatArray
    labels: LabelArray
    weight: FloatArray
    beta: FloatArray


def random_rows(n: int, d: int, seed: int, spread: float = 1.0) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows(
        rng.normal(size=(n, d)),
        rng.integers(0, 2, n).astype(np.int8),
        rng.uniform(0.1, 2.0, n),
        spread * rng.normal(size=d + 1),
    )


def plain_sums(rows: Rows) -> Sums:
    """(P1) written out with whole matrices."""
    X = np.column_stack([rows.features, np.ones(len(rows.features))])
    u, y = X @ rows.beta, rows.labels.astype(float)
    prob = expit(u)
    return Sums(
        float(rows.weight @ (np.logaddexp(0.0, u) - y * u)),
        X.T @ (rows.weight * (prob - y)),
        (X.T * (rows.weight * expit(u) * expit(-u))) @ X,
    )


@pytest.mark.parametrize("d", [0, 1, 5])
@pytest.mark.parametrize("n", BLOCK_EDGES)
def test_sums_equal_the_plain_formula(n: int, d: int) -> None:
    rows = random_rows(n, d, seed=n + d)
    got, expected = logistic_sums(*rows), plain_sums(rows)
    size = float(np.abs(expected.hessian).max())
    np.testing.assert_allclose(got.value, expected.value, rtol=1e-12)
    np.testing.assert_allclose(got.gradient, expected.gradient, rtol=1e-12, atol=1e-12 * n)
    np.testing.assert_allclose(got.hessian, expected.hessian, rtol=1e-12, atol=1e-12 * size)


@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_derivatives_equal_central_differences(spread: float) -> None:
    rows = random_rows(300, 4, seed=3, spread=spread)
    at = logistic_sums(*rows)
    h = 1e-5 / max(1.0, spread)  # truncation h^2, rounding 1e-16 * value / h
    for j in range(5):
        step = h * np.eye(5)[j]
        up = logistic_sums(*rows[:3], rows.beta + step)
        down = logistic_sums(*rows[:3], rows.beta - step)
        slope = (up.value - down.value) / (2.0 * h)
        atol = 1e-15 * abs(at.value) / h * 10.0 + 1e-8
        np.testing.assert_allclose(at.gradient[j], slope, rtol=1e-8, atol=atol)
        column = (up.gradient - down.gradient) / (2.0 * h)
        np.testing.assert_allclose(at.hessian[j], column, rtol=1e-7, atol=1e-6)


def test_the_hessian_is_exactly_symmetric() -> None:
    hessian = logistic_sums(*random_rows(700, 6, seed=4)).hessian
    np.testing.assert_array_equal(hessian, hessian.T)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 300), d=st.integers(0, 4))
def test_integer_weights_are_repeated_rows(seed: int, n: int, d: int) -> None:
    rows = random_rows(n, d, seed)
    times = np.random.default_rng(seed).integers(0, 4, n)
    if not times.any():
        times[0] = 1
    weighted = logistic_sums(rows.features, rows.labels, times.astype(float), rows.beta)
    repeated = logistic_sums(
        np.repeat(rows.features, times, axis=0),
        np.repeat(rows.labels, times),
        np.ones(times.sum()),
        rows.beta,
    )
    size = times.sum() * (1.0 + np.abs(rows.features).max(initial=0.0)) ** 2
    np.testing.assert_allclose(weighted.value, repeated.value, rtol=1e-12)
    np.testing.assert_allclose(weighted.gradient, repeated.gradient, atol=1e-14 * size, rtol=0)
    np.testing.assert_allclose(weighted.hessian, repeated.hessian, atol=1e-14 * size, rtol=0)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 600))
def test_the_order_of_rows_does_not_matter(seed: int, n: int) -> None:
    rows = random_rows(n, 3, seed)
    order = np.random.default_rng(seed).permutation(n)
    shuffled = Rows(rows.features[order], rows.labels[order], rows.weight[order], rows.beta)
    np.testing.assert_allclose(
        logistic_sums(*rows).value, logistic_sums(*shuffled).value, rtol=1e-12
    )


@pytest.mark.parametrize("n", BLOCK_EDGES)
def test_losses_equal_the_value_of_the_sums(n: int) -> None:
    rows = random_rows(n, 3, seed=n)
    betas = np.random.default_rng(n).normal(size=(4, 4))
    values = [logistic_sums(*rows[:3], beta).value for beta in betas]
    np.testing.assert_allclose(logistic_losses(*rows[:3], betas), values, rtol=1e-13)


def test_losses_take_any_memory_layout_of_the_points() -> None:
    rows = random_rows(40, 3, seed=0)
    betas = np.random.default_rng(0).normal(size=(4, 6))
    np.testing.assert_array_equal(
        logistic_losses(*rows[:3], betas.T), logistic_losses(*rows[:3], betas.T.copy())
    )


def test_a_single_row_has_the_closed_form() -> None:
    x, y, w = np.array([[2.0]]), np.array([1], dtype=np.int8), np.array([3.0])
    at = logistic_sums(x, y, w, np.array([0.5, -0.25]))  # u = 0.75
    p = 1.0 / (1.0 + np.exp(-0.75))
    assert at.value == pytest.approx(-3.0 * np.log(p), rel=1e-15)
    np.testing.assert_allclose(at.gradient, 3.0 * (p - 1.0) * np.array([2.0, 1.0]), rtol=1e-14)
    outer = np.array([[4.0, 2.0], [2.0, 1.0]])
    np.testing.assert_allclose(at.hessian, 3.0 * p * (1.0 - p) * outer, rtol=1e-14)


@pytest.mark.parametrize("u", [-800.0, -100.0, 100.0, 800.0])
@pytest.mark.parametrize("label", [0, 1])
def test_far_log_odds_stay_finite_and_linear(u: float, label: int) -> None:
    x, y = np.zeros((1, 1)), np.array([label], dtype=np.int8)
    at = logistic_sums(x, y, np.ones(1), np.array([0.0, u]))
    wrong_side = max(u, 0.0) - label * u  # log(1 + e^u) - y u is this up to e^-|u|
    assert at.value == pytest.approx(wrong_side, abs=1e-40, rel=1e-15)
    assert at.gradient[1] == pytest.approx(float(u > 0) - label, abs=1e-40)


def test_a_nan_in_the_features_reaches_the_result() -> None:
    rows = random_rows(300, 2, seed=0)
    rows.features[290, 1] = np.nan
    at = logistic_sums(*rows)
    assert np.isnan(at.value)
    assert np.isnan(at.gradient).any()


def test_sigmoid_mean_and_its_slope() -> None:
    score = np.random.default_rng(0).normal(size=1000) * 3.0
    mean, slope = sigmoid_mean(score, 0.7)
    prob = expit(score + 0.7)
    np.testing.assert_allclose(mean, prob.mean(), rtol=1e-13)
    np.testing.assert_allclose(slope, (prob * (1.0 - prob)).mean(), rtol=1e-13)
    np.testing.assert_allclose(sigmoids(score, 0.7), prob, rtol=1e-15 * 4)


@given(u=st.floats(-30.0, 30.0), exponent=st.floats(-12.0, 2.0), sign=st.sampled_from([-1.0, 1.0]))
def test_a_loss_above_its_tangent_has_eleven_digits_at_any_shift(
    u: float, exponent: float, sign: float
) -> None:
    shift = sign * 10.0**exponent
    with localcontext(prec=100):
        at, d = Decimal(u), Decimal(shift)
        rise = (1 + (at + d).exp()).ln() - (1 + at.exp()).ln()
        expected = float(rise - d / (1 + (-at).exp()))
    got = softplus_divergence(np.array([u]), np.array([shift]))
    np.testing.assert_allclose(got, expected, rtol=1e-11)


def test_a_loss_above_its_tangent_stays_finite_far_out() -> None:
    u, shift = np.array([800.0, -800.0, 800.0, -800.0]), np.array([-2e3, 2e3, 5.0, -5.0])
    np.testing.assert_array_equal(softplus_divergence(u, shift), [1200.0, 1200.0, 0.0, 0.0])
