"""Local data of any shape: vectors, images, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.lab.clients import check_offsets

if TYPE_CHECKING:
    from fedipw.numerics.types import IntArray

_CHUNK_ROWS = 1 << 14


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayClients:
    """Rows of every client: client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.

    A row may be a vector, an image or a sequence of tokens, and a label a class, a number or an
    array. The arrays are not copied.

    >>> data = ArrayClients(features=np.zeros((3, 8, 8)), labels=np.array([4, 0, 9]),
    ...                     offsets=np.array([0, 1, 3]))
    >>> data.size, data.counts.tolist()
    (2, [1, 2])
    """

    features: NDArray[Any]  # (rows, ...)
    labels: NDArray[Any]  # (rows, ...)
    offsets: IntArray  # (N + 1,)

    def __post_init__(self) -> None:
        if self.features.ndim < 1 or self.labels.ndim < 1 or len(self.features) != len(self.labels):
            raise InputError(
                f"features {self.features.shape} and labels {self.labels.shape} disagree on rows."
            )
        check_offsets(self.offsets, len(self.labels))
        if len(self.labels) > np.iinfo(np.int32).max:
            raise InputError(f"{len(self.labels)} rows are more than 32-bit indices can name.")
        for name in ("features", "labels"):
            self._check_values(name, getattr(self, name))

    def _check_values(self, name: str, values: NDArray[Any]) -> None:
        if values.dtype.kind not in "fiub":
            raise InputError(f"{name} must be numbers, not {values.dtype}.")
        for start in range(0, len(values), _CHUNK_ROWS):
            part = values[start : start + _CHUNK_ROWS].reshape(-1, values[0].size)
            if values.dtype.kind == "f":
                fine, what = np.isfinite(part).all(axis=1), "missing or infinite values"
            else:
                limits = np.iinfo(np.int32)  # JAX's integers unless told otherwise
                fine = ((part >= limits.min) & (part <= limits.max)).all(axis=1)
                what = "integers of more than 32 bits"
            if not fine.all():
                row = start + int(np.argmin(fine))
                owner = int(np.searchsorted(self.offsets, row, side="right")) - 1
                raise InputError(
                    f"{name} have {what}, first in row {row} of client {owner}. "
                    "Fill, recode or drop such rows."
                )

    @property
    def size(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> IntArray:
        """Rows of each client, n_i, (N,)."""
        ends = self.offsets.astype(np.int64)
        return ends[1:] - ends[:-1]
