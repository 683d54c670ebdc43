"""The invitations of a round and their outcomes: its rows in the ledger, metrics and log lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from logging import getLogger
from typing import Final, Protocol

import numpy as np
import polars as pl
from flwr.app import Error, Message, MetricRecord

from fedipw.errors import InputError
from fedipw.flower.client import DECLINED_CODE
from fedipw.flower.covariates import first_line
from fedipw.flower.door import Door
from fedipw.flower.roster import Attendance
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.numerics.checks import some
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.tables.columns import ID, INVITE_PROB, INVITED, OPENED_AT
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Members
from fedipw.weighting.live import Live
from fedipw.weighting.replay import Plan
from fedipw.weighting.weigher import RoundWeights

PREFIX: Final = "fedipw-"  # of the metrics added to a strategy's own
Values = dict[str, float | list[float]]
_LOG = getLogger("flwr.fedipw")


class Outcome(Enum):
    """The outcome of an invitation, as in the ledger's column ``fate``."""

    REPLIED = "replied"
    REFUSED = "refused"  # a reply the screen refused
    DECLINED = "declined"  # the client refused
    RAISED = "raised"  # the client's code raised an error
    CRASHED = "crashed"  # the client's process ended
    LOST = "lost"  # the node went offline
    EXPIRED = "expired"  # the message outlived its time
    FAILED = "failed"  # any other error
    SILENT = "silent"  # no answer in time


_BY_CODE: Mapping[int, Outcome] = {
    2: Outcome.RAISED,
    3: Outcome.EXPIRED,
    4: Outcome.EXPIRED,
    5: Outcome.LOST,
    8: Outcome.CRASHED,
}


def outcome_of(error: Error) -> Outcome:
    """Return the outcome that an error reply stands for.

    >>> from flwr.app import Error
    >>> outcome_of(Error(2, "ValueError")).value, outcome_of(Error(1000, "on battery")).value
    ('raised', 'declined')
    """
    if error.code >= DECLINED_CODE:
        return Outcome.DECLINED
    return _BY_CODE.get(error.code, Outcome.FAILED)


@dataclass(slots=True)
class RoundOutcomes:
    """Outcomes of a round's invitations and the replies, by place in the round's table."""

    outcomes: dict[int, Outcome]
    replies: dict[int, Message] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)  # why a reply was refused
    errors: dict[int, str] = field(default_factory=dict)  # what a client's code raised
    strays: int = 0  # messages that answer no invitation of the round, or answer it again

    @classmethod
    def of(cls, invited: Mapping[int, Message], messages: Iterable[Message]) -> RoundOutcomes:
        """Return the outcomes of invitations, by place, from the messages that came back.

        A message belongs to the invitation whose identifier it answers: errors the server makes
        itself carry no client's node. The first answer counts.
        """
        places = {message.metadata.message_id: place for place, message in invited.items()}
        made = cls(dict.fromkeys(sorted(invited), Outcome.SILENT))
        answered: set[int] = set()
        arrived: dict[int, Message] = {}
        for message in messages:
            place = places.get(message.metadata.reply_to_message_id)
            if place is None or place in answered:
                made.strays += 1
                continue
            answered.add(place)
            if message.has_error():
                made.outcomes[place] = outcome_of(message.error)
                if made.outcomes[place] is Outcome.RAISED and message.error.reason:
                    made.errors[place] = first_line(message.error.reason)
            else:
                made.outcomes[place] = Outcome.REPLIED
                arrived[place] = message
        made.replies = dict(sorted(arrived.items()))
        return made

    def refuse(self, place: int, reason: str) -> None:
        """Leave a reply out."""
        self.outcomes[place] = Outcome.REFUSED
        self.reasons[place] = reason
        del self.replies[place]

    def drop(self, place: int, reason: str) -> None:
        """Take a reply as none: its client was lost before its part was done."""
        self.outcomes[place] = Outcome.FAILED
        self.errors[place] = reason
        del self.replies[place]

    def column(self, rows: int) -> list[str | None]:
        """Return the ledger's column ``fate``, none for clients that were not invited."""
        out: list[str | None] = [None] * rows
        for place, outcome in self.outcomes.items():
            reason = self.reasons.get(place) or self.errors.get(place)
            out[place] = outcome.value if reason is None else f"{outcome.value}: {reason}"
        return out

    def counts(self) -> dict[str, int]:
        """Return the number of invitations by outcome."""
        found = list(self.outcomes.values())
        return {outcome.value: found.count(outcome) for outcome in Outcome}


