"""Metrics of the target population with intervals, all of a round from one replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import polars as pl

from fedipw.errors import FedIPWError, InputError
from fedipw.evaluation.estimators import EVERYONE, Estimate, Group, HajekMean, population_means
from fedipw.evaluation.evaluate import column_groups
from fedipw.evaluation.intervals import Automatic
from fedipw.evaluation.logged import VALUE, LoggedSample, MetricCollector, Metrics, check_method
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import visible
from fedipw.selection.counts import member_counts
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.selection.participation import FAILURES
from fedipw.tables.columns import ID, ROUND
from fedipw.tables.ledger import Ledger
from fedipw.weighting.methods import default_method, method_named
from fedipw.weighting.replay import Plan, Replay

WINDOW = 50  # rounds behind an interval's participation model


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMeans:
    """A metric's mean over the target population and its subgroups, or why there is none."""

    estimates: tuple[Estimate, ...] = ()  # everyone first
    reason: str = ""

    @property
    def warning(self) -> str:
        """What the interval of everyone cannot promise, and why; empty if no rule says so."""
        return self.estimates[0].warning if self.estimates else ""

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics that a round records: ``loss-target``, ``loss-target-low``, ...

        Those of a subgroup are ``loss[os = ios]-target`` and so on. An estimate without an interval
        is left out.

        >>> line = Estimate(group="os = ios", estimator="hajek", estimate=0.5, confidence=0.95,
        ...                 effective_sample_size=9.0, clients=10, replies=10)
        >>> TargetMeans(estimates=(line.with_error(0.1, 9.0),)).metrics("loss")
        {'loss[os = ios]-target': 0.5, 'loss[os = ios]-target-se': 0.1, 'loss[os = ios]-targ...
        """
        out = {}
        for line in self.estimates:
            if not np.isfinite(line.low):
                continue
            inside = "" if line.group == EVERYONE else f"[{visible(line.group)}]"
            for key, value in (("", line.estimate), ("-se", line.se), ("-low", line.low),
                               ("-high", line.high)):  # fmt: skip
                out[f"{name}{inside}-target{key}"] = float(value)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """How metrics of the target population are estimated."""

    plan: Plan
    by: Sequence[str] = field(default=())  # columns of the table of clients, for subgroups
    since: int = 1  # the first evaluation with the same clients enrolled


def target_means(
    stage: EnrollmentStage,
    directory: Path,
    tables: Mapping[str, pl.DataFrame],
    how: TargetPlan,
) -> dict[str, TargetMeans]:
    """Return Hájek's means of a round's metrics, with the recommended design-based intervals (E23).

    The evaluation ledger is read once for all metrics and subgroups. Participation is fitted on its
    last rounds, the one just closed among them. Enrollment is that of the method; for one without
    a standard error, such as FedAvg, it is FedIPW's, or quadratic calibration to totals.

    Parameters
    ----------
    stage
        Enrollment of the clients that are listed now.
    directory
        Of the evaluation ledger.
    tables
        Of one round by metric: ``unit_id, round, value``.
    how
        Method and formulas, subgroups, and since when enrollment is the same.
    """
    if not tables:
        return {}
    plan = _with_error(stage, how.plan)
    last = int(next(iter(tables.values()))[ROUND][0])
    first = how.since if plan.formulas.history else max(how.since, last - WINDOW + 1)
    ledger, out = Ledger(directory, first), {}
    groups: dict[tuple[str, ...], list[str]] = {}  # metrics by the clients that report them
    for name, table in tables.items():
        groups.setdefault(tuple(table[ID].cast(pl.String).to_list()), []).append(name)
    most = max(map(len, groups))
    try:
        collectors = {
            names[0]: MetricCollector(
                stage, ledger, Metrics(tables[names[0]]), allow_missing=len(ids) < most
            )
            for ids, names in groups.items()
        }
        learner = Replay(stage, ledger, plan, observers=list(collectors.values())).learn()
    except (FedIPWError, *FAILURES) as error:
        return dict.fromkeys(tables, TargetMeans(reason=str(error)))
    for names in groups.values():
        try:
            logged = collectors[names[0]].sample(plan.method, learner)
        except (FedIPWError, *FAILURES) as error:
            out.update(dict.fromkeys(names, TargetMeans(reason=str(error))))
            continue
        for name in names:
            out[name] = _estimated(stage, logged, tables[name], how)
    return {name: out[name] for name in tables}


def _estimated(
    stage: EnrollmentStage, logged: LoggedSample, table: pl.DataFrame, how: TargetPlan
) -> TargetMeans:
    members, rows = stage.members, logged.members[logged.sample.client]
    values = np.full(members.size, np.nan)
    values[members.rows_of(table[ID], "metrics")] = table[VALUE].cast(pl.Float64).to_numpy()
    try:
        groups = [Group(size=logged.population_size)]
        for column in how.by:
            groups += column_groups(logged, stage, column)
        counts = None
        if how.plan.examples is not None:
            counts = member_counts(stage, how.plan.examples)[rows].astype(np.float64)
        mean = HajekMean(counts)
        found = population_means(logged.sample, values[rows], [mean], groups, interval=Automatic())
    except (FedIPWError, *FAILURES) as error:
        return TargetMeans(reason=str(error))
    return TargetMeans(estimates=found, reason=found[0].reason)


def _with_error(stage: EnrollmentStage, plan: Plan) -> Plan:
    """Return the plan, with the usual method where its own has no standard error."""
    try:
        check_method(stage, plan.method)
    except InputError:
        usual = default_method(everyone=stage.population.targets is None)
        return replace(plan, method=method_named(usual))
    return plan


def plain_mean(table: pl.DataFrame) -> float:
    """Return the mean of a metric over the respondents."""
    values: FloatArray = table[VALUE].cast(pl.Float64).to_numpy()
    return float(values.mean())
