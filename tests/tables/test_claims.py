"""Files that claim to hold far more than they can are refused, unless that is allowed."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl
import pytest

import fedipw.tables.table as module
from fedipw.errors import InputError
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.tables.table import Table, read_table

ROWS = 2_000_000


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLAIM", 10**6)


def flat(**more: object) -> pl.DataFrame:
    zeros = pl.repeat(0, ROWS, eager=True, dtype=pl.Int64)
    return pl.DataFrame({"unit_id": zeros, "enrolled": zeros == 0, **more})


@pytest.mark.parametrize("name", ["people.parquet", "people.csv.gz"])
def test_a_file_that_unpacks_to_far_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        flat().write_parquet(path)
    else:
        path.write_bytes(gzip.compress(b"unit_id,enrolled\n" + b"0,true\n" * ROWS, 9))
    for read in (lambda: read_table(path), lambda: Population(path).check(),
                 lambda: list(Table(path).batches())):  # fmt: skip
        with pytest.raises(InputError, match=rf"{name} has .* claims .*FEDIPW_ALLOW_LARGE_FILES=1"):
            read()
    monkeypatch.setenv("FEDIPW_ALLOW_LARGE_FILES", "1")
    assert read_table(path).height == ROWS


def test_an_honest_table_is_read_however_large(tmp_path: Path) -> None:
    path = tmp_path / "people.parquet"
    frame = pl.DataFrame({"unit_id": range(300_000), "enrolled": True})
    frame.write_parquet(path, compression="uncompressed")
    assert read_table(path).height == 300_000


def test_a_round_of_more_rows_than_its_bytes_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    yes = pl.repeat(True, ROWS, eager=True)
    made = flat(invited=yes, replied=yes).with_columns(round=pl.lit(1)).drop("enrolled")
    made.write_parquet(tmp_path / "rounds" / "round-000001.parquet")
    with pytest.raises(InputError, match=r"round-000001\.parquet has .* claims"):
        Ledger(tmp_path / "rounds").read(1)
