"""A metric on the target population, from files: everyone, subgroups, rounds, sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.evaluation.estimates import (
    Estimate,
    Estimator,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    population_means,
)
from fedipw.evaluation.jackknife import jackknife_means
from fedipw.evaluation.plain import Moved, moved_by_weights, plain_means
from fedipw.evaluation.sensitivity import odds_ratio_at, sensitivity_bounds
from fedipw.evaluation.weight_errors import sensitivity_errors
from fedipw.numerics.checks import some
from fedipw.tables.cells import Cells
from fedipw.tables.design import Missing
from fedipw.tables.ledger import ROUND
from fedipw.weighting.people import KnownPopulation, KnownTotals

if TYPE_CHECKING:
    from fedipw.evaluation.logged import LoggedSample
    from fedipw.evaluation.twophase import TwoPhase

GROUPS_MAX = 200  # of one column
_SAMPLE = 20_000  # rows of the population by which a number is cut into fifths


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """How far unobserved drivers of enrollment could move Hájek's mean."""

    odds_ratio: float
    low: float
    high: float
    weight_error: float  # largest centred error of the weights at this odds ratio
    reverses_at: float | None  # odds ratio at which the bounds reach the value asked about

    def to_json(self) -> dict[str, float | None]:
        """Return plain values; an odds ratio that is infinite, none that reaches it, is null."""
        values = {name: getattr(self, name) for name in Sensitivity.__slots__}
        return values | {"reverses_at": None if self.reverses_at == np.inf else self.reverses_at}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A metric on the target population."""

    method: str
    rounds: int
    population_size: float | None
    estimates: tuple[Estimate, ...]  # plain, horvitz-thompson, hajek, greg of each group
    moved: Moved  # what weighting did to the mean of everyone
    sensitivity: tuple[Sensitivity, ...]
    sensitivity_reason: str  # why there is none
    notes: tuple[str, ...]

    def of(self, estimator: str, group: str = "everyone") -> Estimate:
        """Return one estimate by name."""
        for line in self.estimates:
            if (line.estimator, line.group) == (estimator, group):
                return line
        raise InputError(f"There is no {estimator} estimate of {group}.")

    def table(self) -> pl.DataFrame:
        """Return one row per estimate."""
        names = ["group", "estimator", "estimate", "se", "low", "high", "confidence",
                 "effective_sample_size", "clients", "replies", "se_superpopulation", "freedom",
                 "reason"]  # fmt: skip
        rows = [tuple(getattr(line, name) for name in names) for line in self.estimates]
        made = pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)
        floats = pl.col("estimate", "se", "low", "high", "se_superpopulation", "freedom")
        return made.with_columns(floats.cast(pl.Float64).fill_nan(None))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "method": self.method,
            "rounds": self.rounds,
            "population_size": self.population_size,
            "estimates": self.table().to_dicts(),
            "moved": {"difference": self.moved.difference, "se": self.moved.se},
            "sensitivity": [s.to_json() for s in self.sensitivity],
            "sensitivity_reason": self.sensitivity_reason,
            "notes": list(self.notes),
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
    seed: int = 0  # of the jackknife's groups


def evaluated(
    logged: LoggedSample,
    people: KnownPopulation | KnownTotals,
    method: str,
    plan: EvaluationPlan | None = None,
) -> Evaluation:
    """Return a metric's mean over the population, by every estimator there is.

    Parameters
    ----------
    logged
        Replies with values (:func:`fedipw.evaluation.logged_two_phase`).
    people
        The population behind them.
    method
        Name of the method of the enrollment weights, for the record.
    plan
        Groups, confidence, odds ratios of the sensitivity analysis, variance.
    """
    plan = EvaluationPlan() if plan is None else plan
    sample, estimators = logged.sample, _estimators(logged, plan)
    everyone = Group(size=logged.population_size)
    groups = [everyone]
    for name in dict.fromkeys(plan.by):
        groups += _rounds(logged) if name == ROUND else groups_by(logged, people, name)
    counts = logged.counts if plan.by_samples else None
    lines = list(plain_means(sample, logged.values, groups, plan.confidence, counts))
    lines += _means(sample, logged, estimators, groups, plan)
    order = {group.name: k for k, group in enumerate(groups)}
    lines.sort(key=lambda line: order.get(line.group, len(order)))
    bounds, reason = _sensitivity(logged, plan)
    return Evaluation(
        method=method,
        rounds=sample.rounds,
        population_size=logged.population_size,
        estimates=tuple(lines),
        moved=moved_by_weights(sample, logged.values, counts),
        sensitivity=bounds,
        sensitivity_reason=reason,
        notes=logged.notes(),
    )


def _estimators(logged: LoggedSample, plan: EvaluationPlan) -> list[Estimator]:
    if plan.by_samples:
        if logged.counts is None:
            raise InputError("The mean over samples needs a column 'n' in the metrics.")
        return [HajekMean(counts=logged.counts)]
    made: list[Estimator] = [HorvitzThompsonMean(logged.incomplete), HajekMean()]
    return made if logged.regression is None else [*made, logged.regression]


def _means(
    sample: TwoPhase,
    logged: LoggedSample,
    estimators: Sequence[Estimator],
    groups: Sequence[Group],
    plan: EvaluationPlan,
) -> tuple[Estimate, ...]:
    if not plan.jackknife:
        return population_means(
            sample, logged.values, estimators, groups, confidence=plan.confidence
        )
    return jackknife_means(
        sample, logged.values, estimators, groups, confidence=plan.confidence,
        count=plan.jackknife, rng=np.random.default_rng(plan.seed),
    )  # fmt: skip


def _rounds(logged: LoggedSample) -> list[Group]:
    """Return each evaluated round that has a reply."""
    return [
        Group(name=f"round = {index}", size=logged.population_size, rounds=np.array([code]))
        for code, index in enumerate(logged.rounds.tolist())
        if (logged.sample.round == code).any()
    ]


def groups_by(
    logged: LoggedSample, people: KnownPopulation | KnownTotals, column: str
) -> list[Group]:
    """Return the groups of a column of the clients' table, with their sizes where known."""
    frame = people.members.frame
    if column not in people.members.covariates:
        raise InputError(
            f"No column {column!r} to group by; clients have {some(people.members.covariates)}, "
            f"and {ROUND!r} gives each round."
        )
    sample = frame[column]
    if isinstance(people, KnownPopulation):
        sample = people.coded.table.sample(_SAMPLE, [column])[column]
    cells = Cells.of(sample)
    mine = frame.select(cells.expression().alias("(cell)"))["(cell)"][logged.members]
    levels = cells.ordered(mine.unique().to_list())
    if len(levels) > GROUPS_MAX:
        raise InputError(
            f"{column!r} has {len(levels)} levels among the enrolled, more than {GROUPS_MAX}: "
            "group by a coarser column."
        )
    sizes = _sizes(people, cells, mine)
    return [
        Group(
            name=cells.named(level),
            inside=(mine == level).to_numpy(),
            size=sizes.get(level),
        )
        for level in levels
    ]


