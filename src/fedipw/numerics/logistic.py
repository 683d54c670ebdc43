"""Sums of the logistic log-likelihood over rows: the compiled core of every logistic objective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from fedipw.numerics import FloatArray, LabelArray
from fedipw.numerics.compiled import compiled, exp, log1p_unit, sigmoid
from fedipw.numerics.newton import Sums

_BLOCK = 256
_SERIES, _HUGE = 1e-4, 40.0  # shifts of log odds with a formula of their own


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
def _sums(
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
    for j in range(d + 1):  # a loop: np.tril and what it calls take seconds to compile
        for k in range(j):
            hessian[k, j] = hessian[j, k]
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
        u = room[: stop - start]
        for j in range(d):
            block[j, : u.size] = features[start:stop, j]
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
    return Sums(*_sums(features.T, labels, row_weight, beta)[:3])


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
    return ColumnSums(*_sums(columns, labels, row_weight, beta))


def logistic_losses(
    features: FloatArray, labels: LabelArray, row_weight: FloatArray, betas: FloatArray
) -> FloatArray:
    """Return (P1) alone, for each row of ``betas`` (T, d + 1)."""
    return np.asarray(_losses(features, labels, row_weight, np.ascontiguousarray(betas)))


def softplus_divergence(u: FloatArray, shift: FloatArray) -> FloatArray:
    r"""Return how far log(1 + e^u) rises above its tangent at u after a shift d, (n,).

    .. math:: D(u, d) = \log(1 + e^{u + d}) - \log(1 + e^u) - \sigma(u)\, d
       = \log\left(1 + k (e^t - 1)\right) - k t,

    with :math:`k = \sigma(-|u|) \le 1/2` and t = d for u < 0, -d for u > 0. A difference of losses
    is rounded like the losses; here both terms are of order k t, so that the relative error is a
    few :math:`\epsilon/|t|`. Below |t| = 1e-4 three terms of the series in t take over: they leave
    out less than :math:`|t|^3/60 < 2 \cdot 10^{-14}` of D. Above 40 the 1 beside e^t is less than
    rounding, and e^t need not be finite. So D has eleven digits or more for any shift.

    >>> [f"{d:.9g}" for d in softplus_divergence(np.zeros(2), np.array([1e-9, 2.0]))]
    ['1.25e-19', '0.43378083']
    """
    k, t = expit(-np.abs(u)), np.where(u < 0.0, shift, -shift)
    bend = k * (1.0 - k)
    series = (
        0.5 * bend * t**2 * (1.0 + (1.0 - 2.0 * k) * t / 3.0 + (1.0 - 6.0 * bend) * t**2 / 12.0)
    )
    near = np.log1p(k * np.expm1(np.minimum(t, _HUGE))) - k * t
    far = np.logaddexp(0.0, t - np.logaddexp(0.0, np.abs(u))) - k * t
    out: FloatArray = np.where(np.abs(t) < _SERIES, series, np.where(t < _HUGE, near, far))
    return out


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
