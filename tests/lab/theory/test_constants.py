"""Constants, weight errors and floors against brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedipw.errors import InputError
from fedipw.lab.clients import ClientData
from fedipw.lab.engine import LocalWork, LogisticTrainer, RoundWork
from fedipw.lab.mechanisms import LogisticEnrollment, enrollment_draw
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import (
    FederatedLogistic,
    Grade,
    efficiency_bound,
    estimated_constants,
    estimated_efficiency_bound,
    exact_floor,
    first_order_floor,
    logistic_constants,
    lottery_term,
    participation_only_errors,
    redrawn_variance,
    residual_variance,
    sensitivity_errors,
    sensitivity_ratios,
    target_weights,
    weight_errors,
)

L2 = 0.1


@pytest.fixture(scope="module")
def clients() -> ClientData:
    return Testbed(size=40, rows=5, rows_max=15).draw(np.random.default_rng(0)).clients


@pytest.fixture(scope="module")
def target(clients: ClientData) -> FederatedLogistic:
    return FederatedLogistic(clients, L2, target_weights(clients))


def own(clients: ClientData, i: int) -> FederatedLogistic:
    return FederatedLogistic(clients, L2, np.eye(clients.size)[i])


def test_smoothness_is_attained_and_never_passed(
    clients: ClientData, target: FederatedLogistic
) -> None:
    problem, rng = logistic_constants(target, 0.1), np.random.default_rng(1)
    at_zero = [np.linalg.eigvalsh(own(clients, i).sums(np.zeros(6)).hessian)[-1] for i in range(40)]
    np.testing.assert_allclose(max(at_zero), problem.smoothness, rtol=1e-12)
    for i in range(40):
        hessian = own(clients, i).sums(rng.normal(size=6)).hessian
        values = np.linalg.eigvalsh(hessian)
        assert L2 - 1e-12 <= values[0] <= values[-1] <= problem.smoothness
    assert problem.grades is not None
    assert problem.grades["smoothness"] is Grade.EXACT


@pytest.mark.parametrize("balance", [0.5, 1.0, 4.0])
def test_heterogeneity_bounds_hold_everywhere(target: FederatedLogistic, balance: float) -> None:
    problem, rng = logistic_constants(target, 0.1, balance=balance), np.random.default_rng(2)
    best = target.minimum()
    for scale in (0.0, 0.1, 1.0, 5.0, 50.0):
        theta = best.point + scale * rng.normal(size=6)
        mean = (target.client_gradients(theta) ** 2).sum(axis=1).mean()
        gap = target.losses(theta)[0] - best.value
        limit = problem.heterogeneity**2 + 2 * problem.smoothness * problem.growth**2 * gap
        assert mean <= limit * (1 + 1e-12)


def test_mini_batch_noise_is_bounded(clients: ClientData, target: FederatedLogistic) -> None:
    """Mean squared distance of 400 batch gradients from the full one, far out and near."""
    problem, rng = logistic_constants(target, 0.1, batch_size=3), np.random.default_rng(3)
    assert problem.noise > 0
    for scale in (0.0, 1.0, 20.0):
        theta = scale * rng.normal(size=6)
        full = target.client_gradients(theta)
        work = LocalWork(steps=1, step_size=1.0, batch_size=3)
        squares = np.zeros(40)
        for key in range(400):
            task = RoundWork(clients=np.arange(40), theta=theta, key=key)
            squares += ((-LogisticTrainer(clients, work, L2).updates(task) - full) ** 2).sum(
                axis=1
            ) / 400
        assert squares.max() <= problem.noise**2
    assert logistic_constants(target, 0.1).noise == 0.0


def test_estimates_from_gradients_stay_inside_the_exact_constants(
    target: FederatedLogistic,
) -> None:
    exact, rng = logistic_constants(target, 0.1), np.random.default_rng(4)
    points = target.minimum().point + 0.3 * rng.normal(size=(6, 6))
    gradients = np.stack([target.client_gradients(p) for p in points])
    guess = estimated_constants(points, gradients, 0.1)
    assert L2 <= guess.strong_convexity <= guess.smoothness <= exact.smoothness
    assert guess.population_size == 40
    assert guess.grades is not None
    assert guess.grades["smoothness"] is Grade.ESTIMATED


def test_estimates_refuse_what_they_cannot_use() -> None:
    points, gradients = np.array([[0.0], [1.0]]), np.zeros((2, 3, 1))
    with pytest.raises(InputError, match="not convex between the points"):
        estimated_constants(points, -points[:, None, :] + gradients, 0.5)
    with pytest.raises(InputError, match="coincide"):
        estimated_constants(np.zeros((2, 1)), gradients, 0.5)
    with pytest.raises(InputError, match="at least two points"):
        estimated_constants(points[:1], gradients[:1], 0.5)
    with pytest.raises(InputError, match="finite"):
        estimated_constants(points, gradients * np.nan, 0.5)


def test_no_penalty_no_strong_convexity(clients: ClientData) -> None:
    with pytest.raises(InputError, match="set l2 > 0"):
        logistic_constants(FederatedLogistic(clients, 0.0, target_weights(clients)), 0.1)


ratios = arrays(np.float64, st.integers(1, 30), elements=st.floats(0.05, 5.0))


@given(rho=ratios, factor=st.floats(0.1, 10.0))
def test_centred_errors_forget_a_common_factor_and_raw_ones_do_not(
    rho: np.ndarray, factor: float
) -> None:
    one, other = weight_errors(rho), weight_errors(factor * rho)
    np.testing.assert_allclose(other.centred, one.centred, atol=1e-12)
    np.testing.assert_allclose(other.rms, one.rms, atol=1e-9)
    assert one.raw == np.abs(rho - 1).max()
    # the best common rescaling of the ratio leaves exactly the centred error
    np.testing.assert_allclose(weight_errors(rho / one.step_factor).raw, one.centred, atol=1e-12)


def test_errors_left_where_enrollment_is_not_corrected() -> None:
    errors = participation_only_errors([0.2, 0.8])
    assert errors.raw == pytest.approx(0.8)
    assert errors.centred == pytest.approx(0.6)
    with pytest.raises(InputError, match="above 0"):
        weight_errors([0.0, 1.0])


@given(
    hat=arrays(np.float64, 8, elements=st.floats(0.05, 1.0)),
    odds=st.floats(1.0, 20.0),
    where=arrays(np.float64, 8, elements=st.floats(-1.0, 1.0)),
)
def test_sensitivity_ranges_hold_every_allowed_truth(
    hat: np.ndarray, odds: float, where: np.ndarray
) -> None:
    """True odds anywhere within a factor Lambda of the fitted ones."""
    inverse = 1 + (1 / hat - 1) * odds**where
    rho = (1 / inverse) / hat
    low, high = sensitivity_ratios(hat, odds)
    assert np.all(low <= rho * (1 + 1e-9))
    assert np.all(rho <= high * (1 + 1e-9))
    worst, seen = sensitivity_errors(hat, odds), weight_errors(rho)
    assert seen.raw <= worst.raw + 1e-9
    assert seen.centred <= worst.centred + 1e-9
    assert seen.rms <= worst.rms + 1e-9


def test_no_hidden_selection_no_error() -> None:
    errors = sensitivity_errors([0.2, 0.7], 1.0)
    assert (errors.raw, errors.centred, errors.rms) == (0.0, 0.0, 0.0)
    with pytest.raises(InputError, match="at least 1"):
        sensitivity_errors([0.2], 0.5)


def test_exact_floor_vanishes_for_constant_ratios_and_follows_first_order(
    target: FederatedLogistic,
) -> None:
    assert abs(exact_floor(target, np.full(40, 0.3))) < 1e-14
    direction = np.random.default_rng(5).normal(size=40)
    for size in (1e-2, 1e-3):
        ratio = 1.0 + size * direction
        floor, first = exact_floor(target, ratio), first_order_floor(target, ratio)
        np.testing.assert_allclose(floor, first, rtol=20 * size)
    np.testing.assert_allclose(
        first_order_floor(target, 7.0 * ratio), first_order_floor(target, ratio), rtol=1e-9
    )


def test_the_lottery_term_is_within_ten_percent_of_two_thousand_draws() -> None:
    """N = 1,000 at strength 1; the mean of 2,000 draws has a standard error of 2%.

    Seeded; were the term exact, the bound of 10% would fail by chance below 1e-6.
    """
    drawn = Testbed().draw(np.random.default_rng(0))
    target = FederatedLogistic(drawn.clients, 0.05, target_weights(drawn.clients))
    prob, rng = LogisticEnrollment()(drawn.population), np.random.default_rng(7)
    best, excess = target.minimum(), []
    for _ in range(2000):
        weights = enrollment_draw(prob, rng) / prob
        limit = FederatedLogistic(drawn.clients, 0.05, weights).minimum(best.point).point
        excess.append(target.losses(limit)[0] - best.value)
    assert abs(np.mean(excess) / lottery_term(target, prob) - 1) < 0.1


def test_the_efficiency_bound_lies_a_third_below_the_oracle() -> None:
    """Exact by redrawing, and estimated from residuals, of all clients and of the enrolled."""
    bed, rng = Testbed(size=4000), np.random.default_rng(1)
    drawn = bed.draw(rng)
    population = drawn.population
    target = FederatedLogistic(drawn.clients, 0.05, target_weights(drawn.clients))
    prob, Z, best = LogisticEnrollment()(population), population.matrix(), target.minimum()
    exact = efficiency_bound(target, prob, redrawn_variance(bed, Z, best.point, 0.05, rng))
    assert 2.5 < lottery_term(target, prob) / exact < 3.5
    gradients = target.client_gradients(best.point)
    guessed = efficiency_bound(target, prob, residual_variance(gradients, Z))
    np.testing.assert_allclose(guessed, exact, rtol=0.15)
    enrolled = enrollment_draw(prob, rng)
    practice = estimated_efficiency_bound(
        gradients[enrolled], Z[enrolled], prob[enrolled], target.sums(best.point).hessian
    )
    np.testing.assert_allclose(practice, exact, rtol=0.3)


def test_participation_only_is_below_the_efficiency_bound_only_where_nothing_shifts() -> None:
    """Mean of its limit, equal weights of the enrolled, over 200 draws of enrollment."""
    unshifted = Testbed(shift=0.0, concept_shift=0.0, intercept_loadings=(0.0, 0.0, 0.0))
    for bed, low, high in ((unshifted, 0.4, 0.6), (Testbed(), 30.0, 90.0)):
        drawn, rng = bed.draw(np.random.default_rng(0)), np.random.default_rng(7)
        target = FederatedLogistic(drawn.clients, 0.05, target_weights(drawn.clients))
        prob, best = LogisticEnrollment()(drawn.population), target.minimum()
        excess = []
        for _ in range(200):
            enrolled = enrollment_draw(prob, rng).astype(np.float64)
            limit = FederatedLogistic(drawn.clients, 0.05, enrolled).minimum(best.point).point
            excess.append(target.losses(limit)[0] - best.value)
        Z = drawn.population.matrix()
        variance = redrawn_variance(bed, Z, best.point, 0.05, rng)
        assert low < np.mean(excess) / efficiency_bound(target, prob, variance) < high


def test_redrawn_variance_is_the_variance_over_clients_of_the_same_kind() -> None:
    """Clients that all share one Z: their own spread against the redrawn one, 5%."""
    bed, rng = Testbed(size=10), np.random.default_rng(2)
    Z, theta = np.tile([1.0, 0.5, -0.3], (20_000, 1)), np.full(6, 0.2)
    clients = bed.clients_given(Z, rng)
    gradients = FederatedLogistic(clients, 0.05, np.ones(20_000)).client_gradients(theta)
    redrawn = redrawn_variance(bed, Z[:2000], theta, 0.05, rng).mean(axis=0)
    scale = np.sqrt(np.outer(np.diag(redrawn), np.diag(redrawn)))
    assert np.abs((np.cov(gradients.T) - redrawn) / scale).max() < 0.05


def test_too_few_clients_for_a_regression() -> None:
    with pytest.raises(InputError, match="too few for 10 terms"):
        residual_variance(np.zeros((15, 2)), np.zeros((15, 3)))


def test_the_largest_centred_error_is_that_of_two_different_clients() -> None:
    """All ends of all ranges, by exhaustion."""
    rng = np.random.default_rng(8)
    for _ in range(30):
        hat, odds = rng.uniform(0.05, 1.0, (5,)), float(rng.uniform(1.0, 5.0))
        ends = np.stack(sensitivity_ratios(hat, odds))
        seen = [
            weight_errors(ends[list(choice), range(5)]).centred
            for choice in product([0, 1], repeat=5)
        ]
        np.testing.assert_allclose(sensitivity_errors(hat, odds).centred, max(seen), rtol=1e-12)
    assert sensitivity_errors([0.3], 2.0).centred == 0.0


def test_unequal_weights_are_refused(clients: ClientData) -> None:
    uneven = FederatedLogistic(clients, L2, np.arange(1.0, 41.0))
    with pytest.raises(InputError, match="The theorem is for the mean over clients"):
        logistic_constants(uneven, 0.1)
    with pytest.raises(InputError, match="The efficiency bound is for the mean over clients"):
        efficiency_bound(uneven, np.full(40, 0.5), np.zeros((40, 6, 6)))
