"""An audit's numbers, gathered from tables, one replay of a ledger, and a metric of the replies."""

from __future__ import annotations

import math
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

import numpy as np
import polars as pl

from fedipw.audit.rates import clock_of, heat_parts
from fedipw.audit.remarks import NO_METRIC, Gathered, remarks, unknowns
from fedipw.audit.replay import LedgerFacts, round_lines
from fedipw.audit.suppression import (
    coefficients_but,
    nonzero_rows,
    small_terms,
    stage_part,
    weight_part,
)
from fedipw.audit.training import recorded_reliance
from fedipw.audit.values import (
    Audit,
    AuditSettings,
    EstimateLine,
    MetricPart,
    OverlapPart,
    PopulationSource,
    SilentGroup,
    Sizes,
    StagePart,
)
from fedipw.errors import InputError
from fedipw.evaluation.balance import (
    ENROLLED_WEIGHTED,
    POPULATION,
    RESPONDENTS,
    RESPONDENTS_WEIGHTED,
    BalanceTable,
    Moments,
    partition_moments,
    weighted_moments,
)
from fedipw.evaluation.diagnostics import CalibrationSums, calibration_sums
from fedipw.evaluation.estimators import EVERYONE, Estimate
from fedipw.evaluation.evaluate import EvaluationPlan, covariate_cells, evaluated
from fedipw.evaluation.logged import LoggedSample, MetricCollector, Metrics, check_method
from fedipw.numerics import BoolArray, FloatArray
from fedipw.numerics.checks import check_positive, some
from fedipw.selection.enrollment import (
    EnrollmentStage,
    ReferenceRows,
    member_columns,
    relabelled,
)
from fedipw.selection.overlap import THRESHOLD, Cell, Overlap, empty_cells, overlap
from fedipw.selection.participation import Window
from fedipw.selection.saved import (
    AVAILABILITY,
    PARTICIPATION,
    REPLY,
    BlockProb,
    block_prob,
)
from fedipw.tables.columns import AVAILABLE, ENROLLED
from fedipw.tables.design import Missing
from fedipw.tables.formula import term_of
from fedipw.tables.ledger import Ledger
from fedipw.tables.partitions import Block, sum_over
from fedipw.weighting.pipeline import Weighing
from fedipw.weighting.replay import Observer, Plan, Progress, Record
from fedipw.weighting.resume import SavedRun
from fedipw.weighting.spread import replay_of
from fedipw.weighting.weigher import EnrollmentState, StagedEnrollment

_Groups = Mapping[str, FloatArray | None]  # weights of the members in each, (n,); 0 outside
MIN_CELL = 10
MOST_EMPTY = 200  # cells with nobody enrolled that are listed
ODDS_RATIOS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
_PACKAGES = ("fedipw", "numpy", "polars")
_ROUNDING = 1e-12  # of the values, below which two means are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRequest:
    """A metric of the replies to tell of the population, and columns to group it by."""

    values: Metrics
    name: str = "metric"
    by: tuple[str, ...] = ()


