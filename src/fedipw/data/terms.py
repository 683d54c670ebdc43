"""Terms of a table: columns, levels of categories, powers and products, by name.

A name is a column (``age``), one level of a category (``os[android]``), a power (``age**2``) or a
product of such (``age:os[android]``). A column whose own name looks like a term is that column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray

_LEVEL = re.compile(r"^(?P<column>[^\[\]]+)\[(?P<level>[^\[\]]*)\]$")
_POWER = re.compile(r"^(?P<column>.+?)\s*\*\*\s*(?P<power>\d+)$")
_YES, _NO = {"true", "1", "yes"}, {"false", "0", "no"}


@dataclass(frozen=True, slots=True)
class Factor:
    """A column, one of its levels, or a power of it."""

    column: str
    level: str | None = None
    power: int = 1

    def expression(self, schema: pl.Schema) -> pl.Expr:
        """Return its values as floats."""
        kind, column = schema[self.column], pl.col(self.column)
        if self.level is not None:
            return _is_level(column, kind, self.level, self.column).cast(pl.Float64)
        if not (kind.is_numeric() or kind == pl.Boolean):
            raise InputError(
                f"{self.column!r} holds {kind}, not numbers: name one of its levels, as in "
                f"{self.column}[level]."
            )
        number = column.cast(pl.Float64)
        return number if self.power == 1 else number.pow(self.power)


@dataclass(frozen=True, slots=True)
class Term:
    """A product of factors.

    >>> frame = pl.DataFrame({"age": [20.0, 40.0], "os": ["ios", "android"]})
    >>> term_of("age**2:os[android]", frame.schema).values(frame)
    array([   0., 1600.])
    """

    name: str
    factors: tuple[Factor, ...]

    def expression(self, schema: pl.Schema) -> pl.Expr:
        """Return its values as one expression over the table."""
        first, *others = (f.expression(schema) for f in self.factors)
        for other in others:
            first = first * other
        return first.alias(self.name)

    def values(self, frame: pl.DataFrame) -> FloatArray:
        """Return its values, (rows,); NaN where something is missing."""
        column = frame.select(self.expression(frame.schema)).to_series()
        return column.fill_null(np.nan).to_numpy()

    @property
    def level(self) -> tuple[str, str] | None:
        """The column and level, if the term is one level of a category."""
        first = self.factors[0]
        if len(self.factors) > 1 or first.level is None:
            return None
        return first.column, first.level


def term_of(name: str, schema: pl.Schema) -> Term:
    """Return the term a name stands for, or say which column it lacks."""
    if name in schema:
        return Term(name, (Factor(name),))
    return Term(name, tuple(_factor(part.strip(), name, schema) for part in name.split(":")))


def formula_terms(formula: str, frame: pl.DataFrame) -> tuple[Term, ...]:
    """Return the terms of ``a + b**2 + a:b``; a text column stands for its levels but the first.

    >>> frame = pl.DataFrame({"age": [20.0, 40.0], "os": ["ios", "android"]})
    >>> [term.name for term in formula_terms("age + age**2 + os", frame)]
    ['age', 'age**2', 'os[ios]']
    """
    terms: dict[str, Term] = {}
    for name in (part.strip() for part in formula.split("+")):
        if not name:
            raise InputError(f"The formula {formula!r} has an empty term.")
        for term in _expanded(name, frame):
            terms.setdefault(term.name, term)
    return tuple(terms.values())


def rich_terms(columns: Sequence[str], frame: pl.DataFrame) -> tuple[Term, ...]:
    """Return columns, then squares of those with more than two values, then products of two.

    >>> frame = pl.DataFrame({"a": [1.0, 2.0, 3.0], "b": [0, 1, 1]})
    >>> [term.name for term in rich_terms(["a", "b"], frame)]
    ['a', 'b', 'a**2', 'a:b']
    """
    main = [term for name in columns for term in _expanded(name, frame)]
    squares = [
        Term(f"{t.name}**2", (Factor(t.factors[0].column, power=2),))
        for t in main
        if t.level is None and frame[t.factors[0].column].n_unique() > 2
    ]
    pairs = [
        Term(f"{a.name}:{b.name}", a.factors + b.factors)
        for i, a in enumerate(main)
        for b in main[i + 1 :]
        if a.factors[0].column != b.factors[0].column
    ]
    return (*main, *squares, *pairs)


def term_matrix(terms: Sequence[Term], frame: pl.DataFrame) -> FloatArray:
    """Return the terms' values, (rows, terms), columns next to each other in memory."""
    out = np.empty((frame.height, len(terms)), order="F")
    for j, term in enumerate(terms):
        out[:, j] = term.values(frame)
    return out


def _expanded(name: str, frame: pl.DataFrame) -> tuple[Term, ...]:
    if name not in frame.columns or _is_number(frame.schema[name]):
        return (term_of(name, frame.schema),)
    levels = frame[name].cast(pl.String).drop_nulls().unique().sort().to_list()
    return tuple(Term(f"{name}[{x}]", (Factor(name, str(x)),)) for x in levels[1:])


def _factor(part: str, name: str, schema: pl.Schema) -> Factor:
    if part in schema:
        return Factor(part)
    found = _LEVEL.match(part)
    if found and found["column"].strip() in schema:
        return Factor(found["column"].strip(), level=found["level"].strip())
    found = _POWER.match(part)
    if found and found["column"] in schema and int(found["power"]) >= 1:
        return Factor(found["column"], power=int(found["power"]))
    raise InputError(
        f"{name!r} names no column of the table, nor a level such as os[android], a power such as "
        f"age**2 or a product such as age:height. Columns: {some(schema.names())}."
    )


def _is_level(column: pl.Expr, kind: pl.DataType, level: str, name: str) -> pl.Expr:
    if kind == pl.Boolean:
        if level.lower() not in _YES | _NO:
            raise InputError(f"{name}[{level}]: {name!r} is true or false.")
        return column if level.lower() in _YES else ~column
    if kind.is_numeric():
        try:
            return column == float(level)
        except ValueError:
            raise InputError(
                f"{name}[{level}]: {name!r} holds numbers, {level!r} is none."
            ) from None
    return column.cast(pl.String) == level


def _is_number(kind: pl.DataType) -> bool:
    return kind.is_numeric() or kind == pl.Boolean
