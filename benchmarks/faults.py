"""``python -m benchmarks.faults``: commands on bad disks, and killed at moments spread over a run.

Each command runs in a process of its own under a limit: a full disk (a file-size limit, and a full
file system where one may be mounted), a directory that may not be written to, few file descriptors,
little memory, its output directory removed while it runs. It must end with exit code 2, name a
file, and leave nothing behind. Then it is killed 20
times, at moments spread over its run; each time its outputs must be whole or absent, and at the end
the next run must clean up. Results go to benchmarks/results/faults.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

RESULT = Path(__file__).parent / "results" / "faults.json"
KEPT = ("out/study/parts", "out/study/study.json", "out/run/checkpoint")  # to go on from
SCENARIO = """seed = 3
rounds = 60
methods = ["fedavg", "fedipw"]
[population]
size = 200
rows = 10
features = 3
"""
STUDY = """rounds = 30
seeds = [1, 2]
methods = ["fedavg", "participation-only"]
[base.population]
size = 100
rows = 6
features = 3
[scenarios.a]
"""


@dataclass(frozen=True)
class Command:
    """A command on inputs in a directory, and what it writes there."""

    name: str
    arguments: tuple[str, ...]
    output: str  # a file, or a directory

    def started(self, folder: Path, limit: str = "") -> subprocess.Popen[str]:
        """Start the command in a directory of its inputs, as the leader of its own group.

        ``limit`` is code that limits the process before the command begins. Modules are not
        compiled to files: where these may not grow, Python leaves half of one, for good.
        """
        called = ["-c", limit + RUN] if limit else ["-m", "fedipw"]
        return subprocess.Popen(
            [sys.executable, *called, *self.arguments],
            cwd=folder, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "2",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )  # fmt: skip


_WHO = ("--population", "people.parquet", "--rounds", "rounds")
COMMANDS = (
    Command(
        "evaluate",
        ("evaluate", *_WHO, "--metrics", "metrics.parquet", "--out", "out/e.csv", "--force"),
        "out/e.csv",
    ),
    Command("weights", ("weights", *_WHO, "--out", "out/w.parquet", "--force"), "out/w.parquet"),
    Command(
        "audit",
        ("audit", *_WHO, "--out", "out/a.html", "--json", "out/a.json", "--force"),
        "out/a.html",
    ),
    Command("simulate", ("simulate", "scenario.toml", "--out", "out/run"), "out/run"),
    Command("study", ("study", "study.toml", "--out", "out/study", "--workers", "1"), "out/study"),
    Command(
        "reproduce",
        ("reproduce", "--out", "out/fig", "--seeds", "1", "--rounds", "20", "--panels", "A",
         "--workers", "1"),
        "out/fig",
    ),
    Command(
        "calibrate",
        ("calibrate", "people.parquet", "--targets", "targets.csv", "--force",
         "--out", "out/c.parquet"),
        "out/c.parquet",
    ),
)  # fmt: skip


def write_inputs(folder: Path, clients: int = 4_000, rounds: int = 30) -> None:
    """Write the inputs of all commands."""
    rng = np.random.default_rng(0)
    age, enrolled = rng.normal(40.0, 10.0, clients), rng.random(clients) < 0.5
    people = pl.DataFrame({"unit_id": np.arange(clients), "age": age, "enrolled": enrolled})
    people.write_parquet(folder / "people.parquet")
    (folder / "targets.csv").write_text("name,value\nage,40.3\n")
    (folder / "scenario.toml").write_text(SCENARIO)
    (folder / "study.toml").write_text(STUDY)
    (folder / "rounds").mkdir()
    (folder / "out").mkdir()
    ids, metrics = np.flatnonzero(enrolled), []
    for k in range(1, rounds + 1):
        battery = rng.random(len(ids))
        replied = rng.random(len(ids)) < 0.2 + 0.6 * battery
        made = {"round": np.full(len(ids), k), "unit_id": ids, "invited": True}
        table = pl.DataFrame({**made, "replied": replied, "battery": battery})
        table.write_parquet(folder / "rounds" / f"round-{k:06d}.parquet")
        here = table.filter("replied").select("unit_id", "round")
        metrics.append(here.with_columns(value=pl.Series(rng.normal(size=here.height))))
    pl.concat(metrics).write_parquet(folder / "metrics.parquet")


def whole(path: Path) -> bool:
    """Return whether a file can be read to its end."""
    try:
        if path.suffix == ".parquet":
            pl.read_parquet(path)
        elif path.suffix == ".csv":
            pl.read_csv(path)
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".html":
            return path.read_text(encoding="utf-8").rstrip().endswith("</html>")
        elif path.suffix == ".npz":
            with np.load(path) as file:
                return all(file[name] is not None for name in file.files)
        elif path.suffix == ".png":
            return path.read_bytes().endswith(b"IEND\xaeB`\x82")
        elif path.suffix == ".svg":
            return path.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    except Exception:  # whatever reads it: it is not whole
        return False
    return True


def broken(folder: Path) -> list[str]:
    """Return the outputs that are not whole; temporaries, which nobody reads, are none."""
    found = (p for p in sorted((folder / "out").rglob("*")) if p.is_file())
    names = {p.relative_to(folder): p for p in found}
    shown = {n: p for n, p in names.items() if not any(part[0] == "." for part in n.parts)}
    return [str(name) for name, path in shown.items() if not whole(path)]


def left_over(folder: Path) -> list[str]:
    """Return what is hidden among the outputs: temporaries and locks."""
    return sorted(str(p.relative_to(folder)) for p in (folder / "out").rglob(".*"))


LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as an error of the write, not a signal
resource.setrlimit(resource.{0}, ({1}, {1}))
"""
RUN = """
import os, sys
os.execv(sys.executable, [sys.executable, "-m", "fedipw", *sys.argv[1:]])
"""
LIMITS = {
    "full disk": LIMIT.format("RLIMIT_FSIZE", 512),
    "few descriptors": LIMIT.format("RLIMIT_NOFILE", 12),
    "little memory": LIMIT.format("RLIMIT_DATA", 150 * 2**20),
    "read-only": "",
    "full file system": "",
    "removed": "",
}
REFUSED = ("full disk", "read-only", "full file system")  # no command can do without


