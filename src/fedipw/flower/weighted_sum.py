"""The wrapped strategy's normalised mean made the weighted sum of updates."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, Self

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as known
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.flower.screen import STYPE, Layout, SentModel, arrays_of, metrics_of
from fedipw.numerics import FloatArray

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


def weighted_replies(replies: Sequence[WeightedReply], key: str) -> list[Message]:
    """Return replies with w c under ``key``, where a strategy looks for weights."""
    for reply in replies:
        metrics_of(reply.message.content)[key] = float(reply.weight * reply.factor)
    return [reply.message for reply in replies]


def summed_replies(
    replies: Sequence[WeightedReply],
    key: str,
    sent: SentModel,
    moved: ArrayRecord | None = None,
) -> list[Message]:
    r"""Return messages whose normalised mean is the weighted sum.

    A strategy averages models :math:`\theta_i = \theta + \Delta_i` and divides by their total
    weight. Two more replies, of the model sent and weights that bring the total to one, make this

    .. math:: \sum_{i \in S} w_i c_i \theta_i + 1 \cdot \theta
       - \Big(\sum_{i \in S} w_i c_i\Big) \theta
       = \theta + \sum_{i \in S} w_i c_i \Delta_i \qquad (O8)

    before any step of the strategy's own, and no update is changed, clipped or not. The first of
    the two is ``moved`` where that is given: the model with noise, or with the correction of a
    regression or a memory. Their metrics keep the averages of metrics those of the replies by w.
    """
    messages = weighted_replies(replies, key)
    for message in messages:
        arrays = arrays_of(message.content)
        for name, array in arrays.items():
            arrays[name] = QuickArray.of(array, sent.layouts[name])
    first = messages[0].content
    names = next(iter(first.array_records)), next(iter(first.metric_records))
    weights = np.array([reply.weight for reply in replies])
    used = np.array([reply.weight * reply.factor for reply in replies])
    records = [metrics_of(message.content) for message in messages]
    first_model = sent.record if moved is None else moved
    for model, weight, by in ((first_model, 1.0, weights), (sent.record, -float(used.sum()), used)):
        metrics = MetricRecord({**_means(records, by, key), key: weight})
        content = RecordDict({names[0]: model, names[1]: metrics})
        messages.append(Message(content, reply_to=messages[0]))
    return messages


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


def packed_array(array: NDArray[Any]) -> Array:
    """Return an array as Flower sends it, by one copy of its bytes; Flower's own makes two.

    >>> packed_array(np.arange(3.0)).numpy()
    array([0., 1., 2.])
    """
    made, stream = np.asarray(array, order="C"), BytesIO()
    npy.write_array_header_1_0(stream, npy.header_data_from_array_1_0(made))
    data = b"".join([stream.getvalue(), made.reshape(-1).view(np.uint8).data])
    return Array(str(made.dtype), made.shape, STYPE, data)


class QuickArray(Array):
    """An array read by one copy of its bytes; Flower's own makes two, piece by piece.

    >>> array = Array(np.arange(3.0))
    >>> QuickArray.of(array, Layout.of(array)).numpy()
    array([0., 1., 2.])
    """

    @classmethod
    def of(cls, array: Array, layout: Layout) -> Self:
        """Return the same array, its bytes shared, which most likely has a known layout."""
        made = cls(array.dtype, array.shape, array.stype, array.data)
        made.__dict__["_layout"] = layout
        return made

    def numpy(self) -> NDArray[Any]:
        """Return a writable copy of the array."""
        layout: Layout = self.__dict__["_layout"]
        return layout.view(self).copy(order="K")


class FiledArray(Array):
    """An array whose bytes lie in a file and are read whenever they are asked for.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(np.array([1.0, 2.0, 3.0]).tobytes())
    ...     file.flush()
    ...     array = FiledArray(file, 8, np.dtype(np.float64), (2,))
    ...     array.numpy(), Array(np.array([2.0, 3.0])).data == array.data
    (array([2., 3.]), True)
    """

    def __init__(
        self, file: BinaryIO, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self.dtype, self.shape, self.stype = str(dtype), shape, STYPE
        self._file, self._offset, self._dtype = file, offset, dtype

    def numpy(self) -> NDArray[Any]:
        """Return the array, read from the file."""
        out = np.empty(self.shape, dtype=self._dtype)
        rest, place = out.reshape(-1).view(np.uint8).data, self._offset
        while rest:
            done = os.preadv(self._file.fileno(), [rest], place)
            if not done:
                raise OSError("the file of an array ends too early")
            rest, place = rest[done:], place + done
        return out

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array as Flower sends it, read from the file."""
        found: bytes = packed_array(self.numpy()).data
        return found


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
