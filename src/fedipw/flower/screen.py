"""Screening of replies: a bad one is refused and recorded, and training goes on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.flower.arrays import Layout, QuickArray
from fedipw.flower.buffers import NON_NEGATIVE, buffer_limit, buffer_names, last_part
from fedipw.flower.covariates import brief
from fedipw.flower.outcomes import PREFIX, RoundOutcomes, Values
from fedipw.numerics.checks import LARGEST, check_positive
from fedipw.numerics.compiled import squared_distance
from fedipw.numerics.threads import over_ranges
from fedipw.storage.atomic import is_file_name
from fedipw.weighting.weigher import RoundWeights

METRICS_MOST = 1_000  # of a reply
_OURS = ("-plain", "-target", "-target-se", "-target-low", "-target-high")  # ends of names
MEDIAN_OF = 3  # replies in a round before updates are compared with their median
_WIDEST = 8  # bytes of a floating-point number that kernels take
Names = tuple[Any, ...]  # of the records of a reply and of its metrics


class _RefusedError(Exception):
    """The reason for which a reply is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    r"""The conditions a reply must meet.

    Its one array record has the keys and shapes of the model that was sent, all numbers are finite,
    and the norm of the update :math:`\Delta_i` is at most ``max_norm``. The update is that of the
    parameters, without buffers (:mod:`fedipw.flower.buffers`). With ``clip`` = C a longer
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
        Multiple of the round's median norm; none to leave updates as long as they are. Buffers are
        held to the same multiple of their own median distance (O22), with ``clip`` too.
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


@dataclass(frozen=True, slots=True, eq=False)
class SentModel:
    """The model that clients were sent, with which their replies are compared."""

    record: ArrayRecord
    arrays: Mapping[str, NDArray[Any]]  # in the types that are computed with
    layouts: Mapping[str, Layout]
    buffers: frozenset[str] = frozenset()

    @classmethod
    def of(cls, record: ArrayRecord, patterns: Sequence[str] = ()) -> SentModel:
        """Return a model; ``patterns`` name buffers that are not found by themselves."""
        if not record:
            raise InputError("The model has no arrays: give initial_arrays.")
        layouts, arrays = {}, {}
        for key, array in record.items():
            try:
                layouts[key] = Layout.of(array)
            except ValueError as error:
                raise InputError(f"Array {key!r} of the model cannot be read: {error}.") from error
            _check_type(key, layouts[key])
            view = layouts[key].view(array)
            arrays[key] = view.astype(layouts[key].working, copy=False)
        return cls(record, arrays, layouts, buffer_names(arrays, patterns))

    @property
    def parameters(self) -> dict[str, NDArray[Any]]:
        """The arrays that are trained: all but the buffers."""
        return {key: array for key, array in self.arrays.items() if key not in self.buffers}

    def readable(self) -> ArrayRecord:
        """Return the model so that a strategy can read it: NumPy has no bfloat16."""
        if not any(layout.bfloat for layout in self.layouts.values()):
            return self.record
        out = ArrayRecord()
        for key, array in self.record.items():
            out[key] = QuickArray.of(array, self.layouts[key])
        return out

    def send_plain(self, messages: Sequence[Message], readable: ArrayRecord) -> None:
        """Let messages carry the model as it was given: Flower sends no arrays of ours."""
        if readable is self.record:
            return
        for message in messages:
            for name, record in list(message.content.items()):
                if isinstance(record, ArrayRecord) and any(
                    isinstance(array, QuickArray) for array in record.values()
                ):
                    message.content[name] = self.record


def _check_type(key: str, layout: Layout) -> None:
    """Refuse types that cannot be averaged."""
    kind, size = layout.dtype.kind, layout.dtype.itemsize
    if kind not in "fiub" or (kind == "f" and size > _WIDEST):
        raise InputError(
            f"Array {key!r} of the model is {layout.name}, which cannot be averaged: send "
            "float16, bfloat16, float32, float64, integers or true and false (a complex array as "
            "its real and imaginary parts)."
        )


@dataclass(frozen=True, slots=True)
class Screened:
    """The updates that were accepted: their norms and how they are clipped."""

    factors: Mapping[int, float]  # c_i by place (O6), 1 where nothing is clipped
    norms: Mapping[int, float]  # by place, before clipping
    limit: float  # of norms, after clipping
    names: Names | None = None  # of records and metrics, that the accepted replies have
    buffers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # c_i (O22) by place
    not_finite: Mapping[int, str] = field(default_factory=dict)  # a metric by place, left out

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
        if any(self.buffers.values()):
            clipped = (min(each.values()) < 1.0 for each in self.buffers.values())
            values["buffers-clipped"] = sum(clipped)
        if self.not_finite:
            values["metrics-not-finite"] = len(self.not_finite)
        return values


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the screen measures of a reply that passes."""

    norm: float  # of the update
    distances: Mapping[str, float]  # of buffers from those that were sent


