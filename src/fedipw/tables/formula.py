"""Formulas: how terms are written, and what each of them names.

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
backticks (a backtick in a name is doubled) and levels in quotes. Spaces are free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import combinations, pairwise
from typing import NoReturn

from fedipw.errors import InputError
from fedipw.numerics.checks import some

_END = re.compile(r"\s*(?:$|[-+:*\[\]),])")  # what may follow a column's name
_BARE = re.compile(r"[^-+:*\[\](),`]+")
_QUOTED = re.compile(r"`((?:[^`]|``)+)`")
_FUNCTION = re.compile(r"([^\W\d]\w*)\s*\(")
_LEVEL = re.compile(r"""\[\s*(?:`([^`]*)`|"([^"]*)"|'([^']*)'|([^\]]*?))\s*\]""")
_POWER = re.compile(r"\*\*\s*([^-+:*\[\](),\s]*)")
_NAMED = re.compile(r"`((?:[^`]|``)+)`|[^\W\d]\w*(?!\w|\s*\()")  # a name, not a function's
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
    text = _LEVEL.sub(" ", formula)
    for match in _NAMED.finditer(text):
        found.append(match[1].replace("``", "`") if match[1] is not None else match[0])
    return tuple(dict.fromkeys(found))


def near(name: str, names: Collection[str]) -> str:
    """Return ``; did you mean ...?`` for the name nearest to one that is not there, or nothing.

    >>> near("Age", ["age", "os"]), near("zzz", ["age", "os"])
    ("; did you mean 'age'?", '.')
    """
    same = [n for n in names if n.casefold() == name.casefold()]
    found = same or get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]!r}?" if found else "."


@dataclass(slots=True)
class _Reader:
    """A place in a formula, moved on by whatever is read."""

    formula: str
    columns: tuple[str, ...]
    others: frozenset[str]
    dotted: int  # how many of the columns a dot stands for
    at: int = 0
    longest_first: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.longest_first = sorted(filter(None, self.columns), key=len, reverse=True)

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
        if re.match(r"\.\s*(?:$|[-+])", self.formula[self.at :]) is None:
            self._fail("'.' stands for every covariate and must stand alone, as in '. - a + a:b'.")
        self._on(1)
        return tuple((Part(column),) for column in self.columns[: self.dotted])

    def _crossed(self) -> tuple[tuple[Part, ...], ...]:
        """Return the products of ``a:b``, or all that ``a*b*c`` is short for."""
        crossed = [self._product()]
        while not self.formula.startswith("**", self.at) and self._takes("*"):
            crossed.append(self._product())
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
        level = _LEVEL.match(self.formula, self.at)
        if level is not None:
            self._on(level.end() - self.at)
            text = next(group for group in level.groups() if group is not None)
            return Part(column, level=text)
        if self.formula.startswith("[", self.at):
            self._fail(f"the level of {column!r} has no closing ']'.")
        return Part(column, power=self._power(column))

    def _power(self, column: str) -> int:
        found = _POWER.match(self.formula, self.at)
        if found is None:
            return 1
        if not (found[1].isdecimal() and int(found[1]) >= 1):
            self._fail(f"the power of {column!r} must be a whole number, 1 or more.")
        self._on(found.end() - self.at)
        return int(found[1])

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
        inside = self.formula[self.at :].split(")")[0]
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
            if name not in self.columns:
                self._missing(name)
            return name
        return next(
            (
                name
                for name in self.longest_first
                if self.formula.startswith(name, self.at)
                and _END.match(self.formula, self.at + len(name))
            ),
            None,
        )

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
        self._fail(f"{name!r} names no column{advice}{guess} Columns: {some(self.columns)}.")

    def _unexpected(self) -> NoReturn:
        rest = self.formula[self.at :]
        self._fail(f"{rest[:20]!r} cannot stand here; terms are joined by + - : or *.")

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
        while self.at < len(self.formula) and self.formula[self.at].isspace():
            self.at += 1

    def _fail(self, why: str) -> NoReturn:
        raise InputError(f"Formula {self.formula!r}, character {self.at + 1}: {why}")
