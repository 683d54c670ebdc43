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

from fedipw.calibration.design import BalanceDesign, Frame, scores
from fedipw.errors import NotConvergedError

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray

FEASIBLE = 1e-9  # standard deviations below which a miss is rounding
_WHOLE = 600_000  # rows times columns up to which one programme holds them all
_MAX_POINTS = 400
_MANY_ROWS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reach:
    """What weights can reach: rows, base shares, and the span of ratios for a total."""

    design: BalanceDesign
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
        share = _filled(score, self.base * (high - low), rest)
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


def _filled(score: FloatArray, room: FloatArray, rest: float) -> FloatArray:
    """Return how far each row is filled, 0 to 1, if ``rest`` goes to the highest scores first."""
    if len(room) == 1:
        whole = min(int(rest / room[0]), len(score))
        share = np.zeros(len(score))
        if whole < len(score):
            order = np.argpartition(-score, whole)
            share[order[whole]] = rest / room[0] - whole
            share[order[:whole]] = 1.0
        else:
            share[:] = 1.0
        return share
    order = np.argsort(-score, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(room[order])[:-1]])
    share = np.empty(len(order))
    share[order] = np.clip((rest - before) / room[order], 0.0, 1.0)
    return share


def nearest_reachable(reach: Reach, columns: BoolArray, *, decide: float | None = None) -> Nearest:
    """Solve (C9) over some of the columns, (q,).

    With ``decide`` it stops as soon as the optimum is proved to lie above or below that miss.
    Otherwise to seven digits, or three with many rows.
    """
    used = np.flatnonzero(columns)
    if reach.design.rows * len(used) <= _WHOLE:
        return _whole_programme(reach, used)
    points = [reach.farthest(sign * np.eye(len(columns))[j]) for j in used for sign in (1.0, -1.0)]
    bound, multipliers = 0.0, np.zeros(len(columns))
    digits = 1e-7 if reach.design.rows < _MANY_ROWS else 1e-3
    for _ in range(_MAX_POINTS):
        miss, point, lam = _nearest_of(np.array(points)[:, used])
        direction = np.zeros(len(columns))
        direction[used] = lam
        farthest = reach.farthest(direction)
        proven = -float(direction @ farthest)
        if proven > bound:
            bound, multipliers = proven, direction
        level = 0.0 if decide is None else decide
        known = miss <= level + FEASIBLE or (decide is not None and bound > level + FEASIBLE)
        if known or miss - bound <= max(FEASIBLE, digits * miss):
            break
        points.append(farthest)
    if bound <= FEASIBLE < miss:
        raise NotConvergedError(_MAX_POINTS, miss - bound, FEASIBLE)
    whole = np.zeros(len(columns))
    whole[used] = point
    return Nearest(miss=miss, bound=bound, point=whole, multipliers=multipliers)


def _whole_programme(reach: Reach, used: IntArray) -> Nearest:
    """Solve (C9) in one programme over the weight of every row."""
    design, (low, high) = reach.design, reach.span
    n, q = design.rows, len(reach.target)
    share = np.broadcast_to(reach.base, (n,)) / reach.total
    x = ((design.dense() - reach.target) / reach.scale)[:, used].T
    limits = np.column_stack([np.append(low * share, 0.0), np.append(high * share, np.inf)])
    miss, mass, multipliers = _programme(x, limits)
    direction, whole = np.zeros(q), np.zeros(q)
    direction[used], whole[used] = multipliers, x @ mass
    proven = -float(direction @ reach.farthest(direction))
    return Nearest(miss=miss, bound=max(0.0, proven), point=whole, multipliers=direction)


def _nearest_of(points: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """Return the least largest miss over the hull of points (k, q), where, and its multipliers."""
    limits = np.tile([0.0, np.inf], (len(points) + 1, 1))
    miss, mix, multipliers = _programme(points.T, limits)
    return miss, mix @ points, multipliers


def _programme(x: FloatArray, limits: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """Minimise s with |x m| <= s, sum m = 1 and limits on m and s; returns s, m and multipliers."""
    q, k = x.shape
    below = -np.ones((q, 1))
    found = linprog(
        np.append(np.zeros(k), 1.0),
        A_ub=np.vstack([np.hstack([x, below]), np.hstack([-x, below])]),
        b_ub=np.zeros(2 * q),
        A_eq=np.append(np.ones(k), 0.0)[None, :],
        b_eq=[1.0],
        bounds=[(low, high) for low, high in limits.tolist()],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if found.x is None:
        raise NotConvergedError(0, float("nan"), FEASIBLE)
    marginal = np.asarray(found.ineqlin.marginals)
    solution = np.asarray(found.x)
    return float(solution[-1]), solution[:-1], marginal[:q] - marginal[q:]


def conflict(reach: Reach, nearest: Nearest, columns: BoolArray, width: float = 0.0) -> BoolArray:
    """Return columns whose targets cannot be met, (q,): each alone, or else a minimal set together.

    Targets may be missed by ``width``. Columns out of reach on their own are all named. If there
    are none, the columns of the proof are left out in turn, the last first, as long as the rest is
    still out of reach.
    """
    allowed = width + FEASIBLE
    alone = np.zeros(len(columns), dtype=np.bool_)
    for j in np.flatnonzero(columns):
        ends = [float(reach.farthest(sign * np.eye(len(columns))[j])[j]) for sign in (-1.0, 1.0)]
        alone[j] = ends[0] > allowed or ends[1] < -allowed
    if alone.any():
        return alone
    blamed = columns & (np.abs(nearest.multipliers) > 1e-9)
    for j in reversed(np.flatnonzero(blamed)):
        rest = blamed.copy()
        rest[j] = False
        if rest.any() and nearest_reachable(reach, rest, decide=width).bound > allowed:
            blamed = rest
    return blamed
