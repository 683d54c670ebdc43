"""Calibration to noisy moments: panel D, from the limit solver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedipw.calibration import Distance, Entropy, Quadratic
from fedipw.errors import InfeasibleError
from fedipw.lab.theory import FederatedLogistic
from fedipw.tables.terms import term_of
from fedipw.weighting import Balance

if TYPE_CHECKING:
    from fedipw.lab.engine import Simulation
    from fedipw.numerics.types import FloatArray

NOISE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)  # standard deviations of each moment
NOISY_METHODS = (
    "participation-only",
    "calibrated-quadratic",
    "calibrated-entropy",
    "calibrated-noise-aware",
)


@dataclass(frozen=True, slots=True, eq=False)
class NoisyLimit:
    """A method's limit by moment noise; NaN where its moments were infeasible."""

    method: str
    x: FloatArray  # moment noise
    excess_loss: FloatArray
    distance: FloatArray


def noisy_limits(run: Simulation, target: FederatedLogistic, seed: int) -> list[NoisyLimit]:
    """Return the limits of a run when population moments are known with errors.

    Each moment gets an error of sd ``noise`` times the column's own sd over the population; all
    noise levels share one draw, scaled. The participation stage is that of the run: each enrolled
    client's true over fitted participation probability, averaged over rounds.
    """
    population, best = run.federation.population, target.minimum()
    terms = [term_of(name, population.frame.schema) for name in population.covariates]
    balance = Balance.of(population, terms)
    spread = balance.matrix.std(axis=0, ddof=1)
    error = spread * np.random.default_rng([seed, *b"moments"]).standard_normal(len(spread))
    participation = run.limits["participation-only"].given_enrolled

    def outcome(weights: FloatArray | None) -> tuple[float, float]:
        if weights is None:
            return float("nan"), float("nan")
        objective = FederatedLogistic(target.clients, target.l2, participation * weights)
        theta = objective.minimum(best.point).point
        loss = float(target.losses(theta)[0] - best.value)
        return loss, float(np.linalg.norm(theta - best.point))

    def weights(method: str, noise: float) -> FloatArray | None:
        if method == "participation-only":
            return np.ones(population.size)
        noisy = replace(balance, mean=balance.mean + noise * error)
        if method == "calibrated-noise-aware":
            noisy = replace(noisy, se=noise * spread)
        rule: Distance = Quadratic() if method == "calibrated-quadratic" else Entropy()
        try:
            return noisy.enrollment_weights(rule)
        except InfeasibleError:
            return None

    found = []
    for method in NOISY_METHODS:
        outcomes = np.array([outcome(weights(method, noise)) for noise in NOISE])
        found.append(NoisyLimit(method, np.array(NOISE), outcomes[:, 0], outcomes[:, 1]))
    return found
