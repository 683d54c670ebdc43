"""What an audit must say beside its numbers: what was left out, and what cannot be known."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from fedipw.audit.parts import RatePart
from fedipw.errors import SeparationError
from fedipw.numerics.checks import some
from fedipw.weighting.people import KnownPopulation, KnownTotals

if TYPE_CHECKING:
    from fedipw.audit.ledgerfacts import LedgerFacts
    from fedipw.audit.tablefacts import TableFacts
    from fedipw.weighting.logrun import LogPlan, LogRecord
    from fedipw.weighting.standing import Standing

HIDDEN_DRIVERS: Final = (
    "Drivers of selection that stand in no column: weights cannot correct for them. A sensitivity "
    "analysis says how strong they must be to change a conclusion."
)
METRIC_UNUSED: Final = (
    "What selection does to the metric: it was given, and could not be weighted (see the notes)."
)
NO_METRIC: Final = "What selection does to a metric: no updates or outcomes of replies were given."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """What remarks are made of."""

    people: KnownPopulation | KnownTotals
    plan: LogPlan
    record: LogRecord
    facts: LedgerFacts | None
    standing: Standing
    tables: TableFacts
    weighted: bool  # whether the enrolled have weights
    rates: tuple[RatePart, ...]
    hidden_coefficients: int  # of participation
    min_cell: int


def remarks(found: Gathered) -> tuple[str, ...]:
    """Return what was skipped, left out or replaced on the way, a sentence each."""
    made = [*_of_enrollment(found), *_of_rounds(found), *_of_fits(found), *_of_weights(found)]
    return tuple(dict.fromkeys([*made, *_of_hiding(found)]))


def _of_enrollment(found: Gathered) -> Iterator[str]:
    people, inside = found.people, int(found.standing.units.enrolled.sum())
    if isinstance(people, KnownPopulation) and people.coded.left_out:
        yield (
            f"{people.coded.left_out} clients of the population table are left out of enrollment "
            "and balance: a value is missing or a level unknown."
        )
    if people.members.changes:
        when = "of everybody enrolled at some time"
        if found.facts is not None and found.facts.present_in:
            when = f"as of round {found.facts.present_in}"
        yield (
            f"Clients join and leave: {people.members.size} are enrolled at some time. The model "
            f"of enrollment, its reach, its weights and the balance of the enrolled are {when} "
            f"({inside} clients); parts with nobody enrolled count everybody enrolled at some time."
        )
    if found.facts is None and found.standing.note and not _unfitted(found.standing.note):
        yield _sentence(found.standing.note)
    if found.record.standings > 1:
        yield f"Enrollment was fitted or calibrated {found.record.standings} times as it changed."
    if isinstance(people, KnownPopulation) and found.standing.model is None:
        yield "There is no model of enrollment."
    if found.weighted and not (found.plan.method.uses_enrollment or found.plan.method.balanced):
        yield (
            f"Weights of the enrolled are by the model of enrollment; {found.plan.method.name} "
            "makes no use of them."
        )


def _of_rounds(found: Gathered) -> Iterator[str]:
    record = found.record
    for reason, count in Counter(record.skipped.values()).items():
        yield f"{_rounds(count)} could not be weighed: {reason}."
    if record.rows_left_out:
        yield (
            f"{record.rows_left_out} rows of the ledger were left out of the fits of "
            "participation: a value is missing or a level unknown."
        )
    if record.left_out:
        yield (
            f"{record.left_out} of {record.replies} replies have no weight: a value is missing or "
            "a level unknown."
        )


def _of_fits(found: Gathered) -> Iterator[str]:
    facts, plan = found.facts, found.plan
    if facts is None:
        return
    for name, count in facts.rates.items():
        yield f"The step {name!r} was given a constant rate, not a model, in {_rounds(count)}."
    for name, count in facts.untold.items():
        if count:
            yield (
                f"The calibration of the step {name!r} is without {_rounds(count)}: no probability "
                "was known before the close."
            )
    if facts.past:
        yield (
            "Probabilities of participation are those a round was given before it closed, so their "
            "calibration is out of sample; coefficients are those of the last fit."
        )
    elif plan.models is None:
        yield "Participation is fitted on the rounds it is checked on: calibration is in sample."
    if plan.settings.last is not None:
        yield f"Participation is fitted on the last {_rounds(plan.settings.last)} before each."
    for note, count in found.record.notes.items():
        if not _unfitted(note):
            yield f"{count} time(s): {_sentence(note)}"


def _of_weights(found: Gathered) -> Iterator[str]:
    if found.record.negative:
        yield f"{found.record.negative} weights of replies are negative."
    if found.record.trimmed:
        yield f"{found.record.trimmed} weights of replies were cut."
    if found.facts is not None:
        below = int((found.facts.reply_weights < 0.0).sum())
        if 0 < below < found.min_cell:
            yield f"The weights of fewer than {found.min_cell} clients sum to less than 0."
        elif below:
            yield f"The weights of {below} clients sum to less than 0."


def _of_hiding(found: Gathered) -> Iterator[str]:
    tables, facts = found.tables, found.facts
    few = f"fewer than {found.min_cell} clients or rows"
    if tables.overlap is not None and tables.overlap.empty_small:
        yield f"{tables.overlap.empty_small} parts with nobody enrolled are not listed: {few}."
    if tables.unlisted:
        yield f"{tables.unlisted} further parts with nobody enrolled are not listed."
    if tables.balance is not None and tables.balance.hidden:
        yield f"{tables.balance.hidden} levels of the balance are hidden: {few}."
    coefficients = tables.hidden_coefficients + found.hidden_coefficients
    if coefficients:
        yield f"{coefficients} coefficients are hidden: their levels have {few}, or no count."
    hidden = sum(part.hidden for part in found.rates)
    if hidden:
        yield f"{hidden} levels of reply rates are hidden: {few}, or beyond the 20 largest."
    if facts is not None:
        gone = [*facts.skipped_columns, *(t.column for t in facts.tallies if t.overflowing)]
        if gone:
            yield f"There are no reply rates by {some(gone)}: too many columns or levels."


def unknowns(found: Gathered) -> tuple[str, ...]:
    """Return what cannot be known from what was given, a sentence each."""
    return (*_of_totals(found), *_of_missing_parts(found), HIDDEN_DRIVERS, NO_METRIC)


def _of_totals(found: Gathered) -> Iterator[str]:
    people = found.people
    if isinstance(people, KnownPopulation):
        return
    yield (
        "Enrollment probabilities, and whether a model of enrollment would fit: only the enrolled "
        "and totals of the population are known."
    )
    yield (
        "How far enrollment reaches: parts of the population with nobody enrolled show only where "
        "they are among the targets."
    )
    yield (
        f"The population in columns that are not among the targets ({some(people.targets.names)})."
    )
    yield (
        "Whether, within a level or at the same value of the targets, the enrolled differ from the "
        "others."
    )
    if people.population_size is None:
        yield "The size of the population: it was not given."


def _of_missing_parts(found: Gathered) -> Iterator[str]:
    if isinstance(found.people, KnownPopulation) and found.standing.model is None:
        yield "Enrollment probabilities: no model of enrollment could be fitted."
    if found.facts is None:
        yield (
            "Participation: who replies once enrolled, and with which weight. No ledger of rounds "
            "was given."
        )
        return
    none = not any(np.isfinite(r.expected) for r in found.facts.rounds)
    if none:
        yield "The fit of participation: no round was given a probability before it closed."


def _unfitted(note: str) -> bool:
    """Return whether a note tells of a fit that failed, with levels that may be too small."""
    return note.startswith("no enrollment probabilities")


def parted(error: SeparationError) -> str:
    """Return what has no model and by which columns; their levels may be too small to name.

    >>> parted(SeparationError(("os[web]", "os[web]:net[3g]", "age"), 90))
    'the selected and the others are parted exactly by os, os:net, age'
    """
    names = dict.fromkeys(re.sub(r"\[.*?\](?=:|$)", "", name) for name in error.columns)
    return f"the selected and the others are parted exactly by {some(names)}"


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."
