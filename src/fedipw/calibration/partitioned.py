"""Balance columns in partitions: files larger than memory, or the workers of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
import polars as pl

from fedipw.calibration.design import Dense, DualSums, Moments, Tilt, check_names
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.numerics.dual import column_moments, dense_sums
from fedipw.tables.cluster import ClusterBlocks
from fedipw.tables.columns import ENROLLED
from fedipw.tables.formula import Term, term_matrix
from fedipw.tables.partitions import Block, Blocks, Partitions, rows_per_block, sum_over
from fedipw.tables.table import Slice, Table, rows_of


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
    def of_terms(
        cls, table: Table, terms: Sequence[Term], *, client: Any = None, scratch: Path | None = None
    ) -> Partitioned:
        """Return terms as columns, of the enrolled rows of a table on disk."""
        names = tuple(term.name for term in terms)
        flags = [ENROLLED] if ENROLLED in table.schema else []
        used = tuple(dict.fromkeys([*flags, *(f.column for term in terms for f in term.factors)]))
        rows = rows_per_block(len(terms))
        if client is not None:
            load = partial(_loaded, used=used, terms=tuple(terms))
            return cls(ClusterBlocks(client, load, _enrolled_slices(table, rows)), names)
        blocks = Blocks(directory=scratch)
        for batch in table.batches(used, rows=rows):
            block = _block(batch, terms)
            if block.rows:
                blocks.append(block)
        return cls(blocks, names)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.partitions.rows

    @cached_property
    def moments(self) -> Moments:
        """Moments of the columns, in one pass."""
        return sum_over(self.partitions, _block_moments)

    @property
    def implied(self) -> BoolArray:
        """None."""
        return np.zeros(len(self.names), dtype=np.bool_)

    def take(self, rows: slice | IntArray) -> Dense:
        """Return some of the rows, in memory."""
        wanted = np.arange(self.rows)[rows]
        return Dense(
            np.vstack(sum_over(self.partitions, partial(_rows, wanted=wanted))), self.names
        )

    def sums(self, base: FloatArray, tilt: Tilt, ratio: FloatArray, *, hessian: bool) -> DualSums:
        """Return the dual's sums."""
        rows, shared = self.partitions, base
        if len(base) > 1 and isinstance(rows, ClusterBlocks):
            rows, shared = rows.with_weights(base), np.empty(0)
        found, parts = sum_over(rows, partial(_dual_sums, base=shared, tilt=tilt, hessian=hessian))
        ratio[:] = np.concatenate(parts)
        return found

    def dense(self) -> FloatArray:
        """Return all rows."""
        return self.take(slice(None)).dense()


def _enrolled_slices(table: Table, rows: int) -> list[Slice]:
    """Return slices with an enrolled row; ``start`` counts the enrolled rows before each."""
    slices = table.slices(rows)
    if ENROLLED not in table.schema:
        return list(slices)
    flags = table.collect(table.scan().select(ENROLLED)).to_series().to_numpy()
    before = np.concatenate([[0], np.cumsum(flags)])
    moved = [part._replace(start=int(before[part.start])) for part in slices]
    ends = [int(before[part.start + part.rows]) for part in slices]
    return [part for part, end in zip(moved, ends, strict=True) if end > part.start]


def _block(frame: pl.DataFrame, terms: Sequence[Term], start: int = 0) -> Block:
    rows = frame.filter(ENROLLED) if ENROLLED in frame.columns else frame
    columns = np.ascontiguousarray(term_matrix(terms, rows).T)
    return Block(columns, np.zeros(0, dtype=np.int8), np.empty(0), start)


def _loaded(part: Slice, used: tuple[str, ...], terms: tuple[Term, ...]) -> Block:
    """Return the block of a slice; workers call it."""
    return _block(rows_of(part, used), terms, part.start)


def _block_moments(block: Block) -> Moments:
    return Moments(block.rows, *column_moments(block.columns.T))


def _dual_sums(
    block: Block, base: FloatArray, tilt: Tilt, *, hessian: bool
) -> tuple[DualSums, list[FloatArray]]:
    """Return a block's sums, and its ratios in a list: lists of blocks add up in order.

    Without ``base`` its weights are the base shares.
    """
    share = block.weights if len(base) == 0 else base
    if len(base) > 1:
        share = base[block.start : block.start + block.rows]
    ratio, (family, centre, scale, point) = np.empty(block.rows), tilt
    found = dense_sums(block.columns.T, share, centre, scale, point, family, ratio, hessian=hessian)
    return DualSums(*found), [ratio]


def _rows(block: Block, wanted: IntArray) -> list[FloatArray]:
    first, last = np.searchsorted(wanted, [block.start, block.start + block.rows])
    here = wanted[first:last] - block.start
    return [np.ascontiguousarray(block.columns[:, here].T)]
