"""Designs: a formula bound to a table, and the columns it makes of that table or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.facts import (
    CODED,
    Missing,
    check_facts,
    check_range,
    coded_columns,
    coded_parts,
    column_kind,
    known_levels,
    known_series,
    medians,
    missing_rows,
    table_facts,
    used_parts,
)
from fedipw.tables.formula import Part, formula_clauses, near
from fedipw.tables.terms import (
    MISSING,
    OTHER,
    Factor,
    Term,
    is_category,
    level_factors,
    level_text,
    number_factors,
    product_terms,
    sorted_levels,
)

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray

__all__ = ["Design", "DesignRows", "Missing", "bound_design"]

_AT_ONCE = 32  # derived columns worked out together
_AS_THEY_ARE = {pl.Float64, pl.Float32, pl.Int64, pl.Int32, pl.Boolean}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DesignRows:
    """What a design makes of a table."""

    columns: FloatArray  # (q, m), one row for each column of the design
    kept: BoolArray | None  # which rows of the table those are, all of them if None
    missing: Mapping[str, int]  # rows taken as missing, by column
    unseen: Mapping[str, tuple[str, ...]]  # levels the design does not know, by column


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The columns of a model, with everything they need to know of the table they were bound to.

    Examples
    --------
    >>> people = pl.DataFrame({"age": [20.0, 40.0, 60.0], "os": ["ios", "android", "ios"]})
    >>> design = bound_design("age*os", people.lazy(), ["age", "os"])
    >>> design.names
    ('age', 'os[ios]', 'age:os[ios]')
    >>> design.rows(people, "people").columns
    array([[20., 40., 60.],
           [ 1.,  0.,  1.],
           [20.,  0., 60.]])
    """

    formula: str
    terms: tuple[Term, ...]  # (q,), without the constant
    levels: Mapping[str, tuple[str, ...]]  # of each category; the first is the reference
    fills: Mapping[str, float]  # medians of numbers with missing values
    lumped: Mapping[str, tuple[str, ...]]  # rare levels merged into "(other)"
    missing: Missing
    kinds: Mapping[str, str]  # "number", "flag" or "category" of each column needed

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, (q,)."""
        return tuple(term.name for term in self.terms)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns a table must have."""
        return tuple(self.kinds)

    def rows(self, frame: pl.DataFrame, where: str) -> DesignRows:
        """Return the columns of a table's rows; ``where`` names the table in errors."""
        numbers = _number_columns(self)
        table: dict[str, pl.Series] = {}
        gone: dict[str, pl.Series] = {}  # where a column is taken as missing
        unseen: dict[str, tuple[str, ...]] = {}
        for column, kind in self.kinds.items():
            series = table[column] = known_series(frame, column, kind, where)
            lost = missing_rows(series, where)
            if column in self.levels:
                codes, lost, strange = _codes(self, series, lost, where)
                table[column + CODED] = codes
                unseen |= {column: strange} if strange else {}
            elif column not in numbers:
                continue  # only asked whether it is missing
            if lost is not None:
                gone[column] = lost
                _check_missing(self, column, lost, is_number=column in numbers, where=where)
        kept = None
        if self.missing is Missing.DROP and gone:
            kept = ~np.logical_or.reduce([lost.to_numpy() for lost in gone.values()])
        return DesignRows(
            columns=_values(self, table, kept, where),
            kept=kept,
            missing={column: int(lost.sum()) for column, lost in gone.items()},
            unseen=unseen,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the design as plain JSON types."""
        return {
            "formula": self.formula,
            "terms": [
                {"name": term.name, "factors": [_factor_json(f) for f in term.factors]}
                for term in self.terms
            ],
            "levels": {column: list(levels) for column, levels in self.levels.items()},
            "fills": dict(self.fills),
            "lumped": {column: list(levels) for column, levels in self.lumped.items()},
            "missing": self.missing.value,
            "kinds": dict(self.kinds),
        }

    @classmethod
    def from_json(cls, d: Mapping[str, Any]) -> Self:
        """Return the design that :meth:`to_json` wrote."""
        try:
            return cls(
                formula=d["formula"],
                terms=tuple(
                    Term(t["name"], tuple(_factor_of(f) for f in t["factors"])) for t in d["terms"]
                ),
                levels={column: tuple(levels) for column, levels in d["levels"].items()},
                fills={column: float(value) for column, value in d["fills"].items()},
                lumped={column: tuple(levels) for column, levels in d["lumped"].items()},
                missing=Missing(d["missing"]),
                kinds=dict(d["kinds"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"This is no design as written by to_json: {error!r}.") from error


def bound_design(
    formula: str,
    table: pl.LazyFrame,
    covariates: Sequence[str],
    *,
    more: Sequence[str] = (),
    missing: Missing = Missing.ERROR,
    lump_below: float | None = None,
    where: str = "table",
    checked: bool = True,
) -> Design:
    """Return the design of a formula on a table: its levels, medians and columns.

    Parameters
    ----------
    formula
        See :mod:`fedipw.tables.formula`.
    table
        Read in a few passes, however many columns there are; never held in memory as a whole.
    covariates
        What ``.`` stands for, and the only columns that may be named, besides ``more``.
    more
        Columns that may be named but are not meant by ``.``.
    missing
        What becomes of missing values and unknown levels, here and in every later table.
    lump_below
        Levels with a smaller share of the rows that have one are merged into ``(other)``, which
        also takes levels unknown at binding.
    where
        The table's name in errors.
    checked
        Whether to look for missing and infinite numbers now. Without it columns of numbers are not
        read where no median is needed; ``rows`` finds what is wrong later.

    Examples
    --------
    >>> people = pl.LazyFrame({"age": [20.0, None, 60.0, 30.0], "os": ["a", "b", None, "a"]})
    >>> bound_design("age + os", people, ["age", "os"], missing=Missing.INDICATOR).names
    ('age', 'os[b]', 'os[(missing)]', 'age[missing]')
    """
    if lump_below is not None and not 0.0 < lump_below < 1.0:
        raise InputError(f"lump_below must be a share between 0 and 1, not {lump_below!r}.")
    schema = table.collect_schema()
    clauses = formula_clauses(formula, covariates, schema.names(), more)
    parts = used_parts(clauses, formula)
    kinds = {part.column: column_kind(part.column, schema, where) for part in parts}
    if checked or missing is Missing.INDICATOR:
        facts = table_facts(table, parts, where)
        check_facts(facts, missing)
    else:
        facts = table_facts(table, coded_parts(parts, schema), where)
    known = {column: known_levels(column, facts, missing, lump_below) for column in facts.levels}
    design = Design(
        formula=formula,
        terms=(),
        levels={column: levels for column, (levels, _) in known.items()},
        fills=medians(table, facts) if missing is Missing.INDICATOR else {},
        lumped={column: rare for column, (_, rare) in known.items() if rare},
        missing=missing,
        kinds=kinds,
    )
    terms = product_terms(clauses, lambda part: _factors(design, part, schema))
    return replace(design, terms=(*terms, *_indicators(terms, design.fills)))


def _factors(design: Design, part: Part, schema: pl.Schema) -> tuple[Factor, ...]:
    """Return the factors of a part; none of a column that is taken away again."""
    column = part.column
    if column not in design.kinds:
        return ()
    kind, levels = schema[column], design.levels.get(column, ())
    own = 0.0 if MISSING in levels or column in design.fills else None
    if is_category(part, kind):
        return tuple(replace(f, fill=own) for f in level_factors(column, levels))
    factors = number_factors(part, kind)
    if part.level is None:
        return tuple(replace(f, fill=design.fills.get(column)) for f in factors)
    if factors[0].missing:
        return factors
    level = level_text(part.level, kind, column)
    if column in design.levels and level not in levels:
        merged = level in design.lumped.get(column, ())
        why = f"merged into {OTHER}." if merged else f"not in the table{near(level, levels)}"
        raise InputError(f"{column}[{level}]: this level is {why} Levels: {some(levels)}.")
    return (replace(factors[0], level=level, fill=own),)


def _indicators(terms: Sequence[Term], fills: Mapping[str, float]) -> list[Term]:
    """Return a column for each number that marks where it is missing, unless there is one."""
    has = {term.factors[0] for term in terms if len(term.factors) == 1}
    marks = []
    for column in fills:
        mark = Factor(column, missing=True)
        if mark not in has and Factor(column, level=MISSING, fill=0.0) not in has:
            marks.append(Term(mark.name, (mark,)))
    return marks


def _codes(
    design: Design, series: pl.Series, lost: pl.Series | None, where: str
) -> tuple[pl.Series, pl.Series | None, tuple[str, ...]]:
    """Return a category's levels, where it is taken as missing, and the levels not known."""
    column, levels = series.name, design.levels[series.name]
    codes = _level_codes(series, levels)
    own = design.missing is Missing.INDICATOR and MISSING in levels
    strange: tuple[str, ...] = ()
    if codes.null_count() > (0 if lost is None else int(lost.sum())):
        odd = codes.is_null() if lost is None else codes.is_null() & ~lost
        merged = design.lumped.get(column, ())
        strange = tuple(x for x in sorted_levels(series.filter(odd)) if x not in merged)
        if merged:
            other = pl.lit(OTHER, dtype=codes.dtype)
            codes = pl.select(pl.when(odd).then(other).otherwise(codes).alias(column)).to_series()
        elif own or design.missing is Missing.DROP:
            lost = codes.is_null()
        else:
            _fail_unseen(design, column, strange, int(odd.sum()), where)
    return codes.fill_null(MISSING) if own else codes, lost, strange


def _level_codes(series: pl.Series, levels: Sequence[str]) -> pl.Series:
    """Return levels as an enumeration, null where a row has none of them."""
    kind = pl.Enum(levels)
    if not series.dtype.is_numeric():
        return series.cast(pl.String).cast(kind, strict=False)
    names = [level for level in levels if level not in {OTHER, MISSING}]
    numbers = series.cast(pl.Float64).fill_nan(None)
    if not names:
        return pl.Series(series.name, [None], dtype=kind).new_from_index(0, len(series))
    values = [float(name) for name in names]
    return numbers.replace_strict(values, names, default=None, return_dtype=kind)


def _fail_unseen(
    design: Design, column: str, strange: Sequence[str], count: int, where: str
) -> NoReturn:
    advice = (
        "Choose Missing.DROP (--missing drop) to leave such rows out, or merge rare levels "
        "(lump_below, --lump-below), or bind the design to a table that has them."
    )
    if design.missing is Missing.INDICATOR:
        advice = f"No row was missing at binding, so there is no {MISSING} level either. {advice}"
    raise InputError(
        f"{where}: {column!r} has {len(strange)} level(s) in {count} rows that were not there when "
        f"the design was bound: {some(map(repr, strange))}. {advice}"
    )


def _check_missing(
    design: Design, column: str, lost: pl.Series, *, is_number: bool, where: str
) -> None:
    """Raise if missing values of a column cannot be dealt with as the design says."""
    known = MISSING in design.levels.get(column, (MISSING,)) and (
        column in design.fills or not is_number
    )
    if design.missing is Missing.DROP or (design.missing is Missing.INDICATOR and known):
        return
    rows = some(lost.arg_true().to_list())
    advice = (
        "Choose Missing.INDICATOR (--missing indicator) to mark them or Missing.DROP (--missing "
        "drop) to leave such rows out."
    )
    if design.missing is Missing.INDICATOR:
        advice = (
            "It had no missing values when the design was bound: fill these, or bind the design to "
            "a table that has some."
        )
    raise InputError(
        f"{where}: {column!r} is missing in {lost.sum()} of {len(lost)} rows (row {rows}). {advice}"
    )


def _values(
    design: Design, columns: Mapping[str, pl.Series], kept: BoolArray | None, where: str
) -> FloatArray:
    """Return the design's columns, (q, m); one that is a column as it stands costs one copy."""
    table = pl.DataFrame([series.alias(name) for name, series in columns.items()])
    table = table if kept is None else table.filter(pl.Series(kept))
    out = np.empty((len(design.terms), table.height))
    derived, coded = [], coded_columns(design.levels, table)
    for j, term in enumerate(design.terms):
        first = term.factors[0]
        if len(term.factors) == 1 and first.is_plain:
            series = table[first.column]
            direct = series if series.dtype in _AS_THEY_ARE else series.cast(pl.Float64)
            out[j] = direct.to_numpy()
        elif len(term.factors) == 1 and (first.column, first.level) in coded:
            codes, code = coded[first.column, first.level]
            np.equal(codes, code, out=out[j], casting="unsafe")
        else:
            derived.append(j)
    for start in range(0, len(derived), _AT_ONCE):
        chosen = derived[start : start + _AT_ONCE]
        terms = {str(j): _coded_term(design.terms[j], design.levels) for j in chosen}
        made = table.select(t.expression(table.schema).alias(name) for name, t in terms.items())
        for j in chosen:
            out[j] = made[str(j)].to_numpy()
            check_range(out[j], design.terms[j].name, where)
    return out


def _coded_term(term: Term, levels: Mapping[str, Sequence[str]]) -> Term:
    """Return a term that reads levels from the coded copies of columns."""
    return Term(
        term.name,
        tuple(
            f if f.level is None or f.column not in levels else replace(f, column=f.column + CODED)
            for f in term.factors
        ),
    )


def _number_columns(design: Design) -> frozenset[str]:
    """Return the columns whose numbers are used, not only their levels."""
    factors = (factor for term in design.terms for factor in term.factors)
    return frozenset(
        f.column
        for f in factors
        if f.is_number or (f.level is not None and f.column not in design.levels)
    )


def _factor_json(factor: Factor) -> dict[str, Any]:
    """Return the fields that are not as usual."""
    values = {f.name: getattr(factor, f.name) for f in fields(Factor)}
    plain = Factor(factor.column)
    out = {k: v for k, v in values.items() if k == "column" or v != getattr(plain, k)}
    return out | {"knots": list(factor.knots)} if factor.knots else out


def _factor_of(d: Mapping[str, Any]) -> Factor:
    knots = tuple(float(knot) for knot in d.get("knots", ()))
    others: dict[str, Any] = {name: value for name, value in d.items() if name != "knots"}
    return Factor(**others, knots=knots)
