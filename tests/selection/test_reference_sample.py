"""Enrollment from a reference sample (Chen, Li and Wu)."""

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.selection import NewtonLogistic, reference_sample_fit


def population(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    Z = np.column_stack([rng.standard_normal(size), rng.integers(0, 2, size)])
    return Z, rng.random(size) < 1 / (1 + np.exp(0.5 - Z @ [0.8, -0.6]))


def test_the_estimating_equation_is_solved() -> None:
    Z, inside = population(3000, 0)
    rng = np.random.default_rng(1)
    chance = np.where(Z[:, 1] == 1, 0.3, 0.1)  # a sample with unequal probabilities
    drawn = rng.random(3000) < chance
    fit = reference_sample_fit(Z[inside], Z[drawn], 1 / chance[drawn])
    z = np.column_stack([np.ones(drawn.sum()), Z[drawn]])
    expected = (fit.prob_at(Z[drawn]) / chance[drawn]) @ z
    observed = np.column_stack([np.ones(inside.sum()), Z[inside]]).sum(axis=0)
    np.testing.assert_allclose(expected, observed, rtol=1e-9)
    np.testing.assert_allclose(fit.prob, fit.prob_at(Z[inside]), rtol=1e-14)


def test_a_census_as_reference_is_maximum_likelihood() -> None:
    """With the whole population as sample (P3) is the score equation of logistic regression."""
    Z, inside = population(2000, 2)
    fit = reference_sample_fit(Z[inside], Z, np.ones(2000))
    mle = NewtonLogistic().fit(Z, inside)
    np.testing.assert_allclose(fit.coefficients, mle.coef_[0], rtol=1e-9)
    np.testing.assert_allclose(fit.intercept, mle.intercept_[0], rtol=1e-9)


def test_weights_recover_the_population_mean() -> None:
    """A 5% sample of 200,000: an error above 0.05 is over five standard errors away."""
    Z, inside = population(200_000, 3)
    sample = np.random.default_rng(4).choice(200_000, 10_000, replace=False)
    fit = reference_sample_fit(Z[inside], Z[sample], np.full(10_000, 20.0))
    weights = 1 / fit.prob
    outcome = Z[:, 0] + Z[:, 1]
    assert abs(outcome[inside].mean() - outcome.mean()) > 0.2
    assert abs(weights @ outcome[inside] / weights.sum() - outcome.mean()) < 0.05
    assert abs(weights.sum() / fit.population_size - 1) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e, r, d: (e[:, :1], r, d), "need the same columns"),
        (lambda e, r, d: (e, r, -d), "finite and above 0"),
        (lambda e, r, d: (e, r, d[:-1]), "design_weights has"),
        (lambda e, r, d: (e, r, d / 1000), "no more than the .* enrolled clients"),
        (lambda e, r, d: (e, np.where(r == r[0, 0], np.nan, r), d), "missing or infinite"),
        (lambda e, r, d: (e, r * [1.0, 0.0], d), "z2 is constant in the reference sample"),
        (lambda e, r, d: (e, r[:2], d[:2] * 1000), "2 reference rows are too few"),
    ],
)
def test_samples_no_fit_can_use(change: object, message: str) -> None:
    Z, inside = population(500, 5)
    assert callable(change)
    with pytest.raises(InputError, match=message):
        reference_sample_fit(*change(Z[inside], Z[:100], np.full(100, 5.0)))
