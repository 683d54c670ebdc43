"""``python -m benchmarks.audit``: an audit of a real-sized log.

Writes a population of a million clients and 100 rounds of 200,000 enrolled clients each (20 million
rows), with times and categories, and gathers an audit of it in a process of its own, with the
default fit, in one step and in three. Results go to benchmarks/results/audit.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.special import expit

from fedipw.data import Ledger
from fedipw.experiments.files import environment

RESULT = Path(__file__).parent / "results" / "audit.json"
SECONDS, GIGABYTES, BYTES = 180.0, 3.0, 1_000_000  # what an audit may take


def write_log(directory: Path, clients: int, rounds: int, *, steps: int, seed: int = 0) -> int:
    """Write a population, a fifth of it enrolled, and its rounds; return the number enrolled."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((3, clients))
    system = rng.choice(["android", "ios", "web"], clients, p=[0.6, 0.3, 0.1])
    region = rng.choice([f"region {k}" for k in range(6)], clients)
    odds = -1.65 + 0.8 * z[0] - 0.5 * z[1] + 0.5 * (system == "ios")
    enrolled = rng.random(clients) < expit(odds)
    people = {"unit_id": np.arange(clients), "enrolled": enrolled, "os": system, "region": region}
    people |= {f"z{j + 1}": z[j] for j in range(3)}
    pl.DataFrame(people).write_parquet(directory / "people.parquet")
    ids = np.flatnonzero(enrolled)
    n, z, ledger = len(ids), z[:, ids], Ledger(directory / "rounds")
    for index in range(1, rounds + 1):
        opened = datetime(2026, 1, 1) + timedelta(hours=index)
        battery, network = rng.standard_normal(n), rng.choice(["wifi", "cell", "none"], n)
        wave = 0.4 * np.sin(2 * np.pi * index / 24)
        available = rng.random(n) < expit(0.2 + 0.5 * z[0] + wave)
        invited = available & (rng.random(n) < 0.5)
        odds = 0.5 + 0.6 * battery + 0.3 * z[1] + 0.4 * (network == "wifi")
        replied = invited & (rng.random(n) < expit(odds))
        table = {"unit_id": ids, "invited": invited, "replied": replied, "battery": battery}
        table |= {"network": network, "bars": rng.integers(0, 6, n), "opened_at": [opened] * n}
        if steps == 3:
            table |= {"available": available, "invite_prob": np.full(n, 0.5)}
        ledger.append(index, pl.DataFrame(table))
    return n


def run(directory: Path, fit: str) -> dict[str, Any]:
    """Return seconds, peak memory and bytes of the audit, made by a process of its own."""
    out = directory / f"audit-{fit}.json"
    command = [sys.executable, "-m", "benchmarks.audit", "--gather", str(directory)]
    command += ["--fit", fit, "--out", str(out)]
    began = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with {status}")
    return {
        "seconds": time.perf_counter() - began,
        "gigabytes": used.ru_maxrss / 2**20,
        "bytes": out.stat().st_size,
        "rows": json.loads(out.read_text())["sizes"]["rows"],
    }


def gather(directory: Path, fit: str, out: Path) -> None:
    """Write the audit of a log."""
    from fedipw.audit.gather import audit_facts
    from fedipw.data import TableFile
    from fedipw.propensity import LogSettings, LogWindow
    from fedipw.weights import method_named
    from fedipw.weights.logrun import LogPlan
    from fedipw.weights.people import KnownPopulation

    ledger = Ledger(directory / "rounds")
    people = KnownPopulation.of(TableFile(directory / "people.parquet"), later=ledger.covariates)
    plan = LogPlan(method=method_named("fedipw"), settings=LogSettings(window=LogWindow(fit)))
    found = audit_facts(people, ledger, plan, title="benchmark")
    out.write_text(json.dumps(found.to_json(), allow_nan=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--gather", type=Path, help="only gather the audit of this log")
    parser.add_argument("--fit", default="past")
    arguments = parser.parse_args()
    if arguments.gather is not None:
        gather(arguments.gather, arguments.fit, arguments.out)
        return
    result: dict[str, Any] = {"clients": arguments.clients, "rounds": arguments.rounds, "runs": {}}
    result["limits"] = {"seconds": SECONDS, "gigabytes": GIGABYTES, "bytes": BYTES}
    for steps in (1, 3):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            result["enrolled"] = write_log(
                directory, arguments.clients, arguments.rounds, steps=steps
            )
            for fit in ("past", "pooled"):
                found = run(directory, fit)
                result["runs"][f"{fit}, {'one step' if steps == 1 else 'three steps'}"] = found
                print(steps, fit, found, flush=True)
    arguments.out.write_text(json.dumps(result | environment(), indent=2) + "\n")


if __name__ == "__main__":
    main()
