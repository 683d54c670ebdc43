"""Random streams of one seed: independent of each other's use."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from fedipw.lab.testbed import Streams

NAMES = ("population", "enrollment", "participation", "training")


@pytest.mark.parametrize("used", NAMES)
def test_a_stream_does_not_notice_how_much_another_was_used(used: str) -> None:
    touched, untouched = Streams.of(3), Streams.of(3)
    getattr(touched, used).random(12_345)
    for name in NAMES:
        same = getattr(touched, name).random() == getattr(untouched, name).random()
        assert same == (name != used)


def test_seeds_and_streams_differ() -> None:
    first = [getattr(Streams.of(seed), name).random() for seed in (1, 2) for name in NAMES]
    assert len(set(first)) == 8


def test_streams_are_uncorrelated() -> None:
    """Six correlations of 10,000 pairs; each false alarm 1e-6, together below 1e-5."""
    limit = stats.norm.isf(0.5e-6) / np.sqrt(10_000)
    streams = Streams.of(11)
    draws = {name: getattr(streams, name).standard_normal(10_000) for name in NAMES}
    for a, b in combinations(NAMES, 2):
        assert abs(np.corrcoef(draws[a], draws[b])[0, 1]) < limit
