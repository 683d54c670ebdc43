"""One kind of work, round by round: whom the server invited, what became of it, which weights."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.ledger import AVAILABLE, INVITE_PROB, INVITED, OPENED_AT
from fedipw.tables.population import ID
from fedipw.weighting.live import LiveLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flwr.app import Message

    from fedipw.flower.fates import Settled
    from fedipw.flower.roster import Attendance
    from fedipw.numerics.types import BoolArray
    from fedipw.tables.ledger import Ledger
    from fedipw.weighting.replay import LogPlan
    from fedipw.weighting.rounds import RoundWeights
    from fedipw.weighting.standing import People


class RoundBook:
    """The rounds of a ledger that grows, and the invitations of the open one."""

    def __init__(self, people: People, ledger: Ledger, plan: LogPlan) -> None:
        self.live = LiveLog(people, ledger, plan)
        self.invited: Mapping[int, Message] = {}  # by place in the round's table
        self._rows = np.empty(0, dtype=np.int64)  # of the members, by place

    @property
    def rounds(self) -> int:
        """Number of closed rounds."""
        return self.live.rounds

    @property
    def ids(self) -> pl.Series:
        """Identifiers of the open round's clients, by place."""
        return self.live.people.members.frame[ID][self._rows]

    def open(
        self,
        attendance: Attendance,
        messages: Sequence[Message],
        present: BoolArray,
        opened_at: datetime,
    ) -> None:
        """Open the next round with who is available and what is about to be sent to whom.

        Strategies sample the nodes they see without replacement, each alike, so k invitations of
        n available clients were sent with probability k/n.
        """
        members = self.live.people.members
        self._rows = np.flatnonzero(present)
        places = np.cumsum(present) - 1
        place_of = dict(zip(attendance.nodes, places[attendance.rows].tolist(), strict=True))
        nodes = [message.metadata.dst_node_id for message in messages]
        strange = sorted(set(nodes) - set(place_of))
        if strange or len(set(nodes)) != len(nodes):
            raise InputError(
                f"The wrapped strategy must write to available clients, once to each; it wrote to "
                f"node {some(strange or nodes)}."
            )
        self.invited = dict(zip((place_of[node] for node in nodes), messages, strict=True))
        flags = np.zeros(len(self._rows), dtype=np.bool_)
        flags[list(self.invited)] = True
        prob = len(nodes) / max(len(place_of), 1)
        table = attendance.table(members, present).with_columns(
            pl.Series(INVITED, flags),
            pl.when(AVAILABLE).then(pl.lit(prob)).otherwise(None).alias(INVITE_PROB),
            pl.lit(opened_at).alias(OPENED_AT),
        )
        self.live.open(table)

    def weights(self, settled: Settled) -> tuple[RoundWeights | None, dict[int, float]]:
        """Return the weights of the replies that count, and each by its place."""
        found = self.live.weights(self._replied(settled))
        if found is None:
            return None, {}
        places = np.searchsorted(self._rows, found.replies.rows)
        return found, dict(zip(places.tolist(), found.weights.tolist(), strict=True))

    def close(self, settled: Settled) -> None:
        """Write the round to the ledger, then learn from it."""
        self.live.close(self._replied(settled), settled.words(len(self._rows)))
        self.invited = {}

    def _replied(self, settled: Settled) -> BoolArray:
        replied = np.zeros(len(self._rows), dtype=np.bool_)
        replied[list(settled.replies)] = True
        return replied
