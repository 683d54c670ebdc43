"""Local data of all clients in one ragged block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedipw.numerics.types import FloatArray, IntArray, LabelArray

_CHUNK_ROWS = 1 << 18


def check_offsets(offsets: IntArray, rows: int) -> None:
    """Raise unless offsets (N + 1,) give every client rows of its own, all ``rows`` together."""
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise InputError("offsets must be a vector of integers.")
    if len(offsets) < 2:
        raise InputError("There are no clients: offsets needs at least two entries.")
    counts = np.diff(offsets.astype(np.int64))
    if offsets[0] != 0 or offsets[-1] != rows or (counts < 0).any():
        raise InputError(f"offsets must rise from 0 to the number of rows, {rows}.")
    if (counts == 0).any():
        raise InputError(
            f"{int((counts == 0).sum())} clients have no rows (client "
            f"{some(np.flatnonzero(counts == 0).tolist())}); a local loss needs at least one."
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClientData:
    """Rows of every client: client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.

    Examples
    --------
    >>> data = ClientData(features=np.zeros((3, 2)), labels=np.array([0, 1, 1], dtype=np.int8),
    ...                   offsets=np.array([0, 1, 3]))
    >>> data.size, data.counts.tolist(), data.label_share.tolist()
    (2, [1, 2], [0.0, 1.0])
    """

    features: FloatArray  # (rows, d)
    labels: LabelArray  # (rows,), 0 or 1
    offsets: IntArray  # (N + 1,)

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
        check_offsets(self.offsets, rows)
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

    def _owner(self, row: int) -> int:
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    @property
    def size(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @property
    def n_parameters(self) -> int:
        """Length of the model, one coefficient per feature and the intercept."""
        return int(self.features.shape[1]) + 1

    @property
    def counts(self) -> IntArray:
        """Rows of each client, n_i, (N,)."""
        counts: IntArray = np.diff(self.offsets)
        return counts

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
