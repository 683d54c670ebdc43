"""The testbed as a federation: clients of a drawn scenario behind a ClientApp."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from inprocess import InProcessGrid

from fedipw.engine import LocalWork, RoundWork, client_updates
from fedipw.experiments.scenario import Scenario
from fedipw.data.testbed import Testbed
from fedipw.integrations.flower import declined, describes

L2 = 0.05


@dataclass(frozen=True)
class World:
    """A drawn scenario: who is enrolled, and what each client does in every round."""

    seed: int = 0
    size: int = 300
    rounds: int = 12

    @property
    def scenario(self) -> Scenario:
        return Scenario(
            seed=self.seed, rounds=self.rounds, population=Testbed(size=self.size),
            methods=("fedipw", "fedipw-hajek"),
        )  # fmt: skip

    @cached_property
    def federation(self) -> Any:
        return self.scenario.simulation(limits=False).federation

    @cached_property
    def draws(self) -> list[Any]:
        process = self.scenario.simulation(limits=False).federation.participation
        return [process.advance() for _ in range(self.rounds)]

    @property
    def inside(self) -> np.ndarray[Any, Any]:
        """Rows of the enrolled clients; node k is the k-th of them."""
        return np.flatnonzero(self.federation.population.enrolled)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.federation.participation.columns)

    def put(self, where: Path) -> Path:
        """Write the population table."""
        self.federation.population.frame.write_parquet(where / "people.parquet")
        return where / "people.parquet"

    def app(self) -> ClientApp:
        """Return what every node runs; node k+1 has row k of the enrolled."""
        app = ClientApp()
        clients, inside = self.federation.clients, self.inside
        ids = self.federation.population.frame["unit_id"].to_list()

        @describes(app)
        def about(context: Context, server_round: int) -> dict[str, float | str | int | bool]:
            row = int(inside[int(context.node_config["row"])])
            x = self.draws[server_round - 1].covariates[row]
            return {"unit_id": ids[row], **dict(zip(self.columns, map(float, x), strict=True))}

        @app.train()
        def train(message: Message, context: Context) -> Message:
            row = int(inside[int(context.node_config["row"])])
            index = int(message.content["config"]["server-round"])
            if not self.draws[index - 1].replied[row]:
                return declined(message, "busy")
            theta = message.content["arrays"]["theta"].numpy()
            work = RoundWork(clients=np.array([row]), theta=theta, key=0)
            update = client_updates(clients, LocalWork(), L2, work)[0]
            return reply(message, theta + update, {"num-examples": 20, "loss": float(row)})

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            row = int(inside[int(context.node_config["row"])])
            content = RecordDict({"metrics": MetricRecord({"num-examples": 20, "age": ages[row]})})
            return Message(content, reply_to=message)

        ages = self.federation.population.frame["z2"].to_list()
        return app

    def grid(self) -> InProcessGrid:
        return InProcessGrid(
            self.app(), {1000 + k: {"row": k} for k in range(len(self.inside))}
        )

    @property
    def start(self) -> ArrayRecord:
        return model(np.zeros(self.federation.clients.n_parameters))


def model(theta: Any) -> ArrayRecord:
    return ArrayRecord({"theta": Array(np.asarray(theta))})


def reply(message: Message, theta: Any, metrics: dict[str, float]) -> Message:
    content = RecordDict({"arrays": model(theta), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)
