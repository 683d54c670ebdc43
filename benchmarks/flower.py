"""What FedIPW adds to a Flower strategy's own time and memory on the server.

200 replies of a model with 1,000,000 parameters, in one process: the same replies are aggregated by
FedAvg alone and by FedIPW around FedAvg, screening, weights, ledger and checkpoint included. Time
on the wire, where clients are waited for, is in neither.

    python -m benchmarks.flower
"""

from __future__ import annotations

import json
import tempfile
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedipw.lab.files import environment

PARAMETERS, REPLIES, ENROLLED, POPULATION, ROUNDS, WARM = 1_000_000, 200, 400, 1_000, 23, 3
RESULT = Path(__file__).parent / "results" / "flower.json"
TABLE = Path(__file__).parents[1] / "docs" / "_static" / "flower-benchmark.md"


def people(where: Path) -> Path:
    rng = np.random.default_rng(0)
    age = rng.normal(size=POPULATION)
    order = np.argsort(-(age + rng.logistic(size=POPULATION)))
    enrolled = np.zeros(POPULATION, dtype=bool)
    enrolled[order[:ENROLLED]] = True
    table = pl.DataFrame({"unit_id": np.arange(POPULATION), "age": age, "enrolled": enrolled})
    table.write_parquet(where / "people.parquet")
    return where / "people.parquet"


class Clock:
    """Seconds spent in some calls."""

    def __init__(self) -> None:
        self.total = 0.0

    def of(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = function(*args, **kwargs)
        if isinstance(found, Iterable) and not isinstance(found, tuple):
            found = list(found)
        self.total += time.perf_counter() - start
        return found


def peak_of(function: Any, *args: Any) -> int:
    """Return the most memory a call has at a time beyond what there was before, in bytes."""
    tracemalloc.start()
    try:
        function(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measured(dtype: str, *, clip: float | None = None) -> dict[str, Any]:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    from fedipw.flower import FedIPW, InProcessGrid, Screen, describes

    where = Path(tempfile.mkdtemp())
    table = people(where)
    ids = pl.read_parquet(table).filter("enrolled")["unit_id"].to_list()
    rng = np.random.default_rng(1)
    model = rng.normal(size=PARAMETERS).astype(dtype)
    noise = [rng.normal(size=PARAMETERS).astype(dtype) for _ in range(4)]
    app = ClientApp()

    @describes(app)
    def about(context: Context, server_round: int) -> dict[str, float]:
        chance = np.random.default_rng([server_round, context.node_id])
        return {"unit_id": ids[context.node_config["row"]], "battery": chance.random()}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        made = model + np.asarray(0.01 * noise[context.node_id % 4], dtype=dtype)
        content = RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(made)}),
                "metrics": MetricRecord({"num-examples": 20, "loss": 0.5}),
            }
        )
        return Message(content, reply_to=message)

    class TimedGrid(InProcessGrid):
        spent = 0.0

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            start = time.perf_counter()
            found = super().send_and_receive(messages, timeout=timeout)
            self.spent += time.perf_counter() - start
            return found

    def copies(replies: list[Message]) -> list[Message]:
        """Return the same replies in records of their own, the numbers shared."""
        made = []
        for reply in replies:
            old = reply.content.array_records["arrays"]["w"]
            array = Array(old.dtype, old.shape, old.stype, old.data)
            metrics = MetricRecord(dict(reply.content.metric_records["metrics"]))
            content = RecordDict({"arrays": ArrayRecord({"w": array}), "metrics": metrics})
            made.append(Message(content, reply_to=reply))
        return made

    grid = TimedGrid(app, {10 + k: {"row": k} for k in range(ENROLLED)})
    share = REPLIES / ENROLLED
    plain = FedAvg(fraction_train=share, fraction_evaluate=0.0)
    ours = FedIPW(
        FedAvg(fraction_train=share, fraction_evaluate=0.0),
        population=table, participation="battery", ledger=where / "ledger",
        screen=Screen(clip=clip),
    )  # fmt: skip
    arrays, times = ArrayRecord({"w": Array(model)}), []
    memory = {"plain": 0, "fedipw": 0}
    for index in range(1, ROUNDS + 1):
        own, alone, grid.spent = Clock(), Clock(), 0.0
        sent = own.of(ours.configure_train, index, arrays, ConfigRecord(), grid)
        own.total -= grid.spent  # what clients do when asked is not the server's
        replies = list(grid.send_and_receive(sent))
        again = alone.of(plain.configure_train, index, arrays, ConfigRecord(), grid)
        del again
        both = [(plain, alone, "plain", copies(replies)), (ours, own, "fedipw", replies)]
        for strategy, clock, name, mine in both if index % 2 else both[::-1]:  # each first at times
            if index < ROUNDS:
                clock.of(strategy.aggregate_train, index, mine)
            else:
                memory[name] = peak_of(strategy.aggregate_train, index, mine)
        assert len(replies) == REPLIES
        if WARM < index < ROUNDS:
            times.append((alone.total, own.total))
    alone, own = np.array(times).T
    copy = PARAMETERS * np.dtype(dtype).itemsize
    return {
        "dtype": dtype,
        "clip": clip,
        "replies": REPLIES,
        "parameters": PARAMETERS,
        "rounds": len(times),
        "fedavg_seconds": float(np.median(alone)),
        "fedipw_seconds": float(np.median(own)),
        "overhead": float(np.median(own / alone) - 1.0),
        "overhead_quartiles": np.quantile(own / alone - 1.0, [0.25, 0.75]).tolist(),
        "model_copies": {name: peak / copy for name, peak in memory.items()},
    }


def table(found: list[dict[str, Any]]) -> str:
    """Return the results as a page's table."""
    lines = [
        "| model | FedAvg alone | FedIPW around FedAvg | more | memory, model copies |",
        "|---|---|---|---|---|",
    ]
    for line in found:
        name = line["dtype"] + ("" if line["clip"] is None else ", clipped")
        low, high = line["overhead_quartiles"]
        copies = line["model_copies"]
        lines.append(
            f"| {name} | {line['fedavg_seconds']:.2f} s | {line['fedipw_seconds']:.2f} s | "
            f"{line['overhead']:+.0%} ({low:+.0%} to {high:+.0%}) | "
            f"{copies['plain']:.1f} and {copies['fedipw']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    found = [measured("float64"), measured("float32"), measured("float64", clip=1.0)]
    for line in found:
        print(json.dumps(line))
    RESULT.parent.mkdir(exist_ok=True)
    told = {"environment": environment(), "results": found}
    TABLE.write_text(table(found), encoding="utf-8")
    RESULT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
