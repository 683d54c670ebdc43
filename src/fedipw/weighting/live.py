"""Rounds as they happen: weights by what a ledger tells so far, and the ledger kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, final

import polars as pl

from fedipw.errors import InfeasibleError, InputError, PositivityError, SeparationError
from fedipw.numerics.checks import check_rows
from fedipw.numerics.threads import without_collection
from fedipw.selection.participation import FAILURES, Participation, Window
from fedipw.selection.steps import known_steps, participation_steps
from fedipw.tables.columns import AFTERWARDS, FATE, REPLIED, ROUND
from fedipw.tables.formula import sorted_levels
from fedipw.tables.ledger import Ledger, LedgerWriter, check_round, quarantined
from fedipw.weighting.replay import Plan, Record, RoundRun, coming_round, ledger_rounds
from fedipw.weighting.snapshot import EVERY, Snapshot, SnapshotUnusedError, can_be_saved
from fedipw.weighting.weigher import StagedEnrollment, Weigher

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.selection.steps import Step
    from fedipw.tables.ledger import Round
    from fedipw.tables.population import Members
    from fedipw.weighting.pipeline import Weighing
    from fedipw.weighting.weigher import RoundWeights


_OF_THE_TABLE = (InfeasibleError, SeparationError, PositivityError)


@final
class GrowingLedger:
    """A ledger to which rounds are added as they happen, by one server at a time.

    A round opens with one row per enrolled client and is in the ledger before ``close`` returns.
    Nothing is weighed here: it is what a server keeps that has nothing to weigh clients by.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from fedipw.tables.population import Population
    >>> devices = Population.of({"unit_id": [1, 2], "age": [30.0, 40.0], "enrolled": [True, True]})
    >>> rounds = GrowingLedger(Ledger(Path(tempfile.mkdtemp()) / "rounds"), devices.members)
    >>> _ = rounds.open(pl.DataFrame({"unit_id": [1, 2], "invited": [True, True]}))
    >>> rounds.close(np.array([True, False]))
    >>> rounds.rounds, rounds.ledger.read(1)["replied"].to_list()
    (1, [True, False])
    """

    notes: tuple[str, ...] = ()  # nothing is fitted that could fail
    failed = 0

    def __init__(self, ledger: Ledger, members: Members) -> None:
        self.ledger, self.members = ledger, members
        self._writer: LedgerWriter | None = None  # while the ledger is held
        self._open: pl.DataFrame | None = None
        self._closed = 0
        self._cleaned = False  # whether what a killed server left was looked for
        if ledger.has(ledger.since) or ledger.rounds:
            self._closed = len(ledger.require_rounds())

    @property
    def rounds(self) -> int:
        """Number of closed rounds."""
        while self.ledger.has(self.ledger.since + self._closed):  # another server's
            self._closed += 1
        return self._closed

    @property
    def held(self) -> bool:
        """Whether the ledger is kept from other writers."""
        return self._writer is not None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the ledger to itself for this block; outside it every round takes the lock anew."""
        first, self._cleaned = not self._cleaned, True
        with self.ledger.writing(cleaned=first) as writer:
            self._writer = writer
            try:
                yield
            finally:
                self._writer = None

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Keep the ledger for what is written with a round; raise if another server closed it.

        Inside ``holding`` nobody else can have.
        """
        if self._writer is not None:
            yield
            return
        before = self._closed
        with self.holding():
            if self.rounds != before:
                raise InputError(
                    f"{self.ledger.directory}: another server closed round {before + 1} meanwhile. "
                    "One ledger has one server: this one stops here."
                )
            yield

    def open(self, table: pl.DataFrame) -> tuple[pl.DataFrame, Round]:
        """Open the next round with its rows, and return them as the ledger will have them."""
        index = self.rounds + 1
        if self._open is not None:
            raise InputError(f"Round {index} is open: close it first.")
        frame = table.drop(ROUND, *AFTERWARDS, strict=False)
        frame = frame.with_columns(pl.lit(index, dtype=pl.Int64).alias(ROUND))
        where = f"{self.ledger.directory} round {index}"
        check_round(frame.with_columns(pl.lit(False).alias(REPLIED)), index, where)
        if index > 1:
            frame = self._in_order(frame, where)
        round_ = coming_round(frame, index, self.members, self.ledger)
        self._open = frame
        return frame, round_

    def forget(self) -> None:
        """Leave the open round as if it had not been opened."""
        self._open = None

    @property
    def opened(self) -> pl.DataFrame:
        """The rows of the open round."""
        if self._open is None:
            raise InputError("No round is open: call open(table) first.")
        return self._open

    def close(self, replied: BoolArray, outcomes: Sequence[str | None] | None = None) -> None:
        """Write the round to the ledger.

        ``replied`` (n,) is over the rows the round opened with, ``outcomes`` (n,) of the
        invitations, in words; in all rounds or in none.
        """
        frame = self.opened
        check_rows(frame.height, replied=replied)
        closed = frame.with_columns(pl.Series(REPLIED, replied))
        if outcomes is not None:
            closed = closed.with_columns(pl.Series(FATE, outcomes, dtype=pl.String))
        (self._writer or self.ledger).append(self.rounds + 1, closed)
        self._open = None

    def _in_order(self, frame: pl.DataFrame, where: str) -> pl.DataFrame:
        """Return a round's columns in the order of the ledger's, or raise if they differ."""
        names = [name for name in self.ledger.schema.names() if name not in AFTERWARDS]
        if set(names) != set(frame.columns):
            apart = sorted(set(names) ^ set(frame.columns))
            raise InputError(f"{where}: its columns are not those of earlier rounds: {apart}.")
        return frame.select(names)


@final
class Live:
    """Weights of rounds that open and close while a ledger grows.

    A round opens with one row per enrolled client, is weighed once it is known who replied, and is
    in the ledger before ``close`` returns. A program that was killed makes a new one of the same
    ledger and goes on after its last closed round; one that runs for long keeps other writers away
    with ``holding``. The weights are those that
    :class:`~fedipw.weighting.replay.Replay` finds in the ledger later, since levels of categories
    are bound anew when one occurs for the first time.

    Parameters
    ----------
    stage
        What is known of enrollment.
    ledger
        Closed rounds, none to begin with.
    plan
        Method, formulas and how to fit; fits are on past rounds or on the same round.
    guarded
        Whether to go on where clients' values cannot be used, as a server does: values of the
        ledger that no server accepts are taken as missing, a fit that fails is recorded and the
        former one used, and a round that cannot be weighed is skipped.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from fedipw.selection.enrollment import enrollment_stage
    >>> from fedipw.tables.population import Population
    >>> from fedipw.weighting.methods import method_named
    >>> rng = np.random.default_rng(0)
    >>> age, enrolled = rng.normal(size=200), rng.random(200) < 0.5
    >>> devices = Population.of({"unit_id": np.arange(200), "age": age, "enrolled": enrolled})
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "rounds")
    >>> live = Live(enrollment_stage(devices), ledger, Plan(method=method_named("fedipw")))
    >>> for _ in range(3):
    ...     live.open(pl.DataFrame({"unit_id": np.flatnonzero(enrolled), "invited": True,
    ...                             "battery": rng.random(enrolled.sum())}))
    ...     replied = rng.random(enrolled.sum()) < 0.5
    ...     found = live.weigh(replied)
    ...     live.close(replied)
    >>> live.rounds, bool(len(found.weights) == replied.sum()), bool(0.7 < found.total < 1.4)
    (3, True, True)
    """

    def __init__(
        self, stage: EnrollmentStage, ledger: Ledger, plan: Plan, *, guarded: bool = False
    ) -> None:
        stage.require(plan.method.needs)
        if plan.collapsed:
            raise InputError(
                "collapsed needs X of clients that are not enrolled: it cannot be live."
            )
        if plan.settings.window is Window.POOLED and plan.models is None:
            raise InputError(
                "The pooled fit needs rounds that are yet to come: use past, or saved models."
            )
        if plan.formulas.lump_below is not None:
            raise InputError("Rare levels are known at the end only: leave lump_below out.")
        self.stage, self.ledger, self.plan, self._guarded = stage, ledger, plan, guarded
        self.replayed = 0  # closed rounds that were read and weighed anew
        self._failed_before = 0  # failures before the open round
        self._run: RoundRun | None = None
        self._learner: Participation | None = None
        self._end = GrowingLedger(ledger, stage.members)
        self._found: RoundWeights | None = None
        self._enrollment = StagedEnrollment(stage, plan.method, examples=plan.examples)
        self._snapshot: Snapshot | None = None
        self._times = 0  # the open round was weighed
        self._unused = ""  # why a snapshot was left aside
        if self._end.rounds:
            self._bind(None)

    @property
    def rounds(self) -> int:
        """Number of closed rounds."""
        return self._end.rounds

    @property
    def members(self) -> Members:
        """Everybody who is enrolled at some time."""
        return self.stage.members

    @property
    def weighing(self) -> Weighing:
        """The method at the present enrollment; once a round was opened."""
        return self._opened()[1].weighing

    def standing(self, present: BoolArray) -> FloatArray | None:
        """Return what each member stands for in a round to come, (n,); none if not known.

        ``present`` (n,) says which members are enrolled then.
        """
        method = self.plan.method
        if self._run is None:
            return method.at(self._enrollment.at(present)).standing()
        return self._run.weigher.weighing_at(method.name, present).standing()

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be done as asked so far, such as targets that were approached."""
        failures = () if self._learner is None else self._learner.failures
        return () if self._run is None else (*self._run.record.notes, *failures)

    @property
    def failed(self) -> int:
        """Number of fits and other steps that failed in the open round, or in the last one."""
        return self._failures() - self._failed_before

    def _failures(self) -> int:
        return 0 if self._learner is None else self._learner.failures.total()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the ledger to itself for this block; outside it every round takes the lock anew."""
        with self._end.holding():
            yield

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Keep the ledger for what is written with a round; raise if another server closed it.

        Inside ``holding`` nobody else can have.
        """
        with self._end.closing():
            yield

    def open(self, table: pl.DataFrame) -> None:
        """Open the next round with its rows: ``unit_id``, ``invited`` and what else is known."""
        frame, round_ = self._end.open(table)
        try:
            if self._behind() or self._strange(frame):
                self._bind(frame)
            assert self._run is not None
            self._failed_before = self._failures()
            self._run.open(round_)
        except BaseException:
            self._end.forget()
            raise
        self._found, self._times = None, 0

    def weigh(self, replied: BoolArray, reliance: float = 1.0) -> RoundWeights | None:
        """Return the weights of the replies, none if nothing can be weighed.

        ``replied`` (n,) is over the rows the round opened with; ``reliance`` is how far enrollment
        weights are relied on (O21).
        """
        frame, run = self._opened()
        check_rows(frame.height, replied=replied)
        self._found = self._weighed(run, replied, reliance)
        self._times += 1
        return self._found

    def _weighed(
        self, run: RoundRun, replied: BoolArray, reliance: float = 1.0
    ) -> RoundWeights | None:
        """Return the weights of a round, none if it is skipped."""
        try:
            return run.weigh(replied, reliance)
        except FAILURES as error:
            # targets and separation are of the table, not of what clients say
            if not self._guarded or isinstance(error, _OF_THE_TABLE):
                raise
            assert self._learner is not None
            reason = str(error).split("\n", maxsplit=1)[0][:160] or type(error).__name__
            run.record.skipped[self._learner.rounds + 1] = reason
            self._learner.failures[f"a round cannot be weighed and is skipped: {reason}"] += 1
            return None

    def close(self, replied: BoolArray, outcomes: Sequence[str | None] | None = None) -> None:
        """Write the round to the ledger, then learn from it.

        ``outcomes`` (n,) of the invitations, in words; in all rounds or in none.
        """
        _, run = self._opened()
        self._end.close(replied, outcomes)
        run.close(replied, self._found)
        self._found = None
        if self._times != 1:  # a restart weighs every round once, and its fits follow from that
            self._snapshot = None
        if self._save_is_due():
            self._save()

    def _opened(self) -> tuple[pl.DataFrame, RoundRun]:
        frame = self._end.opened
        assert self._run is not None
        return frame, self._run

    def _behind(self) -> bool:
        """Return whether the ledger has rounds this one has not seen, such as another server's."""
        return self._learner is None or self._learner.rounds != self.rounds

    def _save_is_due(self) -> bool:
        """Return whether a snapshot is due: after a fit, which a restart need not make again."""
        if self._snapshot is None or self._learner is None:
            return False
        since = self.rounds - self._snapshot.rounds
        fitted = any(step.fitted_on == self.rounds - 1 for step in self._learner.steps)
        return since >= EVERY or (fitted and since >= self.plan.settings.refit_every)

    def _save(self) -> None:
        """Write a snapshot of the learner; what goes wrong is noted, the ledger has all of it."""
        if self._snapshot is None or self._run is None or self._behind():
            return
        assert self._learner is not None
        notes = self._run.record.notes
        try:
            if self._end.held:
                self._snapshot.save(self._run.weigher, self._learner, notes)
            else:
                with self.ledger.writing(cleaned=False):
                    self._snapshot.save(self._run.weigher, self._learner, notes)
        except (InputError, SnapshotUnusedError) as error:
            notes[f"no snapshot of the learner: {error}"] += 1

    def _strange(self, frame: pl.DataFrame) -> bool:
        """Return whether a category of the round has a level that no design knows."""
        assert self._learner is not None
        if self.plan.models is not None:
            return False
        for learner in self._learner.steps:
            for column, levels in learner.step.design.levels.items():
                here = sorted_levels(frame[column]) if column in frame.columns else ()
                if not set(here) <= set(levels):
                    return True
        return False

    def _bind(self, opening: pl.DataFrame | None) -> None:
        """Bind designs to all rounds so far, and replay the closed ones."""
        if opening is None and self._restored():
            return
        steps = participation_steps(
            self.ledger, self.stage.members, self.plan.formulas, self.plan.models, opening=opening,
            quarantine=self._guarded,
        )  # fmt: skip
        self._begin(steps)
        self._replay(0)
        if self._unused and self._run is not None:
            self._run.record.notes[self._unused] += 1
            self._unused = ""

    def _begin(self, steps: tuple[Step, ...]) -> None:
        """Begin anew with these steps."""
        members, plan = self.stage.members, self.plan
        self._learner = Participation(
            members, steps, replace(plan.settings, forgets=True), models=plan.models,
            scratch=plan.scratch, guarded=self._guarded,
        )  # fmt: skip
        weigher = Weigher(self._enrollment, self._learner, {plan.method.name: plan.method})
        self._run = RoundRun(weigher, plan.method.name, Record())
        fresh = Snapshot(self.ledger, self.stage, plan) if can_be_saved(steps) else None
        self._snapshot = fresh

    def _replay(self, after: int) -> bool:
        """Replay the closed rounds after some; return whether no level was new to the designs."""
        assert self._run is not None
        since = self.ledger.since
        closed = range(since + after, since + self._end.rounds)
        for found in ledger_rounds(self.ledger, self.stage.members, closed):
            round_, table = self._quarantined(*found) if self._guarded else found
            if after and self._strange(table):
                return False
            replied = table[REPLIED].to_numpy()
            self._run.open(round_)
            self._run.close(replied, self._weighed(self._run, replied))
            self.replayed += 1
        return True

    def _quarantined(self, round_: Round, table: pl.DataFrame) -> tuple[Round, pl.DataFrame]:
        """Return a round of the ledger with values that no server accepts taken as missing."""
        clean = table.with_columns(quarantined(table.schema))
        lost = int((clean.null_count() - table.null_count()).sum_horizontal().item())
        if not lost:
            return round_, table
        assert self._run is not None
        self._run.record.notes[
            f"round {round_.index} of {self.ledger.directory}: {lost} value(s) that no server "
            "accepts are taken as missing"
        ] += 1
        kept = clean.drop(AFTERWARDS, strict=False)
        return replace(round_, table=kept), clean

    def _restored(self) -> bool:
        """Return whether a snapshot could be used, and the rounds after it were replayed.

        A level that is new in those rounds changes the designs, and with them everything: all
        rounds are read then, as without a snapshot.
        """
        snapshot, why = Snapshot(self.ledger, self.stage, self.plan), ""
        try:
            designs = snapshot.designs()
            if designs is None:
                return False
            self._begin(known_steps(self.ledger.schema, designs))
            assert self._run is not None
            assert self._learner is not None
            with without_collection():  # a few objects for each of many rounds
                done, notes = snapshot.restore(self._run.weigher, self._learner)
            self._run.record.notes.update(notes)
            if self._replay(done):
                self._snapshot = snapshot
                return True
        except SnapshotUnusedError as error:
            why = str(error)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            why = f"it does not fit ({type(error).__name__})"
        self.stage.restore({})
        self._unused = why and f"{snapshot.directory} was not used, all rounds were read: {why}"
        return False
