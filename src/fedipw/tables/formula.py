"""Formulas: how terms are written, what each of them names, and the columns that terms are.

========================  ======================================================================
``a + b``                 terms, each taken once
``. - a``                 every covariate but ``a``; ``-`` takes terms away again
``a``                     a column; a category stands for all its levels but the first
``C(a)``                  a number or flag taken as a category
``a[level]``              one level; ``a[missing]`` marks missing values of a number or flag
``a**2``                  a power
``ns(a, 20, 40, 60)``     a natural cubic spline with these knots, linear beyond the outer ones
``a:b``                   products of the columns of ``a`` and ``b``
``a*b``                   short for ``a + b + a:b``
========================  ======================================================================

The longest column name at a place is that column, whatever it looks like; names may stand in
backticks (a backtick in a name is doubled). A level may hold any character: it ends at the first
closing bracket that a sign or the end of the formula follows, so that ``age[(0,19]]`` is the level
``(0,19]`` and ``plan[a:b]`` the level ``a:b``. One that holds such an end itself, as ``a]+b``, or
begins with a space, stands in quotes: ``plan["a]+b"]``. Other spaces are free.

Bound to columns a formula is a list of terms. A term has a name: a column (``age``), one level of a
category (``os[android]``), a power (``age**2``) or a product of such (``age:os[android]``).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import SHOWN, shown, some
from fedipw.tables.columns import NO, YES

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

MISSING: Final = "(missing)"  # the level of rows without one, where that is a level of its own
OTHER: Final = "(other)"  # the level rare levels are merged into
_BARE = re.compile(r"[^-+:*\[\](),`]+")
_QUOTED = re.compile(r"`((?:[^`]|``)+)`")
_FUNCTION = re.compile(r"([^\W\d]\w*)\s*\(")
_POWER = re.compile(r"\*\*\s*([^-+:*\[\](),\s]*)")
_NAMED = re.compile(r"`((?:[^`]|``)+)`|[^\W\d]\w*(?!\w|\s*\()")  # a name, not a function's
_NEAR, _CANDIDATES = 200, 2_000  # characters of a name, and names, among which one is guessed
_QUOTES, _SIGNS = "`\"'", "-+:*"
POWER_MAX = 100  # of a column; beyond it even numbers near 1 leave the range of numbers
PRODUCTS_MAX = 10_000  # that one clause may stand for, such as a*b*c
_ADVICE = {
    "^": "powers are written a**2",
    "~": "a formula has no left side",
    "|": "there are no grouped terms",
    "/": "nested terms are written a + a:b",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One factor of a product as written: a column, and what is made of it."""

    column: str
    category: bool = False
    level: str | None = None
    power: int = 1
    knots: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Clause:
    """What stands between two signs: products of parts that are added or taken away."""

    adds: bool
    products: tuple[tuple[Part, ...], ...]
    text: str


def formula_clauses(
    formula: str,
    columns: Sequence[str],
    others: Collection[str] = (),
    more: Sequence[str] = (),
) -> tuple[Clause, ...]:
    """Return the clauses of a formula over ``columns``.

    ``others`` are columns of the table that may not be named, for the error that says so; ``more``
    may be named but are not meant by ``.``.

    >>> for clause in formula_clauses("age*os - age**2", ["age", "os"]):
    ...     print(clause.adds, [[part.column for part in parts] for parts in clause.products])
    True [['age'], ['os'], ['age', 'os']]
    False [['age']]
    >>> formula_clauses("age + hight", ["age", "height"])
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: Formula 'age + hight', character 7: 'hight' names no column; did you
    mean 'height'? Columns: age, height.
    """
    reader = _Reader(formula, (*columns, *more), frozenset(others), len(columns))
    return tuple(reader.clauses())


def formula_names(formula: str) -> tuple[str, ...]:
    """Return what a formula names, in order, whether such columns are known or not.

    >>> formula_names("battery*wifi + C(`local hour`) + os[not charging]**2 + .")
    ('battery', 'wifi', 'local hour', 'os')
    """
    found: list[str] = []
    for match in _NAMED.finditer(_without_levels(formula)):
        found.append(match[1].replace("``", "`") if match[1] is not None else match[0])
    return tuple(dict.fromkeys(found))


def near(name: str, names: Collection[str]) -> str:
    """Return ``; did you mean ...?`` for the name nearest to one that is not there, or a stop."""
    found = _nearest(name, names, 1)
    return f"; did you mean {found[0]!r}?" if found else "."


