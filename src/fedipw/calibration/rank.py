"""Columns that say nothing new: constants and those that follow from the columns before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.calibration.design import BalanceDesign, Frame, gram
from fedipw.errors import InfeasibleError

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray

_VARIANCE = 1e-12  # share of a column's variance below which nothing is left of it
_CONSISTENT = 1e-6  # of the column's range: targets that follow may be rounded
_ROUNDING = 1e-12  # of a target that should be 0
SUBSAMPLE = 20_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Independence:
    """Which columns are constrained, and what became of the others."""

    kept: BoolArray  # (q,)
    dropped: dict[str, str]  # name and reason


def independence(design: BalanceDesign, target: FloatArray) -> Independence:
    """Return the columns to constrain; a dependent column whose target disagrees is an error.

    A column that depends on others over all rows does so over some of them, so a subsample that
    shows none but those implied by the design spares the pass over the data.
    """
    moments = design.moments
    constant = moments.least == moments.largest
    scale = np.where(constant, 1.0, moments.deviation)
    kept, relation = _independent(design, scale, constant)
    dropped = _dropped_constants(design, target)
    for j in np.flatnonzero(~kept & ~constant).tolist():
        name = design.names[j]
        size = float(moments.largest[j] - moments.least[j])
        standard = (target[kept] - moments.mean[kept]) / scale[kept]
        follows = float(moments.mean[j] + scale[j] * (relation[j, kept] @ standard))
        off = float(target[j]) - follows
        if abs(off) > _CONSISTENT * size:
            raise _dependent_error(design, relation[j], j, target, follows)
        others = _named(design, relation[j])
        dropped[name] = f"follows from {others}" + (
            f"; its target is off by {off:.2g}" if abs(off) > 1e-10 * size else ""
        )
    return Independence(kept=kept, dropped=dropped)


def variation(design: BalanceDesign, target: FloatArray) -> Independence:
    """Return all columns that vary: with a tolerance they need not be independent."""
    moments = design.moments
    return Independence(
        kept=moments.least < moments.largest, dropped=_dropped_constants(design, target)
    )


def _dropped_constants(design: BalanceDesign, target: FloatArray) -> dict[str, str]:
    """Return columns that are constant; one whose target is another value is an error."""
    moments = design.moments
    dropped = {}
    for j in np.flatnonzero(moments.least == moments.largest):
        value = float(moments.least[j])
        if abs(float(target[j]) - value) > _CONSISTENT * abs(value) + _ROUNDING:
            raise _constant_error(design, int(j), float(target[j]))
        dropped[design.names[j]] = f"constant, {value:.6g}, for all enrolled clients"
    return dropped


def subsample(design: BalanceDesign, base: FloatArray) -> tuple[BalanceDesign, FloatArray]:
    """Return about 20,000 rows spread over all, and their base shares."""
    rows = slice(None, None, design.rows // SUBSAMPLE)
    part = design.take(rows)
    return part, np.array([1.0 / part.rows]) if len(base) == 1 else base[rows] / base[rows].sum()


def _independent(
    design: BalanceDesign, scale: FloatArray, constant: BoolArray
) -> tuple[BoolArray, FloatArray]:
    """Return which columns are independent, (q,), and how the others follow, (q, q)."""
    frame = Frame(design.moments.mean, scale)
    base = np.array([1.0 / design.rows])  # dependence is one of rows, whatever their weight
    if design.rows > 2 * SUBSAMPLE and not constant.any():
        kept, relation = _factor(gram(*subsample(design, base), frame), constant)
        if not (~kept & ~design.implied).any():
            return kept, relation
    return _factor(gram(design, base, frame), constant)


def _factor(square: FloatArray, constant: BoolArray) -> tuple[BoolArray, FloatArray]:
    """Sweep columns in their order out of a Gram matrix (constant last), those that are new."""
    q = len(constant)
    mean = square[-1, :-1] / square[-1, -1]
    rest = square[:-1, :-1] - square[-1, -1] * np.outer(mean, mean)
    first = np.diag(rest).copy()
    kept = np.zeros(q, dtype=np.bool_)
    for j in range(q):
        if constant[j] or rest[j, j] <= _VARIANCE * max(first[j], 1e-300):
            continue
        kept[j] = True
        rest = rest - np.outer(rest[:, j], rest[j]) / rest[j, j]
    relation = np.zeros((q, q))
    if not kept.all() and kept.any():
        full = square[:-1, :-1] - square[-1, -1] * np.outer(mean, mean)
        relation[:, kept] = np.linalg.solve(full[np.ix_(kept, kept)], full[kept]).T
    return kept, relation


def _named(design: BalanceDesign, relation: FloatArray) -> str:
    names = [design.names[k] for k in np.flatnonzero(np.abs(relation) > 1e-6)]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _span(design: BalanceDesign, j: int, target: float) -> tuple[str, float, float, float]:
    moments = design.moments
    return design.names[j], target, float(moments.least[j]), float(moments.largest[j])


def _constant_error(design: BalanceDesign, j: int, target: float) -> InfeasibleError:
    value = float(design.moments.least[j])
    why = (
        f"All {design.rows} enrolled clients have {design.names[j]} = {value:.6g}, so no weights "
        f"give a mean of {target:.6g}."
    )
    ways = (
        "correct the target",
        "leave this constraint out: nobody enrolled can stand for those it is about",
        "merge the level with another that enrolled clients have",
    )
    return InfeasibleError(why, (_span(design, j, target),), ways_out=ways)


def _dependent_error(
    design: BalanceDesign, relation: FloatArray, j: int, target: FloatArray, follows: float
) -> InfeasibleError:
    others = np.flatnonzero(np.abs(relation) > 1e-6)
    why = (
        f"{design.names[j]} follows from {_named(design, relation)} among the enrolled clients; "
        f"their targets make it {follows:.6g}, not {float(target[j]):.6g}."
    )
    rows = tuple(_span(design, int(k), float(target[k])) for k in (*others, j))
    ways = ("correct the targets", "leave one of them out", "allow a tolerance with a slack")
    return InfeasibleError(why, rows, ways_out=ways)
