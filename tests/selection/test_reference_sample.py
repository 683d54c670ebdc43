"""Enrollment from a reference sample (Chen, Li and Wu): the equation and the stage."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy.optimize import root
from scipy.special import expit
from sklearn.naive_bayes import GaussianNB

from fedipw.errors import InputError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.classifiers import Classifier, Newton
from fedipw.selection.coded import TableSettings, table_model
from fedipw.selection.enrollment import (
    EnrollmentFit,
    EnrollmentStage,
    Needs,
    SampleEnrollment,
    enrollment_stage,
    reference_sample_fit,
)
from fedipw.selection.propensity import NewtonLogistic
from fedipw.tables.design import Missing
from fedipw.tables.population import Population
from fedipw.tables.table import Table


def population(size: int, seed: int) -> tuple[FloatArray, BoolArray]:
    rng = np.random.default_rng(seed)
    Z = np.column_stack([rng.standard_normal(size), rng.integers(0, 2, size)])
    return Z, rng.random(size) < 1 / (1 + np.exp(0.5 - Z @ [0.8, -0.6]))


def test_the_estimating_equation_is_solved() -> None:
    Z, inside = population(3000, 0)
    rng = np.random.default_rng(1)
    chance = np.where(Z[:, 1] == 1, 0.3, 0.1)  # a sample with unequal probabilities
    drawn = rng.random(3000) < chance
    fit = reference_sample_fit(Z[inside], Z[drawn], 1 / chance[drawn])
    z = np.column_stack([np.ones(drawn.sum()), Z[drawn]])
    expected = (fit.prob_at(Z[drawn]) / chance[drawn]) @ z
    observed = np.column_stack([np.ones(inside.sum()), Z[inside]]).sum(axis=0)
    np.testing.assert_allclose(expected, observed, rtol=1e-9)
    np.testing.assert_allclose(fit.prob, fit.prob_at(Z[inside]), rtol=1e-14)


def test_a_census_as_reference_is_maximum_likelihood() -> None:
    """With the whole population as sample (P3) is the score equation of logistic regression."""
    Z, inside = population(2000, 2)
    fit = reference_sample_fit(Z[inside], Z, np.ones(2000))
    mle = NewtonLogistic().fit(Z, inside)
    np.testing.assert_allclose(fit.coefficients, mle.coef_[0], rtol=1e-9)
    np.testing.assert_allclose(fit.intercept, mle.intercept_[0], rtol=1e-9)


def test_weights_recover_the_population_mean() -> None:
    """A 5% sample of 200,000: an error above 0.05 is over five standard errors away."""
    Z, inside = population(200_000, 3)
    sample = np.random.default_rng(4).choice(200_000, 10_000, replace=False)
    fit = reference_sample_fit(Z[inside], Z[sample], np.full(10_000, 20.0))
    weights = 1 / fit.prob
    outcome = Z[:, 0] + Z[:, 1]
    assert abs(outcome[inside].mean() - outcome.mean()) > 0.2
    assert abs(weights @ outcome[inside] / weights.sum() - outcome.mean()) < 0.05
    assert abs(weights.sum() / fit.population_size - 1) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e, r, d: (e[:, :1], r, d), "need the same columns"),
        (lambda e, r, d: (e, r, -d), "finite and above 0"),
        (lambda e, r, d: (e, r, d[:-1]), "design_weights has"),
        (lambda e, r, d: (e, r, d / 1000), "no more than the .* enrolled clients"),
        (lambda e, r, d: (e, np.where(r == r[0, 0], np.nan, r), d), "missing or infinite"),
        (lambda e, r, d: (e, r * [1.0, 0.0], d), "z2 is constant in the reference sample"),
        (lambda e, r, d: (e, r[:2], d[:2] * 1000), "2 reference rows are too few"),
    ],
)
def test_samples_no_fit_can_use(change: object, message: str) -> None:
    Z, inside = population(500, 5)
    assert callable(change)
    with pytest.raises(InputError, match=message):
        reference_sample_fit(*change(Z[inside], Z[:100], np.full(100, 5.0)))


# The stage


def frames(size: int = 3_000) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return enrolled clients and a sample with unequal probabilities, weights in ``d``."""
    Z, inside = population(size, 0)
    rng = np.random.default_rng(1)
    chance = np.where(Z[:, 1] == 1, 0.3, 0.1)
    drawn = rng.random(size) < chance
    region = np.where(Z[:, 0] > 0.5, "north", np.where(Z[:, 0] > -0.3, "mid", "south"))
    everyone = pl.DataFrame(
        {"unit_id": np.arange(size), "age": Z[:, 0] ** 2, "flag": Z[:, 1], "region": region}
    )
    sample = everyone.with_columns(d=1.0 / chance).filter(drawn).drop("unit_id")
    return everyone.filter(inside), sample


