"""Overlap: probabilities and empty cells against plain counting in memory."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.selection.coded import CodedTable, TableSettings
from fedipw.selection.overlap import Cell, _block_overlap, empty_cells, overlap
from fedipw.selection.saved import _logistic_prob
from fedipw.tables import partitions
from fedipw.tables.design import Missing
from fedipw.tables.partitions import Block
from fedipw.tables.table import Table
from worlds import World, population_table


def people(n: int = 5_000) -> pl.DataFrame:
    odds = 2.0 * pl.col("age") - 1.5 + (pl.col("os") == "ios")
    world = World(size=n, seed=3, covariates=("age", "os"), enrollment=odds)
    return population_table(world).drop("unit_id")


def written(frame: pl.DataFrame, folder: Path) -> Table:
    frame.write_parquet(folder / "people.parquet")
    return Table(folder / "people.parquet")


@pytest.mark.parametrize("threshold", [0.01, 0.2, 1e-9])
@pytest.mark.parametrize("small_blocks", [False, True])
def test_sums_equal_a_plain_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threshold: float, small_blocks: bool
) -> None:
    frame = people(20_000)
    if small_blocks:
        monkeypatch.setattr(partitions, "_BLOCK_BYTES", 1)
    coded = CodedTable.of(written(frame, tmp_path), "age + os")
    model = coded.model()
    found = overlap(coded, model, threshold=threshold)
    prob, enrolled = model.prob(frame)[0], frame["enrolled"].to_numpy()
    weights = 1.0 / prob[enrolled]
    assert (found.population, found.enrolled) == (20_000, int(enrolled.sum()))
    np.testing.assert_allclose(found.smallest, np.sort(prob)[:5], rtol=1e-11)
    assert found.smallest_enrolled == pytest.approx(prob[enrolled].min(), rel=1e-11)
    assert found.below == (prob < threshold).sum()
    assert found.share_below == (prob < threshold).mean()
    assert found.estimated_size == pytest.approx(weights.sum(), rel=1e-11)
    ess = weights.sum() ** 2 / (weights**2).sum()
    assert found.effective_sample_size == pytest.approx(ess, rel=1e-11)
    assert found.empty_cells == ()
    assert found.to_json()["share_below"] == found.share_below


def test_a_model_of_categories_alone_estimates_the_size_exactly(tmp_path: Path) -> None:
    """Shares by cell: each enrolled client stands for its cell's size over its enrolled."""
    frame = people().drop("age")
    coded = CodedTable.of(written(frame, tmp_path), "os")
    found = overlap(coded, coded.model())
    assert found.estimated_size == pytest.approx(5_000, rel=1e-11)
    shares = frame.group_by("os").agg(pl.col("enrolled").mean())["enrolled"]
    np.testing.assert_allclose(found.smallest, np.full(5, shares.min()), rtol=1e-11)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6])
