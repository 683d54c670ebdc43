"""What clients may answer: declared types, ranges and levels, and sizes that hold for everybody."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import LARGEST, SMALLEST, shown, some, visible
from fedipw.tables.formula import MISSING, OTHER

LONGEST: Final = 200  # characters of a text, and of an identifier
LEVELS_MOST: Final = 50  # levels of a text covariate, those declared or admitted
_SHOWN: Final = 80  # characters of what a client said that the log shows
_SIMULATED: Final = "ClientAppException occurred. Message: "  # before the error in a simulation
_TYPES: Final[Mapping[str, pl.DataType]] = {  # in the order that decides a tie
    "number": pl.Float64(), "flag": pl.Boolean(), "text": pl.String(),
}  # fmt: skip
Value = float | bool | str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Covariate:
    """The type of a covariate that clients answer, and the values it may have.

    An answer of another type or outside range or levels is not used: its client is not available
    in that round.

    Parameters
    ----------
    kind
        ``number``, ``text`` or ``flag``.
    low, high
        The range of a number, both ends included; open where none.
    levels
        The values a text may have; all are known to the model from the first round on.

    Examples
    --------
    >>> Covariate.of((0, 1))
    Covariate(kind='number', low=0.0, high=1.0, levels=None)
    >>> Covariate.of(["wifi", "mobile"]).levels
    ('mobile', 'wifi')
    >>> Covariate.of("flag").fault(True), Covariate.of((0, 1)).fault(-40.0)
    (None, 'lies outside 0 to 1')
    """

    kind: str
    low: float | None = None
    high: float | None = None
    levels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in _TYPES:
            raise InputError(f"A covariate is a number, text or flag, not {shown(self.kind)}.")
        ends = [end for end in (self.low, self.high) if end is not None]
        if ends and self.kind != "number":
            raise InputError(f"Only numbers have a range, and this is declared a {self.kind}.")
        if any(not (isinstance(end, int | float) and abs(end) <= LARGEST) for end in ends):
            raise InputError(f"A range has finite ends, not {shown((self.low, self.high))}.")
        if len(ends) == 2 and not ends[0] < ends[1]:
            raise InputError(f"A range begins below its end, unlike {ends[0]:g} to {ends[1]:g}.")
        if self.levels is None:
            return
        if self.kind != "text":
            raise InputError(f"Only text has levels, and this is declared a {self.kind}.")
        odd = [level for level in self.levels if not isinstance(level, str)]
        odd += [level for level in self.levels if level in {OTHER, MISSING}]
        odd += [level for level in self.levels if isinstance(level, str) and len(level) > LONGEST]
        if odd or not 2 <= len(self.levels) <= LEVELS_MOST:
            raise InputError(
                f"Levels are 2 to {LEVELS_MOST} texts of at most {LONGEST} characters, none of "
                f"them {OTHER} or {MISSING}, not {some(map(brief, odd or self.levels))}."
            )

    @classmethod
    def of(cls, given: Any) -> Covariate:
        """Return a declaration: one as it is, a kind, a pair of ends, or levels."""
        if isinstance(given, Covariate):
            return given
        if isinstance(given, str):
            return cls(kind=given)
        pair = isinstance(given, tuple | list) and len(given) == 2
        if pair and all(_is_end(end) for end in given):
            low, high = (None if end is None else float(end) for end in given)
            return cls(kind="number", low=low, high=high)
        several = isinstance(given, list | tuple | set | frozenset) and bool(given)
        if several and all(isinstance(level, str) for level in given):
            return cls(kind="text", levels=tuple(sorted(set(given))))
        raise InputError(
            f"A covariate is declared by its kind (number, text, flag), a pair of ends, a list of "
            f"levels, or Covariate(...), not by {shown(given)}."
        )

    @property
    def type(self) -> pl.DataType:
        """Type of its column in a ledger."""
        return _TYPES[self.kind]

    def fault(self, value: Value) -> str | None:
        """Return why a value cannot be used, none if it can."""
        kind = kind_of(value)
        if kind != self.kind:
            return f"is a {kind}, and declared a {self.kind}"
        if not isinstance(value, str) and not self._inside(value):
            if self.low is None or self.high is None:
                return (
                    f"lies above {self.high:g}" if self.low is None else f"lies below {self.low:g}"
                )
            return f"lies outside {self.low:g} to {self.high:g}"
        if self.levels is not None and value not in self.levels:
            return "is none of its levels"
        return None

    def _inside(self, value: float) -> bool:
        low = -math.inf if self.low is None else self.low
        return low <= value <= (math.inf if self.high is None else self.high)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        levels = None if self.levels is None else list(self.levels)
        return {"kind": self.kind, "low": self.low, "high": self.high, "levels": levels}


def _is_end(given: object) -> bool:
    """Return whether something is the end of a range: a number, or none for an open end."""
    return given is None or (isinstance(given, int | float) and not isinstance(given, bool))


def declarations(covariates: Iterable[str] | Mapping[str, Any] | None) -> dict[str, Covariate]:
    """Return the declarations of a user's ``covariates=`` by name, none for plain names."""
    if not isinstance(covariates, Mapping):
        return {}
    made = {}
    for name, given in covariates.items():
        if given is None:
            continue
        try:
            made[name] = Covariate.of(given)
        except InputError as error:
            raise InputError(f"covariates: {name!r}: {error}") from error
    return made


