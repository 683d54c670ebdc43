"""Mini-batches: whose rows, drawn from the round's key and the client alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedipw.numerics.compiled import compiled

if TYPE_CHECKING:
    from fedipw.numerics.types import IntArray

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