def nearest_first(name: str, names: Collection[str]) -> list[str]:
    """Return names, those most like one that is not there first.

    >>> nearest_first("andriod", ["ios", "web", "android"])
    ['android', 'ios', 'web']
    """
    return list(dict.fromkeys((*_nearest(name, names, SHOWN), *names)))


def _nearest(name: str, names: Collection[str], count: int) -> list[str]:
    same = [n for n in names if n.casefold() == name.casefold()]
    if same or len(name) > _NEAR:
        return same[:count]
    few = [n for n in names if len(n) <= _NEAR][:_CANDIDATES]  # looking takes time by their product
    return get_close_matches(name, few, n=count)


def level_named(name: str) -> tuple[str, str] | None:
    """Return the column and level that a name means, whatever the table; none if it means another.

    >>> level_named("agecat[(0,19]]"), level_named("`a[b`[c]"), level_named("age:os[ios]")
    (('agecat', '(0,19]'), ('a[b', 'c'), None)
    """
    quoted = _QUOTED.match(name)
    column = name[: max(name.find("["), 0)] if quoted is None else quoted[1].replace("``", "`")
    opened = len(column) if quoted is None else quoted.end()
    found = _level_at(name, opened)
    if not column.strip() or found is None or found[1] != len(name.rstrip()):
        return None
    if quoted is None and any(sign in column for sign in _SIGNS):
        return None  # a product or a sum
    return column.strip(), found[0]


def _level_at(text: str, at: int) -> tuple[str, int] | None:
    """Return the level in the brackets that open here and where they end, none without an end.

    A level ends at the first closing bracket with a sign or nothing behind it; in quotes it may
    hold such ends. One look at each character: a regular expression takes the square of the spaces
    after an opening bracket.
    """
    if not text.startswith("[", at):
        return None
    start = _past_spaces(text, at + 1)
    if start < len(text) and text[start] in _QUOTES:
        closed = text.find(text[start], start + 1)
        end = _past_spaces(text, closed + 1)
        if closed >= 0 and text.startswith("]", end) and _may_end(text, end + 1):
            return text[start + 1 : closed], end + 1
    end = text.find("]", start)
    while end >= 0 and not _may_end(text, end + 1):
        end = text.find("]", end + 1)
    return None if end < 0 else (text[start:end].rstrip(), end + 1)


def _may_end(text: str, at: int) -> bool:
    """Return whether a level may end before this place: a sign follows, or nothing."""
    place = _past_spaces(text, at)
    return place == len(text) or text[place] in _SIGNS


def _past_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _without_levels(formula: str) -> str:
    """Return a formula with a space in place of each level."""
    out, at = [], 0
    while (opened := formula.find("[", at)) >= 0:
        found = _level_at(formula, opened)
        if found is None:  # nor does a later one end
            break
        out += [formula[at:opened], " "]
        at = found[1]
    return "".join([*out, formula[at:]])


