"""A metric in an audit: the numbers of an evaluation, without the parts too small to show."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fedipw.audit.gather import ODDS_RATIOS, metric_notes, metric_part
from fedipw.audit.values import MetricPart
from fedipw.audit.verdict import verdict
from fedipw.evaluation.evaluate import EvaluationPlan, evaluated
from fedipw.evaluation.logged import LoggedSample, Metrics, logged_two_phase
from fedipw.selection.enrollment import EnrollmentStage, enrollment_stage
from fedipw.tables import Ledger, Population
from worlds import Tables

from .handmade import FAIR, WORTH, answer
from .reference import planned, world


def reported(given: Tables, value: pl.Expr) -> pl.DataFrame:
    """Return a value for each reply, of what is known of the client."""
    return given.log.filter("replied").select("unit_id", "round", value.cast(float).alias("value"))


def sampled(
    given: Tables,
    where: Path,
    metrics: pl.DataFrame,
    targets: dict[str, float] | None = None,
    method: str = "fedipw",
) -> tuple[LoggedSample, EnrollmentStage]:
    replace(given, metrics=metrics).write(where)
    ledger = Ledger(where / "rounds")
    people = Population(where / "people.parquet")
    if targets is not None:
        people = Population.from_totals(where / "enrolled.parquet", targets)
    stage = enrollment_stage(people, later=ledger.covariates)
    values = Metrics.read(where / "loss.parquet")
    return logged_two_phase(stage, ledger, values, planned(method)), stage


def part_of(
    logged: LoggedSample, stage: EnrollmentStage, *by: str, min_cell: int = 10
) -> MetricPart:
    plan = EvaluationPlan(by=by)
    return metric_part(logged, stage, "fedipw", name="loss", plan=plan, min_cell=min_cell)


def everyone(part: MetricPart, estimator: str) -> Any:
    (found,) = (e for e in part.estimates if (e.group, e.estimator) == ("everyone", estimator))
    return found


def test_estimates_are_those_of_the_evaluation_and_small_groups_are_counted(tmp_path: Path) -> None:
    given = world(1)
    logged, stage = sampled(given, tmp_path, reported(given, pl.col("z1") + pl.col("rooms")))
    whole = evaluated(logged, stage, "fedipw", EvaluationPlan(by=("os", "rooms", "round")))
    sizes = {line.group: line.clients for line in whole.estimates}
    limit = sorted(sizes.values())[4]  # some groups are smaller
    part = part_of(logged, stage, "os", "rooms", "round", min_cell=limit)
    kept = [line for line in whole.estimates if sizes[line.group] >= limit]
    assert len(kept) < len(whole.estimates)
    assert part.hidden == len({g for g, n in sizes.items() if n < limit}) > 0
    for got, wanted in zip(part.estimates, kept, strict=True):
        assert (got.group, got.estimator) == (wanted.group, wanted.estimator)
        assert (got.clients, got.replies) == (wanted.clients, wanted.replies)
        values = (got.estimate, got.standard_error, got.low, got.high)
        assert values == (wanted.estimate, wanted.se, wanted.low, wanted.high)
    assert metric_notes(part, limit)[0] == (
        f"{part.hidden} group(s) of the metric have fewer than {limit} clients."
    )
    assert (part.name, part.rounds, part.confidence) == ("loss", 12, 0.95)


def test_everyone_is_shown_however_few_they_are(tmp_path: Path) -> None:
    given = world(2)
    logged, stage = sampled(given, tmp_path, reported(given, pl.col("z1")))
    part = part_of(logged, stage, "os", min_cell=10_000)
    assert {line.group for line in part.estimates} == {"everyone"}
    assert part.hidden == 3


def test_weighting_moved_the_plain_mean_to_that_of_hajek(tmp_path: Path) -> None:
    given = world(3)
    logged, stage = sampled(given, tmp_path, reported(given, pl.col("z1")))
    part = part_of(logged, stage)
    plain, hajek = everyone(part, "plain"), everyone(part, "hajek")
    assert plain.estimate == pytest.approx(reported(given, pl.col("z1"))["value"].mean(), rel=1e-12)
    assert part.moved == pytest.approx(hajek.estimate - plain.estimate, rel=1e-12)
    assert part.moved is not None
    assert part.moved_error is not None
    assert part.moved < -3.0 * part.moved_error  # z1 drives both stages
    assert answer(replace(FAIR, metric=part), WORTH).answer == "Yes"


def test_bounds_start_at_hajek_widen_and_reach_the_plain_mean_at_the_odds_ratio_told(
    tmp_path: Path,
) -> None:
    given = world(4)
    logged, stage = sampled(given, tmp_path, reported(given, pl.col("z1")))
    part = part_of(logged, stage)
    assert tuple(line.odds_ratio for line in part.sensitivity) == ODDS_RATIOS
    first = part.sensitivity[0]
    hajek, plain = everyone(part, "hajek").estimate, everyone(part, "plain").estimate
    assert first.low == pytest.approx(hajek)
    assert first.high == pytest.approx(hajek)
    assert first.weight_error == pytest.approx(0.0, abs=1e-12)
    widths = [line.high - line.low for line in part.sensitivity]
    assert widths == sorted(widths)
    at = part.plain_odds_ratio
    assert at is not None
    assert at > 1.0
    there = evaluated(logged, stage, "fedipw", EvaluationPlan(odds_ratios=(at,))).sensitivity[0]
    assert there.high == pytest.approx(plain, rel=1e-6)  # the plain mean is too high
    assert part.sensitivity_reason == ""


def test_a_metric_that_is_the_same_for_all_is_not_moved(tmp_path: Path) -> None:
    given = world(5)
    logged, stage = sampled(given, tmp_path, reported(given, pl.lit(0.25)))
    part = part_of(logged, stage)
    assert part.moved == 0.0  # not what rounding leaves
    assert everyone(part, "hajek").estimate == pytest.approx(0.25)
    assert answer(replace(FAIR, metric=part), WORTH).answer == "No"


def test_one_reply_has_a_mean_and_no_interval_and_no_number_that_is_not_finite(
    tmp_path: Path,
) -> None:
    given = world(6)
    first = given.rounds[3].filter("replied")["unit_id"][0]
    lone = given.changed(4, replied=pl.col("unit_id") == first)
    logged, stage = sampled(lone, tmp_path, reported(lone, pl.col("z1")).filter(round=4))
    part = part_of(logged, stage)
    plain = everyone(part, "plain")
    assert plain.estimate == given.people.filter(unit_id=first)["z1"][0]
    assert plain.standard_error is plain.low is plain.high is None
    assert plain.reason == "1 client replied: no standard error"
    assert any("1 client replied" in note for note in metric_notes(part, 10))
    audit = replace(FAIR, metric=part)
    json.dumps(replace(audit, verdict=verdict(audit)).to_json(), allow_nan=False)
    assert answer(audit, WORTH).answer == "No"


def test_totals_without_a_size_say_why_there_are_no_bounds(tmp_path: Path) -> None:
    given = world(8)
    logged, stage = sampled(
        given, tmp_path, reported(given, pl.col("z1")), {"z1": 0.0, "os[ios]": 0.3},
        "calibrated-quadratic",
    )  # fmt: skip
    part = part_of(logged, stage)
    assert part.sensitivity == ()
    assert part.plain_odds_ratio is None
    notes = " ".join(metric_notes(part, 10))
    assert "No sensitivity analysis: the population's size is not known" in notes
    assert "horvitz-thompson of everyone: " in notes
    assert everyone(part, "horvitz-thompson").estimate is None
