r"""Metrics of the target population from secure sums, with intervals.

A respondent holds its balance columns b and its own metric values. The server sends
:math:`\lambda`; the respondent computes its weight and adds weight, weighted columns and weighted
values to a secure sum. Newton's method moves :math:`\lambda` until the weighted respondents have
the population's means: the entropy calibration that evaluation uses in the open. One more sum, of
powers of what each respondent adds to the error, gives standard error, degrees of freedom,
skewness and effective number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from fedipw.errors import InputError
from fedipw.evaluation.estimators import EVERYONE, Estimate
from fedipw.evaluation.intervals import Evidence, Interval, Jeffreys, StudentT
from fedipw.evaluation.phases import inverse_of
from fedipw.evaluation.sample import remaining
from fedipw.numerics.checks import check_positive, check_rows
from fedipw.numerics.newton import NewtonResult, Sums, newton_minimum
from fedipw.private.sums import Part, Parts, SecureSums, SumRequest

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

CALIBRATION: Final = "metric-calibration"  # purposes of these sums
ERRORS: Final = "metric-errors"
_BALANCED: Final = 1e-7  # largest standardised miss of a calibration that has converged
_RESOLUTION: Final = 0.01  # share of a sum of powers that may be rounding
_NARROW: Final = 50.0  # times the root mean square influence, where the first bound was too wide
_ATTEMPTS: Final = 6
_TYPICAL: Final = 100.0  # times the mean influence, up to which one is sent at first
_WIDEST: Final = 20.0  # times the range of a metric; leverages can raise an influence tenfold


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateMetric:
    """A metric that clients report: its range, and whether it is a share.

    Values outside of the range are cut to it by the client, and counted. Of a share, with values
    of 0 and 1 or between, the interval stays within 0 and 1.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    share: bool = False

    def __post_init__(self) -> None:
        if not (np.isfinite([self.low, self.high]).all() and self.low < self.high):
            raise InputError(f"{self.name}: a range needs a low end below its high end.")
        if self.share and (self.low, self.high) != (0.0, 1.0):
            raise InputError(f"{self.name}: a share lies between 0 and 1.")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricPlan:
    r"""What every respondent is told: the balance map's means and scale, bounds, and metrics.

    All of it is public, and none of it comes from a respondent.
    """

    metrics: tuple[PrivateMetric, ...]
    mean: FloatArray  # mu_b, (q,)
    scale: FloatArray  # (q,) by which balance columns are standardised
    largest_base: float = 1.0  # of a client: its replies, each over its invitation probability
    reach: float = 6.0  # standardised columns are cut beyond
    largest_exponent: float = 15.0  # of lambda'b; words of 64 bits have room for it

    def __post_init__(self) -> None:
        check_rows(len(self.mean), scale=self.scale)
        for name in ("largest_base", "reach", "largest_exponent"):
            check_positive(getattr(self, name), name)
        if not self.metrics:
            raise InputError("There is no metric to report.")

    def public(self, **more: Any) -> dict[str, Any]:
        """Return plain values for a request."""
        return {
            "mean": self.mean.tolist(), "scale": self.scale.tolist(), "reach": self.reach,
            "low": [m.low for m in self.metrics], "high": [m.high for m in self.metrics],
            "largest_base": self.largest_base, "largest_exponent": self.largest_exponent, **more,
        }  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnReplies:
    """What one respondent knows: its balance columns, and the values of its replies."""

    balance: FloatArray  # b, (q,) in their own units
    values: FloatArray  # (k, K), a row for each reply and a column for each metric
    base: FloatArray  # d, (k,): 1 over the invitation probability, or 1

    def __post_init__(self) -> None:
        check_rows(len(self.values), base=self.base)
        finite = all(np.isfinite(a).all() for a in (self.balance, self.values, self.base))
        if not (finite and (self.base > 0.0).all() and len(self.base)):
            raise InputError("A respondent needs at least one reply, of finite values.")


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """A respondent's numbers in the request's units."""

    b: FloatArray  # (q,)
    weight: float  # e = D exp(lambda'b)
    values: FloatArray  # mean of the client's values by its base weights, (K,)
    cut: int

    @classmethod
    def of(cls, public: Mapping[str, Any], own: OwnReplies) -> _Own:
        at = {k: np.array(public[k], dtype=np.float64) for k in ("mean", "scale", "low", "high")}
        standard = (own.balance - at["mean"]) / at["scale"]
        b = np.clip(standard, -public["reach"], public["reach"])
        values = np.clip(own.values, at["low"], at["high"])
        count, most = float(own.base.sum()), float(public["largest_base"])
        base = min(count, most)
        limit = float(public["largest_exponent"])
        odds = float(b @ np.array(public["lambda"], dtype=np.float64))
        cut = np.count_nonzero(b != standard) + np.count_nonzero(values != own.values)
        cut += int(count > most) + int(abs(odds) > limit)
        weight = base * float(np.exp(np.clip(odds, -limit, limit)))
        return cls(b, weight, own.base @ values / count, int(cut))


