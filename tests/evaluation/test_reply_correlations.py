"""Correlations of a client's replies from round to round, found from the replies alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.evaluation.phases import KnownEnrollment
from fedipw.evaluation.sample import TwoPhase


def chained(rng: np.random.Generator, n: int, rounds: int, memory: float) -> TwoPhase:
    """Clients that keep last round's state with this probability, else draw anew."""
    p = rng.uniform(0.3, 0.7, size=n)
    states = [rng.random(n) < p]
    for _ in range(rounds - 1):
        states.append(np.where(rng.random(n) < memory, states[-1], rng.random(n) < p))
    index, client = np.nonzero(np.array(states))
    order = rng.permutation(len(client))
    client, index = client[order], index[order]
    phase = KnownEnrollment(weights=np.ones(n))
    return TwoPhase(client=client, round=index, prob=p[client], rounds=rounds, enrollment=phase)


def test_correlations_of_a_chain_are_found_lag_by_lag() -> None:
    """100,000 clients: each correlation has a standard error below 0.0045, five are allowed.

    False alarm below 1e-6 for the three lags together.
    """
    found = chained(np.random.default_rng(6), 100_000, 4, memory=0.6).correlations
    np.testing.assert_allclose(found, [0.6, 0.36, 0.216], atol=0.0225)


def test_rounds_that_are_not_related_have_no_correlation() -> None:
    """100,000 clients: its standard error is 0.0032, the threshold 0.02; false alarm 1e-9."""
    assert chained(np.random.default_rng(7), 100_000, 3, memory=0.0).correlations == ()


def test_correlations_make_the_weighted_pairs_count_all_pairs() -> None:
    sample = chained(np.random.default_rng(8), 500, 3, memory=0.5)
    p, s = sample.prob, np.sqrt((1 - sample.prob) / sample.prob)
    for lag, rho in enumerate(sample.correlations, start=1):
        pairs = [
            (a, b)
            for a, b in product(range(len(p)), repeat=2)
            if sample.client[a] == sample.client[b] and sample.round[b] - sample.round[a] == lag
        ]
        count = sum(1 / (p[a] * p[b] * (1 + rho * s[a] * s[b])) for a, b in pairs)
        assert count == pytest.approx(500 * (3 - lag), rel=1e-9)
    assert len(sample.correlations) == 2


def test_rounds_that_were_left_out_still_keep_others_apart() -> None:
    """Every second round of a chain: lag 1 has no pairs, lag 2 the correlation of two steps.

    100,000 clients, a standard error below 0.0045, five allowed: false alarm below 1e-6.
    """
    whole = chained(np.random.default_rng(9), 100_000, 5, memory=0.6)
    kept = whole.round % 2 == 0
    sample = TwoPhase(
        client=whole.client[kept], round=whole.round[kept] // 2, prob=whole.prob[kept], rounds=3,
        enrollment=whole.enrollment, times=np.array([3, 5, 7]),
    )  # fmt: skip
    assert sample.correlations[0] == 0.0
    assert sample.correlations[1] == pytest.approx(0.36, abs=0.0225)
    values = np.ones((kept.sum(), 1))
    together = replace(sample, times=None)
    assert together.correlations[0] == pytest.approx(sample.correlations[1], abs=1e-9)
    assert not np.allclose(sample.chance(values), 0.0)


def test_times_must_rise() -> None:
    sample = chained(np.random.default_rng(9), 50, 3, memory=0.5)
    with pytest.raises(InputError, match="order"):
        replace(sample, times=np.array([1, 1, 2]))
