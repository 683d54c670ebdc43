"""Replies screened before they count: one bad reply is left out and recorded, and nothing stops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from fedipw.errors import InputError
from fedipw.integrations.flower.arrays import array_view
from fedipw.numerics.checks import check_positive
from fedipw.numerics.distance import squared_distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedipw.integrations.flower.fates import Settled


class _RefusedError(Exception):
    """Why a reply is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    r"""What a reply must be like to count.

    Its one array record has the keys and shapes of the model that was sent, all numbers are finite,
    and the update :math:`\Delta_i` is no longer than ``max_norm``. With ``clip`` = C a longer
    update is shortened, before it is weighted:

    .. math:: \Delta_i \leftarrow \Delta_i \min(1, C / \lVert \Delta_i \rVert), \qquad (O6)

    so that no client moves the aggregate by more than :math:`C \max_i |w_i|`. Who is left out here
    did not take part, as far as the weights are concerned: a limit that clients exceed because of
    what their data are like selects on the outcome, and no weight corrects that. Clipping biases
    the sum too, but keeps everybody in.

    Parameters
    ----------
    max_norm
        Longest update that is not absurd.
    clip
        C; updates are not shortened by default.
    """

    max_norm: float = 1e6
    clip: float | None = None

    def __post_init__(self) -> None:
        check_positive(self.max_norm, "max_norm")
        if self.clip is not None:
            check_positive(self.clip, "clip")


@dataclass(frozen=True, slots=True, eq=False)
class SentModel:
    """The model that clients were sent, as arrays to compare replies with."""

    record: ArrayRecord
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, record: ArrayRecord, screen: Screen) -> SentModel:
        """Return a model; clipping needs floating-point arrays."""
        arrays = {key: array_view(array) for key, array in record.items()}
        if not arrays:
            raise InputError("The model has no arrays: give initial_arrays.")
        for key, array in arrays.items():
            if screen.clip is not None and not np.issubdtype(array.dtype, np.floating):
                raise InputError(
                    f"Clipping needs floating-point arrays; {key!r} is {array.dtype}. Leave it out "
                    "of what clients send, or train without clip."
                )
        return cls(record, arrays)


@dataclass(frozen=True, slots=True)
class Screened:
    """What screening did beside refusing."""

    clipped: int = 0
    largest_norm: float = 0.0  # of the updates that count, before clipping


def screened(settled: Settled, sent: SentModel, screen: Screen) -> Screened:
    """Refuse the replies that do not fit, shorten those that are too long."""
    names = _usual_names(settled, with_arrays=True)
    clipped, largest = 0, 0.0
    for place, message in list(settled.replies.items()):
        try:
            _check_names(message.content, names, with_arrays=True)
            _check_metrics(message.content)
            record = next(iter(message.content.array_records.values()))
            norm = math.sqrt(_squared_norm(record, sent))
            if not math.isfinite(norm):
                raise _RefusedError("NaN or infinite values")
            if norm > screen.max_norm:
                raise _RefusedError(f"update of norm {norm:.3g}")
        except _RefusedError as reason:
            settled.refuse(place, str(reason))
            continue
        largest = max(largest, norm)
        if screen.clip is not None and norm > screen.clip:
            clipped += 1
            _shorten(record, sent, screen.clip / norm)
    return Screened(clipped, largest)


def screened_metrics(settled: Settled) -> None:
    """Refuse replies to an evaluation whose metrics do not fit."""
    names = _usual_names(settled, with_arrays=False)
    for place, message in list(settled.replies.items()):
        try:
            _check_names(message.content, names, with_arrays=False)
            _check_metrics(message.content)
        except _RefusedError as reason:
            settled.refuse(place, str(reason))


_Names = tuple[Any, ...]


def _names(content: RecordDict, *, with_arrays: bool) -> _Names:
    metrics = tuple(
        (name, tuple(sorted((k, len(v) if isinstance(v, list) else -1) for k, v in record.items())))
        for name, record in sorted(content.metric_records.items())
    )
    return metrics, tuple(sorted(content.array_records)) if with_arrays else ()


def _usual_names(settled: Settled, *, with_arrays: bool) -> _Names | None:
    """Return the names of records and metrics that most replies have; the first of equals."""
    found = Counter(_names(m.content, with_arrays=with_arrays) for m in settled.replies.values())
    return found.most_common(1)[0][0] if found else None


def _check_names(content: RecordDict, usual: _Names | None, *, with_arrays: bool) -> None:
    if with_arrays and len(content.array_records) != 1:
        raise _RefusedError(f"{len(content.array_records)} array records, not one")
    if len(content.metric_records) != 1:
        raise _RefusedError(f"{len(content.metric_records)} metric records, not one")
    if _names(content, with_arrays=with_arrays) != usual:
        raise _RefusedError("records or metrics other than those of most replies")


def _check_metrics(content: RecordDict) -> None:
    for name, value in metrics_of(content).items():
        values = value if isinstance(value, list) else [value]
        if not all(map(math.isfinite, values)):
            raise _RefusedError(f"metric {name!r} is not finite")


def metrics_of(content: RecordDict) -> MetricRecord:
    """Return the one metric record of a reply."""
    return next(iter(content.metric_records.values()))


def _squared_norm(record: ArrayRecord, sent: SentModel) -> float:
    """Return the squared norm of an update, without copying the reply."""
    if set(record) != set(sent.arrays):
        raise _RefusedError("keys other than those of the model")
    total = 0.0
    for key, model in sent.arrays.items():
        try:
            array = array_view(record[key])
        except ValueError as error:
            raise _RefusedError(f"{key!r} cannot be read") from error
        if array.shape != model.shape:
            raise _RefusedError(f"{key!r} has shape {array.shape}, not {model.shape}")
        if np.issubdtype(model.dtype, np.floating):
            if not np.issubdtype(array.dtype, np.floating):
                raise _RefusedError(f"{key!r} is {array.dtype}, not {model.dtype}")
            total += squared_distance(array, model)
        elif array.dtype != model.dtype:
            raise _RefusedError(f"{key!r} is {array.dtype}, not {model.dtype}")
    return total


def _shorten(record: ArrayRecord, sent: SentModel, factor: float) -> None:
    """Replace a reply by the model sent plus a part of its update (O6)."""
    for key, model in sent.arrays.items():
        update = record[key].numpy() - model
        update *= factor
        update += model
        record[key] = Array(np.asarray(update))
