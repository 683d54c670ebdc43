"""Separation over blocks: what a linear programme on all rows says, with few rows in hand."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fedipw.errors import SeparationError
from fedipw.numerics import FloatArray, LabelArray
from fedipw.selection import separation
from fedipw.selection.classifiers import Newton
from fedipw.selection.coded import TableSettings, table_model
from fedipw.selection.logistic import logistic_fit
from fedipw.selection.separation import separating_columns
from fedipw.tables.partitions import Block, Blocks
from fedipw.tables.table import Table


def in_blocks(X: FloatArray, y: LabelArray, size: int, w: FloatArray | None = None) -> Blocks:
    return Blocks.of(
        [
            Block(
                X[k : k + size].T.copy(),
                y[k : k + size],
                np.empty(0) if w is None else w[k : k + size],
            )
            for k in range(0, len(X), size)
        ]
    )


def separates(X: FloatArray, y: LabelArray, columns: list[int]) -> bool:
    """Tell from one programme over all rows; whole numbers, so gains are 0 or far from it."""
    sign = 2.0 * y - 1.0
    signed = np.column_stack([X[:, columns], np.ones(len(X))]) * sign[:, None]
    found = linprog(-signed.sum(axis=0), A_ub=-signed, b_ub=np.zeros(len(X)), bounds=(-1.0, 1.0))
    assert found.fun is not None
    return bool(found.fun < -1e-6)


def independent(X: FloatArray) -> bool:
    return bool(np.linalg.matrix_rank(np.column_stack([X, np.ones(len(X))])) == X.shape[1] + 1)


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(4, 40),
    q=st.integers(1, 3),
    size=st.integers(3, 7),
    largest=st.integers(1, 6),
    noise=st.sampled_from([0.0, 0.0, 1.0, 3.0]),
    first=st.sampled_from([1, 2, 2_000]),
)
def test_blocks_agree_with_one_programme_on_all_rows(
    seed: int, n: int, q: int, size: int, largest: int, noise: float, first: int
) -> None:
    rng = np.random.default_rng(seed)
    X = rng.integers(-largest, largest + 1, (n, q)).astype(float)
    y = (X @ rng.integers(-2, 3, q) + noise * rng.normal(size=n) > 0.5).astype(np.int8)
    assume(0 < y.sum() < n)
    assume(independent(X))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(separation, "_FIRST", first)  # 8 or 16 rows in hand, or all
        patch.setattr(separation, "_WORST", 2)
        blamed = list(separating_columns(in_blocks(X, y, size), np.ones(q, dtype=np.bool_)))
    assert bool(blamed) == separates(X, y, list(range(q)))
    if blamed:
        assert separates(X, y, blamed)
        assert not any(separates(X, y, [j for j in blamed if j != left]) for left in blamed)


def test_the_working_set_of_the_test_above_is_really_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(separation, "_FIRST", 1)
    X, y = np.arange(40.0)[:, None], (np.arange(40) >= 20).astype(np.int8)
    blocks = in_blocks(X, y, 7)
    used = np.array([0])
    rows = blocks.reduced(lambda block: separation._extremes(block, used), separation._joined)
    assert len(rows.thinned().signed) < 40 == blocks.rows
    assert separating_columns(blocks, np.array([True])) == (0,)


def test_a_direction_no_row_in_hand_can_tell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The level stands in one row, which thinning leaves out: the rows in hand do not span it."""
    monkeypatch.setattr(separation, "_FIRST", 1)
    rng = np.random.default_rng(0)
    for place in range(40):
        X = np.column_stack([rng.integers(0, 3, 40), np.arange(40) == place]).astype(float)
        y = np.tile([0, 1], 20).astype(np.int8)
        if separates(X, y, [0]):
            continue
        assert separating_columns(in_blocks(X, y, 5), np.array([True, True])) == (1,)
        assert separating_columns(in_blocks(X, y, 5), np.array([True, False])) == ()


