"""What is balanced: a matrix of balance columns, or margins of categories never made into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows, some
from fedipw.numerics.dual import CLIPPED, column_moments, dense_sums, margin_sums

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, CodeArray, FloatArray, IntArray


class Moments(NamedTuple):
    """Of each balance column: mean, standard deviation (over n - 1), least, largest, (q,) each."""

    mean: FloatArray
    deviation: FloatArray
    least: FloatArray
    largest: FloatArray


class Frame(NamedTuple):
    """Columns are taken as (b - centre) / scale."""

    centre: FloatArray  # (q,)
    scale: FloatArray  # (q,)


class DualSums(NamedTuple):
    """Sums over rows at one set of multipliers; gradient and Hessian have the constant last."""

    value: float
    largest: float  # largest u of any row
    gradient: FloatArray  # (q + 1,)
    hessian: FloatArray | None  # (q + 1, q + 1)


class BalanceDesign(Protocol):
    """Rows of balance columns b_i, whatever holds them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, (q,)."""
        ...

    @property
    def rows(self) -> int:
        """Number of enrolled clients."""
        ...

    @property
    def moments(self) -> Moments:
        """Unweighted moments of the columns."""
        ...

    @property
    def implied(self) -> BoolArray:
        """Columns known to follow from those before them, (q,)."""
        ...

    def take(self, rows: slice | IntArray) -> BalanceDesign:
        """Return some of the rows, copied."""
        ...

    def sums(
        self,
        base: FloatArray,
        frame: Frame,
        point: FloatArray,
        family: tuple[int, float, float],
        ratio: FloatArray,
        *,
        hessian: bool = True,
    ) -> DualSums:
        """Return the dual's sums in a frame; leaves F(u) in ``ratio``."""
        ...

    def row(self, index: int) -> FloatArray:
        """Return one row, (q,)."""
        ...

    def dense(self) -> FloatArray:
        """Return all rows, (n, q); only for small problems."""
        ...


def gram(design: BalanceDesign, base: FloatArray, frame: Frame) -> FloatArray:
    """Return the base-weighted second moments of the standardised columns, constant last."""
    family = (CLIPPED, -np.inf, np.inf)  # F' = 1
    point, room = np.zeros(len(frame.centre) + 1), np.empty(design.rows)
    square = design.sums(base, frame, point, family, room).hessian
    assert square is not None
    return square


def scores(design: BalanceDesign, direction: FloatArray, room: FloatArray) -> FloatArray:
    """Return b_i'direction of every row in ``room``, (n,)."""
    raw = Frame(np.zeros(len(direction)), np.ones(len(direction)))
    family = (CLIPPED, -np.inf, np.inf)  # F = 1 + u
    design.sums(np.ones(1), raw, np.append(direction, -1.0), family, room, hessian=False)
    return room


@final
@dataclass(frozen=True, eq=False)
class Dense:
    """A matrix of balance columns, (n, q), read where it lies and never copied."""

    matrix: FloatArray
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2 or self.matrix.shape[1] != len(self.names):
            raise InputError(
                f"Balance columns have shape {self.matrix.shape}, expected (rows, "
                f"{len(self.names)})."
            )
        check_names(self.names)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.matrix)

    @cached_property
    def moments(self) -> Moments:
        """Moments of the columns, in one pass."""
        return Moments(*column_moments(self.matrix))

    @property
    def implied(self) -> BoolArray:
        """None."""
        return np.zeros(len(self.names), dtype=np.bool_)

    def take(self, rows: slice | IntArray) -> Dense:
        """Return some of the rows, copied."""
        return Dense(np.ascontiguousarray(self.matrix[rows]), self.names)

    def sums(
        self,
        base: FloatArray,
        frame: Frame,
        point: FloatArray,
        family: tuple[int, float, float],
        ratio: FloatArray,
        *,
        hessian: bool = True,
    ) -> DualSums:
        """Return the dual's sums."""
        return DualSums(
            *dense_sums(self.matrix, base, *frame, point, family, ratio, hessian=hessian)
        )

    def row(self, index: int) -> FloatArray:
        """Return one row."""
        return np.asarray(self.matrix[index], dtype=np.float64)

    def dense(self) -> FloatArray:
        """Return the matrix."""
        return self.matrix