def screened(
    outcomes: RoundOutcomes,
    sent: SentModel,
    screen: Screen,
    *,
    key: str = "",
    before: Names | None = None,
) -> Screened:
    """Refuse the replies that fail the screen, and return how the others are clipped.

    Whatever inspecting a reply raises refuses that reply. ``key`` is the metric that strategies
    weight by, ``before`` the names of records and metrics of the replies of earlier rounds: for
    :func:`usual_names`.
    """
    parts = _parts(outcomes)
    places, usual = list(parts), usual_names([p.names for p in parts.values()], key, before)
    found: list[_Measured | _RefusedError] = [_RefusedError("not read")] * len(places)

    def measure(first: int, last: int) -> None:
        for k in range(first, last):
            part = parts[places[k]]
            found[k] = _caught(lambda part=part: part.measured(usual, sent, screen))  # type: ignore[misc]

    size = sum(array.size for array in sent.arrays.values())
    over_ranges(len(places), measure, work=float(size * len(places)))
    good = {}
    for place, made in zip(places, found, strict=True):
        if isinstance(made, _RefusedError):
            outcomes.refuse(place, str(made))
        else:
            good[place] = made
    norms = {place: made.norm for place, made in good.items()}
    limit = screen.limit(list(norms.values()))
    return Screened(
        factors={place: limit / n if n > limit else 1.0 for place, n in norms.items()},
        norms=norms,
        limit=limit,
        names=usual if good else before,
        buffers=_buffer_factors(good, sent, screen),
        not_finite={p: bad for p in good if (bad := parts[p].not_finite())},
    )


def _buffer_factors(
    good: Mapping[int, _Measured], sent: SentModel, screen: Screen
) -> dict[int, dict[str, float]]:
    """Return by how much of their way buffers of the replies move (O22), by place and name."""
    out: dict[int, dict[str, float]] = {place: {} for place in good}
    for name in sorted(sent.buffers):
        far = {place: made.distances[name] for place, made in good.items()}
        limit = buffer_limit(list(far.values()), screen.clip_at_median, MEDIAN_OF)
        for place, distance in far.items():
            out[place][name] = limit / distance if distance > limit else 1.0
    return out


def _caught(inspect: Callable[[], _Measured]) -> _Measured | _RefusedError:
    """Return what an inspection returns, or why the reply is refused."""
    try:
        return inspect()
    except _RefusedError as reason:
        return reason
    # a reply is a stranger's bytes: what it can raise cannot be listed
    except Exception as error:
        return _RefusedError(f"{type(error).__name__} while it was read")


def screened_metrics(
    outcomes: RoundOutcomes, *, key: str = "", before: Names | None = None
) -> Names | None:
    """Refuse replies to an evaluation whose metrics cannot be used or differ from most.

    Returns the names of records and metrics that the others have.
    """
    parts = {place: replace(part, arrays={}) for place, part in _parts(outcomes).items()}
    usual = usual_names([part.names for part in parts.values()], key, before)
    for place, part in parts.items():
        try:
            part.check_names(usual)
            bad = part.not_finite()
            if bad:
                raise _RefusedError(f"metric {brief(bad)} is not finite, or beyond {LARGEST:g}")
        except _RefusedError as reason:
            outcomes.refuse(place, str(reason))
    return usual if outcomes.replies else before


def _parts(outcomes: RoundOutcomes) -> dict[int, _Parts]:
    """Return the records of the replies; one that has none that can be listed is refused."""
    found = {}
    for place, message in list(outcomes.replies.items()):
        try:
            part = _Parts.of(message.content)
            hash(part.names)
            fault = name_fault(name for record in part.metrics.values() for name in record)
            if fault:  # before votes on names are counted
                outcomes.refuse(place, fault)
            else:
                found[place] = part
        except Exception as error:
            outcomes.refuse(place, f"{type(error).__name__} while it was read")
    return found


def metrics_of(content: RecordDict) -> MetricRecord:
    """Return the one metric record of a reply."""
    return next(record for record in content.values() if isinstance(record, MetricRecord))


def arrays_of(content: RecordDict) -> ArrayRecord:
    """Return the one array record of a reply."""
    return next(record for record in content.values() if isinstance(record, ArrayRecord))


def usual_names(names: Sequence[Names], key: str = "", before: Names | None = None) -> Names | None:
    """Return the names of records and metrics that replies must have.

    Those of earlier rounds, unless more than half of the replies agree on others. In the first
    round those that most have; of those that tie, those with the metric ``key``, by which the
    strategy weights; and of these the first in the order of the clients' table, which is not that
    in which replies arrive.

    >>> ours, theirs = ((("m", (("n", -1),)),), ("a",)), ((("m", (("x", -1),)),), ("a",))
    >>> usual_names([theirs, ours], "n") == ours
    True
    >>> usual_names([theirs, ours, theirs, ours], before=ours) == ours
    True
    """
    found = Counter(names)
    if not found:
        return before
    most = max(found.values())
    if before is not None and found[before] and 2 * most <= len(names):
        return before
    tied = [name for name, count in found.items() if count == most]
    return next((name for name in tied if _has_metric(name, key)), tied[0])


