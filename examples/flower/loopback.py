"""A Flower deployment on this machine: a SuperLink and SuperNodes, each a process of its own.

``python examples/flower/loopback.py APP --nodes 4 -c 'key=value'`` starts them on free loopback
ports, runs the app and ends every process it started. Tests use :class:`Deployment` to lose a node
or the server on purpose. For Linux and macOS.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
LINK = "loopback"  # name of the SuperLink in Flower's configuration
START_SECONDS = 120.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
SERVER_APP = "flwr-serverapp"

Value = str | int | float | bool


def flower_settings(home: Path) -> dict[str, str]:
    """Return this process's environment with a Flower home of its own, and nothing sent out."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # apps run in this environment
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def assignments(values: Mapping[str, Value]) -> str:
    """Return settings as Flower takes them on a command line.

    >>> assignments({"partition-id": 0, "behaviour": "declines", "late": True})
    'partition-id=0 behaviour="declines" late=true'
    """
    return " ".join(f"{key}={_toml(value)}" for key, value in values.items())


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def until(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Wait for a condition; raise TimeoutError that names it."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Waited {seconds:g} s for {what}.")
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    command: str


def processes() -> list[Process]:
    """Return everything that runs."""
    table = subprocess.run(
        ["ps", "-e", "-ww", "-o", "pid=,ppid=,stat=,args="],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    rows = (line.split(None, 3) for line in table.splitlines())
    return [Process(int(r[0]), int(r[1]), r[3]) for r in rows if len(r) == 4 and r[2][0] != "Z"]


@dataclass(frozen=True, slots=True)
class Started:
    """A process of a deployment, and how to know what it started in turn.

    Flower detaches its helpers from the process group, and a killed parent leaves orphans: those
    are known by what stands on their command line, an address nobody else uses.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    mark: str | None = None

    def is_root(self, process: Process) -> bool:
        """Return whether a process is this one, or bears its mark."""
        if self.mark is not None and self.mark in process.command:
            return True
        # once it has ended, its number may belong to somebody else
        return process.pid == self.process.pid and self.process.poll() is None

    def check(self) -> None:
        """Raise if it ended by itself."""
        if self.process.poll() is not None:
            tail = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} ended with code {self.process.returncode}:\n{tail}")


def owned(started: Sequence[Started]) -> list[Process]:
    """Return what runs of some processes and of all they started."""
    table = processes()
    found = {p.pid for p in table if any(each.is_root(p) for each in started)}
    size = 0
    while size != len(found):
        size = len(found)
        found |= {p.pid for p in table if p.parent in found}
    return [p for p in table if p.pid in found]


def end(started: Sequence[Started], *, at_once: bool = False) -> None:
    """End processes and all they started: ask first, unless ``at_once``, then kill."""
    if not at_once:
        _signalled(started, signal.SIGTERM)
        with suppress(TimeoutError):
            until(lambda: not owned(started), "processes to end", STOP_SECONDS)
    # what a process started while it was being killed is found the next time
    until(lambda: not _signalled(started, signal.SIGKILL), "processes to end", STOP_SECONDS)
    for each in started:
        each.process.wait(STOP_SECONDS)


def _signalled(started: Sequence[Started], number: signal.Signals) -> bool:
    """Send a signal to all that runs, and return whether anything did."""
    running = owned(started)
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
    return bool(running)


class Deployment:
    """A SuperLink and SuperNodes on loopback, ended with all they started when the block ends.

    Parameters
    ----------
    directory
        Where logs and Flower's own files go.

    Examples
    --------
    >>> with Deployment(Path("scratch")) as deployment:  # doctest: +SKIP
    ...     for k in range(4):
    ...         deployment.add_node({"partition-id": k, "num-partitions": 4})
    ...     print(deployment.run(Path("examples/flower/testbed")))
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.settings = flower_settings(self.directory / "flwr")
        self.nodes: list[Started] = []
        self._link: Started | None = None
        self._runs: list[Started] = []
        self._port = 0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def started(self) -> list[Started]:
        """Every process started so far."""
        return [*([] if self._link is None else [self._link]), *self.nodes, *self._runs]

    def start(self) -> None:
        """Start the SuperLink, and return when it listens."""
        home = self.directory / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        (self._port,) = free_ports(1)
        (home / "config.toml").write_text(
            f'[superlink.{LINK}]\naddress = "{HOST}:{self._port}"\ninsecure = true\n',
            encoding="utf-8",
        )
        self._link = self._started(
            "superlink",
            ["flower-superlink", "--insecure", "--host", HOST, "--port", str(self._port),
             "--disable-runtime-dependency-installation"],
            self._port,
        )  # fmt: skip
        until(self._listens, "the SuperLink")

    def add_node(self, config: Mapping[str, Value]) -> Started:
        """Start a SuperNode with this configuration; it comes online by itself."""
        (port,) = free_ports(1)
        node = self._started(
            f"supernode-{len(self.nodes)}",
            ["flower-supernode", "--insecure", "--superlink", f"{HOST}:{self._port}",
             "--host", HOST, "--port", str(port), "--node-config", assignments(config)],
            port,
        )  # fmt: skip
        self.nodes.append(node)
        return node

    def submitted(self, app: Path, config: str = "") -> Started:
        """Start a run of an app, its log streamed to the file of the process returned."""
        command = ["flwr", "run", str(app.resolve()), LINK, "--stream"]
        run = self._started(f"run-{len(self._runs)}", [*command, *(("-c", config) * bool(config))])
        self._runs.append(run)
        return run

    def run(self, app: Path, config: str = "", seconds: float = 3600.0) -> str:
        """Run an app to its end and return what it logged; raise if it failed."""
        return self.finished(self.submitted(app, config), seconds)

    def finished(self, run: Started, seconds: float = 3600.0) -> str:
        """Wait for a run and return what it logged; raise if it failed."""
        try:
            code = run.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        text = run.log.read_text(encoding="utf-8", errors="replace")
        if code != 0:
            raise RuntimeError(f"{run.name} ended with {code}:\n{text[-4000:]}")
        return text

    def kill_server_app(self, seconds: float = START_SECONDS) -> None:
        """Kill the process of the server app, as a crash would."""
        assert self._link is not None
        link = self._link

        def running() -> list[int]:
            return [p.pid for p in owned([link]) if SERVER_APP in p.command]

        until(lambda: bool(running()), "a server app", seconds)
        for pid in running():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not running(), "the server app to end")

    def stop(self) -> None:
        """End every process started here, and all they started."""
        end([*self.nodes, *self._runs], at_once=True)  # nothing of theirs needs saving
        if self._link is not None:
            end([self._link])

    def _listens(self) -> bool:
        assert self._link is not None
        self._link.check()
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self._port)) == 0

    def _started(self, name: str, command: Sequence[str], port: int = 0) -> Started:
        program = shutil.which(command[0], path=self.settings["PATH"])
        if program is None:
            raise RuntimeError(f"{command[0]} is not installed: pip install 'fedipw[flower]'.")
        path = self.directory / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [program, *command[1:]], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env=self.settings, start_new_session=True,
            )  # fmt: skip
        mark = f"{HOST}:{port}" if port else None  # as helpers are told where to connect
        return Started(name, process, path, mark)


def followed(run: Started) -> int:
    """Print what a run logs while it goes on, and return its exit code."""
    with run.log.open("rb") as log:
        while True:
            ended = run.process.poll()
            text = log.read()
            sys.stdout.write(text.decode("utf-8", errors="replace"))
            sys.stdout.flush()
            if ended is not None and not text:
                return ended
            time.sleep(POLL_SECONDS)


def _ended(number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + number)  # so that the block below ends what it started


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an app on a deployment of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("app", type=Path, help="directory of a Flower app")
    parser.add_argument("--nodes", type=int, default=4, help="number of SuperNodes (4)")
    parser.add_argument("-c", "--run-config", default="", help="'key=value key=value'")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _ended)
    with (
        tempfile.TemporaryDirectory(prefix="loopback-") as scratch,
        Deployment(Path(scratch)) as deployment,
    ):
        for k in range(chosen.nodes):
            deployment.add_node({"partition-id": k, "num-partitions": chosen.nodes})
        return followed(deployment.submitted(chosen.app, chosen.run_config))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
