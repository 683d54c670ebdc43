"""Local data of all clients in one ragged block: rows of numbers, or rows of any shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.numerics.checks import some

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray, IntArray, LabelArray

_CHUNK_ROWS = 1 << 18
_CHECKED_ROWS = 1 << 14  # of any shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RaggedRows:
    """Client i owns rows ``offsets[i]`` to ``offsets[i + 1]``."""

    features: NDArray[Any]  # (rows, ...)
    labels: NDArray[Any]  # (rows, ...)
    offsets: IntArray  # (N + 1,)

    def _check_offsets(self) -> None:
        offsets, rows = self.offsets, len(self.labels)
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
            raise InputError("offsets must be a vector of integers.")
        if len(offsets) < 2:
            raise InputError("There are no clients: offsets needs at least two entries.")
        counts = self.counts
        if offsets[0] != 0 or offsets[-1] != rows or (counts < 0).any():
            raise InputError(f"offsets must rise from 0 to the number of rows, {rows}.")
        if (counts == 0).any():
            raise InputError(
                f"{int((counts == 0).sum())} clients have no rows (client "
                f"{some(np.flatnonzero(counts == 0).tolist())}); a local loss needs at least one."
            )

    def _owner(self, row: int) -> int:
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    @property
    def size(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> IntArray:
        """Rows of each client, n_i, (N,)."""
        ends = self.offsets.astype(np.int64, copy=False)
        return ends[1:] - ends[:-1]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClientData(_RaggedRows):
    """Rows of every client: client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.

    >>> data = ClientData(features=np.zeros((3, 2)), labels=np.array([0, 1, 1], dtype=np.int8),
    ...                   offsets=np.array([0, 1, 3]))
    >>> data.size, data.counts.tolist(), data.label_share.tolist()
    (2, [1, 2], [0.0, 1.0])
    """

    features: FloatArray  # (rows, d)
    labels: LabelArray  # (rows,), 0 or 1

    def __post_init__(self) -> None:
        rows = len(self.labels)
        if self.features.ndim != 2 or len(self.features) != rows:
            raise InputError(
                f"features {self.features.shape} and labels {self.labels.shape} disagree on rows."
            )
        if self.features.dtype != np.float64 or not self.features.flags.c_contiguous:
            raise InputError("features must be a C-contiguous float64 array.")
        if self.labels.dtype != np.int8:
            raise InputError(f"labels must be int8 (0 or 1), not {self.labels.dtype}.")
        self._check_offsets()
        if self.labels.size and (self.labels.min() < 0 or self.labels.max() > 1):
            row = int(np.flatnonzero((self.labels < 0) | (self.labels > 1))[0])
            raise InputError(
                f"labels must be 0 or 1; row {row} of client {self._owner(row)} has "
                f"{self.labels[row]}."
            )
        for start in range(0, rows, _CHUNK_ROWS):
            fine = np.isfinite(self.features[start : start + _CHUNK_ROWS]).all(axis=1)
            if not fine.all():
                row = start + int(np.argmin(fine))
                raise InputError(
                    f"features have missing or infinite values, first in row {row} of client "
                    f"{self._owner(row)}. Fill or drop such rows."
                )

    @property
    def n_parameters(self) -> int:
        """Length of the model, one coefficient per feature and the intercept."""
        return int(self.features.shape[1]) + 1

    @property
    def label_share(self) -> FloatArray:
        """Share of ones among each client's labels, (N,)."""
        ones: FloatArray = np.add.reduceat(self.labels, self.offsets[:-1], dtype=np.float64)
        return ones / self.counts

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Yield (clients, rows) slices that together cover everything, in bounded pieces."""
        first = 0
        while first < self.size:
            limit = self.offsets[first] + _CHUNK_ROWS
            last = max(first + 1, int(np.searchsorted(self.offsets, limit, side="right")) - 1)
            yield slice(first, last), slice(int(self.offsets[first]), int(self.offsets[last]))
            first = last


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayClients(_RaggedRows):
    """As :class:`ClientData`, but a row may be a vector, an image or a sequence of tokens.

    A label may be a class, a number or an array. The arrays are not copied.

    >>> data = ArrayClients(features=np.zeros((3, 8, 8)), labels=np.array([4, 0, 9]),
    ...                     offsets=np.array([0, 1, 3]))
    >>> data.size, data.counts.tolist()
    (2, [1, 2])
    """

    def __post_init__(self) -> None:
        if self.features.ndim < 1 or self.labels.ndim < 1 or len(self.features) != len(self.labels):
            raise InputError(
                f"features {self.features.shape} and labels {self.labels.shape} disagree on rows."
            )
        self._check_offsets()
        if len(self.labels) > np.iinfo(np.int32).max:
            raise InputError(f"{len(self.labels)} rows are more than 32-bit indices can name.")
        for name in ("features", "labels"):
            self._check_values(name, getattr(self, name))

    def _check_values(self, name: str, values: NDArray[Any]) -> None:
        if values.dtype.kind not in "fiub":
            raise InputError(f"{name} must be numbers, not {values.dtype}.")
        for start in range(0, len(values), _CHECKED_ROWS):
            part = values[start : start + _CHECKED_ROWS].reshape(-1, values[0].size)
            if values.dtype.kind == "f":
                fine, what = np.isfinite(part).all(axis=1), "missing or infinite values"
            else:
                limits = np.iinfo(np.int32)  # JAX's integers unless told otherwise
                fine = ((part >= limits.min) & (part <= limits.max)).all(axis=1)
                what = "integers of more than 32 bits"
            if not fine.all():
                row = start + int(np.argmin(fine))
                raise InputError(
                    f"{name} have {what}, first in row {row} of client {self._owner(row)}. "
                    "Fill, recode or drop such rows."
                )
