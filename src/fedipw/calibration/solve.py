"""Calibration: weights on enrolled clients whose means are the population's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from fedipw.calibration.design import (
    SUBSAMPLE,
    BalanceDesign,
    design_of,
    gram,
    independence,
    subsample,
    variation,
)
from fedipw.calibration.distances import Distance, Entropy, Family, InverseLogit, Quadratic
from fedipw.calibration.dual import DualProblem, DualResult, Status, dual_minimum
from fedipw.calibration.feasibility import ADVICE, VIOLATION, at_the_border, explain, infeasible
from fedipw.errors import InfeasibleError, InputError, NotConvergedError
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.numerics.checks import LARGEST, SMALLEST, check_magnitude, check_positive, some
from fedipw.numerics.dual import CLIPPED, EXPONENTIAL, LOGISTIC

TYPICAL_SHIFT = 0.55  # of population means from the enrolled clients', in standard deviations
RARE = 10  # enrolled clients below which a level may be called rare
RARE_TIMES = 2.0  # its share among them, which it must stand for more than to be called so
FEW = (0.1, 10.0)  # share, and number, of effective clients that calibration must leave


@final
@dataclass(frozen=True, slots=True)
class Box:
    r"""Soft calibration: :math:`|\sum_i q_i b_{ij} - \mu_j| \le \text{width}\; sd(b_j)` (C7)."""

    width: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.width <= LARGEST:
            raise InputError(
                f"A slack must be 0 or more, and {LARGEST:g} at most, not {self.width!r}."
            )


@final
@dataclass(frozen=True, slots=True)
class Ridge:
    r"""Soft calibration: misses cost instead of being forbidden.

    .. math:: \min \frac1n \sum_i \phi(g_i) + \frac{1}{2\,\text{penalty}}
       \sum_j \left(\frac{\sum_i q_i b_{ij} - \mu_j}{sd(b_j)}\right)^2 \qquad (C8)

    A small penalty parameter is near exact calibration, a large one near the base weights.
    """

    penalty: float

    def __post_init__(self) -> None:
        check_positive(self.penalty, "penalty")


Slack = Box | Ridge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """Calibrated weights and everything needed to judge them."""

    weights: FloatArray  # q, (n,), sum to 1
    ratio: FloatArray  # weight * N / base, (n,)
    population_size: float  # N
    names: tuple[str, ...]
    given: FloatArray  # targets as given, (q,)
    target: FloatArray  # what was aimed at, (q,): drawn to the enrolled where errors were given
    achieved: FloatArray  # weighted means, (q,)
    deviation: FloatArray  # standard deviations of the columns, (q,)
    multipliers: FloatArray  # lambda in units of b, the constant last, (q + 1,)
    iterations: int
    status: Status
    dropped: dict[str, str]  # columns that say nothing new, with the reason
    rare: dict[str, float]  # indicators that few enrolled clients carry (C15), with their share
    slack: Slack | None
    rule: Distance | InverseLogit
    share: FloatArray  # of base weight, (n,) or (1,) where all are alike
    notes: tuple[str, ...] = ()  # what was done to the targets before

    @property
    def distance(self) -> float:
        """Base-weighted mean of the cost of the ratios: how far the weights had to go."""
        cost = self.rule.cost(self.ratio)
        return float(self.share @ cost if len(self.share) > 1 else cost.mean())

    def weights_at(self, balance: FloatArray) -> FloatArray:
        """Return the weight a client with these columns (m, q) and base weight 1 would have, (m,).

        For the enrolled themselves, without base weights, it is their weight.
        """
        u = balance @ self.multipliers[:-1] + self.multipliers[-1]
        return self.rule.ratio(u) / self.population_size

    @property
    def violation(self) -> FloatArray:
        """Miss of each constraint in standard deviations, (q,); 0 for a constant column."""
        scale = np.where(self.deviation > 0.0, self.deviation, np.inf)
        miss: FloatArray = np.abs(self.achieved - self.target) / scale
        return miss

    @property
    def largest_violation(self) -> float:
        """The largest miss, in standard deviations."""
        return float(self.violation.max(initial=0.0))

    @property
    def negative(self) -> int:
        """Number of negative weights (the linear distance only)."""
        return int((self.weights < 0.0).sum())

    @property
    def effective_sample_size(self) -> float:
        """Kish's effective number of enrolled clients (W10)."""
        return float(self.weights.sum() ** 2 / (self.weights**2).sum())

    def warnings(self) -> tuple[str, ...]:
        r"""Return whether targets are nearly out of reach, by the clients that are left to count.

        .. math:: n_{eff}(q) < \max\big(n_{eff}(d)/10,\; \min(10,\, n_{eff}(d)/2)\big) \qquad (C14)

        with Kish's effective numbers of the weights and of the base weights (W10): a tenth of the
        clients, or ten of them, must be left. The target named is that whose multiplier, in
        standard deviations, is largest.
        """
        base = 1.0 / (self.share**2).sum() if len(self.share) > 1 else float(len(self.weights))
        least, left = effective_needed(base), self.effective_sample_size
        if left >= least:
            return ()
        pull = np.abs(self.multipliers[:-1]) * self.deviation
        text = (
            f"Warning: the targets are nearly infeasible. Calibration leaves {left:.1f} effective "
            f"clients of {base:.1f}, fewer than {least:.1f}, and {self.weights.max():.1%} of the "
            f"weight to one of them; {self.names[int(pull.argmax())]} pulls most."
        )
        return (text,)


