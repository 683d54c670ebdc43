"""The rounds of a ledger on the workers of a cluster: coded, fitted, weighed and tallied there.

The command that asks decides, by counts and sums alone, which fit each round is given. Workers read
the ledger's files, code rounds in chunks, keep the coded rows, form the sums of the fits over them,
weigh the replies and write the tables. What a lost worker had done is done again by another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import numpy as np

from fedipw.errors import InputError
from fedipw.selection.participation import Participation, RoundCounts, StepFit, Window
from fedipw.selection.rowstore import (
    UNWEIGHTED,
    BlockStore,
    CodedRows,
    block_edges,
    weighted_rounds,
)
from fedipw.selection.steps import participation_steps
from fedipw.tables.cluster import Workers
from fedipw.tables.columns import REPLIED
from fedipw.tables.partitions import Block, Given, Partitions
from fedipw.weighting.replay import Observer, Record, Replay, RoundRun, ledger_rounds
from fedipw.weighting.sources import NoParticipation
from fedipw.weighting.weigher import GivenEnrollment, StagedEnrollment, Weigher

if TYPE_CHECKING:
    from collections.abc import Iterator

    import polars as pl

    from fedipw.numerics import BoolArray, FloatArray, IntArray, LabelArray
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.selection.participation import Coder, ParticipationSettings
    from fedipw.selection.rowstore import RowStore
    from fedipw.selection.saved import StageModel
    from fedipw.selection.steps import Step
    from fedipw.tables.cluster import Shared, Task
    from fedipw.tables.ledger import Ledger
    from fedipw.tables.partitions import Frame
    from fedipw.tables.population import Members
    from fedipw.weighting.online import OnlineState
    from fedipw.weighting.pipeline import Weighing
    from fedipw.weighting.replay import Plan, Progress
    from fedipw.weighting.resume import SavedRun

T = TypeVar("T")
Writer = Callable[[int, "pl.DataFrame"], None]  # of a part by its number, from any process
_MOST_ROUNDS = 10  # of a chunk
_CHUNKS = 8  # for each thread of the workers, at least, where there are enough rounds


# --- on the workers


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What workers need to know of all rounds."""

    ledger: Ledger
    members: Members
    steps: tuple[Step, ...]
    settings: ParticipationSettings
    learning: tuple[Observer, ...]  # that have seen nothing: of rows that are fitted on
    watching: tuple[Observer, ...]  # of weights


class _RoundFacts(NamedTuple):
    """What is counted of a round."""

    number: int
    rows: int
    replies: int
    present: bytes | None  # of each member whether it is listed, packed; none if all are
    counts: dict[str, RoundCounts]  # by step


class _Chunk(NamedTuple):
    """Coded rounds."""

    blocks: dict[str, list[list[Block]]]  # by step and round; rows counted from the chunk's first
    facts: list[_RoundFacts]
    brought: list[Any]  # by the observers


class _Part(NamedTuple):
    """Which rows of a chunk a sum runs over."""

    step: str
    first: int  # round, counted from the chunk's first
    last: int
    start: int  # rows of the step before the chunk
    beside: Any = None  # what is given for each block, where something is


def _first_frames(job: _Job) -> dict[str, Frame | None]:
    """Return the change of columns of each step, by its first rows."""
    learner = Participation(job.members, job.steps, job.settings)
    for round_, table in ledger_rounds(job.ledger, job.members):
        learner.open(round_)
        learner.close(table[REPLIED].to_numpy())
        if all(step.store.frame is not None for step in learner.steps):
            break
    return {step.step.name: step.store.frame for step in learner.steps}


def _history(job: _Job, rounds: Sequence[int], before: Any) -> Any:
    """Return what is remembered of clients after some rounds, and before them."""
    learner = Participation(job.members, job.steps, job.settings)
    learner.remember(before, rounds[0] - job.ledger.since)
    for round_, table in ledger_rounds(job.ledger, job.members, rounds):
        learner.skip(round_, table[REPLIED].to_numpy())
    return learner.memory()


