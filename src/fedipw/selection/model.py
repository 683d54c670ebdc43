"""P(selected | x) from any probabilistic classifier."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from fedipw.errors import NotConvergedError, SeparationError
from fedipw.selection.fit import GRADIENT_TOL
from fedipw.selection.logistic import NewtonLogistic, binary_labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from fedipw.numerics.types import FloatArray


class PropensityModel(ClassifierMixin, BaseEstimator):
    """P(selected | x) from any probabilistic classifier.

    Parameters
    ----------
    classifier
        Any scikit-learn classifier with ``predict_proba``; unpenalised :class:`NewtonLogistic` by
        default. Its probabilities are passed on as they are, never clipped.

    Examples
    --------
    >>> X, y = np.array([[0.0], [0.0], [1.0], [1.0]]), np.array([0, 1, 0, 1])
    >>> PropensityModel().fit(X, y).predict_proba([[0.0]]).round(3)
    array([[0.5, 0.5]])
    """

    def __init__(self, classifier: Any = None) -> None:
        self.classifier = classifier

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to ``X`` (n, q) and two-valued ``y`` (n,)."""
        X, y = validate_data(self, X, y)
        binary_labels(y)
        base = NewtonLogistic() if self.classifier is None else self.classifier
        self.classifier_ = clone(base).fit(X, y)
        self.classes_ = self.classifier_.classes_
        return self

    def predict_proba(self, X: Any) -> FloatArray:
        """Return the probabilities of both classes, (n, 2)."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        prob: FloatArray = self.classifier_.predict_proba(X)
        return prob

    def predict(self, X: Any) -> Any:
        """Return the likelier class, (n,)."""
        prob = self.predict_proba(X)  # first, so that an unfitted model says so
        return self.classes_[prob.argmax(axis=1)]


def fitted_model(
    classifier: Any, X: FloatArray, selected: ArrayLike, names: Sequence[str]
) -> PropensityModel:
    """Return a model fitted in earnest: what scikit-learn would warn of is an error here."""
    model = PropensityModel(classifier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # raised below, with names
        model.fit(X, np.asarray(selected, dtype=bool))
    inner = model.classifier_
    if isinstance(inner, NewtonLogistic) and inner.separation_:
        raise SeparationError(tuple(names[j] for j in inner.separation_), len(X))
    if isinstance(inner, NewtonLogistic) and not inner.converged_:
        raise NotConvergedError(inner.n_iter_, inner.gradient_norm_, GRADIENT_TOL)
    return model
