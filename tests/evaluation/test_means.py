"""Weighted means and their standard errors: against R, a numeric sandwich and a bootstrap."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from fedipw.errors import InputError
from fedipw.evaluation.means import WeightedMean, hajek_mean, horvitz_thompson_mean
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.propensity import NewtonLogistic
from fedipw.weighting.functions import hajek_weights, horvitz_thompson_weights

FOLDER = Path(__file__).parents[1] / "reference"
R: dict[str, Any] = json.loads((FOLDER / "ipw200_R.json").read_text())
Mean = Callable[[FloatArray, FloatArray, BoolArray, FloatArray], WeightedMean]
BOTH = pytest.mark.parametrize("mean", [horvitz_thompson_mean, hajek_mean])
Rows = tuple[FloatArray, FloatArray, BoolArray, FloatArray]


def fitted(Z: FloatArray, selected: BoolArray) -> FloatArray:
    prob: FloatArray = NewtonLogistic().fit(Z[:, 1:], selected).predict_proba(Z[:, 1:])[:, 1]
    return prob


def drawn(rng: np.random.Generator, n: int, q: int = 3, shift: float = 2.0) -> Rows:
    """Outcome of the selected, design, who is selected, fitted probabilities."""
    Z = np.column_stack([np.ones(n), rng.normal(size=(n, q - 1))])
    selected = rng.random(n) < 1.0 / (1.0 + np.exp(0.5 - 0.8 * Z[:, 1:].sum(axis=1)))
    y = shift + Z[:, 1:].sum(axis=1) + rng.normal(size=n)
    return y[selected], Z, selected, fitted(Z, selected)


def reference() -> Rows:
    table = pl.read_csv(FOLDER / "ipw200.csv")
    levels = [table["z3"].to_numpy() == level for level in ("b", "c")]
    Z = np.column_stack([np.ones(200), table["z1"], table["z2"], *levels]).astype(float)
    enrolled = table["e"].to_numpy() == 1
    return table["y"].to_numpy()[enrolled], Z, enrolled, fitted(Z, enrolled)


def test_the_means_and_standard_errors_equal_rs() -> None:
    ht, hajek = horvitz_thompson_mean(*reference()), hajek_mean(*reference())
    for got, name in (
        (ht.estimate, "ht_mean"),
        (ht.se, "se_ht_m_estimation"),
        (hajek.estimate, "hajek_mean"),
        (hajek.se, "se_hajek_m_estimation"),
        (hajek.se_known, "se_hajek_weights_known"),
        (hajek.effective_sample_size, "ess"),
        (ht.estimated_size, "sum_w"),
        (ht.selected_size, "n_enrolled"),
    ):
        assert got == pytest.approx(R[name], rel=1e-10), name


def test_estimates_are_the_weighted_sums() -> None:
    y, Z, selected, prob = drawn(np.random.default_rng(1), 300)
    ht, hajek = (m(y, Z, selected, prob) for m in (horvitz_thompson_mean, hajek_mean))
    weights = horvitz_thompson_weights(prob[selected], 300)
    assert ht.estimate == pytest.approx(float(weights @ y), rel=1e-12)
    assert hajek.estimate == pytest.approx(float(hajek_weights(prob[selected]) @ y), rel=1e-12)
    assert abs(ht.estimate - hajek.estimate) > 1e-3
    assert ht.se != pytest.approx(hajek.se, rel=1e-3)


def sandwich(rows: Rows, *, normalised: bool, estimated: bool) -> float:
    """The last standard error of stacked estimating equations, derivatives taken numerically."""
    y, Z, selected, prob = rows
    filled = np.zeros(len(Z))
    filled[selected] = y
    beta = np.linalg.lstsq(Z, np.log(prob / (1.0 - prob)))[0]
    w = selected / prob
    mu = (w @ filled) / (w.sum() if normalised else len(Z))

    def equations(at: FloatArray) -> FloatArray:
        p = 1.0 / (1.0 + np.exp(-Z @ at[:-1]))
        last = selected / p * (filled - at[-1]) if normalised else selected / p * filled - at[-1]
        return np.column_stack([Z * (selected - p)[:, None], last])

    at, step = np.append(beta, mu), 1e-5
    moved = step * np.eye(len(at))
    slopes = [(equations(at + d) - equations(at - d)).mean(axis=0) / (2 * step) for d in moved]
    bread, meat = np.column_stack(slopes), equations(at).T @ equations(at) / len(Z)
    if not estimated:  # the last equation alone
        return float(np.sqrt(meat[-1, -1] / len(Z)) / abs(bread[-1, -1]))
    inverse = np.linalg.inv(bread)
    return float(np.sqrt((inverse @ meat @ inverse.T)[-1, -1] / len(Z)))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), q=st.integers(2, 4))
def test_standard_errors_equal_a_sandwich_with_numeric_derivatives(seed: int, q: int) -> None:
    rows = drawn(np.random.default_rng(seed), 400, q)
    for mean, normalised in ((horvitz_thompson_mean, False), (hajek_mean, True)):
        got = mean(*rows)
        assert got.se == pytest.approx(
            sandwich(rows, normalised=normalised, estimated=True), rel=1e-6
        )
        assert got.se_known == pytest.approx(
            sandwich(rows, normalised=normalised, estimated=False), rel=1e-6
        )


def bootstrapped(rows: Rows, times: int, rng: np.random.Generator) -> FloatArray:
    """HT and Hájek means of resampled units, each with its own fit by Newton, (times, 2)."""
    y, Z, selected, _ = rows
    n, q = Z.shape
    filled = np.zeros(n)
    filled[selected] = y
    count = rng.multinomial(n, np.full(n, 1.0 / n), size=times).astype(float)
    products = (Z[:, :, None] * Z[:, None, :]).reshape(n, q * q)
    beta = np.zeros((times, q))
    for _ in range(12):
        p = 1.0 / (1.0 + np.exp(-beta @ Z.T))
        gradient = (count * (selected - p)) @ Z
        hessian = ((count * p * (1.0 - p)) @ products).reshape(times, q, q)
        beta += np.linalg.solve(hessian, gradient[:, :, None])[:, :, 0]
    assert np.abs(gradient).max() < 1e-8
    w = count * selected * (1.0 + np.exp(-beta @ Z.T))
    return np.column_stack([w @ filled / n, w @ filled / w.sum(axis=1)])


def test_standard_errors_equal_a_bootstrap_of_units() -> None:
    """2,000 resamples of 1,500 units, refitted: the bootstrap's own error is 1.6%, 9% allowed.

    False alarm below 1e-6 for the two together (5.6 standard errors), higher-order terms of
    about 1% aside.
    """
    rng = np.random.default_rng(3)
    rows = drawn(rng, 1500, 2)
    spread = bootstrapped(rows, 2000, rng).std(axis=0)
    for mean, expected in zip((horvitz_thompson_mean, hajek_mean), spread, strict=True):
        got = mean(*rows)
        assert got.se == pytest.approx(expected, rel=0.09)
        assert got.se_known > 1.15 * got.se  # the other form would be told apart


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), shift=st.floats(-10.0, 10.0), scale=st.floats(0.1, 10.0))
def test_hajek_moves_with_the_outcomes_and_horvitz_thompson_scales(
    seed: int, shift: float, scale: float
) -> None:
    y, Z, selected, prob = drawn(np.random.default_rng(seed), 200)
    hajek, moved = (hajek_mean(v, Z, selected, prob) for v in (y, shift + scale * y))
    assert moved.estimate == pytest.approx(shift + scale * hajek.estimate, abs=1e-9)
    assert moved.se == pytest.approx(scale * hajek.se, rel=1e-9)
    ht, scaled = (horvitz_thompson_mean(v, Z, selected, prob) for v in (y, scale * y))
    assert scaled.estimate == pytest.approx(scale * ht.estimate, rel=1e-9)
    assert scaled.se == pytest.approx(scale * ht.se, rel=1e-9)


@BOTH
def test_an_outcome_the_design_explains_leaves_no_selection_error(mean: Mean) -> None:
    # y = 1: Hájek knows it is 1; Horvitz–Thompson has only the noise of the estimated size left
    _, Z, selected, prob = drawn(np.random.default_rng(4), 500)
    got = mean(np.ones(selected.sum()), Z, selected, prob)
    if mean is hajek_mean:
        assert got.estimate == pytest.approx(1.0, rel=1e-12)
        assert got.se == pytest.approx(0.0, abs=1e-12)
    else:
        assert got.se < got.se_known / 1.5


@BOTH
def test_twice_the_rows_give_the_same_mean_with_root_two_less_error(mean: Mean) -> None:
    y, Z, selected, prob = drawn(np.random.default_rng(5), 3000)  # twice is more than one block
    once = mean(y, Z, selected, prob)
    twice = mean(np.tile(y, 2), np.tile(Z, (2, 1)), np.tile(selected, 2), np.tile(prob, 2))
    assert twice.estimate == pytest.approx(once.estimate, rel=1e-12)
    assert twice.se == pytest.approx(once.se / np.sqrt(2.0), rel=1e-10)
    assert twice.se_known == pytest.approx(once.se_known / np.sqrt(2.0), rel=1e-10)


@BOTH
def test_columns_that_follow_from_others_change_nothing(mean: Mean) -> None:
    y, Z, selected, prob = drawn(np.random.default_rng(6), 400)
    more = np.column_stack([Z, 2.0 * Z[:, 1] - 3.0, np.zeros(400)])
    assert mean(y, more, selected, prob).se == pytest.approx(
        mean(y, Z, selected, prob).se, rel=1e-8
    )
    far = np.column_stack([Z[:, 0], 1e6 * Z[:, 1], 1e-6 * Z[:, 2]])
    assert mean(y, far, selected, prob).se == pytest.approx(mean(y, Z, selected, prob).se, rel=1e-9)


@BOTH
def test_memory_does_not_grow_with_the_rows(mean: Mean) -> None:
    rows = drawn(np.random.default_rng(7), 200_000)
    mean(*rows)
    tracemalloc.start()
    try:
        mean(*rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000  # one column of floats is 1.6 MB


@BOTH
def test_bad_input_is_named(mean: Mean) -> None:
    y, Z, e, prob = drawn(np.random.default_rng(8), 300)
    zero = np.where(np.arange(300) == 7, 0.0, prob)
    hole = np.where(np.arange(len(y)) == 3, np.nan, y)
    ridge = LogisticRegression(C=0.05).fit(Z[:, 1:], e).predict_proba(Z[:, 1:])[:, 1]
    for bad, match in (
        ((y[1:], Z, e, prob), rf"outcome has {len(y) - 1} rows, expected {len(y)}"),
        ((y, Z[1:], e, prob), "Z has 299 rows, expected 300"),
        ((y, Z, e, prob[1:]), "prob has 299 rows, expected 300"),
        ((y, Z[:, 0], e, prob), r"Expected outcome \(m,\), Z \(N, q\)"),
        ((y, Z, e.astype(float), prob), r"selected must be \(N,\) of true and false"),
        ((y[:0], Z, np.zeros(300, dtype=bool), prob), "Nobody is selected"),
        ((y, Z, e, zero), r"prob must lie in \(0, 1\]; 1 of 300 do not \(row 7: 0\.0\)"),
        ((hole, Z, e, prob), "must be finite"),
        ((y, np.where(Z > 1.0, np.inf, Z), e, prob), "must be finite"),
        ((y, Z, e, ridge), r"not the maximum-likelihood fit .* score of column [12]"),
        ((y, Z, e, np.full(300, 0.5)), "not the maximum-likelihood fit"),
    ):
        with pytest.raises(InputError, match=match):
            mean(*bad)
