"""Screening of replies: a bad one is refused and recorded, and training goes on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, Self

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.flower.outcomes import RoundOutcomes, Values
from fedipw.numerics.checks import check_positive
from fedipw.numerics.compiled import squared_distance
from fedipw.numerics.threads import over_ranges
from fedipw.weighting.weigher import RoundWeights

MEDIAN_OF = 3  # replies in a round before updates are compared with their median
STYPE = "numpy.ndarray"  # how arrays are serialised
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_Names = tuple[Any, ...]


class _RefusedError(Exception):
    """The reason for which a reply is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    r"""The conditions a reply must meet.

    Its one array record has the keys and shapes of the model that was sent, all numbers are finite,
    and the norm of the update :math:`\Delta_i` is at most ``max_norm``. With ``clip`` = C a longer
    update is clipped before it is weighted:

    .. math:: \Delta_i \leftarrow c_i \Delta_i, \quad
       c_i = \min(1, C / \lVert \Delta_i \rVert), \qquad (O6)

    so that no client moves the aggregate by more than :math:`C \max_i |w_i|`. Without ``clip``
    an update longer than ``clip_at_median`` times the median norm of the round's replies is
    clipped to that, in rounds of three replies or more. For the weights a
    refused client did not take part: a limit that clients exceed because of their data selects on
    the outcome, and no weight corrects that. Clipping biases the sum too, but keeps every client.

    Parameters
    ----------
    max_norm
        Largest norm of an update that is accepted.
    clip
        C, the same in all rounds, as noise needs it.
    clip_at_median
        Multiple of the round's median norm; none to leave updates as long as they are.
    """

    max_norm: float = 1e6
    clip: float | None = None
    clip_at_median: float | None = 10.0

    def __post_init__(self) -> None:
        check_positive(self.max_norm, "max_norm")
        if self.clip is not None:
            check_positive(self.clip, "clip")
        if self.clip_at_median is not None and not self.clip_at_median >= 1.0:
            raise InputError(
                f"clip_at_median must be 1 or more, not {self.clip_at_median!r}: half of the "
                "updates would be cut."
            )

    def limit(self, norms: Sequence[float]) -> float:
        """Return the norm that updates are clipped to in a round with these norms."""
        if self.clip is not None:
            return self.clip
        if self.clip_at_median is None or len(norms) < MEDIAN_OF:
            return math.inf
        return self.clip_at_median * float(np.median(norms)) or math.inf


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array is laid out in its bytes: its header, and what the header says."""

    head: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: str

    @classmethod
    def of(cls, array: Array) -> Self:
        """Return the layout of an array; ValueError for bytes that are not an array."""
        if array.stype != STYPE:
            raise ValueError(f"serialised as {array.stype!r}")
        stream = BytesIO(array.data)
        try:
            shape, fortran, dtype = _HEADERS[npy.read_magic(stream)](stream)
        except (KeyError, TypeError, EOFError) as error:
            raise ValueError("no header") from error
        if dtype.hasobject:
            raise ValueError("holds objects")
        return cls(array.data[: stream.tell()], dtype, shape, "F" if fortran else "C")

    def view(self, array: Array) -> NDArray[Any]:
        """Return an array's numbers without a copy, quickly if it has this layout."""
        own = self
        if array.stype != STYPE or not array.data.startswith(self.head):
            own = type(self).of(array)
        flat = np.frombuffer(array.data, dtype=own.dtype, offset=len(own.head))
        return flat.reshape(own.shape, order=own.order)  # type: ignore[call-overload,no-any-return]


def array_view(array: Array) -> NDArray[Any]:
    """Return an array without a copy, read-only, as its bytes say and not as its fields claim.

    Raises ValueError for bytes that are not an array.

    >>> from flwr.app import Array
    >>> array_view(Array(np.arange(3.0)))
    array([0., 1., 2.])
    """
    return Layout.of(array).view(array)


@dataclass(frozen=True, slots=True, eq=False)
class SentModel:
    """The model that clients were sent, with which their replies are compared."""

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


@dataclass(frozen=True, slots=True)
class Screened:
    """The updates that were accepted: their norms and how they are clipped."""

    factors: Mapping[int, float]  # c_i by place (O6), 1 where nothing is clipped
    norms: Mapping[int, float]  # by place, before clipping
    limit: float  # of norms, after clipping

    @property
    def largest_norm(self) -> float:
        """The largest norm before clipping, 0 if nothing was accepted."""
        return max(self.norms.values(), default=0.0)

    def metrics(self, found: RoundWeights | None, *, private: bool) -> Values:
        """Return metrics of the updates; if they are private, only those that do not read them."""
        values: Values = {} if private else {"update-norm-largest": self.largest_norm}
        if math.isfinite(self.limit):
            largest = 0.0 if found is None else float(np.abs(found.weights).max())
            values["influence"] = self.limit * largest
            if not private:
                values["clipped"] = sum(factor < 1.0 for factor in self.factors.values())
        return values


def screened(outcomes: RoundOutcomes, sent: SentModel, screen: Screen) -> Screened:
    """Refuse the replies that fail the screen, and return how the others are clipped."""
    parts = {place: _Parts.of(message.content) for place, message in outcomes.replies.items()}
    places, usual = list(parts), _usual(part.names for part in parts.values())
    found: list[float | _RefusedError] = [math.nan] * len(places)

    def norms(first: int, last: int) -> None:
        for k in range(first, last):
            try:
                found[k] = parts[places[k]].norm(usual, sent, screen)
            except _RefusedError as reason:
                found[k] = reason

    size = sum(array.size for array in sent.arrays.values())
    over_ranges(len(places), norms, work=float(size * len(places)))
    norms_found = [norm for norm in found if isinstance(norm, float)]
    floating = all(array.dtype.kind == "f" for array in sent.arrays.values())
    limit = screen.limit(norms_found) if floating else math.inf
    factors, kept = {}, {}
    for place, norm in zip(places, found, strict=True):
        if isinstance(norm, _RefusedError):
            outcomes.refuse(place, str(norm))
            continue
        kept[place] = norm
        factors[place] = limit / norm if norm > limit else 1.0
    return Screened(factors, kept, limit)


def screened_metrics(outcomes: RoundOutcomes) -> None:
    """Refuse replies to an evaluation whose metrics are not finite or differ from most."""
    parts = {
        place: replace(_Parts.of(message.content), arrays={})
        for place, message in outcomes.replies.items()
    }
    usual = _usual(part.names for part in parts.values())
    for place, part in parts.items():
        try:
            part.check_metrics(usual)
        except _RefusedError as reason:
            outcomes.refuse(place, str(reason))


def metrics_of(content: RecordDict) -> MetricRecord:
    """Return the one metric record of a reply."""
    return next(record for record in content.values() if isinstance(record, MetricRecord))


def arrays_of(content: RecordDict) -> ArrayRecord:
    """Return the one array record of a reply."""
    return next(record for record in content.values() if isinstance(record, ArrayRecord))


def _usual(names: Iterable[_Names]) -> _Names | None:
    """Return the names of records and metrics that most replies have; the first if tied."""
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
        """Return the norm of the update, or raise the reason to refuse it."""
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
