"""Border checks. Each names the thing that is wrong and what would be right; none repairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike

from fedipw.errors import InputError
from fedipw.numerics import FloatArray

SHOWN = 5


def some(items: Iterable[object]) -> str:
    """Return the first few items as text, with the number left out.

    >>> some(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    values = list(items)
    shown = ", ".join(str(value) for value in values[:SHOWN])
    rest = len(values) - SHOWN
    return shown if rest <= 0 else f"{shown} and {rest} more"


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
    bad = ~((probs > 0.0) & (probs <= 1.0))  # NaN fails both comparisons
    if bad.any():
        rows = np.flatnonzero(bad)
        listed = some(f"row {row}: {float(probs.ravel()[row])!r}" for row in rows.tolist())
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


def check_positive(value: float, name: str) -> float:
    """Return ``value`` if it is finite and above zero."""
    if not (isinstance(value, Real) and np.isfinite(value) and value > 0):
        raise InputError(f"{name} must be a finite number above 0, not {value!r}.")
    return value


def check_rows(expected: int, **arrays: FloatArray | np.ndarray) -> None:
    """Raise if an array's first axis is not ``expected`` long."""
    for name, array in arrays.items():
        if len(array) != expected:
            raise InputError(f"{name} has {len(array)} rows, expected {expected}.")
