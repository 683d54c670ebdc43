"""What an audit must say beside its numbers: what was left out, and what cannot be known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from fedipw.audit.replay import LedgerFacts
from fedipw.audit.values import Audit
from fedipw.numerics.checks import some
from fedipw.selection.classifiers import ClassifierFit
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.selection.logistic import LogisticFit
from fedipw.selection.participation import Source
from fedipw.tables.formula import term_of
from fedipw.tables.targets import Targets
from fedipw.weighting.replay import Plan, Record, note_sentence, rate_sentence
from fedipw.weighting.weigher import EnrollmentState

LISTED: Final = 40  # columns without a total that are named
HIDDEN_DRIVERS: Final = (
    "Drivers of selection that are not observed: weights cannot correct for them. A sensitivity "
    "analysis estimates how strong they must be to change a conclusion."
)
NO_METRIC: Final = "What selection does to a metric: no updates or outcomes of replies were given."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """What remarks are made of."""

    stage: EnrollmentStage
    plan: Plan
    record: Record
    facts: LedgerFacts
    state: EnrollmentState
    audit: Audit  # without remarks
    weighted: bool  # whether the enrolled have weights
    hidden_coefficients: int
    soft: bool  # whether penalties were asked for

    @property
    def min_cell(self) -> int:
        """The fewest clients, or rows, that are shown."""
        return self.audit.settings.min_cell


def remarks(found: Gathered) -> tuple[str, ...]:
    """Return what was skipped, left out or replaced on the way, a sentence each."""
    kinds = (_of_enrollment, _of_classifiers, _of_rounds, _of_fits, _of_weights, _of_hiding)
    return tuple(dict.fromkeys(remark for kind in kinds for remark in kind(found)))


def _of_enrollment(found: Gathered) -> Iterator[str]:
    stage, inside = found.stage, int(found.state.enrolled_size)
    if stage.narrowed:
        yield stage.narrowed
    if stage.own is not None:
        yield (
            "Rows of the population count by their base weights. The check of the enrollment "
            "model (calibration, AUC) counts rows alike, and standard errors of its coefficients "
            "take base weights for numbers of independent clients."
        )
    if stage.members.changes:
        when = "of all enrolled at some time"
        if found.facts.present_in:
            when = f"as of round {found.facts.present_in}"
        yield (
            f"Clients join and leave: {stage.members.size} are enrolled at some time. The model "
            f"of enrollment, its overlap, its weights and the balance of the enrolled are {when} "
            f"({inside} clients); subgroups with nobody enrolled count all enrolled at some time."
        )
    if not found.facts.rounds and found.state.note and not _unfitted(found.state.note):
        yield _sentence(found.state.note)
    if found.record.enrollments > 1:
        yield f"Enrollment was fitted or calibrated {found.record.enrollments} times as it changed."
    if stage.coded is not None and found.state.model is None:
        yield "There is no model of enrollment."
    if found.weighted and not (
        found.plan.method.uses_enrollment or found.plan.method.calibration.balance
    ):
        yield (
            f"Weights of the enrolled are by the model of enrollment; {found.plan.method.name} "
            "makes no use of them."
        )


def _of_classifiers(found: Gathered) -> Iterator[str]:
    models = (found.state.model, *found.record.participation.values())
    names = [m.stage for m in models if m is not None and isinstance(m.fit, ClassifierFit)]
    if names:
        yield (
            f"Probabilities of {' and '.join(names)} are by a classifier: there are no "
            "coefficients to show."
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
    if not facts.rounds:
        return
    for name, count in facts.rates.items():
        if count:
            yield rate_sentence(name, count)
    for name, count in facts.untold.items():
        if count:
            yield (
                f"The calibration of the step {name!r} is without {_rounds(count)}: no probability "
                "was known before the close."
            )
    fits = [model.fit for model in found.record.participation.values()]
    if facts.past:
        shown = any(isinstance(fit, LogisticFit) for fit in fits)
        yield (
            "Probabilities of participation are those a round was given before it closed, so their "
            f"calibration is out of sample{'; coefficients are those of the last fit' * shown}."
        )
    elif plan.models is None and any(fit.cross_fitted for fit in fits):
        yield (
            "Participation is fitted on the rounds it is checked on, each client's probabilities "
            "by a fit without it: calibration is out of sample."
        )
    elif plan.models is None:
        yield "Participation is fitted on the rounds it is checked on: calibration is in sample."
    if plan.settings.last is not None:
        yield f"Participation is fitted on the last {_rounds(plan.settings.last)} before each."
    for note, count in found.record.notes.items():
        if not _unfitted(note):
            yield note_sentence(note, count)
    mended = [model.stage for model in found.record.participation.values() if model.note]
    penalised = found.record.sources[Source.PENALISED.value]
    if penalised and not mended and not found.soft:
        yield (
            f"In {_rounds(penalised)} the fit of participation has a penalty here, as under "
            "--soft; without --soft those rounds are weighed by a constant rate."
        )


def _of_weights(found: Gathered) -> Iterator[str]:
    if found.record.negative:
        yield f"{found.record.negative} weights of replies are negative."
    if found.record.trimmed:
        yield f"{found.record.trimmed} weights of replies were cut."
    below = int((found.facts.reply_weights < 0.0).sum())
    if below:
        clients = f"fewer than {found.min_cell}" if below < found.min_cell else f"{below}"
        yield f"The weights of {clients} clients sum to less than 0."


def _of_hiding(found: Gathered) -> Iterator[str]:
    audit, facts = found.audit, found.facts
    few = f"fewer than {found.min_cell} clients or rows"
    if audit.overlap is not None and audit.overlap.empty_small:
        yield f"{audit.overlap.empty_small} subgroups with nobody enrolled are not listed: {few}."
    if audit.overlap is not None and audit.overlap.empty_more:
        more = audit.overlap.empty_more
        yield f"{more} further subgroups with nobody enrolled are not listed."
    if audit.balance is not None and audit.balance.hidden:
        yield f"{audit.balance.hidden} levels of the balance are hidden: {few}."
    coefficients = found.hidden_coefficients
    if coefficients:
        yield f"{coefficients} coefficients are hidden: their levels have {few}, or no count."
    hidden = sum(part.hidden for part in audit.rates)
    if hidden:
        yield f"{hidden} levels of reply rates are hidden: {few}."
    gone = [*facts.skipped_columns, *(t.column for t in facts.tallies if t.overflowing)]
    if gone:
        yield f"There are no reply rates by {some(gone)}: too many columns or levels."


def unknowns(found: Gathered) -> tuple[str, ...]:
    """Return what cannot be known from what was given, a sentence each."""
    return (*_of_totals(found), *_of_missing_parts(found), HIDDEN_DRIVERS, NO_METRIC)


def _of_totals(found: Gathered) -> Iterator[str]:
    population = found.stage.population
    if found.stage.reference is not None:
        yield (
            "The overlap of enrollment, and subgroups with nobody enrolled: the population is "
            f"known by a reference sample of {len(found.stage.reference.weights)} rows, so its "
            "side of every balance has an error of its own."
        )
    if population.targets is None:
        return
    yield (
        "Enrollment probabilities, and whether a model of enrollment would fit: only the enrolled "
        "and totals of the population are known."
    )
    yield (
        "The overlap of enrollment: subgroups with nobody enrolled show only where "
        "they are among the targets."
    )
    yield from _of_untargeted(found, population.targets)
    yield (
        "Whether, within a level or at the same value of the targets, the enrolled differ from the "
        "others."
    )
    if population.size is None:
        yield "The size of the population: it was not given."


def _of_untargeted(found: Gathered, targets: Targets) -> Iterator[str]:
    """Yield which columns of the enrolled have no total to be compared with."""
    frame = found.stage.members.frame
    terms = [term_of(name, frame.schema) for name in targets.names]
    named = {factor.column for term in terms for factor in term.factors}
    columns = [name for name in found.stage.members.covariates if name not in named]
    if columns:
        rest = f" and {len(columns) - LISTED} more" if len(columns) > LISTED else ""
        yield (
            f"The population in columns that are not targets ({', '.join(columns[:LISTED])}{rest}):"
            " nothing says whether the enrolled differ there, and weights do not balance them."
        )
    else:
        yield "The population in columns that the table of the enrolled does not have."


def _of_missing_parts(found: Gathered) -> Iterator[str]:
    if found.stage.coded is not None and found.state.model is None:
        yield "Enrollment probabilities: no model of enrollment could be fitted."
    if not found.facts.rounds:
        yield (
            "Participation: who replies once enrolled, and with which weight. No ledger of rounds "
            "was given."
        )
    elif not any(np.isfinite(r.expected) for r in found.facts.rounds):
        yield "The fit of participation: no round was given a probability before it closed."


def _unfitted(note: str) -> bool:
    """Return whether a note tells of a fit that failed, with levels that may be too small."""
    return note.startswith("no enrollment probabilities")


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."
