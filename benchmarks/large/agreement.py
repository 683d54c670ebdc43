"""Whether two runs of a command gave the same results, found in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from benchmarks.compare.agreement import Agreement, Difference, compared_json
from benchmarks.large.commands import Command

T = TypeVar("T")
TOLERANCE = 1e-10
_KEYS = ["round", "unit_id"]


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a fresh process, so that its memory is not counted as a later child's."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def agreement(command: Command, old: Path, new: Path) -> Agreement:
    """Return how far the results of two runs of a command agree."""
    printed = [json.loads(out.with_suffix(".json").read_text()) for out in (old, new)]
    found = compared_json(*printed)
    if command.table is not None:
        found += apart(compared_weights, command.results(old), command.results(new))
    return found


def compared_weights(old: Path, new: Path) -> Agreement:
    """Compare weights and probabilities by client and round, as shares of their own size.

    None of them may be small only because there are many clients: no absolute tolerance is added.
    """
    before, after = (_sorted(path) for path in (old, new))
    if before.columns != after.columns:
        return _infinite("columns", f"{before.columns} -> {after.columns}")
    if not before.select(_KEYS).equals(after.select(_KEYS)):
        return _infinite("rows", f"{before.height} -> {after.height}, not the same replies")
    found = Agreement()
    for name in (n for n in before.columns if n not in _KEYS):
        a, b = before[name].to_numpy(), after[name].to_numpy()
        size = float(np.max(np.abs(a / b - 1.0), initial=0.0))
        differs = () if size <= TOLERANCE else (Difference(name, size, f"up to {size:.1e}"),)
        found += Agreement(before.height, size, differs)
    return found


def _sorted(path: Path) -> pl.DataFrame:
    source = path / "**" / "*.parquet" if path.is_dir() else path
    return pl.read_parquet(source).with_columns(pl.col("unit_id").cast(pl.Int64)).sort(_KEYS)


def _infinite(where: str, what: str) -> Agreement:
    return Agreement(1, float("inf"), (Difference(where, float("inf"), what),))