def _coded(
    job: _Job, rounds: Sequence[int], frames: Mapping[str, Frame | None], history: Any,
    told: Sequence[Any],
) -> _Chunk:  # fmt: skip
    """Return coded rounds, with what observers made of them."""
    standardised = job.settings.estimator.standardises

    def store(coder: Coder) -> RowStore:
        return BlockStore(
            job.members.size, standardised=standardised, memory=2**63,
            frame=frames[coder.step.name],
        )  # fmt: skip

    learner = Participation(job.members, job.steps, job.settings, store=store)
    learner.remember(history, rounds[0] - job.ledger.since)
    learning = [o.begun(given) for o, given in zip(job.learning, told, strict=True)]
    facts = []
    for round_, table in ledger_rounds(job.ledger, job.members, rounds):
        replied = table[REPLIED].to_numpy()
        learner.open(round_)
        taken = learner.close(replied)
        for observer in learning:
            observer.learnt(round_, table, taken)
        everybody = len(round_.rows) == job.members.size
        present = None if everybody else np.packbits(round_.present(job.members.size)).tobytes()
        counts = {step.step.name: step.counted for step in learner.steps if step.counted}
        facts.append(
            _RoundFacts(round_.index, len(round_.rows), int(replied.sum()), present, counts)
        )
    blocks = {}
    for step in learner.steps:
        assert isinstance(step.store, BlockStore)
        blocks[step.step.name] = [step.store.blocks_of(k) for k in range(len(rounds))]
    return _Chunk(blocks, facts, [observer.brought() for observer in learning])


def _facts(chunk: _Chunk) -> tuple[list[_RoundFacts], list[Any]]:
    return chunk.facts, chunk.brought


def _summed(
    chunk: _Chunk, part: _Part, function: Callable[..., T], combine: Callable[[T, T], T]
) -> T | None:
    """Return the function's values of a chunk's blocks, combined; none if there are none."""
    total: T | None = None
    blocks = [b for own in chunk.blocks[part.step][part.first : part.last] for b in own]
    for k, block in enumerate(blocks):
        placed = block._replace(start=part.start + block.start)
        value = function(placed) if part.beside is None else function(placed, part.beside[k])
        total = value if total is None else combine(total, value)
    return total


def _either(a: T | None, b: T | None, combine: Callable[[T, T], T]) -> T | None:
    """Combine two values, either of which may be none."""
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)


class _Fits(NamedTuple):
    """What some rounds are given: fits by round, or models for all."""

    given: dict[int, dict[str, StepFit]] | None = None
    models: Mapping[str, StageModel] | None = None
    certain: frozenset[str] = frozenset()


class _Enrollment(NamedTuple):
    """Enrollment as it is in some rounds."""

    weighing: Weighing
    present: BoolArray  # (n,)


class _Asked(NamedTuple):
    """Rounds to weigh, of one enrollment."""

    numbers: list[int]
    fits: _Fits
    method: str
    told: list[Any]  # for the observers
    fresh: bool  # whether enrollment is another than before them
    write: tuple[Writer, int] | None = None  # of their tables, and the number of the part
    keep: bool = False  # whether the tables come back


class _Weighed(NamedTuple):
    """What comes back of some weighed rounds."""

    record: Record
    brought: list[Any]  # by the observers
    learnt: OnlineState | None
    tables: list[pl.DataFrame]
    written: bool


def _weighed(
    job: _Job, asked: _Asked, history: Any, enrolled: _Enrollment | None, before: OnlineState | None
) -> _Weighed:
    """Weigh some rounds; ``before`` is what was learnt before. Nobody may be enrolled yet."""
    import polars as pl  # noqa: PLC0415

    fits, name = asked.fits, asked.method
    learner = Participation(
        job.members, job.steps, job.settings, models=fits.models, certain=fits.certain,
        given=fits.given,
    )  # fmt: skip
    learner.remember(history, asked.numbers[0] - job.ledger.since)
    weigher = Weigher(GivenEnrollment(job.members.size), learner, {})
    if enrolled is not None:
        weighing = enrolled.weighing
        if before is not None:
            again = weighing.knowing(before) if asked.fresh else replace(weighing, learnt=before)
            weighing = again
        weigher.start({name: weighing}, enrolled.present)
    record, tables = Record(), []
    watching = [o.begun(given) for o, given in zip(job.watching, asked.told, strict=True)]
    run = RoundRun(weigher, name, record, watching)
    for round_, table in ledger_rounds(job.ledger, job.members, asked.numbers):
        found = run.take(round_, table, job.members, learns=False)
        if found is not None:
            tables.append(found)
    record.notes.update(learner.notes)
    if asked.write is not None and tables:
        asked.write[0](asked.write[1], pl.concat(tables))
    return _Weighed(
        record,
        [observer.brought() for observer in watching],
        None if enrolled is None else run.weighing.learnt,
        tables if asked.keep else [],
        bool(tables),
    )


def _learnt(found: _Weighed) -> OnlineState | None:
    return found.learnt


# --- here


