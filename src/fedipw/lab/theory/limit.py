"""The limit solver: bias and enrollment lottery of a scheme without training.

Rounds average participation out; enrollment is drawn once and never averages out. So a scheme
trained for ever settles at the minimiser of the objective weighted by its expected weights given
who enrolled, and, were enrollment redrawn too, at the one weighted by their mean over enrollment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.theory.objective import FederatedLogistic
from fedipw.numerics.checks import check_probability

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedipw.numerics import BoolArray, FloatArray
    from fedipw.weighting.pipeline import Weighing
    from fedipw.weighting.weigher import Replies


@final
class LimitWeights:
    r"""Running means over rounds of a scheme's expected weights (L1), for one scheme.

    ``given_enrolled`` takes :math:`P(A_i = 1) = E_i \pi^{part}_{ir}`, ``over_enrollment`` takes
    :math:`\pi^{enr}_i \pi^{part}_{ir}`.
    """

    def __init__(self, enrolled: BoolArray, enrollment_prob: FloatArray) -> None:
        self._enrolled, self._enrollment_prob = enrolled, enrollment_prob
        self._sums = np.zeros((2, len(enrolled)))
        self.rounds = 0  # added
        self.least_inclusion_prob = 1.0  # true or used, of any client in any round added

    def add(
        self,
        weighing: Weighing,
        units: Replies,
        participation_prob: FloatArray,
        *,
        work: FloatArray | None = None,
    ) -> None:
        """Add a round: all N units as the method sees them, and their true participation, (N,).

        ``work`` (N,) multiplies weights where clients do unequal local work: to first order in the
        local step an update is its client's gradient times the number of steps.
        """
        stages = (self._enrolled.astype(np.float64), self._enrollment_prob)
        both = (weighing, weighing.over_enrollment())
        for row, (of, stage) in enumerate(zip(both, stages, strict=True)):
            mean = of.expected_weights(units, stage * participation_prob)
            self._sums[row] += mean if work is None else mean * work
        self.rounds += 1
        true, used = self._enrollment_prob * participation_prob, units.inclusion_prob
        self.least_inclusion_prob = float(min(self.least_inclusion_prob, true.min(), used.min()))

    @property
    def given_enrolled(self) -> FloatArray:
        """Mean weight of each client given who enrolled, (N,)."""
        return self._mean(0)

    @property
    def over_enrollment(self) -> FloatArray:
        """Mean weight of each client over enrollment too, (N,)."""
        return self._mean(1)

    def _mean(self, row: int) -> FloatArray:
        if self.rounds == 0:
            raise InputError("No round was added to the limit weights.")
        mean: FloatArray = self._sums[row] / self.rounds
        return mean

    def state(self) -> dict[str, Any]:
        """Return the sums so far."""
        return {
            "sums": self._sums.copy(),
            "rounds": self.rounds,
            "least": self.least_inclusion_prob,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved sums back."""
        self._sums, self.rounds = np.array(state["sums"]), int(state["rounds"])
        self.least_inclusion_prob = float(state["least"])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ErrorParts:
    r"""Excess target loss of a trained model in three parts that add up to it.

    .. math::
       F(\theta) - F^\star =
       \underbrace{F(\theta) - F(\theta_{lim})}_{\text{optimisation}} +
       \underbrace{F(\theta_{lim}) - F(\bar\theta)}_{\text{enrollment lottery}} +
       \underbrace{F(\bar\theta) - F^\star}_{\text{bias}} \qquad (L2)

    :math:`\theta_{lim}` is the scheme's limit given who enrolled, :math:`\bar\theta` its limit over
    enrollment. Optimisation error is the rest: too few rounds, the noise of the last ones, and
    client drift where clients take several local steps. The lottery can be negative, as when fitted
    probabilities undo part of the draw.
    """

    optimisation: float
    lottery: float
    bias: float
    limit: FloatArray  # (d + 1,)

    @property
    def excess_loss(self) -> float:
        """The sum of the three."""
        return self.optimisation + self.lottery + self.bias

    @property
    def limit_excess_loss(self) -> float:
        """Excess loss of the limit: what no number of rounds removes."""
        return self.lottery + self.bias


def error_parts(target: FederatedLogistic, weights: LimitWeights, theta: FloatArray) -> ErrorParts:
    """Return the three errors of a model ``theta`` (d + 1,) trained under these weights."""
    best = target.minimum()
    means = (weights.given_enrolled, weights.over_enrollment)
    objectives = [FederatedLogistic(target.clients, target.l2, mean) for mean in means]
    limits = [objective.minimum(best.point).point for objective in objectives]
    losses = target.losses(np.stack([theta, *limits]))
    return ErrorParts(
        optimisation=float(losses[0] - losses[1]),
        lottery=float(losses[1] - losses[2]),
        bias=float(losses[2] - best.value),
        limit=limits[0],
    )


def lottery_term(target: FederatedLogistic, enrollment_prob: FloatArray) -> float:
    r"""Return the mean excess loss that one draw of enrollment costs the oracle, to first order.

    .. math:: \frac{1}{2N}\, \text{tr}\!\left(H^{-1}\, \text{mean}\!\left[
       \frac{1 - \pi^{enr}_i}{\pi^{enr}_i} \nabla f_i \nabla f_i'\right]\right)
       \quad \text{at } \theta^\star \qquad (L3)

    H is the Hessian of F, which must weight all N clients alike. Rounds never remove this term.
    """
    prob = check_probability(enrollment_prob, "enrollment_prob")
    target.require_equal_weights("The lottery term")
    best = target.minimum()
    gradients = target.client_gradients(best.point)
    spread = (gradients * ((1.0 - prob) / prob)[:, None]).T @ gradients / len(prob)
    hessian = target.sums(best.point).hessian
    return float(np.trace(np.linalg.solve(hessian, spread)) / (2.0 * len(prob)))
