"""Cells of a column: levels as they are, numbers in fifths, missing values apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.tables.cells import FEW, Cells


def cut(column: pl.Series, cells: Cells | None = None) -> list[str]:
    chosen = Cells.of(column) if cells is None else cells
    return column.to_frame().select(chosen.expression().alias("part"))["part"].to_list()


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["b", None, "a"], ["b", "(missing)", "a"]),
        ([True, False, None], ["true", "false", "(missing)"]),
        ([3, 1, None], ["3", "1", "(missing)"]),
        ([1.5, math.nan, None, 2.0], ["1.5", "(missing)", "(missing)", "2.0"]),
    ],
    ids=["text", "flags", "whole numbers", "floats"],
)
def test_few_values_are_levels_and_missing_ones_a_level_of_their_own(
    values: list[Any], names: list[str]
) -> None:
    cells = Cells.of(pl.Series("x", values))
    assert cells.is_category
    assert cut(pl.Series("x", values)) == names
    assert cells.named(names[0]) == f"x = {names[0]}"


def test_a_number_with_many_values_is_cut_into_fifths() -> None:
    column = pl.Series("age", np.random.default_rng(1).permutation(1000).astype(float))
    parts = pl.Series(cut(column)).value_counts()
    assert set(parts["count"]) <= {199, 200, 201}
    assert parts.height == 5
    cells = Cells.of(column)
    assert not cells.is_category
    assert cells.named("(0, 1]") == "age in (0, 1]"


def test_the_border_between_levels_and_fifths() -> None:
    assert Cells.of(pl.Series("x", list(range(FEW)))).is_category
    assert not Cells.of(pl.Series("x", list(range(FEW + 1)))).is_category
    assert Cells.of(pl.Series("x", [str(k) for k in range(100)])).is_category


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.none() | st.just(math.nan), min_size=1, max_size=60)
)
def test_each_value_lies_in_the_range_that_names_it(values: list[float | None]) -> None:
    column = pl.Series("x", values, dtype=pl.Float64)
    cells = Cells.of(column)
    for value, part in zip(values, cut(column), strict=True):
        if value is None or math.isnan(value):
            assert part == "(missing)"
        elif cells.edges is not None:
            low, high = (float(end) for end in part.strip("(]").split(", "))
            near = 1e-5 * max(1.0, abs(value))  # names are rounded
            assert low - near <= value <= high + near


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), start=st.sampled_from([0.0, 1.7e9, -3e12]))
def test_cells_are_as_many_as_the_edges_tell_apart(seed: int, start: float) -> None:
    # times in seconds differ in digits that a short name would not show
    values = start + np.random.default_rng(seed).integers(0, 500, 400)
    column = pl.Series("t", values)
    cells = Cells.of(column)
    assert cells.edges is not None
    ranges = 1 + np.searchsorted(cells.edges, np.unique(values)).max()
    parts = cut(column)
    assert len(set(parts)) == len(np.unique(np.searchsorted(cells.edges, values))) <= ranges
    order = cells.ordered(set(parts))
    means = [values[np.array(parts) == part].mean() for part in order]
    assert means == sorted(means)


def test_cells_are_ordered_by_number_by_name_and_missing_last() -> None:
    levels = Cells.of(pl.Series("os", ["web", None, "ios"]))
    assert levels.ordered(["web", "(missing)", "ios"]) == ["ios", "web", "(missing)"]
    column = pl.Series("x", [*(float(k) for k in range(-50, 50)), None])
    numbers = Cells.of(column)
    ordered = numbers.ordered(set(cut(column)))
    assert ordered[0].startswith("(-inf")
    assert ordered[-2].endswith("inf]")
    assert ordered[-1] == "(missing)"


def test_rows_beyond_the_sample_fall_into_its_cells() -> None:
    cells = Cells.of(pl.Series("x", list(range(100))))
    assert cut(pl.Series("x", [-1000, 1000]), cells) == [
        cells.ordered(cut(pl.Series("x", [0]), cells))[0],
        cut(pl.Series("x", [99]), cells)[0],
    ]
