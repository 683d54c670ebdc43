"""Enrollment: who can train at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.mechanisms.base import score_of, solved_intercept
from fedipw.numerics.checks import check_probability
from fedipw.numerics.logistic import sigmoids

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray
    from fedipw.tables.population import Population


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticEnrollment:
    r"""Enrollment by a logistic model with a given mean rate.

    .. math:: \text{logit}\, \pi^{enr}_i = a + s\, Z_i'\beta, \quad
       \text{mean}\, \pi^{enr} = \text{rate} \qquad (D2)

    >>> from fedipw.tables import Population
    >>> people = Population.of({"unit_id": [1, 2], "z1": [-1.0, 1.0], "z2": [0.0, 0.0]})
    >>> LogisticEnrollment()(people).round(3)
    array([0.269, 0.731])
    """

    coefficients: Mapping[str, float] = field(default_factory=lambda: {"z1": 1.0, "z2": 0.8})
    strength: float = 1.0
    rate: float = 0.5

    def __call__(self, population: Population) -> FloatArray:
        """Return enrollment probabilities, (N,)."""
        score = self.strength * score_of(population, self.coefficients)
        return sigmoids(score, solved_intercept(lambda: [score], self.rate))


def enrollment_draw(probabilities: FloatArray, rng: np.random.Generator) -> BoolArray:
    """Draw enrollment once: client i enrolls if its uniform falls below its probability.

    Probabilities must lie in (0, 1]. One uniform per client whatever the probabilities, so that
    sweeps over mechanisms share their chance.
    """
    probs = check_probability(probabilities, "enrollment probability")
    enrolled: BoolArray = rng.random(len(probs)) < probs
    if not enrolled.any():
        raise InputError(
            f"No client of {len(probs)} enrolled at a mean probability of {probs.mean():.3g}. "
            "Raise the rate or the population size."
        )
    return enrolled
