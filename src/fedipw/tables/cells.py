"""Cells of a column: its levels, or fifths of a number with many values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.tables.formula import MISSING

if TYPE_CHECKING:
    from fedipw.tables.table import Table

FEW = 12  # distinct values of a number that make it a category
CUTS = (0.2, 0.4, 0.6, 0.8)  # between fifths
SAMPLE = 20_000  # rows of a table by which its columns are cut


@dataclass(frozen=True, slots=True)
class Cells:
    """How a column is cut into cells.

    Examples
    --------
    >>> ages = pl.Series("age", [float(a) for a in range(20, 60)])
    >>> cells = Cells.of(ages)
    >>> ages.to_frame().select(cells.expression().alias("part"))["part"].unique().sort()[0]
    '(-inf, 28]'
    >>> cells.named("(-inf, 28]"), Cells.of(pl.Series("os", ["web", "ios"])).named("web")
    ('age in (-inf, 28]', 'os = web')
    """

    column: str
    is_float: bool
    edges: tuple[float, ...] | None  # of the fifths; none for a category

    @classmethod
    def of(cls, sample: pl.Series) -> Cells:
        """Return the cells of a column, from some of its values."""
        kind = sample.dtype
        if not kind.is_numeric() or sample.n_unique() <= FEW:
            return cls(sample.name, kind.is_float(), None)
        values = sample.cast(pl.Float64).fill_nan(None).drop_nulls()
        edges = sorted({float(values.quantile(q) or 0.0) for q in CUTS})
        return cls(sample.name, kind.is_float(), tuple(edges))

    @property
    def is_category(self) -> bool:
        """Whether each value is a cell of its own."""
        return self.edges is None

    def expression(self) -> pl.Expr:
        """Return the cell of each row, as text."""
        values = pl.col(self.column)
        if self.is_float:
            values = values.fill_nan(None)
        if self.edges is None:
            return values.cast(pl.String).fill_null(MISSING)
        *names, last = self.ranges()
        part = pl.lit(last)
        for name, edge in reversed(list(zip(names, self.edges, strict=True))):
            part = pl.when(values <= edge).then(pl.lit(name)).otherwise(part)
        return pl.when(values.is_null()).then(pl.lit(MISSING)).otherwise(part)

    def ordered(self, levels: Iterable[str]) -> list[str]:
        """Return cells in their order: ranges by number, levels by name, missing ones last."""
        ranges = [] if self.edges is None else self.ranges()
        place = {name: k for k, name in enumerate(ranges)}
        return sorted(levels, key=lambda name: (name == MISSING, place.get(name, 0), name))

    def ranges(self) -> list[str]:
        """Return the names of the fifths, in order."""
        edges = (-np.inf, *(self.edges or ()), np.inf)
        for digits in range(6, 18):  # as many as tell the edges apart
            bounds = [f"{edge:.{digits}g}" for edge in edges]
            if len(set(bounds)) == len(bounds):
                break
        return [f"({low}, {high}]" for low, high in pairwise(bounds)]

    def named(self, level: str) -> str:
        """Return a cell's name for people."""
        return f"{self.column} {'=' if self.is_category else 'in'} {level}"


def table_cells(table: Table, columns: Sequence[str]) -> dict[str, Cells]:
    """Return the cells of columns of a table, the same wherever they are shown."""
    sample = table.sample(SAMPLE, columns)
    return {name: Cells.of(sample[name]) for name in columns}
