"""Balance: against R, against plain numpy, and the same for any partitioning."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedipw.errors import InputError
from fedipw.evaluation.balance import (
    BalanceTable,
    Moments,
    partition_moments,
    standardised_differences,
    weighted_moments,
)
from fedipw.numerics import FloatArray
from fedipw.selection import coded as coding
from fedipw.selection.coded import CodedTable, TableSettings
from fedipw.tables.design import Missing, bound_design
from fedipw.tables.partitions import Block, Blocks, Frame
from fedipw.tables.table import Table
from fedipw.tables.targets import Targets

REFERENCE = Path(__file__).parents[1] / "reference"
R = json.loads((REFERENCE / "ipw200_R.json").read_text())
IN_R = {"z1": "z1", "z2": "z2", "z3[b]": "z3b", "z3[c]": "z3c"}


def ipw200() -> pl.DataFrame:
    frame = pl.read_csv(REFERENCE / "ipw200_fitted_R.csv", null_values="NA")
    return frame.select("z1", "z2", "z3", (pl.col("e") == 1).alias("enrolled"), "w")


def coded_ipw200(folder: Path) -> CodedTable:
    path = folder / "people.parquet"
    ipw200().drop("w").write_parquet(path)
    return CodedTable.of(Table(path), "z1 + z2 + z3")


def enrolled_of(frame: pl.DataFrame, coded: CodedTable) -> tuple[FloatArray, FloatArray]:
    inside = frame.filter("enrolled")
    return coded.design.rows(inside, "enrolled").columns, inside["w"].to_numpy()


def balance_groups(columns: FloatArray, weights: FloatArray | None = None) -> dict[str, Moments]:
    """The enrolled, and where they have weights the weighted enrolled."""
    groups = {"enrolled": weighted_moments(columns)}
    return groups if weights is None else groups | {
        "enrolled weighted": weighted_moments(columns, weights)
    }  # fmt: skip


def smd(table: BalanceTable, group: str) -> dict[str, float]:
    """Differences of a group by column; infinite where the table has none."""
    found = {line.name: line.groups[group].smd for line in table.lines}
    return {name: np.inf if value is None else value for name, value in found.items()}


@pytest.mark.parametrize("small_blocks", [False, True])
def test_differences_equal_those_of_r(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: bool
) -> None:
    if small_blocks:
        monkeypatch.setattr(coding._Rows, "batch", 37)
    coded = coded_ipw200(tmp_path)
    columns, weights = enrolled_of(ipw200(), coded)
    table = BalanceTable.of(
        coded.design.names,
        partition_moments(coded.partitions, coded.frame),
        balance_groups(columns, weights),
        levels=coded.design.levels,
    )
    before, after = smd(table, "enrolled"), smd(table, "enrolled weighted")
    for name, theirs in IN_R.items():
        assert before[name] == pytest.approx(R["smd_before"][theirs], abs=1e-8)
        assert after[name] == pytest.approx(R["smd_after"][theirs], abs=1e-8)
    assert [row.name for row in table.lines] == ["z1", "z2", "z3[a]", "z3[b]", "z3[c]"]
    assert table.scale_from == "population"


def test_the_reference_level_has_the_moments_of_its_own_column(tmp_path: Path) -> None:
    frame, coded = ipw200(), coded_ipw200(tmp_path)
    columns, weights = enrolled_of(frame, coded)
    groups = balance_groups(columns, weights)
    table = BalanceTable.of(
        coded.design.names, partition_moments(coded.partitions, coded.frame), groups,
        levels=coded.design.levels,
    )  # fmt: skip
    row = next(row for row in table.lines if row.name == "z3[a]")
    own = (frame["z3"] == "a").to_numpy().astype(np.float64)
    inside = own[frame["enrolled"].to_numpy()]
    assert row.mean == pytest.approx(own.mean(), rel=1e-12)
    assert row.sd == pytest.approx(own.std(ddof=1), rel=1e-12)
    assert row.groups["enrolled"].mean == pytest.approx(inside.mean(), rel=1e-12)
    assert row.groups["enrolled weighted"].mean == pytest.approx(
        np.average(inside, weights=weights), rel=1e-12
    )


def test_levels_for_rows_without_one_are_rows_too() -> None:
    people = pl.DataFrame({"os": ["a", "b", None, "a"], "age": [1.0, 2.0, 3.0, 5.0]})
    design = bound_design("age + os", people.lazy(), ["age", "os"], missing=Missing.INDICATOR)
    columns = design.rows(people, "people").columns
    table = BalanceTable.of(
        design.names, weighted_moments(columns), balance_groups(columns), levels=design.levels
    )
    assert {row.name: row.mean for row in table.lines} == {
        "age": 2.75, "os[a]": 0.5, "os[b]": 0.25, "os[(missing)]": 0.25,
    }  # fmt: skip
    assert set(smd(table, "enrolled").values()) == {0.0}


def test_a_level_is_derived_only_if_all_others_are_columns() -> None:
    moments = weighted_moments(np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    levels = {"os": ("a", "b", "c", "d"), "one": ("x",)}
    table = BalanceTable.of(["os[b]", "os[c]"], moments, {"g": moments}, levels=levels)
    assert [row.name for row in table.lines] == ["os[b]", "os[c]"]


def test_hidden_lines_are_counted_and_a_difference_without_a_scale_is_none() -> None:
    whole = weighted_moments(np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]))
    group = weighted_moments(np.array([[2.0, 2.0], [1.0, 1.0]]))
    table = BalanceTable.of(["flat", "age"], whole, {"enrolled": group})
    assert table.lines[0].groups["enrolled"].smd is None
    assert table.lines[1].groups["enrolled"].smd == 0.0
    less = table.without({"flat", "nobody's"})
    assert ([line.name for line in less.lines], less.hidden) == (["age"], 1)
    assert less.without({"age"}).hidden == 2


def test_targets_take_their_scale_from_the_weighted_enrolled() -> None:
    columns = np.array([[20.0, 30.0, 60.0, 50.0], [0.0, 1.0, 1.0, 0.0]])
    weights = np.array([1.0, 2.0, 1.0, 4.0])
    groups = balance_groups(columns, weights)
    targets = Targets.of({"age": 45.0, "os[web]": 0.3})
    table = BalanceTable.of_targets(targets, groups, levels={"os": ("ios", "web")})
    assert table.scale_from == "enrolled weighted"
    sd = groups["enrolled weighted"].sd
    assert {row.name: row.mean for row in table.lines} == pytest.approx(
        {"age": 45.0, "os[ios]": 0.7, "os[web]": 0.3}
    )
    assert smd(table, "enrolled")["age"] == pytest.approx((40.0 - 45.0) / sd[0])
    apart = smd(table, "enrolled")
    assert apart["os[web]"] is not None
    assert apart["os[ios]"] == pytest.approx(-apart["os[web]"])
    with pytest.raises(InputError, match="No group 'enrolled weighted'"):
        BalanceTable.of_targets(targets, balance_groups(columns))


def test_a_column_that_does_not_vary_is_balanced_or_infinitely_far() -> None:
    found = standardised_differences(
        np.array([0.1, 0.2, 0.0]), np.array([0.1, 0.1, 0.1]), np.zeros(3)
    )
    assert found.tolist() == [0.0, np.inf, -np.inf]
    assert weighted_moments(np.full((1, 7), 0.1)).sd.tolist() == [0.0]
    away = Frame(np.array([0.1]), np.array([1.0]))
    blocks = Blocks.of_arrays(away.standard(np.full((1, 7), 0.1)).T, np.zeros(7, np.int8))
    assert partition_moments(blocks, away).sd.tolist() == [0.0]


values = st.floats(-1e3, 1e3)


@given(
    columns=arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(2, 40)), elements=values),
    cuts=st.sets(st.integers(1, 39), max_size=6),
    seed=st.integers(0, 2**32 - 1),
    weighted=st.booleans(),
)
def test_any_partitioning_gives_the_moments_of_arrays(
    columns: FloatArray, cuts: set[int], seed: int, weighted: bool
) -> None:
    rng = np.random.default_rng(seed)
    m = columns.shape[1]
    weights = rng.exponential(size=m) * (rng.random(m) < 0.7) + 1e-3 * (np.arange(m) == 0)
    own = weights if weighted else np.ones(m)
    frame = Frame(rng.normal(size=len(columns)), rng.uniform(0.5, 2.0, len(columns)))
    framed = frame.standard(columns.copy())
    edges = [0, *sorted(c for c in cuts if c < m), m]
    blocks = Blocks.of(
        [
            Block(framed[:, a:b], np.zeros(b - a, np.int8), own[a:b] if weighted else np.empty(0))
            for a, b in pairwise(edges)
        ]
    )
    found, known = partition_moments(blocks, frame), weighted_moments(columns, own)
    assert found.rows == known.rows
    np.testing.assert_allclose(found.mean, known.mean, rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(found.square, known.square, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(known.mean, np.average(columns, axis=1, weights=own), atol=1e-10)


@given(
    columns=arrays(np.float64, (2, 9), elements=values),
    weights=arrays(np.float64, 9, elements=st.floats(0.1, 10.0)),
    factor=st.floats(1e-6, 1e6),
)
def test_a_common_factor_of_weights_changes_nothing(
    columns: FloatArray, weights: FloatArray, factor: float
) -> None:
    one, other = weighted_moments(columns, weights), weighted_moments(columns, factor * weights)
    np.testing.assert_allclose(other.mean, one.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(other.sd, one.sd, rtol=1e-6, atol=1e-9)


def test_moments_travel_to_workers() -> None:
    found = pickle.loads(pickle.dumps(weighted_moments(np.array([[1.0, 2.0]]))))
    assert isinstance(found, Moments)
    assert found.mean == [1.5]


X = np.array([[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(
    ("columns", "weights", "message"),
    [
        (np.empty((2, 0)), None, "must be"),
        (np.empty(3), None, "must be"),
        (np.array([[1.0, np.nan]]), None, "missing or infinite"),
        (X, np.ones(2), "expected 3"),
        (X, np.array([1.0, -1.0, 1.0]), "not negative"),
        (X, np.array([1.0, np.nan, 1.0]), "finite"),
        (X, np.zeros(3), "sum to 0"),
    ],
)
def test_bad_input_is_refused(
    columns: FloatArray, weights: FloatArray | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        weighted_moments(columns, weights)


def test_bad_tables_are_refused() -> None:
    good = weighted_moments(X)
    with pytest.raises(InputError, match="two rows"):
        _ = weighted_moments(X[:, :1]).sd
    with pytest.raises(InputError, match="names"):
        BalanceTable.of(["a", "a"], good, {"g": good})
    with pytest.raises(InputError, match="Group 'g' has 2 columns"):
        BalanceTable.of(["a"], good, {"g": weighted_moments(np.ones((2, 3)))})
    with pytest.raises(InputError, match="no group"):
        BalanceTable.of_targets(Targets.of({"a": 1.0}), {})
    blocks = Blocks.of_arrays(np.array([[1.0], [np.nan]]), np.zeros(2, np.int8))
    with pytest.raises(InputError, match="missing, infinite"):
        partition_moments(blocks)
    negative = Blocks.of_arrays(np.ones((2, 1)), np.zeros(2, np.int8), -np.ones(2))
    with pytest.raises(InputError, match="not negative"):
        partition_moments(negative)


def test_rows_left_out_under_drop_are_not_in_the_population(tmp_path: Path) -> None:
    path = tmp_path / "people.parquet"
    people = {"x": [1.0, None, 3.0, 8.0], "enrolled": [True, False, True, False]}
    pl.DataFrame(people).write_parquet(path)
    coded = CodedTable.of(Table(path), "x", settings=TableSettings(missing=Missing.DROP))
    assert partition_moments(coded.partitions, coded.frame).mean == pytest.approx([4.0])
