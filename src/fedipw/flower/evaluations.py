"""Federated evaluation: a metric of the target population with an interval, beside the plain one.

Evaluation has invitations and replies of its own, so it has a ledger of its own, weighed like that
of training. ``fedipw evaluate --rounds LEDGER/evaluation --metrics LEDGER/evaluation/metrics/NAME``
reads the same files later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import polars as pl
from flwr.app import Message, MetricRecord

from fedipw.errors import FedIPWError, InputError
from fedipw.evaluation import HajekMean, Metrics, logged_two_phase, population_means
from fedipw.evaluation.estimates import Group
from fedipw.evaluation.logged import check_method
from fedipw.evaluation.metrics import COUNT, VALUE
from fedipw.flower.fates import settled
from fedipw.flower.handing import WeightedReply, weighted_replies
from fedipw.flower.journal import EVALUATED, Journal
from fedipw.flower.rounds import RoundBook
from fedipw.flower.screen import metrics_of, screened_metrics
from fedipw.flower.telling import add_facts, log_round, round_facts
from fedipw.tables.ledger import ROUND, Ledger
from fedipw.tables.population import ID
from fedipw.tables.tables import read_table, write_table
from fedipw.weighting.people import KnownPopulation
from fedipw.weighting.registry import method_named

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from fedipw.flower.roster import Attendance
    from fedipw.flower.setup import Study
    from fedipw.numerics.types import BoolArray
    from fedipw.weighting.people import KnownTotals
    from fedipw.weighting.replay import LogPlan

WINDOW = 50  # rounds behind an interval's participation model
_LOG = getLogger("flwr.fedipw")


class Evaluator:
    """The evaluations of a run: their ledger, metrics on disk, and intervals.

    Parameters
    ----------
    study
        People, method and formulas.
    directory
        Of the evaluation ledger.
    journal
        Where metrics of a round go.
    key
        Metric by which the wrapped strategy weighs, and clients report how many samples they have.
    """

    def __init__(self, study: Study, directory: Path, journal: Journal, key: str) -> None:
        self.study, self.directory, self.journal, self.key = study, directory, journal, key
        self.book = RoundBook(study.people, Ledger(directory), study.plan)

    def open(
        self,
        attendance: Attendance,
        messages: Sequence[Message],
        present: BoolArray,
        opened_at: datetime,
    ) -> None:
        """Open the next evaluation with whom it invites."""
        known = self.study.people.members.present(self.book.rounds + 1, opened_at)
        if not np.array_equal(present, known):
            raise InputError(
                "Clients join or leave by the number of the round: evaluate in every round from "
                "the first on, or give dates and times."
            )
        self.book.open(attendance, messages, present, opened_at)

    def skip(self, server_round: int) -> None:
        """Record that a round has no evaluation."""
        self.journal.write(EVALUATED, server_round, None, evaluation=0, whole=True)

    def done(self, server_round: int) -> MetricRecord | None:
        """Return a round's metrics, empty if it was skipped, none if it is yet to be evaluated."""
        found = self.journal.read(EVALUATED, server_round)
        if found is None or found["evaluation"] > self.book.rounds:
            return None
        metrics: MetricRecord = found["metrics"] or MetricRecord()
        if not found["whole"]:
            metrics = self._with_intervals(server_round, found["evaluation"], metrics)
        return metrics

    def settled(
        self,
        strategy: Strategy,
        server_round: int,
        replies: Iterable[Message],
        seen: Mapping[str, float],
    ) -> MetricRecord | None:
        """Close the open evaluation, and return weighted metrics, plain ones, and intervals.

        Metrics are on disk before the round is in the ledger; intervals need it to be there, and
        are made again if a kill came between.
        """
        if not self.book.invited:
            return None
        index, fates = self.book.rounds + 1, settled(self.book.invited, replies)
        screened_metrics(fates)
        found, weights = self.book.weights(fates)
        tables = metric_tables(fates.replies, self.book.ids, index, self.key)
        metrics = MetricRecord()
        if found is not None and found.weights.any():
            handed = [WeightedReply(fates.replies[place], w) for place, w in weights.items()]
            own = strategy.aggregate_evaluate(server_round, weighted_replies(handed, self.key))
            metrics = MetricRecord() if own is None else own
        add_facts(metrics, {**seen, **round_facts(fates, found)})
        log_round("evaluation", server_round, fates, found, self.book.ids)
        write_metrics(self.directory / "metrics", tables, index)
        self.journal.write(EVALUATED, server_round, metrics, evaluation=index, whole=False)
        self.book.close(fates)
        return self._with_intervals(server_round, index, metrics)

    def _with_intervals(self, server_round: int, index: int, metrics: MetricRecord) -> MetricRecord:
        """Add plain means and intervals of an evaluation that is in its ledger."""
        for name, table in read_metrics(self.directory / "metrics", index).items():
            metrics[f"{name}-plain"] = float(table[VALUE].mean())  # type: ignore[arg-type]
            line = metric_interval(self.study.people, self.directory, table, self.study.plan)
            if line.reason:
                _LOG.info("FedIPW: no interval of %s: %s", name, line.reason)
                continue
            metrics[f"{name}-target"], metrics[f"{name}-target-se"] = line.estimate, line.se
            metrics[f"{name}-target-low"], metrics[f"{name}-target-high"] = line.low, line.high
        self.journal.write(EVALUATED, server_round, metrics, evaluation=index, whole=True)
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A metric's mean over the population, as those who replied tell it."""

    estimate: float
    se: float
    low: float
    high: float
    reason: str = ""  # why there is none


