"""Population targets: names, means, and their standard errors where known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import LARGEST, check_rows, some
from fedipw.tables.table import Table, TableLike

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

_LEVEL = re.compile(r"^([^\[\]:]+)\[[^\[\]]*\]$")
_TEXT = (pl.String, pl.Categorical, pl.Enum, pl.Null)
SHARES = 1e-6  # by which the shares of one category may exceed 1
TargetsLike: TypeAlias = "Mapping[str, float] | TableLike | Targets"


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Population means by name; a share for one level of a category.

    Examples
    --------
    >>> Targets.of({"age": 45.0, "os[android]": 0.7}).names
    ('age', 'os[android]')
    >>> Targets.of({"os[ios]": 0.6, "os[android]": 0.7})
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: The shares of 'os' sum to 1.3, more than 1: os[ios] = 0.6, ...
    """

    names: tuple[str, ...]
    values: FloatArray  # (q,)
    se: FloatArray | None = None  # (q,)

    def __post_init__(self) -> None:
        check_rows(len(self.names), values=self.values)
        if not self.names:
            raise InputError("There are no targets.")
        twice = sorted({n for n in self.names if self.names.count(n) > 1})
        if twice:
            raise InputError(f"{some(twice)}: each target must be given once.")
        self._check_numbers()
        self._check_shares()

    def _check_numbers(self) -> None:
        bad = [n for n, v in zip(self.names, self.values, strict=True) if not np.isfinite(v)]
        if bad:
            raise InputError(f"The target value of {some(bad)} is missing or infinite.")
        huge = [n for n, v in zip(self.names, self.values, strict=True) if abs(v) > LARGEST]
        if huge:
            raise InputError(f"The target value of {some(huge)} is beyond {LARGEST:g}.")
        if self.se is not None:
            check_rows(len(self.names), se=self.se)
            odd = [n for n, e in zip(self.names, self.se, strict=True) if not 0.0 <= e <= LARGEST]
            if odd:
                raise InputError(
                    f"The standard error of {some(odd)} must be a number from 0 to {LARGEST:g}. "
                    "Leave out a target about which nothing is known."
                )

    def _check_shares(self) -> None:
        shares: dict[str, dict[str, float]] = {}
        for name, value in zip(self.names, self.values.tolist(), strict=True):
            found = _LEVEL.match(name)
            if found is None:
                continue
            if not -SHARES <= value <= 1.0 + SHARES:
                raise InputError(f"{name} = {value:g}: the share of a level lies between 0 and 1.")
            shares.setdefault(found[1], {})[name] = value
        for column, levels in shares.items():
            if sum(levels.values()) > 1.0 + SHARES:
                listed = some(f"{n} = {v:g}" for n, v in levels.items())
                raise InputError(
                    f"The shares of {column!r} sum to {sum(levels.values()):.8g}, more than 1: "
                    f"{listed}."
                )

    @classmethod
    def of(cls, values: Mapping[str, float], se: Mapping[str, float] | None = None) -> Self:
        """Return targets from values by name."""
        errors = None if se is None else np.array([float(se.get(n, 0.0)) for n in values])
        return cls(tuple(values), np.array([float(v) for v in values.values()]), errors)

    @classmethod
    def given(cls, source: TargetsLike) -> Targets:
        """Return targets as they come: values by name, a file or frame, or targets already.

        >>> Targets.given(pl.DataFrame({"name": ["age"], "value": [45.0]})).names
        ('age',)
        """
        if isinstance(source, Targets):
            return source
        if isinstance(source, Mapping):
            return cls.of(source)
        known = isinstance(source, str | Path | pl.LazyFrame | Table)
        if known or hasattr(source, "__arrow_c_stream__"):
            return cls.read(source)
        raise InputError(
            "Targets are values by name (a dict), a path or a frame with the columns name, value "
            f"and optionally se, or Targets, not {type(source).__name__}."
        )

    @classmethod
    def read(cls, source: TableLike) -> Self:
        """Return the targets of a table with columns ``name``, ``value`` and optionally ``se``."""
        table = Table(source)
        frame = table.collect()
        for column in ("name", "value"):
            if column not in frame.columns:
                raise InputError(
                    f"{table.name} has no column {column!r}; it has {some(frame.columns)}. Targets "
                    "are name,value and optionally se."
                )
        try:
            if not (frame["name"].dtype.is_numeric() or frame["name"].dtype in _TEXT):
                raise InputError(f"column 'name' must hold text, not {frame['name'].dtype}.")
            names = frame["name"].cast(pl.String)
            if names.null_count():
                raise InputError(f"row {int(names.is_null().arg_max() or 0) + 1} has no name.")
            se = _numbers(frame, "se") if "se" in frame.columns else None
            return cls(tuple(names.to_list()), _numbers(frame, "value"), se)
        except InputError as error:
            raise InputError(f"{table.name}: {error}") from error


def _numbers(frame: pl.DataFrame, column: str) -> FloatArray:
    given = frame[column]
    if not given.dtype.is_numeric() and given.null_count() < len(given):
        raise InputError(f"column {column!r} must hold numbers, not {given.dtype}.")
    values = given.cast(pl.Float64)
    return values.fill_null(0.0 if column == "se" else np.nan).to_numpy().copy()
