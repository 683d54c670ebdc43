"""Means over the target population from replies: estimators, subgroups, standard errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, final

import numpy as np
from scipy.special import stdtrit

from fedipw.errors import FedIPWError, InputError
from fedipw.evaluation.intervals import Evidence, Interval, StudentT, cautions
from fedipw.evaluation.phases import client_sums, inverse_of
from fedipw.evaluation.sample import TwoPhase, Variance
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.numerics.checks import check_positive, check_rows
from fedipw.weighting.functions import effective_sample_size

GROUPS = 50  # of clients, in a jackknife
EVERYONE: Final = "everyone"
PLAIN: Final = "plain"
MEAN: Final = "mean"
CLIENTS_PER_TERM = 5  # that replied, behind each column of a regression
SMALLEST_GROUP = 2  # clients that replied, below which there is no standard error
_ROUNDING = 1e-13  # of the largest value: standard errors below it are 0
_T: Final = StudentT()


class Linear(NamedTuple):
    """An estimate, and values u of the replies whose weighted sum has its error."""

    estimate: float
    values: FloatArray  # (m,)
    leverage: FloatArray  # (n,) how much each client moves the mean its u are taken from
    unit: float = 1.0  # of the estimate, in units of the values: rounding is relative to it
    shares: FloatArray | None = None  # (n,) of the sum that the mean divides by; none by a constant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Some clients of the population, told apart by something known of the enrolled.

    With ``rounds`` the mean is over these rounds instead of all.
    """

    name: str = EVERYONE
    inside: BoolArray | None = None  # (n,) of the enrolled; all if None
    size: float | None = None  # in the population, where known
    rounds: IntArray | None = None  # codes of rounds; all if None

    def flags(self, sample: TwoPhase) -> FloatArray:
        """Return 1 for replies of the group, 0 for others, (m,)."""
        out = self.during(sample)
        if self.inside is not None:
            check_rows(sample.clients, inside=self.inside)
            out *= self.inside[sample.client]
        return out

    def during(self, sample: TwoPhase) -> FloatArray:
        """Return 1 for replies in the rounds of the group, whoever's they are, (m,)."""
        if self.rounds is None:
            return np.ones(len(sample.client))
        return np.isin(sample.round, self.rounds).astype(np.float64)

    def size_in(self, sample: TwoPhase) -> float | None:
        """Return how many clients of the population it counts for, over the sample's rounds."""
        if self.size is None or self.rounds is None:
            return self.size
        return self.size * len(self.rounds) / sample.rounds

    def scaled(self, share: float) -> Group:
        """Return it as a group of a share of the population."""
        return replace(self, size=None if self.size is None else self.size * share)


class MeanEstimator(ABC):
    """A mean, or another statistic, over a group of the population."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the estimator, in tables."""

    @property
    def statistic(self) -> str:
        """What it estimates, in tables."""
        return MEAN

    @abstractmethod
    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the estimate and its linearised values u; raise InputError if there is none."""

    def part(self, chosen: BoolArray) -> MeanEstimator:
        """Return the same for some of the replies, (m,)."""
        del chosen
        return self


@final
@dataclass(frozen=True, slots=True)
class HorvitzThompsonMean(MeanEstimator):
    r"""Weighted sum over the known size of the group.

    .. math:: \hat\mu = \frac{1}{N_D} \sum_{i, r} w_{ir} D_i y_{ir}, \qquad
       w_{ir} = \frac{\kappa_i A_{ir}}{R\, \hat p_{ir}}, \qquad u_{ir} = \frac{D_i y_{ir}}{N_D}
       \qquad (E26)

    ``left_out`` is how many replies have no value here. There is no estimate then: a sum without
    them is too small, where a mean can do without.
    """

    left_out: int = 0
    name = "horvitz-thompson"

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the estimate and u."""
        if self.left_out:
            raise InputError(f"{self.left_out} replies are left out, so the sum is too small")
        size = group.size_in(sample)
        if size is None:
            raise InputError("the size of the group in the population is not known")
        u = group.flags(sample) * values / check_positive(size, "size")
        return Linear(float(sample.weights @ u), u, np.zeros(sample.clients))


