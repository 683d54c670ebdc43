"""The configuration of a run: population, method and formulas, from a user's arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import polars as pl

from fedipw.errors import InputError
from fedipw.flower.covariates import Covariate, declarations
from fedipw.flower.register import Register
from fedipw.flower.screen import Screen
from fedipw.numerics.checks import some
from fedipw.selection.enrollment import EnrollmentStage, ListedEnrollment
from fedipw.selection.steps import AVAILABILITY_COLUMNS, COLUMNS
from fedipw.tables.columns import ID, OWN_COLUMNS
from fedipw.tables.design import Missing
from fedipw.tables.formula import OTHER, formula_clauses, formula_names
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.tables.table import TableLike
from fedipw.tables.targets import TargetsLike
from fedipw.weighting.pipeline import Cap, Guard, Guards
from fedipw.weighting.replay import Plan
from fedipw.weighting.settings import Settings
from fedipw.weighting.weigher import StagedEnrollment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunConfig:
    """The target population, how replies are weighted, and what clients are asked."""

    stage: EnrollmentStage
    plan: Plan
    evaluation: Plan  # of metrics: weights alone, without guards and augmentation
    columns: tuple[str, ...]  # asked of clients before every round
    settings: Mapping[str, Any]  # those a resumed run must share
    register: Register  # everybody who was ever enrolled
    present: EnrollmentStage  # of the clients that are listed now, without those that left
    declared: Mapping[str, Covariate] = field(default_factory=dict)  # what answers may be
    coded: frozenset[str] = frozenset()  # asked, and categories even if they are numbers

    @classmethod
    def of(
        cls,
        *,
        population: TableLike | None,
        enrolled: TableLike | None,
        targets: TargetsLike | None,
        population_size: float | None,
        totals: bool,
        covariates: Sequence[str] | Mapping[str, Any] | None,
        settings: Settings,
        ledger: Path,
        augment: bool = True,
        examples: str | None = None,
        cluster: str | None = None,
        private: bool = False,
    ) -> Self:
        """Return the configuration, its tables read and checked.

        ``ledger`` is the directory of the run, whose clients may have been others before;
        ``augment`` is whether the default method may keep sums of updates; ``examples`` is the
        column of numbers of samples where the target is the mean over samples; ``cluster`` that of
        what clients share, the unit of standard errors; ``private`` is whether clients keep their
        covariates to themselves, so that the table lists identifiers alone.
        """
        if settings.missing == Missing.ERROR.value:
            raise InputError(
                'missing="error" would let the gap of one client end a run: use "drop", by which '
                'its replies have no weight, or "indicator".'
            )
        who = _population(
            population, enrolled, targets, population_size, settings.enrollment, totals=totals
        ).clustered(cluster)
        names = who.clients.schema.names()
        columns = _asked(settings.participation, covariates, names)
        declared = declarations(covariates)
        plan = _with_levels(
            settings.plan(who, training=augment and examples is None), columns, declared
        )
        if examples is not None:
            plan = _by_samples(plan, examples)
        register = Register.of(ledger, who.members)

        def stage_of(population: Population) -> EnrollmentStage:
            if private:
                return ListedEnrollment(population)
            return settings.stage(population, later=columns)

        stage = present = stage_of(who.with_members(register.members))
        if register.members.former is not None:
            present = stage_of(who)
        shared = {
            "scheme": plan.method.name, "enrollment": settings.enrollment,
            "participation": settings.participation, "availability": settings.availability,
            "history": settings.history, "columns": list(columns), "trim": settings.trim,
            "refit_every": settings.refit_every, "l2": settings.l2,
        }  # fmt: skip
        chosen = settings.classifier
        fits = {
            "classifier": chosen if chosen is None or isinstance(chosen, str) else repr(chosen),
            "folds": settings.folds, "score_calibration": settings.score_calibration,
        }  # fmt: skip
        if any(value is not None for value in fits.values()):
            shared |= fits
        if settings.missing != Missing.DROP.value:
            shared["missing"] = settings.missing
        if declared:
            shared["declared"] = {name: how.to_json() for name, how in sorted(declared.items())}
        evaluation = replace(plan, method=plan.method.unguarded())
        if settings.method is None and examples is None:
            evaluation = _with_levels(settings.plan(who), columns, declared)
        if examples is not None:
            shared["examples"] = examples
        if cluster is not None:
            shared["cluster"] = cluster
        if settings.trim is not None and not plan.method.augmentation.weighs_replies:
            raise InputError(
                f"trim cuts the weights of replies, and {plan.method.name} has none: leave it out."
            )
        return cls(
            stage=stage, plan=plan, evaluation=evaluation, columns=columns, settings=shared,
            register=register, present=present,
            declared=declared, coded=_coded(settings.participation, columns, names),
        )  # fmt: skip

    @property
    def replies(self) -> Plan:
        """How a round's replies are weighed: plainly where a memory alone carries weights."""
        return replace(self.plan, method=self.plan.method.of_replies())

    def asked(self, ledger: Ledger) -> dict[str, pl.DataType | None]:
        """Return the covariates clients are asked for, with types known from earlier rounds."""
        known = ledger.schema if ledger.rounds else {}
        made: dict[str, pl.DataType | None] = {name: known.get(name) for name in self.columns}
        for name, how in self.declared.items():
            if made[name] is not None and made[name] != how.type:
                raise InputError(
                    f"{name!r} is declared a {how.kind}, and the ledger {ledger.directory} holds "
                    f"{made[name]}: declare it as it is, or begin with an empty ledger."
                )
            made[name] = how.type
        return made

    def lines(self) -> list[str]:
        """Return the log's lines at the start."""
        formulas, known = self.plan.formulas, f"{self.stage.members.listed} enrolled clients"
        targets, size = self.stage.population.targets, self.stage.size
        if targets is not None:
            known += f", {len(targets.names)} population totals"
        elif size is not None:
            known += f" of {size:.6g}"
        return [
            f"{self.plan.method.name}; {known}"
            + (f"; mean over samples by {self.plan.examples}" if self.plan.examples else ""),
            f"availability ~ {formulas.availability}, reply ~ {formulas.reply}"
            + (" and history" if formulas.history else ""),
            f"asked before every round: {', '.join(self.columns) or 'nothing'}",
        ]

    def without_weight(self) -> str:
        """Return how many clients lack a value that a formula needs; nothing if none does."""
        formulas, members = self.plan.formulas, self.stage.members
        if formulas.missing is not Missing.DROP:
            return ""
        used = " + ".join((self.stage.formula or "", formulas.availability, formulas.reply))
        named = members.covariates if "." in re.split(r"[\s+]+", used) else formula_names(used)
        gaps = members.frame.filter(~members.gone).select(
            pl.col(name).is_null() for name in named if name in members.covariates
        )
        lacking = [name for name in gaps.columns if gaps[name].any()]
        if not lacking:
            return ""
        clients = int(gaps.select(pl.any_horizontal(lacking)).to_series().sum())
        return (
            f"{clients} enrolled clients lack a value of {some(map(repr, lacking))}, and their "
            'replies get no weight: missing="indicator" makes it a value of its own, or name other '
            "columns in the formulas, availability= among them"
        )

    def influence(self, screen: Screen) -> str:
        """Return the bound on what one update adds, as far as it is known at the start.

        The weight of a client is its enrollment factor over its participation probability; the
        first is known now, the second when a round closes.
        """
        clip = screen.clip
        if clip is None and screen.clip_at_median is None:
            return "updates are not clipped: one client can move the aggregate without bound"
        if clip is None:
            times = f"{screen.clip_at_median:g} x the median norm of the round's updates"
            bound = f"no update adds more than {times} x max w"
        else:
            bound = f"no client moves the aggregate by more than {clip:g} x max w"
        method, members = self.replies.method, self.stage.members
        everybody = ~members.gone
        found = method.at(
            StagedEnrollment(self.stage, method, examples=self.plan.examples).at(everybody)
        ).influence()
        later = "each round's metrics hold its bound as fedipw-influence"
        changes = members.changes and found.factor is not None
        if not found.known or changes:
            return f"{bound}, known when a round closes (fedipw-influence in its metrics)"
        if found.factor is None:
            shares = "" if clip is None else f" <= {_up(clip)}"
            return f"{bound}{shares}, since weights are shares{_capped(method.guard)}; {later}"
        scale = 1.0 if clip is None else clip
        least = "" if found.share is None else f", and at least {_up(scale * found.share)}"
        return (
            f"{bound}; w = e / (participation probability) with e <= {_up(found.factor)}, so "
            f"{_up(scale * found.factor)} over that probability{least}; {later}"
        )


