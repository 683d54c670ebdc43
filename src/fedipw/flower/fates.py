"""What became of each invitation of a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from fedipw.flower.words import DECLINED_CODE

if TYPE_CHECKING:
    from flwr.app import Error, Message


class Fate(Enum):
    """What became of an invitation, as it stands in the ledger's column ``fate``."""

    REPLIED = "replied"
    REFUSED = "refused"  # a reply the screen refused
    DECLINED = "declined"  # the client said no
    RAISED = "raised"  # the client's code raised an error
    CRASHED = "crashed"  # the client's process ended
    LOST = "lost"  # the node went offline
    EXPIRED = "expired"  # the message outlived its time
    FAILED = "failed"  # any other error
    SILENT = "silent"  # no answer in time


_BY_CODE: Mapping[int, Fate] = {
    2: Fate.RAISED,
    3: Fate.EXPIRED,
    4: Fate.EXPIRED,
    5: Fate.LOST,
    8: Fate.CRASHED,
}


def fate_of(error: Error) -> Fate:
    """Return what an error reply tells.

    >>> from flwr.app import Error
    >>> fate_of(Error(2, "ValueError")).value, fate_of(Error(1000, "on battery")).value
    ('raised', 'declined')
    """
    if error.code >= DECLINED_CODE:
        return Fate.DECLINED
    return _BY_CODE.get(error.code, Fate.FAILED)


@dataclass(slots=True)
class Settled:
    """Invitations by place in the round's table: fates of all, replies of those that came."""

    fates: dict[int, Fate]
    replies: dict[int, Message] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)  # why a reply was refused
    strays: int = 0  # messages that answer no invitation of the round, or answer it again

    def refuse(self, place: int, reason: str) -> None:
        """Leave a reply out."""
        self.fates[place] = Fate.REFUSED
        self.reasons[place] = reason
        del self.replies[place]

    def words(self, rows: int) -> list[str | None]:
        """Return the fate of every row in words, none where nobody was invited."""
        out: list[str | None] = [None] * rows
        for place, fate in self.fates.items():
            reason = self.reasons.get(place)
            out[place] = fate.value if reason is None else f"{fate.value}: {reason}"
        return out

    def counts(self) -> dict[str, int]:
        """Return how many invitations had each fate."""
        found = list(self.fates.values())
        return {fate.value: found.count(fate) for fate in Fate}


def settled(invited: Mapping[int, Message], messages: Iterable[Message]) -> Settled:
    """Return what became of invitations, by place, from the messages that came back.

    A message belongs to the invitation whose identifier it answers: errors the server makes itself
    carry no client's node. The first answer counts.
    """
    places = {message.metadata.message_id: place for place, message in invited.items()}
    made = Settled(dict.fromkeys(sorted(invited), Fate.SILENT))
    answered: set[int] = set()
    arrived: dict[int, Message] = {}
    for message in messages:
        place = places.get(message.metadata.reply_to_message_id)
        if place is None or place in answered:
            made.strays += 1
            continue
        answered.add(place)
        if message.has_error():
            made.fates[place] = fate_of(message.error)
        else:
            made.fates[place] = Fate.REPLIED
            arrived[place] = message
    made.replies = dict(sorted(arrived.items()))
    return made
