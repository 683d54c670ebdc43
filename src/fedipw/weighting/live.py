"""Rounds as they happen: weights by what a ledger tells so far, and the ledger kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows
from fedipw.selection.participation import Participation, Window
from fedipw.selection.steps import participation_steps
from fedipw.tables.columns import AFTERWARDS, FATE, REPLIED, ROUND
from fedipw.tables.ledger import Ledger, LedgerWriter, check_round
from fedipw.weighting.replay import Plan, Record, RoundRun, coming_round, ledger_rounds
from fedipw.weighting.weigher import StagedEnrollment, Weigher

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.weighting.pipeline import Weighing
    from fedipw.weighting.weigher import RoundWeights


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

    def __init__(self, stage: EnrollmentStage, ledger: Ledger, plan: Plan) -> None:
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
        self.stage, self.ledger, self.plan = stage, ledger, plan
        self._run: RoundRun | None = None
        self._learner: Participation | None = None
        self._open: pl.DataFrame | None = None
        self._found: RoundWeights | None = None
        self._writer: LedgerWriter | None = None  # while the ledger is held
        self._enrollment = StagedEnrollment(stage, plan.method)
        if ledger.rounds:
            ledger.require_rounds()
            self._bind(None)

    @property
    def rounds(self) -> int:
        """Number of closed rounds."""
        return len(self.ledger.rounds)

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
        return () if self._run is None else tuple(self._run.record.notes)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the ledger to itself for this block; outside it every round takes the lock anew."""
        with self.ledger.writing() as writer:
            self._writer = writer
            try:
                yield
            finally:
                self._writer = None

    def open(self, table: pl.DataFrame) -> None:
        """Open the next round with its rows: ``unit_id``, ``invited`` and what else is known."""
        if self._open is not None:
            raise InputError(f"Round {self.rounds + 1} is open: close it first.")
        index = self.rounds + 1
        frame = table.drop(ROUND, *AFTERWARDS, strict=False)
        frame = frame.with_columns(pl.lit(index, dtype=pl.Int64).alias(ROUND))
        where = f"{self.ledger.directory} round {index}"
        check_round(frame.with_columns(pl.lit(False).alias(REPLIED)), index, where)
        if self.rounds:
            frame = self._in_order(frame, where)
        round_ = coming_round(frame, index, self.stage.members, self.ledger)
        if self._behind() or self._strange(frame):
            self._bind(frame)
        assert self._run is not None
        self._run.open(round_)
        self._open, self._found = frame, None

    def weigh(self, replied: BoolArray, reliance: float = 1.0) -> RoundWeights | None:
        """Return the weights of the replies, none if nothing can be weighed.

        ``replied`` (n,) is over the rows the round opened with; ``reliance`` is how far enrollment
        weights are relied on (O21).
        """
        frame, run = self._opened()
        check_rows(frame.height, replied=replied)
        self._found = run.weigh(replied, reliance)
        return self._found

    def close(self, replied: BoolArray, outcomes: Sequence[str | None] | None = None) -> None:
        """Write the round to the ledger, then learn from it.

        ``outcomes`` (n,) of the invitations, in words; in all rounds or in none.
        """
        frame, run = self._opened()
        check_rows(frame.height, replied=replied)
        closed = frame.with_columns(pl.Series(REPLIED, replied))
        if outcomes is not None:
            closed = closed.with_columns(pl.Series(FATE, outcomes, dtype=pl.String))
        (self._writer or self.ledger).append(self.rounds + 1, closed)
        run.close(replied, self._found)
        self._open, self._found = None, None

    def _opened(self) -> tuple[pl.DataFrame, RoundRun]:
        if self._open is None or self._run is None:
            raise InputError("No round is open: call open(table) first.")
        return self._open, self._run

    def _in_order(self, frame: pl.DataFrame, where: str) -> pl.DataFrame:
        """Return a round's columns in the order of the ledger's, or raise if they differ."""
        names = [name for name in self.ledger.schema.names() if name not in AFTERWARDS]
        if set(names) != set(frame.columns):
            apart = sorted(set(names) ^ set(frame.columns))
            raise InputError(f"{where}: its columns are not those of earlier rounds: {apart}.")
        return frame.select(names)

    def _behind(self) -> bool:
        """Return whether the ledger has rounds this one has not seen, such as another server's."""
        return self._learner is None or self._learner.rounds != self.rounds

    def _strange(self, frame: pl.DataFrame) -> bool:
        """Return whether a category of the round has a level that no design knows."""
        assert self._learner is not None
        if self.plan.models is not None:
            return False
        for learner in self._learner.steps:
            for column, levels in learner.step.design.levels.items():
                if column in frame.columns:
                    here = frame[column].drop_nulls().unique().cast(pl.String).to_list()
                    if not set(here) <= set(levels):
                        return True
        return False

    def _bind(self, opening: pl.DataFrame | None) -> None:
        """Bind designs to all rounds so far, and replay the closed ones."""
        members, plan = self.stage.members, self.plan
        steps = participation_steps(
            self.ledger, members, plan.formulas, plan.models, opening=opening
        )
        self._learner = Participation(
            members, steps, plan.settings, models=plan.models, scratch=plan.scratch
        )
        weigher = Weigher(self._enrollment, self._learner, {plan.method.name: plan.method})
        self._run = RoundRun(weigher, plan.method.name, Record())
        if not self.ledger.rounds:
            return
        for round_, table in ledger_rounds(self.ledger, members):
            replied = table[REPLIED].to_numpy()
            self._run.open(round_)
            self._run.close(replied, self._run.weigh(replied))
