"""How far two arrays are apart, in one pass and without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedipw.numerics.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray


@compiled
def _squares(a: NDArray[Any], b: NDArray[Any]) -> float:
    total = 0.0
    for i in range(a.size):
        apart = np.float64(a[i]) - np.float64(b[i])
        total += apart * apart
    return total


def squared_distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    r"""Return :math:`\sum_i (a_i - b_i)^2`, NaN or infinite if any element of ``a`` is.

    Both are of the same shape and of a floating type. It is infinite, too, where a difference is
    beyond 1e154 and its square overflows.

    >>> squared_distance(np.array([1.0, 2.0]), np.array([1.0, 0.0]))
    4.0
    """
    if a.dtype != b.dtype or a.dtype not in (np.float32, np.float64):
        a, b = a.astype(np.float64), b.astype(np.float64)
    return float(_squares(a.reshape(-1), b.reshape(-1)))
