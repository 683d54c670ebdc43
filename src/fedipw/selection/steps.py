r"""The steps of participation in a log: which rows are fitted on what, and what is known by design.

Participation is one step, or up to three: *available*, *invited* (a probability the server knows
and uses as it is), *replied*. Their product is the participation probability:

.. math:: \pi^{part}_{ir} = P(\text{available}) \cdot
   P(\text{invited} \mid \text{available}) \cdot P(\text{replied} \mid \text{invited}).
   \qquad (P5)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows, some
from fedipw.selection.saved import AVAILABILITY, PARTICIPATION, REPLY
from fedipw.tables.columns import (
    ASKED,
    AVAILABLE,
    ID,
    INVITE_PROB,
    INVITED,
    OPENED_AT,
    OWN_COLUMNS,
    REPLIED,
)
from fedipw.tables.design import Design, Missing, bound_design
from fedipw.tables.ledger import Ledger, Round, quarantined
from fedipw.tables.population import Members
from fedipw.tables.table import reading

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray
    from fedipw.selection.saved import StageModel
    from fedipw.storage.places import Place


REPLY_COLUMNS = ("last_reply", "reply_rate", "rounds_since_reply")
AVAILABILITY_COLUMNS = ("last_available", "available_rate", "rounds_since_available")
CLOCK_COLUMNS = ("hour_sin", "hour_cos")
ELAPSED = "elapsed"  # only where a formula names it: history does not add it
TIME_COLUMNS = (*CLOCK_COLUMNS, ELAPSED)
NAMES = (*REPLY_COLUMNS, *AVAILABILITY_COLUMNS, *TIME_COLUMNS)  # that no table needs to have


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One fitted step: rows of a round that could pass it, and those that did."""

    name: str
    design: Design
    label: str
    among: str | None  # the flag of rows that could pass; all rows if none

    def rows(self, table: pl.DataFrame, size: int) -> IntArray:
        """Return the rows of a round that could pass, (m,) of its ``size`` rows."""
        return (
            np.arange(size) if self.among is None else np.flatnonzero(table[self.among].to_numpy())
        )

    def _level_columns(self) -> dict[str, list[int]]:
        """Return the columns of single levels, by category."""
        own: dict[str, list[int]] = {}
        for j, term in enumerate(self.design.terms):
            if term.level is not None:
                own.setdefault(term.level[0], []).append(j)
        return own

    def coefficients(self, sums: FloatArray, count: int) -> int:
        """Return how many coefficients some rows can be asked for, the intercept among them.

        ``sums`` (q,) are of the columns over the ``count`` rows. Levels that have not occurred do
        not count, so that a log tells the same whether later rounds are known or not.
        """
        own = self._level_columns()
        total = 1 + len(self.design.terms) - sum(map(len, own.values()))
        for column, places in own.items():
            seen = int((sums[places] != 0.0).sum())
            if len(places) == len(self.design.levels.get(column, ())) - 1:  # one is the reference
                seen += int(sums[places].sum() != count) - 1
            total += max(seen, 0)
        return total

    def fresh(self, sums: FloatArray, count: int, columns: FloatArray) -> dict[str, BoolArray]:
        """Return which of some rows have a level that no fitted row had, by level.

        ``sums`` (q,) are of the columns over the ``count`` fitted rows, ``columns`` (q, m) of the
        rows asked about. A category's first level has no column: it is where the others' are 0.
        """
        own = self._level_columns()
        found = {
            self.design.names[j]: columns[j] != 0.0
            for places in own.values() for j in places if sums[j] == 0.0
        }  # fmt: skip
        for column, places in own.items():
            levels = self.design.levels.get(column, ())
            if len(places) == len(levels) - 1 and sums[places].sum() == count:
                found[f"{column}[{levels[0]}]"] = ~columns[places].any(axis=0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulas:
    """What the steps of participation depend on.

    ``reply`` is the formula of the last step, or of the only one; ``availability`` that of the
    first of three. ``.`` is every covariate a step may use: of ledger and table for a reply, of the
    table alone for availability, since what the ledger holds of a client that is offline is not
    observed. Names of history columns and of the clock may be used in both; ``history`` adds them
    all but ``elapsed``.
    """

    reply: str = "."
    availability: str = "."
    history: bool = False
    missing: Missing = Missing.ERROR
    lump_below: float | None = None
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # that may yet occur


def participation_steps(
    rounds: Ledger | Round,
    members: Members,
    formulas: Formulas,
    models: Mapping[str, StageModel] | None = None,
    *,
    in_one: bool = False,
    opening: pl.DataFrame | None = None,
    quarantine: bool = False,
) -> tuple[Step, ...]:
    """Return the steps that the columns of rounds tell apart, with their designs.

    Parameters
    ----------
    rounds
        A ledger, or the first round where there is none, as in a simulation. Levels of categories
        are those of all rounds and, without a ledger, of all members; who replied is not read.
    members
        The clients and what is known of them.
    formulas
        What the steps depend on.
    models
        Fitted steps by name, whose designs are used as they are.
    in_one
        Make one step over everybody, whatever the columns.
    opening
        A round about to follow those of the ledger.
    quarantine
        Take values of the ledger that no server accepts as missing.
    """
    found = _Binding.of(
        rounds, members, formulas, everyone=in_one, opening=opening, quarantine=quarantine
    )
    taken = {*found.columns, *OWN_COLUMNS}
    both = [n for n in members.covariates if n in taken]
    if both:
        raise InputError(
            f"{some(map(repr, both))} stands in the table of clients and in the ledger, or has a "
            "meaning of its own there: rename or drop one, so that a formula means one of them."
        )
    steps = []
    if AVAILABLE in found.columns and not in_one:
        design = found.availability() if models is None else _saved(models, AVAILABILITY)
        asked = ASKED if ASKED in found.columns else None  # of the others nothing is known (P8)
        steps.append(Step(name=AVAILABILITY, design=design, label=AVAILABLE, among=asked))
    among: str | None = INVITED if INVITE_PROB in found.columns else AVAILABLE
    if in_one or among not in found.columns:
        among = None
    name = PARTICIPATION if among is None else REPLY
    design = found.reply(among) if models is None else _saved(models, name)
    return (*steps, Step(name=name, design=design, label=REPLIED, among=among))


def known_steps(columns: Collection[str], designs: Mapping[str, Design]) -> tuple[Step, ...]:
    """Return the steps of a log with these columns whose designs are known already, by name."""
    among = AVAILABLE if AVAILABLE in columns else None
    among = INVITED if INVITE_PROB in columns else among
    last = PARTICIPATION if among is None else REPLY
    asked = ASKED if ASKED in columns else None
    kinds = {AVAILABILITY: (AVAILABLE, asked), last: (REPLIED, among)}
    wanted = ([AVAILABILITY] if AVAILABLE in columns else []) + [last]
    if set(wanted) != set(designs):
        raise ValueError(f"designs of {sorted(designs)}, not of {wanted}")
    return tuple(
        Step(name=name, design=designs[name], label=kinds[name][0], among=kinds[name][1])
        for name in wanted
    )


def _saved(models: Mapping[str, StageModel], name: str) -> Design:
    if name not in models:
        raise InputError(f"There is no saved model of {name}; there is {some(models)}.")
    return models[name].design


@dataclass(frozen=True, slots=True)
class _Binding:
    """All rounds with what is known of their clients, to which designs are bound."""

    query: pl.LazyFrame
    where: Place
    columns: tuple[str, ...]  # of the rounds
    members: Members
    formulas: Formulas

    @classmethod
    def of(
        cls,
        rounds: Ledger | Round,
        members: Members,
        formulas: Formulas,
        *,
        everyone: bool,
        opening: pl.DataFrame | None,
        quarantine: bool = False,
    ) -> _Binding:
        known = members.frame.lazy().select(ID, *members.covariates)
        if isinstance(rounds, Round):
            ids = members.frame[ID][rounds.rows].to_frame()  # a round may have no other column
            listed = ids.hstack(rounds.table.get_columns()).lazy()
            columns, everyone = (*rounds.table.columns, ID), True
            where: Place = Path("round 1")
        else:
            columns = tuple(rounds.schema.names() if opening is None else opening.columns)
            where, coming = rounds.directory, [] if opening is None else [opening.lazy()]
            # who replied is not known of the round about to follow
            closed = [rounds.scan().select(columns)] if rounds.rounds or not coming else []
            if quarantine:
                closed = [query.with_columns(*quarantined(rounds.schema)) for query in closed]
            # strangers are found later
            listed = pl.concat([*closed, *coming])
            listed = listed.with_columns(pl.col(ID).cast(members.frame.schema[ID], strict=False))
        query = listed.join(known, on=ID, how="left")
        if everyone:  # those without a row have covariates too; their X are values that occur
            own = [n for n in columns if n not in {ID, *OWN_COLUMNS}]
            others = known.join(listed.select(ID), on=ID, how="anti")
            if own:
                occurs = listed.select(pl.col(own).drop_nulls().first())
                others = others.join(occurs, how="cross")
            query = pl.concat([query, others], how="diagonal_relaxed")
        return cls(query, where, columns, members, formulas)

    @property
    def covariates(self) -> tuple[str, ...]:
        """Covariates of the rounds."""
        return tuple(n for n in self.columns if n not in {ID, *OWN_COLUMNS})

    def availability(self) -> Design:
        """Return the design of availability: nothing of the ledger but history is known then."""
        past = (*AVAILABILITY_COLUMNS, *REPLY_COLUMNS, *TIME_COLUMNS)
        return self._design(self.query, self.formulas.availability, self.members.covariates, past)

    def reply(self, among: str | None) -> Design:
        """Return the design of a reply, bound to the rows that could reply."""
        query = self.query if among is None else self.query.filter(pl.col(among))
        known = (*self.members.covariates, *self.covariates)
        return self._design(query, self.formulas.reply, known, (*REPLY_COLUMNS, *TIME_COLUMNS))

    def _design(
        self, query: pl.LazyFrame, formula: str, known: Sequence[str], past: Sequence[str]
    ) -> Design:
        """Return a design in which ``.`` is what is known; history is named or asked for."""
        own = {*self.members.covariates, *self.covariates}
        past = [name for name in past if name not in own]
        if self.formulas.history:
            added = [name for name in past if name != ELAPSED]
            formula = " + ".join([*([] if formula == "." and not known else [formula]), *added])
        if not known and formula.strip() == ".":
            raise InputError(
                "There is no covariate to explain participation with: ledger and table have none. "
                "Use history (last_reply, reply_rate, ...), or add covariates."
            )
        with reading(self.where):
            return bound_design(
                formula,
                query.with_columns(pl.lit(0.5).alias(name) for name in past),
                known,
                more=past,
                missing=self.formulas.missing,
                lump_below=self.formulas.lump_below,
                levels=self.formulas.levels,
                where=str(self.where),
                checked=False,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    r"""Time as a covariate: where in its cycle a round opens, and how long after the first.

    Columns, for a round at time t with a cycle of length P:

    * ``hour_sin``, ``hour_cos``: :math:`\sin(2\pi t/P)` and :math:`\cos(2\pi t/P)`;
    * ``elapsed``: :math:`(t - t_0)/P`, the cycles since the start.

    Time is the number of the round, :math:`t_0 = 0` and P is ``day_length`` rounds; with
    ``day_hours`` it is the ledger's ``opened_at``, :math:`t_0` that of the first round, and P is
    ``day_hours`` hours: with 24 it is the hour of the day in UTC.

    >>> Clock(day_length=4.0).columns(3.0, origin=0.0)["elapsed"]
    0.75
    """

    day_length: float = 24.0  # rounds of a cycle
    day_hours: float | None = None  # hours of a cycle, in place of rounds

    def __post_init__(self) -> None:
        if not 1e-6 <= self.day_length <= 1e15:
            raise InputError(f"A day has 1e-06 to 1e+15 rounds, not {self.day_length!r}.")
        if self.day_hours is not None and not 1e-3 <= self.day_hours <= 1e6:
            raise InputError(f"A cycle has 0.001 to 1e+06 hours, not {self.day_hours!r}.")

    def time(self, table: pl.DataFrame, index: int) -> float:
        """Return t of a round, the ``index``-th from 1: that number, or hours since 1970 in UTC."""
        if self.day_hours is None:
            return float(index)
        known = isinstance(table.schema.get(OPENED_AT), pl.Date | pl.Datetime) and table.height
        if not known or table[OPENED_AT][0] is None:
            raise InputError(
                f"Round {index} has no {OPENED_AT!r}, by which a clock of {self.day_hours:g} hours "
                "runs: record it, or let the clock run by rounds (day_length)."
            )
        moment = table[OPENED_AT].head(1).cast(pl.Datetime("us"))
        return float(moment.dt.epoch("us")[0]) / 3.6e9

    def columns(self, time: float, origin: float) -> dict[str, float]:
        """Return the values of the columns at a time, all clients having the same."""
        period = self.day_length if self.day_hours is None else self.day_hours
        angle = 2.0 * np.pi * time / period
        values = (float(np.sin(angle)), float(np.cos(angle)), (time - origin) / period)
        return dict(zip(TIME_COLUMNS, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplyHistory:
    r"""Running history of n clients before a round; never of the round itself.

    Columns, for round r with :math:`s_i` replies in the :math:`e_i` rounds before r in which the
    client was enrolled (all r - 1 unless it joined or left), the last in round :math:`l_i` (if
    none, the round before it joined, 0 for those enrolled from the start):

    * ``last_reply``: 1 if the client replied in round r - 1;
    * ``reply_rate``: :math:`(s_i + 1)/(e_i + 2)`, so 1/2 before any round;
    * ``rounds_since_reply``: :math:`r - l_i`.

    Examples
    --------
    >>> history = ReplyHistory.of(2).after(np.array([True, False]))
    >>> history.matrix()  # before round 2
    array([[1.        , 0.66666667, 1.        ],
           [0.        , 0.33333333, 2.        ]])
    """

    rounds: int
    replies: IntArray  # (n,)
    last: IntArray  # (n,) round of the last reply; if none, the round before the client joined
    seen: IntArray  # (n,) rounds in which the client was enrolled

    @classmethod
    def of(cls, clients: int) -> ReplyHistory:
        """Return the history before the first round."""
        zeros = np.zeros(clients, dtype=np.int64)
        return cls(rounds=0, replies=zeros, last=zeros, seen=zeros)

    def state(self) -> dict[str, Any]:
        """Return the counts so far."""
        return {name: getattr(self, name) for name in ("rounds", "replies", "last", "seen")}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> ReplyHistory:
        """Return the history that was saved."""
        counts = {name: np.array(state[name]) for name in ("replies", "last", "seen")}
        return cls(rounds=int(state["rounds"]), **counts)

    def joined(self, present: BoolArray) -> ReplyHistory:
        """Return the history with those present for the first time counted from now, (n,)."""
        check_rows(len(self.replies), present=present)
        fresh = present & (self.seen == 0)
        return replace(self, last=np.where(fresh, self.rounds, self.last))

    def after(self, replied: BoolArray, present: BoolArray | None = None) -> ReplyHistory:
        """Return the history after a round with these replies, of those enrolled in it, (n,)."""
        check_rows(len(self.replies), replied=replied)
        index = self.rounds + 1
        return ReplyHistory(
            rounds=index,
            replies=self.replies + replied,
            last=np.where(replied, index, self.last),
            seen=self.seen + (1 if present is None else present),
        )

    def matrix(self) -> FloatArray:
        """Return the columns for the coming round, (n, 3)."""
        out = np.empty((len(self.replies), len(REPLY_COLUMNS)))
        out[:, 0] = (self.last == self.rounds) & (self.replies > 0)
        out[:, 1] = (self.replies + 1.0) / (self.seen + 2.0)
        out[:, 2] = self.rounds + 1 - self.last
        return out