class OpenLedger(Protocol):
    """A ledger that grows: :class:`~fedipw.weighting.live.Live`, or without any weights."""

    @property
    def ledger(self) -> Ledger: ...  # noqa: D102
    @property
    def members(self) -> Members: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def failed(self) -> int: ...  # noqa: D102
    @property
    def rounds(self) -> int: ...  # noqa: D102
    def holding(self) -> AbstractContextManager[None]: ...  # noqa: D102
    def closing(self) -> AbstractContextManager[None]: ...  # noqa: D102
    def open(self, table: pl.DataFrame) -> object: ...  # noqa: D102
    def close(  # noqa: D102
        self, replied: BoolArray, outcomes: Sequence[str | None] | None = None
    ) -> None: ...


class InvitedRounds:
    """The rounds of a growing ledger, and the invitations of the open one."""

    def __init__(self, live: OpenLedger, door: Door | None = None, *, learns: bool = True) -> None:
        self.live = live
        self.winsorised = 0  # answers of the open round that were moved
        self.others = 0  # levels of the open round that are not admitted
        self._noted: set[str] = set()
        self._door, self._learns = door, learns
        self.available = 0  # clients of the open round
        self.invited: Mapping[int, Message] = {}  # by place in the round's table
        self.invite_prob: FloatArray = np.empty(0)  # of the open round, by place
        self._rows = np.empty(0, dtype=np.int64)  # of the members, by place

    @property
    def closed(self) -> int:
        """Number of closed rounds."""
        return self.live.rounds

    @property
    def rows(self) -> IntArray:
        """Rows of the open round's clients among the members, by place."""
        return self._rows

    @property
    def ids(self) -> pl.Series:
        """Identifiers of the open round's clients, by place."""
        return self.live.members.frame[ID][self._rows]

    def open(
        self,
        attendance: Attendance,
        messages: Sequence[Message],
        invite_prob: FloatArray | None = None,
    ) -> None:
        """Open the next round with the clients that are available and the invitations to be sent.

        ``invite_prob`` (n,) is of the available clients. By default strategies sample the nodes
        they see uniformly without replacement: k of n with probability k/n.
        """
        self.available = len(attendance.nodes)
        self._rows = np.flatnonzero(attendance.present)
        places = np.cumsum(attendance.present) - 1
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
        prob = np.full(len(self._rows), np.nan)
        even = len(nodes) / max(self.available, 1) or np.nan  # not known if nobody was invited
        # given available, and asked among them (P8)
        given = even if invite_prob is None else invite_prob
        prob[places[attendance.rows]] = attendance.ask_prob * given
        self.invite_prob = prob
        table = self._admitted(attendance.table(self.live.members))
        table = table.with_columns(
            pl.Series(INVITED, flags),
            pl.Series(INVITE_PROB, prob).fill_nan(None),
            pl.lit(attendance.opened_at).alias(OPENED_AT),
        )
        self.live.open(table)
        for note in sorted({*self.live.notes} - self._noted):
            _LOG.warning("FedIPW: %s", note)
            self._noted.add(note)

    def _admitted(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return the answers of a round as they are used."""
        if self._door is None:
            return table
        closed = self.closed
        if self._learns:
            self._door.follow(self.live.ledger, closed)
        table, self.winsorised, self.others = self._door.admitted(
            table, self._rows, closed + 1, learn=self._learns
        )
        if self.winsorised:
            text = "answers lie outside what other clients answered and are taken at its edge"
            self._warn_once("winsorised", f"{self.winsorised} {text} (fedipw-winsorised)")
        if self.others:
            text = "answers have levels that are not admitted yet: texts are (other), numbers null"
            self._warn_once("others", f"{self.others} {text} (fedipw-other-levels)")
        return table

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._noted:
            self._noted.add(kind)
            _LOG.warning("FedIPW: %s; not logged again", text)

    def close(self, outcomes: RoundOutcomes) -> None:
        """Write the round to the ledger, then learn from it."""
        self.live.close(self._replied(outcomes), outcomes.column(len(self._rows)))
        self.invited = {}

    def _replied(self, outcomes: RoundOutcomes) -> BoolArray:
        replied = np.zeros(len(self._rows), dtype=np.bool_)
        replied[list(outcomes.replies)] = True
        return replied


class Rounds(InvitedRounds):
    """Rounds whose replies are weighed; all that is asked of the live weigher is asked here."""

    live: Live

    def __init__(
        self,
        stage: EnrollmentStage,
        ledger: Ledger,
        plan: Plan,
        door: Door | None = None,
        *,
        learns: bool = True,
    ) -> None:
        super().__init__(Live(stage, ledger, plan, guarded=True), door, learns=learns)

    def weights(
        self, outcomes: RoundOutcomes, reliance: float = 1.0
    ) -> tuple[RoundWeights | None, dict[int, float]]:
        """Return the weights of the replies that count, and each by its place.

        ``reliance`` is how far enrollment weights are relied on (O21).
        """
        found = self.live.weigh(self._replied(outcomes), reliance)
        if found is None:
            return None, {}
        places = np.searchsorted(self._rows, found.replies.rows)
        return found, dict(zip(places.tolist(), found.weights.tolist(), strict=True))


def add_metrics(metrics: MetricRecord, values: Values) -> None:
    """Add values to a strategy's own metrics, under ``fedipw-``."""
    for name, value in values.items():
        metrics[f"{PREFIX}{name}"] = value


def round_counts(available: int, outcomes: RoundOutcomes) -> Values:
    """Return counts of clients and outcomes."""
    return {
        "available": available, "invited": len(outcomes.outcomes), **outcomes.counts(),
        "strays": outcomes.strays,
    }  # fmt: skip


def round_metrics(available: int, outcomes: RoundOutcomes, found: RoundWeights | None) -> Values:
    """Return counts of clients and outcomes, weights in the order of the ledger, and diagnostics.

    A reply has no weight, and is not weighed, where a model lacks a value or does not know a level.
    """
    values: Values = {**round_counts(available, outcomes), "weighed": 0}
    if found is None:
        return values
    replies = found.replies
    values |= {
        "weighed": len(found.weights),
        "weights": found.weights.tolist(),
        "weight-sum": found.total,
        "weight-largest": float(np.abs(found.weights).max()),
        "weights-negative": found.negative,
        "weights-trimmed": 0 if found.trimming is None else found.trimming.changed,
        "effective-replies": found.effective_replies,
        "reliance": found.reliance,
        "participation-smallest": float(replies.participation_prob.min()),
    }
    if found.imbalance is not None:
        values["imbalance-enrolled"] = found.imbalance.enrolled
        if np.isfinite(found.imbalance.respondents):
            values["imbalance-respondents"] = found.imbalance.respondents
    if not np.isnan(replies.inclusion_prob).any():
        values["inclusion-smallest"] = float(replies.inclusion_prob.min())
    return values


def log_private_round(index: int, outcomes: RoundOutcomes, values: Values) -> None:
    """Log the outcomes of a private round and its sum on one line."""
    counts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.counts().items() if n)
    line = f"private round {index}, {len(outcomes.outcomes)} invited: {counts or 'nobody'}"
    if values["sum-opened"]:
        line += (
            f"; the sum over {values['contributors']} counts as {values['effective-replies']:.4g} "
            f"replies; cut: {values['weights-cut']} weights, {values['columns-cut']} clients' "
            f"columns, {values['updates-clipped']} updates"
        )
    _LOG.info("FedIPW: %s", line)
    for reason, n in Counter(outcomes.errors.values()).most_common(3):
        _LOG.warning("FedIPW: %d clients dropped out: %s", n, reason)


