"""Private training on a deployment of five SuperNodes, one of them killed in the middle of a sum.

A deployment starts some thirty processes: it is run where FEDIPW_DEPLOYMENT is set, and its saved
result (``python -m benchmarks.private_deployment``) is checked everywhere.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import private_cost
from benchmarks.private_deployment import HELD, RESULTS, app_with_hold, deployed

from fedipw.flower import InProcessGrid
from loading import example

NODES = 5


def check(contributors: list[int], outcomes: list[list[str]]) -> None:
    """Raise if the node that was killed cost more than its own part."""
    assert contributors[0] == NODES - 1
    assert outcomes[0][HELD].startswith("failed: no answer to 'mask'")
    assert [fate for k, fate in enumerate(outcomes[0]) if k != HELD] == ["replied"] * (NODES - 1)
    assert all(count == NODES - 1 for count in contributors)


@pytest.mark.skipif("FEDIPW_DEPLOYMENT" not in os.environ, reason="FEDIPW_DEPLOYMENT is not set")
def test_a_node_killed_in_the_middle_of_a_sum_costs_itself_alone(tmp_path: Path) -> None:
    found = deployed(tmp_path, nodes=NODES, rounds=1, timeout=60.0)
    check([m["fedipw-contributors"] for m in found["metrics"]], found["outcomes"])
    assert found["left"] == []
    assert "distance to the model of the population" in found["log"]


def test_the_saved_deployment_went_on_without_the_node() -> None:
    saved: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    check(saved["contributors"], saved["outcomes"])


def test_the_app_of_the_deployment_can_be_held_at_a_stage(tmp_path: Path) -> None:
    app = app_with_hold(tmp_path)
    assert 'clientapp = "holding:client"' in (app / "pyproject.toml").read_text(encoding="utf-8")
    compile((app / "holding.py").read_text(encoding="utf-8"), "holding.py", "exec")


def test_the_example_learns_the_model_of_the_population(tmp_path: Path) -> None:
    """In process, by identifiers and two means: closer than the mean over the enrolled."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    app = example("flower/private/private_app")
    people = app.enrolled_people()
    grid = InProcessGrid(app.client, {100 + k: {"partition-id": k} for k in range(len(people))})
    made = app.strategy(tmp_path / "ledger", nodes=len(people), minimum=5)
    result = made.start(grid, app.start(), num_rounds=15)
    plain = np.mean([person.optimum for person in people], axis=0)
    ours = np.linalg.norm(result.arrays["theta"].numpy() - app.target())
    assert ours < 0.7 * np.linalg.norm(plain - app.target())


def test_the_cost_of_a_round_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private_cost.main((8,), (2,), 50, tmp_path / "cost.json")
    assert "8 clients, q =  2: 7 neighbours" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "cost.json").read_text(encoding="utf-8"))["rounds"]
    assert found["messages"] == 8 * 4 + 7 * 4  # one of eight is lost before its masked vector
    assert found["contributors"] == 7
