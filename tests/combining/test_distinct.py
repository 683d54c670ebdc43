"""The number of different clients (O23): exact where they are few, close where they are many."""

import numpy as np
import pytest

from fedipw.combining.distinct import KEPT, DistinctClients


@pytest.mark.parametrize("kind", [str, int])
def test_few_clients_are_counted(kind: type) -> None:
    rng, seen, known = np.random.default_rng(0), DistinctClients(), set()
    for _ in range(30):
        ids = [kind(one) for one in rng.choice(KEPT - 1, 150, replace=False)]
        seen = seen.after(np.array(ids))
        known |= set(ids)
        assert seen.number == len(known)
    assert len(known) > 2000


@pytest.mark.parametrize("clients", [20_000, 60_000])
def test_many_clients_are_estimated(clients: int) -> None:
    """Within five standard errors of 1.6%: hashes are fixed, so it passes or fails for good."""
    seen = DistinctClients()
    for ids in np.array_split(np.arange(clients), 7):
        seen = seen.after(ids).after(ids[::3])
    assert len(seen.smallest) == KEPT
    assert seen.number == pytest.approx(clients, rel=5.0 / np.sqrt(KEPT))


def test_order_and_repetition_do_not_matter() -> None:
    ids = np.arange(9000)
    one = DistinctClients().after(ids)
    other = DistinctClients().after(ids[::-1][:5000]).after(ids).after(ids[:10])
    np.testing.assert_array_equal(one.smallest, other.smallest)
