"""Sums of the logistic log-likelihood over rows: the compiled core of every logistic objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.numerics.compiled import compiled, exp, log1p_unit, sigmoid
from fedipw.numerics.newton import Sums

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, LabelArray

_BLOCK = 256


@compiled
def _transposed(features: FloatArray, start: int, stop: int, out: FloatArray) -> None:
    """Copy rows start to stop into columns of ``out`` (d, block), so that loops run along rows."""
    for i in range(start, stop):
        for j in range(features.shape[1]):
            out[j, i - start] = features[i, j]


@compiled
def _log_odds(columns: FloatArray, beta: FloatArray, u: FloatArray) -> None:
    u[:] = beta[columns.shape[0]]
    for j in range(columns.shape[0]):
        column = columns[j]
        for i in range(u.size):
            u[i] += beta[j] * column[i]


@compiled
def _weighted_loss(u: FloatArray, labels: LabelArray, weight: FloatArray) -> float:
    total = 0.0
    for i in range(u.size):
        above = 0.5 * (u[i] + abs(u[i]))
        total += weight[i] * (log1p_unit(exp(-abs(u[i]))) + above - labels[i] * u[i])
    return total


@compiled
def _terms(
    u: FloatArray,
    labels: LabelArray,
    weight: FloatArray,
    residual: FloatArray,
    curvature: FloatArray,
) -> None:
    for i in range(u.size):
        prob = sigmoid(u[i])
        residual[i] = weight[i] * (prob - labels[i])
        curvature[i] = weight[i] * prob * (1.0 - prob)


@compiled
def _dot(a: FloatArray, b: FloatArray) -> float:
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@compiled
def _add_derivatives(
    block: FloatArray,
    residual: FloatArray,
    curvature: FloatArray,
    scaled: FloatArray,
    gradient: FloatArray,
    hessian: FloatArray,
) -> None:
    """Add the gradient and the lower half of the Hessian of a block of columns, constant last.

    The block comes whole, so that its columns are known to be contiguous; ``scaled`` (m,) says how
    many of its rows count.
    """
    m = scaled.size
    for j in range(block.shape[0]):
        column = block[j, :m]
        gradient[j] += _dot(residual, column)
        for i in range(m):
            scaled[i] = curvature[i] * column[i]
        for k in range(j + 1):
            hessian[j, k] += _dot(scaled, block[k, :m])


@compiled
def _mirror(hessian: FloatArray) -> None:
    """Copy the lower half of a symmetric matrix to the upper."""
    for j in range(hessian.shape[0]):
        for k in range(j):
            hessian[k, j] = hessian[j, k]


@compiled
def _sums(
    features: FloatArray, labels: LabelArray, row_weight: FloatArray, beta: FloatArray
) -> tuple[float, FloatArray, FloatArray]:
    n, d = features.shape
    loss = 0.0
    gradient = np.zeros(d + 1)
    hessian = np.zeros((d + 1, d + 1))
    block = np.ones((d + 1, _BLOCK))
    scaled = np.empty(_BLOCK)
    room = np.empty((3, _BLOCK))
    for start in range(0, n, _BLOCK):
        stop = min(n, start + _BLOCK)
        m = stop - start
        _transposed(features, start, stop, block)
        u, residual, curvature = room[0, :m], room[1, :m], room[2, :m]
        _log_odds(block[:d], beta, u)
        loss += _weighted_loss(u, labels[start:stop], row_weight[start:stop])
        _terms(u, labels[start:stop], row_weight[start:stop], residual, curvature)
        _add_derivatives(block, residual, curvature, scaled[:m], gradient, hessian)
    _mirror(hessian)
    return loss, gradient, hessian


@compiled
def _column_sums(
    columns: FloatArray, labels: LabelArray, row_weight: FloatArray, beta: FloatArray
) -> tuple[float, FloatArray, FloatArray, float]:
    d, n = columns.shape
    loss = 0.0
    top = 0.0
    gradient = np.zeros(d + 1)
    hessian = np.zeros((d + 1, d + 1))
    block = np.ones((d + 1, _BLOCK))
    ones = np.ones(_BLOCK)
    scaled = np.empty(_BLOCK)
    room = np.empty((3, _BLOCK))
    for start in range(0, n, _BLOCK):
        stop = min(n, start + _BLOCK)
        m = stop - start
        for j in range(d):
            block[j, :m] = columns[j, start:stop]
        u, residual, curvature = room[0, :m], room[1, :m], room[2, :m]
        _log_odds(block[:d], beta, u)
        weight = row_weight[start:stop] if row_weight.size else ones[:m]
        for i in range(m):
            top = max(top, abs(u[i]))
        loss += _weighted_loss(u, labels[start:stop], weight)
        _terms(u, labels[start:stop], weight, residual, curvature)
        _add_derivatives(block, residual, curvature, scaled[:m], gradient, hessian)
    _mirror(hessian)
    return loss, gradient, hessian, top


@compiled
def _losses(
    features: FloatArray, labels: LabelArray, row_weight: FloatArray, betas: FloatArray
) -> FloatArray:
    n, d = features.shape
    total = np.zeros(betas.shape[0])
    block = np.empty((d, _BLOCK))
    room = np.empty(_BLOCK)
    for start in range(0, n, _BLOCK):
        stop = min(n, start + _BLOCK)
        _transposed(features, start, stop, block)
        u = room[: stop - start]
        for t in range(betas.shape[0]):
            _log_odds(block, betas[t], u)
            total[t] += _weighted_loss(u, labels[start:stop], row_weight[start:stop])
    return total


def logistic_sums(
    features: FloatArray, labels: LabelArray, row_weight: FloatArray, beta: FloatArray
) -> Sums:
    r"""Return the weighted negative log-likelihood of logistic regression with its derivatives.

    .. math:: \ell(\beta) = \sum_i \omega_i \left[\log(1 + e^{u_i}) - y_i u_i\right],
       \quad u_i = x_i'\beta_{1..d} + \beta_{d+1}. \qquad (P1)

    ``features`` (n, d), ``labels`` and ``row_weight`` (n,), ``beta`` (d + 1,) with the intercept
    last. One pass, a few hundred rows of working memory.

    >>> x, y = np.zeros((2, 1)), np.array([0, 1], dtype=np.int8)
    >>> round(logistic_sums(x, y, np.ones(2), np.zeros(2)).value / 2, 6)  # log 2
    0.693147
    """
    return Sums(*_sums(features, labels, row_weight, beta))


@dataclass(frozen=True, slots=True, eq=False)
class ColumnSums:
    """Sums over a block of rows, and the largest absolute log odds in it."""

    value: float
    gradient: FloatArray  # (d + 1,)
    hessian: FloatArray  # (d + 1, d + 1)
    largest: float

    def __add__(self, other: ColumnSums) -> ColumnSums:
        return ColumnSums(
            self.value + other.value,
            self.gradient + other.gradient,
            self.hessian + other.hessian,
            max(self.largest, other.largest),
        )


def column_sums(
    columns: FloatArray, labels: LabelArray, row_weight: FloatArray, beta: FloatArray
) -> ColumnSums:
    """Return (P1) and its derivatives over rows that lie by column, ``columns`` (d, n).

    An empty ``row_weight`` counts every row once.
    """
    return ColumnSums(*_column_sums(columns, labels, row_weight, beta))


def logistic_losses(
    features: FloatArray, labels: LabelArray, row_weight: FloatArray, betas: FloatArray
) -> FloatArray:
    """Return (P1) alone, for each row of ``betas`` (T, d + 1)."""
    return np.asarray(_losses(features, labels, row_weight, np.ascontiguousarray(betas)))


@compiled
def sigmoid_mean(score: FloatArray, shift: float) -> tuple[float, float]:
    """Return the mean over all entries of sigmoid(shift + score) and its slope in the shift."""
    mean = 0.0
    slope = 0.0
    flat = score.ravel()
    for i in range(flat.size):
        prob = sigmoid(shift + flat[i])
        mean += prob
        slope += prob * (1.0 - prob)
    return mean / flat.size, slope / flat.size


@compiled
def sigmoids(score: FloatArray, shift: float) -> FloatArray:
    """Return sigmoid(shift + score) for every entry of a vector."""
    out = np.empty(score.size)
    for i in range(score.size):
        out[i] = sigmoid(shift + score[i])
    return out