def staged(
    formula: str = ".", *, sample: pl.DataFrame | None = None, settings: TableSettings | None = None
) -> EnrollmentStage:
    enrolled, drawn = frames()
    known = Population.from_sample(enrolled, drawn if sample is None else sample, "d")
    return enrollment_stage(known, formula, settings=settings)


def fitted(stage: EnrollmentStage, *, required: bool = True) -> EnrollmentFit:
    return stage.fitted(np.ones(stage.members.size, dtype=np.bool_), required=required)


def columns(frame: pl.DataFrame) -> FloatArray:
    """Return the design of all covariates by hand: age, flag, region."""
    levels = [(frame["region"] == level).to_numpy() for level in ("north", "south")]
    return np.column_stack([frame["age"].to_numpy(), frame["flag"].to_numpy(), *levels])


def test_the_stage_gives_the_probabilities_of_the_fit() -> None:
    enrolled, sample = frames()
    stage = staged()
    assert isinstance(stage, SampleEnrollment)
    found = fitted(stage)
    expected = reference_sample_fit(columns(enrolled), columns(sample), sample["d"].to_numpy())
    np.testing.assert_allclose(found.prob, expected.prob, rtol=1e-12)
    assert found.known.all()
    assert found.model is None
    assert found.note == "enrollment by a reference sample"
    assert stage.size == pytest.approx(sample["d"].sum(), rel=1e-14)
    assert (stage.formula, stage.coded, stage.overlap(None, 0.01)) == (".", None, None)


def test_the_stage_solves_the_score_equation_as_a_root_finder_does() -> None:
    """The equation of nonprobsvy's MLE in R, solved by MINPACK from zero."""
    enrolled, sample = frames()
    z, r = (np.column_stack([np.ones(f.height), columns(f)]) for f in (enrolled, sample))
    weights, total = sample["d"].to_numpy(), z.sum(axis=0)

    def score(beta: FloatArray) -> FloatArray:
        out: FloatArray = total - (weights * expit(r @ beta)) @ r
        return out

    def slope(beta: FloatArray) -> FloatArray:
        prob = expit(r @ beta)
        out: FloatArray = -(r.T * (weights * prob * (1.0 - prob))) @ r
        return out

    solved = root(score, np.zeros(5), jac=slope, tol=1e-13)
    np.testing.assert_allclose(fitted(staged()).prob, expit(z @ solved.x), rtol=1e-7)


def test_only_the_columns_asked_for_are_used_and_never_the_weights() -> None:
    enrolled, sample = frames()
    expected = reference_sample_fit(
        columns(enrolled)[:, :1], columns(sample)[:, :1], sample["d"].to_numpy()
    )
    np.testing.assert_allclose(fitted(staged("age")).prob, expected.prob, rtol=1e-12)
    both = Population.from_sample(enrolled.with_columns(d=1.0), sample, "d")
    found = fitted(enrollment_stage(both))
    np.testing.assert_allclose(found.prob, fitted(staged()).prob, rtol=1e-14)


def test_who_is_enrolled_now_decides_the_fit() -> None:
    enrolled, sample = frames()
    present = np.arange(enrolled.height) % 3 > 0
    found = staged().fitted(present, required=True)
    expected = reference_sample_fit(
        columns(enrolled.filter(present)), columns(sample), sample["d"].to_numpy()
    )
    np.testing.assert_allclose(found.prob, expected.prob_at(columns(enrolled)), rtol=1e-12)


