"""Secure sums over a Flower grid, and the settings of private training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeVar, final

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedipw.errors import InputError
from fedipw.flower.covariates import first_line
from fedipw.flower.private_client import ACTION, BEGIN, MASK, OPEN, RECORD, SHARE, STAGE
from fedipw.flower.secure import StageProbability
from fedipw.numerics.checks import check_positive
from fedipw.private.protocol import (
    Boxes,
    Keys,
    Masked,
    ProtocolError,
    Shares,
    SumServer,
    Wire,
)
from fedipw.private.sums import SumRequest, SumResult
from fedipw.selection.saved import StageModel
from fedipw.weighting.online import OnlineSettings

W = TypeVar("W", bound=Wire)
_KEPT: Final = (
    "minimum", "largest_weight", "largest_column", "radius", "without", "augmented", "bits",
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """How training is made private: ``FedIPW(..., private=Private(...))``.

    Clients run :class:`~fedipw.flower.private_client.PrivateClient`. The server keeps population
    means and coefficients, and learns totals over ``minimum`` clients and more.

    Parameters
    ----------
    spread
        Standard deviations of the targets in the population, where they do not follow from the
        targets (:meth:`~fedipw.private.calibration.BalanceMap.of`).
    minimum
        Fewest clients whose sum is opened.
    largest_weight
        Largest weight of a client, as a multiple of the mean weight so far.
    largest_column
        Largest standardised balance column.
    participation
        Models of the steps of participation: clients are sent their coefficients and divide their
        base weight by the probability.
    radius, without
        With noise (``FedIPW(noise=...)``): standardised columns are shortened to this Euclidean
        norm, and so many contributors may add no noise (:class:`~fedipw.private.noisy.NoisyTerms`).
        Noise is scaled to the largest weight: choose ``largest_weight`` near 4, and ``minimum``
        near the number of clients that usually reply.
    augmented
        Add the sums that a regression of updates on balance columns needs (O20): q more vectors of
        the model's size from every client, for small models.
    bits
        Of a word, 32 or 64.
    degree
        Neighbours of a client, even; by default as many as :class:`~fedipw.private.graph.Graph`
        needs.
    timeout
        Seconds that each of the three later exchanges of a sum waits for answers.
    online
        How fast calibration learns.
    """

    spread: Mapping[str, float] = field(default_factory=dict)
    minimum: int = 10
    largest_weight: float = 100.0
    largest_column: float = 10.0
    participation: Sequence[StageModel | StageProbability] = ()
    radius: float = 3.0
    without: int = 0
    augmented: bool = False
    bits: int = 32
    degree: int | None = None
    timeout: float = 60.0
    online: OnlineSettings = field(default_factory=OnlineSettings)

    def __post_init__(self) -> None:
        if self.minimum < 3:
            raise InputError(
                f"A sum of {self.minimum} clients shows them to each other: minimum is 3 at least."
            )
        if self.bits not in {32, 64}:
            raise InputError(f"Words have 32 or 64 bits, not {self.bits!r}.")
        check_positive(self.timeout, "timeout")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The participation model as clients are sent it."""
        made = (s if isinstance(s, StageProbability) else StageProbability.of(s)
                for s in self.participation)  # fmt: skip
        return [step.to_json() for step in made]

    def to_json(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share."""
        plain = {name: getattr(self, name) for name in _KEPT}
        return plain | {
            "spread": dict(self.spread), "participation": self.steps,
            "online": asdict(self.online),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a sum cost: messages and the bytes of their fields, both ways, and seconds."""

    messages: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.messages + other.messages, self.sent + other.sent,
            self.received + other.received, self.seconds + other.seconds,
        )  # fmt: skip


