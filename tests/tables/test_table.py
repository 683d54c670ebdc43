"""Tables: read lazily and in order, and refused by name where they are damaged."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from fedipw.errors import InputError
from fedipw.tables.table import Slice, Table, read_table, rows_of, write_table

ParquetCompression = Literal["zstd", "uncompressed"]


def people(n: int = 1000, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "unit_id": [f"c{k}" for k in range(n)],
            "age": rng.normal(40.0, 9.0, n),
            "os": rng.choice(["ios", "android", "web"], n),
            "enrolled": rng.random(n) < 0.4,
        }
    )


def in_parts(frame: pl.DataFrame, folder: Path, sizes: list[int]) -> Table:
    folder.mkdir(parents=True)
    start = 0
    for k, size in enumerate(sizes):
        frame.slice(start, size).write_parquet(folder / f"part-{k:03d}.parquet")
        start += size
    return Table(folder)


class Speaks:
    """A frame of some library that is known by its Arrow stream alone."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._frame.__arrow_c_stream__(requested_schema)


def in_pandas(frame: pl.DataFrame) -> Any:
    return pd.DataFrame(frame.to_dict(as_series=False))


FRAMES: dict[str, Callable[[pl.DataFrame], Any]] = {
    "frame": lambda frame: frame,
    "chunks": lambda frame: pl.concat([frame[:333], frame[333:]], rechunk=False),
    "query": pl.DataFrame.lazy,
    "pandas": in_pandas,
    "arrow": Speaks,
}
SUFFIXES = [".parquet", ".csv", ".csv.gz", ".tsv", ".feather", ".CSV"]


@pytest.fixture(params=["groups", "parts", *SUFFIXES, *FRAMES])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    if request.param == "parts":
        return in_parts(people(), tmp_path / "people", [400, 0, 1, 599])
    if request.param in FRAMES:
        return Table(FRAMES[request.param](people()))
    if request.param == "groups":
        people().write_parquet(tmp_path / "groups.parquet", row_group_size=300)
        return Table(tmp_path / "groups.parquet")
    path = tmp_path / f"people[1]{request.param}"
    write_table(people(), str(path))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    return Table(str(path))


def test_rows_columns_and_types(table: Table) -> None:
    assert table.rows == 1000
    assert table.schema == people().schema
    assert_frame_equal(table.collect(table.scan()), people())


@pytest.mark.parametrize("rows", [1, 7, 250, 1000, 5000])
def test_batches_are_the_rows_in_order(table: Table, rows: int) -> None:
    got = list(table.batches(rows=rows))
    assert max(batch.height for batch in got) <= rows
    assert_frame_equal(pl.concat(got), people())


def test_batches_of_some_columns(table: Table) -> None:
    some = pl.concat(list(table.batches(["os", "unit_id"], rows=100)))
    assert_frame_equal(some, people().select("os", "unit_id"))
    with pytest.raises(InputError, match=r"has no column 'height'; it has unit_id, age, os"):
        next(table.batches(["os", "height"]))


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5), rows=st.integers(1, 50))
def test_slices_cover_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], rows: int
) -> None:
    frame = people(sum(sizes))
    table = in_parts(frame, tmp_path_factory.mktemp("slices") / "people", sizes)
    slices = table.slices(rows)
    assert all(0 < part.rows <= rows for part in slices)
    start = 0
    for part in slices:
        assert part.start == start
        got = rows_of(part, frame.columns)
        assert_frame_equal(got, frame.slice(start, part.rows))
        start += part.rows
    assert start == frame.height


def test_slices_of_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    people(10).write_csv(path)
    assert Table(path).slices(4) == (
        Slice(path, 0, 4, 0),
        Slice(path, 4, 4, 4),
        Slice(path, 8, 2, 8),
    )
    got = rows_of(Slice(path, 4, 4, 4), ["unit_id", "enrolled"])
    assert_frame_equal(got, people(10).slice(4, 4).select("unit_id", "enrolled"))


