"""Constants of a federated problem: exact where that is possible, labelled where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.theory.objective import FederatedLogistic
from fedipw.numerics.checks import check_positive, check_probability

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics import FloatArray


class Grade(Enum):
    """How far a constant can be trusted."""

    EXACT = "exact"
    BOUND = "valid bound, not attained"
    ESTIMATED = "estimated from the points given, may be too small"
    GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemConstants:
    r"""What the convergence bound needs to know of a problem.

    .. math:: \frac{1}{N}\sum_i |\nabla f_i(\theta)|^2 \le G^2 + 2 L B^2 (F(\theta) - F^\star),
       \qquad E|g_i - \nabla f_i|^2 \le \sigma^2, \qquad p_i, \hat p_i \ge p_{min} \qquad (T1)

    >>> problem = ProblemConstants(smoothness=2.0, strong_convexity=0.5, heterogeneity=1.0,
    ...                            population_size=100, least_prob=0.1)
    >>> problem.condition, problem.least_replies
    (4.0, 10.0)
    """

    smoothness: float  # L of every client
    strong_convexity: float  # mu of the mean
    heterogeneity: float  # G
    population_size: float  # N
    least_prob: float  # p_min
    growth: float = 1.0  # B, at least 1
    noise: float = 0.0  # sigma, of one stochastic gradient
    grades: Mapping[str, Grade] | None = None  # by name of the constant

    def __post_init__(self) -> None:
        check_positive(self.smoothness, "smoothness L")
        check_positive(self.population_size, "population_size")
        if not self.strong_convexity > 0.0:
            raise InputError(
                f"The mean objective must be strongly convex; mu is {self.strong_convexity!r}. Add "
                "an L2 term: without it no bound of this kind exists."
            )
        if self.strong_convexity > self.smoothness * (1 + 1e-12):
            raise InputError(
                f"mu = {self.strong_convexity:.3g} exceeds L = {self.smoothness:.3g}: one is wrong."
            )
        check_probability([self.least_prob], "p_min")
        for name, least in (("heterogeneity", 0.0), ("noise", 0.0), ("growth", 1.0)):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= least):
                raise InputError(f"{name} must be finite and at least {least:g}, not {value!r}.")

    @property
    def condition(self) -> float:
        """The condition number, kappa = L / mu."""
        return self.smoothness / self.strong_convexity

    @property
    def least_replies(self) -> float:
        """N p_min: the replies of a round if everyone were as unlikely as the least likely."""
        return self.population_size * self.least_prob


def logistic_constants(
    target: FederatedLogistic,
    least_prob: float,
    *,
    batch_size: int | None = None,
    balance: float = 1.0,
) -> ProblemConstants:
    r"""Return the constants of a federated logistic regression.

    L is exact: a client's Hessian is largest at :math:`\theta = 0`, where every
    :math:`p(1 - p) = 1/4`. mu is exact too: the data's curvature vanishes far out, the penalty's
    does not. For convex clients co-coercivity gives, for any ``balance`` a > 0,

    .. math:: G^2 = (1 + a)\, \frac{1}{N}\sum_i |\nabla f_i(\theta^\star)|^2, \qquad
       B^2 = 1 + 1/a, \qquad (T2)

    and for mini-batches of m of n rows :math:`\sigma^2 \le \max_i \frac{n - m}{m (n - 1)}
    \text{mean}_j |x_{ij}|^2`, since no row's gradient exceeds :math:`|x_{ij}|`.
    """
    check_positive(balance, "balance")
    target.require_equal_weights("The theorem")
    if target.l2 <= 0.0:
        raise InputError("Without an L2 term the objective is not strongly convex: set l2 > 0.")
    best = target.minimum()
    gradients = target.client_gradients(best.point)
    spread = float((gradients**2).sum(axis=1).mean())
    largest, squares = _curvatures(target)
    noise = 0.0
    if batch_size is not None:
        n = target.clients.counts.astype(np.float64)
        m = np.minimum(batch_size, n)
        share = np.where(n > 1, (n - m) / (m * np.maximum(n - 1.0, 1.0)), 0.0)
        noise = float(np.sqrt((share * squares).max()))
    return ProblemConstants(
        smoothness=largest + target.l2,
        strong_convexity=target.l2,
        heterogeneity=float(np.sqrt((1.0 + balance) * spread)),
        growth=float(np.sqrt(1.0 + 1.0 / balance)),
        noise=noise,
        population_size=target.clients.size,
        least_prob=least_prob,
        grades={
            "smoothness": Grade.EXACT,
            "strong_convexity": Grade.EXACT,
            "heterogeneity": Grade.BOUND,
            "growth": Grade.BOUND,
            "noise": Grade.EXACT if noise == 0.0 else Grade.BOUND,
            "least_prob": Grade.GIVEN,
        },
    )


def _curvatures(target: FederatedLogistic) -> tuple[float, FloatArray]:
    """Return the largest eigenvalue of any client's X'X/(4n), and mean |x|^2 per client, (N,)."""
    clients = target.clients
    largest, squares = 0.0, np.empty(clients.size)
    for i in range(clients.size):
        rows = slice(clients.offsets[i], clients.offsets[i + 1])
        x = np.column_stack([clients.features[rows], np.ones(clients.counts[i])])
        largest = max(largest, float(np.linalg.norm(x, 2) ** 2 / (4.0 * len(x))))
        squares[i] = (x**2).sum() / len(x)
    return largest, squares


def estimated_constants(
    points: ArrayLike,
    gradients: ArrayLike,
    least_prob: float,
    *,
    population_size: float | None = None,
    noise: float = 0.0,
) -> ProblemConstants:
    r"""Estimate the constants of any model from clients' gradients at a few points.

    ``points`` is (T, d) and ``gradients`` (T, n, d), for instance updates divided by minus the
    step. L is the steepest change of a client's gradient between two points, mu the flattest of the
    mean gradient, G the root mean square where the mean gradient is smallest, B = 1. All are
    labelled as estimates.
    """
    theta, grads = np.asarray(points, dtype=np.float64), np.asarray(gradients, dtype=np.float64)
    if theta.ndim != 2 or grads.ndim != 3 or len(theta) < 2 or len(theta) != len(grads):
        raise InputError(
            f"Need at least two points (T, d) with gradients (T, n, d), not {theta.shape} and "
            f"{grads.shape}."
        )
    if not (np.isfinite(theta).all() and np.isfinite(grads).all()):
        raise InputError("Points and gradients must be finite.")
    steepest, flattest = 0.0, np.inf
    means = grads.mean(axis=1)
    for s in range(len(theta)):
        for t in range(s):
            gap = theta[s] - theta[t]
            length = float(np.linalg.norm(gap))
            if length == 0.0:
                raise InputError(f"Points {t} and {s} coincide.")
            change = np.linalg.norm(grads[s] - grads[t], axis=1).max() / length
            steepest = max(steepest, float(change))
            flattest = min(flattest, float((means[s] - means[t]) @ gap) / length**2)
    if not flattest > 0.0:
        raise InputError(
            f"The mean objective is not convex between the points (curvature {flattest:.3g}): the "
            "bound does not apply to it."
        )
    nearest = int(np.linalg.norm(means, axis=1).argmin())
    estimated = dict.fromkeys(
        ("smoothness", "strong_convexity", "heterogeneity", "growth"), Grade.ESTIMATED
    )
    return ProblemConstants(
        smoothness=steepest,
        strong_convexity=flattest,
        heterogeneity=float(np.sqrt((grads[nearest] ** 2).sum(axis=1).mean())),
        noise=noise,
        population_size=grads.shape[1] if population_size is None else population_size,
        least_prob=least_prob,
        grades={**estimated, "noise": Grade.GIVEN, "least_prob": Grade.GIVEN},
    )