def log_round(
    work: str,
    index: int,
    outcomes: RoundOutcomes,
    found: RoundWeights | None,
    ids: pl.Series,
    *,
    said: str = "",
) -> None:
    """Log the outcomes, weights and metrics of a round on one line, and warnings on others.

    ``ids`` are those of the clients by place, ``said`` is what the metrics are.
    """
    counts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.counts().items() if n)
    line = f"{work} of round {index}, {len(outcomes.outcomes)} invited: {counts or 'nobody'}"
    if found is not None:
        relied = found.reliance < 1.0
        silent = outcomes.counts()[Outcome.REPLIED.value] - len(found.weights)
        if silent:
            line += f"; {silent} replies lack a value or have a new level, and get no weight"
        line += (
            f"; weights sum to {found.total:.4g} and count as {found.effective_replies:.4g} "
            f"replies; participation from {found.replies.source.value}"
            + (f"; reliance on enrollment weights {found.reliance:.2f}" if relied else "")
            + (f"; {found.note}" if found.note else "")
        )
    _LOG.info("FedIPW: %s%s", line, f"; {said}" if said else "")
    if outcomes.errors:
        kinds = Counter(outcomes.errors.values())
        listed = "; ".join(f"{n} x {text}" for text, n in kinds.most_common(3))
        more = f" and {len(kinds) - 3} more kinds" if len(kinds) > 3 else ""
        _LOG.warning("FedIPW: %d clients raised an error: %s%s", len(outcomes.errors), listed, more)
    for place, reason in outcomes.reasons.items():
        _LOG.warning("FedIPW: the reply of %r is refused: %s", ids[place], reason)
    if found is None:
        _LOG.warning("FedIPW: nothing to weigh in round %d: it is recorded and skipped", index)
    elif found.few:
        _LOG.warning(
            "FedIPW: few replies carry the weight of round %d: %d replies count as %.3g",
            index, len(found.weights), found.effective_replies,
        )  # fmt: skip
