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

Multipliers alone cannot meet constraints to the last digits. With unit roundoff
:math:`\epsilon/2 = 2^{-53}` the computed u is off by up to :math:`(q + 2)\,\tfrac\epsilon2 \sum_j
|\lambda_j \tilde x_{ij}|`, and base weights spread over d decades ask for multipliers of up to
:math:`10^d`; how much of that error shows depends on the order in which a processor adds. The last
steps therefore correct the ratios themselves (iterative refinement): :math:`g_i \leftarrow g_i +
F'(u_i)\, v'\tilde x_i`, with v from the Newton system at the misses of the present ratios. A
correction's error is relative to the correction, not to u. What is left is the error of the sums:
a weight :math:`p_i g_i`, its column :math:`(b - \mu)/s` and their product are n terms of at most
five roundings each, added in n - 1 steps in any order, so that

.. math:: \Big|\sum_i p_i g_i \tilde x_{ij} - \text{its computed value}\Big| \le
   \gamma_{n+4} \sum_i |p_i g_i \tilde x_{ij}|, \qquad
   \gamma_k = \frac{k \epsilon/2}{1 - k \epsilon/2}. \qquad (C12)

Refinement goes on until computed misses are below this bound (or ``TOLERANCE``, where that is
less), so that true ones are below twice the bound. It does not depend on the base weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
from scipy.linalg import eigh

from fedipw.calibration.design import BalanceDesign, DualSums, Tilt
from fedipw.calibration.distances import CONSTANT, UNBOUNDED, Family
from fedipw.numerics import BoolArray, FloatArray
from fedipw.numerics.dual import CLIPPED, l1_quadratic_step

