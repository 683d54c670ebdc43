"""Local SGD of a round's clients, compiled, and the weighted sum of their updates.

Every method's local work goes through the one gradient step here: FedProx by its pull, SCAFFOLD by
its corrections. Mini-batches are drawn from the round's key and the client alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive, check_rows
from fedipw.numerics.compiled import compiled, sigmoid
from fedipw.numerics.threads import over_ranges

if TYPE_CHECKING:
    from fedipw.lab.clients import ClientData
    from fedipw.numerics import FloatArray, IntArray, LabelArray

_CHUNK = 8  # clients per partial sum; partial sums are added in order, whatever the threads
NO_ROW = -1  # where a client has fewer rows or steps than others


@compiled
def _next_random(state: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Advance a splitmix64 stream: (new state, 64 random bits)."""
    state = np.uint64(state + np.uint64(0x9E3779B97F4A7C15))
    z = state
    z = np.uint64((z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    z = np.uint64((z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return state, np.uint64(z ^ (z >> np.uint64(31)))


@compiled
def client_stream(key: int, client: int) -> np.uint64:
    """Start of a client's own stream in a round: chance does not depend on who else replied."""
    _, mixed = _next_random(np.uint64(client) ^ np.uint64(0xD1B54A32D192ED03))
    _, start = _next_random(np.uint64(key) ^ mixed)
    return start


@compiled
def drawn_rows(state: np.uint64, order: IntArray, batch: int) -> np.uint64:
    """Put a random batch without replacement at the front of ``order``; returns the new state."""
    n = order.size
    for i in range(batch):
        state, bits = _next_random(state)
        # 32 random bits times the range, high half: uneven by less than n / 2**32
        j = i + np.int64(((bits >> np.uint64(32)) * np.uint64(n - i)) >> np.uint64(32))
        order[i], order[j] = order[j], order[i]
    return state


@compiled
def _fill(
    offsets: IntArray, clients: IntArray, steps: IntArray, batch: int, key: int, out: IntArray
) -> None:
    for i in range(clients.size):
        first, last = offsets[clients[i]], offsets[clients[i] + 1]
        order = np.arange(first, last)
        used = min(last - first, batch)
        state = client_stream(key, clients[i])
        for k in range(steps[i]):
            if used < last - first:
                state = drawn_rows(state, order, used)
            out[i, k, :used] = order[:used]


def batch_rows(
    offsets: IntArray, clients: IntArray, steps: IntArray, batch: int, key: int
) -> IntArray:
    """Return the rows each client trains on at each of its steps, (m, max K_i, batch).

    ``offsets`` (N + 1,) says whose rows are whose; the draws are those of the compiled trainer.
    Places beyond a client's own rows or steps hold -1.

    >>> batch_rows(np.array([0, 2, 7]), np.array([1, 0]), np.array([1, 2]), 3, key=5)
    array([[[ 3,  5,  2],
            [-1, -1, -1]],
    <BLANKLINE>
           [[ 0,  1, -1],
            [ 0,  1, -1]]])
    """
    out = np.full((len(clients), int(steps.max()), batch), NO_ROW)
    _fill(offsets, clients, steps, batch, key, out)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWork:
    r"""What each client does in a round.

    .. math:: y_0 = \theta, \quad y_{k} = y_{k-1} - \eta\, g_i(y_{k-1}), \quad
       \Delta_i = y_{K_i} - \theta \qquad (O2)

    A batch is drawn without replacement, afresh at every step; all rows (the full gradient) if
    there is no ``batch_size`` or if a client has no more.
    """

    steps: int = 1  # K of all clients unless a round passes its own K_i
    step_size: float = 0.5  # eta
    batch_size: int | None = None  # rows of a stochastic gradient

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"Local steps must be at least 1, not {self.steps}.")
        check_positive(self.step_size, "step_size")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, not {self.batch_size}.")


@compiled
def _gradient_step(
    features: FloatArray,
    labels: LabelArray,
    rows: IntArray,
    y: FloatArray,
    step: FloatArray,
    drift: FloatArray,
    u: FloatArray,
) -> None:
    """One SGD step on ``rows``; ``step`` is (step size, l2 + pull), ``u`` is working memory.

    ``drift`` is what every step adds besides (O13), or empty.
    """
    d, m = features.shape[1], rows.size
    for i in range(m):
        x = features[rows[i]]
        total = y[d]
        for j in range(d):
            total += x[j] * y[j]
        u[i] = total
    for i in range(m):
        u[i] = sigmoid(u[i])
    shrink = 1.0 - step[0] * step[1]
    for j in range(d + 1):
        y[j] *= shrink
    for j in range(drift.size):
        y[j] += drift[j]
    scale = step[0] / m
    for i in range(m):
        residual = scale * (labels[rows[i]] - u[i])
        x = features[rows[i]]
        for j in range(d):
            y[j] += residual * x[j]
        y[d] += residual


class _Data(NamedTuple):
    features: FloatArray
    labels: LabelArray
    offsets: IntArray


class _Job(NamedTuple):
    theta: FloatArray
    step: FloatArray  # step size, l2 + pull
    batch: int  # 0 for the full gradient
    key: int  # this round's chance
    clients: IntArray  # (m,)
    steps: IntArray  # (m,)
    drift: FloatArray  # (m, d + 1), (1, d + 1) for all alike, or (1, 0)


@compiled
def _local_model(data: _Data, job: _Job, i: int, y: FloatArray) -> None:
    """Run the local steps of the round's client i; the resulting model is left in ``y``."""
    y[:] = job.theta
    client, drift = job.clients[i], job.drift[min(i, len(job.drift) - 1)]
    first, last = data.offsets[client], data.offsets[client + 1]
    count = last - first
    order = np.arange(first, last)
    used = count if job.batch == 0 or job.batch >= count else job.batch
    u = np.empty(used)
    state = client_stream(job.key, client)
    for _ in range(job.steps[i]):
        if used < count:
            state = drawn_rows(state, order, used)
        _gradient_step(data.features, data.labels, order[:used], y, job.step, drift, u)


@compiled
def _partial_sums(
    data: _Data, job: _Job, weights: FloatArray, parts: FloatArray, first: int, last: int
) -> None:
    """Fill rows first to last of ``parts`` with the weighted sums of a few clients each."""
    size = job.theta.size
    y = np.empty(size)
    for c in range(first, last):
        for i in range(c * _CHUNK, min(job.clients.size, (c + 1) * _CHUNK)):
            _local_model(data, job, i, y)
            for k in range(len(weights)):
                for j in range(size):
                    parts[c, k, j] += weights[k, i] * (y[j] - job.theta[j])


@compiled
def _updates(data: _Data, job: _Job, out: FloatArray, first: int, last: int) -> None:
    """Fill rows first to last of ``out`` with one update each."""
    for i in range(first, last):
        _local_model(data, job, i, out[i])
        for j in range(job.theta.size):
            out[i, j] -= job.theta[j]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundWork:
    r"""Local training of one round: whose, from which model, with which chance.

    ``proximal`` and ``corrections`` change every local gradient,

    .. math:: g_i(y) + \mu\, (y - \theta) + s_i \qquad (O13)

    the first is FedProx's pull to the model that was sent, the second SCAFFOLD's
    :math:`s_i = c - c_i`.
    """

    clients: IntArray  # (m,) positions in the client data
    theta: FloatArray  # (d + 1,)
    key: int  # 64 bits; a client's batches depend on it and on the client alone
    steps: IntArray | None = None  # (m,) local steps K_i where they differ
    proximal: float = 0.0  # mu
    corrections: FloatArray | None = None  # (m, d + 1) s_i

    def __post_init__(self) -> None:
        if not 0.0 <= self.proximal < np.inf:
            raise InputError(f"proximal must be 0 or more, not {self.proximal!r}.")
        if self.corrections is not None:
            check_rows(len(self.clients), corrections=self.corrections)
            if self.corrections.shape[1] != len(self.theta):
                raise InputError(
                    f"Corrections have {self.corrections.shape[1]} entries for a model of "
                    f"{len(self.theta)} parameters."
                )

    def local_steps(self, work: LocalWork) -> IntArray:
        """Return the number of local steps K_i of each client, (m,)."""
        steps = np.full(len(self.clients), work.steps) if self.steps is None else self.steps
        check_rows(len(self.clients), steps=steps)
        return steps

    def drift(self, step_size: float) -> FloatArray:
        """Return what each local step adds besides the gradient, (m or 1, d + 1), or (1, 0)."""
        if self.corrections is not None:
            return step_size * (self.proximal * self.theta - self.corrections)
        if self.proximal:
            return step_size * self.proximal * self.theta[None, :]
        return np.empty((1, 0))


class Trainer(Protocol):
    """Local training of a round's clients, whatever the model; models are flat vectors."""

    @property
    def start(self) -> FloatArray:
        """The model before the first round, (P,)."""

    @property
    def work(self) -> LocalWork:
        """What each client does in a round."""

    @property
    def plain_sgd(self) -> bool:
        """Whether a local step is the step size times a gradient, as SCAFFOLD and FedNova need."""

    def updates(self, task: RoundWork) -> FloatArray:
        """Return each client's update (O2), (m, P)."""

    def total(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return the weighted sum of updates, (P,), none of them kept."""

    def sums(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return weighted sums of updates, (k, P), for rows of weights, (k, m)."""

    def losses(self, theta: FloatArray, clients: IntArray | None = None) -> FloatArray:
        """Return the loss of these clients or of all at a model (P,), (m,) or (N,)."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class LogisticTrainer:
    """Logistic regression with an L2 term, compiled: the engine's own model.

    >>> from fedipw.lab.testbed import Testbed
    >>> trainer = LogisticTrainer(Testbed(size=4).draw(np.random.default_rng(0)).clients)
    >>> task = RoundWork(clients=np.array([0, 2]), theta=np.zeros(6), key=1)
    >>> one = trainer.updates(task)
    >>> total = trainer.total(task, np.array([0.25, 0.5]))
    >>> np.allclose(total, 0.25 * one[0] + 0.5 * one[1])
    True
    """

    clients: ClientData
    work: LocalWork = field(default_factory=LocalWork)
    l2: float = 0.05
    plain_sgd = True

    @property
    def start(self) -> FloatArray:
        """Zero, (d + 1,)."""
        return np.zeros(self.clients.n_parameters)

    def updates(self, task: RoundWork) -> FloatArray:
        """Return each client's update (O2), (m, d + 1)."""
        job = self._job(task)
        out = np.empty((len(task.clients), len(task.theta)))
        work = self._operations(job)
        over_ranges(len(out), lambda a, b: _updates(self._data, job, out, a, b), work=work)
        return out

    def total(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return the weighted sum of updates in (O3) without keeping any of them, (d + 1,)."""
        total: FloatArray = self.sums(task, np.asarray(weights)[None, :])[0]
        return total

    def sums(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return weighted sums of updates, (k, d + 1), for rows of weights, (k, m)."""
        check_rows(len(task.clients), weights=weights.T)
        job, rows = self._job(task), np.ascontiguousarray(weights, dtype=np.float64)
        parts = np.zeros((-(-len(task.clients) // _CHUNK), len(rows), len(task.theta)))
        over_ranges(
            len(parts),
            lambda a, b: _partial_sums(self._data, job, rows, parts, a, b),
            work=self._operations(job),
        )
        total: FloatArray = parts.sum(axis=0)
        return total

    def losses(self, theta: FloatArray, clients: IntArray | None = None) -> FloatArray:
        """Return the regularised loss of these clients or of all (O1), (m,) or (N,)."""
        who, counts = (
            np.arange(self.clients.size) if clients is None else clients,
            self.clients.counts,
        )
        ends = np.cumsum(counts[who])
        starts = ends - counts[who]
        rows = np.arange(ends[-1]) + np.repeat(self.clients.offsets[who] - starts, counts[who])
        u = self.clients.features[rows] @ theta[:-1] + theta[-1]
        each = np.logaddexp(0.0, u) - self.clients.labels[rows] * u
        means: FloatArray = np.add.reduceat(each, starts) / counts[who]
        return means + 0.5 * self.l2 * float(theta @ theta)

    @property
    def _data(self) -> _Data:
        return _Data(self.clients.features, self.clients.labels, self.clients.offsets)

    def _job(self, task: RoundWork) -> _Job:
        if len(task.theta) != self.clients.n_parameters:
            raise InputError(
                f"The model has {len(task.theta)} of {self.clients.n_parameters} parameters."
            )
        return _Job(
            task.theta,
            np.array([self.work.step_size, self.l2 + task.proximal]),
            self.work.batch_size or 0,
            task.key,
            task.clients,
            task.local_steps(self.work),
            task.drift(self.work.step_size),
        )

    def _operations(self, job: _Job) -> float:
        rows = job.batch or len(self.clients.labels) / self.clients.size
        return float(4.0 * job.steps.sum() * rows * self.clients.n_parameters)
