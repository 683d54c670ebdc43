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
    units: FloatArray  # (C, K) what each cluster, or client, adds to the error (E36)


@dataclass(frozen=True, kw_only=True, eq=False)
class Clusters:
    r"""Enrolled clients that belong together: devices of a person, persons of a household.

    Clusters are independent of each other; within one, enrollment and replies may depend on each
    other in any way. Products of two members are seen as often as both are enrolled. Their joint
    probability lies between that of members who enroll together and that of members who enroll
    each by itself,

    .. math:: \frac{1}{\pi_{ij}} = \lambda\, \kappa_i \kappa_j
       + (1 - \lambda) \sqrt{\kappa_i \kappa_j}, \qquad 0 \le \lambda \le 1 \qquad (E35)

    with the :math:`\lambda` by which the enrolled pairs count the pairs of the population. Where
    those are not known it is 0, members enroll together: where they are alike this errs towards
    a larger variance.

    Examples
    --------
    >>> two = Clusters(code=np.array([0, 1, 0]), pairs=2.0)
    >>> two.sums(np.array([[1.0], [2.0], [3.0]]))[:, 0].tolist()
    [4.0, 2.0]
    >>> two.products(np.array([[1.0], [2.0], [3.0]]))[:, 0].tolist()
    [6.0, 0.0]
    >>> two.apart(np.full(3, 2.0))  # one pair of two, not the four that chance alone would take
    0.0
    """

    code: IntArray  # (n,) cluster of each enrolled client, 0 to C - 1
    count: int | None = None  # clusters of the population, where known
    pairs: float | None = None  # pairs of the population's clients in one cluster, where known

    def __post_init__(self) -> None:
        if len(self.code) and (
            self.code.min() < 0 or len(np.unique(self.code)) != self.code.max() + 1
        ):
            raise InputError("Clusters must be coded 0 to C - 1, each with a client.")

    @cached_property
    def size(self) -> int:
        """Number of clusters with an enrolled client, C."""
        return int(self.code.max(initial=-1)) + 1

    def sums(self, values: FloatArray) -> FloatArray:
        """Return the sums of values (n, K) by cluster, (C, K)."""
        return _sums(self.code, values, self.size)

    def shared(self, values: FloatArray) -> FloatArray:
        """Return the sum over its cluster for each client, (n,), at most 1: leverages."""
        out: FloatArray = np.minimum(self.sums(values)[self.code], 1.0)
        return out

    def products(self, values: FloatArray) -> FloatArray:
        """Return the sums over ordered pairs of different members of their products, (C, K)."""
        return _products(self.code, values, self.size)

    def apart(self, kappa: FloatArray) -> float:
        """Return lambda of (E35) for enrollment weights (n,)."""
        if self.pairs is None:
            return 0.0
        alone, both = (float(self.products(k[:, None]).sum()) for k in (kappa, np.sqrt(kappa)))
        return _share(2.0 * self.pairs, alone, both)


def _sums(code: IntArray, values: FloatArray, size: int) -> FloatArray:
    return np.column_stack([client_sums(code, column, size) for column in values.T])


def _products(code: IntArray, values: FloatArray, size: int) -> FloatArray:
    return _sums(code, values, size) ** 2 - _sums(code, values**2, size)


