"""Flower's arrays read where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from flwr.app import Array
from numpy.lib import format as npy

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STYPE = "numpy.ndarray"
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in its bytes: what stands before its numbers, and what that means."""

    head: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: str

    @classmethod
    def of(cls, array: Array) -> Self:
        """Return the layout of an array; ValueError for bytes that are none."""
        if array.stype != _STYPE:
            raise ValueError(f"serialised as {array.stype!r}")
        stream = BytesIO(array.data)
        try:
            shape, fortran, dtype = _HEADERS[npy.read_magic(stream)](stream)
        except (KeyError, TypeError, EOFError) as error:
            raise ValueError("no header") from error
        if dtype.hasobject:
            raise ValueError("holds objects")
        return cls(array.data[: stream.tell()], dtype, shape, "F" if fortran else "C")

    def view(self, array: Array) -> NDArray[Any]:
        """Return an array's numbers without a copy, quickly if it has this layout."""
        own = self
        if array.stype != _STYPE or not array.data.startswith(self.head):
            own = type(self).of(array)
        flat = np.frombuffer(array.data, dtype=own.dtype, offset=len(own.head))
        return flat.reshape(own.shape, order=own.order)  # type: ignore[call-overload,no-any-return]


def array_view(array: Array) -> NDArray[Any]:
    """Return what an array holds, as its bytes say and not as it claims, without a copy.

    Raises ValueError for bytes that are no array. The view cannot be written to.

    >>> from flwr.app import Array
    >>> array_view(Array(np.arange(3.0)))
    array([0., 1., 2.])
    """
    return Layout.of(array).view(array)


class QuickArray(Array):
    """An array that is read by one copy of its bytes; Flower's own makes two, piece by piece.

    >>> quick = QuickArray.of(Array(np.arange(3.0)))
    >>> quick.numpy()
    array([0., 1., 2.])
    """

    @classmethod
    def of(cls, array: Array, layout: Layout | None = None) -> Self:
        """Return the same array, its bytes shared, which most likely has a known layout."""
        made = cls(array.dtype, array.shape, array.stype, array.data)
        made.__dict__["_layout"] = Layout.of(array) if layout is None else layout
        return made

    def numpy(self) -> NDArray[Any]:
        """Return the array, as a copy of one's own."""
        layout: Layout = self.__dict__["_layout"]
        return layout.view(self).copy(order="K")
