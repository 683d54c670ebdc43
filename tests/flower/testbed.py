"""The testbed as a federation: clients of a drawn scenario behind a ClientApp."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from inprocess import InProcessGrid

from fedipw.flower import declined, describes
from fedipw.lab.engine import (
    Federation,
    LocalWork,
    LogisticTrainer,
    RoundWork,
    Simulation,
    Training,
)
from fedipw.lab.engine.server import ServerStep
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Testbed

L2 = 0.05
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class World:
    """A drawn scenario: who is enrolled, and what each client does in every round."""

    seed: int = 0
    size: int = 300
    rounds: int = 12
    methods: tuple[str, ...] = ("fedipw", "fedipw-hajek")
    calls: list[tuple[str, int, int]] = field(default_factory=list)  # work, round, row

    @property
    def scenario(self) -> Scenario:
        return Scenario(
            seed=self.seed, rounds=self.rounds, population=Testbed(size=self.size),
            methods=self.methods,
        )  # fmt: skip

    @cached_property
    def federation(self) -> Federation:
        return self.scenario.simulation(limits=False).federation

    @cached_property
    def draws(self) -> list[Any]:
        process = self.scenario.simulation(limits=False).federation.participation
        return [process.advance() for _ in range(self.rounds)]

    @property
    def inside(self) -> Any:
        """Rows of the enrolled clients; node 1000 + k is the k-th of them."""
        return np.flatnonzero(self.federation.population.enrolled)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.federation.participation.columns)

    @property
    def start(self) -> ArrayRecord:
        return model(np.zeros(self.federation.rows.n_parameters))

    def put(self, where: Path) -> Path:
        """Write the population table, the enrolled table and the totals."""
        frame = self.federation.population.frame
        frame.write_parquet(where / "people.parquet")
        frame.filter("enrolled").drop("enrolled").write_parquet(where / "enrolled.parquet")
        lines = [f"{name},{frame[name].mean()!r}" for name in ("z1", "z2", "z3")]
        (where / "targets.csv").write_text("\n".join(["name,value", *lines]) + "\n")
        return where / "people.parquet"

    def trained(self, optimizer: ServerStep | None = None) -> Any:
        """Return the history of the in-process engine on the same draws."""
        plain = self.scenario.simulation(limits=False)
        run = Simulation(
            plain.federation, plain._weighers, Training(l2=L2, optimizer=optimizer),
            np.random.default_rng(0),
        )  # fmt: skip
        run.advance(self.rounds)
        return run.history()

    def app(self) -> ClientApp:
        """Return what every node runs; a client declines when the draw has it not replying."""
        app, frame = ClientApp(), self.federation.population.frame
        clients, inside, ids = self.federation.rows, self.inside, frame["unit_id"].to_list()
        z2 = frame["z2"].to_list()

        @describes(app)
        def about(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
            row = int(inside[int(context.node_config["row"])])
            x = self.draws[server_round - 1].covariates[row]
            return {"unit_id": ids[row], **dict(zip(self.columns, map(float, x), strict=True))}

        @app.train()
        def train(message: Message, context: Context) -> Message:
            row, index = int(inside[int(context.node_config["row"])]), round_of(message)
            self.calls.append(("train", index, row))
            if not self.draws[index - 1].replied[row]:
                return declined(message, "busy")
            theta = message.content.array_records["arrays"]["theta"].numpy()
            work = RoundWork(clients=np.array([row]), theta=theta, key=0)
            update = LogisticTrainer(clients, LocalWork(), L2).updates(work)[0]
            return reply(message, theta + update, {"num-examples": 20, "z2": z2[row]})

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            row, index = int(inside[int(context.node_config["row"])]), round_of(message)
            self.calls.append(("evaluate", index, row))
            x = self.draws[index - 1].covariates[row, 0]
            if np.random.default_rng([index, row]).random() > 1.0 / (1.0 + np.exp(-1.0 - x)):
                return declined(message, "low battery")
            metrics = MetricRecord({"num-examples": 20, "z2": z2[row]})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return app

    def grid(self) -> InProcessGrid:
        return InProcessGrid(self.app(), {1000 + k: {"row": k} for k in range(len(self.inside))})


def round_of(message: Message) -> int:
    return int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]


def model(theta: Any) -> ArrayRecord:
    return ArrayRecord({"theta": Array(np.asarray(theta))})


def reply(message: Message, theta: Any, metrics: dict[str, Any]) -> Message:
    content = RecordDict({"arrays": model(theta), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


def theta_of(arrays: ArrayRecord) -> FloatArray:
    return np.asarray(arrays["theta"].numpy(), dtype=np.float64)