def _share(target: float, alone: float, both: float) -> float:
    """Return the share of ``alone``, the rest of ``both``, that makes the target; 0 to 1."""
    return 0.0 if alone <= both else min(max((target - both) / (alone - both), 0.0), 1.0)


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
    clusters: Clusters | None = None  # of the enrolled; each by itself if None

    def __post_init__(self) -> None:
        check_rows(len(self.client), round=self.round, prob=self.prob)
        check_probability(self.prob, "participation_prob")
        if not len(self.client):
            raise InputError("There is no reply to estimate anything from.")
        if self.client.min() < 0 or self.client.max() >= self.clients:
            raise InputError(f"Clients of replies must be coded 0 to {self.clients - 1}.")
        if self.clusters is not None:
            check_rows(self.clients, cluster=self.clusters.code)
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

    @property
    def units(self) -> int:
        """Number of clusters, or of clients where there are none, C."""
        return self.clients if self.clusters is None else self.clusters.size

    def by_unit(self, values: FloatArray) -> FloatArray:
        """Return the sums of values (n, K) by cluster, (C, K); themselves without clusters."""
        return values if self.clusters is None else self.clusters.sums(values)

    @cached_property
    def unit(self) -> IntArray:
        """Cluster of each reply, or its client where there are none, (m,)."""
        return self.client if self.clusters is None else self.clusters.code[self.client]

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

        With clusters both sums run over them, and clients are independent no more. A sum over i of
        products of two parts of a client gains those of two members of a cluster, weighted by
        (E35): with :math:`d_i = a_i - s_i`,

        .. math:: \phi_c = \sum_{i \in c} \phi_i + \sum_{i \ne j \in c} \left[\lambda a_i a_j
           + (1 - \lambda) \left(d_i d_j + \sqrt{f_i f_j}\, (a_i a_j - d_i d_j)\right)\right]
           \qquad (E36)

        and the second sum gains :math:`(\hat t_i \hat t_j - \hat v_{ij}) / \pi_{ij}`. Leverages
        are those of the cluster. Without clusters :math:`\phi_i` are what they were.

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
        leverage, own = self._shared(leverage), self._shared(phase.leverage[:, None])
        kappa = phase.weights[:, None]
        fitted, raised = self._fitted(values)
        influence = kappa * totals / remaining(leverage) - raised
        explained = phase.explained(totals) / remaining(own)
        terms = self._terms(influence, explained)
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
            self._superpopulation(kappa * totals - fitted, totals),
            self.by_unit(influence - explained),
        )

    def _terms(self, influence: FloatArray, explained: FloatArray) -> FloatArray:
        """Return the terms of the first sum of (E23), (n, K), or of (E36), (C, K)."""
        f, apart = self.enrollment.fraction[:, None], influence - explained
        terms: FloatArray = (1.0 - f) * apart**2 + f * influence**2
        if self.clusters is None:
            return terms
        products, root, alone = self.clusters.products, np.sqrt(f), self._apart
        both = products(apart) + products(root * influence) - products(root * apart)
        return self.by_unit(terms) + alone * products(influence) + (1.0 - alone) * both

    @cached_property
    def _apart(self) -> float:
        """Lambda of (E35)."""
        assert self.clusters is not None
        return self.clusters.apart(self.enrollment.weights / self.enrollment.own)

    def _shared(self, leverage: FloatArray) -> FloatArray:
        return leverage if self.clusters is None else self.clusters.shared(leverage)

    def _superpopulation(self, influence: FloatArray, totals: FloatArray) -> FloatArray | None:
        """Return (E24), (K,), between clusters where there are some."""
        phase = self.enrollment
        if self.clusters is None or phase.population_size is None:
            return phase.superpopulation(influence, totals)
        squares = self._terms(influence, phase.explained(totals)).sum(axis=0)
        count = self.units if self.clusters.count is None else self.clusters.count
        out: FloatArray = squares - influence.sum(axis=0) ** 2 / count
        return out

    @property
    def together(self) -> int:
        """How many sums are best worked on together: each has a number for every reply."""
        return max(1, _AT_ONCE // max(len(self.client), self.clients))

    def _finite(self, values: FloatArray, leverage: FloatArray | float = 0.0) -> FloatArray:
        """Return the second sum of (E23), (K,): what the population's being finite takes off."""
        phase, totals = self.enrollment, self.totals(values)
        kept = (phase.fraction * phase.weights**2)[:, None]
        own = kept * (totals**2 - self.chance(values)) / remaining(leverage) ** 2
        out: FloatArray = own.sum(axis=0)
        if self.clusters is not None:
            raised = np.broadcast_to(1.0 / remaining(leverage), totals.shape)
            alone = self._apart
            single = kept / np.reshape(phase.own, (-1, 1))  # rows may stand for several clients
            out = out + alone * self._shared_means(values, single * raised)
            out = out + (1.0 - alone) * self._shared_means(values, np.sqrt(kept) * raised)
        return out

    def _shared_means(self, values: FloatArray, scale: FloatArray) -> FloatArray:
        r"""Return the sums over pairs of a cluster of scaled t t' less what chance adds, (K,).

        What chance in participation adds is estimated from replies of two members in one round,
        whose joint probability is a mixture as in (E35), its share by counting such pairs. Replies
        of two members in different rounds count as unrelated.
        """
        assert self.clusters is not None
        found = self.clusters.products(scale * self.totals(values)).sum(axis=0)
        place, size, related = self._meetings
        each = scale[self.client] * values / (self.rounds * self.prob)[:, None]
        both = _products(place, each, size) - _products(
            place, np.sqrt(self.prob)[:, None] * each, size
        )
        out: FloatArray = found - related * both.sum(axis=0)
        return out

    @cached_property
    def _meetings(self) -> tuple[IntArray, int, float]:
        """Cluster and round of each reply as one number, (m,), how many, and how tied replies are.

        The last is 1 if members reply together and 0 if each replies by itself.
        """
        assert self.clusters is not None
        place = np.unique(self.unit * self.rounds + self.round, return_inverse=True)[1]
        size = int(place.max()) + 1
        members = np.bincount(self.clusters.code)
        pairs = float((members * (members - 1.0)).sum()) * self.rounds
        alone, both = (
            float(_products(place, w[:, None], size).sum())
            for w in (1.0 / self.prob, 1.0 / np.sqrt(self.prob))
        )
        return place.astype(np.int64), size, 1.0 - _share(pairs, alone, both)

    def finite(self, values: FloatArray) -> FloatArray:
        r"""Return what the population's being finite takes off a jackknife over clients, (K,).

        It is :math:`\frac{M}{M - 1} (Q - \hat V)`, with :math:`\hat V` of (E23) and Q the sum of
        squares that leaving out groups of the M units measures, both without leverages. The units
        are all N clients where enrollment was fitted on them, and then Q is (E24); the enrolled
        elsewhere. Enrolled clients of one cluster are one unit.
        """
        phase, totals = self.enrollment, self.totals(values)
        influence = self._influence(values, totals)
        terms = self._terms(influence, phase.explained(totals))
        units = phase.units - self.clients + self.units
        measured = phase.resampled(influence, totals, self.by_unit)
        apart = measured - terms.sum(axis=0) + self._finite(values)
        out: FloatArray = apart * (units / max(units - 1, 1))
        return out

    def _influence(self, values: FloatArray, totals: FloatArray) -> FloatArray:
        """Return a of (E23) without leverages, (n, K)."""
        return self.enrollment.weights[:, None] * totals - self._fitted(values)[0]

    def influence(self, values: FloatArray) -> FloatArray:
        """Return a - s of (E23) without leverages, by cluster where there are some, (C, K)."""
        totals = self.totals(values)
        return self.by_unit(self._influence(values, totals) - self.enrollment.explained(totals))

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
            raised += part / remaining(self._shared(step.leverage[:, None]))
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


def remaining(leverage: FloatArray | float) -> FloatArray:
    """Return one minus leverage, kept away from 0: a client that alone decides a fit."""
    out: FloatArray = np.maximum(1.0 - leverage, 0.1)
    return out
