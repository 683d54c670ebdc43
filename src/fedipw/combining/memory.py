"""Memory methods: what the server keeps of every enrolled client, under enrollment weights.

They alone see update vectors. Each keeps one vector per enrolled client and a running sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows
from fedipw.selection.participation import Source

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray
    from fedipw.weighting.pipeline import Weighing
    from fedipw.weighting.weigher import Replies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemorySum:
    """What takes the place of a round's weighted sum, or why there is none yet."""

    total: FloatArray | None  # (P,)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryWeights:
    r"""A weighting as memory uses it: once for all enrolled clients, participation aside.

    .. math:: \omega_i = \frac{w_i}{\sum_{j \in E} w_j}, \quad w = \text{the method's weights at }
       \pi^{part} = 1 \qquad (W16)

    is :math:`1/N_{enr}` for plain means, proportional to :math:`1/\hat\pi^{enr}_i` for FedIPW and
    q for calibrated weights.
    """

    weighing: Weighing
    enrollment_weights: FloatArray  # (N,) omega, zero where not enrolled
    scale: float  # of the scheme's weights, so that they are omega / pi_part

    @classmethod
    def of(cls, weighing: Weighing) -> MemoryWeights:
        """Return it for a method at its enrollment."""
        state = weighing.state
        rows = np.flatnonzero(state.enrolled)
        weights = weighing.weights(state.replies(0, rows, np.ones(len(rows)), Source.NONE))
        total = float(weights.sum())
        if not (np.isfinite(total) and total > 0.0):
            raise InputError(f"Enrollment weights must have a positive sum, not {total:.3g}.")
        omega = np.zeros(len(state.unit_ids))
        omega[rows] = weights / total
        scale = 1.0 if weighing.self_normalised else 1.0 / total
        return cls(weighing=weighing, enrollment_weights=omega, scale=scale)

    def everyone(self) -> Replies:
        """Return all N clients at participation 1."""
        ones = np.ones(len(self.enrollment_weights))
        return self.weighing.state.replies(0, np.arange(len(ones)), ones, Source.NONE)


class Memory(Protocol):
    """A rule that remembers something of every client."""

    def corrections(self, rows: IntArray) -> FloatArray | None:
        """Return what is added to the local gradients of clients ``rows``, (m, P), or nothing."""
        ...

    def total(
        self, rows: IntArray, updates: FloatArray, weights: FloatArray, lengths: FloatArray
    ) -> MemorySum:
        r"""Return what takes the place of the weighted sum (O3), and remember the round.

        ``updates`` (m, P) and ``weights`` (m,) are those of the replies of clients ``rows`` (m,);
        ``lengths`` (m,) are the lengths :math:`K_i \eta` of their local paths.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the memory as arrays and plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved memory back."""
        ...