def _calibration_parts(public: Mapping[str, Any]) -> Parts:
    q, low, high = len(public["mean"]), np.array(public["low"]), np.array(public["high"])
    most = float(public["largest_base"] * np.exp(public["largest_exponent"]))
    reach, value = float(public["reach"]), float(max(np.abs(low).max(), np.abs(high).max()))
    return Parts(
        weight=Part(1, most),
        first=Part(q, most * reach),
        second=Part(q * (q + 1) // 2, most * reach**2),
        values=Part(len(low), most * value),
        crossed=Part(q * len(low), most * reach * value),
        replies=Part(1, _MOST_REPLIES),
        cut=Part(1, _MOST_REPLIES),
    )


_MOST_REPLIES: Final = 2.0**20  # of one client


def calibration_contribution(request: SumRequest, own: OwnReplies) -> FloatArray:
    r"""Return what a respondent adds to a step of calibration.

    .. math:: e_i = D_i \exp(\lambda'b_i), \qquad
       \big(e_i,\; e_i b_i,\; e_i b_i b_i',\; e_i \bar y_i,\; e_i b_i \bar y_i'\big) \qquad (N2)

    with :math:`D_i` the sum of the base weights of its replies and :math:`\bar y_i` the mean of its
    values by them: a client is one cluster, however often it replied.

    Examples
    --------
    >>> plan = MetricPlan(metrics=(PrivateMetric(name="loss"),), mean=np.zeros(1),
    ...                   scale=np.ones(1))
    >>> own = OwnReplies(balance=np.array([2.0]), values=np.array([[0.5]]), base=np.ones(1))
    >>> request = SumRequest(purpose=CALIBRATION, length=7, public=plan.public(**{"lambda": [0.0]}))
    >>> added = calibration_contribution(request, own)
    >>> (added[:2] * np.exp(15) * [1.0, 6.0]).round(9)  # e and e b
    array([1., 2.])
    """
    me = _Own.of(request.public, own)
    b, e = me.b, me.weight
    return _calibration_parts(request.public).packed(
        weight=np.array([e]),
        first=e * b,
        second=e * np.outer(b, b)[np.tril_indices(len(b))],
        values=e * me.values,
        crossed=e * np.outer(b, me.values),
        replies=np.array([float(len(own.base))]),
        cut=np.array([float(me.cut)]),
    )


def _error_parts(public: Mapping[str, Any]) -> Parts:
    unit = np.array(public["unit"])  # (K,), the bound on an influence
    powers = {
        f"power{k}-{j}": Part(1, float(unit[j] ** k)) for k in (2, 3, 4) for j in range(len(unit))
    }
    return Parts(share=Part(1, 1.0), events=Part(2 * len(unit), 1.0), **powers)


def error_contribution(request: SumRequest, own: OwnReplies) -> FloatArray:
    r"""Return what a respondent adds to the sums behind standard errors.

    .. math:: \phi_i = \frac{s_i (\bar y_i - \hat\mu)}{1 - s_i}
       - \frac{s_i\, \tilde b_i'B}{1 - h_i}, \qquad s_i = e_i \Big/ \sum_j e_j, \quad
       h_i = e_i \tilde b_i' G^{-1} \tilde b_i, \qquad
       \big(s_i^2,\; \phi_i^2,\; \phi_i^3,\; \phi_i^4\big) \qquad (N3)

    with :math:`\tilde b = (b, 1)`, :math:`G = \sum_j e_j \tilde b_j \tilde b_j'` and B the slopes
    of the values on the columns: (E23) for calibrated respondents. It also says whether it has a
    value above 0, and one below 1.
    """
    public = request.public
    me = _Own.of(public, own)
    full, inverse = np.append(me.b, 1.0), np.array(public["inverse"])
    share, leverage = me.weight / public["total"], me.weight * float(full @ inverse @ full)
    apart = me.values - np.array(public["estimate"])
    fitted = full @ np.array(public["slopes"])  # (K,)
    influence = share * apart / remaining(share) - share * fitted / remaining(leverage)
    cut = np.clip(own.values, public["low"], public["high"])
    events = np.concatenate([(cut > 0.0).any(axis=0), (cut < 1.0).any(axis=0)])
    powers = {
        f"power{k}-{j}": np.array([influence[j] ** k])
        for k in (2, 3, 4) for j in range(len(influence))
    }  # fmt: skip
    return _error_parts(public).packed(
        share=np.array([min(share, 1.0) ** 2]), events=events.astype(np.float64), **powers
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SummedEvidence(Evidence):
    """Evidence whose units are known by sums of powers alone.

    The largest share of one unit in the sum of squares is no sum. It is at most the root of the sum
    of the squared shares, and that stands in its place: a warning may be one too many.
    """

    cubes: float
    fourths: float
    units: FloatArray = field(default_factory=lambda: np.empty(0))

    @property
    def skewness(self) -> float:
        """Skewness (E41) of the estimate."""
        return self.cubes / self.se**3 if self.se > 0.0 else 0.0

    @property
    def largest(self) -> float:
        """Upper bound on the largest share of one unit."""
        return float(np.sqrt(max(self.fourths, 0.0)) / self.se**2) if self.se > 0.0 else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrivateMeans:
    """Metrics of the target population by secure sums, and how they came about."""

    estimates: Mapping[str, Estimate]  # by metric
    coefficients: FloatArray  # lambda, (q,), a start for the next evaluation
    imbalance: float  # largest standardised miss that a regression then took off
    exchanges: int  # secure sums
    respondents: tuple[int, ...]  # in each of them
    cut: int  # values, columns and exponents that clients cut to their bounds


@final
class _Steps:
    """The dual of entropy calibration over secure sums, and the latest of them."""

    def __init__(self, sums: SecureSums, plan: MetricPlan) -> None:
        self._sums, self._plan = sums, plan
        self.respondents: list[int] = []
        self.found: dict[str, FloatArray] = {}
        self.value_error = 0.0

    def at(self, coefficients: FloatArray) -> Sums:
        r"""Return :math:`\log \sum e_i`, its gradient, the miss, and its Hessian."""
        public = self._plan.public(**{"lambda": coefficients.tolist()})
        parts = _calibration_parts(public)
        result = self._sums.sum(SumRequest(purpose=CALIBRATION, length=parts.length, public=public))
        self.found, q = parts.unpacked(result.total), len(coefficients)
        changed = self.respondents and self.respondents[-1] != result.contributors
        self.respondents.append(result.contributors)
        total = float(self.found["weight"][0])
        most = self._plan.largest_base * np.exp(self._plan.largest_exponent)
        self.value_error = np.inf if changed else 2.0 * result.error * most / total
        mean, square = self.found["first"] / total, np.zeros((q, q))
        square[np.tril_indices(q)] = self.found["second"] / total
        hessian = square + np.tril(square, -1).T - np.outer(mean, mean)
        return Sums(float(np.log(total)), mean, hessian)

    def regression(self) -> tuple[FloatArray, FloatArray, float]:
        """Return G^-1 of (N3), coefficients of the values on (b, 1), (q + 1, K), and the total."""
        found, total = self.found, float(self.found["weight"][0])
        q, size = len(found["first"]), len(found["values"])
        gram = np.zeros((q + 1, q + 1))
        gram[np.tril_indices(q)] = found["second"]
        gram[-1, :-1] = found["first"]
        gram = gram + np.tril(gram, -1).T
        gram[-1, -1] = total
        right = np.vstack([found["crossed"].reshape(q, size), found["values"]])
        inverse = inverse_of(gram)
        return inverse, inverse @ right, total


def private_means(
    sums: SecureSums,
    plan: MetricPlan,
    *,
    start: FloatArray | None = None,
    confidence: float = 0.95,
    max_exchanges: int = 20,
) -> PrivateMeans:
    r"""Estimate metrics of the target population from respondents that show nothing of themselves.

    Respondents are calibrated to the population's means (N2). The estimate is the constant of the
    regression of values on b with weights e,

    .. math:: \hat\mu = \big[G^{-1} \sum_i e_i \tilde b_i \bar y_i\big]_{q + 1}
       = \frac{\sum_i e_i \bar y_i}{\sum_i e_i} \;\text{ where }\; \sum_i e_i b_i = 0, \qquad
       \hat V = \sum_i \phi_i^2, \quad \nu = \hat V^2 \Big/ \sum_i \phi_i^4 \qquad (N4)

    It is the mean that :func:`~fedipw.evaluation.estimators.population_means` gives for the pooled
    respondents, with the same standard error. The constant takes off what is left of an imbalance,
    should respondents drop out between two sums. Intervals are Jeffreys' for shares, Student's t
    elsewhere: a bootstrap needs the clients one by one.

    Parameters
    ----------
    sums
        Over the respondents of an evaluation, for :data:`CALIBRATION` and :data:`ERRORS`.
    plan
        Balance means, bounds and metrics.
    start
        First :math:`\lambda`, (q,), such as that of training; it saves exchanges.
    confidence
        Of the intervals.
    max_exchanges
        Limit on Newton steps.

    Examples
    --------
    >>> from functools import partial
    >>> from fedipw.private.sums import LocalSums
    >>> clients = []
    >>> for k in range(40):  # too many with b = 1, who have the larger values
    ...     own = OwnReplies(balance=np.array([float(k % 4 > 0)]), base=np.ones(1),
    ...                      values=np.array([[0.2 + 0.5 * (k % 4 > 0) + 0.001 * k]]))
    ...     clients.append({CALIBRATION: partial(calibration_contribution, own=own),
    ...                     ERRORS: partial(error_contribution, own=own)})
    >>> plan = MetricPlan(metrics=(PrivateMetric(name="loss"),), mean=np.array([0.5]),
    ...                   scale=np.array([0.5]))
    >>> found = private_means(LocalSums(clients, minimum=10, bits=64), plan)
    >>> round(found.estimates["loss"].estimate, 3), found.respondents[0]
    (0.469, 40)
    """
    if not 0.0 < confidence < 1.0:
        raise InputError(f"A confidence lies between 0 and 1, not {confidence}.")
    q, steps = len(plan.mean), _Steps(sums, plan)
    first = np.zeros(q) if start is None else np.array(start, dtype=np.float64)
    found: NewtonResult = newton_minimum(
        steps.at, first, gradient_tol=_BALANCED, max_iterations=max_exchanges,
        value_error=lambda: steps.value_error,
    ).checked()  # fmt: skip
    inverse, slopes, total = steps.regression()
    estimate = slopes[-1].copy()
    fitted = slopes.copy()
    fitted[-1] -= estimate  # of the values less their mean
    public = plan.public(
        **{"lambda": found.point.tolist()}, total=total, estimate=estimate.tolist(),
        slopes=fitted.tolist(), inverse=inverse.tolist(),
    )  # fmt: skip
    errors, exchanges = _errors(sums, plan, public, steps.respondents[-1])
    cut = round(float(steps.found["cut"][0]))
    replies = round(float(steps.found["replies"][0]))
    lines = {}
    for j, metric in enumerate(plan.metrics):
        square, cube, fourth = (float(errors.found[f"power{k}-{j}"][0]) for k in (2, 3, 4))
        events = errors.found["events"].reshape(2, -1)[:, j].round()
        known = SummedEvidence(
            estimate=_inside(metric, float(estimate[j])),
            se=float(np.sqrt(max(square, 0.0))),
            freedom=square**2 / fourth if fourth > 0.0 else 1.0,
            confidence=confidence,
            replied=errors.contributors,
            effective=1.0 / float(errors.found["share"][0]),
            events=int(events.min()) if metric.share else None,
            cubes=cube,
            fourths=fourth,
        )
        kind: Interval = Jeffreys() if metric.share else StudentT()
        lines[metric.name] = Estimate(
            group=EVERYONE, estimator="calibrated", estimate=known.estimate, confidence=confidence,
            effective_sample_size=known.effective, clients=errors.contributors, replies=replies,
        ).with_interval(known, kind)  # fmt: skip
    return PrivateMeans(
        estimates=lines,
        coefficients=found.point,
        imbalance=float(np.abs(steps.found["first"] / total).max(initial=0.0)),
        exchanges=len(steps.respondents) + exchanges,
        respondents=(*steps.respondents, errors.contributors),
        cut=cut,
    )


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Errors:
    found: Mapping[str, FloatArray]
    contributors: int


def _errors(
    sums: SecureSums, plan: MetricPlan, public: Mapping[str, Any], respondents: int
) -> tuple[_Errors, int]:
    """Return the sums of (N3), asked for again where their unit was too small or too large."""
    ranges = np.array([m.high - m.low for m in plan.metrics])
    unit = min(_TYPICAL / respondents, _WIDEST) * ranges
    for exchanges in range(1, _ATTEMPTS + 1):
        here = {**public, "unit": unit.tolist()}
        parts = _error_parts(here)
        result = sums.sum(SumRequest(purpose=ERRORS, length=parts.length, public=here))
        if result.clipped:
            unit = np.minimum(10.0 * unit, _WIDEST * ranges)
            continue
        found = parts.unpacked(result.total)
        finer = _finer(found, unit, result.error, result.contributors)
        if np.array_equal(finer, unit):
            return _Errors(found, result.contributors), exchanges
        unit = finer
    raise InputError(
        f"No unit was found in {_ATTEMPTS} sums in which the numbers behind a standard error are "
        "neither cut nor rounded away: a client does not follow the plan, or has nearly all of the "
        "weight."
    )


def _finer(
    found: Mapping[str, FloatArray], unit: FloatArray, error: float, clients: int
) -> FloatArray:
    """Return units (K,) in which sums of powers are more than rounding, the same if they are."""
    out = unit.copy()
    for j, bound in enumerate(unit):
        square, fourth = (float(found[f"power{k}-{j}"][0]) / bound**k for k in (2, 4))
        if square <= error or error <= _RESOLUTION * fourth:
            continue  # all of zero, but for rounding; or well above it
        out[j] = bound * min(_NARROW * np.sqrt(square / clients), 1.0)
        if out[j] > 0.5 * bound:
            raise InputError(
                f"The rounding of secure sums is more than {_RESOLUTION:.0%} of what degrees of "
                "freedom rest on: use words of 64 bits."
            )
    return out


def _inside(metric: PrivateMetric, estimate: float) -> float:
    """Return an estimate; one of a share that a regression put outside of 0 to 1 has none."""
    if metric.share and not -_BALANCED <= estimate <= 1.0 + _BALANCED:
        raise InputError(f"{metric.name}: the estimate {estimate:.4g} of a share is not one.")
    return min(max(estimate, 0.0), 1.0) if metric.share else estimate
