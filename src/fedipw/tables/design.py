"""Designs: a formula bound to a table, and the columns it makes of that table or another.

Binding reads of the table what the columns need: kinds, levels of categories, missing values and
medians.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import polars as pl
from pydantic import TypeAdapter, ValidationError

from fedipw.errors import InputError
from fedipw.numerics.checks import LARGEST, SMALLEST, check_magnitude, shown, some
from fedipw.tables.formula import (
    MISSING,
    OTHER,
    Clause,
    Factor,
    Part,
    Term,
    formula_clauses,
    is_category,
    is_number,
    level_factors,
    level_text,
    near,
    number_factors,
    number_text,
    product_terms,
    sorted_levels,
)
from fedipw.tables.table import reading

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray

LEVELS_MAX = 500  # of one category
_CODED = "\0levels"  # marks the coded copy of a category's column
_COLUMN, _LEVEL = "\0column", "\0level"  # names no column of a table has
_TYPES = {"number": pl.Float64, "flag": pl.Boolean, "category": pl.String}
_AT_ONCE = 32  # derived columns worked out together
_AS_THEY_ARE = {pl.Float64, pl.Float32, pl.Int64, pl.Int32, pl.Boolean}


class Missing(Enum):
    """What becomes of missing values, and of levels that were not there at binding.

    ``ERROR`` refuses them. ``INDICATOR`` fills numbers with the median and adds a column that marks
    them; a category gets a level of its own. ``DROP`` leaves the rows out.
    """

    ERROR = "error"
    INDICATOR = "indicator"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DesignRows:
    """What a design makes of a table."""

    columns: FloatArray  # (q, m), one row for each column of the design
    kept: BoolArray | None  # which rows of the table those are, all of them if None
    missing: Mapping[str, int]  # rows taken as missing, by column
    unseen: Mapping[str, tuple[str, ...]]  # levels the design does not know, by column

    @property
    def known(self) -> BoolArray:
        """Which rows of the table these are."""
        everything = np.ones(self.columns.shape[1], dtype=np.bool_)
        return everything if self.kept is None else self.kept

    def matrix(self) -> FloatArray:
        """Return the columns of all rows of the table, (n, q); 0 where a row was left out."""
        out = np.zeros((len(self.known), len(self.columns)))
        out[self.known] = self.columns.T
        return out


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
        try:
            return self._rows(frame, where)
        except (pl.exceptions.PolarsError, ArithmeticError, LookupError) as error:
            reason = str(error).split("\n", maxsplit=1)[0]
            raise InputError(
                f"{where} does not fit the design it is coded by ({reason}): the design was bound "
                "to another table, or is damaged."
            ) from error

    def _rows(self, frame: pl.DataFrame, where: str) -> DesignRows:
        numbers = _number_columns(self)
        table: dict[str, pl.Series] = {}
        gone: dict[str, pl.Series] = {}  # where a column is taken as missing
        unseen: dict[str, tuple[str, ...]] = {}
        for column, kind in self.kinds.items():
            series = table[column] = _known_series(frame, column, kind, where)
            lost = _missing_rows(series, where)
            if column in self.levels:
                codes, lost, strange = _codes(self, series, lost, where)
                table[column + _CODED] = codes
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
        plain: dict[str, Any] = _adapter().dump_python(self, mode="json", exclude_defaults=True)
        return plain

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Design:
        """Return the design that :meth:`to_json` wrote."""
        try:
            return _adapter().validate_python(saved)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "design"
            raise InputError(
                f"This is no design as written by to_json: {where}: {first['msg']}."
            ) from error


@cache
def _adapter() -> TypeAdapter[Design]:
    return TypeAdapter(Design)


def bound_design(  # noqa: PLR0913
    formula: str,
    table: pl.LazyFrame,
    covariates: Sequence[str],
    *,
    more: Sequence[str] = (),
    missing: Missing = Missing.ERROR,
    lump_below: float | None = None,
    levels: Mapping[str, Sequence[str]] | None = None,
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
    levels
        Levels of text columns that may occur later, beside those of the table.
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
    kinds = {part.column: _column_kind(part.column, schema, where) for part in parts}
    if checked or missing is Missing.INDICATOR:
        facts = _table_facts(table, parts, where)
        _check_facts(facts, missing)
    else:
        coded = [part for part in parts if _is_coded(part, schema[part.column])]
        facts = _table_facts(table, coded, where)
    facts = _with_levels(facts, levels or {}, schema)
    known = {column: _known_levels(column, facts, missing, lump_below) for column in facts.levels}
    design = Design(
        formula=formula,
        terms=(),
        levels={column: levels for column, (levels, _) in known.items()},
        fills=_medians(table, facts) if missing is Missing.INDICATOR else {},
        lumped={column: rare for column, (_, rare) in known.items() if rare},
        missing=missing,
        kinds=kinds,
    )
    terms = product_terms(clauses, lambda part: _factors(design, part, schema))
    return replace(design, terms=(*terms, *_indicators(terms, design.fills)))


def used_parts(clauses: Sequence[Clause], formula: str) -> tuple[Part, ...]:
    """Return the parts of products that are not taken away again."""
    kept: dict[frozenset[tuple[Part, int]], tuple[Part, ...]] = {}
    for clause in clauses:
        products = {frozenset(Counter(parts).items()): parts for parts in clause.products}
        if clause.adds:
            kept |= products
            continue
        known = {part.column for parts in kept.values() for part in parts}
        named = {part.column for parts in products.values() for part in parts}
        if not products.keys() & kept.keys() and not named <= known:
            raise InputError(
                f"Formula {shown(formula)} takes away {clause.text!r}, which it has not."
            )
        kept = {key: parts for key, parts in kept.items() if key not in products}
    if not kept:
        raise InputError(f"Formula {shown(formula)} has no terms.")
    return tuple(part for parts in kept.values() for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What binding asks of a table."""

    where: str  # its name in errors
    height: int = 0
    complete: int = 0  # rows with nothing missing
    missing: Mapping[str, int] = field(default_factory=dict)  # by column whose values are used
    infinite: Mapping[str, int] = field(default_factory=dict)
    levels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # rows of each, in order
    numbers: tuple[str, ...] = ()  # columns whose numbers are used

    def listed(self, counts: Mapping[str, int]) -> str:
        """Return columns with how many of the rows they concern, for people."""
        return some(f"{c!r} ({n} of {self.height} rows)" for c, n in counts.items())


