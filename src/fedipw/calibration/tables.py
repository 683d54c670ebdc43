"""Calibration of a table of enrolled clients to named targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from fedipw.calibration.design import BalanceDesign, Dense, Margins, Partitioned
from fedipw.calibration.distances import Distance, InverseLogit
from fedipw.calibration.solve import Calibration, Slack, calibrated
from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import some
from fedipw.tables.columns import ENROLLED, ID
from fedipw.tables.formula import Term, sorted_levels, term_matrix, term_of
from fedipw.tables.population import Population
from fedipw.tables.table import Table, TableLike, odd_number
from fedipw.tables.targets import Targets

OTHERS = "all others"
IN_MEMORY = 2_000_000  # rows of a table beyond which its columns are not all held in memory
_REST = 1e-6  # of a category's share: what is left counts as nothing


def calibrated_table(
    table: TableLike,
    targets: Targets,
    *,
    distance: Distance | InverseLogit | None = None,
    base: str | None = None,
    population_size: float | None = None,
    slack: Slack | None = None,
    client: Any = None,
    in_memory: int = IN_MEMORY,
) -> tuple[pl.DataFrame, Calibration]:
    """Return ``unit_id, weight`` of the enrolled rows of a table, weights summing to 1.

    Rows with ``enrolled`` false are ignored; a table without that column lists enrolled clients.
    ``base`` names the column of base weights. See :func:`fedipw.calibration.calibrated`.

    A table of more than ``in_memory`` rows is read in blocks, of which a few are in memory at a
    time. With ``client``, a ``distributed.Client``, the workers of a Dask cluster read and keep
    them. The weights are the same.

    Examples
    --------
    >>> from fedipw.tables import Targets
    >>> people = pl.DataFrame({"unit_id": ["a", "b", "c"], "os": ["ios", "ios", "android"]})
    >>> table, _ = calibrated_table(people, Targets.of({"os[android]": 0.6}))
    >>> table["weight"].round(6).to_list()
    [0.2, 0.2, 0.6]
    """
    given = source = Table(table)
    whole = client is None and given.rows <= in_memory
    if whole:
        given = Table(given.collect())
    Population(given).check()
    columns = _target_columns(given, targets)
    if population_size is None:
        population_size = targets.totals
    rows = given.collect(_enrolled(given).select(_id_and_base(given, base, source.name)))
    source.warn_of_odd_cells()
    design: BalanceDesign
    if whole:
        design = columns.design(given.collect(_enrolled(given)))
    else:
        design = Partitioned.of_terms(given, columns.terms, client=client)
    found = calibrated(
        design,
        columns.target,
        distance=distance,
        base=None if base is None else rows["base"].to_numpy(),
        population_size=population_size,
        slack=slack,
        se=columns.se,
    )
    found = replace(found, notes=columns.notes)
    return pl.DataFrame({ID: rows[ID], "weight": found.weights}), found


def _enrolled(table: Table) -> pl.LazyFrame:
    return table.scan().filter(ENROLLED) if ENROLLED in table.schema else table.scan()


def _id_and_base(table: Table, base: str | None, name: str) -> list[pl.Expr]:
    """Return the identifier and, where a column of them is named, the base weight."""
    if base is None:
        return [pl.col(ID)]
    if base not in table.schema:
        raise InputError(f"No base weight column {base!r}; the table has {some(table.schema)}.")
    kind = table.schema[base]
    if not kind.is_numeric():
        odd = odd_number(table.collect(table.scan().select(base))[base])
        raise InputError(f"{name}: base weights: {odd}.")
    return [pl.col(ID), pl.col(base).cast(pl.Float64).fill_null(np.nan).alias("base")]


class _Others(Term):
    """Whether a row has none of some levels of a category, which are its factors."""

    __slots__ = ()

    def expression(self, schema: pl.Schema) -> pl.Expr:
        inside = pl.sum_horizontal(factor.expression(schema) for factor in self.factors)
        return (1.0 - inside).alias(self.name)


class _TargetColumns(NamedTuple):
    """The columns that targets are about, with what they must average to."""

    terms: tuple[Term, ...]
    target: FloatArray  # (q,)
    se: FloatArray | None  # (q,)
    categories: tuple[int, ...]  # numbers of levels in turn; empty unless all terms are levels
    notes: tuple[str, ...]  # what was done to the targets

    def design(self, frame: pl.DataFrame) -> BalanceDesign:
        """Return the columns in memory; of levels ``Margins``, for which no matrix is built."""
        names = tuple(term.name for term in self.terms)
        if not self.categories:
            return Dense(term_matrix(self.terms, frame), names)
        codes = np.empty((frame.height, len(self.categories)), dtype=np.int32)
        levels, first = [], 0
        for v, size in enumerate(self.categories):
            for k, term in enumerate(self.terms[first : first + size]):
                codes[term.values(frame) == 1.0, v] = k
            levels.append(names[first : first + size])
            first += size
        return Margins(codes, tuple(levels))


def _target_columns(table: Table, targets: Targets) -> _TargetColumns:
    """Return the columns of targets; what the levels of a category leave over is one more level.

    That is so only where all targets are levels.
    """
    terms = [term_of(name, table.schema) for name in targets.names]
    _require_known(terms, table)
    targets = targets.on(terms, table.schema, _levels(terms, table)).required()
    if any(term.level is None for term in terms):
        return _TargetColumns(tuple(terms), targets.values, targets.se, (), targets.notes)
    groups: dict[str, list[int]] = {}
    for j, term in enumerate(terms):
        groups.setdefault(term.factors[0].column, []).append(j)
    others = [
        _Others(f"{column}[{OTHERS}]", tuple(terms[j].factors[0] for j in members))
        for column, members in groups.items()
    ]
    most = table.collect(
        _enrolled(table).select(other.expression(table.schema).max() for other in others)
    )
    columns: list[Term] = []
    target, errors, sizes = [], [], []
    se = np.zeros(len(terms)) if targets.se is None else targets.se
    for other, found, members in zip(others, most.row(0), groups.values(), strict=True):
        columns += [terms[j] for j in members]
        target += targets.values[members].tolist()
        errors += se[members].tolist()
        rest = 1.0 - sum(targets.values[members].tolist())
        more = found == 1.0 or rest > _REST
        if more:
            columns.append(other)
            target.append(max(0.0, rest))
            errors.append(float(np.linalg.norm(se[members])))
        sizes.append(len(members) + more)
    return _TargetColumns(
        tuple(columns),
        np.array(target),
        None if targets.se is None else np.array(errors),
        tuple(sizes),
        targets.notes,
    )


def _levels(terms: list[Term], table: Table) -> dict[str, tuple[str, ...]]:
    """Return the levels that enrolled rows have of the columns of which a level is a target."""
    columns = dict.fromkeys(term.level[0] for term in terms if term.level is not None)
    query = _enrolled(table)
    return {c: sorted_levels(table.collect(query.select(pl.col(c).unique()))[c]) for c in columns}


def _require_known(terms: list[Term], table: Table) -> None:
    """Raise where a column of a target has missing values: a row without a level is in no share."""
    used = {factor.column: term for term in terms for factor in term.factors}
    for column, term in used.items():
        if column in {ID, ENROLLED}:
            raise InputError(f"{term.name}: {column!r} is no covariate.")
    counts = [pl.len().alias("rows"), pl.col(used).null_count().name.prefix("missing ")]
    rows, *missing = table.collect(_enrolled(table).select(counts)).row(0)
    for (column, term), count in zip(used.items(), missing, strict=True):
        if count:
            raise InputError(
                f"{column!r} is missing in {count} of {rows} enrolled rows, and {term.name} is a "
                "target. Fill it, for instance with a level of its own, or drop the rows."
            )
