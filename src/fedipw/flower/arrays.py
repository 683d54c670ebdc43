"""Arrays as Flower sends them: read without a copy, and never as their sender claims.

Bytes come from clients. Their header is read by a strict pattern and never evaluated, and the shape
it gives must be that of the bytes behind it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, Self

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedipw.numerics.types import BFLOAT16, from_bfloat16, in_type, to_bfloat16

STYPE = "numpy.ndarray"  # how arrays are serialised
_MAGIC, _LONGEST, _DIMENSIONS = b"\x93NUMPY", 4096, 64
_BFLOAT = "<V2"  # how a header calls what NumPy does not know
_DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>=|]?[a-zA-Z]\d{0,4})['"]""")
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(((?:\s*\d{1,18}\s*,)*(?:\s*\d{1,18})?)\s*\)""")


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array is laid out in its bytes: its header, and what the header says."""

    head: bytes
    dtype: np.dtype[Any]  # of the bytes
    shape: tuple[int, ...]
    order: str
    bfloat: bool = False  # whether the bytes are bfloat16, read as float32

    @classmethod
    def of(cls, array: Array) -> Self:
        """Return the layout of an array; ValueError for bytes that are not an array."""
        if array.stype != STYPE:
            raise ValueError(f"serialised as {array.stype!r}")
        data = array.data
        if data[:6] != _MAGIC or len(data) < 12 or data[6] not in {1, 2, 3}:
            raise ValueError("no header")
        start = 10 if data[6] == 1 else 12
        length = int.from_bytes(data[8:start], "little")
        if length > min(_LONGEST, len(data) - start):
            raise ValueError(f"a header of {length} bytes")
        head = bytes(data[: start + length])
        text = head[start:].decode("latin-1")
        descr, order, shape = (p.search(text) for p in (_DESCR, _ORDER, _SHAPE))
        if descr is None or order is None or shape is None:
            raise ValueError("no header of plain numbers")
        bfloat = descr[1] == _BFLOAT and array.dtype == BFLOAT16
        try:
            dtype = np.dtype(np.uint16 if bfloat else descr[1])
        except TypeError as error:
            raise ValueError(f"type {descr[1]!r}") from error
        sizes = tuple(map(int, re.findall(r"\d+", shape[1])))
        if len(sizes) > _DIMENSIONS or dtype.hasobject:
            raise ValueError("holds objects, or too many dimensions")
        if math.prod(sizes) * dtype.itemsize != len(data) - len(head):
            raise ValueError(f"{len(data) - len(head)} bytes are not of shape {sizes}")
        return cls(head, dtype, sizes, "F" if order[1] == "True" else "C", bfloat)

    @property
    def name(self) -> str:
        """The type, as Flower calls it."""
        return BFLOAT16 if self.bfloat else str(self.dtype)

    @property
    def working(self) -> np.dtype[Any]:
        """The type that is computed with: single precision at least, in the machine's order.

        >>> Layout.of(Array(np.ones(3, dtype=np.float16))).working
        dtype('float32')
        """
        if self.bfloat or self.dtype == np.float16:
            return np.dtype(np.float32)
        return self.dtype.newbyteorder("=")

    def view(self, array: Array) -> NDArray[Any]:
        """Return an array's numbers without a copy, quickly if it has this layout."""
        own = self
        if array.stype != STYPE or not array.data.startswith(self.head):
            own = type(self).of(array)
        flat = np.frombuffer(array.data, dtype=own.dtype, offset=len(own.head))
        if own.bfloat:
            flat = from_bfloat16(flat)
        return flat.reshape(own.shape, order=own.order)  # type: ignore[call-overload,no-any-return]


def array_view(array: Array) -> NDArray[Any]:
    """Return an array without a copy, read-only, as its bytes say and not as its fields claim.

    bfloat16 comes as float32. Raises ValueError for bytes that are not an array.

    >>> array_view(Array(np.arange(3.0)))
    array([0., 1., 2.])
    """
    return Layout.of(array).view(array)


def packed_array(array: NDArray[Any], name: str | None = None) -> Array:
    """Return an array as Flower sends it, by one copy of its bytes; Flower's own makes two.

    With the ``name`` of a type the numbers are put in that type first, integers rounded.

    >>> packed_array(np.arange(3.0)).numpy()
    array([0., 1., 2.])
    >>> packed_array(np.array(2.6), "int64").numpy()
    array(3)
    """
    stream = BytesIO()
    if name == BFLOAT16:
        made: NDArray[Any] = to_bfloat16(array).reshape(np.shape(array))
        about = {**npy.header_data_from_array_1_0(made), "descr": _BFLOAT}
    else:
        made = array if name is None else in_type(array, np.dtype(name))
        made = np.asarray(made, order="C")
        about = npy.header_data_from_array_1_0(made)
    npy.write_array_header_1_0(stream, about)
    data = b"".join([stream.getvalue(), made.reshape(-1).view(np.uint8).data])
    return Array(name or str(made.dtype), made.shape, STYPE, data)


def packed_record(arrays: Mapping[str, NDArray[Any]], like: ArrayRecord) -> ArrayRecord:
    """Return arrays as a record, in the types of another."""
    out = ArrayRecord()
    for key, array in arrays.items():
        out[key] = packed_array(array, Layout.of(like[key]).name)
    return out


class QuickArray(Array):
    """An array read by one copy of its bytes; Flower's own makes two, piece by piece.

    It comes in the type that is computed with, whatever the precision of its bytes: the first reply
    would set that of the strategy's sums.

    >>> array = Array(np.array([1.0, 2.0], dtype=np.float16))
    >>> QuickArray.of(array, Layout.of(array)).numpy()
    array([1., 2.], dtype=float32)
    """

    @classmethod
    def of(cls, array: Array, layout: Layout) -> Self:
        """Return the same array, its bytes shared, which most likely has a known layout."""
        made = cls(array.dtype, array.shape, array.stype, array.data)
        made.__dict__["_layout"] = layout
        return made

    def numpy(self) -> NDArray[Any]:
        """Return a writable copy of the array."""
        layout: Layout = self.__dict__["_layout"]
        return layout.view(self).astype(layout.working, order="K", copy=True)


class FiledArray(Array):
    """An array whose bytes lie in a file and are read whenever they are asked for.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(np.array([1.0, 2.0, 3.0]).tobytes())
    ...     file.flush()
    ...     array = FiledArray(file, 8, np.dtype(np.float64), (2,))
    ...     array.numpy(), Array(np.array([2.0, 3.0])).data == array.data
    (array([2., 3.]), True)
    """

    def __init__(
        self, file: BinaryIO, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self.dtype, self.shape, self.stype = str(dtype), shape, STYPE
        self._file, self._offset, self._dtype = file, offset, dtype

    def numpy(self) -> NDArray[Any]:
        """Return the array, read from the file."""
        out = np.empty(self.shape, dtype=self._dtype)
        rest, place = out.reshape(-1).view(np.uint8).data, self._offset
        while rest:
            done = os.preadv(self._file.fileno(), [rest], place)
            if not done:
                raise OSError("the file of an array ends too early")
            rest, place = rest[done:], place + done
        return out

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array as Flower sends it, read from the file."""
        found: bytes = packed_array(self.numpy()).data
        return found
