"""Local SGD of a round's clients, compiled, and the weighted sum of their updates.

Every method's local work goes through the one gradient step here: FedProx by its pull, SCAFFOLD by
its corrections.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.engine.batches import client_stream, drawn_rows
from fedipw.numerics.checks import check_positive, check_rows
from fedipw.numerics.compiled import compiled, sigmoid
from fedipw.numerics.threads import over_ranges

if TYPE_CHECKING:
    from fedipw.lab.clients import ClientData
    from fedipw.numerics.types import FloatArray, IntArray, LabelArray

_CHUNK = 8  # clients per partial sum; partial sums are added in order, whatever the threads


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWork:
    r"""What each client does in a round.

    .. math:: y_0 = \theta, \quad y_{k} = y_{k-1} - \eta\, g_i(y_{k-1}), \quad
       \Delta_i = y_{K_i} - \theta \qquad (O2)

    Parameters
    ----------
    steps
        K, the same for all clients unless a round passes its own K_i.
    step_size
        Local step :math:`\eta`.
    batch_size
        Rows of a stochastic gradient, drawn without replacement, afresh at every step; all rows
        (the full gradient) if none or if a client has no more.
    """

    steps: int = 1
    step_size: float = 0.5
    batch_size: int | None = None

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
    data: _Data,
    job: _Job,
    weights: FloatArray,
    parts: FloatArray,
    first: int,
    last: int,
) -> None:
    """Fill rows first to last of ``parts`` with the weighted sums of a few clients each."""
    size = job.theta.size
    y = np.empty(size)
    for c in range(first, last):
        part = parts[c]
        for i in range(c * _CHUNK, min(job.clients.size, (c + 1) * _CHUNK)):
            _local_model(data, job, i, y)
            for j in range(size):
                part[j] += weights[i] * (y[j] - job.theta[j])


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

    def _drift(self, step_size: float) -> FloatArray:
        if self.corrections is not None:
            return step_size * (self.proximal * self.theta - self.corrections)
        if self.proximal:
            return step_size * self.proximal * self.theta[None, :]
        return np.empty((1, 0))

    def _arguments(self, data: ClientData, work: LocalWork, l2: float) -> tuple[_Data, _Job]:
        if len(self.theta) != data.n_parameters:
            raise InputError(f"The model has {len(self.theta)} of {data.n_parameters} parameters.")
        job = _Job(
            self.theta,
            np.array([work.step_size, l2 + self.proximal]),
            work.batch_size or 0,
            self.key,
            self.clients,
            self.local_steps(work),
            self._drift(work.step_size),
        )
        return _Data(data.features, data.labels, data.offsets), job

    def _operations(self, data: ClientData, work: LocalWork, steps: IntArray) -> float:
        rows = len(data.labels) / data.size if work.batch_size is None else work.batch_size
        return float(4.0 * steps.sum() * rows * data.n_parameters)


def client_updates(data: ClientData, work: LocalWork, l2: float, task: RoundWork) -> FloatArray:
    """Return each client's update (O2), (m, d + 1)."""
    arguments = task._arguments(data, work, l2)
    out = np.empty((len(task.clients), len(task.theta)))
    operations = task._operations(data, work, arguments[1].steps)
    over_ranges(len(out), lambda a, b: _updates(*arguments, out, a, b), work=operations)
    return out


def weighted_update(
    data: ClientData, work: LocalWork, l2: float, task: RoundWork, weights: FloatArray
) -> FloatArray:
    """Return the weighted sum of updates in (O3) without keeping any of them, (d + 1,).

    >>> from fedipw.lab.testbed import Testbed
    >>> data = Testbed(size=4).draw(np.random.default_rng(0)).clients
    >>> task = RoundWork(clients=np.array([0, 2]), theta=np.zeros(6), key=1)
    >>> one = client_updates(data, LocalWork(), 0.05, task)
    >>> total = weighted_update(data, LocalWork(), 0.05, task, np.array([0.25, 0.5]))
    >>> np.allclose(total, 0.25 * one[0] + 0.5 * one[1])
    True
    """
    check_rows(len(task.clients), weights=weights)
    arguments = task._arguments(data, work, l2)
    parts = np.zeros((-(-len(task.clients) // _CHUNK), len(task.theta)))
    operations = task._operations(data, work, arguments[1].steps)
    over_ranges(
        len(parts), lambda a, b: _partial_sums(*arguments, weights, parts, a, b), work=operations
    )
    total: FloatArray = parts.sum(axis=0)
    return total


class Trainer(Protocol):
    """Local training of a round's clients, whatever the model; models are flat vectors."""

    @property
    def start(self) -> FloatArray:
        """The model before the first round, (P,)."""
        ...

    @property
    def work(self) -> LocalWork:
        """What each client does in a round."""
        ...

    @property
    def plain_sgd(self) -> bool:
        """Whether a local step is the step size times a gradient, as SCAFFOLD and FedNova need."""
        ...

    def updates(self, task: RoundWork) -> FloatArray:
        """Return each client's update (O2), (m, P)."""
        ...

    def total(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return the weighted sum of updates, (P,), none of them kept."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class LogisticTrainer:
    """Logistic regression with an L2 term, compiled: the engine's own model."""

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
        return client_updates(self.clients, self.work, self.l2, task)

    def total(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return the weighted sum of updates, (d + 1,)."""
        return weighted_update(self.clients, self.work, self.l2, task, weights)
