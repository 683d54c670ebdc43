"""P(selected | x) from any probabilistic classifier, and cross-fitting by client."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.utils.validation import check_is_fitted, validate_data

from fedipw.errors import InputError, NotConvergedError, SeparationError
from fedipw.propensity.logistic import GRADIENT_TOL, NewtonLogistic, binary_labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike

    from fedipw.numerics.types import BoolArray, FloatArray, IdArray, IntArray


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


def _folds(
    y: BoolArray, groups: IdArray, folds: int, rng: np.random.Generator
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield (others, own) rows of each fold; all rows of a client share one."""
    chance = int(rng.integers(2**31))
    if len(np.unique(groups)) == len(y):  # one row each: the plain split is fast for any number
        yield from StratifiedKFold(folds, shuffle=True, random_state=chance).split(y, y)
    else:
        split = StratifiedGroupKFold(folds, shuffle=True, random_state=chance)
        yield from split.split(y, y, groups)


def cross_fitted_prob(
    classifier: Any,
    X: FloatArray,
    selected: ArrayLike,
    groups: IdArray,
    *,
    folds: int = 5,
    rng: np.random.Generator,
    names: Sequence[str] | None = None,
) -> FloatArray:
    """Return each row's P(selected) from a model that never saw its client.

    ``groups`` (n,) names the client of each row; all rows of a client share a fold, so that neither
    its own selection nor its other rounds shape its probability. ``names`` of columns
    serve error messages.

    >>> rng = np.random.default_rng(0)
    >>> X, y = rng.normal(size=(60, 1)), rng.random(60) < 0.5
    >>> prob = cross_fitted_prob(None, X, y, np.arange(60), folds=3, rng=rng)
    >>> prob.shape
    (60,)
    """
    y = np.asarray(selected, dtype=bool)
    clients = len(np.unique(groups))
    if folds < 2 or folds > clients:
        raise InputError(f"{folds} folds over {clients} clients: need 2 to {clients}.")
    names = [f"column {j}" for j in range(X.shape[1])] if names is None else names
    prob = np.empty(len(y))
    for others, own in _folds(y, groups, folds, rng):
        prob[own] = fitted_model(classifier, X[others], y[others], names).predict_proba(X[own])[
            :, 1
        ]
    return prob
