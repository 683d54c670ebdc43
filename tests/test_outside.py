"""Other people's experiments: their models and mechanisms are right, and tables are the results."""

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import intermittent
from benchmarks.outside import clusters, cyclic, figure, sine, tables, two_clients
from scipy.optimize import approx_fprime

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("pair", [(0.5, 0.5), (1.0, 0.3), (0.2, 0.7), (0.05, 1.0)])
def test_the_engines_fedavg_has_the_closed_form_of_two_clients(pair: tuple[float, float]) -> None:
    exact = two_clients.fedavg_limit(*pair)
    assert abs(two_clients.engine_limit("fedavg", *pair) - exact) < 1e-9
    assert abs(two_clients.engine_limit("oracle", *pair) - two_clients.SOLUTION) < 1e-9


def test_the_closed_form_of_two_clients_is_the_fixed_point_over_all_outcomes() -> None:
    p1, p2 = 0.3, 0.8
    x = two_clients.fedavg_limit(p1, p2)
    move = p1 * (1 - p2) * (0.0 - x) + p2 * (1 - p1) * (100.0 - x) + p1 * p2 * (50.0 - x)
    assert abs(move) < 1e-12


def test_all_rules_run_on_two_clients() -> None:
    found = two_clients.run_mean(0, 0.9, 0.4, rounds=60)
    assert set(found) == {*two_clients.METHODS, two_clients.MEAN}
    assert all(0.0 <= value <= 100.0 for value in found.values())


def test_the_networks_gradient_is_that_of_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    images, theta = sine.divided(rng), sine.first_model(rng)
    who = np.array([3, 8])
    clipped = sine.clipped_gradient(images, who, np.tile(theta, (2, 1)), 0, 0)
    monkeypatch.setattr(sine, "CLIP", np.inf)
    slope = sine.clipped_gradient(images, who, np.tile(theta, (2, 1)), 0, 0)
    chosen = rng.choice(len(theta), 25, replace=False)
    for client, found in zip(who, slope, strict=True):

        def loss(part: np.ndarray, client: int = client) -> float:
            moved = theta.copy()
            moved[chosen] = part
            return float(sine.client_losses(images, moved, np.array([client]))[0])

        expected = approx_fprime(theta[chosen], loss, 1e-5)
        np.testing.assert_allclose(found[chosen], expected, atol=2e-5)
    norm = np.linalg.norm(slope, axis=1, keepdims=True)
    assert (norm > 0.5).all()
    np.testing.assert_allclose(clipped, slope * 0.5 / norm, rtol=1e-4, atol=1e-6)


def test_images_are_divided_once_among_all_clients() -> None:
    images = sine.divided(np.random.default_rng(1))
    counts = images.counts
    assert counts.sum() + len(images.test_y) == 1797
    assert counts.min() >= 1
    np.testing.assert_allclose(images.shares.sum(axis=1), 1.0, rtol=1e-6)


def test_sine_availability_runs_and_is_reproducible() -> None:
    methods = ("fedavg", "fedawe", "oracle", "participation-only")
    one, two = (sine.one_seed(3, 0.5, 4, methods) for _ in range(2))
    assert one == two
    assert all(5.0 < value < 100.0 for value in one.values())


def test_markov_clients_have_their_rates_and_correlations() -> None:
    """4,000 rounds of 24 chains, means over 6 or more clients: false alarm below 1e-4."""
    data = clusters.drawn(np.random.default_rng(4))
    process = clusters.ChainProcess(data.chains, np.random.default_rng(5))
    path = np.array([process.advance().replied for _ in range(4000)], dtype=float)
    rate, correlation = data.chains.availability, data.chains.correlation
    for high in (True, False):
        kind = (rate > 0.5) == high
        assert abs(path[:, kind].mean() - rate[kind].mean()) < 0.03
    strong = correlation > 0.5
    assert strong.sum() == 6
    assert (rate[strong] == 0.1).all()
    found = [np.corrcoef(path[:-1, i], path[1:, i])[0, 1] for i in range(24)]
    np.testing.assert_allclose(np.mean(np.array(found)[strong]), 0.9, atol=0.05)
    np.testing.assert_allclose(np.mean(np.array(found)[~strong]), 0.005, atol=0.03)


@pytest.mark.parametrize("name", ["unbiased", "adafed", "f3ast", "cafed"])
def test_clusters_run(name: str) -> None:
    found = clusters.one_run(0, name, rounds=12)
    assert 50.0 < found["time_average"] <= found["maximum"] < 95.0


def test_the_cyclic_objective_is_the_mean_of_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cyclic, "_noise", lambda _: np.zeros((10, 2)))
    for point in (np.array([0.3, -0.2, 0.7, 1.5]), np.array([2.0, 1.0, -0.4, -3.0])):
        both = cyclic.noisy_gradient(np.arange(2), np.tile(point, (2, 1)), 0, 0)
        # the fourth coordinate's curvatures differ, L/2 and lambda/2, and their mean is taken twice
        slope = approx_fprime(point, cyclic.objective, 1e-7)
        np.testing.assert_allclose(both.mean(axis=0)[:3], slope[:3], atol=1e-5)
        np.testing.assert_allclose(both.sum(axis=0)[3], slope[3], atol=1e-5)


def test_cyclic_participation_runs() -> None:
    for method, grid in cyclic.GRIDS.items():
        found = cyclic.losses(0, method, rounds=200, **grid[0])
        assert found.shape == (2,)
        assert np.isfinite(found).all()


def test_the_tables_of_the_page_are_the_saved_results(tmp_path: Path) -> None:
    saved = json.loads((ROOT / "benchmarks" / "results" / "outside.json").read_text())
    page = (ROOT / "docs" / "outside.md").read_text(encoding="utf-8")
    found = tables.lines(saved)
    assert set(found) == {"two-clients", "sine", "clusters", "cyclic"}
    for part, lines in found.items():
        name = f"_static/outside-{part}.md"
        assert name in page
        assert (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines() == lines
    figure.draw(saved, tmp_path / "outside.png")
    assert (tmp_path / "outside.png").stat().st_size > 10_000


def test_the_table_of_rules_for_clients_that_come_and_go_is_the_saved_result() -> None:
    saved = json.loads(intermittent.RESULT.read_text())
    page = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8").splitlines()
    for line in intermittent.lines(saved):
        assert line in page
    found = intermittent.one_seed(0, 6, ("fedavg", "fedawe+fedipw"))
    assert found["fedavg"] != found["fedawe+fedipw"]
