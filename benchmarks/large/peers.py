"""What one would use instead, on the same files: packages in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.large.agreement import apart, compared_weights
from benchmarks.large.commands import COMMANDS, GIGABYTE, FailedError, ended, place, started
from benchmarks.large.workload import SYSTEMS, Log

HERE = Path(__file__).parent
POOLED = COMMANDS[1]
BY_HAND = ("scikit-learn", "glum")
BALANCE = ("same model", "10 penalties", "defaults")
_LOOK = 0.1  # seconds between looks at memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may hold and take before it is ended."""

    gigabytes: float
    seconds: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Environments:
    """Pythons of the peers, each made on first use in a folder."""

    folder: Path

    def python(self, name: str, requirements: Path) -> str:
        """Return the Python of an environment."""
        python = self.folder / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.folder / name)], check=True)
            install = [python, "-m", "pip", "install", "-q", "-r", requirements]
            subprocess.run(list(map(str, install)), check=True)
        return str(python)

    @property
    def by_hand(self) -> str:
        return self.python("by-hand", HERE.parent / "fitting" / "requirements-peers.txt")

    @property
    def balance(self) -> str:
        return self.python("balance", HERE / "requirements-balance.txt")


def threads() -> dict[str, str | None]:
    """Return the limits of threads that processes inherit."""
    return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")}


def weights(
    logs: Sequence[Log], environments: Environments, folder: Path, limits: Limits,
    more: Sequence[str],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield what pooled weights take by fedipw and by hand, and how far the latter differ."""
    for log in logs:
        facts = {"rounds": log.length, "rows": log.rows}
        ours = place(folder / str(log.length), POOLED)
        found = _limited(POOLED.line(log, ours, *more), ours, limits)
        yield {"package": "fedipw", "version": version("fedipw"), **facts, **found}
        for name in BY_HAND:
            out = folder / str(log.length) / name
            line = [environments.by_hand, "-P", str(HERE / "by_hand.py"), name, str(log.people)]
            result = out.with_suffix(".parquet")
            found = _limited([*line, str(log.rounds), str(result)], out, limits)
            if "ended" not in found:
                agreed = apart(compared_weights, ours.with_suffix(".parquet"), result)
                found["largest_difference"] = agreed.largest
            yield {"package": name, **facts, **found}


def balanced(
    data: Path, sizes: Sequence[int], environments: Environments, folder: Path, limits: Limits
) -> Iterator[dict[str, Any]]:
    """Yield what weights of the enrolled of smaller populations take, and what they balance."""
    for clients in sizes:
        where = folder / f"clients-{clients}"
        where.mkdir(parents=True, exist_ok=True)
        people, ours = where / "people.parquet", where / "fedipw"
        pl.scan_parquet(data / "people.parquet").head(clients).sink_parquet(people)
        line = [sys.executable, str(HERE / "by_fedipw.py"), str(people), f"{ours}.parquet"]
        runs = {"fedipw": (line, ours)}
        for settings in BALANCE:
            out = where / settings.replace(" ", "-")
            line = [environments.balance, "-P", str(HERE / "by_balance.py"), settings]
            runs[f"balance, {settings}"] = ([*line, str(people), f"{out}.parquet"], out)
        for name, (words, out) in runs.items():
            found = _limited(words, out, limits)
            if "ended" not in found:
                found |= apart(_balance, people, Path(f"{out}.parquet"), Path(f"{ours}.parquet"))
            yield {"package": name, "clients": clients, **found}


def _limited(line: Sequence[str], out: Path, limits: Limits) -> dict[str, Any]:
    """Run a process within limits; return what it took and printed, or why it was ended."""
    import psutil  # type: ignore[import-untyped]

    out.parent.mkdir(parents=True, exist_ok=True)
    began, over, why = time.perf_counter(), threading.Event(), list[str]()
    process = started(line, out)

    def watch() -> None:
        seen = psutil.Process(process.pid)
        while not over.wait(_LOOK):
            try:
                held = seen.memory_info().rss / GIGABYTE
            except psutil.NoSuchProcess:
                return
            if held > limits.gigabytes or time.perf_counter() - began > limits.seconds:
                why.append("memory" if held > limits.gigabytes else "time")
                process.kill()
                return

    guard = threading.Thread(target=watch, daemon=True)
    guard.start()
    try:
        used = ended(process, began, out)
    except FailedError:
        if not why:
            raise
        return {"ended": why[0], "seconds": time.perf_counter() - began}
    finally:
        over.set()
        guard.join()
    return asdict(used) | _printed(out)


def _printed(out: Path) -> dict[str, Any]:
    """Return version and iterations, the last line that a peer prints."""
    last = json.loads(out.with_suffix(".json").read_text().strip().splitlines()[-1])
    return {key: last[key] for key in ("version", "iterations") if key in last}


def _balance(people: Path, weights: Path, ours: Path) -> dict[str, Any]:
    """Return how far weighted means of the enrolled are from the population's."""
    names = ["z1", "z2", "z3", *SYSTEMS]
    levels = [(pl.col("os") == level).cast(pl.Float64).alias(level) for level in SYSTEMS]
    frame = pl.read_parquet(people).with_columns(levels)
    sample = _joined(frame, weights)
    X, w = sample.select(names).to_numpy(), sample["weight"].to_numpy()
    population = frame.select(names).to_numpy()
    mean, sd = population.mean(axis=0), population.std(axis=0)
    asmd, before = np.abs(w @ X / w.sum() - mean) / sd, np.abs(X.mean(axis=0) - mean) / sd
    own = _joined(frame, ours)["weight"].to_numpy()
    share, other = w / w.sum(), own / own.sum()
    return {
        "enrolled": sample.height,
        "asmd_before": float(before.mean()),
        "asmd": float(asmd.mean()),
        "largest_asmd": float(asmd.max()),
        "effective": float(w.sum() ** 2 / (w @ w)),
        "largest_difference": float(np.abs(share / other - 1.0).max()),
    }


def _joined(frame: pl.DataFrame, weights: Path) -> pl.DataFrame:
    """Return the enrolled with their weights, in the order of the population."""
    given = pl.read_parquet(weights).select(pl.col("unit_id").cast(pl.Int64), "weight")
    found = frame.filter("enrolled").join(given, on="unit_id", maintain_order="left")
    if found.height != int(frame["enrolled"].sum()):
        raise RuntimeError(f"{weights} lacks enrolled clients.")
    return found
