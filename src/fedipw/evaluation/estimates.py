"""Means over the target population from replies: estimators, subgroups, standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

import numpy as np
from scipy.special import stdtrit

from fedipw.errors import InputError
from fedipw.evaluation.sums import client_sums, inverse_of
from fedipw.numerics.checks import check_positive, check_rows
from fedipw.weighting.functions import effective_sample_size

if TYPE_CHECKING:
    from fedipw.evaluation.twophase import TwoPhase
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray

EVERYONE: Final = "everyone"
CLIENTS_PER_TERM = 5  # that replied, behind each column of a regression
SMALLEST_GROUP = 2  # clients that replied, below which there is no standard error
_ROUNDING = 1e-13  # of the largest value: standard errors below it are 0


class Linear(NamedTuple):
    """An estimate, and values u of the replies whose weighted sum has its error."""

    estimate: float
    values: FloatArray  # (m,)
    leverage: FloatArray  # (n,) how much each client moves the mean its u are taken from


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


class Estimator(Protocol):
    """A mean over a group of the population."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        ...

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the estimate and its linearised values; raise InputError if there is none."""
        ...

    def part(self, chosen: BoolArray) -> Estimator:
        """Return the same for some of the replies, (m,)."""
        ...


@final
@dataclass(frozen=True, slots=True)
class HorvitzThompsonMean:
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

    def part(self, chosen: BoolArray) -> HorvitzThompsonMean:
        """Return itself."""
        del chosen
        return self


@final
@dataclass(frozen=True, slots=True, eq=False)
class HajekMean:
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
        return Linear(estimate, flags * (values - estimate) / total, shares)

    def part(self, chosen: BoolArray) -> HajekMean:
        """Return the mean with the counts of some replies."""
        return self if self.counts is None else HajekMean(self.counts[chosen])


@final
@dataclass(frozen=True, slots=True, eq=False)
class GregMean:
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
        return Linear(estimate, u, np.minimum(leverage, 1.0))

    def part(self, chosen: BoolArray) -> GregMean:
        """Return itself."""
        del chosen
        return self

    def _columns(self, sample: TwoPhase) -> FloatArray:
        check_rows(sample.clients, balance=self.balance)
        apart = self.balance - self.mean
        scale = apart.std(axis=0)
        b = apart / np.where(scale > 0.0, scale, 1.0)
        return np.column_stack([b, np.ones(len(b))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over a group of the population, and how far to trust it."""

    group: str
    estimator: str
    estimate: float
    se: float  # design-based (E23)
    se_superpopulation: float | None  # (E24)
    freedom: float  # degrees of freedom of the interval (E29)
    low: float
    high: float
    confidence: float
    effective_sample_size: float  # of the clients' weights, (W10)
    clients: int  # of the group that replied
    replies: int
    reason: str = ""  # why numbers are missing


def population_means(
    sample: TwoPhase,
    values: FloatArray,
    estimators: Sequence[Estimator],
    groups: Sequence[Group] = (Group(),),
    *,
    confidence: float = 0.95,
) -> tuple[Estimate, ...]:
    r"""Estimate the mean of a metric over the population and its groups.

    The mean is over clients and rounds, each client counting alike; y is what a client would have
    reported in a round, whether it replied or not. The interval is
    :math:`\hat\mu \pm t\, \hat V^{1/2}` with the design-based variance (E23) of u and Student's
    t of the degrees of freedom (E29).

    Parameters
    ----------
    sample
        The replies and both phases.
    values
        y of the replies, (m,).
    estimators
        Which means: :class:`HorvitzThompsonMean`, :class:`HajekMean`, :class:`GregMean`.
    groups
        Parts of the population; everyone by default.
    confidence
        Of the intervals.

    Examples
    --------
    >>> from fedipw.evaluation.stages import KnownEnrollment
    >>> from fedipw.evaluation.twophase import TwoPhase
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
    pairs = [(group, estimator) for group in groups for estimator in estimators]
    lines: list[Estimate] = []
    for first in range(0, len(pairs), sample.together):
        lines += _lines(sample, values, pairs[first : first + sample.together], confidence)
    return tuple(lines)


def _lines(
    sample: TwoPhase,
    values: FloatArray,
    pairs: Sequence[tuple[Group, Estimator]],
    confidence: float,
) -> list[Estimate]:
    """Return some of the estimates; what they need for each reply is gone with them."""
    made = [_attempt(sample, values, estimator, group) for group, estimator in pairs]
    tiny = (_ROUNDING * float(np.abs(values).max())) ** 2
    right = [linear for linear, _ in made if linear is not None]
    u = np.column_stack([linear.values for linear in right]) if right else np.empty((0, 0))
    leverage = np.column_stack([linear.leverage for linear in right]) if right else u
    made = [(linear and linear._replace(values=u[:0, 0]), reason) for linear, reason in made]
    del right  # each has a number for every reply, as u has
    errors = iter(_errors(sample, u, leverage, tiny))
    return [
        _line(sample, group, estimator.name, linear, next(errors) if linear else _NONE, reason,
              confidence)
        for (linear, reason), (group, estimator) in zip(made, pairs, strict=True)
    ]  # fmt: skip


class _Error(NamedTuple):
    design: float
    freedom: float
    wide: float | None


_NONE = _Error(np.nan, np.nan, None)


def _errors(sample: TwoPhase, u: FloatArray, leverage: FloatArray, tiny: float) -> list[_Error]:
    if not u.size:
        return []
    found = sample.variance(u, leverage)
    wide = found.superpopulation
    return [
        _Error(float(v) if abs(v) > tiny else 0.0, float(f), None if wide is None else wide[k])
        for k, (v, f) in enumerate(zip(found.variance, found.freedom, strict=True))
    ]


def _attempt(
    sample: TwoPhase, values: FloatArray, estimator: Estimator, group: Group
) -> tuple[Linear | None, str]:
    if not group.flags(sample).any():
        return None, "nobody of the group replied"
    try:
        return estimator.linear(sample, values, group), ""
    except InputError as error:
        return None, str(error)


def _line(  # noqa: PLR0917
    sample: TwoPhase,
    group: Group,
    estimator: str,
    linear: Linear | None,
    error: _Error,
    reason: str,
    confidence: float,
) -> Estimate:
    inside = group.flags(sample) > 0.0
    clients = client_sums(sample.client[inside], sample.weights[inside], sample.clients)
    seen = len(np.unique(sample.client[inside]))
    if seen < SMALLEST_GROUP and linear is not None:
        error, reason = _NONE, f"{seen} client replied: no standard error"
    elif error.design < 0.0:
        reason = "the design-based variance came out negative: "
        reason += "there is no other" if error.wide is None else "this is the superpopulation's"
        error = error._replace(design=np.nan if error.wide is None else max(error.wide, 0.0))
    mean, se = np.nan if linear is None else linear.estimate, float(np.sqrt(error.design))
    reach = float(stdtrit(max(error.freedom, 1.0), 0.5 + 0.5 * confidence)) * se
    return Estimate(
        group=group.name,
        estimator=estimator,
        estimate=mean,
        se=se,
        se_superpopulation=None if error.wide is None else float(np.sqrt(max(error.wide, 0.0))),
        freedom=error.freedom,
        low=mean - reach,
        high=mean + reach,
        confidence=confidence,
        effective_sample_size=effective_sample_size(clients) if clients.any() else 0.0,
        clients=seen,
        replies=int(inside.sum()),
        reason=reason,
    )
