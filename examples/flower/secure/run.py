"""The secure app in one process, beside the sums in the clear: ``python -m secure.run``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from secure.secure_app import (
    HAJEK,
    HT,
    POPULATION,
    SIZE,
    Person,
    SecureIPW,
    client,
    enrolled_people,
    people,
    pilot_models,
    replies,
    workflow,
)

from fedipw.flower import InProcessGrid


class CopyingGrid(InProcessGrid):
    """Nodes in one process that get copies, as over a network; what they answer is kept."""

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, Mapping[str, Any]],
        loses: Callable[[Message], bool] = lambda _: False,
    ) -> None:
        super().__init__(app, nodes, loses)
        self.heard: list[Message] = []  # all that the server ever received

    @property
    def run(self) -> Any:
        """The run, as far as the workflow asks for it."""
        return SimpleNamespace(run_id=1)

    def _reply(self, message: Message) -> Message | None:
        reply = super()._reply(deepcopy(message))
        if reply is not None:
            self.heard.append(deepcopy(reply))
        return reply


def trained(
    strategy: SecureIPW,
    rounds: int,
    *,
    app: ClientApp = client,
    clients: int | None = None,
    loses: Callable[[Message], bool] = lambda _: False,
) -> CopyingGrid:
    """Let a strategy train for some rounds; return the grid with all that was heard."""
    clients = len(enrolled_people()) if clients is None else clients
    grid = CopyingGrid(app, {100 + k: {"partition-id": k} for k in range(clients)}, loses)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    config = ServerConfig(num_rounds=rounds)
    workflow()(grid, LegacyContext(context=context, config=config, strategy=strategy))
    return grid


def clear_step(
    clients: Iterable[Person], theta: np.ndarray[Any, Any], *, hajek: bool
) -> np.ndarray[Any, Any]:
    """Return the step by these clients, as somebody would compute it who knows everything."""
    model, total, step = pilot_models(), 0.0, np.zeros_like(theta)
    for person in clients:
        weight = model.weight(person.covariates)
        total += weight
        step += weight * 0.5 * (person.optimum - theta)
    return step / total if hajek else step


def main(rounds: int, estimator: str) -> None:
    """Train, and print how far the secure sums are from those in the clear."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    strategy = SecureIPW(pilot_models(), estimator)
    trained(strategy, rounds)
    everybody, theta = enrolled_people(), np.zeros(SIZE)
    target = np.mean([p.optimum for p in people(POPULATION, seed=0)], axis=0)
    print(f"{len(everybody)} of {POPULATION} people are enrolled; the target is the mean over all.")
    for index, step in strategy.steps.items():
        rngs = [np.random.default_rng([place, index]) for place in range(len(everybody))]
        present = [p for p, rng in zip(everybody, rngs, strict=True) if replies(p, rng)]
        clear = clear_step(present, theta, hajek=estimator == HAJEK)
        theta = strategy.models[index][0]
        print(
            f"round {index}: {len(present)} replied; secure and clear step differ by "
            f"{np.abs(step[0] - clear).max():.1e}; distance to the target "
            f"{np.linalg.norm(theta - target):.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--estimator", default=HT, choices=[HT, HAJEK])
    given = parser.parse_args()
    main(given.rounds, given.estimator)
