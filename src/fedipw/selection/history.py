"""What a client's past replies say about its next one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray

REPLY_COLUMNS = ("last_reply", "reply_rate", "rounds_since_reply")
AVAILABILITY_COLUMNS = ("last_available", "available_rate", "rounds_since_available")
CLOCK_COLUMNS = ("hour_sin", "hour_cos")
COLUMNS = (*REPLY_COLUMNS, *CLOCK_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplyHistory:
    r"""Running history of n clients before a round; never of the round itself.

    Columns, for round r with :math:`s_i` replies in the :math:`e_i` rounds before r in which the
    client was enrolled (all r - 1 unless it joined or left), the last in round :math:`l_i` (if
    none, the round before it joined, 0 for those enrolled from the start):

    * ``last_reply``: 1 if the client replied in round r - 1;
    * ``reply_rate``: :math:`(s_i + 1)/(e_i + 2)`, so 1/2 before any round;
    * ``rounds_since_reply``: :math:`r - l_i`;
    * ``hour_sin``, ``hour_cos``: the clock, :math:`2 \pi r / \text{day}`.

    Examples
    --------
    >>> history = ReplyHistory.of(2).after(np.array([True, False]))
    >>> history.matrix(day_length=24)[:, :3]  # before round 2
    array([[1.        , 0.66666667, 1.        ],
           [0.        , 0.33333333, 2.        ]])
    """

    rounds: int
    replies: IntArray  # (n,)
    last: IntArray  # (n,) round of the last reply; if none, the round before the client joined
    seen: IntArray  # (n,) rounds in which the client was enrolled

    @classmethod
    def of(cls, clients: int) -> ReplyHistory:
        """Return the history before the first round."""
        zeros = np.zeros(clients, dtype=np.int64)
        return cls(rounds=0, replies=zeros, last=zeros, seen=zeros)

    def joined(self, present: BoolArray) -> ReplyHistory:
        """Return the history with those present for the first time counted from now, (n,)."""
        check_rows(len(self.replies), present=present)
        fresh = present & (self.seen == 0)
        return replace(self, last=np.where(fresh, self.rounds, self.last))

    def after(self, replied: BoolArray, present: BoolArray | None = None) -> ReplyHistory:
        """Return the history after a round with these replies, of those enrolled in it, (n,)."""
        check_rows(len(self.replies), replied=replied)
        index = self.rounds + 1
        return ReplyHistory(
            rounds=index,
            replies=self.replies + replied,
            last=np.where(replied, index, self.last),
            seen=self.seen + (1 if present is None else present),
        )

    def matrix(self, *, day_length: float = 24.0) -> FloatArray:
        """Return the columns for the coming round, (n, 5)."""
        if not day_length > 0:
            raise InputError(f"day_length must be above 0, not {day_length!r}.")
        coming = self.rounds + 1
        angle = 2.0 * np.pi * coming / day_length
        out = np.empty((len(self.replies), len(COLUMNS)))
        out[:, 0] = (self.last == self.rounds) & (self.replies > 0)
        out[:, 1] = (self.replies + 1.0) / (self.seen + 2.0)
        out[:, 2] = coming - self.last
        out[:, 3], out[:, 4] = np.sin(angle), np.cos(angle)
        return out
