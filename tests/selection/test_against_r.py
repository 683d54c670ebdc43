"""The 200-row reference: what R's glm gives, digit by digit (tests/reference/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedipw.numerics.types import BoolArray, FloatArray
from fedipw.selection import EnrollmentFit, NewtonLogistic, enrollment_fit
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


@pytest.fixture(scope="module")
def fit(table: pl.DataFrame) -> EnrollmentFit:
    flags = table.with_columns(unit_id="id", enrolled=pl.col("e") == 1)
    people = Population(flags.select("unit_id", "enrolled", *COLUMNS))
    return enrollment_fit(people, COLUMNS)


@pytest.fixture(scope="module")
def enrolled_outcomes(table: pl.DataFrame) -> FloatArray:
    return np.asarray(table.filter(pl.col("e") == 1)["y"], dtype=np.float64)


@pytest.fixture(scope="module")
def enrolled_prob(table: pl.DataFrame, fit: EnrollmentFit) -> FloatArray:
    enrolled: BoolArray = np.asarray(table["e"]) == 1
    return fit.prob[enrolled]


def test_the_table_is_the_one_r_fitted(table: pl.DataFrame) -> None:
    for name in ("id", "z1", "z2", "e", "y"):
        np.testing.assert_array_equal(table[name].to_numpy(), FITTED[name].to_numpy())
    assert table["z3"].to_list() == FITTED["z3"].to_list()
    assert int(table["e"].sum()) == R["n_enrolled"]


def test_coefficients_equal_rs(fit: EnrollmentFit) -> None:
    assert fit.model is not None
    inner = fit.model.classifier_
    assert isinstance(inner, NewtonLogistic)
    got = np.append(inner.coef_[0], inner.intercept_)
    expected = [R["coef"][name] for name in (*COLUMNS, "(Intercept)")]
    np.testing.assert_allclose(got, expected, rtol=1e-11)
    assert fit.dropped == ()


def test_standard_errors_equal_rs(fit: EnrollmentFit) -> None:
    assert fit.model is not None
    inner = fit.model.classifier_
    expected = np.array([R["se"][name] for name in (*COLUMNS, "(Intercept)")])
    np.testing.assert_allclose(inner.standard_errors_, expected, rtol=5e-9)
    np.testing.assert_allclose(np.diag(inner.covariance_), expected**2, rtol=1e-8)


def test_fitted_probabilities_equal_rs(fit: EnrollmentFit) -> None:
    np.testing.assert_allclose(fit.prob, FITTED["p"].to_numpy(), rtol=1e-11)
    assert fit.prob.min() == pytest.approx(R["p_min"], rel=1e-11)
    assert fit.prob.max() == pytest.approx(R["p_max"], rel=1e-11)


def test_the_log_likelihood_equals_rs(table: pl.DataFrame, fit: EnrollmentFit) -> None:
    e = table["e"].to_numpy()
    loglik = float(np.log(np.where(e == 1, fit.prob, 1.0 - fit.prob)).sum())
    assert loglik == pytest.approx(R["loglik"], rel=1e-12)
    assert -2.0 * loglik == pytest.approx(R["deviance"], rel=1e-12)


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
