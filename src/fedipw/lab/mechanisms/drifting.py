"""Participation that changes from round to round: by a cycle, a trend or a change point."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.mechanisms.base import CountedProcess, RoundDraw, score_of, solved_intercept
from fedipw.numerics.checks import check_probability
from fedipw.numerics.logistic import sigmoids

if TYPE_CHECKING:
    from fedipw.lab.clients import ArrayClients, ClientData
    from fedipw.numerics import FloatArray
    from fedipw.tables.population import Population


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftingParticipation(ABC):
    r"""Logistic participation whose coefficients move with a signal :math:`s(r)` of the round.

    .. math:: \text{logit}\, \pi^{part}_{ir} = a + Z_i'\beta + s(r)\,(\delta_0 + Z_i'\delta)
       \qquad (D7)

    ``coefficients`` are :math:`\beta`, ``drift`` is :math:`\delta` and ``level`` is
    :math:`\delta_0`, which moves all clients alike. The intercept is solved for a mean rate over
    all clients and the first ``rate_rounds`` rounds. Replies are independent given Z and the round;
    nothing else is observed before a round.
    """

    coefficients: Mapping[str, float] = field(default_factory=lambda: {"z1": 0.4, "z2": 0.6})
    drift: Mapping[str, float] = field(default_factory=lambda: {"z1": -0.8, "z2": -0.8})
    level: float = 0.0
    rate: float = 0.25
    rate_rounds: int = 100

    def __post_init__(self) -> None:
        if self.rate_rounds < 1:
            raise InputError(f"rate_rounds must be at least 1, not {self.rate_rounds}.")

    @abstractmethod
    def signal(self, index: int) -> float:
        """Return s of a round, counted from 1."""

    def start(
        self, population: Population, clients: ClientData | ArrayClients, rng: np.random.Generator
    ) -> DriftingProcess:
        """Return a process over these clients."""
        del clients  # data play no part here
        fixed = score_of(population, self.coefficients)
        moving = self.level + score_of(population, self.drift)

        def score(index: int) -> FloatArray:
            moved: FloatArray = fixed + self.signal(index) * moving
            return moved

        def first() -> Iterator[FloatArray]:
            return (score(index) for index in range(1, self.rate_rounds + 1))

        intercept = solved_intercept(first, self.rate)
        return DriftingProcess(lambda index: sigmoids(score(index), intercept), rng)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SineParticipation(DriftingParticipation):
    r"""Selection that swings: :math:`s(r) = \sin(2\pi r/P)` in (D7).

    >>> SineParticipation(period=48).signal(12)
    1.0
    """

    period: float = 48.0

    def __post_init__(self) -> None:
        DriftingParticipation.__post_init__(self)
        _check_period(self.period)

    def signal(self, index: int) -> float:
        """Return s of a round, counted from 1."""
        return math.sin(2.0 * math.pi * index / self.period)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrendParticipation(DriftingParticipation):
    r"""Selection that moves steadily and then stays: :math:`s(r) = \min(r/L, 1)` in (D7).

    >>> trend = TrendParticipation(length=200)
    >>> trend.signal(50), trend.signal(400)
    (0.25, 1.0)
    """

    length: int = 600

    def __post_init__(self) -> None:
        DriftingParticipation.__post_init__(self)
        if self.length < 1:
            raise InputError(f"length must be at least 1 round, not {self.length}.")

    def signal(self, index: int) -> float:
        """Return s of a round, counted from 1."""
        return min(index / self.length, 1.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePointParticipation(DriftingParticipation):
    r"""Selection that changes once: :math:`s(r) = 1` from round ``at`` on, 0 before, in (D7).

    >>> change = ChangePointParticipation(at=300)
    >>> change.signal(299), change.signal(300)
    (0.0, 1.0)
    """

    at: int = 300

    def __post_init__(self) -> None:
        DriftingParticipation.__post_init__(self)
        if self.at < 1:
            raise InputError(f"at is a round, counted from 1, not {self.at}.")

    def signal(self, index: int) -> float:
        """Return s of a round, counted from 1."""
        return float(index >= self.at)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSineAvailability:
    r"""Availability that all clients lose and regain together, as in FedAWE (arXiv 2409.17446).

    .. math:: \pi^{part}_{ir} = p_i\, (\gamma \sin(2\pi r/P) + 1 - \gamma), \quad
       \text{logit}\, p_i = a + Z_i'\beta \qquad (D8)

    The mean of :math:`p_i` is ``rate``; over a whole period of rounds the mean probability of a
    client is :math:`p_i (1 - \gamma)`. With ``base``, :math:`p_i` is that column of the population.

    >>> from fedipw.lab.testbed import Testbed
    >>> drawn = Testbed(size=100).draw(np.random.default_rng(1))
    >>> process = ScaledSineAvailability(gamma=0.3, period=20, rate=0.5).start(
    ...     drawn.population, drawn.clients, np.random.default_rng(2))
    >>> rates = [process.advance().participation_prob.mean() for _ in range(20)]
    >>> round(float(np.mean(rates)), 12), round(float(max(rates)), 12)
    (0.35, 0.5)
    """

    coefficients: Mapping[str, float] = field(default_factory=lambda: {"z1": 0.4, "z2": 0.6})
    gamma: float = 0.3
    period: float = 20.0
    rate: float = 0.25
    base: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma < 0.5:
            raise InputError(
                f"gamma must lie in [0, 0.5), not {self.gamma}: from 0.5 on nobody is available in "
                "the trough of the cycle."
            )
        _check_period(self.period)

    def factor(self, index: int) -> float:
        """Return what multiplies the base probabilities in a round, counted from 1."""
        swing = math.sin(2.0 * math.pi * index / self.period)
        return self.gamma * swing + 1.0 - self.gamma

    def start(
        self, population: Population, clients: ClientData | ArrayClients, rng: np.random.Generator
    ) -> DriftingProcess:
        """Return a process over these clients."""
        del clients  # data play no part here
        base = self._base(population)
        return DriftingProcess(lambda index: self.factor(index) * base, rng)

    def _base(self, population: Population) -> FloatArray:
        """Return p of each client, (N,)."""
        if self.base is not None:
            given = population.matrix((self.base,))[:, 0]
            return check_probability(given, f"base probability {self.base!r}")
        score = score_of(population, self.coefficients)
        return sigmoids(score, solved_intercept(lambda: [score], self.rate))


@final
class DriftingProcess(CountedProcess):
    """Independent replies with probabilities that depend on the client and the round."""

    columns = ()

    def __init__(self, prob: Callable[[int], FloatArray], rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._prob, self._draw = prob, rng.random

    def advance(self) -> RoundDraw:
        """Return the next round."""
        self.round += 1
        prob = self._prob(self.round)
        return RoundDraw(
            index=self.round,
            covariates=np.empty((len(prob), 0)),
            participation_prob=prob,
            replied=self._draw(len(prob)) < prob,
        )


def _check_period(period: float) -> None:
    if not 2.0 <= period <= 1e9:
        raise InputError(f"period must be 2 to 1e+09 rounds, not {period}.")
