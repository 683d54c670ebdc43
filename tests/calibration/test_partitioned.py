"""Calibration over partitions: the same weights as from a matrix in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.calibration import (
    Box,
    Distance,
    Entropy,
    InverseLogit,
    Linear,
    Logit,
    Partitioned,
    Quadratic,
    calibrated,
)
from fedipw.errors import InfeasibleError, InputError
from fedipw.numerics import FloatArray
from fedipw.tables import Block, Blocks, Table, Targets
from fedipw.tables.formula import term_of

DISTANCES: list[Distance | InverseLogit] = [
    Quadratic(),
    Quadratic(0.3, 4.0),
    Linear(),
    Entropy(),
    Logit(0.1, 8.0),
    InverseLogit(),
]


def in_blocks(matrix: FloatArray, sizes: list[int], *, memory: int) -> Blocks:
    """Return the rows cut into blocks of these sizes, over and over."""
    blocks, first, k = Blocks(memory=memory), 0, 0
    while first < len(matrix):
        part = matrix[first : first + sizes[k % len(sizes)]]
        columns = np.array(part.T, order="C")
        blocks.append(Block(columns, np.zeros(0, dtype=np.int8), np.empty(0)))
        first, k = first + len(part), k + 1
    return blocks


def clients(n: int, seed: int) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(n, 2)), rng.random(n) < 0.3, rng.exponential(size=n)])
    tilt = rng.random(n) + 0.5
    return X, tilt @ X / tilt.sum()


@pytest.mark.parametrize("distance", DISTANCES, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("memory", [0, 10**9], ids=["scratch file", "memory"])
def test_partitions_give_the_weights_of_the_matrix(
    distance: Distance | InverseLogit, memory: int
) -> None:
    X, mu = clients(3_000, seed=1)
    names = ("a", "b", "c", "d")
    size = 9_000.0 if isinstance(distance, InverseLogit) else None
    whole = calibrated(X, mu, distance=distance, population_size=size, names=names)
    design = Partitioned(in_blocks(X, [700, 1, 300], memory=memory), names)
    cut = calibrated(design, mu, distance=distance, population_size=size)
    np.testing.assert_allclose(cut.weights, whole.weights, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(cut.achieved, mu, rtol=1e-9)
    assert cut.status is whole.status
    np.testing.assert_allclose(cut.deviation, whole.deviation, rtol=1e-12)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    memory=st.sampled_from([0, 2_000, 10**9]),
    seed=st.integers(0, 1000),
)
def test_how_rows_are_cut_does_not_matter(sizes: list[int], memory: int, seed: int) -> None:
    X, mu = clients(150, seed)
    base = np.random.default_rng(seed).random(150) + 0.1
    mu = base @ X / base.sum() * 0.9 + mu * 0.1
    names = ("a", "b", "c", "d")
    whole = calibrated(X, mu, distance=Entropy(), base=base, names=names)
    cut = calibrated(
        Partitioned(in_blocks(X, sizes, memory=memory), names), mu, distance=Entropy(), base=base
    )
    np.testing.assert_allclose(cut.weights, whole.weights, rtol=1e-9)


def test_base_weights_of_zero_and_a_slack_work_alike() -> None:
    X, mu = clients(400, seed=3)
    base = np.arange(400) % 3 * 1.0
    names = ("a", "b", "c", "d")
    design = Partitioned(in_blocks(X, [64], memory=0), names)
    whole = calibrated(X, mu, base=base, slack=Box(0.05), names=names)
    cut = calibrated(design, mu, base=base, slack=Box(0.05))
    np.testing.assert_allclose(cut.weights, whole.weights, rtol=1e-9, atol=1e-12)
    assert (cut.weights[base == 0.0] == 0.0).all()


def test_the_subsample_start_reaches_the_same_weights() -> None:
    X, mu = clients(90_000, seed=4)  # large enough for a start from a subsample
    names = ("a", "b", "c", "d")
    whole = calibrated(X, mu, distance=Entropy(), names=names)
    cut = calibrated(Partitioned(in_blocks(X, [20_000], memory=0), names), mu, distance=Entropy())
    np.testing.assert_allclose(cut.weights, whole.weights, rtol=1e-10)


def test_infeasible_targets_end_in_the_same_error() -> None:
    X, mu = clients(500, seed=5)
    names = ("a", "b", "c", "d")
    mu[2] = 1.2
    with pytest.raises(InfeasibleError) as whole:
        calibrated(X, mu, names=names)
    with pytest.raises(InfeasibleError) as cut:
        calibrated(Partitioned(in_blocks(X, [99], memory=0), names), mu)
    assert str(cut.value) == str(whole.value)


def test_a_table_on_disk_equals_its_matrix(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    people = pl.DataFrame(
        {"age": rng.normal(40, 10, 5_000), "os": rng.choice(["ios", "android"], 5_000)}
    )
    people.write_parquet(tmp_path / "people.parquet")
    targets = Targets.of({"age": 43.0, "age**2": 43.0**2 + 110.0, "os[ios]": 0.4})
    table = Table(tmp_path / "people.parquet")
    design = Partitioned.of_terms(table, [term_of(n, table.schema) for n in targets.names])
    age, ios = people["age"].to_numpy(), (people["os"] == "ios").to_numpy().astype(float)
    whole = calibrated(
        np.column_stack([age, age**2, ios]), targets.values, distance=Entropy(), names=targets.names
    )
    cut = calibrated(design, targets.values, distance=Entropy())
    np.testing.assert_allclose(cut.weights, whole.weights, rtol=1e-9)
    assert cut.names == targets.names


def test_names_of_a_design_are_its_own_and_unique() -> None:
    X, mu = clients(50, seed=7)
    with pytest.raises(InputError, match="named once each"):
        Partitioned(in_blocks(X, [50], memory=0), ("a", "a", "b", "c"))
    design = Partitioned(in_blocks(X, [50], memory=0), ("a", "b", "c", "d"))
    with pytest.raises(InputError, match="names its own columns"):
        calibrated(design, mu, names=["a", "b", "c", "d"])


def test_missing_values_are_named() -> None:
    X, mu = clients(200, seed=8)
    X[17, 1] = np.nan
    with pytest.raises(InputError, match="Balance column b has missing"):
        calibrated(Partitioned(in_blocks(X, [30], memory=0), ("a", "b", "c", "d")), mu)
