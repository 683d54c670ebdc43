"""Overlap: how near selection comes to leaving some of the population out altogether."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.numerics.checks import some
from fedipw.selection.saved import block_prob
from fedipw.tables.cells import table_cells
from fedipw.tables.columns import ENROLLED
from fedipw.tables.partitions import Block, Partitions, sum_over

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray
    from fedipw.selection.coded import CodedTable
    from fedipw.selection.saved import BlockProb, StageModel
    from fedipw.tables.table import Table

THRESHOLD = 0.01
_SMALLEST = 5
_CROSSED = 12  # columns whose pairs are looked at
_AT_ONCE = 32  # columns counted by one look at the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A part of the population in which nobody is enrolled."""

    name: str
    population: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    r"""How far enrollment reaches, by a fitted model and by counts.

    ``estimated_size`` is :math:`\hat N = \sum_E 1/\hat\pi` (W9), near the population's size
    if the model is right; ``effective_sample_size`` that of the enrolled under weights
    :math:`1/\hat\pi` (W10). They are infinite and 0 if an enrolled client has probability 0.
    """

    threshold: float
    population: float  # clients that the rows stand for, by their base weights
    enrolled: int
    smallest: tuple[float, ...]  # probabilities of the population
    smallest_enrolled: float
    below: float  # clients of the population below the threshold
    estimated_size: float
    effective_sample_size: float
    empty_cells: tuple[Cell, ...]

    @property
    def share_below(self) -> float:
        """Share of the population with a probability below the threshold."""
        return self.below / self.population

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        size = self.estimated_size if np.isfinite(self.estimated_size) else None
        return {**asdict(self), "estimated_size": size, "share_below": self.share_below}

    def lines(self) -> tuple[str, ...]:
        """Return what people should read."""
        size = (
            f"Enrollment: {self.enrolled} of {self.population:.10g} clients, effective "
            f"{self.effective_sample_size:.1f}; estimated population "
            f"{self.estimated_size:.6g} against {self.population:.10g}."
        )
        reach = (
            f"Smallest enrollment probability {self.smallest[0]:.3g}; {self.share_below:.2%} of "
            f"the population below {self.threshold:g}."
        )
        out = [size, reach]
        if self.empty_cells:
            cells = some(f"{c.name} ({c.population} clients)" for c in self.empty_cells)
            out.append(
                f"Nobody is enrolled in {len(self.empty_cells)} cell(s): {cells}. No weight can "
                "stand for them; the model extends what it saw elsewhere."
            )
        return tuple(out)


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    rows: float
    enrolled: int
    below: float
    smallest: FloatArray
    smallest_enrolled: float
    size: float
    square: float

    def __add__(self, other: _Sums) -> _Sums:
        both = np.sort(np.concatenate([self.smallest, other.smallest]))[:_SMALLEST]
        return _Sums(
            self.rows + other.rows,
            self.enrolled + other.enrolled,
            self.below + other.below,
            both,
            min(self.smallest_enrolled, other.smallest_enrolled),
            self.size + other.size,
            self.square + other.square,
        )


def _block_overlap(block: Block, prob_of: BlockProb, threshold: float) -> _Sums:
    prob = prob_of(block)
    inside = prob[block.labels == 1]
    weighted = len(block.weights) > 0
    with np.errstate(divide="ignore"):  # a classifier may give an enrolled client probability 0
        inverse = (block.weights[block.labels == 1] if weighted else 1.0) / inside
    small = prob < threshold
    return _Sums(
        float(block.weights.sum()) if weighted else len(prob),
        len(inside),
        float(block.weights[small].sum()) if weighted else int(small.sum()),
        np.sort(np.partition(prob, _SMALLEST)[:_SMALLEST] if len(prob) > _SMALLEST else prob),
        float(inside.min(initial=np.inf)),
        float(inverse.sum()),
        float((inverse**2).sum()),
    )


def overlap(
    coded: CodedTable,
    model: StageModel,
    *,
    threshold: float = THRESHOLD,
    cells: bool = True,
    partitions: Partitions | None = None,
) -> Overlap:
    """Return the overlap of a coded population table under its enrollment model.

    ``cells`` asks for parts of the population with nobody enrolled: every value of a category or of
    a number with few values, every fifth of other numbers, and every pair of categories. They count
    everybody who is enrolled at some time. ``partitions`` are the same rows with other labels.
    """
    prob_of = block_prob(model.fit, coded.frame)
    rows = coded.partitions if partitions is None else partitions
    sums = sum_over(rows, partial(_block_overlap, prob_of=prob_of, threshold=threshold))
    return Overlap(
        threshold=threshold,
        population=sums.rows,
        enrolled=sums.enrolled,
        smallest=tuple(sums.smallest.tolist()),
        smallest_enrolled=sums.smallest_enrolled,
        below=sums.below,
        estimated_size=sums.size,
        effective_sample_size=sums.size**2 / sums.square if np.isfinite(sums.square) else 0.0,
        empty_cells=empty_cells(coded.table, model.design.columns) if cells else (),
    )


def empty_cells(table: Table, columns: Sequence[str]) -> tuple[Cell, ...]:
    """Return parts of the population in which nobody is enrolled, the largest first.

    A pair that lies in an empty single cell is not listed again.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from fedipw.tables.table import Table
    >>> path = Path(tempfile.mkdtemp()) / "people.parquet"
    >>> pl.DataFrame({"os": ["a", "a", "b", "b"], "enrolled": [True, True, False, False],
    ...               "age": [20.0, 30.0, 20.0, 30.0]}).write_parquet(path)
    >>> [(cell.name, cell.population) for cell in empty_cells(Table(path), ["os", "age"])]
    [('os = b', 2)]
    """
    cells = table_cells(table, columns)
    crossed = [name for name in columns if cells[name].is_category][:_CROSSED]
    found: list[tuple[tuple[tuple[str, str], ...], int]] = []
    for first in range(0, len(columns), _AT_ONCE):
        some_columns = columns[first : first + _AT_ONCE]
        query = (
            table.scan()
            .select(pl.col(ENROLLED), *(cells[n].expression().alias(f"{n} ") for n in some_columns))
            .unpivot(index=ENROLLED, variable_name="(column)", value_name="(level)")
            .group_by("(column)", "(level)")
            .agg(pl.len().alias("(n)"), pl.col(ENROLLED).sum().alias("(enrolled)"))
            .filter(pl.col("(enrolled)") == 0)
        )
        for name, level, size, _ in table.collect(query).iter_rows():
            found.append((((name[:-1], str(level)),), size))
    for names in combinations(crossed, 2):
        parts = [cells[name].expression().alias(f"({k})") for k, name in enumerate(names)]
        query = (
            table.scan()
            .group_by(parts)
            .agg(pl.len().alias("(n)"), pl.col(ENROLLED).sum().alias("(enrolled)"))
            .filter(pl.col("(enrolled)") == 0)
        )
        for *levels, size, _ in table.collect(query).iter_rows():
            key = tuple(zip(names, map(str, levels), strict=True))
            if not any(set(known) < set(key) for known, _ in found):
                found.append((key, size))
    found.sort(key=lambda item: (-item[1], item[0]))
    return tuple(
        Cell(name=" and ".join(cells[n].named(v) for n, v in key), population=size)
        for key, size in found
    )
