"""The wrapped strategy's normalised mean made the weighted sum of updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as known
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.flower.arrays import FiledArray, Layout, QuickArray, array_view, packed_array
from fedipw.flower.buffers import buffer_mean
from fedipw.flower.reply_metrics import fill_metrics, metric_means
from fedipw.flower.screen import SentModel, arrays_of, metrics_of
from fedipw.flower.update_sums import update_sum

LARGEST_SUM = 1e6  # of absolute weights: beyond it single precision keeps no digit of the model

_RANKED = (
    known.Bulyan, known.FedMedian, known.FedTrimmedAvg, known.FedXgbBagging, known.FedXgbCyclic,
    known.Krum, known.MultiKrum, known.QFedAvg,
)  # fmt: skip
_PRIVATE = (
    known.DifferentialPrivacyClientSideAdaptiveClipping,
    known.DifferentialPrivacyClientSideFixedClipping,
    known.DifferentialPrivacyServerSideAdaptiveClipping,
    known.DifferentialPrivacyServerSideFixedClipping,
)


def weight_key(strategy: known.Strategy) -> str:
    """Return the metric by which a strategy weights replies; refuse one that ignores weights."""
    name = type(strategy).__name__
    if isinstance(strategy, type):
        raise InputError(
            f"strategy must be an instance: write {strategy.__name__}(), not {strategy.__name__}."
        )
    if any(base.__module__.startswith("flwr.server.") for base in type(strategy).__mro__):
        raise InputError(
            f"{name} is of Flower's older interface, flwr.server: wrap a strategy of "
            f"flwr.serverapp.strategy, such as flwr.serverapp.strategy.FedAvg()."
        )
    if not isinstance(strategy, known.Strategy):
        raise InputError(
            "The first argument is the strategy to wrap, such as flwr.serverapp.strategy.FedAvg(); "
            f"this is a {name}. Tables go to population= or enrolled=."
        )
    if isinstance(strategy, _RANKED):
        raise InputError(
            f"{name} chooses or counts replies by a rule of its own and would not follow weights. "
            "Wrap FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi or FedProx; for bad replies see "
            "Screen."
        )
    if isinstance(strategy, _PRIVATE):
        raise InputError(
            f"{name} scales its noise to equal weights, too little for the largest of these. Wrap "
            "the strategy inside it and pass clip and noise=GaussianNoise(...)."
        )
    key = getattr(strategy, "weighted_by_key", None)
    if not isinstance(key, str):
        raise InputError(
            f"{name} has no weighted_by_key: it must average replies by a metric of that name."
        )
    return key


@dataclass(frozen=True, slots=True)
class WeightedReply:
    """A reply, its weight w, and the factor c by which its update is clipped (O6)."""

    message: Message
    weight: float
    factor: float = 1.0
    norm: float = math.nan  # of the update, before it is clipped
    buffers: Mapping[str, float] = field(default_factory=dict)  # c of each buffer (O22)


def weighted_replies(replies: Sequence[WeightedReply], key: str) -> list[Message]:
    """Return replies with w c under ``key``, where a strategy looks for weights."""
    for reply in replies:
        metrics_of(reply.message.content)[key] = float(reply.weight * reply.factor)
    return [reply.message for reply in replies]


def weights_size(replies: Sequence[WeightedReply]) -> float:
    """Return the sum of the absolute weights by which updates are added."""
    return sum(abs(reply.weight * reply.factor) for reply in replies)


def buffer_means(replies: Sequence[WeightedReply], sent: SentModel) -> dict[str, NDArray[Any]]:
    """Return the mean of each buffer of a model over the replies (O22)."""
    records = [arrays_of(reply.message.content) for reply in replies]
    weights = [reply.weight for reply in replies]
    return {
        name: buffer_mean(
            [sent.layouts[name].view(record[name]) for record in records],
            weights,
            [reply.buffers.get(name, 1.0) for reply in replies],
            sent.arrays[name],
        )
        for name in sorted(sent.buffers)
    }


def summed_replies(
    replies: Sequence[WeightedReply],
    key: str,
    sent: SentModel,
    moved: ArrayRecord | None = None,
    means: Mapping[str, NDArray[Any]] | None = None,
) -> list[Message]:
    r"""Return messages whose normalised mean is the weighted sum.

    A strategy averages models :math:`\theta_i = \theta + \Delta_i` and divides by their total
    weight. Two more replies, of the model sent and weights that bring the total to one, make this

    .. math:: \sum_{i \in S} w_i c_i \theta_i + 1 \cdot \theta
       - \Big(\sum_{i \in S} w_i c_i\Big) \theta
       = \theta + \sum_{i \in S} w_i c_i \Delta_i \qquad (O8)

    before any step of the strategy's own, and no update is changed, clipped or not. The first of
    the two is ``moved`` where that is given: the model with noise, or with the correction of a
    regression or a memory. Their metrics keep the averages of metrics those of the replies by w; a
    metric that is not finite counts as the mean of the others. Every message has the ``means`` of
    buffers in place of its own, so that they are the strategy's mean too.
    """
    records = [metrics_of(reply.message.content) for reply in replies]
    weights = np.array([reply.weight for reply in replies])
    used = np.array([reply.weight * reply.factor for reply in replies])
    fill_metrics(records, weights, key)
    messages = weighted_replies(replies, key)
    packed = {name: packed_array(mean) for name, mean in (means or {}).items()}
    for message in messages:
        arrays = arrays_of(message.content)
        for name, array in arrays.items():
            arrays[name] = _handed(array, sent.layouts[name], packed.get(name))
    first = messages[0].content
    names = next(iter(first.array_records)), next(iter(first.metric_records))
    first_model = sent.record if moved is None else moved
    for model, weight, by in ((first_model, 1.0, weights), (sent.record, -float(used.sum()), used)):
        given = ArrayRecord()  # one by one: all at once they would be copied
        for name in sent.arrays:
            given[name] = _handed(model[name], sent.layouts[name], packed.get(name))
        metrics = MetricRecord({**metric_means(records, by, key), key: weight})
        content = RecordDict({names[0]: given, names[1]: metrics})
        messages.append(Message(content, reply_to=messages[0]))
    return messages


def _handed(array: Array, layout: Layout, mean: Array | None) -> Array:
    """Return an array as a strategy receives it: a buffer's mean, else read in one copy."""
    if mean is not None:
        return mean
    return array if isinstance(array, FiledArray) else QuickArray.of(array, layout)


