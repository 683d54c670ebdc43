r"""Whether covariates part the two classes, proved over rows that need not fit in memory.

A maximum of (P1) exists unless some :math:`\gamma \ne 0` has :math:`(2 y_i - 1) x_i'\gamma \ge 0`
for all rows, strictly for one (Albert and Anderson 1984). That is one linear programme over
all rows; here it is solved over few of them, to which the rows its solution violates are added
until none is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import null_space

from fedipw.errors import NotConvergedError
from fedipw.tables.partitions import Block, Partitions

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray

_FIRST = 2_000  # rows of the first programme, besides the extremes of each column
_WORST = 500  # violating rows added at a time
_ROUNDS = 200
_MANY = 64  # columns beyond which they are first left out by halves, quarters and so on
_ASKED = 24  # programmes that are solved for that
_TINY = 1e-7  # entries of a direction, and violations, that count as zero
_GAIN = 1e-9  # a mean gain that counts as zero


def separating_columns(partitions: Partitions, kept: BoolArray) -> tuple[int, ...]:
    """Return a minimal set of columns that separates the classes, none if there is none.

    ``kept`` (q,) says which columns take part; they must be independent of each other and of the
    constant. Each is left out in turn, the last first, if the others separate without it: which set
    of several that is does not depend on the solution of a programme. Of more than 64 columns the
    set may be larger than it must be: each look is a programme of its own.

    >>> from fedipw.tables.partitions import Blocks
    >>> y = np.array([0, 0, 1], dtype=np.int8)
    >>> separating_columns(Blocks.of_arrays(np.array([[0.0], [1.0], [2.0]]), y), np.array([True]))
    (0,)
    >>> separating_columns(Blocks.of_arrays(np.array([[0.0], [2.0], [1.0]]), y), np.array([True]))
    ()
    """
    used = np.flatnonzero(kept)
    rows = partitions.reduced(partial(_extremes, used=used), _joined)
    if len(rows.signed) > 8 * _FIRST:
        rows = rows.thinned()
    search = _Search(partitions, used, rows.signed)
    support = search.direction(np.ones(len(used), dtype=np.bool_))  # a direction's columns
    blamed = np.full(len(used), bool(support.any()))
    size = int(support.sum()) // 2 if support.sum() > _MANY else 1  # columns left out together
    asked, most = 0, _ASKED if size > 1 else len(used)
    while size:
        at = np.flatnonzero(blamed)
        for last in range(len(at), 0, -size):
            out = at[max(0, last - size) : last]
            rest = blamed.copy()
            rest[out] = False
            if support[out].any():  # else the direction at hand does without them
                if asked == most:
                    continue
                found, asked = search.direction(rest), asked + 1
                if not found.any():
                    continue
                support = found
            blamed = rest
        size //= 2
    return tuple(int(j) for j in used[support])


@dataclass(slots=True, eq=False)
class _Search:
    """The programme over some rows, and the means to find more."""

    partitions: Partitions
    used: IntArray
    signed: FloatArray  # (m, q + 1) rows of (2 y - 1) (x, 1)

    def direction(self, allowed: BoolArray) -> BoolArray:
        """Return columns of one direction within ``allowed`` that separates, none if none does."""
        from scipy.optimize import linprog  # noqa: PLC0415 (slow to load, seldom needed)

        columns = np.append(np.flatnonzero(allowed), len(self.used))
        self._span(columns)
        for _ in range(_ROUNDS):
            part = self.signed[:, columns]
            found = linprog(
                -part.mean(axis=0), A_ub=-part, b_ub=np.zeros(len(part)), bounds=(-1.0, 1.0)
            )
            none = np.zeros(len(self.used), dtype=np.bool_)
            if found.x is None or found.fun is None or found.fun >= -_GAIN:
                return none
            gamma = np.zeros(len(self.used) + 1)
            gamma[columns] = np.where(np.abs(found.x) > _TINY, found.x, 0.0)
            if len(self.signed) == self.partitions.rows:
                return np.asarray(gamma[:-1] != 0.0)
            worst = self.partitions.reduced(
                partial(_violations, used=self.used, gamma=gamma), _worst_of
            )
            if not len(worst.signed):
                return np.asarray(gamma[:-1] != 0.0)
            self.signed = np.vstack([self.signed, worst.signed])
        raise NotConvergedError(
            _ROUNDS, float("nan"), _TINY, "The search for separating columns did not end."
        )

    def _span(self, columns: IntArray) -> None:
        """Add rows until those at hand span every direction that all rows span."""
        for _ in range(len(columns)):
            if len(self.signed) == self.partitions.rows:
                return
            # the triangle has the same null space, and no side as long as the rows
            free = null_space(np.linalg.qr(self.signed[:, columns], mode="r"), rcond=1e-9)
            if free.shape[1] == 0:
                return
            gamma = np.zeros(len(self.used) + 1)
            gamma[columns] = free[:, 0]
            more = self.partitions.reduced(
                partial(_farthest, used=self.used, gamma=gamma), _farther_of
            )
            if not len(more.signed) or abs(more.margin[0]) <= _TINY:
                return
            self.signed = np.vstack([self.signed, more.signed])


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Signed rows and their margins along a direction."""

    signed: FloatArray  # (m, q + 1)
    margin: FloatArray  # (m,)

    def thinned(self) -> _Rows:
        step = -(-len(self.signed) // (8 * _FIRST))
        return _Rows(self.signed[::step], self.margin[::step])


def _signed(block: Block, used: IntArray, rows: IntArray) -> FloatArray:
    sign = 2.0 * block.labels[rows] - 1.0
    x = block.columns[np.ix_(used, rows)]
    return np.column_stack([(x * sign).T, sign])


def _extremes(block: Block, used: IntArray) -> _Rows:
    """Return some rows of a block: those with the extremes of each column, and a few more."""
    if block.rows <= _FIRST:
        chosen = np.arange(block.rows)
    else:
        picked: list[IntArray] = [np.linspace(0, block.rows - 1, 64).astype(np.int64)]
        for label in (0, 1):
            mine = np.flatnonzero(block.labels == label)
            if len(mine):
                x = block.columns[used][:, mine]
                picked += [mine[x.argmin(axis=1)], mine[x.argmax(axis=1)]]
        chosen = np.unique(np.concatenate(picked))
    if len(block.weights):
        chosen = chosen[block.weights[chosen] > 0.0]
    signed = _signed(block, used, chosen)
    return _Rows(signed, np.zeros(len(signed)))


def _joined(a: _Rows, b: _Rows) -> _Rows:
    return _Rows(np.vstack([a.signed, b.signed]), np.concatenate([a.margin, b.margin]))


def _margins(block: Block, used: IntArray, gamma: FloatArray) -> FloatArray:
    margin = (gamma[:-1] @ block.columns[used] + gamma[-1]) * (2.0 * block.labels - 1.0)
    return np.where(block.weights > 0.0, margin, 0.0) if len(block.weights) else margin


def _violations(block: Block, used: IntArray, gamma: FloatArray) -> _Rows:
    """Return the rows farthest on the wrong side of a direction."""
    margin = _margins(block, used, gamma)
    wrong = np.flatnonzero(margin < -_TINY)
    if len(wrong) > _WORST:
        wrong = wrong[np.argpartition(margin[wrong], _WORST)[:_WORST]]
    return _Rows(_signed(block, used, wrong), margin[wrong])


def _worst_of(a: _Rows, b: _Rows) -> _Rows:
    both = _joined(a, b)
    if len(both.margin) <= _WORST:
        return both
    worst = np.argsort(both.margin, kind="stable")[:_WORST]
    return _Rows(both.signed[worst], both.margin[worst])


def _farthest(block: Block, used: IntArray, gamma: FloatArray) -> _Rows:
    margin = _margins(block, used, gamma)
    rows = np.array([int(np.abs(margin).argmax())]) if len(margin) else np.arange(0)
    return _Rows(_signed(block, used, rows), margin[rows])


def _farther_of(a: _Rows, b: _Rows) -> _Rows:
    if not len(a.margin) or (len(b.margin) and abs(b.margin[0]) > abs(a.margin[0])):
        return b
    return a
