"""Compiled elementary functions against forty-digit decimal arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import cast

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedipw.numerics import FloatArray
from fedipw.numerics.compiled import _OPTIONS, exp, log1p_unit, sigmoid

TWO_ULPS = 4e-16  # relative, below two units in the last place of any double
Vectorised = Callable[[FloatArray], FloatArray]


def fresh(function: Vectorised) -> Vectorised:
    """Compile as every kernel is, but not from a cache that an edit of ``exp`` would not touch."""
    return cast("Vectorised", numba.njit(**{**_OPTIONS, "cache": False})(function))


@fresh
def exps(x: FloatArray) -> FloatArray:
    out = np.empty(x.size)
    for i in range(x.size):
        out[i] = exp(x[i])
    return out


@fresh
def sigmoids(x: FloatArray) -> FloatArray:
    out = np.empty(x.size)
    for i in range(x.size):
        out[i] = sigmoid(x[i])
    return out


@fresh
def log1ps(x: FloatArray) -> FloatArray:
    out = np.empty(x.size)
    for i in range(x.size):
        out[i] = log1p_unit(x[i])
    return out


def worst_relative_error(
    got: FloatArray, x: FloatArray, exact: Callable[[Decimal], Decimal]
) -> float:
    """Return the largest |got / exact(x) - 1|, in decimal arithmetic."""
    with localcontext() as context:
        context.prec = 40
        worst = Decimal(0)
        for value, argument in zip(got.tolist(), x.tolist(), strict=True):
            truth = exact(Decimal(argument))
            worst = max(worst, abs(Decimal(value) / truth - 1))
        return float(worst)


def wide_range(limit: float) -> FloatArray:
    """Return arguments of every magnitude up to ``limit``, of both signs, and the seams."""
    rng = np.random.default_rng(1)
    even = np.linspace(-limit, limit, 4001)
    small = 10.0 ** rng.uniform(-20, np.log10(limit), 2000) * rng.choice([-1.0, 1.0], 2000)
    seams = np.log(2.0) * (np.arange(-1000, 1001) + 0.5)  # where the multiple of log 2 changes
    return np.concatenate([even, small, seams[np.abs(seams) < limit]])


def test_exp_is_right_to_two_units_in_the_last_place() -> None:
    x = wide_range(700.0)
    assert worst_relative_error(exps(x), x, Decimal.exp) <= TWO_ULPS


@settings(max_examples=200)
@given(arrays(np.float64, st.integers(1, 20), elements=st.floats(-700.0, 700.0)))
def test_exp_of_any_double_in_range(x: FloatArray) -> None:
    assert worst_relative_error(exps(x), x, Decimal.exp) <= TWO_ULPS


def test_exp_agrees_with_numpy() -> None:
    x = wide_range(700.0)
    np.testing.assert_allclose(exps(x), np.exp(x), rtol=TWO_ULPS)


def test_sigmoid_is_right_to_two_units_in_the_last_place() -> None:
    x = wide_range(700.0)
    assert worst_relative_error(sigmoids(x), x, lambda u: 1 / (1 + (-u).exp())) <= TWO_ULPS


def test_log1p_is_right_to_two_units_in_the_last_place() -> None:
    rng = np.random.default_rng(2)
    e = np.concatenate([np.linspace(0.0, 1.0, 4001)[1:], 10.0 ** rng.uniform(-300, 0, 2000)])
    np.testing.assert_allclose(log1ps(e), np.log1p(e), rtol=TWO_ULPS)
    coarse = e[e > 1e-9]  # 1 + e keeps thirty digits of e
    assert worst_relative_error(log1ps(coarse), coarse, lambda v: (1 + v).ln()) <= TWO_ULPS
    assert log1ps(np.zeros(1))[0] == 0.0


@pytest.mark.parametrize("function", [exps, sigmoids, log1ps])
@pytest.mark.parametrize("length", [1, 3, 4, 8, 17])
def test_a_nan_passes_through_alone(function: Vectorised, length: int) -> None:
    clean = np.linspace(0.1, 0.9, length)
    for position in range(length):
        x = clean.copy()
        x[position] = np.nan
        got = function(x)
        assert np.flatnonzero(np.isnan(got)).tolist() == [position]
        others = np.arange(length) != position
        np.testing.assert_array_equal(got[others], function(clean)[others])


@pytest.mark.parametrize("beyond", [700.0, np.nextafter(700.0, 1e3), 709.0, 1e4, 1e300, np.inf])
def test_exp_and_sigmoid_saturate_beyond_700(beyond: float) -> None:
    ends = np.array([-700.0, 700.0])
    out = np.array([-beyond, beyond])
    np.testing.assert_array_equal(exps(out), exps(ends))
    np.testing.assert_array_equal(sigmoids(out), sigmoids(ends))
    assert np.isfinite(exps(out)).all()
    assert (sigmoids(out) > 0.0).all()


@settings(max_examples=100)
@given(arrays(np.float64, st.integers(2, 20), elements=st.floats(-1e3, 1e3)))
def test_sigmoid_is_monotone_up_to_rounding(x: FloatArray) -> None:
    got = sigmoids(np.sort(x))
    assert (got[1:] >= got[:-1] * (1.0 - TWO_ULPS)).all()
