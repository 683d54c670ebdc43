"""Rows in partitions, and one sum over them.

Fitting and calibration are sums over rows. Whoever sums hands a function of one block of rows to
:func:`sum_over` and never learns whether blocks lie in memory, in a scratch file or on a cluster.
Blocks are added in their order, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.threads import thread_count

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, LabelArray

T = TypeVar("T")
BLOCK_ROWS = 65_536
_BLOCK_BYTES = 16 * 2**20
_BEHIND = 4  # blocks that may wait to be written
MEMORY = 256 * 2**20  # bytes of blocks kept in memory before the rest goes to a scratch file


def rows_per_block(columns: int) -> int:
    """Return how many rows of this many columns make a block of about 16 MiB."""
    return int(np.clip(_BLOCK_BYTES // (8 * max(1, columns)), 8_192, 262_144))


class Block(NamedTuple):
    """Some rows: covariates by column, labels, and weights where rows do not count alike."""

    columns: FloatArray  # (q, m), each column contiguous
    labels: LabelArray  # (m,) 0 or 1; empty where nothing is labelled
    weights: FloatArray  # (m,), or (0,) where every row counts once
    start: int = 0  # number of rows before it

    @property
    def rows(self) -> int:
        """Number of rows, m."""
        return int(self.columns.shape[1])

    def sizes(self) -> tuple[int, int, int]:
        """Return the lengths of columns, labels and weights in memory."""
        return self.columns.size, self.labels.size, self.weights.size


class Partitions(Protocol):
    """Blocks of rows, wherever they are."""

    @property
    def rows(self) -> int:
        """Number of rows in all blocks."""
        ...

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks, combined in order."""
        ...


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


class _Stored(NamedTuple):
    """Where a block lies in the scratch file."""

    offset: int
    shape: tuple[int, int]
    labels: int
    weights: int
    start: int

    @property
    def rows(self) -> int:
        return self.shape[1]


@final
class Blocks:
    """Blocks in memory, and beyond a budget in a scratch file that is gone with them.

    The file is read with plain reads, not mapped: what the system caches of it is not this
    process's memory. ``part`` gives a range of blocks without copying any.

    Parameters
    ----------
    memory
        Bytes of blocks to keep in memory.
    directory
        Where the scratch file goes; the system's temporary directory by default.
    """

    def __init__(self, *, memory: int = MEMORY, directory: Path | None = None) -> None:
        self._scratch = _Scratch(directory)
        self._memory = memory
        self._entries: list[Block | _Stored] = []
        self._rows = 0

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
        here = block._replace(start=self._rows)
        size = sum(array.nbytes for array in block[:3])
        if size <= self._memory:
            self._memory -= size
            self._entries.append(here)
        else:
            self._memory = 0  # later blocks follow, so that reading stays in one sweep
            self._entries.append(self._scratch.written(here))
        self._rows += block.rows

    @property
    def rows(self) -> int:
        """Number of rows in all blocks."""
        return self._rows

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks in order."""
        self._scratch.settled()
        for entry in self._entries:
            yield self._read(entry, _Room())

    def part(self, first: int, last: int) -> Blocks:
        """Return blocks ``first`` up to ``last``, without it."""
        some = Blocks.__new__(Blocks)
        some._scratch, some._memory = self._scratch, 0
        some._entries = self._entries[first:last]
        some._rows = sum(entry.rows for entry in some._entries)
        return some

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks, combined in order; threads share blocks."""
        if not self._entries:
            raise InputError("There are no rows.")
        self._scratch.settled()
        rooms = threading.local()

        def at(entry: Block | _Stored) -> T:
            if not hasattr(rooms, "room"):
                rooms.room = _Room()
            return function(self._read(entry, rooms.room))

        threads = thread_count()
        if threads == 1 or len(self._entries) == 1:
            total = at(self._entries[0])
            for entry in self._entries[1:]:
                total = combine(total, at(entry))
            return total
        return _in_order(at, self._entries, combine, threads)

    def _read(self, entry: Block | _Stored, room: _Room) -> Block:
        return entry if isinstance(entry, Block) else self._scratch.read(entry, room)


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


class _Room:
    """A buffer that grows to the largest block read into it."""

    def __init__(self) -> None:
        self.bytes = np.empty(0, dtype=np.uint8)

    def of(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if self.bytes.size < size:
            self.bytes = np.empty(size, dtype=np.uint8)
        return self.bytes[:size]


class _Scratch:
    """A file without a name: the system removes it when the last user is gone.

    Blocks are written behind the caller's back, a few at a time, while the next ones are decoded.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory, self._end = directory, 0
        self._file: Any = None
        self._writing: deque[Future[None]] = deque()

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def written(self, block: Block) -> _Stored:
        if self._file is None:
            try:
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._directory)  # noqa: SIM115
            except OSError as error:
                raise InputError(f"No scratch file can be made: {error}.") from error
        offset, (q, m) = self._end, block.columns.shape
        self._end += sum(array.nbytes for array in block[:3])
        self._end += -self._end % 8
        self._writing.append(_pool(1).submit(self._write, block, offset))
        if len(self._writing) > _BEHIND:
            self._writing.popleft().result()
        return _Stored(offset, (q, m), block.labels.size, block.weights.size, block.start)

    def _write(self, block: Block, offset: int) -> None:
        try:
            for array in block[:3]:
                rest = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
                while rest.size:
                    done = os.pwrite(self._file.fileno(), rest.data, offset)
                    offset, rest = offset + done, rest[done:]
        except OSError as error:
            raise InputError(
                f"The scratch file could not grow beyond {offset / 2**30:.1f} GiB "
                f"({error.strerror}): free space in {self._directory or tempfile.gettempdir()} or "
                "set TMPDIR to a larger disk."
            ) from error

    def settled(self) -> None:
        """Wait until every block is written."""
        while self._writing:
            self._writing.popleft().result()

    def read(self, entry: _Stored, room: _Room) -> Block:
        cells = 8 * entry.shape[0] * entry.shape[1]
        size = cells + entry.labels + 8 * entry.weights
        got = room.of(size)
        done = 0
        while done < size:
            step = os.preadv(self._file.fileno(), [got[done:].data], entry.offset + done)
            if step == 0:
                raise OSError("the scratch file is shorter than what was written to it")
            done += step
        columns = got[:cells].view(np.float64).reshape(entry.shape)
        labels = got[cells : cells + entry.labels].view(np.int8)
        weights = np.frombuffer(got[cells + entry.labels :].tobytes(), dtype=np.float64)
        return Block(columns, labels, weights, entry.start)