def test_rows_left_out_count_neither_here_nor_there() -> None:
    enrolled, sample = frames()
    dropping = TableSettings(missing=Missing.DROP)
    gone = pl.int_range(pl.len()) % 7 == 0
    hole = pl.when(gone).then(None).otherwise("age").alias("age")
    here, there = enrolled.with_columns(hole), sample.with_columns(hole)
    stage = enrollment_stage(Population.from_sample(here, there, "d"), settings=dropping)
    found = fitted(stage)
    whole = enrollment_stage(
        Population.from_sample(enrolled.filter(~gone), sample.filter(~gone), "d")
    )
    np.testing.assert_array_equal(found.known, here["age"].is_not_null().to_numpy())
    assert np.isnan(found.prob[~found.known]).all()
    np.testing.assert_allclose(found.prob[found.known], fitted(whole).prob, rtol=1e-12)
    assert stage.size == pytest.approx(sample.filter(~gone)["d"].sum(), rel=1e-14)
    with pytest.raises(InputError, match="missing values in 'age'"):
        enrollment_stage(Population.from_sample(enrolled, there, "d"))


def test_means_are_the_samples_with_their_errors() -> None:
    _, sample = frames()
    stage = staged()
    found = stage.balance("main", np.ones(stage.members.size, dtype=np.bool_))
    share = sample["d"].to_numpy() / sample["d"].sum()
    mean = share @ columns(sample)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    assert found.se is not None
    np.testing.assert_allclose(
        found.se, np.sqrt(share**2 @ (columns(sample) - mean) ** 2), rtol=1e-12
    )
    np.testing.assert_allclose(found.matrix, columns(stage.members.frame), rtol=1e-15)
    assert found.names == ("age", "flag", "region[north]", "region[south]")


def test_methods_that_need_everybody_are_refused() -> None:
    stage = staged()
    stage.require(
        Needs(method="fedipw", probabilities=True, size=True, balance=frozenset({"main"}))
    )
    for needs in (Needs(method="oracle", truth=True), Needs(method="collapsed", everyone=True)):
        with pytest.raises(InputError, match=f"{needs.method} needs a table of the whole pop"):
            stage.require(needs)


def test_a_saved_model_is_refused() -> None:
    enrolled, sample = frames()
    table = enrolled.with_columns(enrolled=pl.int_range(pl.len()) % 2 == 0)
    model = table_model(Table(table), "flag")
    with pytest.raises(InputError, match="saved model of enrollment needs a table of the whole"):
        enrollment_stage(Population.from_sample(enrolled, sample, "d"), model=model)


@pytest.mark.parametrize("estimator", [Newton(l2=2.0), Classifier(GaussianNB(), folds=3)])
def test_another_estimator_is_not_used_and_the_note_says_so(estimator: Newton | Classifier) -> None:
    found = fitted(staged(settings=TableSettings(estimator=estimator)))
    assert found.note.endswith("by logistic regression without a penalty")
    np.testing.assert_array_equal(found.prob, fitted(staged()).prob)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pl.col("d") * -1.0, "weights in 'd' must be finite and above 0"),
        (pl.lit(None, dtype=pl.Float64).alias("d"), "weights in 'd' must be finite and above 0"),
        (pl.lit(np.inf).alias("d"), "weights in 'd' must be finite and above 0"),
    ],
)
def test_weights_that_are_none_are_refused(change: pl.Expr, message: str) -> None:
    with pytest.raises(InputError, match=message):
        staged(sample=frames()[1].with_columns(change))


def test_a_sample_without_weights_or_columns_is_refused_by_name() -> None:
    enrolled, sample = frames()
    with pytest.raises(InputError, match=r"no column 'weight'; it has age, flag, region, d"):
        Population.from_sample(enrolled, sample, "weight")
    with pytest.raises(InputError, match="'income'"):
        staged("age + income")
    with pytest.raises(InputError, match="'age'"):
        staged("age", sample=sample.drop("age"))


def test_a_sample_of_too_few_is_an_error_where_it_is_needed_and_a_note_elsewhere() -> None:
    small = frames()[1].with_columns(d=pl.lit(1.0))
    with pytest.raises(InputError, match="no more than the"):
        fitted(staged(sample=small))
    found = fitted(staged(sample=small), required=False)
    assert found.note.startswith("no enrollment probabilities: The design weights sum to")
    assert np.isnan(found.prob).all()
    assert found.known.all()
