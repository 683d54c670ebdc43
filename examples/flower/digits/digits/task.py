"""Who the clients are, when they take part, and the network they train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from sklearn.datasets import load_digits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Labels = NDArray[np.int64]
    Model = dict[str, Floats]

TRAIN, HELD_OUT = 20, 20  # images of each client
HIDDEN, CLASSES, PIXELS = 32, 10, 64
MIX, INK = 1.5, 0.4  # how strongly z1 moves the mix of digits, and z2 the ink
ENROLLMENT = np.array([1.0, 0.5])  # on z1 and z2
PARTICIPATION = np.array([0.5, 0.0])
STATE = 0.8  # of the round's state x on participation


class Work(Enum):
    """What clients are asked to do."""

    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class World:
    """A population of which some enrolled; the same on the server and on every node.

    Clients with a high z1 write high digits, and those with a high z2 press harder. Both are more
    likely to enrol: exactly ``enrolled`` clients do, those with the largest score plus logistic
    noise. A client takes part in a round by a coin whose log odds depend on z1 and on the state x
    of the round.
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

    def chance(self, *place: int) -> np.random.Generator:
        """Return the chance that belongs to a place of the simulation and to no other."""
        return np.random.default_rng([self.seed, *place])

    @cached_property
    def covariates(self) -> Floats:
        """z1 and z2 of all clients, (N, 2)."""
        return np.clip(self.chance(0).standard_normal((self.size, 2)), -2.0, 2.0)

    @cached_property
    def inside(self) -> Labels:
        """Rows of the enrolled clients, in order."""
        noisy = self.covariates @ ENROLLMENT + self.chance(1).logistic(size=self.size)
        return np.sort(np.argsort(-noisy)[: self.enrolled])

    @property
    def population(self) -> pl.DataFrame:
        """The table of all clients."""
        enrolled = np.zeros(self.size, dtype=np.bool_)
        enrolled[self.inside] = True
        z1, z2 = self.covariates.T
        ids = [unit_id(row) for row in range(self.size)]
        return pl.DataFrame({"unit_id": ids, "z1": z1, "z2": z2, "enrolled": enrolled})

    def row(self, partition: int) -> int:
        """Return the row of the client that a node is: node k is the k-th enrolled."""
        if not 0 <= partition < self.enrolled:
            raise ValueError(f"Node {partition} is none of {self.enrolled}: set enrolled to match.")
        return int(self.inside[partition])

    def state(self, row: int, index: int) -> float:
        """Return the state x of a client in a round."""
        return float(self.chance(2, index, row).standard_normal())

    def takes_part(self, row: int, index: int, work: Work) -> bool:
        """Toss the coin of a client for a work of a round; training and evaluation have their own.

        Were it the same coin, a model would be evaluated on the very replies it was fitted to.
        """
        rate = self.participation_rate
        score = np.log(rate / (1.0 - rate)) + self.covariates[row] @ PARTICIPATION
        score += STATE * self.state(row, index)
        coin = self.chance(3, index, row, work is Work.EVALUATE).random()
        return bool(coin < 1.0 / (1.0 + np.exp(-score)))

    def data(self, row: int, *, held_out: bool = False) -> tuple[Floats, Labels]:
        """Return images, (n, 64), and digits, (n,), of one client.

        No image is both in a client's part to train on and in one ``held_out``.
        """
        images, digits = _images()
        usable = np.arange(len(digits)) % 2 == held_out
        z1, z2 = self.covariates[row]
        odds = usable * np.exp(MIX * z1 * (digits - 4.5) / 4.5)
        count = HELD_OUT if held_out else TRAIN
        chosen = self.chance(4, held_out, row).choice(len(digits), count, p=odds / odds.sum())
        return np.clip(images[chosen] * np.exp(INK * z2), 0.0, 1.0), digits[chosen]

    def true_accuracy(self, model: Model) -> float:
        """Return the mean accuracy over all clients, enrolled or not."""
        found = [accuracy(model, *self.data(row, held_out=True)) for row in range(self.size)]
        return float(np.mean(found))


@cache
def _world(size: int, enrolled: int, rate: float, seed: int) -> World:
    return World(size, enrolled, rate, seed)


@cache
def _images() -> tuple[Floats, Labels]:
    images, digits = load_digits(return_X_y=True)
    return np.asarray(images, dtype=np.float64) / 16.0, np.asarray(digits, dtype=np.int64)


def unit_id(row: int) -> str:
    """Return the identifier of a client."""
    return f"c{row:04d}"


def first_model(seed: int) -> Model:
    """Return a network with small random weights."""
    rng = np.random.default_rng([seed, 5])
    return {
        "w1": rng.standard_normal((PIXELS, HIDDEN)) * np.sqrt(2.0 / PIXELS),
        "b1": np.zeros(HIDDEN),
        "w2": rng.standard_normal((HIDDEN, CLASSES)) * np.sqrt(1.0 / HIDDEN),
        "b2": np.zeros(CLASSES),
    }


def _scores(model: Model, images: Floats) -> tuple[Floats, Floats]:
    """Return the hidden layer, (n, 32), and the scores of the digits, (n, 10)."""
    hidden = np.maximum(images @ model["w1"] + model["b1"], 0.0)
    return hidden, hidden @ model["w2"] + model["b2"]


def accuracy(model: Model, images: Floats, digits: Labels) -> float:
    """Return the share of images classified correctly."""
    return float(np.mean(_scores(model, images)[1].argmax(axis=1) == digits))


def gradient(model: Model, images: Floats, digits: Labels) -> Model:
    """Return the gradient of the mean cross-entropy."""
    hidden, scores = _scores(model, images)
    prob = np.exp(scores - scores.max(axis=1, keepdims=True))
    prob /= prob.sum(axis=1, keepdims=True)
    prob[np.arange(len(digits)), digits] -= 1.0
    outer = prob / len(digits)
    inner = (outer @ model["w2"].T) * (hidden > 0.0)
    return {
        "w1": images.T @ inner,
        "b1": inner.sum(axis=0),
        "w2": hidden.T @ outer,
        "b2": outer.sum(axis=0),
    }


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """Stochastic gradient descent over a client's images, some times."""

    epochs: int
    batch_size: int
    step_size: float

    def trained(
        self, model: Model, images: Floats, digits: Labels, rng: np.random.Generator
    ) -> Model:
        """Return the model after the client's work."""
        model = {name: array.copy() for name, array in model.items()}
        for _ in range(self.epochs):
            order = rng.permutation(len(digits))
            for first in range(0, len(order), self.batch_size):
                batch = order[first : first + self.batch_size]
                for name, slope in gradient(model, images[batch], digits[batch]).items():
                    model[name] -= self.step_size * slope
        return model
