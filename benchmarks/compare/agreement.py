"""Whether two outputs of the same command hold the same numbers.

Tables are joined by their keys, JSON is walked. Numbers must be equal to 1e-9 relative or 1e-12
absolute. Text is counted where it differs and is no fault: wording may change. Keys and columns
that only the new output has are listed and are no fault either; rows are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

RELATIVE, ABSOLUTE = 1e-9, 1e-12

# What differs between any two runs, and how often a solver went over its rows.
IGNORED = frozenset(
    {"versions", "made_with", "python", "platform", "version"}
    | {"seconds", "time", "times", "started", "finished", "out", "path", "passes", "iterations"}
)
# Columns and fields that name a row; a list of objects that all have the same of them is joined by
# them, and by place if they are not unique.
_NAMES = ("panel", "scenario", "method", "group", "estimator", "stage", "column", "name", "level")
_NUMBERED = ("strength", "x", "seed", "round", "first", "odds_ratio")


@dataclass(frozen=True, slots=True)
class Expected:
    """A difference that a mended defect explains.

    Patterns are those of :mod:`fnmatch`. ``command`` is matched against the command as printed
    (``weights greg``), ``what`` against the place printed with the difference
    (``weights.parquet:weight``, ``stdout/notes/*``, ``exit code``).
    """

    command: str
    what: str
    why: str
    world: str = "*"

    def explains(self, world: str, command: str, place: str) -> bool:
        """Return whether this entry is about a difference."""
        found = ((world, self.world), (command, self.command), (place, self.what))
        return all(fnmatchcase(text, pattern) for text, pattern in found)


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where two outputs differ, by how much (infinity where something is missing)."""

    place: str
    size: float
    what: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a comparison found."""

    numbers: int = 0
    largest: float = 0.0
    differences: tuple[Difference, ...] = ()
    added: tuple[str, ...] = ()  # keys and columns that only the new output has
    texts: int = 0  # texts that differ

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.numbers + other.numbers,
            max(self.largest, other.largest),
            self.differences + other.differences,
            self.added + other.added,
            self.texts + other.texts,
        )


def difference_of(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return differences as shares of the larger number, the same shape.

    Numbers are taken as 1e-3 or more, so that 1e-9 of that is the absolute tolerance. Two missing
    numbers are the same; one is infinitely far from any number.
    """
    size = np.maximum(np.maximum(np.abs(old), np.abs(new)), ABSOLUTE / RELATIVE)
    with np.errstate(invalid="ignore"):
        share = np.abs(old - new) / size
    share = np.where(np.isnan(share), np.inf, share)
    same = (old == new) | (np.isnan(old) & np.isnan(new))
    return np.where(same, 0.0, share)


def compared_json(old: Any, new: Any, place: str = "") -> Agreement:
    """Compare two JSON values."""
    if isinstance(old, dict) and isinstance(new, dict):
        return _objects(old, new, place)
    if isinstance(old, list) and isinstance(new, list):
        return _lists(old, new, place)
    if isinstance(old, str) and isinstance(new, str):
        return Agreement(texts=int(old != new))
    if old is None and new is None:
        return Agreement()
    if _is_number(old) and _is_number(new):
        size = float(difference_of(np.array(old, dtype=float), np.array(new, dtype=float)))
        found = (Difference(place, size, f"{old!r} -> {new!r}"),) if size > RELATIVE else ()
        return Agreement(1, size, found)
    return _gone(place, f"{_short(old)} -> {_short(new)}")


def _objects(old: dict[str, Any], new: dict[str, Any], place: str) -> Agreement:
    found = Agreement()
    for key, value in old.items():
        inner = f"{place}/{key}"
        if key in IGNORED:
            continue
        if key in new:
            found += compared_json(value, new[key], inner)
        elif _numbers_in(value):
            found += _gone(inner, f"missing, with {_numbers_in(value)} numbers")
        else:
            found += Agreement(texts=1)
    more = tuple(f"{place}/{k}" for k in new if k not in old and k not in IGNORED)
    return found + Agreement(added=more)


def _lists(old: list[Any], new: list[Any], place: str) -> Agreement:
    mine, other = _labelled(old), _labelled(new)
    found = Agreement()
    for label, value in mine.items():
        inner = f"{place}/{label}"
        if label in other:
            found += compared_json(value, other[label], inner)
        elif _numbers_in(value):
            found += _gone(inner, "missing")
        else:
            found += Agreement(texts=1)
    for label, value in other.items():
        if label not in mine:
            inner = f"{place}/{label}"
            found += _gone(inner, "added") if _numbers_in(value) else Agreement(texts=1)
    return found


def _labelled(items: list[Any]) -> dict[str, Any]:
    """Return the items of a list by what names them, by place if nothing does."""
    if items and all(isinstance(item, dict) for item in items):
        names = [n for n in (*_NAMES, *_NUMBERED) if all(n in item for item in items)]
        for many in range(1, len(names) + 1):  # by as few as will do: some of them are results
            labels = [",".join(str(item[n]) for n in names[:many]) for item in items]
            if len(set(labels)) == len(items):
                return dict(zip(labels, items, strict=True))
    return {str(place): item for place, item in enumerate(items)}


def compared_tables(
    old: pl.DataFrame, new: pl.DataFrame, keys: Sequence[str], place: str = ""
) -> Agreement:
    """Compare two tables, joined by key columns that name each row once."""
    absent = [name for name in keys if name not in new.columns]
    if absent:
        return _gone(place, f"key {', '.join(absent)} missing")
    old, new = _keyed(old, keys), _keyed(new, keys)
    if old.select(keys).is_duplicated().any():
        raise ValueError(f"{place}: {', '.join(keys)} do not name the rows.")
    if new.select(keys).is_duplicated().any():
        return _gone(place, "a row more than once")
    found = Agreement()
    for label, rows in (
        ("missing", old.join(new, on=list(keys), how="anti")),
        ("added", new.join(old, on=list(keys), how="anti")),
    ):
        if rows.height:
            first = _row_name(rows, keys, 0)
            found += _gone(f"{place}:rows", f"{rows.height} {label}, the first at {first}")
    both = old.join(new, on=list(keys), how="inner", suffix=" (new)", maintain_order="left")
    for name in old.columns:
        if name in keys or name in IGNORED:
            continue
        if name in new.columns:
            found += _compared_column(both, name, keys, f"{place}:{name}")
        elif old[name].dtype != pl.String:
            found += _gone(f"{place}:{name}", "column missing")
    more = tuple(f"{place}:{n}" for n in new.columns if n not in old.columns)
    return found + Agreement(added=more)


def _compared_column(both: pl.DataFrame, name: str, keys: Sequence[str], place: str) -> Agreement:
    old, new = both[name], both[f"{name} (new)"]
    if old.dtype == new.dtype == pl.String:
        return Agreement(texts=int((~old.eq_missing(new)).sum()))
    sizes = difference_of(_floats(old), _floats(new))
    numbers = int((old.is_not_null() | new.is_not_null()).sum())
    if not sizes.size:
        return Agreement()
    worst, apart = int(sizes.argmax()), int((sizes > RELATIVE).sum())
    if not apart:
        return Agreement(numbers, float(sizes[worst]))
    what = f"{apart} of {len(sizes)} differ, most at {_row_name(both, keys, worst)}: "
    what += f"{old[worst]!r} -> {new[worst]!r}"
    size = float(sizes[worst])
    return Agreement(numbers, size, (Difference(place, size, what),))


def _keyed(table: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Return a table whose keys are numbers or text, whichever file they come from."""
    number = [n for n in keys if table[n].dtype.is_numeric()]
    text = [n for n in keys if n not in number]
    return table.with_columns(
        pl.col(number).cast(pl.Float64), pl.col(text).cast(pl.String).fill_null("")
    )


def _floats(column: pl.Series) -> np.ndarray:
    """Return numbers, (n,): NaN where there is none; an empty column of a CSV file is text."""
    values: np.ndarray = column.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
    return values


def _row_name(table: pl.DataFrame, keys: Sequence[str], row: int) -> str:
    values = (table[n][row] for n in keys)
    whole = (int(v) if isinstance(v, float) and v.is_integer() else v for v in values)
    return " ".join(f"{n}={v}" for n, v in zip(keys, whole, strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)  # true and false are 1 and 0


def _numbers_in(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_numbers_in(v) for k, v in value.items() if k not in IGNORED)
    if isinstance(value, list):
        return sum(_numbers_in(v) for v in value)
    return int(_is_number(value))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _gone(place: str, what: str) -> Agreement:
    return Agreement(1, np.inf, (Difference(place, np.inf, what),))


def compared_files(old: Path, new: Path, keys: Sequence[str]) -> Agreement:
    """Compare two output files: tables by ``keys``, JSON where there are none."""
    name = old.name
    if not new.exists():
        return _gone(name, "file missing")
    if not keys:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (old, new))
        return compared_json(before, after, old.stem)
    return compared_tables(_table(old), _table(new), keys, name)


def _table(path: Path) -> pl.DataFrame:
    if path.suffix == ".parquet":
        return pl.read_parquet(path)
    return pl.read_csv(path, infer_schema_length=None)
