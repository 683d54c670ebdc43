"""A checkout whose commands are run in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BATCH = Path(__file__).with_name("batch.py")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process used."""

    seconds: float
    processor_seconds: float
    megabytes: float  # peak resident memory


@dataclass(frozen=True, slots=True)
class Checkout:
    """Sources of one commit; nothing is written into them.

    Compiled modules and kernels go to ``cache``, which both checkouts may share: their paths tell
    them apart. It should be new, since a kernel's cache does not notice a change in a function of
    another file that was compiled into it.
    """

    name: str
    directory: Path
    cache: Path
    threads: int | None = None  # of OpenMP and BLAS; two runs side by side wait for each other else

    def environment(self) -> dict[str, str]:
        """Return the environment of its processes."""
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        if self.threads is not None:
            names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
            kept |= dict.fromkeys(names, str(self.threads))
        return kept | {
            "PYTHONPATH": str(self.directory / "src"),
            "PYTHONPYCACHEPREFIX": str(self.cache / "modules"),
            "NUMBA_CACHE_DIR": str(self.cache / "kernels"),
        }

    def run_batch(self, jobs: Sequence[tuple[list[str], Path]]) -> None:
        """Run commands in one process, each with its directory."""
        for _, out in jobs:
            out.mkdir(parents=True)
        file = jobs[0][1].parent / "jobs.json"
        file.write_text(json.dumps([{"arguments": a, "out": str(out)} for a, out in jobs]))
        command = [sys.executable, "-P", str(_BATCH), str(self.directory), str(file)]
        subprocess.run(command, env=self.environment(), cwd=file.parent, check=True)

    def run_alone(self, arguments: Sequence[str], out: Path) -> Usage:
        """Run one command in a process of its own, and leave what a batch leaves."""
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "fedipw.cli", *arguments]
        with (out / "stdout.json").open("w") as said, (out / "stderr.txt").open("w") as told:
            began = time.perf_counter()
            process = subprocess.Popen(
                command, env=self.environment(), cwd=out, stdout=said, stderr=told
            )
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        (out / "code").write_text(str(process.returncode))
        return Usage(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)

    def commit(self) -> str:
        """Return the commit, marked where files were changed since; empty if it is none."""
        said = ["git", "--no-optional-locks", "-C", str(self.directory)]
        found = subprocess.run(
            [*said, "rev-parse", "HEAD"], check=False, capture_output=True, text=True
        )
        if found.returncode:
            return ""
        changed = subprocess.run(
            [*said, "status", "--porcelain", "src"], capture_output=True, text=True, check=True
        )
        return found.stdout.strip() + (" and changes" if changed.stdout else "")
