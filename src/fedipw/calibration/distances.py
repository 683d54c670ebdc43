"""Distances between weights and base weights: each is one function F from multipliers to ratios."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import numpy as np
from scipy.special import expit, xlogy

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.dual import CLIPPED, EXPONENTIAL, LOGISTIC


class Family(NamedTuple):
    """One function F(u), by its kind and the ends of its range; compiled sums take it so."""

    kind: int
    low: float
    high: float

    @property
    def steep(self) -> float:
        """A of (C5)."""
        return (self.high - self.low) / ((1.0 - self.low) * (self.high - 1.0))

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return F(u), (n,)."""
        _, low, high = self
        if self.kind == EXPONENTIAL:
            return np.exp(u)
        if self.kind == CLIPPED:
            return np.clip(1.0 + u, low, high)
        prob: FloatArray = expit(self.steep * u + math.log((1.0 - low) / (high - 1.0)))
        return low + (high - low) * prob

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return F' where F is this ratio, (n,)."""
        _, low, high = self
        if self.kind == EXPONENTIAL:
            return ratio
        if self.kind == CLIPPED:
            return ((ratio > low) & (ratio < high)).astype(np.float64)
        out: FloatArray = (ratio - low) * (high - ratio) / ((1.0 - low) * (high - 1.0))
        return out

    def inverse(self, ratio: float) -> float:
        """Return u with F(u) = ratio."""
        _, low, high = self
        if self.kind == EXPONENTIAL:
            return math.log(ratio)
        if self.kind == CLIPPED:
            return ratio - 1.0
        odds = (ratio - low) * (high - 1.0) / ((high - ratio) * (1.0 - low))
        return math.log(odds) / self.steep

    def cost(self, ratio: FloatArray) -> FloatArray:
        """Return the integral of the inverse of F from 1 to each ratio, (n,)."""
        _, low, high = self
        if self.kind == EXPONENTIAL:
            return np.asarray(xlogy(ratio, ratio) - ratio + 1.0)
        if self.kind == CLIPPED:
            return np.asarray(0.5 * (ratio - 1.0) ** 2)
        below, above = np.maximum(ratio - low, 0.0), np.maximum(high - ratio, 0.0)
        logs = xlogy(below, below / (1.0 - low)) + xlogy(above, above / (high - 1.0))
        return np.asarray(logs / self.steep)


UNBOUNDED = Family(CLIPPED, -math.inf, math.inf)  # F = 1 + u
CONSTANT = Family(CLIPPED, 1.0, 1.0)  # F = 1


class Distance(ABC):
    """How far a weight may lie from its base, g = weight * N / base = F(u), and at what cost."""

    # whether the ends of the range of F can be reached, so that targets may lie on the border
    closed: ClassVar[bool]
    nonnegative: ClassVar[bool] = True  # whether no weight can be negative
    needs_size: ClassVar[bool] = False  # whether the population's size must be known

    @property
    @abstractmethod
    def family(self) -> Family:
        """F, with the least and the largest ratio it can take."""

    def cost(self, ratio: FloatArray) -> FloatArray:
        """Return the distance of each ratio from 1, (n,)."""
        return self.family.cost(ratio)

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return F(u), (n,)."""
        return self.family.ratio(u)

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return F' where F is this ratio, (n,)."""
        return self.family.slope(ratio)


@final
@dataclass(frozen=True, slots=True)
class Quadratic(Distance):
    r"""Chi-square distance with bounds on the ratio, by default the sign alone.

    .. math:: \min \sum_i d_i \tfrac12 (g_i - 1)^2, \quad \text{low} \le g_i \le \text{high};
       \qquad F(u) = \min(\max(1 + u, \text{low}), \text{high}) \qquad (C2)

    With low = 0 this is the paper's programme with the sign constraint it forgets. Weights of 0 are
    common; targets on the border of what enrolled clients span can be met.
    """

    low: float = 0.0
    high: float = math.inf
    closed: ClassVar = True

    def __post_init__(self) -> None:
        if not (0.0 <= self.low < self.high):
            raise InputError(
                f"Bounds on the weight ratio must be 0 <= LOW < HIGH, not {self.low:g},"
                f"{self.high:g}. For weights of either sign use the linear distance."
            )

    @property
    def family(self) -> Family:
        """1 + u held in the bounds."""
        return Family(CLIPPED, self.low, self.high)