def kind_of(value: Value) -> str:
    """Return the kind of a plain value."""
    return "flag" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def plain_value(value: object) -> tuple[Value | None, str]:
    """Return a value as a number, text or flag, or none and why it cannot be used.

    >>> plain_value(3), plain_value(1e308)
    ((3.0, ''), (None, 'lies beyond 1e+100'))
    >>> plain_value([0.5])
    (None, 'must be a number, text or flag, not list')
    """
    if isinstance(value, bool):
        return value, ""
    if isinstance(value, str):
        if len(value) > LONGEST:
            return None, f"is text of more than {LONGEST} characters"
        return (value, "") if _is_text(value) else (None, "is text that cannot be written")
    if not isinstance(value, int | float):
        return None, f"must be a number, text or flag, not {type(value).__name__}"
    fault = ""
    if isinstance(value, float) and not math.isfinite(value):
        fault = f"is {value}"
    elif abs(value) > LARGEST:  # before it is made floating-point: integers may be larger than all
        fault = f"lies beyond {LARGEST:g}"
    elif 0.0 < abs(value) < SMALLEST:
        fault = f"lies within {SMALLEST:g} of 0"
    return (None, fault) if fault else (float(value), "")


def _is_text(value: str) -> bool:
    """Return whether a text can be written: Python's may hold halves of a pair of surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def majority(values: Iterable[Value]) -> str | None:
    """Return the kind of most values; a tie goes to number before flag before text.

    >>> majority([0.5, "full", 0.7]), majority(["a", 1.0]), majority([])
    ('number', 'number', None)
    """
    votes = Counter(map(kind_of, values))
    # max keeps the first of equals, and kinds come in the order that decides a tie
    return max(_TYPES, key=lambda kind: votes[kind]) if votes else None


def type_of(kind: str) -> pl.DataType:
    """Return the type of a ledger's column of a kind."""
    return _TYPES[kind]


def brief(said: object) -> str:
    r"""Return what a client said as the log shows it: on one line, at most 80 characters.

    >>> brief("a\x1b[31m"), len(brief("u" * 10_000_000))
    ("'a\\x1b[31m'", 80)
    """
    text = f"'{visible(said[:_SHOWN])}'" if isinstance(said, str) else visible(shown(said))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def first_line(reason: object) -> str:
    r"""Return the first line of an error's reason, at most 160 characters that can be seen.

    >>> first_line("ValueError('no table')\nTraceback ...")
    "ValueError('no table')"
    >>> first_line("<class 'X'>:<'\nException ClientAppException occurred. Message: no table'>")
    "no table'>"
    """
    lines = str(reason)[:4000].split(_SIMULATED)[-1].strip().splitlines()
    text = visible((lines[0] if lines else "")[: 2 * _SHOWN])
    return text if len(text) < 2 * _SHOWN else f"{text[: 2 * _SHOWN - 3]}..."
