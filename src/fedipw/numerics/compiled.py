"""The one door to numba: typed decorators with the settings every kernel shares.

Kernels are compiled once and cached on disk, release the interpreter lock, follow IEEE
division (so that loops vectorise), and may reorder sums but never assume the absence of NaN or
infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.extending import intrinsic
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
}


def compiled(function: F) -> F:
    """Compile a function for the machine it runs on."""
    return cast("F", numba.njit(**_OPTIONS)(function))


def inlined(function: F) -> F:
    """Compile a function into the loops that call it, so that they vectorise.

    Its own arithmetic keeps the order written here, whatever the calling loop allows.
    """
    options = {**_OPTIONS, "fastmath": {"contract", "nsz"}, "forceinline": True}
    return cast("F", numba.njit(**options)(function))


def _bit_cast(source: Any, result: Any) -> Any:
    """Return a compiled function that reads the bits of one type as another."""

    @intrinsic
    def same_bits(_context: Any, _value: Any) -> Any:
        def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(result))

        return result(source), code

    return same_bits


_float_bits = _bit_cast(numba.types.float64, numba.types.int64)
_bits_float = _bit_cast(numba.types.int64, numba.types.float64)


def _address_cast() -> Any:
    """Return a compiled function that takes an address as a pointer to numbers of an array."""

    @intrinsic
    def pointer(_context: Any, address: Any, like: Any) -> Any:
        kind = numba.types.CPointer(like.dtype)  # type: ignore[no-untyped-call]

        def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(address, like), code

    return pointer


_pointer = _address_cast()


@inlined
def numbers_at(address: int, count: int, like: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers that lie at an address, of the type of ``like``, inside a kernel.

    Whoever calls the kernel keeps their owner alive, and has checked type, size and alignment.
    """
    found: NDArray[Any] = numba.carray(_pointer(address, like), count)  # type: ignore[attr-defined]
    return found


@inlined
def exp(x: float) -> float:
    r"""Return e**x to about one unit in the last place; arguments beyond +-700 saturate there.

    Written so that LLVM turns a loop over it into vector instructions (the C library's ``exp`` is a
    scalar call): x = k log 2 + r, a Taylor polynomial on |r| <= log(2)/2, and 2**k by its bits.
    A NaN stays a NaN.
    """
    y = -700.0 if x < -700.0 else x
    y = 700.0 if y > 700.0 else y
    shifted = y * 1.4426950408889634 + 6755399441055744.0  # round to an integer in the low bits
    k = shifted - 6755399441055744.0
    r = (y - k * 6.93145751953125e-1) - k * 1.42860682030941723212e-6
    p = 1.0 / 6227020800.0
    p = p * r + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    scale: float = _bits_float(((_float_bits(shifted) & 0xFFF) + 1023) << 52)
    return p * scale


@inlined
def sigmoid(x: float) -> float:
    """Return 1 / (1 + e**-x)."""
    return 1.0 / (1.0 + exp(-x))


@inlined
def log1p_unit(e: float) -> float:
    r"""Return log(1 + e) for e in [0, 1], to about one unit in the last place.

    log(1 + e) = 2 artanh(s) with s = e / (2 + e) <= 1/3: a series in s**2 that loops vectorise. Its
    first term, 2 s, is written e - s e: the rounding of s then counts for less than half.
    """
    s = e / (2.0 + e)
    q = s * s
    p = 1.0 / 33.0
    p = p * q + 1.0 / 31.0
    p = p * q + 1.0 / 29.0
    p = p * q + 1.0 / 27.0
    p = p * q + 1.0 / 25.0
    p = p * q + 1.0 / 23.0
    p = p * q + 1.0 / 21.0
    p = p * q + 1.0 / 19.0
    p = p * q + 1.0 / 17.0
    p = p * q + 1.0 / 15.0
    p = p * q + 1.0 / 13.0
    p = p * q + 1.0 / 11.0
    p = p * q + 1.0 / 9.0
    p = p * q + 1.0 / 7.0
    p = p * q + 1.0 / 5.0
    p = p * q + 1.0 / 3.0
    return e - s * (e - 2.0 * q * p)


@compiled
def _squares(a: NDArray[Any], b: NDArray[Any]) -> float:
    total = 0.0
    for i in range(a.size):
        apart = np.float64(a[i]) - np.float64(b[i])
        total += apart * apart
    return total


def squared_distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    r"""Return :math:`\sum_i (a_i - b_i)^2`, NaN or infinite if any element of ``a`` is.

    Both are of the same shape and numbers. It is infinite, too, where a difference is
    beyond 1e154 and its square overflows.

    >>> squared_distance(np.array([1.0, 2.0]), np.array([1.0, 0.0]))
    4.0
    """
    if a.dtype != b.dtype or a.dtype not in (np.float32, np.float64):
        a, b = a.astype(np.float64), b.astype(np.float64)
    return float(_squares(a.reshape(-1), b.reshape(-1)))
