"""Weights of every reply of a ledger, round by round, by the same weigher as in training."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import polars as pl

from fedipw.errors import EmptyRoundError, InputError
from fedipw.numerics.checks import some
from fedipw.selection.coefficients import Coefficient, coefficients_of
from fedipw.selection.participation import Participation, ParticipationSettings, Source, Window
from fedipw.selection.saved import ENROLLMENT
from fedipw.selection.steps import Formulas, participation_steps
from fedipw.tables.columns import AFTERWARDS, ID, OPENED_AT, REPLIED, ROUND
from fedipw.tables.ledger import Round
from fedipw.weighting.functions import effective_sample_size
from fedipw.weighting.pipeline import Method, Probabilities
from fedipw.weighting.sources import CollapsedParticipation
from fedipw.weighting.weigher import Imbalance, StagedEnrollment, Weigher

if TYPE_CHECKING:
    from pathlib import Path

    from fedipw.numerics import BoolArray, IntArray
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.selection.participation import StepRows
    from fedipw.selection.saved import StageModel
    from fedipw.selection.steps import Step
    from fedipw.tables.ledger import Ledger
    from fedipw.tables.population import Members
    from fedipw.weighting.pipeline import Weighing
    from fedipw.weighting.resume import SavedRun
    from fedipw.weighting.sources import ParticipationSource
    from fedipw.weighting.weigher import RoundWeights

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How rounds are turned into weights."""

    method: Method
    formulas: Formulas = field(default_factory=Formulas)
    settings: ParticipationSettings = field(default_factory=ParticipationSettings)
    models: Mapping[str, StageModel] | None = None  # participation steps, fitted before
    scratch: Path | None = None
    examples: str | None = None  # column of the table of clients with their numbers of samples
    client: Any = None  # a distributed.Client on whose workers rounds are read and weighed
    errors: bool = True  # whether standard errors of the last models are asked for: one more pass

    def __post_init__(self) -> None:
        if self.method.normalisation.reads_samples and self.examples is None:
            raise InputError(
                f"{self.method.name} needs the sample counts of clients, which a ledger does not "
                "hold: use the normalisation hajek."
            )

    @property
    def collapsed(self) -> bool:
        """Whether one model over everybody takes the place of the two stages."""
        return self.method.base.probabilities is Probabilities.COLLAPSED


class Observer:
    """Receives a replay as it goes on; it changes nothing. What it does not need it leaves out."""

    wants_steps = False  # whether ``weighed`` receives the steps of a round
    learns = False  # whether it looks at rows that are fitted on, and at nothing else

    def read(self, round_: Round, table: pl.DataFrame) -> None:
        """Take a round as it stands in the ledger."""

    def enrolled(self, weighing: Weighing) -> None:
        """Take enrollment as it is from this round on."""

    def weighed(self, steps: Sequence[StepRows], found: RoundWeights | None) -> None:
        """Take the steps of the round that was read and its weights, none if it was skipped."""

    def learnt(self, round_: Round, table: pl.DataFrame, taken: Sequence[BoolArray]) -> None:
        """Take which rows of a closed round each step is fitted on, (n,) each."""

    def elsewhere(self) -> Observer:
        """Return one that has seen nothing, for other processes that read some of the rounds."""
        raise InputError(f"{type(self).__name__} cannot observe rounds on a cluster.")

    def told(self, rounds: Sequence[int]) -> Any:
        """Return what that one must know of some rounds beforehand."""
        del rounds

    def begun(self, told: Any) -> Observer:
        """Return a copy of one that has seen nothing, told what it must know."""
        del told
        return copy.deepcopy(self)

    def brought(self) -> Any:
        """Return what it has counted, to be merged where the others are."""
        return self

    def merge(self, brought: Any) -> None:
        """Add what was counted of later rounds."""
        del brought
        raise InputError(f"{type(self).__name__} cannot observe rounds on a cluster.")

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs to go on after the rounds so far; only between rounds."""
        raise InputError(f"{type(self).__name__} cannot go on from a saved state: use none.")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back; ``ValueError`` if it was counted in another way.

        Enrollment as it was then is received before, by ``enrolled``.
        """
        del state
        raise InputError(f"{type(self).__name__} cannot go on from a saved state: use none.")


