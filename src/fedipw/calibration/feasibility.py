r"""Whether any weights meet the targets: a linear programme with few columns at a time.

What weights with ratios in [low, high] and total r can reach is a convex set Y of means. The
programme

.. math:: \min_{y \in Y} \max_j |y_j - \mu_j| / s_j \qquad (C9)

is solved by column generation: a small programme over the points found so far gives multipliers,
one pass over the rows finds the point of Y farthest along them, until none helps. Multipliers with
:math:`\sum_j |\lambda_j| = 1` prove the optimum: no point of Y comes closer than
:math:`-\max_{y \in Y} \sum_j \lambda_j (y_j - \mu_j)/s_j`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linprog

from fedipw.calibration.design import Design, Frame, scores
from fedipw.errors import NotConvergedError

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray

FEASIBLE = 1e-9  # standard deviations below which a miss is rounding
_MAX_POINTS = 5000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reach:
    """What weights can reach: rows, base shares, and the span of ratios for a total."""

    design: Design
    base: FloatArray  # p, (n,) or (1,)
    target: FloatArray  # (q,)
    scale: FloatArray  # (q,)
    span: tuple[float, float]
    total: float

    def farthest(self, direction: FloatArray) -> FloatArray:
        """Return the standardised mean reachable farthest along a direction, (q,).

        Every row keeps the least ratio; what is left of the total goes to the rows with the
        highest scores, each up to its largest ratio.
        """
        room = np.empty(self.design.rows)
        score = scores(self.design, direction / self.scale, room)
        low, high = self.span
        rest = self.total - low
        if not np.isfinite(high):
            best = self._standard(self.design.row(int(np.argmax(score))))
            if low == 0.0:
                return best
            return (low * self._mean(np.ones(1)) + rest * best) / self.total
        order = np.argsort(-score, kind="stable")
        room_of = np.broadcast_to(self.base * (high - low), score.shape)[order]
        before = np.concatenate([[0.0], np.cumsum(room_of)[:-1]])
        share = np.empty(len(order))
        share[order] = np.clip((rest - before) / room_of, 0.0, 1.0)
        return self._mean(low + (high - low) * share) / self.total

    def _standard(self, row: FloatArray) -> FloatArray:
        out: FloatArray = (row - self.target) / self.scale
        return out

    def _mean(self, ratio: FloatArray) -> FloatArray:
        """Return the sum over rows of base times ratio times standardised columns, (q,)."""
        weight = np.ascontiguousarray(np.broadcast_to(self.base * ratio, (self.design.rows,)))
        family = (0, 1.0, 1.0)  # F = 1, so that the gradient is the weighted sum
        point, room = np.zeros(len(self.target) + 1), np.empty(self.design.rows)
        frame = Frame(self.target, self.scale)
        sums = self.design.sums(weight, frame, point, family, room, hessian=False)
        return sums.gradient[:-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nearest:
    """The reachable mean nearest to the target, and the multipliers that prove it."""

    miss: float  # largest distance of a component, in standard deviations
    bound: float  # proven: no reachable mean comes closer than this
    point: FloatArray  # (q,), standardised around the target
    multipliers: FloatArray  # (q,), absolute values sum to at most 1

    @property
    def feasible(self) -> bool:
        """Whether the target itself can be reached."""
        return self.miss <= FEASIBLE


def nearest_reachable(reach: Reach, columns: BoolArray) -> Nearest:
    """Solve (C9) over some of the columns, (q,)."""
    used = np.flatnonzero(columns)
    points = [reach.farthest(sign * np.eye(len(columns))[j]) for j in used for sign in (1.0, -1.0)]
    bound, multipliers = 0.0, np.zeros(len(columns))
    for _ in range(_MAX_POINTS):
        miss, point, lam = _nearest_of(np.array(points)[:, used])
        direction = np.zeros(len(columns))
        direction[used] = lam
        farthest = reach.farthest(direction)
        proven = -float(direction @ farthest)
        if proven > bound:
            bound, multipliers = proven, direction
        if miss <= FEASIBLE or miss - bound <= max(FEASIBLE, 1e-7 * miss):
            whole = np.zeros(len(columns))
            whole[used] = point
            return Nearest(miss=miss, bound=bound, point=whole, multipliers=multipliers)
        points.append(farthest)
    raise NotConvergedError(_MAX_POINTS, miss - bound, FEASIBLE)


def _nearest_of(points: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """Return the least largest miss over the hull of points (k, q), where, and its multipliers."""
    k, q = points.shape
    above = np.hstack([points.T, -np.ones((q, 1))])
    below = np.hstack([-points.T, -np.ones((q, 1))])
    found = linprog(
        np.append(np.zeros(k), 1.0),
        A_ub=np.vstack([above, below]),
        b_ub=np.zeros(2 * q),
        A_eq=np.append(np.ones(k), 0.0)[None, :],
        b_eq=[1.0],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if found.x is None:
        raise NotConvergedError(0, float("nan"), FEASIBLE)
    mix = np.asarray(found.x)[:-1]
    marginal = np.asarray(found.ineqlin.marginals)
    return float(np.asarray(found.fun)), mix @ points, marginal[:q] - marginal[q:]


def conflict(reach: Reach, columns: BoolArray) -> BoolArray:
    """Return a minimal set of columns whose targets cannot be met together, (q,).

    Starts from the columns of the proof and leaves each out in turn, the last first.
    """
    nearest = nearest_reachable(reach, columns)
    blamed = columns & (np.abs(nearest.multipliers) > 1e-9)
    for j in reversed(np.flatnonzero(blamed)):
        rest = blamed.copy()
        rest[j] = False
        if rest.any() and not nearest_reachable(reach, rest).feasible:
            blamed = rest
    return blamed