def effective_needed(base: float) -> float:
    """Return the effective clients below which targets are nearly infeasible (C14).

    >>> effective_needed(500.0), effective_needed(40.0), effective_needed(6.0)
    (50.0, 10.0, 3.0)
    """
    share, number = FEW
    return max(share * base, min(number, base / 2.0))


def calibrated(
    balance: FloatArray | BalanceDesign,
    target: ArrayLike,
    *,
    distance: Distance | InverseLogit | None = None,
    base: ArrayLike | None = None,
    population_size: float | None = None,
    slack: Slack | None = None,
    se: ArrayLike | None = None,
    names: Sequence[str] | None = None,
) -> Calibration:
    r"""Weights nearest to the base weights that reproduce population means.

    .. math:: \min_q \sum_i d_i\, \phi\!\left(\frac{N q_i}{d_i}\right)
       \quad \text{s.t.} \quad \sum_i q_i = 1, \;\; \sum_i q_i b_i = \mu_b. \qquad (C0)

    Parameters
    ----------
    balance
        Balance columns b of the enrolled clients, (n, q), or a design such as ``Margins``.
    target
        Population means, (q,).
    distance
        ``Quadratic`` (default), ``Entropy``, ``Logit``, ``Linear`` or ``InverseLogit``.
    base
        Base weights d, (n,); all 1 by default.
    population_size
        N; the sum of the base weights by default. Bounds are on N q / d.
    slack
        ``Box`` or ``Ridge`` for soft calibration; exact by default.
    se
        Standard errors of the targets, (q,): noisy ones are trusted less (C10).
    names
        Names of the columns, for messages.

    Raises
    ------
    InfeasibleError
        If no weights meet the targets, with the constraints in conflict and the nearest that can be
        met.

    Examples
    --------
    >>> ages = np.array([[20.0], [30.0], [60.0]])
    >>> result = calibrated(ages, [45.0], distance=Entropy(), names=["age"])
    >>> result.weights.round(4), result.status.value
    (array([0.1889, 0.2482, 0.563 ]), 'converged')
    >>> calibrated(ages, [70.0], names=["age"])
    Traceback (most recent call last):
    ...
    fedipw.errors.InfeasibleError: No weights on the 3 enrolled clients meet the targets. In ...
    """
    design = design_of(balance, names)
    wanted = _checked_target(design, target)
    rule = Quadratic() if distance is None else distance
    if not isinstance(rule, Distance | InverseLogit):
        raise InputError(f"distance must be one such as Entropy(), not {rule!r}.")
    if slack is not None and not isinstance(slack, Box | Ridge):
        raise InputError(f"slack must be Box(width) or Ridge(penalty), not {slack!r}.")
    if base is None:
        size, share = float(design.rows), np.array([1.0 / design.rows])
        used, positive = design, np.arange(0)
    elif isinstance(rule, InverseLogit):
        raise InputError("The inverse-logit distance takes no base weights: its base is 1.")
    else:
        weights = _checked_base(design, base)
        size, positive = float(weights.sum()), np.flatnonzero(weights)
        share = weights[positive] / size
        used = design if len(positive) == design.rows else design.take(positive)
    aim = wanted if se is None else trusted_target(used, share, wanted, se)
    if isinstance(rule, InverseLogit):
        result = _inverse_logit(used, aim, population_size, slack)
    else:
        total = size if population_size is None else population_size
        check_positive(total, "population_size")
        result = _solved(_Task(used, aim, share, rule, size, total, slack))
    result = replace(result, given=wanted)
    return result if used is design else _spread(result, positive, design.rows)


