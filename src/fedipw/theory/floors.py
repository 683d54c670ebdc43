"""What stays when rounds have done their work: floors of bias, and the limit of any weighting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_probability, check_rows
from fedipw.theory.objective import FederatedLogistic

if TYPE_CHECKING:
    from fedipw.data.testbed import Testbed
    from fedipw.numerics.types import FloatArray


def exact_floor(target: FederatedLogistic, ratio: FloatArray) -> float:
    r"""Return the excess loss of the minimiser under weights off by ``ratio`` (N,).

    .. math:: F(\theta_\rho^\star) - F^\star, \qquad
       \theta_\rho^\star = \arg\min \textstyle\sum_i \rho_i f_i \qquad (T7)

    By Newton, to the last digits. A constant ratio has no floor.
    """
    best = target.minimum()
    weighted = FederatedLogistic(target.clients, target.l2, target.client_weights * ratio)
    return float(target.losses(weighted.minimum(best.point).point)[0] - best.value)


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


def efficiency_bound(
    target: FederatedLogistic, enrollment_prob: FloatArray, variance: FloatArray
) -> float:
    r"""Return the expected excess loss no regular weighting can beat.

    .. math:: \frac{1}{2N}\, \text{tr}\left(H^{-1}\, \text{mean}\left[
       \frac{1 - \pi_i}{\pi_i} \text{Var}(\nabla f_i \mid Z_i)\right]\right)
       \quad \text{at } \theta^\star \qquad (T9)

    ``variance`` is :math:`\text{Var}(\nabla f_i \mid Z_i)`, (N, d + 1, d + 1): from
    :func:`redrawn_variance` on synthetic data, from :func:`residual_variance` in practice. The
    oracle has the raw second moment in its place (L3), so it is no lower bound.
    """
    prob = check_probability(enrollment_prob, "enrollment_prob")
    check_rows(target.clients.size, enrollment_prob=prob, variance=variance)
    target.require_equal_weights("The efficiency bound")
    hessian = target.sums(target.minimum().point).hessian
    spread = np.einsum("i,ijk->jk", (1.0 - prob) / prob, variance) / len(prob)
    return float(np.trace(np.linalg.solve(hessian, spread)) / (2.0 * len(prob)))


def redrawn_variance(
    testbed: Testbed, Z: FloatArray, theta: FloatArray, l2: float, rng: np.random.Generator
) -> FloatArray:
    """Return Var(grad f_i | Z_i) on the testbed by drawing every client's data anew, (N, d+1, d+1).

    20 draws with Z held fixed; unbiased for each client, and averaged over clients where used.
    """
    draws, n, q = 20, len(Z), len(theta)
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