@final
class SpreadRows:
    """The rows of one step in some rounds, in chunks on workers: rows of rounds for any sum."""

    def __init__(self, store: SpreadStore, first: int, last: int) -> None:
        self._store, self._first, self._last = store, first, last

    @property
    def rows(self) -> int:
        """Number of rows."""
        starts = self._store.starts
        return starts[self._last] - starts[self._first]

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks, combined in each chunk and then in pairs."""
        return self._combined(function, combine, None)

    def beside(
        self, function: Callable[[Block, Any], T], given: Given, combine: Callable[[T, T], T]
    ) -> T:
        """Return the function's values of all blocks, each with what is given for its rows.

        That is made here and travels to the worker that has the block.
        """
        return self._combined(function, combine, given)

    def _combined(
        self, function: Callable[..., T], combine: Callable[[T, T], T], given: Given | None
    ) -> T:
        store, tasks, parts = self._store, [], []
        for chunk, rounds in zip(store.chunks, store.places, strict=True):
            first, last = max(self._first, rounds.start), min(self._last, rounds.stop)
            if first >= last or store.starts[first] == store.starts[last]:
                continue
            start, beside = store.starts[rounds.start], None
            if given is not None:
                edges = [e for k in range(first, last) for e in store.edges[k]]
                beside = [given(a, b) for a, b in edges]
            tasks.append(chunk)
            parts.append(
                _Part(store.name, first - rounds.start, last - rounds.start, start, beside)
            )
        if not tasks:
            raise InputError("There are no rows.")
        each = partial(_summed, function=function, combine=combine)
        both = partial(_either, combine=combine)
        found: T | None = store.workers.reduced(each, tasks, parts, both)
        assert found is not None
        return found


@final
@dataclass(eq=False, slots=True)
class SpreadStore:
    """The rows of one step on workers, as a learner's store; rounds are counted with it.

    Parameters
    ----------
    workers, name
        Who has them, of which step.
    chunks, places
        Tasks with the coded rounds, and the rounds of each, counted from 0.
    frame
        The change of columns.
    members
        Number of clients that rows may belong to.
    """

    workers: Workers
    name: str
    chunks: Sequence[Task]
    places: Sequence[range]
    frame: Frame | None
    members: int
    starts: list[int] = field(default_factory=lambda: [0])  # rows before each round
    edges: list[list[tuple[int, int]]] = field(default_factory=list)  # rows of blocks, by round

    def count(self, counts: RoundCounts, width: int) -> None:
        """Take the number of rows of the next round; blocks have the width of the design."""
        start = self.starts[-1]
        self.starts.append(start + counts.rows)
        self.edges.append([(start + a, start + b) for a, b in block_edges(width, counts.rows)])

    def append(self, columns: FloatArray, labels: LabelArray, clients: IntArray) -> None:
        """Raise: workers code rounds themselves."""
        del columns, labels, clients
        raise InputError("Rows on workers are coded there.")

    def rounds(self, first: int, last: int, weights: FloatArray = UNWEIGHTED) -> CodedRows:
        """Return the rows of rounds ``first`` up to ``last``."""
        if self.frame is None:
            raise InputError("There are no rows to fit on.")
        part: Partitions = SpreadRows(self, first, last)
        if len(weights):
            part = weighted_rounds(part, np.array(self.starts[first:last]), weights)
        return CodedRows(part, self.frame, self.members)

    def whole(self) -> SpreadRows:
        """Return the rows of all rounds."""
        return SpreadRows(self, 0, len(self.starts) - 1)

    def forget(self, first: int) -> None:
        """Keep all: a ledger is read to its end."""

    def state(self) -> dict[str, Any]:
        """Raise: rows on workers are not saved."""
        raise InputError("Rows on the workers of a cluster cannot be saved.")

    def restore(self, state: Any) -> None:
        """Raise: rows on workers are not saved."""
        del state
        raise InputError("Rows on the workers of a cluster cannot be restored.")


@final
class SpreadReplay:
    """The rounds of a ledger, weighed on the workers of a cluster as they would have been here.

    Arguments and results are those of :class:`~fedipw.weighting.replay.Replay`; ``plan.client`` has
    the workers, which must see the ledger's files and the place that is written to. Of the replies
    only what observers keep of them comes back.
    """

    spread = True

    def __init__(
        self,
        stage: EnrollmentStage,
        ledger: Ledger,
        plan: Plan,
        *,
        observers: Sequence[Observer] = (),
        progress: Progress | None = None,
    ) -> None:
        stage.require(plan.method.needs)
        self.stage, self.plan = stage, plan
        # workers may have another working directory
        self.ledger = ledger.absolute()
        self._learning = tuple(o for o in observers if o.learns)
        self._watching = tuple(o for o in observers if not o.learns)
        self._progress = progress
        numbers = ledger.require_rounds()
        self._workers = Workers(plan.client)
        size = len(numbers) // (_CHUNKS * self._workers.count)
        size = min(max(1, size), _MOST_ROUNDS)
        self._chunks = [numbers[k : k + size] for k in range(0, len(numbers), size)]
        self._places = [range(k, min(k + size, len(numbers))) for k in range(0, len(numbers), size)]
        self._done, self._todo = 0, 2 * len(numbers)
        self.learner: Participation | None = None
        self.record = Record(population=stage.narrowed)

    def run(self, write: Writer | None = None) -> int:
        """Weigh all rounds; ``write`` takes tables by the number of their part, on the workers.

        Returns how many tables were written; a part without replies is none.
        """
        return sum(found.written for found in self._results(write))

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """Yield the table of each round with replies, brought here."""
        for found in self._results(None, keep=True):
            yield from found.tables

    def _results(self, write: Writer | None, *, keep: bool = False) -> Iterator[_Weighed]:
        plan, settings = self.plan, self.plan.settings
        learner, facts = self._learnt(settings, plan.models)
        self.learner, fits = learner, [_Fits()] * len(self._chunks)
        if plan.models is not None:
            fits = [_Fits(models=plan.models)] * len(fits)
        elif settings.window is Window.POOLED:
            models = learner.pooled(certain=True)
            names = frozenset(step.step.name for step in learner.steps)
            fits = [_Fits(models=models, certain=names - set(models))] * len(fits)
        elif settings.window is Window.PAST:
            fits = self._decided(learner, facts)
        yield from self._weigh(facts, fits, write, keep=keep)
        if plan.models is not None:
            self.record.participation, self.learner = dict(plan.models), None
            return
        self.record.add_fits(learner)
        self.record.participation = learner.fitted(errors=plan.errors)
        if not settings.soft:
            learner.require_models()

    def learn(self) -> Participation:
        """Return a learner that has seen all rounds, whose rows are on the workers."""
        self._todo //= 2
        how = replace(self.plan.settings, window=Window.POOLED, last=None, decay=1.0)
        self.learner, _ = self._learnt(how, None)
        return self.learner

    # --- the first half: rounds are coded

    def _learnt(
        self, settings: ParticipationSettings, models: Mapping[str, StageModel] | None
    ) -> tuple[Participation, list[_RoundFacts]]:
        """Let workers code all rounds; return a learner over their rows, and what was counted.

        The learner has counted the rounds already, but where it decides on fits round by round.
        """
        members, workers = self.stage.members, self._workers
        steps = participation_steps(self.ledger, members, self.plan.formulas, models)
        away = [tuple(o.elsewhere() for o in some) for some in (self._learning, self._watching)]
        self._job = workers.shared(_Job(self.ledger, members, steps, settings, *away))
        frames = workers.result(workers.task(_first_frames, self._job))
        self._histories: list[Task | None] = [None] * len(self._chunks)
        if Participation(members, steps, settings).remembers:
            before: Task | None = None
            for k, rounds in enumerate(self._chunks):
                self._histories[k] = before
                before = workers.task(_history, self._job, rounds, before)
        coded = [
            workers.task(_coded, self._job, rounds, frames, history, _told(self._learning, rounds))
            for rounds, history in zip(self._chunks, self._histories, strict=True)
        ]
        found = [workers.task(_facts, chunk) for chunk in coded]
        workers.begin(found)
        facts: list[_RoundFacts] = []
        for task, rounds in zip(found, self._chunks, strict=True):
            mine, brought = workers.result(task)
            facts += mine
            for observer, part in zip(self._learning, brought, strict=True):
                observer.merge(part)
            self._count(len(rounds))

        def store(coder: Coder) -> RowStore:
            name = coder.step.name
            return SpreadStore(workers, name, coded, self._places, frames[name], members.size)

        learner = Participation(members, steps, settings, store=store)
        if settings.window is not Window.PAST or models is not None:
            for one in facts:
                self._take(learner, one)
        return learner, facts

    @staticmethod
    def _take(learner: Participation, facts: _RoundFacts) -> None:
        for step in learner.steps:
            assert isinstance(step.store, SpreadStore)
            step.store.count(facts.counts[step.step.name], len(step.step.design.terms))
        learner.count(facts.counts)

    def _decided(self, learner: Participation, facts: Sequence[_RoundFacts]) -> list[_Fits]:
        """Return what each round is given, by the rounds before it."""
        given: dict[int, dict[str, StepFit]] = {}
        for k, one in enumerate(facts):
            given[k] = learner.decided(one.counts, one.replies) if one.rows else {}
            self._take(learner, one)
        return [_Fits(given={k: given[k] for k in places}) for places in self._places]

    # --- the second half: replies are weighed

    def _weigh(
        self, facts: Sequence[_RoundFacts], fits: Sequence[_Fits], write: Writer | None, *,
        keep: bool,
    ) -> Iterator[_Weighed]:  # fmt: skip
        """Let workers weigh all rounds; yield what comes back, in order."""
        workers, plan, record = self._workers, self.plan, self.record
        name, size = plan.method.name, self.stage.members.size
        weigher = Weigher(
            StagedEnrollment(self.stage, plan.method, examples=plan.examples), NoParticipation(),
            {name: plan.method},
        )  # fmt: skip
        enrolled: Shared | None = None
        before: Task | None = None
        tasks: list[tuple[Task, int]] = []
        for k, places in enumerate(self._places):
            for rounds in _alike(facts[places.start : places.stop]):
                present = _present(rounds[0], size)
                fresh = bool(rounds[0].rows) and weigher.enroll(present, rounds[0].number)
                if fresh:
                    weighing = weigher.weighings[name]
                    enrolled = workers.shared(_Enrollment(weighing, present))
                    for observer in (record, *self._learning, *self._watching):
                        observer.enrolled(weighing)
                numbers, number = [one.number for one in rounds], len(tasks)
                asked = _Asked(
                    numbers, fits[k], name, _told(self._watching, numbers), fresh,
                    None if write is None else (write, number), keep,
                )  # fmt: skip
                learns = name in weigher.weighings and weigher.weighings[name].learnt is not None
                learnt = workers.task(_learnt, before) if learns and before is not None else None
                before = workers.task(
                    _weighed, self._job, asked, self._history_before(k, numbers), enrolled, learnt
                )
                tasks.append((before, len(numbers)))
        workers.begin([task for task, _ in tasks])
        for task, count in tasks:
            found: _Weighed = workers.result(task)
            record.merge(found.record)
            for observer, part in zip(self._watching, found.brought, strict=True):
                observer.merge(part)
            self._count(count)
            yield found

    def _history_before(self, k: int, numbers: Sequence[int]) -> Task | None:
        """Return what is remembered before rounds of the k-th chunk, none if nothing need be."""
        history, gap = self._histories[k], self._chunks[k][: self._chunks[k].index(numbers[0])]
        if not gap or not self._remembers:
            return history
        return self._workers.task(_history, self._job, gap, history)

    @property
    def _remembers(self) -> bool:
        assert self.learner is not None
        return self.learner.remembers

    def _count(self, rounds: int) -> None:
        self._done += rounds
        if self._progress is not None:
            self._progress(self._done, self._todo)


def _told(observers: Sequence[Observer], rounds: Sequence[int]) -> list[Any]:
    return [observer.told(rounds) for observer in observers]


def _present(facts: _RoundFacts, size: int) -> BoolArray:
    """Return who of the members a round lists, (n,)."""
    if facts.present is None:
        return np.ones(size, dtype=np.bool_)
    packed = np.frombuffer(facts.present, dtype=np.uint8)
    return np.unpackbits(packed, count=size).astype(np.bool_)


def _alike(facts: Sequence[_RoundFacts]) -> list[list[_RoundFacts]]:
    """Return rounds in groups of the same clients; one without any goes with those before it."""
    out: list[list[_RoundFacts]] = []
    for one in facts:
        last = next((r for r in reversed(out[-1]) if r.rows), None) if out else None
        if out and (not one.rows or (last is not None and last.present == one.present)):
            out[-1].append(one)
        else:
            out.append([one])
    return out


def replay_of(
    stage: EnrollmentStage,
    ledger: Ledger,
    plan: Plan,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
    saved: SavedRun | None = None,
) -> Replay | SpreadReplay:
    """Return the replay of a ledger: on the workers of the plan's cluster, or here without one.

    One model over everybody (the collapsed method) is fitted here in either case.
    """
    if plan.client is None or plan.collapsed:
        return Replay(stage, ledger, plan, observers=observers, progress=progress, saved=saved)
    if saved is not None:
        raise InputError(
            "A saved state (--state) is of one machine, and workers of a cluster (--scheduler) "
            "keep none: leave one of them out."
        )
    return SpreadReplay(stage, ledger, plan, observers=observers, progress=progress)
