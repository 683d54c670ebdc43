"""Sums of updates under several weights at once, in one reading of the replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from fedipw.numerics import FloatArray
from fedipw.numerics.compiled import compiled
from fedipw.numerics.threads import over_ranges

_PIECE = 16_384  # parameters whose sums are made at once, by each thread
_GROUP = 8  # replies whose updates are added to the sums at once
_CALL = 4 * _GROUP  # replies of one call of the kernel: short calls would wait for each other
_STRIP = 512  # parameters of a group whose updates stay in the processor's nearest memory


def over_updates(
    weights: FloatArray,
    replies: Sequence[NDArray[Any]],
    model: NDArray[Any],
    dtype: np.dtype[Any],
    use: Callable[[slice, NDArray[Any]], None],
) -> None:
    """Call ``use`` with pieces of an array's sums of updates, on all cores.

    Parameters
    ----------
    weights
        (k, m), a row for each sum.
    replies
        m arrays, of any floating type.
    model
        What updates are differences from.
    dtype
        Of the sums: float32 or float64.
    use
        Receives a slice of the flat array and the sums, (k, p), of its numbers.
    """
    base = _read_only(model.reshape(-1))
    flat = [_read_only(reply.reshape(-1)) for reply in replies]
    flat += [base] * (-len(flat) % _CALL)  # they move nothing
    rows = np.zeros((len(weights), len(flat)), dtype=dtype)
    rows[:, : len(replies)] = weights

    def work(start: int, stop: int) -> None:
        for piece in _pieces(start * _PIECE, min(stop * _PIECE, len(base))):
            sums = np.zeros((len(rows), piece.stop - piece.start), dtype=dtype)
            origin = _of_type(base[piece], dtype)
            for k in range(0, len(replies), _CALL):
                some = tuple(_of_type(reply[piece], dtype) for reply in flat[k : k + _CALL])
                used = min(_CALL, len(replies) - k)
                _add_updates(sums, rows[:, k : k + _CALL], origin, some, used)
            use(piece, sums)

    count = -(-len(base) // _PIECE)
    # small products in ``use`` would start BLAS threads beside these, which cost several times more
    # than they save
    with _pools().limit(limits=1, user_api="blas"):
        over_ranges(count, work, work=float(len(base) * len(flat) * len(rows)))


@cache
def _pools() -> ThreadpoolController:
    return ThreadpoolController()


def update_sum(
    weights: FloatArray, replies: Sequence[NDArray[Any]], model: NDArray[Any]
) -> NDArray[Any]:
    r"""Return :math:`\sum_i w_i (\theta_i - \theta)` for an array, in its own floating type.

    >>> update_sum(np.array([0.5, 2.0]), [np.array([3.0]), np.array([0.0])], np.array([1.0]))
    array([-1.])
    """
    out = np.empty(model.size, dtype=model.dtype)

    def use(piece: slice, sums: NDArray[Any]) -> None:
        out[piece] = sums[0]

    over_updates(weights[None], replies, model, model.dtype, use)
    return out.reshape(model.shape)


@compiled
def _add_updates(
    sums: NDArray[Any],
    weights: NDArray[Any],
    origin: NDArray[Any],
    replies: tuple[NDArray[Any], ...],
    used: int,
) -> None:
    """Add the weighted updates of the first replies, ``used`` of them, to sums, (k, p).

    ``weights`` are (k, 32), zero for replies that are not used. The updates of a group are made
    once for a few parameters and used in all k sums: a product of matrices, but without a copy of
    the replies, and without threads other than the caller's.
    """
    moved = np.empty(_GROUP * _STRIP, dtype=sums.dtype)
    for first in range(0, len(origin), _STRIP):
        last = min(first + _STRIP, len(origin))
        here = origin[first:last]
        for group in range(0, used, _GROUP):
            for i in range(_GROUP):
                reply, update = replies[group + i][first:last], moved[i * _STRIP : (i + 1) * _STRIP]
                for t in range(len(here)):
                    update[t] = reply[t] - here[t]
            for j in range(len(sums)):
                total, w = sums[j, first:last], weights[j, group : group + _GROUP]
                w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
                for t in range(len(total)):
                    total[t] += (
                        (w0 * moved[t] + w1 * moved[t + _STRIP])
                        + (w2 * moved[t + 2 * _STRIP] + w3 * moved[t + 3 * _STRIP])
                    ) + (
                        (w4 * moved[t + 4 * _STRIP] + w5 * moved[t + 5 * _STRIP])
                        + (w6 * moved[t + 6 * _STRIP] + w7 * moved[t + 7 * _STRIP])
                    )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a flat array that the kernel can take, a copy only if its bytes are not aligned."""
    out = np.require(array, requirements=("C", "A")).view()
    out.flags.writeable = False
    return out


def _of_type(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    return array if array.dtype == dtype else _read_only(array.astype(dtype))


def _pieces(first: int, last: int) -> Iterator[slice]:
    for start in range(first, last, _PIECE):
        yield slice(start, min(start + _PIECE, last))
