r"""The dual of calibration, minimised by Newton's method over few and cheap passes.

Minimising :math:`\sum_i p_i \phi(g_i)` subject to :math:`\sum_i p_i g_i \tilde x_i = (0, r)` has
the dual

.. math:: \min_\lambda \; \sum_i p_i \Phi(\lambda'\tilde x_i) - r \lambda_0
   + \sum_j \left(\tau_j |\lambda_j| + \tfrac12 \rho_j \lambda_j^2\right), \qquad (C1)

with :math:`\tilde x_i = ((b_i - \mu)/s, 1)`, :math:`\Phi' = F` and
:math:`g_i = F(\lambda'\tilde x_i)`: q + 1 unknowns whatever the number of rows.
Columns are centred at the target, so that the gradient is the miss itself and loses no digits.
:math:`\tau` is a box of tolerated misses and :math:`\rho` a ridge; both are zero for exact
calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.linalg import eigh

from fedipw.calibration.design import BalanceDesign, DualSums, Frame
from fedipw.numerics.dual import CLIPPED, l1_quadratic_step

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray

TOLERANCE = 1e-12  # on misses in standard deviations
_DECREMENT = 1e-11  # on the root mean square change of u still to come
_FLOOR = 1e-10  # a miss at which no further step helping counts as rounding
_CHORD = 0.1  # gradients that fall by this factor let the Hessian stand for another step
_FAR = 1e13  # multipliers beyond this mean a dual without minimum
_NULL = 1e-13  # eigenvalues of the Hessian below this share of the largest are zero
_STALE = 3
_EXPANSIONS = 24  # a damped step that helps is doubled this often at most


class Status(Enum):
    """How the dual iteration ended."""

    CONVERGED = "converged"
    INFEASIBLE = "a direction proves that no weights exist"
    STALLED = "no step lowers the dual"
    DIVERGED = "multipliers run away"
    MAX_ITERATIONS = "iteration limit reached"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DualProblem:
    """All that (C1) needs."""

    design: BalanceDesign
    base: FloatArray  # p, (n,) summing to 1, or (1,) with 1/n where all are alike
    target: FloatArray  # mu, (q,)
    scale: FloatArray  # s, (q,)
    kept: BoolArray  # (q,) columns that are constrained
    family: tuple[int, float, float]
    total: float  # r
    box: FloatArray  # tau, (q,)
    ridge: FloatArray  # rho, (q,)

    def sums(self, point: FloatArray, ratio: FloatArray, *, hessian: bool) -> DualSums:
        """Return value, gradient and Hessian of the smooth part of (C1)."""
        frame = Frame(self.target, self.scale)
        at = self.design.sums(self.base, frame, point, self.family, ratio, hessian=hessian)
        gradient = at.gradient.copy()
        gradient[-1] -= self.total
        gradient[:-1] += self.ridge * point[:-1]
        square = at.hessian
        if square is not None:
            square[np.arange(len(self.ridge)), np.arange(len(self.ridge))] += self.ridge
        smooth = at.value - self.total * point[-1]
        if self.ridge.any():
            smooth += 0.5 * float(self.ridge @ point[:-1] ** 2)
        return at._replace(value=smooth, gradient=gradient, hessian=square)

    def value(self, at: DualSums, point: FloatArray) -> float:
        """Return (C1)."""
        return at.value + float(self.box @ np.abs(point[:-1]))

    def residual(self, gradient: FloatArray, point: FloatArray) -> FloatArray:
        """Return the least subgradient, zero at a minimum; 0 for columns that are not kept."""
        tau, lam = np.append(self.box, 0.0), point
        slack = np.sign(gradient) * np.maximum(np.abs(gradient) - tau, 0.0)
        out = np.where(lam == 0.0, slack, gradient + tau * np.sign(lam))
        return np.where(np.append(self.kept, True), out, 0.0)

    def separated(self, at: DualSums, point: FloatArray) -> bool:
        """Return whether these multipliers prove that no weights of one sign meet the target.

        Where ratios have no upper bound the constraints ask for a mean of the x of 0 within the
        box, and every row has lambda'x < -tau'|lambda|.
        """
        _, low, high = self.family
        size = float(np.abs(point[:-1]).sum())
        if low != 0.0 or np.isfinite(high) or size == 0.0 or self.ridge.any():
            return False
        most = at.largest - point[-1]
        return bool(most < -float(self.box @ np.abs(point[:-1])) - 1e-9 * size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DualResult:
    """Where the iteration stopped; ``ratio`` belongs to ``point``."""

    point: FloatArray  # lambda, (q + 1,)
    ratio: FloatArray  # g, (n,)
    gradient: FloatArray  # (q + 1,) of the smooth part
    residual: float  # largest subgradient over the total
    remaining: float  # the larger of that and the step still to come, in units of u
    iterations: int
    passes: tuple[int, int]  # over the data: with Hessian, without
    status: Status


class _Step(NamedTuple):
    """A Newton step, twice the fall it promises, and whether it had to be damped."""

    step: FloatArray  # (q + 1,)
    decrement: float
    damped: bool
    size: float  # the scale of decrements: 1, or lambda'H lambda where u itself is large


def dual_minimum(
    problem: DualProblem,
    start: FloatArray,
    *,
    fallback: tuple[FloatArray, float] | None = None,
    max_iterations: int = 200,
) -> DualResult:
    """Minimise (C1) by Newton steps with halving, from a first point (q + 1,).

    A step that shrinks the gradient tenfold keeps the Hessian for the next one: late passes then
    read the data for the gradient alone. ``fallback`` is another first point and the largest
    gradient there, taken if ``start`` is worse.
    """
    run = _Run(problem, start)
    if fallback is not None and not run.norm <= fallback[1]:
        run = _Run(problem, fallback[0])
    status, iterations = Status.MAX_ITERATIONS, 0
    newton = _Step(np.zeros(len(start)), np.inf, False, 1.0)
    for iterations in range(max_iterations + 1):
        lost = run.lost()
        if lost is not None:
            status = lost
            break
        newton = _step(problem, run.at, run.hessian, run.point)
        if run.converged(newton):
            status = Status.CONVERGED
            break
        if iterations == max_iterations:
            break
        if run.moved(newton) or run.refreshed():
            continue
        status = Status.CONVERGED if run.settled(newton) else Status.STALLED
        break
    coming = np.sqrt(max(newton.decrement, 0.0) / newton.size)
    residual = run.norm / problem.total
    return DualResult(
        point=run.point,
        ratio=run.ratio,
        gradient=run.at.gradient,
        residual=residual,
        remaining=max(residual, float(coming)),
        iterations=iterations,
        passes=(run.full, run.light),
        status=status,
    )


class _Run:
    """The point, what is known there, and the Hessian in use, which may be of an earlier point."""

    def __init__(self, problem: DualProblem, start: FloatArray) -> None:
        self.problem, self.point = problem, start.copy()
        self.ratio, self._room = np.empty((2, problem.design.rows))
        self.full, self.light = 0, 0  # passes over the data, with Hessian and without
        exact = not np.isfinite(problem.family[1:]).any()  # quadratic: one Hessian serves for ever
        self._contraction = 0.0 if exact else 1.0
        self._stale = 0  # steps in a row that left a gradient of rounding as it was
        self.at = self._sums(self.point, self.ratio, hessian=True)
        self.hessian, self._fresh = self._given(self.at), True
        self.norm = self._norm(self.at, self.point)

    def lost(self) -> Status | None:
        """Return why no minimum is to be expected, if there is a reason."""
        if self.problem.separated(self.at, self.point):
            return Status.INFEASIBLE
        return None if np.abs(self.point).max() < _FAR else Status.DIVERGED

    def converged(self, newton: _Step) -> bool:
        """Return whether misses and the step to come are small, or all rounding."""
        near = newton.decrement <= _DECREMENT**2 * newton.size
        return (self.norm <= TOLERANCE * self.problem.total and near) or self._stale >= _STALE

    def settled(self, newton: _Step) -> bool:
        """Return whether no step helps because everything left is rounding."""
        small = newton.decrement <= 1e-14 * newton.size
        return self.norm <= self._rounding and small

    @property
    def _rounding(self) -> float:
        """A gradient of this size may be all rounding: u is a sum of terms as large as lambda."""
        size = float(np.abs(self.point).max())
        return self.problem.total * max(_FLOOR, 8.0 * np.finfo(np.float64).eps * size)

    def moved(self, newton: _Step) -> bool:
        """Go to the first of the halved steps that lowers the dual, if any does.

        Near the minimum the value is all rounding, and a gradient halved counts instead. A damped
        step that lowers the dual at once is doubled as long as that helps: its length is a guess.
        """
        value, decrement = self.problem.value(self.at, self.point), newton.decrement
        near = decrement < 1e-10 * max(1.0, abs(value))
        for halvings in range(4 if near else 50):
            trial = self.point + 0.5**halvings * newton.step
            hessian = self._contraction > _CHORD and halvings == 0 and not newton.damped
            at = self._sums(trial, self._room, hessian=hessian)
            if not np.isfinite(at.value) or not np.isfinite(at.gradient).all():
                continue
            norm = self._norm(at, trial)
            fall = 1e-4 * 0.5**halvings * decrement
            lower = self.problem.value(at, trial) <= value - fall
            if lower or (near and norm < 0.5 * self.norm):
                self._take(trial, at, norm)
                if newton.damped:
                    if halvings == 0:
                        self._lengthen(newton.step)
                    self.refreshed()
                return True
        return False

    def _lengthen(self, step: FloatArray) -> None:
        """Go on along a step as long as the dual falls, twice as far each time."""
        for doublings in range(_EXPANSIONS):
            trial = self.point + 2.0**doublings * step
            if not np.abs(trial).max() < _FAR:
                return
            at = self._sums(trial, self._room, hessian=False)
            lower = self.problem.value(at, trial) < self.problem.value(self.at, self.point)
            if not (np.isfinite(at.gradient).all() and lower):
                return
            self._take(trial, at, self._norm(at, trial), chord=True)

    def refreshed(self) -> bool:
        """Take the Hessian at the present point, unless it is in use."""
        if self._fresh:
            return False
        self.at = self._sums(self.point, self.ratio, hessian=True)
        self.hessian, self._fresh, self._contraction = self._given(self.at), True, 1.0
        return True

    def _take(self, point: FloatArray, at: DualSums, norm: float, *, chord: bool = False) -> None:
        self.point, self.at = point, at
        self.ratio, self._room = self._room, self.ratio
        self._contraction = norm / self.norm if self.norm > 0.0 else 0.0
        still = norm <= self._rounding and self._contraction > 0.5
        self._stale = self._stale + 1 if still else 0
        self.norm, self._fresh = norm, at.hessian is not None
        if at.hessian is not None:
            self.hessian = at.hessian
        elif self._contraction > _CHORD and norm > TOLERANCE * self.problem.total and not chord:
            self.refreshed()

    def _sums(self, point: FloatArray, ratio: FloatArray, *, hessian: bool) -> DualSums:
        self.full, self.light = self.full + hessian, self.light + (not hessian)
        return self.problem.sums(point, ratio, hessian=hessian)

    def _norm(self, at: DualSums, point: FloatArray) -> float:
        return float(np.abs(self.problem.residual(at.gradient, point)).max())

    def _given(self, at: DualSums) -> FloatArray:
        assert at.hessian is not None
        return at.hessian


def _step(problem: DualProblem, at: DualSums, hessian: FloatArray, point: FloatArray) -> _Step:
    """Return the Newton step over the kept columns.

    Where the Hessian vanishes along a direction in which the gradient does not (too few rows away
    from their bounds) the step is damped there, in proportion to the gradient.
    """
    used = np.append(problem.kept, True)
    H, g, lam = hessian[np.ix_(used, used)], at.gradient[used], point[used]
    values, vectors = eigh(H)
    size = max(1.0, float(lam @ H @ lam)) if problem.family[0] == CLIPPED else 1.0
    null = values <= max(_NULL * float(values[-1]), 1e-24)
    left = problem.residual(at.gradient, point)[used]
    damped = bool(np.abs(vectors[:, null].T @ left).max(initial=0.0) > 1e-14 * problem.total)
    damping = max(float(values[-1]), 1e-3) * min(1e-2, max(1e-12, float(np.abs(left).max())))
    values = np.where(null, damping, values)
    along = vectors.T @ g
    step = np.zeros(len(point))
    if problem.box.any():
        tau = np.append(problem.box, 0.0)[used]
        whole = np.ascontiguousarray((vectors * values) @ vectors.T)
        s = l1_quadratic_step(whole, g, lam, tau)
        gain = tau @ (np.abs(lam + s) - np.abs(lam))
        step[used] = s
        return _Step(step, float(-(g @ s + gain)), damped, size)
    step[used] = -vectors @ (along / values)
    return _Step(step, float(along @ (along / values)), damped, size)
