"""Enrollment probabilities from a table of everybody, or from totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.naive_bayes import GaussianNB
from sklearn.tree import DecisionTreeClassifier

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.selection.classifiers import Classifier, Estimator, Isotonic, Newton, Platt
from fedipw.selection.coded import TableSettings, known_before_enrollment, table_model
from fedipw.selection.enrollment import (
    EnrollmentFit,
    Needs,
    TableEnrollment,
    TotalsEnrollment,
    enrollment_stage,
    rich_design,
)
from fedipw.selection.propensity import NewtonLogistic
from fedipw.tables import partitions
from fedipw.tables.design import Missing
from fedipw.tables.population import Population
from fedipw.tables.table import Table


def table_of(size: int = 300, seed: int = 0, **columns: Any) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(size, 3))
    enrolled = rng.random(size) < 1.0 / (1.0 + np.exp(0.4 - z @ [0.8, -0.5, 0.2]))
    own = {"unit_id": np.arange(size), "z1": z[:, 0], "z2": z[:, 1], "z3": z[:, 2]}
    return pl.DataFrame({**own, "enrolled": enrolled, **columns})


def people(size: int = 300, **columns: Any) -> Population:
    return Population(table_of(size, **columns))


def staged(
    population: Population, formula: str = ".", estimator: Estimator | None = None
) -> TableEnrollment:
    stage = enrollment_stage(
        population, formula, settings=TableSettings(estimator=estimator or Newton())
    )
    assert isinstance(stage, TableEnrollment)
    return stage


def fitted(stage: TableEnrollment, *, required: bool = True) -> EnrollmentFit:
    return stage.fitted(np.ones(stage.members.size, dtype=np.bool_), required=required)


def everyone(stage: TableEnrollment) -> FloatArray:
    """Return the probabilities of all clients, checked against those of the enrolled, (N,)."""
    found = fitted(stage)
    assert found.model is not None
    prob = stage.everyone_prob(found.model)
    np.testing.assert_allclose(found.prob, prob[stage.population.enrolled], rtol=1e-13)
    return prob


def test_the_default_fit_solves_the_score_equations() -> None:
    population = people()
    stage = staged(population)
    residual = population.enrolled - everyone(stage)
    assert stage.coded.design.names == ("z1", "z2", "z3")
    assert abs(residual.sum()) <= 1e-9
    np.testing.assert_allclose(population.matrix().T @ residual, 0.0, atol=1e-9)


def test_only_the_columns_asked_for_are_used() -> None:
    population = people()
    stage = staged(population, "z2")
    expected = NewtonLogistic().fit(population.matrix(["z2"]), population.enrolled)
    prob = expected.predict_proba(population.matrix(["z2"]))[:, 1]
    np.testing.assert_allclose(everyone(stage), prob, rtol=1e-12)
    assert stage.coded.design.names == ("z2",)


def late_columns() -> dict[str, Any]:
    flags = table_of()["enrolled"]
    return {"battery": [0.5 if flag else None for flag in flags]}


@pytest.mark.parametrize("formula", [".", "z1 + battery", "battery", "z1:battery"])
@pytest.mark.parametrize("missing", list(Missing))
def test_a_column_known_only_after_enrollment_is_refused_by_name(
    formula: str, missing: Missing
) -> None:
    population = people(**late_columns())
    outside = population.listed - population.enrolled_size
    with pytest.raises(InputError) as caught:
        enrollment_stage(population, formula, settings=TableSettings(missing=missing))
    message = str(caught.value)
    assert message.startswith("'battery' is known only after enrollment")
    assert f"null for all {outside} non-enrolled clients" in message
    assert "Leave it to the participation stage." in message


def test_the_other_columns_of_such_a_table_stay_usable() -> None:
    late = staged(people(**late_columns()), "z1 + z2")
    np.testing.assert_array_equal(everyone(late), everyone(staged(people(), "z1 + z2")))


def test_only_columns_known_after_enrollment_are_refused() -> None:
    frame = table_of(
        4,
        enrolled=[True, False, True, False],
        battery=[0.5, None, 0.9, None],  # null exactly where not enrolled
        nan=[0.5, np.nan, 0.9, np.nan],
        text=["a", None, "b", None],
        partly=[None, None, 1.0, None],  # null there and elsewhere
        never=pl.Series([None] * 4, dtype=pl.Float64),  # everywhere: missing, not late
        gap=[None, 2.0, 3.0, 1.0],  # null for an enrolled client only
    )
    names = ["battery", "nan", "text", "partly", "never", "gap", "z1"]
    for kind in ("frame", "all enrolled"):
        table = Table(frame if kind == "frame" else frame.with_columns(enrolled=pl.lit(True)))
        late = []
        for name in names:
            try:
                known_before_enrollment(table, [name])
            except InputError:
                late.append(name)
        assert late == (names[:4] if kind == "frame" else [])


def test_a_column_of_the_ledger_cannot_explain_enrollment() -> None:
    with pytest.raises(InputError, match=r"'hours' stands only in the ledger"):
        enrollment_stage(people(), "z1 + hours", later=["hours"])


def test_an_unknown_column_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="'height'"):
        enrollment_stage(people(), "z1 + height")


def test_no_covariates_are_refused() -> None:
    bare = Population(table_of().select("unit_id", "enrolled"))
    with pytest.raises(InputError, match="no covariate to explain enrollment"):
        enrollment_stage(bare)
    with pytest.raises(InputError, match="has no terms"):
        enrollment_stage(people(), "z1 - z1")


def test_everybody_enrolled_is_refused_with_the_way_out() -> None:
    stage = staged(people(enrolled=np.ones(300, dtype=bool)))
    stage.require(Needs(method="participation-only"))
    with pytest.raises(
        InputError, match=r"all 300 clients are enrolled.*participation-only.*totals"
    ):
        stage.require(Needs(method="fedipw", probabilities=True))


def test_what_no_table_holds_is_refused() -> None:
    with pytest.raises(InputError, match="oracle needs true probabilities"):
        staged(people()).require(Needs(method="oracle", truth=True))


def test_a_missing_value_is_named() -> None:
    income: list[float | None] = [1.0] * 300
    income[17] = None
    with pytest.raises(InputError, match=r"'income' is missing in 1 of 300 rows \(row 17\)"):
        staged(people(income=income))


def test_dropped_columns_are_named() -> None:
    z1 = table_of()["z1"].to_numpy()
    stage = staged(people(twice=2.0 * z1, one=np.ones(300)))
    model = fitted(stage).model
    assert model is not None
    assert model.dropped == ("twice", "one")
    np.testing.assert_allclose(everyone(stage), everyone(staged(people())), rtol=1e-9)


# Classifiers


@pytest.mark.parametrize("classifier", [None, DecisionTreeClassifier(max_depth=2, random_state=0)])
def test_cross_fitted_probabilities_equal_a_plain_loop(classifier: Any) -> None:
    population = people()
    stage = staged(population, estimator=Classifier(classifier, folds=4, seed=3))
    Z, enrolled = population.matrix(), population.enrolled
    seed = int(np.random.default_rng(3).integers(2**31))
    split = StratifiedKFold(4, shuffle=True, random_state=seed)
    expected = np.full(300, np.nan)
    for others, own in split.split(Z, enrolled):
        base = NewtonLogistic() if classifier is None else classifier
        expected[own] = base.fit(Z[others], enrolled[others]).predict_proba(Z[own])[:, 1]
    np.testing.assert_allclose(everyone(stage), expected, rtol=1e-13)
    found = fitted(stage)
    assert found.model is not None
    assert found.model.fit.cross_fitted
    assert found.model.dropped == ()


def test_a_seed_decides_the_folds() -> None:
    first, again, other = (
        everyone(staged(people(), estimator=Classifier(folds=3, seed=seed))) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    client=st.integers(0, 299),
    calibration=st.sampled_from([None, Platt(), Isotonic(rows_per_class=5)]),
)
def test_no_row_of_a_fold_shapes_its_own_model(
    seed: int, client: int, calibration: Platt | Isotonic | None
) -> None:
    """Whatever stands in a client's row: the model it is asked of is the same.

    Maps of scores are fitted on the other folds' labels and scores, so a client's covariates reach
    its own map only through those other models.
    """
    frame = table_of(seed=seed)
    moved = frame.with_columns(z1=pl.when(pl.col("unit_id") == client).then(9.0).otherwise("z1"))
    how = Classifier(
        LogisticRegression(),  # its probabilities are never 0, which would be refused
        folds=3, calibration=calibration, seed=[seed],
    )  # fmt: skip
    one, two = (fitted(staged(Population(f), estimator=how)).model for f in (frame, moved))
    assert one is not None
    assert two is not None
    folds = [getattr(model.fit, "fold_of") for model in (one, two)]  # noqa: B009
    np.testing.assert_array_equal(*folds)
    new = np.random.default_rng(0).normal(size=(40, 3))
    own = int(folds[0][client])
    models = [getattr(model.fit, "models")[own] for model in (one, two)]  # noqa: B009
    np.testing.assert_array_equal(*[m.predict_proba(new) for m in models])


def test_any_classifier_serves() -> None:
    population = people()
    boosting = HistGradientBoostingClassifier(max_iter=5, random_state=0)
    prob = everyone(staged(population, estimator=Classifier(boosting)))
    expected = boosting.fit(population.matrix(), population.enrolled)
    np.testing.assert_array_equal(prob, expected.predict_proba(population.matrix())[:, 1])


def test_a_probability_of_zero_for_an_enrolled_client_is_refused() -> None:
    # out of fold, a tree without depth limit is sure of clients that did enroll
    sure = Classifier(DecisionTreeClassifier(random_state=0), folds=3)
    stage = staged(people(), estimator=sure)
    with pytest.raises(InputError, match=r"probability of enrolled clients must .*row \d+: 0\.0"):
        fitted(stage)
    assert fitted(stage, required=False).prob.min() == 0.0  # where nobody divides by it


@pytest.mark.parametrize("estimator", [Newton(), Classifier(GaussianNB(), folds=3, seed=1)])
def test_rows_left_out_do_not_move_the_others(
    estimator: Estimator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Clients with missing values, in every part of a table: as if they were not there."""
    monkeypatch.setattr(partitions, "_BLOCK_BYTES", 1)
    rng = np.random.default_rng(5)
    frame = table_of(30_000).with_columns(
        z1=pl.when(pl.Series(rng.random(30_000) < 0.2)).then(None).otherwise("z1")
    )
    for k in range(3):
        frame.slice(10_000 * k, 10_000).write_parquet(tmp_path / f"{k}.parquet")
    how = TableSettings(missing=Missing.DROP, estimator=estimator)
    part = enrollment_stage(Population(tmp_path), settings=how)
    whole = enrollment_stage(Population(frame.drop_nulls("z1")), settings=how)
    assert isinstance(part, TableEnrollment)
    assert isinstance(whole, TableEnrollment)
    assert part.size == whole.size == frame["z1"].count()
    here, there = fitted(part), fitted(whole)
    np.testing.assert_array_equal(here.known, part.members.frame["z1"].is_not_null().to_numpy())
    assert np.isnan(here.prob[~here.known]).all()
    np.testing.assert_allclose(here.prob[here.known], there.prob, rtol=1e-9)


