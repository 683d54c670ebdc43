"""Runs of studies: what they hold, what they resume from, and methods that fail."""

import json
import os
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.combining.tail import tail_length
from fedipw.errors import InputError, WorkerLostError
from fedipw.lab.comparison import StudyTables
from fedipw.lab.mechanisms import LogisticEnrollment
from fedipw.lab.pool import pooled
from fedipw.lab.scenario import PropensitySettings, Scenario, TrainingSettings
from fedipw.lab.study import curve_rounds, kept_parts, run_study
from fedipw.lab.study_file import Case, Measure, Study
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import error_parts

TABLES = ("results.parquet", "curves.parquet", "summary.parquet")
FILES = {
    "comparison.csv",
    "curves.png",
    "curves.svg",
    "curves.parquet",
    "figure.png",
    "figure.svg",
    "index.html",
    "manifest.json",
    "parts",
    "ranks.csv",
    "results.parquet",
    "study.json",
    "summary.csv",
    "summary.parquet",
}
BASE = Scenario(
    rounds=20, methods=("fedavg", "participation-only", "fedipw"), population=Testbed(size=100)
)
FEW = LogisticEnrollment(rate=0.06)  # six clients: some seeds cannot be calibrated, or fitted


def study_of(*, seeds: tuple[int, ...] = (0, 1), **scenarios: Scenario) -> Study:
    return Study(
        cases=tuple(Case(name=n, title=n, scenario=s) for n, s in scenarios.items()), seeds=seeds
    )


STUDY = study_of(plain=BASE, opposite=replace(BASE, methods=("oracle", "fedavg"), rounds=10))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyTables]:
    out = tmp_path_factory.mktemp("study") / "out"
    steps: list[tuple[int, int]] = []
    tables = run_study(STUDY, out, progress=lambda *done: steps.append(done))
    assert steps == [(k, 4) for k in range(5)]
    return out, tables


@pytest.fixture
def copied(made: tuple[Path, StudyTables], tmp_path: Path) -> Path:
    """A finished study without what was made of its parts."""
    out = tmp_path / "copy"
    out.mkdir()
    shutil.copy(made[0] / "study.json", out)
    shutil.copytree(made[0] / "parts", out / "parts")
    return out


def same_tables(one: Path, two: Path) -> bool:
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in TABLES)


