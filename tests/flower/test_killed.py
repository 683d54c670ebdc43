"""A server killed with SIGKILL goes on where it was, and ends with the same model."""

import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from flower.federations import LabFederation
from flower.killing import ROUNDS, SIZE, killed_at, killed_removing, refused, trained

KILLS = 4
_PROCESSES = mp.get_context("forkserver")  # each child is a process that has imported all it needs
_PROCESSES.set_forkserver_preload(["flower.killing"])


@pytest.fixture(autouse=True, scope="module")
def _paths() -> Iterator[None]:
    """Let the fork server find what it imports beforehand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        yield


def process(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = _PROCESSES.Process(target=target, args=args, kwargs=kwargs)
    made.start()
    return made


def finished(target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    run = process(target, *args, **kwargs)
    run.join(120)
    assert run.exitcode == 0


def outcome(where: Path) -> tuple[Any, dict[str, float]]:
    with np.load(where / "done.npz") as found:
        return found["theta"], dict(zip(found["names"].tolist(), found["values"], strict=True))


def rounds_of(where: Path, kind: str = "") -> list[list[Any]]:
    """Return what the ledger tells of every round but when it opened."""
    folder = where / "ledger" / kind
    files = sorted(folder.glob("round-*.parquet"))
    return [pl.read_parquet(path).drop("opened_at").rows() for path in files]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run nobody killed."""
    where = tmp_path_factory.mktemp("whole")
    LabFederation(size=SIZE, rounds=ROUNDS).put(where)
    finished(trained, where)
    return where


def same(where: Path, whole: Path) -> None:
    theta, metrics = outcome(where)
    expected, told = outcome(whole)
    np.testing.assert_array_equal(theta, expected)
    assert metrics.keys() == told.keys()
    for name, value in told.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name
    for kind in ("", "evaluation"):
        assert rounds_of(where, kind) == rounds_of(whole, kind)


def test_runs_killed_at_any_moment_end_like_the_one_nobody_killed(
    tmp_path: Path, whole: Path
) -> None:
    rng = np.random.default_rng(5)
    for k, last in enumerate(rng.integers(0, ROUNDS - 5, KILLS).tolist()):
        where = tmp_path / str(k)
        where.mkdir()
        LabFederation(size=SIZE, rounds=ROUNDS).put(where)
        run = process(trained, where)
        path = where / "ledger" / f"round-{last:06d}.parquet"
        while last and not path.exists() and run.is_alive():
            time.sleep(0.002)
        run.join(float(rng.uniform(0.0, 0.1)))  # a round takes half as long
        run.kill()
        run.join()
        assert run.exitcode == -signal.SIGKILL
        assert last <= len(rounds_of(where)) < ROUNDS
        finished(trained, where)
        same(where, whole)


