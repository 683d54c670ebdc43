"""FedAWE's Example 1: two clients, and how far FedAvg ends from the solution (arXiv 2409.17446).

Losses are (x - u)^2 / 2 with u = 0 and 100, solved at x = 50; client i is available with
probability p_i in every round. The limit of FedAvg's expected model is found three ways: in closed
form, from the engine's own step over all four outcomes of a round, and by running the engine. Other
rules are run too.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from benchmarks.outside.trainers import GradientTrainer
from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine import Federation, LocalWork, RoundWork, Simulation, Training
from fedipw.lab.engine.intermittent import EchoedUpdates
from fedipw.lab.mechanisms import RoundDraw
from fedipw.lab.mechanisms.base import CountedProcess
from fedipw.lab.scenario import Scenario
from fedipw.tables.ledger import Round
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

MINIMA, SOLUTION = np.array([0.0, 100.0]), 50.0
GRID = tuple(np.round(np.linspace(0.05, 1.0, 20), 2).tolist())
SHOWN = ((0.5, 0.5), (0.9, 0.1), (0.9, 0.5), (0.3, 0.1))
METHODS = ("fedavg", "oracle", "fedau", "debiased", "f3ast", "mifa", "fedvarp", "fedawe", "focus")
MEAN = "fedawe, mean of models"
STEP, ROUNDS, SEEDS = 0.02, 4000, 3


def fedavg_limit(p1: float, p2: float) -> float:
    r"""Return the limit of the expected model of FedAvg over active clients.

    .. math:: \frac{u_1\, p_1 (1 - p_2/2) + u_2\, p_2 (1 - p_1/2)}{p_1 + p_2 - p_1 p_2}

    since a client that is there alone counts whole and two count half each.

    >>> fedavg_limit(0.5, 0.5), fedavg_limit(1.0, 0.5)
    (50.0, 25.0)
    """
    alone = p1 * (1.0 - p2 / 2.0), p2 * (1.0 - p1 / 2.0)
    return float((MINIMA @ alone) / (p1 + p2 - p1 * p2))


def biased_objective(p1: float, p2: float) -> float:
    """Return the minimiser of the paper's equation (3), clients weighted by p_i / (p_1 + p_2)."""
    return float((MINIMA @ (p1, p2)) / (p1 + p2))


class _Coins(CountedProcess):
    """Independent replies with constant probabilities."""

    columns = ()

    def __init__(self, prob: FloatArray, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._prob, self._draw = prob, rng

    def advance(self) -> RoundDraw:
        """Return the next round."""
        self.round += 1
        return RoundDraw(
            index=self.round,
            covariates=np.empty((len(self._prob), 0)),
            participation_prob=self._prob,
            replied=self._draw.random(len(self._prob)) < self._prob,
        )


def _federation(prob: FloatArray, rng: np.random.Generator) -> Federation:
    population = Population.of({"unit_id": np.arange(2), "side": np.array([0.0, 1.0])})
    data = ArrayClients(features=np.zeros((2, 1)), labels=np.zeros(2), offsets=np.arange(3))
    return Federation(
        population=population.with_enrolled(np.ones(2, dtype=bool)),
        clients=data,
        participation=_Coins(prob, rng),
        enrollment_prob=np.ones(2),
    )


def _trainer() -> GradientTrainer:
    return GradientTrainer(
        gradient=lambda clients, models, _key, _step: models - MINIMA[clients, None],
        loss=lambda theta, clients: 0.5 * (theta[0] - MINIMA[clients]) ** 2,
        start=np.zeros(1),
        work=LocalWork(step_size=STEP),
        clients=2,
    )


def engine_limit(method: str, p1: float, p2: float) -> float:
    """Return the limit of the expected model from the engine's step over all four outcomes.

    For methods whose step depends on the present round alone: the expected step is affine in x.
    """
    prob = np.array([p1, p2])
    federation, trainer = _federation(prob, np.random.default_rng(0)), _trainer()
    scenario = Scenario(methods=(method,))
    composition = scenario.compositions(federation, trainer.start)[method]
    (weigher,) = scenario.weighers(federation)
    rows, expected = np.arange(2), []
    for x in (0.0, 1.0):
        mean = x
        for replied in product([True, False], repeat=2):
            there = np.array(replied)
            if there.any():
                coming = Round(index=1, rows=rows, table=pl.DataFrame(), participation_prob=prob)
                weigher.open(coming)
                given = weigher.weigh(there)[method]
                weigher.close(there)
                task = RoundWork(clients=rows[there], theta=np.array([x]), key=0)
                total = composition.total(trainer, task, given).total
                assert total is not None
                mean += float(np.where(there, prob, 1.0 - prob).prod() * total[0])
        expected.append(mean)
    return expected[0] / (1.0 - (expected[1] - expected[0]))


def run_mean(seed: int, p1: float, p2: float, rounds: int = ROUNDS) -> dict[str, float]:
    """Return each method's mean model over the second half of a run."""
    rng = np.random.default_rng([seed, int(100 * p1), int(100 * p2)])
    federation, trainer = _federation(np.array([p1, p2]), rng), _trainer()
    scenario = Scenario(methods=METHODS)
    compositions = scenario.compositions(federation, trainer.start)
    run = Simulation(
        federation,
        scenario.weighers(federation),
        Training(work=trainer.work),
        rng,
        compositions=compositions,
        trainer=trainer,
    )
    echoed, means = compositions["fedawe"].intermittent, []

    def after(done: int) -> None:
        if done > rounds // 2 and isinstance(echoed, EchoedUpdates):
            means.append(float(echoed.mean_model[0]))

    run.advance(rounds, after=after)
    half = run.history().iterates[:, rounds // 2 + 1 :, 0].mean(axis=1)
    return dict(zip(run.methods, half.tolist(), strict=True)) | {MEAN: float(np.mean(means))}


def study(seeds: int = SEEDS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the surface of FedAvg's bias, and where runs of all methods end in a few places."""
    pairs = list(product(GRID, GRID))
    exact = np.array([fedavg_limit(*pair) for pair in pairs])
    engine = np.array([engine_limit("fedavg", *pair) for pair in pairs])
    known = np.array([engine_limit("oracle", *pair) for pair in pairs])
    runs = {}
    for pair in SHOWN:
        found = [run_mean(seed, *pair, rounds) for seed in range(seeds)]
        values = {m: np.array([one[m] for one in found]) for m in found[0]}
        runs[f"{pair[0]}, {pair[1]}"] = {
            "closed_form": fedavg_limit(*pair),
            "equation_3": biased_objective(*pair),
            "mean": {m: float(v.mean()) for m, v in values.items()},
            "standard_error": {m: float(v.std(ddof=1) / np.sqrt(seeds)) for m, v in values.items()},
        }
    return {
        "grid": GRID,
        "distance": np.abs(exact - SOLUTION).reshape(len(GRID), -1).round(6).tolist(),
        "largest_difference_engine": float(np.abs(engine - exact).max()),
        "largest_distance_known": float(np.abs(known - SOLUTION).max()),
        "share_over_10": float((np.abs(exact - SOLUTION) > 10.0).mean()),
        "rounds": rounds,
        "seeds": seeds,
        "runs": runs,
    }
