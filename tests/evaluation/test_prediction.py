"""Prediction-powered means: closed forms, folds, tuned powers, refusals, coverage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.special import expit
from scipy.stats import binom
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor

import fedipw
from cli.command import Files
from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    EVERYONE,
    GregMean,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    population_means,
)
from fedipw.evaluation.phases import KnownEnrollment, client_sums
from fedipw.evaluation.prediction import (
    NAME,
    CrossFitted,
    PredictionPoweredMean,
    Regressor,
    checked_regression,
)
from fedipw.evaluation.sample import Clusters, TwoPhase
from fedipw.lab.two_phase import fitted_two_phase
from fedipw.numerics import FloatArray, IntArray
from fedipw.selection.enrollment import enrollment_stage
from fedipw.tables import Population
from fedipw.tables.cells import table_cells
from fedipw.weighting.settings import Settings
from worlds import World


@dataclass(frozen=True, eq=False)
class Drawn:
    """A two-phase sample with both stages fitted, its covariates and values."""

    Z: FloatArray  # (N, 2)
    ids: IntArray  # (n,) of the enrolled
    sample: TwoPhase
    values: FloatArray  # (m,)
    truth: float

    def means(self, fit: CrossFitted, inside: Any = slice(None)) -> FloatArray:
        return np.array([model.at(self.Z[inside]).mean() for model in fit.models])

    def fit(self, regression: Any, **more: Any) -> CrossFitted:
        named = Regressor.named(regression)
        return CrossFitted.of(named, self.Z[self.ids], self.sample, self.values, **more)

    def clustered(self, code: IntArray) -> Drawn:
        """Return it with clients that belong together."""
        return replace(self, sample=replace(self.sample, clusters=Clusters(code=code)))

    def tuned(self, regression: Any, group: Group | None = None) -> PredictionPoweredMean:
        fit = self.fit(regression)
        means = {EVERYONE: self.means(fit)}
        groups = [Group() if group is None else group]
        return PredictionPoweredMean.tuned(fit, means, self.sample, self.values, groups)


def drawn(seed: int, bend: float = 2.0, size: int = 500, rounds: int = 2) -> Drawn:
    """Return a draw from the same population; ``bend`` is how much the metric is a step of Z."""
    fixed = np.random.default_rng(5)
    Z = fixed.normal(size=(size, 2))
    own = bend * (np.abs(Z[:, 0]) > 0.7) + fixed.normal(size=size)
    y = own[:, None] + 0.3 * fixed.normal(size=(size, rounds))
    rng = np.random.default_rng([seed, 8])
    enrolled = rng.random(size) < expit(-0.3 + 0.6 * Z[:, 0])
    ids = np.flatnonzero(enrolled)
    replied = rng.random(rounds * len(ids)) < np.tile(expit(0.3 * Z[ids, 1]), rounds)
    sample = fitted_two_phase(
        Z, enrolled, np.tile(Z[ids], (rounds, 1)), np.tile(ids, rounds),
        np.repeat(np.arange(rounds), len(ids)), replied=replied,
    )  # fmt: skip
    return Drawn(Z, ids, sample, y[ids][sample.client, sample.round], float(y.mean()))


def fixed_mean(
    own: FloatArray, fold_of: IntArray, means: FloatArray, power: float
) -> PredictionPoweredMean:
    return PredictionPoweredMean(
        own=own, fold_of=fold_of, means={EVERYONE: means}, powers={EVERYONE: power}, fixed=True
    )


def tree(leaves: int = 8) -> DecisionTreeRegressor:
    return DecisionTreeRegressor(max_leaf_nodes=leaves, min_samples_leaf=5, random_state=0)


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_over_every_draw_and_every_division_into_folds_the_sum_is_unbiased(power: float) -> None:
    """Any two fixed functions predict; the known size takes the place of the sum of weights."""
    rng = np.random.default_rng(1)
    n, y, pi = 4, rng.normal(size=4), rng.uniform(0.2, 0.9, 4)
    predicted = rng.normal(size=(2, n))  # by two models
    mean = total = variance = second = 0.0
    for folds, flags in product(product([0, 1], repeat=n), product([True, False], repeat=n)):
        prob = float(np.where(flags, pi, 1 - pi).prod()) / 2**n
        total += prob
        ids = np.flatnonzero(flags)
        if not len(ids):
            continue  # an empty sum
        fold = np.array(folds)[ids]
        sample = TwoPhase(
            client=np.arange(len(ids)), round=np.zeros(len(ids), dtype=np.int64),
            prob=np.ones(len(ids)), rounds=1,
            enrollment=KnownEnrollment(weights=1 / pi[ids], population_size=n),
        )  # fmt: skip
        made = fixed_mean(predicted[fold, ids], fold, predicted.mean(axis=1), power)
        left = y[ids] - power * made.centred(sample, Group())
        linear = HorvitzThompsonMean().linear(sample, left, Group(size=n))
        mean += prob * linear.estimate
        second += prob * linear.estimate**2
        variance += prob * float(sample.variance(linear.values[:, None]).variance[0])
    assert total == pytest.approx(1.0, abs=1e-12)
    assert mean == pytest.approx(y.mean(), rel=1e-12)
    # what drawing the folds adds, as far as the two models differ: of the order 1/N
    apart = predicted - predicted.mean(axis=1, keepdims=True)
    folded = (power / n) ** 2 * ((apart[0] - apart[1]) ** 2).sum() / 4
    assert second - mean**2 == pytest.approx(variance + folded, rel=1e-12)


def test_the_estimate_is_hajeks_mean_moved_by_each_folds_own_difference() -> None:
    world = drawn(1)
    sample, y, fit = world.sample, world.values, world.fit(tree())
    means, power = world.means(fit), 0.6
    made = fixed_mean(fit.own, fit.fold_of, means, power)
    w, fold = sample.weights, fit.fold_of[sample.client]
    expected = float(w @ y) / w.sum()
    for k, mean in enumerate(means):
        mine = fold == k
        own = float(w[mine] @ fit.models[k].at(world.Z[world.ids])[sample.client[mine]])
        expected += power * (w[mine].sum() * mean - own) / w.sum()
    found = made.linear(sample, y, Group())
    assert found.estimate == pytest.approx(expected, rel=1e-12)
    # its u is Hájek's of what the predictions leave, so the weighted sum of u is 0
    assert abs(float(w @ found.values)) < 1e-12
    np.testing.assert_array_equal(
        found.leverage, client_sums(sample.client, w / w.sum(), sample.clients)
    )


def test_without_power_and_with_constant_predictions_it_is_hajeks_mean() -> None:
    world = drawn(2)
    sample, y = world.sample, world.values
    (hajek,) = population_means(sample, y, [HajekMean()])
    fit = world.fit(tree())
    (idle,) = population_means(sample, y, [fixed_mean(fit.own, fit.fold_of, world.means(fit), 0.0)])
    assert idle == replace(hajek, estimator=NAME)
    flat = world.tuned(tree(leaves=2).set_params(min_samples_leaf=10**6))
    (constant,) = population_means(sample, y, [flat])
    for name in ("estimate", "se", "low", "high", "se_superpopulation"):
        assert getattr(constant, name) == pytest.approx(getattr(hajek, name), rel=1e-11), name


def test_with_gregs_own_line_and_full_power_it_is_the_greg_mean() -> None:
    world = drawn(3)
    sample, y, b = world.sample, world.values, world.Z[world.ids]
    mean = world.Z.mean(axis=0)
    line = LinearRegression().fit(b[sample.client], y, sample.weights)
    nobody = np.zeros(sample.clients, dtype=np.int64)
    made = fixed_mean(line.predict(b), nobody, line.predict(mean[None]), 1.0)
    greg = GregMean(b, mean).linear(sample, y, Group())
    assert made.linear(sample, y, Group()).estimate == pytest.approx(greg.estimate, rel=1e-12)


@pytest.mark.parametrize("group", [Group(), Group(name="late", rounds=np.array([1]))])
def test_the_tuned_power_makes_the_variance_of_both_fitted_phases_least(group: Group) -> None:
    world = drawn(4, bend=1.0)
    made = world.tuned(tree(), group)
    power = made.powers[group.name]
    assert 0.0 < power < 1.0
    sample, share = world.sample, HajekMean().linear(world.sample, world.values, group).leverage

    def variance(at: float) -> float:
        fixed = replace(made, powers={group.name: at}, fixed=True)
        u = fixed.linear(sample, world.values, group).values[:, None]
        return float(sample.variance(u, share[:, None]).variance[0])

    # a parabola: its vertex by three points
    low, middle, high = variance(0.0), variance(0.5), variance(1.0)
    vertex = 0.5 + 0.25 * (low - high) / (low - 2 * middle + high)
    assert power == pytest.approx(vertex, rel=1e-9)
    assert variance(power) < min(low, middle, high)


def test_the_power_is_between_0_and_1_and_a_misleading_prediction_has_none() -> None:
    world = drawn(4)
    fit = world.fit(tree())
    for factor, expected in ((-1.0, 0.0), (0.01, 1.0)):
        turned = replace(fit, own=factor * fit.own)
        means = {EVERYONE: factor * world.means(fit)}
        made = PredictionPoweredMean.tuned(turned, means, world.sample, world.values, [Group()])
        assert made.powers == {EVERYONE: expected}


def test_a_tuned_power_costs_leverage() -> None:
    world = drawn(4, bend=1.0)
    made = world.tuned(tree())
    fixed = replace(made, fixed=True)
    tuned, given = (m.linear(world.sample, world.values, Group()) for m in (made, fixed))
    assert tuned.estimate == given.estimate
    more = tuned.leverage - given.leverage
    assert more.sum() == pytest.approx(1.0, rel=1e-12)
    (wide,), (narrow,) = (population_means(world.sample, world.values, [m]) for m in (made, fixed))
    assert narrow.se < wide.se < 1.03 * narrow.se


@pytest.mark.parametrize("regression", ["boosting", "linear", tree()])
def test_no_client_is_predicted_from_its_own_data_nor_from_its_clusters(regression: Any) -> None:
    world = drawn(6, size=300)
    cluster = np.arange(world.sample.clients) // 2
    world = world.clustered(cluster)
    fit = world.fit(regression)
    client = int(world.sample.client[0])
    other = np.where(world.sample.client == client, 50.0, world.values)
    again = replace(world, values=other).fit(regression)
    mine = fit.fold_of == fit.fold_of[client]
    np.testing.assert_array_equal(again.own[mine], fit.own[mine])
    rest = (fit.fold_of >= 0) & ~mine
    assert (again.own[rest] != fit.own[rest]).mean() > 0.5
    for code in np.unique(cluster):
        assert len({k for k in fit.fold_of[cluster == code].tolist() if k >= 0}) <= 1
    heard = np.bincount(world.sample.client, minlength=world.sample.clients) > 0
    np.testing.assert_array_equal(fit.fold_of >= 0, heard)
    np.testing.assert_array_equal(np.isfinite(fit.own), heard)


def test_folds_and_predictions_do_not_depend_on_how_clients_are_numbered() -> None:
    world = drawn(7)
    n = world.sample.clients
    turn = np.random.default_rng(0).permutation(n)  # old number of the new ones
    new = np.argsort(turn)
    phase = KnownEnrollment(weights=world.sample.enrollment.weights)
    known = replace(world.sample, enrollment=phase, steps=())
    turned = replace(
        known, client=new[known.client], enrollment=KnownEnrollment(weights=phase.weights[turn])
    )
    values, named = world.values, Regressor.named("boosting")
    Z = world.Z[world.ids]
    one = CrossFitted.of(named, Z, known, values, order=np.arange(n))
    two = CrossFitted.of(named, Z[turn], turned, values, order=new)
    np.testing.assert_array_equal(two.fold_of[new], one.fold_of)
    np.testing.assert_array_equal(two.own[new], one.own)
    mixed = np.random.default_rng(1).permutation(len(values))
    shuffled = replace(
        known, client=known.client[mixed], round=known.round[mixed], prob=known.prob[mixed]
    )
    three = CrossFitted.of(named, Z, shuffled, values[mixed], order=np.arange(n))
    np.testing.assert_allclose(three.own, one.own, rtol=1e-9)


def test_a_metric_of_0_and_1_is_predicted_by_probabilities() -> None:
    world = drawn(8)
    flags = replace(world, values=(world.values > 1.0).astype(float))
    for name in ("boosting", "sklearn.naive_bayes.GaussianNB"):
        fit = flags.fit(name)
        own = fit.own[fit.fold_of >= 0]
        assert own.min() > 0.0
        assert own.max() < 1.0
        reply = fit.own[flags.sample.client]
        right = flags.values[np.argsort(reply)]
        half = len(right) // 2
        assert right[half:].mean() > right[:half].mean()
    line = flags.fit("linear").own
    assert np.nanmin(line) < np.nanmax(line)
    with pytest.raises(InputError, match="is a classifier, and the metric is not 0 or 1"):
        world.fit("sklearn.naive_bayes.GaussianNB")
    never = replace(world, values=np.zeros_like(world.values))
    with pytest.raises(InputError, match="all values outside one fold of the clients are 0"):
        never.fit("boosting")


def test_values_of_any_size_are_predicted() -> None:
    world = drawn(8)
    plain = world.tuned("boosting").linear(world.sample, world.values, Group()).estimate
    large = replace(world, values=1e60 * world.values)
    found = large.tuned("boosting").linear(large.sample, large.values, Group()).estimate
    assert found == pytest.approx(1e60 * plain, rel=1e-6)


def test_few_clients_have_no_prediction_and_small_groups_no_power() -> None:
    world = drawn(9, size=90)
    clients = len(np.unique(world.sample.client))
    assert clients < 50
    with pytest.raises(InputError, match=f"{clients} clients replied, 5 folds of 10 need 50"):
        world.fit(tree())
    one = np.zeros(world.sample.clients, dtype=np.int64)
    with pytest.raises(InputError, match="1 clusters of clients replied"):
        world.clustered(one).fit(tree())
    whole = drawn(9)
    inside = np.zeros(whole.sample.clients, dtype=np.bool_)
    inside[np.unique(whole.sample.client)[:7]] = True
    small, strange = Group(name="small", inside=inside), Group(name="strange", inside=~inside)
    fit = whole.fit(tree())
    means = {EVERYONE: whole.means(fit), "small": whole.means(fit)}
    groups = [Group(), small, strange]
    made = PredictionPoweredMean.tuned(fit, means, whole.sample, whole.values, groups)
    assert list(made.powers) == [EVERYONE]
    lines = population_means(whole.sample, whole.values, [made], groups)
    assert [line.reason for line in lines] == [
        "", "7 clients replied, the power of a prediction needs 10",
        "the population's rows of the group are not known",
    ]  # fmt: skip
    with pytest.raises(InputError, match="no power was tuned for the group"):
        made.linear(whole.sample, whole.values, Group(name="other", rounds=np.array([0])))


@pytest.mark.parametrize(("bend", "widest"), [(3.0, 0.75), (0.0, 1.03)], ids=["step", "unrelated"])
def test_intervals_hold_the_mean_and_are_shorter_where_z_tells(bend: float, widest: float) -> None:
    """Of 150 draws at 95% fewer than the 1e-5 quantile hold the mean with probability 1e-5."""
    held, widths = 0, []
    for seed in range(150):
        world = drawn(1000 + seed, bend)
        hajek, found = population_means(
            world.sample, world.values, [HajekMean(), world.tuned(tree())]
        )
        held += found.low <= world.truth <= found.high
        widths.append((found.high - found.low, hajek.high - hajek.low))
    assert held >= binom.ppf(1e-5, 150, 0.95)
    short, usual = np.mean(widths, axis=0)
    assert short < widest * usual


# From files.

STEPPED = World(
    size=500, rounds=4, seed=4, ids=100, covariates=("age", "rich"),
    enrollment=0.6 * pl.col("age") - 0.2, metric=2.0 * (pl.col("age").abs() > 0.7) + pl.col("age"),
)  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files.of(STEPPED, tmp_path).put()


def lines_of(found: dict[str, Any], estimator: str) -> dict[str, dict[str, Any]]:
    return {e["group"]: e for e in found["estimates"] if e["estimator"] == estimator}


def test_the_command_adds_a_line_for_every_group_and_changes_no_other(files: Files) -> None:
    options = ("--by", "rich", "--by", "age", "--by", "round")
    found, before = files.evaluated(*options, "--predict", "boosting"), files.evaluated(*options)
    mine, hajek = lines_of(found, NAME), lines_of(found, "hajek")
    assert list(mine) == list(hajek)
    assert all(line["reason"] == "" for line in mine.values())
    others = [e for e in found["estimates"] if e["estimator"] != NAME]
    assert others == before["estimates"]
    whole = mine[EVERYONE]
    assert whole["high"] - whole["low"] < 0.9 * (hajek[EVERYONE]["high"] - hajek[EVERYONE]["low"])
    (note,) = set(found["notes"]) - set(before["notes"])
    assert note.startswith("Predictions by boosting, 5 folds of clients; power 0.")
    code, out, _ = files.evaluate("--predict", "linear")
    assert code == 0
    assert "PPI" in out
    assert "Predictions by linear, 5 folds of clients; power" in out.replace("\n", " ")


def test_python_gives_what_the_command_gives(files: Files) -> None:
    mine = lines_of(files.evaluated("--by", "rich", "--predict", "linear"), NAME)
    for regression in ("linear", "sklearn.linear_model.LinearRegression", LinearRegression()):
        found = fedipw.evaluate(
            files.metrics, files.people, files.where / "rounds", by="rich", predict=regression
        )
        for group, line in mine.items():
            assert found.of(NAME, group).estimate == pytest.approx(line["estimate"], rel=1e-12)
            assert found.of(NAME, group).se == pytest.approx(line["se"], rel=1e-12)


def test_the_order_of_rows_does_not_matter(files: Files) -> None:
    before = lines_of(files.evaluated("--by", "rich", "--predict", "boosting"), NAME)
    files.people = files.people.sample(fraction=1.0, shuffle=True, seed=1)
    files.metrics = files.metrics.sample(fraction=1.0, shuffle=True, seed=1)
    files.rounds = [t.sample(fraction=1.0, shuffle=True, seed=1) for t in files.rounds]
    after = lines_of(files.put().evaluated("--by", "rich", "--predict", "boosting"), NAME)
    for group, line in before.items():
        for name in ("estimate", "se"):
            assert after[group][name] == pytest.approx(line[name], rel=1e-9), (group, name)


@pytest.mark.parametrize("base", [None, "d"], ids=["rows alike", "base weights"])
@pytest.mark.parametrize("lost", [False, True], ids=["whole", "missing values dropped"])
def test_means_streamed_from_files_are_those_in_memory(
    tmp_path: Path, files: Files, lost: bool, base: str | None
) -> None:
    people = files.people.with_columns(d=1.0 + pl.col("unit_id") % 3)
    if lost:
        people = people.with_columns(pl.when(pl.col("unit_id") % 7 > 0).then("age").alias("age"))
    (tmp_path / "parts").mkdir()
    for k in range(3):  # a batch does not go beyond a file
        people[k * 200 : (k + 1) * 200].write_parquet(tmp_path / "parts" / f"{k}.parquet")
    stage = Settings(missing="drop").stage(Population(tmp_path / "parts", base="d"))
    world = drawn(1)
    fit = world.fit(tree())
    assert stage.coded is not None
    cells = table_cells(stage.coded.table, ["rich", "age"])
    found = fit.means(stage.coded, cells, base)
    known = people.filter(pl.col("age").is_not_null())
    flags = (known["rich"] == "yes").cast(pl.Float64)
    Z = np.column_stack([known["age"], flags])
    assert stage.coded.design.names == ("age", "rich[yes]")
    each = np.column_stack([model.at(Z) for model in fit.models])
    weights = np.ones(len(Z)) if base is None else known[base].to_numpy()
    expected = np.average(each, axis=0, weights=weights)
    np.testing.assert_allclose(found[EVERYONE], expected, rtol=1e-12)
    for column, cell in cells.items():
        level = known.select(cell.expression().alias(column))[column]
        for name in level.unique():
            inside = (level == name).to_numpy()
            expected = np.average(each[inside], axis=0, weights=weights[inside])
            np.testing.assert_allclose(found[cell.named(name)], expected, rtol=1e-12)


def test_rows_that_stand_for_several_clients_count_as_often(files: Files) -> None:
    rows, replies = files.where / "rounds", files.metrics
    alike = fedipw.evaluate(replies, files.people, rows, predict="linear").of(NAME)
    given = Population(files.people.with_columns(d=pl.lit(3.0)), base="d")
    found = fedipw.evaluate(replies, given, rows, predict="linear").of(NAME)
    assert found.estimate == pytest.approx(alike.estimate, rel=1e-9)
    heavy = pl.when(pl.col("age") > 0.0).then(3.0).otherwise(1.0)
    given = Population(files.people.with_columns(d=heavy), base="d")
    moved = fedipw.evaluate(replies, given, rows, predict="boosting").of(NAME)
    hajek = fedipw.evaluate(replies, given, rows).of("hajek")
    assert (
        abs(moved.estimate - hajek.estimate) < 2 * hajek.se < abs(moved.estimate - alike.estimate)
    )


def test_totals_and_differences_go_with_predictions(files: Files) -> None:
    found = fedipw.evaluate(
        files.metrics, files.people, files.where / "rounds", by="rich", total=True,
        difference=["pairs", "rest"], predict="linear",
    )  # fmt: skip
    no, yes = (found.of(NAME, f"rich = {level}").estimate for level in ("no", "yes"))
    apart = found.of(NAME, "rich = no less rich = yes", "difference")
    assert apart.estimate == pytest.approx(no - yes, rel=1e-9)
    assert apart.se > 0.0
    total = found.of(NAME, EVERYONE, "total")
    assert total.estimate == pytest.approx(500 * found.of(NAME).estimate, rel=1e-12)
    rest = found.of(NAME, "rich = no less the rest", "difference")
    assert rest.reason == "the population's rows of the group are not known"


def test_a_jackknife_keeps_models_and_powers_and_agrees(files: Files) -> None:
    linear = files.evaluated("--predict", "boosting")
    again = files.evaluated("--predict", "boosting", "--jackknife", 60)
    assert again["notes"] == linear["notes"]
    one, two = (lines_of(found, NAME)[EVERYONE] for found in (linear, again))
    assert two["estimate"] == one["estimate"]
    assert two["se"] == pytest.approx(one["se"], rel=0.25)
    assert two["se"] < 0.9 * lines_of(again, "hajek")[EVERYONE]["se"]


class Broken(RegressorMixin, BaseEstimator):
    """Fails as it is told to."""

    def __init__(self, at: str = "fit") -> None:
        self.at = at

    def fit(self, X: FloatArray, y: FloatArray) -> Broken:
        if self.at == "fit":
            raise RuntimeError("out of luck")
        self.mean_ = y.mean() + X.sum() * 0
        return self

    def predict(self, X: FloatArray) -> FloatArray:
        return np.full(len(X), np.nan) if self.at == "predict" else np.zeros((len(X), 2))


@pytest.mark.parametrize(
    ("at", "words"),
    [("fit", "out of luck"), ("predict", "predictions are not one finite number for each client"),
     ("shape", "predictions are not one finite number for each client")],
)  # fmt: skip
def test_a_regression_that_fails_is_a_reason_and_leaves_the_others(
    files: Files, at: str, words: str
) -> None:
    where = files.where / "rounds"
    found = fedipw.evaluate(files.metrics, files.people, where, predict=Broken(at))
    assert found.of(NAME).reason == f"the regression Broken failed: {words}"
    assert np.isnan(found.of(NAME).estimate)
    assert found.of("hajek") == fedipw.evaluate(files.metrics, files.people, where).of("hajek")


def test_what_cannot_be_is_refused_in_words(files: Files) -> None:
    def refused(*options: object, **given: Any) -> str:
        code, _, err = files.evaluate(*options, **given)
        assert code == 2
        return err.replace("\n", " ")

    means = files.means("age", "rich[yes]")
    files.write(files.where, targets=means)
    totals = ("--scheme", "calibrated-entropy", "--population-size", 500, "--predict", "linear")
    told = refused(*totals, source="targets")
    assert "needs a table of the whole population" in told
    assert "GREG is the regression that totals allow" in told
    assert "No regression 'bosting'" in refused("--predict", "bosting")
    assert "cannot be made" in refused("--predict", "sklearn.linear_model.Nothing")
    assert "Ask for one of the two" in refused("--predict", "linear", "--samples")
    stage = enrollment_stage(Population(files.people))
    assert checked_regression(None, stage) is None
    for strange in (LinearRegression, 3, "os.path"):
        with pytest.raises(InputError, match=r"No regression|cannot be made"):
            checked_regression(strange, stage)
