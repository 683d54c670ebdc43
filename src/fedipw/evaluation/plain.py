"""The unweighted mean of replies, and what weighting does to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

from fedipw.evaluation.estimates import Estimate, Group, HajekMean
from fedipw.evaluation.sums import client_sums
from fedipw.weighting.functions import effective_sample_size

if TYPE_CHECKING:
    from fedipw.evaluation.twophase import TwoPhase
    from fedipw.numerics.types import FloatArray

PLAIN = "plain"


def plain_means(
    sample: TwoPhase,
    values: FloatArray,
    groups: Sequence[Group],
    confidence: float = 0.95,
    counts: FloatArray | None = None,
) -> tuple[Estimate, ...]:
    r"""Return the mean of the replies as they came, with an error clustered by client.

    .. math:: \bar y = \frac{1}{m} \sum y_{ir}, \qquad \text{se}^2 = \frac{n}{n - 1}
       \frac{1}{m^2} \sum_i \Big(\sum_r (y_{ir} - \bar y)\Big)^2 \qquad (E31)

    It is about those who reply, not about the population: the interval says how well *their* mean
    is known. With ``counts`` (m,) each reply counts as often, and m is their sum.
    """
    often = np.ones(len(values)) if counts is None else counts
    return tuple(_plain(sample, values, often, group, confidence) for group in groups)


def _plain(
    sample: TwoPhase, values: FloatArray, often: FloatArray, group: Group, confidence: float
) -> Estimate:
    inside = group.flags(sample) > 0.0
    client, y, often = sample.client[inside], values[inside], often[inside]
    counts = client_sums(client, often, sample.clients)
    seen, total = len(np.unique(client)), float(often.sum())
    mean = float(often @ y) / total if seen else np.nan
    se, reason = np.nan, "" if seen else "nobody of the group replied"
    if seen > 1:
        sums = client_sums(client, often * (y - mean), sample.clients)
        se = float(np.sqrt(seen / (seen - 1) * (sums**2).sum())) / total
    elif seen:
        reason = "1 client replied: no standard error"
    reach = float(stdtrit(max(seen - 1.0, 1.0), 0.5 + 0.5 * confidence)) * se
    return Estimate(
        group=group.name, estimator=PLAIN, estimate=mean, se=se, se_superpopulation=None,
        freedom=max(seen - 1.0, 0.0), low=mean - reach, high=mean + reach, confidence=confidence,
        effective_sample_size=effective_sample_size(counts) if seen else 0.0,
        clients=seen, replies=len(y), reason=reason,
    )  # fmt: skip


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
    of squared influences over the same clients, with nothing taken off for the finite population.
    Where the gain is below 0 the plain mean is nearer to the population's, as far as these replies
    tell. With ``counts`` (m,) both are means over samples.
    """
    linear = HajekMean(counts).linear(sample, values, Group())
    often = np.ones(len(values)) if counts is None else counts
    share = often / often.sum()
    mean = float(share @ values)
    plain = client_sums(sample.client, share * (values - mean), sample.clients)
    weighted = sample.influence(linear.values[:, None])[:, 0]
    return Moved(
        difference=linear.estimate - mean,
        se=float(np.sqrt(((weighted - plain) ** 2).sum())),
        weighted_se=float(np.sqrt((weighted**2).sum())),
        plain_se=float(np.sqrt((plain**2).sum())),
    )
