"""Passes over clients by secure sums on a Flower grid, however often it takes to meet them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, final

from fedipw.flower.private import FlowerSums, Private

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fedipw.private.sums import SumRequest, SumResult


@final
class RemainingSums:
    """Secure sums over the nodes that have no part in the present pass yet.

    For :class:`~fedipw.private.newton.ClientRows`: a pass over all clients takes several sums, one
    for each time that some of them are reachable, and each client belongs in it once. The server
    knows whose vectors a sum holds, so it asks the others. A client registers
    ``private.contribution("participation")`` with a function that returns
    :func:`~fedipw.private.newton.likelihood_contribution` of its rows.

    Parameters
    ----------
    grid
        Of the run.
    nodes
        Which nodes may be asked, at the time of a sum: those that are online, if not given.
    private
        Minimum, bits, degree and timeout; a fit needs words of 64 bits.
    """

    def __init__(
        self, grid: Grid, private: Private, nodes: Callable[[], Iterable[int]] | None = None
    ) -> None:
        self._grid, self._private = grid, private
        self._nodes = grid.get_node_ids if nodes is None else nodes
        self._pass, self._inside = 0, frozenset[int]()

    def sum(self, request: SumRequest) -> SumResult:
        """Return the sum over the nodes that are left; SumNotOpenedError if nothing was opened."""
        number = int(request.public["pass"])
        if number != self._pass:
            self._pass, self._inside = number, frozenset()
        sums = FlowerSums(self._grid, set(self._nodes()) - self._inside, self._private)
        found = sums.sum(request)
        self._inside |= sums.inside
        return found