@pytest.mark.parametrize(("rows", "height"), [(5000, 1000), (1000, 1000), (80, 80), (83, 80)])
def test_a_sample_is_spread_over_the_table(table: Table, rows: int, height: int) -> None:
    got = table.sample(rows, ["unit_id"])["unit_id"].str.strip_prefix("c").cast(pl.Int64)
    assert len(got) == height
    assert got.n_unique() == height
    assert got.is_sorted()
    assert (got[0], got[-1]) == (0, 999)
    assert got.diff().max() in range(1, 1000 // 7 + 1)  # runs at even distances


def test_a_sample_of_very_few_rows_is_not_empty(table: Table) -> None:
    assert 1 <= table.sample(3, ["age"]).height <= 8


# --- frames


def test_a_frame_is_not_copied() -> None:
    frame = people().with_columns(enrolled=pl.col("enrolled").cast(pl.Int64))
    table = Table(frame)
    assert table.schema["enrolled"] == pl.Boolean
    (whole,) = table.batches(["age"])
    second = list(table.batches(["age"], rows=400))[1]
    for got, start in ((table.collect(), 0), (whole, 0), (second, 400)):
        there = frame["age"].to_numpy()[start:].__array_interface__["data"]
        assert got["age"].to_numpy().__array_interface__["data"] == there


@pytest.mark.parametrize("kind", FRAMES)
def test_flags_of_a_frame_are_checked(kind: str) -> None:
    flags = pl.DataFrame({"unit_id": [1, 2, 3], "enrolled": ["yes", "No", None]})
    assert read_table(FRAMES[kind](flags))["enrolled"].to_list() == [True, False, None]
    odd = FRAMES[kind](flags.with_columns(enrolled=pl.lit("maybe")))
    with pytest.raises(InputError, match="the table given: 'enrolled' holds 'maybe'"):
        read_table(odd)


def test_missing_values_of_pandas_are_missing() -> None:
    frame = pd.DataFrame(
        {
            "x": [1.0, float("nan")],
            "os": ["ios", None],
            "n": pd.array([None, 2], dtype="Int64"),
            "kind": pd.Categorical(["u", None]),
            "day": pd.to_datetime(["2026-01-01", None]),
        }
    )
    got = read_table(frame)
    assert got["x"].to_list() == [1.0, None]
    assert got["os"].to_list() == ["ios", None]
    assert got["n"].to_list() == [None, 2]
    assert got["kind"].cast(pl.String).to_list() == ["u", None]
    assert got["day"].to_list() == [datetime(2026, 1, 1), None]
    with pytest.raises(InputError, match="The DataFrame given cannot be read"):
        Table(pd.DataFrame({"x": ["a", 1]}))


def test_a_frame_is_named_in_errors() -> None:
    table = Table(people(3))
    assert (table.name, table.path) == ("the table given", None)
    with pytest.raises(InputError, match="the table given has no column 'height'"):
        table.require(["height"])
    with pytest.raises(InputError, match="write it to a file"):
        table.slices(5)
    broken = people(3).lazy().with_columns(pl.col("os").cast(pl.Int64))
    with pytest.raises(InputError, match="the table given cannot be read: "):
        list(Table(broken).batches())


@pytest.mark.parametrize("source", [None, 3, ["a.csv"], {"x": [1]}, b"a.csv"])
def test_what_is_no_table_is_told_what_is(source: Any) -> None:
    kind = type(source).__name__
    with pytest.raises(InputError, match=rf"A table is a path .* or a frame .*, not {kind}\."):
        Table(source)


def test_tables_load_neither_compiler_nor_learners() -> None:
    program = (
        "import sys, fedipw.tables.table\n"
        "print([m for m in ('numba', 'sklearn', 'scipy', 'flwr') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout.decode().strip() == "[]"


def test_equal_tables_are_equal_files(tmp_path: Path) -> None:
    for suffix in SUFFIXES[:-1]:
        one, other = tmp_path / f"one{suffix}", tmp_path / f"other{suffix}"
        write_table(people(50), one)
        write_table(people(50).lazy(), other)
        assert one.read_bytes() == other.read_bytes()


# --- what a table may not be


def test_paths_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "data.csv").write_text("unit_id\na\n")
    for name, message in [
        ("notes.txt", "notes.txt: tables are .parquet, .csv"),
        ("none.csv", "No file .*none.csv"),
        ("none.parquet", "No file .*none.parquet"),
        ("empty", "empty holds no .parquet file"),
    ]:
        with pytest.raises(InputError, match=message):
            _ = Table(tmp_path / name).rows


@pytest.mark.parametrize("name", ["people.parquet", "people.csv"])
def test_an_empty_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=f"{name} is not a readable"):
        _ = Table(tmp_path / name).schema


