"""The roster: which node is which client, which clients are available, and their current state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from logging import getLogger
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedipw.flower.asking import AskSample
from fedipw.flower.client import ACTION, COLUMNS, RECORD, SERVER_ROUND
from fedipw.flower.covariates import (
    LONGEST,
    Covariate,
    Value,
    brief,
    first_line,
    kind_of,
    majority,
    plain_value,
    type_of,
)
from fedipw.flower.identity import Identities
from fedipw.flower.preflight import Hearing, Patience, example
from fedipw.numerics import BoolArray, IntArray
from fedipw.numerics.checks import some
from fedipw.numerics.threads import without_collection
from fedipw.tables.columns import ASKED, ID
from fedipw.tables.population import Members

_WORD: Final = 64  # bits of an identifier that is a number
LIFE: Final = 10.0  # a question lives this many times as long as answers are waited for
_LOG = getLogger("flwr.fedipw")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attendance:
    """The members enrolled in a round, and which of them are available, in the members' order."""

    present: BoolArray  # (n,) whether each member is enrolled
    opened_at: datetime
    rows: IntArray  # (k,) of the members that are available
    nodes: tuple[int, ...]  # (k,)
    answers: Mapping[str, pl.Series]  # (k,) each, the covariates asked for
    asked: BoolArray | None = None  # (n,) who was drawn to be asked; everybody if none
    ask_prob: float = 1.0  # of being drawn

    def table(self, members: Members) -> pl.DataFrame:
        """Return one row per enrolled client: ``available``, and the answers of those that are."""
        available = np.zeros(members.size, dtype=np.bool_)
        available[self.rows] = True
        frame = members.frame.select(ID).with_columns(pl.Series("available", available))
        if self.asked is not None:
            frame = frame.with_columns(pl.Series(ASKED, self.asked))
        if self.answers:
            answers = pl.DataFrame({"(row)": self.rows.astype(np.uint32), **self.answers})
            frame = frame.with_row_index("(row)").join(
                answers, on="(row)", how="left", maintain_order="left"
            )
        return frame.drop("(row)", strict=False).filter(pl.Series(self.present))


class _Question(NamedTuple):
    """A question that was not answered in time."""

    node: int
    until: float  # when it is given up
    whole: bool  # whether it asks for covariates, not for the identifier alone


