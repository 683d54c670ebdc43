"""The convergence bound with its terms apart, and the conditions under which it is true."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive

if TYPE_CHECKING:
    from fedipw.lab.theory.constants import ProblemConstants

VARIANCE = 60.0  # C of the variance term
DRIFT = 480.0  # C of the drift term
FLOOR = 36.0  # C of the floor
SMALL_ERROR = 1.0 / 72.0  # c_abs of eps_w^2 <= c_abs mu / (L B^2)
SMALL_DRIFT = 1.0 / 480.0  # c of (eta~ L)^2 kappa B^2 <= c gamma^2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """K local steps of size eta, server step gamma, R rounds."""

    local_steps: int
    step_size: float
    rounds: int
    server_step: float = 1.0

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise InputError(f"K must be at least 1 local step, not {self.local_steps}.")
        if self.rounds < 0:
            raise InputError(f"The number of rounds must be 0 or more, not {self.rounds}.")
        check_positive(self.step_size, "step_size")
        check_positive(self.server_step, "server_step")

    @property
    def effective_step(self) -> float:
        """eta~ = K gamma eta."""
        return self.local_steps * self.server_step * self.step_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One requirement of the theorem: a value and the limit it must not pass."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the value stays within the limit (up to rounding)."""
        return self.value <= self.limit * (1.0 + 1e-12)

    def __str__(self) -> str:
        if self.holds:
            return f"{self.name} = {self.value:.3g} <= {self.limit:.3g}"
        return f"outside the theorem: {self.name} = {self.value:.3g} > {self.limit:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    r"""The four terms of the bound on :math:`E[F(\theta_R) - F^\star]`, and its conditions."""

    transient: float
    variance: float
    drift: float
    floor: float
    conditions: tuple[Condition, ...]

    @property
    def total(self) -> float:
        """The sum of the four terms."""
        return self.transient + self.variance + self.drift + self.floor

    @property
    def holds(self) -> bool:
        """Whether every condition holds, that on drift among them, so that the bound is proved.

        Convex clients need the drift condition too: see
        :class:`~fedipw.lab.theory.ConvexTriple`.
        """
        return all(c.holds for c in self.conditions)

    @property
    def statement(self) -> str:
        """Say in words whether the bound applies, and which condition fails."""
        return "; ".join(str(c) for c in self.conditions if not c.holds) or "inside the theorem"


def variance_constant(problem: ProblemConstants, schedule: Schedule) -> float:
    r"""Return V of the variance term, with the factor L in all three parts.

    .. math:: V = L\left[\frac{\sigma^2}{K N p_{min}} + \frac{\sigma^2}{K\gamma^2}
       + \frac{G^2}{N p_{min}}\right] \qquad (T5)
    """
    noise = problem.noise**2 / schedule.local_steps
    sampled = (noise + problem.heterogeneity**2) / problem.least_replies
    return problem.smoothness * (sampled + noise / schedule.server_step**2)


def step_limit(problem: ProblemConstants) -> float:
    r"""Return the largest effective step, :math:`1/(c_0 L)`, :math:`c_0 = 8(1 + \kappa B^2/(N p_{min}))`.

    >>> from fedipw.lab.theory.constants import ProblemConstants
    >>> step_limit(ProblemConstants(smoothness=1.0, strong_convexity=1.0, heterogeneity=0.0,
    ...                             population_size=1, least_prob=1.0))
    0.0625
    """  # noqa: E501
    c0 = 8.0 * (1.0 + problem.condition * problem.growth**2 / problem.least_replies)
    return 1.0 / (c0 * problem.smoothness)


def convergence_bound(
    problem: ProblemConstants, schedule: Schedule, *, initial_gap: float, weight_error: float
) -> Bound:
    r"""Return the corrected bound of the bias-floor theorem, term by term.

    .. math:: E[F(\theta_R) - F^\star] \le
       \left(1 - \frac{\mu\tilde\eta}{8}\right)^R h_0 + \frac{60\,\tilde\eta V}{\mu}
       + \frac{480\,(\tilde\eta L)^2 G^2}{\gamma^2\mu} + \frac{36\,\epsilon_w^2 G^2}{\mu}
       \qquad (T6)

    ``initial_gap`` is :math:`h_0 = F(\theta_0) - F^\star`; ``weight_error`` is
    :math:`\epsilon_w`, the raw error, or the centred one with the server step scaled by its factor
    (T3).

    >>> from fedipw.lab.theory.constants import ProblemConstants
    >>> problem = ProblemConstants(smoothness=1.0, strong_convexity=0.5, heterogeneity=0.1,
    ...                            population_size=1000, least_prob=0.05)
    >>> bound = convergence_bound(problem, Schedule(local_steps=1, step_size=0.01, rounds=5000),
    ...                           initial_gap=1.0, weight_error=0.83)
    >>> bound.statement
    'outside the theorem: eps_w = 0.83 > 0.5; outside the theorem: eps_w^2 = 0.689 > 0.00694'
    """
    if not (math.isfinite(initial_gap) and initial_gap >= 0.0):
        raise InputError(f"initial_gap must be finite and 0 or more, not {initial_gap!r}.")
    if not (math.isfinite(weight_error) and weight_error >= 0.0):
        raise InputError(f"weight_error must be finite and 0 or more, not {weight_error!r}.")
    L, mu, G = problem.smoothness, problem.strong_convexity, problem.heterogeneity
    step, gamma = schedule.effective_step, schedule.server_step
    contraction = max(0.0, 1.0 - mu * step / 8.0)
    conditions = (
        Condition(name="effective step", value=step, limit=step_limit(problem)),
        Condition(name="1/gamma", value=1.0 / gamma, limit=1.0),
        Condition(name="eps_w", value=weight_error, limit=0.5),
        Condition(
            name="eps_w^2", value=weight_error**2, limit=SMALL_ERROR * mu / (L * problem.growth**2)
        ),
        Condition(
            name="drift (eta~ L)^2 kappa B^2 / gamma^2",
            value=(step * L) ** 2 * problem.condition * problem.growth**2 / gamma**2,
            limit=SMALL_DRIFT,
        ),
    )
    return Bound(
        transient=contraction**schedule.rounds * initial_gap,
        variance=VARIANCE * step * variance_constant(problem, schedule) / mu,
        drift=DRIFT * (step * L) ** 2 * G**2 / (gamma**2 * mu),
        floor=FLOOR * weight_error**2 * G**2 / mu,
        conditions=conditions,
    )


def printed_bound(
    problem: ProblemConstants,
    schedule: Schedule,
    *,
    initial_gap: float,
    weight_error: float,
    constant: float,
) -> float:
    r"""Return the bound as the paper prints it, for comparison: it is not true.

    .. math:: \left(1 - \frac{\mu\tilde\eta}{8}\right)^R h_0 + \frac{C\tilde\eta}{\mu}\left[
       \frac{\sigma^2}{K N p_{min}} + \frac{L\sigma^2}{K\gamma^2} + \frac{G^2}{N p_{min}}\right]
       + \frac{C\epsilon_w^2 G^2}{\mu}

    ``constant`` is the paper's unnamed universal C.
    """
    mu, step = problem.strong_convexity, schedule.effective_step
    noise = problem.noise**2 / schedule.local_steps
    printed = (noise + problem.heterogeneity**2) / problem.least_replies
    printed += problem.smoothness * noise / schedule.server_step**2
    floor = weight_error**2 * problem.heterogeneity**2 / mu
    transient = max(0.0, 1.0 - mu * step / 8.0) ** schedule.rounds * initial_gap
    return transient + constant * (step * printed / mu + floor)


def recommended_schedule(
    problem: ProblemConstants,
    accuracy: float,
    *,
    initial_gap: float,
    weight_error: float = 0.0,
    local_steps: int = 1,
    server_step: float = 1.0,
) -> Schedule:
    """Return a step and a number of rounds after which (T6) is at most ``accuracy``.

    What the floor leaves is shared alike by transient, variance and drift. The constants are those
    of the proof, so the advice is safe and far from tight: a practical run needs fewer rounds.
    """
    check_positive(accuracy, "accuracy")
    mu, L, G = problem.strong_convexity, problem.smoothness, problem.heterogeneity
    floor = FLOOR * weight_error**2 * G**2 / mu
    if floor >= accuracy:
        raise InputError(
            f"Accuracy {accuracy:.3g} is below the floor {floor:.3g} that the weight error "
            f"{weight_error:.3g} leaves: no step and no number of rounds reaches it. Lower the "
            "weight error."
        )
    part = (accuracy - floor) / 3.0
    unit = Schedule(local_steps=local_steps, step_size=1.0, rounds=0, server_step=server_step)
    limits = [step_limit(problem)]
    limits.append(server_step * math.sqrt(SMALL_DRIFT / problem.condition) / (L * problem.growth))
    if G > 0.0:
        limits.append(server_step * math.sqrt(part * mu / DRIFT) / (L * G))
    variance = variance_constant(problem, unit)
    if variance > 0.0:
        limits.append(part * mu / (VARIANCE * variance))
    step = min(limits)
    rounds = 0
    if initial_gap > part:
        rounds = math.ceil(math.log(initial_gap / part) / -math.log1p(-mu * step / 8.0))
    advice = Schedule(
        local_steps=local_steps,
        step_size=step / (local_steps * server_step),
        rounds=rounds,
        server_step=server_step,
    )
    bound = convergence_bound(problem, advice, initial_gap=initial_gap, weight_error=weight_error)
    if not bound.holds:
        raise InputError(f"No schedule can be recommended: {bound.statement}.")
    return advice
