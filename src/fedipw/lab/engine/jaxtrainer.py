"""Local training of any differentiable model with JAX, server steps by optax: the extra ``jax``.

A round is one compiled function that loops over blocks of clients. Loops have the number of clients
and of steps as data, not as shape: a smaller cohort, padded to the same shape, does not pay for the
padding, and clients with their own K_i need no masks. The rest of the engine does not import this
module, so that it works without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine.local import LocalWork, RoundWork, batch_rows
from fedipw.numerics.checks import check_rows, some
from fedipw.numerics.threads import over_ranges

try:
    import jax
except ImportError as error:
    raise ImportError(
        "The JAX trainer needs the extra `jax`: pip install 'fedipw[jax]'.", name="jax"
    ) from error

import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

if TYPE_CHECKING:
    import optax
    from numpy.typing import DTypeLike, NDArray

    from fedipw.lab.engine.server import State
    from fedipw.numerics import FloatArray, IntArray

__all__ = ["JaxTrainer", "OptaxStep"]

_PLACES = (8, 64, 512)  # clients of one call, padded; larger cohorts take several calls
_CALL_BYTES = 1 << 26  # drawn rows, corrections and updates of one call
_BLOCK, _BLOCK_PARAMETERS = 16, 1 << 19  # clients side by side, and parameters of them together
_SHARES, _SHARED_PARAMETERS = 2, 1 << 22  # calls that share a sum's clients; none of large models
_PIECE_ROWS = 512  # rows of a full gradient at once
_ROWS = 1024  # rows of an evaluation at once

Params: TypeAlias = Any  # a tree of arrays
Loss: TypeAlias = Callable[[Params, jax.Array, jax.Array], jax.Array]
Penalty: TypeAlias = Callable[[Params], jax.Array]


class Data(NamedTuple):
    """Rows of all clients, on the device."""

    features: jax.Array  # (rows, ...)
    labels: jax.Array  # (rows, ...)


class Lanes(NamedTuple):
    """What differs between clients; C places, of which the first are taken."""

    first: Any  # (C,) first row
    rows: Any  # (C,) n_i
    steps: Any  # (C,) K_i, 0 where a place is empty
    drawn: Any  # (C, K, batch) rows of each step, -1 for none; None for full gradients
    corrections: Any  # (C, P) or None
    weights: Any  # (C, k) 0 where a place is empty; None where updates are kept apart


class Job(NamedTuple):
    """One call: the model sent, how many blocks are taken, mu, and the clients."""

    theta: Any  # (P,)
    blocks: Any  # ()
    proximal: Any  # () or None
    lanes: Lanes


class Optimizer(NamedTuple):
    """The two functions of an optax transformation."""

    init: Callable[[Params], Any]
    update: Callable[[Params, Any, Params], tuple[Params, Any]]


def plain_sgd(step_size: float) -> Optimizer:
    """Return gradient descent with a constant step, without state."""

    def update(gradient: Params, state: tuple[()], params: Params) -> tuple[Params, tuple[()]]:
        del params
        return jax.tree.map(lambda g: -step_size * g, gradient), state

    return Optimizer(lambda _: (), update)


@dataclass(frozen=True, slots=True, eq=False)
class LocalProblem:
    """What every client minimises and how; fixed when the functions are compiled."""

    loss: Loss
    penalty: Penalty | None
    optimizer: Optimizer
    tree: Callable[[jax.Array], Params]  # from the flat model
    block: int  # clients side by side
    piece: int  # rows of a full gradient taken at once
    pieces: bool  # whether some client has more than one piece

    def sums(self, data: Data, job: Job) -> jax.Array:
        """Return weighted sums of updates, (k, P)."""
        start, count = self.tree(job.theta), job.lanes.weights.shape[1]

        def add(i: Any, sums: Params) -> Params:
            lanes = self._lanes(job.lanes, i)
            moved = self._moved(data, job, start, lanes)
            return jax.tree.map(lambda s, d: s + _weighted(lanes.weights, d), sums, moved)

        zero = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), start)
        found = lax.fori_loop(0, job.blocks, add, zero)
        return jax.vmap(lambda one: ravel_pytree(one)[0])(found)

    def updates(self, data: Data, job: Job) -> jax.Array:
        """Return each client's update, (C, P); zero where a place is empty."""
        start = self.tree(job.theta)

        def put(i: Any, out: jax.Array) -> jax.Array:
            moved = self._moved(data, job, start, self._lanes(job.lanes, i))
            flat = jax.vmap(lambda one: ravel_pytree(one)[0])(moved)
            return lax.dynamic_update_slice_in_dim(out, flat, i * self.block, axis=0)

        out = jnp.zeros((len(job.lanes.steps), len(job.theta)), job.theta.dtype)
        filled: jax.Array = lax.fori_loop(0, job.blocks, put, out)
        return filled

    def _lanes(self, lanes: Lanes, i: Any) -> Lanes:
        first, size = i * self.block, self.block
        return Lanes(*jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, size), lanes))

    def _moved(self, data: Data, job: Job, start: Params, lanes: Lanes) -> Params:
        """Return the updates of a block of clients, one more axis in front of every leaf."""
        if self.block == 1:  # without vmap, which would turn products into batched ones
            alone = self._update(data, job, start, jax.tree.map(lambda a: a[0], lanes))
            return jax.tree.map(lambda a: a[None], alone)
        return jax.vmap(lambda lane: self._update(data, job, start, lane))(lanes)

    def _update(self, data: Data, job: Job, start: Params, lane: Lanes) -> Params:
        """Return one client's update (O2), a tree."""
        added = None if lane.corrections is None else self.tree(lane.corrections)

        def step(k: Any, now: tuple[Params, Any]) -> tuple[Params, Any]:
            y, state = now
            if lane.drawn is None:
                gradient = self._full_gradient(y, data, lane)
            else:
                used = lane.drawn[k] >= 0
                # a place without a row computes on one of the client's own, and counts for nothing
                at = jnp.where(used, lane.drawn[k], lane.first)
                gradient = jax.grad(self._share)(y, data, at, used, used.sum())
            gradient = self._shifted(gradient, y, start, job.proximal, added)
            moves, state = self.optimizer.update(gradient, state, y)
            return jax.tree.map(jnp.add, y, moves), state

        begin = (start, self.optimizer.init(start))
        y, _ = lax.fori_loop(0, lane.steps, step, begin)
        return jax.tree.map(jnp.subtract, y, start)

    def _shifted(
        self, gradient: Params, y: Params, start: Params, proximal: Any, added: Params | None
    ) -> Params:
        """Add the gradients of the penalty and of (O13)."""
        if self.penalty is not None:
            gradient = jax.tree.map(jnp.add, gradient, jax.grad(self.penalty)(y))
        if proximal is not None:
            gradient = jax.tree.map(lambda g, a, b: g + proximal * (a - b), gradient, y, start)
        if added is not None:
            gradient = jax.tree.map(jnp.add, gradient, added)
        return gradient

    def _full_gradient(self, y: Params, data: Data, lane: Lanes) -> Params:
        """Return the gradient of the mean loss over all rows of a client, piece by piece."""

        def gradient(j: Any) -> Params:
            own = j * self.piece + jnp.arange(self.piece, dtype=jnp.int32)
            used = own < lane.rows
            at = lane.first + jnp.where(used, own, 0)
            return jax.grad(self._share)(y, data, at, used, lane.rows)

        if not self.pieces:
            return gradient(0)
        number = (lane.rows + self.piece - 1) // self.piece
        return lax.fori_loop(
            1, number, lambda j, g: jax.tree.map(jnp.add, g, gradient(j)), gradient(0)
        )

    def _share(
        self, y: Params, data: Data, at: jax.Array, used: jax.Array, count: jax.Array
    ) -> jax.Array:
        """Return what these rows contribute to a mean over ``count`` rows."""
        losses = self.loss(y, data.features[at], data.labels[at])
        total = jnp.where(used, losses, 0.0).sum()
        return total / jnp.maximum(count, 1).astype(total.dtype)  # empty places: 0, not 0/0


