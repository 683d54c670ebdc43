"""Tables and ledgers by URL are what they are on a disk."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import polars as pl
import pytest

import fedipw
from fedipw.errors import InputError
from fedipw.storage.remote import Remote
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.tables.table import Table, rows_of, write_table
from worlds import World, drawn

fsspec: Any = pytest.importorskip("fsspec")

TABLES = drawn(World(size=120, rounds=3, seed=3))
KINDS = ("parquet", "csv", "csv.gz", "tsv", "feather")


@pytest.fixture
def at() -> Iterator[str]:
    """Yield a directory in a store in memory, gone afterwards."""
    name = uuid4().hex
    yield f"memory://{name}"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)


@pytest.fixture
def rounds(at: str) -> str:
    for index, frame in enumerate(TABLES.rounds, start=1):
        write_table(frame, f"{at}/rounds/round-{index:06d}.parquet")
    return f"{at}/rounds"


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_read_as_it_was_written(at: str, kind: str) -> None:
    people = TABLES.people.with_columns(pl.col("unit_id").cast(pl.String))
    write_table(people, f"{at}/people.{kind}")
    table = Table(f"{at}/people.{kind}")
    assert table.rows == people.height
    assert table.collect().equals(people)
    assert pl.concat(table.batches(rows=50)).equals(people)
    parts = table.slices(50)
    assert pl.concat([rows_of(part, people.columns) for part in parts]).equals(people)


def test_a_directory_is_read_in_order_of_names(at: str) -> None:
    for name, piece in (("b", TABLES.people[60:]), ("a", TABLES.people[:60])):
        write_table(piece, f"{at}/people/{name}.parquet")
    (Remote(f"{at}/people") / "_SUCCESS").mark()
    assert Table(f"{at}/people/").collect().equals(TABLES.people)
    assert Population(f"{at}/people").size == TABLES.people.height


def test_another_process_makes_copies_of_its_own(at: str, rounds: str) -> None:
    write_table(TABLES.people, f"{at}/people.parquet")
    table, ledger = Table(f"{at}/people.parquet"), Ledger(rounds)
    table.collect()
    ledger.scan()
    told = pickle.dumps((table, ledger, table.slices(50)))
    assert b"fedipw-copies" not in told  # no path of this process
    there, log, parts = pickle.loads(told)
    assert there.collect().equals(TABLES.people)
    assert log.read(2).equals(ledger.read(2))
    assert rows_of(parts[1], ["unit_id"]).equals(TABLES.people.select("unit_id")[50:100])


def test_a_ledger_is_read_round_by_round_and_as_a_query(rounds: str) -> None:
    ledger = Ledger(rounds)
    assert ledger.rounds == (1, 2, 3)
    assert [r.equals(t) for r, t in zip(ledger, TABLES.rounds, strict=True)] == [True] * 3
    assert ledger.scan().collect().equals(pl.concat(TABLES.rounds))
    assert ledger.has(3)
    assert not ledger.has(4)
    with pytest.raises(InputError, match=f"No round 4 in {rounds}"):
        ledger.read(4)
    write_table(
        TABLES.changed(1, round=pl.lit(4, pl.Int64)).rounds[0], f"{rounds}/round-000004.parquet"
    )
    assert max(ledger.rounds) == 4
    assert ledger.read(4).height == TABLES.rounds[0].height


def test_a_ledger_at_a_url_is_not_written(rounds: str) -> None:
    ledger = Ledger(rounds)
    with pytest.raises(InputError, match=r"is at a URL: a server keeps its ledger"):
        ledger.append(1, TABLES.rounds[0])
    with pytest.raises(InputError, match=r"is at a URL"), ledger.writing():
        pass


def test_the_common_jobs_take_urls(at: str, rounds: str, tmp_path: Path) -> None:
    TABLES.write(tmp_path, "parquet")
    write_table(TABLES.people, f"{at}/people.parquet")
    here = fedipw.weigh(tmp_path / "people.parquet", tmp_path / "rounds")
    assert fedipw.weigh(f"{at}/people.parquet", rounds).table.equals(here.table)
    fedipw.audit(f"{at}/people.parquet", rounds).save(f"{at}/report.html")
    assert Remote(f"{at}/report.html").is_file()


def test_errors_name_the_url_and_no_copy(at: str, rounds: str) -> None:
    files, path = fsspec.filesystem("memory"), at.removeprefix("memory:/")
    write_table(TABLES.people, f"{at}/people.parquet")
    whole = files.cat_file(f"{path}/people.parquet")
    files.pipe_file(f"{path}/cut.parquet", whole[:-9])
    files.pipe_file(f"{path}/odd.csv", "unit_id,name\na,Zoë\n".encode("latin-1"))
    files.pipe_file(f"{path}/long.csv", b"unit_id,age\na,1,2\n")
    files.pipe_file(f"{path}/rounds/round-000002.parquet", whole[:-9])
    said = []
    for name in ("cut.parquet", "odd.csv", "long.csv", "none.csv", "none"):
        with pytest.raises(InputError, match=f"{at}/{name}") as failed:
            Table(f"{at}/{name}").collect()
        said.append(str(failed.value))
    with pytest.raises(InputError, match=f"{rounds}/round-000002.parquet is not a read") as failed:
        Ledger(rounds).read(2)
    assert not [text for text in (*said, str(failed.value)) if "fedipw-copies" in text]
    with pytest.raises(InputError, match=f"No ledger directory {at}/none"):
        Ledger(f"{at}/none").require_rounds()
