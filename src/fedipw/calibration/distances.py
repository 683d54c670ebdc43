"""Distances between weights and base weights: each is one function F from multipliers to ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

import numpy as np
from scipy.special import expit

from fedipw.errors import InputError
from fedipw.numerics.dual import CLIPPED, EXPONENTIAL, LOGISTIC

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray


class Distance(Protocol):
    """How far a weight may stand from its base, g = weight * N / base = F(u), and at what cost."""

    @property
    def family(self) -> tuple[int, float, float]:
        """The compiled family of F with its bounds."""
        ...

    @property
    def span(self) -> tuple[float, float]:
        """The least and the largest ratio F can take."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the ends of the span can be reached, so that targets may lie on the border."""
        ...

    def start(self, ratio: float) -> float:
        """Return u with F(u) = ratio."""
        ...

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return F(u), (n,)."""
        ...

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return F' where F is this ratio, (n,)."""
        ...

    def cost(self, ratio: FloatArray) -> FloatArray:
        """Return the distance of each ratio from 1, (n,)."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Quadratic:
    r"""Chi-square distance with bounds on the ratio, by default the sign alone.

    .. math:: \min \sum_i d_i \tfrac12 (g_i - 1)^2, \quad \text{low} \le g_i \le \text{high};
       \qquad F(u) = \min(\max(1 + u, \text{low}), \text{high}) \qquad (C2)

    With low = 0 this is the paper's programme with the sign constraint it forgets. Weights of 0 are
    common; targets on the border of what enrolled clients span can be met.
    """

    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        if not (0.0 <= self.low < self.high):
            raise InputError(
                f"Bounds on the weight ratio must be 0 <= LOW < HIGH, not {self.low:g},"
                f"{self.high:g}. For weights of either sign use the linear distance."
            )

    @property
    def family(self) -> tuple[int, float, float]:
        """The compiled family."""
        return CLIPPED, self.low, self.high

    @property
    def span(self) -> tuple[float, float]:
        """The bounds."""
        return self.low, self.high

    closed = True

    def start(self, ratio: float) -> float:
        """Return ratio - 1."""
        return ratio - 1.0

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return 1 + u held in the bounds."""
        return np.clip(1.0 + u, self.low, self.high)

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return 1 between the bounds and 0 at them."""
        return ((ratio > self.low) & (ratio < self.high)).astype(np.float64)

    def cost(self, ratio: FloatArray) -> FloatArray:
        """Return (g - 1)^2 / 2."""
        return _half_square(ratio)


@final
@dataclass(frozen=True, slots=True)
class Linear:
    r"""Chi-square distance without bounds: the GREG weights of survey sampling, in closed form.

    .. math:: \min \sum_i d_i \tfrac12 (g_i - 1)^2; \qquad F(u) = 1 + u \qquad (C3)

    Any target can be met; weights may be negative, and are reported when they are.
    """

    @property
    def family(self) -> tuple[int, float, float]:
        """The compiled family."""
        return CLIPPED, -math.inf, math.inf

    @property
    def span(self) -> tuple[float, float]:
        """All numbers."""
        return -math.inf, math.inf

    closed = True

    def start(self, ratio: float) -> float:
        """Return ratio - 1."""
        return ratio - 1.0

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return 1 + u."""
        return 1.0 + u

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return 1."""
        return np.ones_like(ratio)

    def cost(self, ratio: FloatArray) -> FloatArray:
        """Return (g - 1)^2 / 2."""
        return _half_square(ratio)


@final
@dataclass(frozen=True, slots=True)
class Entropy:
    r"""Exponential tilting, also called raking or entropy balancing.

    .. math:: \min \sum_i d_i (g_i \log g_i - g_i + 1); \qquad F(u) = e^u \qquad (C4)

    Weights are positive; the target must lie strictly inside the hull of the enrolled.
    """

    @property
    def family(self) -> tuple[int, float, float]:
        """The compiled family."""
        return EXPONENTIAL, 0.0, math.inf

    @property
    def span(self) -> tuple[float, float]:
        """All positive numbers."""
        return 0.0, math.inf

    closed = False

    def start(self, ratio: float) -> float:
        """Return log ratio."""
        return math.log(ratio)

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return exp u."""
        return np.exp(u)

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return the ratio."""
        return ratio

    def cost(self, ratio: FloatArray) -> FloatArray:
        """Return g log g - g + 1."""
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(ratio > 0.0, ratio * np.log(ratio), 0.0)
        out: FloatArray = logs - ratio + 1.0
        return out


@final
@dataclass(frozen=True, slots=True)
class Logit:
    r"""Deville and Särndal's bounded distance.

    .. math:: F(u) = \frac{L (U - 1) + U (1 - L) e^{Au}}{U - 1 + (1 - L) e^{Au}}, \qquad
       A = \frac{U - L}{(1 - L)(U - 1)} \qquad (C5)

    Ratios stay strictly between L = low and U = high, low < 1 < high.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.low < 1.0 < self.high < math.inf):
            raise InputError(
                f"The logit distance needs bounds 0 <= LOW < 1 < HIGH, both finite, not "
                f"{self.low:g},{self.high:g}."
            )

    @property
    def family(self) -> tuple[int, float, float]:
        """The compiled family."""
        return LOGISTIC, self.low, self.high

    @property
    def span(self) -> tuple[float, float]:
        """The bounds."""
        return self.low, self.high

    closed = False

    def start(self, ratio: float) -> float:
        """Return u with F(u) = ratio."""
        low, high = self.low, self.high
        steep = (high - low) / ((1.0 - low) * (high - 1.0))
        odds = (ratio - low) * (high - 1.0) / ((high - ratio) * (1.0 - low))
        return math.log(odds) / steep

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return F(u)."""
        low, high = self.low, self.high
        steep = (high - low) / ((1.0 - low) * (high - 1.0))
        prob: FloatArray = expit(steep * u + math.log((1.0 - low) / (high - 1.0)))
        return low + (high - low) * prob

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return A (g - L)(U - g) / (U - L)."""
        low, high = self.low, self.high
        out: FloatArray = (ratio - low) * (high - ratio) / ((1.0 - low) * (high - 1.0))
        return out

    def cost(self, ratio: FloatArray) -> FloatArray:
        """Return the integral of the inverse of F from 1."""
        low, high = self.low, self.high
        steep = (high - low) / ((1.0 - low) * (high - 1.0))
        below, above = ratio - low, high - ratio
        with np.errstate(divide="ignore", invalid="ignore"):
            down = np.where(below > 0.0, below * np.log(below / (1.0 - low)), 0.0)
            up = np.where(above > 0.0, above * np.log(above / (high - 1.0)), 0.0)
        out: FloatArray = (down + up) / steep
        return out


@final
@dataclass(frozen=True, slots=True)
class InverseLogit:
    r"""Inverse probabilities of a logistic enrollment model, fitted by calibration.

    .. math:: w_i = 1 + e^{-\lambda'b_i}, \qquad \sum_{i \in E} w_i b_i = N \mu_b \qquad (C6)

    Where enrollment is logistic in b(Z) this is its inverse, so the weights are consistent even
    where the mean update is not linear in b. Every enrolled client stands for itself, and
    :math:`e^{-\lambda'b_i}` for others: it is entropy calibration of the enrolled to the mean of
    the *non-enrolled*, :math:`(N\mu - \sum_E b)/(N - n)`. Needs the population size N > n, takes
    no base weights and no bounds.
    """

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return 1 + exp u, with u = -lambda'b."""
        return 1.0 + np.exp(u)

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return the ratio less 1."""
        out: FloatArray = ratio - 1.0
        return out


def _half_square(ratio: FloatArray) -> FloatArray:
    out: FloatArray = 0.5 * (ratio - 1.0) ** 2
    return out
