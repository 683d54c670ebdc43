"""Floors that unobserved drivers of enrollment leave: against enumeration, bounds and limits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.evaluation.sensitivity import sensitivity_ratios
from fedipw.lab.mechanisms import LogisticEnrollment
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import (
    FederatedLogistic,
    TwoClients,
    exact_floor,
    first_order_floor,
    largest_floor,
    logistic_constants,
    sensitivity_errors,
    sensitivity_floor,
    target_weights,
    weight_errors,
)
from fedipw.lab.theory.constants import ProblemConstants

GRADIENT = 1e-11  # at which Newton stops


def problem(size: int, seed: int, l2: float = 0.05) -> FederatedLogistic:
    clients = Testbed(size=size).draw(np.random.default_rng(seed)).clients
    return FederatedLogistic(clients, l2, target_weights(clients))


@pytest.mark.parametrize("seed", range(6))
def test_the_worst_ratios_are_those_of_enumeration(seed: int) -> None:
    """The first-order floor grows along any line from its least point, so corners hold the most."""
    target, rng = problem(9, seed), np.random.default_rng(seed)
    prob = rng.uniform(0.1, 0.9, 9)
    low, high = sensitivity_ratios(prob, 1.5)
    corners = [np.where(up, high, low) for up in product([False, True], repeat=9)]
    most = max(first_order_floor(target, ratio) for ratio in corners)
    found = sensitivity_floor(target, prob, 1.5)
    np.testing.assert_allclose(first_order_floor(target, found.ratio), most, rtol=1e-9)
    assert found.floor == exact_floor(target, found.ratio)


def test_ratios_stay_in_the_box_and_without_doubt_there_is_no_floor() -> None:
    target, rng = problem(60, 1), np.random.default_rng(1)
    prob = rng.uniform(0.05, 1.0, 60)
    assert sensitivity_floor(target, prob, 1.0).floor == 0.0
    low, high = sensitivity_ratios(prob, 2.0)
    ratio = sensitivity_floor(target, prob, 2.0).ratio
    assert (ratio >= low).all()
    assert (ratio <= high).all()
    assert set(np.flatnonzero(ratio == low)) | set(np.flatnonzero(ratio == high)) == set(range(60))


def test_more_doubt_leaves_more_and_never_beyond_the_bound() -> None:
    target = problem(300, 2, l2=1.0)
    prob = LogisticEnrollment()(Testbed(size=300).draw(np.random.default_rng(2)).population)
    constants = logistic_constants(target, 0.1)
    floors = [sensitivity_floor(target, prob, x) for x in (1.0, 1.05, 1.1, 1.2, 1.5)]
    assert np.all(np.diff([f.floor for f in floors]) > 0.0)
    for found, odds_ratio in zip(floors, (1.0, 1.05, 1.1, 1.2, 1.5), strict=True):
        assert found.weight_error == sensitivity_errors(prob, odds_ratio).centred
        assert found.floor <= largest_floor(found.weight_error, constants)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), spread=st.floats(0.0, 0.3), l2=st.floats(0.2, 3.0))
def test_no_floor_exceeds_its_bound(seed: int, spread: float, l2: float) -> None:
    r"""Minimisers are found to a gradient of at most tau, which adds to that of the bound.

    The proof of (T11) has :math:`|\nabla F| \le \epsilon\sqrt{G^2 + 2 L B^2 f}` at the misweighted
    minimiser; at the one found tau is added. With :math:`(a + \tau)^2 \le (1 + c)\, a^2 +
    (1 + 1/c)\, \tau^2` this is the bound at :math:`\epsilon\sqrt{1 + c}` plus :math:`(1 + 1/c)\,
    \tau^2` over twice its denominator, for any c > 0; the best is about :math:`\tau/(\epsilon G)`.
    """
    target = problem(30, seed % 7, l2)
    ratio = np.random.default_rng(seed).uniform(1.0 - spread, 1.0 + spread, 30)
    error = weight_errors(ratio).centred
    for balance in (0.5, 1.0, 4.0):
        constants = logistic_constants(target, 0.1, balance=balance)
        off = GRADIENT / (GRADIENT + error * constants.heterogeneity)
        wider = error**2 * (1.0 + off)
        left = constants.strong_convexity - wider * constants.smoothness * constants.growth**2
        if left > 0.0:
            solver = (1.0 + 1.0 / off) * GRADIENT**2 / (2.0 * left)
            bound = largest_floor(float(np.sqrt(wider)), constants) + solver
            assert exact_floor(target, ratio) <= bound * (1.0 + 1e-11)


@pytest.mark.parametrize("spread", [1e-4, 1e-7, 1e-9])
def test_small_floors_are_those_of_first_order(spread: float) -> None:
    """Below the last digit of the loss too: the next term is a multiple of the spread."""
    target = problem(30, 4, 0.5)
    ratio = 1.0 + spread * np.random.default_rng(5).uniform(-1.0, 1.0, 30)
    leading = first_order_floor(target, ratio)
    gradient = np.sqrt(leading)  # about, of the misweighted minimiser
    rtol = 10.0 * spread + 10.0 * GRADIENT / gradient
    np.testing.assert_allclose(exact_floor(target, ratio), leading, rtol=rtol)


@pytest.mark.parametrize("error", [0.0, 0.1, 0.4])
def test_the_bound_is_near_the_two_client_instance(error: float) -> None:
    pair = TwoClients(strong_convexity=2.0, distance=1.5)
    constants = ProblemConstants(
        smoothness=2.0, strong_convexity=2.0, heterogeneity=pair.heterogeneity,
        population_size=2, least_prob=1.0,
    )  # fmt: skip
    bound = largest_floor(error, constants)
    np.testing.assert_allclose(bound * (1.0 - error**2), pair.suboptimality(error), rtol=1e-12)


def test_bad_input_is_refused() -> None:
    target = problem(20, 3)
    with pytest.raises(InputError, match="at least 1"):
        sensitivity_floor(target, np.full(20, 0.5), 0.9)
    with pytest.raises(InputError, match="enrollment_prob"):
        sensitivity_floor(target, np.full(19, 0.5), 1.5)
    with pytest.raises(InputError, match="0 or more"):
        largest_floor(-0.1, logistic_constants(target, 0.1))