def _by_samples(plan: Plan, examples: str) -> Plan:
    """Return the plan for the mean over samples, or raise if the method has none."""
    method = plan.method
    if method.augmentation.memory or method.augmentation.regression is not None:
        raise InputError(
            f"{method.name} adds sums over clients, each counting alike, to a round's replies: "
            "with examples= use a method without memory and regression, such as fedipw-hajek."
        )
    return replace(plan, method=method.by_samples(total=True), examples=examples)


def _capped(guard: Guard) -> str:
    """Return what a guard says of the largest share."""
    for one in guard.guards if isinstance(guard, Guards) else (guard,):
        if isinstance(one, Cap):
            return f" and w is at most {one.share:.0%}, or 5 equal shares of a smaller round"
    return ""


def _up(value: float) -> str:
    """Return a number with four digits, never below it.

    >>> _up(0.123412), _up(2.0)
    ('0.1235', '2')
    """
    digit = 10.0 ** (math.floor(math.log10(value)) - 3)
    shown = f"{value:.4g}"
    return shown if float(shown) >= value else f"{(math.floor(value / digit) + 1) * digit:.4g}"


def _population(
    population: TableLike | None,
    enrolled: TableLike | None,
    targets: TargetsLike | None,
    size: float | None,
    enrollment: str,
    *,
    totals: bool,
) -> Population:
    """Return the population of a user's arguments, or raise if they do not go together."""
    if (population is None) == (enrolled is None):
        raise InputError("Give population=, or enrolled= together with targets=.")
    if (enrolled is None) != (targets is None):
        raise InputError("enrolled= and targets= go together.")
    if totals and targets is None:
        raise InputError("totals= goes with targets=: it says what their values are.")
    if population is not None:
        if size is not None:
            raise InputError("population_size= goes with targets=: a population table has its own.")
        return Population(population)
    if enrollment != ".":
        raise InputError("enrollment= goes with population=: with targets= it is calibrated.")
    assert enrolled is not None
    assert targets is not None
    return Population.from_totals(enrolled, targets, size, totals=totals)


