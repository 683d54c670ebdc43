"""Memory of updates: unbiased as without it, and noise that dies out."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from fedipw.combining.memory import UpdateMemory
from fedipw.errors import InputError
from fedipw.lab.scenario import Scenario


def total(memory: UpdateMemory, rows: Any, updates: Any, weights: Any) -> np.ndarray:
    found = memory.total(rows, updates, weights, np.ones(len(rows))).total
    assert found is not None
    return found


def test_the_mean_over_participation_is_the_weighted_mean_update() -> None:
    """Enumeration of all reply sets, from a memory that is already filled."""
    rng = np.random.default_rng(0)
    n, d = 5, 3
    omega, prob = rng.dirichlet(np.ones(n)), rng.uniform(0.2, 0.9, n)
    before, updates = rng.standard_normal((2, n, d))
    mean = np.zeros(d)
    for present in product([True, False], repeat=n):
        rows = np.flatnonzero(present)
        memory = UpdateMemory(np.ones(n, dtype=bool), omega, np.zeros(d))
        total(memory, np.arange(n), before, np.ones(n))
        found = total(memory, rows, updates[rows], omega[rows] / prob[rows])
        mean += np.where(present, prob, 1 - prob).prod() * found
    np.testing.assert_allclose(mean, omega @ updates, atol=1e-13)


def test_updates_that_do_not_change_leave_no_noise() -> None:
    rng = np.random.default_rng(1)
    omega, updates = rng.dirichlet(np.ones(4)), rng.standard_normal((4, 2))
    memory = UpdateMemory(np.ones(len(omega), dtype=bool), omega, np.zeros(2))
    total(memory, np.arange(4), updates, np.ones(4))
    for rows in ([0], [1, 3], []):
        found = total(memory, np.array(rows, dtype=int), updates[rows], np.full(len(rows), 50.0))
        np.testing.assert_allclose(found, omega @ updates, atol=1e-14)


def test_state_goes_on_to_the_same_bytes() -> None:
    rng = np.random.default_rng(2)
    omega, updates = rng.dirichlet(np.ones(6)), rng.standard_normal((3, 6, 2))
    everyone = np.ones(6, dtype=bool)
    first, second = (UpdateMemory(everyone, omega, np.zeros(2)) for _ in range(2))
    total(first, np.array([0, 2]), updates[0][[0, 2]], np.ones(2))
    second.restore(first.state())
    for memory in (first, second):
        total(memory, np.array([1]), updates[1][[1]], np.ones(1))
    a = total(first, np.arange(6), updates[2], np.ones(6))
    np.testing.assert_array_equal(a, total(second, np.arange(6), updates[2], np.ones(6)))
    with pytest.raises(InputError, match="weights has 1 rows, expected 2"):
        total(first, np.array([0, 1]), updates[0][:2], np.ones(1))


def test_a_run_with_memory_resumes_to_the_same_bytes() -> None:
    scenario = Scenario(rounds=30, methods=("efficient", "efficient-hajek", "fedipw"))
    whole, first, second = (scenario.simulation() for _ in range(3))
    whole.advance(30)
    first.advance(17)
    second.restore(first.state())
    second.advance(13)
    np.testing.assert_array_equal(whole.history().iterates, second.history().iterates)


def test_the_last_model_of_the_efficient_scheme_is_its_limit() -> None:
    """Noise left after 600 rounds is a thousandth of FedIPW's; seeded, deterministic."""
    scenario = Scenario(methods=("fedipw", "efficient"))
    run = scenario.simulation()
    run.advance(600)
    target, history = scenario.objective(run.federation), run.history()
    moves = {m: np.std(history.of(m)[-50:], axis=0).max() for m in history.methods}
    assert moves["efficient"] < 1e-3 * moves["fedipw"]
    best = target.minimum()
    excess = target.losses(history.of("efficient")[-1])[0] - best.value
    assert excess < 1e-3
