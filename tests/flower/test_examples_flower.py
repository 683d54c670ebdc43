"""The example apps run as their page says: ``flwr run`` in simulation, at a small size."""

import math
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loopback import HOST, Process, Started, assignments, end, flower_settings, free_ports, owned

from fedipw.tables.ledger import Ledger

EXAMPLES = Path(__file__).parents[2] / "examples" / "flower"
NODES, ROUNDS = 20, 2
SMALL: dict[str, Any] = {
    "population-size": 50, "enrolled": NODES, "num-server-rounds": ROUNDS,
    "participation-rate": 0.6,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {"testbed": {}, "digits": {"information": "totals"}}
METRICS = {"testbed": "loss", "digits": "accuracy"}
FEDERATION = {"num-supernodes": NODES, "client-resources-num-cpus": 2}
NUMBER = r"(-?\d+\.\d+)"
WEIGHTED = re.compile(rf"weighted for the population +{NUMBER} +95% {NUMBER} to {NUMBER}")
OTHERS = re.compile(rf"(?:plain mean of the reports|truth, all clients) +{NUMBER}")
PATIENCE = 300.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of an app, its files and the processes it ran in."""

    code: int
    text: str
    output: Path
    left: list[Process]  # after all was ended


class Simulations:
    """Runs that share the detached SuperLink that ``flwr run`` leaves behind.

    The SuperLink is known by an address nobody else uses, Ray by its directory.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        self.directory, self.scratch = directory, scratch
        http, control = free_ports(2)
        self.settings = {
            **flower_settings(directory / "flwr"),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "RAY_TMPDIR": str(scratch),
        }
        self.marks = (f"{HOST}:{control}", str(scratch))
        self.started: list[Started] = []

    def run(self, app: Path, config: str) -> tuple[int, str]:
        """Run an app, and return its exit code and what it printed."""
        program = shutil.which("flwr", path=self.settings["PATH"])
        assert program is not None
        path = self.directory / f"{app.name}.log"
        command = [program, "run", str(app), "--stream", "-c", config]
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--federation-config", assignments(FEDERATION)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self.settings, start_new_session=True,
            )  # fmt: skip
        self.started += [Started(app.name, process, path, mark) for mark in self.marks]
        code = process.wait(PATIENCE)
        return code, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Both apps, one after the other."""
    where = tmp_path_factory.mktemp("simulations")
    found: dict[str, tuple[int, str]] = {}
    # Ray puts sockets there, whose paths must be short
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        simulations = Simulations(where, Path(scratch))
        try:
            for name, config in CONFIGS.items():
                chosen = {**SMALL, **config, "output": str(where / name)}
                found[name] = simulations.run(EXAMPLES / name, assignments(chosen))
        finally:
            end(simulations.started)
        left = owned(simulations.started)
    return {
        name: Run(code=code, text=text, output=where / name, left=left)
        for name, (code, text) in found.items()
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_the_app_runs_to_its_end(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert run.code == 0, run.text[-3000:]
    assert f"[ROUND {ROUNDS}/{ROUNDS}]" in run.text
    assert Ledger(run.output / "ledger").rounds == tuple(range(1, ROUNDS + 1)), run.text[-3000:]
    assert Ledger(run.output / "ledger" / "evaluation").rounds == tuple(range(1, ROUNDS + 1))
    metric = METRICS[name]
    tables = list((run.output / "ledger" / "evaluation" / "metrics" / metric).iterdir())
    assert len(tables) == ROUNDS


@pytest.mark.parametrize("name", CONFIGS)
def test_the_app_compares_what_it_knows_with_the_truth(runs: dict[str, Run], name: str) -> None:
    text = runs[name].text
    found = WEIGHTED.search(text)
    assert found is not None, text[-3000:]
    estimate, low, high = map(float, found.groups())
    assert low < estimate < high
    plain, truth = map(float, OTHERS.findall(text))
    assert all(map(math.isfinite, (estimate, plain, truth)))


def test_totals_are_all_that_one_app_knows(runs: dict[str, Run]) -> None:
    assert (runs["testbed"].output / "population.parquet").exists()
    assert not (runs["digits"].output / "population.parquet").exists()
    assert (runs["digits"].output / "targets.csv").exists()


def test_no_process_is_left(runs: dict[str, Run]) -> None:
    assert [process for run in runs.values() for process in run.left] == []
