"""Terms of a table: columns, levels of categories, powers and products, by name.

A name is a column (``age``), one level of a category (``os[android]``), a power (``age**2``) or a
product of such (``age:os[android]``). A column whose own name looks like a term is that column.
Formulas, which join terms, know more of them: see :mod:`fedipw.tables.formula`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.formula import Clause, Part, formula_clauses
from fedipw.tables.population import ENROLLED, ID, NO, YES

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray

MISSING: Final = "(missing)"  # the level of rows without one, where that is a level of its own
OTHER: Final = "(other)"  # the level rare levels are merged into
_LEVEL = re.compile(r"^(?P<column>[^\[\]]+)\[(?P<level>[^\[\]]*)\]$")
_POWER = re.compile(r"^(?P<column>.+?)\s*\*\*\s*(?P<power>\d+)$")


@dataclass(frozen=True, slots=True)
class Factor:
    """A column, one of its levels, a power of it, one column of its spline, or where it is missing.

    ``fill`` stands for missing values of a number, in powers and splines too; of a level it says
    that a row without one does not have this one. NaN is missing.

    Examples
    --------
    >>> frame = pl.DataFrame({"age": [20.0, None, 60.0]})
    >>> frame.select(Factor("age", power=2, fill=30.0).expression(frame.schema))["age"].to_list()
    [400.0, 900.0, 3600.0]
    >>> frame.select(Factor("age", missing=True).expression(frame.schema))["age"].to_list()
    [0.0, 1.0, 0.0]
    """

    column: str
    level: str | None = None
    power: int = 1
    knots: tuple[float, ...] = ()
    basis: int = 0  # which column of the spline, from 1 to len(knots) - 1
    missing: bool = False
    fill: float | None = None

    @property
    def name(self) -> str:
        """How it is written; a spline's columns are numbered."""
        if self.level is not None:
            return f"{self.column}[{self.level}]"
        if self.missing:
            return f"{self.column}[missing]"
        if self.knots:
            listed = ", ".join(map(number_text, self.knots))
            return f"ns({self.column}, {listed})[{self.basis}]"
        return self.column if self.power == 1 else f"{self.column}**{self.power}"

    @property
    def is_number(self) -> bool:
        """Whether it is the column's number, a power or a spline of it."""
        return self.level is None and not self.missing

    @property
    def is_plain(self) -> bool:
        """Whether it is the column as it stands."""
        return self == Factor(self.column)

    def expression(self, schema: pl.Schema) -> pl.Expr:
        """Return its values as floats."""
        kind, column = schema[self.column], pl.col(self.column)
        if self.missing or self.level == MISSING:
            return self._where_missing(kind).cast(pl.Float64)
        if self.level is not None:
            has = _is_level(column, kind, self.level, self.column)
            return (has if self.fill is None else has.fill_null(value=False)).cast(pl.Float64)
        if not is_number(kind):
            raise InputError(
                f"{self.column!r} holds {kind}, not numbers: name one of its levels, as in "
                f"{self.column}[level]."
            )
        number = column.cast(pl.Float64)
        if self.fill is not None:
            number = number.fill_nan(self.fill).fill_null(self.fill)
        if self.knots:
            return spline_column(number, self.knots, self.basis)
        return number if self.power == 1 else number.pow(self.power)

    def _where_missing(self, kind: pl.DataType) -> pl.Expr:
        column = pl.col(self.column)
        where = column.is_null()
        if kind.is_float():
            return where | column.is_nan().fill_null(value=False)
        if self.missing or is_number(kind):
            return where
        return where | _is_level(column, kind, MISSING, self.column).fill_null(value=False)


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
    def key(self) -> frozenset[tuple[Factor, int]]:
        """What makes two terms the same: their factors in any order."""
        return frozenset(Counter(self.factors).items())

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
    """Return the terms of a formula; a text column stands for its levels but the first.

    ``.`` is every column but ``unit_id`` and ``enrolled``.

    >>> frame = pl.DataFrame({"age": [20.0, 40.0], "os": ["ios", "android"]})
    >>> [term.name for term in formula_terms("age + age**2 + os", frame)]
    ['age', 'age**2', 'os[ios]']
    >>> [term.name for term in formula_terms("age*os - age", frame)]
    ['os[ios]', 'age:os[ios]']
    """
    covariates = [name for name in frame.columns if name not in {ID, ENROLLED}]

    def factors(part: Part) -> tuple[Factor, ...]:
        if is_category(part, frame.schema[part.column]):
            return level_factors(part.column, sorted_levels(frame[part.column]))
        return number_factors(part, frame.schema[part.column])

    return product_terms(formula_clauses(formula, covariates, frame.columns), factors)


