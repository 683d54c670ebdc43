"""What invitations save: the noise of a round's mean, and tables that are those of the results."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from benchmarks.round_noise import (
    NEYMAN,
    PROPORTIONAL,
    UNIFORM,
    Clients,
    clients_of,
    designs,
    horvitz_thompson_variance,
)

from fedipw.lab.mechanisms import LogisticEnrollment
from fedipw.lab.scenario import Scenario
from fedipw.weighting.invitations import systematic_sample

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(("strength", "most"), [(1.0, 0.6), (2.0, 0.2)])
def test_a_rounds_mean_is_less_noisy_than_under_uniform_invitations(
    strength: float, most: float
) -> None:
    """With a tenth of the enrolled invited, in each of three draws of the population."""
    for seed in (100, 101, 102):
        scenario = Scenario(seed=seed, enrollment=LogisticEnrollment(strength=strength))
        clients = clients_of(scenario, rounds=100)
        by = designs(clients, len(clients.weights) // 10)
        found = {
            name: horvitz_thompson_variance(
                clients, clients.gradients, prob, np.random.default_rng(seed)
            )
            for name, prob in by.items()
        }
        assert found[PROPORTIONAL] < most * found[UNIFORM]
        assert found[NEYMAN] < most * found[UNIFORM]


def test_the_variance_is_that_of_simulated_rounds() -> None:
    """40,000 rounds: the relative error of a variance is about 1% here; false alarm below 1e-5."""
    rng = np.random.default_rng(0)
    n = 8
    reply = rng.uniform(0.3, 0.9, n)
    clients = Clients(
        weights=rng.uniform(0.5, 3.0, n), gradients=rng.normal(size=(n, 2)),
        residuals=np.zeros((n, 2)), prob=reply[None, :], replied=np.ones((1, n), dtype=np.bool_),
    )  # fmt: skip
    prob = designs(clients, 3)[PROPORTIONAL]
    each = clients.weights[:, None] * clients.gradients / (prob * reply)[:, None]
    totals = np.empty((40_000, 2))
    for k in range(len(totals)):
        rows = systematic_sample(prob, rng.permutation(n), rng.random())
        totals[k] = each[rows[rng.random(len(rows)) < reply[rows]]].sum(axis=0)
    found = np.mean([
        horvitz_thompson_variance(clients, clients.gradients, prob, rng) for _ in range(20)
    ])  # fmt: skip
    assert found == pytest.approx(float(totals.var(axis=0).sum()), rel=0.05)


def test_tables_of_the_docs_are_those_of_the_results(tmp_path: Path) -> None:
    result = ROOT / "benchmarks" / "results" / "invitations.json"
    printed = subprocess.run(
        [sys.executable, "-m", "benchmarks.invitations", "--saved", result, "--out", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8",
    ).stdout  # fmt: skip
    for part in ("noise", "trained"):
        page = ROOT / "docs" / "_static" / f"invitations-{part}.md"
        assert page.read_text(encoding="utf-8") in printed
    saved = json.loads(result.read_text())
    at = pl.DataFrame(saved["noise"]).filter(design=PROPORTIONAL, share=0.1)
    assert at.filter(regime="testbed")["variance"].item() <= 0.6
    assert at.filter(regime="strength-2")["variance"].item() <= 0.2
    assert saved["seeds"] == 20
