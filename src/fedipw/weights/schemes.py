"""Schemes: what is known of the replies in, one number per reply out, no update ever read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive, check_probability
from fedipw.weights.functions import hajek_weights, horvitz_thompson_weights

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray
    from fedipw.weights.rounds import RoundReplies


class Scheme(Protocol):
    """One weight for each reply of a round, known before any update is read."""

    @property
    def self_normalised(self) -> bool:
        """Whether weights sum to one in every round."""
        ...

    def weights(self, replies: RoundReplies) -> FloatArray:
        """Return the weight of each reply, (m,)."""
        ...


def expected_weights(
    scheme: Scheme, units: RoundReplies, reply_prob: FloatArray, *, trim: float | None = None
) -> FloatArray:
    r"""Return each unit's mean contribution to a round, E[A_i w_i], (n,).

    .. math:: v_i = P(A_i = 1)\, w_i, \qquad
       v_i = \frac{P(A_i = 1)\, w_i}{\sum_j P(A_j = 1)\, w_j}
       \text{ if self-normalised} \qquad (L1)

    Exact for schemes whose weight of i depends on i alone; for self-normalised ones it is the limit
    of large rounds. ``units`` describes all n units as if all had replied. With ``trim``, weights
    are cut at this multiple of the mean weight of a round's replies (W7), again in that limit.
    """
    weights = scheme.weights(units)
    if trim is not None:
        weights = np.minimum(weights, trim * (reply_prob @ weights) / reply_prob.sum())
    mass = reply_prob * weights
    expected: FloatArray = mass / mass.sum() if scheme.self_normalised else mass
    return expected


@final
@dataclass(frozen=True, slots=True)
class FedAvg:
    r"""The plain mean over replies, :math:`w_i = 1/|S|` (W1)."""

    self_normalised = True

    def weights(self, replies: RoundReplies) -> FloatArray:
        """Return equal weights, (m,)."""
        m = len(replies.unit_ids)
        return np.full(m, 1.0 / m)


@final
@dataclass(frozen=True, slots=True)
class ParticipationOnly:
    r"""Participation corrected, enrollment ignored.

    .. math:: w_i = \frac{1}{N_{enr}\, \pi^{part}_i} \qquad (W4)

    ``size`` is the number of enrolled clients; the population size gives the paper's literal form:
    the same minimiser at a smaller step.
    """

    size: float
    self_normalised = False

    def weights(self, replies: RoundReplies) -> FloatArray:
        """Return the weights, (m,)."""
        prob = check_probability(replies.participation_prob, "participation_prob")
        return 1.0 / (check_positive(self.size, "size") * prob)


@final
@dataclass(frozen=True, slots=True)
class HorvitzThompson:
    """Unbiased when every probability is right, however small the round (W2)."""

    population_size: float
    self_normalised = False

    def weights(self, replies: RoundReplies) -> FloatArray:
        """Return the weights, (m,)."""
        return horvitz_thompson_weights(replies.inclusion_prob, self.population_size)


@final
@dataclass(frozen=True, slots=True)
class Hajek:
    """A scheme's weights divided by their sum in the round (W3): stable, biased in small rounds."""

    inner: Scheme
    self_normalised = True

    def weights(self, replies: RoundReplies) -> FloatArray:
        """Return weights that sum to one, (m,)."""
        return hajek_weights(_as_probability(self.inner.weights(replies)))


@final
@dataclass(frozen=True, slots=True)
class SampleHajek:
    r"""Weights for the mean over samples instead of clients.

    .. math:: w_i = \frac{n_i w_i'}{\sum_{j \in S} n_j w_j'} \qquad (W8)

    Only this self-normalised form exists: Horvitz–Thompson would need the sample counts of clients
    that never enrolled.
    """

    inner: Scheme
    self_normalised = True

    def weights(self, replies: RoundReplies) -> FloatArray:
        """Return weights that sum to one, (m,)."""
        if (replies.sample_counts <= 0).any():
            raise InputError(f"round {replies.index}: a reply without samples has no weight.")
        raw = replies.sample_counts * self.inner.weights(replies)
        return hajek_weights(_as_probability(raw))


def _as_probability(raw: FloatArray) -> FloatArray:
    """Return probabilities whose inverses are in the proportions of ``raw``."""
    smallest = raw.min()
    if not smallest > 0.0:
        raise InputError(f"Self-normalised weights need positive weights; the least is {smallest}.")
    prob: FloatArray = smallest / raw
    return prob
