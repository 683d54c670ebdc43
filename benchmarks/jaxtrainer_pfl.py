"""Time rounds of pfl-research, or of a plain PyTorch loop, on the network of the JAX trainer.

Reads clients, cohorts and the starting weights from an .npz file, and writes the seconds of each
timed round and the final loss to a JSON file. Runs in the environment of its own requirements.

    python jaxtrainer_pfl.py INPUT.npz --peer pfl --rounds 10 --warmup 2 --out OUT.json
    torchrun --nproc_per_node 2 jaxtrainer_pfl.py INPUT.npz --peer pfl --out OUT.json
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# pfl otherwise asks PyTorch for a GPU at every batch; must be set before pfl is imported.
os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import HyperParam, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

Arrays = dict[str, np.ndarray]

STEPS, BATCH, STEP_SIZE = 10, 20, 0.1
WORKERS = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun, as is RANK


class Network(torch.nn.Module):
    """784-128-10 with ReLU, from given weights, with the methods that pfl asks for."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        self.first = torch.nn.Linear(*arrays["w1"].shape)
        self.second = torch.nn.Linear(*arrays["w2"].shape)
        for layer, w, b in ((self.first, "w1", "b1"), (self.second, "w2", "b2")):
            layer.weight.data = torch.from_numpy(arrays[w].T.copy())
            layer.bias.data = torch.from_numpy(arrays[b].copy())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.second(torch.relu(self.first(features)))

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        return torch.nn.functional.cross_entropy(self(features), labels)

    @torch.no_grad()
    def metrics(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:
        """Return the loss as pfl's sum and count."""
        return {"loss": Weighted(self.loss(features, labels).item() * len(labels), len(labels))}


class FreshBatches(PyTorchTensorDataset):
    """A client's rows, served as STEPS batches, each drawn afresh without replacement."""

    def iter(self, batch_size: int | None) -> Iterator[list[torch.Tensor]]:
        """Yield the batches, or all rows at once when no smaller batch is asked for."""
        if batch_size is None or batch_size >= len(self):
            yield list(self.raw_data)
            return
        for _ in range(STEPS):
            rows = torch.randperm(len(self))[:batch_size]
            yield [tensor[rows] for tensor in self.raw_data]


class RoundSchedule(HyperParam, TrainingProcessCallback):
    """The cohort size of the current round, its clients one by one, and the end of each round."""

    def __init__(self, cohorts: np.ndarray) -> None:
        self._cohorts = cohorts.tolist()
        self._round = self._position = 0
        self.stamps: list[float] = []

    def value(self) -> int:
        """Return the cohort size."""
        return len(self._cohorts[self._round])

    def next_client(self) -> int:
        """Return the index of the next client."""
        self._position += 1
        cohort = self._cohorts[self._round]
        return cohort[(self._position - 1) % len(cohort)]

    def on_train_begin(self, **_: object) -> Metrics:
        """Note the time."""
        self.stamps = [time.perf_counter()]
        return Metrics()

    def after_central_iteration(self, *_: object, central_iteration: int) -> tuple[bool, Metrics]:
        """Note the time and go to the next round, without a wish to stop."""
        self.stamps.append(time.perf_counter())
        self._round = min(central_iteration + 1, len(self._cohorts) - 1)
        self._position = 0
        return False, Metrics()


def client_tensors(arrays: Arrays) -> list[tuple[torch.Tensor, torch.Tensor]]:
    features, labels = (torch.from_numpy(arrays[name]) for name in ("features", "labels"))
    bounds = itertools.pairwise(arrays["offsets"].tolist())
    return [(features[a:b].clone(), labels[a:b].clone()) for a, b in bounds]


def by_pfl(arrays: Arrays, network: Network, rounds: int) -> list[float]:
    schedule = RoundSchedule(arrays["cohorts"])
    clients = [FreshBatches(tensors) for tensors in client_tensors(arrays)]
    dataset = FederatedDataset(clients.__getitem__, schedule.next_client)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, train_cohort_size=schedule, val_cohort_size=None),
        SimulatedBackend(training_data=dataset, val_data=dataset),
        model,
        NNTrainHyperParams(BATCH, None, STEP_SIZE, local_num_steps=STEPS),
        callbacks=[schedule],
        send_metrics_to_platform=False,
    )
    return np.diff(schedule.stamps).tolist()


def by_loop(arrays: Arrays, network: Network, rounds: int) -> list[float]:
    """Clients one after the other; the sum of their moves in place."""
    clients, seconds = client_tensors(arrays), []
    weights = list(network.parameters())
    for cohort in arrays["cohorts"][:rounds].tolist():
        began = time.perf_counter()
        start = [w.detach().clone() for w in weights]
        total = [torch.zeros_like(w) for w in start]
        optimizer = torch.optim.SGD(weights, lr=STEP_SIZE)
        for features, labels in (clients[i] for i in cohort):
            with torch.no_grad():
                torch._foreach_copy_(weights, start)
            for _ in range(STEPS):
                rows = torch.randperm(len(labels))[:BATCH]
                optimizer.zero_grad()
                network.loss(features[rows], labels[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, torch._foreach_sub(weights, start))
        with torch.no_grad():
            torch._foreach_copy_(weights, start)
            torch._foreach_add_(weights, total, alpha=1.0 / len(cohort))
        seconds.append(time.perf_counter() - began)
    return seconds


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=Path)
    parser.add_argument("--peer", choices=("pfl", "loop"), default="pfl")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="at least 1: pfl evaluates first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with np.load(arguments.input) as archive:
        arrays = dict(archive)
    network = Network(arrays)
    run = by_pfl if arguments.peer == "pfl" else by_loop
    seconds = run(arrays, network, arguments.warmup + arguments.rounds)
    timed = seconds[arguments.warmup :]
    with torch.no_grad():
        features, labels = (torch.from_numpy(arrays[name]) for name in ("features", "labels"))
        loss = network.loss(features, labels).item()
    result = {
        "versions": {name: metadata.version(name) for name in ("pfl", "torch", "numpy")},
        "seconds_per_round": timed,
        "seconds_per_round_median": statistics.median(timed),
        "threads": arguments.threads * WORKERS,
        "final_loss": loss,
    }
    if os.environ.get("RANK", "0") == "0":
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
