"""Asking a sample of the clients for their state before a round, instead of all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics import BoolArray
from fedipw.numerics.checks import shown

_STREAM = 0x61736B  # keeps these draws apart from others of the same seed


@final
@dataclass(frozen=True, slots=True)
class AskSample:
    r"""Who is asked in a round: m of the n enrolled clients, drawn uniformly whoever is online.

    .. math:: a_r = m/n, \qquad
       P(\text{invited} \mid \text{available}) = a_r \, P(\text{invited} \mid
       \text{available, asked}) \qquad (P8)

    The draw does not look at who is online, so among those asked the share that is available is
    what it is among all: availability is fitted on the clients asked, and the known :math:`a_r` is
    part of ``invite_prob``. The draw is a function of seed and round.

    Parameters
    ----------
    size
        A fraction of the enrolled clients below 1, or their number.
    seed
        Of the draws.

    Examples
    --------
    >>> sample = AskSample(0.25)
    >>> enrolled = np.array([True, False, True, True, True])
    >>> sample.drawn(1, enrolled).sum().item(), sample.prob(enrolled)
    (1, 0.25)
    """

    size: float
    seed: int = 0

    def __post_init__(self) -> None:
        size = self.size
        whole = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        if not (whole or (isinstance(size, float) and 0.0 < size < 1.0)):
            raise InputError(
                "ask is a fraction of the enrolled clients between 0 and 1, or their number, not "
                f"{shown(size)}."
            )

    def count(self, enrolled: int) -> int:
        """Return how many of so many are asked, m."""
        if isinstance(self.size, int):
            return min(self.size, enrolled)
        return min(max(math.ceil(self.size * enrolled), 1), enrolled)

    def prob(self, present: BoolArray) -> float:
        """Return the probability of being asked, 1 if nobody is enrolled."""
        enrolled = int(np.count_nonzero(present))
        return self.count(enrolled) / enrolled if enrolled else 1.0

    def drawn(self, index: int, present: BoolArray) -> BoolArray:
        """Return who is asked in a round, (n,)."""
        rows, out = np.flatnonzero(present), np.zeros(len(present), dtype=np.bool_)
        rng = np.random.default_rng([_STREAM, self.seed % 2**64, index])
        out[rng.choice(rows, self.count(len(rows)), replace=False)] = True
        return out
