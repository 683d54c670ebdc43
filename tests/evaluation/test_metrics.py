"""Metrics clients report: what is taken, what is refused, and differences of two models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.evaluation.logged import Metrics

GOOD: dict[str, list[Any]] = {
    "unit_id": [1, 2, 1, 3], "round": [1, 1, 4, 4], "value": [0.5, 0.25, 1.0, 2.0],
    "n": [10, 20, 10, 5],
}  # fmt: skip


def metrics(**changed: Any) -> Metrics:
    return Metrics(pl.DataFrame(GOOD | changed, strict=False), "loss.parquet")


def test_rounds_are_told_apart_and_a_round_without_values_is_none() -> None:
    made = metrics()
    assert made.rounds == (1, 4)
    part = made.of(4)
    assert part is not None
    assert part["unit_id"].to_list() == [1, 3]
    assert made.of(2) is None


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_files_of_either_kind_are_read_with_the_columns_needed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"loss.{kind}"
    frame = pl.DataFrame(GOOD | {"note": list("abcd")})
    frame.write_parquet(path) if kind == "parquet" else frame.write_csv(path)
    made = Metrics.read(path)
    assert made.frame.columns == ["unit_id", "round", "value", "n"]
    assert made.frame["unit_id"].dtype == (pl.Int64 if kind == "parquet" else pl.String)
    assert made.frame["value"].to_list() == GOOD["value"]
    frame.drop("n").write_parquet(tmp_path / "less.parquet")
    assert "n" not in Metrics.read(tmp_path / "less.parquet").frame.columns


def test_flags_are_a_metric(tmp_path: Path) -> None:
    path = tmp_path / "right.parquet"
    pl.DataFrame(GOOD | {"value": [True, False, True, True]}).write_parquet(path)
    assert Metrics.read(path).frame["value"].sum() == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"value": [0.5, None, 1.0, 2.0]}, "1 rows have no 'value'"),
        ({"value": [0.5, float("nan"), float("inf"), 2.0]}, "2 values are not finite"),
        ({"value": [0.5, -1e200, 1.0, 2.0]}, "1 values are beyond 1e"),
        ({"value": ["1", "2.5", "n/a", "4"]}, "row 3, column 'value': 'n/a' is not a number"),
        ({"unit_id": [1, None, 1, 3]}, "1 rows have no 'unit_id'"),
        ({"round": [1, 1, None, 4]}, "1 rows have no 'round'"),
        ({"round": [1.0, 1.0, 4.0, 4.5]}, "'round' must hold whole numbers"),
        ({"n": [1, 2, 3, None]}, "1 rows have no 'n'"),
        ({"n": [1, 2, 3, 0]}, "'n' must hold finite numbers above 0"),
        ({"n": [1.0, 2.0, 3.0, float("nan")]}, "'n' must hold finite numbers above 0"),
        ({"n": [1.0, 2.0, 3.0, float("inf")]}, "'n' must hold finite numbers above 0"),
        ({"n": list("1bc4")}, r"row 2, column 'n': 'b' is not a number \(2 such cells\)"),
        ({"unit_id": [1, 1, 3, 3]}, r"4 rows share unit_id and round .*\(1, 1\).* Keep one value"),
    ],
)
def test_values_that_cannot_be_are_named_with_their_file(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=f"loss.parquet: {message}"):
        metrics(**changed)


@pytest.mark.parametrize("name", ["unit_id", "round", "value"])
def test_a_column_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    frame = pl.DataFrame(GOOD).drop(name)
    with pytest.raises(InputError, match=f"loss.parquet has no column '{name}'; it has"):
        Metrics(frame, "loss.parquet")
    frame.write_parquet(tmp_path / "loss.parquet")
    with pytest.raises(InputError, match=f"loss.parquet has no column '{name}'; it has"):
        Metrics.read(tmp_path / "loss.parquet")


def test_no_rows_are_no_metrics() -> None:
    with pytest.raises(InputError, match=r"loss\.parquet has no rows"):
        Metrics(pl.DataFrame(GOOD).head(0), "loss.parquet")


def test_differences_are_taken_row_by_row_whatever_the_order() -> None:
    first = metrics()
    other = Metrics(
        first.frame.with_columns(pl.col("value") / 4).sample(fraction=1.0, shuffle=True, seed=1),
        "other.parquet",
    )
    both = first.against(other)
    assert both.frame["value"].to_list() == [0.375, 0.1875, 0.75, 1.5]
    assert both.frame.select("unit_id", "round", "n").equals(
        first.frame.select("unit_id", "round", "n")
    )
    assert both.where == "loss.parquet less other.parquet"
    reverse = other.against(first).frame.sort("unit_id", "round")["value"]
    assert reverse.to_list() == [-0.375, -0.75, -0.1875, -1.5]


def test_numbers_and_their_text_are_the_same_client() -> None:
    text = Metrics(
        pl.DataFrame(GOOD).with_columns(
            pl.col("unit_id").cast(pl.String), pl.col("round").cast(pl.Int16)
        )
    )
    both = metrics().against(text)
    assert both.frame["value"].to_list() == [0.0] * 4
    assert both.frame.schema["unit_id"] == pl.Int64


@pytest.mark.parametrize("changed", [{"unit_id": [1, 2, 1, 4]}, {"round": [1, 1, 3, 4]}])
def test_models_told_of_on_other_rows_have_no_difference(changed: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="same clients and rounds: 4 and 4 rows, 3 in both"):
        metrics().against(metrics(**changed))
    fewer = Metrics(metrics().frame.head(3), "fewer")
    for first, second in ((metrics(), fewer), (fewer, metrics())):
        with pytest.raises(InputError, match=r"same clients and rounds: [34] and [34] rows, 3"):
            first.against(second)
