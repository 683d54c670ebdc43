"""The average of the last rounds' models: most of the noise removed for nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.numerics.types import in_type


def tail_length(rounds: int, fraction: float) -> int:
    """Return how many last rounds a fraction stands for, at least one.

    >>> tail_length(600, 0.2), tail_length(3, 0.2)
    (120, 1)
    """
    if not 0.0 < fraction <= 1.0:
        raise InputError(f"A tail must be a fraction in (0, 1], not {fraction!r}.")
    return max(1, math.ceil(fraction * rounds - 1e-9))


@final
class TailAverage:
    r"""The running mean of models, array by array.

    .. math:: \bar\theta = \frac{1}{T} \sum_{r > R - T} \theta_r \qquad (O4)

    Sums are in float64; integers are rounded to their type.

    >>> tail = TailAverage()
    >>> for model in ([1.0, 2.0], [3.0, 2.0]):
    ...     tail.add({"w": np.array(model)})
    >>> tail.count, tail.mean()["w"]
    (2, array([2., 2.]))
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, NDArray[Any]] = {}
        self._kinds: dict[str, str] = {}

    def add(self, model: Mapping[str, NDArray[Any]]) -> None:
        """Take the model after another round."""
        for name, array in model.items():
            if name not in self._sums:
                self._sums[name] = np.zeros(array.shape)
                self._kinds[name] = array.dtype.str
            self._sums[name] += array
        self.count += 1

    def mean(self) -> dict[str, NDArray[Any]]:
        """Return the mean, in the types of the models."""
        out = {}
        for name, total in self._sums.items():
            out[name] = in_type(np.asarray(total / self.count), np.dtype(self._kinds[name]))
        return out

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, to be saved before the next round: sums are its own."""
        return {
            "count": self.count,
            "names": list(self._sums),
            "kinds": list(self._kinds.values()),
            "sums": list(self._sums.values()),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Return a saved average."""
        made = cls()
        made.count = int(state["count"])
        made._sums = dict(zip(state["names"], map(np.array, state["sums"]), strict=True))
        made._kinds = dict(zip(state["names"], state["kinds"], strict=True))
        return made
