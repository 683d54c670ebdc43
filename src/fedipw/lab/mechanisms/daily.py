"""Participation as on phones: a slowly moving state, a day cycle, and the client's own habits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.mechanisms.base import RoundDraw, score_of, solved_intercept
from fedipw.numerics.logistic import sigmoids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedipw.lab.arrayclients import ArrayClients
    from fedipw.lab.clients import ClientData
    from fedipw.numerics.types import FloatArray
    from fedipw.tables.population import Population


@dataclass(frozen=True, slots=True, kw_only=True)
class DailyParticipation:
    r"""Logistic participation on Z and on one observed pre-round covariate.

    .. math::
       \text{logit}\, \pi^{part}_{ir} &= a + Z_i'\beta + \beta_x X_{ir} \\
       X_{ir} &= \text{AR}(1)_{ir} + Z_i'\alpha + \text{amplitude}\,
       \sin(2\pi r/\text{day} + \phi_i) \qquad (D3)

    The AR(1) part is stationary with unit variance. The intercept is solved for a mean rate over
    all clients and the first ``rate_rounds`` rounds.

    >>> from fedipw.lab.testbed import Testbed
    >>> drawn = Testbed(size=200).draw(np.random.default_rng(1))
    >>> process = DailyParticipation().start(drawn.population, drawn.clients,
    ...                                      np.random.default_rng(2))
    >>> rates = [process.advance().participation_prob.mean() for _ in range(100)]
    >>> round(float(np.mean(rates)), 9)
    0.25
    """

    coefficients: Mapping[str, float] = field(default_factory=lambda: {"z1": 0.4, "z2": 0.6})
    covariate_coefficient: float = 0.8
    covariate_loadings: Mapping[str, float] = field(default_factory=lambda: {"z2": 0.4})
    autocorrelation: float = 0.7
    day_amplitude: float = 0.5
    day_length: float = 24.0
    rate: float = 0.25
    rate_rounds: int = 100

    def __post_init__(self) -> None:
        if not -1.0 < self.autocorrelation < 1.0:
            raise InputError(
                f"autocorrelation must lie strictly between -1 and 1, not {self.autocorrelation}."
            )
        if self.rate_rounds < 1:
            raise InputError(f"rate_rounds must be at least 1, not {self.rate_rounds}.")

    def start(
        self, population: Population, clients: ClientData | ArrayClients, rng: np.random.Generator
    ) -> DailyProcess:
        """Return a process over these clients."""
        del clients  # data play no part here
        states, replies = rng.spawn(2)
        covariate = _Covariate(self, score_of(population, self.covariate_loadings), states)
        score = score_of(population, self.coefficients)

        def first_scores() -> Iterator[FloatArray]:
            ahead = copy.deepcopy(covariate)
            for _ in range(self.rate_rounds):
                yield score + self.covariate_coefficient * ahead.advance()

        intercept = solved_intercept(first_scores, self.rate)
        return DailyProcess(self.covariate_coefficient, intercept, score, covariate, replies)


class _Covariate:
    """X of all clients, round after round."""

    def __init__(
        self, settings: DailyParticipation, mean: FloatArray, rng: np.random.Generator
    ) -> None:
        self.settings, self.mean, self.rng = settings, mean, rng
        self.phase = rng.uniform(0.0, 2.0 * np.pi, len(mean))
        self.ar = rng.standard_normal(len(mean))
        self.round = 0

    def advance(self) -> FloatArray:
        rho = self.settings.autocorrelation
        self.round += 1
        if self.round > 1:
            self.ar = rho * self.ar + np.sqrt(1.0 - rho**2) * self.rng.standard_normal(len(self.ar))
        angle = 2.0 * np.pi * self.round / self.settings.day_length
        day: FloatArray = self.settings.day_amplitude * np.sin(angle + self.phase)
        return self.ar + self.mean + day


@final
class DailyProcess:
    """A running :class:`DailyParticipation`."""

    columns = ("x",)

    def __init__(
        self,
        coefficient: float,
        intercept: float,
        score: FloatArray,
        covariate: _Covariate,
        rng: np.random.Generator,
    ) -> None:
        self._coefficient, self._intercept, self._score = coefficient, intercept, score
        self._covariate, self._rng = covariate, rng

    def advance(self) -> RoundDraw:
        """Return the next round."""
        x = self._covariate.advance()
        prob = sigmoids(self._score + self._coefficient * x, self._intercept)
        return RoundDraw(
            index=self._covariate.round,
            covariates=x[:, None],
            participation_prob=prob,
            replied=self._rng.random(len(prob)) < prob,
        )

    def state(self) -> dict[str, Any]:
        """Return what changes from round to round."""
        return {
            "round": self._covariate.round,
            "ar": self._covariate.ar.copy(),
            "covariate_rng": self._covariate.rng.bit_generator.state,
            "reply_rng": self._rng.bit_generator.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._covariate.round, self._covariate.ar = int(state["round"]), np.array(state["ar"])
        self._covariate.rng.bit_generator.state = state["covariate_rng"]
        self._rng.bit_generator.state = state["reply_rng"]