def product_terms(
    clauses: Sequence[Clause], factors: Callable[[Part], tuple[Factor, ...]]
) -> tuple[Term, ...]:
    """Return what clauses add and do not take away, each part standing for some factors.

    Products run over the parts' factors. Categories are coded by levels against the first on both
    sides, so ``os:kind`` has a column for each pair of levels other than the first ones and means
    little without ``os + kind``. The same factors in another order are the same term.
    """
    terms: dict[frozenset[tuple[Factor, int]], Term] = {}
    for clause in clauses:
        made = [term for parts in clause.products for term in _products(parts, factors)]
        if clause.adds:
            for term in made:
                terms.setdefault(term.key, term)
            continue
        gone = {term.key for term in made}
        if made and not gone & terms.keys():
            raise InputError(f"The formula takes away {clause.text!r}, which it does not have.")
        terms = {key: term for key, term in terms.items() if key not in gone}
    twice = Counter(term.name for term in terms.values())
    return tuple(_quoted(t) if twice[t.name] > 1 else t for t in terms.values())


def rich_terms(columns: Sequence[str], frame: pl.DataFrame) -> tuple[Term, ...]:
    """Return columns, then squares of those with more than two values, then products of two.

    >>> frame = pl.DataFrame({"a": [1.0, 2.0, 3.0], "b": [0, 1, 1]})
    >>> [term.name for term in rich_terms(["a", "b"], frame)]
    ['a', 'b', 'a**2', 'a:b']
    """
    main = [term for name in columns for term in _main_terms(name, frame)]
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


def is_category(part: Part, kind: pl.DataType) -> bool:
    """Return whether a part stands for all levels of its column."""
    if part.category or is_number(kind):
        return part.category
    if part.power > 1 or part.knots:
        raise InputError(
            f"{part.column!r} holds {kind}, not numbers: it has no powers and no splines."
        )
    return part.level is None


def level_factors(column: str, levels: Sequence[str]) -> tuple[Factor, ...]:
    """Return all levels of a category but the first."""
    return tuple(Factor(column, level=level) for level in levels[1:])


def number_factors(part: Part, kind: pl.DataType) -> tuple[Factor, ...]:
    """Return the factors of a part that is no category: a number's, or one level."""
    if part.level is not None:
        if part.level == "missing" and is_number(kind):
            return (Factor(part.column, missing=True),)
        return (Factor(part.column, level=part.level),)
    if part.knots:
        columns = range(1, len(part.knots))
        return tuple(Factor(part.column, knots=part.knots, basis=k) for k in columns)
    return (Factor(part.column, power=part.power),)


def sorted_levels(values: pl.Series) -> tuple[str, ...]:
    """Return the levels of a column as text: numbers by size, all else by spelling.

    >>> sorted_levels(pl.Series([10.0, 2.0, None, 2.0]))
    ('2', '10')
    """
    if values.dtype.is_numeric():
        known = values.cast(pl.Float64).fill_nan(None).drop_nulls().unique().sort()
        return tuple(dict.fromkeys(map(number_text, known.to_list())))
    return tuple(values.cast(pl.String).drop_nulls().unique().sort().to_list())


def level_text(level: str, kind: pl.DataType, column: str) -> str:
    """Return a level as :func:`sorted_levels` writes it: 2.0 of numbers is 2, yes of flags true."""
    if level in {MISSING, OTHER}:
        return level
    if kind == pl.Boolean:
        return "true" if _yes(level, column) else "false"
    return number_text(_number(level, column)) if kind.is_numeric() else level


