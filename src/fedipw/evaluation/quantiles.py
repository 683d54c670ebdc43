"""Quantiles of a metric over the population, with Woodruff's intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np
from scipy.special import stdtrit

from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    Estimate,
    Group,
    HajekMean,
    Linear,
    MeanEstimator,
    population_means,
)
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics import BoolArray, FloatArray

Means = Callable[
    [TwoPhase, FloatArray, Sequence[MeanEstimator], Sequence[Group]], Sequence[Estimate]
]


class Distribution(NamedTuple):
    """A weighted distribution function: the share of the weight at or below each value."""

    values: FloatArray  # (k,) rising
    shares: FloatArray  # (k,) rising to 1

    @classmethod
    def of(cls, values: FloatArray, weights: FloatArray) -> Distribution:
        """Return that of values (m,) with weights (m,), some of them above 0 and none below.

        >>> found = Distribution.of(np.array([3.0, 1.0, 3.0]), np.array([1.0, 2.0, 1.0]))
        >>> found.values.tolist(), found.shares.tolist()
        ([1.0, 3.0], [0.5, 1.0])
        """
        kept = weights > 0.0
        distinct, place = np.unique(values[kept], return_inverse=True)
        sums = np.cumsum(np.bincount(place, weights[kept]))
        return cls(distinct, sums / sums[-1])

    def inverse(self, share: float) -> float:
        """Return the smallest value whose share is this large; NaN outside of 0 to 1.

        Shares count as equal within the rounding of a sum of as many terms.

        >>> low, high = np.array([1.0, 3.0]), np.array([0.5, 1.0])
        >>> [Distribution(low, high).inverse(share) for share in (0.5, 0.51, -0.1)]
        [1.0, 3.0, nan]
        """
        rounding = 4.0 * np.finfo(float).eps * len(self.shares)
        if not -rounding <= share <= 1.0 + rounding:
            return np.nan
        place = np.searchsorted(self.shares, share - rounding)
        return float(self.values[min(int(place), len(self.values) - 1)])

    def cut(self, share: float) -> float:
        """Return where an interval is taken from: the inverse, or what is next to the largest.

        >>> [Distribution(np.array([1.0, 3.0]), np.array([0.5, 1.0])).cut(p) for p in (0.5, 0.9)]
        [1.0, 1.0]
        """
        found = self.inverse(share)
        below = self.values[self.values < self.values[-1]]
        return float(below.max(initial=-np.inf)) if found == self.values[-1] else found


@final
@dataclass(frozen=True, slots=True, eq=False)
class _ShareBelow(MeanEstimator):
    """Hájek's mean of whether the value is at or below a cut, which each group has of its own."""

    cuts: Mapping[str, float]  # by group; none where weights are below 0 or all 0
    hajek: HajekMean
    name = "hajek"

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the share and its u."""
        if group.name not in self.cuts:
            raise InputError("weights are below 0, or all 0: there is no distribution of the group")
        below = (values <= self.cuts[group.name]).astype(np.float64)
        return self.hajek.linear(sample, below, group)

    def part(self, chosen: BoolArray) -> _ShareBelow:
        """Return the same for some of the replies, (m,)."""
        return _ShareBelow(self.cuts, self.hajek.part(chosen))


def population_quantiles(
    sample: TwoPhase,
    values: FloatArray,
    at: Sequence[float],
    groups: Sequence[Group] = (Group(),),
    *,
    counts: FloatArray | None = None,
    means: Means = population_means,
) -> tuple[Estimate, ...]:
    r"""Estimate quantiles of a metric over the population and its groups.

    The distribution is that of what clients would report in a round, whether they reply or not. It
    is inverted at the left: a quantile is the smallest value at or below which the share of the
    weight is p or more,

    .. math:: \hat F(y) = \frac{\sum w_{ir} D_i 1[y_{ir} \le y]}{\sum w_{ir} D_i}, \qquad
       \hat q_p = \min\{y : \hat F(y) \ge p\}. \qquad (E45)

    Woodruff's interval inverts that of the share at or below it, a Hájek mean with the variance
    (E23) and the degrees of freedom (E29):

    .. math:: \big[\hat q(\hat F(\hat q_p) - t\,\hat V^{1/2}),\;
       \hat q(\hat F(\hat q_p) + t\,\hat V^{1/2})\big], \qquad
       \text{se} = \frac{\text{length}}{2 t} \qquad (E46)

    Both are as in R's ``svyquantile`` (``qrule = "math"``, ``interval.type = "mean"``). A limit of
    the share below 0 or above 1 leaves the quantile without that limit and without a standard
    error. So does a quantile that is the largest value of all, whose share is 1 without any error:
    there is no upper limit, and the lower one is that of the next smaller value (R gives an
    interval of length 0).

    Parameters
    ----------
    sample, values, groups
        As in :func:`~fedipw.evaluation.estimators.population_means`.
    at
        Shares p, between 0 and 1.
    counts
        Samples behind each value, (m,): the distribution is then over samples, not clients.
    means
        Gives estimates of shares with their intervals; a jackknife may take the place of (E23).

    Examples
    --------
    >>> from fedipw.evaluation.phases import KnownEnrollment
    >>> n = 40
    >>> phase = KnownEnrollment(weights=np.full(n, 5.0), population_size=200)
    >>> sample = TwoPhase(client=np.arange(n), round=np.zeros(n, dtype=int), prob=np.ones(n),
    ...                   rounds=1, enrollment=phase)
    >>> found, = population_quantiles(sample, np.arange(40.0) ** 2, [0.5])
    >>> found.statistic, found.estimate, found.low, found.high
    ('quantile 0.5', 361.0, 196.0, 625.0)
    """
    for p in at:
        if not 0.0 < p < 1.0:
            raise InputError(f"A quantile is taken between 0 and 1, not at {p:g}.")
    # ranks in place of values, from 1 to 2: shares are the same, their rounding is that of shares
    distinct, place = np.unique(values, return_inverse=True)
    ranks = 1.0 + (place + 1.0) / len(distinct)
    hajek, often = HajekMean(counts), 1.0 if counts is None else counts
    known: dict[str, Distribution] = {}
    for group in groups:
        inside = group.flags(sample) > 0.0
        weights = (sample.weights * often)[inside]
        if weights.sum() > 0.0 and not (weights < 0.0).any():
            known[group.name] = Distribution.of(ranks[inside], weights)
    cuts = [{name: found.cut(p) for name, found in known.items()} for p in at]
    shares = means(sample, ranks, [_ShareBelow(each, hajek) for each in cuts], groups)
    places = [p for _ in groups for p in at]
    return tuple(
        _inverted(line, p, known.get(line.group), distinct)
        for line, p in zip(shares, places, strict=True)
    )


def _inverted(
    share: Estimate, p: float, known: Distribution | None, distinct: FloatArray
) -> Estimate:
    """Return the quantile that has this share at or below it."""
    line = replace(share, statistic=f"quantile {p:g}", se_superpopulation=None)
    if known is None:
        return line

    def value(share: float) -> float:
        rank = known.inverse(share)
        return rank if np.isnan(rank) else float(distinct[round((rank - 1.0) * len(distinct)) - 1])

    estimate, low, high, reason = value(p), value(share.low), value(share.high), share.reason
    if known.inverse(p) == known.values[-1]:
        high = np.nan
    if len(known.values) == 1:
        low = np.nan
    ends = [end for end, at in (("low", low), ("high", high)) if np.isnan(at)]
    if np.isfinite(share.se) and ends:
        reason = f"too few values lie beyond it: the interval has no {' and no '.join(ends)} end"
    t = float(stdtrit(max(share.freedom, 1.0), 0.5 + 0.5 * share.confidence))
    se = 0.5 * (high - low) / t
    return replace(line, estimate=estimate, low=low, high=high, se=se, reason=reason)