def test_text_is_no_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "people.parquet"
    path.write_text("unit_id,age\na,30\n" * 100)
    with pytest.raises(InputError, match=r"people.parquet is not a readable parquet table"):
        _ = Table(path).rows


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("parts", [False, True])
def test_a_file_cut_short_is_named(tmp_path: Path, kept: float, parts: bool) -> None:
    path = tmp_path / "people" / "part-001.parquet"
    in_parts(people(), path.parent, [500, 500])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    table = Table(path.parent if parts else path)
    for ask in (
        lambda: table.rows,
        lambda: table.schema,
        lambda: list(table.batches()),
        lambda: table.sample(10, ["age"]),
    ):
        with pytest.raises(InputError, match=r"part-001\.parquet is not a readable parquet table"):
            ask()


@pytest.mark.parametrize("last", [1, 4, 8, 60])
def test_a_footer_cut_short_is_named(tmp_path: Path, last: int) -> None:
    path = tmp_path / "people.parquet"
    people().write_parquet(path)
    path.write_bytes(path.read_bytes()[:-last])
    with pytest.raises(InputError, match=r"people.parquet is not a readable parquet table"):
        list(Table(path).batches())


@pytest.mark.parametrize(
    ("columns", "compression", "hole", "step"),
    [
        (["unit_id", "age", "os", "enrolled"], "zstd", 500, 9001),
        (["unit_id", "age", "os", "enrolled"], "uncompressed", 500, 9001),
        (["enrolled"], "uncompressed", 30, 31),
    ],
)
def test_a_file_damaged_inside_never_yields_fewer_rows(
    tmp_path: Path, columns: list[str], compression: ParquetCompression, hole: int, step: int
) -> None:
    """Changed numbers may pass as numbers, but what cannot be decoded is an error, not the end."""
    path = tmp_path / "people.parquet"
    frame = people(20_000).select(columns)
    frame.write_parquet(path, row_group_size=5000, compression=compression)
    whole = path.read_bytes()
    said: list[str] = []

    def in_batches() -> Iterable[pl.DataFrame]:
        return Table(path).batches()

    def in_slices() -> Iterable[pl.DataFrame]:
        return (rows_of(part, columns) for part in Table(path).slices(4000))

    for start, byte, ways in product(
        range(4, len(whole) - 600, step), (b"\0", b"\xff"), (in_batches, in_slices)
    ):
        path.write_bytes(whole[:start] + byte * hole + whole[start + hole :])
        try:
            rows = sum(frame.height for frame in ways())
        except InputError as error:
            said.append(str(error))
        else:
            assert rows == 20_000
    assert len(said) >= 5
    named = re.compile(r"people.parquet( is not a readable|: only \d+ of)")
    assert all(named.search(message) for message in said)


def test_the_damaged_part_is_the_one_named(tmp_path: Path) -> None:
    table = in_parts(people(), tmp_path / "people", [500, 300, 200])
    odd = tmp_path / "people" / "part-001.parquet"
    whole = odd.read_bytes()
    odd.write_bytes(whole[:4] + b"\xff" * 600 + whole[604:])
    with pytest.raises(InputError, match=r"part-001.parquet( is not a readable|: only \d+ of)"):
        list(table.batches())


def test_another_type_in_a_part_is_named(tmp_path: Path) -> None:
    table = in_parts(people(), tmp_path / "people", [500, 300, 200])
    odd = tmp_path / "people" / "part-002.parquet"
    people(3).with_columns(pl.col("age").cast(pl.Float32)).write_parquet(odd)
    message = r"part-002.parquet: column 'age' is Float32, in part-000.parquet it is Float64"
    for ask in (lambda: table.schema, table.scan, lambda: list(Table(table).batches())):
        with pytest.raises(InputError, match=message):
            ask()


def test_a_missing_or_additional_column_in_a_part_is_named(tmp_path: Path) -> None:
    table = in_parts(people(), tmp_path / "people", [500, 500])
    odd = tmp_path / "people" / "part-001.parquet"
    people(3).drop("os").write_parquet(odd)
    with pytest.raises(
        InputError, match=r"part-001.parquet has other columns than part-000.*: no os"
    ):
        _ = table.schema
    people(3).with_columns(height=pl.lit(1.8)).write_parquet(odd)
    with pytest.raises(InputError, match=r"part-001.parquet has other columns .*: also height"):
        _ = Table(table).schema