def test_no_file_is_a_bad_moment_to_be_killed_at(tmp_path: Path) -> None:
    rounds = 2
    reference = tmp_path / "whole"
    reference.mkdir()
    LabFederation(size=SIZE, rounds=ROUNDS).put(reference)
    finished(killed_at, reference, 0, False, rounds)
    renames = int((reference / "renames").read_text())
    assert renames >= 7 * rounds
    for rename in range(renames // 2 + 1, renames + 2):  # those of the second round, and the end
        where = tmp_path / str(rename)
        where.mkdir()
        LabFederation(size=SIZE, rounds=ROUNDS).put(where)
        last = rename > renames
        run = process(killed_at, where, rename - last, last, rounds)
        run.join(120)
        assert run.exitcode == -signal.SIGKILL
        finished(trained, where, rounds)
        same(where, reference)


MEMORY = ("efficient-hajek", "mifa+efficient", "scaffold+efficient")


def store(where: Path) -> dict[str, bytes]:
    """Return what the memory of clients holds."""
    folder = where / "ledger" / "checkpoint" / "memory"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("scheme", MEMORY)
def test_a_memory_of_clients_survives_a_kill_at_any_moment(tmp_path: Path, scheme: str) -> None:
    """Moments within a round, before files get their names, after the last, and while removing.

    A process that is started again has none of the clients' contexts.
    """
    rounds, rng, whole = 3, np.random.default_rng(7), tmp_path / "whole"

    def prepared(name: str) -> Path:
        where = tmp_path / name
        where.mkdir()
        LabFederation(size=SIZE, rounds=ROUNDS).put(where)
        return where

    def ends_like_the_whole(where: Path) -> None:
        finished(trained, where, rounds, scheme=scheme)
        same(where, whole)
        assert store(where) == store(whole)

    finished(killed_at, prepared("whole"), 0, False, rounds, scheme)
    renames = int((whole / "renames").read_text())
    clients = len(store(whole))
    assert renames > 7 * rounds + clients
    moments = sorted({1, renames, int(rng.integers(2, renames))})
    for rename in moments:
        where = prepared(f"rename {rename}")
        run = process(killed_at, where, rename, bool(rename == renames), rounds, scheme)
        run.join(120)
        assert run.exitcode == -signal.SIGKILL
        ends_like_the_whole(where)
    finished(killed_removing, prepared("removing"), 0, rounds, scheme)
    removals = int((tmp_path / "removing" / "removals").read_text())
    assert removals > rounds
    for removal in (1, removals):
        where = prepared(f"removal {removal}")
        run = process(killed_removing, where, removal, rounds, scheme)
        run.join(120)
        assert run.exitcode == -signal.SIGKILL
        ends_like_the_whole(where)
    where = prepared("moment")
    run = process(trained, where, rounds, scheme=scheme)
    while not (where / "ledger" / "round-000001.parquet").exists() and run.is_alive():
        time.sleep(0.002)
    run.join(float(rng.uniform(0.0, 0.1)))
    run.kill()
    run.join()
    ends_like_the_whole(where)


def test_noise_and_what_it_spent_go_on_too(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        LabFederation(size=SIZE, rounds=ROUNDS).put(tmp_path / name)
    finished(trained, tmp_path / "whole", 4, private=True)
    finished(trained, tmp_path / "parts", 2, private=True)
    finished(trained, tmp_path / "parts", 4, private=True)
    same(tmp_path / "parts", tmp_path / "whole")
    assert outcome(tmp_path / "parts")[1]["train 4 fedipw-epsilon"] > 0.0


def test_a_second_server_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    rounds = 3
    for name in ("whole", "shared"):
        (tmp_path / name).mkdir()
        LabFederation(size=SIZE, rounds=ROUNDS).put(tmp_path / name)
    finished(trained, tmp_path / "whole", rounds)
    where, ledger = tmp_path / "shared", tmp_path / "shared" / "ledger"
    (where / "hold").touch()
    first = process(trained, where, rounds, held_in=2)
    while not (where / "held").exists():
        assert first.is_alive()
        time.sleep(0.02)
    before = files_of(ledger)
    assert len(rounds_of(where)) == 1
    finished(refused, where, rounds)
    assert f"process {first.pid} writes the ledger" in (where / "refused").read_text()
    assert files_of(ledger) == before
    first.kill()
    first.join()
    (where / "hold").unlink()
    assert files_of(ledger) == before  # the lock file is there, and nobody holds it
    finished(trained, where, rounds)
    same(where, tmp_path / "whole")
    assert not (ledger / ".lock").exists()


def test_a_server_that_is_not_alone_leaves_the_bytes_of_a_lone_one(tmp_path: Path) -> None:
    """The second is refused while the first is in a round; the first goes on as if alone."""
    rounds, moment = 3, datetime(2026, 1, 1, tzinfo=UTC)
    for name in ("lone", "shared"):
        (tmp_path / name).mkdir()
        LabFederation(size=SIZE, rounds=ROUNDS).put(tmp_path / name)
    finished(trained, tmp_path / "lone", rounds, at=moment)
    where = tmp_path / "shared"
    (where / "hold").touch()
    first = process(trained, where, rounds, held_in=2, at=moment)
    while not (where / "held").exists():
        assert first.is_alive()
        time.sleep(0.02)
    finished(refused, where, rounds)
    assert f"process {first.pid} writes the ledger" in (where / "refused").read_text()
    (where / "hold").unlink()
    first.join(120)
    assert first.exitcode == 0
    lone, shared = (
        {str(path.relative_to(tmp_path / name)): path.read_bytes()
         for path in sorted((tmp_path / name / "ledger").rglob("*")) if path.is_file()}
        for name in ("lone", "shared")
    )  # fmt: skip
    assert lone.keys() == shared.keys()
    assert [name for name in lone if lone[name] != shared[name]] == []


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return when each file was written and what is in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}