def faulty(command: Command, kind: str, folder: Path) -> dict[str, Any]:
    """Return how a command ended under a limit, and what it left."""
    blocked = folder / "out"
    if kind == "read-only":  # for everybody, root too: a file where a directory would have to be
        shutil.rmtree(blocked)
        blocked.write_text("not a directory")
    if kind == "full file system" and not _mounted(blocked):
        return {"code": None, "error": "no file system may be mounted here", "left": []}
    process = command.started(folder, LIMITS[kind])
    if kind == "removed":
        _remove_once_used(blocked, process)
    _, err = process.communicate(timeout=300)
    left = []
    if kind == "full file system":
        left = sorted(str(p.relative_to(folder)) for p in blocked.rglob("*") if p.is_file())
        left = [name for name in left if name != "out/fill" and not name.startswith(KEPT)]
        subprocess.run(["umount", str(blocked)], check=True)
    elif kind == "read-only":
        left = [] if blocked.read_text() == "not a directory" else ["out"]
        blocked.unlink()
        blocked.mkdir()
    elif process.returncode:
        found = [p for p in blocked.rglob("*") if p.is_file() or not any(p.iterdir())]
        left = sorted(str(p.relative_to(folder)) for p in found)
        left = [name for name in left if not name.startswith(KEPT)]
    else:
        left = [*broken(folder), *left_over(folder)]
    return {"code": process.returncode, "error": err.strip()[-300:], "left": left}


def _mounted(place: Path) -> bool:
    """Mount a file system of 64 KiB that a file fills all but 4 KiB of; return whether it may."""
    asked = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        if subprocess.run(asked, capture_output=True, check=False).returncode:
            return False
    except FileNotFoundError:
        return False
    (place / "fill").write_bytes(bytes(60 * 1024))
    return True


def _remove_once_used(place: Path, process: subprocess.Popen[str]) -> None:
    """Remove a directory as soon as the command has put something there."""
    while process.poll() is None and not any(place.iterdir()):
        time.sleep(0.001)
    while place.exists():  # the command may just be writing
        shutil.rmtree(place, ignore_errors=True)


def kills(
    command: Command, folder: Path, count: int, chance: random.Random
) -> Iterator[dict[str, Any]]:
    """Kill a command at moments spread over its run; yield what each kill found and left."""
    took = np.inf
    for _ in range(2):  # the first one compiles and fills caches
        _cleared(folder)
        began = time.perf_counter()
        command.started(folder).communicate(timeout=300)
        took = min(took, time.perf_counter() - began)
    k = misses = 0
    while k < count:
        _cleared(folder)
        began = time.perf_counter()
        process = command.started(folder)
        moment = took * (k + chance.random()) / count
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        killed = process.returncode == -signal.SIGKILL
        if not killed and misses < count:  # it was faster this time: once more, a little earlier
            took, misses = min(took, time.perf_counter() - began), misses + 1
            continue
        k += 1
        found = {"broken": broken(folder), "left": left_over(folder)}
        yield {"at": moment / took, "inside": killed, **found}


def _cleared(folder: Path) -> None:
    shutil.rmtree(folder / "out")
    (folder / "out").mkdir()


def killed(command: Command, folder: Path, count: int, seed: int = 1) -> dict[str, Any]:
    """Return what some kills of a command did, and whether the next run cleaned up after them."""
    found = list(kills(command, folder, count, random.Random(seed)))
    time.sleep(2.1)  # what was just made may be somebody's
    more = ["--resume"] if (folder / "out/run/checkpoint/checkpoint.npz").exists() else []
    if more and (folder / "out/run/summary.json").exists():
        more = []
    last = Command(command.name, (*command.arguments, *more), command.output).started(folder)
    _, err = last.communicate(timeout=300)
    return {
        "kills": len(found), "inside": sum(one["inside"] for one in found),
        "moments": [round(one["at"], 3) for one in found if one["inside"]],
        "broken": sorted({name for one in found for name in one["broken"]}),
        "left_by_kills": sorted({name.split("/")[1][:12] for one in found for name in one["left"]}),
        "next": last.returncode, "next_error": err.strip()[-300:],
        "left": left_over(folder), "whole": not broken(folder),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[c.name for c in COMMANDS])
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    from fedipw.lab.files import environment

    result: dict[str, Any] = {"limits": {}, "kills": {}}
    good = True
    for command in (c for c in COMMANDS if c.name in asked.only):
        for kind in LIMITS:
            with tempfile.TemporaryDirectory() as scratch:
                write_inputs(Path(scratch))
                found = faulty(command, kind, Path(scratch))
            codes = (2, None) if kind in REFUSED else (0, 2)
            good &= found["code"] in codes and not found["left"]
            result["limits"][f"{command.name}, {kind}"] = found
            print(command.name, kind, found, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            write_inputs(Path(scratch))
            found = killed(command, Path(scratch), asked.kills)
        good &= not found["broken"] and found["whole"] and found["next"] == 0 and not found["left"]
        result["kills"][command.name] = found
        print(command.name, "killed", found, flush=True)
    asked.out.write_text(json.dumps(result | environment(), indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
