"""Who the clients are, when they take part, and what they learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedipw.lab.mechanisms import DailyParticipation, LogisticEnrollment
from fedipw.lab.mechanisms.base import RoundDraw, score_of
from fedipw.lab.testbed import PopulationDraw, Streams, Testbed
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

L2 = 0.05
ROWS = 40  # of each client: the first half to train on, the rest to evaluate on


class Work(Enum):
    """What clients are asked to do."""

    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class World:
    """A population of which some enrolled; the same on the server and on every node.

    Enrollment is logistic in z1 and z2, with the intercept that enrols exactly ``enrolled``
    clients: those with the largest score plus logistic noise. Participation is logistic in z1, z2
    and the state x of the round.
    """

    size: int
    enrolled: int
    participation_rate: float
    seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> World:
        """Return the world of a run's configuration, drawn once in a process."""
        return _world(
            int(config["population-size"]), int(config["enrolled"]),
            float(config["participation-rate"]), int(config["seed"]),
        )  # fmt: skip

    @cached_property
    def drawn(self) -> PopulationDraw:
        """Covariates and data of all clients."""
        return Testbed(size=self.size, rows=ROWS).draw(Streams.of(self.seed).population)

    @cached_property
    def population(self) -> Population:
        """The table of all clients, with who enrolled."""
        people = self.drawn.population
        score = score_of(people, LogisticEnrollment().coefficients)
        noisy = score + Streams.of(self.seed).enrollment.logistic(size=self.size)
        inside = np.zeros(self.size, dtype=np.bool_)
        inside[np.argsort(-noisy)[: self.enrolled]] = True
        return people.with_enrolled(inside)

    def row(self, partition: int) -> int:
        """Return the row of the client that a node is: node k is the k-th enrolled."""
        if not 0 <= partition < self.enrolled:
            raise ValueError(f"Node {partition} is none of {self.enrolled}: set enrolled to match.")
        return int(np.flatnonzero(self.population.enrolled)[partition])

    def unit_id(self, row: int) -> int:
        """Return the identifier of a client."""
        return int(self.population.unit_ids[row])

    def round(self, index: int) -> RoundDraw:
        """Return the state x of all clients in a round, counted from 1, and how ready each is."""
        while len(self._rounds) < index:
            self._rounds.append(self._process.advance())
        return self._rounds[index - 1]

    def takes_part(self, row: int, index: int, work: Work) -> bool:
        """Toss the coin of a client for a work of a round; training and evaluation have their own.

        Were it the same coin, a model would be evaluated on the very replies it was fitted to.
        """
        prob = self.round(index).participation_prob
        assert prob is not None
        rng = np.random.default_rng([self.seed, index, row, work is Work.EVALUATE])
        return bool(rng.random() < prob[row])

    @cached_property
    def _process(self) -> Any:
        mechanism = DailyParticipation(rate=self.participation_rate)
        drawn = self.drawn
        return mechanism.start(drawn.population, drawn.clients, Streams.of(self.seed).participation)

    @cached_property
    def _rounds(self) -> list[RoundDraw]:
        return []

    def data(self, row: int, *, held_out: bool = False) -> tuple[Vector, Vector]:
        """Return features with a constant, (n, d + 1), and labels, (n,), of one client.

        They are those to train on, or those ``held_out`` to evaluate on.
        """
        clients, first = self.drawn.clients, row * ROWS + held_out * (ROWS // 2)
        rows = slice(first, first + ROWS // 2)
        ones = np.ones((ROWS // 2, 1))
        return np.hstack([clients.features[rows], ones]), clients.labels[rows].astype(np.float64)

    def true_loss(self, theta: Vector) -> float:
        """Return the mean loss over all clients, enrolled or not."""
        losses = [loss(theta, *self.data(row, held_out=True)) for row in range(self.size)]
        return float(np.mean(losses))


@cache
def _world(size: int, enrolled: int, rate: float, seed: int) -> World:
    return World(size, enrolled, rate, seed)


def loss(theta: Vector, features: Vector, labels: Vector) -> float:
    """Return the mean logistic loss."""
    scores = features @ theta
    return float(np.mean(np.logaddexp(0.0, scores) - labels * scores))


def trained(theta: Vector, features: Vector, labels: Vector, steps: int, size: float) -> Vector:
    """Return the model after some steps of gradient descent on the penalised loss."""
    for _ in range(steps):
        prob = 1.0 / (1.0 + np.exp(-(features @ theta)))
        gradient = features.T @ (prob - labels) / len(labels) + L2 * theta
        theta = theta - size * gradient
    return theta