# Enrollment that changes


def test_who_is_enrolled_now_decides_the_fit() -> None:
    population = people(2_000)
    stage = staged(population)
    present = np.ones(stage.members.size, dtype=np.bool_)
    present[::3] = False
    found = stage.fitted(present, required=True)
    inside = np.flatnonzero(population.enrolled)
    now = np.zeros(2_000, dtype=np.bool_)
    now[inside[present]] = True
    expected = NewtonLogistic().fit(population.matrix(), now).predict_proba(population.matrix())
    np.testing.assert_allclose(found.prob, expected[inside, 1], rtol=1e-9)
    again = stage.fitted(present.copy(), required=True)
    assert again.model is found.model  # nobody came or went: no new fit


def test_too_few_members_so_far_are_given_the_rate() -> None:
    joined = np.where(np.arange(300) < 20, 1, 5)
    stage = staged(people(enrolled_from=joined))
    few = np.zeros(stage.members.size, dtype=np.bool_)
    few[:20] = True
    found = stage.fitted(few, required=True)
    assert found.model is None
    assert "fewer than 10 clients a coefficient" in found.note
    np.testing.assert_array_equal(found.prob, 20 / 300)


def test_a_fit_that_fails_is_a_note_unless_it_is_needed() -> None:
    flags = table_of()["enrolled"].to_numpy()
    stage = staged(people(same=flags.astype(float)))
    with pytest.raises(Exception, match="same separate"):
        fitted(stage)
    found = fitted(stage, required=False)
    assert found.model is None
    assert found.note.startswith("no enrollment probabilities: same separate")
    assert np.isnan(found.prob).all()


