"""Selection models as scikit-learn classifiers: the exact logistic fit, and a wrapper of any other.

They stand apart because they load scikit-learn, which no command needs without a classifier.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from fedipw.errors import InputError
from fedipw.selection.logistic import LogisticFit, logistic_fit
from fedipw.tables.partitions import Blocks, Frame

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics import FloatArray, LabelArray


class NewtonLogistic(ClassifierMixin, BaseEstimator):
    r"""Logistic regression without penalty, to the last digits.

    Minimises (P1) plus :math:`\tfrac{1}{2} l_2 |\beta|^2` (intercept not penalised) by Newton's
    method. Two classes only. Columns that are constant or collinear with those before them
    get coefficient 0 and stand in ``dropped_``. Where the classes can be separated no maximum
    exists: ``fit`` warns, ``separation_`` holds the positions of the columns to blame and
    ``converged_`` is false. ``standard_errors_`` are those of the coefficients and, last, the
    intercept. The work is done by :func:`logistic_fit`.

    Parameters
    ----------
    l2
        Ridge penalty; 0 is maximum likelihood.
    max_iter
        Limit on Newton steps.

    Examples
    --------
    >>> X, y = np.array([[0.0], [0.0], [1.0], [1.0], [1.0]]), np.array([0, 1, 0, 1, 1])
    >>> model = NewtonLogistic().fit(X, y)
    >>> round(float(model.predict_proba([[1.0]])[0, 1]), 6)  # the share of ones among x = 1
    0.666667
    """

    def __init__(self, l2: float = 0.0, max_iter: int = 100) -> None:
        self.l2 = l2
        self.max_iter = max_iter

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> Self:
        """Fit to ``X`` (n, q) and two-valued ``y`` (n,)."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        self.classes_, labels = binary_labels(y)
        if not self.l2 >= 0.0:
            raise InputError(f"l2 must be 0 or more, not {self.l2!r}.")
        weight = None if sample_weight is None else _weights(sample_weight, len(X))
        if weight is not None:
            X, labels, weight = X[weight > 0], labels[weight > 0], weight[weight > 0]
        if labels.min() == labels.max():
            raise InputError(f"Every row with weight is of one class, {self.classes_[labels[0]]}.")
        columns = np.array(X.T, order="C")  # a copy, changed in place below
        frame = Frame.of(columns, weight)
        blocks = Blocks.of_arrays(frame.standard(columns).T, labels, weight)
        names = [str(j) for j in range(X.shape[1])]
        found = logistic_fit(blocks, names, frame=frame, l2=self.l2, max_iter=self.max_iter)
        self.coef_ = found.coefficients[None, :]
        self.intercept_ = np.array([found.intercept])
        self.covariance_ = found.covariance
        self.standard_errors_ = found.standard_errors
        self.n_iter_ = max(1, found.iterations)
        self.gradient_norm_ = found.gradient_norm
        self.dropped_ = np.array([int(name) for name in found.dropped], dtype=np.int64)
        self.separation_ = tuple(int(name) for name in found.separating)
        self.converged_ = found.converged
        _warn_unless_fine(found)
        return self

    def decision_function(self, X: Any) -> FloatArray:
        """Return the log odds of the second class, (n,)."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        scores: FloatArray = X @ self.coef_[0] + self.intercept_[0]
        return scores

    def predict_proba(self, X: Any) -> FloatArray:
        """Return the probabilities of both classes, (n, 2)."""
        log_odds = self.decision_function(X)
        return np.column_stack([expit(-log_odds), expit(log_odds)])

    def predict(self, X: Any) -> Any:
        """Return the likelier class, (n,)."""
        log_odds = self.decision_function(X)
        return self.classes_[(log_odds > 0).astype(int)]


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


def binary_labels(y: Any) -> tuple[Any, LabelArray]:
    """Return the two classes and labels 0 or 1, or say why ``y`` is not binary."""
    check_classification_targets(y)
    kind = type_of_target(y, input_name="y")
    if kind != "binary":
        raise InputError(
            f"Only binary classification is supported. The type of the target is {kind}."
        )
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) != 2:
        raise InputError(f"Selection needs two classes in y; it has {len(classes)} class.")
    return classes, labels.astype(np.int8)


def _weights(sample_weight: ArrayLike, rows: int) -> FloatArray:
    weight = np.asarray(sample_weight, dtype=np.float64)
    if weight.ndim == 0:
        weight = np.full(rows, float(weight))
    if weight.shape != (rows,):
        raise InputError(f"sample_weight has shape {weight.shape}, expected ({rows},).")
    if not (np.isfinite(weight).all() and (weight >= 0).all() and weight.any()):
        raise InputError("sample_weight must be finite, not negative, and not all zero.")
    return weight


def _warn_unless_fine(found: LogisticFit) -> None:
    if found.separating:
        positions = tuple(int(name) for name in found.separating)
        message = f"Columns {positions} separate the classes: no maximum exists."
    elif not found.converged:
        message = f"Not converged: {found.status.value}, gradient {found.gradient_norm:.3g}."
    else:
        return
    warnings.warn(message, ConvergenceWarning, stacklevel=3)
