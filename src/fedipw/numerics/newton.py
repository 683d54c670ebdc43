"""Newton's method for smooth convex objectives, with a result that tells how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from scipy.linalg import eigh

from fedipw.errors import NotConvergedError
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import LARGEST, SMALLEST


class Sums(NamedTuple):
    """Value, gradient (q,) and Hessian (q, q) of an objective at one point."""

    value: float
    gradient: FloatArray
    hessian: FloatArray


class NewtonStatus(Enum):
    """How an iteration ended."""

    CONVERGED = "converged"
    MAX_ITERATIONS = "iteration limit reached"
    SINGULAR = "singular Hessian"
    STALLED = "no step lowers the objective"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewtonResult:
    """Where Newton's method stopped and why; ``point`` is a minimiser only if converged.

    ``gradient_norm`` is the norm at the last point where the objective was evaluated. When the
    iteration ends on ``decrement_tol`` that is the point before the final step, and the final step
    is taken unchecked (its error is of the order of the decrement squared).
    """

    point: FloatArray
    value: float
    gradient_norm: float
    hessian: FloatArray
    iterations: int
    status: NewtonStatus
    tolerance: float

    @property
    def converged(self) -> bool:
        """Whether a tolerance was met."""
        return self.status is NewtonStatus.CONVERGED

    def checked(self) -> NewtonResult:
        """Return itself, or raise if it did not converge."""
        if not self.converged:
            raise NotConvergedError(self.iterations, self.gradient_norm, self.tolerance)
        return self


def newton_minimum(
    objective: Callable[[FloatArray], Sums],
    start: FloatArray,
    *,
    gradient_tol: float = 1e-11,
    decrement_tol: float = 0.0,
    max_iterations: int = 100,
    value_error: Callable[[], float] = lambda: 0.0,
) -> NewtonResult:
    r"""Minimise a convex function by Newton steps with halving.

    .. math:: \beta^{+} = \beta - t H(\beta)^{-1} g(\beta), \qquad
       \lambda^2 = g' H^{-1} g. \qquad (P2)

    Stops when :math:`|g| \le` ``gradient_tol``, or after the step taken at a point whose Newton
    decrement :math:`\lambda^2` is at most ``decrement_tol``.

    Parameters
    ----------
    objective
        Value, gradient and Hessian at a point.
    start
        First point, shape (q,).
    gradient_tol, decrement_tol
        Tolerances; a decrement tolerance of 0 asks for the gradient alone.
    max_iterations
        Limit on steps.
    value_error
        By how much two values may differ beyond rounding, asked after each evaluation: a step that
        raises the objective by no more is taken.

    Examples
    --------
    >>> quadratic = lambda x: Sums(float((x - 3) @ (x - 3)), 2 * (x - 3), 2 * np.eye(1))
    >>> newton_minimum(quadratic, np.zeros(1)).point
    array([3.])
    """
    point = np.array(start, dtype=np.float64)
    at = objective(point)
    status, iterations = NewtonStatus.MAX_ITERATIONS, 0
    norm = float(np.linalg.norm(at.gradient))
    for iterations in range(max_iterations + 1):
        norm = float(np.linalg.norm(at.gradient))
        if norm <= gradient_tol:
            status = NewtonStatus.CONVERGED
            break
        if iterations == max_iterations:
            break
        step = _newton_step(at)
        if step is None:
            status = NewtonStatus.SINGULAR
            break
        decrement = float(step @ at.gradient)
        if decrement <= decrement_tol:
            point, status = point - step, NewtonStatus.CONVERGED
            break
        moved = _lower(objective, point, at.value, _Step(step, decrement), value_error)
        if moved is None:
            status = NewtonStatus.STALLED
            break
        point, at = moved
    return NewtonResult(
        point=point,
        value=at.value,
        gradient_norm=norm,
        hessian=at.hessian,
        iterations=iterations,
        status=status,
        tolerance=gradient_tol,
    )


def _newton_step(at: Sums) -> FloatArray | None:
    """Return H^-1 g; where H is singular, the least such step in units of H's diagonal."""
    scale = np.sqrt(np.diag(at.hessian))
    if not np.isfinite(at.hessian).all() or not np.isfinite(at.gradient).all():
        return None
    # of a smaller one the square is 0
    scale = np.where(scale > SMALLEST, scale, 1.0)
    scaled, gradient = at.hessian / np.outer(scale, scale), at.gradient / scale
    values, vectors = eigh(scaled)
    solid = values > 1e-11 * values[-1]
    along = vectors.T @ gradient
    rounding = 1e-13 * np.sqrt(max(1.0, abs(at.value)))  # of a gradient in this scaling
    if np.linalg.norm(along[~solid]) > max(rounding, 1e-6 * float(np.linalg.norm(gradient))):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        step: FloatArray = vectors[:, solid] @ (along[solid] / values[solid]) / scale
    return step if np.abs(step).max(initial=0.0) <= LARGEST else None


class _Step(NamedTuple):
    """A Newton step and its decrement."""

    step: FloatArray
    decrement: float


def _lower(
    objective: Callable[[FloatArray], Sums],
    point: FloatArray,
    value: float,
    newton: _Step,
    value_error: Callable[[], float],
) -> tuple[FloatArray, Sums] | None:
    """Return the first of the halved steps that lowers the objective enough, if any."""
    slack = 1e-14 * max(1.0, abs(value))  # rounding of the value itself near the minimum
    for halvings in range(40):
        scale = 0.5**halvings
        candidate = point - scale * newton.step
        at = objective(candidate)
        if at.value <= value - 1e-4 * scale * newton.decrement + slack + value_error():
            return candidate, at
    return None
