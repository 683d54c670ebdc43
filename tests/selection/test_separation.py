"""Separation: found exactly where it is, and nowhere else."""

from __future__ import annotations

import warnings
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

from fedipw.errors import SeparationError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.classifiers import Classifier, Newton
from fedipw.selection.coded import TableSettings
from fedipw.selection.enrollment import EnrollmentFit, enrollment_stage
from fedipw.selection.propensity import NewtonLogistic
from fedipw.tables import Population


def quiet_fit(X: FloatArray, y: BoolArray) -> NewtonLogistic:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return NewtonLogistic().fit(X, y)


def separable_on_a_line(x: FloatArray, y: BoolArray) -> bool:
    """Tell by definition: the classes overlap in at most one shared end point."""
    return bool(x[y].min() >= x[~y].max() or x[~y].min() >= x[y].max())


def separable_in_the_plane(X: FloatArray, y: BoolArray) -> bool:
    """Tell by trying every line through two points (integers, so exactly).

    The directions that separate weakly form a cone. If the points span the plane it is pointed, so
    unless it is zero it has an extreme ray, at which two rows are zero: a line through two points.
    """
    rows = np.column_stack([X, np.ones(len(X))]).astype(np.int64)
    sign = np.where(y, 1, -1)
    for a, b in combinations(range(len(X)), 2):
        line = np.cross(rows[a], rows[b])
        side = sign * (rows @ line)
        if line.any() and ((side >= 0).all() or (side <= 0).all()):
            return True
    return False


@pytest.mark.parametrize("x", [[0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 7]])
def test_every_labelling_of_points_on_a_line(x: list[int]) -> None:
    points = np.array(x, dtype=float)
    for labels in product([False, True], repeat=6):
        y = np.array(labels)
        if y.all() or not y.any():
            continue
        model = quiet_fit(points[:, None], y)
        assert bool(model.separation_) == separable_on_a_line(points, y), labels
        assert model.converged_ == (not model.separation_), labels


@pytest.mark.parametrize(
    "points",
    [
        [[0, 0], [1, 0], [0, 1], [1, 1], [2, 1], [1, 2], [2, 2]],
        [[0, 0], [4, 1], [1, 3], [2, 2], [2, 2], [5, 5], [3, 1]],
    ],
)
def test_every_labelling_of_points_in_the_plane(points: list[list[int]]) -> None:
    X = np.array(points, dtype=float)
    found = 0
    for labels in product([False, True], repeat=len(points) - 1):
        y = np.array([True, *labels])  # the other half of the labellings is the mirror image
        if y.all():
            continue
        model = quiet_fit(X, y)
        assert bool(model.separation_) == separable_in_the_plane(X, y), labels
        found += bool(model.separation_)
    assert 0 < found < 2 ** (len(points) - 1) - 1  # both answers occur


def test_complete_separation_warns_and_names_the_column_alone() -> None:
    rng = np.random.default_rng(0)
    y = np.repeat([False, True], 50)
    X = np.column_stack([rng.normal(size=(100, 2)), np.where(y, 1.0, -1.0), rng.normal(size=100)])
    with pytest.warns(ConvergenceWarning, match=r"Columns \(2,\) separate the classes"):
        model = NewtonLogistic().fit(X, y)
    assert model.separation_ == (2,)
    assert not model.converged_


def test_quasi_complete_separation_names_the_rare_group() -> None:
    rng = np.random.default_rng(1)
    rare = np.zeros(200)
    rare[:6] = 1.0  # six clients of a group in which everybody enrolled
    y = rng.random(200) < 0.5
    y[:6] = True
    X = np.column_stack([rng.normal(size=200), rare])
    with pytest.warns(ConvergenceWarning, match=r"Columns \(1,\) separate"):
        model = NewtonLogistic().fit(X, y)
    assert model.separation_ == (1,)


def test_columns_that_separate_only_together_are_both_named() -> None:
    rng = np.random.default_rng(2)
    X = rng.normal(size=(300, 3))
    y = X[:, 0] + X[:, 2] > 0.0
    assert quiet_fit(X, y).separation_ == (0, 2)


def test_positions_are_those_of_the_given_table_despite_dropped_columns() -> None:
    y = np.repeat([False, True], 10)
    X = np.column_stack([np.ones(20), np.tile([1.0, 2.0], 10), np.where(y, 3.0, 2.0)])
    model = quiet_fit(X, y)
    assert model.dropped_.tolist() == [0]
    assert model.separation_ == (2,)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), steepness=st.floats(5.0, 60.0))
def test_no_false_alarm_on_overlap_with_large_coefficients(seed: int, steepness: float) -> None:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(400, 2))
    noise = rng.logistic(size=400)
    y = steepness * (X[:, 0] - 0.5 * X[:, 1]) + noise > 0.0
    # two rows on the wrong side, off each other's line: no direction is left that separates
    X = np.concatenate([X, [[0.3, 0.0], [-0.3, 0.0], [0.3, 0.2], [-0.3, -0.2]]])
    y = np.concatenate([y, [False, True, False, True]])
    model = NewtonLogistic().fit(X, y)  # a warning would be an error
    assert model.separation_ == ()
    assert model.converged_


def test_a_wide_range_of_log_odds_alone_is_no_separation() -> None:
    x = np.concatenate([np.linspace(-1.0, 1.0, 401), [0.05, -0.05]])
    y = np.concatenate([np.linspace(-1.0, 1.0, 401) > 0.0, [False, True]])
    model = NewtonLogistic().fit(x[:, None], y)
    assert np.abs(model.decision_function(x[:, None])).max() > 15.0  # it was looked into
    assert model.converged_


def enrolled_people(split: FloatArray, enrolled: BoolArray) -> Population:
    rng = np.random.default_rng(3)
    n = len(split)
    return Population.of(
        {
            "unit_id": np.arange(n),
            "age": rng.normal(size=n),
            "has_app": split,
            "enrolled": enrolled,
        }
    )


def enrollment_fit(people: Population, estimator: Newton | Classifier) -> EnrollmentFit:
    stage = enrollment_stage(people, settings=TableSettings(estimator=estimator))
    return stage.fitted(np.ones(stage.members.size, dtype=np.bool_), required=True)


@pytest.mark.parametrize("folds", [None, 3])
def test_the_enrollment_fit_names_the_covariate(folds: int | None) -> None:
    enrolled = np.tile([True, False, False], 40)
    people = enrolled_people(enrolled.astype(float), enrolled)
    with pytest.raises(SeparationError, match=r"^has_app separate\(s\)") as caught:
        enrollment_fit(people, Newton() if folds is None else Classifier(folds=folds))
    assert caught.value.columns == ("has_app",)
    assert caught.value.n_rows == (120 if folds is None else 80)
    assert "Drop or coarsen" in str(caught.value)


def test_a_ridge_is_the_way_out_the_error_offers() -> None:
    enrolled = np.tile([True, False, False], 40)
    people = enrolled_people(enrolled.astype(float), enrolled)
    for estimator in (Newton(l2=1.0), Classifier(NewtonLogistic(l2=1.0))):
        fit = enrollment_fit(people, estimator)
        assert ((fit.prob > 0.0) & (fit.prob < 1.0)).all()