def test_rows_of_weight_zero_neither_separate_nor_save(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.arange(6.0)[:, None], np.array([0, 0, 0, 1, 1, 1], np.int8)
    mixed = np.array([0, 1, 0, 1, 1, 1], np.int8)
    kept = np.array([True])
    for first in (1, 2_000):
        monkeypatch.setattr(separation, "_FIRST", first)
        w = np.array([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
        assert separating_columns(in_blocks(x, mixed, 2), kept) == ()
        assert separating_columns(in_blocks(x, mixed, 2, w), kept) == (0,)
        assert separating_columns(in_blocks(x, y, 2, np.ones(6)), kept) == (0,)


# --- through the fit


def rare_level(n: int, rows: list[int], label: bool) -> pl.DataFrame:
    rng = np.random.default_rng(1)
    age = rng.normal(size=n)
    os_ = rng.choice(["ios", "web", "droid"], n).astype(object)
    os_[rows] = "zune"
    enrolled = rng.random(n) < 1.0 / (1.0 + np.exp(1.0 - age))
    enrolled[rows] = label
    return pl.DataFrame({"age": age, "os": pl.Series(os_.tolist()), "enrolled": enrolled})


@pytest.mark.parametrize("label", [True, False])
def test_a_rare_level_that_separates_is_named(tmp_path: Path, label: bool) -> None:
    path = tmp_path / "people.parquet"
    rare_level(200_000, [17, 60_000, 199_999], label).write_parquet(path)
    with pytest.raises(
        SeparationError, match=r"os\[zune\] separate\(s\) .* in 200000 rows"
    ) as caught:
        table_model(Table(path), "age + os")
    assert caught.value.columns == ("os[zune]",)
    penalised = table_model(
        Table(path), "age + os", settings=TableSettings(estimator=Newton(0.1))
    ).logistic()
    assert penalised.converged
    assert np.sign(penalised.coefficients[-1]) == (1.0 if label else -1.0)


def test_a_rare_level_outside_the_sample_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample does not know the level, so its column is not standardised."""
    monkeypatch.setattr("fedipw.selection.coded.SAMPLE_ROWS", 80)
    path = tmp_path / "people.parquet"
    frame = rare_level(20_000, [1_777], True)
    frame.write_parquet(path)
    assert "zune" not in Table(path).sample(80, ["os"])["os"]
    with pytest.raises(SeparationError) as caught:
        table_model(Table(path), "age + os")
    assert caught.value.columns == ("os[zune]",)


@pytest.mark.parametrize("others", [1e1, 1e3, 1e5, 1e7])
def test_one_row_in_a_hundred_million_separates_as_well_as_one_in_ten(others: float) -> None:
    """Weights stand for rows. A tolerance on the mean gradient alone would call it converged."""
    rng = np.random.default_rng(2)
    z = rng.normal(size=500)
    X = np.column_stack([z, np.arange(500) == 7])
    y = (rng.random(500) < 1.0 / (1.0 + np.exp(-z))).astype(np.int8)
    w = np.full(500, others)
    w[7] = 1.0
    assert logistic_fit(Blocks.of_arrays(X, y, w), ["z", "rare"]).separating == ("rare",)
    twice = np.vstack([X, X[7]]), np.append(y, 1 - y[7]).astype(np.int8), np.append(w, 1.0)
    fit = logistic_fit(Blocks.of_arrays(*twice), ["z", "rare"]).checked()
    inside = fit.prob(X[7:8].T)  # two rows, one of each kind
    assert inside[0] == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_no_false_alarm_where_log_odds_are_extreme_but_classes_overlap(seed: int) -> None:
    """Every row near the border has a partner of the other class at the same place."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(6_000, 3))
    u = X @ np.array([12.0, -9.0, 4.0])
    y = (rng.random(6_000) < 1.0 / (1.0 + np.exp(-u))).astype(np.int8)
    near = np.argsort(np.abs(u))[:8]
    X, y = np.vstack([X, X[near]]), np.append(y, 1 - y[near]).astype(np.int8)
    assert not separates(X, y, [0, 1, 2])
    fit = logistic_fit(in_blocks(X, y, 700), list("abc")).checked()
    assert np.abs(fit.log_odds(X.T)).max() > 15.0
    residual = y - fit.prob(X.T)
    np.testing.assert_allclose(X.T @ residual, 0.0, atol=1e-8)  # a maximum, not a long way off


def test_the_search_needs_no_square_of_its_rows() -> None:
    """Rows in hand are thousands: a square of them would take gigabytes."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40_000, 3))
    y = (rng.random(len(X)) < 0.5).astype(np.int8)
    X[:, 2] = 0.0
    X[np.flatnonzero(y == 0)[:40], 2] = 1.0  # a level that is never selected
    blocks = in_blocks(X, y, 400)
    tracemalloc.start()
    try:
        assert separating_columns(blocks, np.ones(3, dtype=np.bool_)) == (2,)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20
