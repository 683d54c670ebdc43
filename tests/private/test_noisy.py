"""A private round with noise against the same round without."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import chi2

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.private.calibration import BalanceMap, RoundTerms, RoundTotals, TermLimits
from fedipw.private.noisy import NOISY, NoisyTerms
from fedipw.private.sums import LocalSums

BALANCE = BalanceMap(names=("a", "b"), mean=np.zeros(2), scale=np.ones(2))


def round_terms(coefficients: FloatArray, parameters: int = 6) -> RoundTerms:
    """Return the terms of a round."""
    return RoundTerms(
        balance=BALANCE, coefficients=coefficients, unit=1.2, parameters=parameters,
        limits=TermLimits(clip=0.5, largest_weight=4.0),
    )  # fmt: skip


def summed(terms: RoundTerms, multiplier: float, clients: int = 60) -> tuple[
    RoundTotals, RoundTotals, NoisyTerms
]:  # fmt: skip
    """Return the totals of a round without and with noise, and the terms of the latter."""
    rng = np.random.default_rng(4)
    b = 0.8 * rng.standard_normal((clients, 2))
    b[0] = (5.0, 0.0)  # beyond the radius
    updates = 0.05 * rng.standard_normal((clients, terms.parameters))
    updates[1] = 1.0  # beyond the clip
    noisy = NoisyTerms(terms=terms, radius=3.0, multiplier=multiplier, fewest=40, without=10)
    near = b * np.minimum(1.0, 3.0 / np.linalg.norm(b, axis=1))[:, None]
    plain = [
        {"train": lambda _, i=i: terms.contribution(1.0, near[i], updates[i])}
        for i in range(clients)
    ]
    hidden = [
        {NOISY: lambda _, i=i: noisy.contribution(1.0, b[i], updates[i])} for i in range(clients)
    ]
    exact = LocalSums(plain, minimum=40, bits=64).sum(terms.request)
    found = LocalSums(hidden, minimum=40, bits=64).sum(noisy.request)
    return RoundTotals.of(terms, exact), noisy.totals(found), noisy


def test_hardly_any_noise_leaves_the_totals_of_the_round() -> None:
    """Totals, step and counts of what was cut are those of the round without noise."""
    exact, noisy, _ = summed(round_terms(np.array([0.3, -0.2])), 1e-7)
    assert noisy.online.count == pytest.approx(exact.online.count, rel=1e-5)
    np.testing.assert_allclose(noisy.online.first, exact.online.first, atol=1e-3)
    np.testing.assert_allclose(noisy.online.second, exact.online.second, atol=1e-3)
    np.testing.assert_allclose(noisy.update, exact.update, atol=1e-4)
    np.testing.assert_allclose(noisy.step, noisy.update / (60 * 1.2), rtol=1e-12)
    assert noisy.cut == (0, 1, 1)


def test_every_part_has_the_noise_of_its_own_bound() -> None:
    """Squares of 2,000 noisy parameters against the stated deviation; false alarm 1e-6."""
    terms = round_terms(np.zeros(2), parameters=2_000)
    exact, noisy, how = summed(terms, 2.0)
    ratio = float(((noisy.update - exact.update) ** 2).sum()) / how.noise_sd("update", 60) ** 2
    assert chi2.ppf(5e-7, 2_000) < ratio < chi2.ppf(1.0 - 5e-7, 2_000)
    assert how.noise_sd("second", 60) == pytest.approx(9.0 * how.noise_sd("weight", 60))
    assert how.noise_sd("update", 60) == pytest.approx(0.5 * how.noise_sd("weight", 60))


def test_no_client_is_longer_than_one_whatever_it_has() -> None:
    """Weights, columns and updates beyond all bounds make a vector of length 1 at most."""
    noisy = NoisyTerms(
        terms=round_terms(np.array([3.0, 0.0])), radius=1.5, multiplier=1.0, fewest=10
    )
    rng = np.random.default_rng(0)
    for size in (1e-3, 1.0, 1e3, 1e6):
        vector = noisy.vector(
            size, size * rng.standard_normal(2), size * rng.standard_normal(6)
        )  # fmt: skip
        assert np.linalg.norm(vector) <= 1.0 + 1e-12


def test_a_client_reads_the_terms_it_was_sent() -> None:
    """From the request's plain values a client makes the same vector."""
    noisy = NoisyTerms(terms=round_terms(np.array([0.1, 0.2])), radius=2.0, multiplier=1.0,
                       fewest=10, without=2)  # fmt: skip
    again = NoisyTerms.of(json.loads(json.dumps(dict(noisy.request.public))))
    given = 1.3, np.array([0.4, -3.0]), np.full(6, 0.1)
    np.testing.assert_array_equal(again.vector(*given), noisy.vector(*given))
    assert again.request == noisy.request
    with pytest.raises(InputError, match="no terms of a round with noise"):
        NoisyTerms.of(noisy.terms.request.public)
