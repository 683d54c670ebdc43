"""Weights handed to a strategy that always divides by their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedipw.flower.arrays import QuickArray
from fedipw.flower.screen import SentModel, arrays_of, metrics_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedipw.numerics.types import FloatArray


@dataclass(frozen=True, slots=True)
class WeightedReply:
    """A reply, its weight w, and the factor c its update is shortened by (O6)."""

    message: Message
    weight: float
    factor: float = 1.0


def weighted_replies(replies: Sequence[WeightedReply], key: str) -> list[Message]:
    """Return replies with w c where a strategy looks for weights, under ``key``."""
    for reply in replies:
        metrics_of(reply.message.content)[key] = float(reply.weight * reply.factor)
    return [reply.message for reply in replies]


def summed_replies(
    replies: Sequence[WeightedReply],
    key: str,
    sent: SentModel,
    noise: Mapping[str, NDArray[Any]] | None = None,
) -> list[Message]:
    r"""Return replies whose normalised mean is the weighted sum.

    A strategy averages the models :math:`\theta_i = \theta + \Delta_i` it is handed and divides by
    their total weight. Two more replies, of the model sent and weights that bring the total to one,
    make this

    .. math:: \sum_{i \in S} w_i c_i \theta_i + 1 \cdot \theta
       - \Big(\sum_{i \in S} w_i c_i\Big) \theta
       = \theta + \sum_{i \in S} w_i c_i \Delta_i \qquad (O8)

    before any step of the strategy's own, and no update is touched, clipped or not. Noise is added
    to the first of the two. Their metrics are such that averages are those of the replies by w.
    """
    handed = weighted_replies(replies, key)
    for message in handed:
        arrays = arrays_of(message.content)
        for name, array in arrays.items():
            arrays[name] = QuickArray.of(array, sent.layouts[name])
    first = handed[0].content
    names = next(iter(first.array_records)), next(iter(first.metric_records))
    weights = np.array([reply.weight for reply in replies])
    used = np.array([reply.weight * reply.factor for reply in replies])
    moved = sent.record
    if noise is not None:
        moved = ArrayRecord({k: Array(v + noise[k]) for k, v in sent.arrays.items()})
    records = [metrics_of(message.content) for message in handed]
    for model, weight, by in ((moved, 1.0, weights), (sent.record, -float(used.sum()), used)):
        metrics = MetricRecord({**_means(records, by, key), key: weight})
        content = RecordDict({names[0]: model, names[1]: metrics})
        handed.append(Message(content, reply_to=handed[0]))
    return handed


def _means(metrics: Sequence[MetricRecord], weights: FloatArray, key: str) -> dict[str, Any]:
    """Return the weighted mean of each metric, the plain one where weights sum to zero."""
    total = float(weights.sum())
    share = weights / total if total != 0.0 else np.full(len(weights), 1.0 / len(weights))
    means: dict[str, Any] = {}
    for name, first in metrics[0].items():
        if name != key:
            mean = share @ np.array([record[name] for record in metrics], dtype=np.float64)
            means[name] = mean.tolist() if isinstance(first, list) else float(mean)
    return means
