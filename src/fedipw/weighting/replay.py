"""One weigher led through rounds one after the other, from a ledger or as they happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import polars as pl

from fedipw.errors import EmptyRoundError, InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import some
from fedipw.selection.logged import LoggedParticipation
from fedipw.selection.steplog import LogSettings
from fedipw.selection.steps import Formulas
from fedipw.tables.ledger import ROUND
from fedipw.tables.population import ID
from fedipw.weighting.functions import effective_sample_size
from fedipw.weighting.logged import Logged
from fedipw.weighting.registry import Method
from fedipw.weighting.rounds import RoundOpening, RoundWeights
from fedipw.weighting.schemes import Calibrated, Greg, Hajek, Scheme, enrollment_weights_of
from fedipw.weighting.weigher import Weigher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fedipw.numerics.types import BoolArray, IntArray
    from fedipw.selection.logged import StepRows
    from fedipw.selection.stage import StageModel
    from fedipw.tables.members import Members
    from fedipw.weighting.standing import People, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlan:
    """How a ledger is turned into weights."""

    method: Method
    formulas: Formulas = field(default_factory=Formulas)
    settings: LogSettings = field(default_factory=LogSettings)
    trim: float | None = None
    models: Mapping[str, StageModel] | None = None  # participation steps, fitted before
    scratch: Path | None = None


@dataclass(slots=True, eq=False)
class LogRecord:
    """What happened on the way: where probabilities came from, what was skipped."""

    rounds: int = 0
    replies: int = 0
    weighed: int = 0
    skipped: dict[int, str] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    negative: int = 0
    trimmed: int = 0
    smallest_participation: float = np.inf
    smallest_inclusion: float = np.inf
    effective: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    refits: int = 0
    passes: int = 0
    left_out: int = 0  # replies without a weight
    rows_left_out: int = 0  # rows of the ledger no fit has used, for want of values
    enrolled_effective: float = np.nan  # effective number of enrolled clients, calibrated
    standings: int = 0  # times enrollment was fitted or calibrated
    enrollment: StageModel | None = None
    participation: dict[str, StageModel] = field(default_factory=dict)

    def take(self, found: RoundWeights) -> None:
        """Count a round's weights."""
        self.weighed += len(found.weights)
        self.negative += found.negative
        self.trimmed += 0 if found.trimming is None else found.trimming.changed
        if found.note:
            self.notes[found.note] += 1
        replies = found.replies
        self.sources[replies.source.value] += 1
        self.smallest_participation = min(
            self.smallest_participation, float(replies.participation_prob.min())
        )
        inclusion = replies.inclusion_prob
        if not np.isnan(inclusion).any():
            self.smallest_inclusion = min(self.smallest_inclusion, float(inclusion.min()))
        if found.weights.any():
            self.effective.append(effective_sample_size(found.weights))
        self.totals.append(found.total)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without the models."""
        plain = ("rounds", "replies", "weighed", "negative", "trimmed", "refits", "passes",
                 "left_out", "rows_left_out")  # fmt: skip
        return {
            **{name: getattr(self, name) for name in plain},
            "enrollment_fits": self.standings,
            "skipped": {str(k): v for k, v in self.skipped.items()},
            "sources": dict(self.sources),
            "notes": dict(self.notes),
            "smallest_participation_prob": _number(self.smallest_participation),
            "smallest_inclusion_prob": _number(self.smallest_inclusion),
            "mean_effective_replies": _number(float(np.mean(self.effective or [np.nan]))),
            "enrolled_effective": _number(self.enrolled_effective),
            "mean_weight_sum": _number(float(np.mean(self.totals or [np.nan]))),
        }


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


class Watch(Protocol):
    """Told of a replay as it goes on; it changes nothing."""

    def read(self, index: int, table: pl.DataFrame, rows: IntArray) -> None:
        """Take a round as it stands in the ledger, and the members behind its rows, (n,)."""
        ...

    def enrolled(self, standing: Standing, scheme: Scheme) -> None:
        """Take enrollment as it stands from this round on."""
        ...

    def weighed(self, steps: Sequence[StepRows], found: RoundWeights | None) -> None:
        """Take the steps of the round that was read and its weights, none if it was skipped."""
        ...


@dataclass(slots=True, eq=False)
class Replay:
    """One weigher, its enrollment renewed whenever somebody joins or leaves."""

    people: People
    plan: LogPlan
    record: LogRecord
    participation: LoggedParticipation
    watch: Watch | None = None
    weigher: Weigher | None = None
    source: Logged | None = None
    scheme: Scheme | None = None
    present: BoolArray | None = None
    index: int = 0  # of the open round
    empty: bool = False  # whether nobody is enrolled in it

    def round(self, opening: RoundOpening, replied: BoolArray) -> pl.DataFrame | None:
        """Return the table of a round, none if nothing in it can be weighed."""
        self.open(opening)
        found = self.weights(replied)
        self.close(replied, found)
        return None if found is None else self.table(found)

    def open(self, opening: RoundOpening) -> None:
        """Take a round's rows."""
        assert opening.table is not None
        assert opening.rows is not None
        present = np.zeros(self.people.members.size, dtype=np.bool_)
        present[opening.rows] = True
        self.index, self.empty = opening.index, not present.any()
        self.record.rounds += 1
        if self.empty:  # nobody was enrolled; time goes on
            self.record.skipped[opening.index] = "nobody is enrolled"
            self.participation.open(opening.table, opening.rows)
            return
        if self.present is None or not np.array_equal(present, self.present):
            self._enroll(present, opening.index)
        assert self.weigher is not None
        self.weigher.open(opening)

    def weights(self, replied: BoolArray) -> RoundWeights | None:
        """Return the weights of the open round's replies, none if nothing can be weighed."""
        if self.empty:
            return None
        assert self.weigher is not None
        if not replied.any():
            self.record.skipped[self.index] = "nobody replied"
            return None
        try:
            return self.weigher.weights(replied)[self.plan.method.name]
        except EmptyRoundError:
            self.record.skipped[self.index] = "no reply has all the values needed"
            return None

    def close(self, replied: BoolArray, found: RoundWeights | None) -> None:
        """Take the replies of the open round, and the weights they were given."""
        if self.watch is not None:
            steps = () if self.empty else self.participation.step_rows(replied)
            self.watch.weighed(steps, found)
        if self.empty:
            self.participation.close(replied)
            return
        assert self.weigher is not None
        assert self.source is not None
        self.weigher.close(replied)
        self.record.replies += int(replied.sum())
        self.record.left_out = self.source.left_out
        if found is not None:
            self.record.take(found)

    def _enroll(self, present: BoolArray, index: int) -> None:
        try:
            standing: Standing = self.people.at(present, self.plan.method)
        except (SeparationError, NotConvergedError) as error:
            if not self.people.members.changes:
                raise
            raise InputError(
                f"Enrollment as it stood in round {index} ({int(present.sum())} clients) cannot be "
                f"fitted: {error}"
            ) from error
        self.present = present
        self.scheme = self.plan.method.scheme_for(standing.facts)
        self.record.standings += 1
        self.record.enrollment = standing.model
        if standing.note:
            self.record.notes[standing.note] += 1
        if _calibrated(self.scheme):
            enrolled = enrollment_weights_of(self.scheme)[standing.units.enrolled]
            self.record.enrolled_effective = effective_sample_size(enrolled)
        if self.weigher is None or self.source is None:
            self.source = Logged(standing.units, self.participation)
            schemes = {self.plan.method.name: self.scheme}
            self.weigher = Weigher(self.source, schemes, trim=self.plan.trim)
        else:
            self.source.units = standing.units
            self.weigher.schemes[self.plan.method.name] = self.scheme
        if self.watch is not None:
            self.watch.enrolled(standing, self.scheme)

    def table(self, found: RoundWeights) -> pl.DataFrame:
        """Return probabilities and weights, one row per reply."""
        replies = found.replies
        ids = self.people.members.frame[ID][replies.rows]
        assert self.scheme is not None
        made = {
            ID: ids,
            ROUND: np.full(len(ids), replies.index, dtype=np.int64),
            "enrollment_prob": replies.enrollment_prob,
            "participation_prob": replies.participation_prob,
            "inclusion_prob": replies.inclusion_prob,
            "weight": found.weights,
        }
        if _calibrated(self.scheme):
            made["enrollment_weight"] = enrollment_weights_of(self.scheme)[replies.rows]
        return pl.DataFrame(made).with_columns(
            pl.col("enrollment_prob", "inclusion_prob").fill_nan(None)
        )


def _calibrated(scheme: Scheme) -> bool:
    if isinstance(scheme, Hajek | Greg):
        return _calibrated(scheme.inner)
    return isinstance(scheme, Calibrated)


def check_present(members: Members, rows: IntArray, enrolled: BoolArray, where: str) -> None:
    """Raise unless a round has one row for each client enrolled then, and no other."""
    early = rows[~enrolled[rows]]
    ids = members.frame[ID]
    if early.size:
        raise InputError(
            f"{where}: {early.size} client(s) have a row but were not enrolled then: "
            f"{some(ids[early].to_list())}."
        )
    listed = np.zeros(members.size, dtype=np.bool_)
    listed[rows] = True
    absent = np.flatnonzero(enrolled & ~listed)
    if absent.size:
        raise InputError(
            f"{where}: {absent.size} enrolled client(s) have no row: "
            f"{some(ids[absent].to_list())}. A round lists every enrolled client; add those that "
            "were not invited, or say when clients join and leave (enrolled_from, enrolled_until)."
        )
