"""Slopes of the distances: the derivative of F in its multiplier, given F itself."""

from __future__ import annotations

import numpy as np
import pytest

from fedipw.calibration import Distance, Entropy, InverseLogit, Linear, Logit, Quadratic

DISTANCES: dict[str, Distance | InverseLogit] = {
    "quadratic": Quadratic(),
    "quadratic in bounds": Quadratic(0.3, 1.9),
    "linear": Linear(),
    "entropy": Entropy(),
    "logit": Logit(0.2, 5.0),
    "logit from 0": Logit(0.0, 1.5),
    "inverse-logit": InverseLogit(),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_slopes_are_derivatives_of_the_ratio(name: str) -> None:
    distance = DISTANCES[name]
    u = np.linspace(-2.03, 2.01, 41)  # no point within a step of a kink
    step = 1e-6
    numeric = (distance.ratio(u + step) - distance.ratio(u - step)) / (2 * step)
    np.testing.assert_allclose(distance.slope(distance.ratio(u)), numeric, rtol=1e-6, atol=1e-9)


def test_slopes_are_zero_where_a_bound_holds() -> None:
    np.testing.assert_array_equal(
        Quadratic(0.3, 1.9).slope(np.array([0.3, 0.31, 1.0, 1.9])), [0.0, 1.0, 1.0, 0.0]
    )
    np.testing.assert_array_equal(Quadratic().slope(np.array([0.0, 1e-300])), [0.0, 1.0])
    np.testing.assert_allclose(Logit(0.2, 5.0).slope(np.array([0.2, 5.0])), 0.0)


@pytest.mark.parametrize("name", DISTANCES)
def test_slopes_at_the_base_are_those_of_a_small_change(name: str) -> None:
    # all distances are scaled alike: near ratio 1 they are the chi-square distance
    ratio = np.array([2.0 if name == "inverse-logit" else 1.0])
    assert DISTANCES[name].slope(ratio)[0] == pytest.approx(1.0, rel=1e-12)
