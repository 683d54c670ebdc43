"""Flower's arrays read where they lie."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

if TYPE_CHECKING:
    from flwr.app import Array
    from numpy.typing import NDArray

_STYPE = "numpy.ndarray"
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def array_view(array: Array) -> NDArray[Any]:
    """Return what an array holds, as its bytes say and not as it claims, without a copy.

    Raises ValueError for bytes that are no array. The view cannot be written to.

    >>> from flwr.app import Array
    >>> array_view(Array(np.arange(3.0)))
    array([0., 1., 2.])
    """
    if array.stype != _STYPE:
        raise ValueError(f"serialised as {array.stype!r}")
    stream = BytesIO(array.data)
    try:
        shape, fortran, dtype = _HEADERS[npy.read_magic(stream)](stream)
    except (KeyError, TypeError, EOFError) as error:
        raise ValueError("no header") from error
    if dtype.hasobject:
        raise ValueError("holds objects")
    flat = np.frombuffer(array.data, dtype=dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C")
