"""The comparison of two checkouts finds what differs, and nothing else."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from benchmarks.compare.agreement import (
    Agreement,
    Expected,
    compared_files,
    compared_json,
    compared_tables,
)

KEYS = ("round", "unit_id")
TABLE = pl.DataFrame(
    {"round": [1, 1, 2], "unit_id": ["a", "b", "a"], "weight": [0.5, 1e-8, None], "note": "x"}
)
VALUES: dict[str, Any] = {
    "sizes": {"population": 1500.0, "table": True, "rate": None},
    "lines": [{"name": "age", "mean": 45.0}, {"name": "os[ios]", "mean": 0.28}],
    "edges": [0.1, 0.2],
    "notes": ["two clients"],
    "made_with": {"numpy": "2.0"},
}


def places(found: Agreement) -> list[str]:
    return [d.place for d in found.differences]


def test_equal_outputs_agree() -> None:
    assert compared_json(VALUES, deepcopy(VALUES)) == Agreement(numbers=6)
    shuffled = TABLE[[2, 0, 1]].select("note", "weight", "unit_id", "round")
    assert compared_tables(TABLE, shuffled, KEYS) == Agreement(numbers=2)


def test_wording_versions_order_and_rounding_are_no_differences() -> None:
    new = {**VALUES, "lines": VALUES["lines"][::-1], "notes": ["2 clients"], "made_with": {}}
    new["edges"] = [0.1 * (1 + 1e-10), 0.2 + 1e-13]
    found = compared_json(VALUES, new)
    assert not found.differences
    assert found.texts == 1
    assert 0 < found.largest < 1e-9


@pytest.mark.parametrize("change", [1e-8, -1.0, np.nan, np.inf])
def test_a_changed_number_is_found(change: float) -> None:
    new = deepcopy(VALUES)
    new["lines"][1]["mean"] += change
    found = compared_json(VALUES, new, "audit")
    assert places(found) == ["audit/lines/os[ios]/mean"]
    assert found.largest > 1e-9
    table = TABLE.with_columns(pl.Series("weight", [0.5 + change, 1e-8, None]))
    found = compared_tables(TABLE, table, KEYS, "weights")
    assert places(found) == ["weights:weight"]
    assert "round=1 unit_id=a" in found.differences[0].what


def test_a_number_in_place_of_none_is_found() -> None:
    new = deepcopy(VALUES)
    new["sizes"]["rate"] = 0.0
    assert places(compared_json(VALUES, new)) == ["/sizes/rate"]
    assert places(compared_json(new, VALUES)) == ["/sizes/rate"]
    filled = TABLE.with_columns(pl.col("weight").fill_null(0.0))
    assert places(compared_tables(TABLE, filled, KEYS)) == [":weight"]


def test_a_missing_and_an_added_row_are_found() -> None:
    for old, new in ((TABLE, TABLE[:2]), (TABLE[:2], TABLE)):
        found = compared_tables(old, new, KEYS, "weights")
        assert places(found) == ["weights:rows"]
        assert found.largest == np.inf
    assert places(compared_tables(TABLE, pl.concat([TABLE, TABLE[:1]]), KEYS, "w")) == ["w"]
    fewer = {**VALUES, "lines": VALUES["lines"][:1], "edges": [0.1]}
    assert places(compared_json(VALUES, fewer)) == ["/lines/os[ios]", "/edges/1"]
    assert places(compared_json(fewer, VALUES)) == ["/lines/os[ios]", "/edges/1"]


def test_a_missing_key_is_found_and_an_added_one_is_listed() -> None:
    fewer = {k: v for k, v in VALUES.items() if k != "sizes"}
    assert places(compared_json(VALUES, fewer)) == ["/sizes"]
    assert compared_json(fewer, VALUES).added == ("/sizes",)
    assert not compared_json(fewer, VALUES).differences
    assert places(compared_tables(TABLE, TABLE.drop("weight"), KEYS, "w")) == ["w:weight"]
    assert places(compared_tables(TABLE, TABLE.drop("unit_id"), KEYS, "w")) == ["w"]


def test_files_are_compared_by_their_kind(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for place, weight in ((old, 0.5), (new, 0.25)):
        place.mkdir()
        (place / "audit.json").write_text(json.dumps(VALUES))
        changed = TABLE.with_columns(pl.lit(weight).alias("weight"))
        changed.write_csv(place / "weights.csv")
    assert not compared_files(old / "audit.json", new / "audit.json", ()).differences
    found = compared_files(old / "weights.csv", new / "weights.csv", KEYS)
    assert places(found) == ["weights.csv:weight"]
    (new / "weights.csv").unlink()
    assert places(compared_files(old / "weights.csv", new / "weights.csv", KEYS)) == ["weights.csv"]


def test_an_expected_difference_is_told_by_world_command_and_place() -> None:
    entry = Expected("weights greg*", "weights.parquet:*", "a defect", world="missing")
    assert entry.explains("missing", "weights greg-hajek", "weights.parquet:weight")
    assert not entry.explains("table", "weights greg-hajek", "weights.parquet:weight")
    assert not entry.explains("missing", "weights fedipw", "weights.parquet:weight")
    assert not entry.explains("missing", "weights greg", "stdout/replies")
