"""``python -m benchmarks.incremental``: what rounds cost that are added to a long ledger.

Writes a population and a ledger of 1,000 rounds, runs ``fedipw weights`` and ``fedipw audit`` on
it with ``--state``, adds 100 rounds, and runs both again: with the state, and without one, from
scratch. The files of the last two runs must have the same bytes. Results go to
benchmarks/results/incremental.json, and as a table to docs/_static/incremental-benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ledger import write_log
from fedipw.lab.files import environment

RESULT = Path(__file__).parent / "results" / "incremental.json"
TABLE = Path(__file__).parents[1] / "docs" / "_static" / "incremental-benchmark.md"
OUTPUTS = {"weights": ("weights.parquet",), "audit": ("audit.html", "audit.json")}
Runner = Callable[[list[str]], dict[str, Any]]
FEW = -1.75  # log odds by which about a fifth of the population is enrolled


def arguments(job: str, directory: Path, out: Path, *more: str) -> list[str]:
    """Return the words of a command whose outputs go to a directory."""
    out.mkdir(exist_ok=True)
    files = [str(out / name) for name in OUTPUTS[job]]
    given = ["--population", str(directory / "people.parquet")]
    given += ["--rounds", str(directory / "rounds"), "--out", files[0], *more]
    return [job, "-q", "--force", *given, "--json", *files[1:]]


def measured(words: list[str]) -> dict[str, Any]:
    """Run a command; return its seconds, its processor time, its peak memory and its output."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "fedipw", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status  # it was waited for
    if status:
        raise RuntimeError(f"{command} ended with {status}")
    return {
        "seconds": time.perf_counter() - began,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "gigabytes": used.ru_maxrss / 2**20,
        "said": said,
    }


def shown(directory: Path, after: int) -> None:
    """Let the ledger have its first rounds only."""
    rounds = directory / "rounds"
    rounds.mkdir(exist_ok=True)
    for path in sorted((directory / "all").iterdir()):
        number = int(path.stem[-6:]) if path.suffix == ".parquet" else 0
        if number <= after and not (rounds / path.name).exists():
            os.link(path, rounds / path.name)


def compared(
    job: str, directory: Path, rounds: int, added: int, run: Runner = measured
) -> dict[str, Any]:
    """Return the costs of a first run, of one on the rounds added, and of one from scratch."""
    grown, whole, state = directory / "grown", directory / "whole", str(directory / "state")
    shown(directory, rounds)
    found = {"first": run(arguments(job, directory, grown, "--state", state))}
    shown(directory, rounds + added)
    found["added"] = run(arguments(job, directory, grown, "--state", state))
    found["scratch"] = run(arguments(job, directory, whole))
    said = {name: cost.pop("said") for name, cost in found.items()}
    same = [(grown / n).read_bytes() == (whole / n).read_bytes() for n in OUTPUTS[job]]
    if job == "weights":  # the summary names the output
        same.append(said["added"].replace(str(grown), str(whole)) == said["scratch"])
    held = [path for path in (directory / "state" / job).rglob("*") if path.is_file()]
    spent = [found[name]["processor_seconds"] for name in ("added", "scratch")]
    return {
        **found,
        "same_bytes": all(same),
        "share": spent[0] / spent[1],
        "state_gigabytes": sum(path.stat().st_size for path in held) / 2**30,
    }


def table(result: dict[str, Any]) -> str:
    """Return the costs as a table for the documentation."""
    head = (
        f"first run, {result['rounds']:,} rounds",
        f"{result['added']} rounds more",
        "from scratch",
    )
    lines = [f"| | {' | '.join(head)} | share |", "|---|---|---|---|---|"]
    for job in OUTPUTS:
        if job in result:
            costs = [result[job][name] for name in ("first", "added", "scratch")]
            spent = " | ".join(f"{cost['processor_seconds']:.0f}" for cost in costs)
            held = " | ".join(f"{cost['gigabytes']:.2f}" for cost in costs)
            lines.append(f"| `{job}`, processor seconds | {spent} | {result[job]['share']:.0%} |")
            lines.append(f"| peak GiB | {held} | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--added", type=int, default=100)
    parser.add_argument("--jobs", nargs="+", default=list(OUTPUTS), choices=list(OUTPUTS))
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    result: dict[str, Any] = {}
    if given.out.exists():  # jobs may be run one by one
        result = json.loads(given.out.read_text())
    sizes = {"clients": given.clients, "rounds": given.rounds, "added": given.added}
    result |= {**sizes, "environment": environment()}
    for job in given.jobs:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            result["enrolled"] = write_log(
                directory, given.clients, given.rounds + given.added, steps=1, offset=FEW
            )
            (directory / "rounds").rename(directory / "all")
            result[job] = compared(job, directory, given.rounds, given.added)
            print(job, json.dumps(result[job]), flush=True)
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    if given.out == RESULT:
        TABLE.write_text(table(result))


if __name__ == "__main__":
    main()
