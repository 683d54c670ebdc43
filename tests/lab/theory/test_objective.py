"""The federated objective against plain NumPy."""

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.lab.clients import ClientData
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import FederatedLogistic, target_weights

L2 = 0.05


@pytest.fixture(scope="module")
def clients() -> ClientData:
    return Testbed(size=60, rows=3, rows_max=30).draw(np.random.default_rng(0)).clients


def plain(clients: ClientData, weights: np.ndarray, theta: np.ndarray) -> tuple[float, np.ndarray]:
    """Value and gradient of (O1), client by client, from the definition."""
    value, gradient = 0.0, np.zeros(len(theta))
    for i in range(clients.size):
        rows = slice(clients.offsets[i], clients.offsets[i + 1])
        x = np.column_stack([clients.features[rows], np.ones(clients.counts[i])])
        y, u = clients.labels[rows], x @ theta
        own = np.mean(np.log1p(np.exp(u)) - y * u) + L2 / 2 * theta @ theta
        slope = x.T @ (1 / (1 + np.exp(-u)) - y) / len(y) + L2 * theta
        value += weights[i] * own / weights.sum()
        gradient += weights[i] * slope / weights.sum()
    return value, gradient


@pytest.mark.parametrize("by_sample", [False, True])
def test_value_and_gradient_from_the_definition(clients: ClientData, by_sample: bool) -> None:
    weights = target_weights(clients, by_sample=by_sample)
    objective = FederatedLogistic(clients, L2, weights)
    theta = np.random.default_rng(1).normal(size=6)
    value, gradient = plain(clients, weights, theta)
    at = objective.sums(theta)
    np.testing.assert_allclose(at.value, value, rtol=1e-13)
    np.testing.assert_allclose(at.gradient, gradient, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(objective.losses(np.stack([theta, 0 * theta]))[0], value, rtol=1e-13)
    step = 1e-6 * np.eye(6)
    slopes = [
        (objective.sums(theta + s).gradient - objective.sums(theta - s).gradient) for s in step
    ]
    np.testing.assert_allclose(at.hessian, np.array(slopes) / 2e-6, atol=1e-8)


def test_gradients_of_single_clients(clients: ClientData, monkeypatch: pytest.MonkeyPatch) -> None:
    theta = np.random.default_rng(4).normal(size=6)
    objective = FederatedLogistic(clients, L2, target_weights(clients))
    one = [plain(clients, np.eye(clients.size)[i], theta)[1] for i in range(clients.size)]
    np.testing.assert_allclose(objective.client_gradients(theta), one, rtol=1e-11, atol=1e-14)
    monkeypatch.setattr("fedipw.lab.clients._CHUNK_ROWS", 50)
    np.testing.assert_allclose(objective.client_gradients(theta), one, rtol=1e-11, atol=1e-14)


def test_the_minimum_has_gradient_below_1e_10(clients: ClientData) -> None:
    weights = np.random.default_rng(2).uniform(0.0, 1.0, clients.size)
    best = FederatedLogistic(clients, L2, weights).minimum()
    assert np.linalg.norm(plain(clients, weights, best.point)[1]) < 1e-10
    assert best.converged


def test_weights_count_only_in_proportion(clients: ClientData) -> None:
    weights = np.random.default_rng(3).uniform(0.1, 1.0, clients.size)
    one = FederatedLogistic(clients, L2, weights).minimum().point
    np.testing.assert_allclose(FederatedLogistic(clients, L2, 7 * weights).minimum().point, one)


def test_data_in_pieces_give_the_same_sums(
    clients: ClientData, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = FederatedLogistic(clients, L2, target_weights(clients))
    theta = np.full(6, 0.3)
    whole = objective.sums(theta)
    monkeypatch.setattr("fedipw.lab.clients._CHUNK_ROWS", 50)
    np.testing.assert_allclose(objective.sums(theta).gradient, whole.gradient, rtol=1e-12)
    np.testing.assert_allclose(objective.losses(theta), whole.value, rtol=1e-13)


@pytest.mark.parametrize("weights", [np.zeros(60), np.full(60, -1.0), np.full(60, np.nan)])
def test_weights_no_objective_can_have(clients: ClientData, weights: np.ndarray) -> None:
    with pytest.raises(InputError, match="Client weights must be finite with a positive sum"):
        FederatedLogistic(clients, L2, weights)
    with pytest.raises(InputError, match="l2 must be 0 or more"):
        FederatedLogistic(clients, -1.0, np.ones(60))
