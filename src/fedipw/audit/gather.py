"""An audit's numbers, gathered from tables and one replay of a ledger."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedipw.audit.cells import weight_part
from fedipw.audit.ledgerfacts import LedgerFacts
from fedipw.audit.parts import (
    Audit,
    AuditSettings,
    HeatPart,
    RatePart,
    Sizes,
    StagePart,
    WeightPart,
)
from fedipw.audit.remarks import Gathered, parted, remarks, unknowns
from fedipw.audit.roundlines import round_lines
from fedipw.audit.tablefacts import (
    Groups,
    TableFacts,
    enrollment_weights,
    population_facts,
    totals_facts,
)
from fedipw.audit.tallies import heat_parts
from fedipw.errors import SeparationError
from fedipw.numerics.checks import check_positive
from fedipw.selection.overlap import THRESHOLD
from fedipw.selection.stage import AVAILABILITY, PARTICIPATION, REPLY
from fedipw.tables.ledger import AVAILABLE, Ledger
from fedipw.weighting.logrun import LogPlan, LogRecord, Progress, logged_weights
from fedipw.weighting.people import KnownPopulation, KnownTotals
from fedipw.weighting.registry import SourceKind, method_named

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray
    from fedipw.weighting.schemes import Scheme
    from fedipw.weighting.standing import Standing

MIN_CELL = 10
PARTICIPATION_ONLY = "participation-only"
_PACKAGES = ("fedipw", "numpy", "polars")


def audit_facts(
    people: KnownPopulation | KnownTotals,
    ledger: Ledger | None,
    plan: LogPlan,
    *,
    threshold: float = THRESHOLD,
    min_cell: int = MIN_CELL,
    title: str = "",
    progress: Progress | None = None,
    record: LogRecord | None = None,
) -> Audit:
    """Return everything an audit says but a metric and a verdict.

    The ledger is replayed once, twice for the pooled fit; beside sums and counts, one weight per
    reply and a few numbers per enrolled client are held in memory. Where clients join and leave,
    the model of enrollment, its reach, its weights and the balance of the enrolled are as of the
    last round. Where a part of the population has nobody enrolled, enrollment may have no model:
    the audit then says so, names the part, and weighs for participation alone.

    Parameters
    ----------
    people
        A population table, or enrolled clients and totals.
    ledger
        Closed rounds, if there are any.
    plan
        Method, formulas and how to fit.
    threshold
        A probability counted as small.
    min_cell
        Parts with fewer clients, or rows, are merged or hidden, and counted.
    title
        Of the page.
    progress
        Told of rounds done and rounds in all.
    record
        Filled with what happened on the way.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import polars as pl
    >>> from fedipw.tables import TableFile
    >>> from fedipw.weighting import method_named
    >>> path, rng = Path(tempfile.mkdtemp()) / "people.parquet", np.random.default_rng(1)
    >>> age = rng.normal(40.0, 10.0, 500)
    >>> pl.DataFrame({"unit_id": range(500), "age": age,
    ...               "enrolled": rng.random(500) < 0.01 * age}).write_parquet(path)
    >>> people = KnownPopulation.of(TableFile(path))
    >>> audit = audit_facts(people, None, LogPlan(method=method_named("fedipw")))
    >>> audit.sizes.enrolled, audit.stages[0].stage, audit.balance.groups
    (194, 'enrollment', ('enrolled', 'enrolled weighted'))
    """
    check_positive(min_cell, "min_cell")
    people.require(plan.method)
    asked = _Asked(threshold, min_cell, title, progress)
    try:
        return _facts(people, ledger, plan, asked, LogRecord() if record is None else record)
    except SeparationError as error:
        if not (isinstance(people, KnownPopulation) and plan.method.uses_enrollment):
            raise
        fewer = replace(plan, method=method_named(PARTICIPATION_ONLY))
        found = _facts(people, ledger, fewer, asked, LogRecord() if record is None else record)
        note = (
            f"Enrollment has no model: {parted(error)}. Weights here are {PARTICIPATION_ONLY}: "
            "they make the replies stand for the enrolled, not for the population."
        )
        return replace(found, notes=(note, *found.notes))


class _Asked(NamedTuple):
    threshold: float
    min_cell: int
    title: str
    progress: Progress | None


def _facts(
    people: KnownPopulation | KnownTotals,
    ledger: Ledger | None,
    plan: LogPlan,
    asked: _Asked,
    record: LogRecord,
) -> Audit:
    threshold, min_cell, title, progress = asked
    facts = None
    if ledger is not None:
        facts = _replayed(people, ledger, plan, record, min_cell=min_cell, progress=progress)
    standing, scheme = _standing(people, plan, facts)
    weights = enrollment_weights(standing, scheme)
    groups = _groups(standing, weights, facts)
    tables = _tables(people, standing, groups, threshold, min_cell)
    steps, hidden = _steps(facts, plan, record, min_cell)
    rates, heat = _rates(facts)
    gathered = Gathered(
        people=people, plan=plan, record=record, facts=facts, standing=standing, tables=tables,
        weighted=weights is not None, rates=rates, hidden_coefficients=hidden, min_cell=min_cell,
    )  # fmt: skip
    return Audit(
        title=title,
        settings=_settings(people, ledger, plan, threshold, min_cell),
        sizes=_sizes(people, facts),
        stages=(*([] if tables.stage is None else [tables.stage]), *steps),
        overlap=tables.overlap,
        balance=tables.balance,
        weights=_weights(weights, groups, facts, min_cell),
        rates=rates,
        heat=heat,
        rounds=() if facts is None else round_lines(facts.rounds),
        unknown=unknowns(gathered),
        notes=remarks(gathered),
        made_with={**{n: version(n) for n in _PACKAGES}, "python": platform.python_version()},
    )


def _replayed(
    people: KnownPopulation | KnownTotals,
    ledger: Ledger,
    plan: LogPlan,
    record: LogRecord,
    *,
    min_cell: int,
    progress: Progress | None,
) -> LedgerFacts:
    """Return what a replay of the ledger told."""
    ledger.require_rounds()
    columns = people.coded.design.columns if isinstance(people, KnownPopulation) else ()
    facts = LedgerFacts.of(
        people.members, ledger, plan, min_cell, first=columns,
        collapsed=plan.method.source is SourceKind.COLLAPSED,
    )  # fmt: skip
    for _ in logged_weights(people, ledger, plan, record, progress, watch=facts):
        pass
    return facts


def _standing(
    people: KnownPopulation | KnownTotals, plan: LogPlan, facts: LedgerFacts | None
) -> tuple[Standing, Scheme]:
    """Return enrollment as it stood in the last round, or of everybody without rounds."""
    if facts is not None and facts.standing is not None and not facts.collapsed:
        assert facts.scheme is not None
        return facts.standing, facts.scheme
    present = np.ones(people.members.size, dtype=np.bool_)
    if facts is not None and facts.present.any():
        present = facts.present
    standing = people.at(present, plan.method)
    return standing, plan.method.scheme_for(standing.facts)


def _groups(standing: Standing, weights: FloatArray | None, facts: LedgerFacts | None) -> Groups:
    return Groups(
        enrolled=standing.units.enrolled,
        enrollment_weights=weights,
        reply_counts=None if facts is None else facts.reply_counts.astype(np.float64),
        reply_weights=None if facts is None else facts.reply_weights,
    )


def _tables(
    people: KnownPopulation | KnownTotals,
    standing: Standing,
    groups: Groups,
    threshold: float,
    min_cell: int,
) -> TableFacts:
    if isinstance(people, KnownTotals):
        return totals_facts(people, groups, min_cell=min_cell)
    return population_facts(people, standing.model, groups, threshold=threshold, min_cell=min_cell)


def _steps(
    facts: LedgerFacts | None, plan: LogPlan, record: LogRecord, min_cell: int
) -> tuple[tuple[StagePart, ...], int]:
    if facts is None:
        return (), 0
    asked = plan.formulas
    formulas = {AVAILABILITY: asked.availability, PARTICIPATION: asked.reply, REPLY: asked.reply}
    return facts.stages(record.participation, formulas, min_cell)


def _settings(
    people: KnownPopulation | KnownTotals,
    ledger: Ledger | None,
    plan: LogPlan,
    threshold: float,
    min_cell: int,
) -> AuditSettings:
    enrollment = (
        people.coded.design.formula
        if isinstance(people, KnownPopulation)
        else ", ".join(people.targets.names)
    )
    participation, fit = "", ""
    if ledger is not None:
        asked = plan.formulas
        participation = asked.reply + (" with history" if asked.history else "")
        if AVAILABLE in ledger.schema and plan.method.source is not SourceKind.COLLAPSED:
            participation = f"available: {asked.availability}; replied: {participation}"
        fit = plan.settings.window.value if plan.models is None else "saved"
    return AuditSettings(
        scheme=plan.method.name,
        enrollment=enrollment,
        participation=participation,
        participation_fit=fit,
        threshold=threshold,
        min_cell=min_cell,
    )


def _sizes(people: KnownPopulation | KnownTotals, facts: LedgerFacts | None) -> Sizes:
    """Return the counts of the tables as given, before anything is left out."""
    if isinstance(people, KnownPopulation):
        size: float | None = people.coded.table.rows
    else:
        size = people.population_size
    rounds = [] if facts is None else facts.rounds
    return Sizes(
        population=None if size is None else float(size),
        population_table=isinstance(people, KnownPopulation),
        enrolled=people.members.size,
        rounds=len(rounds),
        rows=sum(one.rows for one in rounds),
        replies=sum(one.replies for one in rounds),
        clients_replied=0 if facts is None else int((facts.reply_counts > 0).sum()),
    )


def _weights(
    enrollment: FloatArray | None, groups: Groups, facts: LedgerFacts | None, min_cell: int
) -> tuple[WeightPart, ...]:
    parts = []
    if enrollment is not None:
        parts.append(weight_part("enrollment", enrollment[groups.enrolled], min_cell))
    if facts is not None:
        parts.append(weight_part("replies", facts.all_weights(), min_cell))
    return tuple(part for part in parts if part is not None)


def _rates(facts: LedgerFacts | None) -> tuple[tuple[RatePart, ...], tuple[HeatPart, ...]]:
    if facts is None:
        return (), ()
    rates = tuple(part for part in (t.part() for t in facts.counted()) if part.lines or part.hidden)
    return rates, () if facts.clock is None else heat_parts(facts.counted(), facts.clock[0])
