"""Commands on a large log, each in a process of its own: what it took, and what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.large.workload import Log

GIGABYTE = 1e9
_KIBIBYTE = 1024  # unit of ru_maxrss on Linux


@dataclass(frozen=True, slots=True)
class Used:
    """What a process took; memory is the peak of its resident pages, those of files among them."""

    seconds: float
    processor_seconds: float
    gigabytes: float


@dataclass(frozen=True, slots=True)
class Command:
    """A command of fedipw, its words with names of files to fill in, and how to read its result."""

    name: str
    words: tuple[str, ...]
    table: str | None = None  # suffix of a table of results; else they are JSON

    def line(self, log: Log, out: Path, *more: str) -> list[str]:
        """Return the command on a log, its files under names that begin with ``out``."""
        files = {"loss": log.metric("loss"), "accuracy": log.metric("accuracy"), "out": out}
        words = [word.format(**files) for word in self.words]
        where = ["--population", str(log.people), "--rounds", str(log.rounds), "--force"]
        return [sys.executable, "-m", "fedipw", *words, *where, *more]

    def results(self, out: Path) -> Path:
        """Return the file of results."""
        return out.with_suffix(self.table or ".json")

    def result_rows(self, out: Path) -> int:
        """Return the number of rows of a table of results, or of estimates, or audited."""
        if self.table is not None:
            path = self.results(out)
            source = path / "**" / "*.parquet" if path.is_dir() else path
            return int(pl.scan_parquet(source).select(pl.len()).collect().item())
        found = json.loads(self.results(out).read_text())
        return len(found["estimates"]) if "estimates" in found else int(found["sizes"]["rows"])


_WEIGHTS = ("weights", "--json", "--out", "{out}.parquet", "--participation-fit")
COMMANDS = (
    Command("weights, past fit", (*_WEIGHTS, "past"), ".parquet"),
    Command("weights, pooled fit", (*_WEIGHTS, "pooled"), ".parquet"),
    Command("evaluate, one metric", ("evaluate", "--metrics", "{loss}", "--json")),
    Command(
        "evaluate, two metrics",
        ("evaluate", "--metrics", "{loss}", "--against", "{accuracy}", "--json"),
    ),
    Command(
        "audit with a metric",
        ("audit", "--metrics", "{loss}", "--out", "{out}.html", "--json", "{out}.json"),
    ),
)


def chosen(names: Sequence[str]) -> list[Command]:
    """Return commands whose name begins with one of these; all if there are none."""
    found = [c for c in COMMANDS if not names or c.name.startswith(tuple(names))]
    if not found:
        raise SystemExit(f"No command begins with {', '.join(names)}.")
    return found


def place(folder: Path, command: Command) -> Path:
    """Return what the names of a command's files begin with, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / command.name.replace(", ", "-").replace(" ", "-")


class FailedError(RuntimeError):
    """A process that ended with an error, or was ended."""


def started(line: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    """Start a process; what it prints goes to files whose names begin with ``out``.

    Standard output is ``.json`` unless the command writes this file itself.
    """
    printed = ".txt" if f"{out}.json" in line else ".json"
    with out.with_suffix(printed).open("wb") as output, out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(list(line), stdin=subprocess.DEVNULL, stdout=output, stderr=log)


def ended(process: subprocess.Popen[bytes], began: float, out: Path) -> Used:
    """Wait for a process and return what it took.

    Linux counts what the parent held when it started the process as a peak of the child, so the
    parent must stay small.
    """
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = out.with_suffix(".log").read_text(errors="replace")[-2000:]
        raise FailedError(f"{out.name} ended with {process.returncode}: {said}")
    return Used(
        time.perf_counter() - began,
        used.ru_utime + used.ru_stime,
        used.ru_maxrss * _KIBIBYTE / GIGABYTE,
    )


def measured(line: Sequence[str], out: Path) -> Used:
    """Run a process to its end and return what it took."""
    began = time.perf_counter()
    return ended(started(line, out), began, out)


def kept(line: Sequence[str], out: Path) -> Used:
    """Run a process and keep what it took beside its files."""
    used = measured(line, out)
    out.with_suffix(".used").write_text(json.dumps({"line": line, "used": asdict(used)}))
    return used


def known(line: Sequence[str], out: Path) -> Used:
    """Return what the same process took before, or run it if there was none."""
    path = out.with_suffix(".used")
    saved: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"line": None}
    return Used(**saved["used"]) if saved["line"] == line else kept(line, out)


def run(
    logs: Sequence[Log],
    commands: Sequence[Command],
    folder: Path,
    more: Sequence[str],
    save: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Run each command on each log; what was found is saved after every one of them.

    Parameters
    ----------
    logs, commands
        What to run, on which files.
    folder
        Place for results, one folder per log in it; they are kept.
    more
        Further options of every command.
    save
        Receives all rows so far.
    """
    rows: list[dict[str, Any]] = []
    for log in logs:
        count = log.rows
        for command in commands:
            out = place(folder / str(log.length), command)
            used = kept(command.line(log, out, *more), out)
            row = {"command": command.name, "rounds": log.length, "rows": count, **asdict(used)}
            row["result_rows"] = command.result_rows(out)
            rows.append(row)
            print(row, flush=True)
            save(rows)
    return rows


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return how time grows with the rows of a ledger, for each command.

    ``seconds_per_million`` includes what the population costs, whatever the ledger. ``slope_ratio``
    leaves this out: seconds per row between the two longest ledgers over those between the two
    shortest; 1 is linear, more is faster than linear.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["command"] for row in rows):
        own = sorted((r for r in rows if r["command"] == name), key=lambda r: r["rows"])
        size, seconds = [r["rows"] for r in own], [r["seconds"] for r in own]
        each = [s / (n / 1e6) for s, n in zip(seconds, size, strict=True)]
        found[name] = {
            "seconds_per_million": each,
            "ratio": each[-1] / each[0],
            "slope_ratio": _slope_ratio(size, seconds) if len(own) > 2 else None,
        }
    return found


def _slope_ratio(size: Sequence[int], seconds: Sequence[float]) -> float:
    first = (seconds[1] - seconds[0]) / (size[1] - size[0])
    last = (seconds[-1] - seconds[-2]) / (size[-1] - size[-2])
    return last / first