def test_columns_of_parts_may_stand_in_any_order(tmp_path: Path) -> None:
    table = in_parts(people(), tmp_path / "people", [500, 500])
    path = tmp_path / "people" / "part-001.parquet"
    pl.read_parquet(path).select("os", "enrolled", "unit_id", "age").write_parquet(path)
    assert_frame_equal(pl.concat(list(table.batches())), people())
    assert_frame_equal(
        pl.concat([rows_of(s, ["age"]) for s in table.slices(300)]), people()[["age"]]
    )


# --- CSV


def written(path: Path, text: str) -> Table:
    path.write_text(text, encoding="utf-8")
    return Table(path)


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        ("true", "false"),
        ("TRUE", "False"),
        ("yes", "no"),
        ("Yes", "NO"),
        ("1", "0"),
        (" yes ", "no"),
    ],
)
def test_flags_of_a_csv_file(tmp_path: Path, yes: str, no: str) -> None:
    table = written(tmp_path / "t.csv", f"unit_id,enrolled\na,{yes}\nb,{no}\nc,{yes}\n")
    assert table.schema["enrolled"] == pl.Boolean
    assert table.collect(table.scan())["enrolled"].to_list() == [True, False, True]


@pytest.mark.parametrize("odd", ["maybe", "2", "1.0", "y"])
def test_an_odd_flag_is_named(tmp_path: Path, odd: str) -> None:
    table = written(tmp_path / "t.csv", f"unit_id,enrolled\na,yes\nb,{odd}\nc,no\n")
    with pytest.raises(InputError, match=f"t.csv: 'enrolled' holds '{odd}'; it must be true or"):
        list(table.batches())


def test_flags_of_a_parquet_file_may_be_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pl.DataFrame({"enrolled": [1, 0, 1]}).write_parquet(path)
    assert Table(path).collect(Table(path).scan())["enrolled"].to_list() == [
        True,
        False,
        True,
    ]
    pl.DataFrame({"enrolled": [1, 0, 7]}).write_parquet(path)
    with pytest.raises(InputError, match="'enrolled' holds '7'"):
        _ = Table(path).schema


def test_a_missing_flag_stays_missing(tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", "unit_id,enrolled\na,yes\nb,\nc,no\n")
    assert table.collect(table.scan())["enrolled"].to_list() == [True, None, False]


def test_a_column_that_stands_twice_is_named(tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", "unit_id,age,os,age\na,1,ios,2\n")
    with pytest.raises(InputError, match=r"t.csv: column 'age' stands twice"):
        _ = table.schema


def test_a_row_with_too_many_fields_is_refused(tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", "unit_id,age\na,1\nb,2,3\n")
    with pytest.raises(InputError, match=r"t.csv is not a readable csv table"):
        list(table.batches())


def test_identifiers_of_a_csv_file_are_text(tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", "unit_id,age\n007,1\n7,2\n")
    assert table.collect(table.scan())["unit_id"].to_list() == ["007", "7"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("unit_id,age\na,1\nb,2", ["a", "b"]),  # no line end
        ("unit_id,age\r\na,1\r\nb,2\r\n", ["a", "b"]),
        ('unit_id,age\n"a\nx",1\n"b,y",2\n', ["a\nx", "b,y"]),
        ("\ufeffunit_id,age\na,1\n", ["a"]),
        ("unit_id,age\na,1\n\nb,2\n", ["a", None, "b"]),  # an empty line is a row
    ],
)
def test_rows_are_counted_as_they_are_read(
    tmp_path: Path, text: str, ids: list[str | None]
) -> None:
    table = written(tmp_path / "t.csv", text)
    assert table.rows == len(ids)
    assert pl.concat(list(table.batches(["unit_id"], rows=1)))["unit_id"].to_list() == ids


# --- nothing in it


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_a_table_without_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    none = people(0)
    if name.endswith("csv"):
        none.write_csv(path)
    else:
        none.write_parquet(path)
    table = Table(path)
    assert (table.rows, table.slices(5)) == (0, ())
    assert table.schema.names() == none.columns
    assert sum(batch.height for batch in table.batches()) == 0
    assert table.sample(5, ["age"]).height == 0
