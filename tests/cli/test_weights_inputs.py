"""Inputs of ``fedipw weights`` stay as they are, whatever is asked of it."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl
import pytest

from fedipw.cli import main
from worlds import World, drawn

from .command import contents


@pytest.fixture
def files(tmp_path: Path) -> Path:
    drawn(World(size=120, rounds=3, seed=1)).write(tmp_path, targets={"age": 0.1})
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedipw", "weights", *map(str, arguments)])
    try:
        main()
    except SystemExit as done:
        return int(done.code or 0)
    return 0


@pytest.mark.parametrize("out", ["people.parquet", "rounds/w.parquet", "../{}/people.parquet"])
def test_no_input_is_written_over(
    files: Path, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(files)
    target = files / out.format(files.name)
    given = ("--population", files / "people.parquet", "--rounds", files / "rounds")
    assert run(monkeypatch, *given, "--out", target) == 2
    assert "write it elsewhere" in capsys.readouterr().err
    assert contents(files) == before


@pytest.mark.parametrize("name", ["enrolled.parquet", "targets.csv"])
def test_no_enrolled_table_or_target_is_written_over(
    files: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(files)
    given = ("--enrolled", files / "enrolled.parquet", "--targets", files / "targets.csv")
    code = run(monkeypatch, *given, "--rounds", files / "rounds", "--out", files / name)
    assert code == 2
    assert contents(files) == before


def test_a_formula_of_enrollment_says_nothing_with_totals(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ("--enrolled", files / "enrolled.parquet", "--targets", files / "targets.csv")
    given = (*known, "--rounds", files / "rounds", "--out", files / "w.parquet")
    assert run(monkeypatch, *given, "--enrollment", "age") == 2
    assert "with --targets it is calibrated" in capsys.readouterr().err
    assert run(monkeypatch, *given) == 0


def test_a_column_that_is_nan_outside_is_known_after_enrollment(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = pl.when("enrolled").then(pl.col("age") + 1.0).otherwise(float("nan")).alias("late")
    people = pl.read_parquet(files / "people.parquet").with_columns(late)
    people.write_parquet(files / "people.parquet")
    given = ("--population", files / "people.parquet", "--rounds", files / "rounds")
    assert run(monkeypatch, *given, "--out", files / "w.parquet") == 2
    assert "'late' is known only after enrollment" in capsys.readouterr().err
    chosen = ("--enrollment", ". - late", "--out", files / "w.parquet")
    assert run(monkeypatch, *given, *chosen) == 0
