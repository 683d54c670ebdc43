"""``python -m benchmarks.fitting``: from a Parquet file to coefficients, ours and its peers.

Writes a population of 10 million clients and 20 covariates, fits it exactly with plain NumPy, then
with every solver in a fresh process, and ours on 20 and 40 million clients as well. Peers live in
an environment of their own, made on first use. Results go to benchmarks/results/fitting.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fitting.solve import SOLVERS
from benchmarks.fitting.workload import COLUMNS, exact_fit, write_population
from fedipw.lab.files import environment

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "fitting.json"
EXACT = 1e-8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=Path("/tmp/fedipw-fitting-peers"))
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--larger", type=int, nargs="*", default=[20_000_000, 40_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    peers = _environment(arguments.environment)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "people.parquet"
        write_population(path, arguments.rows)
        reference = exact_fit(path)
        size = path.stat().st_size / 2**30
        runs: dict[str, list[Any]] = {name: [] for name in SOLVERS}
        for _ in range(arguments.repeats):  # in turn, so that all see the machine's moods
            for name in SOLVERS:
                python = sys.executable if name == "fedipw" else peers
                runs[name].append(_run(str(python), name, path, reference))
                print(name, {k: v for k, v in runs[name][-1].items() if k != "point"}, flush=True)
        best = {name: min(found, key=lambda run: run["seconds"]) for name, found in runs.items()}
        larger = {}
        for rows in arguments.larger:
            path.unlink()
            write_population(path, rows)
            larger[rows] = min(
                (_run(sys.executable, "fedipw", path, None) for _ in range(2)),
                key=lambda run: run["seconds"],
            )
            print(rows, larger[rows]["seconds"], larger[rows]["gigabytes"], flush=True)
    ours = best["fedipw"]["seconds"]
    right = {n: r["seconds"] for n, r in best.items() if n != "fedipw" and r["error"] < 1e-6}
    result = {
        "rows": arguments.rows,
        "columns": COLUMNS,
        "file_gigabytes": size,
        "repeats": arguments.repeats,
        "best": {name: _plain(run) for name, run in best.items()},
        "all_seconds": {name: [r["seconds"] for r in found] for name, found in runs.items()},
        "times_faster": {name: seconds / ours for name, seconds in right.items()},
        "exact": best["fedipw"]["error"] < EXACT,
        "larger": {str(rows): _plain(run) for rows, run in larger.items()},
    }
    arguments.out.write_text(json.dumps(result | environment(), indent=2) + "\n")
    print(json.dumps(result["times_faster"], indent=2))


def _plain(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "point"}


def _environment(directory: Path) -> Path:
    """Return the Python of the peers' environment, made if it is not there."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        wanted = str(HERE / "requirements-peers.txt")
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", wanted], check=True)
    return python


def _run(python: str, name: str, path: Path, reference: np.ndarray | None) -> dict[str, Any]:
    done = subprocess.run(
        [python, str(HERE / "solve.py"), name, str(path)],
        check=True, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if reference is not None:
        found["error"] = float(np.abs(np.array(found["point"]) - reference).max())
    return found


if __name__ == "__main__":
    main()
