"""Rounds as they happen: weights by what a ledger tells so far, and the ledger kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows
from fedipw.selection.logged import LoggedParticipation
from fedipw.selection.steplog import LogWindow
from fedipw.selection.steps import participation_steps
from fedipw.tables.ledger import AFTERWARDS, FATE, OPENED_AT, REPLIED, ROUND, Ledger, check_round
from fedipw.tables.population import ID
from fedipw.weighting.registry import SourceKind
from fedipw.weighting.replay import LogPlan, LogRecord, Replay, check_present
from fedipw.weighting.rounds import RoundOpening

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray
    from fedipw.weighting.rounds import RoundWeights
    from fedipw.weighting.standing import People


@final
class LiveLog:
    """Weights of rounds that open and close while a ledger grows.

    A round opens with one row per enrolled client, is weighed once it is known who replied, and is
    in the ledger before ``close`` returns. A program that was killed makes a new one of the same
    ledger and goes on after its last closed round. The weights are those that
    :func:`~fedipw.weighting.logrun.logged_weights` finds in the ledger later, since levels of
    categories are bound anew when one occurs for the first time.

    Parameters
    ----------
    people
        A population table, or enrolled clients and totals.
    ledger
        Closed rounds, none to begin with.
    plan
        Method, formulas and how to fit; fits are on past rounds or on the same round.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from fedipw.tables import TableFile
    >>> from fedipw.weighting import method_named
    >>> from fedipw.weighting.people import KnownPopulation
    >>> folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(0)
    >>> age, enrolled = rng.normal(size=200), rng.random(200) < 0.5
    >>> people = pl.DataFrame({"unit_id": range(200), "age": age, "enrolled": enrolled})
    >>> people.write_parquet(folder / "people.parquet")
    >>> known = KnownPopulation.of(TableFile(folder / "people.parquet"))
    >>> live = LiveLog(known, Ledger(folder / "rounds"), LogPlan(method=method_named("fedipw")))
    >>> for _ in range(3):
    ...     live.open(pl.DataFrame({"unit_id": np.flatnonzero(enrolled), "invited": True,
    ...                             "battery": rng.random(enrolled.sum())}))
    ...     replied = rng.random(enrolled.sum()) < 0.5
    ...     found = live.weights(replied)
    ...     live.close(replied)
    >>> live.rounds, bool(len(found.weights) == replied.sum()), bool(0.7 < found.total < 1.4)
    (3, True, True)
    """

    def __init__(self, people: People, ledger: Ledger, plan: LogPlan) -> None:
        people.require(plan.method)
        if plan.method.source is SourceKind.COLLAPSED:
            raise InputError(
                "collapsed needs X of clients that are not enrolled: it cannot be live."
            )
        if plan.settings.window is LogWindow.POOLED and plan.models is None:
            raise InputError(
                "The pooled fit needs rounds that are yet to come: use past, or saved models."
            )
        if plan.formulas.lump_below is not None:
            raise InputError("Rare levels are known at the end only: leave lump_below out.")
        self.people, self.ledger, self.plan = people, ledger, plan
        self.record = LogRecord()
        self._replay: Replay | None = None
        self._open: pl.DataFrame | None = None
        self._found: RoundWeights | None = None
        if ledger.rounds:
            ledger.require_rounds()
            self._bind(None)

    @property
    def rounds(self) -> int:
        """Number of closed rounds."""
        return len(self.ledger.rounds)

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
        opening = self._opening(frame, index, where)
        if self._replay is None or self._strange(frame):
            self._bind(frame)
        assert self._replay is not None
        self._replay.open(opening)
        self._open, self._found = frame, None

    def weights(self, replied: BoolArray) -> RoundWeights | None:
        """Return the weights of the replies, none if nothing can be weighed.

        ``replied`` (n,) is over the rows the round opened with.
        """
        frame, replay = self._opened()
        check_rows(frame.height, replied=replied)
        self._found = replay.weights(replied)
        return self._found

    def close(self, replied: BoolArray, fate: Sequence[str | None] | None = None) -> None:
        """Write the round to the ledger, then learn from it.

        ``fate`` (n,) tells what became of each invitation, in words; in all rounds or in none.
        """
        frame, replay = self._opened()
        check_rows(frame.height, replied=replied)
        closed = frame.with_columns(pl.Series(REPLIED, replied))
        if fate is not None:
            closed = closed.with_columns(pl.Series(FATE, fate, dtype=pl.String))
        self.ledger.append(self.rounds + 1, closed)
        replay.close(replied, self._found)
        self._open, self._found = None, None

    def _opened(self) -> tuple[pl.DataFrame, Replay]:
        if self._open is None or self._replay is None:
            raise InputError("No round is open: call open(table) first.")
        return self._open, self._replay

    def _in_order(self, frame: pl.DataFrame, where: str) -> pl.DataFrame:
        """Return a round's columns in the order of the ledger's, or raise if they differ."""
        names = [name for name in self.ledger.schema.names() if name not in AFTERWARDS]
        if set(names) != set(frame.columns):
            apart = sorted(set(names) ^ set(frame.columns))
            raise InputError(f"{where}: its columns are not those of earlier rounds: {apart}.")
        return frame.select(names)

    def _opening(self, frame: pl.DataFrame, index: int, where: str) -> RoundOpening:
        members = self.people.members
        rows = members.rows_of(frame[ID], where)
        moment = frame[OPENED_AT][0] if OPENED_AT in frame.columns and frame.height else None
        check_present(members, rows, members.present(index, moment), where)
        return RoundOpening(index=index, table=frame, rows=rows)

    def _strange(self, frame: pl.DataFrame) -> bool:
        """Return whether a category of the round has a level that no design knows."""
        assert self._replay is not None
        if self.plan.models is not None:
            return False
        for log in self._replay.participation.logs:
            for column, levels in log.step.design.levels.items():
                if column in frame.columns:
                    here = frame[column].drop_nulls().unique().cast(pl.String).to_list()
                    if not set(here) <= set(levels):
                        return True
        return False

    def _bind(self, opening: pl.DataFrame | None) -> None:
        """Bind designs to all rounds so far, and lead a new replay through the closed ones."""
        members, plan = self.people.members, self.plan
        steps = participation_steps(
            self.ledger, members, plan.formulas, plan.models, opening=opening
        )
        participation = LoggedParticipation(
            members, steps, plan.settings, models=plan.models, scratch=plan.scratch
        )
        self.record = LogRecord()
        self._replay = Replay(self.people, plan, self.record, participation)
        for index in self.ledger.rounds:
            table = self.ledger.read(index)
            where = f"{self.ledger.directory} round {index}"
            opened = self._opening(table.drop(AFTERWARDS, strict=False), index, where)
            self._replay.round(opened, table[REPLIED].to_numpy())
