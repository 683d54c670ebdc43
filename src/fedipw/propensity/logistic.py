"""Maximum-likelihood logistic regression by Newton's method, as a scikit-learn classifier."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy.optimize import linprog
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from fedipw.errors import InputError
from fedipw.numerics.logistic import logistic_sums
from fedipw.numerics.newton import NewtonResult, Sums, newton_minimum

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics.types import BoolArray, FloatArray, LabelArray

_SUSPECT = 15.0  # |log odds| beyond which separation is looked for
GRADIENT_TOL = 1e-12  # of the mean log-likelihood on standardised columns
_RANK_TOL = 1e-5  # above the square root of Newton's eigenvalue cut and the programme's 1e-7


class NewtonLogistic(ClassifierMixin, BaseEstimator):
    r"""Logistic regression without penalty, to the last digits.

    Minimises (P1) plus :math:`\tfrac{1}{2} l_2 |\beta|^2` (intercept not penalised) by Newton's
    method. Two classes only. Columns that are constant or collinear with those before them
    get coefficient 0 and stand in ``dropped_``. Where the classes can be separated no maximum
    exists: ``fit`` warns, ``separation_`` holds the positions of the columns to blame and
    ``converged_`` is false.

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
        if sample_weight is not None:
            weight = _weights(sample_weight, len(X))
            X, labels, weight = X[weight > 0], labels[weight > 0], weight[weight > 0]
        else:
            weight = np.ones(len(X))
        if labels.min() == labels.max():
            raise InputError(f"Every row with weight is of one class, {self.classes_[labels[0]]}.")
        share = weight / weight.sum()
        centre, scale = _location_scale(X, share)
        standard = np.ascontiguousarray((X - centre) / scale)
        counted = np.sqrt(len(X) * share)[:, None] * standard  # a weight is a repeated row
        kept = (
            independent_columns(counted) if self.l2 == 0.0 else np.ones(X.shape[1], dtype=np.bool_)
        )
        used = np.ascontiguousarray(standard[:, kept])
        result = _fitted(used, labels, weight, self.l2 / scale[kept] ** 2, self.max_iter)
        coef = np.zeros(X.shape[1])
        coef[kept] = result.point[:-1] / scale[kept]
        self.coef_ = coef[None, :]
        self.intercept_ = np.array([result.point[-1] - coef @ centre])
        self.n_iter_ = max(1, result.iterations)
        self.gradient_norm_ = result.gradient_norm
        self.dropped_ = np.flatnonzero(~kept)
        log_odds = used @ result.point[:-1] + result.point[-1]
        suspect = not result.converged or np.abs(log_odds).max() > _SUSPECT
        positions = separating_columns(used, labels) if suspect and self.l2 == 0.0 else ()
        self.separation_ = tuple(np.flatnonzero(kept)[list(positions)].tolist())
        self.converged_ = result.converged and not positions
        _warn_unless_fine(self.separation_, result)
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


def independent_columns(standard: FloatArray) -> BoolArray:
    """Return which columns of a centred, scaled matrix do not depend on those before them, (q,)."""
    kept = np.zeros(standard.shape[1], dtype=bool)
    basis = np.empty((standard.shape[1], len(standard)))  # orthonormal rows
    for j, column in enumerate(standard.T):
        known = basis[: kept.sum()]
        rest = column - known.T @ (known @ column)
        rest -= known.T @ (known @ rest)  # again, for what rounding left
        norm = np.linalg.norm(rest)
        if norm > _RANK_TOL * np.sqrt(len(standard)):
            basis[kept.sum()] = rest / norm
            kept[j] = True
    return kept


def separating_columns(X: FloatArray, labels: LabelArray) -> tuple[int, ...]:
    r"""Return a minimal set of columns that separates the classes, none if there is none.

    A maximum of (P1) exists unless some :math:`\gamma \ne 0` has
    :math:`(2 y_i - 1) x_i'\gamma \ge 0` for all rows, strictly for one (Albert & Anderson 1984);
    that is one linear programme. Its solution may lean on columns it does not need, so each is left
    out in turn, the last first.

    >>> separating_columns(np.array([[0.0], [1.0], [2.0]]), np.array([0, 0, 1], dtype=np.int8))
    (0,)
    >>> separating_columns(np.array([[0.0], [2.0], [1.0]]), np.array([0, 0, 1], dtype=np.int8))
    ()
    """
    blamed = _separating_direction(X, labels)
    for j in reversed(blamed):
        rest = [k for k in blamed if k != j]
        if _separating_direction(X[:, rest], labels):
            blamed = tuple(rest)
    return blamed


def _separating_direction(X: FloatArray, labels: LabelArray) -> tuple[int, ...]:
    """Return the columns of one direction that separates the classes, none if there is none."""
    signed = (2.0 * labels - 1.0)[:, None] * np.column_stack([X, np.ones(len(X))])
    found = linprog(-signed.mean(axis=0), A_ub=-signed, b_ub=np.zeros(len(X)), bounds=(-1.0, 1.0))
    if found.x is None or found.fun is None or found.fun >= -1e-9:
        return ()
    return tuple(int(j) for j in np.flatnonzero(np.abs(found.x[:-1]) > 1e-7))


def _location_scale(X: FloatArray, share: FloatArray) -> tuple[FloatArray, FloatArray]:
    centre = share @ X
    scale = np.sqrt(share @ (X - centre) ** 2)
    tiny = 1e-12 * np.maximum(1e-300, np.abs(X).max(axis=0, initial=0.0))
    return centre, np.where(scale > tiny, scale, 1.0)


def _weights(sample_weight: ArrayLike, rows: int) -> FloatArray:
    weight = np.asarray(sample_weight, dtype=np.float64)
    if weight.ndim == 0:
        weight = np.full(rows, float(weight))
    if weight.shape != (rows,):
        raise InputError(f"sample_weight has shape {weight.shape}, expected ({rows},).")
    if not (np.isfinite(weight).all() and (weight >= 0).all() and weight.any()):
        raise InputError("sample_weight must be finite, not negative, and not all zero.")
    return weight


def _fitted(
    X: FloatArray, labels: LabelArray, weight: FloatArray, ridge: FloatArray, max_iter: int
) -> NewtonResult:
    """Minimise the mean penalised log-likelihood over standardised columns."""
    share = weight / weight.sum()
    penalty = np.append(ridge, 0.0) / weight.sum()

    def objective(beta: FloatArray) -> Sums:
        at = logistic_sums(X, labels, share, beta)
        return Sums(
            at.value + 0.5 * float(penalty @ beta**2),
            at.gradient + penalty * beta,
            at.hessian + np.diag(penalty),
        )

    rate = float(share @ labels)
    start = np.zeros(X.shape[1] + 1)
    start[-1] = np.log(rate / (1.0 - rate))
    return newton_minimum(objective, start, gradient_tol=GRADIENT_TOL, max_iterations=max_iter)


def _warn_unless_fine(separation: tuple[int, ...], result: NewtonResult) -> None:
    if separation:
        message = f"Columns {separation} separate the classes: no maximum exists."
    elif not result.converged:
        message = f"Not converged: {result.status.value}, gradient {result.gradient_norm:.3g}."
    else:
        return
    warnings.warn(message, ConvergenceWarning, stacklevel=3)
