"""Who shares masks with whom: every client with all others, or with some on a ring at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Final, final

from fedipw.errors import InputError

SECURITY_BITS: Final = 40  # exposure at most 2^-40
CORRECTNESS_BITS: Final = 20  # a sum fails for chance dropouts at most once in 2^20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    r"""n clients, each with k neighbours, of whom t together can restore what it lost.

    Neighbours are the k/2 nearest on either side of a ring on which the clients are placed at
    random (a Harary graph), or all others. With a share :math:`\gamma` of the clients working with
    the server and :math:`\delta` dropping out, unions over clients bound what can go wrong:

    .. math::
       P(\text{a client is exposed}) &\le n\, P(H_\gamma \ge t) + n (\gamma + \delta)^{k/2}, \\
       P(\text{the sum fails}) &\le n\, P(H_\delta > k - t) \qquad (M2)

    with :math:`H_\gamma`, :math:`H_\delta` hypergeometric: how many of k neighbours, drawn from the
    n - 1 others, are corrupt, or dropped out. The second term of exposure is that the honest
    clients that are left fall into two groups, whose two sums could be told apart; it is not there
    in a complete graph. An honest-but-curious server places clients at random, as agreed.

    Examples
    --------
    >>> graph = Graph.fitting(1000, minimum=10)
    >>> graph.degree, graph.threshold, graph.exposure(0.1, 0.2) < 2**-40
    (76, 39, True)
    >>> Graph.fitting(12, minimum=5)
    Graph(clients=12, degree=11, threshold=6)
    """

    clients: int  # n
    degree: int  # k
    threshold: int  # t

    def __post_init__(self) -> None:
        complete = self.degree == self.clients - 1
        if self.clients < 2 or not (complete or 2 <= self.degree < self.clients - 1):
            raise InputError(f"{self.clients} clients cannot have {self.degree} neighbours each.")
        if self.degree % 2 and not complete:
            raise InputError(f"On a ring the number of neighbours is even, not {self.degree}.")
        if not 1 <= self.threshold <= self.degree:
            raise InputError(f"A threshold of {self.threshold} does not fit {self.degree} shares.")

    @classmethod
    def fitting(
        cls,
        clients: int,
        *,
        minimum: int,
        degree: int | None = None,
        corrupt: float = 0.1,
        dropout: float = 0.2,
    ) -> Graph:
        """Return the sparsest ring that meets both bounds (M2), or the complete graph.

        The threshold is the majority of a client's neighbours, and at least ``minimum - 1``: a
        client that answers only for that many neighbours knows that ``minimum`` are in the sum.
        """
        for k in range(2, clients - 1, 2) if degree is None else (degree,):
            if k >= clients - 1 or max(k // 2 + 1, minimum - 1) > k:
                continue
            made = cls(clients=clients, degree=k, threshold=max(k // 2 + 1, minimum - 1))
            if degree is not None:
                return made
            if (
                made.exposure(corrupt, dropout) <= 2.0**-SECURITY_BITS
                and made.failure(dropout) <= 2.0**-CORRECTNESS_BITS
            ):
                return made
        k = clients - 1
        return cls(clients=clients, degree=k, threshold=max(k // 2 + 1, min(minimum - 1, k)))

    def exposure(self, corrupt: float, dropout: float) -> float:
        """Return the bound on the probability that some client is exposed, at most 1."""
        n, k = self.clients, self.degree
        apart = 0.0 if k == n - 1 else n * (corrupt + dropout) ** (k / 2)
        return min(1.0, n * _tail(n - 1, math.floor(corrupt * n), k, self.threshold) + apart)

    def failure(self, dropout: float) -> float:
        """Return the bound on the probability that a sum fails for dropouts, at most 1."""
        n, k = self.clients, self.degree
        return min(1.0, n * _tail(n - 1, math.ceil(dropout * n), k, k - self.threshold + 1))

    def neighbours(self, ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the neighbours of each client, sorted, clients placed at random on the ring."""
        if len(set(ids)) != self.clients or len(ids) != self.clients:
            raise InputError(f"{len(ids)} clients are not the {self.clients} of this graph.")
        if self.degree == self.clients - 1:
            return {i: tuple(j for j in sorted(ids) if j != i) for i in ids}
        ring = list(ids)
        SystemRandom().shuffle(ring)
        reach, n = self.degree // 2, self.clients
        return {
            ring[p]: tuple(sorted(ring[(p + d) % n] for d in range(-reach, reach + 1) if d))
            for p in range(n)
        }


def _tail(clients: int, marked: int, drawn: int, least: int) -> float:
    """Return the probability of ``least`` and more marked ones among some drawn without return.

    >>> _tail(6, 2, 4, 2)  # both of two, with four of six: C(4, 2) of C(6, 4)
    0.4
    """
    marked = min(marked, clients)
    ways = sum(
        math.comb(marked, x) * math.comb(clients - marked, drawn - x)
        for x in range(least, min(marked, drawn) + 1)
    )
    return ways / math.comb(clients, drawn)
