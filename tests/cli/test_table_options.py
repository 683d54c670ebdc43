"""Every command reads every kind of table, under another name of the identifiers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import fedipw as package
from worlds import World

from .command import Files, contents, fedipw, succeeded

WORLD = World(size=200, rounds=3, seed=5, covariates=("age",), changing=(), metric=pl.col("age"))
KINDS = ("csv", "csv.gz", "tsv", "feather", "parquet")


def written(frame: pl.DataFrame, path: Path, **text: Any) -> Path:
    """Write a table by its suffix with polars alone, or with a separator of one's own."""
    kind = path.name.partition(".")[2]
    if kind == "feather":
        frame.write_ipc(path)
    elif kind == "parquet":
        frame.write_parquet(path)
    elif kind == "csv.gz":
        frame.write_csv(path, compression="gzip", **text)
    else:
        frame.write_csv(path, **({"separator": "\t"} if kind == "tsv" else {}) | text)
    return path


def results(files: Files, where: Path, kind: str, *options: object, **text: Any) -> dict[str, Any]:
    """Return what every command makes of tables of one kind."""
    where.mkdir()
    name = "device" if "--id" in options else "unit_id"

    def put(file: str, frame: pl.DataFrame) -> Path:
        frame = frame.rename({"unit_id": name}) if "unit_id" in frame.columns else frame
        return written(frame, where / f"{file}.{kind}", **text)

    people, loss = put("people", files.people), put("loss", files.metrics)
    enrolled = put("enrolled", files.people.filter("enrolled").drop("enrolled"))
    means = put("means", pl.DataFrame({"name": ["age"], "value": [0.1]}))
    rounds = ("--rounds", files.where / "rounds")
    who = ("--population", people, *rounds, *options)
    totals = ("--enrolled", enrolled, "--targets", means, *rounds, *options)
    for file, given in (("w", who), ("wt", totals)):
        succeeded("weights", *given, "--out", where / f"{file}.parquet")
    succeeded("calibrate", enrolled, "--targets", means, *options, "--out", where / "c.parquet")
    succeeded("audit", *who, "--metrics", loss, "--out", where / "a.html")
    return {
        **{path.name: pl.read_parquet(path) for path in where.glob("[wc]*.parquet")},
        "evaluate": succeeded("evaluate", *who, "--metrics", loss, "--against", loss),
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        found[k].equals(v) if isinstance(v, pl.DataFrame) else found[k] == v
        for k, v in expected.items()
    )


def test_every_kind_of_table_gives_the_same_numbers(tmp_path: Path) -> None:
    made = Files.of(WORLD, tmp_path).put()
    expected = results(made, tmp_path / "usual", "parquet")
    assert len(expected) == 4
    text = pl.col("unit_id").cast(pl.String)  # as text files hold it
    textual = {
        k: v.with_columns(text) if isinstance(v, pl.DataFrame) else v for k, v in expected.items()
    }
    for kind in KINDS[:3]:
        assert same(results(made, tmp_path / kind, kind), textual), kind
    assert same(results(made, tmp_path / "feather", "feather"), expected)
    other = results(
        made, tmp_path / "id", "csv", "--id", "device", "--separator", "~", separator="~"
    )
    assert same(other, textual)


def test_python_takes_the_same_name_of_identifiers(tmp_path: Path) -> None:
    files = Files.of(WORLD, tmp_path).put()
    people, loss = (t.rename({"unit_id": "device"}) for t in (files.people, files.metrics))
    rounds = tmp_path / "rounds"
    usual = package.weigh(files.people, rounds).table
    assert package.weigh(people, rounds, id="device").table.equals(usual)
    found = package.evaluate(loss, people, rounds, id="device")
    assert found.table().equals(package.evaluate(files.metrics, files.people, rounds).table())
    report = package.audit(people, rounds, metrics=loss, id="device")
    assert report.audit.metric is not None
    weights = package.calibrate(people.filter("enrolled"), {"age": 0.1}, id="device").table
    assert weights.columns == ["unit_id", "weight"]


@pytest.mark.filterwarnings("always::fedipw.errors.FedIPWWarning")
def test_an_odd_cell_is_a_notice_and_a_wrong_file_an_error(tmp_path: Path) -> None:
    files = Files.of(WORLD, tmp_path).put("csv")
    people = tmp_path / "people.csv"
    lines = people.read_text().splitlines()
    at = lines[0].split(",").index("age")
    cells = lines[7].split(",")
    cells[at] = "n/a"
    people.write_text("\n".join([*lines[:7], ",".join(cells), *lines[8:], ""]))
    given = files.given(kind="csv")
    out = ("--out", tmp_path / "w.csv")
    _, _, error = fedipw("weights", *given, *out, "--missing", "drop")
    assert f"notice: {people} row 7, column 'age': 'n/a' is not a number" in error
    assert error.count("notice: ") == 1
    before = contents(tmp_path)
    people.write_bytes("unit_id,age,enrolled\na,é,1\n".encode("latin-1"))
    code, _, error = fedipw("weights", *given, *out, "--force")
    assert code == 2
    assert "people.csv is not UTF-8; it looks like WINDOWS-1252" in error
    people.write_bytes(before[people])
    assert contents(tmp_path) == before


@pytest.mark.parametrize("option", [("--id", "device"), ("--separator", "::")])
def test_options_that_fit_no_table_are_errors(tmp_path: Path, option: tuple[str, str]) -> None:
    files = Files.of(WORLD, tmp_path).put("csv")
    code, _, error = fedipw(
        "weights", *files.given(kind="csv"), *option, "--out", tmp_path / "w.csv"
    )
    assert code == 2
    assert "no column 'device'" in error or "A separator is one character" in error
