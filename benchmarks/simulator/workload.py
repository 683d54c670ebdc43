"""The workload: 2,000 clients, 64 rows, d = 20, about 160 replies a round, 10 steps of batch 16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedipw.lab.mechanisms import DataAvailability, LogisticEnrollment
from fedipw.lab.scenario import Scenario, TrainingSettings
from fedipw.lab.testbed import Testbed
from fedipw.numerics.compiled import compiled
from fedipw.numerics.threads import over_ranges

STEPS, BATCH, CLIENTS, ROWS, FEATURES = 10, 16, 2000, 64, 20


def scenario(rounds: int, method: str = "fedavg") -> Scenario:
    """Return the workload: everyone enrolled, replies at a rate of 8%."""
    return Scenario(
        seed=0,
        rounds=rounds,
        methods=(method,),
        population=Testbed(size=CLIENTS, rows=ROWS, features=FEATURES),
        enrollment=LogisticEnrollment(strength=0.0, rate=1.0 - 1e-12),
        participation=DataAvailability(rate=0.08),
        training=TrainingSettings(local_steps=STEPS, step_size=0.1, batch_size=BATCH),
    )


def write_input(path: Path, rounds: int) -> None:
    """Write data and the cohort of every round for the peers."""
    federation = scenario(rounds).simulation(limits=False).federation
    cohorts = [np.flatnonzero(federation.participation.advance().replied) for _ in range(rounds)]
    np.savez(
        path,
        features=federation.clients.features,
        labels=federation.clients.labels,
        offsets=federation.clients.offsets,
        cohort_ids=np.concatenate(cohorts),
        cohort_offsets=np.concatenate([[0], np.cumsum([len(c) for c in cohorts])]),
    )


def timed_rounds(rounds: int, warmup: int) -> list[float]:
    """Return the seconds of each whole round of the engine: selection, weights, training, step."""
    run = scenario(rounds + warmup).simulation(limits=False)
    run.advance(warmup)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run.advance(1)
        seconds.append(time.perf_counter() - began)
    return seconds


@compiled
def _products(
    batches: np.ndarray, models: np.ndarray, out: np.ndarray, first: int, last: int
) -> None:
    """X y and X'(X y) for every step of every client, and nothing else."""
    steps, rows, d = batches.shape[1], batches.shape[2], batches.shape[3]
    u = np.empty(rows)
    for c in range(first, last):
        y = models[c]
        for s in range(steps):
            for i in range(rows):
                x = batches[c, s, i]
                total = 0.0
                for j in range(d):
                    total += x[j] * y[j]
                u[i] = total
            for i in range(rows):
                x = batches[c, s, i]
                for j in range(d):
                    out[c, j] += u[i] * x[j]


def floor_seconds(repeats: int) -> dict[str, float]:
    """Return the median seconds of a round's bare matrix products, compiled and by NumPy.

    Batches lie gathered and in order; no sampling, no logistic function, no regularisation.
    """
    rng = np.random.default_rng(0)
    clients = int(0.08 * CLIENTS)
    batches = rng.normal(size=(clients, STEPS, BATCH, FEATURES + 1))
    models, out = rng.normal(size=(clients, FEATURES + 1)), np.zeros((clients, FEATURES + 1))

    def loop() -> None:
        work = 4.0 * batches.size
        over_ranges(clients, lambda a, b: _products(batches, models, out, a, b), work=work)

    def by_numpy() -> None:
        for s in range(STEPS):
            X = batches[:, s]
            u = X @ models[:, :, None]
            np.matmul(X.transpose(0, 2, 1), u)

    return {"compiled": _median_time(loop, repeats), "numpy": _median_time(by_numpy, repeats)}


def _median_time(function: Callable[[], None], repeats: int) -> float:
    function()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