def audit_facts(
    stage: EnrollmentStage,
    ledger: Ledger | None,
    plan: Plan,
    *,
    threshold: float = THRESHOLD,
    min_cell: int = MIN_CELL,
    title: str = "",
    metric: MetricRequest | None = None,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
    saved: SavedRun | None = None,
) -> Audit:
    """Return everything an audit says but its verdict.

    The ledger is read once, twice for the pooled fit, whatever the metric; where it has columns of
    its own, eight of its rounds are looked at beforehand, to cut their numbers into fifths. Beside
    sums and counts, one weight per reply and a few numbers per enrolled client are held in memory.

    Where clients join and leave, the model of enrollment, its overlap, its weights and the balance
    of the enrolled are as of the last round. Where a model has no maximum, such as where nobody of
    a subgroup is enrolled, it gets the penalty that ``soft`` would give it, whether that was asked
    for or not, and the audit says so: it reports what weights without it refuse.

    Parameters
    ----------
    stage, ledger, plan
        What is known of enrollment, closed rounds if there are any, and how to weigh them.
    threshold, min_cell
        A probability counted as small; subgroups with fewer clients, or rows, are merged or hidden,
        and counted.
    title, metric
        Of the page; of the replies, if there is one.
    observers, progress
        Receive the rounds too; receives rounds done and rounds in all.
    saved
        What an earlier audit has learnt of the first rounds: only those after them are read.

    Examples
    --------
    >>> from fedipw.selection.enrollment import enrollment_stage
    >>> from fedipw.tables.population import Population
    >>> from fedipw.weighting.methods import method_named
    >>> rng = np.random.default_rng(1)
    >>> age = rng.normal(40.0, 10.0, 500)
    >>> devices = Population.of({"unit_id": np.arange(500), "age": age,
    ...                          "enrolled": rng.random(500) < 0.01 * age})
    >>> audit = audit_facts(enrollment_stage(devices), None, Plan(method=method_named("fedipw")))
    >>> audit.sizes.enrolled, audit.stages[0].stage, audit.balance.groups
    (194, 'enrollment', ('enrolled', 'enrolled weighted'))
    """
    check_positive(min_cell, "min_cell")
    stage.require(plan.method.needs)
    if metric is not None:
        check_method(stage, plan.method)
        if plan.models is not None:
            raise InputError("A metric needs participation fitted on its rounds, not saved models.")
    asked = plan.settings.soft
    soft = replace(plan, settings=replace(plan.settings, soft=True))
    job = _Job(
        stage.softly(), ledger, threshold, min_cell, title, observers, progress, saved, asked
    )
    return job.audit(soft, metric).visible()


class _Job(NamedTuple):
    """What an audit is made of."""

    stage: EnrollmentStage
    ledger: Ledger | None
    threshold: float
    min_cell: int
    title: str
    observers: Sequence[Observer]
    progress: Progress | None
    saved: SavedRun | None
    soft: bool  # whether penalties were asked for

    def audit(self, plan: Plan, metric: MetricRequest | None) -> Audit:
        stage, ledger, min_cell = self.stage, self.ledger, self.min_cell
        facts, record, replay = _observer(stage, ledger, plan, min_cell), Record(), None
        collector = None
        if ledger is not None:
            watching = [facts, *self.observers]
            if metric is not None:
                collector = MetricCollector(stage, ledger, metric.values)
                watching.append(collector)
            replay = replay_of(
                stage, ledger, plan, observers=watching, progress=self.progress, saved=self.saved
            )
            record = replay.record
            replay.run()
        audit = self._gathered(plan, facts, record)
        if metric is None or collector is None or replay is None:
            return audit
        assert replay.learner is not None
        logged = collector.sample(plan.method, replay.learner)
        part = metric_part(
            logged, stage, plan.method.name, name=metric.name, plan=EvaluationPlan(by=metric.by),
            min_cell=min_cell,
        )  # fmt: skip
        return replace(
            audit,
            metric=part,
            notes=(*audit.notes, *_fresh(audit.notes, logged), *metric_notes(part, min_cell)),
            unknown=tuple(line for line in audit.unknown if line != NO_METRIC),
        )

    def _gathered(self, plan: Plan, facts: LedgerFacts, record: Record) -> Audit:
        stage, min_cell = self.stage, self.min_cell
        weighing = facts.weighing or _weighing(stage, plan, facts)
        weights, state = weighing.inverse_enrollment(), weighing.state
        own = np.ones(stage.members.size) if stage.own is None else stage.own
        groups = {
            ENROLLED: state.enrolled * own,
            RESPONDENTS: facts.reply_counts * own,
            ENROLLED_WEIGHTED: weights,
            RESPONDENTS_WEIGHTED: facts.reply_weights,
        }
        if stage.reference is not None:
            tables = _sample_facts(stage, stage.reference, groups, min_cell)
        elif stage.coded is None:
            tables = _totals_facts(stage, state.enrolled, groups, min_cell)
        else:
            tables = _population_facts(stage, state, groups, self.threshold, min_cell)
        asked = plan.formulas
        formulas = {AVAILABILITY: asked.availability, PARTICIPATION: asked.reply,
                    REPLY: asked.reply}  # fmt: skip
        steps, hidden = facts.stages(record.participation, formulas, min_cell)
        made = (
            weights is not None and weight_part("enrollment", weights[state.enrolled], min_cell),
            weight_part("replies", np.concatenate([np.empty(0), *facts.weights]), min_cell),
        )
        counted = facts.counted()
        audit = Audit(
            title=self.title,
            settings=self._settings(plan),
            sizes=_sizes(stage, facts),
            stages=(*([] if tables.stage is None else [tables.stage]), *steps),
            overlap=tables.overlap,
            balance=tables.balance,
            weights=tuple(part for part in made if part),
            rates=tuple(part for part in (t.part() for t in counted) if part.lines or part.hidden),
            silent=tuple(_in_population(stage, facts.silent())),
            heat=() if facts.clock is None else heat_parts(counted, facts.clock[0]),
            rounds=round_lines(facts.rounds, recorded_reliance(self.ledger)),
            made_with={**{n: version(n) for n in _PACKAGES}, "python": platform.python_version()},
        )
        gathered = Gathered(
            stage=stage, plan=plan, record=record, facts=facts, state=state, audit=audit,
            weighted=weights is not None, soft=self.soft,
            hidden_coefficients=tables.hidden_coefficients + hidden,
        )  # fmt: skip
        return replace(audit, unknown=unknowns(gathered), notes=remarks(gathered))

    def _settings(self, plan: Plan) -> AuditSettings:
        asked, participation, fit = plan.formulas, "", ""
        if self.ledger is not None:
            participation = asked.reply + (" with history" if asked.history else "")
            if AVAILABLE in self.ledger.schema and not plan.collapsed:
                participation = f"available: {asked.availability}; replied: {participation}"
            fit = plan.settings.rounds_fitted if plan.models is None else "saved"
        return AuditSettings(
            scheme=plan.method.name,
            enrollment=self.stage.formula,
            participation=participation,
            participation_fit=fit,
            missing=asked.missing.value,
            soft=self.soft,
            command=_command(self.stage, plan),
            threshold=self.threshold,
            min_cell=self.min_cell,
        )


