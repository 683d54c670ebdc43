"""A server process that trains on an in-process grid, to be killed; imported by its children."""

import logging
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp.strategy import FedAdam

from fedipw.errors import InputError
from fedipw.flower import FedIPW, GaussianNoise, Screen
from fedipw.lab.engine import LocalWork, LogisticTrainer, RoundWork
from fedipw.lab.testbed import Testbed
from fedipw.numerics.logistic import logistic_sums
from flower.federations import LabFederation, round_of, theta_of

ROUNDS, SIZE = 20, 80


def load_kernels() -> None:
    """Call compiled functions once: what is forked from here has them, in half of the time.

    Nothing here starts a thread, which no fork would take along.
    """
    clients = Testbed(size=2).clients_given(np.zeros((2, 3)), np.random.default_rng(0))
    theta = np.zeros(clients.n_parameters)
    work = RoundWork(clients=np.array([0]), theta=theta, key=0)
    LogisticTrainer(clients, LocalWork(), 0.0).updates(work)
    logistic_sums(clients.features, clients.labels, np.ones(len(clients.labels)), theta)


load_kernels()


class Sometimes(FedAdam):
    """FedAdam that has every fourth model evaluated, and the first two."""

    def configure_evaluate(self, server_round: int, *rest: Any) -> Any:
        due = server_round <= 2 or server_round % 4 == 0
        return super().configure_evaluate(server_round, *rest) if due else []


def trained(
    where: Path,
    rounds: int = ROUNDS,
    *,
    private: bool = False,
    held_in: int = 0,
    scheme: str | None = None,
    at: datetime | None = None,
) -> FedIPW:
    """Train to the end, from wherever an earlier process got to; leave the model's numbers.

    In round ``held_in`` the server waits for replies as long as there is a file ``hold``. With
    ``at`` the clock stands still.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    world = LabFederation(size=SIZE, rounds=ROUNDS)
    grid = world.grid()

    def held(message: Message) -> bool:
        if message.metadata.message_type == "train" and round_of(message) == held_in:
            (where / "held").touch()
            while (where / "hold").exists():
                time.sleep(0.02)
        return False

    grid.loses = held
    strategy = FedIPW(
        Sometimes(
            eta=0.1, beta_1=0.9, beta_2=0.99, fraction_train=0.7, fraction_evaluate=0.5,
            min_available_nodes=1,
        ),
        population=where / "people.parquet", participation="z2 + x", enrollment="z1 + z2",
        availability="z2", ledger=where / "ledger", refit_every=3, scheme=scheme,
        screen=Screen(clip=0.3) if private else None,
        noise=GaussianNoise(multiplier=0.1, delta=1e-5, seed=3) if private else None,
        clock=lambda: datetime.now(UTC) if at is None else at,
    )  # fmt: skip
    result = strategy.start(grid, world.start, num_rounds=rounds)
    metrics = {
        f"{kind} {index} {name}": value
        for kind, found in (
            ("train", result.train_metrics_clientapp),
            ("evaluate", result.evaluate_metrics_clientapp),
        )
        for index, record in found.items()
        for name, value in record.items()
        if not isinstance(value, list)
    }
    np.savez(where / "done.npz", theta=theta_of(result.arrays), names=list(metrics),
             values=np.array(list(metrics.values()), dtype=np.float64))  # fmt: skip
    return strategy


def refused(where: Path, rounds: int) -> None:
    """Try to train, and leave the reason why that is refused."""
    try:
        trained(where, rounds)
    except InputError as error:
        (where / "refused").write_text(str(error))


def killed_at(
    where: Path, rename: int, after: bool, rounds: int, scheme: str | None = None
) -> None:
    """Train, and be killed right before or after the n-th file gets its name, counted from 1."""
    count, replace = 0, Path.replace

    def counted(self: Path, target: Any) -> Path:
        nonlocal count
        count += 1
        if count == rename and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        made = replace(self, target)
        if count == rename and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    Path.replace = counted  # type: ignore[method-assign, assignment]
    trained(where, rounds, scheme=scheme)
    (where / "renames").write_text(str(count))


def killed_removing(where: Path, removal: int, rounds: int, scheme: str) -> None:
    """Train, and be killed right before the n-th file of a client's vector is removed."""
    count, unlink = 0, Path.unlink

    def counted(self: Path, missing_ok: bool = False) -> None:
        nonlocal count
        if self.suffix == ".npy":
            count += 1
            if count == removal:
                os.kill(os.getpid(), signal.SIGKILL)
        unlink(self, missing_ok=missing_ok)

    Path.unlink = counted  # type: ignore[method-assign]
    trained(where, rounds, scheme=scheme)
    (where / "removals").write_text(str(count))
