"""Federated evaluation: a metric of the target population with an interval, beside the plain one.

Evaluation has invitations and replies of its own, so it has a ledger of its own, weighted like that
of training. ``fedipw evaluate --rounds LEDGER/evaluation --metrics LEDGER/evaluation/metrics/NAME``
reads the same files later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import polars as pl
from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedipw.errors import InputError
from fedipw.evaluation.logged import COUNT, VALUE
from fedipw.flower.config import RunConfig
from fedipw.flower.door import Door
from fedipw.flower.intervals import TargetPlan, plain_mean, target_means
from fedipw.flower.journal import EVALUATED, Journal
from fedipw.flower.outcomes import RoundOutcomes, Rounds, add_metrics, log_round, round_metrics
from fedipw.flower.progress import target_line
from fedipw.flower.roster import Attendance
from fedipw.flower.screen import Names, metrics_of, screened_metrics
from fedipw.flower.weighted_sum import WeightedReply, weighted_replies
from fedipw.numerics.checks import some
from fedipw.tables.columns import ID, ROUND
from fedipw.tables.ledger import Ledger
from fedipw.tables.table import read_table, write_table

_LOG = getLogger("flwr.fedipw")


class Evaluator:
    """The evaluations of a run: their ledger, metrics on disk, and intervals.

    Intervals need the same clients enrolled in all rounds that participation is fitted on: where
    enrollment has changed between two starts, those since.

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
    subgroups
        Columns of the table of clients, for metrics of their levels.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        journal: Journal,
        key: str,
        *,
        door: Door | None = None,
        subgroups: Sequence[str] = (),
    ) -> None:
        known = config.stage.members.covariates
        strange = [name for name in subgroups if name not in known]
        if strange:
            raise InputError(
                f"subgroups: the table of clients has no column {some(map(repr, strange))}; it has "
                f"{some(known)}."
            )
        self.config, self.directory, self.journal, self.key = config, directory, journal, key
        self.rounds = Rounds(config.stage, Ledger(directory), config.evaluation, door, learns=False)
        self.subgroups = tuple(subgroups)
        self._names: Names | None = None  # of metrics in earlier evaluations of this process

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
        self._names = screened_metrics(outcomes, key=self.key, before=self._names)
        found, weights = self.rounds.weights(outcomes)
        tables = metric_tables(outcomes.replies, self.rounds.ids, index, self.key)
        metrics = MetricRecord()
        if found is not None and found.weights.any():
            weighted = [WeightedReply(outcomes.replies[place], w) for place, w in weights.items()]
            own = strategy.aggregate_evaluate(server_round, weighted_replies(weighted, self.key))
            metrics = MetricRecord() if own is None else own
        add_metrics(metrics, round_metrics(self.rounds.available, outcomes, found))
        ids = self.rounds.ids
        write_metrics(self.directory / "metrics", tables, index)
        self.journal.write(EVALUATED, server_round, metrics, evaluation=index, whole=False)
        self.rounds.close(outcomes)
        metrics = self._with_intervals(server_round, index, metrics)
        log_round("evaluation", server_round, outcomes, found, ids, said=target_line(metrics))
        return metrics

    def _with_intervals(self, server_round: int, index: int, metrics: MetricRecord) -> MetricRecord:
        """Add plain means and intervals of an evaluation that is in its ledger."""
        tables = read_metrics(self.directory / "metrics", index)
        how = TargetPlan(
            plan=self.config.evaluation, by=self.subgroups,
            since=self.config.register.evaluation_since,
        )  # fmt: skip
        found = target_means(self.config.present, self.directory, tables, how)
        for name, table in tables.items():
            metrics[f"{name}-plain"] = plain_mean(table)
            if found[name].reason:
                _LOG.warning("FedIPW: no interval of %s: %s", name, found[name].reason)
            elif found[name].warning:
                _LOG.info("FedIPW: the interval of %s %s", name, found[name].warning)
            for key, value in found[name].metrics(name).items():
                metrics[key] = value
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
