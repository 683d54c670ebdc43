"""Training that serves a population whose clients tell nobody anything about themselves.

Who enrols depends on age and system, and so does what a client's data say. The server knows the
means of both in the population, as a census has them, and the identifiers of who enrolled. A client
is sent coefficients, computes its weight from covariates that never leave it, and adds its weighted
update to a sum of which the server sees the total.

``python -m private.run`` (in ``examples/flower``) runs it in one process, ``flwr run`` (here) as an
app, one client for each node with ``partition-id=0``, ``1``, ...
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedipw.flower import FedIPW, Private, PrivateClient, Screen, declined, describes

POPULATION, SIZE = 200, 5  # people, and parameters of the model
RATE = 0.7  # at which an invited client takes part


@dataclass(frozen=True)
class Person:
    """Somebody of the population; nothing of this is known to the server."""

    unit_id: str
    age: float
    os: str
    optimum: np.ndarray[Any, Any]  # (SIZE,), the model that fits this person's data best
    enrolled: bool


@cache
def people(seed: int = 3) -> tuple[Person, ...]:
    """Return the population: the young and users of ios enrol more often."""
    rng, found = np.random.default_rng(seed), []
    for k in range(POPULATION):
        age, os = float(rng.normal(45.0, 12.0)), "ios" if rng.random() < 0.3 else "android"
        optimum = 0.05 * (age - 45.0) + (os == "ios") + 0.2 * rng.normal(size=SIZE)
        score = -2.0 - 0.07 * (age - 45.0) + 1.0 * (os == "ios")
        enrolled = bool(rng.random() < 1.0 / (1.0 + np.exp(-score)))
        found.append(Person(f"p{k}", age, os, optimum, enrolled))
    return tuple(found)


def enrolled_people() -> list[Person]:
    """Return the clients; node k is the k-th of them."""
    return [person for person in people() if person.enrolled]


def census() -> dict[str, float]:
    """Return what is public: means over the population."""
    return {
        "age": float(np.mean([p.age for p in people()])),
        "os[ios]": float(np.mean([p.os == "ios" for p in people()])),
    }


def target() -> np.ndarray[Any, Any]:
    """Return the model that is best for the population, as somebody knows who knows everything."""
    return np.mean([person.optimum for person in people()], axis=0)


def client_app(mods: Sequence[Any] = ()) -> ClientApp:
    """Return what every node runs."""
    app = ClientApp(mods=list(mods))

    def own(context: Context) -> Person:
        return enrolled_people()[int(context.node_config["partition-id"])]

    @describes(app)
    def description(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
        """Return who this is, and nothing else."""
        del server_round
        return {"unit_id": own(context).unit_id}

    def covariates(context: Context, server_round: int) -> dict[str, float | bool | str | None]:
        """Return what the weight is computed from; it stays on this node."""
        del server_round
        return {"age": own(context).age, "os": own(context).os}

    private = PrivateClient(app, covariates=covariates, smallest=4)

    @private.train
    def train(message: Message, context: Context) -> Message:
        """Return the trained model to the private client, which sends none of it."""
        person, index = own(context), int(message.content["config"]["server-round"])
        place = int(context.node_config["partition-id"])
        rate = float(context.run_config.get("participation-rate", RATE))
        if np.random.default_rng([place, index]).random() > rate:
            return declined(message, "busy")
        theta = message.content["arrays"]["theta"].numpy()
        trained = theta + 0.2 * (person.optimum - theta)
        return Message(
            RecordDict({"arrays": ArrayRecord({"theta": Array(trained)})}), reply_to=message
        )

    return app


def strategy(ledger: Path, nodes: int, minimum: int, timeout: float = 60.0) -> FedIPW:
    """Return the server's part: a table of identifiers, population means, and no more."""
    ids = pl.DataFrame({"unit_id": [person.unit_id for person in enrolled_people()]})
    return FedIPW(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=nodes),
        enrolled=ids,
        targets=census(),
        ledger=ledger,
        screen=Screen(clip=5.0),
        private=Private(spread={"age": 12.0}, minimum=minimum, timeout=timeout),
    )


def start() -> ArrayRecord:
    """Return the model to begin with."""
    return ArrayRecord({"theta": Array(np.zeros(SIZE))})


client = client_app()
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print how far the model is from the one that is best for the population."""
    config = context.run_config
    output = Path(str(config["output"]) or tempfile.mkdtemp(prefix="fedipw-private-"))
    made = strategy(
        output / "ledger", int(config["nodes"]), int(config["minimum"]),
        float(config["stage-timeout"]),
    )  # fmt: skip
    result = made.start(grid, start(), num_rounds=int(config["num-server-rounds"]))
    distance = np.linalg.norm(result.arrays["theta"].numpy() - target())
    print(f"distance to the model of the population: {distance:.3f}")
