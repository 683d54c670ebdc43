"""Sums of updates under several weights at once, in one reading of the replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from fedipw.numerics import FloatArray
from fedipw.numerics.compiled import compiled, inlined, numbers_at
from fedipw.numerics.threads import over_ranges

_PIECE = 16_384  # parameters whose sums are made at once, by each thread
_STRIP = 4_096  # parameters of which the sums stay in the processor's near memory
_READ, _MADE = 8, 4  # replies and sums of one loop, whose weights and updates stay in registers


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
    base = _of_type(_read_only(model.reshape(-1)), dtype)
    flat = [_read_only(reply.reshape(-1)) for reply in replies]
    flat += [base] * (-len(flat) % _READ)  # they move nothing
    rows = np.zeros((len(weights) + -len(weights) % _MADE, len(flat)), dtype=dtype)
    rows[: len(weights), : len(replies)] = weights
    places = np.array([reply.ctypes.data for reply in flat], dtype=np.int64)
    others = [k for k, reply in enumerate(flat) if reply.dtype != dtype]

    def work(start: int, stop: int) -> None:
        for piece in _pieces(start * _PIECE, min(stop * _PIECE, len(base))):
            sums = np.zeros((len(rows), piece.stop - piece.start), dtype=dtype)
            here = places + piece.start * dtype.itemsize
            held = [_of_type(flat[k][piece], dtype) for k in others]
            here[others] = [part.ctypes.data for part in held]
            _add_updates(sums, rows, base[piece], here)
            use(piece, sums[: len(weights)])

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
    sums: NDArray[Any], weights: NDArray[Any], origin: NDArray[Any], replies: NDArray[np.int64]
) -> None:
    """Add the weighted updates of replies, which lie at these addresses, to sums, (k, p).

    ``weights`` are (k, m), k a multiple of 4 and m of 8. Eight replies are read for all sums while
    they are near, four sums at a time: a product of matrices, but without a copy of the replies or
    of their updates, and without threads other than the caller's.
    """
    for first in range(0, len(origin), _STRIP):
        count = min(_STRIP, len(origin) - first)
        here, past = origin[first : first + count], first * origin.itemsize
        for i in range(0, len(replies), _READ):
            r0 = numbers_at(replies[i] + past, count, origin)
            r1 = numbers_at(replies[i + 1] + past, count, origin)
            r2 = numbers_at(replies[i + 2] + past, count, origin)
            r3 = numbers_at(replies[i + 3] + past, count, origin)
            r4 = numbers_at(replies[i + 4] + past, count, origin)
            r5 = numbers_at(replies[i + 5] + past, count, origin)
            r6 = numbers_at(replies[i + 6] + past, count, origin)
            r7 = numbers_at(replies[i + 7] + past, count, origin)
            for j in range(0, len(sums), _MADE):
                s0, s1 = sums[j, first : first + count], sums[j + 1, first : first + count]
                s2, s3 = sums[j + 2, first : first + count], sums[j + 3, first : first + count]
                a0, a1, a2, a3, a4, a5, a6, a7 = _eight(weights[j, i:])
                b0, b1, b2, b3, b4, b5, b6, b7 = _eight(weights[j + 1, i:])
                c0, c1, c2, c3, c4, c5, c6, c7 = _eight(weights[j + 2, i:])
                d0, d1, d2, d3, d4, d5, d6, d7 = _eight(weights[j + 3, i:])
                for t in range(count):
                    x = here[t]
                    u0, u1, u2, u3 = r0[t] - x, r1[t] - x, r2[t] - x, r3[t] - x
                    u4, u5, u6, u7 = r4[t] - x, r5[t] - x, r6[t] - x, r7[t] - x
                    s0[t] += ((a0 * u0 + a1 * u1) + (a2 * u2 + a3 * u3)) + (
                        (a4 * u4 + a5 * u5) + (a6 * u6 + a7 * u7)
                    )
                    s1[t] += ((b0 * u0 + b1 * u1) + (b2 * u2 + b3 * u3)) + (
                        (b4 * u4 + b5 * u5) + (b6 * u6 + b7 * u7)
                    )
                    s2[t] += ((c0 * u0 + c1 * u1) + (c2 * u2 + c3 * u3)) + (
                        (c4 * u4 + c5 * u5) + (c6 * u6 + c7 * u7)
                    )
                    s3[t] += ((d0 * u0 + d1 * u1) + (d2 * u2 + d3 * u3)) + (
                        (d4 * u4 + d5 * u5) + (d6 * u6 + d7 * u7)
                    )


@inlined
def _eight(row: NDArray[Any]) -> tuple[Any, ...]:
    """Return the first eight numbers of an array."""
    return row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7]


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