def _fresh(notes: Sequence[str], logged: LoggedSample) -> list[str]:
    """Return what the metric's sample says beyond what was said."""
    return [line for line in logged.notes() if not any(line in note for note in notes)]


def _observer(
    stage: EnrollmentStage, ledger: Ledger | None, plan: Plan, min_cell: int
) -> LedgerFacts:
    if ledger is None:
        return LedgerFacts(stage.members)
    ledger.require_rounds()
    facts = LedgerFacts(
        stage.members,
        past=plan.settings.window is Window.PAST and plan.models is None,
        clock=clock_of(ledger, plan.settings.clock.day_length),
    )
    first = () if stage.coded is None else stage.coded.design.columns
    facts.count(ledger, min_cell, first, partial(covariate_cells, stage))
    return facts


def _weighing(stage: EnrollmentStage, plan: Plan, facts: LedgerFacts) -> Weighing:
    """Return enrollment of everybody, where no round was weighed."""
    present = facts.present if facts.present.any() else np.ones(stage.members.size, dtype=np.bool_)
    return plan.method.at(StagedEnrollment(stage, plan.method, examples=plan.examples).at(present))


def _command(stage: EnrollmentStage, plan: Plan) -> str:
    """Return the command that writes the weights, with files to fill in."""
    given = {
        PopulationSource.TABLE: "--population FILE",
        PopulationSource.SAMPLE: "--enrolled FILE --reference FILE --reference-weight COLUMN",
        PopulationSource.TOTALS: "--enrolled FILE --targets FILE",
    }[_source(stage)] + ("" if stage.population.base is None else " --base COLUMN")
    missing = plan.formulas.missing
    policy = "" if missing is Missing.ERROR else f" --missing {missing.value}"
    return (
        f"fedipw weights {given} --rounds DIR --scheme {shlex.quote(plan.method.name)}{policy} "
        "--out weights.parquet"
    )


def _in_population(stage: EnrollmentStage, groups: Sequence[SilentGroup]) -> Iterator[SilentGroup]:
    """Yield groups with their sizes in the population, where everybody is listed."""
    names = [name for name in stage.members.covariates if stage.coded is not None]
    cells = covariate_cells(stage, names) if groups and names else {}
    known: dict[str, int] = {}
    for column, cut in cells.items():
        assert stage.coded is not None
        if any(group.name.startswith(f"{column} ") for group in groups):
            table = stage.coded.table
            query = table.scan().group_by(cut.expression().alias("(cell)")).agg(pl.len())
            known |= {cut.named(str(k)): int(v) for k, v in table.collect(query).iter_rows()}
    for group in groups:
        yield replace(group, population=known.get(group.name))


