"""Schemes: what is known of the replies in, one number per reply out, no update ever read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from fedipw.calibration import Quadratic, calibrated
from fedipw.errors import FedIPWError, InputError
from fedipw.numerics.checks import check_positive, check_probability
from fedipw.weighting.functions import horvitz_thompson_weights

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray
    from fedipw.weighting.balance import Balance
    from fedipw.weighting.rounds import RoundReplies

REPLIES_PER_TERM = 5  # GREG is left out of rounds with fewer replies per coefficient


class Scheme(Protocol):
    """One weight for each reply of a round, known before any update is read."""

    @property
    def self_normalised(self) -> bool:
        """Whether weights sum to one in every round."""
        ...

    def weights(self, replies: RoundReplies, presence: FloatArray | None = None) -> FloatArray:
        """Return the weight of each reply, (m,).

        ``presence`` (m,) counts each reply as often as it says where a scheme sums over the round:
        with reply probabilities in its place weights are those of a large round.
        """
        ...


def expected_weights(
    scheme: Scheme, units: RoundReplies, reply_prob: FloatArray, *, trim: float | None = None
) -> FloatArray:
    r"""Return each unit's mean contribution to a round, E[A_i w_i], (n,).

    .. math:: v_i = P(A_i = 1)\, w_i, \qquad
       v_i = \frac{P(A_i = 1)\, w_i}{\sum_j P(A_j = 1)\, w_j}
       \text{ if self-normalised} \qquad (L1)

    Exact for schemes whose weight of i depends on i alone; for others it is the limit of large
    rounds. ``units`` describes all n units as if all had replied. With ``trim``, weights are cut at
    this multiple of the mean weight of a round's replies (W7), again in that limit.
    """
    weights = scheme.weights(units, reply_prob)
    if trim is not None:
        weights = np.minimum(weights, trim * (reply_prob @ weights) / reply_prob.sum())
    expected: FloatArray = reply_prob * weights
    return expected


def weighed(scheme: Scheme, replies: RoundReplies) -> tuple[FloatArray, str]:
    """Return a scheme's weights and what it could not do in this round, empty if nothing."""
    if isinstance(scheme, Greg):
        return scheme.weighed(replies)
    if isinstance(scheme, Hajek | SampleHajek):
        inner, note = weighed(scheme.inner, replies)
        return scheme.normalised(inner, replies), note
    return scheme.weights(replies), ""


def over_enrollment(scheme: Scheme) -> Scheme:
    """Return the scheme without the chance of one enrollment draw, itself where that is not known.

    Calibrated weights answer to who enrolled; in the mean over enrollment they are ``expected``.
    """
    if isinstance(scheme, Hajek | SampleHajek):
        return type(scheme)(over_enrollment(scheme.inner))
    if isinstance(scheme, Greg):
        return replace(scheme, inner=over_enrollment(scheme.inner))
    if isinstance(scheme, Calibrated) and scheme.expected is not None:
        return Calibrated(scheme.expected)
    return scheme


def enrollment_weights_of(scheme: Scheme) -> FloatArray:
    """Return the enrollment weights behind a calibrated scheme, (N,)."""
    if isinstance(scheme, Hajek | SampleHajek | Greg):
        return enrollment_weights_of(scheme.inner)
    if isinstance(scheme, Calibrated):
        return scheme.enrollment_weights
    raise InputError(f"{type(scheme).__name__} has no enrollment weights of its own.")


@final
@dataclass(frozen=True, slots=True)
class FedAvg:
    r"""The plain mean over replies, :math:`w_i = 1/|S|` (W1)."""

    self_normalised = True

    def weights(self, replies: RoundReplies, presence: FloatArray | None = None) -> FloatArray:
        """Return equal weights, (m,)."""
        m = len(replies.unit_ids)
        return np.full(m, 1.0 / (m if presence is None else presence.sum()))


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

    def weights(self, replies: RoundReplies, presence: FloatArray | None = None) -> FloatArray:
        """Return the weights, (m,)."""
        del presence
        prob = check_probability(replies.participation_prob, "participation_prob")
        return 1.0 / (check_positive(self.size, "size") * prob)


@final
@dataclass(frozen=True, slots=True)
class HorvitzThompson:
    """Unbiased when every probability is right, however small the round (W2)."""

    population_size: float
    self_normalised = False

    def weights(self, replies: RoundReplies, presence: FloatArray | None = None) -> FloatArray:
        """Return the weights, (m,)."""
        del presence
        return horvitz_thompson_weights(replies.inclusion_prob, self.population_size)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    r"""Enrollment by calibration, participation by inverse probability.

    .. math:: w_i = \frac{q_i}{\pi^{part}_i} \qquad (W11)

    ``enrollment_weights`` are q over the rows of the table, summing to one over the enrolled;
    ``expected`` those of calibration in the mean over enrollment (C11), in simulations.
    """

    enrollment_weights: FloatArray  # (N,)
    expected: FloatArray | None = None  # (N,)
    self_normalised = False

    def weights(self, replies: RoundReplies, presence: FloatArray | None = None) -> FloatArray:
        """Return the weights, (m,)."""
        del presence
        prob = check_probability(replies.participation_prob, "participation_prob")
        weights: FloatArray = self.enrollment_weights[replies.rows] / prob
        return weights


