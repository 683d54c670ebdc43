"""Unique identifiers: every doubled one is named, no other ever is, in any number of buckets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.tables import population
from fedipw.tables.population import _compare, _require_unique_ids
from fedipw.tables.table import Table


def in_parts(ids: list[object], folder: Path, parts: int = 1) -> Table:
    folder.mkdir(parents=True, exist_ok=True)
    series = pl.Series("unit_id", ids)
    size = -(-max(1, len(ids)) // parts)
    for k in range(parts):
        pl.DataFrame(series.slice(k * size, size)).write_parquet(folder / f"{k}.parquet")
    return Table(folder)


@settings(max_examples=60)
@given(
    numbers=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    text=st.booleans(),
    parts=st.integers(1, 3),
    bucket=st.integers(1, 70),
)
def test_doubled_identifiers_are_counted_and_named_whatever_the_buckets(
    tmp_path_factory: pytest.TempPathFactory,
    numbers: list[int],
    text: bool,
    parts: int,
    bucket: int,
) -> None:
    ids: list[object] = [f"c{k:02d}" if text else k for k in numbers]
    table = in_parts(ids, tmp_path_factory.mktemp("ids"), parts)
    twice = sorted(str(k) for k, count in Counter(ids).items() if count > 1)
    if not text:
        twice = [str(k) for k, count in sorted(Counter(numbers).items()) if count > 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(population, "_BUCKET_ROWS", bucket)
        if not twice:
            _require_unique_ids(table)
            return
        shown = ", ".join(twice[:5])
        with pytest.raises(
            InputError, match=rf"; {len(twice)} value\(s\) .* more than once: {shown}"
        ):
            _require_unique_ids(table)


@pytest.mark.parametrize("bucket", [1_000, 4_000_000])
def test_many_distinct_identifiers_are_never_accused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    monkeypatch.setattr(population, "_BUCKET_ROWS", bucket)
    ids = np.random.default_rng(0).permutation(60_000)
    for k, column in enumerate((pl.Series(ids), pl.Series(ids).cast(pl.String))):
        _require_unique_ids(in_parts(column.to_list(), tmp_path / str(k), 3))


def test_identifiers_whose_hashes_agree_are_compared_in_full(tmp_path: Path) -> None:
    """Whatever hashes say: values that are not the same do not stand twice."""
    table = in_parts(["a", "b", "c", "d"], tmp_path)
    hashes = pl.Series(["a", "b", "c"]).hash().to_numpy()
    _compare(table, hashes)
    doubled = in_parts(["a", "b", "c", "c"], tmp_path / "twice")
    with pytest.raises(InputError, match=r"1 value\(s\) stand more than once: c\."):
        _compare(doubled, hashes)


@pytest.mark.parametrize("bucket", [2, 1_000])
def test_a_row_without_identifier_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    monkeypatch.setattr(population, "_BUCKET_ROWS", bucket)
    table = in_parts(["a", "b", "c", None, "d", None], tmp_path, 2)
    with pytest.raises(InputError, match=r"row\(s\) have no unit_id, the first is 4\."):
        _require_unique_ids(table)


def test_text_that_looks_like_the_same_number_is_not(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("unit_id,age\n7,1\n007,2\n7.0,3\n")
    _require_unique_ids(Table(path))


def test_tables_without_rows_or_without_identifiers(tmp_path: Path) -> None:
    path = tmp_path / "people.parquet"
    pl.DataFrame({"unit_id": []}, schema={"unit_id": pl.String}).write_parquet(path)
    _require_unique_ids(Table(path))
    pl.DataFrame({"age": [1]}).write_parquet(path)
    with pytest.raises(InputError, match="has no column 'unit_id'; it has age"):
        _require_unique_ids(Table(path))
