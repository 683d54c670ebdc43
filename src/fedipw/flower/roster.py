"""Which node is which client, and what clients say of themselves before a round."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedipw.errors import InputError
from fedipw.flower.words import ACTION, COLUMNS, RECORD, SERVER_ROUND
from fedipw.numerics.checks import some
from fedipw.tables.population import ID

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, IntArray
    from fedipw.tables.members import Members

_LOG = getLogger("flwr.fedipw")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attendance:
    """The clients available in a round; row i is one of them, in the order of the members."""

    rows: IntArray  # (k,) of the members
    nodes: tuple[int, ...]  # (k,)
    answers: Mapping[str, pl.Series]  # (k,) each, what was asked

    def table(self, members: Members, present: BoolArray) -> pl.DataFrame:
        """Return one row per enrolled client: who is available, and what those answered."""
        available = np.zeros(members.size, dtype=np.bool_)
        available[self.rows] = True
        frame = members.frame.select(ID).with_columns(pl.Series("available", available))
        if self.answers:
            told = pl.DataFrame({"(row)": self.rows.astype(np.uint32), **self.answers})
            frame = frame.with_row_index("(row)").join(
                told, on="(row)", how="left", maintain_order="left"
            )
        return frame.drop("(row)", strict=False).filter(pl.Series(present))


class Roster:
    """Nodes by client, found out by asking.

    A client is available in a round if its node is online and answers with all that is asked.
    Without covariates to ask for, a node is asked once who it is.

    Parameters
    ----------
    members
        The enrolled clients.
    asked
        Covariates to ask for before every round, with their types where known.
    timeout
        Seconds to wait for answers.
    """

    def __init__(
        self, members: Members, asked: Mapping[str, pl.DataType | None], timeout: float
    ) -> None:
        self.members, self.timeout = members, timeout
        self.kinds: dict[str, pl.DataType | None] = dict(asked)
        self.index = 0
        self._rows = {str(unit): row for row, unit in enumerate(members.frame[ID].to_list())}
        self._row_of: dict[int, int] = {}  # by node
        self._node_of: dict[int, int] = {}  # by row
        self._strangers: set[int] = set()
        self._asked_at: dict[int, float] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._online: list[int] = []
        self._present = np.zeros(members.size, dtype=np.bool_)

    def open(self, index: int, present: BoolArray) -> None:
        """Begin a round in which these members are enrolled, (n,): nobody has answered yet."""
        self.index, self._present = index, present
        self._asked_at, self._answers, self._online = {}, {}, []

    def available(self, grid: Grid) -> list[int]:
        """Return the nodes of available clients, in the order of the members.

        Whoever has come online since the last call is asked; who did not answer is asked again
        after the timeout.
        """
        online = sorted(grid.get_node_ids())
        now = time.monotonic()
        due = [
            node
            for node in online
            if node not in self._strangers
            and node not in self._answers
            and (self.kinds or node not in self._row_of)
            and now - self._asked_at.get(node, -math.inf) >= self.timeout
        ]
        if due:
            self._ask(grid, due, now)
        for node in set(self._row_of) - set(online):
            del self._node_of[self._row_of.pop(node)]
        self._online = sorted(
            (
                node
                for node in online
                if node in self._row_of
                and self._present[self._row_of[node]]
                and (not self.kinds or node in self._answers)
            ),
            key=lambda node: self._row_of[node],
        )
        return list(self._online)

    def attendance(self) -> Attendance:
        """Return the clients available when last asked for."""
        columns = {
            name: pl.Series(
                name,
                [self._answers[node][name] for node in self._online],
                dtype=pl.Float64() if kind is None else kind,
            )
            for name, kind in self.kinds.items()
        }
        rows = np.array([self._row_of[node] for node in self._online], dtype=np.int64)
        return Attendance(rows=rows, nodes=tuple(self._online), answers=columns)

    def _ask(self, grid: Grid, nodes: Sequence[int], now: float) -> None:
        config = ConfigRecord({SERVER_ROUND: self.index, COLUMNS: list(self.kinds)})
        content = RecordDict({RECORD: config})
        sent = [
            Message(
                content=content,
                dst_node_id=node,
                message_type=f"query.{ACTION}",
                ttl=self.timeout,
                group_id=str(self.index),
            )
            for node in nodes
        ]
        self._asked_at.update(dict.fromkeys(nodes, now))
        replies = list(grid.send_and_receive(sent, timeout=self.timeout))
        node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
        heard = {
            node_of[reply.metadata.reply_to_message_id]: reply
            for reply in replies
            if reply.metadata.reply_to_message_id in node_of and not reply.has_error()
        }
        if len(heard) < len(nodes):
            _LOG.info("FedIPW: %d of %d nodes asked did not answer", len(nodes) - len(heard),
                      len(nodes))  # fmt: skip
        for node in sorted(heard):
            self._take(node, heard[node].content)

    def _take(self, node: int, content: RecordDict) -> None:
        record = content.get(RECORD)
        unit = record.get(ID) if isinstance(record, ConfigRecord) else None
        if (
            not isinstance(record, ConfigRecord)
            or not isinstance(unit, int | str)
            or isinstance(unit, bool)
        ):
            _LOG.warning("FedIPW: node %d answered without a %s: left out", node, ID)
            self._strangers.add(node)
            return
        row = self._rows.get(str(unit))
        if row is None:
            _LOG.warning("FedIPW: node %d says it is %r, who is not enrolled: left out", node, unit)
            self._strangers.add(node)
            return
        other = self._node_of.get(row, node)
        if other != node and (not self.kinds or other in self._answers):
            _LOG.warning(
                "FedIPW: nodes %d and %d both say they are %r: %d is left out", other, node, unit,
                node,
            )  # fmt: skip
            return
        self._row_of.pop(other, None)  # the client may have come back as another node
        self._row_of[node], self._node_of[row] = row, node
        try:
            self._answers[node] = self._values(record)
        except InputError as error:
            _LOG.warning("FedIPW: client %r: %s It is not available in this round.", unit, error)

    def _values(self, record: ConfigRecord) -> dict[str, Any]:
        """Return the values asked for, or say what is wrong with them."""
        lacking = [name for name in self.kinds if name not in record]
        if lacking:
            raise InputError(f"its answer lacks {some(map(repr, lacking))}.")
        values = {name: _plain(record[name], name) for name in self.kinds}
        for name, value in values.items():
            kind = _kind_of(value)
            if self.kinds[name] is None:
                self.kinds[name] = kind
            elif self.kinds[name] != kind:
                raise InputError(f"{name!r} is {kind}, others answered {self.kinds[name]}.")
        return values


def _plain(value: object, name: str) -> float | bool | str:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise InputError(f"{name!r} is {value}.")
        return float(value)
    raise InputError(f"{name!r} must be a number, text or flag, not {type(value).__name__}.")


def _kind_of(value: float | bool | str) -> pl.DataType:
    if isinstance(value, bool):
        return pl.Boolean()
    return pl.String() if isinstance(value, str) else pl.Float64()


class VisibleGrid(Grid):
    """A grid on which only some nodes are seen; all else is the grid's own."""

    def __init__(self, grid: Grid, roster: Roster) -> None:
        self._grid, self._roster = grid, roster

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Return a new message."""
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of available clients, in the order of the members."""
        return self._roster.available(self._grid)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return answers."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return answers."""
        return self._grid.send_and_receive(messages, timeout=timeout)
