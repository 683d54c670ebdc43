"""A metric on the target population, from files: everyone, subgroups, rounds, sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.evaluation.dependence import Dependence, reply_dependence
from fedipw.evaluation.estimators import (
    MEAN,
    Estimate,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    MeanEstimator,
    Moved,
    jackknife_means,
    moved_by_weights,
    plain_means,
    population_means,
)
from fedipw.evaluation.intervals import Automatic, Interval, StudentT
from fedipw.evaluation.logged import LoggedSample
from fedipw.evaluation.prediction import powered_mean
from fedipw.evaluation.quantiles import Means, population_quantiles
from fedipw.evaluation.replicates import ReplicateWeights, replicate_weights
from fedipw.evaluation.sensitivity import odds_ratio_at, sensitivity_bounds, sensitivity_errors
from fedipw.evaluation.statistics import Contrast, Difference, Ratio, Total, contrasts
from fedipw.numerics.checks import some
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.tables.cells import Cells, table_cells
from fedipw.tables.columns import ROUND
from fedipw.tables.formula import level_text, term_of
from fedipw.tables.table import pandas_frame

GROUPS_MAX = 200  # of one column
_CELL = "(cell)"
_CERTAIN = 1e-6  # of 1, within which a calibrated weight is 1 but for rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Bounds of Hájek's mean if unobserved drivers move the odds of selection."""

    odds_ratio: float
    low: float  # of enrollment alone
    high: float
    weight_error: float  # largest centred error of the enrollment weights at this odds ratio
    both_low: float | None = None  # of enrollment and of every reply
    both_high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A metric on the target population."""

    method: str
    rounds: int
    population_size: float | None
    estimates: tuple[Estimate, ...]  # plain, horvitz-thompson, hajek, greg of each group; others
    moved: Moved  # what weighting did to the mean of everyone
    sensitivity: tuple[Sensitivity, ...]
    sensitivity_reason: str  # why there is none
    reverses_at: float | None  # odds ratio at which the bounds reach the value asked about
    notes: tuple[str, ...]
    replicates: ReplicateWeights | None = None
    dependence: Dependence | None = None  # of replies on the metric, where it can be seen (E64)

    def of(self, estimator: str, group: str = "everyone", statistic: str = MEAN) -> Estimate:
        """Return one estimate by name."""
        for line in self.estimates:
            if (line.estimator, line.group, line.statistic) == (estimator, group, statistic):
                return line
        kind = estimator if statistic == MEAN else f"{estimator} {statistic}"
        raise InputError(f"There is no {kind} estimate of {group}.")

    def table(self) -> pl.DataFrame:
        """Return one row per estimate."""
        names = ["group", "statistic", "estimator", "estimate", "se", "low", "high", "confidence",
                 "effective_sample_size", "clients", "replies", "se_superpopulation", "freedom",
                 "reason", "interval", "warning", "clusters"]  # fmt: skip
        rows = [tuple(getattr(line, name) for name in names) for line in self.estimates]
        made = pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)
        floats = pl.col("estimate", "se", "low", "high", "se_superpopulation", "freedom")
        return made.with_columns(floats.cast(pl.Float64).fill_nan(None))

    to_polars = table

    def to_pandas(self) -> Any:
        """Return one row per estimate as a pandas frame; needs pandas."""
        return pandas_frame(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def plot(self, name: str = "metric") -> Any:
        """Return a matplotlib ``Figure`` of the means and intervals, by group and estimator."""
        from fedipw.figures import estimates_figure  # noqa: PLC0415

        return estimates_figure(self.table(), name=name)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; an odds ratio that is infinite, none that reaches it, is null."""
        at = None if self.reverses_at == np.inf else self.reverses_at
        return {
            "method": self.method,
            "rounds": self.rounds,
            "population_size": self.population_size,
            "estimates": self.table().to_dicts(),
            "moved": {"difference": self.moved.difference, "se": self.moved.se},
            "sensitivity": [asdict(s) | {"reverses_at": at} for s in self.sensitivity],
            "sensitivity_reason": self.sensitivity_reason,
            "notes": list(self.notes),
            "dependence": None if self.dependence is None else asdict(self.dependence),
            "replicates": None if self.replicates is None else self.replicates.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What to estimate and how."""

    by: Sequence[str] = ()
    confidence: float = 0.95
    odds_ratios: Sequence[float] = ()
    conclusion: float | None = None  # the value at which a conclusion would change
    jackknife: int = 0  # groups; 0 is the linearised variance
    by_samples: bool = False  # the mean over samples in place of clients
    quantiles: Sequence[float] = ()  # shares of the population at or below them
    totals: bool = False  # of everyone and of subgroups of known size
    difference: Sequence[str] = ()  # of subgroups: rest, pairs, or the one to compare with
    replicates: int = 0  # replicate weights to make
    predict: Any = None  # regression of the metric on Z, by name or itself; none without
    seed: int = 0  # of the groups of a jackknife, of replicate weights and of folds
    interval: Interval = field(default_factory=Automatic)  # of all but quantiles


def evaluated(
    logged: LoggedSample, stage: EnrollmentStage, method: str, plan: EvaluationPlan | None = None
) -> Evaluation:
    """Return a metric's mean over the population, by every estimator there is.

    Parameters
    ----------
    logged
        Replies with values (:func:`~fedipw.evaluation.logged.logged_two_phase`).
    stage
        What is known of enrollment behind them.
    method
        Name of the method of the enrollment weights, for the record.
    plan
        Groups, confidence, odds ratios of the sensitivity analysis, variance.
    """
    plan = EvaluationPlan() if plan is None else plan
    sample, values, estimators = logged.sample, logged.values, _estimators(logged, plan)
    everyone = Group(size=logged.population_size)
    columns = {
        name: _rounds(logged) if name == ROUND else column_groups(logged, stage, name)
        for name in dict.fromkeys(plan.by)
    }
    groups = [everyone, *(group for found in columns.values() for group in found)]
    pairs = contrasts(columns, plan.difference, everyone)
    notes = logged.notes()
    if plan.predict is not None:
        cells = covariate_cells(stage, [name for name in columns if name != ROUND])
        powered = powered_mean(logged, stage, plan.predict, groups, cells=cells, seed=plan.seed)
        estimators, notes = [*estimators, powered.mean], (*notes, *powered.notes)
    counts = logged.counts if plan.by_samples else None
    level, kind = plan.confidence, plan.interval
    lines = list(plain_means(sample, values, groups, level, counts, interval=kind))
    means = _means(plan, kind)
    lines += means(sample, values, [*estimators, *_totals(estimators, groups, plan)], groups)
    if plan.quantiles:
        lines += population_quantiles(
            sample, values, plan.quantiles, groups, counts=counts, means=_means(plan, StudentT())
        )
    if pairs:
        lines += means(sample, values, *_differences(estimators, pairs))
    order = {group.name: k for k, group in enumerate(groups)}
    lines.sort(key=lambda line: order.get(line.group, len(order)))
    bounds, reason, reverses_at = _sensitivity(logged, plan)
    dependence = reply_dependence(sample, values)
    if dependence is not None and dependence.matters:
        notes = (*notes, depends(dependence))
    return Evaluation(
        method=method,
        rounds=sample.rounds,
        population_size=logged.population_size,
        estimates=tuple(lines),
        moved=moved_by_weights(sample, values, counts),
        sensitivity=bounds,
        sensitivity_reason=reason,
        reverses_at=reverses_at,
        notes=notes,
        replicates=replicate_weights(logged, stage, plan.replicates, plan.seed)
        if plan.replicates
        else None,
        dependence=dependence,
    )


def depends(found: Dependence) -> str:
    """Return the warning that replies depend on the metric itself."""
    return (
        f"Warning: replies depend on the metric itself, {found.words}, among clients with the same "
        "fitted probability. No weight made of covariates corrects that, and intervals leave it "
        "out: take the estimate as one of respondents, or bound it by a sensitivity analysis "
        "of both stages."
    )


def _means(plan: EvaluationPlan, kind: Interval) -> Means:
    """Return what gives estimates with their errors: linearised, or by a jackknife."""
    if not plan.jackknife:
        return partial(population_means, confidence=plan.confidence, interval=kind)

    def made(*given: Any) -> tuple[Estimate, ...]:
        return jackknife_means(
            *given, confidence=plan.confidence, interval=kind, count=plan.jackknife,
            rng=np.random.default_rng(plan.seed),
        )  # fmt: skip

    return made


def _totals(
    estimators: Sequence[MeanEstimator], groups: Sequence[Group], plan: EvaluationPlan
) -> list[MeanEstimator]:
    if not plan.totals:
        return []
    if plan.by_samples:
        raise InputError(
            "A total is one over clients, and how many samples the population has is not known. "
            "For the sum over samples multiply 'value' by 'n' and leave --samples out."
        )
    return [Total.over(mean, groups) for mean in estimators if mean.statistic == MEAN]


def _differences(
    estimators: Sequence[MeanEstimator], pairs: Sequence[Contrast]
) -> tuple[list[Difference], list[Group]]:
    return [Difference.between(each, pairs) for each in estimators], [x.both() for x in pairs]


def _estimators(logged: LoggedSample, plan: EvaluationPlan) -> list[MeanEstimator]:
    counts = logged.counts if plan.by_samples else None
    ratio: list[MeanEstimator] = [] if logged.under is None else [Ratio(logged.under, counts)]
    if plan.by_samples:
        if counts is None:
            raise InputError("The mean over samples needs a column 'n' in the metrics.")
        if plan.predict is not None:
            raise InputError(
                "Predictions are of the mean over clients: how many samples those have that never "
                "enrolled is not known. Ask for one of the two."
            )
        return [HajekMean(counts=counts), *ratio]
    made: list[MeanEstimator] = [HorvitzThompsonMean(logged.incomplete), HajekMean()]
    if logged.regression is not None:
        made.append(logged.regression)
    return [*made, *ratio]


def _rounds(logged: LoggedSample) -> list[Group]:
    return [
        Group(name=f"round = {index}", size=logged.population_size, rounds=np.array([code]))
        for code, index in enumerate(logged.rounds.tolist())
        if (logged.sample.round == code).any()
    ]


def column_groups(logged: LoggedSample, stage: EnrollmentStage, column: str) -> list[Group]:
    """Return the groups of a column of the clients' table, with their sizes where known."""
    frame = stage.members.frame
    if column not in stage.members.covariates:
        raise InputError(
            f"No column {column!r} to group by; clients have {some(stage.members.covariates)}, "
            f"and {ROUND!r} gives each round."
        )
    cells = covariate_cells(stage, [column])[column]
    mine = frame.select(cells.expression().alias(_CELL))[_CELL][logged.members]
    levels = cells.ordered(mine.unique().to_list())
    if len(levels) > GROUPS_MAX:
        raise InputError(
            f"{column!r} has {len(levels)} levels among the enrolled, more than {GROUPS_MAX}: "
            "group by a coarser column."
        )
    sizes = _sizes(stage, cells, mine)
    return [
        Group(name=cells.named(level), inside=(mine == level).to_numpy(), size=sizes.get(level))
        for level in levels
    ]


def covariate_cells(stage: EnrollmentStage, columns: Sequence[str]) -> dict[str, Cells]:
    """Return how covariates are cut: by the population, or by the enrolled beside totals."""
    if stage.coded is not None:
        return table_cells(stage.coded.table, columns)
    return {name: Cells.of(stage.members.frame[name]) for name in columns}


def _sizes(stage: EnrollmentStage, cells: Cells, mine: pl.Series) -> dict[str, float]:
    """Return how many of the population are in each cell, where that is known."""
    if stage.coded is not None:
        table, base = stage.coded.table, stage.population.base
        count = pl.len() if base is None else pl.col(base).cast(pl.Float64).sum()
        rows = stage.coded.listed_rows().group_by(cells.expression().alias(_CELL))
        query = rows.agg(count.alias("(size)"))
        return {str(k): float(v) for k, v in table.collect(query).iter_rows()}
    targets, size = stage.population.targets, stage.size
    if size is None or targets is None or not cells.is_category:
        return {}
    schema, column = stage.members.frame.schema, cells.column
    shares: dict[str, float] = {}
    for name, value in zip(targets.names, targets.values.tolist(), strict=True):
        level = term_of(name, schema).level
        if level is not None and level[0] == column:
            shares[level_text(level[1], schema[column], column)] = value
    found = {
        level: shares.get(level_text(level, schema[column], column))
        for level in mine.unique().to_list()
    }
    given = {level: share for level, share in found.items() if share is not None}
    left = [level for level in found if level not in given]
    if given and len(left) == 1:  # a level without a target has the rest
        given[left[0]] = 1.0 - sum(given.values())
    return {k: v * size for k, v in given.items() if v > 0.0}


def _sensitivity(
    logged: LoggedSample, plan: EvaluationPlan
) -> tuple[tuple[Sensitivity, ...], str, float | None]:
    """Return bounds, why there are none, and the odds ratio at which they reach the conclusion."""
    if not plan.odds_ratios:
        return (), "not asked for", None
    sample = logged.sample
    own = sample.enrollment.own  # base weights count like samples
    kappa = sample.enrollment.weights / own
    if not sample.enrollment.fraction.any():
        reason = "the population's size is not known, so enrollment has no probabilities"
        return (), reason, None
    kappa = np.where(np.abs(kappa - 1.0) < _CERTAIN, 1.0, kappa)
    if (kappa < 1.0).any():
        reason = (
            f"{int((kappa < 1.0).sum())} enrolled clients stand for less than themselves, so their "
            "weights are no inverse probabilities: use fedipw or calibrated-inverse-logit"
        )
        return (), reason, None
    prob, often = 1.0 / kappa[sample.client], np.ones(len(sample.client))
    if plan.by_samples:
        assert logged.counts is not None
        often = logged.counts / logged.counts.min()  # what a reply counts, 1 at least
    if isinstance(own, np.ndarray):
        often = often * (own / own.min())[sample.client]
    rows = (logged.values, prob, sample.prob / often)
    found = []
    for odds_ratio in plan.odds_ratios:
        bounds = sensitivity_bounds(*rows, odds_ratio, groups=sample.client)
        both = sensitivity_bounds(
            *rows, odds_ratio, participation_odds_ratio=odds_ratio, groups=sample.client
        )
        found.append(
            Sensitivity(
                odds_ratio=odds_ratio,
                low=bounds.low,
                high=bounds.high,
                weight_error=sensitivity_errors(1.0 / kappa, odds_ratio).centred,
                both_low=both.low,
                both_high=both.high,
            )
        )
    value = plan.conclusion
    at = None if value is None else odds_ratio_at(value, *rows, groups=sample.client)
    return tuple(found), "", at