class Roster:
    """Nodes by client, from the clients' answers.

    A client is available in a round if its node is online and answers with all covariates asked
    for. Without covariates to ask for, a node is asked once, for its identifier. A node is not
    asked again while an earlier question is open: answers that come late are used in the round
    they come in.

    Parameters
    ----------
    members
        The enrolled clients.
    asked
        Covariates to ask for before every round, with their types where known. Where not, the type
        is that of most clients' answers in the first round.
    timeout
        Seconds to wait for answers.
    declared
        What answers may be, of some covariates.
    identities
        Who is believed to be which client.
    patience
        Seconds a round waits while nobody new can be used.
    sample
        Whose covariates are asked for in a round; everybody's if none.
    """

    def __init__(
        self,
        members: Members,
        asked: Mapping[str, pl.DataType | None],
        timeout: float,
        *,
        declared: Mapping[str, Covariate] | None = None,
        identities: Identities | None = None,
        patience: float | None = None,
        sample: AskSample | None = None,
    ) -> None:
        self.members, self.timeout, self.sample = members, timeout, sample
        self.kinds: dict[str, pl.DataType | None] = dict(asked)
        self.index = 0
        ids = members.frame[ID].to_list()
        self.identities = Identities(ids) if identities is None else identities
        self.hearing, self._patience = Hearing(), Patience(patience)
        self._known = example(ids[0]) if ids else "none"
        self._declared = dict(declared or {})
        self._rows = {str(unit): row for row, unit in enumerate(ids)}
        self._open: dict[str, _Question] = {}  # by identifier of the message
        self._asked_at: dict[tuple[int, bool], float] = {}  # by node and whether for covariates
        self._answers: dict[int, dict[str, Value]] = {}  # of the round, by node
        self._available: list[tuple[int, int]] = []  # rows and nodes
        self._drawn: BoolArray | None = None
        self._online: list[int] = []  # at the last call
        self._stale = True  # something was heard since

    def open(self, index: int, moment: datetime) -> None:
        """Begin the training or evaluation of a round; answers hold for the round."""
        if index != self.index:
            self._asked_at, self._answers, self._available = {}, {}, []
            self.hearing.open()
        self.index, self._opened_at = index, moment
        self._present = self.members.present(index, moment)
        self._drawn = None if self.sample is None else self.sample.drawn(index, self._present)
        self._patience.open()
        self._stale = True

    def available(self, grid: Grid) -> list[int]:
        """Return the nodes of available clients, in the order of the members.

        Nodes that came online since the last call are asked; those that did not answer are asked
        again after the timeout, unless their question is still open.
        """
        with without_collection():
            return self._available_now(grid)

    def _available_now(self, grid: Grid) -> list[int]:
        online = sorted(grid.get_node_ids())
        self.identities.online(online)
        self._pull(grid, set(online))
        if self._drawn is not None:  # who is whom comes first: a sample is one of clients
            self._ask(grid, self._due(online, whole=False), whole=False)
        whole = bool(self.kinds) or self._drawn is None
        if whole:
            self._ask(grid, self._due(online, whole=True), whole=True)
        if self._stale or online != self._online:  # else it is as at the last call
            speakers = self.identities.speakers(self.index, grid, asked=bool(self.kinds))
            self._available = self._usable(speakers)
            for _, node in self._available:
                self.hearing.cleared(node)
            self.hearing.log()
            self._online, self._stale = online, False
        self._patience.waited(len(self._available), len(online), self.hearing, self._known)
        return [node for _, node in self._available]

    def attendance(self) -> Attendance:
        """Return the clients that were available at the last call of ``available``."""
        for name, kind in self._decided(node for _, node in self._available).items():
            if kind is None:
                _LOG.warning("FedIPW: nobody answered %r in the first round: from now on it is a "
                             "number; declare it in covariates= if it is not", name)  # fmt: skip
            self.kinds[name] = pl.Float64() if kind is None else kind  # as the ledger has it now
        columns = {
            name: pl.Series(
                name, [self._answers[node][name] for _, node in self._available], dtype=kind
            )
            for name, kind in self.kinds.items()
        }
        rows = np.array([row for row, _ in self._available], dtype=np.int64)
        share = 1.0 if self.sample is None else self.sample.prob(self._present)
        return Attendance(
            present=self._present, opened_at=self._opened_at, rows=rows,
            nodes=tuple(node for _, node in self._available), answers=columns,
            asked=self._drawn, ask_prob=share,
        )  # fmt: skip

    def _due(self, online: Sequence[int], *, whole: bool) -> list[int]:
        """Return the nodes to ask now, for covariates or for their identifier alone."""
        now, waiting = time.monotonic(), {question.node for question in self._open.values()}
        found = []
        for node in online:
            before = self._asked_at.get((node, whole), -math.inf)
            if node in waiting or now - before < self.timeout:
                continue
            known = self.identities.knows(node)
            if whole and self._drawn is not None:
                due = known and self._drawn[self.identities.row_of(node)]
                due = due and node not in self._answers
            elif whole and self.kinds:
                due = node not in self._answers
            else:
                due = not known
            if due:
                found.append(node)
        return found

    def _ask(self, grid: Grid, nodes: Sequence[int], *, whole: bool) -> None:
        if not nodes:
            return
        columns = list(self.kinds) if whole else []
        config = ConfigRecord({SERVER_ROUND: self.index, COLUMNS: columns})
        content, group, now = RecordDict({RECORD: config}), str(self.index), time.monotonic()
        life = LIFE * self.timeout
        sent = [
            Message(content=content, dst_node_id=node, message_type=f"query.{ACTION}", ttl=life,
                    group_id=group)
            for node in nodes
        ]  # fmt: skip
        self._asked_at.update(((node, whole), now) for node in nodes)
        replies = list(grid.send_and_receive(sent, timeout=self.timeout))
        for message in sent:
            question = _Question(message.metadata.dst_node_id, now + life, whole)
            if message.metadata.message_id:
                self._open[message.metadata.message_id] = question
        self._take_all(replies, grid)
        silent = set(nodes) & {question.node for question in self._open.values()}
        for node in silent:
            self.hearing.fault(node, f"no answer in {self.timeout:g} s")

    def _pull(self, grid: Grid, online: set[int]) -> None:
        """Take answers that came late, and give up questions that nobody will answer."""
        now = time.monotonic()
        if not self._open:
            return
        self._open = {
            key: question
            for key, question in self._open.items()
            if question.until > now and question.node in online
        }
        if self._open:
            self._take_all(grid.pull_messages(list(self._open)), grid)

    def _take_all(self, replies: Iterable[Message], grid: Grid) -> None:
        """Take answers in the order of nodes."""
        self._stale = True
        heard: dict[int, tuple[Message, bool]] = {}
        for reply in replies:
            question = self._open.pop(reply.metadata.reply_to_message_id, None)
            if question is not None:
                heard[question.node] = reply, question.whole
        for node in sorted(heard):
            reply, whole = heard[node]
            self.hearing.cleared(node)
            if reply.has_error():
                reason = first_line(reply.error.reason) or f"error {reply.error.code}"
                self.hearing.fault(node, f"could not describe itself: {reason}")
                continue
            found = reply.content.get(RECORD)  # Flower's config_records copies all of them
            record = found if isinstance(found, ConfigRecord) else ConfigRecord()
            row = self._row(node, record)
            refused = None if row is None else self.identities.claim(node, row, self.index, grid)
            if refused:
                self.hearing.fault(node, refused, f"as {brief(record.get(ID))}")
            elif row is not None and whole:
                self._take(node, record)

    def _row(self, node: int, answer: ConfigRecord) -> int | None:
        """Return the client a node says it is, none if that is no enrolled client."""
        unit = answer.get(ID)
        if not isinstance(unit, int | str) or isinstance(unit, bool):
            self.hearing.fault(node, f"answered without a {ID}")
            return None
        long = len(unit) > LONGEST if isinstance(unit, str) else unit.bit_length() > _WORD
        row = None if long else self._rows.get(str(unit))
        if row is None:
            kind = f"answered as one who is not enrolled (the table has {ID} such as {self._known})"
            self.hearing.fault(node, kind, example(unit))
        return row

    def _take(self, node: int, answer: ConfigRecord) -> None:
        """Take the covariates of a node's client, if it can be used with them."""
        lacking = [name for name in self.kinds if name not in answer]
        if lacking:
            self.hearing.fault(node, f"its answer lacks {some(map(repr, lacking))}")
            return
        values: dict[str, Value] = {}
        for name in self.kinds:
            value, fault = plain_value(answer[name])
            if value is not None and name in self._declared:
                fault = self._declared[name].fault(value) or ""
            if value is None or fault:
                self.hearing.fault(node, f"{name!r} {fault}", brief(answer[name]))
                return
            values[name] = value
        self._answers[node] = values

    def _decided(self, nodes: Iterable[int]) -> dict[str, pl.DataType | None]:
        """Return the types of the covariates: declared, of the ledger, or of most answers."""
        answers, made = [self._answers[n] for n in nodes if n in self._answers], dict(self.kinds)
        for name, kind in self.kinds.items():
            if kind is None:
                most = majority(answer[name] for answer in answers)
                made[name] = None if most is None else type_of(most)
        return made

    def _usable(self, speakers: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return rows and nodes of the clients that are available, in the members' order."""
        for node in set(self._answers) - set(speakers.values()):
            if self.identities.knows(node):
                self.hearing.fault(node, "another node speaks for the client it names")
        chosen = [
            (row, node)
            for row, node in sorted(speakers.items())
            if self._present[row] and (self._drawn is None or self._drawn[row])
        ]
        if not self.kinds:
            return chosen
        decided, found = self._decided(node for _, node in chosen), []
        for row, node in chosen:
            values = self._answers.get(node)
            if values is None:
                continue
            wrong = [n for n, v in values.items() if type_of(kind_of(v)) != decided[n]]
            for name in wrong[:1]:
                kind = type_of(kind_of(values[name]))
                self.hearing.fault(node, f"{name!r} is {kind}, others answered {decided[name]}")
            if not wrong:
                found.append((row, node))
        return found


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

    def get_nodes(self) -> Iterable[Any]:
        """Return what Flower knows of the nodes of available clients."""
        known = {info.node_id: info for info in self.grid.get_nodes()}
        return [known[node] for node in self.get_node_ids() if node in known]
