"""FedAU: participation read off the gaps between a client's replies, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.errors import InputError
from fedipw.selection import Source

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray
    from fedipw.weighting.rounds import RoundOpening, RoundReplies
    from fedipw.weighting.sources import Units

CUTOFF = 50  # rounds after which a gap is closed without a reply


@final
class Gaps:
    r"""The mean gap between a client's replies stands for the inverse of its participation.

    .. math:: \hat\pi^{part}_{ir} = 1 / \bar g_{ir}, \qquad
       \bar g_{ir} = \frac{1}{M} \sum_{k=1}^{M} g_{ik} \quad (1 \text{ before the first}),
       \qquad (P6)

    :math:`g_{ik}` are the numbers of rounds from one reply to the next before round r, the first
    counted from the start; a gap is closed at ``cutoff`` rounds though no reply came (Wang and Ji
    2024). With :class:`ParticipationOnly` it is FedAU, :math:`w_i = \bar g_i / N_{enr}`; with
    enrollment weights :math:`\bar g_i / (N \hat\pi^{enr}_i)`.

    Parameters
    ----------
    units
        The clients, with their enrollment probabilities.
    cutoff
        Longest gap, in rounds.
    """

    def __init__(self, units: Units, cutoff: int = CUTOFF) -> None:
        if cutoff < 1:
            raise InputError(f"cutoff must be at least 1 round, not {cutoff}.")
        self.units, self._cutoff, self._index = units, cutoff, 0
        self._rows = np.flatnonzero(units.enrolled)
        self._mean = np.ones(len(self._rows))
        self._closed = np.zeros(len(self._rows), dtype=np.int64)  # gaps so far, M
        self._running = np.zeros(len(self._rows), dtype=np.int64)  # rounds since the last

    def open(self, opening: RoundOpening) -> None:
        """Take what is known before a round: its number."""
        self._index = opening.index

    def replies(self, replied: BoolArray) -> RoundReplies:
        """Return what is known of those who replied."""
        rows = self._rows[replied]
        return self.units.replies(self._index, rows, 1.0 / self._mean[replied], Source.GAPS)

    def close(self, replied: BoolArray) -> None:
        """Count the round, and close the gaps of those who replied or waited too long."""
        self._running += 1
        done = replied | (self._running >= self._cutoff)
        count = self._closed[done]
        self._mean[done] = np.where(
            count == 0,
            self._running[done],
            (count * self._mean[done] + self._running[done]) / (count + 1),
        )
        self._closed[done] += 1
        self._running[done] = 0

    def everyone(self, covariates: FloatArray, true_prob: FloatArray) -> RoundReplies:
        """Return all units; those never enrolled have no gaps, the truth stands for theirs."""
        del covariates
        prob = true_prob.copy()
        prob[self._rows] = 1.0 / self._mean
        return self.units.replies(self._index, np.arange(len(prob)), prob, Source.GAPS)

    def state(self) -> dict[str, Any]:
        """Return the gaps so far."""
        return {
            "mean": self._mean.copy(),
            "closed": self._closed.copy(),
            "running": self._running.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved gaps back."""
        self._mean, self._closed, self._running = (
            np.array(state[key]) for key in ("mean", "closed", "running")
        )
