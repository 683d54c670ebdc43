"""The inverse-logit distance: inverse probabilities of a logistic model, fitted by calibration."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import root
from scipy.special import expit

from fedipw.calibration import Box, Entropy, InverseLogit, Margins, Ridge, calibrated
from fedipw.errors import InfeasibleError, InputError
from fedipw.numerics import FloatArray
from fedipw.selection.propensity import NewtonLogistic

COEF = np.array([0.8, -0.5, -1.0])  # of two covariates and the constant


def population(size: int, seed: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return covariates, enrollment probabilities, and who is enrolled."""
    rng = np.random.default_rng(seed)
    z = np.column_stack([rng.normal(size=size), rng.uniform(-1.0, 2.0, size)])
    prob = expit(z @ COEF[:2] + COEF[2])
    return z, prob, rng.random(size) < prob


@pytest.fixture(scope="module")
def people() -> tuple[FloatArray, FloatArray, FloatArray]:
    return population(3000, 0)


def test_every_weight_exceeds_one_and_totals_are_the_populations(
    people: tuple[FloatArray, FloatArray, FloatArray],
) -> None:
    z, _, enrolled = people
    size = len(z)
    result = calibrated(z[enrolled], z.mean(axis=0), distance=InverseLogit(), population_size=size)
    w = size * result.weights
    assert w.min() > 1.0
    np.testing.assert_allclose(w, result.ratio, rtol=1e-13)
    assert w.sum() == pytest.approx(size, rel=1e-12)
    np.testing.assert_allclose(w @ z[enrolled], z.sum(axis=0), rtol=1e-11)
    np.testing.assert_allclose(result.achieved, z.mean(axis=0), rtol=1e-11)
    assert result.largest_violation < 1e-12
    assert result.population_size == size


def test_weights_are_one_plus_the_exponential_of_the_multipliers(
    people: tuple[FloatArray, FloatArray, FloatArray],
) -> None:
    z, _, enrolled = people
    b = z[enrolled]
    result = calibrated(b, z.mean(axis=0), distance=InverseLogit(), population_size=len(z))
    odds = np.exp(b @ result.multipliers[:-1] + result.multipliers[-1])
    np.testing.assert_allclose(len(z) * result.weights, 1.0 + odds, rtol=1e-11)


def test_it_is_the_entropy_tilt_to_the_mean_of_the_non_enrolled_plus_one(
    people: tuple[FloatArray, FloatArray, FloatArray],
) -> None:
    z, _, enrolled = people
    b, out = z[enrolled], z[~enrolled.astype(bool)]
    result = calibrated(b, z.mean(axis=0), distance=InverseLogit(), population_size=len(z))
    tilt = calibrated(b, out.mean(axis=0), distance=Entropy(), population_size=len(out))
    np.testing.assert_allclose(len(z) * result.weights, 1.0 + tilt.ratio, rtol=1e-10)


def test_weights_equal_the_root_of_the_calibration_equations(
    people: tuple[FloatArray, FloatArray, FloatArray],
) -> None:
    z, _, enrolled = people
    x = np.column_stack([z, np.ones(len(z))])

    def equations(lam: FloatArray) -> FloatArray:
        weighted = (1.0 + np.exp(-x[enrolled] @ lam)) @ x[enrolled]
        off: FloatArray = weighted / len(z) - x.mean(axis=0)
        return off

    found = root(equations, np.zeros(3), tol=1e-13)
    assert np.abs(equations(found.x)).max() < 1e-12
    result = calibrated(
        z[enrolled], z.mean(axis=0), distance=InverseLogit(), population_size=len(z)
    )
    np.testing.assert_allclose(result.multipliers, -found.x, rtol=1e-9)


def test_a_saturated_model_equals_the_logistic_fit() -> None:
    """With one category both give the share enrolled of each level; in general they differ."""
    rng = np.random.default_rng(1)
    level = rng.integers(0, 3, 600)
    enrolled = rng.random(600) < np.array([0.2, 0.5, 0.8])[level]
    dummies = np.column_stack([level == 1, level == 2]).astype(float)
    fit = NewtonLogistic().fit(dummies, enrolled)
    prob = fit.predict_proba(dummies)[:, 1]
    design = Margins(level[enrolled][:, None], (("a", "b", "c"),))
    share = np.bincount(level) / 600
    result = calibrated(design, share, distance=InverseLogit(), population_size=600)
    np.testing.assert_allclose(600 * result.weights, 1.0 / prob[enrolled], rtol=1e-9)


