"""What calibration is allowed to miss, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from fedipw.calibration.distances import Distance, Entropy, InverseLogit
from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive

if TYPE_CHECKING:
    from fedipw.calibration.dual import Status
    from fedipw.numerics.types import FloatArray


@final
@dataclass(frozen=True, slots=True)
class Box:
    r"""Soft calibration: :math:`|\sum_i q_i b_{ij} - \mu_j| \le \text{width}\; sd(b_j)` (C7)."""

    width: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.width) and self.width >= 0.0):
            raise InputError(f"A slack must be 0 or more, not {self.width!r}.")


@final
@dataclass(frozen=True, slots=True)
class Ridge:
    r"""Soft calibration: misses cost instead of being forbidden.

    .. math:: \min \frac1n \sum_i \phi(g_i) + \frac{1}{2\,\text{penalty}}
       \sum_j \left(\frac{\sum_i q_i b_{ij} - \mu_j}{sd(b_j)}\right)^2 \qquad (C8)

    A small penalty parameter is near exact calibration, a large one near the base weights.
    """

    penalty: float

    def __post_init__(self) -> None:
        check_positive(self.penalty, "penalty")


Slack = Box | Ridge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """Calibrated weights and everything needed to judge them."""

    weights: FloatArray  # q, (n,), sum to 1
    ratio: FloatArray  # weight * N / base, (n,)
    population_size: float  # N
    names: tuple[str, ...]
    given: FloatArray  # targets as given, (q,)
    target: FloatArray  # what was aimed at, (q,): drawn to the enrolled where errors were given
    achieved: FloatArray  # weighted means, (q,)
    deviation: FloatArray  # standard deviations of the columns, (q,)
    multipliers: FloatArray  # lambda in units of b, the constant last, (q + 1,)
    iterations: int
    status: Status
    dropped: dict[str, str]  # columns that say nothing new, with the reason
    rare: dict[str, float]  # indicators of few enrolled clients, with their share
    slack: Slack | None
    rule: Distance | InverseLogit
    share: FloatArray  # of base weight, (n,) or (1,) where all are alike

    @property
    def distance(self) -> float:
        """Base-weighted mean of the cost of the ratios: how far the weights had to go."""
        if isinstance(self.rule, InverseLogit):
            cost = Entropy().cost(self.ratio - 1.0)
        else:
            cost = self.rule.cost(self.ratio)
        return float(self.share @ cost if len(self.share) > 1 else cost.mean())

    def weights_at(self, balance: FloatArray) -> FloatArray:
        """Return the weight a client with these columns (m, q) and base weight 1 would have, (m,).

        For the enrolled themselves, without base weights, it is their weight.
        """
        u = balance @ self.multipliers[:-1] + self.multipliers[-1]
        return self.rule.ratio(u) / self.population_size

    @property
    def violation(self) -> FloatArray:
        """Miss of each constraint in standard deviations, (q,); 0 for a constant column."""
        scale = np.where(self.deviation > 0.0, self.deviation, np.inf)
        miss: FloatArray = np.abs(self.achieved - self.target) / scale
        return miss

    @property
    def largest_violation(self) -> float:
        """The largest miss, in standard deviations."""
        return float(self.violation.max(initial=0.0))

    @property
    def negative(self) -> int:
        """Number of negative weights (the linear distance only)."""
        return int((self.weights < 0.0).sum())

    @property
    def effective_sample_size(self) -> float:
        """Kish's effective number of enrolled clients (W10)."""
        return float(self.weights.sum() ** 2 / (self.weights**2).sum())
