"""Inputs of ``fedipw weights`` stay as they are, whatever is asked of it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.cli import main
from fedipw.tables import Ledger


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    age = rng.normal(size=120)
    enrolled = rng.random(120) < 1 / (1 + np.exp(-age))
    people = pl.DataFrame({"unit_id": np.arange(120), "enrolled": enrolled, "age": age})
    people.write_parquet(tmp_path / "people.parquet")
    people.filter("enrolled").write_parquet(tmp_path / "enrolled.parquet")
    (tmp_path / "targets.csv").write_text("name,value\nage,0.1\n")
    ids, ledger = people.filter("enrolled")["unit_id"], Ledger(tmp_path / "rounds")
    for index in range(1, 4):
        replied = rng.random(len(ids)) < 0.5
        table = {"unit_id": ids, "invited": np.ones(len(ids), dtype=bool), "replied": replied}
        ledger.append(index, pl.DataFrame({**table, "x": rng.normal(size=len(ids))}))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedipw", "weights", *map(str, arguments)])
    try:
        main()
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("out", ["people.parquet", "rounds/w.parquet", "../{}/people.parquet"])
def test_no_input_is_written_over(
    files: Path, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bytes_of(files)
    target = files / out.format(files.name)
    given = ("--population", files / "people.parquet", "--rounds", files / "rounds")
    assert run(monkeypatch, *given, "--out", target) == 2
    assert "write it elsewhere" in capsys.readouterr().err
    assert bytes_of(files) == before


@pytest.mark.parametrize("name", ["enrolled.parquet", "targets.csv"])
def test_no_enrolled_table_or_target_is_written_over(
    files: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bytes_of(files)
    given = ("--enrolled", files / "enrolled.parquet", "--targets", files / "targets.csv")
    code = run(monkeypatch, *given, "--rounds", files / "rounds", "--out", files / name)
    assert code == 2
    assert bytes_of(files) == before


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