def _sizes(
    people: KnownPopulation | KnownTotals, cells: Cells, mine: pl.Series
) -> dict[str, float]:
    """Return how many of the population are in each cell, where that is known."""
    if isinstance(people, KnownPopulation):
        table, design = people.coded.table, people.coded.design
        rows = table.scan()
        if design.missing is Missing.DROP:  # those left out are not of the population either
            known = [pl.col(n).is_not_null() for n in design.columns]
            known += [pl.col(n).is_not_nan() for n in design.columns if table.schema[n].is_float()]
            rows = rows.filter(*known)
        query = rows.group_by(cells.expression().alias("(cell)")).agg(pl.len())
        return {str(k): float(v) for k, v in table.collect(query).iter_rows()}
    if people.population_size is None:
        return {}
    shares = dict(zip(people.targets.names, people.targets.values.tolist(), strict=True))
    found = {level: shares.get(f"{cells.column}[{level}]") for level in mine.unique().to_list()}
    given = {level: share for level, share in found.items() if share is not None}
    left = [level for level in found if level not in given]
    if given and len(left) == 1:  # a level without a target has the rest
        given[left[0]] = 1.0 - sum(given.values())
    return {k: v * people.population_size for k, v in given.items() if v > 0.0}


def _sensitivity(logged: LoggedSample, plan: EvaluationPlan) -> tuple[tuple[Sensitivity, ...], str]:
    if not plan.odds_ratios:
        return (), "not asked for"
    sample = logged.sample
    kappa = sample.enrollment.weights
    if not sample.enrollment.fraction.any():
        return (), "the population's size is not known, so enrollment has no probabilities"
    if (kappa < 1.0).any():
        return (), (
            f"{int((kappa < 1.0).sum())} enrolled clients stand for less than themselves, so their "
            "weights are no inverse probabilities: use fedipw or calibrated-inverse-logit"
        )
    prob, often = 1.0 / kappa[sample.client], np.ones(len(sample.client))
    if plan.by_samples:
        assert logged.counts is not None
        often = logged.counts / logged.counts.min()  # what a reply counts, 1 at least
    rows = (logged.values, prob, sample.prob / often)
    value = plan.conclusion
    at = None if value is None else odds_ratio_at(value, *rows, groups=sample.client)
    found = []
    for odds_ratio in plan.odds_ratios:
        bounds = sensitivity_bounds(*rows, odds_ratio, groups=sample.client)
        error = sensitivity_errors(1.0 / kappa, odds_ratio).centred
        found.append(
            Sensitivity(
                odds_ratio=odds_ratio, low=bounds.low, high=bounds.high, weight_error=error,
                reverses_at=at,
            )
        )  # fmt: skip
    return tuple(found), ""
