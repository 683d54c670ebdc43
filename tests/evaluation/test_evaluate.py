"""A metric on the population from tables and ledgers: the same numbers as from arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cli.command import Files
from fedipw.calibration import Entropy
from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    GregMean,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    population_means,
)
from fedipw.evaluation.evaluate import Evaluation, EvaluationPlan, evaluated
from fedipw.evaluation.logged import LoggedSample, Metrics, logged_two_phase
from fedipw.evaluation.phases import CalibratedEnrollment, FittedEnrollment
from fedipw.evaluation.sensitivity import sensitivity_bounds
from fedipw.lab.two_phase import fitted_two_phase
from fedipw.selection.classifiers import Newton
from fedipw.selection.coded import TableSettings
from fedipw.selection.enrollment import EnrollmentStage, enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.steps import Formulas
from fedipw.tables import Ledger, Population, Targets
from fedipw.tables.design import Missing
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan, Replay
from worlds import STEPS, World

SIZE, ROUNDS = 400, 4


@dataclass
class Logged(Files):
    """A population and a ledger on disk, and the metrics of the replies."""

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.where / "rounds")

    def known(self, missing: Missing = Missing.ERROR, l2: float = 0.0) -> EnrollmentStage:
        settings = TableSettings(missing=missing, estimator=Newton(l2))
        people = Population(self.where / "people.parquet")
        return enrollment_stage(people, "age + rich", settings=settings)

    def totals(
        self, size: float | None = None, se: dict[str, float] | None = None
    ) -> EnrollmentStage:
        table, means = self.where / "enrolled.parquet", self.means("age", "rich[yes]")
        return enrollment_stage(Population.from_totals(table, Targets.of(means, se), size))

    def share(self, level: str) -> float:
        return self.people.filter(rich=level).height / self.people.height

    def logged(
        self,
        stage: EnrollmentStage,
        method: str = "fedipw",
        metrics: pl.DataFrame | None = None,
        *,
        missing: Missing = Missing.ERROR,
        allow_missing: bool = False,
        settings: ParticipationSettings | None = None,
    ) -> LoggedSample:
        formulas = Formulas(reply="age + x", availability="age", missing=missing)
        plan = Plan(
            method=method_named(method), formulas=formulas, scratch=self.where,
            settings=settings or ParticipationSettings(),
        )  # fmt: skip
        told = Metrics(self.metrics if metrics is None else metrics)
        return logged_two_phase(stage, self.ledger, told, plan, allow_missing=allow_missing)


def made(where: Path, *, steps: bool = False) -> Logged:
    """Return a world whose rows and metrics are in no order."""
    world = World(
        size=SIZE, rounds=ROUNDS, seed=11, ids=100, covariates=("age", "rich"),
        steps=STEPS if steps else (), enrollment=0.6 * pl.col("age") - 0.5,
        metric=1.0 + pl.col("age") + pl.col("x"),
    )  # fmt: skip
    out = Logged.of(world, where)
    out.rounds = [t.sample(fraction=1.0, shuffle=True, seed=k) for k, t in enumerate(out.rounds)]
    out.people = out.people.sample(fraction=1.0, shuffle=True, seed=3)
    out.metrics = out.metrics.sample(fraction=1.0, shuffle=True, seed=3)
    return out


@pytest.fixture
def world(tmp_path: Path) -> Logged:
    return made(tmp_path).put()


def estimates(found: Evaluation, group: str = "everyone") -> dict[str, tuple[float, float]]:
    return {x.estimator: (x.estimate, x.se) for x in found.estimates if x.group == group}


def from_arrays(world: Logged) -> dict[str, tuple[float, float]]:
    """The same by arrays: enrollment on age and rich, participation on age and x."""
    people = world.people.with_columns(b=(pl.col("rich") == "yes").cast(pl.Float64))
    Z = people.select("age", "b").to_numpy()
    rows = pl.concat([t.with_columns(pl.lit(k).alias("r")) for k, t in enumerate(world.rounds)])
    places = people.select("unit_id", "age").with_row_index("place")
    rows = rows.join(places, on="unit_id", how="left", maintain_order="left")
    values = rows.join(
        world.metrics.with_columns(pl.col("round") - 1), how="left", maintain_order="left",
        left_on=["unit_id", "r"], right_on=["unit_id", "round"],
    )  # fmt: skip
    replied = rows["replied"].to_numpy()
    sample = fitted_two_phase(
        Z, people["enrolled"].to_numpy(), rows.select("age", "x").to_numpy(),
        rows["place"].to_numpy().astype(np.int64), rows["r"].to_numpy().astype(np.int64),
        replied=replied,
    )  # fmt: skip
    greg = GregMean(Z[people["enrolled"].to_numpy()], Z.mean(axis=0))
    lines = population_means(
        sample, values["value"].to_numpy()[replied], [HorvitzThompsonMean(), HajekMean(), greg],
        [Group(size=SIZE)],
    )  # fmt: skip
    return {line.estimator: (line.estimate, line.se) for line in lines}


def test_files_give_the_same_means_and_errors_as_arrays(world: Logged) -> None:
    stage = world.known()
    logged = world.logged(stage)
    found = estimates(evaluated(logged, stage, "fedipw"))
    for name, expected in from_arrays(world).items():
        assert found[name] == pytest.approx(expected, rel=1e-9), name
    assert isinstance(logged.sample.enrollment, FittedEnrollment)
    assert (logged.left_out, logged.unreported, logged.incomplete) == (0, 0, 0)
    assert logged.rounds.tolist() == [1, 2, 3, 4]
    mean = world.metrics["value"].mean()
    assert found["plain"][0] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("steps", [False, True], ids=["one step", "three steps"])
@pytest.mark.parametrize(
    ("method", "l2"),
    [("fedipw", 0.0), ("fedipw", 30.0), ("calibrated-entropy", 0.0), ("calibrated-entropy", 30.0),
     ("efficient", 0.0)],
)  # fmt: skip
def test_weights_are_those_of_the_weights_command(
    tmp_path: Path, steps: bool, method: str, l2: float
) -> None:
    world = made(tmp_path, steps=steps)
    world.put()
    stage = world.known(l2=l2)
    logged = world.logged(
        stage, method, settings=ParticipationSettings(last=2, estimator=Newton(l2))
    )
    assert all(step.fit.l2 == l2 for step in logged.sample.steps)
    plan = Plan(
        method=method_named(method), formulas=Formulas(reply="age + x", availability="age"),
        settings=ParticipationSettings(window=Window.POOLED, estimator=Newton(l2)),
    )  # fmt: skip
    tables = pl.concat(Replay(stage, world.ledger, plan))
    ids = stage.members.frame["unit_id"][logged.members[logged.sample.client]]
    mine = pl.DataFrame({
        "unit_id": ids, "round": logged.rounds[logged.sample.round],
        "mine": logged.sample.weights * ROUNDS / SIZE, "p": logged.sample.prob,
    })  # fmt: skip
    both = tables.join(mine, on=["unit_id", "round"], how="inner")
    assert both.height == tables.height == mine.height
    np.testing.assert_allclose(both["mine"], both["weight"], rtol=1e-9)
    np.testing.assert_allclose(both["p"], both["participation_prob"], rtol=1e-9)
    assert len(logged.sample.steps) == 1 + steps


def test_a_penalty_moves_the_mean_to_the_plain_one_and_its_error_with_it(world: Logged) -> None:
    found = []
    for l2 in (0.0, 30.0, 1e9):
        stage = world.known(l2=l2)
        logged = world.logged(stage, settings=ParticipationSettings(estimator=Newton(l2)))
        found.append(evaluated(logged, stage, "fedipw").moved)
    free, some, full = found
    assert abs(full.difference) < 1e-6 < abs(some.difference) < abs(free.difference)
    assert full.se < 1e-6 < some.se < free.se
    assert full.weighted_se == pytest.approx(full.plain_se, rel=1e-5)


def test_rounds_without_metrics_are_fitted_on_and_not_evaluated(world: Logged) -> None:
    stage = world.known()
    some = world.metrics.filter(pl.col("round").is_in([2, 4]))
    part, whole = world.logged(stage, metrics=some), world.logged(stage)
    assert part.rounds.tolist() == [2, 4]
    assert part.sample.rounds == 2
    chosen = np.isin(whole.sample.round, [1, 3])
    np.testing.assert_allclose(part.sample.prob, whole.sample.prob[chosen], rtol=1e-12)
    np.testing.assert_allclose(part.sample.weights, 2 * whole.sample.weights[chosen], rtol=1e-12)
    assert part.sample.steps[0].rows.rows == whole.sample.steps[0].rows.rows
    by_round = evaluated(whole, stage, "fedipw", EvaluationPlan(by=("round",)))
    alone = evaluated(world.logged(stage, metrics=some.filter(round=2)), stage, "fedipw")
    for name, expected in estimates(alone).items():
        assert estimates(by_round, "round = 2")[name] == pytest.approx(expected, rel=1e-9), name


def test_totals_without_a_size_have_no_sum_and_wider_intervals(world: Logged) -> None:
    found = {}
    for size in (None, float(SIZE)):
        stage = world.totals(size)
        logged = world.logged(stage, "calibrated-entropy")
        assert isinstance(logged.sample.enrollment, CalibratedEnrollment)
        assert logged.sample.enrollment.fraction.any() == (size is not None)
        plan = EvaluationPlan(by=("rich",), odds_ratios=(2.0,))
        found[size] = evaluated(logged, stage, "calibrated-entropy", plan)
    without, known = found[None], found[float(SIZE)]
    line = without.of("horvitz-thompson")
    assert np.isnan(line.estimate)
    assert line.reason == "the size of the group in the population is not known"
    assert without.of("hajek").estimate == pytest.approx(known.of("hajek").estimate, rel=1e-12)
    assert without.of("hajek").se > known.of("hajek").se
    assert without.of("hajek").se_superpopulation is None
    assert "size is not known" in without.sensitivity_reason
    for level in ("no", "yes"):  # no has no target: it takes what yes leaves
        ht, hajek = (known.of(e, f"rich = {level}") for e in ("horvitz-thompson", "hajek"))
        assert abs(ht.estimate - hajek.estimate) < 4 * ht.se
    parts = [
        known.of("horvitz-thompson", f"rich = {v}").estimate * world.share(v) for v in ("no", "yes")
    ]
    assert sum(parts) == pytest.approx(known.of("horvitz-thompson").estimate, rel=1e-9)


def test_standard_errors_of_targets_widen_the_interval(world: Logged) -> None:
    stage = world.totals(float(SIZE))
    base = world.logged(stage, "calibrated-entropy").sample
    phase = base.enrollment
    assert isinstance(phase, CalibratedEnrollment)
    y = world.logged(stage, "calibrated-entropy").values
    (sure,) = population_means(base, y, [HajekMean()])
    wide = replace(base, enrollment=replace(phase, target_error=np.array([0.1, 0.0])))
    (unsure,) = population_means(wide, y, [HajekMean()])
    # one more in mean age moves the mean by the slope of the metric on age, refitted numerically
    ends = []
    for move in (1e-5, -1e-5):
        moved = replace(phase.source, mean=phase.source.mean + np.array([move, 0.0]))
        sample = replace(base, enrollment=CalibratedEnrollment.of(moved, Entropy()))
        ends.append(HajekMean().linear(sample, y, Group()).estimate)
    slope = (ends[0] - ends[1]) / 2e-5
    assert unsure.se**2 - sure.se**2 == pytest.approx((0.1 * slope) ** 2, rel=1e-6)
    through = world.totals(float(SIZE), se={"age": 0.1})
    logged = world.logged(through, "calibrated-entropy")
    assert evaluated(logged, through, "x").of("hajek").se > 1.05 * sure.se


def test_rows_with_missing_values_are_left_out_and_the_sum_with_them(tmp_path: Path) -> None:
    world = made(tmp_path)
    lost = pl.col("unit_id") % 10 == 0
    world.people = world.people.with_columns(pl.when(~lost).then("age").alias("age"))
    world.put()
    stage = world.known(missing=Missing.DROP)
    logged = world.logged(stage, missing=Missing.DROP)
    gone = world.metrics.filter(lost).height
    assert (logged.left_out, logged.incomplete) == (gone, 0)
    assert gone > 0
    kept = world.people.filter(~lost)
    assert logged.population_size == kept.height
    found = evaluated(logged, stage, "fedipw", EvaluationPlan(by=("rich",)))
    parts = [
        found.of("horvitz-thompson", f"rich = {v}").estimate * kept.filter(rich=v).height
        for v in ("no", "yes")
    ]
    whole = found.of("horvitz-thompson").estimate * kept.height
    assert sum(parts) == pytest.approx(whole, rel=1e-9)
    assert any(f"{gone} replies have a missing value" in note for note in found.notes)


def test_replies_without_a_value_leave_no_sum(tmp_path: Path) -> None:
    world = made(tmp_path)
    world.rounds[1] = world.rounds[1].with_columns(
        pl.when(pl.int_range(pl.len()) % 5 > 0).then("x").alias("x")
    )
    world.put()
    stage = world.known()
    logged = world.logged(stage, missing=Missing.DROP)
    assert logged.incomplete == logged.left_out > 0
    line = evaluated(logged, stage, "fedipw").of("horvitz-thompson")
    assert np.isnan(line.estimate)
    assert "left out, so the sum is too small" in line.reason
    with pytest.raises(InputError, match="replies have no metric"):
        world.logged(stage, metrics=world.metrics[5:], missing=Missing.DROP)
    fewer = world.logged(stage, metrics=world.metrics[5:], missing=Missing.DROP, allow_missing=True)
    assert fewer.unreported == 5
    assert "5 replies have no metric" in " ".join(fewer.notes())
    ends = [evaluated(s, stage, "x").of("hajek").estimate for s in (logged, fewer)]
    assert ends[0] == pytest.approx(ends[1], abs=0.1)


def test_the_mean_over_samples_is_one_throughout(world: Logged) -> None:
    stage = world.known()
    logged = world.logged(stage)
    plan = EvaluationPlan(by=("round",), by_samples=True, odds_ratios=(1.0, 3.0), jackknife=8)
    found, s = evaluated(logged, stage, "fedipw", plan), logged.sample
    assert logged.counts is not None
    hajek = np.average(logged.values, weights=logged.counts * s.weights)
    plain = np.average(logged.values, weights=logged.counts)
    assert set(estimates(found)) == {"plain", "hajek"}
    assert found.of("hajek").estimate == pytest.approx(hajek, rel=1e-12)
    assert found.of("plain").estimate == pytest.approx(plain, rel=1e-12)
    assert found.moved.difference == pytest.approx(hajek - plain, abs=1e-12)
    assert found.sensitivity[0].low == pytest.approx(hajek, rel=1e-10)
    assert found.sensitivity[1].low < hajek < found.sensitivity[1].high
    first = s.round == 0
    own = np.average(logged.values[first], weights=(logged.counts * s.weights)[first])
    assert found.of("hajek", "round = 1").estimate == pytest.approx(own, rel=1e-12)


def test_sensitivity_is_that_of_the_hajek_mean(world: Logged) -> None:
    stage = world.known()
    logged = world.logged(stage)
    value = evaluated(logged, stage, "fedipw").of("hajek").estimate - 0.2
    plan = EvaluationPlan(odds_ratios=(2.0,), conclusion=value)
    whole = evaluated(logged, stage, "fedipw", plan)
    (found,) = whole.sensitivity
    s = logged.sample
    prob = 1 / s.enrollment.weights[s.client]
    bounds = sensitivity_bounds(logged.values, prob, s.prob, 2.0, groups=s.client)
    assert (found.low, found.high) == (bounds.low, bounds.high)
    assert whole.reverses_at is not None
    at = sensitivity_bounds(logged.values, prob, s.prob, whole.reverses_at, groups=s.client)
    assert at.low == pytest.approx(value, rel=1e-9)
    quadratic = world.logged(stage, "calibrated-quadratic")
    assert (quadratic.sample.enrollment.weights < 1.0).any()
    refused = evaluated(quadratic, stage, "calibrated-quadratic", plan)
    assert refused.sensitivity == ()
    assert "less than themselves" in refused.sensitivity_reason


def test_a_population_smaller_than_its_enrolled_is_refused(world: Logged) -> None:
    with pytest.raises(InputError, match="population of 20 cannot have"):
        world.logged(world.totals(20.0), "calibrated-entropy")


def test_an_estimate_that_is_not_there_is_an_error(world: Logged) -> None:
    stage = world.known()
    found = evaluated(world.logged(stage), stage, "fedipw")
    with pytest.raises(InputError, match="no greg estimate of nobody"):
        found.of("greg", "nobody")
    assert found.table().height == len(found.estimates) == 4


def test_steps_that_everybody_passed_change_nothing(tmp_path: Path) -> None:
    """Everybody available and invited for sure is a ledger of one step."""
    found = []
    for name, more in (
        ("one", {}),
        ("three", {"available": pl.lit(True), "invite_prob": pl.lit(1.0)}),
    ):
        (tmp_path / name).mkdir()
        world = made(tmp_path / name)
        world.rounds = [table.with_columns(**more) for table in world.rounds]
        world.put()
        stage = world.known()
        found.append(estimates(evaluated(world.logged(stage), stage, "fedipw")))
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        assert found[1][name] == pytest.approx(expected, rel=1e-9), name


def test_when_everybody_replies_only_enrollment_is_uncertain(tmp_path: Path) -> None:
    found = []
    for rounds in (1, ROUNDS):
        (tmp_path / str(rounds)).mkdir()
        world = made(tmp_path / str(rounds))
        world.rounds = [t.with_columns(replied=pl.lit(True)) for t in world.rounds[:rounds]]
        world.metrics = pl.concat(
            pl.DataFrame({"unit_id": t["unit_id"], "round": k, "value": t["unit_id"] * 1.0})
            for k, t in enumerate(world.rounds, start=1)
        )
        world.put()
        stage = world.known()
        logged = world.logged(stage)
        found.append(estimates(evaluated(logged, stage, "fedipw")))
        prob = 1.0 / logged.sample.enrollment.weights
        ids = stage.members.frame["unit_id"].to_numpy()
        expected = float((ids / prob).sum() / (1.0 / prob).sum())
        assert found[-1]["hajek"][0] == pytest.approx(expected, rel=1e-9)
    assert found[0]["hajek"] == pytest.approx(found[1]["hajek"], rel=1e-9)  # no part shrinks
