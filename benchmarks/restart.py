"""``python -m benchmarks.restart``: a live server's restart, and reading a ledger, by rounds.

For each length a ledger of small rounds is written, a server reads all of it and goes on for a few
rounds, which leaves a snapshot of its learner, and then new processes restart: with the snapshot
and without it. Results go to benchmarks/results/restart.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedipw.lab.files import environment
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import ParticipationSettings
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.weighting.live import Live
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan
from fedipw.weighting.snapshot import EVERY

RESULT = Path(__file__).parent / "results" / "restart.json"
AFTER = 5  # rounds after the snapshot
TIMES = 5
RESTART = """
import sys, time
from pathlib import Path
from benchmarks.restart import server
began = time.perf_counter()
live = server(Path(sys.argv[1]), int(sys.argv[2]))
print(time.perf_counter() - began, time.process_time(), live.rounds, *live.notes)
"""


def server(folder: Path, refit_every: int) -> Live:
    """Return a server on the population and the ledger of a directory."""
    stage = enrollment_stage(Population(folder / "people.parquet"))
    settings = ParticipationSettings(refit_every=refit_every)
    plan = Plan(method=method_named("fedipw-hajek"), settings=settings)
    return Live(stage, Ledger(folder / "rounds"), plan)


def write_log(folder: Path, clients: int, rounds: int, seed: int = 0) -> list[pl.DataFrame]:
    """Write a population and a ledger; return the tables of the rounds that follow."""
    rng = np.random.default_rng(seed)
    age = rng.normal(size=clients)
    enrolled = rng.random(clients) < 0.5
    people = {"unit_id": np.arange(clients), "age": age, "enrolled": enrolled}
    pl.DataFrame(people).write_parquet(folder / "people.parquet")
    ids, tables = np.flatnonzero(enrolled), []
    ledger = Ledger(folder / "rounds")
    for index in range(1, rounds + EVERY + AFTER + 1):
        battery = rng.normal(size=len(ids))
        replied = rng.random(len(ids)) < 1.0 / (1.0 + np.exp(-0.5 * battery))
        made = pl.DataFrame(
            {"unit_id": ids, "invited": True, "replied": replied, "battery": battery}
        )
        if index <= rounds:
            ledger.append(index, made)
        else:
            tables.append(made)
    return tables


def restart(folder: Path, refit_every: int, times: int = TIMES) -> tuple[float, float]:
    """Return the seconds of a restart, the least of some new processes, and their CPU seconds."""
    seconds, whole = [], []
    for _ in range(times):
        found = subprocess.run(
            [sys.executable, "-c", RESTART, str(folder), str(refit_every)],
            capture_output=True,
            text=True,
            check=True,
        )
        wall, cpu = map(float, found.stdout.split()[:2])
        seconds.append(wall)
        whole.append(cpu)
    return min(seconds), min(whole)


def measured(rounds: int, clients: int, refit_every: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        began = time.perf_counter()
        tables = write_log(folder, clients, rounds)
        written = time.perf_counter() - began
        began = time.perf_counter()
        read = sum(table.height for table in Ledger(folder / "rounds"))
        iterated = time.perf_counter() - began
        live = server(folder, refit_every)
        with live.holding():
            for table in tables:
                live.open(table.drop("replied"))
                live.weigh(table["replied"].to_numpy())
                live.close(table["replied"].to_numpy())
        size = sum(path.stat().st_size for path in (folder / "rounds" / "learner").iterdir())
        restarted, process = restart(folder, refit_every)
        shutil.rmtree(folder / "rounds" / "learner")
        return {
            "rounds": rounds + EVERY + AFTER, "rows": read, "write_s": written,
            "iterate_s": iterated, "iterate_ms_per_round": 1e3 * iterated / rounds,
            "restart_s": restarted, "restart_cpu_s": process,
            "restart_without_s": restart(folder, refit_every, 1)[0],
            "snapshot_bytes": size,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[500, 2_000, 10_000])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--refit-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    runs = []
    for rounds in asked.rounds:
        runs.append(measured(rounds - rounds % EVERY, asked.clients, asked.refit_every))
        print(runs[-1], flush=True)
    result = {"clients": asked.clients, "refit_every": asked.refit_every, "runs": runs}
    asked.out.write_text(json.dumps(result | environment(), indent=2) + "\n")


if __name__ == "__main__":
    main()
