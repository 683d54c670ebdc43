"""Designs where values are missing, and what holds of every design."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.tables.design import Design, Missing, bound_design
from fedipw.tables.formula import term_matrix

NAN = float("nan")
PEOPLE = pl.DataFrame({"age": [20.0, 40.0], "os": ["ios", "android"], "rooms": [1, 2]})
GAPS = pl.DataFrame(
    {
        "age": [20.0, None, 60.0, NAN, 30.0],
        "rooms": [1, 2, 3, 4, 5],
        "os": ["ios", "android", None, "ios", "ios"],
        "new": [True, None, False, True, True],
    }
)


def bound(
    formula: str,
    frame: pl.DataFrame = PEOPLE,
    missing: Missing = Missing.ERROR,
    lump_below: float | None = None,
) -> Design:
    return bound_design(
        formula, frame.lazy(), frame.columns, missing=missing, lump_below=lump_below, where="people"
    )


# Missing values


def test_missing_values_are_an_error_unless_said_otherwise() -> None:
    message = r"people: missing values in 'age' \(2 of 5 rows\), 'os' \(1 of 5 rows\)\. Choose Miss"
    with pytest.raises(InputError, match=message):
        bound("age + os", GAPS)
    whole = GAPS.drop_nulls().filter(pl.col("age").is_not_nan())
    design = bound("age + os", whole.vstack(whole.with_columns(os=pl.lit("android"))))
    message = r"later: 'age' is missing in 2 of 5 rows \(row 1, 3\)\. Choose Missing.INDICATOR"
    with pytest.raises(InputError, match=message):
        design.rows(GAPS, "later")


def test_indicators_fill_numbers_once_and_give_categories_a_level() -> None:
    design = bound("age + age**2 + ns(age, 20, 60) + age:os + new + rooms", GAPS, Missing.INDICATOR)
    assert design.fills == {"age": 30.0, "new": 1.0}
    assert design.levels == {"os": ("android", "ios", "(missing)")}
    rows = design.rows(GAPS, "people")
    expected = {
        "age": [20, 30, 60, 30, 30],
        "age**2": [400, 900, 3600, 900, 900],
        "ns(age, 20, 60)[1]": [0, 0.25, 1, 0.25, 0.25],
        "age:os[ios]": [20, 0, 0, 30, 30],
        "age:os[(missing)]": [0, 0, 60, 0, 0],
        "new": [1, 1, 0, 1, 1],
        "rooms": [1, 2, 3, 4, 5],
        "age[missing]": [0, 1, 0, 1, 0],
        "new[missing]": [0, 1, 0, 0, 0],
    }
    assert design.names == tuple(expected)
    np.testing.assert_array_equal(rows.columns, np.array(list(expected.values()), dtype=float))
    assert rows.kept is None
    assert rows.missing == {"age": 2, "os": 1, "new": 1}


def test_every_column_of_a_design_is_one_expression_over_the_raw_table() -> None:
    design = bound("age*os + C(new) + rooms[2] + new", GAPS, Missing.INDICATOR)
    np.testing.assert_array_equal(
        term_matrix(design.terms, GAPS).T, design.rows(GAPS, "people").columns
    )


def test_a_number_that_is_also_a_category_is_marked_once() -> None:
    frame = pl.DataFrame({"x": [1.0, 2.0, None, NAN]})
    design = bound("x + C(x)", frame, Missing.INDICATOR)
    assert design.names == ("x", "x[2]", "x[(missing)]")
    np.testing.assert_array_equal(
        design.rows(frame, "people").columns, [[1, 2, 1.5, 1.5], [0, 1, 0, 0], [0, 0, 1, 1]]
    )
    assert bound("x + x[missing]", frame, Missing.INDICATOR).names == ("x", "x[missing]")
    assert (
        bound("C(x):x[(missing)]", frame, Missing.INDICATOR).names
        == ("x[(missing)]", "x[missing]")[:1]
    )


def test_a_level_of_a_number_is_not_what_fills_it() -> None:
    frame = pl.DataFrame({"x": [2, 2, 3, None]})
    design = bound("x[2]", frame, Missing.INDICATOR)
    assert design.names == ("x[2]", "x[missing]")
    np.testing.assert_array_equal(
        design.rows(frame, "people").columns, [[1, 1, 0, 0], [0, 0, 0, 1]]
    )


def test_a_column_may_be_asked_only_whether_it_is_missing() -> None:
    design = bound("age[missing] + rooms", GAPS)
    rows = design.rows(GAPS, "people")
    np.testing.assert_array_equal(rows.columns, [[0, 1, 0, 1, 0], [1, 2, 3, 4, 5]])
    assert rows.missing == {}


def test_indicators_of_values_that_were_never_missing_are_refused() -> None:
    design = bound("rooms + age", GAPS, Missing.INDICATOR)
    later = GAPS.with_columns(rooms=pl.Series([1, None, 3, 4, 5]))
    message = r"later: 'rooms' is missing in 1 of 5 rows \(row 1\)\. It had no missing values when"
    with pytest.raises(InputError, match=message):
        design.rows(later, "later")
    design = bound("os", PEOPLE, Missing.INDICATOR)
    with pytest.raises(InputError, match=r"'os' is missing in 1 of 5 rows.*It had no missing"):
        design.rows(GAPS, "later")


def test_dropped_rows_are_left_out_and_counted() -> None:
    design = bound("age + os + rooms", GAPS, Missing.DROP)
    rows = design.rows(GAPS, "people")
    assert rows.kept is not None
    assert rows.kept.tolist() == [True, False, False, False, True]
    assert rows.missing == {"age": 2, "os": 1}
    np.testing.assert_array_equal(rows.columns, [[20, 30], [1, 1], [1, 5]])
    nothing = design.rows(GAPS[1:2], "one batch")
    assert nothing.columns.shape == (3, 0)


def test_a_table_of_which_no_row_is_whole_is_refused() -> None:
    frame = pl.DataFrame({"a": [1.0, None], "b": [None, 1.0]})
    with pytest.raises(
        InputError, match=r"every row has a missing value: 'a' \(1 of 2 rows\), 'b'"
    ):
        bound("a + b", frame, Missing.DROP)
    assert bound("a + b", frame, Missing.INDICATOR).fills == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("missing", Missing)
@pytest.mark.parametrize("kind", [pl.Float64, pl.String, pl.Null, pl.Boolean])
def test_columns_of_nothing_are_refused(missing: Missing, kind: pl.DataType) -> None:
    frame = PEOPLE.with_columns(gone=pl.lit(None, dtype=kind))
    with pytest.raises(InputError, match="people: every row of 'gone' is missing"):
        bound("age + gone", frame, missing)


@pytest.mark.parametrize("kind", [pl.Null, pl.String, pl.Float64])
def test_a_later_table_may_have_a_column_of_nothing_of_any_type(kind: pl.DataType) -> None:
    design = bound("age + os + new", GAPS, Missing.INDICATOR)
    later = GAPS.head(2).with_columns(pl.lit(None, dtype=kind).alias(c) for c in design.columns)
    rows = design.rows(later, "later")
    assert dict(zip(design.names, rows.columns[:, 0].tolist(), strict=True)) == {
        "age": 30.0,
        "os[ios]": 0.0,
        "os[(missing)]": 1.0,
        "new": 1.0,
        "age[missing]": 1.0,
        "new[missing]": 1.0,
    }


def test_a_table_without_rows() -> None:
    with pytest.raises(InputError, match="people has no rows"):
        bound("age", PEOPLE.clear())
    design = bound("age + os + C(rooms)")
    assert design.rows(PEOPLE.clear(), "later").columns.shape == (3, 0)


@pytest.mark.parametrize("missing", Missing)
def test_infinite_values_are_always_an_error(missing: Missing) -> None:
    frame = pl.DataFrame({"x": [1.0, math.inf, None]})
    with pytest.raises(InputError, match=r"people: infinite values in 'x' \(1 of 3 rows\)"):
        bound("x", frame, missing)
    design = bound("x", pl.DataFrame({"x": [1.0, 2.0]}), missing)
    with pytest.raises(InputError, match="later: 'x' is infinite in 1 of 3 rows, first in row 1"):
        design.rows(frame, "later")
    both = pl.DataFrame({"x": [math.inf, -math.inf]})
    with pytest.raises(InputError, match="'x' is infinite in 2 of 2 rows"):
        design.rows(both, "later")


def test_numbers_that_leave_the_range_are_an_error_and_large_sums_are_not() -> None:
    big = pl.DataFrame({"x": [1e100, 1e100]})
    rows = bound("x + x:x - x:x + new:x", big.with_columns(new=True)).rows(
        big.with_columns(new=True), "people"
    )
    np.testing.assert_array_equal(rows.columns, [[1e100, 1e100], [1e100, 1e100]])
    with pytest.raises(
        InputError, match=r"people: x\*\*2 is beyond the range of numbers in 2 of 2"
    ):
        bound("x**2", big).rows(big, "people")
    huge = pl.DataFrame({"x": [1e101, 1.0]})
    with pytest.raises(InputError, match=r"people: 'x' holds 1e\+101, beyond 1e\+100"):
        bound("x", huge).rows(huge, "people")


def test_unknown_levels_count_as_missing_where_that_is_a_level() -> None:
    design = bound("os", GAPS, Missing.INDICATOR)
    later = pl.DataFrame({"os": ["web", "ios", None]})
    rows = design.rows(later, "later")
    np.testing.assert_array_equal(rows.columns, [[0, 1, 0], [1, 0, 1]])
    assert (rows.missing, rows.unseen) == ({"os": 2}, {"os": ("web",)})


# Files, memory and JSON


def test_tables_on_disk_are_read_where_they_lie(tmp_path: Path) -> None:
    GAPS.write_parquet(tmp_path / "people.parquet")
    there = pl.scan_parquet(tmp_path / "people.parquet")
    design = bound_design("age*os", there, GAPS.columns, missing=Missing.INDICATOR)
    assert design == bound("age*os", GAPS, Missing.INDICATOR)


@pytest.mark.parametrize("missing", [Missing.INDICATOR, Missing.DROP])
def test_designs_survive_json_and_pickle(missing: Missing) -> None:
    formula = "age*os + ns(rooms, 1, 2.1, 0.1e2) + C(rooms) + new[yes] + age**2"
    design = bound(formula, GAPS, missing, lump_below=0.3)
    again = Design.from_json(json.loads(json.dumps(design.to_json())))
    assert again == design == pickle.loads(pickle.dumps(design))
    np.testing.assert_array_equal(
        again.rows(GAPS, "people").columns, design.rows(GAPS, "people").columns
    )


@pytest.mark.parametrize(
    "change",
    [
        {"terms": None},
        {"missing": "maybe"},
        {"levels": []},
        {"terms": [{"name": "x", "factors": [{"shape": 1}]}]},
    ],
)
def test_json_of_something_else_is_refused(change: dict[str, object]) -> None:
    written = bound("age").to_json() | change
    with pytest.raises(InputError, match="This is no design as written by to_json"):
        Design.from_json(written)
    with pytest.raises(InputError, match="Field required"):
        Design.from_json({})


# Properties

LEVEL = st.text(alphabet="ab[]():` é", max_size=3)
TABLES = st.integers(1, 12).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "x": st.lists(
                st.none() | st.just(NAN) | st.floats(-1e6, 1e6, width=32), min_size=n, max_size=n
            ),
            "k": st.lists(st.none() | st.integers(-3, 3), min_size=n, max_size=n),
            "t": st.lists(st.none() | LEVEL, min_size=n, max_size=n),
            "f": st.lists(st.none() | st.booleans(), min_size=n, max_size=n),
        }
    )
)
SCHEMA = {"x": pl.Float64, "k": pl.Int64, "t": pl.String, "f": pl.Boolean}
FORMULA = "x*t + x**3 + C(k) + f + ns(x, -10, 0, 5, 100) + k**2:C(f)"


def some_design(
    columns: dict[str, list[object]], missing: Missing, lump_below: float | None
) -> tuple[pl.DataFrame, Design | None]:
    frame = pl.DataFrame(columns, schema=SCHEMA)
    try:
        return frame, bound(FORMULA, frame, missing, lump_below)
    except InputError:  # too much is missing
        return frame, None


POLICIES = st.sampled_from(Missing)
SHARES = st.none() | st.sampled_from([0.2, 0.5])


@settings(max_examples=150)
@given(TABLES, POLICIES, SHARES)
def test_levels_of_a_design_on_its_own_table_exclude_each_other(
    columns: dict[str, list[object]], missing: Missing, lump_below: float | None
) -> None:
    frame, design = some_design(columns, missing, lump_below)
    if design is None:
        return
    rows = design.rows(frame, "people")
    assert rows.columns.shape[0] == len(design.names) == len(set(design.names))
    assert rows.unseen == {}
    assert np.isfinite(rows.columns).all()
    for column, levels in design.levels.items():
        mine = [
            j for j, t in enumerate(design.terms) if t.level is not None and t.level[0] == column
        ]
        assert len(mine) == (0 if column == "f" else len(levels) - 1)  # f: in a product
        total = rows.columns[mine].sum(axis=0)
        assert np.isin(total, [0.0, 1.0]).all()
    if rows.kept is not None:
        assert rows.kept.sum() == rows.columns.shape[1] < frame.height


@settings(max_examples=100)
@given(TABLES, POLICIES, SHARES)
def test_json_changes_no_column(
    columns: dict[str, list[object]], missing: Missing, lump_below: float | None
) -> None:
    frame, design = some_design(columns, missing, lump_below)
    if design is None:
        return
    again = Design.from_json(json.loads(json.dumps(design.to_json())))
    assert again == design
    np.testing.assert_array_equal(
        again.rows(frame, "people").columns, design.rows(frame, "people").columns
    )


@settings(max_examples=100)
@given(TABLES, POLICIES, SHARES, st.randoms(use_true_random=False), st.integers(0, 12))
def test_order_and_batches_change_no_column(
    columns: dict[str, list[object]],
    missing: Missing,
    lump_below: float | None,
    random: object,
    cut: int,
) -> None:
    frame, design = some_design(columns, missing, lump_below)
    if design is None:
        return
    whole = design.rows(frame, "people")
    parts = [design.rows(f, "batch").columns for f in (frame[:cut], frame[cut:])]
    np.testing.assert_array_equal(np.hstack(parts), whole.columns)
    order = list(range(frame.height))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = frame[order]
    assert bound(FORMULA, shuffled, missing, lump_below) == design
    turned = design.rows(shuffled, "shuffled")
    kept = [i for i in order if whole.kept is None or whole.kept[i]]
    place = np.cumsum(np.ones(frame.height) if whole.kept is None else whole.kept).astype(int) - 1
    np.testing.assert_array_equal(turned.columns, whole.columns[:, place[kept]])