def _source(stage: EnrollmentStage) -> PopulationSource:
    if stage.population.lists_everyone:
        return PopulationSource.TABLE
    return PopulationSource.TOTALS if stage.reference is None else PopulationSource.SAMPLE


def _sizes(stage: EnrollmentStage, facts: LedgerFacts) -> Sizes:
    """Return the counts of the tables as given, before anything is left out."""
    size = stage.population.size
    return Sizes(
        population=None if size is None else float(size),
        population_table=stage.population.lists_everyone,
        population_source=_source(stage),
        population_known=None if stage.size is None else float(stage.size),
        enrolled=stage.members.size,
        rounds=len(facts.rounds),
        rows=sum(one.rows for one in facts.rounds),
        replies=sum(one.replies for one in facts.rounds),
        clients_replied=int((facts.reply_counts > 0).sum()),
    )


def _moments(groups: _Groups, columns: FloatArray, known: BoolArray) -> dict[str, Moments]:
    """Return the moments of the groups with anybody; ``columns`` are of the known, (q, m)."""
    inside = {name: w[known] for name, w in groups.items() if w is not None}
    return {
        name: weighted_moments(columns, w, signed=True) for name, w in inside.items() if w.sum() > 0
    }


class _TableFacts(NamedTuple):
    """The parts of an audit that a table of clients gives."""

    stage: StagePart | None = None
    overlap: OverlapPart | None = None
    balance: BalanceTable | None = None
    hidden_coefficients: int = 0


def _population_facts(
    stage: EnrollmentStage, state: EnrollmentState, groups: _Groups, threshold: float, min_cell: int
) -> _TableFacts:
    """Return what a population table says, with enrollment as it is in ``state``."""
    coded = stage.coded
    assert coded is not None
    design = coded.design
    counts = nonzero_rows(coded.partitions, coded.frame)
    small = small_terms(
        design.terms, counts, coded.rows, min_cell=min_cell, kinds=design.kinds,
        levels=design.levels,
    )  # fmt: skip
    columns, known = member_columns(coded, stage.members)
    whole = partition_moments(coded.partitions, coded.frame)
    table = BalanceTable.of(
        design.names, whole, _moments(groups, columns, known), levels=design.levels
    )
    fitted: StagePart | None = None
    found: Overlap | None = None
    hidden = 0
    model = state.model
    if model is None:
        cells = empty_cells(coded.table, design.columns)
    else:
        rows = relabelled(coded, state.enrolled, known)
        shown = coefficients_but(model, small)
        hidden = shown.hidden
        sums = sum_over(rows, partial(_block_sums, prob=block_prob(model.fit, coded.frame)))
        fitted = stage_part(
            model.stage, model.design.formula, sums, (POPULATION, ENROLLED), shown, coded.left_out,
            min_cell,
        )  # fmt: skip
        found = overlap(coded, model, threshold=threshold, partitions=rows)
        cells = found.empty_cells
    large = tuple(cell for cell in cells if cell.population >= min_cell)
    return _TableFacts(
        stage=fitted,
        overlap=_overlap_part(found, threshold, large, len(cells) - len(large)),
        balance=table.without(small),
        hidden_coefficients=hidden,
    )


def _overlap_part(
    found: Overlap | None, threshold: float, empty: tuple[Cell, ...], small: int
) -> OverlapPart:
    """Return the overlap; without a model only the cells with nobody enrolled are known."""
    known = ("share_below", "estimated_size", "effective_sample_size")
    return OverlapPart(
        threshold=threshold,
        smallest_prob=None if found is None else found.smallest[0],
        below=None if found is None else round(found.below),
        empty=empty[:MOST_EMPTY],
        empty_small=small,
        empty_more=max(0, len(empty) - MOST_EMPTY),
        **{name: getattr(found, name, None) for name in known},
    )


def _block_sums(block: Block, prob: BlockProb) -> CalibrationSums:
    # rows count alike here, whatever their base weights: few of them must stay hidden
    return calibration_sums(prob(block), block.labels.astype(np.float64), np.ones(block.rows))