@final
class _Kept:
    """One vector per enrolled client, and their sum under enrollment weights."""

    def __init__(self, enrolled: BoolArray, omega: FloatArray, start: FloatArray) -> None:
        check_rows(len(enrolled), enrollment_weights=omega)
        self._place = np.cumsum(enrolled) - 1
        self._omega, self.size = omega, int(enrolled.sum())
        self._vectors = np.zeros((self.size, len(start)), dtype=start.dtype)
        self.sum = np.zeros(len(start))

    def of(self, rows: IntArray) -> FloatArray:
        vectors: FloatArray = self._vectors[self._place[rows]]
        return vectors

    def put(self, rows: IntArray, vectors: FloatArray, weights: FloatArray) -> FloatArray:
        """Keep new vectors (m, P); returns how they differ from the old ones."""
        check_rows(len(rows), updates=vectors, weights=weights)
        change: FloatArray = vectors - self.of(rows)
        self._vectors[self._place[rows]] = vectors
        self.sum = self.sum + self._omega[rows] @ change
        return change

    def state(self) -> dict[str, Any]:
        return {"latest": self._vectors.copy(), "sum": self.sum.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._vectors, self.sum = np.array(state["latest"]), np.array(state["sum"])


@final
class UpdateMemory:
    r"""FedVARP: the latest update :math:`y_i` of every client, corrected by what replies say now.

    .. math:: \sum_{i \in S_r} w_{ir} (\Delta_{ir} - y_i) + \sum_{i \in E} \omega_i y_i,
       \qquad y_i \leftarrow \Delta_{ir} \;\; (i \in S_r) \qquad (O5)

    takes the place of :math:`\sum_S w \Delta` in (O3). As published :math:`w = 1/|S|` and
    :math:`\omega = 1/N_{enr}`. With :math:`w = \omega/\pi^{part}` its mean is
    :math:`\sum_E \omega_i \Delta_{ir}`, as without memory; its noise dies out as the model
    settles, because updates then change little between a client's replies. Memory starts at zero:
    a client's first reply counts whole.

    Parameters
    ----------
    enrolled
        Who can ever reply, (N,).
    enrollment_weights
        :math:`\omega` of every client, (N,), read where enrolled.
    start
        The model before the first round, (P,): its length and type are those of an update.
    """

    def __init__(
        self, enrolled: BoolArray, enrollment_weights: FloatArray, start: FloatArray
    ) -> None:
        self._kept = _Kept(enrolled, enrollment_weights, start)

    def corrections(self, rows: IntArray) -> None:
        """Return nothing: local steps stay as they are."""

    def total(
        self, rows: IntArray, updates: FloatArray, weights: FloatArray, lengths: FloatArray
    ) -> MemorySum:
        """Return (O5) and keep the updates."""
        del lengths
        before, change = self._kept.sum, self._kept.put(rows, updates, weights)
        return MemorySum(total=weights @ change + before)

    def state(self) -> dict[str, Any]:
        """Return the memory."""
        return self._kept.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved memory back."""
        self._kept.restore(state)


@final
class LatestUpdates:
    r"""MIFA: the mean of every enrolled client's latest update, however old.

    .. math:: \sum_{i \in E} \omega_i G_i, \qquad G_i \leftarrow \Delta_{ir} \;\; (i \in S_r)
       \qquad (O14)

    takes the place of the sum in (O3); :math:`\omega = 1/N_{enr}` as published. No participation
    probability is needed. The original waits until every enrolled client was seen, which one
    client that never replies makes for ever: memory starts at zero instead, unless ``wait`` is
    given. Parameters are those of :class:`UpdateMemory`, and

    wait
        Keep the model until all were seen, but for this many rounds at most.
    """

    def __init__(
        self,
        enrolled: BoolArray,
        enrollment_weights: FloatArray,
        start: FloatArray,
        *,
        wait: int | None = None,
    ) -> None:
        if wait is not None and wait < 1:
            raise InputError(f"wait must be at least 1 round, not {wait}.")
        self._kept = _Kept(enrolled, enrollment_weights, start)
        self._seen = np.zeros(len(enrolled), dtype=bool)
        self._wait, self._rounds = wait, 0

    def corrections(self, rows: IntArray) -> None:
        """Return nothing: local steps stay as they are."""

    def total(
        self, rows: IntArray, updates: FloatArray, weights: FloatArray, lengths: FloatArray
    ) -> MemorySum:
        """Return (O14) and keep the updates; weights of the replies play no part."""
        del lengths
        self._kept.put(rows, updates, weights)
        self._seen[rows] = True
        self._rounds += 1
        seen = int(self._seen.sum())
        if self._wait is not None and self._rounds < self._wait and seen < self._kept.size:
            return MemorySum(total=None, note=f"waiting: {seen} of {self._kept.size} clients seen")
        return MemorySum(total=self._kept.sum)

    def state(self) -> dict[str, Any]:
        """Return the memory."""
        return self._kept.state() | {"seen": self._seen.copy(), "rounds": self._rounds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved memory back."""
        self._kept.restore(state)
        self._seen, self._rounds = np.array(state["seen"]), int(state["rounds"])


@final
class ControlVariates:
    r"""SCAFFOLD: each client's own gradient :math:`c_i` is taken off, their mean c put on.

    .. math:: y \leftarrow y - \eta\,(g_i(y) - c_i + c), \quad
       c_i^+ = c_i - c + \frac{\theta - y}{K_i \eta}, \quad
       c \leftarrow c + \sum_{i \in S} \omega_i (c_i^+ - c_i), \quad
       \theta \leftarrow \theta + \gamma \,\text{mean}_S \Delta_i \qquad (O15)

    so that :math:`c = \sum_E \omega_i c_i` always. :math:`\omega = 1/N_{enr}` as published; under
    enrollment weights c is the population's gradient, and the plain mean over replies does no harm,
    since at the solution every client's corrected gradient is zero. The local step is the engine's
    own (O13). Parameters are those of :class:`UpdateMemory`, and

    every
        Rounds with replies after which control variates are renewed, each by its client's mean
        gradient over them: those of Amplified SCAFFOLD (Crawshaw and Liu 2024), 1 as in SCAFFOLD.
    """

    def __init__(
        self,
        enrolled: BoolArray,
        enrollment_weights: FloatArray,
        start: FloatArray,
        *,
        every: int = 1,
    ) -> None:
        if every < 1:
            raise InputError(f"every must be at least 1 round, not {every}.")
        self._kept, self._every, self._rounds = _Kept(enrolled, enrollment_weights, start), every, 0
        self._recent: dict[int, tuple[int, FloatArray]] = {}  # replies and sum of gradients

    def corrections(self, rows: IntArray) -> FloatArray:
        """Return :math:`c - c_i`, (m, P)."""
        return self._kept.sum - self._kept.of(rows)

    def total(
        self, rows: IntArray, updates: FloatArray, weights: FloatArray, lengths: FloatArray
    ) -> MemorySum:
        """Return the weighted sum of corrected updates and keep the new control variates."""
        own = -self.corrections(rows) - updates / lengths[:, None]
        if self._every == 1:
            self._kept.put(rows, own, weights)
            return MemorySum(total=weights @ updates)
        for client, gradient in zip(rows.tolist(), own, strict=True):
            count, before = self._recent.get(client, (0, np.zeros(len(gradient))))
            self._recent[client] = count + 1, before + gradient
        self._rounds += 1
        if self._rounds % self._every == 0:
            means = [gradient / count for count, gradient in self._recent.values()]
            self._kept.put(np.array(list(self._recent)), np.stack(means), np.ones(len(means)))
            self._recent = {}
        return MemorySum(total=weights @ updates)

    def state(self) -> dict[str, Any]:
        """Return the memory, with the gradients since it was renewed."""
        if self._every == 1:
            return self._kept.state()
        return self._kept.state() | {
            "rounds": self._rounds,
            "recent": {str(client): list(of) for client, of in self._recent.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved memory back."""
        self._kept.restore(state)
        if self._every > 1:
            self._rounds = int(state["rounds"])
            self._recent = {
                int(client): (int(count), np.array(gradient))
                for client, (count, gradient) in state["recent"].items()
            }
