"""The roster: which node is which client, which clients are available, and their current state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from logging import getLogger
from typing import Any

import numpy as np
import polars as pl
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedipw.errors import InputError
from fedipw.flower.client import ACTION, COLUMNS, RECORD, SERVER_ROUND
from fedipw.numerics import BoolArray, IntArray
from fedipw.numerics.checks import some
from fedipw.tables.columns import ID
from fedipw.tables.population import Members

_KINDS: Mapping[type, pl.DataType] = {bool: pl.Boolean(), str: pl.String(), float: pl.Float64()}
_LOG = getLogger("flwr.fedipw")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attendance:
    """The members enrolled in a round, and which of them are available, in the members' order."""

    present: BoolArray  # (n,) whether each member is enrolled
    opened_at: datetime
    rows: IntArray  # (k,) of the members that are available
    nodes: tuple[int, ...]  # (k,)
    answers: Mapping[str, pl.Series]  # (k,) each, the covariates asked for

    def table(self, members: Members) -> pl.DataFrame:
        """Return one row per enrolled client: ``available``, and the answers of those that are."""
        available = np.zeros(members.size, dtype=np.bool_)
        available[self.rows] = True
        frame = members.frame.select(ID).with_columns(pl.Series("available", available))
        if self.answers:
            answers = pl.DataFrame({"(row)": self.rows.astype(np.uint32), **self.answers})
            frame = frame.with_row_index("(row)").join(
                answers, on="(row)", how="left", maintain_order="left"
            )
        return frame.drop("(row)", strict=False).filter(pl.Series(self.present))


class Roster:
    """Nodes by client, from the clients' answers.

    A client is available in a round if its node is online and answers with all covariates asked
    for. Without covariates to ask for, a node is asked once, for its identifier.

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

    def open(self, index: int, moment: datetime) -> None:
        """Begin the training or evaluation of a round; answers hold for the round."""
        if index != self.index:
            self._asked_at, self._answers, self._online = {}, {}, []
        self.index, self._opened_at = index, moment
        self._present = self.members.present(index, moment)

    def available(self, grid: Grid) -> list[int]:
        """Return the nodes of available clients, in the order of the members.

        Nodes that came online since the last call are asked; those that did not answer are asked
        again after the timeout.
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
        known = [
            (self._row_of[node], node)
            for node in online
            if node in self._row_of and (not self.kinds or node in self._answers)
        ]
        self._online = [node for row, node in sorted(known) if self._present[row]]
        return list(self._online)

    def attendance(self) -> Attendance:
        """Return the clients that were available at the last call of ``available``."""
        columns = {
            name: pl.Series(name, [self._answers[node][name] for node in self._online],
                            dtype=pl.Float64() if kind is None else kind)
            for name, kind in self.kinds.items()
        }  # fmt: skip
        rows = np.array([self._row_of[node] for node in self._online], dtype=np.int64)
        return Attendance(
            present=self._present, opened_at=self._opened_at, rows=rows,
            nodes=tuple(self._online), answers=columns,
        )  # fmt: skip

    def _ask(self, grid: Grid, nodes: Sequence[int], now: float) -> None:
        config = ConfigRecord({SERVER_ROUND: self.index, COLUMNS: list(self.kinds)})
        content, group = RecordDict({RECORD: config}), str(self.index)
        sent = [
            Message(content=content, dst_node_id=node, message_type=f"query.{ACTION}",
                    ttl=self.timeout, group_id=group)
            for node in nodes
        ]  # fmt: skip
        self._asked_at.update(dict.fromkeys(nodes, now))
        replies = list(grid.send_and_receive(sent, timeout=self.timeout))
        node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
        heard = {
            node_of[reply.metadata.reply_to_message_id]: reply.content
            for reply in replies
            if reply.metadata.reply_to_message_id in node_of and not reply.has_error()
        }
        if len(heard) < len(nodes):
            _LOG.info("FedIPW: %d of %d nodes asked did not answer", len(nodes) - len(heard),
                      len(nodes))  # fmt: skip
        for node in sorted(heard):
            self._take(node, heard[node].config_records.get(RECORD, ConfigRecord()))

    def _take(self, node: int, answer: ConfigRecord) -> None:
        """Take a node's answer: which client it is, and that client's covariates."""
        unit = answer.get(ID)
        named = isinstance(unit, int | str) and not isinstance(unit, bool)
        row = self._rows.get(str(unit)) if named else None
        if row is None:
            said = f"as {unit!r}, who is not enrolled" if named else f"without a {ID}"
            _LOG.warning("FedIPW: node %d answered %s: it is ignored", node, said)
            self._strangers.add(node)
            return
        other = self._node_of.get(row, node)
        if other != node and (not self.kinds or other in self._answers):
            _LOG.warning("FedIPW: nodes %d and %d both say they are %r: %d is ignored", other, node,
                         unit, node)  # fmt: skip
            return
        self._row_of.pop(other, None)  # the client may have come back as another node
        self._row_of[node], self._node_of[row] = row, node
        try:
            self._answers[node] = self._values(answer)
        except InputError as error:
            _LOG.warning("FedIPW: client %r: %s It is not available in this round.", unit, error)

    def _values(self, answer: ConfigRecord) -> dict[str, Any]:
        """Return the values asked for; InputError for missing or bad ones."""
        lacking = [name for name in self.kinds if name not in answer]
        if lacking:
            raise InputError(f"its answer lacks {some(map(repr, lacking))}.")
        values = {name: _plain(answer[name], name) for name in self.kinds}
        for name, value in values.items():
            kind = _KINDS[type(value)]
            if self.kinds[name] is None:
                self.kinds[name] = kind
            elif self.kinds[name] != kind:
                raise InputError(f"{name!r} is {kind}, others answered {self.kinds[name]}.")
        return values


def _plain(value: object, name: str) -> float | bool | str:
    if isinstance(value, bool | str):
        return value
    if not isinstance(value, int | float):
        raise InputError(f"{name!r} must be a number, text or flag, not {type(value).__name__}.")
    if not math.isfinite(value):
        raise InputError(f"{name!r} is {value}.")
    return float(value)


def _passed_on(name: str) -> Any:
    """Return a method that calls the wrapped grid's, whatever its arguments in this release."""

    def method(self: VisibleGrid, *args: Any, **settings: Any) -> Any:
        return getattr(self.grid, name)(*args, **settings)

    return method


class VisibleGrid(Grid):
    """A grid that shows only the nodes of available clients; all else is the grid's own."""

    run = property(lambda self: self.grid.run)
    set_run = _passed_on("set_run")
    create_message = _passed_on("create_message")
    push_messages = _passed_on("push_messages")
    pull_messages = _passed_on("pull_messages")
    send_and_receive = _passed_on("send_and_receive")

    def __init__(self, grid: Grid, roster: Roster) -> None:
        self.grid, self._roster = grid, roster

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of available clients, in the order of the members."""
        return self._roster.available(self.grid)
