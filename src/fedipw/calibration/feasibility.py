r"""Whether any weights meet the targets; if none do, the constraints in conflict and ways out.

What weights with ratios in [low, high] and total r can reach is a convex set Y of means. The
programme

.. math:: \min_{y \in Y} \max_j |y_j - \mu_j| / s_j \qquad (C9)

is solved by column generation: a small programme over the points found so far gives multipliers,
one pass over the rows finds the point of Y farthest along them, until none helps. Multipliers with
:math:`\sum_j |\lambda_j| = 1` prove the optimum: no point of Y comes closer than
:math:`-\max_{y \in Y} \sum_j \lambda_j (y_j - \mu_j)/s_j`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedipw.calibration.design import conflict_rows
from fedipw.calibration.distances import Distance
from fedipw.calibration.dual import TOLERANCE, DualProblem, DualResult, Status
from fedipw.errors import InfeasibleError, NotConvergedError
from fedipw.numerics import BoolArray, FloatArray, IntArray

FEASIBLE = 1e-9  # standard deviations below which a miss is rounding
VIOLATION = 1e-8  # standard deviations a solved constraint may be off at most
ADVICE = (
    "The targets can be met, but hardly: they lie close to the border of what can be, or base "
    "weights or columns are very uneven. Allow a (wider) slack, coarsen the constraints, or even "
    "out the base weights."
)
_WHOLE = 600_000  # rows times columns up to which one programme holds them all
_MAX_POINTS = 400
_MANY_ROWS = 50_000
_PROBE = 1e-7  # a target this much farther out, in shifts, decides whether it lies on the border
_TINY = 1e-12  # a ratio this near to an end of its span is looked at: border targets make it so


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nearest:
    """The reachable mean nearest to the target, and the multipliers that prove it."""

    miss: float  # largest distance of a component, in standard deviations
    bound: float  # proven: no reachable mean comes closer than this
    point: FloatArray  # (q,), standardised around the target
    multipliers: FloatArray  # (q,), absolute values sum to at most 1


def farthest(problem: DualProblem, direction: FloatArray) -> FloatArray:
    """Return the standardised mean that weights can reach farthest along a direction, (q,).

    Every row keeps the least ratio; what is left of the total goes to the rows with the highest
    scores, each up to its largest ratio.
    """
    design, (_, low, high) = problem.design, problem.family
    room = np.empty(design.rows)
    score = problem.shifts(np.append(direction, 0.0), room)
    rest = problem.total - low
    if np.isfinite(high):
        share = _filled(score, problem.base * (high - low), rest)
        return problem.totals(low + (high - low) * share, room)[:-1] / problem.total
    row = design.take(np.array([np.argmax(score)])).dense()[0]
    best: FloatArray = (row - problem.target) / problem.scale
    if low == 0.0:
        return best
    enrolled = problem.totals(np.ones(design.rows), room)[:-1]
    return (low * enrolled + rest * best) / problem.total


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


def nearest_reachable(
    problem: DualProblem, columns: BoolArray, *, decide: float | None = None
) -> Nearest:
    """Solve (C9) over some of the columns, (q,).

    With ``decide`` it stops as soon as the optimum is proved to lie above or below that miss.
    Otherwise to seven digits, or three with many rows.
    """
    used = np.flatnonzero(columns)
    if problem.design.rows * len(used) <= _WHOLE:
        return _whole_programme(problem, used)
    points = [
        farthest(problem, sign * np.eye(len(columns))[j]) for j in used for sign in (1.0, -1.0)
    ]
    bound, multipliers = 0.0, np.zeros(len(columns))
    digits = 1e-7 if problem.design.rows < _MANY_ROWS else 1e-3
    for _ in range(_MAX_POINTS):
        hull = np.array(points)[:, used]
        miss, mix, lam = _programme(hull.T, np.tile([0.0, np.inf], (len(hull) + 1, 1)))
        direction = np.zeros(len(columns))
        direction[used] = lam
        outermost = farthest(problem, direction)
        proven = -float(direction @ outermost)
        if proven > bound:
            bound, multipliers = proven, direction
        level = 0.0 if decide is None else decide
        known = miss <= level + FEASIBLE or (decide is not None and bound > level + FEASIBLE)
        if known or miss - bound <= max(FEASIBLE, digits * miss):
            break
        points.append(outermost)
    if bound <= FEASIBLE < miss:
        raise NotConvergedError(_MAX_POINTS, miss - bound, FEASIBLE)
    whole = np.zeros(len(columns))
    whole[used] = mix @ hull
    return Nearest(miss=miss, bound=bound, point=whole, multipliers=multipliers)


def _whole_programme(problem: DualProblem, used: IntArray) -> Nearest:
    """Solve (C9) in one programme over the weight of every row."""
    design, (_, low, high) = problem.design, problem.family
    n, q = design.rows, len(problem.target)
    share = np.broadcast_to(problem.base, (n,)) / problem.total
    x = ((design.dense() - problem.target) / problem.scale)[:, used].T
    limits = np.column_stack([np.append(low * share, 0.0), np.append(high * share, np.inf)])
    miss, mass, multipliers = _programme(x, limits)
    direction, whole = np.zeros(q), np.zeros(q)
    direction[used], whole[used] = multipliers, x @ mass
    proven = -float(direction @ farthest(problem, direction))
    return Nearest(miss=miss, bound=max(0.0, proven), point=whole, multipliers=direction)


def _programme(x: FloatArray, limits: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """Minimise s with |x m| <= s, sum m = 1 and limits on m and s; returns s, m and multipliers."""
    from scipy.optimize import linprog  # noqa: PLC0415 (slow to load, seldom needed)

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


def conflict(
    problem: DualProblem, nearest: Nearest, columns: BoolArray, width: float = 0.0
) -> BoolArray:
    """Return columns whose targets cannot be met, (q,): each alone, or else a minimal set together.

    Targets may be missed by ``width``. Columns out of reach on their own are all named. If there
    are none, the columns of the proof are left out in turn, the last first, as long as the rest is
    still out of problem.
    """
    allowed = width + FEASIBLE
    alone = np.zeros(len(columns), dtype=np.bool_)
    for j in np.flatnonzero(columns):
        ends = [float(farthest(problem, sign * np.eye(len(columns))[j])[j]) for sign in (-1.0, 1.0)]
        alone[j] = ends[0] > allowed or ends[1] < -allowed
    if alone.any():
        return alone
    blamed = columns & (np.abs(nearest.multipliers) > 1e-9)
    for j in reversed(np.flatnonzero(blamed)):
        rest = blamed.copy()
        rest[j] = False
        if rest.any() and nearest_reachable(problem, rest, decide=width).bound > allowed:
            blamed = rest
    return blamed


def at_the_border(problem: DualProblem, found: DualResult, distance: Distance) -> bool:
    """Return whether ratios run to an end of the span that the distance can only approach."""
    if distance.closed:
        return False
    _, low, high = problem.family
    return bool(found.ratio.min() - low < _TINY or high - found.ratio.max() < _TINY)


def explain(problem: DualProblem, distance: Distance, found: DualResult) -> None:
    """Raise what stands in the way of a solution, if anything does."""
    if not problem.ridge.any() and np.isfinite(problem.family.low):
        width = float(problem.box.max(initial=0.0)) / problem.total
        nearest = nearest_reachable(problem, problem.design.moments.varies)
        if nearest.bound > width + FEASIBLE:
            proof = nearest_reachable(problem, problem.kept, decide=width)
            blamed = conflict(problem, proof, problem.kept, width)
            raise infeasible(problem, distance, blamed, nearest)
        if not distance.closed and width == 0.0:
            away = _PROBE * (problem.target - problem.design.moments.mean)
            beyond = replace(problem, target=problem.target + away)
            outer = nearest_reachable(beyond, problem.kept)
            if outer.bound > FEASIBLE:
                blamed = conflict(beyond, outer, problem.kept)
                raise InfeasibleError(
                    "The targets lie on the border of what enrolled clients span: they can be met "
                    "only with weight ratios at the ends of their range, which this distance never "
                    "reaches.",
                    conflict_rows(problem.design, problem.target, np.flatnonzero(blamed)),
                    ways_out=(
                        "use the quadratic distance",
                        "correct the targets",
                        "allow a tolerance with a slack",
                    ),
                )
    if found.status is not Status.CONVERGED:
        raise NotConvergedError(found.iterations, found.remaining, TOLERANCE, ADVICE)


def infeasible(
    problem: DualProblem, distance: Distance, blamed: BoolArray, known: Nearest | None = None
) -> InfeasibleError:
    """Return the error that names the constraints to blame and the nearest that can be met."""
    columns = problem.design.moments.varies  # those that follow from others too
    nearest = nearest_reachable(problem, columns) if known is None else known
    values = problem.target + problem.scale * nearest.point
    names = problem.design.names
    _, low, high = distance.family
    bounds = f" with ratios between {low:g} and {high:g}" if (low, high) != (0.0, np.inf) else ""
    return InfeasibleError(
        f"No weights{bounds} on the {problem.design.rows} enrolled clients meet the targets.",
        conflict_rows(problem.design, problem.target, np.flatnonzero(blamed)),
        nearest={names[j]: float(values[j]) for j in np.flatnonzero(columns)},
        least_slack=nearest.miss,
        ways_out=(
            "correct the targets",
            "leave a constraint out or coarsen it",
            *(("widen the bounds",) if bounds else ()),
            f"allow a tolerance with a slack above {nearest.miss:.4g}",
        ),
    )
