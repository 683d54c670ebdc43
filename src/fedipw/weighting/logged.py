"""Probabilities of both stages from tables: enrolled clients in memory, rounds as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.errors import InputError
from fedipw.weighting.rounds import RoundOpening, RoundReplies

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray
    from fedipw.selection import LoggedParticipation
    from fedipw.weighting.sources import Units


@final
class Logged:
    """Enrollment as given, participation fitted on rounds that come as tables.

    ``units`` lists enrolled clients only and may be replaced between rounds, when enrollment
    changes. Replies for which nothing is known (missing values under the policy drop) are left out
    and counted in ``left_out``.
    """

    def __init__(self, units: Units, participation: LoggedParticipation) -> None:
        self.units, self.participation = units, participation
        self.left_out = 0
        self._index, self._rows = 0, np.arange(0)

    def open(self, opening: RoundOpening) -> None:
        """Take what is known before a round."""
        if opening.table is None or opening.rows is None:
            raise InputError("Rounds of a log open with their table and the rows behind it.")
        self._index, self._rows = opening.index, opening.rows
        self.participation.open(opening.table, opening.rows)

    def replies(self, replied: BoolArray) -> RoundReplies:
        """Return what is known of those who replied."""
        prob, known, source = self.participation.prob(replied)
        known = known & self.units.enrolled[self._rows[replied]]  # in the enrollment stage too
        self.left_out += int((~known).sum())
        rows: IntArray = self._rows[replied][known]
        return self.units.replies(self._index, rows, prob[known], source)

    def close(self, replied: BoolArray) -> None:
        """Take the replies of the round."""
        self.participation.close(replied)

    def everyone(self, covariates: FloatArray, true_prob: FloatArray) -> RoundReplies:
        """Refuse: only a simulation knows everyone."""
        del covariates, true_prob
        raise InputError("A log tells of enrolled clients only.")

    def state(self) -> dict[str, Any]:
        """Return nothing: the ledger holds what was learnt."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back nothing."""
