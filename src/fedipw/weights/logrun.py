"""Weights of every reply of a ledger, round by round, by the same weigher as in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import polars as pl

from fedipw.data.ledger import OPENED_AT, REPLIED, ROUND, Ledger
from fedipw.data.population import ID
from fedipw.errors import EmptyRoundError, InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import some
from fedipw.propensity.logged import LoggedParticipation
from fedipw.propensity.steplog import LogSettings, LogWindow
from fedipw.propensity.steps import Formulas, participation_steps
from fedipw.weights.functions import effective_sample_size
from fedipw.weights.logged import Logged
from fedipw.weights.registry import Method, SourceKind
from fedipw.weights.rounds import RoundOpening, RoundWeights
from fedipw.weights.schemes import Calibrated, Greg, Hajek, Scheme, enrollment_weights_of
from fedipw.weights.weigher import Weigher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fedipw.data.members import Members
    from fedipw.numerics.types import BoolArray, IntArray
    from fedipw.propensity.logged import StepRows
    from fedipw.propensity.stage import StageModel
    from fedipw.weights.everyone import Everyone
    from fedipw.weights.standing import People, Standing

Progress = Callable[[int, int], None]


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


def logged_weights(
    people: People,
    ledger: Ledger,
    plan: LogPlan,
    record: LogRecord,
    progress: Progress | None = None,
    *,
    watch: Watch | None = None,
) -> Iterator[pl.DataFrame]:
    """Yield one table per round with replies: probabilities and weights, one row per reply.

    Rounds are read one at a time and told to the weigher as they would have opened and closed. What
    cannot be weighed is skipped and stands in ``record``.

    Parameters
    ----------
    people
        A population table, or enrolled clients and totals.
    ledger
        Closed rounds.
    plan
        Method, formulas and how to fit.
    record
        Filled on the way.
    progress
        Told of rounds done and rounds in all.
    watch
        Told of all rows of each round, beside the replies.
    """
    people.require(plan.method)
    ledger.require_rounds()
    enrolled, everyone = people.members, None
    if plan.method.source is SourceKind.COLLAPSED:
        people = everyone = people.everyone()
    steps = participation_steps(
        ledger, people.members, plan.formulas, plan.models, in_one=everyone is not None
    )
    models, todo = plan.models, _Count(len(ledger.rounds), progress)
    if plan.settings.window is LogWindow.POOLED and models is None:
        todo = _Count(2 * len(ledger.rounds), progress)
        learner = LoggedParticipation(people.members, steps, plan.settings, scratch=plan.scratch)
        for opening, replied in _rounds(ledger, enrolled, everyone):
            assert opening.table is not None
            assert opening.rows is not None
            learner.open(opening.table, opening.rows)
            learner.close(replied)
            todo.one()
        models = learner.pooled()
        record.refits += len(learner.logs)
        record.passes += sum(log.passes for log in learner.logs)
        record.rows_left_out = sum(log.left_out for log in learner.logs)
        del learner
    participation = LoggedParticipation(
        people.members, steps, plan.settings, models=models, scratch=plan.scratch
    )
    run = _Run(people, plan, record, participation, watch)
    for opening, replied in _rounds(ledger, enrolled, everyone, watch):
        table = run.round(opening, replied)
        todo.one()
        if table is not None:
            yield table
    record.refits += sum(log.fits for log in participation.logs)
    record.passes += sum(log.passes for log in participation.logs)
    record.rows_left_out += sum(log.left_out for log in participation.logs)
    record.notes.update(participation.notes)
    record.participation = dict(models or {}) or {
        log.step.name: log.model() for log in participation.logs if log.fit is not None
    }


@dataclass(slots=True)
class _Count:
    total: int
    progress: Progress | None
    done: int = 0

    def one(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


@dataclass(slots=True, eq=False)
class _Run:
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

    def round(self, opening: RoundOpening, replied: BoolArray) -> pl.DataFrame | None:
        """Return the table of a round, none if nothing in it can be weighed."""
        assert opening.rows is not None
        present = np.zeros(self.people.members.size, dtype=np.bool_)
        present[opening.rows] = True
        if not present.any():
            self._nobody(opening, replied)
            return None
        if self.present is None or not np.array_equal(present, self.present):
            self._enroll(present, opening.index)
        assert self.weigher is not None
        assert self.source is not None
        self.record.rounds += 1
        self.record.replies += int(replied.sum())
        self.weigher.open(opening)
        found = None
        if not replied.any():
            self.record.skipped[opening.index] = "nobody replied"
        else:
            try:
                found = self.weigher.weights(replied)[self.plan.method.name]
            except EmptyRoundError:
                self.record.skipped[opening.index] = "no reply has all the values needed"
        if self.watch is not None:
            self.watch.weighed(self.participation.step_rows(replied), found)
        self.weigher.close(replied)
        self.record.left_out = self.source.left_out
        return None if found is None else self._table(found)

    def _nobody(self, opening: RoundOpening, replied: BoolArray) -> None:
        """Skip a round nobody was enrolled in; time goes on."""
        assert opening.table is not None
        assert opening.rows is not None
        self.record.rounds += 1
        self.record.skipped[opening.index] = "nobody is enrolled"
        self.participation.open(opening.table, opening.rows)
        if self.watch is not None:
            self.watch.weighed((), None)
        self.participation.close(replied)

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

    def _table(self, found: RoundWeights) -> pl.DataFrame:
        self.record.take(found)
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


def _rounds(
    ledger: Ledger, members: Members, everyone: Everyone | None, watch: Watch | None = None
) -> Iterator[tuple[RoundOpening, BoolArray]]:
    """Yield each round of a ledger, checked against who was enrolled then; filled if collapsed."""
    for index, table in zip(ledger.rounds, ledger, strict=True):
        where = f"{ledger.directory} round {index}"
        rows = members.rows_of(table[ID], where)
        moment = table[OPENED_AT][0] if OPENED_AT in table.columns and table.height else None
        check_present(members, rows, members.present(index, moment), where)
        if watch is not None:
            watch.read(index, table, rows)
        opening = RoundOpening(index=index, table=table.drop(REPLIED), rows=rows)
        replied = table[REPLIED].to_numpy()
        yield (opening, replied) if everyone is None else everyone.filled(opening, replied)


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