@final
class FlowerSums:
    """Secure sums over the nodes of a grid.

    Parameters
    ----------
    grid, nodes
        Whom to ask.
    private
        Minimum, bits, degree and timeout.

    Examples
    --------
    ``FlowerSums(grid, nodes, Private(minimum=10)).sum(SumRequest(purpose="age", length=1,
    bound=120.0))`` adds up what clients registered with ``private.contribution("age")``.
    """

    def __init__(self, grid: Grid, nodes: Iterable[int], private: Private) -> None:
        self._grid, self._private = grid, private
        self._nodes = sorted(nodes)
        self._index = {node: k for k, node in enumerate(self._nodes)}
        self.faults: dict[int, str] = {}  # by node: why it has no part in the last sum
        self.inside: frozenset[int] = frozenset()  # nodes whose vectors are in the last sum
        self.traffic = Traffic()  # of the last sum

    def server(self, request: SumRequest) -> SumServer:
        """Return the server's side of a sum, with its invitation."""
        self.faults, self.inside, self.traffic = {}, frozenset(), Traffic()
        how = self._private
        return SumServer(
            request, minimum=how.minimum, bits=how.bits, degree=how.degree, asked=len(self._nodes)
        )

    def sum(self, request: SumRequest) -> SumResult:
        """Return the sum over the nodes that answer; SumNotOpenedError if nothing was opened."""
        server = self.server(request)
        told = dict.fromkeys(range(len(self._nodes)), server.invitation)
        return self._led(server, self._exchanged(server, BEGIN, told, Keys))

    def opened(self, server: SumServer, replies: Mapping[int, Message]) -> SumResult:
        """Return the sum of nodes that answered an invitation with keys, by node."""
        keys = {}
        for node, reply in replies.items():
            found = self._read(server, self._index[node], reply, Keys)
            if found is not None:
                keys[self._index[node]] = found
        return self._led(server, keys)

    def _led(self, server: SumServer, keys: Mapping[int, Keys]) -> SumResult:
        began = time.monotonic()
        try:
            near = server.keys(keys)
            boxes = server.boxes(self._exchanged(server, SHARE, near, Boxes))
            masked = self._exchanged(server, MASK, boxes, Masked)
            told = server.masked(masked)
            self.inside = frozenset(self._nodes[k] for k in told)
            return server.shares(self._exchanged(server, OPEN, told, Shares))
        finally:
            self.faults |= {self._nodes[k]: reason for k, reason in server.faults.items()}
            seconds = time.monotonic() - began
            self.traffic = replace(self.traffic, seconds=seconds)

    def _exchanged(
        self, server: SumServer, stage: str, told: Mapping[int, Wire], kind: type[W]
    ) -> dict[int, W]:
        """Send each client its message and return the answers that are what they should be."""
        messages, places, size = [], {}, 0
        for place, message in told.items():
            plain = message.to_plain()
            size += _size(plain)
            record = ConfigRecord({STAGE: stage, **plain})
            messages.append(Message(
                RecordDict({RECORD: record}), self._nodes[place], f"query.{ACTION}",
                ttl=self._private.timeout,
            ))  # fmt: skip
        replies = list(self._grid.send_and_receive(messages, timeout=self._private.timeout))
        for place, sent in zip(told, messages, strict=True):
            places[sent.metadata.message_id] = place
        self.traffic += Traffic(messages=len(messages), sent=size)
        out: dict[int, W] = {}
        for reply in replies:
            place_of = places.pop(reply.metadata.reply_to_message_id, None)
            if place_of is None:
                continue  # answers nothing that was asked, or again
            found = self._read(server, place_of, reply, kind)
            if found is not None:
                out[place_of] = found
        for place in places.values():
            server.faults.setdefault(place, f"no answer to {stage!r} in time")
        return dict(sorted(out.items()))

    def _read(self, server: SumServer, place: int, reply: Message, kind: type[W]) -> W | None:
        """Return an answer, none if it is an error or something else than asked for."""
        if reply.has_error():
            reason = first_line(reply.error.reason) or f"error {reply.error.code}"
            server.faults[place] = reason
            return None
        record = reply.content.get(RECORD)
        try:
            if not isinstance(record, ConfigRecord) or len(reply.content) != 1:
                raise ProtocolError("an answer with other records")
            plain = dict(record)
            self.traffic += Traffic(messages=1, received=_size(plain))
            return kind.of_plain(plain)
        except ProtocolError as error:
            server.faults[place] = str(error)[:160]
            return None


def refuse_with_private(**given: bool) -> None:
    """Raise for settings that need what clients keep to themselves.

    >>> refuse_with_private(trim=False, history=True)
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: private= does not go with history: ...
    """
    wrong = [name for name, here in given.items() if here]
    if wrong:
        raise InputError(
            f"private= does not go with {', '.join(wrong)}: the server has no covariate, weight, "
            "update or metric of a client. A participation model goes into "
            "Private(participation=...)."
        )


def _size(plain: Mapping[str, Any]) -> int:
    """Return the bytes of a message's fields, numbers as eight."""
    total = 0
    for name, value in plain.items():
        parts = value if isinstance(value, list) else [value]
        total += len(name) + sum(len(v) if isinstance(v, bytes | str) else 8 for v in parts)
    return total
