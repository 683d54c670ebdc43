"""Tables in parts appear as a whole, on a disk and in a store, and replace none but their own."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError, NotFiniteError
from fedipw.storage.places import Place, place_of
from fedipw.storage.remote import Remote
from fedipw.tables.parts import Parts, check_output, part_name, written_parts, written_rows
from fedipw.tables.table import SUCCESS, UNFINISHED, Table, write_table

fsspec: Any = pytest.importorskip("fsspec")


@pytest.fixture(params=["disk", "store"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yield a directory that is not there yet."""
    if request.param == "disk":
        yield tmp_path / "weights"
        return
    name = uuid4().hex
    yield place_of(f"memory://{name}/weights")
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def rows(*numbers: int) -> pl.DataFrame:
    return pl.DataFrame(
        {"unit_id": [f"u{n}" for n in numbers], "weight": [n / 8 for n in numbers]},
        schema={"unit_id": pl.String, "weight": pl.Float64},
    )


def seen(place: Place) -> set[str]:
    return {one.name for one in place.iterdir()} if place.is_dir() else set()


def ids(place: Place) -> list[str]:
    return Table(place).collect()["unit_id"].to_list()


def test_parts_come_in_any_order_twice_and_from_any_process(out: Place) -> None:
    with written_parts(out) as parts:
        elsewhere: Parts = pickle.loads(pickle.dumps(parts))
        elsewhere.write(1, rows(9))
        elsewhere.write(1, rows(3, 4))
        parts.write(0, rows(1, 2))
        assert not {name for name in seen(out) if name.endswith(".parquet")}
    assert seen(out) - {SUCCESS} == {part_name(0), part_name(1)}
    assert ids(out) == ["u1", "u2", "u3", "u4"]


def test_another_table_takes_the_place_of_all_parts(out: Place) -> None:
    with written_rows(out, part_rows=1) as write:
        write(rows(1, 2, 3))
    with written_rows(out, part_rows=2) as write:
        write(rows(7, 8))
    assert ids(out) == ["u7", "u8"]
    assert seen(out) - {SUCCESS} == {part_name(0)}


def test_numbers_without_a_part_are_closed_up(out: Place) -> None:
    with written_parts(out) as parts:
        for number in (5, 1, 3):
            parts.write(number, rows(number))
        parts.check(3)
    assert seen(out) - {SUCCESS} == {part_name(0), part_name(1), part_name(2)}
    assert ids(out) == ["u1", "u3", "u5"]


def test_what_fails_leaves_the_former_table_and_nothing_else(out: Place) -> None:
    with written_rows(out) as write:
        write(rows(1))
    before = seen(out)
    with pytest.raises(ZeroDivisionError), written_rows(out, part_rows=1) as write:
        write(rows(2, 3, 1 // 0))
    with pytest.raises(InputError, match="There are no rows to write"), written_rows(out):
        pass
    with written_parts(out) as parts:
        parts.write(1, rows(1))
        with pytest.raises(InputError, match="1 parts are there, and 2 were written"):
            parts.check(2)
    with pytest.raises(NotFiniteError), written_rows(out) as write:
        write(rows(2).with_columns(weight=pl.lit(float("inf"))))
    assert seen(out) == before
    assert ids(out) == ["u1"]
    if isinstance(out, Path):
        assert os.listdir(out.parent) == ["weights"]


def test_a_directory_of_other_files_is_never_replaced(out: Place) -> None:
    write_table_in(out, "people.parquet")
    for check in (check_output, lambda place: written_parts(place).__enter__()):
        with pytest.raises(InputError, match=r"holds other files .*\(people.parquet\)"):
            check(out)
    assert seen(out) == {"people.parquet"}


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(InputError, match="is a file; give a directory"):
        check_output(tmp_path / "weights")


def write_table_in(directory: Place, name: str) -> None:
    if isinstance(directory, Path):
        directory.mkdir(exist_ok=True)
    write_table(rows(1), directory / name)


def test_parts_in_a_store_are_not_read_until_all_are_there(out: Place) -> None:
    write_table_in(out, part_name(0))
    assert Table(out).rows == 1  # of another program, which has signs of its own
    if isinstance(out, Remote):
        write_table(rows(2), out / f"{UNFINISHED}ab" / part_name(0))
        with pytest.raises(InputError, match="is being written, or was left unfinished"):
            _ = Table(out).rows
        (out / SUCCESS).mark()  # of the former table, which is whole until the new one is
        assert Table(out).rows == 1


def test_permissions_are_those_of_a_new_directory(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    with written_rows(tmp_path / "weights") as write:
        write(rows(1))
    usual, made = (stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("usual", "weights"))
    assert made == usual


@settings(max_examples=8)  # each writes files
@given(heights=st.lists(st.integers(0, 7), min_size=1, max_size=8), size=st.integers(1, 5))
def test_parts_have_one_height_wherever_tables_end(
    tmp_path_factory: pytest.TempPathFactory, heights: list[int], size: int
) -> None:
    out, numbers = tmp_path_factory.mktemp("parts") / "weights", iter(range(100))
    with written_rows(out, part_rows=size) as write:
        for height in heights:
            write(rows(*(next(numbers) for _ in range(height))))
    total = sum(heights)
    found = [pl.read_parquet(path).height for path in sorted(out.iterdir())]
    assert all(height == size for height in found[:-1])
    assert sum(found) == total
    assert len(found) == max(1, -(-total // size))
    assert ids(out) == [f"u{n}" for n in range(total)]


def test_one_file_is_the_same_however_rows_come(tmp_path: Path) -> None:
    with written_rows(tmp_path / "a.parquet", part_rows=2) as write:
        for n in range(5):
            write(rows(n))
    assert ids(tmp_path / "a.parquet") == [f"u{n}" for n in range(5)]
    with pytest.raises(InputError, match=r"tables are \.parquet"):
        check_output(tmp_path / "a.txt")


def test_there_is_an_end_to_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fewer than 1000000 parts"):  # noqa: SIM117
        with written_parts(tmp_path / "weights") as parts:
            parts.write(10**6, rows(1))


@pytest.mark.parametrize("name", ["weights.parquet", "weights"])
def test_bytes_do_not_tell_in_which_pieces_rows_came(tmp_path: Path, name: str) -> None:
    count = 600_000  # fewer are one group of rows however they came
    whole = pl.DataFrame({"unit_id": np.arange(count), "weight": np.linspace(0.0, 1.0, count)})
    made = []
    for size in (count, 70_000, 1_100):
        out = tmp_path / str(size) / name
        out.parent.mkdir()
        with written_rows(out, part_rows=400_000) as write:
            for first in range(0, count, size):
                write(whole[first : first + size])
        made.append([p.read_bytes() for p in sorted(out.parent.rglob("*.parquet")) if p.is_file()])
    assert made[0] == made[1] == made[2]
