"""Federated evaluation: a metric of the target population with an interval, beside the plain one.

Evaluation has invitations and replies of its own, so it has a ledger of its own, weighed like that
of training. ``fedipw evaluate --rounds LEDGER/evaluation --metrics LEDGER/evaluation/metrics/NAME``
reads the same files later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import polars as pl

from fedipw.data.ledger import ROUND, Ledger
from fedipw.data.population import ID
from fedipw.data.tables import read_table, write_table
from fedipw.errors import FedIPWError
from fedipw.evaluation import HajekMean, Metrics, logged_two_phase, population_means
from fedipw.evaluation.estimates import Group
from fedipw.evaluation.metrics import COUNT, VALUE
from fedipw.integrations.flower.screen import metrics_of

if TYPE_CHECKING:
    from flwr.app import Message

    from fedipw.weights.people import KnownPopulation, KnownTotals
    from fedipw.weights.replay import LogPlan

WINDOW = 50  # rounds behind an interval's participation model


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
    them. What cannot be estimated has a reason in place of numbers.
    """
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
