r"""A method is five choices: base weight, calibration, normalisation, guard, augmentation.

Each choice is a small object that knows what it needs, what it could not do in a round and how
large it can make a weight. To add one, write a class and name it in the registry of its kind
(:data:`BASES`, :data:`CALIBRATIONS`, :data:`NORMALISATIONS`, :data:`GUARDS`,
:data:`AUGMENTATIONS`); every command and engine takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Protocol, final

import numpy as np

from fedipw.calibration import (
    Distance,
    Entropy,
    InverseLogit,
    Linear,
    Logit,
    Quadratic,
    Ridge,
    calibrated,
)
from fedipw.errors import FedIPWError, InfeasibleError, InputError, NotConvergedError
from fedipw.numerics.checks import check_positive, check_probability, some
from fedipw.selection.enrollment import Needs
from fedipw.weighting.functions import (
    TrimReport,
    capped,
    effective_sample_size,
    horvitz_thompson_weights,
    trimmed,
)
from fedipw.weighting.online import OnlineSettings, OnlineState
from fedipw.weighting.weigher import (
    ClientNumbers,
    EnrollmentState,
    Imbalance,
    Replies,
    RoundWeights,
)

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray
    from fedipw.weighting.balance import Balance

REPLIES_PER_TERM = 5  # GREG is left out of rounds with fewer replies per coefficient
SOFT = (1e-2, 0.1, 1.0)  # ridges of a calibration whose targets cannot be met (C8), in turn
SOFT_CLIENTS = 10.0  # effective clients it must leave, before a larger ridge is tried
TIMES_EQUAL_SHARE = 5.0  # a reply may always carry this many times its equal share of a round
LOGIT_BOUNDS = (0.1, 10.0)  # of the weight ratio, for bounded logit calibration


class Probabilities(Enum):
    """Which participation probabilities a base weight reads."""

    NONE = "none"
    FITTED = "fitted"
    TRUE = "true"
    COLLAPSED = "collapsed"
    GAPS = "gaps"
    RATES = "rates"


class Base(Protocol):
    """The weight d of a reply before anything else, 1/N included.

    One in which clients count by their base weights, where they have some, says so by
    ``takes_base``.
    """

    probabilities: ClassVar[Probabilities]
    uses_enrollment: ClassVar[bool]  # whether it reads enrollment probabilities

    def weights(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,)."""
        ...

    def within(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d for the enrolled alone, without what corrects enrollment, (m,)."""
        ...

    def largest(self, state: EnrollmentState) -> FloatArray:
        """Return each client's d times its participation probability, (n,)."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Equal:
    """d = 1: nothing is corrected. It has no Horvitz–Thompson form."""

    probabilities: ClassVar = Probabilities.NONE
    uses_enrollment: ClassVar = False

    def weights(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return ones, (m,)."""
        del state
        return np.ones(len(replies.rows))

    def within(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,): enrollment is not in it."""
        return self.weights(replies, state)

    def largest(self, state: EnrollmentState) -> FloatArray:
        """Return ones, (n,)."""
        return np.ones(len(state.unit_ids))


@final
@dataclass(frozen=True, slots=True)
class InverseInvitation:
    r"""The server's own sampling corrected, and nothing else, by the known probability of it.

    .. math:: d_i = \frac{1/a_i}{\text{mean}_{S_r}(1/a_j)}, \qquad a_i = P(\text{invited})
       \qquad (W21)

    Nothing is estimated: the ledger's ``invite_prob`` is known by design, and 1 where there is
    none. Where all replies of a round were as likely to be invited it is :class:`Equal`.
    """

    probabilities: ClassVar = Probabilities.NONE
    uses_enrollment: ClassVar = False

    def weights(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,)."""
        del state
        prob = check_probability(replies.invite_prob, "invite_prob")
        raw = prob.min() / prob  # ones exactly where all are as likely
        weights: FloatArray = raw / raw.mean()
        return weights

    def within(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,): enrollment is not in it."""
        return self.weights(replies, state)

    def largest(self, state: EnrollmentState) -> FloatArray:
        """Return ones, (n,)."""
        return np.ones(len(state.unit_ids))


@final
@dataclass(frozen=True, slots=True)
class InverseParticipation:
    r"""Participation corrected, enrollment not: :math:`d_i = 1/(N_{enr} \pi^{part}_i)` (W4).

    With base weights a,

    .. math:: d_i = \frac{a_i}{\pi^{part}_i \sum_{j \in E} a_j} \qquad (W23)
    """

    probabilities: ClassVar = Probabilities.FITTED
    uses_enrollment: ClassVar = False
    takes_base: ClassVar = True

    def weights(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,)."""
        prob = check_probability(replies.participation_prob, "participation_prob")
        own = state.base_of(replies.rows)
        return own / (check_positive(state.enrolled_mass, "size") * prob)

    def within(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,): enrollment is not in it."""
        return self.weights(replies, state)

    def largest(self, state: EnrollmentState) -> FloatArray:
        """Return 1/N_enr, or the share of base weights, (n,)."""
        alike = np.full(len(state.unit_ids), 1.0 / state.enrolled_mass)
        return alike * state.base_of(slice(None))


@final
@dataclass(frozen=True, slots=True)
class InverseInclusion:
    r"""Both stages corrected: :math:`d_i = 1/(N \pi^{enr}_i \pi^{part}_i)` (W2).

    Where a row of the population stands for :math:`a_i` clients, its base weight,

    .. math:: d_i = \frac{a_i}{N\, \pi^{enr}_i \pi^{part}_i}, \qquad N = \sum_{j=1}^{rows} a_j
       \qquad (W24)

    with :math:`\pi^{enr}` fitted with the a as weights of rows, and population means weighted by
    them.
    """

    probabilities: ClassVar = Probabilities.FITTED
    uses_enrollment: ClassVar = True
    takes_base: ClassVar = True

    def weights(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,)."""
        alike = horvitz_thompson_weights(replies.inclusion_prob, state.population_size)
        return alike * state.base_of(replies.rows)

    def within(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return 1/(N_enr pi_part), (m,)."""
        return InverseParticipation().weights(replies, state)

    def largest(self, state: EnrollmentState) -> FloatArray:
        """Return 1/(N pi_enr), (n,)."""
        return state.base_of(slice(None)) / (state.population_size * state.prob)


@final
@dataclass(frozen=True, slots=True)
class TrueInclusion:
    """As :class:`InverseInclusion` with the true probabilities: the oracle of a simulation."""

    probabilities: ClassVar = Probabilities.TRUE
    uses_enrollment: ClassVar = True

    def weights(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,)."""
        return InverseInclusion().weights(replies, state)

    def within(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return 1/(N_enr pi_part), (m,)."""
        return InverseParticipation().weights(replies, state)

    def largest(self, state: EnrollmentState) -> FloatArray:
        """Return 1/(N pi_enr), (n,)."""
        return InverseInclusion().largest(state)


@final
@dataclass(frozen=True, slots=True)
class CollapsedInclusion:
    """One model of P(replied | Z, X) over everybody: the misspecified comparison."""

    probabilities: ClassVar = Probabilities.COLLAPSED
    uses_enrollment: ClassVar = False

    def weights(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return 1/(N p), (m,)."""
        return horvitz_thompson_weights(replies.participation_prob, state.population_size)

    def within(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        """Return d, (m,): enrollment is not in it."""
        return self.weights(replies, state)

    def largest(self, state: EnrollmentState) -> FloatArray:
        """Return 1/N, (n,)."""
        return np.full(len(state.unit_ids), 1.0 / state.population_size)


class CalibrationRule(Protocol):
    """How weights are moved to reproduce population means; by default they are not."""

    @property
    def balance(self) -> str:
        """Which population means are needed: ``main``, ``rich``, ``wide``, or none if empty."""
        return ""

    @property
    def needs_size(self) -> bool:
        """Whether the population's size is needed."""
        return False

    @property
    def nonnegative(self) -> bool:
        """Whether weights keep the sign of the base."""
        return True

    @property
    def distance(self) -> Distance | InverseLogit | None:
        """Distance by which the enrolled are calibrated, once; none if they are not."""
        return None

    @property
    def each_round(self) -> bool:
        """Whether the replies of a round decide."""
        return False

    @property
    def pools_respondents(self) -> bool:
        """Whether, over all rounds, it is calibration of the respondents together."""
        return False

    @property
    def strict(self) -> bool:
        """Whether targets that cannot be met are an error."""
        return False

    @property
    def corrects_enrollment(self) -> bool:
        """Whether it does what enrollment probabilities in the base would do again."""
        return self.distance is not None

    @property
    def comparable(self) -> bool:
        """Whether weights before normalisation have one scale in all rounds."""
        return True

    def enrollment_weights(self, state: EnrollmentState, method: str) -> CalibratedClients | None:
        """Return q of the enrolled where they are calibrated once."""
        del state, method
        return None

    def strictly(self) -> CalibrationRule:
        """Return the rule for which targets that cannot be met are an error."""
        return self

    def begun(
        self, state: EnrollmentState, method: str, learnt: OnlineState | None
    ) -> OnlineState | None:
        """Return what a rule that learns as rounds go by starts with; none if it does not."""
        del state, method, learnt
        return None

    def after(self, base: FloatArray, replies: Replies, weighing: Weighing) -> OnlineState | None:
        """Return what it has learnt after a round with these base weights, (m,)."""
        del base, replies
        return weighing.learnt

    def standing(self, weighing: Weighing) -> FloatArray | None:
        """Return what each client stands for by what was learnt, (n,)."""
        del weighing
        return None

    def imbalance(self, weighing: Weighing) -> Imbalance | None:
        """Return how far means are from the population's, where calibration goes on."""
        del weighing
        return None

    def moved(
        self, base: FloatArray, replies: Replies, weighing: Weighing, presence: FloatArray | None
    ) -> tuple[FloatArray, str]:
        """Return the weights, (m,), and what could not be done in this round."""
        del replies, weighing, presence
        return base, ""


@dataclass(frozen=True, slots=True, eq=False)
class CalibratedClients:
    """Enrollment weights q by calibration, summing to one over the enrolled."""

    weights: FloatArray  # (n,)
    expected: FloatArray | None = None  # (n,) in the mean over enrollment (C11), in simulations
    note: str = ""  # what could not be met


@final
@dataclass(frozen=True, slots=True)
class Uncalibrated(CalibrationRule):
    """Base weights as they are."""


@final
@dataclass(frozen=True, slots=True)
class OfEnrolled(CalibrationRule):
    r"""The enrolled calibrated once to population means; participation stays in the base.

    .. math:: w_i = N_{enr}\, q_i\, d_i = \frac{q_i}{\pi^{part}_i} \qquad (W11)

    Targets are met as they are given. With ``noise_aware`` they are shrunk towards the enrolled
    by their standard errors (:func:`fedipw.calibration.trusted_target`).
    """

    distance: Distance | InverseLogit = field(default_factory=Quadratic)
    balance: str = "main"
    noise_aware: bool = False
    strict: bool = False  # whether targets that cannot be met are an error

    @property
    def needs_size(self) -> bool:
        """Whether the distance needs N."""
        return self.distance.needs_size

    @property
    def nonnegative(self) -> bool:
        """Whether the distance gives no negative weight."""
        return self.distance.nonnegative

    def enrollment_weights(self, state: EnrollmentState, method: str) -> CalibratedClients | None:
        """Return q of the enrolled, and its mean over enrollment where the truth is known.

        Where calibration in the mean has no solution, the weights of this draw serve for both.
        Unless ``strict``, targets that cannot be met are approached: softly, else those of the
        covariates alone.
        """
        balance = state.balance_for(method, self.balance)
        aware, expected = self.noise_aware, None
        try:
            found = balance.calibration(self.distance, noise_aware=aware)
            weights = balance.enrollment_weights(found)
        except (InfeasibleError, NotConvergedError) as error:
            if self.strict:
                raise
            return self._softly(balance, error)
        if state.true_prob is not None:
            with suppress(InfeasibleError, NotConvergedError):
                expected = balance.expected_weights(
                    self.distance, state.true_prob, noise_aware=aware
                )
        return CalibratedClients(weights, expected, " ".join(found.warnings()))

    def strictly(self) -> CalibrationRule:
        """Return the rule without its way out."""
        return replace(self, strict=True)

    def _softly(self, balance: Balance, error: FedIPWError) -> CalibratedClients:
        """Return soft calibration on all columns, else on the covariates, or raise the error."""
        varying = balance.varying()
        if not varying.names:
            note = "targets cannot be met: no covariate varies among the enrolled, who count alike"
            alike = np.ones(len(balance.matrix)) if balance.base is None else balance.base
            return CalibratedClients(alike / alike[balance.enrolled].sum(), note=note)
        lost = [name for name in balance.names if name not in varying.names]
        without = f" without {some(lost)}, which does not vary among the enrolled" if lost else ""
        maps = {without: varying}
        if varying.main < len(varying.names):
            maps[f" of the covariates alone{without}"] = varying.leading_columns()
        enough = min(SOFT_CLIENTS, balance.enrolled.sum() / 2.0)
        for (which, columns), ridge in product(maps.items(), SOFT):
            with suppress(InfeasibleError, NotConvergedError):
                found = columns.calibration(
                    Entropy(), noise_aware=self.noise_aware, slack=Ridge(ridge)
                )
                if effective_sample_size(found.weights) < enough and ridge < SOFT[-1]:
                    continue  # a few clients would stand for everybody
                note = (
                    f"targets cannot be met: soft calibration by entropy{which}, largest "
                    f"difference left {found.largest_violation:.2g} standard deviations"
                )
                return CalibratedClients(columns.enrollment_weights(found), note=note)
        raise error

    def moved(
        self, base: FloatArray, replies: Replies, weighing: Weighing, presence: FloatArray | None
    ) -> tuple[FloatArray, str]:
        """Return the base weights times the calibrated share of each client."""
        del presence
        q = weighing.enrollment_weights
        assert q is not None
        state = weighing.state
        own = state.base_of(replies.rows)  # calibration starts from it, and has it in q
        weights: FloatArray = base * (state.enrolled_mass * q[replies.rows] / own)
        return weights, ""


@final
@dataclass(frozen=True, slots=True)
class OfReplies(CalibrationRule):
    r"""The replies of each round calibrated to population means (GREG).

    .. math:: w_i = d_i \left[1 + b_i' \Big(\sum_{j \in S} d_j b_j b_j'\Big)^{-1}
       \Big(\mu_b - \sum_{j \in S} d_j b_j\Big)\right] \qquad (W12)

    b contains the constant 1, so weights sum to one. Consistent if either the probabilities behind
    d or a linear model of updates on b(Z) is right. Rounds with fewer than 5 (q + 1) replies keep d
    and say so. Weights may be negative; with ``nonnegative`` the nearest weights that are not take
    their place, and a round in which there are none keeps d.
    """

    nonnegative: bool = False
    balance: ClassVar = "main"
    each_round: ClassVar = True

    def moved(
        self, base: FloatArray, replies: Replies, weighing: Weighing, presence: FloatArray | None
    ) -> tuple[FloatArray, str]:
        """Return the weights, and why they are not balanced, empty if they are."""
        balance = weighing.state.balance_for(weighing.method.name, self.balance)
        needed = REPLIES_PER_TERM * (len(balance.names) + 1)
        if len(base) < needed:
            return base, f"not balanced: {len(base)} replies, {needed} needed"
        mass = base if presence is None else base * presence
        rows = balance.matrix[replies.rows]
        if self.nonnegative:
            return _nearest(base, mass, rows, balance)
        b = np.column_stack([np.ones(len(rows)), rows - balance.mean])
        miss = np.append(1.0, np.zeros(rows.shape[1])) - mass @ b
        move = np.linalg.lstsq((mass[:, None] * b).T @ b, miss)[0]
        weights: FloatArray = base * (1.0 + b @ move)
        return weights, ""


def _nearest(
    base: FloatArray, mass: FloatArray, rows: FloatArray, balance: Balance
) -> tuple[FloatArray, str]:
    try:
        found = calibrated(
            rows, balance.mean, distance=Quadratic(), base=mass, population_size=1.0,
            names=balance.names,
        )  # fmt: skip
    except FedIPWError as error:
        return base, f"not balanced: {type(error).__name__}"
    weights: FloatArray = base * found.ratio
    return weights, ""


@final
@dataclass(frozen=True, slots=True)
class AsYouGo(CalibrationRule):
    r"""Both stages from population means, learnt as rounds go by (W18).

    .. math:: w_i = d_i \exp(\lambda_{r-1}' b_i)

    The weights of a round rest on the rounds before it; until there are some they are d. What it
    cannot see are covariates known only before a round that drive replies and predict updates given
    Z: for those the base is 1 / participation probability.
    """

    settings: OnlineSettings = field(default_factory=OnlineSettings)
    balance: str = "rich"
    corrects_enrollment: ClassVar = True
    pools_respondents: ClassVar = True
    comparable: ClassVar = False  # they grow with lambda

    def begun(
        self, state: EnrollmentState, method: str, learnt: OnlineState | None
    ) -> OnlineState | None:
        """Return what was learnt before, or nothing yet."""
        balance = state.balance_for(method, self.balance)
        return OnlineState.begun(balance) if learnt is None else learnt.on(balance)

    def moved(
        self, base: FloatArray, replies: Replies, weighing: Weighing, presence: FloatArray | None
    ) -> tuple[FloatArray, str]:
        """Return the base weights times exp(lambda'b)."""
        del presence
        learnt, b = self._at(replies, weighing)
        weights: FloatArray = base * learnt.factors(b, self.settings)
        return weights, ""

    def after(self, base: FloatArray, replies: Replies, weighing: Weighing) -> OnlineState | None:
        """Return the coefficients one step further."""
        learnt, b = self._at(replies, weighing)
        return learnt.learnt(base, b, self.settings)

    def standing(self, weighing: Weighing) -> FloatArray | None:
        """Return exp(lambda'b) of each client, (n,)."""
        learnt = weighing.learnt
        assert learnt is not None
        balance = weighing.state.balance_for(weighing.method.name, self.balance)
        return learnt.factors(learnt.standardised(balance.matrix, balance.mean), self.settings)

    def imbalance(self, weighing: Weighing) -> Imbalance | None:
        """Return the imbalance of the enrolled, and what is left of it in the replies so far."""
        learnt = weighing.learnt
        assert learnt is not None
        balance = weighing.state.balance_for(weighing.method.name, self.balance)
        apart = learnt.standardised(balance.matrix[balance.enrolled].mean(axis=0), balance.mean)
        return Imbalance(float(np.abs(apart).max(initial=0.0)), learnt.imbalance)

    def _at(self, replies: Replies, weighing: Weighing) -> tuple[OnlineState, FloatArray]:
        learnt = weighing.learnt
        assert learnt is not None
        balance = weighing.state.balance_for(weighing.method.name, self.balance)
        return learnt, learnt.standardised(balance.matrix[replies.rows], balance.mean)


class NoPositiveSumError(InputError):
    """Weights of either sign that sum to nothing: the round is recorded and carries no weight."""


class Normalisation(Protocol):
    """What a round's weights sum to."""

    self_normalised: ClassVar[bool]  # to one in every round
    reads_samples: ClassVar[bool]  # whether it needs clients' sample counts
    reads_total: ClassVar[bool]  # whether it needs those of the whole population

    def applied(
        self, weights: FloatArray, replies: Replies, presence: FloatArray | None
    ) -> FloatArray:
        """Return the weights, (m,).

        ``presence`` (m,) counts each reply as often as it says: with reply probabilities in its
        place weights are those of a large round.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class HorvitzThompson:
    """Weights as they are: unbiased when every probability is right, however small the round."""

    self_normalised: ClassVar = False
    reads_samples: ClassVar = False
    reads_total: ClassVar = False

    def applied(
        self, weights: FloatArray, replies: Replies, presence: FloatArray | None
    ) -> FloatArray:
        """Return the weights."""
        del replies, presence
        return weights


@final
@dataclass(frozen=True, slots=True)
class Hajek:
    """Weights over their sum in the round (W3): stable, biased in small rounds."""

    self_normalised: ClassVar = True
    reads_samples: ClassVar = False
    reads_total: ClassVar = False

    def applied(
        self, weights: FloatArray, replies: Replies, presence: FloatArray | None
    ) -> FloatArray:
        """Return weights that sum to one, (m,)."""
        del replies
        return _over_sum(weights, presence)


@final
@dataclass(frozen=True, slots=True)
class BySamples:
    r"""Weights for the mean over samples instead of clients.

    .. math:: w_i = \frac{n_i w_i'}{\sum_{j \in S} n_j w_j'} \qquad (W8)

    It needs the counts of respondents only. :class:`OverSampleTotal` is the Horvitz–Thompson form,
    which needs those of clients that never enrolled.
    """

    self_normalised: ClassVar = True
    reads_samples: ClassVar = True
    reads_total: ClassVar = False

    def applied(
        self, weights: FloatArray, replies: Replies, presence: FloatArray | None
    ) -> FloatArray:
        """Return weights that sum to one, (m,)."""
        if (replies.sample_counts <= 0).any():
            raise InputError(f"round {replies.index}: a reply without samples has no weight.")
        return _over_sum(replies.sample_counts * weights, presence)


@final
@dataclass(frozen=True, slots=True)
class OverSampleTotal:
    r"""Weights for the mean over samples, in Horvitz–Thompson's form.

    .. math:: w_i = \frac{n_i}{\bar n} w_i', \qquad \bar n = \frac{T}{N}
       = \frac{1}{N} \sum_{j=1}^N n_j \qquad (W22)

    with :math:`w'` the weight for the mean over clients, 1/N included: :math:`n_i / (T \pi_i)`
    where that is :math:`1 / (N \pi_i)`. Unbiased when every probability is right. The total T of
    the population's samples must be known, by a table of everybody or as a target of calibration.
    """

    self_normalised: ClassVar = False
    reads_samples: ClassVar = True
    reads_total: ClassVar = True

    def applied(
        self, weights: FloatArray, replies: Replies, presence: FloatArray | None
    ) -> FloatArray:
        """Return the weights, (m,)."""
        del presence
        if not replies.mean_count > 0.0:
            raise InputError(f"round {replies.index}: the population's samples are not known.")
        out: FloatArray = replies.sample_counts * weights / replies.mean_count
        return out


def _over_sum(raw: FloatArray, presence: FloatArray | None) -> FloatArray:
    """Return weights over their sum in the round."""
    largest = np.abs(raw).max()
    if largest == 0.0:
        return raw  # calibration left every reply without weight: an empty round
    scaled = raw / largest  # huge weights must not overflow their sum
    total = scaled.sum() if presence is None else presence @ scaled
    if not (np.isfinite(total) and total > 0.0):
        raise NoPositiveSumError(
            f"Self-normalised weights need a positive sum; {len(raw)} weights between "
            f"{raw.min():.3g} and {raw.max():.3g} have none."
        )
    weights: FloatArray = scaled / total
    return weights


class Guard(Protocol):
    """A bound on weights that is visible: it returns what it changed.

    One that keeps the sum of weights makes others larger and says so by ``keeps_sum``.
    """

    def applied(self, weights: FloatArray) -> TrimReport | None:
        """Return the weights and what was changed, none if the guard does nothing."""
        ...

    def expected(self, weights: FloatArray, presence: FloatArray) -> FloatArray:
        """Return weights as the guard leaves them in a large round with these replies, (m,)."""
        ...


@final
@dataclass(frozen=True, slots=True)
class NoGuard:
    """Weights as they are."""

    def applied(self, weights: FloatArray) -> TrimReport | None:
        """Return nothing."""
        del weights
        return None

    def expected(self, weights: FloatArray, presence: FloatArray) -> FloatArray:
        """Return the weights."""
        del presence
        return weights


@final
@dataclass(frozen=True, slots=True)
class Trim:
    """Weights cut at a multiple of their mean in the round (W7)."""

    times_mean: float = 20.0

    def __post_init__(self) -> None:
        if not self.times_mean >= 1.0:
            raise InputError(
                f"Trimming below the mean weight is not trimming: {self.times_mean!r} < 1."
            )

    def applied(self, weights: FloatArray) -> TrimReport | None:
        """Return the trimmed weights and what was cut."""
        return trimmed(weights, self.times_mean)

    def expected(self, weights: FloatArray, presence: FloatArray) -> FloatArray:
        """Return weights cut at a multiple of the mean size of a round's weights."""
        cap = self.times_mean * float(presence @ np.abs(weights)) / float(presence.sum())
        return np.clip(weights, -cap, cap)


@final
@dataclass(frozen=True, slots=True)
class Temper:
    r"""Weights drawn together: :math:`w_i' \propto w_i^t` with their sum kept (W19).

    It trades bias for variance, for methods whose augmentation takes most of the bias.
    """

    power: float = 0.75
    keeps_sum: ClassVar = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.power <= 1.0:
            raise InputError(f"Weights are tempered by a power in [0, 1], not {self.power!r}.")

    def applied(self, weights: FloatArray) -> TrimReport | None:
        """Return the tempered weights; none is counted as cut."""
        made = self._tempered(weights, np.ones(len(weights)))
        cap = float(np.abs(made).max(initial=0.0))
        return TrimReport(weights=made, cap=cap, changed=0, mass=0.0)

    def expected(self, weights: FloatArray, presence: FloatArray) -> FloatArray:
        """Return tempered weights of a large round."""
        return self._tempered(weights, presence)

    def _tempered(self, weights: FloatArray, presence: FloatArray) -> FloatArray:
        size = np.abs(weights)
        raised: FloatArray = np.sign(weights) * size**self.power
        total = float(presence @ raised)
        return raised * (float(presence @ weights) / total) if total > 0.0 else weights


@final
@dataclass(frozen=True, slots=True)
class Cap:
    r"""No reply carries more than a share of a round; the others carry what is cut.

    .. math:: |w_i'| \le c \sum_{j \in S} |w_j|, \qquad c = \max(s, 5/m) \qquad (W20)

    with the sum of weights kept; s is ``share``.
    """

    share: float = 0.1
    keeps_sum: ClassVar = True

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise InputError(f"A share must lie in (0, 1], not {self.share!r}.")

    def limit(self, replies: float) -> float:
        """Return the largest share in a round of so many replies."""
        return min(1.0, max(self.share, TIMES_EQUAL_SHARE / max(replies, 1.0)))

    def applied(self, weights: FloatArray) -> TrimReport | None:
        """Return the capped weights and what was cut."""
        return capped(weights, self.limit(len(weights)))

    def expected(self, weights: FloatArray, presence: FloatArray) -> FloatArray:
        """Return weights capped in a large round with these replies."""
        limit = self.limit(float(presence.sum()))
        return capped(weights, limit, presence).weights


@final
@dataclass(frozen=True, slots=True)
class Guards:
    """Several guards, one after the other."""

    guards: tuple[Guard, ...]

    @property
    def keeps_sum(self) -> bool:
        """Whether one of them does."""
        return any(getattr(guard, "keeps_sum", False) for guard in self.guards)

    def applied(self, weights: FloatArray) -> TrimReport | None:
        """Return the weights and what was cut in all."""
        reports = []
        for guard in self.guards:
            report = guard.applied(weights)
            if report is not None:
                weights = report.weights
                reports.append(report)
        if not reports:
            return None
        return TrimReport(
            weights=weights,
            cap=reports[-1].cap,
            changed=sum(report.changed for report in reports),
            mass=sum(report.mass for report in reports),
        )

    def expected(self, weights: FloatArray, presence: FloatArray) -> FloatArray:
        """Return weights as all guards leave them in a large round."""
        for guard in self.guards:
            weights = guard.expected(weights, presence)
        return weights


class Augmentation(Protocol):
    """What the server keeps of updates, beside weights."""

    @property
    def memory(self) -> str:
        """The published rule that keeps something of each client; empty if none."""
        ...

    @property
    def weighs_replies(self) -> bool:
        """Whether replies have weights of their own."""
        ...

    @property
    def regression(self) -> Regression | None:
        """How updates are regressed on balance columns (O20), none if they are not."""
        ...

    @property
    def balance(self) -> str:
        """Population means it needs: ``main``, ``rich``, ``wide``, or none if empty."""
        ...


@final
@dataclass(frozen=True, slots=True)
class NoAugmentation:
    """Nothing: the weighted sum of a round's updates."""

    memory: ClassVar = ""
    weighs_replies: ClassVar = True
    regression: ClassVar = None
    balance: ClassVar = ""


@final
@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Each client's latest update, under its enrollment weight (O5)."""

    memory: ClassVar = "fedvarp"
    weighs_replies: ClassVar = True
    regression: ClassVar = None
    balance: ClassVar = ""


@final
@dataclass(frozen=True, slots=True)
class LatestUpdates:
    """The mean of each client's latest update, under enrollment weights alone (O14)."""

    memory: ClassVar = "mifa"
    weighs_replies: ClassVar = False
    regression: ClassVar = None
    balance: ClassVar = ""


@final
@dataclass(frozen=True, slots=True)
class ControlVariates:
    """Each client's own gradient, under its enrollment weight; updates averaged plainly (O15)."""

    memory: ClassVar = "scaffold"
    weighs_replies: ClassVar = False
    regression: ClassVar = None
    balance: ClassVar = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """A regression of updates on balance columns; weights carry its residuals only (O20)."""

    decay: float = 0.99  # g, by which earlier rounds count less in every round
    few_clients: float = 14.0  # effective clients k in the ridge (k/n)^2 + c q/M on slopes
    few_replies: float = 2.0  # c, for q moments and M replies remembered
    few_products: float = 2.0  # c', that squares and products have more of: c' q/n
    per_moment: float = 10.0  # replies remembered behind each moment that is used
    largest: float = 8.0  # times a mean round's weight, that a reply may have in what is learnt
    adaptive: bool = False  # whether enrollment weights are relied on as updates ask for (O21)
    balance: str = "wide"
    memory: ClassVar = ""
    weighs_replies: ClassVar = True

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise InputError(f"The decay must lie between 0 and 1, not {self.decay!r}.")

    @property
    def regression(self) -> Regression:
        """Itself."""
        return self


BASES: dict[str, Callable[[], Base]] = {
    "equal": Equal,
    "invitation": InverseInvitation,
    "participation": InverseParticipation,
    "inclusion": InverseInclusion,
    "true-inclusion": TrueInclusion,
    "collapsed": CollapsedInclusion,
}
CALIBRATIONS: dict[str, Callable[[], CalibrationRule]] = {
    "none": Uncalibrated,
    "quadratic": lambda: OfEnrolled(Quadratic()),
    "entropy": lambda: OfEnrolled(Entropy()),
    "linear": lambda: OfEnrolled(Linear()),
    "logit": lambda: OfEnrolled(Logit(*LOGIT_BOUNDS)),
    "inverse-logit": lambda: OfEnrolled(InverseLogit()),
    "noise-aware": lambda: OfEnrolled(Entropy(), noise_aware=True),
    "rich-inverse-logit": lambda: OfEnrolled(InverseLogit(), balance="rich"),
    "greg": OfReplies,
    "greg-nonnegative": lambda: OfReplies(nonnegative=True),
    "online": AsYouGo,
    "online-main": lambda: AsYouGo(balance="main"),
}
NORMALISATIONS: dict[str, Callable[[], Normalisation]] = {
    "horvitz-thompson": HorvitzThompson,
    "hajek": Hajek,
    "samples": BySamples,
    "sample-total": OverSampleTotal,
}
GUARDS: dict[str, Callable[..., Guard]] = {
    "none": NoGuard,
    "trim": Trim,
    "temper": Temper,
    "cap": Cap,
}
AUGMENTATIONS: dict[str, Callable[[], Augmentation]] = {
    "none": NoAugmentation,
    "memory": UpdateMemory,
    "latest-updates": LatestUpdates,
    "control-variates": ControlVariates,
    "regression": Regression,
    "adaptive-regression": lambda: Regression(adaptive=True),
}
MEMORIES: dict[str, Augmentation] = {
    made.memory: made for made in (make() for make in AUGMENTATIONS.values()) if made.memory
}  # by the name of the published rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    r"""How large a weight can be, as far as that is known before a round.

    .. math:: |w_i| \le \max(c, e / \pi^{part}_i) \qquad (W17)

    with c ``share`` and e ``factor``; nothing is known before where both are none.
    """

    share: float | None = None
    factor: float | None = None

    @property
    def known(self) -> bool:
        """Whether there is a bound before the round."""
        return self.share is not None or self.factor is not None

    def bound(self, participation_prob: FloatArray) -> FloatArray:
        """Return the largest weight of replies with these probabilities, (m,)."""
        over = (self.factor or 0.0) / participation_prob
        out: FloatArray = np.maximum(self.share or 0.0, over)
        return out if self.known else np.full(len(out), np.inf)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How replies are weighed: a name for five choices."""

    name: str
    base: Base
    calibration: CalibrationRule = field(default_factory=Uncalibrated)
    normalisation: Normalisation = field(default_factory=HorvitzThompson)
    guard: Guard = field(default_factory=NoGuard)
    augmentation: Augmentation = field(default_factory=NoAugmentation)

    def __post_init__(self) -> None:
        both = self.base.uses_enrollment or self.base.probabilities is Probabilities.COLLAPSED
        if self.calibration.corrects_enrollment and both:
            raise InputError(
                f"{self.name}: the calibration corrects enrollment, and the base weight does too. "
                "Use the base participation, or calibrate the replies (greg)."
            )
        guards = self.guard.guards if isinstance(self.guard, Guards) else (self.guard,)
        if not self.calibration.nonnegative and any(isinstance(g, Temper) for g in guards):
            raise InputError(
                f"{self.name}: weights of either sign cannot be tempered. Use the guard trim or "
                "cap, or a calibration without negative weights."
            )
        how = self.augmentation.regression
        if how is not None and how.adaptive:
            self._check_adaptive()
        plain = self.base.probabilities is Probabilities.NONE
        if plain and not self.normalisation.self_normalised:
            raise InputError(
                f"{self.name}: base weights without reply probabilities, equal or by invitation, "
                "have no Horvitz–Thompson form. Use the normalisation hajek."
            )

    def _check_adaptive(self) -> None:
        if not (self.base.uses_enrollment or self.calibration.corrects_enrollment):
            raise InputError(
                f"{self.name}: nothing corrects enrollment, so there is nothing to rely on more or "
                "less. Use the augmentation regression."
            )
        if not self.calibration.nonnegative:
            raise InputError(
                f"{self.name}: weights of either sign cannot be relied on in part. Use the "
                "augmentation regression, or a calibration without negative weights."
            )

    @property
    def needs(self) -> Needs:
        """What must be known of the population."""
        kind = self.base.probabilities
        return Needs(
            method=self.name,
            probabilities=self.base.uses_enrollment and kind is not Probabilities.TRUE,
            truth=kind is Probabilities.TRUE,
            everyone=kind is Probabilities.COLLAPSED,
            size=self.calibration.needs_size,
            balance=frozenset({self.calibration.balance, self.augmentation.balance} - {""}),
            strict=self.calibration.strict,
            takes_base=getattr(self.base, "takes_base", False),
        )

    @property
    def uses_enrollment(self) -> bool:
        """Whether it reads enrollment probabilities."""
        return self.base.uses_enrollment

    @property
    def weighs_enrollment(self) -> bool:
        """Whether each enrolled client stands for others by a weight that is never negative."""
        signed = self.calibration.distance is not None and not self.calibration.nonnegative
        return (self.base.uses_enrollment or self.calibration.corrects_enrollment) and not signed

    def trimmed(self, times_mean: float | None) -> Method:
        """Return the method with weights cut at a multiple of a round's mean; itself if none."""
        return self if times_mean is None else replace(self, guard=Trim(times_mean))

    def strictly(self) -> Method:
        """Return the method for which targets that cannot be met are an error."""
        return replace(self, calibration=self.calibration.strictly())

    def remembering(self, rule: str) -> Method:
        """Return the method with the memory of a published rule in place of its own, if any.

        >>> from fedipw.weighting.methods import METHODS
        >>> METHODS["efficient"].remembering("mifa").augmentation
        LatestUpdates()
        """
        if self.augmentation.regression is not None:
            raise InputError(
                f"{rule} and the regression of {self.name} both decide what is remembered of "
                "updates; keep one."
            )
        return replace(self, name=f"{rule}+{self.name}", augmentation=MEMORIES[rule])

    def of_replies(self) -> Method:
        """Return how a round's replies are weighed: plainly where memory alone carries weights."""
        if self.augmentation.weighs_replies:
            return self
        return replace(
            self, base=Equal(), calibration=Uncalibrated(), normalisation=Hajek(), guard=NoGuard()
        )

    def unguarded(self) -> Method:
        """Return the weights alone, without guard and augmentation, as estimates need them."""
        if isinstance(self.guard, NoGuard) and isinstance(self.augmentation, NoAugmentation):
            return self
        name = f"{self.name}, guard=none, augmentation=none"
        return replace(self, name=name, guard=NoGuard(), augmentation=NoAugmentation())

    def by_samples(self, *, total: bool = False) -> Method:
        """Return the method for the mean over samples instead of clients.

        ``total`` is whether the number of samples in the whole population is known, which
        Horvitz–Thompson forms need.
        """
        if total and not self.normalisation.self_normalised:
            return replace(self, normalisation=OverSampleTotal())
        if not self.normalisation.self_normalised:
            raise InputError(
                f"{self.name} is a Horvitz–Thompson form, and the sample target has none: the "
                "sample counts of clients that never enrolled are unknown. Use "
                f"{self.name}-hajek."
            )
        return replace(self, normalisation=BySamples())

    def at(self, state: EnrollmentState, learnt: OnlineState | None = None) -> Weighing:
        """Return the method for clients that are enrolled, calibrated where it calibrates once.

        ``learnt`` is what a calibration that goes on from round to round knew before.
        """
        found = self.calibration.enrollment_weights(state, self.name)
        return Weighing(
            method=self,
            state=state,
            enrollment_weights=None if found is None else found.weights,
            expected=None if found is None else found.expected,
            learnt=self.calibration.begun(state, self.name, learnt),
            note="" if found is None else found.note,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighing:
    """A method at one time of enrollment: replies in, one number each out, no update ever read."""

    method: Method
    state: EnrollmentState
    enrollment_weights: FloatArray | None = None  # (n,) q, where the enrolled are calibrated
    expected: FloatArray | None = None  # (n,) its mean over enrollment, in simulations
    learnt: OnlineState | None = None  # by calibration as you go
    note: str = ""  # what calibration of the enrolled could not meet

    @property
    def self_normalised(self) -> bool:
        """Whether weights sum to one in every round."""
        return self.method.normalisation.self_normalised

    def knowing(self, before: OnlineState) -> Weighing:
        """Return the same with what was learnt before, under another enrollment."""
        learnt = self.method.calibration.begun(self.state, self.method.name, before)
        return replace(self, learnt=learnt)

    def weights(self, replies: Replies, presence: FloatArray | None = None) -> FloatArray:
        """Return the weight of each reply before the guard, (m,)."""
        return self._unguarded(replies, presence)[0]

    def weighed(self, replies: Replies, reliance: float = 1.0) -> RoundWeights:
        r"""Return the weights of a round's replies, with what was not done and what was cut.

        .. math:: w_i = d_i (w_i^{raw} / d_i)^\Lambda

        before normalisation and guard, with d the weight for the enrolled alone and
        :math:`\Lambda` the ``reliance`` on what corrects enrollment (O21).
        """
        base = self.method.base.weights(replies, self.state)
        raw, note = self.method.calibration.moved(base, replies, self, None)
        within = self.method.base.within(replies, self.state)
        relied = raw if reliance == 1.0 else within * (raw / within) ** reliance
        try:
            weights = self.method.normalisation.applied(relied, replies, None)
        except NoPositiveSumError as error:
            weights, note = np.zeros(len(replies.rows)), str(error)
        if not (weights.any() or note):
            note = "no reply carries weight"
        report = self.method.guard.applied(weights)
        if not self.method.calibration.comparable:
            raw = raw * (len(raw) / raw.sum())
        return RoundWeights(
            replies=replies,
            weights=weights if report is None else report.weights,
            trimming=report,
            raw=raw,
            within=within,
            reliance=reliance,
            clients=self._numbers(reliance) if self.method.augmentation.balance else None,
            imbalance=self.method.calibration.imbalance(self),
            note=note,
        )

    def _numbers(self, reliance: float) -> ClientNumbers:
        """Return how many clients are enrolled and how many they count as."""
        size, inside = self.state.enrolled_size, self.state.enrolled
        standing = self.standing()
        if standing is None:
            return ClientNumbers(size, size, size)
        ones, own = np.ones(int(size)), standing[inside]
        guarded = self.method.guard.expected(own**reliance, ones)
        return ClientNumbers(size, effective_sample_size(own), effective_sample_size(guarded))

    def after(self, replies: Replies) -> Weighing:
        """Return it after a round with these replies, for the next one."""
        if self.learnt is None:
            return self
        base = self.method.base.weights(replies, self.state)
        return replace(self, learnt=self.method.calibration.after(base, replies, self))

    def _unguarded(self, replies: Replies, presence: FloatArray | None) -> tuple[FloatArray, str]:
        base = self.method.base.weights(replies, self.state)
        moved, note = self.method.calibration.moved(base, replies, self, presence)
        return self.method.normalisation.applied(moved, replies, presence), note

    def expected_weights(self, units: Replies, reply_prob: FloatArray) -> FloatArray:
        r"""Return each unit's mean contribution to a round, E[A_i w_i], (n,).

        .. math:: v_i = P(A_i = 1)\, w_i, \qquad
           v_i = \frac{P(A_i = 1)\, w_i}{\sum_j P(A_j = 1)\, w_j}
           \text{ if self-normalised} \qquad (L1)

        Exact where the weight of i depends on i alone; otherwise it is the limit of large rounds.
        ``units`` describes all n units as if all had replied.
        """
        weights = self.method.guard.expected(self.weights(units, reply_prob), reply_prob)
        expected: FloatArray = reply_prob * weights
        return expected

    def over_enrollment(self) -> Weighing:
        """Return it without the chance of one enrollment draw, itself where that is not known."""
        return self if self.expected is None else replace(self, enrollment_weights=self.expected)

    def inverse_enrollment(self) -> FloatArray | None:
        """Return what each enrolled client stands for, (n,), 0 for others; none if not known.

        The calibrated weight, else the inverse of the enrollment probability.
        """
        if self.enrollment_weights is not None:
            return np.where(self.state.enrolled, self.enrollment_weights, 0.0)
        prob, inside = self.state.prob, self.state.enrolled
        if np.isnan(prob[inside]).any():
            return None
        out = np.zeros(len(prob))
        out[inside] = self.state.base_of(inside) / prob[inside]
        return out

    def standing(self) -> FloatArray | None:
        """Return what each client stands for, (n,), none if not known.

        The inverse of enrollment, or what calibration as you go has learnt.
        """
        if self.learnt is not None:
            return self.method.calibration.standing(self)
        return self.inverse_enrollment()

    def influence(self) -> Influence:
        """Return how large a weight can be, as far as that is known before a round."""
        base, calibration = self.method.base, self.method.calibration
        if self.self_normalised:
            return Influence(share=1.0) if calibration.nonnegative else Influence()
        raised = getattr(self.method.guard, "keeps_sum", False)  # others carry what is cut
        if raised or (calibration.each_round and not calibration.nonnegative):
            return Influence()
        largest = base.largest(self.state)
        if self.enrollment_weights is not None:
            own = self.state.base_of(slice(None))
            largest = largest * self.state.enrolled_mass * np.abs(self.enrollment_weights) / own
        if self.method.normalisation.reads_total:
            largest = largest * (self.state.sample_counts / self.state.mean_count)
        factor = float(largest[self.state.enrolled].max())
        return Influence(share=1.0 if calibration.each_round else None, factor=factor)
