"""Tables coded for fits: rows read once, here or on a cluster, ready for any number of passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.errors import FedIPWError, InputError
from fedipw.numerics.checks import check_offsets, some
from fedipw.selection.classifiers import Estimator, Newton
from fedipw.selection.logistic import logistic_fit
from fedipw.selection.rowstore import CodedRows
from fedipw.selection.saved import ENROLLMENT, StageModel
from fedipw.tables.cluster import ClusterBlocks
from fedipw.tables.columns import ENROLLED, FROM, ID, UNTIL
from fedipw.tables.design import Design, Missing, bound_design
from fedipw.tables.partitions import Block, Blocks, Frame, Partitions, rows_per_block, sum_over
from fedipw.tables.table import Slice, Table, rows_of

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

SAMPLE_ROWS = 200_000  # of the first fit, from which the fit on all rows starts
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """How a table on disk is fitted, and where the work is done."""

    missing: Missing = Missing.ERROR  # what becomes of missing values and unknown levels
    lump_below: float | None = None  # levels with a smaller share of the rows are merged
    estimator: Estimator = field(default_factory=Newton)
    soft: bool = False  # whether a fit that separates gets a penalty, instead of an error
    client: Any = None  # a distributed.Client whose workers load and keep the rows
    scratch: Path | None = None  # directory for decoded rows beyond 256 MiB


def table_model(
    table: Table,
    formula: str = ".",
    *,
    label: str = ENROLLED,
    weight: str | None = None,
    covariates: Sequence[str] | None = None,
    settings: TableSettings | None = None,
    start: FloatArray | None = None,
    progress: Progress | None = None,
) -> StageModel:
    """Fit P(label | formula) on a table on disk, exactly, in memory that does not grow with it.

    Parameters
    ----------
    table
        Rows of the population; may be larger than memory.
    formula
        Terms such as ``age + os + age:os + ns(income, 1, 2, 5)``; ``.`` is every covariate.
    label, weight
        Column of true and false, and column of row weights if rows do not count alike.
    covariates
        Columns the formula may use; all but identifiers, label, weight and dates by default.
    settings
        Policies, penalty and where the work is done.
    start
        Coefficients of a former fit, intercept last; those of a sample of rows by default.
    progress
        Told of rows read and rows in all.

    Raises
    ------
    InputError
        If a column is missing, holds nothing or cannot explain the label.
    SeparationError
        If some columns part the two groups, so that no maximum exists.
    """
    coded = CodedTable.of(
        table, formula, label=label, weight=weight, covariates=covariates, settings=settings,
        progress=progress,
    )  # fmt: skip
    return coded.model(start)


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedTable:
    """A table whose rows have been read once and are ready for any number of passes."""

    table: Table
    design: Design
    frame: Frame
    partitions: Partitions
    settings: TableSettings
    start: FloatArray | None  # the fit on a sample of rows

    def listed_rows(self) -> pl.LazyFrame:
        """Return the clients of the table; those left out for missing values are not of them."""
        rows, design = self.table.scan(), self.design
        if design.missing is not Missing.DROP:
            return rows
        floats = [n for n in design.columns if self.table.schema[n].is_float()]
        return rows.filter(
            *(pl.col(n).is_not_null() for n in design.columns),
            *(pl.col(n).is_not_nan() for n in floats),
        )

    @classmethod
    def of(
        cls,
        table: Table,
        formula: str | Design = ".",
        *,
        label: str = ENROLLED,
        weight: str | None = None,
        covariates: Sequence[str] | None = None,
        settings: TableSettings | None = None,
        progress: Progress | None = None,
    ) -> CodedTable:
        """Return a table coded by a formula or a design; see :func:`table_model`."""
        settings = TableSettings() if settings is None else settings
        _check_label(table, label)
        known = {ID, label, weight, ENROLLED, FROM, UNTIL}
        names = tuple(n for n in table.schema if n not in known)
        design = formula if isinstance(formula, Design) else bound_design(
            formula, table.scan(), names if covariates is None else covariates,
            missing=settings.missing, lump_below=settings.lump_below, where=table.name,
            checked=False,
        )  # fmt: skip
        rows = _Rows(design=design, label=label, weight=weight)
        if not design.terms:
            raise InputError(f"The formula {design.formula!r} leaves no column to fit.")
        table.require(rows.columns)
        sample = rows.block(table.sample(SAMPLE_ROWS, rows.columns), table.name)
        check_offsets(sample.columns, design.names, table.name)
        if settings.estimator.standardises:
            frame = Frame.of(sample.columns, sample.weights if len(sample.weights) else None)
        else:
            frame = Frame.unchanged(len(design.terms))
        partitions: Partitions
        if settings.client is None:
            partitions = _local(table, rows, frame, settings.scratch, progress)
        else:
            load = partial(_loaded, rows=rows, frame=frame)
            partitions = ClusterBlocks(settings.client, load, table.slices(rows.batch))
        large = table.rows > 2 * sample.rows
        return cls(
            table=table,
            design=rows.design,
            frame=frame,
            partitions=partitions,
            settings=settings,
            start=_first_point(sample, frame, rows.design.names) if large else None,
        )

    @property
    def rows(self) -> int:
        """Number of clients that take part, N."""
        return self.partitions.rows

    @property
    def left_out(self) -> int:
        """Rows without a value or with an unknown level, under the policy drop."""
        return self.table.rows - self.partitions.rows

    def model(
        self,
        start: FloatArray | None = None,
        partitions: Partitions | None = None,
        estimator: Estimator | None = None,
    ) -> StageModel:
        """Return the fit, on these rows or on the same rows with other labels.

        ``estimator`` takes the place of the settings'.
        """
        rows = CodedRows(self.partitions if partitions is None else partitions, self.frame)
        chosen = self.start if start is None else start
        fitted = (self.settings.estimator if estimator is None else estimator).fitted
        found = fitted(rows, self.design.names, chosen)
        return StageModel(stage=ENROLLMENT, design=self.design, fit=found, left_out=self.left_out)

    @cached_property
    def _totals(self) -> tuple[float, FloatArray]:
        return sum_over(self.partitions, _column_totals)

    @property
    def size(self) -> float:
        """Number of clients that the rows stand for: their weights, or themselves."""
        return self._totals[0]

    def means(self) -> FloatArray:
        """Return the mean of each design column over the rows, (q,), by their weights."""
        mass, total = self._totals
        means: FloatArray = self.frame.centre + self.frame.scale * (total / mass)
        return means


def _column_totals(block: Block) -> tuple[float, FloatArray]:
    if len(block.weights):
        return float(block.weights.sum()), block.columns @ block.weights
    return float(block.rows), block.columns.sum(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """How rows of a table become rows of a fit."""

    design: Design
    label: str
    weight: str | None

    @property
    def columns(self) -> tuple[str, ...]:
        more = () if self.weight is None else (self.weight,)
        return tuple(dict.fromkeys((*self.design.columns, self.label, *more)))

    @property
    def batch(self) -> int:
        """Rows of a block."""
        return rows_per_block(len(self.design.terms) + 1)

    def block(self, frame: pl.DataFrame, where: str) -> Block:
        """Return the block of a batch of rows."""
        flags = frame[self.label]
        if flags.null_count():
            raise InputError(
                f"{where}: {self.label!r} must be true or false in every row; "
                f"{flags.null_count()} are missing."
            )
        coded = self.design.rows(frame, where)
        labels = flags.to_numpy().astype(np.int8)
        weights = np.empty(0) if self.weight is None else _weights(frame[self.weight], where)
        if coded.kept is not None:
            labels = labels[coded.kept]
            weights = weights[coded.kept] if len(weights) else weights
        return Block(coded.columns, labels, weights)


def _weights(column: pl.Series, where: str) -> FloatArray:
    values = column.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
    if not (np.isfinite(values) & (values >= 0.0)).all():
        raise InputError(f"{where}: weights in {column.name!r} must be finite and not negative.")
    return values


def _check_label(table: Table, label: str) -> None:
    table.require([label])
    if table.schema[label] != pl.Boolean:
        raise InputError(
            f"{table.name}: {label!r} must be true or false in every row, not "
            f"{table.schema[label]}."
        )


def _standard(block: Block, frame: Frame) -> Block:
    return block._replace(columns=frame.standard(block.columns))


def _loaded(part: Slice, rows: _Rows, frame: Frame) -> Block:
    """Return the block of a slice; workers call it."""
    block = rows.block(rows_of(part, rows.columns), f"{part.path} from row {part.first + 1}")
    return _standard(block._replace(start=part.start), frame)


def _local(
    table: Table, rows: _Rows, frame: Frame, scratch: Path | None, progress: Progress | None
) -> Blocks:
    blocks, done = Blocks(directory=scratch), 0
    for batch in table.batches(rows.columns, rows=rows.batch):
        block = rows.block(batch, f"{table.name} from row {done + 1}")
        if block.rows:
            blocks.append(_standard(block, frame))
        done += batch.height
        if progress is not None:
            progress(done, table.rows)
    if not blocks.rows:
        raise InputError(f"{table.name}: no row has all its values: nothing is left to fit.")
    return blocks


def _first_point(sample: Block, frame: Frame, names: Sequence[str]) -> FloatArray | None:
    """Return the fit on a sample of rows, none if there is none."""
    blocks = Blocks.of([_standard(sample._replace(columns=sample.columns.copy()), frame)])
    try:
        found = logistic_fit(blocks, names, frame=frame, max_iter=25)
    except FedIPWError:
        return None  # one class only, or the like: the fit on all rows will tell
    return found.point if found.converged else None


def known_before_enrollment(table: Table, names: Sequence[str]) -> None:
    """Raise if a column is null for every client that is not enrolled, but not for all.

    Such a column exists only because the client enrolled, so it can never explain enrollment.
    """
    outside, schema = ~pl.col(ENROLLED), table.schema
    missing = {
        n: pl.col(n).is_null() | pl.col(n).is_nan() if schema[n].is_float() else pl.col(n).is_null()
        for n in names
    }
    query = table.scan().select(
        outside.sum().alias("(outside)"),
        pl.len().alias("(all)"),
        *(lost.sum().alias(f"{n} all") for n, lost in missing.items()),
        *((lost & outside).sum().alias(f"{n} outside") for n, lost in missing.items()),
    )
    found = table.collect(query).row(0, named=True)
    size, everyone = found["(outside)"], found["(all)"]
    late = [
        n for n in names if size and found[f"{n} outside"] == size and found[f"{n} all"] < everyone
    ]
    if late:
        raise InputError(
            f"{some(map(repr, late))} is known only after enrollment (null for all {size} "
            "non-enrolled clients), so it cannot explain enrollment. Leave it to the participation "
            "stage."
        )
