"""Small problems with known answers: the lower bound, and where bounds fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoClients:
    r"""Two quadratic clients on which the floor is met with equality.

    .. math:: f_{1,2}(\theta) = \frac{\mu}{2}(\theta \mp a)^2, \quad \rho = (1 + \epsilon,
       1 - \epsilon): \qquad F(\theta_\rho^\star) - F^\star = \frac{\epsilon^2 G^2}{2\mu}
       \qquad (T10)

    with :math:`G = \mu a`. The statement in the paper has 1/8 in place of 1/2.

    >>> pair = TwoClients(strong_convexity=2.0, distance=3.0)
    >>> pair.suboptimality(0.5), 0.5**2 * pair.heterogeneity**2 / (2 * 2.0)
    (2.25, 2.25)
    """

    strong_convexity: float = 1.0  # mu
    distance: float = 1.0  # a

    def __post_init__(self) -> None:
        check_positive(self.strong_convexity, "strong_convexity")
        check_positive(self.distance, "distance")

    @property
    def heterogeneity(self) -> float:
        """G = mu a."""
        return self.strong_convexity * self.distance

    def minimiser(self, weight_error: float) -> float:
        """Return the minimiser of the misweighted objective, by its first-order condition."""
        if not 0.0 <= weight_error <= 0.5:
            raise InputError(f"eps_w must lie in [0, 1/2], not {weight_error!r}.")
        first, second = 1.0 + weight_error, 1.0 - weight_error
        return (first - second) * self.distance / (first + second)

    def loss(self, theta: float) -> float:
        """Return the target objective at a point."""
        a, mu = self.distance, self.strong_convexity
        return 0.25 * mu * ((theta - a) ** 2 + (theta + a) ** 2)

    def suboptimality(self, weight_error: float) -> float:
        """Return F(theta_rho*) - F*."""
        return self.loss(self.minimiser(weight_error)) - self.loss(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvedPair:
    r"""Half the clients :math:`\tfrac{L}{2}\theta^2`, half :math:`-\tfrac{L - 2\mu}{2}\theta^2`.

    F is mu-strongly convex, every client is L-smooth, and G = sigma = 0. With everyone taking part
    and exact weights the printed bound goes to 0 for any step up to its limit; but local steps of
    the concave half run away, and the mean of the local models may grow.

    >>> pair = CurvedPair(smoothness=50.0, strong_convexity=1.0)
    >>> round(pair.growth(local_steps=10, effective_step=1 / (9 * 50.0)), 3)
    1.003
    """

    smoothness: float
    strong_convexity: float

    def __post_init__(self) -> None:
        check_positive(self.smoothness, "smoothness")
        check_positive(self.strong_convexity, "strong_convexity")

    def growth(self, local_steps: int, effective_step: float) -> float:
        """Return the factor by which theta is multiplied in one round (server step 1)."""
        if local_steps < 1:
            raise InputError(f"K must be at least 1 local step, not {local_steps}.")
        eta = effective_step / local_steps
        up = (1.0 - eta * self.smoothness) ** local_steps
        down = (1.0 + eta * (self.smoothness - 2.0 * self.strong_convexity)) ** local_steps
        return 0.5 * (up + down)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvexTriple:
    r"""Convex clients with one common minimiser, in the plane, whose excess loss first rises.

    .. math:: f_1 = \tfrac12 (x + \sqrt{\mu}\, y)^2, \qquad
       f_2 = f_3 = \tfrac12 (\tfrac12 x - \sqrt{\mu}\, y)^2, \qquad
       F = \tfrac14 x^2 + \tfrac{\mu}{2} y^2

    in equal shares of a population as large as one likes: L = 1 + mu, B = 1, G = sigma = 0. Local
    drift moves error from the flat direction into the steep one, where it costs more. So convexity
    of every client does not replace the drift condition of (T6).

    >>> triple = ConvexTriple(strong_convexity=1e-5)
    >>> float(round(triple.growth(local_steps=200, effective_step=1 / 8, rounds=30), 6))
    1.000275
    """

    strong_convexity: float  # mu

    def __post_init__(self) -> None:
        check_positive(self.strong_convexity, "strong_convexity")
        if self.strong_convexity > 0.5:
            raise InputError(
                f"mu must be at most 1/2, the steep curvature, not {self.strong_convexity!r}."
            )

    @property
    def curvatures(self) -> FloatArray:
        """The clients' Hessians, each of rank one, (3, 2, 2)."""
        flat = np.sqrt(self.strong_convexity)
        slopes = np.array([[1.0, flat], [0.5, -flat], [0.5, -flat]])
        outer: FloatArray = slopes[:, :, None] * slopes[:, None, :]
        return outer

    def round_map(self, local_steps: int, effective_step: float) -> FloatArray:
        """Return the matrix by which theta is multiplied in one round (server step 1), (2, 2)."""
        if local_steps < 1:
            raise InputError(f"K must be at least 1 local step, not {local_steps}.")
        local_step = np.eye(2) - effective_step / local_steps * self.curvatures
        mean: FloatArray = np.linalg.matrix_power(local_step, local_steps).mean(axis=0)
        return mean

    def growth(self, local_steps: int, effective_step: float, rounds: int) -> float:
        """Return the largest (F(theta_R) - F*) / (F(theta_0) - F*) over all starts."""
        root = np.sqrt([0.5, self.strong_convexity])  # of F's Hessian, which is diagonal
        after = np.linalg.matrix_power(self.round_map(local_steps, effective_step), rounds)
        return float(np.linalg.norm(root[:, None] * after / root, 2) ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalPair:
    r"""Half the clients :math:`\tfrac{L}{2}(\theta - a)^2`, half :math:`\tfrac{l}{2}(\theta + b)^2`.

    Convex clients, no noise, everyone takes part, exact weights, N as large as one likes: the
    printed bound goes to 0. With K >= 2 local steps the round's fixed point is not the minimum.
    The distances a and b put the minimum at 0: :math:`L a = l b`.

    >>> pair = UnequalPair(smoothness=10.0, low_curvature=1.0)
    >>> abs(pair.fixed_point(local_steps=1, step_size=0.01)) < 1e-12
    True
    >>> pair.excess(local_steps=5, step_size=0.01) > 1e-4
    True
    """  # noqa: E501

    smoothness: float
    low_curvature: float
    force: float = 1.0  # |gradient| of either client at the minimum: G^2 = 2 force^2 in (T1)

    def __post_init__(self) -> None:
        for name in ("smoothness", "low_curvature", "force"):
            check_positive(getattr(self, name), name)

    def fixed_point(self, local_steps: int, step_size: float) -> float:
        """Return where full participation and exact weights settle."""
        if local_steps < 1:
            raise InputError(f"K must be at least 1 local step, not {local_steps}.")
        stay = [
            (1.0 - step_size * curvature) ** local_steps
            for curvature in (self.smoothness, self.low_curvature)
        ]
        pull = [(1.0 - stay[0]) / self.smoothness, (1.0 - stay[1]) / self.low_curvature]
        return self.force * (pull[0] - pull[1]) / (2.0 - stay[0] - stay[1])

    def excess(self, local_steps: int, step_size: float) -> float:
        """Return the excess loss of the fixed point."""
        mean = 0.5 * (self.smoothness + self.low_curvature)
        return 0.5 * mean * self.fixed_point(local_steps, step_size) ** 2