def test_all_files_are_there_and_nothing_else(made: tuple[Path, StudyTables]) -> None:
    out, _ = made
    assert {p.name for p in out.iterdir()} == FILES
    assert {p.name for p in out.parent.iterdir()} == {"out"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["references"] == {"plain": "participation-only", "opposite": "oracle"}
    assert manifest["settings"] == json.loads((out / "study.json").read_text())
    assert set(manifest["seconds"]["jobs"]) == {"plain", "opposite"}


def test_rows_are_what_single_runs_give(made: tuple[Path, StudyTables]) -> None:
    scenario = replace(BASE, seed=1)
    run = scenario.simulation()
    run.advance(20)
    target, history = scenario.objective(run.federation), run.history()
    best = target.minimum()
    found = made[1].results
    assert found.height == 2 * 3 + 2 * 2
    for name in scenario.methods:
        row = found.row(
            by_predicate=(pl.col("scenario") == "plain")
            & (pl.col("method") == name)
            & (pl.col("seed") == 1),
            named=True,
        )
        losses = target.losses(history.of(name)) - best.value
        average = target.losses(history.tail_average(name))[0] - best.value
        parts = error_parts(target, run.limits[name], history.of(name)[-1])
        assert row["excess_loss"] == pytest.approx(losses[-1], rel=1e-10)
        assert row["tail_excess_loss"] == pytest.approx(average, rel=1e-10)
        assert row["mean_tail_loss"] == pytest.approx(losses[-tail_length(20, 0.2) :].mean())
        assert row["bias"] == parts.bias
        assert row["limit_excess_loss"] == parts.limit_excess_loss
        whole = row["optimisation"] + row["lottery"] + row["bias"]
        assert whole == pytest.approx(row["excess_loss"], abs=1e-12)
        assert row["enrolled_size"] == run.federation.population.enrolled_size
        assert row["mean_replies"] == history.replies.mean()
        assert row["failure"] is None
        curve = made[1].curves.filter(
            (pl.col("scenario") == "plain") & (pl.col("method") == name) & (pl.col("seed") == 1)
        )
        assert curve["round"].to_list() == curve_rounds(20).tolist()
        np.testing.assert_allclose(curve["excess_loss"], losses[curve["round"]], rtol=1e-9)


def test_order_is_scenarios_seeds_methods(made: tuple[Path, StudyTables]) -> None:
    rows = made[1].results.select("scenario", "seed", "method").rows()
    assert rows == [
        (case.name, seed, method)
        for case in STUDY.cases
        for seed in STUDY.seeds
        for method in case.scenario.methods
    ]


def test_two_processes_give_the_same_bytes(made: tuple[Path, StudyTables], tmp_path: Path) -> None:
    run_study(STUDY, tmp_path / "two", workers=2)
    assert same_tables(made[0], tmp_path / "two")


def test_only_what_is_missing_is_run(made: tuple[Path, StudyTables], copied: Path) -> None:
    files = sorted((copied / "parts").glob("*.parquet"))
    files[0].unlink()
    files[2].write_bytes(files[2].read_bytes()[:500])  # cut short
    files[3].write_bytes(b"")
    kept = files[1].stat().st_mtime_ns
    steps: list[tuple[int, int]] = []
    run_study(STUDY, copied, progress=lambda *done: steps.append(done))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert files[1].stat().st_mtime_ns == kept
    assert same_tables(made[0], copied)


def test_comparing_anew_runs_nothing(made: tuple[Path, StudyTables], copied: Path) -> None:
    other = replace(STUDY, measure=Measure.LAST, reference="fedavg")
    tables = run_study(other, copied)
    assert json.loads((copied / "manifest.json").read_text())["jobs_run"] == 0
    assert tables.results.equals(made[1].results)
    assert not tables.summary.equals(made[1].summary)
    assert set(tables.comparison["reference"]) == {"fedavg"}


def test_parts_of_other_settings_are_refused(copied: Path) -> None:
    with pytest.raises(InputError, match=r"seeds was \[0, 1\], is now \[0, 2\]. Choose another"):
        run_study(replace(STUDY, seeds=(0, 2)), copied)
    cases = (replace(STUDY.cases[0], scenario=replace(BASE, rounds=21)), STUDY.cases[1])
    with pytest.raises(InputError, match=r"scenarios.plain.rounds was 20, is now 21"):
        run_study(replace(STUDY, cases=cases), copied)
    with pytest.raises(InputError, match="scenarios in another order"):
        run_study(replace(STUDY, cases=STUDY.cases[::-1]), copied)
    (copied / "study.json").write_text("{")
    with pytest.raises(InputError, match=r"study.json is damaged"):
        run_study(STUDY, copied)
    (copied / "study.json").unlink()
    with pytest.raises(InputError, match=r"parts of a study without its study.json"):
        run_study(STUDY, copied)


def test_a_part_of_something_else_is_refused(copied: Path) -> None:
    one, two = sorted((copied / "parts").glob("*.parquet"))[:2]
    shutil.copy(two, one)
    with pytest.raises(InputError, match=r"scenario-000-seed-0.parquet is not of this study"):
        run_study(STUDY, copied)
    pl.DataFrame({"mine": [1]}).write_parquet(one)
    with pytest.raises(InputError, match="is not of this study"):
        run_study(STUDY, copied)


def test_one_process_at_a_time(copied: Path) -> None:
    with (
        kept_parts(copied, STUDY),
        pytest.raises(InputError, match=r"parts is in use: process \d+ runs a study"),
        kept_parts(copied, STUDY),
    ):
        pass


def test_a_failing_method_keeps_its_row_and_leaves_the_others_alone(tmp_path: Path) -> None:
    few = replace(
        BASE, methods=("fedavg", "fedipw", "calibrated-quadratic"), enrollment=FEW, rounds=10
    )
    wild = replace(few, enrollment=BASE.enrollment, training=TrainingSettings(step_size=1e300))
    study = study_of(few=few, wild=wild)
    results = run_study(study, tmp_path / "all").results
    alone = replace(few, methods=("fedavg",))
    single = run_study(study_of(few=alone), tmp_path / "one").results
    rows = results.filter(pl.col("scenario") == "few")
    assert rows.filter(pl.col("method") == "fedavg").equals(single)
    failures = dict(rows.select(pl.concat_str("method", "seed"), "failure").iter_rows())
    assert "separate(s) selected from non-selected" in failures["fedipw0"]
    assert failures["calibrated-quadratic0"] is None  # targets out of reach are met softly
    assert failures["fedipw1"] is None
    lost = results.filter(pl.col("failure").is_not_null())
    assert lost["tail_excess_loss"].null_count() == lost.height
    diverged = results.filter(pl.col("scenario") == "wild")["failure"]
    assert all("diverged" in text for text in diverged)
    page = (tmp_path / "all" / "index.html").read_text()
    assert "FedIPW failed in 1 of 2 seeds. Seed 0: " in page


def test_a_run_without_limits_has_none(tmp_path: Path) -> None:
    scenario = replace(BASE, methods=("fedavg",), propensity=PropensitySettings(history=True))
    results = run_study(study_of(seeds=(0,), a=scenario), tmp_path / "out").results
    assert results["limit_excess_loss"].to_list() == [None]
    assert results["limit_failure"].to_list() == [None]
    assert results["excess_loss"].null_count() == 0


def test_a_scenario_that_cannot_be_built_is_told_before_anything_runs(tmp_path: Path) -> None:
    bad = replace(BASE, propensity=PropensitySettings(enrollment_columns=("z1", "age")))
    with pytest.raises(InputError, match=r"Scenario 'bad': .*age"):
        run_study(study_of(good=BASE, bad=bad), tmp_path / "out")
    assert not list((tmp_path / "out" / "parts").glob("*.parquet"))
    with pytest.raises(InputError, match="--workers must be at least 1"):
        run_study(STUDY, tmp_path / "out", workers=0)


def _ending(number: int) -> int:
    if number == 3:
        os._exit(9)
    return number


def test_a_lost_worker_is_an_error_that_says_so() -> None:
    with pytest.raises(WorkerLostError, match="ended from outside"):
        list(pooled(_ending, range(6), 2))


def test_who_asks_for_no_more_ends_the_workers() -> None:
    results = pooled(abs, [-1, -2, -3], 2, warm=0)
    assert isinstance(results, Generator)
    assert next(results) in {1, 2, 3}
    results.close()
    assert sorted(pooled(abs, [-1, 2], 1)) == [1, 2]