@pytest.mark.parametrize("size", [2_000, 20_000, 200_000])
def test_multipliers_approach_the_true_coefficients(size: int) -> None:
    """Six standard errors of the calibration equations: false alarm below 1e-8 each."""
    z, prob, enrolled = population(size, 2)
    result = calibrated(z[enrolled], z.mean(axis=0), distance=InverseLogit(), population_size=size)
    x = np.column_stack([z, np.ones(size)])
    slope = ((1.0 - prob)[:, None] * x).T @ x
    spread = (((1.0 - prob) / prob)[:, None] * x).T @ x
    covariance = np.linalg.solve(slope, np.linalg.solve(slope, spread).T)
    errors = np.sqrt(np.diag(covariance))
    assert (np.abs(-result.multipliers - COEF) < 6.0 * errors).all()


def test_weights_approach_inverse_probabilities_at_the_rate_of_a_root() -> None:
    """Mean squared relative errors of 20 draws each.

    The mean of 20 is within a factor 4 of its limit but for odds below 1e-4, so a hundredfold
    population, whose errors are a hundredth, must fall below a tenth.
    """
    errors = {}
    for size in (1_000, 100_000):
        squares = []
        for seed in range(20):
            z, prob, enrolled = population(size, 100 + seed)
            result = calibrated(
                z[enrolled], z.mean(axis=0), distance=InverseLogit(), population_size=size
            )
            squares.append(((size * result.weights * prob[enrolled] - 1.0) ** 2).mean())
        errors[size] = np.mean(squares)
    assert errors[1_000] < 0.05
    assert errors[100_000] < 0.1 * errors[1_000]


def test_a_mean_of_the_non_enrolled_outside_the_hull_is_refused() -> None:
    b = np.arange(10.0)[:, None]
    assert calibrated(b, [5.5], distance=InverseLogit(), population_size=20).weights.min() > 0.05
    with pytest.raises(
        InfeasibleError, match=r"N = 12 and 10 enrolled.*2 clients that are not"
    ) as c:
        calibrated(b, [6.5], distance=InverseLogit(), population_size=12, names=["x"])
    error = c.value
    assert error.nearest["x"] == pytest.approx((45.0 + 2 * 9.0) / 12, rel=1e-9)
    gap = (6.5 - (45.0 + 2 * 9.0) / 12) / b.std(ddof=1)
    assert error.least_slack == pytest.approx(gap, rel=1e-6)
    with pytest.raises(InfeasibleError, match="whom no weights on the enrolled can stand for"):
        calibrated(b, [6.5], distance=InverseLogit(), population_size=12, slack=Box(0.99 * gap))


@pytest.mark.parametrize("size", [5.0, 10.0])
def test_a_population_no_larger_than_the_enrolled_is_refused(size: float) -> None:
    with pytest.raises(InfeasibleError, match="population larger than the 10 enrolled"):
        calibrated(np.arange(10.0)[:, None], [4.5], distance=InverseLogit(), population_size=size)


def test_base_weights_a_ridge_and_no_population_size_are_refused() -> None:
    b = np.arange(10.0)[:, None]
    with pytest.raises(InputError, match="takes no base weights"):
        calibrated(b, [5.0], distance=InverseLogit(), population_size=20, base=np.ones(10))
    with pytest.raises(InputError, match="takes a box as slack, no ridge"):
        calibrated(b, [5.0], distance=InverseLogit(), population_size=20, slack=Ridge(1.0))
    with pytest.raises(InputError, match="needs the population size"):
        calibrated(b, [5.0], distance=InverseLogit())


def test_the_box_is_in_standard_deviations_of_the_population_mean() -> None:
    rng = np.random.default_rng(3)
    b = rng.normal(size=(50, 2))
    target = np.array([0.3, -0.2])
    result = calibrated(b, target, distance=InverseLogit(), population_size=150, slack=Box(0.05))
    miss = (result.weights @ b - target) / b.std(axis=0, ddof=1)
    assert np.abs(miss).max() == pytest.approx(0.05, rel=1e-9)
    np.testing.assert_allclose(result.violation, np.abs(miss), atol=1e-12)
    assert result.slack == Box(0.05)
