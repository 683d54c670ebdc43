"""What a run leaves behind: every iterate and what each round looked like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.combining.tail import tail_length
from fedipw.errors import InputError

if TYPE_CHECKING:
    from fedipw.lab.theory.objective import FederatedLogistic
    from fedipw.numerics import BoolArray, FloatArray, IdArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """One run of M methods over the same R rounds; iterate 0 is the start."""

    methods: tuple[str, ...]
    iterates: FloatArray  # (M, R + 1, d + 1)
    replies: IntArray  # (R,)
    weight_sum: FloatArray  # (M, R), NaN in a skipped round
    effective_replies: FloatArray  # (M, R), NaN in a skipped round
    reliance: FloatArray  # (M, R) on enrollment weights (O21), NaN in a skipped round
    trimmed: IntArray  # (M, R) weights cut
    trimmed_mass: FloatArray  # (M, R) share of weight cut off
    source: IdArray  # (M, R) where participation probabilities came from
    negative: IntArray  # (M, R) negative weights
    note: IdArray  # (M, R) what a scheme could not do, empty if nothing

    @property
    def rounds(self) -> int:
        """Number of rounds, R."""
        return len(self.replies)

    @property
    def skipped(self) -> BoolArray:
        """Rounds in which nobody replied: the model stayed as it was, (R,)."""
        empty: BoolArray = self.replies == 0
        return empty

    def of(self, method: str) -> FloatArray:
        """Return a method's iterates, (R + 1, d + 1)."""
        if method not in self.methods:
            raise InputError(f"No method {method!r} in this run; it has {', '.join(self.methods)}.")
        return np.asarray(self.iterates[self.methods.index(method)])

    def tail_average(self, method: str, fraction: float = 0.2) -> FloatArray:
        r"""Return the mean of the iterates after the last rounds, (d + 1,).

        .. math:: \bar\theta = \frac{1}{T} \sum_{r > R - T} \theta_r, \quad
           T = \lceil \text{fraction}\, R \rceil \qquad (O4)
        """
        mean: FloatArray = self.of(method)[-tail_length(self.rounds, fraction) :].mean(axis=0)
        return mean

    def frame(self, target: FederatedLogistic, best: FloatArray) -> pl.DataFrame:
        """Return one row per method and round, with excess target loss and distance."""
        lowest, after = float(target.losses(best)[0]), self.iterates[:, 1:]
        return pl.concat(
            pl.DataFrame(
                {
                    "method": [name] * self.rounds,
                    "round": np.arange(1, self.rounds + 1),
                    "replies": self.replies,
                    "effective_replies": self.effective_replies[m],
                    "weight_sum": self.weight_sum[m],
                    "reliance": self.reliance[m],
                    "trimmed": self.trimmed[m],
                    "trimmed_mass": self.trimmed_mass[m],
                    "participation": self.source[m].tolist(),
                    "negative": self.negative[m],
                    "note": self.note[m].tolist(),
                    "excess_loss": target.losses(after[m]) - lowest,
                    "distance": np.linalg.norm(after[m] - best, axis=1),
                }
            )
            for m, name in enumerate(self.methods)
        )
