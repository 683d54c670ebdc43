"""``python -m benchmarks.batchnorm``: a network with batch normalisation under random selection.

Handwritten digits on 40 enrolled of 120 clients, chosen at random, who decline two of five
invitations at random: there is nothing to correct, so FedIPW must train as well as FedAvg alone.
Its weights still vary, and a Horvitz--Thompson sum would make running variances negative if it were
taken of them. Accuracy is on digits that no client has, of the model after the last round; the
smallest running variance is over all rounds. The network is PyTorch's where that is installed, else
the same one in NumPy, with the same names and types. Results: benchmarks/results/batchnorm.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fedipw.lab.files import environment

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import Strategy


RESULT = Path(__file__).parent / "results" / "batchnorm.json"
METHODS = ("augmented", "fedipw", "fedipw-hajek")
INPUTS, HIDDEN, CLASSES = 64, 32, 10
BATCH, RATE, MOMENTUM, EPS = 8, 0.1, 0.1, 1e-5
Arrays = dict[str, NDArray[Any]]


class Network(Protocol):
    """A linear layer, batch normalisation, ReLU and a linear layer."""

    @property
    def name(self) -> str:
        """What it is computed with."""
        ...

    def start(self, seed: int) -> Arrays:
        """Return the state of a new network."""
        ...

    def trained(self, state: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
        """Return the state after one pass over a client's data, in batches."""
        ...


