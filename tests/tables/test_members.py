"""The enrolled clients: found by identifier, present between the moments the table names."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.tables.population import Members


def members(ids: list[object], **more: object) -> Members:
    return Members(pl.DataFrame({"unit_id": ids, **more}))


@settings(max_examples=60)
@given(
    ids=st.lists(st.integers(-50, 10**12), min_size=1, max_size=30, unique=True),
    chosen=st.lists(st.integers(0, 10**6), max_size=40),
    ours_is_text=st.booleans(),
    theirs_is_text=st.booleans(),
)
def test_clients_are_found_in_the_order_asked_for(
    ids: list[int], chosen: list[int], ours_is_text: bool, theirs_is_text: bool
) -> None:
    """Numbers and their text are the same, in either direction; asking twice is allowed."""
    places = [k % len(ids) for k in chosen]
    ours = pl.Series(ids, dtype=pl.Int64)
    theirs = pl.Series([ids[k] for k in places], dtype=pl.Int64)
    table = Members(pl.DataFrame({"unit_id": ours.cast(pl.String) if ours_is_text else ours}))
    rows = table.rows_of(theirs.cast(pl.String) if theirs_is_text else theirs, "round 1")
    assert rows.dtype == np.int64
    assert rows.tolist() == places


@pytest.mark.parametrize("kind", [pl.Int8, pl.UInt16, pl.Int32, pl.UInt64])
def test_whole_numbers_of_any_width_are_the_same(kind: pl.DataType) -> None:
    table = members([3, 1, 2])
    assert table.rows_of(pl.Series([1, 3], dtype=kind), "round 1").tolist() == [1, 0]
    narrow = Members(table.frame.cast({"unit_id": kind}))
    assert narrow.rows_of(pl.Series([2, 3]), "round 1").tolist() == [2, 0]


@pytest.mark.parametrize(
    ("ours", "theirs", "strange"),
    [
        (["a", "b"], ["a", "x", "b", "y"], r"2 client\(s\) .*: x, y\."),
        (["a", "b"], ["a", None], r"1 client\(s\) .*: None\."),
        ([1, 2], [2, 7], r"1 client\(s\) .*: 7\."),
        ([1, 2], ["2", "two"], r"1 client\(s\) .*: two\."),
        ([1, 2], ["1", "01", " 1", "1.0", "+1"], r"4 client\(s\) .*: 01,  1, 1.0, \+1\."),
        (["1", "01"], [1, 2], r"1 client\(s\) .*: 2\."),
        (list(range(9)), list(range(7, 20)), "11 .* 9, 10, 11, 12, 13 and 6 more"),
    ],
)
def test_who_is_not_enrolled_is_named(
    ours: list[object], theirs: list[object], strange: str
) -> None:
    with pytest.raises(InputError, match=f"round-000004: {strange}"):
        members(ours).rows_of(pl.Series(theirs), "round-000004")


def test_a_number_too_large_for_the_table_is_nobody() -> None:
    table = Members(pl.DataFrame({"unit_id": pl.Series([1, 2], dtype=pl.UInt8)}))
    with pytest.raises(InputError, match=r"2 client\(s\) are not enrolled .*: 300, -1\."):
        table.rows_of(pl.Series([1, 300, -1]), "round 1")


@pytest.mark.parametrize("ids", [[1.0, 2.0], [True, False], [date(2024, 1, 1)] * 2])
def test_identifiers_of_another_kind_are_refused(ids: list[object]) -> None:
    theirs = pl.Series(ids)
    with pytest.raises(InputError, match=f"round 1: unit_id is {theirs.dtype}, in .* it is String"):
        members(["a", "b"]).rows_of(theirs, "round 1")


# --- who is a member


def test_tables_that_name_no_clients() -> None:
    with pytest.raises(InputError, match="no 'unit_id' column; it has id, age"):
        Members(pl.DataFrame({"id": [1], "age": [2]}))
    with pytest.raises(InputError, match="No client is enrolled"):
        Members(pl.DataFrame({"unit_id": []}, schema={"unit_id": pl.String}))
    with pytest.raises(InputError, match="2 enrolled clients have no unit_id"):
        members(["a", None, None])
    with pytest.raises(InputError, match=r"2 enrolled client\(s\) stand more than once: b, a\."):
        members(["b", "a", "c", "b", "a", "b"])


def test_what_is_known_of_members() -> None:
    table = members(
        ["a", "b"], age=[30, 61], enrolled=[True, True], enrolled_from=[1, None], os=["x", "y"]
    )
    assert (table.size, table.covariates, table.changes) == (2, ("age", "os"), True)
    assert not members(["a"], age=[30]).changes
    assert members(["a"], enrolled_until=[4]).changes
    assert members(["a", "b"]).present(7).tolist() == [True, True]


# --- since when


@settings(max_examples=60)
@given(
    limits=st.lists(
        st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
        min_size=1,
        max_size=12,
    ),
    kind=st.sampled_from(["round", "date", "time", "zone"]),
)
def test_presence_is_from_the_first_moment_to_before_the_last(
    limits: list[tuple[int | None, int | None]], kind: str
) -> None:
    """Joins in the moment it names, is gone in the moment it leaves; null is no limit."""
    zone = UTC if kind == "zone" else None

    def moment(k: int | None) -> object:
        if kind == "round" or k is None:
            return k
        if kind == "date":
            return date(2024, 2, 25) + timedelta(days=k)
        return datetime(2024, 2, 28, 20, tzinfo=zone) + timedelta(hours=k)

    types: dict[str, pl.DataType] = {
        "round": pl.Int64(),
        "date": pl.Date(),
        "time": pl.Datetime("us"),
        "zone": pl.Datetime("ms", "UTC"),
    }
    table = members(
        list(range(len(limits))),
        enrolled_from=pl.Series([moment(a) for a, _ in limits], dtype=types[kind]),
        enrolled_until=pl.Series([moment(b) for _, b in limits], dtype=types[kind]),
    )
    for k in range(10):
        opened = None if kind == "round" else moment(k)
        assert opened is None or isinstance(opened, date)
        expected = [(a is None or a <= k) and (b is None or k < b) for a, b in limits]
        assert table.present(k, opened).tolist() == expected


def test_a_date_is_its_first_moment() -> None:
    table = members(["a", "b"], enrolled_from=[date(2024, 3, 1), date(2024, 3, 2)])
    for opened in (date(2024, 3, 1), datetime(2024, 3, 1, 0, 0), datetime(2024, 3, 1, 23, 59)):
        assert table.present(1, opened).tolist() == [True, False]
    last = members(["a", "b"], enrolled_until=[date(2024, 3, 1), date(2024, 3, 2)])
    assert last.present(1, datetime(2024, 3, 1, 0, 0)).tolist() == [False, True]
    assert last.present(1, datetime(2024, 2, 29, 23, 59)).tolist() == [True, True]
    exact = members(["a", "b"], enrolled_from=[datetime(2024, 3, 1), datetime(2024, 3, 1, 0, 1)])
    assert exact.present(1, date(2024, 3, 1)).tolist() == [True, False]


def test_one_limit_may_count_rounds_and_the_other_days() -> None:
    table = members(["a", "b"], enrolled_from=[2, None], enrolled_until=[None, date(2024, 3, 1)])
    assert table.present(1, date(2024, 2, 1)).tolist() == [False, True]
    assert table.present(2, date(2024, 3, 1)).tolist() == [True, False]


def test_columns_of_nulls_limit_nothing() -> None:
    table = members(["a", "b"], enrolled_from=[None, None], enrolled_until=[None, None])
    assert table.present(3).tolist() == [True, True]


def test_dates_need_the_moment_a_round_opened() -> None:
    table = members(["a"], enrolled_from=[date(2024, 3, 1)])
    with pytest.raises(InputError, match=r"'enrolled_from' holds Date: round 5 .* 'opened_at'"):
        table.present(5)


def test_times_of_another_kind_are_an_error_that_names_both() -> None:
    aware = members(["a"], enrolled_until=[datetime(2024, 3, 1, tzinfo=UTC)])
    with pytest.raises(InputError, match=r"'enrolled_until' holds Datetime.*UTC.* round 5: give"):
        aware.present(5, datetime(2024, 3, 1))


@pytest.mark.parametrize("values", [["2024-03-01"], [1.5], [True]])
def test_limits_that_are_neither_rounds_nor_dates_are_refused(values: list[object]) -> None:
    for name in ("enrolled_from", "enrolled_until"):
        with pytest.raises(InputError, match=f"'{name}' must hold round numbers or dates, not"):
            members(["a"], **{name: values})
