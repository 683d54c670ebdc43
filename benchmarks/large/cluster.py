"""The same commands through a Dask cluster that loses a worker: time, memory, equal results."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.large.agreement import TOLERANCE, agreement
from benchmarks.large.commands import GIGABYTE, Command, ended, known, place, started
from benchmarks.large.workload import Log

_SAMPLED = 0.2  # seconds between looks at memory
_ASKED = 0.02  # seconds between questions to the scheduler
_PATIENCE = 60.0  # seconds for a cluster to end


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster: where its scheduler is, and the process that holds it."""

    address: str
    pid: int


@contextmanager
def running() -> Iterator[Cluster]:
    """Yield a cluster of two worker processes with one thread each, started for this."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.large.workers"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError("The cluster did not start.")
        yield Cluster(address, process.pid)
    finally:
        process.stdin.close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@dataclass
class Watch:
    """What a thread saw of a command on a cluster, and which worker it killed.

    Parameters
    ----------
    cluster, driver
        The cluster, and the process of the command.
    after
        Seconds to wait before a worker is killed; then the first that has tasks is.
    """

    cluster: Cluster
    driver: int
    after: float
    killed: dict[str, Any] | None = None
    peaks: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began, self._over = time.perf_counter(), threading.Event()
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(part,), daemon=True)
            for part in (self._look, self._hunt)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; raise what either could not do."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:
            self._failure = error

    def _look(self) -> None:
        """Keep the peaks of resident memory."""
        while not self._over.wait(_SAMPLED):
            driver = _resident([self.driver])
            held, workers = _resident([self.cluster.pid]), _resident(_children(self.cluster.pid))
            self._peak("driver", driver)
            self._peak("scheduler", held)
            self._peak("largest worker", [max(workers, default=0.0)])
            self._peak("workers", workers)
            self._peak("all", driver + held + workers)

    def _peak(self, name: str, gigabytes: list[float]) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0.0), sum(gigabytes))

    def _hunt(self) -> None:
        """Kill one worker that has tasks."""
        from distributed import Client

        if self._over.wait(self.after):
            return
        with Client(self.cluster.address, set_as_default=False) as client:
            while not self._over.wait(_ASKED):
                busy = client.run_on_scheduler(_busy)
                if busy:
                    pid, tasks = max(busy.items(), key=lambda pair: pair[1])
                    os.kill(pid, signal.SIGKILL)
                    self.killed = {"seconds": time.perf_counter() - self._began, "tasks": tasks}
                    return


def _busy(dask_scheduler: Any = None) -> dict[int, int]:
    """Return the processes of workers that have tasks, and how many; runs on the scheduler."""
    workers = dask_scheduler.workers.values()
    return {worker.pid: len(worker.processing) for worker in workers if worker.processing}


def _children(pid: int) -> list[int]:
    import psutil  # type: ignore[import-untyped]

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _resident(pids: Sequence[int]) -> list[float]:
    """Return the resident memory of those processes that are there, in GB."""
    import psutil

    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid).memory_info().rss / GIGABYTE)
        except psutil.NoSuchProcess:
            continue
    return found


def run(
    log: Log,
    commands: Sequence[Command],
    folder: Path,
    share: float,
    more: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield what each command took here and on a cluster that loses a worker, and how they agree.

    Parameters
    ----------
    log, commands
        What to run, on which files.
    folder
        Place for results; those of the same command without a cluster are used if they are there.
    share
        Share of the time without a cluster after which a worker is killed.
    more
        Further options of every command.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    rows = log.rows
    for command in commands:
        local = place(folder / str(log.length), command)
        alone = known(command.line(log, local, *more), local)
        out = place(folder / f"{log.length}-cluster", command)
        with running() as cluster:
            began = time.perf_counter()
            line = command.line(log, out, *more, "--scheduler", cluster.address)
            process = started(line, out)
            watch = Watch(cluster, process.pid, share * alone.seconds)
            try:
                used = ended(process, began, out)
            finally:
                watch.stop()
        found = agreement(command, local, out)
        yield {
            "command": command.name,
            "rounds": log.length,
            "rows": rows,
            "local_seconds": alone.seconds,
            "seconds": used.seconds,
            "driver_gigabytes": used.gigabytes,
            "peak_gigabytes": watch.peaks,
            "killed": watch.killed,
            "numbers": found.numbers,
            "largest_difference": found.largest,
            "texts_changed": found.texts,
            "equal": found.largest <= TOLERANCE and not found.texts and not found.added,
            "differences": [asdict(d) for d in found.differences],
        }
