"""``python -m benchmarks.augmented``: what a regression of updates costs a Flower server.

200 replies of a model with a million float32 parameters and ten balance columns: the same replies
are aggregated by FedAvg alone and by FedIPW with its default method around FedAvg, in one process,
in turns. FedIPW's time is whole, screening, weights, ledger and checkpoint included, and in parts:
the regression, the model and state on disk, all else. Memory is what a round has at a time beyond
the replies, with the state kept between rounds, in copies of the model. Results go to
benchmarks/results/augmented.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.combining.tail import tail_length
from fedipw.lab.files import environment
from fedipw.numerics.threads import thread_count

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import Strategy

    from fedipw.flower import FedIPW


RESULT = Path(__file__).parent / "results" / "augmented.json"
COVARIATES, WARM = 4, 3  # of two values each: with their six products ten balance columns
AVERAGE = 0.2  # last rounds whose models are averaged, which needs memory of its own
REGRESSION, CHECKPOINT, WHOLE, PLAIN = "regression", "checkpoint", "fedipw", "fedavg"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the job is."""

    parameters: int = 1_000_000
    replies: int = 200
    rounds: int = 20
    enrolled: int = 400
    population: int = 1_000
    covariates: int = COVARIATES

    def people(self) -> pl.DataFrame:
        """Return the population table."""
        rng = np.random.default_rng(0)
        Z = rng.integers(0, 2, (self.population, self.covariates)).astype(np.float64)
        score = Z @ np.full(self.covariates, 0.3) + rng.logistic(size=self.population)
        enrolled = np.zeros(self.population, dtype=np.bool_)
        enrolled[np.argsort(-score)[: self.enrolled]] = True
        columns = {f"z{j + 1}": Z[:, j] for j in range(self.covariates)}
        return pl.DataFrame({"unit_id": np.arange(self.population), **columns,
                             "enrolled": enrolled})  # fmt: skip

    def app(self, ids: Sequence[int]) -> ClientApp:
        """Return what every node runs: it moves the model a little, not twice by the same."""
        from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp

        from fedipw.flower import describes

        app, noise = ClientApp(), np.random.default_rng(2)
        moves = [noise.standard_normal(self.parameters, dtype=np.float32) for _ in range(4)]

        @describes(app)
        def about(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
            chance = np.random.default_rng([server_round, context.node_id])
            return {"unit_id": ids[int(context.node_config["row"])], "battery": chance.random()}

        @app.train()
        def train(message: Message, context: Context) -> Message:
            model = message.content.array_records["arrays"]["w"].numpy()
            chance = np.random.default_rng(context.node_id).random(2, dtype=np.float32)
            made = model + np.float32(0.01) * (chance[0] * moves[context.node_id % 4] + chance[1])
            metrics = MetricRecord({"num-examples": 20, "loss": 0.5})
            content = RecordDict({"arrays": ArrayRecord({"w": Array(made)}), "metrics": metrics})
            return Message(content, reply_to=message)

        return app


@dataclass
class Clock:
    """Seconds of rounds by what they were spent on; memory of the rounds it is watched in."""

    traced: frozenset[int]  # rounds that are watched, which makes them slow
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    peaks: dict[str, dict[int, int]] = field(default_factory=dict)  # bytes
    loads: list[float] = field(default_factory=list)
    index: int = 0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are timed under a name."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = function(*args, **kwargs)
            self.seconds.setdefault(name, {})[self.index] = time.perf_counter() - start
            return found

        return call

    def watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are timed, or watched for memory in some rounds."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.index not in self.traced:
                return self.timed(name, function)(*args, **kwargs)
            tracemalloc.start()
            try:
                return function(*args, **kwargs)
            finally:
                self.peaks.setdefault(name, {})[self.index] = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()

        return call


def copies(replies: Sequence[Message]) -> list[Message]:
    """Return the same replies in records of their own, the numbers shared."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    made = []
    for reply in replies:
        old = reply.content.array_records["arrays"]["w"]
        array = Array(old.dtype, old.shape, old.stype, old.data)
        metrics = MetricRecord(dict(reply.content.metric_records["metrics"]))
        content = RecordDict({"arrays": ArrayRecord({"w": array}), "metrics": metrics})
        made.append(Message(content, reply_to=reply))
    return made


def watch(ours: FedIPW, plain: Strategy, clock: Clock) -> None:
    """Let a strategy time its rounds, and let another aggregate the same replies beside it."""
    regression, journal = ours.augmenter, ours.journal
    assert regression is not None
    strategies = {
        PLAIN: clock.watched(PLAIN, plain.aggregate_train),
        WHOLE: clock.watched(WHOLE, ours.aggregate_train),
    }
    parts: list[tuple[str, Any, str]] = [
        (REGRESSION, regression, "correction"),
        (CHECKPOINT, journal, "save_model"),
    ]
    for name, where, function in parts:
        setattr(where, function, clock.timed(name, getattr(where, function)))

    def aggregate_train(index: int, replies: Iterable[Message]) -> Any:
        mine = list(replies)
        given = {PLAIN: copies(mine), WHOLE: mine}
        clock.index = index
        clock.loads.append(os.getloadavg()[0])
        order = (PLAIN, WHOLE) if index % 2 else (WHOLE, PLAIN)  # each first at times
        found = {name: strategies[name](index, given[name]) for name in order}
        return found[WHOLE]

    vars(ours)["aggregate_train"] = aggregate_train


def measured(size: Size) -> dict[str, Any]:
    """Return time and memory of both on the same replies."""
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from fedipw.flower import FedIPW, InProcessGrid

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    people = size.people()
    ids = people.filter("enrolled")["unit_id"].to_list()
    model = np.random.default_rng(1).standard_normal(size.parameters, dtype=np.float32)
    grid = InProcessGrid(size.app(ids), {10 + k: {"row": k} for k in range(size.enrolled)})
    share, tail = size.replies / size.enrolled, tail_length(size.rounds, AVERAGE)
    before, last = size.rounds - tail, size.rounds
    clock = Clock(frozenset({before, last}))
    with tempfile.TemporaryDirectory() as where:
        ours = FedIPW(
            FedAvg(fraction_train=share, fraction_evaluate=0.0), population=people,
            participation="battery", ledger=where, scheme="augmented", average=AVERAGE,
        )  # fmt: skip
        watch(ours, FedAvg(), clock)
        ours.start(grid, ArrayRecord({"w": Array(model)}), num_rounds=size.rounds)
        assert ours.augmenter is not None
        moments = len(ours.augmenter.state()["names"])
    rounds = [r for r in range(WARM + 1, size.rounds) if r not in clock.traced]
    timed = {
        name: np.array([found[index] for index in rounds]) for name, found in clock.seconds.items()
    }
    whole, plain, disk = timed[WHOLE], timed[PLAIN], timed[CHECKPOINT]
    copy = 4.0 * size.parameters
    return {
        "replies": size.replies,
        "parameters": size.parameters,
        "moments": moments,
        "rounds": len(rounds),
        "threads": thread_count(),
        "load": float(np.median(clock.loads)),
        "seconds": {
            **{name: float(np.median(found)) for name, found in timed.items()},
            "rest": float(np.median(whole - timed[REGRESSION] - disk)),
        },
        "ratio": float(np.median(whole / plain)),
        "ratio_quartiles": np.quantile(whole / plain, [0.25, 0.75]).tolist(),
        "ratio_without_checkpoint": float(np.median((whole - disk) / plain)),
        "model_copies": {
            "state": moments + 1,
            "fedavg": clock.peaks[PLAIN][before] / copy,
            "fedipw": clock.peaks[WHOLE][before] / copy,
            "fedipw_averaging": clock.peaks[WHOLE][last] / copy,
            "all": moments + 1 + clock.peaks[WHOLE][before] / copy,
            "beyond_fedavg": moments + 1
            + (clock.peaks[WHOLE][before] - clock.peaks[PLAIN][before]) / copy,
            "wanted": moments + 3,
        },
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=Size.rounds)
    parser.add_argument("--replies", type=int, default=Size.replies)
    parser.add_argument("--parameters", type=int, default=Size.parameters)
    parser.add_argument("--out", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    found = measured(
        Size(rounds=chosen.rounds, replies=chosen.replies, parameters=chosen.parameters)
    )
    print(json.dumps(found, indent=1))
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps({**environment(), **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