def _has_metric(names: Names, key: str) -> bool:
    return any(key == metric for _, metrics in names[0] for metric, _ in metrics)


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
    def names(self) -> Names:
        metrics = tuple(
            (name, tuple(sorted((k, len(v) if isinstance(v, list) else -1)
                                for k, v in record.items())))
            for name, record in sorted(self.metrics.items())
        )  # fmt: skip
        return metrics, tuple(sorted(self.arrays))

    def check_names(self, usual: Names | None) -> None:
        """Refuse records and metrics other than most replies have."""
        if len(self.metrics) != 1:
            raise _RefusedError(f"{len(self.metrics)} metric records, not one")
        if self.names != usual:
            raise _RefusedError("records or metrics other than those of most replies")

    def not_finite(self) -> str:
        """Return the first metric that is not finite or beyond 1e100, empty if none is."""
        for name, value in next(iter(self.metrics.values())).items():
            if not is_usable(value):
                return name
        return ""

    def measured(self, usual: Names | None, sent: SentModel, screen: Screen) -> _Measured:
        """Return the norm of the update and distances of buffers, or raise why it is refused."""
        if len(self.arrays) != 1:
            raise _RefusedError(f"{len(self.arrays)} array records, not one")
        self.check_names(usual)
        record, total, distances = next(iter(self.arrays.values())), 0.0, {}
        if set(record) != set(sent.arrays):
            raise _RefusedError("keys other than those of the model")
        for key, model in sent.arrays.items():
            square = squared_distance(_checked(key, record, sent), model)
            if key in sent.buffers:
                distances[key] = math.sqrt(square)
            else:
                total += square
            if not math.isfinite(square):
                raise _RefusedError("NaN or infinite values")
        norm = math.sqrt(total)
        if not math.isfinite(norm):
            raise _RefusedError("NaN or infinite values")
        if norm > screen.max_norm:
            raise _RefusedError(f"update of norm {norm:.3g}")
        return _Measured(norm, distances)


def is_usable(value: Any) -> bool:
    """Return whether a metric, a number or a list of them, is finite and not beyond 1e100.

    Squares of larger ones, as intervals have them, would not be finite.

    >>> is_usable(0.5), is_usable([1.0, float("nan")]), is_usable(1e200), is_usable(10**400)
    (True, False, False, False)
    """
    values = value if isinstance(value, list) else [value]
    return all(-LARGEST <= number <= LARGEST for number in values)  # NaN is not


def name_fault(names: Iterable[str]) -> str:
    """Return why metrics cannot be named so, empty if they can.

    Metrics of evaluations are files: a name of dots, one that is too long, or one that is no text
    would write elsewhere or not at all. Names of the server's own metrics are no client's to use.

    >>> name_fault(["loss", "top-5 accuracy"]), name_fault([".."])
    ('', "a metric named '..'")
    """
    known = list(names)
    if len(known) > METRICS_MOST:
        return f"{len(known)} metrics, more than {METRICS_MOST}"
    for name in known:
        if not is_file_name(name):
            return f"a metric named {brief(name)}"
        if name.startswith(PREFIX) or name.endswith(_OURS):
            return (
                f"a metric named {brief(name)}, as the server names its own: give it another name"
            )
    return ""


def _checked(key: str, record: ArrayRecord, sent: SentModel) -> NDArray[Any]:
    """Return an array of a reply without a copy; refuse one of another shape or kind."""
    model, layout = sent.arrays[key], sent.layouts[key]
    try:
        array = layout.view(record[key])
    except ValueError as error:
        raise _RefusedError(f"{key!r} cannot be read") from error
    if array.shape != model.shape:
        raise _RefusedError(f"{key!r} has shape {array.shape}, not {model.shape}")
    floating = model.dtype.kind == "f"
    if (array.dtype.kind != "f") if floating else (array.dtype != layout.dtype):
        raise _RefusedError(f"{key!r} is {array.dtype}, not {layout.name}")
    if floating and array.dtype.itemsize > model.dtype.itemsize and array.size:
        largest = float(np.abs(array).max())
        if math.isfinite(largest) and largest > float(np.finfo(model.dtype).max):
            raise _RefusedError(f"{key!r} has numbers beyond {model.dtype}")
    signed = key in sent.buffers and last_part(key) in NON_NEGATIVE and array.dtype.kind in "fi"
    if signed and (array < 0).any() and not (model < 0).any():
        raise _RefusedError(f"{key!r} is negative")
    return array
