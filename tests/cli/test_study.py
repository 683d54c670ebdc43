"""``fedipw study`` as a user runs it: real processes that are killed, stopped and robbed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from fedipw.lab.study import run_study
from fedipw.lab.study_file import study_from

from .command import fedipw

COMMAND = [sys.executable, "-c", "from fedipw.cli import main; main()"]
STUDY = """
rounds = {rounds}
seeds = {seeds}
methods = ["fedavg", "participation-only", "fedipw"]
[base.population]
size = 100
[scenarios.plain]
[scenarios.opposing]
title = "participation opposes enrollment"
participation.coefficients = {{ z1 = -1.0, z2 = -0.8 }}
"""
TABLES = ("results.parquet", "curves.parquet", "summary.csv", "comparison.csv", "figure.svg")


def written(tmp_path: Path, rounds: int = 10, seeds: int = 2) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(STUDY.format(rounds=rounds, seeds=seeds))
    return path


def started(config: Path, out: Path, workers: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "study", str(config), "--out", str(out), "--workers", str(workers)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def parts(out: Path) -> int:
    return len(list((out / "parts").glob("*.parquet")))


def wait_for_parts(process: subprocess.Popen[str], out: Path, number: int) -> None:
    while parts(out) < number and process.poll() is None:
        time.sleep(0.005)
    if process.poll() is not None:
        pytest.fail(f"ended before it could be disturbed: {process.communicate()[1]}")


def wait_until_gone(group: int) -> None:
    """Wait for the last process of a group; a minute at most."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("workers outlive the command")


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes a command started to work for it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [int(pid) for pid, line in lines.items() if "spawn_main" in line]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_study_disturbed_in_every_way_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """Killed, stopped, robbed of a worker, its parent killed alone: at seeded random moments."""
    config, out, whole = written(tmp_path, rounds=40, seeds=12), tmp_path / "out", tmp_path / "ref"
    chance = random.Random(7)

    def disturbed() -> subprocess.Popen[str]:
        process = started(config, out, workers=2)
        wait_for_parts(process, out, parts(out) + chance.randint(1, 2))
        time.sleep(chance.uniform(0.0, 0.05))
        return process

    killed = disturbed()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()

    robbed = disturbed()
    os.kill(workers_of(robbed)[0], signal.SIGKILL)
    error = robbed.communicate(timeout=60)[1]
    assert robbed.returncode == 2, error
    assert f"of 24 jobs are kept in {out / 'parts'}; the same command goes on" in error
    assert "Traceback" not in error

    stopped = disturbed()
    os.killpg(stopped.pid, signal.SIGINT)
    error = stopped.communicate(timeout=60)[1]
    assert stopped.returncode == 130, error
    assert "the same command goes on from there" in error
    assert "Traceback" not in error

    orphaned = disturbed()
    orphaned.kill()
    orphaned.communicate(timeout=60)
    for process in (robbed, stopped, orphaned):
        wait_until_gone(process.pid)

    assert not (out / "results.parquet").exists()
    assert 4 <= parts(out) < 24
    study = study_from(config)
    run_study(study, out)
    run_study(study, whole)
    for name in TABLES:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert {p.name for p in out.iterdir()} == {p.name for p in whole.iterdir()}
    assert {p.name for p in (out / "parts").iterdir()} == {
        p.name for p in (whole / "parts").iterdir()
    }


def test_it_prints_tables_or_json(tmp_path: Path) -> None:
    config, out = written(tmp_path), tmp_path / "out"
    code, printed, error = fedipw("study", config, "--out", out, "--workers", 1, "--json")
    assert code == 0, error
    found = json.loads(printed)
    assert set(found) == {"summary", "comparison", "ranks"}
    assert len(found["summary"]) == 6
    assert found["comparison"] == pl.read_csv(out / "comparison.csv").to_dicts()
    assert fedipw("study", config, "--out", out, "--workers", 1)[0] == 0  # nothing left to run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds = 2", "seeds = []"), "seeds is empty"),
        (("fedavg", "fedavgg"), "No method 'fedavgg'; did you mean"),
        (("size = 100", "sise = 100"), "unknown key 'sise'; did you mean 'size'?"),
        (("rounds = 10", "rounds = 10\nreference = 'oracle'"), "is not run in scenario 'plain'"),
        (("[scenarios", "[scenario"), "unknown key 'scenario'; did you mean 'scenarios'?"),
        (("size = 100", "size = "), "is not readable TOML"),
    ],
)
def test_a_bad_file_is_exit_code_two_and_leaves_nothing(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    config = written(tmp_path)
    config.write_text(config.read_text().replace(*change))
    code, _, error = fedipw("study", config, "--out", tmp_path / "out")
    assert code == 2
    assert str(config) in error
    assert message in error
    assert not (tmp_path / "out").exists()


def test_other_bad_usage(tmp_path: Path) -> None:
    config = written(tmp_path)
    assert fedipw("study", tmp_path / "none.toml")[0] == 2
    code, _, error = fedipw("study", config, "--out", tmp_path / "out", "--workers", 0)
    assert (code, "--workers must be at least 1, not 0" in error) == (2, True)
    (tmp_path / "file").write_text("mine")
    code, _, error = fedipw("study", config, "--out", tmp_path / "file")
    assert (code, "is a file; give a directory" in error) == (2, True)
    with contextlib.suppress(FileNotFoundError):
        assert not list((tmp_path / "out").iterdir())


def test_help_has_an_example() -> None:
    code, printed, _ = fedipw("study", "--help")
    assert code == 0
    assert "Example: fedipw study" in printed
