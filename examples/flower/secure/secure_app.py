"""FedIPW under secure aggregation: clients weigh their updates, the server sees only the sum.

Every client is sent the models of enrollment and participation and computes its weight from
covariates that never leave it. What it sends is its weight times its update, masked by SecAgg+.
The models were fitted on a pilot whose clients shared their covariates.

``python -m secure.run`` (in ``examples/flower``) runs it in one process, ``flwr run`` (here) as an
app, one client for each SuperNode with ``partition-id=0``, ``1``, ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from scipy.special import expit

from fedipw.flower.secure import (
    Covariates,
    FixedPoint,
    WeightModel,
    hajek_mean,
    moved,
    scaled_update,
    weighted_sum,
)
from fedipw.selection.logistic import logistic_fit
from fedipw.selection.saved import StageModel
from fedipw.tables.design import bound_design
from fedipw.tables.partitions import Blocks

POPULATION, SIZE = 24, 5  # people, and parameters of the model
FIXED = FixedPoint(clipping_range=2.0)  # weight times update stays below
HT, HAJEK = "horvitz-thompson", "hajek"


@dataclass(frozen=True)
class Person:
    """Somebody of the population; nothing of this is known to the server."""

    covariates: Covariates
    optimum: np.ndarray[Any, Any]  # (SIZE,), the model that fits this person's data best
    enrolled: bool


def people(size: int, seed: int) -> list[Person]:
    """Return people whose enrollment and data depend on age and system."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(size):
        age, os = float(rng.normal()), str(rng.choice(["android", "ios"]))
        enrolled = bool(rng.random() < expit(-0.4 + 0.7 * age + 0.5 * (os == "ios")))
        optimum = 0.5 * age + (os == "ios") + 0.3 * rng.normal(size=SIZE)
        found.append(
            Person({"age": age, "os": os, "battery": float(rng.random())}, optimum, enrolled)
        )
    return found


def replies(person: Person, rng: np.random.Generator) -> bool:
    """Return whether a person who is invited takes part."""
    return bool(rng.random() < expit(1.0 + 2.0 * float(person.covariates["battery"] or 0.0)))


TakesPart = Callable[[Person, np.random.Generator], bool]


def fitted(stage: str, formula: str, frame: pl.DataFrame, label: list[bool]) -> StageModel:
    """Return a stage fitted on clients that shared their covariates."""
    design = bound_design(formula, frame.lazy(), frame.columns)
    columns = design.rows(frame, "pilot").columns
    blocks = Blocks.of_arrays(columns.T, np.array(label, dtype=np.int8))
    return StageModel(stage=stage, design=design, fit=logistic_fit(blocks, design.names))


def pilot_models() -> WeightModel:
    """Return the models behind the weights, from a pilot of other people."""
    pilot, rng = people(2000, seed=1), np.random.default_rng(2)
    frame = pl.DataFrame([p.covariates for p in pilot])
    enrollment = fitted("enrollment", "age + os", frame, [p.enrolled for p in pilot])
    participation = fitted("participation", "battery", frame, [replies(p, rng) for p in pilot])
    return WeightModel.horvitz_thompson(enrollment, [participation], POPULATION)


def enrolled_people() -> list[Person]:
    """Return the clients."""
    return [person for person in people(POPULATION, seed=0) if person.enrolled]


class Device(NumPyClient):
    """A client: it trains, weighs its own update, and says nothing else."""

    def __init__(self, person: Person, place: int, takes_part: TakesPart) -> None:
        self.person, self.place, self.takes_part = person, place, takes_part

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Return weight times update, or raise if busy: SecAgg+ goes on without this client."""
        rng = np.random.default_rng([self.place, int(config["round"])])
        if not self.takes_part(self.person, rng):
            raise RuntimeError("busy")
        model = WeightModel.from_json(config["weight-model"])
        weight = model.weight(self.person.covariates, float(config["invite-prob"]))
        trained = [parameters[0] + 0.5 * (self.person.optimum - parameters[0])]
        scaled = scaled_update(
            parameters, trained, weight,
            clipping_range=FIXED.clipping_range, with_weight=bool(config["with-weight"]),
        )  # fmt: skip
        return scaled, 1, {}  # one example, no metrics: both reach the server in clear


class SecureIPW(FedAvg):
    """The server: it hands out models, and steps by a sum whose terms it never sees."""

    def __init__(self, model: WeightModel, estimator: str, **settings: Any) -> None:
        start = ndarrays_to_parameters([np.zeros(SIZE)])
        super().__init__(initial_parameters=start, fraction_evaluate=0.0, **settings)
        self.model, self.estimator = model, estimator
        self.sent: list[np.ndarray[Any, Any]] = []
        self.steps: dict[int, list[np.ndarray[Any, Any]]] = {}  # by round, as the server knows it
        self.models: dict[int, list[np.ndarray[Any, Any]]] = {}  # by round; none if it was halted

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Invite clients, with the models behind their weights."""
        self.sent = parameters_to_ndarrays(parameters)
        chosen = super().configure_fit(server_round, parameters, client_manager)
        for _, instructions in chosen:
            instructions.config = {
                "round": server_round,
                "weight-model": self.model.to_json(),
                "invite-prob": len(chosen) / client_manager.num_available(),
                "with-weight": self.estimator == HAJEK,
            }
        return chosen

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Turn SecAgg+'s mean into the sum, and step; every result holds the same mean."""
        del failures
        mean = parameters_to_ndarrays(results[0][1].parameters)
        step = weighted_sum(mean, len(results), FIXED)
        if self.estimator == HAJEK:
            step = hajek_mean(step)
        self.steps[server_round], self.models[server_round] = step, moved(self.sent, step)
        return ndarrays_to_parameters(self.models[server_round]), {}


def workflow() -> DefaultWorkflow:
    """Return secure aggregation in which more than half of the clients can restore a lost key.

    A round is halted, and the model stays as it was, if fewer are left, or if a client is lost
    before it has shared its keys.
    """
    return DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(1.0, 0.55, **FIXED.settings()))


def client_app(takes_part: TakesPart = replies) -> ClientApp:
    """Return what every node runs."""

    def client_fn(context: Context) -> Client:
        place = int(context.node_config["partition-id"])
        return Device(enrolled_people()[place], place, takes_part).to_client()

    return ClientApp(client_fn=client_fn, mods=[secaggplus_mod])


client = client_app()
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train with secure aggregation."""
    strategy = SecureIPW(pilot_models(), str(context.run_config["estimator"]))
    rounds = ServerConfig(num_rounds=int(context.run_config["num-server-rounds"]))
    workflow()(grid, LegacyContext(context=context, config=rounds, strategy=strategy))
    for index, model in strategy.models.items():
        print(f"round {index}: {model[0].round(3)}")