def trusted_target(
    design: BalanceDesign, base: FloatArray, target: FloatArray, se: ArrayLike
) -> FloatArray:
    r"""Return targets drawn towards the enrolled means as far as their errors ask for, (q,).

    .. math:: \tilde\mu = m + S\, \kappa^2 R\, (\kappa^2 R + T)^{-1} S^{-1} (\hat\mu - m),
       \qquad T = \text{diag}(se_j^2 / s_j^2) \qquad (C10)

    m, S = diag(s) and R are the enrolled clients' means, standard deviations and correlations. This
    is the best linear guess of the population means when their shifts from the enrolled have
    standard deviation :math:`\kappa` (0.55 standard deviations of the column) and correlate as the
    columns do. A target without error is believed, if the others do not contradict it; one with a
    large error moves the weights little. For uncorrelated columns the shift shrinks by
    :math:`\kappa^2/(\kappa^2 + se_j^2/s_j^2)`.
    """
    errors = np.array(se, dtype=np.float64)
    if errors.shape != target.shape or not ((errors >= 0.0) & (errors <= LARGEST)).all():
        raise InputError(f"Standard errors must be one per target, from 0 to {LARGEST:g}.")
    moments = design.moments
    varies = moments.varies
    scale = np.where(varies, moments.deviation, 1.0)
    square = gram(design, base, moments.mean, scale)
    centre = square[-1, :-1] / square[-1, -1]
    covariance = square[:-1, :-1] / square[-1, -1] - np.outer(centre, centre)
    prior = TYPICAL_SHIFT**2 * np.where(np.outer(varies, varies), covariance, 0.0)
    enrolled = moments.mean + scale * centre
    shift = np.where(varies, (target - enrolled) / scale, 0.0)
    # (prior + T) scaled to a unit diagonal: beside a target of a large error the others would be
    # taken for rounding
    noise = errors / scale
    size = np.hypot(np.sqrt(np.maximum(np.diag(prior), 0.0)), noise)
    unit = 1.0 / np.where(size > SMALLEST, size, 1.0)
    whole = prior * np.outer(unit, unit) + np.diag((noise * unit) ** 2)
    believed = prior @ (unit * np.linalg.lstsq(whole, shift * unit, rcond=1e-12)[0])
    out: FloatArray = np.where(errors.any(), enrolled + scale * believed, target)
    return np.where(varies, out, target)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """Rows with a base weight, what they must average to, and how."""

    design: BalanceDesign
    target: FloatArray  # (q,)
    share: FloatArray  # of base weight, (n,) or (1,)
    distance: Distance
    base_size: float  # sum of the base weights
    population_size: float
    slack: Slack | None

    @property
    def total(self) -> float:
        """What the ratios average to."""
        return self.population_size / self.base_size


def _spread(part: Calibration, rows: IntArray, size: int) -> Calibration:
    """Return the result for all rows, those without a base weight at weight 0."""
    weights, ratio, share = np.zeros((3, size))
    weights[rows], ratio[rows], share[rows] = part.weights, part.ratio, part.share
    return replace(part, weights=weights, ratio=ratio, share=share)


def _solved(task: _Task) -> Calibration:
    design, target, distance = task.design, task.target, task.distance
    _check_total(task)
    chosen = independence(design, target) if task.slack is None else variation(design, target)
    problem = _problem(task, chosen.kept)
    if np.isfinite(distance.family.low):
        outside = _outside(task)
        if outside.any():
            raise infeasible(problem, distance, outside)
    zero = np.zeros(len(target) + 1)
    zero[-1] = distance.family.inverse(problem.total)
    miss = problem.total * np.abs((design.moments.mean - target) / problem.scale).max()
    found = dual_minimum(problem, _start(problem, zero), fallback=(zero, 1.01 * float(miss)))
    if found.status is not Status.CONVERGED or at_the_border(problem, found, distance):
        explain(problem, distance, found)
    result = _result(task, problem, found, chosen.dropped)
    if task.slack is None and result.violation[chosen.kept].max(initial=0.0) > VIOLATION:
        raise NotConvergedError(found.iterations, result.largest_violation, VIOLATION, ADVICE)
    return result


