"""What stays when rounds have done their work: floors of bias, and the limit of any weighting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.evaluation.sensitivity import WeightErrors, sensitivity_errors, sensitivity_ratios
from fedipw.lab.testbed import PopulationModel, Testbed
from fedipw.lab.theory.constants import ProblemConstants
from fedipw.lab.theory.limit import lottery_term
from fedipw.lab.theory.objective import FederatedLogistic
from fedipw.numerics.checks import check_probability, check_rows
from fedipw.tables.design import bound_design

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.lab.engine import Federation
    from fedipw.numerics import FloatArray


def weight_errors(ratio: ArrayLike) -> WeightErrors:
    """Return the errors of weight ratios rho = p / p_hat, (n,), all above 0.

    >>> errors = weight_errors([0.5, 0.5, 0.5])  # half the step, and no bias at all
    >>> errors.raw, errors.centred, errors.rms
    (0.5, 0.0, 0.0)
    """
    rho = np.asarray(ratio, dtype=np.float64)
    if rho.size == 0 or not (np.isfinite(rho).all() and (rho > 0.0).all()):
        raise InputError("Weight ratios must be finite and above 0, and at least one.")
    top, bottom = float(rho.max()), float(rho.min())
    return WeightErrors(
        raw=float(np.abs(rho - 1.0).max()),
        centred=(top - bottom) / (top + bottom),
        rms=float(np.sqrt(np.mean((rho / rho.mean() - 1.0) ** 2))),
        step_factor=0.5 * (top + bottom),
    )


def participation_only_errors(enrollment_prob: ArrayLike) -> WeightErrors:
    r"""Return the errors left when participation is corrected and enrollment is not.

    Then :math:`\rho_i = \pi^{enr}_i` even with participation known exactly, so the raw error is
    :math:`\max_i |1 - \pi^{enr}_i|`: the corollary on enrollment omitted.

    >>> participation_only_errors([0.2, 0.6]).raw
    0.8
    """
    return weight_errors(check_probability(enrollment_prob, "enrollment_prob"))


def exact_floor(target: FederatedLogistic, ratio: FloatArray) -> float:
    r"""Return the excess loss of the minimiser under weights off by ``ratio`` (N,).

    .. math:: F(\theta_\rho^\star) - F^\star, \qquad
       \theta_\rho^\star = \arg\min \textstyle\sum_i \rho_i f_i \qquad (T7)

    By Newton, to the last digits. A constant ratio has no floor.
    """
    best = target.minimum()
    weighted = FederatedLogistic(target.clients, target.l2, target.client_weights * ratio)
    return target.excess(weighted.minimum(best.point).point, best.point)


def first_order_floor(target: FederatedLogistic, ratio: FloatArray) -> float:
    r"""Return the leading term of the floor for small errors.

    .. math:: \tfrac12\, g' H^{-1} g, \qquad
       g = \text{mean}\left[(\rho_i/\bar\rho - 1)\nabla f_i(\theta^\star)\right] \qquad (T8)
    """
    check_rows(target.clients.size, ratio=ratio)
    best = target.minimum()
    weight = target.client_weights / target.client_weights.sum()
    centred = ratio / float(weight @ ratio) - 1.0
    g = (weight * centred) @ target.client_gradients(best.point)
    return float(0.5 * g @ np.linalg.solve(target.sums(best.point).hessian, g))


def largest_floor(weight_error: float, problem: ProblemConstants) -> float:
    r"""Return a bound on the floor that weights off by a centred error can leave.

    .. math:: F(\theta_\rho^\star) - F^\star \le \frac{\epsilon^2 G^2}{2 (\mu - \epsilon^2 L B^2)}
       \qquad (T11)

    At the misweighted minimiser :math:`\nabla F = \text{mean}[(1 - \tilde\rho_i) \nabla f_i]` with
    :math:`|1 - \tilde\rho_i| \le \epsilon`, so :math:`2\mu (F - F^\star) \le |\nabla F|^2 \le
    \epsilon^2 (G^2 + 2 L B^2 (F - F^\star))` by (T1). Infinite where
    :math:`\epsilon^2 L B^2 \ge \mu`.

    >>> problem = ProblemConstants(smoothness=2.0, strong_convexity=1.0, heterogeneity=1.0,
    ...                            population_size=100, least_prob=0.1)
    >>> round(largest_floor(0.1, problem), 6), largest_floor(0.9, problem)
    (0.005102, inf)
    """
    if not weight_error >= 0.0:
        raise InputError(f"A weight error is 0 or more, not {weight_error!r}.")
    left = problem.strong_convexity - weight_error**2 * problem.smoothness * problem.growth**2
    return weight_error**2 * problem.heterogeneity**2 / (2.0 * left) if left > 0.0 else np.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SensitivityFloor:
    """What an unobserved driver of enrollment can do to training."""

    odds_ratio: float
    weight_error: float  # largest centred error of the weights
    floor: float  # excess loss of the worst weights found, attained by ``ratio``
    ratio: FloatArray  # (N,)


def sensitivity_floor(
    target: FederatedLogistic, enrollment_prob: FloatArray, odds_ratio: float
) -> SensitivityFloor:
    r"""Return a floor that unobserved drivers of enrollment of up to Lambda can leave.

    .. math:: \max_\rho \; \tfrac12\, g' H^{-1} g, \qquad
       g = \frac{\sum_i \rho_i \nabla f_i(\theta^\star)}{\sum_i \rho_i} \qquad (T12)

    over the ratios :math:`\rho` of (T4). Along a direction the largest mean is a threshold on the
    gradients, as in the bounds of a metric (E3); directions are improved in turn from each axis of
    the Hessian, and the floor of the worst ratios found is exact (T7). It is attained, so the true
    worst case is no smaller; :func:`largest_floor` bounds it from above.

    >>> from fedipw.lab.testbed import Testbed
    >>> from fedipw.lab.theory import target_weights
    >>> clients = Testbed(size=100).draw(np.random.default_rng(0)).clients
    >>> target = FederatedLogistic(clients, 0.05, target_weights(clients))
    >>> prob = np.full(100, 0.5)
    >>> [round(sensitivity_floor(target, prob, x).floor, 4) for x in (1.0, 1.5, 2.0)]
    [0.0, 0.0024, 0.0065]
    """
    check_rows(target.clients.size, enrollment_prob=enrollment_prob)
    low, high = sensitivity_ratios(enrollment_prob, odds_ratio)
    best = target.minimum()
    gradients = target.client_gradients(best.point) * target.client_weights[:, None]
    hessian = target.sums(best.point).hessian
    worst, largest = np.ones(len(low)), 0.0
    for axis in np.linalg.eigh(hessian)[1].T:
        for start in (axis, -axis):
            ratio, value = _climbed(gradients, target.client_weights, hessian, start, (low, high))
            if value > largest:
                worst, largest = ratio, value
    floor = exact_floor(target, worst) if largest > 0.0 else 0.0
    return SensitivityFloor(
        odds_ratio=odds_ratio,
        weight_error=sensitivity_errors(enrollment_prob, odds_ratio).centred,
        floor=floor,
        ratio=worst,
    )


def _climbed(
    gradients: FloatArray,
    weights: FloatArray,
    hessian: FloatArray,
    direction: FloatArray,
    box: tuple[FloatArray, FloatArray],
) -> tuple[FloatArray, float]:
    """Return ratios no direction improves on, and g'H^-1 g / 2 of (T12) there."""
    ratio, value = np.ones(len(weights)), 0.0
    for _ in range(100):
        ratio_next = _tilted(gradients @ direction, weights, box)
        g = ratio_next @ gradients / (ratio_next @ weights)
        direction = np.asarray(np.linalg.solve(hessian, g), dtype=np.float64)
        found = 0.5 * float(g @ direction)
        if found <= value * (1.0 + 1e-12):
            break
        ratio, value = ratio_next, found
    return ratio, value


