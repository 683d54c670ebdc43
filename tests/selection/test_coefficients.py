"""Odds ratios, intervals and p-values against R's glm, and what has none."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedipw.selection.classifiers import Classifier, Newton, Rate
from fedipw.selection.coded import TableSettings, table_model
from fedipw.selection.coefficients import (
    CLASSIFIER_NOTE,
    PENALISED_NOTE,
    ROWS_NOTE,
    Coefficient,
    coefficient_notes,
    coefficients_of,
)
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.saved import StageModel
from fedipw.tables.table import Table

REFERENCE = Path(__file__).parent.parent / "reference"
NAMES = {"(Intercept)": "(intercept)", "z1": "z1", "z2": "z2", "z3b": "z3[b]", "z3c": "z3[c]"}


def model(**settings: Any) -> StageModel:
    frame = pl.read_csv(REFERENCE / "ipw200.csv").rename({"id": "unit_id"})
    frame = frame.with_columns(enrolled=pl.col("e") == 1)
    return table_model(Table(frame), "z1 + z2 + z3", settings=TableSettings(**settings))


def test_odds_ratios_intervals_and_p_values_are_those_of_r() -> None:
    """Newton stops at a gradient of 1e-12, R's deviance at 1e-15: both are the maximum to 1e-8."""
    found = {one.name: one for one in coefficients_of(model().fit)}
    wanted = pl.read_csv(REFERENCE / "ipw200_coefficients_R.csv")
    assert {*found} == {*NAMES.values()}
    for row in wanted.iter_rows(named=True):
        one = found[NAMES[row.pop("name")]]
        for key, value in row.items():
            assert getattr(one, key) == pytest.approx(value, rel=1e-7), key


def test_a_penalised_fit_has_odds_ratios_and_nothing_to_test_them_by() -> None:
    made = model(estimator=Newton(l2=1.0))
    assert coefficient_notes(made) == (PENALISED_NOTE,)
    for one in coefficients_of(made.fit):
        assert one.odds_ratio == pytest.approx(math.exp(one.value))
        assert one.low is one.high is one.p_value is None


def test_a_classifier_and_a_rate_have_no_coefficients() -> None:
    made = model(estimator=Classifier(NewtonLogistic()))
    assert coefficients_of(made.fit) == coefficients_of(Rate(0.5)) == ()
    assert coefficient_notes(made) == (CLASSIFIER_NOTE,)


def test_rows_of_rounds_are_said_to_be_counted_as_independent() -> None:
    made = model()
    assert coefficient_notes(made) == ()
    later = StageModel(stage="participation", design=made.design, fit=made.fit)
    assert coefficient_notes(later) == (ROWS_NOTE,)


@pytest.mark.parametrize("value", [800.0, -800.0])
def test_what_is_not_finite_is_none(value: float) -> None:
    one = Coefficient.of("z", value, 1.0)
    assert one.odds_ratio in {None, 0.0}
    assert one.p_value == 0.0
    left_out = Coefficient.of("z", 0.0, np.nan)
    assert left_out.standard_error is left_out.odds_ratio is left_out.p_value is None
