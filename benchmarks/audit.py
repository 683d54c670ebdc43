"""``python -m benchmarks.audit``: ``fedipw audit`` on real-sized logs of 20 million rows.

A million clients of whom a fifth are enrolled, over 100 rounds; and a million enrolled of two
million, over 20 rounds. Results go to benchmarks/results/audit.json, the docs' table to
docs/_static/audit-benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.special import expit

from fedipw.lab.files import environment
from fedipw.tables import Ledger

RESULT = Path(__file__).parent / "results" / "audit.json"
TABLE = Path(__file__).parents[1] / "docs" / "_static" / "audit-benchmark.md"
SECONDS, GIGABYTES = 180.0, 3.0  # what an audit may take
METRICS = "metrics.parquet"
FITS: dict[str, tuple[str, ...]] = {
    "past fit": ("--participation-fit", "past"),
    "pooled fit": ("--participation-fit", "pooled"),
}


@dataclass(frozen=True)
class Case:
    """A log, and the audits made of it."""

    name: str
    clients: int
    rounds: int
    intercept: float  # of the log odds of enrollment
    steps: int
    runs: dict[str, tuple[str, ...]]


CASES = (
    Case("220,000 enrolled, one step", 1_000_000, 100, -1.65, 1, FITS),
    Case(
        "220,000 enrolled, three steps", 1_000_000, 100, -1.65, 3,
        {**FITS, "past fit and a metric": ("--metrics", METRICS, "--by", "os")},
    ),
    Case("1,000,000 enrolled, one step", 2_000_000, 20, -0.15, 1, {"past fit": FITS["past fit"]}),
)  # fmt: skip


def write_log(directory: Path, clients: int, case: Case, *, seed: int = 0) -> None:
    """Write a population, its rounds, and a metric of the replies."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((3, clients))
    system = rng.choice(["android", "ios", "web"], clients, p=[0.6, 0.3, 0.1])
    region = rng.choice([f"region {k}" for k in range(30)], clients)
    odds = case.intercept + 0.8 * z[0] - 0.5 * z[1] + 0.5 * (system == "ios")
    enrolled = rng.random(clients) < expit(odds)
    people = {"unit_id": np.arange(clients), "enrolled": enrolled, "os": system, "region": region}
    people |= {f"z{j + 1}": z[j] for j in range(3)}
    pl.DataFrame(people).write_parquet(directory / "people.parquet")
    ids = np.flatnonzero(enrolled)
    n, z, ledger = len(ids), z[:, ids], Ledger(directory / "rounds")
    reported = []
    for index in range(1, case.rounds + 1):
        opened = datetime(2026, 1, 1) + timedelta(hours=index)
        battery, network = rng.standard_normal(n), rng.choice(["wifi", "cell", "none"], n)
        wave = 0.4 * np.sin(2 * np.pi * index / 24)
        available = rng.random(n) < expit(0.2 + 0.5 * z[0] + wave)
        invited = available & (rng.random(n) < 0.5)
        odds = 0.5 + 0.6 * battery + 0.3 * z[1] + 0.4 * (network == "wifi")
        replied = invited & (rng.random(n) < expit(odds))
        table = {"unit_id": ids, "invited": invited, "replied": replied, "battery": battery}
        table |= {"network": network, "bars": rng.integers(0, 6, n), "opened_at": [opened] * n}
        if case.steps == 3:
            table |= {"available": available, "invite_prob": np.full(n, 0.5)}
        ledger.append(index, pl.DataFrame(table))
        value = 0.5 + 0.1 * z[0, replied] + 0.1 * rng.random(replied.sum())
        reported.append(pl.DataFrame({"unit_id": ids[replied], "round": index, "value": value}))
    pl.concat(reported).write_parquet(directory / METRICS)


def run(directory: Path, *options: str) -> dict[str, Any]:
    """Return seconds, peak memory and bytes of the command."""
    page, values = directory / "report.html", directory / "report.json"
    command = [sys.executable, "-m", "fedipw.cli", "audit", "--out", str(page)]
    command += ["--population", str(directory / "people.parquet"), "--json", str(values)]
    command += ["--rounds", str(directory / "rounds"), *options]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with {status}")
    sizes = json.loads(values.read_text())["sizes"]
    return {
        "seconds": time.perf_counter() - began,
        "gigabytes": used.ru_maxrss / 2**20,
        "page_bytes": page.stat().st_size,
        "rows": sizes["rows"],
        "enrolled": sizes["enrolled"],
        "replies": sizes["replies"],
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return the runs as a table for the docs."""
    lines = ["| audit | rows of the ledger | seconds | GB | page |", "|---|---:|---:|---:|---:|"]
    for name, r in runs.items():
        page = f"{r['page_bytes'] / 1e6:.1f} MB"
        lines.append(
            f"| {name} | {r['rows']:,} | {r['seconds']:.0f} | {r['gigabytes']:.1f} | {page} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of clients")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"limits": {"seconds": SECONDS, "gigabytes": GIGABYTES}, "runs": {}}
    for case in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            clients = int(case.clients * arguments.scale)
            write_log(directory, clients, case)
            for name, options in case.runs.items():
                chosen = [str(directory / x) if x == METRICS else x for x in options]
                found = run(directory, *chosen)
                result["runs"][f"{case.name}, {name}"] = found
                print(case.name, name, found, flush=True)
    arguments.out.write_text(json.dumps(result | environment(), indent=2) + "\n")
    arguments.table.write_text(table(result["runs"]), encoding="utf-8")


if __name__ == "__main__":
    main()
