"""A grid that keeps every byte a server receives, so that somebody else can look through them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from numpy.typing import ArrayLike

_KINDS = ("<f8", ">f8", "<f4", ">f4")
_DIGITS = 7  # of a number in a text that are looked for
_SHORT = 6  # characters that are found anywhere by chance


@dataclass(frozen=True, slots=True)
class Received:
    """One message: who sent it, in answer to what, and all that is in it."""

    node: int
    kind: str  # of the message, such as train or query.fedipw_sum
    data: bytes  # names and values of its records, or the error


@final
class RecordingGrid(Grid):
    """A grid that passes everything on and keeps what comes back.

    ``strategy.start(RecordingGrid(grid), ...)`` runs as with the grid itself; ``received`` is then
    all that the server ever had from its clients.

    Examples
    --------
    >>> from flwr.app import MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from fedipw.flower.inprocess import InProcessGrid
    >>> app = ClientApp()
    >>> @app.query()
    ... def age(message, context):
    ...     return Message(RecordDict({"own": MetricRecord({"age": 41.25})}), reply_to=message)
    >>> grid = RecordingGrid(InProcessGrid(app, {1: {}}))
    >>> _ = grid.send_and_receive([Message(RecordDict(), 1, "query")])
    >>> grid.size, grid.holds([41.25]), grid.holds([41.5])
    (14, True, False)
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.received: list[Received] = []

    def holds(self, values: ArrayLike) -> bool:
        """Return whether one of some numbers was received as it is, alone or in an array.

        A number is looked for in the bytes of double precision and, with the number after it, of
        single precision, in both orders, and as a text of seven digits. Whole numbers, and texts
        of few digits, are found everywhere and are not looked for.
        """
        given = np.ravel(np.asarray(values, dtype=np.float64))
        wanted = [value for value in given.tolist() if value != round(value)]
        needles = {np.array(v, kind).tobytes() for v in wanted for kind in _KINDS[:2]}
        pairs = [pair for pair in pairwise(given) if all(pair)]
        needles |= {np.array(pair, kind).tobytes() for pair in pairs for kind in _KINDS[2:]}
        texts = (f"{abs(v):.{_DIGITS}g}" for v in wanted)
        needles |= {text.encode() for text in texts if len(text) > _SHORT}
        return any(needle in item.data for item in self.received for needle in needles)

    @property
    def size(self) -> int:
        """Bytes received."""
        return sum(len(item.data) for item in self.received)

    @property
    def run(self) -> Any:
        """The grid's own."""
        return self.grid.run

    def set_run(self, *args: Any, **settings: Any) -> None:
        """Pass on."""
        self.grid.set_run(*args, **settings)

    def create_message(self, *args: Any, **settings: Any) -> Message:
        """Pass on."""
        return self.grid.create_message(*args, **settings)

    def get_node_ids(self) -> Iterable[int]:
        """Pass on."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Pass on."""
        return self.grid.get_nodes()

    def push_messages(self, *args: Any, **settings: Any) -> Iterable[str]:
        """Pass on."""
        return self.grid.push_messages(*args, **settings)

    def pull_messages(self, *args: Any, **settings: Any) -> Iterable[Message]:
        """Return what the grid has received, and keep it."""
        return self._kept(self.grid.pull_messages(*args, **settings))

    def send_and_receive(self, *args: Any, **settings: Any) -> Iterable[Message]:
        """Pass on; return the answers, and keep them."""
        return self._kept(self.grid.send_and_receive(*args, **settings))

    def _kept(self, messages: Iterable[Message]) -> list[Message]:
        out = list(messages)
        self.received += [
            Received(m.metadata.src_node_id, m.metadata.message_type, message_bytes(m)) for m in out
        ]
        return out


def message_bytes(message: Message) -> bytes:
    """Return all that a message holds: names and values of its records, or its error.

    >>> from flwr.app import ConfigRecord, RecordDict
    >>> content = RecordDict({"own": ConfigRecord({"unit_id": "a7", "box": b"xyz"})})
    >>> message_bytes(Message(content, dst_node_id=1, message_type="query"))
    b'ownunit_ida7boxxyz'
    """
    if message.has_error():
        return f"{message.error.code}{message.error.reason}".encode()
    return b"".join(_pieces(message))


def _pieces(message: Message) -> Iterator[bytes]:
    for name, record in message.content.items():
        yield name.encode()
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                yield f"{key}{array.dtype}{tuple(array.shape)}{array.stype}".encode()
                yield array.data
            continue
        for key, value in record.items():
            yield key.encode()
            for part in value if isinstance(value, list) else [value]:
                yield _value_bytes(part)


def _value_bytes(value: object) -> bytes:
    """Return a value as bytes: numbers as they lie in memory and, if whole, as text."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return struct.pack("<d", value)
    return str(value).encode()
