r"""Calibration as you go: entropy calibration of the respondents, one damped Newton step a round.

The weights of a round's replies come from the rounds before it, so that a few replies a round are
enough, and no population table and no model of selection is needed: population means alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedipw.errors import InputError

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray
    from fedipw.weighting.balance import Balance


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSettings:
    """How fast calibration learns, and its limits."""

    decay: float = 0.97  # g, by which earlier rounds count less in every round
    gain: float = 2.0  # a step is gain (1 - g) of Newton's
    ridge: float = 0.02  # added to the spread of each standardised moment
    largest_step: float = 0.3  # of a coefficient in one round
    largest_exponent: float = 8.0  # of lambda'b

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise InputError(f"The decay must lie between 0 and 1, not {self.decay!r}.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnlineSums:
    r"""The sums of one round: :math:`\sum e_i`, :math:`\sum e_i b_i`, :math:`\sum e_i b_i b_i'`.

    All that (W18) learns from: whoever has them needs no client's weight and no client's columns.
    """

    count: float
    first: FloatArray  # (q,)
    second: FloatArray  # (q, q)

    @classmethod
    def of(cls, weights: FloatArray, b: FloatArray) -> Self:
        """Return the sums of weights e, (m,), and standardised columns b, (m, q)."""
        return cls(
            count=float(weights.sum()), first=weights @ b, second=(weights[:, None] * b).T @ b
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnlineState:
    r"""What calibration as you go has learnt.

    .. math::
       e_i &= d_i \exp(\lambda_{r-1}' b_i), \qquad v_i = e_i \Big/ \sum_{S_r} e_j, \\
       S_0 &\leftarrow g S_0 + \sum_{S_r} e_i, \quad
       S_1 \leftarrow g S_1 + \sum_{S_r} e_i b_i, \quad
       S_2 \leftarrow g S_2 + \sum_{S_r} e_i b_i b_i', \qquad m = S_1 / S_0, \\
       \lambda_r &= \lambda_{r-1} - \text{clip}\big(2 (1 - g)
       (S_2 / S_0 - m m' + \rho I)^{-1} m,\; \pm s\big) \qquad (W18)

    with b standardised, so that its population mean is zero. At rest m = 0: the weighted
    respondents of all rounds together have the population's means, and the weights are those of
    their entropy calibration.
    """

    names: tuple[str, ...]
    scale: FloatArray  # (q,) by which moments are standardised
    coefficients: FloatArray  # lambda, (q,)
    count: float = 0.0  # S0
    first: FloatArray  # S1, (q,)
    second: FloatArray  # S2, (q, q)

    @classmethod
    def begun(cls, balance: Balance) -> Self:
        """Return the state before the first round, in which all replies count by their base."""
        size = len(balance.names)
        return cls(
            names=balance.names,
            scale=balance.scale,
            coefficients=np.zeros(size),
            first=np.zeros(size),
            second=np.zeros((size, size)),
        )

    def on(self, balance: Balance) -> OnlineState:
        """Return the state for another map: moments keep what was learnt of them by name."""
        if self.names == balance.names:
            return self
        fresh, kept = OnlineState.begun(balance), {name: k for k, name in enumerate(self.names)}
        new = [k for k, name in enumerate(balance.names) if name in kept]
        old = [kept[balance.names[k]] for k in new]
        for mine, theirs in (
            (fresh.scale, self.scale),
            (fresh.coefficients, self.coefficients),
            (fresh.first, self.first),
        ):
            mine[new] = theirs[old]
        fresh.second[np.ix_(new, new)] = self.second[np.ix_(old, old)]
        return replace(fresh, count=self.count)

    def standardised(self, matrix: FloatArray, mean: FloatArray) -> FloatArray:
        """Return balance columns about the population mean, in units of their scale, (m, q)."""
        b: FloatArray = (matrix - mean) / self.scale
        return b

    def factors(self, b: FloatArray, settings: OnlineSettings) -> FloatArray:
        r"""Return :math:`\exp(\lambda' b)` of standardised columns, (m,)."""
        limit = settings.largest_exponent
        out: FloatArray = np.exp(np.clip(b @ self.coefficients, -limit, limit))
        return out

    def learnt(self, base: FloatArray, b: FloatArray, settings: OnlineSettings) -> OnlineState:
        """Return the state after a round with these base weights, (m,), and columns, (m, q)."""
        e = base * self.factors(b, settings)
        if not (np.isfinite(e).all() and e.any()):
            return self
        return self.moved(OnlineSums.of(e, b), settings)

    def moved(self, sums: OnlineSums, settings: OnlineSettings) -> OnlineState:
        """Return the state after a round with these sums (W18)."""
        decay = settings.decay
        count = decay * self.count + sums.count
        first = decay * self.first + sums.first
        second = decay * self.second + sums.second
        m = first / count
        spread = second / count - np.outer(m, m) + settings.ridge * np.eye(len(m))
        move = settings.gain * (1.0 - decay) * np.linalg.solve(spread, m)
        step = np.clip(move, -settings.largest_step, settings.largest_step)
        return replace(
            self, coefficients=self.coefficients - step, count=count, first=first, second=second
        )

    @property
    def imbalance(self) -> float:
        """Largest standardised difference between weighted respondents and population."""
        return float(np.abs(self.first / self.count).max(initial=0.0)) if self.count else np.nan

    def to_arrays(self) -> dict[str, Any]:
        """Return arrays and plain values from which ``of`` makes the state again."""
        return {
            "names": list(self.names),
            "scale": self.scale,
            "coefficients": self.coefficients,
            "count": self.count,
            "first": self.first,
            "second": self.second,
        }

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Return a saved state."""
        names: Sequence[str] = saved["names"]
        arrays = {k: np.array(saved[k]) for k in ("scale", "coefficients", "first", "second")}
        return cls(names=tuple(names), count=float(saved["count"]), **arrays)
