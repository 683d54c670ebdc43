"""Rows in partitions, and one sum over them.

Fitting and calibration are sums over rows. Whoever sums hands a function of one block of rows to
:func:`sum_over` and never learns whether blocks lie in memory, in a scratch file or on a cluster.
Blocks are added in their order, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, cast, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.threads import thread_count
from fedipw.storage.memory import block_memory
from fedipw.storage.scratch import Room, Scratch, Stored

if TYPE_CHECKING:
    from fedipw.numerics import CodeArray, FloatArray, LabelArray

T = TypeVar("T")
NOBODY: Final = np.empty(0, dtype=np.int32)  # clients of rows that belong to none
BLOCK_ROWS = 65_536
FEWEST_ROWS = 8_192  # of a block that others follow
_BLOCK_BYTES = 16 * 2**20
Given = Callable[[int, int], Any]  # what belongs to rows first up to last, counted over all blocks


def rows_per_block(columns: int) -> int:
    """Return how many rows of this many columns make a block of about 16 MiB."""
    return min(max(_BLOCK_BYTES // (8 * max(1, columns)), FEWEST_ROWS), 262_144)


class Block(NamedTuple):
    """Some rows: covariates by column, labels, and weights where rows do not count alike."""

    columns: FloatArray  # (q, m), each column contiguous
    labels: LabelArray  # (m,) 0 or 1; empty where nothing is labelled
    weights: FloatArray  # (m,), or (0,) where every row counts once
    start: int = 0  # number of rows before it
    clients: CodeArray = NOBODY  # (m,) behind the rows, or (0,) where each is one of its own

    @property
    def rows(self) -> int:
        """Number of rows, m."""
        return int(self.columns.shape[1])


class Partitions(Protocol):
    """Blocks of rows, wherever they are."""

    @property
    def rows(self) -> int:
        """Number of rows in all blocks."""

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks, combined in order."""


class RoundRows(Partitions, Protocol):
    """Rows of rounds: blocks that tell their clients, beside which numbers of rows can be put."""

    def beside(
        self, function: Callable[[Block, Any], T], given: Given, combine: Callable[[T, T], T]
    ) -> T:
        """Return the function's values of all blocks, each with what is given for its rows."""


def sum_over(partitions: Partitions, function: Callable[[Block], T]) -> T:
    """Return the sum over blocks of anything with ``+``, or of tuples of such things.

    Examples
    --------
    >>> X = np.arange(6.0).reshape(3, 2)
    >>> blocks = Blocks.of([Block(X[:2].T.copy(), np.zeros(2, np.int8), np.empty(0)),
    ...                     Block(X[2:].T.copy(), np.zeros(1, np.int8), np.empty(0))])
    >>> sum_over(blocks, lambda block: (block.rows, block.columns.sum(axis=1)))
    (3, array([6., 9.]))
    """
    return partitions.reduced(function, added)


def added(a: T, b: T) -> T:
    """Return the sum of two values; of two tuples, entry by entry."""
    if not isinstance(a, tuple):
        return cast("T", cast("Any", a) + b)
    sums = [x + y for x, y in zip(a, cast("tuple[Any, ...]", b), strict=True)]
    return cast("T", type(a)(*sums) if hasattr(a, "_fields") else tuple(sums))


class _OnDisk(NamedTuple):
    """Where a block lies in a scratch file."""

    file: Scratch
    place: Stored
    rows: int
    start: int