@final
@dataclass(frozen=True, eq=False)
class Margins:
    """Indicators of the levels of V categorical variables, given by codes.

    ``codes`` (n, V) counts levels from 0; ``levels`` names them, variable by variable. Columns are
    all levels in turn, so that targets are one share per level. The indicator matrix is never
    built: memory is one small integer per client and variable.
    """

    codes: CodeArray
    levels: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.shape[1] != len(self.levels):
            raise InputError(
                f"Codes have shape {self.codes.shape}, expected (rows, {len(self.levels)})."
            )
        if not np.issubdtype(self.codes.dtype, np.integer):
            raise InputError(f"Codes must be whole numbers, not {self.codes.dtype}.")
        check_names(self.names)
        sizes = np.array([len(names) for names in self.levels])
        if self.codes.size and (self.codes.min() < 0 or (self.codes.max(axis=0) >= sizes).any()):
            raise InputError(
                "A code names no level: codes count from 0 below the number of levels."
            )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.codes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all levels in turn."""
        return tuple(name for names in self.levels for name in names)

    @cached_property
    def _offsets(self) -> IntArray:
        sizes = [len(names) for names in self.levels]
        return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)

    @cached_property
    def moments(self) -> Moments:
        """Moments of indicators, from counts."""
        counts = [
            np.bincount(self.codes[:, v], minlength=len(names))
            for v, names in enumerate(self.levels)
        ]
        n = self.rows
        share = np.concatenate(counts) / n
        deviation = np.sqrt(share * (1.0 - share) * n / max(1, n - 1))
        return Moments(
            share, deviation, (share >= 1.0).astype(np.float64), (share > 0.0).astype(np.float64)
        )

    @property
    def implied(self) -> BoolArray:
        """The last level of each variable: indicators of a category sum to one."""
        out = np.zeros(len(self.names), dtype=np.bool_)
        out[np.cumsum([len(names) for names in self.levels]) - 1] = True
        return out

    def take(self, rows: slice | IntArray) -> Margins:
        """Return some of the rows, copied."""
        return Margins(np.ascontiguousarray(self.codes[rows]), self.levels)

    def sums(
        self,
        base: FloatArray,
        frame: Frame,
        point: FloatArray,
        family: tuple[int, float, float],
        ratio: FloatArray,
        *,
        hessian: bool = True,
    ) -> DualSums:
        """Return the dual's sums: raw indicators first, then their affine change."""
        centre, scale = frame
        raw = np.append(point[:-1] / scale, point[-1] - float(point[:-1] @ (centre / scale)))
        value, largest, gradient, square = margin_sums(
            self.codes, self._offsets, base, raw, family, ratio, hessian=hessian
        )
        change = np.diag(np.append(1.0 / scale, 1.0))
        change[:-1, -1] = -centre / scale
        gradient = change @ gradient
        if square is not None:
            square = change @ square @ change.T
        return DualSums(value, largest, gradient, square)

    def row(self, index: int) -> FloatArray:
        """Return one row of indicators."""
        out = np.zeros(len(self.names))
        out[self._offsets + self.codes[index]] = 1.0
        return out

    def dense(self) -> FloatArray:
        """Return the indicators."""
        out = np.zeros((self.rows, len(self.names)))
        out[np.arange(self.rows)[:, None], self._offsets + self.codes] = 1.0
        return out


def design_of(balance: FloatArray | BalanceDesign, names: Sequence[str] | None) -> BalanceDesign:
    """Return a design from a matrix and its columns' names."""
    if not isinstance(balance, np.ndarray) and hasattr(balance, "moments"):
        if names is not None:
            raise InputError("A design names its own columns: leave out names.")
        return balance
    matrix = np.asarray(balance, dtype=np.float64)
    if matrix.ndim != 2:
        raise InputError(f"Balance columns have shape {matrix.shape}, expected (rows, columns).")
    if names is None:
        names = [f"b{j + 1}" for j in range(matrix.shape[1])]
    check_rows(matrix.shape[1], names=np.array(names, dtype=object))
    return Dense(matrix, tuple(names))


def check_names(names: tuple[str, ...]) -> None:
    """Raise if a column's name stands twice."""
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"Balance columns must be named once each; {some(twice)} is not.")
