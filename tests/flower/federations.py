"""Federations of in-process clients: the lab's testbed, and a small one that does as it is told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedipw.flower import ControlVariate, FedIPW, InProcessGrid, declined, describes
from fedipw.lab.engine import (
    Federation,
    LocalWork,
    LogisticTrainer,
    RoundWork,
    Simulation,
    Training,
)
from fedipw.lab.engine.server import ServerStep
from fedipw.lab.scenario import PropensitySettings, Scenario
from fedipw.lab.testbed import Testbed
from fedipw.numerics import FloatArray
from fedipw.tables import Ledger
from worlds import Tables, World, drawn

L2 = 0.05
SIZE, INSIDE = 60, 12
Behaviour = Callable[[Message, int], Message]  # a client's reply in a round
About = dict[str, Any]


def round_of(message: Message) -> int:
    return int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]


def theta(message: Message) -> Any:
    return message.content.array_records["arrays"]["theta"].numpy()


def theta_of(arrays: ArrayRecord) -> FloatArray:
    return np.asarray(arrays["theta"].numpy(), dtype=np.float64)


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
class LabFederation:
    """A drawn scenario of the lab: who is enrolled, and what each client does in every round."""

    seed: int = 0
    size: int = 300
    rounds: int = 12
    methods: tuple[str, ...] = ("fedipw", "fedipw-hajek")
    propensity: PropensitySettings = field(default_factory=PropensitySettings)
    calls: list[tuple[str, int, int]] = field(default_factory=list)  # work, round, row

    @property
    def scenario(self) -> Scenario:
        return Scenario(
            seed=self.seed, rounds=self.rounds, population=Testbed(size=self.size),
            methods=self.methods, propensity=self.propensity,
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
        return ArrayRecord({"theta": Array(np.zeros(self.federation.rows.n_parameters))})

    def put(self, where: Path) -> Path:
        """Write the population table, the enrolled table and the totals."""
        tables = Tables(self.federation.population.frame)
        tables.write(where, targets=tables.means("z1", "z2", "z3"))
        return where / "people.parquet"

    def trained(self, optimizer: ServerStep | None = None) -> Any:
        """Return the history of the in-process engine on the same draws."""
        plain = self.scenario.simulation(limits=False)
        run = Simulation(
            plain.federation, plain._weighers, Training(l2=L2, optimizer=optimizer),
            np.random.default_rng(0), compositions=plain._methods,
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
            work = RoundWork(clients=np.array([row]), theta=theta(message), key=0)
            control = None
            if "fedipw-control" in message.content.array_records:
                control = ControlVariate.of(message, context)
                work = replace(work, corrections=control.corrections["theta"][None])
            update = LogisticTrainer(clients, LocalWork(), L2).updates(work)[0]
            metrics = {"num-examples": 20, "z2": z2[row]}
            reply = answered(message, {"theta": theta(message) + update}, **metrics)
            if control is None:
                return reply
            how = LocalWork()
            return control.reply(reply, steps=how.steps, step_size=how.step_size)

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


@dataclass
class Small:
    """Twelve enrolled clients of sixty; node 100 + k is client ``u<k>``."""

    where: Path
    behaviours: dict[int, Behaviour] = field(default_factory=dict)  # by k, in training
    told: dict[int, About | None] = field(default_factory=dict)  # by k, None raises when asked
    asked: list[tuple[int, int]] = field(default_factory=list)  # round and node of each question

    def __post_init__(self) -> None:
        first = pl.int_range(pl.len()) < INSIDE
        odds = pl.when(first).then(np.inf).otherwise(-np.inf)
        tables = drawn(World(size=SIZE, rounds=0, seed=4, ids="u{}", enrollment=odds))
        tables.write(self.where)
        self.people = tables.people
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
            behaviour = self.behaviours.get(int(context.node_config["k"]), moved)
            return behaviour(message, round_of(message))

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            loss = 0.1 * int(context.node_config["k"])
            metrics = MetricRecord({"num-examples": 5, "loss": loss})
            return Message(RecordDict({"m": metrics}), reply_to=message)

        return app

    def strategy(self, inner: Strategy | None = None, **settings: Any) -> FedIPW:
        plain = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        given: dict[str, Any] = {
            "participation": "battery",
            "population": self.where / "people.parquet",
            "ledger": self.where / "ledger",
        }
        return FedIPW(inner or plain, **{**given, **settings})

    def trained(self, rounds: int = 1, inner: Strategy | None = None, **settings: Any) -> Any:
        return self.strategy(inner, **settings).start(self.grid, self.start, num_rounds=rounds)

    def round(self, index: int = 1) -> dict[str, dict[str, Any]]:
        """Return a closed round's rows by client."""
        table = Ledger(self.where / "ledger").read(index)
        return {str(row["unit_id"]): row for row in table.to_dicts()}
