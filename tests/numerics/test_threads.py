"""Work shared between threads: every index once, and the same bytes for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.numerics import threads
from fedipw.numerics.logistic import logistic_losses, logistic_sums
from fedipw.numerics.threads import limit_threads, over_ranges
from fedipw.selection.logistic import logistic_fit
from fedipw.selection.rowstore import Panel, PanelStore


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Limit the threads for a while."""
    before = threads._Limit.threads
    limit_threads(count)
    try:
        yield
    finally:
        limit_threads(before)


@settings(max_examples=200)
@given(
    count=st.integers(0, 1000), limit=st.integers(1, 4), work=st.sampled_from([0.0, 1e5 - 1, 1e9])
)
def test_ranges_cover_every_index_exactly_once(count: int, limit: int, work: float) -> None:
    seen, ranges, lock = np.zeros(count, dtype=int), [], Lock()

    def visit(start: int, stop: int) -> None:
        with lock:
            seen[start:stop] += 1
            ranges.append((start, stop))

    with at_most(limit):
        over_ranges(count, visit, work=work)
    assert (seen == 1).all()
    assert len(ranges) == (1 if work < 1e5 else max(1, min(limit, count)))
    if count >= limit:
        sizes = [stop - start for start, stop in ranges]
        assert max(sizes) - min(sizes) <= 1  # an even split


def test_a_limit_below_one_means_one() -> None:
    with at_most(0):
        ranges: list[tuple[int, int]] = []
        over_ranges(10, lambda a, b: ranges.append((a, b)), work=1e9)
        assert ranges == [(0, 10)]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_any_range_reaches_the_caller(failing: int) -> None:
    def fail(start: int, stop: int) -> None:
        if (start > 0) == bool(failing):
            raise ArithmeticError(f"range {start} to {stop}")

    with at_most(2), pytest.raises(ArithmeticError, match="range"):
        over_ranges(10, fail, work=1e9)


def some_panel(clients: int, rounds: int) -> Panel:
    rng = np.random.default_rng(5)
    store = PanelStore(rng.normal(size=(2, clients)), np.array([0, 2]), columns=4)
    for _ in range(rounds):
        labels = (rng.random(clients) < 0.3).astype(np.int8)
        store.append(rng.normal(size=(2, clients)), labels, np.arange(clients))
    return store.rounds(0, rounds)


def panel_bytes(limit: int) -> list[bytes]:
    panel = some_panel(clients=1700, rounds=20)  # four chunks of clients, the last one partial
    with at_most(limit):
        at, _ = panel.likelihood_sums(np.array([0.1, -0.2, 0.3, 0.5, -0.5]))
        fit = logistic_fit(panel, ("a", "b", "c", "d"), frame=panel.frame).checked()
    values = np.array([at.value, at.largest, fit.log_likelihood])
    return [a.tobytes() for a in (values, at.gradient, at.hessian, fit.point, fit.covariance)]


def logistic_bytes(limit: int) -> list[bytes]:
    rng = np.random.default_rng(6)
    features, labels = rng.normal(size=(30_000, 5)), rng.integers(0, 2, 30_000).astype(np.int8)
    weight, betas = rng.random(30_000), rng.normal(size=(3, 6))
    with at_most(limit):
        at = logistic_sums(features, labels, weight, betas[0])
        losses = logistic_losses(features, labels, weight, betas)
    return [a.tobytes() for a in (np.array([at.value]), at.gradient, at.hessian, losses)]


def test_panel_sums_do_not_depend_on_the_number_of_threads() -> None:
    assert panel_bytes(1) == panel_bytes(2) == panel_bytes(3)


def test_logistic_sums_do_not_depend_on_the_number_of_threads() -> None:
    assert logistic_bytes(1) == logistic_bytes(2)