@dataclass(slots=True)
class _Reader:
    """A place in a formula, moved on by whatever is read."""

    formula: str
    columns: tuple[str, ...]
    others: frozenset[str]
    dotted: int  # how many of the columns a dot stands for
    at: int = 0
    names: frozenset[str] = field(init=False)
    lengths: list[int] = field(init=False)  # of the names, the longest first

    def __post_init__(self) -> None:
        self.names = frozenset(filter(None, self.columns))
        self.lengths = sorted({len(name) for name in self.names}, reverse=True)

    def clauses(self) -> Iterator[Clause]:
        adds = not self._takes("-")
        while True:
            self._spaces()
            start = self.at
            products = self._everything() or self._crossed()
            yield Clause(adds, products, self.formula[start : self.at].strip())
            if self.at == len(self.formula):
                return
            adds = self._takes("+")
            if not adds and not self._takes("-"):
                self._unexpected()

    def _everything(self) -> tuple[tuple[Part, ...], ...]:
        """Return one product for each column if here stands a dot."""
        if not self.formula.startswith(".", self.at) or self._column_here() is not None:
            return ()
        if self._sign_after(self.at + 1) not in {"", "-", "+"}:
            self._fail("'.' stands for every covariate and must stand alone, as in '. - a + a:b'.")
        self._on(1)
        return tuple((Part(column),) for column in self.columns[: self.dotted])

    def _crossed(self) -> tuple[tuple[Part, ...], ...]:
        """Return the products of ``a:b``, or all that ``a*b*c`` is short for."""
        crossed = [self._product()]
        while not self.formula.startswith("**", self.at) and self._takes("*"):
            crossed.append(self._product())
        if 2 ** len(crossed) > PRODUCTS_MAX:
            self._fail(f"{len(crossed)} crossed terms stand for 2**{len(crossed)} - 1 products.")
        chosen = (c for n in range(1, len(crossed) + 1) for c in combinations(crossed, n))
        return tuple(tuple(part for parts in c for part in parts) for c in chosen)

    def _product(self) -> tuple[Part, ...]:
        parts = [self._part()]
        while self._takes(":"):
            parts.append(self._part())
        return tuple(parts)

    def _part(self) -> Part:
        self._spaces()
        column = self._column_here()
        if column is None:
            function = _FUNCTION.match(self.formula, self.at)
            return self._called(function[1], function.end()) if function else self._nothing()
        self._past_column(column)
        level = _level_at(self.formula, self.at)
        if level is not None:
            self._on(level[1] - self.at)
            return Part(column, level=level[0])
        if self.formula.startswith("[", self.at):
            self._fail(f"the level of {column!r} has no closing ']' with a sign or nothing behind.")
        return Part(column, power=self._power(column))

    def _power(self, column: str) -> int:
        found = _POWER.match(self.formula, self.at)
        if found is None:
            return 1
        digits = found[1].lstrip("0")
        if not (digits.isdecimal() and digits.isascii()):
            self._fail(f"the power of {column!r} must be a whole number, 1 or more.")
        if len(digits) > len(str(POWER_MAX)) or int(digits) > POWER_MAX:
            self._fail(f"the power of {column!r} must be {POWER_MAX} at most.")
        self._on(found.end() - self.at)
        return int(digits)

    def _called(self, name: str, inside: int) -> Part:
        if name not in {"C", "ns"}:
            self._fail(
                f"{name}(...) is no function of formulas; there are C(a) and ns(a, 20, 40, 60). "
                "Add the column to the table instead."
            )
        self._on(inside - self.at)
        column = self._column_here()
        if column is None:
            self._nothing()
        self._past_column(column)
        knots = () if name == "C" else self._knots(column)
        if not self._takes(")"):
            self._fail(f"{name}({column} ... has no closing ')'.")
        return Part(column, category=name == "C", knots=knots)

    def _knots(self, column: str) -> tuple[float, ...]:
        end = self.formula.find(")", self.at)
        inside = self.formula[self.at :] if end < 0 else self.formula[self.at : end]
        texts = [text.strip() for text in inside.split(",")][1:] if inside.startswith(",") else []
        try:
            knots = tuple(float(text) for text in texts)
        except ValueError:
            self._fail(f"the knots of ns({column}, ...) must be numbers, not {some(texts)}.")
        if not all(map(math.isfinite, knots)):
            self._fail(f"the knots of ns({column}, ...) must be finite, not {some(texts)}.")
        if len(knots) < 2 or any(a >= b for a, b in pairwise(knots)):
            self._fail(
                f"ns({column}, ...) needs two or more increasing knots, the first and last of "
                f"them the boundaries; it has {some(texts) or 'none'}."
            )
        self._on(len(inside))
        return knots

    def _column_here(self) -> str | None:
        """Return the longest column name that stands here, in backticks or not."""
        quoted = _QUOTED.match(self.formula, self.at)
        if quoted is not None:
            name = quoted[1].replace("``", "`")
            if name not in self.names:
                self._missing(name)
            return name
        for length in self.lengths:
            name = self.formula[self.at : self.at + length]
            if len(name) == length and name in self.names and self._ends(self.at + length):
                return name
        return None

    def _ends(self, at: int) -> bool:
        """Return whether a column's name may end here."""
        sign = self._sign_after(at)
        return not sign or sign in "-+:*[]),"

    def _sign_after(self, at: int) -> str:
        """Return the first character from here on that is no space, nothing at the end."""
        place = _past_spaces(self.formula, at)
        return self.formula[place : place + 1]

    def _past_column(self, column: str) -> None:
        quoted = _QUOTED.match(self.formula, self.at)
        self._on(len(column) if quoted is None else quoted.end() - self.at)

    def _nothing(self) -> NoReturn:
        bare = _BARE.match(self.formula, self.at)
        if bare is None or not bare[0].strip():
            if self.formula.startswith(("(", ")"), self.at):
                self._fail("parentheses stand in C(...) and ns(...) only.")
            if self.formula.startswith("`", self.at):
                self._fail("a backtick is not closed.")
            self._fail("an empty term.")
        self._missing(bare[0].strip())

    def _missing(self, name: str) -> NoReturn:
        if name in {"0", "1"}:
            self._fail("the constant is always part of the model: leave it out of the formula.")
        if name in self.others:
            self._fail(
                f"{name!r} names no column that may be used, though the table has it. Covariates: "
                f"{some(self.columns)}."
            )
        advice = next((f" ({text})" for sign, text in _ADVICE.items() if sign in name), "")
        guess = near(name, self.columns)
        self._fail(f"{shown(name)} names no column{advice}{guess} Columns: {some(self.columns)}.")

    def _unexpected(self) -> NoReturn:
        rest = self.formula[self.at : self.at + 20]
        self._fail(f"{rest!r} cannot stand here; terms are joined by + - : or *.")

    def _takes(self, sign: str) -> bool:
        self._spaces()
        if not self.formula.startswith(sign, self.at):
            return False
        self._on(len(sign))
        return True

    def _on(self, length: int) -> None:
        self.at += length
        self._spaces()

    def _spaces(self) -> None:
        self.at = _past_spaces(self.formula, self.at)

    def _fail(self, why: str) -> NoReturn:
        raise InputError(f"Formula {shown(self.formula)}, character {self.at + 1}: {why}")


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
    """Return the term a name stands for: a formula of one product, without functions.

    What is no such formula, begins with a column and an opening bracket and ends with a closing
    one is a level of that column, whatever is between: a level ends at the last bracket.

    >>> schema = pl.Schema({"plan": pl.String(), "age": pl.Float64()})
    >>> [term_of(name, schema).level for name in ("plan[a:b]", "plan[a]+b]", "age**2:plan[x]")]
    [('plan', 'a:b'), ('plan', 'a]+b'), None]
    """
    if name in schema:
        return Term(name, (Factor(name),))
    parts = _parts_of(name, schema.names())
    if not parts or any(part.category or part.knots for part in parts):
        found = _QUOTED.match(name)
        asked = name.partition("[")[0].strip() if found is None else found[1].replace("``", "`")
        raise InputError(
            f"{shown(name)} names no column of the table, nor a level such as os[android], a power "
            f"such as age**2 or a product such as age:height{near(asked, schema.names())} Columns: "
            f"{some(nearest_first(asked, schema.names()))}."
        )
    for part in parts:
        kind = schema[part.column]
        if not (is_number(kind) or kind in (pl.String, pl.Categorical, pl.Enum)):
            raise InputError(f"{name}: {part.column!r} holds {kind}, neither numbers nor text.")
    made = (number_factors(part, schema[part.column]) for part in parts)
    return Term(name, tuple(factor for factors in made for factor in factors))


