"""Weights of every reply of a ledger, round by round, by the same weigher as in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedipw.selection.logged import LoggedParticipation
from fedipw.selection.steplog import LogWindow
from fedipw.selection.steps import participation_steps
from fedipw.tables.ledger import AFTERWARDS, OPENED_AT, REPLIED, Ledger
from fedipw.tables.population import ID
from fedipw.weighting.registry import SourceKind
from fedipw.weighting.replay import LogPlan, LogRecord, Replay, Watch, check_present
from fedipw.weighting.rounds import RoundOpening

if TYPE_CHECKING:
    import polars as pl

    from fedipw.numerics.types import BoolArray
    from fedipw.tables.members import Members
    from fedipw.weighting.everyone import Everyone
    from fedipw.weighting.standing import People

__all__ = ["LogPlan", "LogRecord", "Progress", "Watch", "logged_weights"]

Progress = Callable[[int, int], None]


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
    models, certain = plan.models, frozenset[str]()
    todo = _Count(len(ledger.rounds), progress)
    if plan.settings.window is LogWindow.POOLED and models is None:
        todo = _Count(2 * len(ledger.rounds), progress)
        learner = LoggedParticipation(people.members, steps, plan.settings, scratch=plan.scratch)
        for opening, replied in _rounds(ledger, enrolled, everyone):
            assert opening.table is not None
            assert opening.rows is not None
            learner.open(opening.table, opening.rows)
            learner.close(replied)
            todo.one()
        models = learner.pooled(certain=True)
        certain = frozenset(step.name for step in steps) - set(models)
        record.refits += len(models)
        record.passes += sum(log.passes for log in learner.logs)
        record.rows_left_out = sum(log.left_out for log in learner.logs)
        del learner
    participation = LoggedParticipation(
        people.members, steps, plan.settings, models=models, certain=certain, scratch=plan.scratch
    )
    run = Replay(people, plan, record, participation, watch)
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
        opening = RoundOpening(index=index, table=table.drop(AFTERWARDS, strict=False), rows=rows)
        replied = table[REPLIED].to_numpy()
        yield (opening, replied) if everyone is None else everyone.filled(opening, replied)