TOLERANCE = 1e-12  # on misses in standard deviations
_DECREMENT = 1e-11  # on the root mean square change of u still to come
_FLOOR = 1e-10  # a miss at which no further step helping counts as rounding
_CHORD = 0.1  # gradients that fall by this factor let the Hessian stand for another step
_FAR = 1e13  # multipliers beyond this mean a dual without minimum
_NULL = 1e-13  # eigenvalues of the Hessian below this share of the largest are zero
_STALE = 3
_EXPANSIONS = 24  # a damped step that helps is doubled this often at most
_REFINEMENTS = 8  # each gains three digits or more at the worst condition, 1 / _NULL


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
    family: Family
    total: float  # r
    box: FloatArray  # tau, (q,)
    ridge: FloatArray  # rho, (q,)

    def sums(self, point: FloatArray, ratio: FloatArray, *, hessian: bool) -> DualSums:
        """Return value, gradient and Hessian of the smooth part of (C1); F(u) in ``ratio``."""
        tilt = Tilt(self.family, self.target, self.scale, point)
        at = self.design.sums(self.base, tilt, ratio, hessian=hessian)
        square = at.hessian
        if square is not None:
            square[np.arange(len(self.ridge)), np.arange(len(self.ridge))] += self.ridge
        smooth = at.value - self.total * point[-1]
        if self.ridge.any():
            smooth += 0.5 * float(self.ridge @ point[:-1] ** 2)
        gradient = self.gradient(at.gradient, point)
        return replace(at, value=smooth, gradient=gradient, hessian=square)

    def totals(self, ratio: FloatArray, room: FloatArray) -> FloatArray:
        """Return sums of weights times standardised columns, and of weights, at ratios (n,)."""
        weight = np.ascontiguousarray(np.broadcast_to(self.base * ratio, ratio.shape))
        tilt = Tilt(CONSTANT, self.target, self.scale, np.zeros(len(self.target) + 1))
        return self.design.sums(weight, tilt, room, hessian=False).gradient

    def gradient(self, totals: FloatArray, point: FloatArray) -> FloatArray:
        """Return the gradient of the smooth part, where weighted columns have these totals."""
        moved: FloatArray = totals + np.append(self.ridge * point[:-1], -self.total)
        return moved

    def shifts(self, step: FloatArray, room: FloatArray) -> FloatArray:
        """Return the change of u along a step of the multipliers, in ``room``, (n,)."""
        tilt = Tilt(UNBOUNDED, self.target, self.scale, step)  # F = 1 + u
        self.design.sums(self.base, tilt, room, hessian=False)
        room -= 1.0
        return room

    def rounding(self, ratio: FloatArray) -> FloatArray:
        """Return (C12), misses that may be all rounding of the sums over rows, (q + 1,).

        No column is larger than at the ends of its range, and weights that cannot be negative add
        up to the total.
        """
        moments = self.design.moments
        below, above = self.target - moments.least, moments.largest - self.target
        size = self.total if self.family[1] >= 0.0 else float((self.base * np.abs(ratio)).sum())
        steps = 0.5 * float(np.finfo(np.float64).eps) * (self.design.rows + 4)
        ends = np.maximum(np.abs(below), np.abs(above)) / self.scale
        return steps / (1.0 - steps) * size * np.append(ends, 1.0)

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
        box, and every row has ``lambda'x < -tau'|lambda|``.
        """
        _, low, high = self.family
        size = float(np.abs(point[:-1]).sum())
        if low != 0.0 or np.isfinite(high) or size == 0.0 or self.ridge.any():
            return False
        most = at.largest - point[-1]
        return bool(most < -float(self.box @ np.abs(point[:-1])) - 1e-9 * size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DualResult:
    """Where the iteration stopped; ``ratio`` belongs to ``point``, more exactly than F(u) does."""

    point: FloatArray  # lambda, (q + 1,)
    ratio: FloatArray  # g, (n,)
    gradient: FloatArray  # (q + 1,) of the smooth part
    # the larger of the largest subgradient over the total and the step still to come, in units of u
    remaining: float
    iterations: int
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
    if status is Status.CONVERGED:
        run.refine()
    coming = np.sqrt(max(newton.decrement, 0.0) / newton.size)
    return DualResult(
        point=run.point,
        ratio=run.ratio,
        gradient=run.at.gradient,
        remaining=max(run.norm / problem.total, float(coming)),
        iterations=iterations,
        status=status,
    )


class _Run:
    """The point, what is known there, and the Hessian in use, which may be of an earlier point."""

    def __init__(self, problem: DualProblem, start: FloatArray) -> None:
        self.problem, self.point = problem, start.copy()
        self.ratio, self._room = np.empty((2, problem.design.rows))
        exact = not np.isfinite(problem.family[1:]).any()  # quadratic: one Hessian serves for ever
        self._contraction = 0.0 if exact else 1.0
        self._stale = 0  # steps in a row that left a gradient of rounding as it was
        self._evaluate()
        self.norm = self._norm(self.at, self.point)

    def lost(self) -> Status | None:
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
            at = self.problem.sums(trial, self._room, hessian=hessian)
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
        for doublings in range(_EXPANSIONS):
            trial = self.point + 2.0**doublings * step
            if not np.abs(trial).max() < _FAR:
                return
            at = self.problem.sums(trial, self._room, hessian=False)
            lower = self.problem.value(at, trial) < self.problem.value(self.at, self.point)
            if not (np.isfinite(at.gradient).all() and lower):
                return
            self._take(trial, at, self._norm(at, trial), chord=True)

    def refreshed(self) -> bool:
        """Take the Hessian at the present point, unless it is in use."""
        if self._fresh:
            return False
        self._evaluate()
        self._contraction = 1.0
        return True

    def _evaluate(self) -> None:
        self.at = self.problem.sums(self.point, self.ratio, hessian=True)
        assert self.at.hessian is not None
        self.hessian, self._fresh = self.at.hessian, True

    def refine(self) -> None:
        """Correct the ratios until their misses are the rounding of sums, or no longer halve."""
        problem, (_, low, high) = self.problem, self.problem.family
        held = (problem.box == 0.0) | (self.point[:-1] != 0.0)
        active = np.append(problem.kept & held, True)
        goal = np.minimum(problem.rounding(self.ratio), TOLERANCE * problem.total)[active]
        left = problem.residual(self.at.gradient, self.point)[active]
        worst = float((np.abs(left) / goal).max())
        if worst <= 1.0:
            return
        solve = _pseudo_inverse(self.hessian[np.ix_(active, active)])
        for _ in range(_REFINEMENTS):
            step = np.zeros(len(self.point))
            step[active] = -solve(left)
            moved = problem.shifts(step, self._room)
            moved *= problem.family.slope(self.ratio)
            moved += self.ratio
            ratio, point = np.clip(moved, low, high), self.point + step
            gradient = problem.gradient(problem.totals(ratio, self._room), point)
            left = problem.residual(gradient, point)[active]
            before, worst = worst, float((np.abs(left) / goal).max())
            if not worst < 0.5 * before:
                return
            self.point, self.ratio = point, ratio
            self.at = replace(self.at, gradient=gradient)
            self.norm = self._norm(self.at, point)
            if worst <= 1.0:
                return

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

    def _norm(self, at: DualSums, point: FloatArray) -> float:
        return float(np.abs(self.problem.residual(at.gradient, point)).max())


def _pseudo_inverse(square: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Return what solves with a Hessian, without steps along directions in which it vanishes."""
    values, vectors = eigh(square)
    inverse = np.where(_vanishing(values), 0.0, 1.0 / np.maximum(values, 1e-300))
    return lambda right: vectors @ (inverse * (vectors.T @ right))


def _vanishing(values: FloatArray) -> BoolArray:
    """Return which eigenvalues of a Hessian, ascending, are zero but for rounding."""
    null: BoolArray = values <= max(_NULL * float(values[-1]), 1e-24)
    return null


def _step(problem: DualProblem, at: DualSums, hessian: FloatArray, point: FloatArray) -> _Step:
    """Return the Newton step over the kept columns.

    Where the Hessian vanishes along a direction in which the gradient does not (too few rows away
    from their bounds) the step is damped there, in proportion to the gradient.
    """
    used = np.append(problem.kept, True)
    H, g, lam = hessian[np.ix_(used, used)], at.gradient[used], point[used]
    values, vectors = eigh(H)
    size = max(1.0, float(lam @ H @ lam)) if problem.family[0] == CLIPPED else 1.0
    null = _vanishing(values)
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
