"""A round's local training as one compiled function: loops over blocks of clients.

Loops have the number of clients and of steps as data, not as shape. So a smaller cohort, padded to
the same shape, does not pay for the padding, and clients with their own K_i need no masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

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
    weights: Any  # (C,) 0 where a place is empty; None where updates are kept apart


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

    def total(self, data: Data, job: Job) -> jax.Array:
        """Return the weighted sum of updates, (P,)."""
        start = self.tree(job.theta)

        def add(i: Any, sums: Params) -> Params:
            lanes = self._lanes(job.lanes, i)
            moved = self._moved(data, job, start, lanes)
            return jax.tree.map(lambda s, d: s + _weighted(lanes.weights, d), sums, moved)

        zero = jax.tree.map(jnp.zeros_like, start)
        return ravel_pytree(lax.fori_loop(0, job.blocks, add, zero))[0]

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
        taken: Lanes = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, i * self.block, self.block), lanes
        )
        return taken

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
    return jnp.tensordot(weights, updates, 1, precision=lax.Precision.HIGHEST)


def row_values(
    tree: Callable[[jax.Array], Params], measure: Loss, theta: Any, data: Data, at: Any
) -> jax.Array:
    """Return ``measure`` at each of these rows, (len(at),)."""
    return measure(tree(theta), data.features[at], data.labels[at])