def _tilted(
    along: FloatArray, weights: FloatArray, box: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Return the ratios in the box with the largest weighted mean of ``along`` / ``weights``."""
    low, high = box
    ratio, level = low, float(low @ along) / float(low @ weights)
    while True:
        at = np.where(along > level * weights, high, low)
        mean = float(at @ along) / float(at @ weights)
        if not mean > level:
            return ratio
        ratio, level = at, mean


def efficiency_bound(
    target: FederatedLogistic, enrollment_prob: FloatArray, variance: FloatArray
) -> float:
    r"""Return the least expected excess loss of regular weightings consistent under selection.

    .. math:: \frac{1}{2N}\, \text{tr}\left(H^{-1}\, \text{mean}\left[
       \frac{1 - \pi_i}{\pi_i} \text{Var}(\nabla f_i \mid Z_i)\right]\right)
       \quad \text{at } \theta^\star \qquad (T9)

    ``variance`` is :math:`\text{Var}(\nabla f_i \mid Z_i)`, (N, d + 1, d + 1): from
    :func:`redrawn_variance` on synthetic data, from :func:`residual_variance` in practice. The
    oracle has the raw second moment in its place (L3), so it is no lower bound. A weighting that
    is not consistent under selection, such as participation-only, can lie below where enrollment
    does not predict gradients.
    """
    prob = check_probability(enrollment_prob, "enrollment_prob")
    check_rows(target.clients.size, enrollment_prob=prob, variance=variance)
    target.require_equal_weights("The efficiency bound")
    hessian = target.sums(target.minimum().point).hessian
    spread = np.einsum("i,ijk->jk", (1.0 - prob) / prob, variance) / len(prob)
    return float(np.trace(np.linalg.solve(hessian, spread)) / (2.0 * len(prob)))


def enrollment_costs(
    target: FederatedLogistic, federation: Federation, model: PopulationModel, seed: int
) -> dict[str, float]:
    """Return what one draw of enrollment costs on average: the oracle (L3), and at least (T9).

    Clients' gradients are drawn anew on the testbed; of real clients there is one draw, and the
    residuals of a regression on Z stand for it.
    """
    prob = federation.enrollment_prob
    if prob is None:
        return {}
    theta, rng = target.minimum().point, np.random.default_rng([seed, 2])
    population = federation.population
    if isinstance(model, Testbed):
        variance = redrawn_variance(model, population.matrix(), theta, target.l2, rng)
    else:
        design = bound_design(".", population.frame.lazy(), population.covariates)
        Z = design.rows(population.frame, "population table").columns.T
        variance = residual_variance(target.client_gradients(theta), Z)
    return {
        "lottery_term": lottery_term(target, prob),
        "efficiency_bound": efficiency_bound(target, prob, variance),
    }


def redrawn_variance(
    testbed: Testbed,
    Z: FloatArray,
    theta: FloatArray,
    l2: float,
    rng: np.random.Generator,
    *,
    draws: int = 20,
) -> FloatArray:
    """Return Var(grad f_i | Z_i) on the testbed by drawing every client's data anew, (N, d+1, d+1).

    Z is held fixed in all draws. From two draws on it is unbiased for each client; it is averaged
    over clients where used.
    """
    n, q = len(Z), len(theta)
    mean, second = np.zeros((n, q)), np.zeros((n, q, q))
    for _ in range(draws):
        clients = testbed.clients_given(Z, rng)
        gradients = FederatedLogistic(clients, l2, np.ones(n)).client_gradients(theta)
        mean += gradients / draws
        second += np.einsum("ij,ik->ijk", gradients, gradients)
    variance: FloatArray = (second - draws * np.einsum("ij,ik->ijk", mean, mean)) / (draws - 1)
    return variance


def residual_variance(
    gradients: FloatArray, Z: FloatArray, weights: FloatArray | None = None
) -> FloatArray:
    """Return an estimate of Var(grad f_i | Z_i) from one gradient per client, (n, d+1, d+1).

    Residuals of a least-squares fit of the gradients (n, d + 1) on Z with squares and products,
    scaled up for the coefficients spent. Weight enrolled clients by 1/pi: the fit must be good
    where few enroll.
    """
    n, q = Z.shape
    check_rows(n, gradients=gradients)
    pairs = [Z[:, j] * Z[:, k] for j in range(q) for k in range(j + 1)]
    design = np.column_stack([np.ones(n), Z, *pairs])
    if n <= 2 * design.shape[1]:
        raise InputError(
            f"{n} clients are too few for {design.shape[1]} terms of Z: use fewer covariates."
        )
    root = np.ones((n, 1)) if weights is None else np.sqrt(weights)[:, None]
    fit, _, rank, _ = np.linalg.lstsq(root * design, root * gradients)
    residual = gradients - design @ fit
    outer: FloatArray = np.einsum("ij,ik->ijk", residual, residual) * (n / (n - rank))
    return outer


def estimated_efficiency_bound(
    gradients: FloatArray, Z: FloatArray, enrollment_prob: FloatArray, hessian: FloatArray
) -> float:
    r"""Return (T9) from what a deployment knows: enrolled clients only.

    .. math:: \frac{1}{2\hat N}\, \text{tr}\left(H^{-1}\, \frac{1}{\hat N}\sum_{i \in E}
       \frac{1 - \hat\pi_i}{\hat\pi_i^2}\, r_i r_i'\right), \qquad
       \hat N = \sum_{i \in E} 1/\hat\pi_i \qquad (T9')

    ``gradients`` (n, d + 1) of the enrolled at the trained model, for instance updates divided by
    minus the step; r are their residuals on Z with squares and products; ``hessian`` of the
    weighted objective there.
    """
    prob = check_probability(enrollment_prob, "enrollment_prob")
    check_rows(len(prob), gradients=gradients, Z=Z)
    size = float((1.0 / prob).sum())
    outer = residual_variance(gradients, Z, 1.0 / prob)
    spread = np.einsum("i,ijk->jk", (1.0 - prob) / prob**2, outer) / size
    return float(np.trace(np.linalg.solve(hessian, spread)) / (2.0 * size))
