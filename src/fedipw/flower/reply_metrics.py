"""Metrics of replies: averaged by the weights, those that are not finite left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy

from fedipw.flower.screen import arrays_of, is_usable, metrics_of
from fedipw.numerics import FloatArray

_FUNCTION = "train_metrics_aggr_fn"  # of Flower's strategies
_FLOWERS_OWN = FedAvg().train_metrics_aggr_fn
_LOG = getLogger("flwr.fedipw")


def metric_means(metrics: Sequence[MetricRecord], weights: FloatArray, key: str) -> dict[str, Any]:
    """Return the weighted mean of each metric but ``key``, the plain one if weights sum to zero.

    >>> found = [MetricRecord({"n": 10, "loss": 0.5}), MetricRecord({"n": 10, "loss": 1.5})]
    >>> metric_means(found, np.array([3.0, 1.0]), "n")
    {'loss': 0.75}
    """
    total = float(weights.sum())
    share = weights / total if total != 0.0 else np.full(len(weights), 1.0 / len(weights))
    means: dict[str, Any] = {}
    for name, first in metrics[0].items():
        if name != key:
            mean = share @ np.array([record[name] for record in metrics], dtype=np.float64)
            means[name] = mean.tolist() if isinstance(first, list) else float(mean)
    return means


def fill_metrics(records: Sequence[MetricRecord], weights: FloatArray, key: str) -> None:
    """Put the others' mean in the place of metrics that are not finite: the mean stays theirs.

    A metric that is finite in no record is removed.
    """
    for name in [name for name in records[0] if name != key]:
        good = [k for k, record in enumerate(records) if is_usable(record[name])]
        if len(good) == len(records):
            continue
        if not good:
            for record in records:
                del record[name]
            continue
        some = [MetricRecord({name: records[k][name]}) for k in good]
        mean = metric_means(some, weights[good], key)[name]
        for k in sorted(set(range(len(records))) - set(good)):
            records[k][name] = mean


def own_function(strategy: Strategy) -> Callable[[list[RecordDict], str], MetricRecord] | None:
    """Return the function by which a user lets a strategy aggregate metrics of training, if any."""
    found = getattr(strategy, _FUNCTION, None)
    return found if callable(found) and found is not _FLOWERS_OWN else None


def metric_contents(
    replies: Sequence[Message], weights: Sequence[float], key: str
) -> list[RecordDict]:
    """Return what a user's function sees: replies with finite metrics, w under ``key``."""
    contents = []
    for message, weight in zip(replies, weights, strict=True):
        found = metrics_of(message.content)
        if all(is_usable(value) for name, value in found.items() if name != key):
            arrays = ArrayRecord()
            for name, array in arrays_of(message.content).items():
                arrays[name] = array
            told = MetricRecord({**found, key: float(weight)})
            names = {type(record): name for name, record in message.content.items()}
            contents.append(RecordDict({names[ArrayRecord]: arrays, names[MetricRecord]: told}))
    return contents


@contextmanager
def only_real_replies(strategy: Strategy, contents: Sequence[RecordDict] | None) -> Iterator[None]:
    """Let a user's function see these contents in place of what the strategy receives.

    What the function raises is logged, and the round then has no metrics of its making: a client's
    numbers must not end a run. Without ``contents`` everything is as it was.
    """
    function = own_function(strategy)
    if contents is None or function is None:
        yield
        return

    def seen(records: list[RecordDict], key: str) -> MetricRecord:
        del records
        if not contents:
            return MetricRecord()
        try:
            return function(list(contents), key)
        except Exception as error:
            _LOG.warning("FedIPW: %s raised %s: %s; the round is without its metrics",
                         _FUNCTION, type(error).__name__, error)  # fmt: skip
            return MetricRecord()

    setattr(strategy, _FUNCTION, seen)
    try:
        yield
    finally:
        setattr(strategy, _FUNCTION, function)