@final
@dataclass(frozen=True, slots=True, eq=False)
class Greg:
    r"""A scheme's weights moved so that the round reproduces the population means of b.

    .. math:: w_i = d_i \left[1 + b_i' \Big(\sum_{j \in S} d_j b_j b_j'\Big)^{-1}
       \Big(\mu_b - \sum_{j \in S} d_j b_j\Big)\right] \qquad (W12)

    b contains the constant 1, so weights sum to one. Consistent if either the probabilities behind
    d or a linear model of updates on b(Z) is right. Rounds with fewer than 5 (q + 1) replies keep d
    and say so. Weights may be negative; with ``nonnegative`` the nearest weights that are not take
    their place, and a round in which there are none keeps d.
    """

    inner: Scheme
    balance: Balance
    nonnegative: bool = False
    self_normalised = False

    def weights(self, replies: RoundReplies, presence: FloatArray | None = None) -> FloatArray:
        """Return the weights, (m,)."""
        return self.weighed(replies, presence)[0]

    def weighed(
        self, replies: RoundReplies, presence: FloatArray | None = None
    ) -> tuple[FloatArray, str]:
        """Return the weights and why they are not balanced, empty if they are."""
        plain = self.inner.weights(replies, presence)
        few = _too_few(len(plain), self.balance)
        if few:
            return plain, few
        mass = plain if presence is None else plain * presence
        rows = self.balance.matrix[replies.rows]
        if self.nonnegative:
            return self._nonnegative(plain, mass, rows)
        b = np.column_stack([np.ones(len(rows)), rows - self.balance.mean])
        miss = np.append(1.0, np.zeros(rows.shape[1])) - mass @ b
        move = np.linalg.lstsq((mass[:, None] * b).T @ b, miss)[0]
        weights: FloatArray = plain * (1.0 + b @ move)
        return weights, ""

    def _nonnegative(
        self, plain: FloatArray, mass: FloatArray, rows: FloatArray
    ) -> tuple[FloatArray, str]:
        try:
            found = calibrated(
                rows, self.balance.mean, distance=Quadratic(), base=mass, population_size=1.0,
                names=self.balance.names,
            )  # fmt: skip
        except FedIPWError as error:
            return plain, f"not balanced: {type(error).__name__}"
        weights: FloatArray = plain * found.ratio
        return weights, ""


def _too_few(replies: int, balance: Balance) -> str:
    """Return why a round is too small to be balanced, empty if it is not."""
    needed = REPLIES_PER_TERM * (len(balance.names) + 1)
    return f"not balanced: {replies} replies, {needed} needed" if replies < needed else ""


@final
@dataclass(frozen=True, slots=True)
class Hajek:
    """A scheme's weights divided by their sum in the round (W3): stable, biased in small rounds."""

    inner: Scheme
    self_normalised = True

    def weights(self, replies: RoundReplies, presence: FloatArray | None = None) -> FloatArray:
        """Return weights that sum to one, (m,)."""
        return self.normalised(self.inner.weights(replies, presence), replies, presence)

    def normalised(
        self, inner: FloatArray, replies: RoundReplies, presence: FloatArray | None = None
    ) -> FloatArray:
        """Return the inner scheme's weights over their sum, (m,)."""
        del replies
        return _over_sum(inner, presence)


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

    def weights(self, replies: RoundReplies, presence: FloatArray | None = None) -> FloatArray:
        """Return weights that sum to one, (m,)."""
        return self.normalised(self.inner.weights(replies, presence), replies, presence)

    def normalised(
        self, inner: FloatArray, replies: RoundReplies, presence: FloatArray | None = None
    ) -> FloatArray:
        """Return the inner scheme's weights times sample counts over their sum, (m,)."""
        if (replies.sample_counts <= 0).any():
            raise InputError(f"round {replies.index}: a reply without samples has no weight.")
        return _over_sum(replies.sample_counts * inner, presence)


def _over_sum(raw: FloatArray, presence: FloatArray | None) -> FloatArray:
    """Return weights over their sum in the round."""
    largest = np.abs(raw).max()
    if largest == 0.0:
        return raw  # calibration left every reply without weight: an empty round
    scaled = raw / largest  # huge weights must not overflow their sum
    total = scaled.sum() if presence is None else presence @ scaled
    if not (np.isfinite(total) and total > 0.0):
        raise InputError(
            f"Self-normalised weights need a positive sum; {len(raw)} weights between "
            f"{raw.min():.3g} and {raw.max():.3g} have none."
        )
    weights: FloatArray = scaled / total
    return weights
