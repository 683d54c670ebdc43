"""FedIPW over FedAvg, begun when all nodes are there."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result

from fedipw.flower import FedIPW

ENROLLMENT, PARTICIPATION = "age", "age + battery"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    while len(list(grid.get_node_ids())) < int(config["nodes"]):
        time.sleep(0.5)
    people, ledger = Path(str(config["people"])), Path(str(config["ledger"]))
    trained(grid, people, ledger, int(config["rounds"]), float(config["timeout"]))


def trained(grid: Grid, people: Path, ledger: Path, rounds: int, timeout: float = 300.0) -> Result:
    """Train until some rounds are done."""
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = FedIPW(
        inner, population=people, enrollment=ENROLLMENT, participation=PARTICIPATION, ledger=ledger,
        ask_timeout=300.0,
    )  # fmt: skip
    start = ArrayRecord({"theta": Array(np.zeros(3))})
    return strategy.start(grid, start, num_rounds=rounds, timeout=timeout)
