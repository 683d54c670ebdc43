"""What a run is about: the people, the method and the formulas, from a user's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.selection import Formulas, LogSettings, TableSettings
from fedipw.selection.history import AVAILABILITY_COLUMNS, COLUMNS
from fedipw.tables.design import Missing
from fedipw.tables.formula import formula_names
from fedipw.tables.ledger import OWN_COLUMNS, Ledger
from fedipw.tables.population import ID
from fedipw.tables.tablefile import TableFile
from fedipw.tables.targets import Targets
from fedipw.weighting.people import KnownPopulation, KnownTotals
from fedipw.weighting.registry import method_named
from fedipw.weighting.replay import LogPlan
from fedipw.weighting.schemes import Greg, enrollment_weights_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """The people a model is to serve, how replies are weighed, and what clients are asked."""

    people: KnownPopulation | KnownTotals
    plan: LogPlan
    columns: tuple[str, ...]  # asked of clients before every round
    settings: Mapping[str, Any]  # what a resumed run must share

    @classmethod
    def of(
        cls,
        *,
        population: str | Path | None,
        enrolled: str | Path | None,
        targets: str | Path | None,
        population_size: float | None,
        enrollment: str,
        participation: str,
        availability: str,
        history: bool,
        covariates: Sequence[str] | None,
        scheme: str | None,
        trim: float | None,
        refit_every: int,
        l2: float,
    ) -> Self:
        """Return a study, its tables read and checked."""
        _check_sources(population, enrolled, targets, population_size, enrollment)
        method = method_named(
            scheme or ("fedipw" if population is not None else "calibrated-quadratic")
        )
        table = TableFile(Path(population if population is not None else enrolled))  # type: ignore[arg-type]
        columns = _asked(participation, covariates, table.schema.names())
        people: KnownPopulation | KnownTotals
        if population is not None:
            options = TableSettings(l2=l2)
            people = KnownPopulation.of(table, enrollment, settings=options, later=columns)
        else:
            people = KnownTotals.of(table, Targets.read(Path(targets)), population_size)  # type: ignore[arg-type]
        formulas = Formulas(
            reply=participation, availability=availability, history=history, missing=Missing.DROP
        )
        plan = LogPlan(
            method=method, formulas=formulas, settings=LogSettings(refit_every=refit_every, l2=l2),
            trim=trim,
        )  # fmt: skip
        settings = {
            "scheme": method.name, "enrollment": enrollment, "participation": participation,
            "availability": availability, "history": history, "columns": list(columns),
            "trim": trim, "refit_every": refit_every, "l2": l2, "clients": people.members.size,
        }  # fmt: skip
        return cls(people=people, plan=plan, columns=columns, settings=settings)

    def asked(self, ledger: Ledger) -> dict[str, pl.DataType | None]:
        """Return what clients are asked, with types where earlier rounds settled them."""
        known = ledger.schema if ledger.rounds else {}
        return {name: known.get(name) for name in self.columns}

    def lines(self) -> list[str]:
        """Return what people should know at the start."""
        members, formulas = self.people.members.size, self.plan.formulas
        told = f"{members} enrolled clients"
        if isinstance(self.people, KnownPopulation):
            told += f" of {self.people.size}"
        else:
            told += f", {len(self.people.targets.names)} population totals"
        return [
            f"{self.plan.method.name}; {told}",
            f"availability ~ {formulas.availability}, reply ~ {formulas.reply}"
            + (" and history" if formulas.history else ""),
            f"asked before every round: {', '.join(self.columns) or 'nothing'}",
        ]

    def influence(self, clip: float | None) -> str:
        """Return how far one client can move the aggregate, as far as that is known at the start.

        The weight of a client is its enrollment factor over its participation probability; the
        first is known now, the second when a round closes.
        """
        if clip is None:
            return "updates are not clipped: one client can move the aggregate without bound"
        standing = self.people.at(np.ones(self.people.members.size, dtype=np.bool_),
                                  self.plan.method)  # fmt: skip
        scheme = self.plan.method.scheme_for(standing.facts)
        bound = f"no client moves the aggregate by more than {clip:g} x max w"
        if scheme.self_normalised and "greg" not in self.plan.method.name:
            return f"{bound} <= {clip:g}, since weights are shares"
        if isinstance(scheme, Greg):
            return f"{bound}, known when a round closes (fedipw-influence in its metrics)"
        inside = standing.units.enrolled
        if self.plan.method.distance is not None:
            factor = float(np.abs(enrollment_weights_of(scheme)[inside]).max())
        elif self.plan.method.uses_enrollment:
            prob = standing.units.enrollment_prob[inside]
            factor = 1.0 / (standing.facts.population * float(prob.min()))
        else:
            factor = 1.0 / standing.facts.enrolled
        return (
            f"{bound}; w = e / (participation probability) with e <= {factor:.4g}, so "
            f"{clip * factor:.4g} over that probability; each round's metrics hold its bound as "
            "fedipw-influence"
        )


def _check_sources(
    population: object, enrolled: object, targets: object, size: float | None, enrollment: str
) -> None:
    if (population is None) == (enrolled is None):
        raise InputError("Give population=, or enrolled= together with targets=.")
    if (enrolled is None) != (targets is None):
        raise InputError("enrolled= and targets= go together.")
    if population is not None and size is not None:
        raise InputError("population_size= goes with targets=: a population table has its own.")
    if targets is not None and enrollment != ".":
        raise InputError("enrollment= goes with population=: with targets= it is calibrated.")


def _asked(formula: str, covariates: Sequence[str] | None, table: Sequence[str]) -> tuple[str, ...]:
    """Return the columns clients must tell: those named that neither table nor history has."""
    known = {*table, *COLUMNS, *AVAILABILITY_COLUMNS}
    named = tuple(name for name in formula_names(formula) if name not in known)
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