def _table_facts(table: pl.LazyFrame, parts: Sequence[Part], where: str) -> _Facts:
    """Return what is asked of the columns of some parts, in one go over the table."""
    if not parts:
        return _Facts(where=where)
    schema = table.collect_schema()
    coded = _columns(p for p in parts if _is_coded(p, schema[p.column]))
    marks = {p for p in parts if p.level == "missing" and is_number(schema[p.column])}
    numbers = _columns(p for p in parts if not _is_coded(p, schema[p.column]) and p not in marks)
    used = _columns(p for p in parts if p not in marks)
    lost = [Factor(c, missing=True).expression(schema) > 0.0 for c in used]
    sums = table.select(
        pl.len().alias("rows"),
        (~pl.any_horizontal(lost)).sum().alias("complete") if lost else pl.len().alias("complete"),
        *(x.sum().alias(f"missing {c}") for c, x in zip(used, lost, strict=True)),
        *(
            pl.col(c).is_infinite().sum().alias(f"infinite {c}")
            for c in _columns(parts)
            if schema[c].is_float()
        ),
    )
    with reading(where):
        found, *counts = pl.collect_all([sums, *_counts(table, coded, schema)], engine="streaming")
    row = found.row(0, named=True)
    return _Facts(
        where=where,
        height=row["rows"],
        complete=row["complete"],
        missing={c: row[f"missing {c}"] for c in used},
        infinite={c: row[f"infinite {c}"] for c in schema if row.get(f"infinite {c}")},
        levels=_levels(coded, counts),
        numbers=numbers,
    )


def _columns(parts: Iterable[Part]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.column for part in parts))


def _is_coded(part: Part, kind: pl.DataType) -> bool:
    """Return whether a part needs the levels of its column."""
    return is_category(part, kind) or (part.level is not None and not is_number(kind))


