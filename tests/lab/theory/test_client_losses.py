"""Losses of single clients add up to the objective."""

from __future__ import annotations

import numpy as np
import pytest

from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import FederatedLogistic, target_weights


def test_client_losses_average_to_the_objective_and_have_its_gradients() -> None:
    clients = Testbed(size=60).draw(np.random.default_rng(1)).clients
    weights = target_weights(clients)
    objective = FederatedLogistic(clients, 0.05, weights)
    theta = np.random.default_rng(2).normal(size=6)
    losses = objective.client_losses(theta)
    assert losses.shape == (60,)
    assert weights @ losses == pytest.approx(float(objective.losses(theta)[0]), rel=1e-12)
    step = 1e-6 * np.eye(6)
    slopes = [
        (objective.client_losses(theta + d) - objective.client_losses(theta - d)) / 2e-6
        for d in step
    ]
    np.testing.assert_allclose(
        np.column_stack(slopes), objective.client_gradients(theta), rtol=1e-6, atol=1e-8
    )


def test_a_clients_loss_is_the_mean_over_its_rows_with_the_penalty() -> None:
    clients = Testbed(size=5).draw(np.random.default_rng(3)).clients
    objective = FederatedLogistic(clients, 0.1, target_weights(clients))
    theta = np.arange(6.0) / 5
    got = objective.client_losses(theta)
    for i in range(5):
        rows = slice(clients.offsets[i], clients.offsets[i + 1])
        u = clients.features[rows] @ theta[:-1] + theta[-1]
        own = np.log1p(np.exp(-np.where(clients.labels[rows] == 1, u, -u))).mean()
        assert got[i] == pytest.approx(own + 0.05 * theta @ theta, rel=1e-12)
