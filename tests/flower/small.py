"""A small federation whose clients do as they are told, for tests of what can go wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from inprocess import InProcessGrid

from fedipw.flower import FedIPW, describes
from fedipw.tables import Ledger

SIZE, INSIDE = 60, 12
Behaviour = Callable[[Message, int], Message]  # a client's reply in a round
About = dict[str, Any]


def theta(message: Message) -> Any:
    return message.content.array_records["arrays"]["theta"].numpy()


def answered(message: Message, arrays: Mapping[str, Any], **metrics: Any) -> Message:
    """Return a reply with these arrays, and metrics beside the usual one."""
    record = ArrayRecord({key: Array(np.asarray(value)) for key, value in arrays.items()})
    told = MetricRecord({"num-examples": 10, **metrics})
    return Message(RecordDict({"arrays": record, "metrics": told}), reply_to=message)


def moved(message: Message, index: int) -> Message:
    """Return an ordinary reply: everybody moves the model by one."""
    del index
    return answered(message, {"theta": theta(message) + 1.0}, loss=0.5)


@dataclass
class Small:
    """Twelve enrolled clients of sixty; node 100 + k is client ``u<k>``."""

    where: Path
    behaviours: dict[int, Behaviour] = field(default_factory=dict)  # by k, in training
    told: dict[int, About | None] = field(default_factory=dict)  # by k, None raises when asked
    asked: list[tuple[int, int]] = field(default_factory=list)  # round and node of each question

    def __post_init__(self) -> None:
        rng = np.random.default_rng(4)
        self.people = pl.DataFrame(
            {
                "unit_id": [f"u{k}" for k in range(SIZE)],
                "age": rng.normal(size=SIZE).round(3),
                "enrolled": [k < INSIDE for k in range(SIZE)],
            }
        )
        self.people.write_parquet(self.where / "people.parquet")
        self.grid = InProcessGrid(self.app(), {100 + k: {"k": k} for k in range(INSIDE)})
        self.start = ArrayRecord({"theta": Array(np.zeros(3))})

    def app(self) -> ClientApp:
        app = ClientApp()

        @describes(app)
        def about(context: Context, server_round: int) -> About:
            k = int(context.node_config["k"])
            self.asked.append((server_round, context.node_id))
            told = self.told.get(k, {})
            if told is None:
                raise RuntimeError("no answer")
            return {"unit_id": f"u{k}", "battery": 0.1 * (k % 7), "wifi": k % 2 == 0, **told}

        @app.train()
        def train(message: Message, context: Context) -> Message:
            index = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
            return self.behaviours.get(int(context.node_config["k"]), moved)(message, index)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            k = int(context.node_config["k"])
            return Message(
                RecordDict({"m": MetricRecord({"num-examples": 5, "loss": 0.1 * k})}),
                reply_to=message,
            )

        return app

    def strategy(self, inner: Strategy | None = None, **settings: Any) -> FedIPW:
        plain = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        given = {"participation": "battery", "population": self.where / "people.parquet"}
        return FedIPW(inner or plain, ledger=self.where / "ledger", **{**given, **settings})

    def trained(self, rounds: int = 1, inner: Strategy | None = None, **settings: Any) -> Any:
        return self.strategy(inner, **settings).start(self.grid, self.start, num_rounds=rounds)

    def round(self, index: int = 1) -> dict[str, dict[str, Any]]:
        """Return a closed round's rows by client."""
        table = Ledger(self.where / "ledger").read(index)
        return {str(row["unit_id"]): row for row in table.to_dicts()}
