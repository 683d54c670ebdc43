"""Targets with standard errors."""

import numpy as np
import pytest

from fedipw.calibration import Entropy, Quadratic, calibrated, trusted_target
from fedipw.calibration.design import Dense
from fedipw.calibration.solve import TYPICAL_SHIFT
from fedipw.errors import FedIPWError, InputError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((400, 3)) @ np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, 0.0, 2.0]])
MEAN, SD = X.mean(axis=0), X.std(axis=0, ddof=1)
TARGET = MEAN + SD * np.array([0.3, -0.2, 0.4])
UNIFORM = np.array([1 / 400])
DESIGN = Dense(X, ("a", "b", "c"))


def test_no_errors_change_nothing() -> None:
    np.testing.assert_array_equal(trusted_target(DESIGN, UNIFORM, TARGET, np.zeros(3)), TARGET)
    exact = calibrated(X, TARGET, distance=Entropy())
    with_zero = calibrated(X, TARGET, distance=Entropy(), se=[0.0, 0.0, 0.0])
    np.testing.assert_array_equal(exact.weights, with_zero.weights)


def test_shrinkage_of_one_column_is_the_normal_posterior_mean() -> None:
    one, se = Dense(X[:, 2:], ("c",)), 0.7
    found = trusted_target(one, UNIFORM, TARGET[2:], [se])
    variance = TYPICAL_SHIFT**2 * 399 / 400  # the design's covariance is over n
    factor = variance / (variance + (se / SD[2]) ** 2)
    assert np.isclose(found[0], MEAN[2] + factor * (TARGET[2] - MEAN[2]), rtol=1e-12)


def test_the_joint_guess_is_that_of_a_normal_model() -> None:
    se = np.array([0.2, 0.0, 1.0])
    covariance = np.cov(X.T, bias=True) * TYPICAL_SHIFT**2
    expected = MEAN + covariance @ np.linalg.solve(covariance + np.diag(se**2), TARGET - MEAN)
    found = trusted_target(DESIGN, UNIFORM, TARGET, se)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert np.isclose(found[1], TARGET[1], rtol=1e-12)  # known without error


def test_hopeless_targets_leave_the_base_weights() -> None:
    found = calibrated(X, TARGET, se=np.full(3, 1e6))
    np.testing.assert_allclose(found.weights, 1 / 400, rtol=1e-6)
    np.testing.assert_array_equal(found.given, TARGET)
    np.testing.assert_allclose(found.target, MEAN, atol=1e-6)


def test_shares_that_contradict_each_other_are_reconciled() -> None:
    """All levels listed, with errors, summing to 1.04: aimed at shares sum to 1."""
    level = RNG.integers(0, 3, 300)
    indicators = (level[:, None] == np.arange(3)).astype(float)
    found = calibrated(indicators, [0.5, 0.3, 0.24], se=[0.02, 0.02, 0.04], distance=Quadratic())
    assert np.isclose(found.target.sum(), 1.0, atol=1e-9)
    np.testing.assert_allclose(found.achieved, found.target, atol=1e-9)
    assert abs(found.target[2] - 0.24) > abs(found.target[0] - 0.5)  # the noisier one gives way


@pytest.mark.parametrize("se", [[0.1], [0.1, -0.1, 0.0], [np.nan, 0.0, 0.0]])
def test_errors_no_target_can_have(se: list[float]) -> None:
    with pytest.raises(InputError, match="Standard errors must be"):
        calibrated(X, TARGET, se=se)


@pytest.mark.parametrize("offset", [1e18, 1e20])
@pytest.mark.parametrize("error", [1e-300, 1e-9, 0.5])
def test_columns_that_vary_by_rounding_alone_end_in_weights_or_an_error_of_ours(
    offset: float, error: float
) -> None:
    """Beside such a column an error may be too small to be divided by."""
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.normal(size=60), offset + 40.0 * rng.normal(size=60)])
    try:
        found = calibrated(rows, [0.1, offset], se=[0.1, error])
    except FedIPWError:
        return
    assert np.isfinite(found.weights).all()
