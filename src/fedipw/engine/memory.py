"""Memory of updates: a round's noise is only that of what changed since a client last replied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.numerics.checks import check_rows

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, IntArray


@final
class UpdateMemory:
    r"""The latest update :math:`y_i` of every client, under enrollment weights.

    .. math:: \sum_{i \in S_r} w_{ir} (\Delta_{ir} - y_i) + \sum_{i \in E} \omega_i y_i,
       \qquad y_i \leftarrow \Delta_{ir} \;\; (i \in S_r) \qquad (O5)

    takes the place of :math:`\sum_S w \Delta` in (O3). With :math:`w = \omega/\pi^{part}` its mean
    is :math:`\sum_E \omega_i \Delta_{ir}`, as without memory; its noise dies out as the model
    settles, because updates then change little between a client's replies. Memory starts at zero:
    a client's first reply counts whole. Costs one update per enrolled client.

    Parameters
    ----------
    enrollment_weights
        :math:`\omega` of every client, (N,); zero or anything for clients that never reply.
    parameters
        Length of an update.
    """

    def __init__(self, enrollment_weights: FloatArray, parameters: int) -> None:
        self._omega = enrollment_weights
        self._latest = np.zeros((len(enrollment_weights), parameters))
        self._sum = np.zeros(parameters)

    def total(self, rows: IntArray, updates: FloatArray, weights: FloatArray) -> FloatArray:
        """Return (O5) for the replies of clients ``rows`` (m,), and keep their updates (m, d)."""
        check_rows(len(rows), updates=updates, weights=weights)
        change = updates - self._latest[rows]
        total: FloatArray = weights @ change + self._sum
        self._latest[rows] = updates
        self._sum = self._sum + self._omega[rows] @ change
        return total

    def state(self) -> dict[str, Any]:
        """Return the memory."""
        return {"latest": self._latest.copy(), "sum": self._sum.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved memory back."""
        self._latest, self._sum = np.array(state["latest"]), np.array(state["sum"])
