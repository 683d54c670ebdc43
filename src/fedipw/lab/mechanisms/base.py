"""What every selection mechanism offers, and enrollment: who can train at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_probability
from fedipw.numerics.logistic import sigmoid_mean, sigmoids

if TYPE_CHECKING:
    from fedipw.lab.clients import ClientData
    from fedipw.numerics import BoolArray, FloatArray
    from fedipw.tables.population import Population


class EnrollmentMechanism(Protocol):
    """Any callable from a population to P(E = 1) of each client."""

    def __call__(self, population: Population) -> FloatArray:
        """Return enrollment probabilities, (N,)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundDraw:
    """One round of participation among all clients, as if all were enrolled."""

    index: int  # counted from 1
    covariates: FloatArray  # (N, q) known before the round
    participation_prob: FloatArray | None  # (N,) true P(A = 1 | E = 1, Z, X), None if unknown
    replied: BoolArray  # (N,)


class ParticipationProcess(Protocol):
    """A running mechanism: one call, one round. Its state can be saved and put back."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the pre-round covariates a server can observe."""

    def advance(self) -> RoundDraw:
        """Return the next round."""

    def state(self) -> dict[str, Any]:
        """Return arrays and plain values from which ``restore`` continues to the same bytes."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""


class CountedProcess:
    """A process whose state is the number of its rounds and, where it draws, its generator."""

    def __init__(self, rng: np.random.Generator | None) -> None:
        self.round, self.rng = 0, rng

    def state(self) -> dict[str, Any]:
        """Return what changes from round to round."""
        drawn = {} if self.rng is None else {"rng": self.rng.bit_generator.state}
        return {"round": self.round, **drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self.round = int(state["round"])
        if self.rng is not None:
            self.rng.bit_generator.state = state["rng"]


class ParticipationMechanism(Protocol):
    """A way clients take part in rounds, before it is tied to clients and chance."""

    def start(
        self, population: Population, clients: ClientData, rng: np.random.Generator
    ) -> ParticipationProcess:
        """Return a process over these clients."""


def score_of(population: Population, coefficients: Mapping[str, float]) -> FloatArray:
    """Return the linear score of each client, (N,)."""
    names = tuple(coefficients)
    if not names:
        return np.zeros(population.listed)
    return population.matrix(names) @ np.array([coefficients[n] for n in names], dtype=np.float64)


def solved_intercept(scores: Callable[[], Iterable[FloatArray]], rate: float) -> float:
    r"""Return the intercept at which the mean probability is ``rate``.

    .. math:: \text{mean}\,\sigma(a + \text{score}) = \text{rate} \qquad (D4)

    Newton safeguarded by bisection; each step asks ``scores`` for the score arrays anew, so that
    they may be streamed.

    >>> round(solved_intercept(lambda: [np.zeros(4)], 0.5), 12)
    0.0
    """
    if not 0.0 < rate < 1.0:
        raise InputError(f"A mean rate must lie strictly between 0 and 1, not {rate!r}.")
    logit = float(np.log(rate / (1.0 - rate)))
    a, low, high = logit, -np.inf, np.inf
    for _ in range(200):
        parts = [
            (*sigmoid_mean(np.ravel(s), a), np.size(s), float(np.min(s)), float(np.max(s)))
            for s in scores()
        ]
        total = sum(size for _, _, size, _, _ in parts)
        excess = sum(mean * size for mean, _, size, _, _ in parts) / total - rate
        slope = sum(slope * size for _, slope, size, _, _ in parts) / total
        if abs(excess) <= 1e-14:
            break
        # with equal scores a = logit - score, so the root lies between the extreme scores' roots
        low = max(low, logit - max(largest for *_, largest in parts))
        high = min(high, logit - min(smallest for *_, smallest, _ in parts))
        low, high = (low, min(a, high)) if excess > 0 else (max(a, low), high)
        newton = a - excess / slope if slope > 0 else np.inf
        following = newton if low < newton < high else 0.5 * (low + high)
        if following == a:
            break
        a = following
    else:
        raise InputError(
            f"No intercept was found for a mean rate of {rate!r}; scores are too wide."
        )
    return a


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticEnrollment:
    r"""Enrollment by a logistic model with a given mean rate.

    .. math:: \text{logit}\, \pi^{enr}_i = a + s\, Z_i'\beta, \quad
       \text{mean}\, \pi^{enr} = \text{rate} \qquad (D2)

    >>> from fedipw.tables import Population
    >>> people = Population.of({"unit_id": [1, 2], "z1": [-1.0, 1.0], "z2": [0.0, 0.0]})
    >>> LogisticEnrollment()(people).round(3)
    array([0.269, 0.731])
    """

    coefficients: Mapping[str, float] = field(default_factory=lambda: {"z1": 1.0, "z2": 0.8})
    strength: float = 1.0
    rate: float = 0.5

    def __call__(self, population: Population) -> FloatArray:
        """Return enrollment probabilities, (N,)."""
        score = self.strength * score_of(population, self.coefficients)
        return sigmoids(score, solved_intercept(lambda: [score], self.rate))


def enrollment_draw(probabilities: FloatArray, rng: np.random.Generator) -> BoolArray:
    """Draw enrollment once: client i enrolls if its uniform falls below its probability.

    Probabilities must lie in (0, 1]. One uniform per client whatever the probabilities, so that
    sweeps over mechanisms share their chance.
    """
    probs = check_probability(probabilities, "enrollment probability")
    enrolled: BoolArray = rng.random(len(probs)) < probs
    if not enrolled.any():
        raise InputError(
            f"No client of {len(probs)} enrolled at a mean probability of {probs.mean():.3g}. "
            "Raise the rate or the population size."
        )
    return enrolled
