"""Members and a server in process, who can be lost, silenced or lied to between any two stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedipw.private.protocol import Member, ProtocolError, SumServer, Wire
from fedipw.private.sums import SumRequest, SumResult, contribution_words

STAGES = ("keys", "boxes", "masked", "shares")
Changes = Callable[[str, int, Wire], Wire | None]  # what a client's answer is turned into


@dataclass
class Protocol:
    """One sum over vectors by client; ``changes`` stands between the clients and the server."""

    vectors: Mapping[int, Any]
    minimum: int = 3
    bits: int = 32
    degree: int | None = None
    bound: float = 1.0
    changes: Changes = lambda _stage, _client, answer: answer
    members: dict[int, Member] = field(default_factory=dict)
    sent: dict[str, dict[int, Any]] = field(default_factory=dict)  # to clients
    heard: dict[str, dict[int, Wire]] = field(default_factory=dict)  # by the server
    refused: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(next(iter(self.vectors.values())))
        self.request = SumRequest(purpose="test", length=length, bound=self.bound)
        self.server = SumServer(
            self.request, minimum=self.minimum, bits=self.bits, degree=self.degree,
            asked=len(self.vectors),
        )  # fmt: skip

    def run(self) -> SumResult:
        """Take all stages and return what was opened."""
        invitation, told = self.server.invitation, dict.fromkeys(self.vectors)
        near = self.server.keys(self._stage("keys", told, lambda i, _: self._begun(i, invitation)))
        boxes = self.server.boxes(self._stage("boxes", near, self._moved))
        opening = self.server.masked(self._stage("masked", boxes, self._masked))
        return self.server.shares(
            self._stage("shares", opening, lambda i, t: self.members[i].opened(t))
        )

    def _stage(self, stage: str, told: Mapping[int, Any], answers: Any) -> dict[int, Any]:
        self.sent[stage] = dict(told)
        self.heard[stage] = {}
        for client, message in told.items():
            try:
                answer = self.changes(stage, client, answers(client, message))
            except ProtocolError as error:
                self.refused[client] = str(error)
                continue
            if answer is not None:
                self.heard[stage][client] = answer
        return self.heard[stage]

    def _begun(self, client: int, invitation: Any) -> Wire:
        self.members[client], keys = Member.begun(invitation)
        return keys

    def _moved(self, client: int, told: Any) -> Wire:
        self.members[client], boxes = self.members[client].shared(told)
        # what is kept between messages is plain values
        self.members[client] = Member.of_plain(self.members[client].to_plain())
        return boxes

    def _masked(self, client: int, told: Any) -> Wire:
        member = self.members[client]
        words = contribution_words(
            np.asarray(self.vectors[client], dtype=float), self.request, member.code()
        )
        self.members[client], masked = member.masked(told, words)
        return masked


def without(stage: str, *clients: int) -> Changes:
    """Return the loss of these clients from a stage on."""
    after = STAGES[STAGES.index(stage) :]
    return lambda at, client, answer: None if at in after and client in clients else answer