@final
@dataclass(frozen=True, slots=True)
class Linear(Distance):
    r"""Chi-square distance without bounds: the GREG weights of survey sampling, in closed form.

    .. math:: \min \sum_i d_i \tfrac12 (g_i - 1)^2; \qquad F(u) = 1 + u \qquad (C3)

    Any target can be met; weights may be negative, and are reported when they are.
    """

    closed: ClassVar = True
    nonnegative: ClassVar = False

    @property
    def family(self) -> Family:
        """1 + u."""
        return UNBOUNDED


@final
@dataclass(frozen=True, slots=True)
class Entropy(Distance):
    r"""Exponential tilting, also called raking or entropy balancing.

    .. math:: \min \sum_i d_i (g_i \log g_i - g_i + 1); \qquad F(u) = e^u \qquad (C4)

    Weights are positive; the target must lie strictly inside the hull of the enrolled.
    """

    closed: ClassVar = False

    @property
    def family(self) -> Family:
        """The exponential function."""
        return Family(EXPONENTIAL, 0.0, math.inf)


@final
@dataclass(frozen=True, slots=True)
class Logit(Distance):
    r"""Deville and Särndal's bounded distance.

    .. math:: F(u) = \frac{L (U - 1) + U (1 - L) e^{Au}}{U - 1 + (1 - L) e^{Au}}, \qquad
       A = \frac{U - L}{(1 - L)(U - 1)} \qquad (C5)

    Ratios stay strictly between L = low and U = high, low < 1 < high.
    """

    low: float
    high: float
    closed: ClassVar = False

    def __post_init__(self) -> None:
        if not (0.0 <= self.low < 1.0 < self.high < math.inf):
            raise InputError(
                f"The logit distance needs bounds 0 <= LOW < 1 < HIGH, both finite, not "
                f"{self.low:g},{self.high:g}."
            )

    @property
    def family(self) -> Family:
        """F of (C5)."""
        return Family(LOGISTIC, self.low, self.high)


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

    nonnegative: ClassVar = True
    needs_size: ClassVar = True

    def ratio(self, u: FloatArray) -> FloatArray:
        """Return 1 + exp u, with u = -lambda'b."""
        return 1.0 + np.exp(u)

    def slope(self, ratio: FloatArray) -> FloatArray:
        """Return the ratio less 1."""
        return Entropy().slope(ratio - 1.0)

    def cost(self, ratio: FloatArray) -> FloatArray:
        """Return the entropy's cost of what a client stands for beyond itself, (n,)."""
        return Entropy().cost(ratio - 1.0)


def distance_named(name: str, bounds: tuple[float, float] | None = None) -> Distance | InverseLogit:
    """Return a distance by its name, with bounds on the weight ratio where it takes them.

    >>> distance_named("logit", (0.2, 5.0))
    Logit(low=0.2, high=5.0)
    """
    if name == "quadratic":
        return Quadratic() if bounds is None else Quadratic(*bounds)
    if name == "logit":
        if bounds is None:
            raise InputError("The logit distance needs --bounds LOW,HIGH with LOW < 1 < HIGH.")
        return Logit(*bounds)
    plain: dict[str, Callable[[], Distance | InverseLogit]] = {
        "entropy": Entropy,
        "linear": Linear,
        "inverse-logit": InverseLogit,
    }
    if name not in plain:
        raise InputError(f"No distance {name!r}; there are quadratic, logit, {', '.join(plain)}.")
    if bounds is not None:
        raise InputError(f"The {name} distance takes no --bounds: use quadratic or logit.")
    return plain[name]()