def _counts(table: pl.LazyFrame, coded: Sequence[str], schema: pl.Schema) -> list[pl.LazyFrame]:
    """Return rows by column and level, apart for numbers and for text: two scans, not one each."""
    numbers = [c for c in coded if schema[c].is_numeric()]
    texts = [c for c in coded if c not in numbers]
    kinds = (
        (numbers, pl.col(numbers).cast(pl.Float64).fill_nan(None)),
        (texts, pl.col(texts).cast(pl.String)),
    )
    return [
        table.select(levels)
        .unpivot(on=columns, variable_name=_COLUMN, value_name=_LEVEL)
        .group_by(_COLUMN, _LEVEL)
        .len()
        for columns, levels in kinds
        if columns
    ]


def _levels(coded: Sequence[str], counts: Sequence[pl.DataFrame]) -> dict[str, dict[str, int]]:
    """Return the rows of each level by column, levels in order."""
    levels: dict[str, dict[str, int]] = {column: {} for column in coded}
    for frame in counts:
        for column, level, rows in frame.drop_nulls(_LEVEL).sort(_LEVEL).iter_rows():
            name = number_text(level) if isinstance(level, float) else level
            levels[column][name] = levels[column].get(name, 0) + rows
    return levels


def _check_facts(facts: _Facts, missing: Missing) -> None:
    """Raise if a table cannot be bound: no rows, infinite values, or missing ones not allowed."""
    where = facts.where
    if facts.height == 0:
        raise InputError(f"{where} has no rows.")
    if facts.infinite:
        raise InputError(
            f"{where}: infinite values in {facts.listed(facts.infinite)}. Correct them or drop the "
            "rows."
        )
    empty = [column for column, n in facts.missing.items() if n == facts.height]
    if empty:
        raise InputError(
            f"{where}: every row of {some(map(repr, empty))} is missing. Leave the column out."
        )
    lost = {column: n for column, n in facts.missing.items() if n}
    if lost and missing is Missing.ERROR:
        raise InputError(
            f"{where}: missing values in {facts.listed(lost)}. Choose Missing.INDICATOR to mark "
            "them or Missing.DROP to leave such rows out, or fill them in the table."
        )
    if missing is Missing.DROP and not facts.complete:
        raise InputError(
            f"{where}: every row has a missing value: {facts.listed(lost)}. Leave a column out of "
            "the formula, or choose Missing.INDICATOR."
        )


def _with_levels(facts: _Facts, more: Mapping[str, Sequence[str]], schema: pl.Schema) -> _Facts:
    """Return facts with levels that may occur, of the text columns among them, in order."""
    added = {c: v for c, v in more.items() if c in facts.levels and not schema[c].is_numeric()}
    if not added:
        return facts
    whole = {
        column: {level: counts.get(level, 0) for level in sorted({*counts, *added.get(column, ())})}
        for column, counts in facts.levels.items()
    }
    return replace(facts, levels={**facts.levels, **{c: whole[c] for c in added}})


