"""What a design must know of a table before it is bound: kinds, levels, missing values, medians."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.formula import Clause, Part, near
from fedipw.tables.terms import MISSING, OTHER, Factor, is_category, is_number, number_text

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray

LEVELS_MAX = 500  # of one category
CODED = "\0levels"  # marks the coded copy of a category's column
_COLUMN, _LEVEL = "\0column", "\0level"  # names no column of a table has
_TYPES = {"number": pl.Float64, "flag": pl.Boolean, "category": pl.String}


class Missing(Enum):
    """What becomes of missing values, and of levels that were not there at binding.

    ``ERROR`` refuses them. ``INDICATOR`` fills numbers with the median and adds a column that marks
    them; a category gets a level of its own. ``DROP`` leaves the rows out.
    """

    ERROR = "error"
    INDICATOR = "indicator"
    DROP = "drop"


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
            raise InputError(f"Formula {formula!r} takes away {clause.text!r}, which it has not.")
        kept = {key: parts for key, parts in kept.items() if key not in products}
    if not kept:
        raise InputError(f"Formula {formula!r} has no terms.")
    return tuple(part for parts in kept.values() for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What binding asks of a table."""

    where: str  # its name in errors
    height: int
    complete: int  # rows with nothing missing
    missing: Mapping[str, int]  # by column whose values are used
    infinite: Mapping[str, int]
    levels: Mapping[str, Mapping[str, int]]  # rows of each level, levels in order
    numbers: tuple[str, ...]  # columns whose numbers are used


def table_facts(table: pl.LazyFrame, parts: Sequence[Part], where: str) -> Facts:
    """Return what is asked of the columns of some parts, in one go over the table."""
    if not parts:
        return Facts(
            where=where, height=0, complete=0, missing={}, infinite={}, levels={}, numbers=()
        )
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
    found, *counts = pl.collect_all([sums, *_counts(table, coded, schema)], engine="streaming")
    row = found.row(0, named=True)
    return Facts(
        where=where,
        height=row["rows"],
        complete=row["complete"],
        missing={c: row[f"missing {c}"] for c in used},
        infinite={c: row[f"infinite {c}"] for c in schema if row.get(f"infinite {c}")},
        levels=_levels(coded, counts),
        numbers=numbers,
    )


def coded_parts(parts: Sequence[Part], schema: pl.Schema) -> tuple[Part, ...]:
    """Return the parts whose columns must be read for their levels."""
    return tuple(part for part in parts if _is_coded(part, schema[part.column]))


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


def known_levels(
    column: str, facts: Facts, missing: Missing, lump_below: float | None
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


def medians(table: pl.LazyFrame, facts: Facts) -> dict[str, float]:
    """Return the medians of numbers that have missing values."""
    columns = [c for c in facts.numbers if facts.missing[c]]
    if not columns:
        return {}
    found = table.select(pl.col(c).cast(pl.Float64).fill_nan(None).median() for c in columns)
    return {c: float(v) for c, v in found.collect(engine="streaming").row(0, named=True).items()}


def column_kind(column: str, schema: pl.Schema, where: str) -> str:
    """Return ``number``, ``flag`` or ``category``."""
    if column not in schema:
        raise InputError(f"{where} has no column {column!r}{near(column, schema.names())}")
    kind = schema[column]
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


def check_facts(facts: Facts, missing: Missing) -> None:
    """Raise if a table cannot be bound: no rows, infinite values, or missing ones not allowed."""
    where = facts.where
    if facts.height == 0:
        raise InputError(f"{where} has no rows.")
    if facts.infinite:
        listed = some(f"{c!r} ({n} of {facts.height} rows)" for c, n in facts.infinite.items())
        raise InputError(f"{where}: infinite values in {listed}. Correct them or drop the rows.")
    empty = [column for column, n in facts.missing.items() if n == facts.height]
    if empty:
        raise InputError(
            f"{where}: every row of {some(map(repr, empty))} is missing. Leave the column out."
        )
    lost = {column: n for column, n in facts.missing.items() if n}
    if lost and missing is Missing.ERROR:
        listed = some(f"{c!r} ({n} of {facts.height} rows)" for c, n in lost.items())
        raise InputError(
            f"{where}: missing values in {listed}. Choose Missing.INDICATOR to mark them or "
            "Missing.DROP to leave such rows out, or fill them in the table."
        )
    if missing is Missing.DROP and not facts.complete:
        listed = some(f"{c!r} ({n} of {facts.height} rows)" for c, n in lost.items())
        raise InputError(
            f"{where}: every row has a missing value: {listed}. Leave a column out of the formula, "
            "or choose Missing.INDICATOR."
        )


def known_series(frame: pl.DataFrame, column: str, kind: str, where: str) -> pl.Series:
    """Return a column of a later table, of the kind it was."""
    if column not in frame.columns:
        raise InputError(f"{where} has no column {column!r}{near(column, frame.columns)}")
    series = frame[column]
    if series.null_count() == len(series):  # any type can hold nothing
        return pl.Series(column, [None], dtype=_TYPES[kind]).new_from_index(0, len(series))
    now = column_kind(column, frame.schema, where)
    if now != kind:
        raise InputError(
            f"{where}: {column!r} holds {series.dtype} (a {now}), but was a {kind} when the design "
            "was bound. Give it the type it had, or bind the design anew."
        )
    return series


def missing_rows(series: pl.Series, where: str) -> pl.Series | None:
    """Return where a column is missing, None if nowhere; infinite values are an error."""
    if not series.dtype.is_float():
        return series.is_null() if series.null_count() else None
    if series.null_count() == 0 and math.isfinite(series.sum()):
        return None  # the sum of a column with NaN or infinite values is neither
    infinite = series.is_infinite().fill_null(value=False)
    if infinite.any():
        raise InputError(
            f"{where}: {series.name!r} is infinite in {infinite.sum()} of {len(series)} rows, "
            f"first in row {infinite.arg_max()}. Correct them or drop the rows."
        )
    lost = series.is_null() | series.is_nan().fill_null(value=False)
    return lost if lost.any() else None


def coded_columns(
    levels: Iterable[str], table: pl.DataFrame
) -> dict[tuple[str, str | None], tuple[np.ndarray, int]]:
    """Return the codes of each category's column, and the code of each of its levels."""
    found: dict[tuple[str, str | None], tuple[np.ndarray, int]] = {}
    for column in levels:
        series = table[column + CODED] if column + CODED in table.columns else None
        if series is None or series.null_count() or not isinstance(series.dtype, pl.Enum):
            continue
        codes = series.to_physical().to_numpy()
        for code, level in enumerate(series.dtype.categories.to_list()):
            found[column, level] = codes, code
    return found


def check_range(values: FloatArray, name: str, where: str) -> None:
    """Raise if a column of a design overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = ~np.isfinite(values)
    if bad.any():
        raise InputError(
            f"{where}: {name} is beyond the range of numbers in {bad.sum()} of {len(bad)} rows. "
            "Scale the column down or use a lower power."
        )
