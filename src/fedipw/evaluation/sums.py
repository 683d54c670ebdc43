"""Sums over clients, and fits on rows that count as often as told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

import numpy as np

from fedipw.selection.fit import logistic_fit
from fedipw.tables.frames import Frame
from fedipw.tables.partitions import Block, Partitions

if TYPE_CHECKING:
    from fedipw.numerics.types import CodeArray, FloatArray

T = TypeVar("T")
_RANK_TOL = 1e-10  # of eigenvalues of an information, columns scaled to one


def client_sums(client: CodeArray, values: FloatArray, n: int) -> FloatArray:
    """Return the sums of values (m,) or (m, K) by client, (n,) or (n, K); codes of n count not."""
    if values.ndim == 1:
        return np.bincount(client, values, n + 1)[:n].astype(np.float64, copy=False)
    return np.column_stack([client_sums(client, column, n) for column in values.T])


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reweighed:
    """Partitions whose rows count as often as told."""

    inner: Partitions
    weights: FloatArray  # (rows,)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.inner.rows

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks with these weights, combined in order."""
        return self.inner.reduced(lambda block: function(self._now(block)), combine)

    def _now(self, block: Block) -> Block:
        return block._replace(weights=self.weights[block.start : block.start + block.rows])


def refitted(rows: Partitions, start: FloatArray) -> FloatArray:
    """Return coefficients in the rows' own frame, constant last, fitted from a start."""
    q = len(start) - 1
    same = Frame(np.zeros(q), np.ones(q))
    fit = logistic_fit(rows, [f"x{j}" for j in range(q)], frame=same, start=start).checked()
    return np.append(fit.coefficients, fit.intercept)


def inverse_of(information: FloatArray) -> FloatArray:
    """Return the inverse of an information; columns that follow from others share theirs."""
    size = np.sqrt(np.diag(information))
    scale = np.where(size > 0.0, size, 1.0)
    both = np.outer(scale, scale)
    inside = np.linalg.pinv(information / both, rcond=_RANK_TOL, hermitian=True)
    out: FloatArray = inside / both
    return out