def test_a_model_given_is_used_as_it_is() -> None:
    model = table_model(Table(table_of(seed=1)), "z1 + z2")
    stage = enrollment_stage(people(), model=model)
    found = stage.fitted(np.ones(stage.members.size, dtype=np.bool_), required=True)
    assert found.model is model
    np.testing.assert_array_equal(found.prob, model.prob(stage.members.frame)[0])
    with pytest.raises(InputError, match="'z2'"):
        enrollment_stage(Population(table_of().drop("z2")), model=model)


# Balance columns


def test_balance_columns_have_the_means_of_the_whole_table() -> None:
    population = people(400, os=np.tile(["a", "b", "c", "c"], 100))
    stage = staged(population)
    enrolled = np.ones(stage.members.size, dtype=np.bool_)
    main = stage.balance("main", enrolled)
    assert main.names == ("z1", "z2", "z3", "os[b]", "os[c]")
    frame = population.frame.with_columns(
        pl.col("os").eq("b").alias("os[b]"), pl.col("os").eq("c").alias("os[c]")
    )
    means = frame.select(pl.col(main.names).cast(pl.Float64).mean()).row(0)
    np.testing.assert_allclose(main.mean, means, rtol=1e-12)
    inside = frame.filter("enrolled").select(pl.col(main.names).cast(pl.Float64)).to_numpy()
    np.testing.assert_array_equal(main.matrix, inside)
    assert main.se is None


