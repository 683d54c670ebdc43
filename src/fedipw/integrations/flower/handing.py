"""Weights handed to a strategy that always divides by their sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedipw.integrations.flower.screen import SentModel, metrics_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Weighted = Mapping[int, tuple[Message, float]]  # reply and weight, by place


def weighted_replies(replies: Weighted, key: str) -> list[Message]:
    """Return replies with their weights where a strategy looks for them, under ``key``."""
    out = []
    for message, weight in replies.values():
        metrics_of(message.content)[key] = float(weight)
        out.append(message)
    return out


def summed_replies(
    replies: Weighted, key: str, sent: SentModel, noise: Mapping[str, NDArray[Any]] | None = None
) -> list[Message]:
    r"""Return replies whose normalised mean is the weighted sum.

    A strategy averages the models :math:`\theta_i` it is handed, divided by the total weight. One
    more reply that carries the model sent, with the weight that is missing to one, makes this

    .. math:: \sum_{i \in S} w_i \theta_i + \Big(1 - \sum_{i \in S} w_i\Big) \theta
       = \theta + \sum_{i \in S} w_i \Delta_i, \qquad (O8)

    before any step of the strategy's own, and no reply is touched. The added reply reports the
    weighted mean of every metric, so metrics are averaged as if it were not there. With ``noise``
    there are two of them: :math:`\theta` plus noise of weight 1, and :math:`\theta` of weight
    :math:`-\sum w_i`.
    """
    handed = weighted_replies(replies, key)
    first = handed[0]
    names = next(iter(first.content.array_records)), next(iter(first.content.metric_records))
    weights = np.array([weight for _, weight in replies.values()])
    means = _means([metrics_of(message.content) for message in handed], weights, key)
    total = float(weights.sum())
    extra = [(sent.record, 1.0 - total)]
    if noise is not None:
        moved = {k: Array(np.asarray(v + noise[k])) for k, v in sent.arrays.items()}
        extra = [(ArrayRecord(moved), 1.0), (sent.record, -total)]
    for model, weight in extra:
        content = RecordDict({names[0]: model, names[1]: MetricRecord({**means, key: weight})})
        handed.append(Message(content, reply_to=first))
    return handed


def _means(metrics: list[MetricRecord], weights: NDArray[Any], key: str) -> dict[str, Any]:
    """Return the weighted mean of each metric, the plain one where weights cancel out."""
    share = weights / weights.sum() if weights.sum() != 0.0 else np.full(len(weights), 1.0)
    share = share / share.sum()
    means: dict[str, Any] = {}
    for name, first in metrics[0].items():
        if name == key:
            continue
        columns = np.array([record[name] for record in metrics], dtype=np.float64)
        mean = share @ columns
        means[name] = mean.tolist() if isinstance(first, list) else float(mean)
    return means
