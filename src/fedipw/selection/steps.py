r"""The steps of participation in a log: which rows are fitted on what, and what is known by design.

Participation is one step, or up to three: *available*, *invited* (a probability the server knows
and uses as it is), *replied*. Their product is the participation probability:

.. math:: \pi^{part}_{ir} = P(\text{available}) \cdot
   P(\text{invited} \mid \text{available}) \cdot P(\text{replied} \mid \text{invited}).
   \qquad (P5)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.selection.history import AVAILABILITY_COLUMNS, CLOCK_COLUMNS, REPLY_COLUMNS
from fedipw.selection.stage import AVAILABILITY, PARTICIPATION, REPLY
from fedipw.tables.design import Design, Missing, bound_design
from fedipw.tables.ledger import AVAILABLE, INVITE_PROB, INVITED, OWN_COLUMNS, REPLIED, Ledger
from fedipw.tables.members import Members
from fedipw.tables.population import ID
from fedipw.tables.tablefile import reading

if TYPE_CHECKING:
    from pathlib import Path

    from fedipw.numerics.types import BoolArray, FloatArray
    from fedipw.selection.stage import StageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One fitted step: rows of a round that could pass it, and those that did."""

    name: str
    design: Design
    label: str
    among: str | None  # the flag of rows that could pass; all rows if none

    def rows(self, frame: pl.DataFrame) -> BoolArray | None:
        """Return which rows of a round could pass, (n,); all if None."""
        return None if self.among is None else frame[self.among].to_numpy()

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
    observed. Names of history columns may be used in both; ``history`` adds them all.
    """

    reply: str = "."
    availability: str = "."
    history: bool = False
    missing: Missing = Missing.ERROR
    lump_below: float | None = None


def participation_steps(
    ledger: Ledger,
    members: Members,
    formulas: Formulas,
    models: Mapping[str, StageModel] | None = None,
    *,
    in_one: bool = False,
    opening: pl.DataFrame | None = None,
) -> tuple[Step, ...]:
    """Return the steps a ledger's columns tell apart, with their designs; ``in_one`` makes one.

    Levels of categories are those of all rounds, and of ``opening``, a round that is about to
    follow; who replied is not looked at. With fitted ``models`` by name the designs are theirs.
    """
    schema = ledger.schema if opening is None else opening.schema
    taken = {*schema.names(), *OWN_COLUMNS}
    both = [n for n in members.covariates if n in taken]
    if both:
        raise InputError(
            f"{some(map(repr, both))} stands in the table of clients and in the ledger, or has a "
            "meaning of its own there: rename or drop one, so that a formula means one of them."
        )
    binding = None
    if models is None:
        binding = _Binding.of(ledger, members, formulas, everyone=in_one, opening=opening)
    steps = []
    if AVAILABLE in schema and not in_one:
        design = _saved(models, AVAILABILITY) if binding is None else binding.availability()
        steps.append(Step(name=AVAILABILITY, design=design, label=AVAILABLE, among=None))
    among: str | None = INVITED if INVITE_PROB in schema else AVAILABLE
    if in_one or among not in schema:
        among = None
    name = PARTICIPATION if among is None else REPLY
    design = _saved(models, name) if binding is None else binding.reply(among)
    return (*steps, Step(name=name, design=design, label=REPLIED, among=among))


def _saved(models: Mapping[str, StageModel] | None, name: str) -> Design:
    if not models or name not in models:
        raise InputError(f"There is no saved model of {name}; there is {some(models or {})}.")
    return models[name].design


def _all_rounds(ledger: Ledger, opening: pl.DataFrame | None) -> pl.LazyFrame:
    """Return the closed rounds and the one about to follow; who replied is not among them."""
    if opening is None:
        return ledger.scan()
    if not ledger.rounds:
        return opening.lazy()
    return pl.concat([ledger.scan().select(opening.columns), opening.lazy()])


@dataclass(frozen=True, slots=True)
class _Binding:
    """All rounds with what is known of their clients, to which designs are bound."""

    query: pl.LazyFrame
    where: Path
    covariates: tuple[str, ...]  # of the rounds
    members: Members
    formulas: Formulas

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        members: Members,
        formulas: Formulas,
        *,
        everyone: bool,
        opening: pl.DataFrame | None,
    ) -> _Binding:
        known = members.frame.lazy().select(ID, *members.covariates)
        ids = pl.col(ID).cast(members.frame.schema[ID], strict=False)  # strangers are found later
        names = ledger.schema.names() if opening is None else opening.columns
        covariates = tuple(n for n in names if n not in {ID, *OWN_COLUMNS})
        rounds = _all_rounds(ledger, opening).with_columns(ids)
        query = rounds.join(known, on=ID, how="left")
        if everyone:  # those without a row have covariates too; their X are values that occur
            occurs = rounds.select(pl.col(covariates).drop_nulls().first())
            others = known.join(rounds.select(ID), on=ID, how="anti").join(occurs, how="cross")
            query = pl.concat([query, others], how="diagonal_relaxed")
        return cls(query, ledger.directory, covariates, members, formulas)

    def availability(self) -> Design:
        """Return the design of availability: nothing of the ledger but history is known then."""
        past = (*AVAILABILITY_COLUMNS, *REPLY_COLUMNS, *CLOCK_COLUMNS)
        return self._design(self.query, self.formulas.availability, self.members.covariates, past)

    def reply(self, among: str | None) -> Design:
        """Return the design of a reply, bound to the rows that could reply."""
        query = self.query if among is None else self.query.filter(pl.col(among))
        known = (*self.members.covariates, *self.covariates)
        return self._design(query, self.formulas.reply, known, (*REPLY_COLUMNS, *CLOCK_COLUMNS))

    def _design(
        self, query: pl.LazyFrame, formula: str, known: Sequence[str], past: Sequence[str]
    ) -> Design:
        """Return a design in which ``.`` is what is known; history is named or asked for."""
        own = {*self.members.covariates, *self.covariates}
        past = [name for name in past if name not in own]
        if self.formulas.history:
            formula = " + ".join([*([] if formula == "." and not known else [formula]), *past])
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
                where=str(self.where),
                checked=False,
            )