@final
class Blocks:
    """Blocks in memory, and beyond a budget in a scratch file that is gone with them.

    ``part`` gives a range of blocks without copying any.

    Parameters
    ----------
    memory
        Bytes of blocks to keep in memory before the rest goes to a scratch file; a share of the
        limit that holds, 256 MiB without one, by default.
    directory
        Where the scratch file goes; the system's temporary directory by default.
    """

    def __init__(self, *, memory: int | None = None, directory: Path | None = None) -> None:
        self._directory = directory
        self._memory = block_memory() if memory is None else memory
        self._scratch: Scratch | None = None  # made when the first block goes there
        self._entries: list[Block | _OnDisk] = []
        self._rows = 0
        self._end = 0  # rows ever added

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Blocks:
        """Return blocks that stay in memory."""
        made = cls(memory=2**63)
        for block in blocks:
            made.append(block)
        return made

    @classmethod
    def of_arrays(
        cls, columns: FloatArray, labels: LabelArray, weights: FloatArray | None = None
    ) -> Blocks:
        """Return blocks of rows (n, q) in memory, copied only where columns are not contiguous."""
        made = cls(memory=2**63)
        for first in range(0, len(columns), BLOCK_ROWS):
            rows = slice(first, first + BLOCK_ROWS)
            part = np.empty(0) if weights is None else weights[rows]
            made.append(Block(np.ascontiguousarray(columns[rows].T), labels[rows], part))
        return made

    def append(self, block: Block) -> None:
        """Add a block at the end."""
        columns, labels, weights, _, clients = block
        here = Block(columns, labels, weights, self._end, clients)  # faster than _replace
        self._rows += columns.shape[1]
        self._end += columns.shape[1]
        size = _size(here)
        if size <= self._memory:
            self._memory -= size
            self._entries.append(here)
        else:
            self._memory = 0  # later blocks follow, so that reading stays in one sweep
            self._scratch = self._scratch or Scratch(self._directory)
            place = self._scratch.written((columns, labels, weights, clients))
            self._entries.append(_OnDisk(self._scratch, place, here.rows, here.start))

    def adopt(self, file: Scratch, place: Stored) -> None:
        """Add a block that lies in a file already: left there, unless memory has room for it."""
        rows = place.arrays[0][1][1]
        if place.size <= self._memory:
            columns, labels, weights, clients = file.read(place, Room())
            self.append(Block(columns, labels, weights, clients=clients))
            return
        self._memory = 0
        self._entries.append(_OnDisk(file, place, rows, self._end))
        self._rows, self._end = self._rows + rows, self._end + rows

    def forget(self, count: int) -> None:
        """Drop the first blocks; the numbers of the rows that follow stay as they are.

        What lies in the scratch file stays there until all of it goes.
        """
        gone, self._entries = self._entries[:count], self._entries[count:]
        self._rows -= sum(entry.rows for entry in gone)
        self._memory += sum(_size(entry) for entry in gone if isinstance(entry, Block))

    @property
    def rows(self) -> int:
        """Number of rows in all blocks."""
        return self._rows

    @property
    def end(self) -> int:
        """Number of rows that were ever added: the start of the next block."""
        return self._end

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks in order."""
        if self._scratch is not None:
            self._scratch.settled()
        for entry in self._entries:
            yield entry if isinstance(entry, Block) else self._read(entry, Room())

    def part(self, first: int, last: int) -> Blocks:
        """Return blocks ``first`` up to ``last``, without it."""
        some = Blocks.__new__(Blocks)
        some._scratch, some._memory, some._directory = self._scratch, 0, self._directory
        some._entries = self._entries[first:last]
        some._rows, some._end = sum(entry.rows for entry in some._entries), self._end
        return some

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks, combined in order; threads share blocks."""
        return self._combined(function, combine)

    def beside(
        self, function: Callable[[Block, Any], T], given: Given, combine: Callable[[T, T], T]
    ) -> T:
        """Return the function's values of all blocks, each with what is given for its rows."""
        return self._combined(
            lambda block: function(block, given(block.start, block.start + block.rows)), combine
        )

    def _combined(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        if not self._entries:
            raise InputError("There are no rows.")
        if self._scratch is not None:
            self._scratch.settled()
        rooms = threading.local()

        def at(entry: Block | _OnDisk) -> T:
            if isinstance(entry, Block):
                return function(entry)
            if not hasattr(rooms, "room"):
                rooms.room = Room()
            return function(self._read(entry, rooms.room))

        threads = thread_count()
        if threads == 1 or len(self._entries) == 1:
            total = at(self._entries[0])
            for entry in self._entries[1:]:
                total = combine(total, at(entry))
            return total
        return _in_order(at, self._entries, combine, threads)

    def _read(self, entry: _OnDisk, room: Room) -> Block:
        columns, labels, weights, clients = entry.file.read(entry.place, room)
        # weights outlive the room
        return Block(columns, labels, weights.copy(), entry.start, clients)


def _size(block: Block) -> int:
    """Return the bytes of a block."""
    return int(
        block.columns.nbytes + block.labels.nbytes + block.weights.nbytes + block.clients.nbytes
    )


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return threads of blocks' own: a kernel that shares ranges between threads has others."""
    return ThreadPoolExecutor(threads)


def _in_order(
    at: Callable[[Any], T], entries: Sequence[Any], combine: Callable[[T, T], T], threads: int
) -> T:
    """Combine values in order while threads work a few entries ahead."""
    waiting: deque[Future[T]] = deque()
    total: T | None = None
    workers = _pool(threads)
    for entry in entries:
        waiting.append(workers.submit(at, entry))
        if len(waiting) > 2 * threads:
            value = waiting.popleft().result()
            total = value if total is None else combine(total, value)
    for future in waiting:
        value = future.result()
        total = value if total is None else combine(total, value)
    return cast("T", total)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """An affine change of columns, (x - centre) / scale, fixed before any row is read."""

    centre: FloatArray  # (q,)
    scale: FloatArray  # (q,)

    @classmethod
    def unchanged(cls, columns: int) -> Frame:
        """Return the frame that leaves columns as they are."""
        return cls(np.zeros(columns), np.ones(columns))

    @classmethod
    def of(cls, columns: FloatArray, weights: FloatArray | None = None) -> Frame:
        """Return mean and standard deviation of columns (q, m); 1 where a column hardly varies."""
        if columns.shape[1] == 0 or (weights is not None and not weights.any()):
            return cls.unchanged(len(columns))
        share = np.full(columns.shape[1], 1.0) if weights is None else weights
        share = share / share.sum()
        centre = columns @ share
        scale = np.sqrt((columns - centre[:, None]) ** 2 @ share)
        tiny = 1e-12 * np.maximum(1e-300, np.abs(columns).max(axis=1, initial=0.0))
        return cls(centre, np.where(scale > tiny, scale, 1.0))

    def matrix(self) -> FloatArray:
        """Return what takes coefficients, intercept last, of columns to those in this frame."""
        out = np.diag(np.append(self.scale, 1.0))
        out[-1, :-1] = self.centre
        return out

    def inverse(self) -> FloatArray:
        """Return what takes coefficients in this frame back to those of the columns."""
        out = np.diag(np.append(1.0 / self.scale, 1.0))
        out[-1, :-1] = -self.centre / self.scale
        return out

    def standard(self, columns: FloatArray) -> FloatArray:
        """Return columns (q, m) in this frame, changed in place."""
        columns -= self.centre[:, None]
        columns /= self.scale[:, None]
        return columns

    def block(self, block: Block) -> Block:
        """Return a block with a copy of its columns in this frame."""
        return block._replace(columns=self.standard(block.columns.copy()))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """Partitions whose blocks are changed as they are read, wherever that is."""

    inner: Partitions
    change: Callable[[Block], Block]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.inner.rows

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all changed blocks, combined in order."""
        # a partial of what a worker needs: a method would carry the partitions along
        return self.inner.reduced(partial(_then, self.change, function), combine)


def _then(change: Callable[[Block], Block], function: Callable[[Block], T], block: Block) -> T:
    return function(change(block))


def frame_of(partitions: Partitions, q: int) -> Frame:
    """Return mean and deviation of the columns, by one pass; 1 where a column hardly varies."""
    if q == 0:
        return Frame.unchanged(0)
    found = sum_over(partitions, _block_spread)
    scale = np.sqrt(found.square / found.weight)
    return Frame(found.mean, np.where(scale > 1e-12 * found.largest, scale, 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class _Spread:
    weight: float
    mean: FloatArray  # (q,)
    square: FloatArray  # (q,) about the mean
    largest: FloatArray  # (q,) of absolute values

    def __add__(self, other: _Spread) -> _Spread:
        weight, apart = self.weight + other.weight, other.mean - self.mean
        share = other.weight / weight if weight > 0.0 else 0.0
        return _Spread(
            weight,
            self.mean + apart * share,
            self.square + other.square + apart**2 * (self.weight * share),
            np.maximum(self.largest, other.largest),
        )


def _block_spread(block: Block) -> _Spread:
    weights = block.weights if len(block.weights) else np.ones(block.rows)
    total = float(weights.sum())
    mean = block.columns @ weights / (total if total > 0.0 else 1.0)
    square = (block.columns - mean[:, None]) ** 2 @ weights
    largest = np.abs(block.columns).max(axis=1, initial=1e-300)
    return _Spread(total, mean, square, largest)
