"""Balance columns in partitions: files larger than memory, or the workers of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.calibration.design import BalanceDesign, Dense, DualSums, Frame, Moments, check_names
from fedipw.numerics.dual import column_moments, dense_sums
from fedipw.tables.cluster import ClusterBlocks
from fedipw.tables.partitions import Block, Blocks, Partitions, rows_per_block, sum_over
from fedipw.tables.tablefile import Slice, TableFile, rows_of
from fedipw.tables.terms import Term, term_matrix, term_of

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray
    from fedipw.tables.targets import Targets


@final
@dataclass(frozen=True, eq=False)
class Partitioned:
    """Rows of balance columns wherever partitions are; only ratios, one per row, are in memory.

    Examples
    --------
    >>> from fedipw.calibration import Entropy, calibrated
    >>> ages = np.array([[20.0], [30.0], [60.0]])
    >>> blocks = Blocks.of_arrays(ages, np.zeros(0, dtype=np.int8))
    >>> calibrated(Partitioned(blocks, ("age",)), [45.0], distance=Entropy()).weights.round(4)
    array([0.1889, 0.2482, 0.563 ])
    """

    partitions: Partitions
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check_names(self.names)

    @classmethod
    def of_table(
        cls, table: TableFile, targets: Targets, *, client: Any = None, scratch: Path | None = None
    ) -> Partitioned:
        """Return the columns that targets are about, of a table on disk whose rows are enrolled.

        With ``client``, a ``distributed.Client``, workers load and keep the rows.
        """
        terms = tuple(term_of(name, table.schema) for name in targets.names)
        rows = rows_per_block(len(terms))
        columns = tuple(dict.fromkeys(f.column for term in terms for f in term.factors))
        if client is not None:
            load = partial(_loaded, terms=terms, columns=columns)
            return cls(ClusterBlocks(client, load, table.slices(rows)), targets.names)
        blocks = Blocks(directory=scratch)
        for batch in table.batches(columns, rows=rows):
            blocks.append(_block(np.ascontiguousarray(term_matrix(terms, batch).T), 0))
        return cls(blocks, targets.names)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.partitions.rows

    @cached_property
    def moments(self) -> Moments:
        """Moments of the columns, in one pass."""
        found = sum_over(self.partitions, _block_moments)
        deviation = np.sqrt(found.square / max(1, found.rows - 1))
        return Moments(found.mean, deviation, found.least, found.largest)

    @property
    def implied(self) -> BoolArray:
        """None."""
        return np.zeros(len(self.names), dtype=np.bool_)

    def take(self, rows: slice | IntArray) -> BalanceDesign:
        """Return some of the rows, in memory."""
        wanted = np.arange(self.rows)[rows]
        found = self.partitions.reduced(partial(_block_rows, wanted=wanted), _joined)
        return Dense(np.vstack(found), self.names)

    def sums(
        self,
        base: FloatArray,
        frame: Frame,
        point: FloatArray,
        family: tuple[int, float, float],
        ratio: FloatArray,
        *,
        hessian: bool = True,
    ) -> DualSums:
        """Return the dual's sums."""
        found = sum_over(
            self.partitions,
            partial(
                _block_dual, base=base, frame=frame, point=point, family=family, hessian=hessian
            ),
        )
        for start, part in found.ratio:
            ratio[start : start + len(part)] = part
        return DualSums(found.value, found.largest, found.gradient, found.hessian)

    def row(self, index: int) -> FloatArray:
        """Return one row."""
        return self.take(np.array([index])).row(0)

    def dense(self) -> FloatArray:
        """Return all rows; only for small problems."""
        return self.take(slice(None)).dense()


def _block(columns: FloatArray, start: int) -> Block:
    return Block(columns, np.zeros(0, dtype=np.int8), np.empty(0), start)


def _loaded(part: Slice, terms: tuple[Term, ...], columns: tuple[str, ...]) -> Block:
    """Return the block of a slice; workers call it."""
    matrix = term_matrix(terms, rows_of(part, columns))
    return _block(np.ascontiguousarray(matrix.T), part.start)


@dataclass(frozen=True, slots=True, eq=False)
class _BlockMoments:
    rows: int
    mean: FloatArray
    square: FloatArray  # sum of squares about the mean
    least: FloatArray
    largest: FloatArray

    def __add__(self, other: _BlockMoments) -> _BlockMoments:
        rows = self.rows + other.rows
        apart, share = other.mean - self.mean, other.rows / rows
        return _BlockMoments(
            rows,
            self.mean + apart * share,
            self.square + other.square + apart**2 * (self.rows * share),
            np.fmin(self.least, other.least),
            np.fmax(self.largest, other.largest),
        )


def _block_moments(block: Block) -> _BlockMoments:
    mean, deviation, least, largest = column_moments(block.columns.T)
    square = deviation**2 * max(1, block.rows - 1)
    return _BlockMoments(block.rows, mean, square, least, largest)


@dataclass(frozen=True, slots=True, eq=False)
class _BlockDual:
    value: float
    largest: float
    gradient: FloatArray
    hessian: FloatArray | None
    ratio: list[tuple[int, FloatArray]]

    def __add__(self, other: _BlockDual) -> _BlockDual:
        square = None
        if self.hessian is not None and other.hessian is not None:
            square = self.hessian + other.hessian
        return _BlockDual(
            self.value + other.value,
            max(self.largest, other.largest),
            self.gradient + other.gradient,
            square,
            self.ratio + other.ratio,
        )


def _block_dual(
    block: Block,
    base: FloatArray,
    frame: Frame,
    point: FloatArray,
    family: tuple[int, float, float],
    *,
    hessian: bool,
) -> _BlockDual:
    share = base if len(base) == 1 else base[block.start : block.start + block.rows]
    ratio = np.empty(block.rows)
    found = dense_sums(block.columns.T, share, *frame, point, family, ratio, hessian=hessian)
    return _BlockDual(*found, [(block.start, ratio)])


def _block_rows(block: Block, wanted: IntArray) -> list[FloatArray]:
    first, last = np.searchsorted(wanted, [block.start, block.start + block.rows])
    here = wanted[first:last] - block.start
    return [np.ascontiguousarray(block.columns[:, here].T)]


def _joined(a: list[FloatArray], b: list[FloatArray]) -> list[FloatArray]:
    return a + b
