"""Participation probabilities of rounds that come as tables, one row per enrolled client.

Rounds are coded once and kept as blocks, in memory or in a scratch file, so that a fit is a few
passes over them whatever the number of clients, and a refit starts where the last one ended.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import polars as pl

from fedipw.errors import InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import some
from fedipw.selection.fit import LogisticFit
from fedipw.selection.history import (
    AVAILABILITY_COLUMNS,
    CLOCK_COLUMNS,
    REPLY_COLUMNS,
    ReplyHistory,
)
from fedipw.selection.participation import Source
from fedipw.selection.stage import StageModel
from fedipw.selection.steplog import LogSettings, LogWindow, StepLog
from fedipw.tables.design import Missing
from fedipw.tables.ledger import AVAILABLE, INVITE_PROB, INVITED, REPLIED
from fedipw.tables.partitions import Blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from fedipw.numerics.types import BoolArray, FloatArray, IntArray
    from fedipw.selection.steps import Step
    from fedipw.tables.members import Members


class StepProb(NamedTuple):
    """Probabilities of one step for the rows asked for, and where they come from."""

    prob: FloatArray  # (m,)
    known: BoolArray  # (m,) false where a row was left out for want of values
    source: Source


class StepRows(NamedTuple):
    """One step of a round: the rows that could pass it, what they were given, and who did."""

    name: str
    among: str | None  # the flag of those rows; all of the round if none
    label: str  # the flag of those who passed
    prob: FloatArray  # (m,); NaN where a row has not all its values, or nothing is known of it
    passed: BoolArray  # (m,)
    source: Source | None  # none where the round was given no probability


@final
class LoggedParticipation:
    """P(replied | enrolled) of rounds that open and close as tables.

    Parameters
    ----------
    members
        The enrolled clients and what is known of them.
    steps
        What to fit (:func:`fedipw.selection.steps.participation_steps`).
    settings
        How to fit it.
    models
        Fitted steps by name to use as they are instead, such as saved ones.
    certain
        Steps without a model among them that everybody passes, of probability 1.
    scratch
        Directory for coded rounds beyond 256 MiB.
    """

    def __init__(
        self,
        members: Members,
        steps: Sequence[Step],
        settings: LogSettings | None = None,
        *,
        models: Mapping[str, StageModel] | None = None,
        certain: Collection[str] = (),
        scratch: Path | None = None,
    ) -> None:
        self.members, self.settings = members, settings or LogSettings()
        self.models = dict(models or {})
        known = {*self.models, *certain}
        lacking = [s.name for s in steps if models is not None and s.name not in known]
        if lacking:
            raise InputError(f"There is no saved model of {some(lacking)}.")
        self.logs = tuple(StepLog(step, self.settings, Blocks(directory=scratch)) for step in steps)
        self._replies = ReplyHistory.of(members.size)
        self._available = ReplyHistory.of(members.size)
        self._open: tuple[pl.DataFrame, IntArray] | None = None
        self._used: dict[str, tuple[LogisticFit | float, Source]] = {}  # in the open round
        self._coded: dict[str, tuple[FloatArray, BoolArray | None]] = {}  # rows of the open round
        self.notes: Counter[str] = Counter()  # rounds in which a fit had to leave something aside

    @property
    def rounds(self) -> int:
        """Number of closed rounds."""
        return self._replies.rounds

    def open(self, table: pl.DataFrame, rows: IntArray) -> None:
        """Take a round's rows, of the members in ``rows``, with availability and invitations."""
        present = _spread(True, rows, self.members.size)
        self._replies = self._replies.joined(present)
        self._available = self._available.joined(present)
        self._open = self._with_history(table, rows), rows
        self._used, self._coded = {}, {}

    def prob(self, replied: BoolArray) -> tuple[FloatArray, BoolArray, Source]:
        """Return (P5) of those who replied, which of them it is known for, and its source.

        ``replied`` (n,) is over the round's rows; who replied is used only by the same-round fit
        and by a first round without any past.
        """
        frame, _ = self._opened()
        who = frame.filter(pl.Series(replied))
        if not who.height:
            raise InputError(f"Nobody replied in round {self.rounds + 1}: skip it and record it.")
        prob, known = np.ones(who.height), np.ones(who.height, dtype=np.bool_)
        parts = [self._step_prob(log, frame, who, replied) for log in self.logs]
        for part in parts:
            prob, known = prob * part.prob, known & part.known
        source = _source(parts)
        if self.logs[-1].step.among == INVITED:
            prob = prob * who[INVITE_PROB].cast(pl.Float64).to_numpy()
        return prob, known, source

    def step_rows(self, replied: BoolArray) -> tuple[StepRows, ...]:
        """Return each step of the open round with all rows that could pass it.

        Probabilities are by the fits that ``prob`` has used. Where it was not asked, as in a round
        without replies, they are by the last fit or the rate of past rounds: nothing is fitted, so
        later rounds are weighed as if this had not been asked.
        """
        frame, _ = self._opened()
        closed = frame.with_columns(pl.Series(REPLIED, replied))
        return tuple(self._rows_of(log, closed) for log in self.logs)

    def close(self, replied: BoolArray) -> tuple[BoolArray, ...]:
        """Take the replies of the open round, (n,); return which rows each step is fitted on."""
        frame, rows = self._opened()
        closed = frame.with_columns(pl.Series(REPLIED, replied))
        taken: tuple[BoolArray, ...] = ()
        if not self.models:
            where = f"round {self.rounds + 1}"
            taken = tuple(
                log.append(closed, where, self._coded.get(log.step.name)) for log in self.logs
            )
        present = _spread(True, rows, self.members.size)
        self._replies = self._replies.after(_spread(replied, rows, self.members.size), present)
        if AVAILABLE in frame.columns:
            there = _spread(frame[AVAILABLE].to_numpy(), rows, self.members.size)
            self._available = self._available.after(there, present)
        self._open, self._coded = None, {}
        return taken

    def pooled(self, *, certain: bool = False) -> dict[str, StageModel]:
        """Return the steps fitted on all closed rounds.

        With ``certain`` a step that everybody passed, of probability 1, is left out; otherwise it
        is an error.
        """
        logs = [log for log in self.logs if not (certain and log.rate(0, self.rounds) == 1.0)]
        for log in logs:
            if log.fit is None or log.fitted_on < self.rounds:
                log.refit(0, self.rounds)
        return {log.step.name: log.model() for log in logs}

    def _opened(self) -> tuple[pl.DataFrame, IntArray]:
        if self._open is None:
            raise InputError("No round is open: call open(table, rows) first.")
        return self._open

    def _with_history(self, table: pl.DataFrame, rows: IntArray) -> pl.DataFrame:
        """Return a round's rows with what is known of the clients, and their history."""
        known = self.members.frame.select(self.members.covariates)[rows]
        past = self._replies.matrix(day_length=self.settings.day_length)[rows]
        made = dict(zip((*REPLY_COLUMNS, *CLOCK_COLUMNS), past.T, strict=True))
        if AVAILABLE in table.columns:
            there = self._available.matrix(day_length=self.settings.day_length)[rows]
            made |= dict(zip(AVAILABILITY_COLUMNS, there.T, strict=False))
        wanted = {name for log in self.logs for name in log.step.design.columns}
        wanted -= {*table.columns, *known.columns}
        more = [pl.Series(name, values) for name, values in made.items() if name in wanted]
        return table.hstack(known.get_columns()).hstack(more)

    def _step_prob(
        self, log: StepLog, frame: pl.DataFrame, who: pl.DataFrame, replied: BoolArray
    ) -> StepProb:
        where = f"replies of round {self.rounds + 1}"
        columns, kept = log.code(who, where)
        known = np.ones(who.height, dtype=np.bool_) if kept is None else kept
        source = Source.MODEL
        if self.models:
            fit = self._given(log)
        elif self.settings.window is LogWindow.SAME_ROUND:
            fit, source = self._same_round(log, frame.with_columns(pl.Series(REPLIED, replied)))
        else:
            fit, source = self._past(log, frame, replied)
        self._used[log.step.name] = fit, source
        prob = np.full(who.height, np.nan)
        if isinstance(fit, float):
            prob[known] = fit
        else:
            fresh = self._unseen(fit, log, columns, where)
            self._note_unvaried(fit, columns)
            prob[known] = np.where(fresh, np.nan, fit.prob(columns))
            known = ~np.isnan(prob)
        return StepProb(prob, known, source)

    def _given(self, log: StepLog) -> LogisticFit | float:
        """Return the fit given for a step, or the probability of one that everybody passes."""
        model = self.models.get(log.step.name)
        return 1.0 if model is None else model.fit

    def _rows_of(self, log: StepLog, closed: pl.DataFrame) -> StepRows:
        step, among = log.step, log.step.rows(closed)
        could = closed if among is None else closed.filter(pl.Series(among))
        passed = could[step.label].to_numpy()
        prob, used = np.full(could.height, np.nan), self._known_fit(log)
        if used is not None:
            columns, kept = log.code(could, f"round {self.rounds + 1}")
            self._coded[step.name] = columns, kept
            prob[slice(None) if kept is None else kept] = self._quiet_prob(used[0], log, columns)
        source = None if used is None else used[1]
        return StepRows(step.name, step.among, step.label, prob, passed, source)

    def _known_fit(self, log: StepLog) -> tuple[LogisticFit | float, Source] | None:
        """Return what the open round was given, or would be without a new fit; none if nothing."""
        if log.step.name in self._used:
            return self._used[log.step.name]
        if self.models:
            return self._given(log), Source.MODEL
        if self.settings.window is LogWindow.SAME_ROUND:
            return None
        if log.fit is not None:
            return log.fit, Source.MODEL
        last = self.settings.last
        rate = log.rate(0 if last is None else max(0, self.rounds - last), self.rounds)
        return None if rate is None else (rate, Source.PAST_RATE)

    def _quiet_prob(
        self, fit: LogisticFit | float, log: StepLog, columns: FloatArray
    ) -> FloatArray | float:
        """Return probabilities of coded rows, NaN where a level is new to the fit."""
        if isinstance(fit, float):
            return fit
        prob = fit.prob(columns)
        if self.models or self.settings.window is not LogWindow.SAME_ROUND:
            for here in self._fresh(fit, log, columns).values():
                prob[here] = np.nan
        return prob

    def _note_unvaried(self, fit: LogisticFit, columns: FloatArray) -> None:
        """Record numbers that vary now and never did in the fit: their coefficient is 0."""
        for j, name in enumerate(fit.names):
            if name in fit.constant and columns.shape[1] and np.ptp(columns[j]) > 0.0:
                self.notes[f"{name} varies, and never did in the rounds fitted on"] += 1

    def _past(
        self, log: StepLog, frame: pl.DataFrame, replied: BoolArray
    ) -> tuple[LogisticFit | float, Source]:
        last = self.rounds
        first = 0 if self.settings.last is None else max(0, last - self.settings.last)
        rate = log.rate(first, last)
        if rate is None:  # no past to learn from
            return self._round_rate(log, frame, replied), Source.ROUND_RATE
        if not log.enough(first, last):
            return rate, Source.PAST_RATE
        if log.fit is not None and not self.settings.due(last, log.fitted_on):
            return log.fit, Source.MODEL
        return _refitted(log, first, last, rate)

    def _same_round(self, log: StepLog, closed: pl.DataFrame) -> tuple[LogisticFit | float, Source]:
        own = StepLog(log.step, self.settings, Blocks())
        own.append(closed, f"round {self.rounds + 1}")
        rate = own.rate(0, 1)
        if rate is None:  # no reply has all its values
            return self._round_rate(log, closed, closed[REPLIED].to_numpy()), Source.ROUND_RATE
        if not own.enough(0, 1):
            return rate, Source.ROUND_RATE
        return _refitted(own, 0, 1, rate)

    def _unseen(self, fit: LogisticFit, log: StepLog, columns: FloatArray, where: str) -> BoolArray:
        """Return rows with a level that no row of the fit had, (m,): the fit says nothing about it.

        They are left out under the policy drop, and an error otherwise.
        """
        fresh = np.zeros(columns.shape[1], dtype=np.bool_)
        if self.settings.window is LogWindow.SAME_ROUND and not self.models:
            return fresh  # every row was fitted on
        for name, here in self._fresh(fit, log, columns).items():
            if here.any() and log.step.design.missing is not Missing.DROP:
                raise InputError(
                    f"{where}: {name} occurs in {int(here.sum())} replies and in no row of the "
                    "rounds fitted on, so nothing is known of it. Leave such rows out (missing: "
                    "drop), merge rare levels, leave the column out, or use the pooled fit."
                )
            fresh |= here
        return fresh

    def _fresh(self, fit: LogisticFit, log: StepLog, columns: FloatArray) -> dict[str, BoolArray]:
        if self.models:  # a saved fit knows only which columns never varied
            terms = [t for t in log.step.design.terms if t.level and t.name in fit.constant]
            return {t.name: columns[fit.names.index(t.name)] != 0.0 for t in terms}
        rounds = slice(log.fitted_from, log.fitted_on)
        count = sum(n for n, _ in log.counts[rounds])
        return log.step.fresh(np.sum(log.sums[rounds], axis=0), count, columns)

    def _round_rate(self, log: StepLog, frame: pl.DataFrame, replied: BoolArray) -> float:
        among = log.step.rows(frame)
        passed = replied if log.step.label == REPLIED else frame[log.step.label].to_numpy()
        return float(passed.mean() if among is None else passed[among].mean())


def _source(parts: Sequence[StepProb]) -> Source:
    """Return where probabilities are from; a step that everybody passed tells nothing."""
    told = [part for part in parts if not (part.prob[part.known] == 1.0).all()] or parts[-1:]
    rates = [part.source for part in told if part.source is not Source.MODEL]
    return rates[-1] if rates else Source.MODEL


def _refitted(
    log: StepLog, first: int, last: int, rate: float
) -> tuple[LogisticFit | float, Source]:
    """Return a new fit, or the rate where there is no maximum or it was not reached."""
    try:
        return log.refit(first, last), Source.MODEL
    except SeparationError:
        source = Source.SEPARATED_RATE
    except NotConvergedError:
        source = Source.UNCONVERGED_RATE
    log.fit = None
    return rate, source


def _spread(flags: BoolArray | bool, rows: IntArray, size: int) -> BoolArray:
    """Return flags of some rows as flags of all, false elsewhere."""
    out = np.zeros(size, dtype=np.bool_)
    out[rows] = flags
    return out
