"""Noise in secure sums: its distribution, its size after dropouts, and what it costs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.private.noise import (
    NoiseShare,
    NormedPart,
    NormedParts,
    discrete_gaussian,
    epsilon_spent,
    multiplier_for,
)
from fedipw.private.sums import LocalSums, SumRequest, SumResult


def repeatable(seed: int) -> Callable[[int], bytes]:
    """Return bytes that look random and are the same in every run."""
    count = 0

    def source(size: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_256(f"{seed}:{count}".encode()).digest(size)

    return source


@pytest.mark.parametrize("sd", [0.8, 3.0, 64.0])
def test_discrete_gaussian_has_its_probabilities(sd: float) -> None:
    """Counts against exp(-k^2 / 2 sd^2) by chi-square; a false alarm once in 1e6."""
    draws = discrete_gaussian(40_000, sd, repeatable(1))
    reach = int(np.ceil(12.0 * sd))
    values = np.arange(-reach, reach + 1)
    prob = np.exp(-(values**2) / (2.0 * sd**2))
    prob /= prob.sum()
    counts = np.bincount(draws + reach, minlength=len(values))
    common = prob * len(draws) >= 10.0
    seen = np.append(counts[common], counts[~common].sum())
    expected = np.append(prob[common], prob[~common].sum()) * len(draws)
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(1.0 - 1e-6, common.sum())


def test_noise_differs_from_call_to_call() -> None:
    """The operating system's bytes are never the same twice."""
    first, second = discrete_gaussian(64, 1e6), discrete_gaussian(64, 1e6)
    assert (first != second).any()


def summed(noise: NoiseShare, vectors: list[FloatArray], *, bits: int = 64) -> SumResult:
    """Return the sum of noisy vectors, in process."""
    source = repeatable(5)
    clients = [{"x": lambda _, v=v: noise.added(v, source)} for v in vectors]
    request = SumRequest(purpose="x", length=noise.length, bound=noise.bound)
    return LocalSums(clients, minimum=noise.fewest, bits=bits).sum(request)


@pytest.mark.parametrize("contributors", [20, 35])
def test_a_sum_has_the_noise_stated_for_whoever_is_left(contributors: int) -> None:
    """Variance over 4,000 coordinates against n tau^2, never below z^2; false alarm 1e-6."""
    noise = NoiseShare(multiplier=0.7, fewest=20, without=4, length=4_000)
    found = noise.opened(summed(noise, [np.zeros(4_000)] * contributors))
    ratio = float((found**2).sum()) / noise.sum_sd(contributors) ** 2
    assert chi2.ppf(5e-7, 4_000) < ratio < chi2.ppf(1.0 - 5e-7, 4_000)
    # with the shares of four contributors taken away it still has its multiplier
    assert noise.share_sd * np.sqrt(20 - 4) >= 0.7 * noise.sensitivity * (1.0 - 1e-12)


def test_opened_totals_are_on_the_grid_and_right_but_for_the_noise() -> None:
    """The total is the sum of the rounded vectors and of the noise, to the last step."""
    rng = np.random.default_rng(0)
    noise = NoiseShare(multiplier=1e-3, fewest=10, length=40)
    vectors = [v / np.linalg.norm(v) for v in rng.standard_normal((12, 40))]
    source = repeatable(5)
    expected = sum(np.rint(noise.added(v, source) / noise.grid) for v in vectors)
    found = noise.opened(summed(noise, vectors))
    np.testing.assert_array_equal(np.rint(found / noise.grid), expected)
    assert np.abs(found - np.sum(vectors, axis=0)).max() < 6.0 * noise.sum_sd(12)


def test_words_coarser_than_the_grid_and_small_sums_are_refused() -> None:
    """Noise that rounding could undo, or that fewer clients share, is an error."""
    noise = NoiseShare(multiplier=1e-4, fewest=10, length=5)
    with pytest.raises(InputError, match="64 bits"):
        noise.opened(summed(noise, [np.zeros(5)] * 2_000, bits=32))
    few = SumResult(total=np.zeros(5), contributors=9, dropped=0, clipped=0, error=0.0)
    with pytest.raises(InputError, match="9 contributors"):
        noise.opened(few)
    wild = SumResult(total=np.full(5, 13.0), contributors=12, dropped=0, clipped=0, error=0.0)
    with pytest.raises(InputError, match="sent something else"):
        noise.opened(wild)
    with pytest.raises(InputError, match="NormedParts"):
        noise.added(np.full(5, 1.0))


@given(
    update=st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
    moments=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2),
)
def test_no_vector_is_longer_than_one(update: list[float], moments: list[float]) -> None:
    """Whatever a client has, its vector has length 1 at most, and parts within norm are kept."""
    parts = NormedParts(update=NormedPart(3, 2.0), moments=NormedPart(2, 7.0))
    given_ = {"update": np.array(update), "moments": np.array(moments)}
    vector = parts.packed(given_)
    assert np.linalg.norm(vector) <= 1.0 + 1e-12
    values, clipped = parts.unpacked(vector)
    for name, norm in (("update", 2.0), ("moments", 7.0)):
        inside = np.linalg.norm(given_[name]) <= norm
        assert clipped[name] == pytest.approx(0.0 if inside else 1.0)
        if inside:
            np.testing.assert_allclose(values[name], given_[name], rtol=1e-12, atol=1e-300)


def test_epsilon_is_the_one_that_flower_spends() -> None:
    """R noisy sums cost what the accountant of the open noise charges for R rounds."""
    privacy = pytest.importorskip("fedipw.flower.privacy")
    spent = privacy.NoisySums(privacy.GaussianNoise(multiplier=2.0, delta=1e-5), clients=50)
    for _ in range(7):
        spent.spend()
    assert epsilon_spent(2.0, 7, 1e-5) == pytest.approx(spent.epsilon, rel=1e-9)
    assert epsilon_spent(2.0, 0, 1e-5) == 0.0


def test_composition_is_that_of_one_sum_with_less_noise() -> None:
    """R sums of multiplier z cost as much as one of z over the root of R."""
    assert epsilon_spent(4.0, 16, 1e-6) == pytest.approx(epsilon_spent(1.0, 1, 1e-6), rel=1e-9)
    assert multiplier_for(3.0, 4, 1e-5) == pytest.approx(2.0 * multiplier_for(3.0, 1, 1e-5), 2e-3)