def _problem(task: _Task, kept: BoolArray) -> DualProblem:
    """Return the dual problem, in ratios over the total where the distance allows it.

    Quadratic, linear and entropy distances have the same minimiser whatever the scale of the base
    weights, if bounds are scaled along; the logit distance is tied to ratios near 1.
    """
    kind, low, high = task.distance.family
    total, slack = task.total, task.slack
    unit = 1.0 if kind == LOGISTIC else total
    moments, q = task.design.moments, len(task.target)
    ridge = np.zeros(q)
    if isinstance(slack, Ridge):
        ridge[:] = slack.penalty * (total if kind == EXPONENTIAL else total**2)
    width = slack.width if isinstance(slack, Box) else 0.0
    return DualProblem(
        design=task.design,
        base=task.share,
        target=task.target,
        scale=np.where(moments.varies, moments.deviation, 1.0),
        kept=kept,
        family=Family(kind, low / unit, high / unit),
        total=total / unit,
        box=np.full(q, width * total / unit),
        ridge=ridge,
    )


def _check_total(task: _Task) -> None:
    total, (_, low, high) = task.total, task.distance.family
    if low < total < high or (task.distance.closed and low <= total <= high):
        return
    raise InfeasibleError(
        f"Weights must sum to {task.population_size:.6g}, {total:.6g} times the base weights, and "
        f"the bounds on their ratio are {low:g} to {high:g}.",
        (("total over base", total, low, high),),
        ways_out=("correct the population size or the base weights", "widen the bounds"),
    )


def _outside(task: _Task) -> BoolArray:
    """Return columns whose target lies outside what enrolled clients span, (q,)."""
    moments, target, slack = task.design.moments, task.target, task.slack
    if isinstance(slack, Ridge):
        return np.zeros(len(target), dtype=np.bool_)
    give = slack.width * moments.deviation if isinstance(slack, Box) else 0.0
    rounding = 1e-12 * np.maximum(np.abs(moments.least), np.abs(moments.largest))
    beyond: BoolArray = (target + give < moments.least - rounding) | (
        target - give > moments.largest + rounding
    )
    return beyond & moments.varies


def _start(problem: DualProblem, zero: FloatArray) -> FloatArray:
    """Return first multipliers: those of a subsample where there are many rows.

    A quadratic without bounds needs none: one Newton step solves it.
    """
    if problem.design.rows < 4 * SUBSAMPLE or not np.isfinite(problem.family[1:]).any():
        return zero
    part, share = subsample(problem.design, problem.base)
    found = dual_minimum(replace(problem, design=part, base=share), zero, max_iterations=25)
    return found.point if found.status is Status.CONVERGED else zero


def _result(
    task: _Task, problem: DualProblem, found: DualResult, dropped: dict[str, str]
) -> Calibration:
    total, unit = task.total, task.total / problem.total
    ratio = found.ratio if unit == 1.0 else found.ratio * unit
    centred = (found.gradient[:-1] - problem.ridge * found.point[:-1]) / problem.total
    lam = np.where(problem.kept, found.point[:-1] / problem.scale, 0.0)
    constant = found.point[-1] - float(lam @ problem.target)
    if problem.family[0] == EXPONENTIAL:
        constant += np.log(unit)
    elif problem.family[0] == CLIPPED:
        lam, constant = total * lam, total - 1.0 + total * constant
    return Calibration(
        weights=found.ratio * (problem.base / problem.total),
        ratio=ratio,
        population_size=task.population_size,
        names=problem.design.names,
        given=problem.target,
        target=problem.target,
        achieved=problem.target + problem.scale * centred,
        deviation=problem.design.moments.deviation,
        multipliers=np.append(lam, constant),
        iterations=found.iterations,
        status=found.status,
        dropped=dropped,
        rare=_rare(problem),
        slack=task.slack,
        rule=task.distance,
        share=problem.base,
    )


def _rare(problem: DualProblem) -> dict[str, float]:
    r"""Return indicators that few enrolled clients must carry, with their share of the rows.

    .. math:: n_l < 10 \quad \text{and} \quad
       \mu_l > 2 \sum_{i \in l} d_i \Big/ \sum_i d_i \qquad (C15)

    A level of few clients that stands for no more than they do at their base weights is harmless.
    """
    design, moments = problem.design, problem.design.moments
    share, n = moments.mean, design.rows
    spread = np.sqrt(np.maximum(share * (1.0 - share), 0.0) * n / max(1, n - 1))
    binary = (moments.least == 0.0) & (moments.largest == 1.0)
    binary &= np.isclose(spread, moments.deviation, rtol=1e-6)  # nothing between 0 and 1
    few = binary & (share * n < RARE - 0.5)
    if not few.any():
        return {}
    base = share
    if len(problem.base) > 1:
        square = gram(design, problem.base, moments.mean, problem.scale)
        base = moments.mean + problem.scale * (square[-1, :-1] / square[-1, -1])
    few &= problem.target > RARE_TIMES * base
    return {design.names[j]: float(share[j]) for j in np.flatnonzero(few)}