def _known_levels(
    column: str, facts: _Facts, missing: Missing, lump_below: float | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a category's levels, special ones last, and those merged into ``(other)``."""
    counts = facts.levels[column]
    least = 0.0 if lump_below is None else lump_below * sum(counts.values())
    rare = [level for level, rows in counts.items() if rows < least]
    own = missing is Missing.INDICATOR and facts.missing[column] > 0
    special = [OTHER] * bool(rare) + [MISSING] * own
    merged = {*rare, *special}
    levels = (*(level for level in counts if level not in merged), *special)
    if len(levels) > LEVELS_MAX:
        raise InputError(
            f"{facts.where}: {column!r} has {len(levels)} levels ({some(levels)}), more than "
            f"{LEVELS_MAX}. Merge rare ones (lump_below), or leave the column out."
        )
    return levels, tuple(rare)


def _medians(table: pl.LazyFrame, facts: _Facts) -> dict[str, float]:
    """Return the medians of numbers that have missing values."""
    columns = [c for c in facts.numbers if facts.missing[c]]
    if not columns:
        return {}
    query = table.select(pl.col(c).cast(pl.Float64).fill_nan(None).median() for c in columns)
    with reading(facts.where):
        found = query.collect(engine="streaming")
    return {c: float(v) for c, v in found.row(0, named=True).items()}


def _column_kind(column: str, schema: pl.Schema, where: str) -> str:
    """Return ``number``, ``flag`` or ``category``."""
    if column not in schema:
        raise InputError(f"{where} has no column {column!r}{near(column, schema.names())}")
    return _kind_of(column, schema[column], where)


def _kind_of(column: str, kind: pl.DataType, where: str) -> str:
    if kind == pl.Boolean:
        return "flag"
    if kind.is_numeric():
        return "number"
    if kind == pl.Null:
        raise InputError(f"{where}: every row of {column!r} is missing. Leave the column out.")
    if kind not in (pl.String, pl.Categorical, pl.Enum):
        raise InputError(
            f"{where}: {column!r} holds {kind}, neither numbers nor text. Turn it into one, such "
            "as days since a date, or leave it out."
        )
    return "category"


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


def _known_series(frame: pl.DataFrame, column: str, kind: str, where: str) -> pl.Series:
    """Return a column of a later table, of the kind it was."""
    # a schema of thousands of columns takes long to make
    series: pl.Series | None = frame.get_column(column, default=None)
    if series is None:
        raise InputError(f"{where} has no column {column!r}{near(column, frame.columns)}")
    if series.null_count() == len(series):  # any type can hold nothing
        return pl.Series(column, [None], dtype=_TYPES[kind]).new_from_index(0, len(series))
    now = _kind_of(column, series.dtype, where)
    if now != kind:
        raise InputError(
            f"{where}: {column!r} holds {series.dtype} (a {now}), but was a {kind} when the design "
            "was bound. Give it the type it had, or bind the design anew."
        )
    return series


def _missing_rows(series: pl.Series, where: str) -> pl.Series | None:
    """Return where a column is missing, None if nowhere; infinite values are an error."""
    if not series.dtype.is_float():
        return series.is_null() if series.null_count() else None
    largest = _largest(series)
    if series.null_count() == 0 and (SMALLEST <= largest <= LARGEST or largest == 0.0):
        return None
    infinite = series.is_infinite().fill_null(value=False)
    if infinite.any():
        raise InputError(
            f"{where}: {series.name!r} is infinite in {infinite.sum()} of {len(series)} rows, "
            f"first in row {infinite.arg_max()}. Correct them or drop the rows."
        )
    check_magnitude(series.fill_null(np.nan).to_numpy(), repr(series.name), where)
    lost = series.is_null() | series.is_nan().fill_null(value=False)
    return lost if lost.any() else None


def _largest(series: pl.Series) -> float:
    """Return the largest absolute value of a column of floats; NaN if one is NaN."""
    values = series.to_numpy() if series.null_count() == 0 else np.empty(0)
    return max(float(values.max()), -float(values.min())) if values.size else math.nan


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
    derived, coded = [], _coded_columns(design.levels, table)
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
            _check_range(out[j], design.terms[j].name, where)
    return out


def _coded_columns(
    levels: Iterable[str], table: pl.DataFrame
) -> dict[tuple[str, str | None], tuple[np.ndarray, int]]:
    """Return the codes of each category's column, and the code of each of its levels."""
    found: dict[tuple[str, str | None], tuple[np.ndarray, int]] = {}
    for column in levels:
        series = table[column + _CODED] if column + _CODED in table.columns else None
        if series is None or series.null_count() or not isinstance(series.dtype, pl.Enum):
            continue
        codes = series.to_physical().to_numpy()
        for code, level in enumerate(series.dtype.categories.to_list()):
            found[column, level] = codes, code
    return found


def _coded_term(term: Term, levels: Mapping[str, Sequence[str]]) -> Term:
    """Return a term that reads levels from the coded copies of columns."""
    return Term(
        term.name,
        tuple(
            f if f.level is None or f.column not in levels else replace(f, column=f.column + _CODED)
            for f in term.factors
        ),
    )


def _check_range(values: FloatArray, name: str, where: str) -> None:
    """Raise if a column of a design overflows."""
    bad = ~(np.abs(values) <= LARGEST)
    if bad.any():
        raise InputError(
            f"{where}: {name} is beyond the range of numbers in {bad.sum()} of {len(bad)} rows. "
            "Scale the column down or use a lower power."
        )


def _number_columns(design: Design) -> frozenset[str]:
    """Return the columns whose numbers are used, not only their levels."""
    factors = (factor for term in design.terms for factor in term.factors)
    return frozenset(
        f.column
        for f in factors
        if f.is_number or (f.level is not None and f.column not in design.levels)
    )
