"""Replies as a two-phase sample of the population: totals by client and the error of any total."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fedipw.errors import InputError
from fedipw.evaluation.phases import EnrollmentPhase, KnownEnrollment, StepPhase, client_sums
from fedipw.numerics import FloatArray, IntArray
from fedipw.numerics.checks import check_probability, check_rows

_LAGS = 48  # rounds apart beyond which replies count as unrelated
_RELATED = 0.02  # of a correlation, below which later lags are not looked at
_AT_ONCE = 2**24  # cells of the arrays made for several totals together
_ROUNDING = 1e-12  # of the first sum of (E23), below which what is left of it is 0


class Variance(NamedTuple):
    """Variances of weighted sums, and how well they are known."""

    variance: FloatArray  # (K,)
    freedom: FloatArray  # (K,) degrees of freedom (E29)
    superpopulation: FloatArray | None  # (K,) (E24), where the population is known


@dataclass(frozen=True, kw_only=True, eq=False)
class TwoPhase:
    """The replies of some rounds, and both phases that led to them.

    Enrollment is drawn once, participation in every round, perhaps related from round to round.
    """

    client: IntArray  # (m,) code of each reply's client, 0 to n - 1
    round: IntArray  # (m,) 0 to R - 1
    prob: FloatArray  # (m,) of participation
    rounds: int  # R
    enrollment: EnrollmentPhase
    steps: tuple[StepPhase, ...] = ()  # fitted; none if participation is known
    times: IntArray | None = None  # (R,) when rounds were, rising; one after the other if None

    def __post_init__(self) -> None:
        check_rows(len(self.client), round=self.round, prob=self.prob)
        check_probability(self.prob, "participation_prob")
        if not len(self.client):
            raise InputError("There is no reply to estimate anything from.")
        if self.client.min() < 0 or self.client.max() >= self.clients:
            raise InputError(f"Clients of replies must be coded 0 to {self.clients - 1}.")
        if self.round.min() < 0 or self.round.max() >= self.rounds:
            raise InputError(f"Rounds of replies must be coded 0 to {self.rounds - 1}.")
        if self.times is not None:
            check_rows(self.rounds, times=self.times)
            if (np.diff(self.times) <= 0).any():
                raise InputError("Rounds must be in the order of their times.")
        if len(np.unique(self._keys)) != len(self._keys):
            raise InputError("A client has two replies in one round.")

    @property
    def clients(self) -> int:
        """Number of enrolled clients, n."""
        return len(self.enrollment.weights)

    @cached_property
    def weights(self) -> FloatArray:
        """Weights of the replies, kappa / (R p), (m,): they sum to about N."""
        return self.enrollment.weights[self.client] / (self.rounds * self.prob)

    def totals(self, values: FloatArray) -> FloatArray:
        r"""Return what each client's replies say of its own mean over rounds, (n, K).

        .. math:: \hat t_i = \frac{1}{R} \sum_r \frac{A_{ir}}{\hat p_{ir}} u_{ir} \qquad (E19)
        """
        each = self.rounds * self.prob
        columns = [client_sums(self.client, column / each, self.clients) for column in values.T]
        return np.column_stack(columns)

    def variance(self, values: FloatArray, leverage: FloatArray | None = None) -> Variance:
        r"""Design-based variance of the weighted sums of values (m, K), (K,).

        The sum over replies of weights times u is that of :math:`\kappa_i \hat t_i` over the
        enrolled. With :math:`a_i = \kappa_i \hat t_i - c_i'g` (E22) and s what the enrollment
        weights explain (E20, E21),

        .. math:: \hat V = \sum_{i \in E} \left[(1 - f_i)(a_i - s_i)^2 + f_i a_i^2\right]
           - \sum_{i \in E} \tilde\kappa_i (\hat t_i^2 - \hat v_i), \qquad
           f_i = 1/\kappa_i \qquad (E23)

        The first sum holds both phases, clustered by client: a client's rounds may depend on each
        other in any way. The second takes off the squares of the clients' own means
        :math:`t_i`, since enrollment draws from a finite population: :math:`\hat v_i` (E25) is the
        part of :math:`\hat t_i^2` that chance in participation adds. :math:`\tilde\kappa_i`
        is :math:`f_i \kappa_i^2`, 0 where the population's size is not known.

        In the first sum each part is divided by one minus the client's own leverage on it, as a
        jackknife would: on the mean that u is taken from (``leverage``, (n, K)), on either fit.
        The second sum is divided by the square of the first of these, so that a census has no
        error. With :math:`\phi_i` the terms of the first sum, the degrees of freedom are
        Satterthwaite's,

        .. math:: \nu = \frac{(\sum \phi_i)^2}{\sum \phi_i^2} \qquad (E29)

        few where few clients make most of the variance, as heavy weights do.

        The superpopulation (M-estimation) form stands beside it,

        .. math:: \hat V = \sum_{i=1}^N (\psi_i - \bar\psi)^2, \qquad
           \psi_i = E_i (\kappa_i \hat t_i - c_i'g) - (E_i - \hat\pi_i)\, z_i'a \qquad (E24)

        in which the N clients are themselves draws, and the error is about the mean they were drawn
        from: larger where much of the population is seen. It is none where the population is known
        by its means alone.
        """
        if leverage is None:
            leverage = np.zeros((self.clients, values.shape[1]))
        phase, totals = self.enrollment, self.totals(values)
        kappa, f = phase.weights[:, None], phase.fraction[:, None]
        fitted, raised = self._fitted(values)
        influence = kappa * totals / _remaining(leverage) - raised
        explained = phase.explained(totals) / _remaining(phase.leverage)[:, None]
        terms = (1.0 - f) * (influence - explained) ** 2 + f * influence**2
        squares, largest = terms.sum(axis=0), terms.max(axis=0, initial=0.0)
        share = terms / np.where(largest > 0.0, largest, 1.0)  # their fourth powers may overflow
        fourths = (share**2).sum(axis=0)
        freedom = np.where(
            fourths > 0.0, share.sum(axis=0) ** 2 / np.where(fourths > 0.0, fourths, 1.0), 1.0
        )
        left = squares - self._finite(values, leverage)
        left = np.where(np.abs(left) <= _ROUNDING * squares, 0.0, left)
        return Variance(
            left + phase.target_variance(totals),
            freedom,
            phase.superpopulation(kappa * totals - fitted, totals),
        )

    @property
    def together(self) -> int:
        """How many sums are best worked on together: each has a number for every reply."""
        return max(1, _AT_ONCE // max(len(self.client), self.clients))

    def _finite(self, values: FloatArray, leverage: FloatArray | float = 0.0) -> FloatArray:
        """Return the second sum of (E23), (K,): what the population's being finite takes off."""
        phase, totals = self.enrollment, self.totals(values)
        kept = (phase.fraction * phase.weights**2)[:, None]
        own = kept * (totals**2 - self.chance(values)) / _remaining(leverage) ** 2
        out: FloatArray = own.sum(axis=0)
        return out

    def finite(self, values: FloatArray) -> FloatArray:
        r"""Return what the population's being finite takes off a jackknife over clients, (K,).

        It is :math:`\frac{M}{M - 1} (Q - \hat V)`, with :math:`\hat V` of (E23) and Q the sum of
        squares that leaving out groups of the M units measures, both without leverages. The units
        are all N clients where enrollment was fitted on them, and then Q is (E24); the enrolled
        elsewhere.
        """
        phase, totals = self.enrollment, self.totals(values)
        f, influence = phase.fraction[:, None], self._influence(values, totals)
        terms = (1.0 - f) * (influence - phase.explained(totals)) ** 2 + f * influence**2
        apart = phase.resampled(influence, totals) - terms.sum(axis=0) + self._finite(values)
        out: FloatArray = apart * (phase.units / max(phase.units - 1, 1))
        return out

    def _influence(self, values: FloatArray, totals: FloatArray) -> FloatArray:
        """Return a of (E23) without leverages, (n, K)."""
        return self.enrollment.weights[:, None] * totals - self._fitted(values)[0]

    def influence(self, values: FloatArray) -> FloatArray:
        """Return a - s of (E23) without leverages, (n, K)."""
        totals = self.totals(values)
        return self._influence(values, totals) - self.enrollment.explained(totals)

    def deleted(
        self, groups: IntArray, count: int, rng: np.random.Generator
    ) -> Iterator[tuple[TwoPhase, float]]:
        """Yield the sample without each group of clients in turn, both stages fitted anew.

        With it comes the share of the population it stands for. ``groups`` (n,) holds 0 to
        count - 1. What is yielded serves for estimates, not for errors.
        """
        parts = zip(*(step.deleted(groups, count) for step in self.steps), strict=True)
        given = np.prod([s.reply_prob for s in self.steps], axis=0)  # the rest is known by design
        for g, (weights, share) in enumerate(self.enrollment.deleted(groups, count, rng)):
            prob = self.prob if not self.steps else self.prob / given * np.prod(next(parts), axis=0)
            kept = groups[self.client] != g
            phase = KnownEnrollment(weights=weights, signed=True)
            yield TwoPhase(
                client=self.client[kept], round=self.round[kept], prob=np.minimum(prob[kept], 1.0),
                rounds=self.rounds, enrollment=phase,
            ), share  # fmt: skip

    def _fitted(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return c'g of all steps, (n, K), as it is and over one minus leverage."""
        plain = np.zeros((self.clients, values.shape[1]))
        raised = np.zeros_like(plain)
        for step in self.steps:
            part = step.fitted_part(self.weights, values)
            plain += part
            raised += part / _remaining(step.leverage)[:, None]
        return plain, raised

    @cached_property
    def _keys(self) -> IntArray:
        """One number for each client and round; a later round of the same client is next."""
        times = self._times
        return self.client * (int(times[-1]) + _LAGS + 1) + times[self.round]

    @cached_property
    def _times(self) -> IntArray:
        """When each round was, from 0 on, (R,)."""
        return np.arange(self.rounds) if self.times is None else self.times - self.times[0]

    @cached_property
    def _order(self) -> IntArray:
        return np.argsort(self._keys, kind="stable")

    def _pairs(self, lag: int) -> tuple[IntArray, IntArray]:
        """Return replies of the same client that are this many rounds apart, (k,) each."""
        keys = self._keys[self._order]
        place = np.searchsorted(keys, keys + lag)
        place[place == len(keys)] = 0
        found = keys[place] == keys + lag
        return self._order[found], self._order[place[found]]

    @cached_property
    def correlations(self) -> tuple[float, ...]:
        r"""Correlation of participation of a client at 1, 2, ... rounds apart, given its model.

        Two replies have the joint probability :math:`p_r p_s (1 + \rho_l \sigma_r \sigma_s)` with
        :math:`\sigma = \sqrt{(1 - p)/p}`; :math:`\rho_l` is such that pairs l rounds apart,
        weighted by its inverse, count all pairs of enrolled clients and rounds. Lags end where the
        correlation falls below 0.02.
        """
        found: list[float] = []
        for lag in range(1, min(int(self._times[-1]), _LAGS) + 1):
            pairs = int(np.isin(self._times + lag, self._times).sum())
            rho = self._correlation(lag, self.clients * pairs) if pairs else 0.0
            if pairs and rho < _RELATED:
                break
            found.append(rho)
        return tuple(found)

    def _correlation(self, lag: int, expected: float) -> float:
        first, then = self._pairs(lag)
        weight = 1.0 / (self.prob[first] * self.prob[then])
        odds = self._odds[first] * self._odds[then]
        low, high = 0.0, 1.0
        if weight.sum() <= expected:
            return 0.0
        for _ in range(40):
            middle = 0.5 * (low + high)
            more = (weight / (1.0 + middle * odds)).sum() > expected
            low, high = (middle, high) if more else (low, middle)
        return 0.5 * (low + high)

    @cached_property
    def _related(self) -> tuple[tuple[IntArray, IntArray, FloatArray], ...]:
        """Return pairs of related replies, and the share of (E25) in their products."""
        found = []
        for lag, rho in enumerate(self.correlations, start=1):
            if rho > 0.0:
                first, then = self._pairs(lag)
                tied = rho * self._odds[first] * self._odds[then]
                found.append((first, then, tied / (1.0 + tied)))
        return tuple(found)

    @cached_property
    def _odds(self) -> FloatArray:
        return np.sqrt((1.0 - self.prob) / self.prob)

    def chance(self, values: FloatArray) -> FloatArray:
        r"""Return the part of each client's squared total that is chance in participation, (n, K).

        .. math:: \hat v_i = \frac{1}{R^2} \Big[\sum_r A_{ir} \frac{1 - \hat p_{ir}}{\hat p_{ir}^2}
           u_{ir}^2 + \sum_{r \ne s} A_{ir} A_{is} \frac{u_{ir} u_{is}}{\hat p_{ir} \hat p_{is}}
           \frac{\rho \sigma_{ir} \sigma_{is}}{1 + \rho \sigma_{ir} \sigma_{is}}\Big]
           \qquad (E25)

        unbiased for the variance of :math:`\hat t_i` given enrollment if the joint probabilities of
        :attr:`correlations` are right, from replies alone.
        """
        each = self.rounds * self.prob
        out = np.zeros((self.clients, values.shape[1]))
        for k, column in enumerate(values.T):
            spread = column / each
            out[:, k] = client_sums(self.client, (1.0 - self.prob) * spread**2, self.clients)
            for first, then, share in self._related:
                both = 2.0 * share * spread[first] * spread[then]
                out[:, k] += client_sums(self.client[first], both, self.clients)
        return out


def _remaining(leverage: FloatArray | float) -> FloatArray:
    """Return one minus leverage, kept away from 0: a client that alone decides a fit."""
    out: FloatArray = np.maximum(1.0 - leverage, 0.1)
    return out
