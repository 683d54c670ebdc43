"""Base weights through weights and evaluate: a row that stands for several clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.special import expit

import fedipw
from cli.command import Files
from fedipw.errors import InputError
from fedipw.evaluation.estimators import Group, HajekMean, population_means
from fedipw.evaluation.evaluate import Evaluation
from fedipw.evaluation.phases import FittedEnrollment
from fedipw.evaluation.sample import TwoPhase
from fedipw.selection.logistic import LogisticFit, logistic_fit
from fedipw.tables.partitions import Blocks, Frame
from worlds import EVERYONE, MEASURED, World

FOLDER = Path(__file__).parents[1] / "reference"
R: dict[str, float] = dict(pl.read_csv(FOLDER / "base200_R.csv").rows())
MODELS: dict[str, Any] = {"enrollment": "age + rich", "participation": "age + x"}
TARGETS = ("age", "rich[yes]")


def near(a: Evaluation, b: Evaluation, rel: float, *, errors: bool = True) -> None:
    """Require the same estimates, and the same errors."""
    assert len(a.estimates) == len(b.estimates)
    for one, two in zip(a.estimates, b.estimates, strict=True):
        assert (one.group, one.estimator) == (two.group, two.estimator)
        assert one.estimate == pytest.approx(two.estimate, rel=rel, nan_ok=True)
        if errors:
            assert one.se == pytest.approx(two.se, rel=rel, nan_ok=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    made = Files.of(MEASURED, tmp_path_factory.mktemp("base"))
    made.people = made.people.with_columns(a=1.0, b=3.5)
    made.put()
    return made


def populations(files: Files) -> Iterator[tuple[str | None, fedipw.Population, bool]]:
    """Yield the same population with and without constant base weights, and whether by totals."""
    for base in (None, "a", "b"):
        people = files.people.drop([name for name in ("a", "b") if name != base])
        yield base, fedipw.Population(people, base=base), False
        inside = people.filter("enrolled")
        means = files.means(*TARGETS)
        yield base, fedipw.Population.from_totals(inside, means, 240.0, base=base), True


@pytest.mark.parametrize(
    ("scheme", "totals"),
    [("fedipw", False), ("fedipw-hajek", False), ("participation-only", False),
     ("calibrated-entropy", False), ("greg", False), ("calibrated-quadratic-hajek", True),
     ("participation-only", True)],
)  # fmt: skip
def test_weights_by_constant_base_weights_are_those_without(
    files: Files, scheme: str, totals: bool
) -> None:
    settings: dict[str, Any] = {"participation": "age + x"} if totals else MODELS
    found = [
        fedipw.weigh(who, files.where / "rounds", method=scheme, **settings).table
        for _, who, by_totals in populations(files)
        if by_totals == totals
    ]
    for table in found[1:]:
        np.testing.assert_allclose(table["weight"], found[0]["weight"], rtol=1e-11)


@pytest.mark.parametrize("soft", [{"l2": 3.0}, {"soft": True, "enrollment": "age + parted"}])
def test_penalties_grow_with_base_weights(files: Files, soft: dict[str, Any]) -> None:
    """So that a common factor of base weights changes nothing, of fits that separate either."""
    parted = pl.when(pl.col("enrolled") & (pl.col("age") > 1.0)).then(1.0).otherwise(0.0)
    people = files.people.with_columns(parted=parted)
    found = [
        fedipw.weigh(
            fedipw.Population(people.drop([n for n in ("a", "b") if n != base]), base=base),
            files.where / "rounds", method="fedipw", participation="age",
            **({"enrollment": "age"} | soft),
        ).table
        for base in (None, "a", "b")
    ]  # fmt: skip
    for table in found[1:]:
        np.testing.assert_allclose(table["weight"], found[0]["weight"], rtol=1e-8)


@pytest.mark.parametrize("totals", [False, True])
@pytest.mark.parametrize("jackknife", [0, 6])
def test_estimates_by_constant_base_weights_are_those_without(
    files: Files, totals: bool, jackknife: int
) -> None:
    scheme = "calibrated-entropy" if totals else "fedipw"
    settings: dict[str, Any] = {"participation": "age + x"} if totals else {**MODELS}
    found = [
        fedipw.evaluate(
            files.metrics,
            who,
            files.where / "rounds",
            by="rich",
            method=scheme,
            sensitivity=[2.0],
            jackknife=jackknife,
            **settings,
        )
        for _, who, by_totals in populations(files)
        if by_totals == totals
    ]
    for other in found[1:]:
        near(other, found[0], 1e-9 if jackknife else 1e-11)
        assert totals or "a row is one draw of enrollment" in other.notes[0]
        for a, b in zip(other.sensitivity, found[0].sensitivity, strict=True):
            assert (a.low, a.high) == pytest.approx((b.low, b.high), rel=1e-9)
            assert a.weight_error == pytest.approx(b.weight_error, rel=1e-9)


@pytest.mark.parametrize(
    "scheme", ["fedipw", "participation-only", "calibrated-entropy", "calibrated-quadratic"]
)
def test_rows_given_twice_are_rows_of_twice_the_base_weight(tmp_path: Path, scheme: str) -> None:
    """All reply, so that participation has no model in which rows would count twice."""
    world = World(
        size=200, rounds=2, seed=3, covariates=("age", "rich"), reply=EVERYONE,
        metric=1.0 + pl.col("age"),
    )  # fmt: skip
    made = Files.of(world, tmp_path)
    some = pl.col("unit_id") % 3 == 0

    def twice(table: pl.DataFrame) -> pl.DataFrame:
        return pl.concat([table, table.filter(some).with_columns(pl.col("unit_id") + 1_000)])

    once = fedipw.Population(
        made.people.with_columns(a=pl.when(some).then(2.0).otherwise(1.0)), base="a"
    )
    ledgers = []
    for name, rounds in (("one", made.rounds), ("two", [twice(t) for t in made.rounds])):
        ledgers.append(fedipw.Ledger(tmp_path / name))
        for index, table in enumerate(rounds, start=1):
            ledgers[-1].append(index, table.drop("round"))
    doubled = fedipw.Population(twice(made.people))
    assert once.size == doubled.size
    settings: dict[str, Any] = {**MODELS, "method": scheme}
    a = fedipw.weigh(once, ledgers[0], **settings).table
    b = fedipw.weigh(doubled, ledgers[1], **settings).table
    own = b.group_by(pl.col("unit_id") % 1_000, "round").agg(pl.col("weight").sum())
    both = a.join(own, on=["unit_id", "round"], suffix="_of_two")
    assert both.height == a.height
    np.testing.assert_allclose(both["weight"], both["weight_of_two"], rtol=1e-9)
    if scheme == "participation-only":
        return
    one = fedipw.evaluate(made.metrics, once, ledgers[0], by="rich", **settings)
    two = fedipw.evaluate(twice(made.metrics), doubled, ledgers[1], by="rich", **settings)
    wanted = [x for x in two.estimates if x.estimator != "plain"]
    found = [x for x in one.estimates if x.estimator != "plain"]
    for x, y in zip(found, wanted, strict=True):
        assert x.estimate == pytest.approx(y.estimate, rel=1e-9)
        assert x.se > y.se  # a row is one draw, however many clients it stands for


def _r_table() -> pl.DataFrame:
    base = pl.Series([1.0, 2.5, 4.0, 1.5])
    return pl.read_csv(FOLDER / "ipw200.csv").with_columns(
        a=base.gather(pl.read_csv(FOLDER / "ipw200.csv")["id"] % 4)
    )


def test_numbers_of_r(tmp_path: Path) -> None:
    """``svyglm`` by the base weights, weighted means, and what follows from both."""
    given = _r_table()
    people = given.select("z1", "z2", "z3", "a", unit_id="id", enrolled=pl.col("e") == 1)
    ledger = fedipw.Ledger(tmp_path)
    inside = people.filter("enrolled")
    ledger.append(1, inside.select("unit_id", invited=True, replied=True))
    metrics = given.filter(pl.col("e") == 1).select(unit_id="id", round=1, value="y")
    who = fedipw.Population(people, base="a")
    assert who.size == pytest.approx(R["population_size"], rel=1e-14)
    weights = fedipw.weigh(who, ledger, method="fedipw")
    model = weights.record.enrollment
    assert model is not None
    fit = model.logistic()
    ours = [fit.intercept, *fit.coefficients]
    np.testing.assert_allclose(
        ours, [R[f"coef_{name}"] for name in ("(Intercept)", "z1", "z2", "z3b", "z3c")], rtol=1e-10
    )
    found = fedipw.evaluate(metrics, who, ledger, method="fedipw")
    assert found.of("horvitz-thompson").estimate == pytest.approx(R["ht_mean"], rel=1e-10)
    assert found.of("hajek").estimate == pytest.approx(R["hajek_mean"], rel=1e-10)
    error = found.of("hajek").se_superpopulation
    assert error == pytest.approx(R["se_hajek_m_estimation"], rel=1e-8)
    raked = fedipw.evaluate(metrics, who, ledger, method="calibrated-entropy")
    assert raked.of("hajek").estimate == pytest.approx(R["raking_mean"], rel=1e-9)
    own = fedipw.weigh(who, ledger, method="calibrated-entropy").table["enrollment_weight"]
    np.testing.assert_allclose(
        own * R["population_size"], [R[f"raking_{k}"] for k in inside["unit_id"]], rtol=1e-8
    )
    names = {"z1": "z1", "z2": "z2", "z3[b]": "z3b", "z3[c]": "z3c"}
    means = {name: R[f"mean_{column}"] for name, column in names.items()}
    totals = fedipw.Population.from_totals(inside, means, R["population_size"], base="a")
    linear = fedipw.evaluate(metrics, totals, ledger, method="calibrated-linear")
    assert linear.of("hajek").estimate == pytest.approx(R["greg_mean"], rel=1e-9)


def test_intervals_cover_with_unequal_base_weights() -> None:
    """400 draws of enrollment from 1,500 rows with base weights 1 to 6.

    At a true coverage of 95% fewer than 368 or more than 392 intervals hold the weighted mean with
    a chance below 0.5%. Errors that took each row for one client would hold it as often as those:
    so they are compared with the spread of the estimates too, known to 1/sqrt(800), 3.6%.
    """
    rng = np.random.default_rng(8)
    Z, a = rng.standard_normal((1_500, 1)), rng.integers(1, 7, 1_500).astype(np.float64)
    y = Z[:, 0] + 0.3 * a + rng.standard_normal(1_500)
    prob, truth = expit(-1.0 + 0.7 * Z[:, 0]), float(a @ y / a.sum())
    frame, held, errors, found = Frame.of(Z.T, a), 0, [], []
    standard = (Z - frame.centre) / frame.scale
    for _ in range(400):
        inside = rng.random(1_500) < prob
        rows = Blocks.of_arrays(standard, inside.astype(np.int8), a)
        fit: LogisticFit = logistic_fit(rows, ["z"], frame=frame).checked()
        columns = np.ascontiguousarray(Z[inside].T)
        phase = FittedEnrollment.of(rows, frame, fit, columns, a[inside])
        n = int(inside.sum())
        sample = TwoPhase(
            client=np.arange(n), round=np.zeros(n, dtype=np.int64), prob=np.ones(n), rounds=1,
            enrollment=phase,
        )  # fmt: skip
        (line,) = population_means(sample, y[inside], [HajekMean()], [Group()])
        held += line.low <= truth <= line.high
        errors.append(line.se)
        found.append(line.estimate)
    assert 368 <= held <= 392, held
    assert np.mean(errors) == pytest.approx(np.std(found), rel=4 * 0.036)


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        (
            "c",
            {},
            r"No base weight column 'c' in the table given\. It has unit_id, enrolled",
        ),
        ("rich", {}, r"base weights: row 1, column 'rich': '.*' is not a number"),
        ("unit_id", {}, r"'unit_id' holds no base weights"),
        ("zero", {}, r"base weights in 'zero' must be finite and above 0 in every row; 1 are not"),
        (
            "a",
            {"method": "fedavg"},
            r"fedavg takes no base weights: use fedipw",
        ),
        ("a", {"method": "calibrated-online"}, r"calibrated-online takes no base weights"),
        ("a", {"classifier": "boosting"}, r"Base weights go with logistic regression fitted once"),
        ("a", {"method": "efficient"}, r"inverse-logit distance takes no base weights"),
    ],
)
def test_what_is_said_of_base_weights_that_cannot_be_used(
    files: Files, base: str, settings: dict[str, Any], message: str
) -> None:
    people = files.people.with_columns(
        zero=pl.when(pl.int_range(pl.len()) == 5).then(0.0).otherwise(1.0)
    )
    with pytest.raises(InputError, match=message):
        fedipw.weigh(
            fedipw.Population(people, base=base), files.where / "rounds", **MODELS, **settings
        )


def test_a_column_of_base_weights_is_no_covariate(files: Files) -> None:
    who = fedipw.Population(files.people.drop("b"), base="a")
    assert who.covariates == who.members.covariates == ("age", "rich")
    found, _ = files.weighed("--base", "a", "--enrollment", "age + rich", "--participation", "age")
    plain, _ = files.weighed("--enrollment", "age + rich", "--participation", "age")
    np.testing.assert_allclose(found["weight"], plain["weight"], rtol=1e-11)


def test_an_audit_by_constant_base_weights_is_that_without(files: Files) -> None:
    settings: dict[str, Any] = {**MODELS, "metrics": files.metrics}
    found = [
        fedipw.audit(
            fedipw.Population(files.people.drop([n for n in ("a", "b") if n != base]), base=base),
            files.where / "rounds", **settings,
        ).to_json()
        for base in (None, "a", "b")
    ]  # fmt: skip
    for other, times in zip(found[1:], (1.0, 3.5), strict=True):
        for part in ("balance", "metric", "rates"):
            assert _numbers(other[part]) == pytest.approx(_numbers(found[0][part]), rel=1e-9)
        for a, b in zip(other["stages"], found[0]["stages"], strict=True):
            for name in ("auc", "rate", "calibration_ratio", "reliability", "prob"):
                assert _numbers(a[name]) == pytest.approx(_numbers(b[name]), rel=1e-9)
        assert any(
            "Rows of the population count by their base weights" in x for x in other["notes"]
        )
        assert other["sizes"]["population"] == pytest.approx(times * 240.0)
        one, two = other["overlap"], found[0]["overlap"]
        assert one["estimated_size"] == pytest.approx(times * two["estimated_size"], rel=1e-9)
        assert one["smallest_prob"] == pytest.approx(two["smallest_prob"], rel=1e-9)
        assert one["share_below"] == pytest.approx(two["share_below"], rel=1e-9)


def _numbers(value: Any) -> list[float]:
    """Return all numbers of plain values, in order."""
    if isinstance(value, dict):
        return [x for v in value.values() for x in _numbers(v)]
    if isinstance(value, list | tuple):
        return [x for v in value for x in _numbers(v)]
    return [float(value)] if isinstance(value, int | float) else []