@dataclass(frozen=True)
class NumpyNetwork:
    """The network in NumPy."""

    name: str = "numpy"

    def start(self, seed: int) -> Arrays:
        """Return the state of a new network."""
        rng = np.random.default_rng(seed)

        def uniform(out: int, into: int) -> Arrays:
            edge = 1.0 / np.sqrt(into)
            made = {"weight": rng.uniform(-edge, edge, (out, into)), "bias": np.zeros(out)}
            return {key: value.astype(np.float32) for key, value in made.items()}

        norm: Arrays = {
            "weight": np.ones(HIDDEN, np.float32), "bias": np.zeros(HIDDEN, np.float32),
            "running_mean": np.zeros(HIDDEN, np.float32),
            "running_var": np.ones(HIDDEN, np.float32),
            "num_batches_tracked": np.array(0, dtype=np.int64),
        }  # fmt: skip
        layers: dict[str, Arrays] = {
            "0": uniform(HIDDEN, INPUTS),
            "1": norm,
            "3": uniform(CLASSES, HIDDEN),
        }
        return {f"{n}.{key}": v for n, layer in layers.items() for key, v in layer.items()}

    def trained(self, state: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
        """Return the state after one pass over a client's data, in batches."""
        kinds = {key: value.dtype for key, value in self.start(0).items()}
        # a network keeps its own types whatever is loaded into it, as PyTorch's does
        s = {key: value.astype(kinds[key]) for key, value in state.items()}
        for first in range(0, len(x), BATCH):
            self._step(s, x[first : first + BATCH], y[first : first + BATCH])
        return s

    def _step(self, s: Arrays, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Take one step of gradient descent, in place."""
        m = len(x)
        h = x @ s["0.weight"].T + s["0.bias"]
        mean, var = h.mean(axis=0), h.var(axis=0)
        scale = 1.0 / np.sqrt(var + EPS)
        hat = (h - mean) * scale
        z = hat * s["1.weight"] + s["1.bias"]
        a = np.maximum(z, 0.0)
        out = _softmax(a @ s["3.weight"].T + s["3.bias"])
        out[np.arange(m), y] -= 1.0
        d = out / m
        dz = (d @ s["3.weight"]) * (z > 0.0)
        dhat = dz * s["1.weight"]
        dh = scale * (dhat - dhat.mean(axis=0) - hat * (dhat * hat).mean(axis=0))
        slopes = {
            "3.weight": d.T @ a, "3.bias": d.sum(axis=0), "1.weight": (dz * hat).sum(axis=0),
            "1.bias": dz.sum(axis=0), "0.weight": dh.T @ x, "0.bias": dh.sum(axis=0),
        }  # fmt: skip
        for key, slope in slopes.items():
            s[key] -= np.float32(RATE) * slope.astype(np.float32)
        s["1.running_mean"] += np.float32(MOMENTUM) * (mean - s["1.running_mean"])
        unbiased = var * m / (m - 1)
        s["1.running_var"] += np.float32(MOMENTUM) * (unbiased - s["1.running_var"])
        s["1.num_batches_tracked"] += 1


class TorchNetwork:
    """The network in PyTorch."""

    name = "torch"

    def __init__(self) -> None:
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(1)

    def _module(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )  # fmt: skip

    def start(self, seed: int) -> Arrays:
        """Return the state of a new network."""
        self.torch.manual_seed(seed)
        return {key: value.numpy().copy() for key, value in self._module().state_dict().items()}

    def trained(self, state: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
        """Return the state after one pass over a client's data, in batches."""
        torch, module = self.torch, self._module()
        # strict, and of the same types: what a client's own code does
        module.load_state_dict({key: torch.from_numpy(v.copy()) for key, v in state.items()})
        step = torch.optim.SGD(module.parameters(), lr=RATE)
        data, labels = torch.from_numpy(x), torch.from_numpy(y)
        module.train()
        for first in range(0, len(x), BATCH):
            step.zero_grad()
            out = module(data[first : first + BATCH])
            torch.nn.functional.cross_entropy(out, labels[first : first + BATCH]).backward()
            step.step()
        return {key: value.numpy().copy() for key, value in module.state_dict().items()}


def network() -> Network:
    """Return PyTorch's network where that is installed, else NumPy's."""
    return TorchNetwork() if find_spec("torch") else NumpyNetwork()


def accuracy(state: Mapping[str, NDArray[Any]], x: NDArray[Any], y: NDArray[Any]) -> float:
    """Return the share of digits a network in evaluation mode gets right."""
    h = x @ state["0.weight"].T + state["0.bias"]
    h = (h - state["1.running_mean"]) / np.sqrt(state["1.running_var"] + EPS)
    a = np.maximum(h * state["1.weight"] + state["1.bias"], 0.0)
    return float((np.argmax(a @ state["3.weight"].T + state["3.bias"], axis=1) == y).mean())


def _softmax(scores: NDArray[Any]) -> NDArray[Any]:
    made: NDArray[Any] = np.exp(scores - scores.max(axis=1, keepdims=True))
    made /= made.sum(axis=1, keepdims=True)
    return made


@cache
def _digits() -> tuple[NDArray[Any], NDArray[Any]]:
    found: Any = load_digits()
    return (found.data / 16.0).astype(np.float32), found.target.astype(np.int64)


@dataclass
class World:
    """Clients with digits of their own, enrolled and taking part at random."""

    seed: int
    clients: int = 120
    enrolled: int = 40
    samples: int = 24
    declines: float = 0.4
    net: Network = field(default_factory=network)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        x, y = _digits()
        order = rng.permutation(len(x))
        rows = order[: self.enrolled * self.samples].reshape(self.enrolled, -1)
        self.data = [(x[mine], y[mine]) for mine in rows]
        rest = order[self.enrolled * self.samples :]
        self.test = x[rest], y[rest]
        self.people = pl.DataFrame(
            {
                "unit_id": np.arange(self.clients),
                "age": rng.normal(size=self.clients),
                "enrolled": np.arange(self.clients) < self.enrolled,  # ages are at random
            }
        )
        self.smallest = np.inf  # running variance of any model sent

    def app(self) -> ClientApp:
        """Return what every node runs."""
        from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp

        from fedipw.flower import declined, describes

        app = ClientApp()

        @describes(app)
        def about(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
            chance = np.random.default_rng([self.seed, server_round, context.node_id])
            return {"unit_id": int(context.node_config["row"]), "battery": chance.random()}

        @app.train()
        def train(message: Message, context: Context) -> Message:
            row, arrays = int(context.node_config["row"]), message.content.array_records["arrays"]
            index = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
            state = {key: array.numpy() for key, array in arrays.items()}
            self.look(state)
            if np.random.default_rng([self.seed, 7, index, row]).random() < self.declines:
                return declined(message)
            made = self.net.trained(state, *self.data[row])
            record = ArrayRecord({key: Array(value) for key, value in made.items()})
            metrics = MetricRecord({"num-examples": self.samples})
            return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

        return app

    def look(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Note the smallest running variance."""
        self.smallest = min(self.smallest, float(state["1.running_var"].min()))

    def run(self, method: str, rounds: int, inner: Callable[..., Strategy] | None = None) -> Arrays:
        """Return the model after the last round; ``plain`` is the wrapped strategy alone."""
        from flwr.app import Array, ArrayRecord
        from flwr.serverapp.strategy import FedAvg

        from fedipw.flower import FedIPW, InProcessGrid

        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        grid = InProcessGrid(self.app(), {10 + k: {"row": k} for k in range(self.enrolled)})
        start = ArrayRecord({k: Array(v) for k, v in self.net.start(self.seed).items()})
        plain = (inner or FedAvg)(fraction_evaluate=0.0)
        if method == "plain":
            state = random.getstate()
            random.seed(self.seed)
            found: ArrayRecord = plain.start(grid, start, num_rounds=rounds).arrays
            random.setstate(state)
        else:
            with tempfile.TemporaryDirectory() as where:
                ours = FedIPW(
                    plain, population=self.people, participation="battery", ledger=where,
                    scheme=method, seed=self.seed, average=None,
                )  # fmt: skip
                found = ours.start(grid, start, num_rounds=rounds).arrays
        state_of = {key: array.numpy() for key, array in found.items()}
        self.look(state_of)
        return state_of


def measured(seeds: int, rounds: int, net: Network | None = None) -> dict[str, Any]:
    """Return accuracies by method and seed, and the smallest running variance of each."""
    chosen = network() if net is None else net
    lines: dict[str, dict[str, Any]] = {}
    for method in ("plain", *METHODS):
        line: dict[str, Any] = {"accuracy": [], "smallest_variance": []}
        for seed in range(seeds):
            world = World(seed, net=chosen)
            line["accuracy"].append(accuracy(world.run(method, rounds), *world.test))
            line["smallest_variance"].append(world.smallest)
        line["mean"] = float(np.mean(line["accuracy"]))
        lines[method] = line
    return {"network": chosen.name, "seeds": seeds, "rounds": rounds, "methods": lines}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    found = measured(chosen.seeds, chosen.rounds)
    print(json.dumps(found, indent=1))
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps({**environment(), **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