def _totals_facts(
    stage: EnrollmentStage, enrolled: BoolArray, groups: _Groups, min_cell: int
) -> _TableFacts:
    """Return what population totals say: the balance of the columns they are about."""
    frame, targets = stage.members.frame, stage.population.targets
    if targets is None:
        return _TableFacts()
    matrix = stage.balance("main", enrolled).matrix
    terms = [term_of(name, frame.schema) for name in targets.names]
    inside = matrix[enrolled]
    small = small_terms(
        terms,
        (inside != 0.0).sum(axis=0),
        len(inside),
        min_cell=min_cell,
        kinds={name: "flag" for name, kind in frame.schema.items() if kind == pl.Boolean},
    )
    everyone = np.ones(len(matrix), dtype=np.bool_)
    found = _moments(groups, matrix.T, everyone)
    weights = groups[ENROLLED_WEIGHTED]
    scaled = weights is not None and bool((weights >= 0.0).all())
    table = BalanceTable.of_targets(
        targets, found, scale_group=ENROLLED_WEIGHTED if scaled else ENROLLED
    )
    return _TableFacts(balance=table.without(small))


def _sample_facts(
    stage: EnrollmentStage, reference: ReferenceRows, groups: _Groups, min_cell: int
) -> _TableFacts:
    """Return what a reference sample says: the balance of the columns of the enrollment model."""
    design = reference.design
    counts = (reference.columns != 0.0).sum(axis=0)
    small = small_terms(
        design.terms, counts, len(reference.columns), min_cell=min_cell, kinds=design.kinds,
        levels=design.levels,
    )  # fmt: skip
    rows = design.rows(stage.members.frame, "enrolled clients")
    whole = weighted_moments(np.ascontiguousarray(reference.columns.T), reference.weights)
    found = _moments(groups, rows.columns, rows.known)
    table = BalanceTable.of(design.names, whole, found, levels=design.levels)
    return _TableFacts(balance=table.without(small))


def metric_part(
    logged: LoggedSample,
    stage: EnrollmentStage,
    method: str,
    *,
    name: str,
    plan: EvaluationPlan,
    min_cell: int,
) -> MetricPart:
    """Return a metric on the population, its groups, and how far unobserved drivers could go.

    Groups with fewer than ``min_cell`` clients that replied are left out and counted.
    """
    mean = float(logged.values.mean())
    asked = replace(plan, odds_ratios=ODDS_RATIOS, conclusion=mean)
    found = evaluated(logged, stage, method, asked)
    same = abs(found.moved.difference) <= _ROUNDING * float(np.abs(logged.values).max())
    small = {e.group for e in found.estimates if e.clients < min_cell and e.group != EVERYONE}
    lines = tuple(_line(e) for e in found.estimates if e.group not in small)
    return MetricPart(
        name=name,
        rounds=found.rounds,
        confidence=plan.confidence,
        estimates=lines,
        sensitivity=found.sensitivity,
        plain_odds_ratio=_known(found.reverses_at),
        moved=_known(0.0 if same else found.moved.difference),
        moved_error=_known(found.moved.se),
        hidden=len(small),
        gain=_known(found.moved.gain),
        sensitivity_reason=found.sensitivity_reason,
        dependence=found.dependence,
    )


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _line(line: Estimate) -> EstimateLine:
    return EstimateLine(
        group=line.group,
        estimator=line.estimator,
        estimate=_known(line.estimate),
        standard_error=_known(line.se),
        low=_known(line.low),
        high=_known(line.high),
        effective_sample_size=_known(line.effective_sample_size),
        clients=line.clients,
        replies=line.replies,
        reason=line.reason,
        interval=line.interval,
        warning=line.warning,
    )


def metric_notes(part: MetricPart, min_cell: int) -> tuple[str, ...]:
    """Return what people should know of a metric's part."""
    out = []
    if part.hidden:
        out.append(f"{part.hidden} group(s) of the metric have fewer than {min_cell} clients.")
    if part.sensitivity_reason:
        out.append(f"No sensitivity analysis: {part.sensitivity_reason}.")
    reasons = dict.fromkeys(e.reason for e in part.estimates if e.reason)
    for reason in reasons:
        who = [f"{e.estimator} of {e.group}" for e in part.estimates if e.reason == reason]
        out.append(f"{some(who)}: {reason}.")
    return tuple(out)
