"""Commands on a real Dask cluster: the local numbers, whatever is lost meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from cli import command
from cli.command import Files
from clusters import started
from fedipw import weigh
from fedipw.errors import InputError
from fedipw.tables import Ledger, partitions
from fedipw.tables.cluster import Workers, connected
from worlds import MEASURED, STEPS, World

distributed: Any = pytest.importorskip("distributed")

SMALL = World(rounds=5, size=300, covariates=("age", "os"), changing=("x", "network"))
CASES: dict[str, tuple[World, tuple[str, ...]]] = {
    "past": (SMALL, ("--refit-every", "2")),
    "history": (SMALL, ("--history", "--refit-every", "3")),
    "pooled": (SMALL, ("--participation-fit", "pooled")),
    "same round": (SMALL, ("--participation-fit", "same-round")),
    "window": (SMALL, ("--window", "2", "--refit-every", "1")),
    "decay": (SMALL, ("--decay", "0.8", "--refit-every", "1")),
    "as it goes": (SMALL, ("--scheme", "calibrated-online")),
    "three steps": (replace(SMALL, steps=STEPS), ()),
    "classifier": (SMALL, ("--classifier", "sklearn.naive_bayes.GaussianNB", "--folds", "2")),
    "collapsed": (SMALL, ("--scheme", "collapsed")),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started() as made:
        yield made


def there(cluster: Any) -> tuple[str, str]:
    return "--scheduler", cluster.scheduler_address


def assert_same_weights(files: Files, cluster: Any, *options: object) -> None:
    near, said = files.weighed(*options)
    far, told = files.weighed(*options, *there(cluster))
    assert near.columns == far.columns
    assert near["unit_id"].equals(far["unit_id"])
    for name in near.columns[1:]:
        np.testing.assert_allclose(far[name], near[name], rtol=1e-10)
    assert_same_numbers(told, said)


def assert_same_numbers(far: Any, near: Any) -> None:
    """Two documents, number by number; text must be the same but for the numbers in it."""
    if isinstance(near, dict):
        assert far.keys() == near.keys()
        for name in near:
            assert_same_numbers(far[name], near[name])
    elif isinstance(near, list):
        assert len(far) == len(near)
        for one, other in zip(far, near, strict=True):
            assert_same_numbers(one, other)
    elif isinstance(near, float):
        assert far == pytest.approx(near, rel=1e-10, abs=1e-12)
    else:
        assert far == near


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_local_ones(cluster: Any, tmp_path: Path, name: str) -> None:
    world, options = CASES[name]
    assert_same_weights(Files.of(world, tmp_path).put(), cluster, *options)


def test_clients_may_join_and_rounds_be_empty(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(replace(SMALL, rounds=7), tmp_path)
    ids = files.people.filter("enrolled")["unit_id"].to_list()
    late, gone = ids[::5], ids[1::7]
    files.people = files.people.with_columns(
        enrolled_from=pl.when(pl.col("unit_id").is_in(late)).then(4).otherwise(2),
        enrolled_until=pl.when(pl.col("unit_id").is_in(gone)).then(6),
    )
    listed = []
    for index, table in enumerate(files.rounds, start=1):
        here = pl.lit(index >= 2) & ((index >= 4) | ~pl.col("unit_id").is_in(late))
        listed.append(table.filter(here & ((index < 6) | ~pl.col("unit_id").is_in(gone))))
    files.rounds = listed
    files.edit(3, replied=pl.lit(False))
    files.put()
    for options in ((), ("--history",), ("--scheme", "calibrated-online")):
        assert_same_weights(files, cluster, *options)


def test_saved_models_and_incomplete_rows_are_used_there_too(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(SMALL, tmp_path)
    files.edit(2, x=pl.when(pl.col("x") > 0.5).then(None).otherwise(pl.col("x")))
    files.put()
    assert_same_weights(files, cluster, "--missing", "drop")
    files.weighed("--missing", "drop", "--save-models", tmp_path / "models")
    assert_same_weights(files, cluster, "--missing", "drop", "--models", tmp_path / "models")


def test_rounds_of_several_blocks_are_summed_in_place(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "FEWEST_ROWS", 16)  # here: what workers cut tells itself
    files = Files.of(replace(MEASURED, size=100), tmp_path).put()
    near = files.evaluated()
    assert_same_numbers(files.evaluated(*there(cluster)), near)


def test_evaluate_and_audit_give_the_local_numbers(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(MEASURED, tmp_path).put()
    for options in ((), ("--jackknife", 4), ("--classifier", "sklearn.naive_bayes.GaussianNB")):
        near, far = files.evaluated(*options), files.evaluated(*options, *there(cluster))
        assert_same_numbers(far, near)
    for fit in ("past", "pooled", "same-round"):
        assert_same_numbers(audited(files, fit, *there(cluster)), audited(files, fit))


def audited(files: Files, fit: str, *more: object) -> dict[str, Any]:
    out = files.where / "audit.json"
    command.succeeded(
        "audit", *files.given(), "--metrics", files.where / "loss.parquet", "--json", out,
        "--participation-fit", fit, "--out", files.where / "audit.html", "--force", *more,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_workers_write_the_parts_of_a_directory(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(SMALL, tmp_path)
    files.edit(2, replied=pl.lit(False))  # its part has no rows, and is none
    files.put()
    near, _ = files.weighed()
    code, _, said = files.weights(*there(cluster), out="parts")
    assert code == 0, said
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert names == [f"part-{k:06d}.parquet" for k in range(SMALL.rounds - 1)]
    far = pl.read_parquet(tmp_path / "parts" / "*.parquet")
    assert far["unit_id"].equals(near["unit_id"])
    np.testing.assert_allclose(far["weight"], near["weight"], rtol=1e-10)


def test_the_python_face_brings_the_tables_back(cluster: Any, tmp_path: Path) -> None:
    Files.of(SMALL, tmp_path).put()
    with connected(cluster.scheduler_address) as client:
        given = tmp_path / "people.parquet", Ledger(tmp_path / "rounds")
        far, near = weigh(*given, client=client), weigh(*given)
    for name in ("weight", "participation_prob", "enrollment_prob"):
        np.testing.assert_allclose(far.table[name], near.table[name], rtol=1e-10)


def test_what_is_wrong_with_a_round_is_told_as_it_is_here(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(SMALL, tmp_path)
    files.edit(4, x=pl.lit(None, dtype=pl.Float64))
    files.put()
    code, _, said = files.weights()
    assert (code, said) == files.weights(*there(cluster))[::2]
    assert code == 2
    assert "round 4" in said


def test_a_saved_state_and_a_cluster_do_not_go_together(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(SMALL, tmp_path).put()
    code, _, said = files.weights("--state", tmp_path / "state", *there(cluster))
    assert code == 2
    assert "leave one of them out" in said


# --- a lost worker; another one takes its place in time


@contextmanager
def a_worker_lost(cluster: Any) -> Iterator[list[str]]:
    """Kill the worker that holds most as soon as there are rounds on it."""
    lost: list[str] = []
    ready, done = threading.Event(), threading.Event()

    def kill() -> None:
        with connected(cluster.scheduler_address) as client:
            client.wait_for_workers(2)
            pids = client.run(os.getpid)
            ready.set()
            while not done.is_set():
                held = client.has_what()
                coded = {w: sum("_coded" in str(k) for k in keys) for w, keys in held.items()}
                worst = max(pids, key=lambda worker: coded.get(worker, 0))
                if coded.get(worst):
                    os.kill(pids[worst], signal.SIGKILL)
                    lost.append(worst)
                    return
                time.sleep(0.002)

    killer = threading.Thread(target=kill)
    killer.start()
    ready.wait()
    try:
        yield lost
    finally:
        done.set()
        killer.join()


def test_a_worker_killed_in_any_command_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(MEASURED, tmp_path).put()
    near = files.weighed(), files.evaluated(), audited(files, "past")
    with a_worker_lost(cluster) as lost:
        far, told = files.weighed(*there(cluster))
    assert len(lost) == 1
    np.testing.assert_allclose(far["weight"], near[0][0]["weight"], rtol=1e-10)
    assert_same_numbers(told, near[0][1])
    with a_worker_lost(cluster) as lost:
        evaluated = files.evaluated(*there(cluster))
    assert len(lost) == 1
    assert_same_numbers(evaluated, near[1])
    with a_worker_lost(cluster) as lost:
        found = audited(files, "past", *there(cluster))
    assert len(lost) == 1
    assert_same_numbers(found, near[2])


def test_what_every_worker_had_is_sent_again(cluster: Any) -> None:
    def times(values: list[int], k: int) -> list[int]:  # in here: workers have no tests
        return [value * k for value in values]

    with connected(cluster.scheduler_address) as client:
        workers = Workers(client)
        shared = workers.shared([1, 2, 3])
        tasks = [workers.task(times, shared, k) for k in range(4)]
        workers.begin(tasks)
        assert [workers.result(task) for task in tasks] == [
            [0, 0, 0],
            [1, 2, 3],
            [2, 4, 6],
            [3, 6, 9],
        ]
        for pid in client.run(os.getpid).values():
            os.kill(pid, signal.SIGKILL)
        assert workers.result(workers.task(times, shared, 5)) == [5, 10, 15]


def test_a_cluster_that_loses_workers_again_and_again_is_given_up(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise OSError("gone")

    monkeypatch.setattr("fedipw.tables.cluster._TRIES", 2)
    monkeypatch.setattr("fedipw.tables.cluster._PAUSE", 0.0)
    with connected(cluster.scheduler_address) as client:
        workers = Workers(client)
        with pytest.raises(InputError, match="The Dask cluster lost workers 2 times"):
            workers.result(workers.task(never))