def metric_tables(
    replies: Mapping[int, Message], ids: pl.Series, index: int, count_key: str
) -> dict[str, pl.DataFrame]:
    """Return a table for each metric that is one number: ``unit_id, round, value, n``.

    ``ids`` are the identifiers by place. ``n`` is what clients report under ``count_key``.
    """
    records = {place: metrics_of(message.content) for place, message in replies.items()}
    if not records:
        return {}
    base = {ID: ids[list(records)], ROUND: np.full(len(records), index, dtype=np.int64)}
    first = next(iter(records.values()))
    names = [name for name, v in first.items() if name != count_key and not isinstance(v, list)]
    counts: dict[str, Any] = {}
    if count_key in first:
        reported = np.array([record[count_key] for record in records.values()], dtype=np.float64)
        if np.isfinite(reported).all() and (reported > 0.0).all():
            counts = {COUNT: reported}
    return {
        name: pl.DataFrame(
            {**base, VALUE: [float(record[name]) for record in records.values()], **counts}  # type: ignore[arg-type]
        )
        for name in names
    }


def write_metrics(directory: Path, tables: Mapping[str, pl.DataFrame], index: int) -> None:
    """Write the metrics of a round, one file each."""
    for name, table in tables.items():
        folder = directory / quote(name, safe="")
        folder.mkdir(parents=True, exist_ok=True)
        write_table(table, folder / f"round-{index:06d}.parquet")


def read_metrics(directory: Path, index: int) -> dict[str, pl.DataFrame]:
    """Return the metrics of a round by name."""
    name = f"round-{index:06d}.parquet"
    return {
        unquote(path.parent.name): read_table(path) for path in sorted(directory.glob(f"*/{name}"))
    }


def metric_interval(
    people: KnownPopulation | KnownTotals, directory: Path, table: pl.DataFrame, plan: LogPlan
) -> Interval:
    """Return Hájek's mean of a metric over the population, with its design-based interval (E23).

    Participation is fitted on the last rounds of the evaluation ledger, the one just closed among
    them. Enrollment is that of the method; of one without a standard error, such as FedAvg, it is
    FedIPW's, or quadratic calibration to totals. What cannot be estimated has a reason in place of
    numbers.
    """
    try:
        check_method(people, plan.method)
    except InputError:
        usual = "fedipw" if isinstance(people, KnownPopulation) else "calibrated-quadratic"
        plan = replace(plan, method=method_named(usual))
    last = int(table[ROUND][0])
    since = 1 if plan.formulas.history else max(1, last - WINDOW + 1)
    try:
        logged = logged_two_phase(people, Ledger(directory, since), Metrics(table), plan)
        size = logged.population_size
        line = population_means(logged.sample, logged.values, [HajekMean()], [Group(size=size)])[0]
    except FedIPWError as error:
        return Interval(estimate=np.nan, se=np.nan, low=np.nan, high=np.nan, reason=str(error))
    return Interval(
        estimate=line.estimate, se=line.se, low=line.low, high=line.high, reason=line.reason
    )
