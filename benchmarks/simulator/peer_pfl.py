"""Time federated averaging rounds of pfl-research on a given logistic regression workload.

Reads the clients' data and the cohort of each round from an .npz file, runs those rounds with
pfl's ``FederatedAveraging`` on its ``SimulatedBackend`` (PyTorch, CPU, float32) and writes the
seconds of each timed round and the final model to a JSON file.

    python peer_pfl.py INPUT.npz --rounds 20 --warmup 3 --out OUT.json
    torchrun --nproc_per_node 2 peer_pfl.py INPUT.npz --out OUT.json    # two worker processes
"""

import argparse
import functools
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
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

LOCAL_STEPS = 10
BATCH_SIZE = 16
LOCAL_LEARNING_RATE = 0.1
L2 = 0.05
WORKERS = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun, as is RANK
NOTES = (
    f"float32; worker processes: {WORKERS}; exactly the cohorts of the file; each client draws 10 "
    "batches of 16 from reshuffled passes over its rows (pfl's own Dataset.iter ends after one "
    "pass, 4 steps); weight decay in the local optimizer; server SGD with step 1; round 0 is never "
    "timed because pfl evaluates each client there."
)


class LogisticRegression(torch.nn.Module):
    """Linear logits, starting at zero, with the methods that pfl asks for."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(dimension, 1)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean logistic loss."""
        logits = self.linear(features).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)

    @torch.no_grad()
    def metrics(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:
        """Return the loss as pfl's sum and count."""
        return {"loss": Weighted(self.loss(features, labels).item() * len(labels), len(labels))}


class ReshuffledDataset(PyTorchTensorDataset):
    """A client's rows, served as LOCAL_STEPS batches from freshly shuffled passes."""

    def iter(self, batch_size: int | None) -> Iterator[list[torch.Tensor]]:
        """Yield the batches, or all rows at once when no smaller batch is asked for."""
        if batch_size is None or batch_size >= len(self):
            yield list(self.raw_data)
            return
        needed = LOCAL_STEPS * batch_size
        order = torch.cat([torch.randperm(len(self)) for _ in range(needed // len(self) + 1)])
        columns = [tensor[order[:needed]].split(batch_size) for tensor in self.raw_data]
        yield from map(list, zip(*columns, strict=True))


class RoundSchedule(HyperParam, TrainingProcessCallback):
    """The cohort size of the current round, its clients one by one, and the end of each round."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        self._ids = ids.tolist()
        self._starts = offsets.tolist()
        self._round = 0
        self._position = self._starts[0]
        self.stamps: list[float] = []

    def value(self) -> int:
        """Return the cohort size."""
        return self._starts[self._round + 1] - self._starts[self._round]

    def next_client(self) -> int:
        """Return the index of the next client."""
        self._position += 1
        return self._ids[(self._position - 1) % len(self._ids)]

    def on_train_begin(self, **_: object) -> Metrics:
        """Note the time."""
        self.stamps = [time.perf_counter()]
        return Metrics()

    def after_central_iteration(self, *_: object, central_iteration: int) -> tuple[bool, Metrics]:
        """Note the time and go to the next round, without a wish to stop."""
        self.stamps.append(time.perf_counter())
        self._round = central_iteration + 1
        # With an odd cohort size pfl's worker processes differ in their number of calls.
        self._position = self._starts[self._round]
        return False, Metrics()


def federated_dataset(arrays: Arrays, next_client: Callable[[], int]) -> FederatedDataset:
    features = torch.from_numpy(arrays["features"].astype(np.float32))
    labels = torch.from_numpy(arrays["labels"].astype(np.float32))
    clients = [
        ReshuffledDataset((features[start:stop].clone(), labels[start:stop].clone()))
        for start, stop in itertools.pairwise(arrays["offsets"].tolist())
    ]
    return FederatedDataset(clients.__getitem__, next_client)


def pfl_model(dimension: int) -> PyTorchModel:
    module = LogisticRegression(dimension)
    local_optimizer = functools.partial(torch.optim.SGD, weight_decay=L2)
    return PyTorchModel(module, local_optimizer, torch.optim.SGD(module.parameters(), lr=1.0))


def trained_theta_and_seconds(arrays: Arrays, rounds: int) -> tuple[np.ndarray, list[float]]:
    if rounds > len(arrays["cohort_offsets"]) - 1:
        raise ValueError(f"the input holds fewer than {rounds} rounds")
    schedule = RoundSchedule(arrays["cohort_ids"], arrays["cohort_offsets"])
    dataset = federated_dataset(arrays, schedule.next_client)
    model = pfl_model(arrays["features"].shape[1])
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, train_cohort_size=schedule, val_cohort_size=None),
        SimulatedBackend(training_data=dataset, val_data=dataset),
        model,
        NNTrainHyperParams(BATCH_SIZE, None, LOCAL_LEARNING_RATE, local_num_steps=LOCAL_STEPS),
        callbacks=[schedule],
        send_metrics_to_platform=False,
    )
    theta = torch.nn.utils.parameters_to_vector(model.pytorch_model.parameters())
    return theta.detach().numpy().astype(np.float64), np.diff(schedule.stamps).tolist()


def population_loss(arrays: Arrays, theta: np.ndarray) -> float:
    logits = arrays["features"] @ theta[:-1] + theta[-1]
    losses = np.logaddexp(0.0, logits) - arrays["labels"] * logits
    return float(losses.mean() + 0.5 * L2 * theta @ theta)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="at least 1")
    # One thread and two measure the same (0.70 and 0.72 s a round, 2 cores): the operators are
    # too small to share. Two worker processes of one thread each take 0.35 s.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.warmup < 1:
        parser.error("--warmup must be at least 1: pfl evaluates the clients in round 0")
    return arguments


def main() -> None:
    arguments = parsed_arguments()
    torch.set_num_threads(arguments.threads)
    with np.load(arguments.input) as archive:
        arrays = dict(archive)
    theta, seconds = trained_theta_and_seconds(arrays, arguments.warmup + arguments.rounds)
    timed = seconds[arguments.warmup :]
    result = {
        "peer": "pfl",
        "versions": {name: metadata.version(name) for name in ("pfl", "torch", "numpy")},
        "python": platform.python_version(),
        "seconds_per_round_median": statistics.median(timed),
        "seconds_per_round": timed,
        "threads": arguments.threads * WORKERS,
        "final_loss": population_loss(arrays, theta),
        "theta": theta.tolist(),
        "notes": NOTES,
    }
    if os.environ.get("RANK", "0") == "0":
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
