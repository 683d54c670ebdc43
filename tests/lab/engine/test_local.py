"""Compiled local training against a plain loop written from the definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedipw.errors import InputError
from fedipw.lab.clients import ClientData
from fedipw.lab.engine import LocalWork, LogisticTrainer, RoundWork
from fedipw.lab.engine.local import client_stream, drawn_rows
from fedipw.lab.testbed import Testbed
from fedipw.numerics.threads import limit_threads

L2 = 0.05
MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def clients() -> ClientData:
    return Testbed(size=40, rows=4, rows_max=40).draw(np.random.default_rng(0)).clients


def splitmix(state: int) -> tuple[int, int]:
    """Steele, Lea and Flood's generator in plain integers."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def slow_update(
    clients: ClientData, client: int, theta: np.ndarray, key: int, steps: int, work: LocalWork
) -> np.ndarray:
    """(O2) row by row: gradients summed in a loop, batches by swapping."""
    rows = list(range(clients.offsets[client], clients.offsets[client + 1]))
    batch = len(rows) if work.batch_size is None else min(work.batch_size, len(rows))
    _, mixed = splitmix(client ^ 0xD1B54A32D192ED03)
    _, state = splitmix(key ^ mixed)
    y = theta.copy()
    for _ in range(steps):
        if batch < len(rows):
            for i in range(batch):
                state, bits = splitmix(state)
                j = i + (((bits >> 32) * (len(rows) - i)) >> 32)
                rows[i], rows[j] = rows[j], rows[i]
        gradient = L2 * y
        for row in rows[:batch]:
            x = np.append(clients.features[row], 1.0)
            gradient = gradient + (1 / (1 + np.exp(-x @ y)) - clients.labels[row]) * x / batch
        y = y - work.step_size * gradient
    update: np.ndarray = y - theta
    return update


@settings(max_examples=25)
@given(
    steps=st.integers(1, 6),
    step_size=st.floats(0.01, 1.0),
    batch=st.one_of(st.none(), st.integers(1, 50)),
    key=st.integers(0, 2**63 - 1),
    seed=st.integers(0, 1000),
)
def test_updates_equal_the_plain_loop(
    clients: ClientData, steps: int, step_size: float, batch: int | None, key: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    work = LocalWork(steps=steps, step_size=step_size, batch_size=batch)
    who, theta = rng.choice(40, 7, replace=False), rng.normal(size=6)
    fast = LogisticTrainer(clients, work, L2).updates(RoundWork(clients=who, theta=theta, key=key))
    slow = [slow_update(clients, int(c), theta, key, steps, work) for c in who]
    np.testing.assert_allclose(fast, slow, rtol=1e-12, atol=1e-12)


def test_each_client_may_do_its_own_number_of_steps(clients: ClientData) -> None:
    who, steps = np.array([3, 9, 30]), np.array([1, 4, 2])
    work, theta = LocalWork(batch_size=5), np.full(6, 0.2)
    task = RoundWork(clients=who, theta=theta, key=11, steps=steps)
    slow = [
        slow_update(clients, int(c), theta, 11, int(k), work)
        for c, k in zip(who, steps, strict=True)
    ]
    np.testing.assert_allclose(LogisticTrainer(clients, work, L2).updates(task), slow, atol=1e-12)


@given(m=st.integers(1, 40), seed=st.integers(0, 100))
@settings(max_examples=20)
def test_the_weighted_sum_is_the_sum_of_weighted_updates(
    clients: ClientData, m: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    task = RoundWork(clients=rng.choice(40, m, replace=False), theta=rng.normal(size=6), key=seed)
    weights, work = rng.normal(size=m), LocalWork(steps=3, batch_size=4)
    total = LogisticTrainer(clients, work, L2).total(task, weights)
    np.testing.assert_allclose(
        total, weights @ LogisticTrainer(clients, work, L2).updates(task), atol=1e-12
    )


def test_a_clients_batches_do_not_depend_on_who_else_replied(clients: ClientData) -> None:
    work, theta = LocalWork(steps=5, batch_size=2), np.zeros(6)
    alone = LogisticTrainer(clients, work, L2).updates(
        RoundWork(clients=np.array([17]), theta=theta, key=5)
    )
    among = LogisticTrainer(clients, work, L2).updates(
        RoundWork(clients=np.array([2, 17, 30]), theta=theta, key=5)
    )
    assert alone[0].tobytes() == among[1].tobytes()


def test_threads_do_not_change_a_byte() -> None:
    clients = Testbed(size=400, rows=30).draw(np.random.default_rng(0)).clients
    task = RoundWork(clients=np.arange(400), theta=np.zeros(6), key=5)
    work, weights = LocalWork(steps=10, batch_size=8), np.linspace(0, 1, 400)
    try:
        limit_threads(1)
        one = LogisticTrainer(clients, work, L2).total(task, weights)
        limit_threads(3)
        three = LogisticTrainer(clients, work, L2).total(task, weights)
    finally:
        limit_threads(2)
    assert one.tobytes() == three.tobytes()


def test_batches_are_uniform_subsets_without_repetition() -> None:
    """All 20 subsets of 3 of 6 rows equally often, over 20,000 clients and two steps each.

    Seeded; a correct generator fails with probability 1e-4.
    """
    counts: dict[frozenset[int], int] = {}
    for client in range(20_000):
        order = np.arange(6)
        state = client_stream(99, client)
        for _ in range(2):
            state = drawn_rows(np.uint64(state), order, 3)
            chosen = frozenset(order[:3].tolist())
            assert len(chosen) == 3
            counts[chosen] = counts.get(chosen, 0) + 1
    assert len(counts) == 20
    assert chisquare(list(counts.values())).pvalue > 1e-4


def test_a_batch_as_large_as_the_data_is_the_full_gradient(clients: ClientData) -> None:
    task = RoundWork(clients=np.arange(40), theta=np.ones(6), key=5)
    full = LogisticTrainer(clients, LocalWork(steps=4), L2).updates(task)
    batched = LogisticTrainer(clients, LocalWork(steps=4, batch_size=1000), L2).updates(task)
    assert full.tobytes() == batched.tobytes()


def test_bad_work_is_refused(clients: ClientData) -> None:
    with pytest.raises(InputError, match="Local steps"):
        LocalWork(steps=0)
    with pytest.raises(InputError, match="step_size"):
        LocalWork(step_size=float("nan"))
    with pytest.raises(InputError, match="batch_size"):
        LocalWork(batch_size=0)
    with pytest.raises(InputError, match="4 of 6 parameters"):
        LogisticTrainer(clients, LocalWork(), L2).updates(
            RoundWork(clients=np.arange(2), theta=np.zeros(4), key=0)
        )
    with pytest.raises(InputError, match="weights has 3 rows, expected 2"):
        LogisticTrainer(clients, LocalWork(), L2).total(
            RoundWork(clients=np.arange(2), theta=np.zeros(6), key=0), np.ones(3)
        )
