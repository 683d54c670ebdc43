"""What stands in the way of calibration: a proof, the constraints in conflict, the ways out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedipw.calibration.dual import TOLERANCE, DualProblem, DualResult, Status
from fedipw.calibration.feasibility import FEASIBLE, Nearest, Reach, conflict, nearest_reachable
from fedipw.errors import InfeasibleError, NotConvergedError

if TYPE_CHECKING:
    from fedipw.calibration.distances import Distance
    from fedipw.numerics.types import BoolArray

VIOLATION = 1e-8  # standard deviations a solved constraint may be off at most
ADVICE = (
    "The targets can be met, but hardly: they lie close to the border of what can be, or base "
    "weights or columns are very uneven. Allow a (wider) slack, coarsen the constraints, or even "
    "out the base weights."
)
_PROBE = 1e-7  # a target this much farther out, in shifts, decides whether it lies on the border
_TINY = 1e-12  # a ratio this near to an end of its span is looked at: border targets make it so


def at_the_border(problem: DualProblem, found: DualResult, distance: Distance) -> bool:
    """Return whether ratios run to an end of the span that the distance can only approach."""
    if distance.closed:
        return False
    _, low, high = problem.family
    return bool(found.ratio.min() - low < _TINY or high - found.ratio.max() < _TINY)


def explain(problem: DualProblem, distance: Distance, found: DualResult) -> None:
    """Raise what stands in the way of a solution, if anything does."""
    reach, columns = _reach(problem), _varying(problem)
    if not problem.ridge.any() and np.isfinite(distance.span[0]):
        width = float(problem.box.max(initial=0.0)) / problem.total
        nearest = nearest_reachable(reach, columns)
        if nearest.bound > width + FEASIBLE:
            proof = nearest_reachable(reach, problem.kept, decide=width)
            blamed = conflict(reach, proof, problem.kept, width)
            raise infeasible(problem, distance, blamed, nearest)
        if not distance.closed and width == 0.0:
            away = _PROBE * (problem.target - problem.design.moments.mean)
            beyond = replace(reach, target=problem.target + away)
            outer = nearest_reachable(beyond, problem.kept)
            if outer.bound > FEASIBLE:
                raise _border(problem, conflict(beyond, outer, problem.kept))
    if found.status is not Status.CONVERGED:
        raise NotConvergedError(found.iterations, found.remaining, TOLERANCE, ADVICE)


def _varying(problem: DualProblem) -> BoolArray:
    """Return columns a slack would hold: all that vary, those that follow from others too."""
    moments = problem.design.moments
    varies: BoolArray = moments.least < moments.largest
    return varies


def _reach(problem: DualProblem) -> Reach:
    return Reach(
        design=problem.design,
        base=problem.base,
        target=problem.target,
        scale=problem.scale,
        span=problem.family[1:],
        total=problem.total,
    )


def _conflict_rows(
    problem: DualProblem, blamed: BoolArray
) -> tuple[tuple[str, float, float, float], ...]:
    moments, names = problem.design.moments, problem.design.names
    return tuple(
        (names[j], float(problem.target[j]), float(moments.least[j]), float(moments.largest[j]))
        for j in np.flatnonzero(blamed)
    )


def infeasible(
    problem: DualProblem, distance: Distance, blamed: BoolArray, known: Nearest | None = None
) -> InfeasibleError:
    """Return the error that names the constraints to blame and the nearest that can be met."""
    columns = _varying(problem)
    nearest = nearest_reachable(_reach(problem), columns) if known is None else known
    values = problem.target + problem.scale * nearest.point
    names = problem.design.names
    low, high = distance.span
    bounds = f" with ratios between {low:g} and {high:g}" if (low, high) != (0.0, np.inf) else ""
    return InfeasibleError(
        f"No weights{bounds} on the {problem.design.rows} enrolled clients meet the targets.",
        _conflict_rows(problem, blamed),
        nearest={names[j]: float(values[j]) for j in np.flatnonzero(columns)},
        least_slack=nearest.miss,
        ways_out=(
            "correct the targets",
            "leave a constraint out or coarsen it",
            *(("widen the bounds",) if bounds else ()),
            f"allow a tolerance with a slack above {nearest.miss:.4g}",
        ),
    )


def _border(problem: DualProblem, blamed: BoolArray) -> InfeasibleError:
    why = (
        "The targets lie on the border of what enrolled clients span: they can be met only with "
        "weight ratios at the ends of their range, which this distance never reaches."
    )
    ways = ("use the quadratic distance", "correct the targets", "allow a tolerance with a slack")
    return InfeasibleError(why, _conflict_rows(problem, blamed), ways_out=ways)