def test_blocks_of_few_rows(rows: int) -> None:
    """A worker may hold a block of which every row was left out."""
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(1, rows))
    block = Block(columns, (np.arange(rows) % 2).astype(np.int8), np.empty(0))
    prob_of = partial(_logistic_prob, beta=np.array([1.0, 0.5]))
    at = _block_overlap(block, prob_of, 0.6)
    prob = np.sort(1.0 / (1.0 + np.exp(-columns[0] - 0.5)))
    np.testing.assert_allclose(at.smallest, prob[:5], rtol=1e-13)
    assert (at.rows, at.enrolled, at.below) == (rows, rows // 2, (prob < 0.6).sum())
    both = at + _block_overlap(block, prob_of, 0.6)
    np.testing.assert_allclose(both.smallest, np.sort(np.tile(prob, 2))[:5], rtol=1e-13)


def test_what_people_read(tmp_path: Path) -> None:
    frame = people().with_columns(
        enrolled=pl.col("enrolled") & ((pl.col("os") != "web") | (pl.col("age") > 0.0)),
        old=pl.col("age") > 0.0,
    )
    coded = CodedTable.of(written(frame, tmp_path), "os + old")
    found = overlap(coded, coded.model())
    size = frame.filter(~pl.col("old") & (pl.col("os") == "web")).height
    assert found.empty_cells == (Cell(name="os = web and old = false", population=size),)
    lines = " ".join(found.lines())
    assert f"{found.enrolled} of 5000 clients" in lines
    assert f"Nobody is enrolled in 1 cell(s): os = web and old = false ({size} clients)" in lines
    assert overlap(coded, coded.model(), cells=False).empty_cells == ()


# --- empty cells


def counted_with_pandas(frame: pl.DataFrame) -> set[tuple[str, int]]:
    """Count every value and every pair of values of text columns, none implied by a single one."""
    table = pd.DataFrame(frame.to_dict(as_series=False))
    names = [name for name in table.columns if name != "enrolled"]
    alone: set[tuple[str, str]] = set()
    out = set()
    for name in names:
        for level, group in table.groupby(name):
            if not group["enrolled"].any():
                alone.add((name, str(level)))
                out.add((f"{name} = {level}", len(group)))
    for a, b in combinations(names, 2):
        for (x, y), group in table.groupby([a, b]):
            known = (a, str(x)) in alone or (b, str(y)) in alone
            if not group["enrolled"].any() and not known:
                out.add((f"{a} = {x} and {b} = {y}", len(group)))
    return out


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(5, 60),
    levels=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    rate=st.sampled_from([0.05, 0.2, 0.6]),
)
def test_empty_cells_are_those_pandas_counts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, n: int, levels: list[int], rate: float
) -> None:
    rng = np.random.default_rng(seed)
    columns = {f"c{j}": rng.choice(list("pqrs")[:k], n) for j, k in enumerate(levels)}
    frame = pl.DataFrame({**columns, "enrolled": rng.random(n) < rate})
    cells = empty_cells(written(frame, tmp_path_factory.mktemp("cells")), list(columns))
    assert {(cell.name, cell.population) for cell in cells} == counted_with_pandas(frame)
    assert len({cell.name for cell in cells}) == len(cells)
    sizes = [cell.population for cell in cells]
    assert sizes == sorted(sizes, reverse=True)


def test_numbers_with_few_values_are_categories_and_others_are_cut_in_fifths(
    tmp_path: Path,
) -> None:
    n = 1_000
    x = np.random.default_rng(5).permutation(n) / 10.0
    few = np.arange(n) % 3
    edges = pl.Series(x).quantile(0.4), pl.Series(x).quantile(0.6)
    assert edges[0] is not None
    assert edges[1] is not None
    inside = (x > edges[0]) & (x <= edges[1])  # the third fifth
    frame = pl.DataFrame({"x": x, "few": few, "enrolled": ~inside & (few != 1)})
    cells = empty_cells(written(frame, tmp_path), ["x", "few"])
    assert {(cell.name, cell.population) for cell in cells} == {
        (f"x in ({edges[0]:g}, {edges[1]:g}]", int(inside.sum())),
        ("few = 1", int((few == 1).sum())),
    }


@pytest.mark.parametrize("gap", [None, float("nan")])
def test_missing_values_are_a_cell_of_their_own(tmp_path: Path, gap: float | None) -> None:
    n = 500
    x: list[float | None] = [gap if k % 2 else k / 7.0 for k in range(n)]
    few: list[float | None] = [gap if k % 5 == 1 else float(k % 4) for k in range(n)]
    text = [None if k % 10 == 3 else "a" for k in range(n)]
    lost = [k % 2 == 1 or k % 5 == 1 for k in range(n)]
    frame = pl.DataFrame({"x": x, "few": few, "text": text, "enrolled": [not m for m in lost]})
    cells = empty_cells(written(frame, tmp_path), ["x", "few", "text"])
    expected = {
        ("x in (missing)", 250),
        ("few = (missing)", 100),
        ("few = 1.0", sum(k % 5 != 1 and k % 4 == 1 for k in range(n))),
        ("few = 3.0", sum(k % 5 != 1 and k % 4 == 3 for k in range(n))),
        ("text = (missing)", 50),
    }
    assert {(cell.name, cell.population) for cell in cells} == expected


def test_a_model_with_marks_for_missing_values(tmp_path: Path) -> None:
    frame = people().with_columns(
        age=pl.when(pl.int_range(pl.len()) % 7 == 0).then(None).otherwise(pl.col("age"))
    )
    settings = TableSettings(missing=Missing.INDICATOR)
    coded = CodedTable.of(written(frame, tmp_path), "age + os", settings=settings)
    model = coded.model()
    found = overlap(coded, model)
    prob = model.prob(frame)[0][frame["enrolled"].to_numpy()]
    assert found.estimated_size == pytest.approx((1.0 / prob).sum(), rel=1e-11)
    assert found.population == 5_000