def summed_reply(
    replies: Sequence[WeightedReply],
    key: str,
    sent: SentModel,
    summed: ArrayRecord,
    means: Mapping[str, NDArray[Any]],
) -> list[Message]:
    """Return one message of weight 1, of the model that the weighted sum (O8) makes.

    For strategies that are known to average replies by weight: it is what they make of
    :func:`summed_replies`, but the replies are read once and at a fraction of the time. Metrics are
    the means of the replies by w.
    """
    records = [metrics_of(reply.message.content) for reply in replies]
    weights = np.array([reply.weight for reply in replies])
    fill_metrics(records, weights, key)
    first, given = replies[0].message, ArrayRecord()
    for name in sent.arrays:
        mean = packed_array(means[name]) if name in means else None
        given[name] = _handed(summed[name], sent.layouts[name], mean)
    told = MetricRecord({**metric_means(records, weights, key), key: 1.0})
    names = next(iter(first.content.array_records)), next(iter(first.content.metric_records))
    return [Message(RecordDict({names[0]: given, names[1]: told}), reply_to=first)]


def summed_model(
    replies: Sequence[WeightedReply], sent: SentModel, moved: ArrayRecord | None = None
) -> ArrayRecord:
    """Return the model, or ``moved``, plus the weighted sum of the updates, array by array."""
    used = np.array([reply.weight * reply.factor for reply in replies])
    records = [arrays_of(reply.message.content) for reply in replies]
    out = ArrayRecord()
    for name, model in sent.arrays.items():
        base = (sent.record if moved is None else moved)[name]
        if name in sent.buffers:
            out[name] = base
            continue
        views = [sent.layouts[name].view(record[name]) for record in records]
        made = update_sum(used, views, model)
        made += model if moved is None else _handed(base, sent.layouts[name], None).numpy()
        out[name] = packed_array(made)
    return out


def finished_model(
    made: ArrayRecord, sent: SentModel, means: Mapping[str, NDArray[Any]]
) -> ArrayRecord:
    """Return a strategy's model in the types that were sent, with buffers at their means.

    An optimiser's steps are for parameters: those it took on buffers are undone, in ``made`` too,
    which some strategies keep as the model that is sent next.
    """
    out = ArrayRecord()
    for name, array in list(made.items()):
        layout, plain = sent.layouts.get(name), array
        if name in means:
            plain = packed_array(means[name], sent.layouts[name].name)
        elif layout is not None and Layout.of(array).name != layout.name:
            plain = packed_array(array_view(array), layout.name)
        out[name] = plain
        if plain is not array:
            bfloat = layout is not None and layout.bfloat
            made[name] = QuickArray.of(plain, sent.layouts[name]) if bfloat else plain
    return out


def moved_model(sent: SentModel, shift: MutableMapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return the model plus a shift, which is used up array by array: one copy at a time."""
    out = {}
    for name, model in sent.arrays.items():
        if name in shift:
            made = shift.pop(name)
            made += model
            out[name] = packed_array(made)
            del made
        else:
            out[name] = sent.record[name]
    return ArrayRecord(out)
