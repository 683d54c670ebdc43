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
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import eigh

from fedipw.calibration.design import Design, DualSums, Frame
from fedipw.numerics.dual import l1_quadratic_step

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray

TOLERANCE = 1e-12  # on misses in standard deviations
_DECREMENT = 1e-11  # on the root mean square change of u still to come
_FLOOR = 1e-10  # a miss at which no further step helping counts as rounding
_CHORD = 0.1  # gradients that fall by this factor let the Hessian stand for another step
_FAR = 1e7  # multipliers beyond this mean a dual without minimum


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

    design: Design
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
        smooth = at.value - self.total * point[-1] + 0.5 * float(self.ridge @ point[:-1] ** 2)
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
    iterations: int
    passes: tuple[int, int]  # over the data: with Hessian, without
    status: Status


def dual_minimum(
    problem: DualProblem, start: FloatArray, *, max_iterations: int = 200
) -> DualResult:
    """Minimise (C1) by Newton steps with halving, from a first point (q + 1,).

    A step that shrinks the gradient tenfold keeps the Hessian for the next one: late passes then
    read the data for the gradient alone.
    """
    run = _Run(problem, start)
    status, iterations = Status.MAX_ITERATIONS, 0
    for iterations in range(max_iterations + 1):
        step, decrement = _step(problem, run.at, run.hessian, run.point)
        ended = run.ended(decrement)
        if ended is not None:
            status = ended
            break
        if iterations == max_iterations:
            break
        if run.moved(step, decrement) or run.refreshed():
            continue
        floor = run.norm <= _FLOOR * problem.total
        status = Status.CONVERGED if floor else Status.STALLED
        break
    return DualResult(
        point=run.point,
        ratio=run.ratio,
        gradient=run.at.gradient,
        residual=run.norm / problem.total,
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
        self.at = self._sums(self.point, self.ratio, hessian=True)
        self.hessian, self._fresh = self._given(self.at), True
        self.norm = self._norm(self.at, self.point)

    def ended(self, decrement: float) -> Status | None:
        """Return why to stop here, if there is a reason."""
        problem = self.problem
        if problem.separated(self.at, self.point):
            return Status.INFEASIBLE
        if not np.abs(self.point).max() < _FAR:
            return Status.DIVERGED
        if self.norm <= TOLERANCE * problem.total and decrement <= _DECREMENT**2:
            return Status.CONVERGED
        return None

    def moved(self, step: FloatArray, decrement: float) -> bool:
        """Go to the first of the halved steps that lowers the dual, if any does.

        Near the minimum the value is all rounding, and a gradient halved counts instead.
        """
        value = self.problem.value(self.at, self.point)
        near = decrement < 1e-10 * max(1.0, abs(value))
        for halvings in range(4 if near else 50):
            trial = self.point + 0.5**halvings * step
            hessian = self._contraction > _CHORD and halvings == 0
            at = self._sums(trial, self._room, hessian=hessian)
            if not np.isfinite(at.value) or not np.isfinite(at.gradient).all():
                continue
            norm = self._norm(at, trial)
            fall = 1e-4 * 0.5**halvings * decrement
            lower = self.problem.value(at, trial) <= value - fall
            if lower or (near and norm < 0.5 * self.norm):
                self._take(trial, at, norm)
                return True
        return False

    def refreshed(self) -> bool:
        """Take the Hessian at the present point, unless it is in use."""
        if self._fresh:
            return False
        self.at = self._sums(self.point, self.ratio, hessian=True)
        self.hessian, self._fresh, self._contraction = self._given(self.at), True, 1.0
        return True

    def _take(self, point: FloatArray, at: DualSums, norm: float) -> None:
        self.point, self.at = point, at
        self.ratio, self._room = self._room, self.ratio
        self._contraction = norm / self.norm if self.norm > 0.0 else 0.0
        self.norm, self._fresh = norm, at.hessian is not None
        if at.hessian is not None:
            self.hessian = at.hessian
        elif self._contraction > _CHORD and norm > TOLERANCE * self.problem.total:
            self.refreshed()

    def _sums(self, point: FloatArray, ratio: FloatArray, *, hessian: bool) -> DualSums:
        self.full, self.light = self.full + hessian, self.light + (not hessian)
        return self.problem.sums(point, ratio, hessian=hessian)

    def _norm(self, at: DualSums, point: FloatArray) -> float:
        return float(np.abs(self.problem.residual(at.gradient, point)).max())

    def _given(self, at: DualSums) -> FloatArray:
        assert at.hessian is not None
        return at.hessian


def _step(
    problem: DualProblem, at: DualSums, hessian: FloatArray, point: FloatArray
) -> tuple[FloatArray, float]:
    """Return the Newton step over the kept columns and twice the fall it promises.

    Directions in which the Hessian vanishes (few rows away from their bounds) are damped in
    proportion to the gradient, which keeps steps finite and convergence fast.
    """
    used = np.append(problem.kept, True)
    H, g = hessian[np.ix_(used, used)], at.gradient[used]
    step = np.zeros(len(point))
    if problem.box.any():
        tau = np.append(problem.box, 0.0)[used]
        damp = 1e-12 * max(float(np.trace(H)), problem.total)
        H = H + damp * np.eye(len(H))
        s = l1_quadratic_step(np.ascontiguousarray(H), g, point[used], tau)
        gain = tau @ (np.abs(point[used] + s) - np.abs(point[used]))
        step[used] = s
        return step, float(-(g @ s + gain))
    values, vectors = eigh(H)
    most = max(float(values[-1]), 1e-3 * problem.total)
    if values[0] < 1e-9 * most:
        values = np.maximum(values, 0.0) + most * min(1e-2, max(1e-12, float(np.abs(g).max())))
    along = vectors.T @ g
    step[used] = -vectors @ (along / values)
    return step, float(along @ (along / values))