@final
@dataclass(frozen=True, slots=True, eq=False)
class HajekMean(MeanEstimator):
    r"""Weighted sum over the sum of weights.

    .. math:: \hat\mu = \frac{\sum w_{ir} D_i y_{ir}}{\sum w_{ir} D_i}, \qquad
       u_{ir} = \frac{D_i (y_{ir} - \hat\mu)}{\sum w_{ir} D_i} \qquad (E27)

    With ``counts``, the samples behind each value, :math:`D_i` is multiplied by them and the mean
    is over samples instead of clients. Only this form of it exists: the number of samples of
    clients that never enrolled is not known.
    """

    counts: FloatArray | None = None  # (m,)
    name = "hajek"

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the estimate and u."""
        flags = group.flags(sample)
        if self.counts is not None:
            check_rows(len(flags), counts=self.counts)
            flags = flags * self.counts
        weights = sample.weights * flags
        total = float(weights.sum())
        if not total > 0.0:
            raise InputError("no reply of the group carries weight")
        estimate = float(weights @ values) / total
        shares = client_sums(sample.client, weights / total, sample.clients)
        return Linear(estimate, flags * (values - estimate) / total, shares, shares=shares)

    def part(self, chosen: BoolArray) -> HajekMean:
        """Return the mean with the counts of some replies."""
        return self if self.counts is None else HajekMean(self.counts[chosen])


@final
@dataclass(frozen=True, slots=True, eq=False)
class GregMean(MeanEstimator):
    r"""Hájek's mean after regression on columns whose population means are known.

    With :math:`B_{ir} = (1, b_i - \mu_b)` the weights become

    .. math:: \omega_{ir} = w_{ir}\, e_1' \Big(\sum w B B'\Big)^{-1} B_{ir}, \qquad
       \hat\mu = \frac{\sum \omega_{ir} D_i y_{ir}}{\sum \omega_{ir} D_i}, \qquad
       u_{ir} = \frac{\omega_{ir}}{w_{ir}}
       \frac{D_i (y_{ir} - \hat\mu) - B_{ir}'\hat\gamma}{\sum \omega_{ir} D_i} \qquad (E28)

    and reproduce the population means of b; :math:`\hat\gamma` is the weighted regression of
    :math:`D (y - \hat\mu)` on B. Consistent if the weights are right or the metric is linear in
    b. Weights may be negative. All sums are over the rounds of the group.
    """

    balance: FloatArray  # (n, q) of the enrolled
    mean: FloatArray  # (q,) of the population
    name = "greg"

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the estimate and u."""
        during = group.during(sample)
        B, w, flags = self._columns(sample), sample.weights * during, group.flags(sample)
        seen = len(np.unique(sample.client[during > 0.0]))
        needed = CLIENTS_PER_TERM * B.shape[1]
        if seen < needed:
            raise InputError(f"{seen} clients replied, a regression on {B.shape[1]} columns needs "
                             f"{needed}")  # fmt: skip
        own = client_sums(sample.client, w, sample.clients)  # b is the client's: sums over rounds
        inverse = inverse_of((own[:, None] * B).T @ B)
        factor = (B @ inverse[:, -1])[sample.client]
        omega = w * factor
        share = float(omega @ flags)
        if not share > 0.0:
            raise InputError("the regression leaves the group no weight")
        estimate = float(omega @ (flags * values)) / share
        apart = flags * (values - estimate)
        gamma = inverse @ (B.T @ client_sums(sample.client, w * apart, sample.clients))
        leverage = own * np.einsum("ij,ij->i", B @ inverse, B)
        u = during * factor * (apart - (B @ gamma)[sample.client]) / share
        shares = client_sums(sample.client, omega * flags / share, sample.clients)
        return Linear(estimate, u, np.minimum(leverage, 1.0), shares=shares)

    def _columns(self, sample: TwoPhase) -> FloatArray:
        check_rows(sample.clients, balance=self.balance)
        apart = self.balance - self.mean
        scale = apart.std(axis=0)
        b = apart / np.where(scale > 0.0, scale, 1.0)
        return np.column_stack([b, np.ones(len(b))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean, or another statistic, over a group of the population, and how far to trust it."""

    group: str
    statistic: str = MEAN  # what of the metric: mean, total, ratio, quantile, difference
    estimator: str
    estimate: float
    confidence: float
    effective_sample_size: float  # of the clients' weights, (W10)
    clients: int  # of the group that replied
    replies: int
    se: float = np.nan  # design-based (E23)
    se_superpopulation: float | None = None  # (E24)
    freedom: float = np.nan  # degrees of freedom of the interval (E29)
    low: float = np.nan
    high: float = np.nan
    reason: str = ""  # why numbers are missing
    interval: str = "t"  # which kind: t, jeffreys, bootstrap, logit, beta
    warnings: tuple[str, ...] = ()  # why the interval cannot promise its confidence
    clusters: int | None = None  # of the group that replied, where clients are clustered

    @property
    def units(self) -> int:
        """Number of independent units that replied: clusters, or clients where there are none."""
        return self.clients if self.clusters is None else self.clusters

    @property
    def warning(self) -> str:
        """What the interval cannot promise, and why; empty if no rule says so."""
        if not self.warnings:
            return ""
        return f"cannot promise {self.confidence:.4g}: " + "; ".join(self.warnings)

    def alone(self) -> str:
        """Return why a line of a single unit has no standard error."""
        who = "client" if self.clusters is None else "cluster"
        return f"{self.units} {who} replied: no standard error"

    def with_interval(self, known: Evidence, interval: Interval, reason: str = "") -> Estimate:
        """Return it with a standard error, its interval, and what that cannot promise."""
        line = replace(self, se=known.se, freedom=known.freedom, reason=reason)
        if not np.isfinite(known.se):
            return line
        try:
            low, high, kind = interval.ends(known)
        except InputError as error:
            return replace(line, reason=f"no interval: {error}")
        return replace(line, low=low, high=high, interval=kind, warnings=tuple(cautions(known)))

    def with_error(self, se: float, freedom: float, reason: str = "") -> Estimate:
        """Return it with a standard error and the interval of Student's t."""
        reach = float(stdtrit(max(freedom, 1.0), 0.5 + 0.5 * self.confidence)) * se
        low, high = self.estimate - reach, self.estimate + reach
        return replace(self, se=se, freedom=freedom, low=low, high=high, reason=reason)


def population_means(
    sample: TwoPhase,
    values: FloatArray,
    estimators: Sequence[MeanEstimator],
    groups: Sequence[Group] = (Group(),),
    *,
    confidence: float = 0.95,
    interval: Interval = _T,
) -> tuple[Estimate, ...]:
    r"""Estimate the mean of a metric over the population and its groups.

    The mean is over clients and rounds, each client counting alike; y is what a client would have
    reported in a round, whether it replied or not. The standard error is the root of the
    design-based variance (E23) of u; by default the interval is
    :math:`\hat\mu \pm t\, \hat V^{1/2}` with Student's t of the degrees of freedom (E29).

    Parameters
    ----------
    sample
        The replies and both phases.
    values
        y of the replies, (m,).
    estimators
        Which means: :class:`HorvitzThompsonMean`, :class:`HajekMean`, :class:`GregMean`.
    groups
        Subgroups of the population; everyone by default.
    confidence, interval
        Of the intervals, and their kind (:data:`~fedipw.evaluation.intervals.INTERVALS`).

    Examples
    --------
    >>> from fedipw.evaluation.phases import KnownEnrollment
    >>> from fedipw.evaluation.sample import TwoPhase
    >>> phase = KnownEnrollment(weights=np.full(4, 2.0), population_size=8)
    >>> sample = TwoPhase(client=np.array([0, 1, 3]), round=np.zeros(3, dtype=int),
    ...                   prob=np.array([0.5, 1.0, 0.5]), rounds=1, enrollment=phase)
    >>> found, = population_means(sample, np.array([1.0, 2.0, 4.0]), [HajekMean()])
    >>> found.estimate, found.clients
    (2.4, 3)
    """
    if not 0.0 < confidence < 1.0:
        raise InputError(f"A confidence lies between 0 and 1, not {confidence}.")
    check_rows(len(sample.client), values=values)
    if not np.isfinite(values).all():
        raise InputError(f"{int((~np.isfinite(values)).sum())} values are missing or infinite.")
    how = _How(confidence, interval, interval.is_share(values))
    pairs = [(group, estimator) for group in groups for estimator in estimators]
    lines: list[Estimate] = []
    for first in range(0, len(pairs), sample.together):
        lines += _lines(sample, values, pairs[first : first + sample.together], how)
    return tuple(lines)


class _How(NamedTuple):
    """How intervals are made."""

    confidence: float
    interval: Interval
    share: bool  # whether the mean lies in [0, 1]

    def of(self, estimator: MeanEstimator) -> _How:
        """Return the same for an estimator: totals, ratios and differences are no shares."""
        return self._replace(share=self.share and estimator.statistic == MEAN)


def _events(sample: TwoPhase, values: FloatArray, inside: BoolArray) -> int:
    """Return how many units of some replies (m,) have an event, or none if that is fewer."""
    some, others = (inside & flags for flags in (values > 0.0, values < 1.0))
    return min(len(np.unique(sample.unit[some])), len(np.unique(sample.unit[others])))


def _evidence(
    line: Estimate, sample: TwoPhase, units: FloatArray, shares: FloatArray | None,
    events: int | None,
) -> Evidence:  # fmt: skip
    """Return what a line's interval is made of, its standard error yet to come."""
    return Evidence(
        estimate=line.estimate,
        se=np.nan,
        freedom=np.nan,
        confidence=line.confidence,
        replied=line.units,
        effective=line.effective_sample_size,
        units=units,
        shares=shares,
        events=events,
        clustered=sample.clusters is not None,
    )


def _lines(
    sample: TwoPhase,
    values: FloatArray,
    pairs: Sequence[tuple[Group, MeanEstimator]],
    how: _How,
) -> list[Estimate]:
    """Return some of the estimates; what they need for each reply is gone with them."""
    lines, columns, leverages, scales, more = [], [], [], [], []
    for group, estimator in pairs:
        line = _line(sample, group, estimator.name, sample.weights, how.confidence)
        line = replace(line, statistic=estimator.statistic)
        if not line.replies:
            lines.append(replace(line, reason="nobody of the group replied"))
            continue
        try:
            linear = estimator.linear(sample, values, group)
        except InputError as error:
            lines.append(replace(line, reason=str(error)))
            continue
        lines.append(replace(line, estimate=linear.estimate))
        columns.append(linear.values)
        leverages.append(linear.leverage)
        scales.append(linear.unit)
        more.append((linear.shares, _event_count(sample, values, group, how.of(estimator))))
    if not columns:
        return lines
    u, leverage = np.column_stack(columns), np.column_stack(leverages)
    del columns, linear  # each has a number for every reply, as u has
    found = sample.variance(u, leverage)
    tiny = (_ROUNDING * float(np.abs(values).max()) * np.array(scales)) ** 2
    column = iter(range(u.shape[1]))
    out = []
    for line in lines:
        if line.reason:
            out.append(line)
            continue
        k = next(column)
        shares, events = more[k]
        within = None if shares is None else sample.by_unit(shares[:, None])[:, 0]
        known = _evidence(line, sample, found.units[:, k], within, events)
        out.append(_with_variance(line, found, k, tiny=tiny[k], known=known, interval=how.interval))
    return out


def _event_count(sample: TwoPhase, values: FloatArray, group: Group, how: _How) -> int | None:
    return _events(sample, values, group.flags(sample) > 0.0) if how.share else None


def _line(
    sample: TwoPhase, group: Group, estimator: str, weights: FloatArray, confidence: float
) -> Estimate:
    """Return a line without numbers yet; replies count by weights, (m,)."""
    inside = group.flags(sample) > 0.0
    units = client_sums(sample.unit[inside], weights[inside], sample.units)
    return Estimate(
        group=group.name,
        estimator=estimator,
        estimate=np.nan,
        confidence=confidence,
        effective_sample_size=effective_sample_size(units) if units.any() else 0.0,
        clients=len(np.unique(sample.client[inside])),
        replies=int(inside.sum()),
        clusters=None if sample.clusters is None else len(np.unique(sample.unit[inside])),
    )


def _with_variance(
    line: Estimate, found: Variance, k: int, *, tiny: float, known: Evidence, interval: Interval
) -> Estimate:
    """Return a line with the k-th of some variances; those below ``tiny`` are 0."""
    if line.units < SMALLEST_GROUP:
        return replace(line, reason=line.alone())
    variance, freedom, reason = float(found.variance[k]), float(found.freedom[k]), ""
    wide = None if found.superpopulation is None else max(float(found.superpopulation[k]), 0.0)
    if abs(variance) <= tiny:
        variance = 0.0
    if variance < 0.0:
        reason = "the design-based variance came out negative: "
        reason += "there is no other" if wide is None else "this is the superpopulation's"
        variance = np.nan if wide is None else wide
    line = replace(line, se_superpopulation=None if wide is None else float(np.sqrt(wide)))
    known = replace(known, se=float(np.sqrt(variance)), freedom=freedom)
    return line.with_interval(known, interval, reason)


def plain_means(
    sample: TwoPhase,
    values: FloatArray,
    groups: Sequence[Group],
    confidence: float = 0.95,
    counts: FloatArray | None = None,
    *,
    interval: Interval = _T,
) -> tuple[Estimate, ...]:
    r"""Return the mean of the replies as they came, with an error clustered by client.

    .. math:: \bar y = \frac{1}{m} \sum y_{ir}, \qquad \text{se}^2 = \frac{n}{n - 1}
       \frac{1}{m^2} \sum_i \Big(\sum_r (y_{ir} - \bar y)\Big)^2 \qquad (E31)

    It is about respondents, not about the population: the interval says how well *their* mean
    is known. With ``counts`` (m,) each reply counts as often, and m is their sum. With clusters
    the sums run over them. The rest is as in :func:`population_means`.
    """
    often = np.ones(len(values)) if counts is None else counts
    how = _How(confidence, interval, interval.is_share(values))
    return tuple(_plain(sample, values, often, group, how) for group in groups)


def _plain(
    sample: TwoPhase, values: FloatArray, often: FloatArray, group: Group, how: _How
) -> Estimate:
    line = _line(sample, group, PLAIN, often, how.confidence)
    if not line.replies:
        return replace(line, freedom=0.0, reason="nobody of the group replied")
    inside = group.flags(sample) > 0.0
    unit, y, often = sample.unit[inside], values[inside], often[inside]
    total, n = float(often.sum()), line.units
    mean = float(often @ y) / total
    line = replace(line, estimate=mean)
    if n < SMALLEST_GROUP:
        return replace(line, freedom=0.0, reason=line.alone())
    sums = client_sums(unit, often * (y - mean), sample.units)
    heard = np.unique(unit)
    shares = client_sums(unit, often / total, sample.units)[heard]
    events = _event_count(sample, values, group, how)
    known = _evidence(line, sample, sums[heard] / total, shares, events)
    se = float(np.sqrt(n / (n - 1) * (sums**2).sum())) / total
    return line.with_interval(replace(known, se=se, freedom=n - 1.0), how.interval)


@dataclass(frozen=True, slots=True)
class Moved:
    """Hájek's mean less the plain mean of the same replies."""

    difference: float
    se: float  # both estimated from the same clients
    weighted_se: float
    plain_se: float

    @property
    def bias_squared(self) -> float:
        """The plain mean's squared bias, less what chance adds to the difference; 0 at least."""
        return max(self.difference**2 - self.se**2, 0.0)

    @property
    def gain(self) -> float:
        """Mean squared error of the plain mean less that of the weighted one."""
        return self.bias_squared + self.plain_se**2 - self.weighted_se**2


def moved_by_weights(
    sample: TwoPhase, values: FloatArray, counts: FloatArray | None = None
) -> Moved:
    r"""Return the difference weighting makes, and whether it pays for its variance.

    .. math:: \text{gain} = \max(\hat d^2 - \text{se}_d^2, 0) + \text{se}_{plain}^2
       - \text{se}_{weighted}^2, \qquad d = \hat\mu_{Hajek} - \bar y \qquad (E32)

    The first term estimates the squared bias of the plain mean; the errors of both means are sums
    of squared influences over the same clients, with nothing taken off for the finite population;
    errors of population means add to the weighted one.
    Where the gain is below 0 the plain mean is nearer to the population's, as far as these replies
    tell. With ``counts`` (m,) both are means over samples.
    """
    linear = HajekMean(counts).linear(sample, values, Group())
    often = np.ones(len(values)) if counts is None else counts
    share = often / often.sum()
    mean = float(share @ values)
    plain = client_sums(sample.unit, share * (values - mean), sample.units)
    u = linear.values[:, None]
    weighted = sample.influence(u)[:, 0]
    means = float(sample.enrollment.target_variance(sample.totals(u))[0])  # of the population
    return Moved(
        difference=linear.estimate - mean,
        se=float(np.sqrt(((weighted - plain) ** 2).sum() + means)),
        weighted_se=float(np.sqrt((weighted**2).sum() + means)),
        plain_se=float(np.sqrt((plain**2).sum())),
    )


def jackknife_means(
    sample: TwoPhase,
    values: FloatArray,
    estimators: Sequence[MeanEstimator],
    groups: Sequence[Group] = (Group(),),
    *,
    rng: np.random.Generator,
    count: int = GROUPS,
    confidence: float = 0.95,
    interval: Interval = _T,
) -> tuple[Estimate, ...]:
    r"""Estimate means with errors by a jackknife over clients.

    The M clients are cut at random into G groups: the whole population where enrollment was fitted
    on it, the enrolled elsewhere; a cluster goes into one group. With :math:`\hat\mu_{(g)}` the
    mean without group g, both stages fitted anew,

    .. math:: \hat V = \frac{G - 1}{G} \sum_g \big(\hat\mu_{(g)} - \bar\mu\big)^2
       - \frac{M}{M - 1} (Q - \hat V_{E23}) \qquad (E30)

    The first sum measures Q, the squares of clients' contributions about their mean, as if clients
    had been drawn from more of their kind; the rest, linearised and without leverages
    (:meth:`TwoPhase.finite`), takes off what the population's being finite does to it. So it is the
    check on (E23); it costs G fits of each stage, and has G - 1 degrees of freedom at most. Errors
    of population means add to it as they do to (E23).

    Parameters
    ----------
    sample, values, estimators, groups, confidence, interval
        As in :func:`population_means`.
    rng
        Draws the groups.
    count
        G, at most the number of enrolled clients, or of their clusters.
    """
    count = jackknife_count(sample, count)
    how = _How(confidence, interval, interval.is_share(values))
    found = population_means(sample, values, estimators, groups, confidence=confidence)
    lines = [(estimator, group) for group in groups for estimator in estimators]
    means = np.full((count, len(found)), np.nan)
    for g, (kept, rest, share) in enumerate(jackknife_samples(sample, count, rng)):
        for k, (estimator, group) in enumerate(lines):
            if np.isfinite(found[k].estimate):
                means[g, k] = _mean(rest, values[kept], estimator.part(kept), group, share)
    spread = (count - 1) / count * ((means - means.mean(axis=0)) ** 2).sum(axis=0)
    out = []
    for k, (line, (estimator, group)) in enumerate(zip(found, lines, strict=True)):
        if not np.isfinite(line.se):
            out.append(line)
            continue
        linear = estimator.linear(sample, values, group)
        events = _event_count(sample, values, group, how.of(estimator))
        out.append(
            _with_spread(
                line, sample, linear, spread[k], count, events=events, interval=how.interval
            )
        )
    return tuple(out)


def jackknife_count(sample: TwoPhase, count: int) -> int:
    """Return how many groups a jackknife has: ``count``, at most the number of units."""
    count = min(count, sample.units)
    if count < 2:
        raise InputError(f"A jackknife needs two groups or more, not {count}.")
    return count


def jackknife_samples(
    sample: TwoPhase, count: int, rng: np.random.Generator
) -> Iterator[tuple[BoolArray, TwoPhase, float]]:
    """Yield the sample without each of ``count`` random groups of clients, both stages fitted anew.

    Before it stands which replies it keeps, (m,), and after it the share of the population that it
    stands for.
    """
    if sample.clusters is None:
        of_clients = (rng.permutation(sample.enrollment.units) % count)[: sample.clients]
    else:
        of_clients = (rng.permutation(sample.units) % count)[sample.clusters.code]
    try:
        for g, (rest, share) in enumerate(sample.deleted(of_clients, count, rng)):
            yield of_clients[sample.client] != g, rest, share
    except FedIPWError as error:
        raise InputError(
            f"The jackknife cannot leave out one of its {count} groups of clients: {error} Use "
            "another number of groups, or none (0)."
        ) from error


def _mean(
    rest: TwoPhase, values: FloatArray, estimator: MeanEstimator, group: Group, share: float
) -> float:
    try:
        return estimator.linear(rest, values, group.scaled(share)).estimate
    except InputError:
        return np.nan


def _with_spread(
    line: Estimate,
    sample: TwoPhase,
    linear: Linear,
    spread: float,
    count: int,
    *,
    events: int | None,
    interval: Interval,
) -> Estimate:
    """Return a line with the error of (E30), ``spread`` its first sum."""
    if not np.isfinite(spread):
        reason = "without one of the jackknife's groups there is no estimate: use more of them"
        return line.with_error(np.nan, np.nan, reason)
    u = linear.values[:, None]
    taken, reason = float(sample.finite(u)[0]), ""
    if abs(spread - taken) <= 1e-12 * spread:
        taken = spread
    if spread < taken:
        taken, reason = 0.0, "nothing taken off for the finite population: too little is left"
    variance = spread - taken + float(sample.enrollment.target_variance(sample.totals(u))[0])
    units = sample.variance(u, linear.leverage[:, None]).units[:, 0]
    shares = linear.shares
    within = None if shares is None else sample.by_unit(shares[:, None])[:, 0]
    known = _evidence(line, sample, units, within, events)
    freedom = min(line.freedom, count - 1.0)
    known = replace(known, se=float(np.sqrt(variance)), freedom=freedom)
    return line.with_interval(known, interval, reason)
