"""Logistic regression over clients and rounds, with what is constant per client kept once.

Row (i, r) has log odds u = z_i'beta_z + x_ir'beta_x. Sums over rounds are formed per client first,
so one pass costs one exponential and a few multiplications per row whatever the width of z, and the
covariates z are never repeated in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.linalg import eigh

from fedipw.numerics.compiled import compiled, exp
from fedipw.numerics.newton import NewtonResult, Sums, newton_minimum
from fedipw.numerics.threads import over_ranges

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray

_CHUNK = 512  # clients per chunk; chunks are summed in order, whatever the number of threads
_FLUSH = 512  # rounds after which a running product of factors in (1, 2] is turned into a sum
_SUSPECT = 10.0  # |log odds| beyond which separation is looked for
_FLAT = 1e-6  # curvature, relative to that at even odds, below which a direction has no maximum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PanelFit:
    """A fit and whether the covariates separate replies from non-replies."""

    result: NewtonResult
    separated: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """Rounds of n clients: constant covariates, covariates by round, who replied."""

    static: FloatArray  # (n, q_z), first column 1
    varying: FloatArray  # (R, q_x, n)
    replied: BoolArray  # (R, n)

    @property
    def n_coefficients(self) -> int:
        """Length of the coefficient vector: static first, then varying."""
        return int(self.static.shape[1] + self.varying.shape[1])

    def sums(self, beta: FloatArray) -> Sums:
        """Return the mean negative log-likelihood (P1) over all rows and its derivatives."""
        return self._evaluated(beta)[0]

    def _evaluated(self, beta: FloatArray) -> tuple[Sums, float]:
        """Return the sums and the largest absolute log odds."""
        qz = self.static.shape[1]
        fixed = np.ascontiguousarray(self.static @ beta[:qz])
        out = _panel_sums(fixed, self.varying, self.replied, np.ascontiguousarray(beta[qz:]))
        rows = self.replied.size
        gradient = np.concatenate([self.static.T @ out.residuals, out.slopes.sum(axis=0)])
        hessian = np.empty((len(beta), len(beta)))
        hessian[:qz, :qz] = (self.static * out.weights[:, None]).T @ self.static
        hessian[qz:, :qz] = out.crossed @ self.static
        lower = out.curves.sum(axis=0)
        hessian[qz:, qz:] = lower + np.tril(lower, -1).T
        hessian[:qz, qz:] = hessian[qz:, :qz].T
        loss, largest = float(out.scalars[:, 0].sum()), float(out.scalars[:, 1].max())
        return Sums(loss / rows, gradient / rows, hessian / rows), largest

    def last_round(self) -> Panel:
        """Return the panel of the last round alone."""
        return Panel(static=self.static, varying=self.varying[-1:], replied=self.replied[-1:])

    def fit(self, start: FloatArray) -> PanelFit:
        """Return the maximum-likelihood coefficients, from a start that may be a former fit."""
        largest = 0.0

        def objective(beta: FloatArray) -> Sums:
            nonlocal largest
            at, largest = self._evaluated(beta)
            return at

        result = newton_minimum(
            objective, start, gradient_tol=1e-13, decrement_tol=1e-12, max_iterations=50
        )
        flat = largest > _SUSPECT and self._is_flat(result.point)
        return PanelFit(result=result, separated=flat)

    def _is_flat(self, beta: FloatArray) -> bool:
        """Tell whether the likelihood is flat along some direction the covariates do vary in."""
        gram = self.sums(np.zeros(self.n_coefficients)).hessian * 4.0
        scale = np.sqrt(np.diag(gram))
        scale = np.where(scale > 0.0, scale, 1.0)
        values, vectors = eigh(gram / np.outer(scale, scale))
        solid = values > 1e-11 * values[-1]
        basis = vectors[:, solid] / np.sqrt(values[solid])
        curvature = self.sums(beta).hessian / np.outer(scale, scale)
        return bool(eigh(basis.T @ curvature @ basis, eigvals_only=True)[0] < _FLAT)


class RoundLog:
    """Closed rounds in arrays that grow by half when full."""

    def __init__(self, clients: int, columns: int) -> None:
        self._varying = np.empty((0, columns, clients))
        self._replied = np.empty((0, clients), dtype=bool)
        self.rounds, self.replies = 0, 0

    def append(self, covariates: FloatArray, replied: BoolArray) -> None:
        """Add a round: covariates (n, q) and replies (n,)."""
        if self.rounds == len(self._varying):
            room = max(4, self.rounds // 2)
            self._varying = _extended(self._varying, room)
            self._replied = _extended(self._replied, room)
        self._varying[self.rounds] = covariates.T
        self._replied[self.rounds] = replied
        self.rounds += 1
        self.replies += int(replied.sum())

    def panel(self, static: FloatArray) -> Panel:
        """Return the rounds so far as a view, with the clients' constant covariates."""
        upto = slice(0, self.rounds)
        return Panel(static=static, varying=self._varying[upto], replied=self._replied[upto])