def _with_levels(plan: Plan, columns: Sequence[str], declared: Mapping[str, Covariate]) -> Plan:
    """Return a plan that knows the levels which answers may have before they occur."""
    levels: dict[str, tuple[str, ...]] = dict.fromkeys(columns, (OTHER,))
    levels |= {name: how.levels for name, how in declared.items() if how.levels is not None}
    return replace(plan, formulas=replace(plan.formulas, levels=levels)) if levels else plan


def _coded(formula: str, columns: Sequence[str], table: Sequence[str]) -> frozenset[str]:
    """Return the columns asked for that a formula takes as categories, whatever they hold."""
    past = (*COLUMNS, *AVAILABILITY_COLUMNS)
    try:
        clauses = formula_clauses(formula, (*columns, *table), more=past)
    except InputError:
        return frozenset()  # what is wrong with it is said where it is bound
    parts = (part for clause in clauses for product in clause.products for part in product)
    return frozenset(part.column for part in parts if part.category) & frozenset(columns)


def _asked(
    formula: str, covariates: Sequence[str] | Mapping[str, Any] | None, table: Sequence[str]
) -> tuple[str, ...]:
    """Return the columns to ask clients for: those named that neither table nor history has."""
    known = {*table, *COLUMNS, *AVAILABILITY_COLUMNS}
    named = tuple(name for name in formula_names(formula) if name not in known)
    if isinstance(covariates, Mapping):  # declares some of them, and may name more
        covariates = (*named, *covariates)
    columns = tuple(dict.fromkeys(named if covariates is None else covariates))
    taken = [name for name in columns if name in {*known, ID, *OWN_COLUMNS}]
    if taken:
        raise InputError(
            f"{some(map(repr, taken))} cannot be asked of clients: the table has it, or it has a "
            "meaning of its own in a ledger. Rename it."
        )
    lacking = [name for name in named if name not in columns]
    if lacking:
        raise InputError(
            f"The participation formula names {some(map(repr, lacking))}, which neither the table "
            "nor covariates= has."
        )
    return columns
