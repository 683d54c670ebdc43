"""Where coded rows of closed rounds lie: in blocks, or as a panel.

A panel holds rounds of the same clients. What does not change of a client is kept once, and sums
over rounds are formed per client first: row (i, r) has log odds u = z_i'beta_z + x_ir'beta_x, so
one pass costs one exponential and a few multiplications per row whatever the width of z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, final, runtime_checkable

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.compiled import compiled, exp
from fedipw.numerics.logistic import ColumnSums
from fedipw.numerics.threads import over_ranges
from fedipw.selection.classifiers import client_folds, drawn_folds
from fedipw.selection.logistic import Counts
from fedipw.tables.partitions import (
    FEWEST_ROWS,
    NOBODY,
    Block,
    Blocks,
    Changed,
    Frame,
    Partitions,
    RoundRows,
    rows_per_block,
)

if TYPE_CHECKING:
    from pathlib import Path

    from fedipw.numerics import BoolArray, CodeArray, FloatArray, IntArray, LabelArray
    from fedipw.storage.scratch import Scratch, Stored

T = TypeVar("T")
UNWEIGHTED = np.empty(0)  # every row counts once
_CHUNK = 512  # clients per chunk; chunks are summed in order, whatever the number of threads
_FLUSH = 512  # rounds after which a running product of factors in (1, 2] is turned into a sum


class StoredRows(Partitions, Protocol):
    """Coded rows of some rounds, for sums and for classifiers."""

    @property
    def frame(self) -> Frame:
        """The change of columns the rows have gone through."""

    def fold_of(self, folds: int, rng: np.random.Generator) -> IntArray:
        """Draw the fold of each client from 0, by its number; -1 for those without rows."""

    def matrix(self) -> tuple[FloatArray, BoolArray, IntArray]:
        """Return all rows as they were given, (m, q), their labels and clients, (m,) each."""


class RowStore(Protocol):
    """Coded rows of one step of participation, round after round."""

    @property
    def frame(self) -> Frame | None:
        """The change of columns, known from the first row on."""

    def append(self, columns: FloatArray, labels: LabelArray, clients: IntArray) -> None:
        """Take the rows of a closed round: (q, m), (m,) and (m,)."""

    def rounds(self, first: int, last: int, weights: FloatArray = UNWEIGHTED) -> StoredRows:
        """Return the rows of rounds ``first`` up to ``last``, counted from 0, without it.

        ``weights`` (last - first,) are of the rounds' rows, where they do not count alike.
        """

    def forget(self, first: int) -> None:
        """Drop the rows of rounds before ``first``; the others keep their numbers."""

    def state(self) -> dict[str, Any]:
        """Return all rows as arrays."""

    def restore(self, state: Any) -> None:
        """Put saved rows back."""


@runtime_checkable
class LedgerStore(RowStore, Protocol):
    """A store that gives the rows of all rounds as they lie."""

    def whole(self) -> RoundRows:
        """Return the rows of all rounds that are kept."""


@final
class BlockStore:
    """Rows in blocks, in memory and beyond a budget in a scratch file.

    Parameters
    ----------
    members
        Number of clients that may have rows.
    standardised
        Whether columns are changed to about mean 0 and deviation 1, by those of the first rows.
    scratch
        Directory for blocks beyond the budget.
    memory
        The budget, in bytes; that of :class:`~fedipw.tables.partitions.Blocks` by default.
    frame
        The change of columns, where it is known before the first rows.
    """

    def __init__(
        self,
        members: int,
        *,
        standardised: bool = True,
        scratch: Path | None = None,
        memory: int | None = None,
        frame: Frame | None = None,
    ) -> None:
        self.frame = frame
        self._members, self._standardised = members, standardised
        self._scratch, self._memory = scratch, memory
        self.blocks = self._empty()
        self._edges = [0]  # of rounds in the blocks
        self._starts: list[int] = []  # rows before each round
        self._gone = 0  # rounds that were forgotten, before all of these

    def _empty(self) -> Blocks:
        return Blocks(directory=self._scratch, memory=self._memory)

    def append(self, columns: FloatArray, labels: LabelArray, clients: IntArray) -> None:
        """Take the rows of a closed round; ``columns`` are changed in place."""
        if self.frame is None and columns.shape[1]:
            self.frame = Frame.of(columns) if self._standardised else Frame.unchanged(len(columns))
        if self.frame is not None and self._standardised:
            columns = self.frame.standard(columns)
        self._keep(columns, labels, clients.astype(np.int32))

    def _keep(self, columns: FloatArray, labels: LabelArray, clients: CodeArray) -> None:
        self._starts.append(self.blocks.end)
        for here in (slice(*edges) for edges in block_edges(*columns.shape)):
            part = np.ascontiguousarray(columns[:, here])
            self.blocks.append(Block(part, labels[here], UNWEIGHTED, clients=clients[here]))
        self._edges.append(len(self.blocks))

    def _adopt(self, file: Scratch, places: Sequence[Stored]) -> None:
        """Take a round whose blocks lie in a file already."""
        self._starts.append(self.blocks.end)
        for place in places:
            self.blocks.adopt(file, place)
        self._edges.append(len(self.blocks))

    def rounds(self, first: int, last: int, weights: FloatArray = UNWEIGHTED) -> CodedRows:
        """Return the rows of some rounds, none of them copied."""
        if self.frame is None:
            raise InputError("There are no rows to fit on.")
        first, last = _within(first, last, self._gone)
        part: Partitions = self.blocks.part(self._edges[first], self._edges[last])
        if len(weights):
            part = weighted_rounds(part, np.array(self._starts[first:last]), weights)
        return CodedRows(part, self.frame, self._members)

    def whole(self) -> Blocks:
        """Return the rows of all rounds that are kept."""
        return self.blocks

    def blocks_of(self, k: int) -> list[Block]:
        """Return the blocks of one round, counted from 0."""
        k -= self._gone
        return list(self.blocks.part(self._edges[k], self._edges[k + 1]))

    def forget(self, first: int) -> None:
        """Drop the rows of rounds before ``first``; the others keep their numbers."""
        k = first - self._gone
        if k <= 0:
            return
        blocks = self._edges[k]
        self.blocks.forget(blocks)
        self._edges = [edge - blocks for edge in self._edges[k:]]
        self._starts, self._gone = self._starts[k:], first

    def round(self, k: int) -> tuple[FloatArray, LabelArray, CodeArray]:
        """Return columns (q, m), labels and clients of one round, counted from 0."""
        blocks = self.blocks_of(k)
        columns, labels, clients = np.empty((0, 0)), np.empty(0, dtype=np.int8), NOBODY
        if blocks:
            columns = np.concatenate([b.columns for b in blocks], axis=1)
            labels = np.concatenate([b.labels for b in blocks])
            clients = np.concatenate([b.clients for b in blocks])
        return columns, labels, clients

    def state(self) -> dict[str, Any]:
        """Return all rounds, each with its columns, labels and clients."""
        rounds, frame = {}, self.frame
        for k in range(self._gone, self._gone + len(self._starts)):
            columns, labels, clients = self.round(k)
            rounds[str(k)] = {"columns": columns, "labels": labels, "clients": clients}
        named = None if frame is None else {"centre": frame.centre, "scale": frame.scale}
        return {"rounds": rounds, "frame": named, "gone": self._gone}

    def restore(self, state: Any) -> None:
        """Put saved rounds back into an empty store."""
        named = state["frame"]
        self.frame = (
            None if named is None else Frame(np.array(named["centre"]), np.array(named["scale"]))
        )
        self.blocks, self._edges, self._starts = self._empty(), [0], []
        self._gone = int(state["gone"])
        for k in range(self._gone, self._gone + len(state["rounds"])):
            saved = state["rounds"][str(k)]
            if "file" in saved:
                self._adopt(saved["file"], saved["places"])
            else:
                self._keep(_own(saved["columns"]), _own(saved["labels"]), saved["clients"])


def block_edges(columns: int, rows: int) -> list[tuple[int, int]]:
    """Return the first row of each block of a round, and the first beyond it.

    >>> block_edges(2, 100), block_edges(200, 20_000)
    ([(0, 100)], [(0, 10485), (10485, 20000)])
    """
    size = rows if rows <= FEWEST_ROWS else rows_per_block(columns)  # one block in most rounds
    return [(first, min(first + size, rows)) for first in range(0, rows, size or 1)]


def _within(first: int, last: int, gone: int) -> tuple[int, int]:
    """Return the places of rounds among those that are kept."""
    if first < gone:
        raise InputError(
            f"The rows of {gone} round(s) were forgotten, and round {first + 1} is one."
        )
    return first - gone, last - gone


def weighted_rounds(rows: Partitions, starts: IntArray, weights: FloatArray) -> Partitions:
    """Return rows with the weights of their rounds, which begin at the rows ``starts``."""
    return Changed(rows, partial(_weighted, starts=starts, weights=weights))


def _weighted(block: Block, starts: IntArray, weights: FloatArray) -> Block:
    """Return a block whose rows have the weight of their round, which begins at a row of starts."""
    mine = weights[np.searchsorted(starts, block.start, side="right") - 1]
    return block._replace(weights=np.full(block.rows, mine))


def _own(array: Any) -> Any:
    """Return an array that may be written to, itself if it may: kernels are compiled for such."""
    return array if array.flags.writeable else array.copy()


@final
@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Rows in partitions as an estimator takes them: of some rounds, or of a table.

    Rows of rounds belong to ``members`` clients, which their blocks tell. Each row of a table is a
    client of its own.
    """

    inner: Partitions
    frame: Frame
    members: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.inner.rows

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks, combined in order."""
        return self.inner.reduced(function, combine)

    def matrix(self) -> tuple[FloatArray, BoolArray, IntArray]:
        """Return all rows in memory, (m, q), their labels and clients."""
        X = np.concatenate(self.inner.reduced(_block_rows, add))
        X = X * self.frame.scale + self.frame.centre
        if self.members is None:
            return X, self._labels(), np.arange(len(X))
        clients = np.concatenate(self.inner.reduced(_block_clients, add))
        return X, self._labels(), clients.astype(np.int64)

    def _labels(self) -> BoolArray:
        return np.concatenate(self.inner.reduced(_block_labels, add))

    def fold_of(self, folds: int, rng: np.random.Generator) -> IntArray:
        """Draw the fold of each client; in a table with about the same share enrolled in each."""
        if self.members is not None:
            return drawn_folds(np.arange(self.members), self.members, folds, rng)
        labels = self._labels()
        return client_folds(labels, np.arange(len(labels)), folds=folds, rng=rng)


def _block_rows(block: Block) -> list[FloatArray]:
    return [block.columns.T.copy()]  # a block from a scratch file lasts until the next is read


def _block_labels(block: Block) -> list[BoolArray]:
    return [block.labels.astype(np.bool_)]


def _block_clients(block: Block) -> list[CodeArray]:
    return [block.clients.copy()]


@final
class PanelStore:
    """Rounds that list the same clients, each with all its values.

    Parameters
    ----------
    static
        Columns that do not change from round to round, of all clients, (q_z, N).
    places
        Which columns of the design these are, (q_z,); the others change.
    columns
        Number of columns of the design, q.
    standardised
        Whether columns are changed to about mean 0 and deviation 1, by those of the first round.
    """

    def __init__(
        self, static: FloatArray, places: IntArray, columns: int, *, standardised: bool = True
    ) -> None:
        self.frame: Frame | None = None
        self._all, self._static_at = static, places
        self._varying_at = np.setdiff1d(np.arange(columns), places)
        self._standardised = standardised
        self._clients = np.empty(0, dtype=np.int64)
        self._static = np.empty((0, 1 + len(places)))  # (n, 1 + q_z), the constant first
        self._varying = np.empty((0, len(self._varying_at), 0))  # (R, q_x, n)
        self._labels = np.empty((0, 0), dtype=np.bool_)
        self._done = 0
        self._passed = [0]  # rows with label 1 before each round
        self._gone = 0  # rounds that were forgotten, before all of these
        both = np.concatenate([[columns], places, self._varying_at])
        self._order = np.argsort(both)

    def append(self, columns: FloatArray, labels: LabelArray, clients: IntArray) -> None:
        """Take a round: columns (q, n) or, since the others are known, (q_x, n)."""
        varying = columns if len(columns) == len(self._varying_at) else columns[self._varying_at]
        if self.frame is None:
            self._begin(varying, clients)
        elif not np.array_equal(clients, self._clients):
            raise InputError("A panel holds rounds of the same clients: use blocks.")
        assert self.frame is not None
        if self._done == len(self._varying):
            room = max(4, self._done // 2)
            self._varying = _extended(self._varying, room)
            self._labels = _extended(self._labels, room)
        at, frame = self._varying_at, self.frame
        np.subtract(varying, frame.centre[at, None], out=self._varying[self._done])
        self._varying[self._done] /= frame.scale[at, None]
        self._labels[self._done] = labels
        self._passed.append(self._passed[-1] + int(labels.sum()))
        self._done += 1

    def _begin(self, varying: FloatArray, clients: IntArray) -> None:
        whole = self.whole(varying, clients)
        self.frame = Frame.of(whole) if self._standardised else Frame.unchanged(len(whole))
        self._clients = np.array(clients)
        self._fix()
        self._varying = np.empty((0, len(varying), len(clients)))
        self._labels = np.empty((0, len(clients)), dtype=np.bool_)

    def _fix(self) -> None:
        """Standardise what does not change."""
        assert self.frame is not None
        at = self._static_at
        fixed = (self._all[:, self._clients] - self.frame.centre[at, None]) / self.frame.scale[
            at, None
        ]
        self._static = np.column_stack([np.ones(len(self._clients)), fixed.T])

    def whole(self, varying: FloatArray, clients: IntArray) -> FloatArray:
        """Return all columns of the design of some clients, (q, m)."""
        out = np.empty((len(self._static_at) + len(self._varying_at), len(clients)))
        out[self._static_at], out[self._varying_at] = self._all[:, clients], varying
        return out

    def rounds(self, first: int, last: int, weights: FloatArray = UNWEIGHTED) -> Panel:
        """Return some rounds as a view."""
        if self.frame is None:
            raise InputError("There are no rows to fit on.")
        first, last = _within(first, last, self._gone)
        chosen = slice(first, last)
        passed = float(self._passed[last] - self._passed[first])
        if len(weights):
            passed = float(weights @ np.diff(self._passed[first : last + 1]))
        return Panel(
            static=self._static,
            varying=self._varying[: self._done][chosen],
            labels=self._labels[: self._done][chosen],
            static_at=self._static_at,
            varying_at=self._varying_at,
            order=self._order,
            frame=self.frame,
            clients=self._clients,
            passed=passed,
            members=self._all.shape[1],
            weights=weights,
        )

    def forget(self, first: int) -> None:
        """Drop the rows of rounds before ``first``; the others keep their numbers."""
        k = first - self._gone
        if 2 * k <= self._done:  # what is left is copied: not in every round
            return
        kept = slice(k, self._done)
        self._varying, self._labels = self._varying[kept].copy(), self._labels[kept].copy()
        self._passed, self._done, self._gone = self._passed[k:], self._done - k, first

    def state(self) -> dict[str, Any]:
        """Return the rounds so far."""
        done, frame = slice(self._done), self.frame
        if frame is None:
            return {"rounds": 0, "gone": 0}
        return {
            "gone": self._gone, "rounds": self._done, "clients": self._clients,
            "varying": self._varying[done].copy(),
            "labels": self._labels[done].copy(), "centre": frame.centre, "scale": frame.scale,
        }  # fmt: skip

    def restore(self, state: Any) -> None:
        """Put saved rounds back."""
        self._done, self._gone = int(state["rounds"]), int(state["gone"])
        self.frame = None
        if self._done:
            self.frame = Frame(np.array(state["centre"]), np.array(state["scale"]))
            self._clients = np.array(state["clients"])
            self._varying, self._labels = np.array(state["varying"]), np.array(state["labels"])
            self._fix()
        self._passed = [0, *np.cumsum(self._labels[: self._done].sum(axis=1)).tolist()]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """Rounds of n clients: constant columns, columns by round, who passed."""

    static: FloatArray  # (n, 1 + q_z), first column 1
    varying: FloatArray  # (R, q_x, n)
    labels: BoolArray  # (R, n)
    static_at: IntArray  # (q_z,) places among the columns of the design
    varying_at: IntArray  # (q_x,)
    order: IntArray  # (q + 1,) the design's columns and constant, among constant, static, varying
    frame: Frame
    clients: IntArray  # (n,)
    passed: float  # weight of rows with label 1
    members: int  # clients that may be asked about, N
    weights: FloatArray = field(default_factory=lambda: UNWEIGHTED)  # (R,), or (0,) for rows alike

    @property
    def rows(self) -> int:
        """Number of rows, R n."""
        return int(self.labels.size)

    def likelihood_sums(self, beta: FloatArray) -> tuple[ColumnSums, Counts]:
        """Return (P1) over all rows with its derivatives, and their counts."""
        inside = np.concatenate([[beta[-1]], beta[self.static_at]])
        fixed = np.ascontiguousarray(self.static @ inside)
        out = _panel_sums(
            fixed, self.varying, self.labels, np.ascontiguousarray(beta[self.varying_at]),
            self.weights,
        )  # fmt: skip
        qz, q = len(inside), len(beta)
        gradient, hessian = np.empty(q), np.empty((q, q))  # the constant, static, varying columns
        gradient[:qz], gradient[qz:] = self.static.T @ out.residuals, out.slopes.sum(axis=0)
        hessian[:qz, :qz] = (self.static * out.weights[:, None]).T @ self.static
        hessian[qz:, :qz] = out.crossed @ self.static
        hessian[:qz, qz:] = hessian[qz:, :qz].T
        lower = out.curves.sum(axis=0)
        hessian[qz:, qz:] = lower + np.tril(lower, -1).T
        order = self.order
        gradient, hessian = gradient[order], hessian[order[:, None], order]
        rows, weight = self.rows, float(self.rows)
        if len(self.weights):
            weight = len(self.clients) * float(self.weights.sum())
        counts = Counts(rows, weight, self.passed)
        loss, largest = float(out.scalars[:, 0].sum()), float(out.scalars[:, 1].max())
        return ColumnSums(loss, gradient, hessian, largest), counts

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all rounds, combined in order."""
        if not len(self.labels):
            raise InputError("There are no rows.")
        total = function(self._block(0))
        for r in range(1, len(self.labels)):
            total = combine(total, function(self._block(r)))
        return total

    def _block(self, r: int) -> Block:
        columns = np.empty((len(self.static_at) + len(self.varying_at), len(self.clients)))
        columns[self.static_at], columns[self.varying_at] = self.static[:, 1:].T, self.varying[r]
        weights = np.repeat(self.weights[r : r + 1], len(self.clients))
        return Block(columns, self.labels[r].astype(np.int8), weights, r * len(self.clients))

    def fold_of(self, folds: int, rng: np.random.Generator) -> IntArray:
        """Draw the fold of each client, by its number, (N,); -1 for those without rows."""
        return drawn_folds(self.clients, self.members, folds, rng)

    def matrix(self) -> tuple[FloatArray, BoolArray, IntArray]:
        """Return all rows in memory, (R n, q), their labels and clients."""
        X = np.concatenate([self._block(r).columns.T for r in range(len(self.labels))])
        X = X * self.frame.scale + self.frame.centre
        return X, self.labels.ravel(), np.tile(self.clients, len(self.labels))


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
    scales: FloatArray,
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
        if scales.size:
            scale = scales[r]
            for i in range(m):
                loss += scale * (max(u[i], 0.0) - answers[i] * u[i] + math.log(factor[i]))
            for i in range(m):
                residual[i] *= scale
            for i in range(m):
                weight[i] *= scale
        else:
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
    scales: FloatArray,
    out: _Totals,
    first: int,
    last: int,
) -> None:
    """Fill the totals of chunks first to last."""
    for c in range(first, last):
        _chunk_sums(fixed, varying, replied, beta, scales, out, c)


def _panel_sums(
    fixed: FloatArray,
    varying: FloatArray,
    replied: BoolArray,
    beta: FloatArray,
    scales: FloatArray,
) -> _Totals:
    """Return the sums over rounds and clients, whatever the number of threads.

    ``scales`` (R,) are the weights of the rounds, (0,) where rows count alike.
    """
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
        _range_sums(fixed, varying, replied, beta, scales, out, first, last)

    over_ranges(chunks, fill, work=20.0 * replied.size * (1 + q))
    return out
