"""The server: any Flower strategy, wrapped so that it serves the whole population."""

from __future__ import annotations

import tempfile
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg, Result, Strategy

from digits.task import World, first_model
from fedipw.flower import FedIPW

app = ServerApp()
log = getLogger("flwr.digits")
# weights that sum to 1: with some dozen replies a round, far steadier than unbiased ones
SCHEMES = {"table": "fedipw-hajek", "totals": "calibrated-entropy-hajek"}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and compare what the clients' reports say with the truth."""
    config = context.run_config
    world = World.of(config)
    output = directory(str(config["output"]))
    log.info("Tables and ledger are in %s", output)
    strategy = FedIPW.from_run_config(
        inner_strategy(str(config["server-strategy"]), world.enrolled),
        config,
        ledger=output / "ledger",
        scheme=str(config["scheme"]) or SCHEMES[str(config["information"])],
        seed=world.seed,
        **sources(world.population, str(config["information"]), output),
    )
    first = first_model(world.seed)
    start = ArrayRecord({name: Array(array) for name, array in first.items()})

    def truth(_: int, arrays: ArrayRecord) -> MetricRecord:
        model = {name: array.numpy() for name, array in arrays.items()}
        return MetricRecord({"accuracy": world.true_accuracy(model)})

    rounds = int(config["num-server-rounds"])
    result = strategy.start(grid, start, num_rounds=rounds, evaluate_fn=truth)
    for line in comparison(result, rounds, "accuracy"):
        log.info(line)


def directory(given: str) -> Path:
    """Return where files go: a directory that exists; a relative one is the SuperLink's."""
    if not given:
        return Path(tempfile.mkdtemp(prefix="fedipw-digits-"))
    path = Path(given).expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def inner_strategy(name: str, nodes: int) -> Strategy:
    """Return the strategy to wrap; it begins when all nodes are there."""
    waits = {"min_available_nodes": nodes, "min_train_nodes": nodes, "min_evaluate_nodes": nodes}
    if name == "fedadam":
        return FedAdam(eta=0.01, **waits)
    if name == "fedavg":
        return FedAvg(**waits)
    raise ValueError(f"server-strategy is fedavg or fedadam, not {name!r}.")


def sources(people: pl.DataFrame, information: str, output: Path) -> dict[str, Any]:
    """Write what the server knows of the population, and return it as FedIPW takes it."""
    if information == "table":
        people.write_parquet(output / "population.parquet")
        return {"population": output / "population.parquet", "enrollment": "z1 + z2"}
    means = people.select(pl.col("z1", "z2").mean()).unpivot(
        variable_name="name", value_name="value"
    )
    means.write_csv(output / "targets.csv")
    people.filter("enrolled").drop("enrolled").write_parquet(output / "enrolled.parquet")
    return {
        "enrolled": output / "enrolled.parquet",
        "targets": output / "targets.csv",
        "population_size": people.height,
    }


def comparison(result: Result, last: int, metric: str) -> list[str]:
    """Return the last round's metric as reported, as weighted for the population, and in truth."""
    metrics = result.evaluate_metrics_clientapp[last]
    truth = result.evaluate_metrics_serverapp[last][metric]
    lines = [
        f"{metric} of the model of round {last}",
        f"  plain mean of the reports    {metrics.get(f'{metric}-plain', np.nan):.4f}",
    ]
    if f"{metric}-target" in metrics:
        estimate, low, high = (metrics[f"{metric}-target{part}"] for part in ("", "-low", "-high"))
        lines.append(f"  weighted for the population  {estimate:.4f}  95% {low:.4f} to {high:.4f}")
    else:
        estimate = metrics.get(metric, np.nan)
        lines.append(f"  weighted for the population  {estimate:.4f}  no interval, see above")
    return [*lines, f"  truth, all clients           {truth:.4f}"]
