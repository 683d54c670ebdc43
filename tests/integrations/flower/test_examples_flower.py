"""The example apps run as their page says: ``flwr run`` in simulation, at a small size."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Process, Started, assignments, end, flower_settings, free_ports, owned

from fedipw.data.ledger import Ledger

EXAMPLES = Path(__file__).parents[3] / "examples" / "flower"
NODES, ROUNDS = 24, 2
FEDERATION = {"num-supernodes": NODES, "client-resources-num-cpus": 2}
NUMBER = r"(-?\d+\.\d+)"
WEIGHTED = re.compile(rf"weighted for the population +{NUMBER} +95% {NUMBER} to {NUMBER}")
OTHERS = re.compile(rf"(?:plain mean of the reports|truth, all clients) +{NUMBER}")
PATIENCE = 300.0


class Simulations:
    """One detached SuperLink for several runs, as ``flwr run`` leaves it behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        http, control = free_ports(2)
        self.settings = {
            **flower_settings(directory / "flwr"),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "RAY_TMPDIR": str(directory / "ray"),
        }
        (directory / "ray").mkdir()
        self.mark = f"127.0.0.1:{control}"
        self.started: list[Started] = []

    def run(self, app: Path, config: str) -> tuple[int, str]:
        """Run an app, and return its exit code and what it printed."""
        program = shutil.which("flwr", path=self.settings["PATH"])
        assert program is not None
        path = self.directory / f"{app.name}.log"
        federation = assignments(FEDERATION)
        with path.open("wb") as log:
            process = subprocess.Popen(
                [program, "run", str(app), "--stream", "-c", config,
                 "--federation-config", federation],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.settings,
                cwd=self.directory, start_new_session=True,
            )  # fmt: skip
        self.started.append(Started("flwr run", process, path, self.mark))
        return process.wait(PATIENCE), path.read_text(encoding="utf-8")

    def left(self) -> list[Process]:
        """Return what runs: the SuperLink by its address, Ray by its directory."""
        return owned(self.started)
