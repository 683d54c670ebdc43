"""``python -m benchmarks.memory``: a population of a million clients, simulated in bounded memory.

Runs 20 rounds of FedAvg, participation-only, FedIPW and the oracle on 1,000,000 clients of 20 rows
each, evaluates the last models, and writes peak memory to benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

from fedipw.lab.files import environment
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Testbed

RESULT = Path(__file__).parent / "results" / "memory.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    began = time.perf_counter()
    scenario = Scenario(rounds=arguments.rounds, population=Testbed(size=arguments.clients))
    run = scenario.simulation(limits=False)
    built = time.perf_counter()
    run.advance(arguments.rounds)
    trained = time.perf_counter()
    target, history = scenario.objective(run.federation), run.history()
    best = target.minimum()
    last = {m: float(target.losses(history.of(m)[-1])[0] - best.value) for m in history.methods}
    result = {
        "clients": arguments.clients,
        "rows_each": 20,
        "rounds": arguments.rounds,
        "features_gigabytes": run.federation.clients.features.nbytes / 2**30,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "seconds_to_draw": built - began,
        "seconds_per_round": (trained - built) / arguments.rounds,
        "seconds_to_evaluate": time.perf_counter() - trained,
        "excess_loss": last,
        **environment(),
    }
    print(json.dumps(result, indent=2))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
