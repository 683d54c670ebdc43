"""Enrollment probabilities from the population table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import StratifiedKFold
from sklearn.tree import DecisionTreeClassifier
from threadpoolctl import threadpool_limits

from fedipw.errors import InputError
from fedipw.lab.mechanisms import LogisticEnrollment, enrollment_draw
from fedipw.lab.testbed import Testbed
from fedipw.selection import NewtonLogistic, enrollment_fit
from fedipw.tables import Population


def people(size: int = 300, **columns: Any) -> Population:
    rng = np.random.default_rng(0)
    drawn = Testbed(size=size, rows=1, features=1).draw(rng).population
    enrolled = enrollment_draw(LogisticEnrollment()(drawn), rng)
    table = {name: drawn.frame[name] for name in drawn.frame.columns}
    return Population.of({**table, "enrolled": enrolled, **columns})


def test_the_default_fit_solves_the_score_equations() -> None:
    population = people()
    fit = enrollment_fit(population)
    residual = population.enrolled - fit.prob
    assert fit.columns == ("z1", "z2", "z3")
    assert abs(residual.sum()) <= 1e-9
    np.testing.assert_allclose(population.matrix().T @ residual, 0.0, atol=1e-9)


def test_only_the_columns_asked_for_are_used() -> None:
    population = people()
    fit = enrollment_fit(population, ["z2"])
    expected = NewtonLogistic().fit(population.matrix(["z2"]), population.enrolled)
    np.testing.assert_array_equal(fit.prob, expected.predict_proba(population.matrix(["z2"]))[:, 1])
    assert fit.columns == ("z2",)


def late_people() -> Population:
    population = people()
    battery = np.where(population.enrolled, 0.5, np.nan)
    values = [None if np.isnan(b) else b for b in battery.tolist()]
    return people(battery=values)


@pytest.mark.parametrize("columns", [None, ["z1", "battery"], ["battery"]])
def test_a_column_known_only_after_enrollment_is_refused_by_name(
    columns: list[str] | None,
) -> None:
    population = late_people()
    outside = population.size - population.enrolled_size
    with pytest.raises(InputError) as caught:
        enrollment_fit(population, columns)
    message = str(caught.value)
    assert message.startswith("'battery' is known only after enrollment")
    assert f"null for all {outside} non-enrolled clients" in message
    assert "Leave it to the participation stage." in message


def test_the_other_columns_of_such_a_table_stay_usable() -> None:
    fit = enrollment_fit(late_people(), ["z1", "z2"])
    np.testing.assert_array_equal(fit.prob, enrollment_fit(people(), ["z1", "z2"]).prob)


def test_an_unknown_column_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="No covariate column 'height'"):
        enrollment_fit(people(), ["z1", "height"])


def test_no_covariates_are_refused() -> None:
    with pytest.raises(InputError, match="at least one covariate"):
        enrollment_fit(people(), [])


def test_everybody_enrolled_is_refused_with_the_way_out() -> None:
    population = people(enrolled=np.ones(300, dtype=bool))
    with pytest.raises(InputError, match=r"All 300 clients are enrolled.*participation weights"):
        enrollment_fit(population)


def test_a_missing_value_is_named() -> None:
    income: list[float | None] = [1.0] * 300
    income[17] = None
    with pytest.raises(InputError, match=r"'income' \(1 of 300 rows, first at row 17\)"):
        enrollment_fit(people(income=income))


def test_dropped_columns_are_named() -> None:
    z1 = people().frame["z1"].to_numpy()
    fit = enrollment_fit(people(twice=2.0 * z1, one=np.ones(300)))
    assert fit.dropped == ("twice", "one")
    np.testing.assert_allclose(fit.prob, enrollment_fit(people()).prob, rtol=1e-9)


def test_cross_fitting_asks_for_chance() -> None:
    with pytest.raises(InputError, match=r"pass rng=numpy.random.default_rng\(seed\)"):
        enrollment_fit(people(), folds=5)


@pytest.mark.parametrize("classifier", [None, DecisionTreeClassifier(max_depth=2, random_state=0)])
def test_cross_fitted_probabilities_equal_a_plain_loop(classifier: Any) -> None:
    population = people()
    fit = enrollment_fit(population, classifier=classifier, folds=4, rng=np.random.default_rng(3))
    Z, enrolled = population.matrix(), population.enrolled
    seed = int(np.random.default_rng(3).integers(2**31))
    split = StratifiedKFold(4, shuffle=True, random_state=seed)
    expected = np.full(300, np.nan)
    for others, own in split.split(Z, enrolled):
        base = NewtonLogistic() if classifier is None else classifier
        expected[own] = base.fit(Z[others], enrolled[others]).predict_proba(Z[own])[:, 1]
    np.testing.assert_array_equal(fit.prob, expected)
    assert fit.model is None
    assert fit.dropped == ()


def test_any_classifier_serves() -> None:
    population = people()
    boosting = HistGradientBoostingClassifier(max_iter=5, random_state=0)
    with threadpool_limits(1):  # tiny fits: threads would only wait for each other
        fit = enrollment_fit(population, classifier=boosting)
        expected = boosting.fit(population.matrix(), population.enrolled)
        prob = expected.predict_proba(population.matrix())[:, 1]
    np.testing.assert_array_equal(fit.prob, prob)


def test_a_probability_of_zero_for_an_enrolled_client_is_refused() -> None:
    # out of fold, a tree without depth limit is sure of clients that did enroll
    with pytest.raises(InputError, match=r"probability of enrolled clients must .*row \d+: 0\.0"):
        enrollment_fit(
            people(),
            classifier=DecisionTreeClassifier(random_state=0),
            folds=3,
            rng=np.random.default_rng(0),
        )
