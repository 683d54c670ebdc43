"""Border checks. Each names the thing that is wrong and what would be right; none repairs."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike

from fedipw.errors import InputError
from fedipw.numerics import FloatArray

SHOWN = 5
_JOINS = "\u200c\u200d"  # between letters of Persian and Indic scripts, and in emoji
_FAR, _DIGITS = 1e10, 4.5e-16  # values over their spread; a spread of rounding
_LONG = 160  # characters of a value that messages show
LARGEST = 1e100  # of a number that is given: squares, and sums of them, stay finite
SMALLEST = 1.0 / LARGEST  # of a probability, and of the largest number of a column


def some(items: Iterable[object]) -> str:
    """Return the first few items as text, with the number left out.

    >>> some(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    values = list(items)
    listed = ", ".join(_cut(str(value)) for value in values[:SHOWN])
    rest = len(values) - SHOWN
    return listed if rest <= 0 else f"{listed} and {rest} more"


def check_probability(values: ArrayLike, name: str = "probability") -> FloatArray:
    r"""Return ``values`` as floats, all in :math:`(0, 1]`, or say which are not.

    >>> check_probability([0.5, 1.0])
    array([0.5, 1. ])
    >>> check_probability([0.5, 0.0], name="enrollment_prob")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: enrollment_prob must lie in (0, 1]; 1 of 2 do not (row 1: 0.0). ...
    """
    probs = np.asarray(values, dtype=np.float64)
    bad = ~((probs >= SMALLEST) & (probs <= 1.0))  # NaN fails both comparisons
    if bad.any():
        rows = np.flatnonzero(bad)
        listed = some(f"row {row}: {float(probs.ravel()[row])!r}" for row in rows.tolist())
        tiny = probs[bad]
        if ((tiny > 0.0) & (tiny < SMALLEST)).all():
            raise InputError(
                f"{name} must not be below {SMALLEST:g}; {rows.size} of {probs.size} are "
                f"({listed}). Weights by their inverse would leave the range of numbers: correct "
                "the probabilities or change the selection model."
            )
        raise InputError(
            f"{name} must lie in (0, 1]; {rows.size} of {probs.size} do not ({listed}). "
            "A client with probability 0 can never be reached, so no weight stands for it: leave "
            "it out of the target population or change the selection model."
        )
    return probs


def check_finite(matrix: FloatArray, names: Sequence[str], what: str) -> None:
    """Raise if a column of ``matrix`` (n, q) has NaN or infinite values."""
    if np.isfinite(matrix).all():
        return
    bad = ~np.isfinite(matrix)
    counts = bad.sum(axis=0)
    found = [
        f"{name!r} ({counts[j]} of {len(matrix)} rows, first at row {int(np.argmax(bad[:, j]))})"
        for j, name in enumerate(names)
        if counts[j]
    ]
    raise InputError(
        f"{what}: missing or infinite values in {some(found)}. Fill or drop them before fitting, "
        "or leave the column out."
    )


def check_magnitude(values: ArrayLike, name: str, where: str = "") -> None:
    """Raise if numbers are too large or too small to be squared and summed; NaN is passed over.

    A number may be 0, and a column may have small numbers beside larger ones.

    >>> check_magnitude([0.0, 1e-300, 5.0], "age")
    >>> check_magnitude([1.0, 1e200], "age", "people.csv")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: people.csv: age holds 1e+200, beyond 1e+100, where squares ...
    """
    given = np.asarray(values, dtype=np.float64)
    if not given.size:
        return
    largest = max(-float(np.fmin.reduce(given.ravel())), float(np.fmax.reduce(given.ravel())))
    if not (largest > LARGEST or 0.0 < largest < SMALLEST):
        return
    start = f"{where}: {name}" if where else name
    if largest > LARGEST:
        raise InputError(
            f"{start} holds {largest:.3g}, beyond {LARGEST:g}, where squares and sums leave the "
            "range of numbers. Correct it, or scale the numbers down."
        )
    raise InputError(
        f"{start} holds numbers too small to be told apart, {largest:.3g} at most, below "
        f"{SMALLEST:g}. Correct them, or scale them up."
    )


def check_offsets(columns: FloatArray, names: Sequence[str], where: str) -> None:
    """Raise if a column (q, m) varies by too little around its values to be weighed by.

    Log odds are sums of coefficients times values. Where values are 1e10 times their spread or
    more, what is left when they cancel is rounding. A spread of a few last digits is none.

    >>> check_offsets(1e15 + np.arange(9.0)[None], ["age"], "people")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: people: 'age' varies by 8 around 1e+15: its values agree in nearly ...
    """
    if not columns.shape[1]:
        return
    low, high = columns.min(axis=1), columns.max(axis=1)
    size, spread = np.maximum(np.abs(low), np.abs(high)), high - low
    for j in np.flatnonzero((spread > _DIGITS * size) & (spread < size / _FAR)).tolist():
        raise InputError(
            f"{where}: {names[j]!r} varies by {spread[j]:.3g} around {low[j]:.6g}: its values "
            "agree in nearly all their digits. Subtract its mean, or leave it out."
        )


def check_positive(value: float, name: str) -> float:
    """Return ``value`` if it is finite and above zero."""
    if not (isinstance(value, Real) and 0.0 < value < np.inf):
        raise InputError(f"{name} must be a finite number above 0, not {shown(value)}.")
    return value


def shown(value: object) -> str:
    """Return how a value is shown in a message, cut where it is long.

    >>> shown("a"), len(shown("a" * 1000))
    ("'a'", 160)
    """
    if isinstance(value, int) and abs(value) >= 10**4000:
        return "a number of thousands of digits"  # Python refuses to write it
    return _cut(repr(value))


def visible(text: str) -> str:
    r"""Return text in which characters that are not seen, or turn others around, are written out.

    >>> visible("a\u202eb\x1b[31m\tc")
    'a\\u202eb\\x1b[31m\\tc'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _is_seen(c) else c.encode("unicode_escape").decode() for c in text)


def _is_seen(character: str) -> bool:
    # spaces other than the plain one are seen as one; joiners shape letters of some scripts
    return character.isprintable() or unicodedata.category(character) == "Zs" or character in _JOINS


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def check_rows(expected: int, **arrays: FloatArray | np.ndarray) -> None:
    """Raise if an array's first axis is not ``expected`` long."""
    for name, array in arrays.items():
        if len(array) != expected:
            raise InputError(f"{name} has {len(array)} rows, expected {expected}.")
