"""Replies screened before they count: one bad reply is left out and recorded, and nothing stops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedipw.errors import InputError
from fedipw.flower.arrays import Layout
from fedipw.numerics.checks import check_positive
from fedipw.numerics.distance import squared_distance
from fedipw.numerics.threads import over_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedipw.flower.fates import Settled


_Names = tuple[Any, ...]


class _RefusedError(Exception):
    """Why a reply is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    r"""What a reply must be like to count.

    Its one array record has the keys and shapes of the model that was sent, all numbers are finite,
    and the update :math:`\Delta_i` is no longer than ``max_norm``. With ``clip`` = C a longer
    update is shortened, before it is weighted:

    .. math:: \Delta_i \leftarrow c_i \Delta_i, \quad
       c_i = \min(1, C / \lVert \Delta_i \rVert), \qquad (O6)

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
    layouts: Mapping[str, Layout]

    @classmethod
    def of(cls, record: ArrayRecord, screen: Screen) -> SentModel:
        """Return a model; clipping needs floating-point arrays."""
        layouts = {key: Layout.of(array) for key, array in record.items()}
        arrays = {key: layouts[key].view(array) for key, array in record.items()}
        if not arrays:
            raise InputError("The model has no arrays: give initial_arrays.")
        for key, array in arrays.items():
            if screen.clip is not None and not np.issubdtype(array.dtype, np.floating):
                raise InputError(
                    f"Clipping needs floating-point arrays; {key!r} is {array.dtype}. Leave it out "
                    "of what clients send, or train without clip."
                )
        return cls(record, arrays, layouts)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(array.size for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class Screened:
    """What screening found of the replies that count."""

    factors: Mapping[int, float]  # c_i by place (O6), 1 where nothing is clipped
    largest_norm: float = 0.0  # before clipping

    @property
    def clipped(self) -> int:
        """Number of updates that were too long."""
        return sum(factor < 1.0 for factor in self.factors.values())


def screened(settled: Settled, sent: SentModel, screen: Screen) -> Screened:
    """Refuse the replies that do not fit, and find which updates are too long."""
    parts = {place: _Parts.of(message.content) for place, message in settled.replies.items()}
    places, usual = list(parts), _usual(part.names for part in parts.values())
    found: list[float | _RefusedError] = [math.nan] * len(places)

    def norms(first: int, last: int) -> None:
        for k in range(first, last):
            try:
                found[k] = parts[places[k]].norm(usual, sent, screen)
            except _RefusedError as reason:
                found[k] = reason

    over_ranges(len(places), norms, work=float(sent.size * len(places)))
    factors, largest = {}, 0.0
    for place, norm in zip(places, found, strict=True):
        if isinstance(norm, _RefusedError):
            settled.refuse(place, str(norm))
            continue
        largest = max(largest, norm)
        long = screen.clip is not None and norm > screen.clip
        factors[place] = screen.clip / norm if long and screen.clip is not None else 1.0
    return Screened(factors, largest)


def screened_metrics(settled: Settled) -> None:
    """Refuse replies to an evaluation whose metrics do not fit."""
    parts = {
        place: replace(_Parts.of(message.content), arrays={})
        for place, message in settled.replies.items()
    }
    usual = _usual(part.names for part in parts.values())
    for place, part in parts.items():
        try:
            part.check_metrics(usual)
        except _RefusedError as reason:
            settled.refuse(place, str(reason))


def metrics_of(content: RecordDict) -> MetricRecord:
    """Return the one metric record of a reply."""
    return next(record for record in content.values() if isinstance(record, MetricRecord))


def arrays_of(content: RecordDict) -> ArrayRecord:
    """Return the one array record of a reply."""
    return next(record for record in content.values() if isinstance(record, ArrayRecord))


def _usual(names: Iterable[_Names]) -> _Names | None:
    """Return the names of records and metrics that most replies have; the first of equals."""
    found = Counter(names).most_common(1)
    return found[0][0] if found else None


@dataclass(frozen=True, slots=True)
class _Parts:
    """The records of a reply by name; Flower's own properties copy them at every call."""

    arrays: Mapping[str, ArrayRecord]
    metrics: Mapping[str, MetricRecord]

    @classmethod
    def of(cls, content: RecordDict) -> _Parts:
        records = dict(content.items())
        return cls(
            {k: v for k, v in records.items() if isinstance(v, ArrayRecord)},
            {k: v for k, v in records.items() if isinstance(v, MetricRecord)},
        )

    @property
    def names(self) -> _Names:
        metrics = tuple(
            (name, tuple(sorted((k, len(v) if isinstance(v, list) else -1)
                                for k, v in record.items())))
            for name, record in sorted(self.metrics.items())
        )  # fmt: skip
        return metrics, tuple(sorted(self.arrays))

    def check_metrics(self, usual: _Names | None) -> None:
        """Refuse metrics that are not finite, or other than most replies have."""
        if len(self.metrics) != 1:
            raise _RefusedError(f"{len(self.metrics)} metric records, not one")
        if self.names != usual:
            raise _RefusedError("records or metrics other than those of most replies")
        for name, value in next(iter(self.metrics.values())).items():
            values = value if isinstance(value, list) else [value]
            if not all(map(math.isfinite, values)):
                raise _RefusedError(f"metric {name!r} is not finite")

    def norm(self, usual: _Names | None, sent: SentModel, screen: Screen) -> float:
        """Return the norm of the update, or say why the reply does not count."""
        if len(self.arrays) != 1:
            raise _RefusedError(f"{len(self.arrays)} array records, not one")
        self.check_metrics(usual)
        norm = math.sqrt(_squared_norm(next(iter(self.arrays.values())), sent))
        if not math.isfinite(norm):
            raise _RefusedError("NaN or infinite values")
        if norm > screen.max_norm:
            raise _RefusedError(f"update of norm {norm:.3g}")
        return norm


def _squared_norm(record: ArrayRecord, sent: SentModel) -> float:
    """Return the squared norm of an update, without copying the reply."""
    if set(record) != set(sent.arrays):
        raise _RefusedError("keys other than those of the model")
    total = 0.0
    for key, model in sent.arrays.items():
        try:
            array = sent.layouts[key].view(record[key])
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
