"""How often the files of a ledger are read: once or twice, however much is asked of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from cli.command import succeeded
from fedipw.tables.ledger import Ledger
from worlds import Tables

from .reference import world

ROUNDS = 12
SAMPLED = {1, 2, 4, 5, 7, 8, 10, 12}  # eight rounds, evenly


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count how often each round is read."""
    found: Counter[int] = Counter()
    read = Ledger.read

    def counted(self: Ledger, index: int) -> pl.DataFrame:
        found[index] += 1
        return read(self, index)

    monkeypatch.setattr(Ledger, "read", counted)
    return found


def put(given: Tables, where: Path) -> tuple[object, ...]:
    """Write a world with a metric and return the options that name its files."""
    values = given.log.filter("replied").select("unit_id", "round", value="z1")
    replace(given, metrics=values).write(where)
    return "--population", where / "people.parquet", "--rounds", where / "rounds"


def without_columns(given: Tables) -> Tables:
    return Tables(given.people, [table.drop("x", "net") for table in given.rounds])


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize(("fit", "times"), [("past", 1), ("same-round", 1), ("pooled", 2)])
def test_an_audit_reads_a_round_once_or_twice_whatever_the_metric(
    fit: str, times: int, steps: bool, reads: Counter[int], tmp_path: Path
) -> None:
    given = without_columns(world(3, rounds=ROUNDS, steps=steps))
    files = (*put(given, tmp_path), "--out", tmp_path / "a.html", "--participation-fit", fit)
    metric = ("--metrics", tmp_path / "loss.parquet")
    for asked in ((), metric, (*metric, "--by", "os", "--by", "rooms", "--by", "round")):
        reads.clear()
        succeeded("audit", *files, *asked, "--force")
        assert reads == dict.fromkeys(range(1, ROUNDS + 1), times)


@pytest.mark.parametrize(("fit", "times"), [("past", 1), ("pooled", 2)])
def test_columns_of_the_ledger_are_cut_by_a_look_at_eight_rounds(
    fit: str, times: int, reads: Counter[int], tmp_path: Path
) -> None:
    files = put(world(4, rounds=ROUNDS), tmp_path)
    metric = ("--metrics", tmp_path / "loss.parquet", "--by", "os")
    succeeded("audit", *files, "--out", tmp_path / "a.html", "--participation-fit", fit, *metric)
    assert reads == {k: times + (k in SAMPLED) for k in range(1, ROUNDS + 1)}


@pytest.mark.parametrize("options", [(), ("--by", "os", "--by", "round", "--jackknife", 4)])
def test_an_evaluation_reads_a_round_once(
    options: tuple[object, ...], reads: Counter[int], tmp_path: Path
) -> None:
    files = put(world(5, rounds=ROUNDS, steps=True), tmp_path)
    succeeded("evaluate", *files, "--metrics", tmp_path / "loss.parquet", *options)
    assert reads == dict.fromkeys(range(1, ROUNDS + 1), 1)