def _weighted(weights: jax.Array, updates: jax.Array) -> jax.Array:
    # at full precision: devices that shorten products would blur the weights
    return jnp.tensordot(weights.T, updates, 1, precision=lax.Precision.HIGHEST)


def row_values(
    tree: Callable[[jax.Array], Params], measure: Loss, theta: Any, data: Data, at: Any
) -> jax.Array:
    """Return ``measure`` at each of these rows, (len(at),)."""
    return measure(tree(theta), data.features[at], data.labels[at])


@final
class JaxTrainer:
    r"""Clients that train any model whose loss JAX can differentiate.

    .. math:: f_i(y) = \frac{1}{n_i} \sum_{j=1}^{n_i} \ell(y; x_{ij}, z_{ij}) + \rho(y), \qquad
       (u_k, o_k) = \mathrm{opt}\big(g_i(y_{k-1}) + \mu (y_{k-1} - \theta) + s_i,\, o_{k-1},\,
       y_{k-1}\big), \quad y_k = y_{k-1} + u_k \qquad (O18)

    with :math:`g_i` the gradient of :math:`f_i`, or of the same over a mini-batch. Plain SGD,
    :math:`u_k = -\eta\, g`, is (O2). The batches are those of the engine's own trainer.

    Parameters
    ----------
    loss
        ``loss(params, x, y)``: the loss of each row, (rows,). Rows must not mix (no batch
        normalisation): places without a row are computed and left out of the sum.
    params
        Tree of floating arrays: the model before the first round.
    clients
        Their rows.
    work
        K, :math:`\eta` and the batch size.
    penalty
        ``penalty(params)``, :math:`\rho`: a scalar added to every local objective.
    optimizer
        An optax transformation for the clients, in place of SGD with ``work.step_size``; its state
        starts afresh for each client in each round.
    dtype
        Of all computations: float32, or float64. JAX's own setting is left alone.
    block
        Clients trained side by side (``vmap``). By default 1 if the loss has a convolution, else
        the largest power of two, at most 16, with no more than 2**19 parameters together.

    Examples
    --------
    >>> data = ArrayClients(features=np.array([[1.0], [3.0], [5.0]]), labels=np.zeros(3),
    ...                     offsets=np.array([0, 1, 3]))
    >>> trainer = JaxTrainer(lambda p, x, y: (p["b"] - x[:, 0]) ** 2 / 2, {"b": np.zeros(())},
    ...                      data, LocalWork(step_size=0.5))
    >>> task = RoundWork(clients=np.array([0, 1]), theta=trainer.start, key=0)
    >>> trainer.updates(task).tolist()  # half the way to the means 1 and 4
    [[0.5], [2.0]]
    >>> trainer.total(task, np.array([0.5, 0.25])).tolist()
    [0.75]
    >>> trainer.losses(trainer.start).tolist()
    [0.5, 8.5]
    """

    def __init__(
        self,
        loss: Loss,
        params: Params,
        clients: ArrayClients,
        work: LocalWork | None = None,
        *,
        penalty: Penalty | None = None,
        optimizer: optax.GradientTransformation | None = None,
        dtype: DTypeLike = np.float32,
        block: int | None = None,
    ) -> None:
        self.clients = clients
        self._offsets = clients.offsets.astype(np.int64)  # of any integer type outside
        self.work = LocalWork() if work is None else work
        self._dtype = np.dtype(dtype)
        if self._dtype not in (np.float32, np.float64):
            raise InputError(f"dtype must be float32 or float64, not {self._dtype}.")
        if block is not None and block < 1:
            raise InputError(f"block must be at least 1, not {block}.")
        self._penalty, self.plain_sgd = penalty, optimizer is None
        with self._precision():
            tree = _floats(params, self._dtype)
            start, self._tree = ravel_pytree(tree)
            self._start = np.asarray(start, dtype=np.float64)
            self._data = Data(*(jnp.asarray(a) for a in self._arrays()))
            convolves = _checked(loss, penalty, tree, self._data)
        if block is None:
            block = 1 if convolves else _block(len(self._start))
        self._loss, self.block = loss, block  # clients trained side by side
        self._compile(optimizer)

    def _compile(self, optimizer: optax.GradientTransformation | None) -> None:
        counts = self.clients.counts
        largest = int(counts.max())
        batch = self.work.batch_size
        self._batch = None if batch is None or batch >= largest else batch
        # pieces near the usual number of rows, so that small clients do not pay for large ones
        piece = min(largest, _PIECE_ROWS, max(32, 2 * int(np.ceil(counts.mean()))))
        rule = plain_sgd(self.work.step_size)
        if optimizer is not None:
            rule = Optimizer(optimizer.init, optimizer.update)
        problem = LocalProblem(
            self._loss, self._penalty, rule, self._tree, self.block, piece, largest > piece
        )
        self._sums, self._updates = jax.jit(problem.sums), jax.jit(problem.updates)
        self._values = jax.jit(partial(row_values, self._tree), static_argnums=0)

    def _arrays(self) -> Iterator[NDArray[Any]]:
        for values in (self.clients.features, self.clients.labels):
            real = values.dtype.kind == "f"
            yield values.astype(self._dtype if real else np.int32, copy=False)

    def _precision(self) -> AbstractContextManager[Any]:
        return jax.enable_x64(True) if self._dtype == np.float64 else nullcontext()

    @property
    def start(self) -> FloatArray:
        """The model before the first round, (P,)."""
        return self._start.copy()

    def tree(self, theta: FloatArray) -> Params:
        """Return a vector (P,) as a tree of NumPy arrays."""
        with self._precision():
            return jax.tree.map(np.asarray, self._tree(jnp.asarray(self._cast(theta))))

    def updates(self, task: RoundWork) -> FloatArray:
        """Return each client's update (O2), (m, P)."""
        out = np.empty((len(task.clients), len(self._start)))
        done = 0
        with self._precision():
            for job, size in self._jobs(task, None):
                out[done : done + size] = np.asarray(self._updates(self._data, job))[:size]
                done += size
        return out

    def total(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return the weighted sum of updates, (P,), none of them kept."""
        total: FloatArray = self.sums(task, np.asarray(weights)[None, :])[0]
        return total

    def sums(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return weighted sums of updates, (k, P), for rows of weights, (k, m)."""
        columns = np.ascontiguousarray(np.asarray(weights, dtype=np.float64).T)
        check_rows(len(task.clients), weights=columns)
        total, size = np.zeros((columns.shape[1], len(self._start))), len(task.clients)
        shares = _SHARES if total.size <= _SHARED_PARAMETERS else 1
        most = -(-size // shares // self.block) * self.block
        jobs = (job for job, _ in self._jobs(task, columns, most))
        while mine := list(islice(jobs, shares)):  # drawn as they are needed, not all at once
            parts = np.zeros((len(mine), *total.shape))
            over_ranges(len(mine), partial(self._fill, parts, mine), work=np.inf)
            total += parts.sum(axis=0)
        return total

    def _fill(self, parts: FloatArray, jobs: list[Job], first: int, last: int) -> None:
        with self._precision():
            for k in range(first, last):
                parts[k] = np.asarray(self._sums(self._data, jobs[k]))

    def losses(self, theta: FloatArray, clients: IntArray | None = None) -> FloatArray:
        """Return f_i, mean loss and penalty, of these clients or of all, (N,)."""
        means = self.means(self._loss, theta, clients)
        if self._penalty is not None:
            with self._precision():
                means = means + float(self._penalty(self._tree(jnp.asarray(self._cast(theta)))))
        return means

    def means(
        self, measure: Loss, theta: FloatArray, clients: IntArray | None = None
    ) -> FloatArray:
        """Return each client's mean of ``measure(params, x, y)``, (rows,) like a loss, (N,).

        Computed over pieces of 1,024 rows, whoever owns them. Compiled once for each function, so
        pass the same object again.
        """
        chosen = np.arange(self.clients.size) if clients is None else self._chosen(clients)
        counts, model = self.clients.counts[chosen], self._cast(theta)
        ends = np.cumsum(counts)
        starts, sums, rows = ends - counts, np.zeros(len(chosen)), int(counts.sum())
        with self._precision():
            for start in range(0, rows, _ROWS):
                place = np.arange(start, min(start + _ROWS, rows))
                owner = np.searchsorted(ends, place, side="right")
                at = self._offsets[chosen[owner]] + place - starts[owner]
                padded = np.full(_ROWS, at[0], dtype=np.int32)
                padded[: len(at)] = at
                values = np.asarray(self._values(measure, model, self._data, padded))
                if values.shape != (_ROWS,):
                    raise InputError(f"A measure of {_ROWS} rows gave {values.shape} values.")
                found = np.bincount(owner - owner[0], values[: len(at)].astype(np.float64))
                sums[owner[0] : owner[-1] + 1] += found
        return sums / counts

    def call_bytes(self, clients: int) -> int:
        """Return the bytes a call of ``total`` needs for so many clients, the data aside."""
        if clients < 1:
            raise InputError(f"A call has at least one client, not {clients}.")
        task = RoundWork(clients=np.zeros(clients, np.int64), theta=self._start, key=0)
        with self._precision():
            job, _ = next(self._jobs(task, np.zeros((clients, 1))))
            found: Any = self._sums.lower(self._data, job).compile().memory_analysis()
        sent = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(job))
        return int(found.temp_size_in_bytes + found.output_size_in_bytes + sent)

    def _jobs(
        self, task: RoundWork, weights: FloatArray | None, limit: int = _PLACES[-1]
    ) -> Iterator[tuple[Job, int]]:
        """Yield the calls a round takes, each of ``limit`` clients at most, with their number."""
        theta, who = self._cast(task.theta), self._chosen(task.clients)
        steps, longest = task.local_steps(self.work), _padded_steps(task, self.work)
        if (steps < 0).any():
            raise InputError("Local steps must be 0 or more.")
        width = 0 if self._batch is None else longest * self._batch * 4
        if weights is None or task.corrections is not None:
            width += theta.nbytes
        fit = min(_PLACES[-1], max(1, _CALL_BYTES // max(width, 1)))
        most = max(1, min(limit, fit))
        mu = np.asarray(task.proximal, self._dtype) if task.proximal else None
        for first in range(0, len(who), most):
            part = slice(first, first + most)
            own = replace(
                task,
                clients=who[part],
                steps=steps[part],
                corrections=None if task.corrections is None else task.corrections[part],
            )
            size = len(own.clients)
            places = min(fit, next(c for c in _PLACES if c >= size))
            places = -(-places // self.block) * self.block
            lanes = self._lanes(own, longest, places, None if weights is None else weights[part])
            yield Job(theta, np.int32(-(-size // self.block)), mu, lanes), size

    def _lanes(
        self, task: RoundWork, longest: int, places: int, weights: FloatArray | None
    ) -> Lanes:
        who, offsets, steps = task.clients, self._offsets, task.local_steps(self.work)
        drawn = None
        if self._batch is not None:
            drawn = np.full((places, longest, self._batch), -1, dtype=np.int32)
            rows = batch_rows(offsets, who, steps, self._batch, task.key)
            drawn[: len(who), : rows.shape[1]] = rows
        added = task.corrections
        return Lanes(
            first=_filled(offsets[who], places, np.int32),
            rows=_filled(self.clients.counts[who], places, np.int32),
            steps=_filled(steps, places, np.int32),
            drawn=drawn,
            corrections=None if added is None else _filled(added, places, self._dtype),
            weights=None if weights is None else _filled(weights, places, self._dtype),
        )

    def _cast(self, theta: FloatArray) -> NDArray[Any]:
        if np.shape(theta) != self._start.shape:
            raise InputError(
                f"The model has shape {np.shape(theta)}, not ({len(self._start)},) as the start."
            )
        return np.asarray(theta).astype(self._dtype)

    def _chosen(self, clients: IntArray) -> IntArray:
        who = np.asarray(clients)
        if who.ndim != 1 or who.dtype.kind not in "iu":
            raise InputError("clients must be a vector of positions.")
        outside = (who < 0) | (who >= self.clients.size)
        if outside.any():
            raise InputError(
                f"There are {self.clients.size} clients, numbered from 0; not among them: "
                f"{some(who[outside].tolist())}."
            )
        return who.astype(np.int64)


def _padded_steps(task: RoundWork, work: LocalWork) -> int:
    """Return K, or where clients differ the next power of two, so that shapes recur."""
    if task.steps is None:
        return work.steps
    return 1 << max(int(np.max(task.steps, initial=1)) - 1, 0).bit_length()


def _filled(values: NDArray[Any], places: int, dtype: DTypeLike) -> NDArray[Any]:
    out = np.zeros((places, *values.shape[1:]), dtype)
    out[: len(values)] = values
    return out


def _block(parameters: int) -> int:
    fit = max(1, min(_BLOCK, _BLOCK_PARAMETERS // parameters))
    return 1 << (fit.bit_length() - 1)


def _floats(params: Params, dtype: np.dtype[Any]) -> Params:
    """Return the tree in one floating type, or say which leaf is none."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise InputError("The tree of parameters has no arrays.")
    for path, leaf in leaves:
        values = np.asarray(leaf)
        if values.dtype.kind != "f" or not np.isfinite(values).all():
            raise InputError(
                f"Parameters {jax.tree_util.keystr(path)} must be finite floating numbers."
            )
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), dtype), params)


def _checked(loss: Loss, penalty: Penalty | None, params: Params, data: Data) -> bool:
    """Check the shapes of loss and penalty; return whether the loss has a convolution."""
    rows = 3
    x, y = (jnp.zeros((rows, *a.shape[1:]), a.dtype) for a in data)
    made = jax.make_jaxpr(loss)(params, x, y)
    shapes = [a.shape for a in made.out_avals]
    if shapes != [(rows,)]:
        found = shapes[0] if len(shapes) == 1 else f"{len(shapes)} arrays"
        raise InputError(
            f"The loss of {rows} rows must have shape ({rows},), one loss per row, not {found}. "
            "Leave out the mean: the trainer takes it over each client's own rows."
        )
    if penalty is not None and (shape := jax.eval_shape(penalty, params).shape) != ():
        raise InputError(f"The penalty must be a scalar, not of shape {shape}.")
    return "conv_general_dilated" in str(made)


@final
@dataclass(frozen=True, slots=True)
class OptaxStep:
    r"""A server step by any optax transformation, in float64.

    .. math:: (u, o) \leftarrow \mathrm{opt}\Big(-\sum_{i \in S} w_i \Delta_i,\, o,\, \theta\Big),
       \quad \theta \leftarrow \theta + u \qquad (O19)

    The weighted sum with its sign changed stands for the gradient. The state is kept as plain
    arrays, so that a run can be saved and resumed.

    >>> import optax
    >>> server = OptaxStep(optax.sgd(0.5, momentum=0.9))
    >>> theta, state = server.step(np.zeros(2), np.array([1.0, -2.0]), {}, 1)
    >>> theta.tolist(), {name: leaf.tolist() for name, leaf in state.items()}
    ([0.5, -1.0], {'0': [-1.0, 2.0]})
    """

    optimizer: optax.GradientTransformation

    def step(
        self, theta: FloatArray, total: FloatArray, state: State, index: int
    ) -> tuple[FloatArray, State]:
        """Return the next model (P,) and the leaves of optax's state, by number."""
        del index
        with jax.enable_x64(True):
            first = jax.eval_shape(self.optimizer.init, theta)
            leaves, structure = jax.tree.flatten(first)
            if state:
                before = jax.tree.unflatten(structure, _restored(state, leaves))
            else:
                before = self.optimizer.init(theta)
            following, after = _stepped(self.optimizer, theta, total, before)
        kept = {str(k): np.asarray(leaf) for k, leaf in enumerate(jax.tree.leaves(after))}
        return np.array(following), kept


def _restored(state: State, leaves: list[jax.ShapeDtypeStruct]) -> list[Any]:
    found = [state.get(str(k)) for k in range(len(leaves))]
    shapes = [None if value is None else value.shape for value in found]
    if len(state) != len(leaves) or shapes != [leaf.shape for leaf in leaves]:
        raise InputError("The saved state is of another server optimizer or model.")
    return found


@partial(jax.jit, static_argnums=0)
def _stepped(
    optimizer: optax.GradientTransformation, theta: Any, total: Any, state: Any
) -> tuple[jax.Array, Any]:
    moves, state = optimizer.update(-total, state, theta)
    return theta + moves, state
