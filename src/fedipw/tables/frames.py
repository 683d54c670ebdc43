"""Affine frames of columns: about mean 0 and deviation 1, so that steps are well conditioned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar, final

import numpy as np

from fedipw.tables.partitions import Block, Partitions, sum_over

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """An affine change of columns, (x - centre) / scale, fixed before any row is read."""

    centre: FloatArray  # (q,)
    scale: FloatArray  # (q,)

    @classmethod
    def of(cls, columns: FloatArray, weights: FloatArray | None = None) -> Frame:
        """Return mean and standard deviation of columns (q, m); 1 where a column hardly varies."""
        if columns.shape[1] == 0 or (weights is not None and not weights.any()):
            return cls(np.zeros(len(columns)), np.ones(len(columns)))
        share = np.full(columns.shape[1], 1.0) if weights is None else weights
        share = share / share.sum()
        centre = columns @ share
        scale = np.sqrt((columns - centre[:, None]) ** 2 @ share)
        tiny = 1e-12 * np.maximum(1e-300, np.abs(columns).max(axis=1, initial=0.0))
        return cls(centre, np.where(scale > tiny, scale, 1.0))

    def matrix(self) -> FloatArray:
        """Return what takes coefficients, intercept last, of columns to those in this frame."""
        out = np.diag(np.append(self.scale, 1.0))
        out[-1, :-1] = self.centre
        return out

    def inverse(self) -> FloatArray:
        """Return what takes coefficients in this frame back to those of the columns."""
        out = np.diag(np.append(1.0 / self.scale, 1.0))
        out[-1, :-1] = -self.centre / self.scale
        return out

    def standard(self, columns: FloatArray) -> FloatArray:
        """Return columns (q, m) in this frame, changed in place."""
        columns -= self.centre[:, None]
        columns /= self.scale[:, None]
        return columns


@final
@dataclass(frozen=True, slots=True, eq=False)
class Framed:
    """Partitions whose columns are changed into a frame as they are read."""

    inner: Partitions
    frame: Frame

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.inner.rows

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks in the frame, combined in order."""
        return self.inner.reduced(partial(_in_frame, function=function, frame=self.frame), combine)


def _in_frame(block: Block, function: Callable[[Block], T], frame: Frame) -> T:
    return function(block._replace(columns=frame.standard(block.columns.copy())))


def frame_of(partitions: Partitions, q: int) -> Frame:
    """Return mean and deviation of the columns, by one pass; 1 where a column hardly varies."""
    if q == 0:
        return Frame(np.zeros(0), np.ones(0))
    found = sum_over(partitions, _block_spread)
    scale = np.sqrt(found.square / found.weight)
    return Frame(found.mean, np.where(scale > 1e-12 * found.largest, scale, 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class _Spread:
    weight: float
    mean: FloatArray  # (q,)
    square: FloatArray  # (q,) about the mean
    largest: FloatArray  # (q,) of absolute values

    def __add__(self, other: _Spread) -> _Spread:
        weight, apart = self.weight + other.weight, other.mean - self.mean
        share = other.weight / weight if weight > 0.0 else 0.0
        return _Spread(
            weight,
            self.mean + apart * share,
            self.square + other.square + apart**2 * (self.weight * share),
            np.maximum(self.largest, other.largest),
        )


def _block_spread(block: Block) -> _Spread:
    weights = block.weights if len(block.weights) else np.ones(block.rows)
    total = float(weights.sum())
    mean = block.columns @ weights / (total if total > 0.0 else 1.0)
    square = (block.columns - mean[:, None]) ** 2 @ weights
    largest = np.abs(block.columns).max(axis=1, initial=1e-300)
    return _Spread(total, mean, square, largest)
