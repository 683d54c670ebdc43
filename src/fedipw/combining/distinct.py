"""How many different clients have replied, in a state that does not grow with their number."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from fedipw.numerics import IdArray

Hashes: TypeAlias = NDArray[np.uint64]

KEPT: Final = 4096  # smallest hashes; up to as many clients the number is exact


@final
@dataclass(frozen=True, slots=True, eq=False)
class DistinctClients:
    r"""The number of different clients behind all replies so far, by their smallest hashes.

    .. math::
       D = |H| \text{ if } |H| < k, \text{ else } (k - 1) / h_{(k)} \qquad (O23)

    H are the k = 4,096 smallest hashes of the clients' identifiers, each as good as a uniform
    number between 0 and 1, and :math:`h_{(k)}` is the largest of them. With more than k clients
    the relative standard error is about :math:`1 / \sqrt{k}`, 1.6%.

    >>> seen = DistinctClients()
    >>> for ids in (["a", "b"], ["b", "c"], ["a"]):
    ...     seen = seen.after(np.array(ids))
    >>> seen.number
    3.0
    """

    smallest: Hashes = field(default_factory=lambda: np.empty(0, dtype=np.uint64))  # ascending

    def after(self, unit_ids: IdArray) -> DistinctClients:
        """Return it after replies of these clients."""
        return DistinctClients(np.union1d(self.smallest, _hashes(unit_ids))[:KEPT])

    @property
    def number(self) -> float:
        """Different clients so far, D."""
        if len(self.smallest) < KEPT:
            return float(len(self.smallest))
        return (KEPT - 1) * 2.0**64 / (float(self.smallest[-1]) + 1.0)


def _hashes(unit_ids: IdArray) -> Hashes:
    digests = b"".join(blake2b(str(one).encode(), digest_size=8).digest() for one in unit_ids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
