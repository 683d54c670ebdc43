"""``python -m benchmarks.network``: a network on Flower with few replies a round.

8,000 people hold handwritten digits, by their covariates mostly 0 to 2 or mostly 3 to 9; about 6%
enrolled, few of them with 0 to 2. A network with one hidden layer is trained through the strategy,
in process, on about 18 and about 5 replies a round. The measure is accuracy on held-out digits in
the mix of the whole population, after every round and of the averaged model. Runs without selection
have as many replies of people drawn at random from all. Results go to
benchmarks/results/network.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from fedipw.lab.files import environment
from fedipw.lab.mechanisms.base import solved_intercept
from fedipw.numerics.logistic import sigmoids
from fedipw.numerics.threads import limit_threads

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord
    from flwr.clientapp import ClientApp
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Numbers = NDArray[np.float64]
    Labels = NDArray[np.int64]
    Model = dict[str, Floats]


RESULT = Path(__file__).parent / "results" / "network.json"
ROUNDS, LAST, REPLIES = 40, 10, (18, 5)
PIXELS, HIDDEN, CLASSES = 64, 32, 10
LOW = 3  # digits 0, 1 and 2, which people with low covariates hold
METHODS: Mapping[str, Mapping[str, Any]] = {
    "without selection": {"scheme": "fedavg"},
    "fedavg": {"scheme": "fedavg"},
    "fedipw": {"scheme": "fedipw"},
    "fedipw-hajek": {"scheme": "fedipw-hajek"},
    "default, table": {},
    "default, totals": {"totals": True},
}


@dataclass(frozen=True, kw_only=True)
class World:
    """People, the digits they hold, and which of them enrol and take part."""

    seed: int
    replies: float = 18.0  # expected in a round
    size: int = 8_000
    rate: float = 0.06  # enrolled
    enrollment: tuple[float, ...] = (0.8, 0.8, 0.0)  # on z1 = +-1, z2 and z3
    participation: tuple[float, ...] = (0.2, 0.3, 0.3)
    battery: float = 0.5  # on the battery of the round
    mix: float = 3.5  # of -(z1 + z2) / sqrt(2) on the log odds that an image is of 0, 1 or 2
    images: int = 20  # of each person
    epochs: int = 5
    batch: int = 5
    step: float = 0.2

    def chance(self, *place: int) -> np.random.Generator:
        """Return the chance that belongs to a place of the simulation and to no other."""
        return np.random.default_rng([self.seed, *place])

    @cached_property
    def covariates(self) -> Numbers:
        """z1, z2 and z3 of all people, (N, 3)."""
        rng = self.chance(0)
        signs = 2.0 * rng.integers(0, 2, self.size) - 1.0
        return np.column_stack([signs, np.clip(rng.standard_normal((self.size, 2)), -2.5, 2.5)])

    @cached_property
    def people(self) -> pl.DataFrame:
        """The table of all people."""
        score = self.covariates @ np.array(self.enrollment)
        prob = sigmoids(score, solved_intercept(lambda: [score], self.rate))
        columns = {f"z{j + 1}": self.covariates[:, j] for j in range(3)}
        enrolled = self.chance(1).random(self.size) < prob
        return pl.DataFrame({"unit_id": np.arange(self.size), **columns, "enrolled": enrolled})

    @cached_property
    def inside(self) -> Labels:
        """Rows of the enrolled people; node 1000 + k is the k-th of them."""
        return np.flatnonzero(self.people["enrolled"].to_numpy())

    @cached_property
    def batteries(self) -> Numbers:
        """Battery of each enrolled client in each round, (R, n)."""
        return self.chance(2).standard_normal((ROUNDS, len(self.inside)))

    @cached_property
    def replied(self) -> NDArray[np.bool_]:
        """Whether each enrolled client replies if invited, in each round, (R, n)."""
        score = self.covariates[self.inside] @ np.array(self.participation)
        score = score + self.battery * self.batteries
        rate = self.replies / len(self.inside)
        flat = score.reshape(-1)
        prob = sigmoids(flat, solved_intercept(lambda: [flat], rate)).reshape(score.shape)
        replied: NDArray[np.bool_] = self.chance(3).random(score.shape) < prob
        return replied

    @cached_property
    def mixes(self) -> Numbers:
        """Probability of each digit among the images of each person, (N, 10)."""
        score = -self.mix * self.covariates[:, :2].sum(axis=1) / np.sqrt(2.0)
        low = sigmoids(score, solved_intercept(lambda: [score], LOW / CLASSES))
        shares = np.where(np.arange(CLASSES) < LOW, 1.0 / LOW, 0.0)
        others = np.where(np.arange(CLASSES) < LOW, 0.0, 1.0 / (CLASSES - LOW))
        out: Numbers = np.outer(low, shares) + np.outer(1.0 - low, others)
        return out

    @cached_property
    def pool(self) -> tuple[Floats, Labels, Floats, Labels]:
        """Images and digits to train on, and those held out."""
        images, digits = load_digits(return_X_y=True)
        scaled = (images / 16.0).astype(np.float32)
        out = np.arange(len(digits)) % 3 == 2
        return scaled[~out], digits[~out], scaled[out], digits[out]

    @cached_property
    def data(self) -> list[tuple[Floats, Labels]]:
        """Images and digits of each enrolled client."""
        images, digits, _, _ = self.pool
        rng = self.chance(4)
        groups = [np.flatnonzero(digits == digit) for digit in range(CLASSES)]
        made = []
        for mix in self.mixes[self.inside]:
            counts = rng.multinomial(self.images, mix)
            chosen = np.concatenate([
                rng.choice(group, count) for group, count in zip(groups, counts, strict=True)
            ])  # fmt: skip
            made.append((images[chosen], digits[chosen]))
        return made

    @cached_property
    def shares(self) -> Numbers:
        """Share of each held-out image in the population's mix, (n,)."""
        digits = self.pool[3]
        each: Numbers = self.mixes.mean(axis=0) / np.bincount(digits, minlength=CLASSES)
        return each[digits]

    def accuracy(self, model: Model) -> float:
        """Return the accuracy on held-out digits in the population's mix."""
        _, _, images, digits = self.pool
        return float(self.shares @ (scores(model, images)[1].argmax(axis=1) == digits))

    def first_model(self) -> Model:
        """Return a network with small random weights."""
        rng = self.chance(5)
        drawn = {
            "w1": rng.standard_normal((PIXELS, HIDDEN)) * np.sqrt(2.0 / PIXELS),
            "b1": np.zeros(HIDDEN),
            "w2": rng.standard_normal((HIDDEN, CLASSES)) * np.sqrt(1.0 / HIDDEN),
            "b2": np.zeros(CLASSES),
        }
        return {name: array.astype(np.float32) for name, array in drawn.items()}

    def trained(self, model: Model, k: int, index: int) -> Model:
        """Return the model after the local epochs of the k-th client in a round."""
        images, digits = self.data[k]
        made, rng = {name: array.copy() for name, array in model.items()}, self.chance(6, index, k)
        for _ in range(self.epochs):
            order = rng.permutation(len(digits))
            for first in range(0, len(order), self.batch):
                batch = order[first : first + self.batch]
                for name, slope in gradient(made, images[batch], digits[batch]).items():
                    made[name] -= np.float32(self.step) * slope
        return made

    def app(self) -> ClientApp:
        """Return what every node runs."""
        from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp

        from fedipw.flower import declined, describes

        app = ClientApp()

        @describes(app)
        def about(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
            k = int(context.node_config["k"])
            return {"unit_id": int(self.inside[k]),
                    "battery": float(self.batteries[server_round - 1, k])}  # fmt: skip

        @app.train()
        def train(message: Message, context: Context) -> Message:
            k = int(context.node_config["k"])
            index = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
            if not self.replied[index - 1, k]:
                return declined(message, "busy")
            made = self.trained(model_of(message.content.array_records["arrays"]), k, index)
            arrays = ArrayRecord({name: Array(array) for name, array in made.items()})
            metrics = MetricRecord({"num-examples": self.images})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        return app

    def sources(self, *, totals: bool) -> dict[str, Any]:
        """Return what the server knows of the population, as FedIPW takes it."""
        people = self.people
        if not totals:
            return {"population": people, "enrollment": "z1 + z2 + z3"}
        means = people.select(pl.col("z1", "z2", "z3").mean()).row(0, named=True)
        inside = people.filter("enrolled").drop("enrolled")
        return {"enrolled": inside, "targets": means, "population_size": people.height}


def model_of(arrays: ArrayRecord) -> Model:
    """Return a record's arrays."""
    return {name: array.numpy() for name, array in arrays.items()}


def scores(model: Model, images: Floats) -> tuple[Floats, Floats]:
    """Return the hidden layer, (n, 32), and the scores of the digits, (n, 10)."""
    hidden = np.maximum(images @ model["w1"] + model["b1"], 0.0)
    return hidden, hidden @ model["w2"] + model["b2"]


def gradient(model: Model, images: Floats, digits: Labels) -> Model:
    """Return the gradient of the mean cross-entropy."""
    hidden, found = scores(model, images)
    prob = np.exp(found - found.max(axis=1, keepdims=True))
    prob /= prob.sum(axis=1, keepdims=True)
    prob[np.arange(len(digits)), digits] -= 1.0
    outer = prob / np.float32(len(digits))
    inner = (outer @ model["w2"].T) * (hidden > 0.0)
    return {
        "w1": images.T @ inner, "b1": inner.sum(axis=0),
        "w2": hidden.T @ outer, "b2": outer.sum(axis=0),
    }  # fmt: skip


def run(world: World, method: str, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Train by a method, and return accuracies after every round and of the returned model."""
    from flwr.app import Array, ArrayRecord, MetricRecord
    from flwr.serverapp.strategy import FedAvg

    from fedipw.flower import FedIPW, InProcessGrid

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    began, settings = time.perf_counter(), dict(METHODS.get(method, {"scheme": method}))
    sources = world.sources(totals=settings.pop("totals", False))
    grid = InProcessGrid(world.app(), {1000 + k: {"k": k} for k in range(len(world.inside))})
    found: list[float] = []

    def judged(index: int, arrays: ArrayRecord) -> MetricRecord:
        if index > 0:
            found.append(world.accuracy(model_of(arrays)))
        return MetricRecord({})

    with tempfile.TemporaryDirectory() as where:
        strategy = FedIPW(
            FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
            ledger=where, participation="z1 + z2 + z3 + battery", **sources, **settings,
        )  # fmt: skip
        start = ArrayRecord({name: Array(array) for name, array in world.first_model().items()})
        result = strategy.start(grid, start, num_rounds=rounds, evaluate_fn=judged)
        name = strategy.config.plan.method.name
    return {
        "seed": world.seed,
        "replies": world.replies,
        "method": method,
        "name": name,
        "replies_seen": float(world.replied[:rounds].sum(axis=1).mean()),
        "enrolled": len(world.inside),
        "enrolled_mix": world.mixes[world.inside].mean(axis=0).tolist(),
        "accuracy": found,
        "averaged": world.accuracy(model_of(result.arrays)),
        "seconds": time.perf_counter() - began,
    }


def _run(job: tuple[int, int, str]) -> dict[str, Any]:
    replies, seed, method = job
    world = World(seed=seed, replies=float(replies))
    if method == "without selection":
        world = replace(world, enrollment=(0.0,) * 3, participation=(0.0,) * 3, battery=0.0)
    return run(world, method)


def _start() -> None:
    limit_threads(1)
    threadpool_limits(1)


def summary(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return accuracies over seeds, by replies and method."""
    out = []
    for replies, method in dict.fromkeys((line["replies"], line["method"]) for line in lines):
        mine = [x for x in lines if (x["replies"], x["method"]) == (replies, method)]
        curves = np.array([line["accuracy"] for line in mine])
        ends = curves[:, -LAST:].mean(axis=1)
        out.append({
            "replies": replies,
            "method": method,
            "name": mine[0]["name"],
            "seeds": len(mine),
            "last_ten": float(ends.mean()),
            "last_ten_worst_seed": float(ends.min()),
            "worst_round": float(curves[:, curves.shape[1] // 2 :].min()),
            "averaged": float(np.mean([line["averaged"] for line in mine])),
            "averaged_worst_seed": float(np.min([line["averaged"] for line in mine])),
            "replies_seen": float(np.mean([line["replies_seen"] for line in mine])),
            "seconds": float(np.mean([line["seconds"] for line in mine])),
        })  # fmt: skip
    return out


def text_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the summary as text."""
    lines = [f"{'replies':>8} {'method':18}{'last ten':>10}{'worst round':>13}{'averaged':>10}"]
    lines += [
        f"{x['replies_seen']:8.1f} {x['method']:18}{x['last_ten']:10.3f}{x['worst_round']:13.3f}"
        f"{x['averaged']:10.3f}"
        for x in found
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all methods on all seeds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--replies", type=int, nargs="*", default=[*REPLIES])
    parser.add_argument("--methods", nargs="*", default=[*METHODS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    jobs = [*product(chosen.replies, seeds, chosen.methods)]
    with ProcessPoolExecutor(
        chosen.workers, mp_context=get_context("spawn"), initializer=_start
    ) as pool:
        lines = list(pool.map(_run, jobs))
    found = summary(lines)
    print(text_table(found))
    made = {**environment(), "summary": found, "results": lines}
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
