"""Amplified SCAFFOLD's synthetic objective under cyclic participation (arXiv 2410.23131).

Everything as in the authors' code: two clients in four dimensions that share three coordinates and
pull the fourth to opposite sides, one client for 240 rounds and then the other for 240, ten local
steps, gradient noise of deviation 1 in the third coordinate, 5,000 rounds; local step,
amplification and proximal coefficient tuned on their grids. Tuning is on one seed, results on
others.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.outside.trainers import GradientTrainer
from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine import (
    Amplified,
    Federation,
    LocalWork,
    RuleSettings,
    Simulation,
    Training,
)
from fedipw.lab.engine.rules import FedProx, Scaffold
from fedipw.lab.mechanisms import RoundDraw
from fedipw.lab.mechanisms.base import CountedProcess
from fedipw.lab.scenario import Scenario
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray, IntArray

STEEP, SLOPE, NOISE, PULL = 16.0, np.array([2.0, 1.0]), 1.0, 16.0  # H, (L, lambda), sigma, zeta
BEST = np.array([1.0, 0.25, 0.0, 0.0])
PERIOD, LOCAL_STEPS, ROUNDS, EVERY = 480, 10, 5000, 100  # models are looked at every 100 rounds
RATES, FACTORS, PROXIMAL = (1e-3, 1e-4, 1e-5, 1e-6), (1.25, 1.5, 2.0, 3.0), (0.01, 0.1, 1.0, 10.0)
METHODS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "amplified": "Amplified FedAvg",
    "amplified+scaffold": "Amplified SCAFFOLD",
}
GRIDS: dict[str, tuple[dict[str, float], ...]] = {
    "fedavg": tuple({"rate": r} for r in RATES),
    "scaffold": tuple({"rate": r} for r in RATES),
    "fedprox": tuple({"rate": r, "mu": m} for r, m in product(RATES, PROXIMAL)),
    "amplified": tuple({"rate": r, "factor": f} for r, f in product(RATES, FACTORS)),
    "amplified+scaffold": tuple({"rate": r, "factor": f} for r, f in product(RATES, FACTORS)),
}


def objective(x: FloatArray) -> FloatArray:
    """Return the mean loss of the two clients at models (..., 4); its minimum is 0.

    >>> float(objective(BEST)), float(objective(np.zeros(4)))
    (0.0, 1.0)
    """
    up = np.maximum(x[..., 2], 0.0)
    found: FloatArray = (
        0.5 * (x[..., 0] - BEST[0]) ** 2
        + 0.5 * STEEP * (x[..., 1] - BEST[1]) ** 2
        + 0.125 * STEEP * (x[..., 2] ** 2 + up**2)
        + 0.25 * SLOPE.sum() * x[..., 3] ** 2
    )
    return found


@lru_cache(maxsize=1)
def _noise(key: int) -> FloatArray:
    """Return the noise of a round, by local step and client."""
    return np.random.default_rng(key).normal(scale=NOISE, size=(LOCAL_STEPS, 2))


def noisy_gradient(clients: IntArray, models: FloatArray, key: int, step: int) -> FloatArray:
    """Return the clients' stochastic gradients at their models, (m, 4)."""
    third = models[:, 2]
    slope: FloatArray = np.stack(
        [
            models[:, 0] - BEST[0],
            STEEP * (models[:, 1] - BEST[1]),
            0.25 * STEEP * (third + np.maximum(third, 0.0)) + _noise(key)[step, clients],
            0.5 * SLOPE[clients] * models[:, 3] + np.where(clients == 0, PULL, -PULL),
        ],
        axis=1,
    )
    return slope


class Cycle(CountedProcess):
    """One client for half a period, then the other."""

    columns = ()

    def __init__(self) -> None:
        super().__init__(None)

    def advance(self) -> RoundDraw:
        """Return the next round."""
        first = self.round % PERIOD < PERIOD // 2
        self.round += 1
        return RoundDraw(
            index=self.round,
            covariates=np.empty((2, 0)),
            participation_prob=None,
            replied=np.array([first, not first]),
        )


def losses(
    seed: int,
    method: str,
    *,
    rate: float,
    factor: float = 1.0,
    mu: float = 0.0,
    rounds: int = ROUNDS,
) -> FloatArray:
    """Return the objective after every 100th round."""
    data = ArrayClients(features=np.zeros((2, 1)), labels=np.zeros(2), offsets=np.arange(3))
    population = Population.of({"unit_id": np.arange(2), "z": np.zeros(2)})
    federation = Federation(
        population=population.with_enrolled(np.ones(2, dtype=bool)),
        clients=data,
        participation=Cycle(),
    )
    amplified = "amplified" in method
    rules = RuleSettings(
        fedprox=FedProx(mu=mu),
        scaffold=Scaffold(every=PERIOD if amplified else 1),
        amplified=Amplified(every=PERIOD, factor=factor),
    )
    scenario = Scenario(methods=(method,), rules=rules)
    trainer = GradientTrainer(
        gradient=noisy_gradient,
        loss=lambda theta, clients: np.full(len(clients), objective(theta)),
        start=np.zeros(4),
        work=LocalWork(steps=LOCAL_STEPS, step_size=rate / factor),
        clients=2,
    )
    run = Simulation(
        federation,
        scenario.weighers(federation),
        Training(work=trainer.work),
        np.random.default_rng([seed, 3]),
        compositions=scenario.compositions(federation, trainer.start),
        trainer=trainer,
    )
    run.advance(rounds)
    return objective(run.history().iterates[0, EVERY::EVERY])


def tuned(method: str, seed: int = 1000, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the settings with the lowest mean objective over the last tenth of the rounds."""

    def last(settings: dict[str, float]) -> float:
        found = losses(seed, method, rounds=rounds, **settings)
        return float(found[-max(1, len(found) // 10) :].mean())

    return min(GRIDS[method], key=last)


def study(seeds: int = 5, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the tuned settings and the objective over rounds, by method and seed."""
    methods = {}
    for method in METHODS:
        settings = tuned(method, rounds=rounds)
        curves = [losses(seed, method, rounds=rounds, **settings) for seed in range(seeds)]
        methods[method] = {
            "settings": settings,
            "curve": np.mean(curves, axis=0).tolist(),
            "last": [float(c[-max(1, len(c) // 10) :].mean()) for c in curves],
        }
    return {"rounds": rounds, "every": EVERY, "seeds": seeds, "methods": methods}
