"""Simulated participation: phones with a day cycle, Markov chains, availability tied to data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.mechanisms.base import CountedProcess, RoundDraw, score_of, solved_intercept
from fedipw.numerics.logistic import sigmoids

if TYPE_CHECKING:
    from fedipw.lab.clients import ArrayClients, ClientData
    from fedipw.numerics import BoolArray, FloatArray
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
        return DailyProcess(self, population, *rng.spawn(2))


@final
class DailyProcess:
    """A running :class:`DailyParticipation`."""

    columns = ("x",)

    def __init__(
        self,
        settings: DailyParticipation,
        population: Population,
        states: np.random.Generator,
        replies: np.random.Generator,
    ) -> None:
        self._settings, self._states, self._replies = settings, states, replies
        self._score = score_of(population, settings.coefficients)
        self._mean = score_of(population, settings.covariate_loadings)
        self._phase = states.uniform(0.0, 2.0 * np.pi, len(self._mean))
        self._ar = states.standard_normal(len(self._mean))
        self._round = 0
        self._intercept = solved_intercept(self._first_scores, settings.rate)

    def _first_scores(self) -> Iterator[FloatArray]:
        ahead = copy.deepcopy(self)
        for _ in range(self._settings.rate_rounds):
            yield self._score + self._settings.covariate_coefficient * ahead._covariate()

    def _covariate(self) -> FloatArray:
        """Return X of all clients in the next round, (N,)."""
        rho = self._settings.autocorrelation
        self._round += 1
        if self._round > 1:
            drawn = self._states.standard_normal(len(self._ar))
            self._ar = rho * self._ar + np.sqrt(1.0 - rho**2) * drawn
        angle = 2.0 * np.pi * self._round / self._settings.day_length
        day: FloatArray = self._settings.day_amplitude * np.sin(angle + self._phase)
        return self._ar + self._mean + day

    def advance(self) -> RoundDraw:
        """Return the next round."""
        x = self._covariate()
        score = self._score + self._settings.covariate_coefficient * x
        prob = sigmoids(score, self._intercept)
        return RoundDraw(
            index=self._round,
            covariates=x[:, None],
            participation_prob=prob,
            replied=self._replies.random(len(prob)) < prob,
        )

    def state(self) -> dict[str, Any]:
        """Return what changes from round to round."""
        return {
            "round": self._round,
            "ar": self._ar.copy(),
            "covariate_rng": self._states.bit_generator.state,
            "reply_rng": self._replies.bit_generator.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._round, self._ar = int(state["round"]), np.array(state["ar"])
        self._states.bit_generator.state = state["covariate_rng"]
        self._replies.bit_generator.state = state["reply_rng"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovAvailability:
    r"""A two-state chain per client with stationary rate :math:`p_i` and memory :math:`\lambda`.

    .. math:: P(A_{ir} = 1 \mid A_{i,r-1}) = (1 - \lambda) p_i + \lambda A_{i,r-1}, \quad
       \text{logit}\, p_i = a + Z_i'\beta \qquad (D5)

    Correlation between rounds is :math:`\lambda^{|r-s|}`. The previous state is observed as the
    covariate ``was_available``.

    >>> from fedipw.lab.testbed import Testbed
    >>> drawn = Testbed(size=100).draw(np.random.default_rng(1))
    >>> chain = MarkovAvailability(memory=0.9)
    >>> process = chain.start(drawn.population, drawn.clients, np.random.default_rng(2))
    >>> first, second = process.advance(), process.advance()
    >>> bool((second.covariates[:, 0] == first.replied).all())
    True
    """

    coefficients: Mapping[str, float] = field(default_factory=lambda: {"z1": 0.4, "z2": 0.6})
    memory: float = 0.8
    rate: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.memory < 1.0:
            raise InputError(
                f"memory must lie in [0, 1), not {self.memory}: at 1 nobody ever changes state."
            )

    def start(
        self, population: Population, clients: ClientData | ArrayClients, rng: np.random.Generator
    ) -> MarkovProcess:
        """Return a process that starts in its stationary distribution."""
        del clients  # data play no part here
        score = score_of(population, self.coefficients)
        rates = sigmoids(score, solved_intercept(lambda: [score], self.rate))
        return MarkovProcess(rates, self.memory, rng)


@final
class MarkovProcess(CountedProcess):
    """A running :class:`MarkovAvailability`."""

    columns = ("was_available",)

    def __init__(self, rates: FloatArray, memory: float, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._rates, self._memory, self._draw = rates, memory, rng.random
        self._available: BoolArray = self._draw(len(rates)) < rates

    def advance(self) -> RoundDraw:
        """Return the next round."""
        before = self._available.astype(np.float64)
        prob = (1.0 - self._memory) * self._rates + self._memory * before
        self._available = self._draw(len(prob)) < prob
        self.round += 1
        return RoundDraw(
            index=self.round,
            covariates=before[:, None],
            participation_prob=prob,
            replied=self._available.copy(),
        )

    def state(self) -> dict[str, Any]:
        """Return what changes from round to round."""
        return {**super().state(), "available": self._available.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        super().restore(state)
        self._available = np.array(state["available"], bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAvailability:
    r"""Availability that depends on what a client holds: its label share or its number of rows.

    .. math:: \text{logit}\, \pi^{part}_i = a + Z_i'\beta + \beta_y\, \text{std}(\bar y_i)
       + \beta_n\, \text{std}(\log n_i) \qquad (D6)

    ``std`` is the standardised value over all clients. A server sees the number of rows (covariate
    ``log_rows``) unless ``observe_size`` is false, and never the labels: label-dependent
    availability breaks the ignorability that any weighting on Z and X needs.

    >>> from fedipw.lab.testbed import Testbed
    >>> drawn = Testbed(size=100, rows=5, rows_max=50).draw(np.random.default_rng(1))
    >>> bigger_first = DataAvailability(size=2.0)
    >>> process = bigger_first.start(drawn.population, drawn.clients, np.random.default_rng(2))
    >>> prob = process.advance().participation_prob
    >>> bool(np.corrcoef(prob, drawn.clients.counts)[0, 1] > 0.8)
    True
    """

    label: float = 0.0
    size: float = 0.0
    coefficients: Mapping[str, float] = field(default_factory=dict)
    rate: float = 0.25
    observe_size: bool = True

    def start(
        self, population: Population, clients: ClientData, rng: np.random.Generator
    ) -> DataProcess:
        """Return a process over these clients."""
        counts, shares = clients.counts, clients.label_share
        log_rows, label_share = _standardised(np.log(counts)), _standardised(shares)
        alike = "Availability by {0} needs clients of different {0}; all have {1}."
        if self.size and not log_rows.any():
            raise InputError(
                alike.format("size", f"{counts[0]} rows") + " Set rows_max above rows."
            )
        if self.label and not label_share.any():
            raise InputError(alike.format("label share", f"{shares[0]:.3g}"))
        score = score_of(population, self.coefficients) + self.size * log_rows
        score += self.label * label_share
        prob = sigmoids(score, solved_intercept(lambda: [score], self.rate))
        seen = self.observe_size and log_rows.any()
        return DataProcess(prob, {"log_rows": log_rows} if seen else {}, rng)


@final
class DataProcess(CountedProcess):
    """A running :class:`DataAvailability`: independent rounds with constant probabilities."""

    def __init__(
        self, prob: FloatArray, observed: Mapping[str, FloatArray], rng: np.random.Generator
    ) -> None:
        super().__init__(rng)
        self.columns = tuple(observed)
        self._covariates = np.column_stack([*observed.values(), np.empty((len(prob), 0))])
        self._prob, self._draw = prob, rng.random

    def advance(self) -> RoundDraw:
        """Return the next round."""
        self.round += 1
        return RoundDraw(
            index=self.round,
            covariates=self._covariates,
            participation_prob=self._prob,
            replied=self._draw(len(self._prob)) < self._prob,
        )


def _standardised(values: FloatArray) -> FloatArray:
    spread = values.std()
    centred: FloatArray = values - values.mean()
    return centred / spread if spread > 1e-12 else np.zeros_like(centred)