@final
@dataclass(slots=True)
class _Mean:
    """A mean of numbers that come one by one: two numbers are kept, however many there were.

    >>> mean = _Mean()
    >>> for number in (1.0, 2.0, 6.0):
    ...     mean.add(number)
    >>> mean.value
    3.0
    """

    total: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        """Take one more number."""
        self.total += number
        self.count += 1

    def __add__(self, other: _Mean) -> _Mean:
        return _Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean, NaN of no number."""
        return self.total / self.count if self.count else np.nan


@final
@dataclass(slots=True, eq=False)
class Record(Observer):
    """What happened on the way: where probabilities came from, what was skipped."""

    rounds: int = 0
    replies: int = 0
    weighed_replies: int = 0
    skipped: dict[int, str] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    negative: int = 0
    trimmed: int = 0
    few_effective: int = 0  # rounds in which few replies carry the weight
    imbalance: Imbalance | None = None  # before the last round, of calibration as you go
    smallest_participation: float = np.inf
    smallest_inclusion: float = np.inf
    effective: _Mean = field(default_factory=_Mean)  # replies of a round
    totals: _Mean = field(default_factory=_Mean)  # sums of a round's weights
    refits: int = 0
    passes: int = 0
    left_out: int = 0  # replies without a weight
    rows_left_out: int = 0  # rows of the ledger no fit has used, because values are missing
    enrolled_effective: float = np.nan  # effective number of enrolled clients, calibrated
    enrollments: int = 0  # times enrollment was fitted or calibrated
    enrollment: StageModel | None = None
    participation: dict[str, StageModel] = field(default_factory=dict)
    population: str = ""  # what is said where clients are left out of it for missing values

    def models(self) -> dict[str, StageModel]:
        """Return the last models by stage; a stage with a constant rate has none."""
        first = {} if self.enrollment is None else {ENROLLMENT: self.enrollment}
        return {**first, **self.participation}

    def models_table(self) -> pl.DataFrame:
        """Return the coefficients of all models with odds ratios, 95% intervals and p-values (P9).

        One row per coefficient: ``stage, name, value, standard_error, odds_ratio, low, high,
        p_value``; a classifier has none.
        """
        rows = [
            {"stage": stage, **asdict(one)}
            for stage, model in self.models().items()
            for one in coefficients_of(model.fit)
        ]
        numbers = [f.name for f in fields(Coefficient) if f.name != "name"]
        text = {"stage": pl.String, "name": pl.String}
        return pl.DataFrame(rows, schema={**text, **dict.fromkeys(numbers, pl.Float64)})

    def enrolled(self, weighing: Weighing) -> None:
        """Count a change of enrollment."""
        state = weighing.state
        self.enrollments += 1
        self.enrollment = state.model
        for note in filter(None, (state.note, weighing.note)):
            self.notes[note] += 1
        if weighing.enrollment_weights is not None:
            inside = weighing.enrollment_weights[state.enrolled]
            self.enrolled_effective = effective_sample_size(inside)

    def weighed(self, steps: Sequence[StepRows], found: RoundWeights | None) -> None:
        """Count a round's weights."""
        del steps
        if found is None:
            return
        self.weighed_replies += len(found.weights)
        self.negative += found.negative
        self.trimmed += 0 if found.trimming is None else found.trimming.changed
        self.few_effective += int(found.weights.any() and found.few)
        self.imbalance = found.imbalance
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
            self.effective.add(effective_sample_size(found.weights))
        self.totals.add(found.total)

    @property
    def rate_rounds(self) -> int:
        """Rounds whose participation probabilities are one rate for all, by no model."""
        return sum(n for source, n in self.sources.items() if Source(source).is_rate)

    def elsewhere(self) -> Record:
        """Return an empty record."""
        return Record()

    def merge(self, brought: Record) -> None:
        """Add what was counted of later rounds; their enrollment was taken here."""
        for name in (*_SUMMED, *_MEANS):
            setattr(self, name, getattr(self, name) + getattr(brought, name))
        for name in ("smallest_participation", "smallest_inclusion"):
            setattr(self, name, min(getattr(self, name), getattr(brought, name)))
        self.skipped.update(brought.skipped)
        self.sources.update(brought.sources)
        self.notes.update(brought.notes)
        if brought.totals.count:  # of the last round that was weighed
            self.imbalance = brought.imbalance

    def state(self) -> dict[str, Any]:
        """Return all counts; the models are the weigher's and the learner's."""
        left = self.imbalance
        return {
            **{name: getattr(self, name) for name in _COUNTED},
            "sources": dict(self.sources),
            "notes": dict(self.notes),
            "skipped": {str(index): why for index, why in self.skipped.items()},
            "imbalance": None if left is None else [left.enrolled, left.respondents],
            **{name: list(astuple(getattr(self, name))) for name in _MEANS},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved counts back."""
        for name in _COUNTED:
            setattr(self, name, state[name])
        for name in _MEANS:
            setattr(self, name, _Mean(*state[name]))
        self.sources, self.notes = Counter(state["sources"]), Counter(state["notes"])
        self.skipped = {int(index): why for index, why in state["skipped"].items()}
        left = state["imbalance"]
        self.imbalance = None if left is None else Imbalance(*left)

    def add_fits(self, learner: Participation) -> None:
        """Count the fits of a learner."""
        self.refits += sum(step.fits for step in learner.steps)
        self.passes += sum(step.passes for step in learner.steps)
        self.rows_left_out += sum(step.left_out for step in learner.steps)
        self.notes.update(learner.notes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without the models."""
        plain = ("rounds", "replies", "negative", "trimmed", "few_effective", "refits", "passes",
                 "left_out", "rows_left_out")  # fmt: skip
        left = self.imbalance
        return {
            **{name: getattr(self, name) for name in plain},
            "weighed": self.weighed_replies,
            "enrollment_fits": self.enrollments,
            "population_note": self.population,
            "rate_rounds": self.rate_rounds,
            "skipped": {str(k): v for k, v in self.skipped.items()},
            "sources": dict(self.sources),
            "notes": dict(self.notes),
            "smallest_participation_prob": _number(self.smallest_participation),
            "smallest_inclusion_prob": _number(self.smallest_inclusion),
            "mean_effective_replies": _number(self.effective.value),
            "enrolled_effective": _number(self.enrolled_effective),
            "mean_weight_sum": _number(self.totals.value),
            "imbalance": None
            if left is None
            else {"enrolled": _number(left.enrolled), "respondents": _number(left.respondents)},
        }


# of a record: what adds up, what is plain, and means over rounds
_SUMMED = ("rounds", "replies", "weighed_replies", "negative", "trimmed", "few_effective", "refits",
           "passes", "left_out", "rows_left_out", "enrollments")  # fmt: skip
_COUNTED = (*_SUMMED, "smallest_participation", "smallest_inclusion", "enrolled_effective")
_MEANS = ("effective", "totals")


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def note_sentence(note: str, count: int) -> str:
    """Return a note and how often it was made, the same in every report.

    >>> note_sentence("enrollment by a fit with a penalty of 1", 2)
    '2 time(s): Enrollment by a fit with a penalty of 1.'
    """
    return f"{count} time(s): {note[:1].upper()}{note[1:].removesuffix('.')}."


def rate_sentence(step: str, rounds: int) -> str:
    """Return what is said of rounds whose probabilities are by no model.

    >>> rate_sentence("participation", 2)
    "The step 'participation' was given a constant rate, not a model, in 2 rounds."
    """
    many = "1 round" if rounds == 1 else f"{rounds} rounds"
    return f"The step {step!r} was given a constant rate, not a model, in {many}."


@final
class RoundRun:
    """One weigher led through rounds, from a ledger or as they happen, with its observers."""

    def __init__(
        self, weigher: Weigher, method: str, record: Record, observers: Sequence[Observer] = ()
    ) -> None:
        self.weigher, self.method, self.record = weigher, method, record
        self.observers = (record, *observers)
        self._round: Round | None = None

    @property
    def weighing(self) -> Weighing:
        """The method at the present enrollment."""
        return self.weigher.weighings[self.method]

    def open(self, round_: Round) -> None:
        """Open a round."""
        before = self.weigher.enrollments
        self.weigher.open(round_)
        self._round = round_
        self.record.rounds += 1
        if self.weigher.enrollments > before:
            for observer in self.observers:
                observer.enrolled(self.weighing)

    def weigh(self, replied: BoolArray, reliance: float = 1.0) -> RoundWeights | None:
        """Return the weights of the open round's replies, none if nothing can be weighed."""
        assert self._round is not None
        try:
            return self.weigher.weigh(replied, {self.method: reliance})[self.method]
        except EmptyRoundError as error:
            self.record.skipped[self._round.index] = str(error)
            return None

    def close(
        self, replied: BoolArray, found: RoundWeights | None, table: pl.DataFrame | None = None
    ) -> None:
        """Close the round with the weights its replies were given."""
        opened = self._round
        assert opened is not None
        steps: Sequence[StepRows] = ()
        if len(opened.rows) and any(observer.wants_steps for observer in self.observers):
            steps = self.weigher.participation.step_rows(replied)
        for observer in self.observers:
            observer.weighed(steps, found)
        taken = self.weigher.close(replied)
        self.record.replies += int(replied.sum())
        self.record.left_out = self.weigher.left_out
        if table is not None and taken:
            for observer in self.observers:
                observer.learnt(opened, table, taken)

    def take(
        self, round_: Round, table: pl.DataFrame, members: Members, *, learns: bool = True
    ) -> pl.DataFrame | None:
        """Lead a closed round through: return the table of its weights, none if it was skipped.

        Observers are told which rows are fitted on unless they were told before.
        """
        for observer in self.observers:
            observer.read(round_, table)
        replied = table[REPLIED].to_numpy()
        self.open(round_)
        found = self.weigh(replied)
        self.close(replied, found, table if learns else None)
        return None if found is None else self.table(found, members)

    def table(self, found: RoundWeights, members: Members) -> pl.DataFrame:
        """Return probabilities and weights, one row per reply."""
        replies, q = found.replies, self.weighing.enrollment_weights
        ids = members.frame[ID][replies.rows]
        made = {
            ID: ids,
            ROUND: np.full(len(ids), replies.index, dtype=np.int64),
            "enrollment_prob": replies.enrollment_prob,
            "participation_prob": replies.participation_prob,
            "inclusion_prob": replies.inclusion_prob,
            "weight": found.weights,
        }
        if q is not None:
            made["enrollment_weight"] = q[replies.rows]
        return pl.DataFrame(made).with_columns(
            pl.col("enrollment_prob", "inclusion_prob").fill_nan(None)
        )


@final
class Replay:
    """The rounds of a ledger, weighed as they would have been while they happened.

    Iterating yields one table per round with replies: probabilities and weights, one row per reply.
    The ledger is read once, twice where participation is fitted on all rounds. What cannot be
    weighed is skipped and recorded.

    Parameters
    ----------
    stage
        What is known of enrollment.
    ledger
        Closed rounds.
    plan
        Method, formulas and how to fit.
    observers
        Receive every round beside the weights.
    progress
        Receives rounds done and rounds in all.
    saved
        Where to go on from and what to save to: of the rounds done before, no table is yielded.
    """

    spread = False  # over the workers of a cluster

    def __init__(
        self,
        stage: EnrollmentStage,
        ledger: Ledger,
        plan: Plan,
        *,
        observers: Sequence[Observer] = (),
        progress: Progress | None = None,
        saved: SavedRun | None = None,
    ) -> None:
        stage.require(plan.method.needs)
        if saved is not None:
            saved.bind(stage, ledger, plan)
        self.stage, self.ledger, self.plan = stage, ledger, plan
        self._observers, self._progress, self._saved = tuple(observers), progress, saved
        self._done, self._todo = 0, len(ledger.require_rounds())
        self.learner: Participation | None = None  # that has seen all rounds, once they are read
        self.record = Record(population=stage.narrowed)

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """Yield the table of each round with replies."""
        plan, record, saved = self.plan, self.record, self._saved
        run, learner = self._begun()
        for round_, table in self._rounds(learner.rounds):
            made = run.take(round_, table, self.stage.members)
            self._count()
            if made is not None:
                yield made
            if saved is not None and saved.due:
                saved.save(run, learner)
        if saved is not None:
            saved.save(run, learner, ended=True)
        record.add_fits(learner)
        record.participation = learner.fitted(errors=plan.errors)
        if not plan.settings.soft:
            learner.require_models()  # what a later round has mended is no failure
        if not learner.models:
            self.learner = learner

    def run(self, write: Callable[[int, pl.DataFrame], None] | None = None) -> int:
        """Weigh all rounds; ``write`` takes their tables by number. Returns how many there are."""
        number = 0
        for table in self:
            if write is not None:
                write(number, table)
            number += 1
        return number

    def _begun(self) -> tuple[RoundRun, Participation]:
        """Return the run and its learner, after the rounds of a saved state where there is one."""
        plan, saved = self.plan, self._saved
        clients, places = self.stage.members, None
        if plan.collapsed:
            clients, places = CollapsedParticipation.everyone(self.stage.population)

        def bound() -> tuple[Step, ...]:
            return participation_steps(
                self.ledger, clients, plan.formulas, plan.models, in_one=plan.collapsed
            )

        known = None if saved is None else saved.steps(clients, bound)
        if saved is not None and known is not None:
            run, learner = self._run(known, clients, places)
            if saved.restored(run, learner):
                self._done = learner.rounds
                return run, learner
        return self._run(bound(), clients, places)

    def _run(
        self, steps: tuple[Step, ...], clients: Members, places: IntArray | None
    ) -> tuple[RoundRun, Participation]:
        """Return a run before its first round; where the fit is pooled, all rounds are read."""
        plan, models, certain = self.plan, self.plan.models, frozenset[str]()
        if plan.settings.window is Window.POOLED and models is None:
            self._todo *= 2
            learner = Participation(clients, steps, plan.settings, scratch=plan.scratch)
            self._learn(_source(learner, places))
            self.learner, models = learner, learner.pooled(certain=True)
            certain = frozenset(step.name for step in steps) - set(models)
            self.record.add_fits(self.learner)
        learner = Participation(
            clients, steps, plan.settings, models=models, certain=certain, scratch=plan.scratch
        )
        weigher = Weigher(
            StagedEnrollment(self.stage, plan.method, examples=plan.examples),
            _source(learner, places), {plan.method.name: plan.method},
        )  # fmt: skip
        return RoundRun(weigher, plan.method.name, self.record, self._observers), learner

    def learn(self) -> Participation:
        """Read the ledger once and return a learner that has seen all rounds, without weights."""
        plan, members = self.plan, self.stage.members
        steps = participation_steps(self.ledger, members, plan.formulas)
        settings = replace(plan.settings, window=Window.POOLED, last=None, decay=1.0)
        self.learner = Participation(members, steps, settings, scratch=plan.scratch)
        self._learn(self.learner)
        return self.learner

    def _learn(self, source: ParticipationSource) -> None:
        """Let a source learn from all rounds."""
        for round_, table in self._rounds():
            source.open(round_)
            taken = source.close(table[REPLIED].to_numpy())
            for observer in self._observers:
                observer.learnt(round_, table, taken)
            self._count()

    def _rounds(self, after: int = 0) -> Iterator[tuple[Round, pl.DataFrame]]:
        return ledger_rounds(self.ledger, self.stage.members, self.ledger.rounds[after:])

    def _count(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._todo)


def _source(learner: Participation, places: IntArray | None) -> ParticipationSource:
    return learner if places is None else CollapsedParticipation(learner, places)


def ledger_rounds(
    ledger: Ledger, members: Members, rounds: Sequence[int] | None = None
) -> Iterator[tuple[Round, pl.DataFrame]]:
    """Yield each round of a ledger, or some, and its table, checked against who was enrolled."""
    for index in ledger.rounds if rounds is None else rounds:
        table = ledger.read(index)
        before = table.drop(AFTERWARDS, strict=False)
        if members.former is None:
            yield coming_round(before, index, members, ledger), table
        else:  # enrollment was another then, and the ledger alone says which
            rows = members.rows_of(table[ID], f"{ledger.directory} round {index}")
            yield Round(index=index, rows=rows, table=before), table


def coming_round(table: pl.DataFrame, index: int, members: Members, ledger: Ledger) -> Round:
    """Return a round before its replies, or raise if it lists others than the enrolled."""
    where = f"{ledger.directory} round {index}"
    rows = members.rows_of(table[ID], where)
    moment = table[OPENED_AT][0] if OPENED_AT in table.columns and table.height else None
    enrolled = members.present(index, moment)
    early, ids = rows[~enrolled[rows]], members.frame[ID]
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
    return Round(index=index, rows=rows, table=table)
