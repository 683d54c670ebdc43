"""Invitations by design on Flower: the wrapped strategy's messages to clients that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from logging import getLogger
from typing import TYPE_CHECKING, final

import numpy as np
from flwr.app import Message

from fedipw.errors import InputError
from fedipw.tables.columns import ID
from fedipw.weighting.invitations import PROPORTIONAL, InvitationDesign, Invitations

if TYPE_CHECKING:
    from fedipw.flower.roster import Attendance
    from fedipw.numerics import FloatArray
    from fedipw.weighting.live import Live

_LOG = getLogger("flwr.fedipw")


@final
class Inviter:
    """Redirects the messages of a wrapped strategy to clients drawn by an invitation design.

    Parameters
    ----------
    settings
        How many, and with which probabilities.
    live
        The rounds whose method says what each client stands for.
    seed
        Of the draws, with the number of the round.
    """

    def __init__(self, settings: Invitations, live: Live, seed: int) -> None:
        settings.check_size(live.stage.members.listed)
        settings.check_method(live.plan.method)
        self.settings, self._live = settings, live
        self._design = InvitationDesign(settings, seed)

    def line(self) -> str:
        """Return the log's line at the start."""
        how = self.settings
        number = "as many invitations as the strategy sends" if how.number is None else (
            f"{how.number} invitations a round"
        )  # fmt: skip
        by = "uniform" if how.kind != PROPORTIONAL else (
            f"in proportion to enrollment weights, at least {how.floor:g} of uniform"
        )  # fmt: skip
        rest = f"; a client at most once in {how.rest} rounds" if how.rest > 1 else ""
        return f"{number}, {by}{rest}"

    def directed(
        self, index: int, attendance: Attendance, messages: Sequence[Message]
    ) -> tuple[list[Message], FloatArray]:
        """Return the messages of a round to the clients drawn, and each one's probability, (n,).

        Probabilities are those of all available clients, in the order of the attendance.
        """
        first = _same(messages)
        members, scores = self._live.stage.members, None
        if self.settings.kind == PROPORTIONAL:
            standing = self._live.standing(attendance.present)
            scores = None if standing is None else standing[attendance.rows]
        ids = members.frame[ID][attendance.rows].to_list()
        found = self._design.drawn(index, ids, scores, len(messages))
        if found.note:
            _LOG.info("FedIPW: round %d: %s", index, found.note)
        about = first.metadata
        made = [
            Message(content=first.content, dst_node_id=attendance.nodes[place],
                    message_type=about.message_type, ttl=about.ttl, group_id=about.group_id)
            for place in np.flatnonzero(found.flags).tolist()
        ]  # fmt: skip
        return made, found.prob


def _same(messages: Sequence[Message]) -> Message:
    """Return the first message, or raise if others say something else."""
    first = messages[0]
    for message in messages[1:]:
        same = message.content is first.content or message.content == first.content
        if not same or message.metadata.message_type != first.metadata.message_type:
            raise InputError(
                "The wrapped strategy sends different messages to different clients, so they "
                "cannot be redirected to those an invitation design draws: use "
                'invitations="uniform", which leaves its own sampling alone.'
            )
    return first