def test_a_rich_map_is_as_rich_as_the_enrolled_allow() -> None:
    stage = staged(people(900))
    for enrolled, columns in ((25 * 9, 9), (25 * 9 - 1, 6), (25 * 6 - 1, 3), (1, 3)):
        assert len(rich_design(stage.coded, enrolled).terms) == columns
    rich = stage.balance("rich", np.ones(stage.members.size, dtype=np.bool_))
    squares = stage.population.matrix(["z1"])[:, 0] ** 2
    at = rich.names.index("z1**2")
    np.testing.assert_allclose(rich.mean[at], squares.mean(), rtol=1e-12)


# Totals


def totals(**more: Any) -> Population:
    enrolled = table_of().filter("enrolled").drop("enrolled")
    return Population.from_totals(enrolled, {"z1": 0.1, "z2": -0.2}, **more)


def test_with_totals_no_probability_is_known_and_means_are() -> None:
    stage = enrollment_stage(totals(size=1_000))
    assert isinstance(stage, TotalsEnrollment)
    assert (stage.size, stage.formula, stage.coded) == (1_000, "z1, z2", None)
    found = stage.fitted(np.ones(stage.members.size, dtype=np.bool_), required=False)
    assert np.isnan(found.prob).all()
    assert found.known.all()
    columns = stage.balance("rich", found.known)
    assert columns.names == ("z1", "z2")
    np.testing.assert_array_equal(columns.mean, [0.1, -0.2])
    np.testing.assert_array_equal(columns.matrix, stage.members.frame.select("z1", "z2").to_numpy())
    assert stage.overlap(None, 0.01) is None


@pytest.mark.parametrize(
    "needs",
    [
        Needs(method="fedipw", probabilities=True),
        Needs(method="fedipw", truth=True),
        Needs(method="fedipw", everyone=True),
        Needs(method="fedipw", size=True),
    ],
)
def test_with_totals_methods_that_need_more_are_refused(needs: Needs) -> None:
    stage = enrollment_stage(totals())
    stage.require(Needs(method="calibrated-quadratic", balance=frozenset({"main"})))
    with pytest.raises(InputError, match=r"fedipw needs (a table of the whole population|the pop)"):
        stage.require(needs)


def test_totals_have_no_formula_and_no_model() -> None:
    model = table_model(Table(table_of()), "z1")
    for formula, given_model in (("z1", None), (".", model)):
        with pytest.raises(InputError, match="needs a population table: totals calibrate"):
            enrollment_stage(totals(), formula, model=given_model)


def test_a_column_of_a_target_must_be_known_of_the_enrolled() -> None:
    enrolled = table_of().filter("enrolled").with_columns(z1=pl.lit(None, dtype=pl.Float64))
    stage = enrollment_stage(Population.from_totals(enrolled, {"z1": 0.1}))
    with pytest.raises(InputError, match=r"enrolled table: missing .*'z1'"):
        stage.balance("main", np.ones(stage.members.size, dtype=np.bool_))
    with pytest.raises(InputError, match="age"):
        enrollment_stage(Population.from_totals(enrolled, {"age": 0.1}))
