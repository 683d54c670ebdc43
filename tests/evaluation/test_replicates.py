"""Replicate weights: what other tools make of them is the jackknife's error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import fedipw
from fedipw.evaluation.estimators import (
    Group,
    HajekMean,
    HorvitzThompsonMean,
    MeanEstimator,
    jackknife_means,
    population_means,
)
from fedipw.evaluation.phases import KnownEnrollment
from fedipw.evaluation.replicates import jackknife_weights
from fedipw.evaluation.sample import TwoPhase
from fedipw.evaluation.statistics import Difference, Ratio, Total
from fedipw.numerics import FloatArray
from two_phase_worlds import drawn_world
from worlds import MEASURED, drawn

FOLDER = Path(__file__).parents[1] / "reference"
Statistic = Callable[[FloatArray], float]


def spread(again: FloatArray, statistic: Statistic) -> float:
    """The variance (E50) from replicate weights (m, G) alone."""
    each = np.array([statistic(column) for column in again.T])
    count = len(each)
    return float((count - 1) / count * ((each - each.mean()) ** 2).sum())


def weights_of(table: pl.DataFrame) -> FloatArray:
    return table.select(pl.col("^rep_[0-9]+$")).to_numpy()


def test_the_plain_formula_gives_what_rs_replicate_design_gives() -> None:
    table = pl.read_csv(FOLDER / "replicates.csv")
    expected = json.loads((FOLDER / "replicates_R.json").read_text())
    y, n = table["value"].to_numpy(), table["n"].to_numpy()
    rich = (table["rich"] == "yes").to_numpy()
    statistics: dict[str, Statistic] = {
        "mean": lambda w: float(np.average(y, weights=w)),
        "total": lambda w: float(w @ y),
        "ratio": lambda w: float((w @ y) / (w @ n)),
        "difference": lambda w: float(
            np.average(y[rich], weights=w[rich]) - np.average(y[~rich], weights=w[~rich])
        ),
    }
    for name, statistic in statistics.items():
        found = statistic(table["weight"].to_numpy())
        assert found == pytest.approx(expected[name]["estimate"], rel=1e-12), name
        se = np.sqrt(spread(weights_of(table), statistic))
        assert se == pytest.approx(expected[name]["se"], rel=1e-10), name


@pytest.mark.parametrize("kind", ["fitted", "calibrated"])
def test_with_the_same_seed_they_hold_the_first_sum_of_the_jackknife(kind: str) -> None:
    world = drawn_world(np.random.default_rng(21), 300)
    sample = world.sample if kind == "fitted" else world.calibrated()
    y, x, group = world.y, world.x, Group(size=300.0)
    again = jackknife_weights(sample, 25, np.random.default_rng(4))
    sides = world.sides
    one, two = (side.flags(sample) * y / float(side.size or 0.0) for side in sides)
    cases: list[tuple[MeanEstimator, Group, Statistic]] = [
        (HajekMean(), group, lambda w: float(np.average(y, weights=w))),
        (Ratio(x), group, lambda w: float((w @ y) / (w @ x))),
        (Total.over(HorvitzThompsonMean(), [group]), group, lambda w: float(w @ y)),
        (
            Difference.between(HorvitzThompsonMean(), [sides]), sides.both(),
            lambda w: float(w @ one - w @ two),
        ),
    ]  # fmt: skip
    for estimator, group, statistic in cases:
        (line,) = jackknife_means(
            sample, y, [estimator], [group], rng=np.random.default_rng(4), count=25
        )
        u = estimator.linear(sample, y, group).values[:, None]
        taken = 0.0 if line.reason else float(sample.finite(u)[0])  # too little was left
        found = spread(again, statistic)
        assert line.se**2 + taken == pytest.approx(found, rel=1e-9)
        assert statistic(sample.weights) == pytest.approx(line.estimate, rel=1e-12)


def test_without_fits_leaving_out_each_client_is_the_linearised_error_by_leverage() -> None:
    # dividing by one minus leverage leaves out exactly, so the sums differ by their centre alone
    rng = np.random.default_rng(2)
    n = 40
    client = np.arange(n)
    sample = TwoPhase(
        client=client, round=0 * client, prob=np.ones(n), rounds=1,
        enrollment=KnownEnrollment(weights=1e12 * rng.uniform(1.0, 6.0, n)),
    )  # fmt: skip
    y = rng.normal(size=n)
    again = jackknife_weights(sample, n, rng)
    assert ((again == 0.0).sum(axis=0) == 1).all()
    each = np.array([np.average(y, weights=w) for w in again.T])
    (line,) = population_means(sample, y, [HajekMean()])
    found = spread(again, lambda w: float(np.average(y, weights=w)))
    centre = n * (each.mean() - line.estimate) ** 2
    assert line.se**2 == pytest.approx(found * n / (n - 1) + centre, rel=1e-9)


def test_the_file_is_the_table_and_its_scales_give_the_errors(tmp_path: Path) -> None:
    tables = drawn(MEASURED)
    tables.write(tmp_path)
    given: tuple[Any, ...] = (tables.metrics, tables.people, tmp_path / "rounds")
    out = tmp_path / "replicates.parquet"
    found = fedipw.evaluate(*given, replicate_weights=out, replicates=40, seed=3)
    made, jackknife = found.replicates, fedipw.evaluate(*given, jackknife=40, seed=3)
    assert made is not None
    assert made.table.equals(pl.read_parquet(out))
    assert made.table.columns == [
        "unit_id", "round", "weight", *(f"rep_{g}" for g in range(1, 41)),
    ]  # fmt: skip
    keys = made.table.select("unit_id", "round")
    assert keys.sort("unit_id", "round").equals(
        tables.metrics.select("unit_id", "round").sort("unit_id", "round")
    )
    y = keys.join(tables.metrics, on=["unit_id", "round"], maintain_order="left")[
        "value"
    ].to_numpy()
    line, w = jackknife.of("hajek"), made.table["weight"].to_numpy()
    assert np.average(y, weights=w) == pytest.approx(line.estimate, rel=1e-12)
    assert w @ y == pytest.approx(240 * found.of("horvitz-thompson").estimate, rel=1e-12)
    wide = spread(weights_of(made.table), lambda w: float(np.average(y, weights=w)))
    assert made.scale == 39 / 40
    assert made.scale_finite is not None
    assert made.scale_finite < made.scale  # nothing taken off is too wide, not too narrow
    finite = wide * made.scale_finite / made.scale
    assert np.sqrt(finite) == pytest.approx(line.se, rel=1e-9)
    again = fedipw.evaluate(*given, replicates=40, seed=3).replicates
    other = fedipw.evaluate(*given, replicates=40, seed=4).replicates
    assert again is not None
    assert other is not None
    assert again.table.equals(made.table)
    assert not other.table.equals(made.table)
    assert made.to_json()["freedom"] == 39