def number_text(value: float) -> str:
    """Return a number as it is written in names, without loss.

    >>> number_text(2.0), number_text(0.1)
    ('2', '0.1')
    """
    whole = float(value).is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else repr(float(value))


def spline_column(x: pl.Expr, knots: Sequence[float], basis: int) -> pl.Expr:
    r"""Return one column of the natural cubic spline with K knots, basis 1 to K - 1.

    With :math:`u` and knots :math:`t` scaled to the range of the knots, the columns are :math:`u`
    and

    .. math:: \frac{(u - t_k)_+^3}{1 - t_k} - \frac{(u - t_{K-1})_+^3}{1 - t_{K-1}},
        \qquad k = 1, \dots, K - 2,

    continued as straight lines beyond 1, so that nothing cancels far outside. Nothing is divided:
    polars rounds quotients of one row otherwise than those of many.
    """
    first, width = knots[0], knots[-1] - knots[0]
    u = (x - first) * (1.0 / width)
    if basis == 1:
        return u
    inside = u.clip(None, 1.0)
    low, high = ((knots[k] - first) / width for k in (basis - 2, -2))
    beyond = (u - 1.0).clip(0.0, None)
    return _bend(inside, low) - _bend(inside, high) + 3.0 * (high - low) * beyond


def _bend(u: pl.Expr, knot: float) -> pl.Expr:
    above = (u - knot).clip(0.0, None)
    return above * above * above * (1.0 / (1.0 - knot))


def _products(parts: Sequence[Part], factors: Callable[[Part], tuple[Factor, ...]]) -> list[Term]:
    choices = [factors(part) for part in parts]
    merged = [m for chosen in product(*choices) if (m := _merged(chosen)) is not None]
    if not merged and all(choices):
        shown = ":".join(choice[0].name for choice in choices)
        raise InputError(f"{shown} is 0 in every row: no row has two levels of one column.")
    return [Term(":".join(f.name for f in m), m) for m in merged]


def _quoted(term: Term) -> Term:
    """Return a term under a name that no column can have."""
    if len(term.factors) == 1 and term.factors[0].is_plain:
        return term
    parts = (replace(f, column=f"`{f.column}`").name for f in term.factors)
    return replace(term, name=":".join(parts))


def _merged(factors: Sequence[Factor]) -> tuple[Factor, ...] | None:
    """Return factors with powers of a number joined and levels once; None if two levels clash."""
    out: dict[object, Factor] = {}
    for factor in factors:
        if factor.level is not None:
            if out.setdefault((factor.column, "level"), factor) != factor:
                return None
        elif factor.missing or factor.knots:
            out[factor if factor.missing else len(out)] = factor
        else:
            had = out.get((factor.column, "power"))
            power = factor.power + (0 if had is None else had.power)
            out[factor.column, "power"] = replace(factor, power=power)
    return tuple(out.values())


def _main_terms(name: str, frame: pl.DataFrame) -> tuple[Term, ...]:
    """Return the terms of one name: all levels but the first if it is a category's column."""
    if name not in frame.columns or is_number(frame.schema[name]):
        return (term_of(name, frame.schema),)
    levels = level_factors(name, sorted_levels(frame[name]))
    return tuple(Term(factor.name, (factor,)) for factor in levels)


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
        return column if _yes(level, name) else ~column
    if kind.is_numeric():
        return column == _number(level, name)
    if isinstance(kind, pl.Enum) and (kind.categories == level).any():
        return column == pl.lit(level, dtype=kind)  # compares codes, not text
    return column.cast(pl.String) == level


def _yes(level: str, column: str) -> bool:
    if level.lower() not in (*YES, *NO):
        raise InputError(f"{column}[{level}]: {column!r} is true or false.")
    return level.lower() in YES


def _number(level: str, column: str) -> float:
    try:
        return float(level)
    except ValueError:
        why = f"{column}[{level}]: {column!r} holds numbers, {level!r} is none."
        raise InputError(why) from None


def is_number(kind: pl.DataType) -> bool:
    """Return whether a column of this type is a number or a flag."""
    return kind.is_numeric() or kind == pl.Boolean
