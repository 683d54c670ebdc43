"""Federated evaluation: a metric of the target population with an interval, beside the plain one.

Evaluation has invitations and replies of its own, so it has a ledger of its own, weighted like that
of training. ``fedipw evaluate --rounds LEDGER/evaluation --metrics LEDGER/evaluation/metrics/NAME``
reads the same files later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import polars as pl
from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedipw.errors import FedIPWError, InputError
from fedipw.evaluation.estimators import Estimate, Group, HajekMean, population_means
from fedipw.evaluation.logged import COUNT, VALUE, Metrics, check_method, logged_two_phase
from fedipw.flower.config import RunConfig
from fedipw.flower.door import Door
from fedipw.flower.journal import EVALUATED, Journal
from fedipw.flower.outcomes import RoundOutcomes, Rounds, add_metrics, log_round, round_metrics
from fedipw.flower.roster import Attendance
from fedipw.flower.screen import metrics_of, screened_metrics
from fedipw.flower.weighted_sum import WeightedReply, weighted_replies
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.selection.participation import FAILURES
from fedipw.tables.columns import ID, ROUND
from fedipw.tables.ledger import Ledger
from fedipw.tables.table import read_table, write_table
from fedipw.weighting.methods import default_method, method_named
from fedipw.weighting.replay import Plan

WINDOW = 50  # rounds behind an interval's participation model
_LOG = getLogger("flwr.fedipw")


class Evaluator:
    """The evaluations of a run: their ledger, metrics on disk, and intervals.

    Parameters
    ----------
    config
        Population, method and formulas.
    directory
        Of the evaluation ledger.
    journal
        For the metrics of each round.
    key
        Metric by which the wrapped strategy weights, and clients report their number of samples.
    door
        What of answers is used, as it was in training.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        journal: Journal,
        key: str,
        door: Door | None = None,
    ) -> None:
        self.config, self.directory, self.journal, self.key = config, directory, journal, key
        self.rounds = Rounds(config.stage, Ledger(directory), config.evaluation, door, learns=False)

    def open(self, attendance: Attendance, messages: Sequence[Message]) -> None:
        """Open the next evaluation with its invitations."""
        members = self.config.stage.members
        known = members.present(self.rounds.closed + 1, attendance.opened_at)
        if not np.array_equal(attendance.present, known):
            raise InputError(
                "Clients join or leave by the number of the round: evaluate in every round from "
                "the first on, or give dates and times."
            )
        self.rounds.open(attendance, messages)

    def skip(self, server_round: int) -> None:
        """Record that a round has no evaluation."""
        self.journal.write(EVALUATED, server_round, None, evaluation=0, whole=True)

    def done(self, server_round: int) -> MetricRecord | None:
        """Return a round's metrics, empty if it was skipped, none if it is yet to be evaluated."""
        found = self.journal.read(EVALUATED, server_round)
        if found is None or found["evaluation"] > self.rounds.closed:
            return None
        metrics: MetricRecord = found["metrics"] or MetricRecord()
        if found["whole"]:
            return metrics
        return self._with_intervals(server_round, found["evaluation"], metrics)

    def aggregated(
        self, strategy: Strategy, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Close the open evaluation, and return weighted metrics, plain ones, and intervals.

        Metrics are on disk before the round is in the ledger; intervals need it to be there, and
        are computed again if the server was killed in between.
        """
        if not self.rounds.invited:
            return None
        index, outcomes = self.rounds.closed + 1, RoundOutcomes.of(self.rounds.invited, replies)
        screened_metrics(outcomes)
        found, weights = self.rounds.weights(outcomes)
        tables = metric_tables(outcomes.replies, self.rounds.ids, index, self.key)
        metrics = MetricRecord()
        if found is not None and found.weights.any():
            weighted = [WeightedReply(outcomes.replies[place], w) for place, w in weights.items()]
            own = strategy.aggregate_evaluate(server_round, weighted_replies(weighted, self.key))
            metrics = MetricRecord() if own is None else own
        add_metrics(metrics, round_metrics(self.rounds.available, outcomes, found))
        log_round("evaluation", server_round, outcomes, found, self.rounds.ids)
        write_metrics(self.directory / "metrics", tables, index)
        self.journal.write(EVALUATED, server_round, metrics, evaluation=index, whole=False)
        self.rounds.close(outcomes)
        return self._with_intervals(server_round, index, metrics)

    def _with_intervals(self, server_round: int, index: int, metrics: MetricRecord) -> MetricRecord:
        """Add plain means and intervals of an evaluation that is in its ledger."""
        for name, table in read_metrics(self.directory / "metrics", index).items():
            metrics[f"{name}-plain"] = float(table[VALUE].mean())  # type: ignore[arg-type]
            try:
                line = metric_interval(
                    self.config.stage, self.directory, table, self.config.evaluation
                )
                reason = line.reason
            except (FedIPWError, *FAILURES) as error:
                reason = str(error) or type(error).__name__
            if reason:
                _LOG.info("FedIPW: no interval of %s: %s", name, reason)
                continue
            metrics[f"{name}-target"], metrics[f"{name}-target-se"] = line.estimate, line.se
            metrics[f"{name}-target-low"], metrics[f"{name}-target-high"] = line.low, line.high
        self.journal.write(EVALUATED, server_round, metrics, evaluation=index, whole=True)
        return metrics


def metric_tables(
    replies: Mapping[int, Message], ids: pl.Series, index: int, count_key: str
) -> dict[str, pl.DataFrame]:
    """Return a table for each metric that is one number: ``unit_id, round, value, n``.

    ``ids`` are the identifiers by place. ``n`` is what clients report under ``count_key``.
    """
    records = [metrics_of(message.content) for message in replies.values()]
    if not records:
        return {}
    numbers = {
        name: np.array([record[name] for record in records], dtype=np.float64)
        for name, first in records[0].items()
        if not isinstance(first, list)
    }
    base = {ID: ids[list(replies)], ROUND: np.full(len(records), index, dtype=np.int64)}
    counts = numbers.pop(count_key, np.zeros(1))
    known = {COUNT: counts} if (counts > 0.0).all() else {}
    return {
        name: pl.DataFrame({**base, VALUE: values, **known}) for name, values in numbers.items()
    }


def write_metrics(directory: Path, tables: Mapping[str, pl.DataFrame], index: int) -> None:
    """Write the metrics of a round, one file each."""
    for name, table in tables.items():
        folder = directory / quote(name, safe="")
        folder.mkdir(parents=True, exist_ok=True)
        write_table(table, folder / f"round-{index:06d}.parquet")


def read_metrics(directory: Path, index: int) -> dict[str, pl.DataFrame]:
    """Return the metrics of a round by name."""
    paths = sorted(directory.glob(f"*/round-{index:06d}.parquet"))
    return {unquote(path.parent.name): read_table(path) for path in paths}


def metric_interval(
    stage: EnrollmentStage, directory: Path, table: pl.DataFrame, plan: Plan
) -> Estimate:
    """Return Hájek's mean of a metric over the population, with its design-based interval (E23).

    Participation is fitted on the last rounds of the evaluation ledger, the one just closed among
    them. Enrollment is that of the method; for one without a standard error, such as FedAvg, it is
    FedIPW's, or quadratic calibration to totals. The estimate has a reason, or an error is raised,
    where there is no interval.
    """
    try:
        check_method(stage, plan.method)
    except InputError:
        usual = default_method(everyone=stage.population.targets is None)
        plan = replace(plan, method=method_named(usual))
    last = int(table[ROUND][0])
    since = 1 if plan.formulas.history else max(1, last - WINDOW + 1)
    logged = logged_two_phase(stage, Ledger(directory, since), Metrics(table), plan)
    group = Group(size=logged.population_size)
    return population_means(logged.sample, logged.values, [HajekMean()], [group])[0]
