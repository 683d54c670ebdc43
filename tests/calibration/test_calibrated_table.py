"""Calibration of tables: in memory, in blocks and on a real Dask cluster, with the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from cli import command
from clusters import started
from fedipw.calibration import (
    Box,
    Calibration,
    Entropy,
    InverseLogit,
    Logit,
    Quadratic,
    calibrated_table,
)
from fedipw.errors import InfeasibleError, InputError
from fedipw.tables import Targets, partitions
from fedipw.tables.cluster import connected

ROWS = 25_000
MIXED = Targets.of({"age": 41.5, "age**2": 41.5**2 + 90.0, "os[ios]": 0.4, "flag": 0.35})
SHARES = {"os[ios]": 0.3, "os[web]": 0.3, "region[n]": 0.6}  # leaves os[tv], two other regions
NOISY = Targets.of(SHARES, {"os[ios]": 0.02, "region[n]": 0.05})
CASES: dict[str, dict[str, Any]] = {
    "quadratic": {"targets": MIXED, "distance": Quadratic()},
    "entropy": {"targets": MIXED, "distance": Entropy()},
    "logit, base": {"targets": MIXED, "distance": Logit(0.1, 8.0), "base": "design"},
    "inverse-logit": {"targets": MIXED, "distance": InverseLogit(), "population_size": 90_000.0},
    "slack": {"targets": MIXED, "slack": Box(0.02), "base": "design"},
    "shares": {"targets": Targets.of(SHARES), "distance": Entropy()},
    "all shares": {"targets": Targets.of({"os[ios]": 0.3, "os[web]": 0.3, "os[tv]": 0.4})},
    "noisy shares": {"targets": NOISY, "distance": Entropy(), "base": "design"},
}
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of 8192 rows, so that a table of a few thousand rows has several."""
    monkeypatch.setattr(partitions, "_BLOCK_BYTES", 1)


def clients(flags: bool) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "unit_id": rng.permutation(ROWS),
            "age": rng.normal(40.0, 9.0, ROWS),
            "os": rng.choice(["ios", "web", "tv"], ROWS),
            "region": rng.choice(["n", "m", "s"], ROWS),
            "flag": rng.random(ROWS) < 0.3,
            "design": rng.integers(0, 4, ROWS),
        }
    )
    late = pl.int_range(pl.len()) >= 8_500  # nobody of the first file, few of the others
    enrolled = late & pl.Series(rng.random(ROWS) < 0.4)
    return frame.with_columns(enrolled=enrolled) if flags else frame


@pytest.fixture(scope="module", params=[True, False], ids=["flags", "all enrolled"])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients")
    for k, part in enumerate(clients(request.param).iter_slices(8_500)):
        part.write_parquet(folder / f"part-{k}.parquet")
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started() as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[Any]:
    with connected(cluster.scheduler_address) as made:
        yield made


def assert_same(
    cut: tuple[pl.DataFrame, Calibration], whole: tuple[pl.DataFrame, Calibration]
) -> None:
    assert cut[0]["unit_id"].equals(whole[0]["unit_id"])
    weights, expected = (found[0]["weight"].to_numpy() for found in (cut, whole))
    np.testing.assert_allclose(weights, expected, rtol=1e-10, atol=1e-10 / len(weights))
    a, b = cut[1], whole[1]
    assert (a.names, a.status, a.dropped.keys()) == (b.names, b.status, b.dropped.keys())
    assert a.rare == pytest.approx(b.rare, rel=1e-12)
    np.testing.assert_allclose(a.target, b.target, rtol=1e-10)
    np.testing.assert_allclose(a.achieved, b.achieved, rtol=1e-10)


@each_case
def test_blocks_give_the_weights_of_the_table_in_memory(table: Path, case: str) -> None:
    whole = calibrated_table(table, **CASES[case])
    assert_same(calibrated_table(table, **CASES[case], in_memory=ROWS - 1), whole)
    frame = clients(flags="enrolled" in pl.read_parquet_schema(table / "part-0.parquet"))
    assert_same(calibrated_table(frame, **CASES[case]), whole)


@each_case
def test_a_cluster_gives_the_weights_of_the_table_in_memory(
    table: Path, case: str, client: Any
) -> None:
    whole = calibrated_table(table, **CASES[case])
    assert_same(calibrated_table(table, **CASES[case], client=client), whole)


@pytest.mark.parametrize("distance", ["quadratic", "entropy"])
def test_the_command_calibrates_on_a_cluster(
    table: Path, distance: str, cluster: Any, tmp_path: Path
) -> None:
    targets = tmp_path / "targets.csv"
    targets.write_text("name,value\nage,41.5\nos[ios],0.4\n")
    found = []
    for name, more in (("here", ()), ("there", ("--scheduler", cluster.scheduler_address))):
        out = tmp_path / f"{name}.feather"
        code, text, errors = command.fedipw(
            "calibrate", table, "--targets", targets, "--distance", distance, "--out", out,
            "--json", *more,
        )  # fmt: skip
        assert code == 0, errors
        assert json.loads(text)["status"] == "converged"
        found.append(pl.read_ipc(out))
    here, there = found
    assert here["unit_id"].equals(there["unit_id"])
    np.testing.assert_allclose(there["weight"], here["weight"], rtol=1e-10, atol=1e-15)


def test_the_command_names_a_scheduler_that_is_none(tmp_path: Path, table: Path) -> None:
    (tmp_path / "targets.csv").write_text("name,value\nage,41.5\n")
    code, _, errors = command.fedipw(
        "calibrate", table, "--targets", tmp_path / "targets.csv", "--out", tmp_path / "w.csv",
        "--scheduler", "nowhere",
    )  # fmt: skip
    assert code == 2
    assert "No Dask scheduler answers at nowhere" in errors


# --- errors are those of the table in memory


@pytest.mark.parametrize(
    ("column", "targets", "message"),
    [
        ("os", {"os[ios]": 0.4, "age": 41.0}, "'os' is missing in 1 of 25000 enrolled rows"),
        ("age", {"os[ios]": 0.4, "age": 41.0}, "'age' is missing in 1 of 25000 enrolled rows"),
        ("os", {"os[ios]": 0.4}, r"and os\[ios\] is a target"),
        ("age", {"unit_id": 3.0}, "'unit_id' is no covariate"),
    ],
)
@pytest.mark.parametrize("in_memory", [0, ROWS], ids=["blocks", "memory"])
def test_missing_values_are_named(
    column: str, targets: dict[str, float], message: str, in_memory: int, tmp_path: Path
) -> None:
    last = pl.int_range(pl.len()) == ROWS - 1
    frame = clients(flags=False).with_columns(pl.when(~last).then(column))
    frame.write_parquet(tmp_path / "clients.parquet")
    with pytest.raises(InputError, match=message):
        calibrated_table(tmp_path / "clients.parquet", Targets.of(targets), in_memory=in_memory)


@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        ({"age": 90.0}, InfeasibleError),
        ({"os[ios]": 0.3, "os[web]": 0.3, "os[tv]": 0.31}, InputError),
        ({"os[vr]": 0.1}, InfeasibleError),
    ],
)
def test_infeasible_targets_end_in_the_same_error(
    table: Path, targets: dict[str, float], kind: type[Exception]
) -> None:
    messages = []
    for in_memory in (0, ROWS):
        with pytest.raises(kind) as caught:
            calibrated_table(table, Targets.of(targets), in_memory=in_memory)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_cluster_cannot_read_a_frame(client: Any) -> None:
    with pytest.raises(InputError, match="in memory, where the workers of a cluster cannot"):
        calibrated_table(clients(flags=True), MIXED, client=client)
