"""Memory methods on a server: a vector of every client on disk, and their weighted sum.

FedVARP and MIFA keep each client's latest update, SCAFFOLD its control variate. A round reads the
vectors of its respondents, in pieces, and writes new ones before the round is in the ledger.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from logging import getLogger
from pathlib import Path
from typing import Any, BinaryIO, Protocol, final

import numpy as np
import polars as pl
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedipw.combining.memory import MemoryWeights
from fedipw.errors import InputError
from fedipw.flower.arrays import FiledArray, array_view, packed_array
from fedipw.flower.client import (
    ACCEPTED,
    BASE,
    CONTROL,
    CONTROL_OWN,
    CONTROL_STATE,
    FACTOR,
    LENGTH,
    ROUND,
    control_change,
)
from fedipw.flower.outcomes import RoundOutcomes, Values
from fedipw.flower.screen import Screen, SentModel, arrays_of
from fedipw.flower.weighted_sum import WeightedReply
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.numerics.threads import over_ranges
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.storage.vectors import VectorStore, write_all
from fedipw.tables.columns import ID
from fedipw.weighting.pipeline import Method, Weighing
from fedipw.weighting.weigher import RoundWeights, StagedEnrollment

FOLDER = "memory"  # in the checkpoint's directory
_PIECE = 32_768  # parameters that are worked on at once, by each thread
_LOG = getLogger("flwr.fedipw")


@final
@dataclass(frozen=True, slots=True, eq=False)
class FlatModel:
    """The parameters of a model as one vector; buffers take no part."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: np.dtype[Any]  # of what is kept: the model's, single precision at least

    @classmethod
    def of(
        cls, arrays: Mapping[str, NDArray[Any]], method: str, buffers: frozenset[str] = frozenset()
    ) -> FlatModel:
        """Return it for a model, or raise if nothing is floating-point and not a buffer."""
        floating = {
            name: array
            for name, array in arrays.items()
            if array.dtype.kind == "f" and name not in buffers
        }
        if not floating:
            raise InputError(
                f"{method} remembers updates, and no array of the model is floating-point, buffers "
                "aside: use a method without a memory, such as fedipw-hajek."
            )
        dtype = np.result_type(*(array.dtype for array in floating.values()))
        shapes = {name: array.shape for name, array in floating.items()}
        return cls(shapes, max(dtype, np.dtype(np.float32)))

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def piece(self, arrays: Mapping[str, NDArray[Any]], where: slice) -> NDArray[Any]:
        """Return some parameters of a model in one vector."""
        out, first = np.empty(where.stop - where.start, dtype=self.dtype), 0
        for name, shape in self.shapes.items():
            last = first + math.prod(shape)
            begin, end = max(first, where.start), min(last, where.stop)
            if begin < end:
                flat = arrays[name].reshape(-1)
                out[begin - where.start : end - where.start] = flat[begin - first : end - first]
            first = last
        return out

    def filed(self, sent: SentModel, file: BinaryIO) -> ArrayRecord:
        """Return a model whose floating-point arrays lie in a file one after the other."""
        out, places = ArrayRecord(), dict(zip(self.shapes, self._starts(sent), strict=True))
        for name, array in sent.arrays.items():  # one by one: all at once they would be copied
            out[name] = sent.record[name]
            if name in places:
                out[name] = FiledArray(file, places[name], array.dtype, array.shape)
        return out

    def write(self, sent: SentModel, file: BinaryIO, where: slice, values: FloatArray) -> None:
        """Write some parameters to such a file, in the types of the model."""
        first = 0
        for (name, shape), place in zip(self.shapes.items(), self._starts(sent), strict=True):
            last = first + math.prod(shape)
            begin, end = max(first, where.start), min(last, where.stop)
            if begin < end:
                dtype = sent.arrays[name].dtype
                some = values[begin - where.start : end - where.start].astype(dtype)
                write_all(file.fileno(), some, place + (begin - first) * dtype.itemsize)
            first = last

    def _starts(self, sent: SentModel) -> list[int]:
        sizes = [sent.arrays[n].nbytes for n in self.shapes]
        return [0, *accumulate(sizes)][: len(sizes)]

    def pieces(self, start: int, stop: int) -> Iterator[slice]:
        """Yield the pieces from one number to another."""
        for k in range(start, stop):
            yield slice(k * _PIECE, min((k + 1) * _PIECE, self.size))

    def record(self, values: Callable[[slice], NDArray[Any]]) -> ArrayRecord:
        """Return a vector, given in pieces, as the arrays of a message."""
        out, first = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            made = np.empty(size, dtype=self.dtype)
            for start in range(0, size, _PIECE):
                stop = min(start + _PIECE, size)
                made[start:stop] = values(slice(first + start, first + stop))
            out[name] = packed_array(made.reshape(shape))
            first += size
        return ArrayRecord(out)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return -(-self.size // _PIECE)


@dataclass(frozen=True, slots=True, eq=False)
class _Reply:
    """A reply as the memory sees it."""

    row: int
    arrays: Mapping[str, NDArray[Any]]
    weight: float  # w, so that it is omega over the participation probability
    factor: float  # by which the update is clipped
    omega: float
    latest: int  # round of what is kept of it, 0 if nothing is
    length: float = 1.0  # K eta, for control variates
    held: bool = True  # whether the client had its control variate


class _Rule(Protocol):
    """What a memory keeps of a reply, and what it adds to the model."""

    def kept(
        self, reply: _Reply, update: NDArray[Any], old: NDArray[Any], mean: NDArray[Any]
    ) -> NDArray[Any]:
        """Return some of the numbers that are kept of a reply; ``mean`` is the sum as sent."""
        ...

    def taken(self, reply: _Reply, update: NDArray[Any], old: NDArray[Any]) -> FloatArray | None:
        """Return what the memory takes off the weighted sum for a reply."""
        ...

    def shift(self, before: FloatArray, after: FloatArray, taken: FloatArray) -> FloatArray | None:
        """Return what is added to the model, none if nothing ever is."""
        ...

    def influence(self, reply: _Reply, limit: float, norm: float) -> float:
        """Return how far a reply with an update of norm ``limit`` can move the aggregate.

        ``norm`` is that of what was kept of the client before.
        """
        ...


@final
class _FedVarp:
    r"""(O5): :math:`\sum_S w \Delta + (s - \sum_S w y)`."""

    def kept(
        self, reply: _Reply, update: NDArray[Any], old: NDArray[Any], mean: NDArray[Any]
    ) -> NDArray[Any]:
        del old, mean
        out: NDArray[Any] = update.dtype.type(reply.factor) * update
        return out

    def taken(self, reply: _Reply, update: NDArray[Any], old: NDArray[Any]) -> FloatArray | None:
        del update
        return reply.weight * old.astype(np.float64) if reply.latest else None

    def shift(self, before: FloatArray, after: FloatArray, taken: FloatArray) -> FloatArray | None:
        del after
        return before - taken

    def influence(self, reply: _Reply, limit: float, norm: float) -> float:
        return abs(reply.weight) * limit + abs(reply.omega - reply.weight) * norm


@final
class _Mifa:
    r"""(O14): :math:`s^+`, so that the replies' plain mean is taken off again."""

    def kept(
        self, reply: _Reply, update: NDArray[Any], old: NDArray[Any], mean: NDArray[Any]
    ) -> NDArray[Any]:
        del old, mean
        out: NDArray[Any] = update.dtype.type(reply.factor) * update
        return out

    def taken(self, reply: _Reply, update: NDArray[Any], old: NDArray[Any]) -> FloatArray | None:
        del old
        return (reply.weight * reply.factor) * update.astype(np.float64)

    def shift(self, before: FloatArray, after: FloatArray, taken: FloatArray) -> FloatArray | None:
        del before
        return after - taken

    def influence(self, reply: _Reply, limit: float, norm: float) -> float:
        return abs(reply.omega) * max(limit, norm)


@final
class _Scaffold:
    """(O15): the model moves by the plain mean of corrected updates."""

    def kept(
        self, reply: _Reply, update: NDArray[Any], old: NDArray[Any], mean: NDArray[Any]
    ) -> NDArray[Any]:
        made = control_change(np.zeros_like(update), update, mean, reply.length)
        if reply.held and reply.latest:
            made = old + made
        made *= made.dtype.type(reply.factor)
        return made

    def taken(self, reply: _Reply, update: NDArray[Any], old: NDArray[Any]) -> FloatArray | None:
        del reply, update, old
        return None

    def shift(self, before: FloatArray, after: FloatArray, taken: FloatArray) -> FloatArray | None:
        del before, after, taken
        return None

    def influence(self, reply: _Reply, limit: float, norm: float) -> float:
        del norm
        return abs(reply.weight) * limit


_RULES: Mapping[str, _Rule] = {"fedvarp": _FedVarp(), "mifa": _Mifa(), "scaffold": _Scaffold()}


@dataclass(slots=True)
class _Known:
    """What is known of the vectors on disk, row by row; saved with the model."""

    latest: IntArray  # (n,) round of each client's file, 0 if it has none
    norms: FloatArray  # (n,) of the vectors
    factors: FloatArray  # (n,) by which control variates were clipped
    omega: FloatArray  # (n,) enrollment weights behind the sum
    total: int  # round of the sum's file, 0 if there is none
    slots: IntArray  # (n,) number of each client's files

    @classmethod
    def empty(cls, slots: IntArray) -> _Known:
        zeros = np.zeros(len(slots))
        return cls(np.zeros(len(slots), dtype=np.int64), zeros, zeros.copy(), zeros.copy(), 0,
                   slots)  # fmt: skip

    @classmethod
    def of(cls, state: Mapping[str, Any], slots: IntArray) -> _Known:
        """Return what was saved in the order in which clients came; later ones have nothing."""
        count = len(state["latest"])

        def mine(name: str) -> NDArray[Any]:
            saved = np.array(state[name])
            whole = np.zeros(max(len(slots), count), dtype=saved.dtype)
            whole[:count] = saved
            return whole[slots]

        return cls(mine("latest"), mine("norms"), mine("factors"), mine("omega"),
                   int(state["total"]), slots)  # fmt: skip

    def ordered(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return numbers of the clients in the order in which they came."""
        out = np.zeros_like(array)
        out[self.slots] = array
        return out

    @property
    def rows(self) -> dict[int, int]:
        """Rounds of the files by row."""
        rows = np.flatnonzero(self.latest)
        return dict(zip(rows.tolist(), self.latest[rows].tolist(), strict=True))

    @property
    def files(self) -> dict[int, int]:
        """Rounds of the files by their number."""
        return {int(self.slots[row]): index for row, index in self.rows.items()}


@final
class ClientMemory:
    r"""A vector :math:`y_i` of every client on disk, and :math:`s = \sum_E \omega_i y_i`.

    In memory are some numbers of each client, and pieces of vectors. A round reads the files of its
    respondents and the sum, and writes new ones under its own number; the old ones are removed when
    the round is closed. When enrollment weights change, because clients join or leave, the sum is
    made anew from all files; a client that left is forgotten.

    Parameters
    ----------
    method
        With a memory among its choices.
    stage
        Enrollment, for weights under which clients are remembered (W16).
    directory
        Of the files.
    slots
        Numbers of the clients' files, (n,), which stay the same when others join or leave; their
        rows by default.
    """

    def __init__(
        self,
        method: Method,
        stage: EnrollmentStage,
        directory: Path,
        slots: IntArray | None = None,
    ) -> None:
        if method.calibration.pools_respondents:
            raise InputError(
                f"{method.name}: a memory needs enrollment weights that stay the same from round "
                "to round, and this calibration learns them as rounds go by. Use a calibration of "
                "the enrolled, such as efficient's."
            )
        self.method, self._stage, self._directory = method, stage, directory
        self.rule = method.augmentation.memory
        self._rule, self._clients = _RULES[self.rule], stage.members.size
        self._slots = np.arange(self._clients) if slots is None else slots
        self._ids = stage.members.frame[ID][np.argsort(self._slots)].cast(pl.String).to_list()
        self._digest = _digest(self._ids)
        self._flat: FlatModel | None = None
        self._store: VectorStore | None = None
        self._known = _Known.empty(self._slots)
        self._stale: list[Path] = []  # files that do not count once the round is closed
        self._weighing: Weighing | None = None  # behind the weights of the open round
        self._weights: MemoryWeights | None = None
        self._present: BoolArray | None = None
        self._summed = False  # whether the sum on disk is under these weights
        self._sent: dict[str, NDArray[Any]] = {}  # the mean of control variates that was sent
        self._holders: dict[int, int] = {}  # nodes that have their client's control variate, by row
        self._controls: dict[int, tuple[float, bool, float]] = {}  # of the round's replies, by row
        self._largest = 0.0  # influence in the round
        self._scratch: BinaryIO | None = None  # the model of the round that replies are added to

    @property
    def controls(self) -> bool:
        """Whether clients keep control variates."""
        return self.rule == "scaffold"

    @property
    def begun(self) -> bool:
        """Whether it knows the model."""
        return self._flat is not None

    def begin(
        self,
        arrays: Mapping[str, NDArray[Any]],
        state: Mapping[str, Any],
        buffers: frozenset[str] = frozenset(),
    ) -> None:
        """Take the model and what was saved with it, empty before the first round.

        Files that do not belong to the last closed round are removed, and those that do must be
        there and whole.
        """
        flat = FlatModel.of(arrays, self.method.name, buffers)
        if state:
            names = state["arrays"]
            floating = {name: arrays[name].shape for name in names}
            flat = FlatModel(floating, np.dtype(state["dtype"]))
            count = len(state["latest"])
            same = count <= self._clients and state["clients"] == _digest(self._ids[:count])
            if state["rule"] != self.rule or not same:
                raise InputError(
                    f"{self._directory} was written for other clients, or for the same in another "
                    f"order, or by {state['rule']}: go on with the table and the scheme it was "
                    "begun with, or begin with an empty ledger."
                )
        self._flat = flat
        store = self._store = VectorStore(self._directory, flat.size, flat.dtype)
        self._known, self._holders = _Known.empty(self._slots), {}
        self._weighing = self._weights = self._present = None
        if state:
            self._known = _Known.of(state, self._slots)
        there = store.check(self._known.files, self._known.total)
        store.keep_only(self._known.files, self._known.total)
        if not there:
            _LOG.warning("FedIPW: %s is missing: the sum is made anew from the clients' files, and "
                         "may differ in the last digits", store.sum(self._known.total))  # fmt: skip
            self._known.total, self._known.omega = 0, np.full(self._clients, np.nan)

    def line(self) -> str:
        """Return the log's line on its size; a warning is logged where the disk is too small."""
        _, store = self._opened()
        needed = self._clients * store.bytes_each + 2 * store.bytes_of_sum
        taken, free = store.room()
        line = (
            f"memory of updates ({self.rule}): {self._clients:,} clients x "
            f"{_bytes(store.bytes_each)} = up to {_bytes(needed)} in {self._directory}, and each "
            f"round's replies twice until it closes; {_bytes(free)} free"
        )
        if free < needed - taken:
            _LOG.warning(
                "FedIPW: the disk of %s has %s free, and the memory may grow by %s: training will "
                "stop when it is full, and can go on after the last closed round",
                self._directory, _bytes(free), _bytes(needed - taken),
            )  # fmt: skip
        return line

    def influence(self) -> str:
        """Return the log's line on what a kept vector can do."""
        what = {
            "fedvarp": "a kept update counts with the client's enrollment weight omega in every "
            "round until it replies again: w (update - kept) + omega kept",
            "mifa": "every update counts with the client's enrollment weight omega, in its round "
            "and in every later one until it replies again; weights of replies play no part",
            "scaffold": "updates count alike, and a control variate with the client's enrollment "
            "weight omega in the mean that all clients are sent, until it replies again; control "
            "variates are clipped at the same multiple of their median norm as updates",
        }[self.rule]
        everybody = ~self._stage.members.gone
        weighing = self.method.at(StagedEnrollment(self._stage, self.method).at(everybody))
        largest = float(np.abs(MemoryWeights.of(weighing).enrollment_weights).max())
        known = "" if self._stage.members.changes else f", at most {largest:.4g}"
        return f"{what}{known}"

    def open(self, weighing: Weighing, present: BoolArray) -> None:
        """Take enrollment as it is in a round: the weighing of its replies, and who is enrolled."""
        if self.method.augmentation.weighs_replies:
            if weighing is not self._weighing:
                self._weights = MemoryWeights.of(weighing)
            self._weighing = weighing
        elif self._present is None or not np.array_equal(present, self._present):
            state = StagedEnrollment(self._stage, self.method).at(present)
            self._weights = MemoryWeights.of(self.method.at(state))
        self._present = present
        assert self._weights is not None
        omega = self._weights.enrollment_weights
        self._summed = bool(self._known.total) and np.array_equal(self._known.omega, omega)

    def invite(self, index: int, messages: Sequence[Message], rows: Sequence[int]) -> None:
        """Add control variates to a round's invitations, to the clients ``rows``."""
        flat, store = self._opened()
        if not (self.controls and messages):
            return
        shared = flat.record(self._sum)
        self._sent = {name: array_view(array) for name, array in shared.items()}
        for message, row in zip(messages, rows, strict=True):
            accepted = int(self._known.latest[row])
            told = ConfigRecord(
                {ROUND: index, ACCEPTED: accepted, FACTOR: float(self._known.factors[row])}
            )
            content = dict(message.content.items())
            content |= {CONTROL: shared, CONTROL_STATE: told}
            if accepted and self._holders.get(row) != message.metadata.dst_node_id:
                own = int(self._slots[row])
                content[CONTROL_OWN] = flat.record(partial(store.vector, own, accepted))
            message.content = RecordDict(content)

    def screened(
        self,
        outcomes: RoundOutcomes,
        rows: IntArray,
        sent: SentModel,
        screen: Screen,
    ) -> None:
        """Refuse replies whose control variates cannot be taken, and find how others are clipped.

        ``rows`` are of the members, by place.
        """
        if not self.controls:
            return
        flat, _ = self._opened()
        self._controls, found = {}, {}
        for place, message in list(outcomes.replies.items()):
            row = int(rows[place])
            told = message.content.config_records.get(CONTROL)
            if told is None:
                outcomes.refuse(
                    place, "no control variate: its app needs fedipw.flower.ControlVariate"
                )
                continue
            del message.content[CONTROL]
            length, base = told.get(LENGTH), told.get(BASE)
            accepted = int(self._known.latest[row])
            if not (isinstance(length, float) and _positive(length, flat.dtype)):
                outcomes.refuse(place, f"a local path of length {length!r}")
            elif type(base) is not int or base not in {0, accepted}:
                outcomes.refuse(place, f"a control variate of round {base!r}, not {accepted}")
            else:
                found[place] = (row, length, base == accepted)
        places, norms = list(found), np.zeros(len(found))

        def work(start: int, stop: int) -> None:
            for k in range(start, stop):
                row, length, held = found[places[k]]
                arrays, latest = (
                    _views(outcomes.replies[places[k]], sent, flat),
                    int(latest_of[row]),
                )
                reply = _Reply(row, arrays, 0.0, 1.0, 0.0, latest, length, held)
                norms[k] = self._norm(reply, sent)

        latest_of = self._known.latest
        over_ranges(len(places), work, work=float(flat.size * len(places)))
        good = []
        for place, norm in zip(places, norms.tolist(), strict=True):
            if not norm <= screen.max_norm:  # NaN is not
                outcomes.refuse(place, f"a control variate of norm {norm:.3g}")
            else:
                good.append((place, norm))
        times = Screen(max_norm=screen.max_norm, clip_at_median=screen.clip_at_median)
        limit = times.limit([norm for _, norm in good])
        for place, norm in good:
            row, length, held = found[place]
            self._controls[row] = (length, held, limit / norm if norm > limit else 1.0)

    def _norm(self, reply: _Reply, sent: SentModel) -> float:
        """Return the norm of what would be kept of a reply."""
        flat, total = self._opened()[0], 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # not finite: it is refused
            for where in flat.pieces(0, flat.count):
                update = flat.piece(reply.arrays, where) - flat.piece(sent.arrays, where)
                mean, old = flat.piece(self._sent, where), self._old(reply, where)
                kept = self._rule.kept(reply, update, old, mean)
                total += float(np.square(kept, dtype=np.float64).sum())
        return math.sqrt(total) if math.isfinite(total) else math.inf

    def weighted(self, replies: Sequence[WeightedReply]) -> list[WeightedReply]:
        """Return replies with weights that are omega over the participation probability."""
        assert self._weights is not None
        scale = self._weights.scale if self.method.augmentation.weighs_replies else 1.0
        return [WeightedReply(r.message, scale * r.weight, r.factor) for r in replies]

    def correction(
        self,
        index: int,
        replies: Sequence[WeightedReply],
        found: RoundWeights,
        sent: SentModel,
        limit: float,
    ) -> ArrayRecord | None:
        """Keep a round's replies, and return the model they are added to, none if it is as sent.

        ``replies`` are those of :meth:`weighted`, in the order of ``found``; ``limit`` is the norm
        that updates are clipped to.
        """
        flat, store = self._opened()
        assert self._weights is not None
        omega, known = self._weights.enrollment_weights, self._known
        mine = [
            self._reply(int(row), reply, sent, omega)
            for row, reply in zip(found.replies.rows, replies, strict=True)
        ]
        left = np.flatnonzero((known.latest > 0) & ~self._weights.weighing.state.enrolled)
        squares = np.zeros((len(mine), flat.count))
        slots = [int(self._slots[reply.row]) for reply in mine]
        with store.writing(slots, index) as (files, total):
            moved = self._scratch = store.scratch()

            def work(start: int, stop: int) -> None:
                for k, where in zip(range(start, stop), flat.pieces(start, stop), strict=True):
                    before = self._sum(where)
                    after, taken = before.copy(), np.zeros(len(before))
                    model = flat.piece(sent.arrays, where)
                    mean = flat.piece(self._sent, where) if self.controls else model
                    for j, reply in enumerate(mine):
                        update = flat.piece(reply.arrays, where)
                        update -= model
                        old = self._old(reply, where)
                        new = self._rule.kept(reply, update, old, mean)
                        less = self._rule.taken(reply, update, old)
                        if less is not None:
                            taken += less
                        after += reply.omega * (new.astype(np.float64) - old)
                        squares[j, k] = np.square(new, dtype=np.float64).sum()
                        store.put(files[slots[j]], where, new)
                    store.put_sum(total, where, after)
                    shift = self._rule.shift(before, after, taken)
                    if shift is not None:
                        flat.write(sent, moved, where, model + shift)

            over_ranges(flat.count, work, work=float(flat.size * len(mine)))
        self._largest = max(
            self._rule.influence(reply, limit, float(known.norms[reply.row])) for reply in mine
        )
        self._stale += [store.client(int(self._slots[row]), int(known.latest[row])) for row in left]
        self._stale += [
            store.client(slot, reply.latest)
            for slot, reply in zip(slots, mine, strict=True)
            if reply.latest
        ]
        self._stale += [store.sum(known.total)] if known.total else []
        for array in (known.latest, known.norms, known.factors):
            array[left] = 0
        rows = [reply.row for reply in mine]
        known.latest[rows], known.norms[rows] = index, np.sqrt(squares.sum(axis=1))
        known.factors[rows] = [reply.factor for reply in mine]
        known.omega, known.total, self._summed = omega.copy(), index, True
        kept = known.latest > 0
        kept[rows] = False
        if not self.controls:  # what clients do that did not reply
            held = np.abs(omega[kept]) * known.norms[kept]
            self._largest = max(self._largest, float(held.max(initial=0.0)))
        for reply, weighted in zip(mine, replies, strict=True):
            self._holders[reply.row] = weighted.message.metadata.src_node_id
        return None if self.controls else flat.filed(sent, moved)

    def _reply(self, row: int, reply: WeightedReply, sent: SentModel, omega: FloatArray) -> _Reply:
        flat, _ = self._opened()
        length, held, factor = self._controls.get(row, (1.0, True, reply.factor))
        return _Reply(
            row, _views(reply.message, sent, flat), reply.weight, factor, float(omega[row]),
            int(self._known.latest[row]), length, held,
        )  # fmt: skip

    def _old(self, reply: _Reply, where: slice) -> NDArray[Any]:
        flat, store = self._opened()
        if not reply.latest:
            return np.zeros(where.stop - where.start, dtype=flat.dtype)
        return store.vector(int(self._slots[reply.row]), reply.latest, where)

    def _sum(self, where: slice) -> FloatArray:
        """Return some numbers of s under the present weights, from its file if they are those."""
        _, store = self._opened()
        known, weights = self._known, self._weights
        assert weights is not None
        omega = weights.enrollment_weights
        if self._summed:
            return store.total(known.total, where)
        out = np.zeros(where.stop - where.start)
        for row, index in known.rows.items():
            if omega[row]:
                kept = store.vector(int(self._slots[row]), index, where)
                out += omega[row] * kept.astype(np.float64)
        return out

    def metrics(self, limit: float) -> Values:
        """Return how many clients are remembered, their weight, and the round's bound."""
        assert self._weights is not None
        kept = self._known.latest > 0
        share = float(self._weights.enrollment_weights[kept].sum())
        values: Values = {"memory-clients": int(kept.sum()), "memory-weight": share}
        if math.isfinite(limit) and self._largest:
            values["influence"] = self._largest
        return values

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the files."""
        flat, _ = self._opened()
        known = self._known
        return {
            "rule": self.rule, "clients": self._digest, "arrays": list(flat.shapes),
            "dtype": flat.dtype.str, "latest": known.ordered(known.latest),
            "norms": known.ordered(known.norms), "factors": known.ordered(known.factors),
            "omega": known.ordered(known.omega), "total": known.total,
        }  # fmt: skip

    def release(self) -> None:
        """Let go of the model that ``correction`` returned."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def close(self) -> None:
        """Remove what does not count any more, after the round is in the ledger."""
        _, store = self._opened()
        store.remove(self._stale)
        self._stale, self._sent, self._controls, self._largest = [], {}, {}, 0.0

    def _opened(self) -> tuple[FlatModel, VectorStore]:
        if self._flat is None or self._store is None:
            raise InputError("The memory does not know the model yet: call begin first.")
        return self._flat, self._store


def _digest(ids: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(ids).encode()).hexdigest()


def _views(message: Message, sent: SentModel, flat: FlatModel) -> dict[str, NDArray[Any]]:
    record = arrays_of(message.content)
    return {name: sent.layouts[name].view(record[name]) for name in flat.shapes}


def _positive(value: float, dtype: np.dtype[Any]) -> bool:
    """Return whether a number is positive and finite in a type."""
    with np.errstate(over="ignore", under="ignore"):
        return bool(0.0 < dtype.type(value) < np.inf)


def _bytes(size: float) -> str:
    """Return a number of bytes in words.

    >>> _bytes(4_000_128), _bytes(2e10), _bytes(812)
    ('4.0 MB', '20.0 GB', '812 bytes')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} bytes"