def _inverse_logit(
    design: BalanceDesign, target: FloatArray, population_size: float | None, slack: Slack | None
) -> Calibration:
    """Entropy calibration to the mean of the non-enrolled, plus one for each enrolled (C6)."""
    n = design.rows
    if isinstance(slack, Ridge):
        raise InputError("The inverse-logit distance takes a box as slack, no ridge.")
    if population_size is None:
        raise InputError("The inverse-logit distance needs the population size.")
    size = check_positive(population_size, "population_size")
    if size <= n:
        raise InfeasibleError(
            f"The inverse-logit distance needs a population larger than the {n} enrolled clients, "
            f"not {size:g}: with nobody outside there is nothing to correct.",
            (("population size", size, n, np.inf),),
            ways_out=("correct the population size", "use another distance"),
        )
    mean = design.moments.mean
    outside = (size * target - n * mean) / (size - n)
    wider = None if slack is None else Box(slack.width * size / (size - n))
    share = np.array([1.0 / n])
    try:
        tilt = _solved(_Task(design, outside, share, Entropy(), float(n), size - n, wider))
    except InfeasibleError as error:
        raise InfeasibleError(
            f"With N = {size:g} and {n} enrolled the targets give these means to the "
            f"{size - n:g} clients that are not enrolled, whom no weights on the enrolled can "
            f"stand for. {error.why}",
            error.conflict,
            nearest={
                name: (n * mean[j] + (size - n) * error.nearest[name]) / size
                for j, name in enumerate(design.names)
                if name in error.nearest
            },
            least_slack=error.least_slack * (size - n) / size,
            ways_out=(
                "correct the targets or the population size",
                "leave a constraint out or coarsen it",
                "use the quadratic or the entropy distance",
                f"allow a tolerance with a slack above {error.least_slack * (size - n) / size:.4g}",
            ),
        ) from error
    ratio = 1.0 + tilt.ratio
    return replace(
        tilt,
        weights=ratio / size,
        ratio=ratio,
        population_size=size,
        target=target,
        achieved=(n * mean + (size - n) * tilt.achieved) / size,
        slack=slack,
        rule=InverseLogit(),
    )


def _checked_target(design: BalanceDesign, target: ArrayLike) -> FloatArray:
    try:
        wanted = np.array(target, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("Targets must be numbers, one per column.") from None
    q = len(design.names)
    if wanted.shape != (q,):
        raise InputError(f"Targets have shape {wanted.shape}, expected ({q},), one per column.")
    if q == 0:
        raise InputError("Calibration needs at least one target.")
    if not np.isfinite(wanted).all():
        bad = [n for n, v in zip(design.names, wanted, strict=True) if not np.isfinite(v)]
        raise InputError(f"The target of {some(bad)} is missing or infinite.")
    if design.rows < q:
        raise InputError(
            f"{design.rows} enrolled clients are fewer than {q} constraints: leave some out."
        )
    moments = design.moments
    missing = ~(np.isfinite(moments.mean) & np.isfinite(moments.deviation))
    if missing.any():
        names = some(design.names[j] for j in np.flatnonzero(missing))
        raise InputError(
            f"Balance column {names} has missing, infinite or too large values among the "
            f"{design.rows} enrolled clients. Fill or drop them first."
        )
    tiny = moments.varies & ~(moments.deviation > 1e-150)
    if tiny.any():
        names = some(design.names[j] for j in np.flatnonzero(tiny))
        raise InputError(f"The values of {names} are too small to be told apart: rescale them.")
    return wanted


def _checked_base(design: BalanceDesign, base: ArrayLike) -> FloatArray:
    given = np.asarray(base, dtype=np.float64)
    if given.shape != (design.rows,):
        raise InputError(f"Base weights have shape {given.shape}, expected ({design.rows},).")
    if not np.isfinite(given).all() or (given < 0.0).any():
        raise InputError(
            "Base weights must be finite and not negative; "
            f"{int((~np.isfinite(given)).sum())} are missing or infinite, "
            f"{int((given < 0.0).sum())} negative."
        )
    largest = float(given.max(initial=0.0))
    if largest == 0.0:
        raise InputError("The base weights sum to 0: there is nothing to calibrate.")
    check_magnitude(given, "The column of base weights")
    return given
