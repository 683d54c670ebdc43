"""The 200-row reference: what R's glm gives, digit by digit (tests/reference/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.enrollment import TableEnrollment, enrollment_stage
from fedipw.selection.logistic import LogisticFit
from fedipw.selection.propensity import NewtonLogistic
from fedipw.tables import Population
from fedipw.weighting.functions import (
    effective_sample_size,
    hajek_weights,
    horvitz_thompson_weights,
)

FOLDER = Path(__file__).parents[1] / "reference"
COLUMNS = ("z1", "z2", "z3b", "z3c")
R: dict[str, Any] = json.loads((FOLDER / "ipw200_R.json").read_text())
FITTED = pl.read_csv(FOLDER / "ipw200_fitted_R.csv", null_values="NA")


@pytest.fixture(scope="module")
def table() -> pl.DataFrame:
    return pl.read_csv(FOLDER / "ipw200.csv").with_columns(
        z3b=pl.col("z3") == "b", z3c=pl.col("z3") == "c"
    )


class Fitted(NamedTuple):
    """The model and the probabilities of everybody, (200,), and of the enrolled."""

    model: LogisticFit
    prob: FloatArray
    enrolled: FloatArray


@pytest.fixture(scope="module")
def fit(table: pl.DataFrame) -> Fitted:
    flags = table.with_columns(unit_id="id", enrolled=pl.col("e") == 1)
    people = Population(flags.select("unit_id", "enrolled", *COLUMNS))
    stage = enrollment_stage(people, " + ".join(COLUMNS))
    assert isinstance(stage, TableEnrollment)
    found = stage.fitted(np.ones(stage.members.size, dtype=np.bool_), required=True)
    assert found.model is not None
    assert found.known.all()
    return Fitted(found.model.logistic(), stage.everyone_prob(found.model), found.prob)


@pytest.fixture(scope="module")
def enrolled_outcomes(table: pl.DataFrame) -> FloatArray:
    return np.asarray(table.filter(pl.col("e") == 1)["y"], dtype=np.float64)


@pytest.fixture(scope="module")
def enrolled_prob(table: pl.DataFrame, fit: Fitted) -> FloatArray:
    enrolled: BoolArray = np.asarray(table["e"]) == 1
    np.testing.assert_allclose(fit.enrolled, fit.prob[enrolled], rtol=1e-14)
    return fit.enrolled


def test_the_table_is_the_one_r_fitted(table: pl.DataFrame) -> None:
    for name in ("id", "z1", "z2", "e", "y"):
        np.testing.assert_array_equal(table[name].to_numpy(), FITTED[name].to_numpy())
    assert table["z3"].to_list() == FITTED["z3"].to_list()
    assert int(table["e"].sum()) == R["n_enrolled"]


def test_coefficients_equal_rs(fit: Fitted) -> None:
    expected = [R["coef"][name] for name in (*COLUMNS, "(Intercept)")]
    np.testing.assert_allclose(fit.model.point, expected, rtol=1e-11)
    assert fit.model.dropped == ()


def test_standard_errors_equal_rs(fit: Fitted) -> None:
    expected = np.array([R["se"][name] for name in (*COLUMNS, "(Intercept)")])
    np.testing.assert_allclose(fit.model.standard_errors, expected, rtol=5e-9)
    np.testing.assert_allclose(np.diag(fit.model.covariance), expected**2, rtol=1e-8)


def test_the_classifier_of_the_same_name_equals_rs(table: pl.DataFrame) -> None:
    X = table.select(pl.col(COLUMNS).cast(pl.Float64)).to_numpy()
    inner = NewtonLogistic().fit(X, table["e"].to_numpy())
    names = (*COLUMNS, "(Intercept)")
    got = np.append(inner.coef_[0], inner.intercept_)
    np.testing.assert_allclose(got, [R["coef"][name] for name in names], rtol=1e-11)
    errors = np.array([R["se"][name] for name in names])
    np.testing.assert_allclose(inner.standard_errors_, errors, rtol=5e-9)
    np.testing.assert_allclose(np.diag(inner.covariance_), errors**2, rtol=1e-8)


def test_fitted_probabilities_equal_rs(fit: Fitted) -> None:
    np.testing.assert_allclose(fit.prob, FITTED["p"].to_numpy(), rtol=1e-11)
    assert fit.prob.min() == pytest.approx(R["p_min"], rel=1e-11)
    assert fit.prob.max() == pytest.approx(R["p_max"], rel=1e-11)


def test_the_log_likelihood_equals_rs(table: pl.DataFrame, fit: Fitted) -> None:
    e = table["e"].to_numpy()
    loglik = float(np.log(np.where(e == 1, fit.prob, 1.0 - fit.prob)).sum())
    assert loglik == pytest.approx(R["loglik"], rel=1e-12)
    assert -2.0 * loglik == pytest.approx(R["deviance"], rel=1e-12)
    assert fit.model.log_likelihood == pytest.approx(R["loglik"], rel=1e-12)


def test_the_horvitz_thompson_mean_equals_rs(
    enrolled_prob: FloatArray, enrolled_outcomes: FloatArray
) -> None:
    weights = horvitz_thompson_weights(enrolled_prob, population_size=200)
    assert weights @ enrolled_outcomes == pytest.approx(R["ht_mean"], rel=1e-11)
    assert 200.0 * weights.sum() == pytest.approx(R["sum_w"], rel=1e-11)


def test_the_hajek_mean_equals_rs(enrolled_prob: FloatArray, enrolled_outcomes: FloatArray) -> None:
    weights = hajek_weights(enrolled_prob)
    assert weights @ enrolled_outcomes == pytest.approx(R["hajek_mean"], rel=1e-11)
    assert effective_sample_size(weights) == pytest.approx(R["ess"], rel=1e-11)


def test_the_two_means_and_the_unweighted_one_are_told_apart() -> None:
    means = [R["ht_mean"], R["hajek_mean"], R["unweighted_mean_enrolled"]]
    assert min(abs(a - b) for i, a in enumerate(means) for b in means[:i]) > 0.05
