"""What ``fedipw evaluate`` refuses: exit codes, messages, and files as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from worlds import MEASURED

from .command import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files.of(MEASURED, tmp_path)


Spoil = Callable[[Files], object]


def _told(change: Callable[[pl.DataFrame], pl.DataFrame]) -> Spoil:
    def spoil(files: Files) -> None:
        files.metrics = change(files.metrics)

    return spoil


def _where(row: int, value: Any, column: str) -> pl.Expr:
    at = pl.int_range(pl.len()) == row
    return pl.when(at).then(pl.lit(value)).otherwise(pl.col(column)).alias(column)


def _nobody_new(files: Files) -> None:
    silent = files.rounds[1].filter(~pl.col("replied"))["unit_id"][0]
    files.metrics = files.metrics.with_columns(
        pl.when(pl.col("round") == 2).then(_first(silent)).otherwise("unit_id").alias("unit_id")
    )


def _first(silent: int) -> pl.Expr:
    first = pl.col("unit_id") == pl.col("unit_id").filter(pl.col("round") == 2).first()
    return pl.when(first).then(silent).otherwise("unit_id")


def _replied(flag: bool) -> Spoil:
    def spoil(files: Files) -> None:
        files.rounds = [t.with_columns(replied=pl.lit(flag)) for t in files.rounds]
        if flag:
            rows = pl.concat(files.rounds).select("unit_id", "round")
            files.metrics = rows.with_columns(value=pl.lit(1.0), n=pl.lit(1))

    return spoil


def _late(files: Files) -> None:
    when = pl.when(pl.col("unit_id") % 2 == 0).then(3).otherwise(1)
    files.people = files.people.with_columns(enrolled_from=when)
    early = files.inside.filter(enrolled_from=1)["unit_id"].implode()
    files.rounds[:2] = [t.filter(pl.col("unit_id").is_in(early)) for t in files.rounds[:2]]
    files.metrics = files.metrics.filter((pl.col("round") > 2) | pl.col("unit_id").is_in(early))


def none(files: Files) -> None:
    del files


REFUSED: dict[str, tuple[Spoil, tuple[object, ...], tuple[str, ...]]] = {
    "no value": (_told(lambda t: t.drop("value")), (), ("loss.parquet", "no column 'value'")),
    "no round": (_told(lambda t: t.drop("round")), (), ("loss.parquet", "no column 'round'")),
    "no unit_id": (_told(lambda t: t.drop("unit_id")), (), ("loss.parquet", "no column 'unit_id'")),
    "NaN": (
        _told(lambda t: t.with_columns(_where(1, np.nan, "value"))), (),
        ("loss.parquet", "1 values are not finite", "Leave such rows out"),
    ),
    "infinite": (_told(lambda t: t.with_columns(_where(1, np.inf, "value"))), (), ("not finite",)),
    "null": (_told(lambda t: t.with_columns(_where(1, None, "value"))), (), ("no 'value'",)),
    "NaN counts": (
        _told(lambda t: t.with_columns(_where(1, np.nan, "n"))), ("--samples",), ("'n' must hold",),
    ),
    "twice": (_told(lambda t: pl.concat([t, t.head(1)])), (), ("share unit_id and round",)),
    "no rows": (_told(lambda t: t.head(0)), (), ("loss.parquet has no rows",)),
    "did not reply": (
        _nobody_new, (), ("loss.parquet round 2", "1 client(s) have a metric and did not reply"),
    ),
    "unknown client": (
        _told(lambda t: t.with_columns(_where(0, 7, "unit_id"))), (),
        ("loss.parquet round 1", "not enrolled according to the table of clients: 7"),
    ),
    "unknown round": (
        _told(lambda t: t.with_columns(_where(0, 9, "round"))), (), ("round 9 is not in", "rounds"),
    ),
    "a reply without a metric": (
        _told(lambda t: t[1:]), (), ("loss.parquet round 1", "1 of", "--missing-metrics"),
    ),
    "group": (none, ("--by", "height"), ("No column 'height'", "age, rich", "'round'")),
    "odds ratio": (none, ("--sensitivity", "0.9"), ("--sensitivity", "1 or more, not 0.9")),
    "odds ratio nan": (none, ("--sensitivity", "nan"), ("--sensitivity", "not nan")),
    "odds ratio inf": (none, ("--sensitivity", "inf"), ("odds ratio", "inf")),
    "conclusion alone": (none, ("--conclusion", "1"), ("--conclusion goes with --sensitivity",)),
    "conclusion nan": (
        none, ("--sensitivity", "2", "--conclusion", "nan"), ("finite",),
    ),
    "confidence 0": (none, ("--confidence", "0"), ("--confidence lies between 0 and 1, not 0",)),
    "confidence 1": (none, ("--confidence", "1"), ("--confidence lies between 0 and 1, not 1",)),
    "jackknife 1": (none, ("--jackknife", "1"), ("--jackknife takes 2 groups or more",)),
    "jackknife -3": (none, ("--jackknife", "-3"), ("--jackknife takes 2 groups or more",)),
    "resamples": (none, ("--resamples", str(10**30)), ("1 to 1000000 resamples",)),
    "seed": (none, ("--seed", "-1"), ("A seed is 0 or more, not -1",)),
    "oracle": (none, ("--scheme", "oracle"), ("needs true probabilities",)),
    "greg": (none, ("--scheme", "greg"), ("greg has no standard error here. Use fedipw",)),
    "fedavg": (none, ("--scheme", "fedavg"), ("fedavg has no standard error here",)),
    "unknown scheme": (none, ("--scheme", "fedpiw"), ("did you mean fedipw?",)),
    "no counts": (_told(lambda t: t.drop("n")), ("--samples",), ("needs a column 'n'",)),
    "joins late": (_late, (), ("round 1", "not enrolled then", "same enrollment")),
    "size": (none, ("--population-size", "9"), ("--population-size goes with --targets",)),
    "day": (none, ("--missing", "guess"), ("guess",)),
}  # fmt: skip


def refused(
    files: Files, messages: tuple[str, ...], code: int, *options: object, **how: Any
) -> None:
    """Run and expect an exit code, words in the message, and files as they were."""
    before = files.listing()
    got, printed, err = files.evaluate(*options, "--out", files.where / "means.csv", **how)
    assert (got, printed) == (code, ""), err
    for words in messages:
        assert words in " ".join(err.split()), err
    assert "Traceback" not in err
    assert files.listing() == before


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_ends_in_code_two_and_a_message(files: Files, case: str) -> None:
    spoil, options, messages = REFUSED[case]
    spoil(files)
    files.put()
    refused(files, messages, 2, *options)


def test_damaged_and_missing_files_are_named(files: Files) -> None:
    files.put()
    refused(files, ("No file", "none.parquet"), 2, metrics="none.parquet")
    path = files.where / "loss.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(files, ("loss.parquet", "not a readable parquet table"), 2)
    path.write_bytes(whole)
    last = files.where / "rounds" / "round-000003.parquet"
    last.write_bytes(last.read_bytes()[:100])
    refused(files, ("round-000003.parquet", "not a readable"), 2)


def test_a_contrast_needs_the_same_rows(files: Files) -> None:
    files.put()
    other = files.where / "other.parquet"
    files.metrics[1:].write_parquet(other)
    words = ("loss.parquet", "other.parquet", "same clients and rounds")
    refused(files, words, 2, "--against", other)


@pytest.mark.parametrize(
    "out", ["loss.parquet", "people.parquet", "other.parquet", "rounds/means.csv", "parts/x.csv"]
)
def test_no_input_is_written_over(files: Files, out: str) -> None:
    files.put()
    (files.where / "parts").mkdir()
    for name in ("other.parquet", "parts/1.parquet"):
        files.metrics.write_parquet(files.where / name)
    before = files.listing()
    options = ("--against", files.where / "other.parquet", "--out", files.where / out)
    code, _, err = files.evaluate(*options, metrics="parts" if "parts" in out else "loss.parquet")
    assert code == 2
    assert "write it elsewhere" in err
    assert files.listing() == before


@pytest.mark.parametrize("out", ["none/means.csv", "means.txt", "rounds"])
def test_an_output_that_cannot_be_written_is_refused(files: Files, out: str) -> None:
    files.put()
    code, _, err = files.evaluate("--out", files.where / out)
    assert code == 2
    assert str(files.where / out) in err


def test_targets_nobody_can_meet_end_in_code_three(files: Files) -> None:
    files.put()
    files.targets("age,50.0")
    refused(files, ("age = 50",), 3, source="targets")
    files.targets("age,0.0")
    refused(files, ("population of 9 cannot have",), 2, "--population-size", 9, source="targets")
    words = ("fedipw needs a table of the whole population",)
    refused(files, words, 2, "--scheme", "fedipw", source="targets")
    words = ("--enrollment goes with --population",)
    refused(files, words, 2, "--enrollment", "age", source="targets")


def test_a_table_with_dates_of_enrollment_and_few_clients_ends_in_a_message(files: Files) -> None:
    few = files.people.with_columns(enrolled_from=1).group_by("enrolled").head(12)
    kept = few.filter("enrolled")["unit_id"].implode()
    files.people = few.select("unit_id", "enrolled", "age", "rich", "enrolled_from")
    files.rounds = [t.filter(pl.col("unit_id").is_in(kept)) for t in files.rounds]
    files.metrics = files.metrics.filter(pl.col("unit_id").is_in(kept))
    files.put()
    refused(files, ("Enrollment has no model", "leave the dates"), 2, "--participation", "x")
