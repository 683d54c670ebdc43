"""Number types of models: integers rounded and held to their range, bfloat16 by its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedipw.numerics import FloatArray

BFLOAT16 = "bfloat16"  # the upper half of a float32; not a type of NumPy's own


def in_type(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return numbers in a type: integers are rounded to even and held to the type's range.

    Floating-point numbers beyond a smaller type become infinite, as NumPy has it.

    >>> in_type(np.array([2.5, 300.0, -7.0]), np.dtype(np.uint8))
    array([  2, 255,   0], dtype=uint8)
    >>> in_type(np.array([0.4, 0.6]), np.dtype(np.bool_))
    array([False,  True])
    """
    values = np.asarray(values)
    if values.dtype == dtype:
        return values
    if dtype.kind == "b":
        flags: NDArray[Any] = np.rint(values).astype(np.bool_)
        return flags
    if dtype.kind not in "iu" or values.dtype.kind not in "fiu":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    info, whole = np.iinfo(dtype), np.rint(values)
    # float(info.max) may lie above the range: compare before the cast, which would wrap around
    high, low = whole >= float(info.max), whole <= float(info.min)
    out = np.where(high | low, 0, whole).astype(dtype)
    out[high], out[low] = info.max, info.min
    return out


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return bfloat16 numbers, given by their bits, in single precision: exactly.

    >>> from_bfloat16(np.array([0x3FC0], dtype=np.uint16))
    array([1.5], dtype=float32)
    """
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: FloatArray | NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 numbers, ties to even.

    >>> hex(to_bfloat16(np.array([1.5]))[0])
    '0x3fc0'
    """
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + odd) >> np.uint64(16)).astype(np.uint16)
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)  # NaN stays NaN
    return np.where(np.isnan(bits.view(np.float32)), quiet, rounded)
