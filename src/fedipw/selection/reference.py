"""Enrollment probabilities from a reference sample: nobody outside it and the enrolled is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import expit

from fedipw.errors import InputError, NotConvergedError
from fedipw.numerics.checks import check_finite, check_probability, check_rows
from fedipw.numerics.logistic import logistic_sums
from fedipw.numerics.newton import Sums, newton_minimum

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceFit:
    """A logistic enrollment model fitted on the enrolled and a reference sample."""

    prob: FloatArray  # of the enrolled, (n,)
    coefficients: FloatArray  # (q,)
    intercept: float
    population_size: float  # sum of the design weights

    def prob_at(self, Z: FloatArray) -> FloatArray:
        """Return P(E = 1 | Z) of other clients, (m,)."""
        prob: FloatArray = expit(Z @ self.coefficients + self.intercept)
        return prob


def reference_sample_fit(
    enrolled: FloatArray,
    reference: FloatArray,
    design_weights: ArrayLike,
    names: Sequence[str] | None = None,
) -> ReferenceFit:
    r"""Fit P(E = 1 | Z) when the population is known through a probability sample of it.

    .. math:: \sum_{i \in E} z_i - \sum_{j \in R} d_j\, \pi(z_j) z_j = 0, \qquad
       \text{logit}\, \pi(z) = z'\beta, \qquad (P3)

    the pseudo-maximum-likelihood of Chen, Li and Wu (2020): the reference sample's weighted sum
    stands for the population's. z contains the constant.

    Parameters
    ----------
    enrolled
        Covariates of the enrolled clients, (n, q).
    reference
        The same covariates of the reference sample, (m, q), which may contain enrolled clients.
    design_weights
        Inverse inclusion probabilities of the reference sample, (m,); they sum to about N.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> Z = rng.standard_normal((20_000, 1))
    >>> inside = rng.random(20_000) < expit(-1.0 + Z[:, 0])
    >>> sample = rng.choice(20_000, 2_000, replace=False)
    >>> fit = reference_sample_fit(Z[inside], Z[sample], np.full(2_000, 10.0))
    >>> bool(abs(fit.coefficients[0] - 1.0) < 0.15), fit.population_size
    (True, 20000.0)
    """
    names = names or [f"z{j + 1}" for j in range(enrolled.shape[1])]
    weights = np.asarray(design_weights, dtype=np.float64)
    _check(enrolled, reference, weights, names)
    share = weights / weights.sum()
    centre = share @ reference
    scale = np.sqrt(share @ (reference - centre) ** 2)
    if (scale == 0.0).any():
        constant = [n for n, s in zip(names, scale, strict=True) if s == 0.0]
        raise InputError(
            f"{', '.join(constant)} is constant in the reference sample: leave it out."
        )
    size = float(weights.sum())
    inside = np.append(((enrolled - centre) / scale).sum(axis=0), len(enrolled)) / size
    outside = np.ascontiguousarray((reference - centre) / scale)
    never = np.zeros(len(reference), dtype=np.int8)

    def objective(beta: FloatArray) -> Sums:
        at = logistic_sums(outside, never, share, beta)  # sum of d log(1 + e^u) over the sample
        return at._replace(value=at.value - float(inside @ beta), gradient=at.gradient - inside)

    start = np.zeros(len(names) + 1)
    start[-1] = np.log(len(enrolled) / (size - len(enrolled)))
    found = newton_minimum(objective, start, gradient_tol=1e-12, max_iterations=100)
    if not found.converged:
        raise NotConvergedError(found.iterations, found.gradient_norm, 1e-12)
    beta = found.point[:-1] / scale
    intercept = float(found.point[-1] - beta @ centre)
    prob = check_probability(expit(enrolled @ beta + intercept), "fitted enrollment probability")
    return ReferenceFit(prob=prob, coefficients=beta, intercept=intercept, population_size=size)


def _check(
    enrolled: FloatArray, reference: FloatArray, weights: FloatArray, names: Sequence[str]
) -> None:
    if enrolled.ndim != 2 or reference.ndim != 2 or enrolled.shape[1] != reference.shape[1]:
        raise InputError(
            f"Enrolled {enrolled.shape} and reference sample {reference.shape} need the same "
            "columns."
        )
    check_rows(len(reference), design_weights=weights)
    check_finite(enrolled, names, "enrolled clients")
    check_finite(reference, names, "reference sample")
    if not (np.isfinite(weights).all() and (weights > 0.0).all()):
        raise InputError("Design weights must be finite and above 0.")
    if weights.sum() <= len(enrolled):
        raise InputError(
            f"The design weights sum to {weights.sum():.6g}, no more than the {len(enrolled)} "
            "enrolled clients: they must sum to about the population size."
        )
    if len(reference) <= enrolled.shape[1]:
        raise InputError(f"{len(reference)} reference rows are too few for {len(names)} columns.")
