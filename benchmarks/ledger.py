"""``python -m benchmarks.ledger``: weights for a real-sized log, by the command itself.

Writes a population, 100 rounds of about 200,000 enrolled clients each (20 million rows), and runs
``fedipw weights`` with the pooled fit and with fits on past rounds, in one step and in three.
Results go to benchmarks/results/ledger.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.special import expit

from fedipw.lab.files import environment
from fedipw.tables import Ledger

RESULT = Path(__file__).parent / "results" / "ledger.json"


def write_log(
    directory: Path, clients: int, rounds: int, *, steps: int, seed: int = 0, offset: float = -0.2
) -> int:
    """Write a population and its rounds; return the number of enrolled clients."""
    rng = np.random.default_rng(seed)
    z, system = rng.standard_normal((3, clients)), rng.choice(["android", "ios", "web"], clients)
    enrolled = rng.random(clients) < expit(
        offset + 0.8 * z[0] - 0.5 * z[1] + 0.5 * (system == "ios")
    )
    people = {"unit_id": np.arange(clients), "enrolled": enrolled, "os": system}
    people |= {f"z{j + 1}": z[j] for j in range(3)}
    pl.DataFrame(people).write_parquet(directory / "people.parquet")
    ids = np.flatnonzero(enrolled)
    n, z = len(ids), z[:, ids]
    ledger = Ledger(directory / "rounds")
    for index in range(1, rounds + 1):
        battery, network = rng.standard_normal(n), rng.choice(["wifi", "cell"], n)
        available = rng.random(n) < expit(0.2 + 0.5 * z[0] + 0.4 * np.sin(2 * np.pi * index / 24))
        invited = available & (rng.random(n) < 0.5)
        odds = 0.5 + 0.6 * battery + 0.3 * z[1] + 0.4 * (network == "wifi")
        replied = invited & (rng.random(n) < expit(odds))
        table = {"unit_id": ids, "invited": invited, "replied": replied, "battery": battery}
        table |= {"network": network, "signal": rng.standard_normal(n)}
        if steps == 3:
            table |= {"available": available, "invite_prob": np.full(n, 0.5)}
        ledger.append(index, pl.DataFrame(table))
    return n


def run(directory: Path, fit: str, *more: str) -> dict[str, Any]:
    """Return seconds and peak memory of the command."""
    out = directory / f"weights-{fit}.parquet"
    command = [sys.executable, "-m", "fedipw", "weights", "--json"]
    command += ["--population", str(directory / "people.parquet"), "--out", str(out)]
    command += ["--rounds", str(directory / "rounds"), "--participation-fit", fit, *more]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    summary = json.loads(process.stdout.read())
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with {status}")
    return {
        "seconds": time.perf_counter() - began,
        "gigabytes": used.ru_maxrss / 2**20,
        "weighed": summary["weighed"],
        "refits": summary["refits"],
        "passes": summary["passes"],
        "mean_weight_sum": summary["mean_weight_sum"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=425_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"clients": arguments.clients, "rounds": arguments.rounds, "runs": {}}
    for steps in (1, 3):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            result["enrolled"] = write_log(
                directory, arguments.clients, arguments.rounds, steps=steps
            )
            for label, options in {
                "pooled": ("pooled",),
                "past": ("past",),
                "past with history": ("past", "--history"),
            }.items():
                found = run(directory, *options)
                result["runs"][f"{label}, {'one step' if steps == 1 else 'three steps'}"] = found
                print(steps, label, found, flush=True)
    arguments.out.write_text(json.dumps(result | environment(), indent=2) + "\n")


if __name__ == "__main__":
    main()
