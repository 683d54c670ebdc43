"""``python -m benchmarks.simulator``: our engine, two peers and the floor, in one run.

Peers live in environments of their own under .benchmarks/, made on first use. Results go to
benchmarks/results/simulator.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulator.workload import floor_seconds, scenario, timed_rounds, write_input
from fedipw.lab.files import environment

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "simulator.json"
ROUNDS, WARMUP = 20, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".benchmarks")
    parser.add_argument("--skip-peers", action="store_true", help="measure ours and the floor only")
    arguments = parser.parse_args()
    seconds = timed_rounds(400, 20)
    ours = statistics.median(seconds)
    floor = floor_seconds(400)
    result: dict[str, Any] = {
        "workload": "2000 clients x 64 rows x 20 features, 8% reply, 10 local steps of batch 16",
        "fedipw": {"seconds_per_round": ours, "rounds_per_second": 1 / ours},
        "floor": floor,
        "times_floor": ours / min(floor.values()),
        **environment(),
    }
    if not arguments.skip_peers:
        result["peers"] = peers(arguments.environments, ours)
    print(json.dumps(result, indent=2))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def peers(environments: Path, ours: float) -> dict[str, Any]:
    """Return seconds per round of each peer on the same cohorts, and how many times slower."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "input.npz"
        write_input(data, ROUNDS + WARMUP)
        own = _own_loss(ROUNDS + WARMUP)
        for name, launcher in _launchers(environments).items():
            out = Path(scratch) / f"{name}.json"
            options = ["--rounds", str(ROUNDS), "--warmup", str(WARMUP), "--out", str(out)]
            subprocess.run([*launcher, str(data), *options], check=True)
            report = json.loads(out.read_text())
            median = report["seconds_per_round_median"]
            found[name] = {
                "seconds_per_round": median,
                "times_ours": median / ours,
                "threads": report["threads"],
                "versions": report["versions"],
                "notes": report["notes"],
                "loss_after_23_rounds": report["final_loss"],
                "our_loss_after_23_rounds": own,
            }
            if not np.isclose(report["final_loss"], own, rtol=2e-3):
                sys.exit(f"{name} computes something else: loss {report['final_loss']} not {own}")
    return found


def _own_loss(rounds: int) -> float:
    made = scenario(rounds)
    run = made.simulation(limits=False)
    run.advance(rounds)
    return float(made.objective(run.federation).losses(run.history().of("fedavg")[-1])[0])


def _launchers(environments: Path) -> dict[str, list[str]]:
    pfl = _environment(environments / "pfl", "requirements-pfl.txt")
    fedjax = _environment(environments / "fedjax", "requirements-fedjax.txt")
    script = str(HERE / "peer_pfl.py")
    return {
        "pfl": [str(pfl / "python"), script],
        "pfl-2-processes": [str(pfl / "torchrun"), "--nproc_per_node", "2", script],
        "fedjax": [str(fedjax / "python"), str(HERE / "peer_fedjax.py")],
    }


def _environment(directory: Path, requirements: str) -> Path:
    """Return the bin directory of a peer's environment, made if it is not there."""
    if not (directory / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        lines = (HERE / requirements).read_text().splitlines()
        for line in lines:
            if line.startswith("torch=="):  # first, so that nothing pulls in another build
                subprocess.run([*pip, line], check=True)
        subprocess.run([*pip, "-r", str(HERE / requirements)], check=True)
    return directory / "bin"


if __name__ == "__main__":
    main()
