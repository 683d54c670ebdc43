"""Any classifier as a propensity model, and cross-fitting by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.naive_bayes import GaussianNB
from sklearn.tree import DecisionTreeClassifier

from fedipw.errors import InputError, NotConvergedError, SeparationError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.classifiers import cross_fitted_prob, fitted_model
from fedipw.selection.propensity import NewtonLogistic, PropensityModel


def selected_rows(seed: int = 0, n: int = 120) -> tuple[FloatArray, BoolArray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    return X, rng.random(n) < 1.0 / (1.0 + np.exp(-X[:, 0]))


@pytest.mark.parametrize(
    "classifier",
    [
        LogisticRegression(),
        DecisionTreeClassifier(random_state=0),
        GaussianNB(),
    ],
    ids=lambda c: type(c).__name__,
)
def test_a_classifiers_probabilities_are_passed_on_untouched(classifier: Any) -> None:
    X, y = selected_rows()
    model = PropensityModel(classifier).fit(X, y)
    assert not hasattr(classifier, "classes_")  # the classifier given is not fitted itself
    own = classifier.fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X), own.predict_proba(X))
    np.testing.assert_array_equal(model.predict(X), own.predict(X))


def test_nothing_is_clipped() -> None:
    X, y = selected_rows()
    prob = PropensityModel(DecisionTreeClassifier(random_state=0)).fit(X, y).predict_proba(X)
    assert set(prob.ravel()) == {0.0, 1.0}  # a full tree is sure of every row it has seen


def test_the_default_is_unpenalised_logistic_regression() -> None:
    X, y = selected_rows()
    model = PropensityModel().fit(X, y)
    assert isinstance(model.classifier_, NewtonLogistic)
    assert model.classifier_.l2 == 0.0
    np.testing.assert_array_equal(
        model.predict_proba(X), NewtonLogistic().fit(X, y).predict_proba(X)
    )


@pytest.mark.parametrize("y", [np.arange(120) % 3, np.linspace(0.0, 1.0, 120)])
def test_a_target_that_is_not_binary_is_refused(y: FloatArray) -> None:
    X, _ = selected_rows()
    with pytest.raises(ValueError, match=r"Only binary classification|Unknown label type"):
        PropensityModel().fit(X, y)


def test_a_fit_in_earnest_raises_where_scikit_learn_warns() -> None:
    X, y = selected_rows()
    with pytest.raises(SeparationError, match="a_column separate") as caught:
        fitted_model(None, y[:, None].astype(float), y, ["a_column"])
    assert caught.value.n_rows == 120
    with pytest.raises(NotConvergedError, match="after 1 iterations") as unfinished:
        fitted_model(NewtonLogistic(max_iter=1), X, y, ["a", "b"])
    assert unfinished.value.gradient_norm > unfinished.value.tolerance > 0.0


@pytest.mark.parametrize("folds", [2, 5])
@pytest.mark.parametrize("classifier", [None, DecisionTreeClassifier(max_depth=2, random_state=0)])
def test_out_of_fold_probabilities_equal_a_plain_loop(classifier: Any, folds: int) -> None:
    X, y = selected_rows(n=150)
    groups = np.repeat(np.arange(50), 3)
    prob = cross_fitted_prob(classifier, X, y, groups, folds=folds, rng=np.random.default_rng(7))
    seed = int(np.random.default_rng(7).integers(2**31))
    expected = np.full(150, np.nan)
    for others, own in StratifiedGroupKFold(folds, shuffle=True, random_state=seed).split(
        X, y, groups
    ):
        assert not set(groups[others]) & set(groups[own])
        base = NewtonLogistic() if classifier is None else classifier
        expected[own] = base.fit(X[others], y[others]).predict_proba(X[own])[:, 1]
    np.testing.assert_array_equal(prob, expected)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), client=st.integers(0, 39))
def test_no_client_shapes_its_own_probability(seed: int, client: int) -> None:
    # what a client's own rows say, X apart, is nowhere in its probability: permuting the labels
    # within the client keeps the folds and every other row, and must keep its probabilities
    rng = np.random.default_rng(seed)
    X, groups = rng.normal(size=(160, 1)), np.repeat(np.arange(40), 4)
    y = rng.random(160) < 0.5
    mine = groups == client
    y[mine] = [True, True, False, False]
    other = y.copy()
    other[mine] = [False, True, False, True]
    before, after = (
        cross_fitted_prob(None, X, labels, groups, folds=4, rng=np.random.default_rng(seed))
        for labels in (y, other)
    )
    np.testing.assert_array_equal(before[mine], after[mine])
    assert (before[~mine] != after[~mine]).any()  # it does shape others'


@pytest.mark.parametrize("folds", [0, 1, 41])
def test_a_number_of_folds_that_cannot_be_is_refused(folds: int) -> None:
    X, y = selected_rows()
    with pytest.raises(InputError, match=rf"{folds} folds over 40 clients: need 2 to 40"):
        cross_fitted_prob(
            None, X, y, np.repeat(np.arange(40), 3), folds=folds, rng=np.random.default_rng(0)
        )