def _extended(array: Any, room: int) -> Any:
    return np.concatenate([array, np.empty((room, *array.shape[1:]), dtype=array.dtype)])


@compiled
def _round_terms(
    u: FloatArray, replied: BoolArray, residual: FloatArray, weight: FloatArray, factor: FloatArray
) -> None:
    """From log odds: p - y, p (1 - p), and 1 + e^-|u|, the loss beyond its linear part."""
    for i in range(u.size):
        small = exp(-abs(u[i]))
        inverse = 1.0 / (1.0 + small)
        prob = inverse if u[i] >= 0.0 else small * inverse
        residual[i] = prob - replied[i]
        weight[i] = small * inverse * inverse
        factor[i] = 1.0 + small


class _Totals(NamedTuple):
    """Sums over rounds, per client, and over rounds and clients, per chunk of clients."""

    residuals: FloatArray  # (n,) sum of p - y
    weights: FloatArray  # (n,) sum of p (1 - p)
    crossed: FloatArray  # (q, n) sum of p (1 - p) x
    scalars: FloatArray  # (chunks, 2) loss, largest |log odds|
    slopes: FloatArray  # (chunks, q) sum of (p - y) x
    curves: FloatArray  # (chunks, q, q) sum of p (1 - p) x x', lower triangle


@compiled
def _chunk_sums(
    fixed: FloatArray,
    varying: FloatArray,
    replied: BoolArray,
    beta: FloatArray,
    out: _Totals,
    chunk: int,
) -> None:
    """Add up the rounds of one chunk of clients."""
    start = chunk * _CHUNK
    stop = min(fixed.size, start + _CHUNK)
    rounds, q, m = varying.shape[0], varying.shape[1], stop - start
    residuals, weights = out.residuals[start:stop], out.weights[start:stop]
    u = np.empty(m)
    residual = np.empty(m)
    weight = np.empty(m)
    factor = np.empty(m)
    product = np.ones(m)
    loss = 0.0
    top = 0.0
    for r in range(rounds):
        u[:] = fixed[start:stop]
        for k in range(q):
            x = varying[r, k, start:stop]
            for i in range(m):
                u[i] += beta[k] * x[i]
        answers = replied[r, start:stop]
        for i in range(m):
            top = max(top, abs(u[i]))
        _round_terms(u, answers, residual, weight, factor)
        for i in range(m):
            loss += max(u[i], 0.0) - answers[i] * u[i]
        for i in range(m):
            product[i] *= factor[i]
        for i in range(m):
            residuals[i] += residual[i]
        for i in range(m):
            weights[i] += weight[i]
        for k in range(q):
            x = varying[r, k, start:stop]
            add = 0.0
            for i in range(m):
                add += residual[i] * x[i]
            out.slopes[chunk, k] += add
            for i in range(m):
                factor[i] = weight[i] * x[i]
            cross = out.crossed[k, start:stop]
            for i in range(m):
                cross[i] += factor[i]
            for j in range(k + 1):
                other = varying[r, j, start:stop]
                add = 0.0
                for i in range(m):
                    add += factor[i] * other[i]
                out.curves[chunk, k, j] += add
        if r % _FLUSH == _FLUSH - 1:
            for i in range(m):
                loss += math.log(product[i])
                product[i] = 1.0
    for i in range(m):
        loss += math.log(product[i])
    out.scalars[chunk, 0] = loss
    out.scalars[chunk, 1] = top


@compiled
def _range_sums(
    fixed: FloatArray,
    varying: FloatArray,
    replied: BoolArray,
    beta: FloatArray,
    out: _Totals,
    first: int,
    last: int,
) -> None:
    """Fill the totals of chunks first to last."""
    for c in range(first, last):
        _chunk_sums(fixed, varying, replied, beta, out, c)


def _panel_sums(
    fixed: FloatArray, varying: FloatArray, replied: BoolArray, beta: FloatArray
) -> _Totals:
    n, q = len(fixed), varying.shape[1]
    chunks = -(-n // _CHUNK)
    out = _Totals(
        residuals=np.zeros(n),
        weights=np.zeros(n),
        crossed=np.zeros((q, n)),
        scalars=np.zeros((chunks, 2)),
        slopes=np.zeros((chunks, q)),
        curves=np.zeros((chunks, q, q)),
    )

    def fill(first: int, last: int) -> None:
        _range_sums(fixed, varying, replied, beta, out, first, last)

    over_ranges(chunks, fill, work=20.0 * replied.size * (1 + q))
    return out