def _parts_of(name: str, columns: Sequence[str]) -> tuple[Part, ...]:
    """Return the factors a name is the product of, none if it is no product."""
    try:
        clauses = formula_clauses(name, columns)
    except InputError:
        clauses = ()
    if len(clauses) == 1 and clauses[0].adds and len(clauses[0].products) == 1:
        return clauses[0].products[0]
    text = name.strip()
    reader = _Reader(text, tuple(columns), frozenset(), len(columns))
    quoted = _QUOTED.match(text)
    column = reader._column_here() if quoted is None or quoted[1] in columns else None
    if column is None or not text.endswith("]"):
        return ()
    reader._past_column(column)
    opened = text.startswith("[", reader.at)
    return (Part(column, level=text[reader.at + 1 : -1].strip()),) if opened else ()


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
    """Return the levels of a column as text: numbers by size, all else by spelling."""
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
    """Return a number as it is written in names, without loss: 2, 0.1."""
    whole = float(value).is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else repr(float(value))


def is_number(kind: pl.DataType) -> bool:
    """Return whether a column of this type is a number or a flag."""
    return kind.is_numeric() or kind == pl.Boolean


def _products(parts: Sequence[Part], factors: Callable[[Part], tuple[Factor, ...]]) -> list[Term]:
    choices = [factors(part) for part in parts]
    if math.prod(map(len, choices)) > PRODUCTS_MAX:
        named = ":".join(choice[0].column for choice in choices[:SHOWN])
        raise InputError(f"{named} stands for more than {PRODUCTS_MAX} columns: merge levels.")
    merged = [m for chosen in product(*choices) if (m := _merged(chosen)) is not None]
    if not merged and all(choices):
        shown = ":".join(choice[0].name for choice in choices)
        raise InputError(f"{shown} is 0 in every row: no row has two levels of one column.")
    return [Term(":".join(f.name for f in m), m) for m in merged]


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


def _quoted(term: Term) -> Term:
    """Return a term under a name that no column can have."""
    if len(term.factors) == 1 and term.factors[0].is_plain:
        return term
    parts = (replace(f, column=f"`{f.column}`").name for f in term.factors)
    return replace(term, name=":".join(parts))


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
