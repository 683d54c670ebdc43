"""The figure's numbers: orderings and ranges, small and seeded."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.lab.figure1 import FigureSettings, reproduce
from fedipw.lab.mechanisms import LogisticEnrollment
from fedipw.lab.scenario import Scenario
from fedipw.lab.theory import error_parts

FILES = {
    "errors.csv",
    "figure1.png",
    "figure1.svg",
    "index.html",
    "manifest.json",
    "results.csv",
    "summary.csv",
}


@pytest.fixture(scope="module")
def limits() -> dict[str, float]:
    """Excess loss of each scheme's limit, mean over ten seeds of the paper's testbed."""
    methods = ("fedavg", "participation-only", "fedipw", "oracle", "collapsed")
    found: dict[str, list[float]] = {name: [] for name in methods}
    for seed in range(10):
        scenario = Scenario(seed=seed, rounds=40, methods=methods)
        run = scenario.simulation()
        run.advance(40)
        target = scenario.objective(run.federation)
        for name in methods:
            part = error_parts(target, run.limits[name], np.zeros(6))
            found[name].append(part.limit_excess_loss)
    return {name: float(np.mean(values)) for name, values in found.items()}


def test_limits_lie_where_independent_runs_put_them(limits: dict[str, float]) -> None:
    """Means over ten other seeds of a separate implementation, within a third or 0.0006.

    Ten seeds leave a standard error of 3% (FedAvg) to 40% (FedIPW, oracle) of these means.
    """
    measured = {
        "fedavg": 0.035,
        "participation-only": 0.0140,
        "fedipw": 0.0005,
        "oracle": 0.0009,
        "collapsed": 0.0018,
    }
    for name, value in measured.items():
        assert abs(limits[name] - value) < max(value / 3, 0.0006), (name, limits[name])


def test_limits_are_ordered_as_panel_a_shows(limits: dict[str, float]) -> None:
    assert limits["fedavg"] > 2 * limits["participation-only"]
    assert limits["participation-only"] > 5 * limits["collapsed"] / 2
    assert limits["collapsed"] > limits["fedipw"]
    assert abs(limits["fedipw"] - limits["oracle"]) < 0.001


def test_the_gap_widens_with_enrollment_strength() -> None:
    """Participation-only minus FedIPW at the limit, mean over four seeds, common chance."""
    gaps = []
    for strength in (0.0, 0.5, 1.0, 1.5):
        seeds = []
        for seed in range(4):
            scenario = Scenario(seed=seed, rounds=20, methods=("participation-only", "fedipw"))
            scenario = replace(scenario, enrollment=LogisticEnrollment(strength=strength))
            run = scenario.simulation()
            run.advance(20)
            target = scenario.objective(run.federation)
            only, both = (
                error_parts(target, run.limits[m], np.zeros(6)).limit_excess_loss
                for m in run.methods
            )
            seeds.append(only - both)
        gaps.append(np.mean(seeds))
    assert abs(gaps[0]) < 0.001
    assert np.all(np.diff(gaps) > 0.002)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("figure") / "out"
    steps: list[tuple[int, int]] = []
    reproduce(out, FigureSettings(seeds=2, rounds=60), lambda *done: steps.append(done))
    assert steps == [(k, 10) for k in range(1, 11)]
    return out


def test_all_files_are_there_and_nothing_else(made: Path) -> None:
    assert {p.name for p in made.iterdir()} == FILES
    assert {p.name for p in made.parent.iterdir()} == {"out"}


def test_results_and_summary_agree(made: Path) -> None:
    rows = pl.read_csv(made / "results.csv")
    assert rows.columns == ["panel", "method", "x", "seed", "excess_loss", "distance"]
    assert rows.filter(pl.col("panel") == "A").height == 4 * 60 * 2
    assert rows.filter(pl.col("panel") == "B").height == 4 * 5 * 2
    with (made / "summary.csv").open() as file:
        summary = list(csv.DictReader(file))
    assert list(summary[0]) == ["panel", "method", "x", "mean", "sd", "n", "infeasible"]
    for row in summary[:: len(summary) // 25]:
        mine = rows.filter(
            (pl.col("panel") == row["panel"])
            & (pl.col("method") == row["method"])
            & (pl.col("x") == float(row["x"]))
        )["excess_loss"].to_numpy()
        assert np.isclose(float(row["mean"]), mine.mean())
        assert np.isclose(float(row["sd"]), mine.std(ddof=1))
        assert (row["n"], row["infeasible"]) == ("2", "0")


def test_panel_b_is_the_tail_of_panel_a_at_strength_one(made: Path) -> None:
    rows = pl.read_csv(made / "results.csv")
    tail = rows.filter((pl.col("panel") == "A") & (pl.col("x") > 48))
    means = tail.group_by("method", "seed").agg(pl.col("excess_loss", "distance").mean())
    point = rows.filter((pl.col("panel") == "B") & (pl.col("x") == 1.0))
    joined = point.join(means, on=["method", "seed"])
    assert joined.height == 8
    for column in ("excess_loss", "distance"):
        np.testing.assert_allclose(joined[column], joined[f"{column}_right"], rtol=1e-12)


def test_the_same_seed_gives_the_same_bytes_whatever_the_processes(
    made: Path, tmp_path: Path
) -> None:
    reproduce(tmp_path / "again", FigureSettings(seeds=2, rounds=60, workers=1))
    for name in ("results.csv", "summary.csv", "errors.csv", "figure1.svg"):
        assert (tmp_path / "again" / name).read_bytes() == (made / name).read_bytes(), name


def test_the_manifest_holds_settings_versions_and_seeds(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["seeds"] == [0, 1]
    assert manifest["settings"]["rounds"] == 60
    assert manifest["scenario"]["population"]["design_seed"] == 12345
    assert {"fedipw", "numpy", "numba"} <= set(manifest["versions"])
    assert manifest["least_enrollment_prob"]["2.0"] < 0.01


def test_one_panel_alone(tmp_path: Path) -> None:
    reproduce(tmp_path / "a", FigureSettings(panels="A", seeds=1, rounds=10, workers=1))
    assert pl.read_csv(tmp_path / "a" / "results.csv")["panel"].unique().to_list() == ["A"]
    assert {p.name for p in (tmp_path / "a").iterdir()} == FILES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"panels": "X"}, "one or more of A, B"),
        ({"panels": "AA"}, "each once"),
        ({"panels": ""}, "one or more"),
        ({"seeds": 0}, "--seeds must be at least 1"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"workers": 0}, "--workers must be at least 1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FigureSettings(**settings)  # type: ignore[arg-type]
