"""Rows of rounds on the workers of a real Dask cluster: the local fits, whatever is lost."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.naive_bayes import GaussianNB

from cli import command
from cli.command import Files
from fedipw.errors import InputError
from fedipw.selection.classifiers import Classifier
from fedipw.selection.participation import ParticipationSettings, Source, Window
from fedipw.selection.rowstore import BlockStore
from fedipw.tables import partitions
from fedipw.tables.cluster import connected
from fedipw.tables.partitions import Block, sum_over
from worlds import MEASURED, World

from .learner import Told, all_rounds, in_blocks, learner_of, played, random_log

distributed: Any = pytest.importorskip("distributed")

WINDOWS = {
    "past": ParticipationSettings(refit_every=1),
    "every third": ParticipationSettings(refit_every=3),
    "rolling": ParticipationSettings(refit_every=1, last=2),
    "decay": ParticipationSettings(refit_every=1, decay=0.8),
    "same round": ParticipationSettings(window=Window.SAME_ROUND, per_coefficient=3.0),
}
WORKERS = 2


def started() -> Any:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # lost workers are meant here
    return distributed.LocalCluster(
        n_workers=WORKERS,
        threads_per_worker=1,
        processes=True,
        dashboard_address="127.0.0.1:0",  # any free port: another run may have the usual one
        host="127.0.0.1",
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started() as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[Any]:
    with connected(cluster.scheduler_address) as made:
        yield made


def assert_same(there: list[Told], here: list[Told]) -> None:
    for far, near in zip(there, here, strict=True):
        np.testing.assert_allclose(far.prob, near.prob, rtol=1e-10)
        assert far.source is near.source
    assert here[-1].source is Source.MODEL


@pytest.mark.parametrize("name", WINDOWS)
def test_probabilities_are_the_local_ones(client: Any, name: str) -> None:
    log, how = random_log(3, rounds=6), WINDOWS[name]
    there = all_rounds(log, replace(how, client=client), store=in_blocks)
    assert_same(there, all_rounds(log, how, store=in_blocks))


@pytest.mark.parametrize("folds", [None, 3])
def test_a_classifier_sees_the_same_rows(client: Any, folds: int | None) -> None:
    log, how = random_log(4), ParticipationSettings(estimator=Classifier(GaussianNB(), folds=folds))
    there = all_rounds(log, replace(how, client=client), store=in_blocks)
    for far, near in zip(there, all_rounds(log, how, store=in_blocks), strict=True):
        np.testing.assert_array_equal(far.prob, near.prob)


def kept_there(client: Any) -> set[str]:
    """Return the blocks that workers keep."""
    return {k for keys in client.has_what().values() for k in keys if k.startswith("Block")}


def test_blocks_of_rounds_lie_on_workers_and_only_sums_come_back(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "_BLOCK_BYTES", 1)  # blocks of 8192 rows
    rng, n = np.random.default_rng(0), 20_000
    stores = BlockStore(n), BlockStore(n, client=client)
    before = kept_there(client)
    for _ in range(2):
        columns, labels = rng.normal(size=(3, n)), (rng.random(n) < 0.4).astype(np.int8)
        for store in stores:
            store.append(columns.copy(), labels, np.arange(n))
    stores[1].rounds(0, 2).reduced(_total, np.add)
    assert len(kept_there(client) - before) == 6  # three blocks a round
    here, there = (store.rounds(1, 2) for store in stores)
    starts = there.reduced(lambda block: [block.start], lambda a, b: a + b)
    assert starts == [20_000, 28_192, 36_384]
    a, b = (sum_over(rows, lambda block: block.columns @ block.labels) for rows in (here, there))
    np.testing.assert_allclose(a, b, rtol=1e-12)
    bytes_twice = [sum_over(there, _total).tobytes() for _ in range(2)]
    assert bytes_twice[0] == bytes_twice[1]


def _total(block: Block) -> Any:
    return block.columns.sum(axis=1)


def test_a_saved_state_goes_on_on_the_cluster(client: Any) -> None:
    log, how = random_log(5, rounds=6), ParticipationSettings(refit_every=1)
    first = learner_of(log, how, store=in_blocks)
    played(first, log, range(4))
    again = learner_of(log, replace(how, client=client), store=in_blocks)
    again.restore(first.state())
    assert_same(played(again, log, range(4, 6)), played(first, log, range(4, 6)))


def test_no_rows_are_an_error_there_too(client: Any) -> None:
    store = BlockStore(4, client=client)
    with pytest.raises(InputError, match="There are no rows"):
        store.rounds(0, 0)


# --- commands


def there(cluster: Any) -> tuple[str, str]:
    return "--scheduler", cluster.scheduler_address


def test_weights_fits_both_stages_on_the_cluster(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(World(), tmp_path).put()
    for options in (("--history",), ("--participation-fit", "pooled")):
        near, said = files.weighed(*options)
        far, told = files.weighed(*options, *there(cluster))
        assert near.columns == far.columns
        for name in near.columns:
            np.testing.assert_allclose(far[name], near[name], rtol=1e-10)
        assert _numbers(told) == pytest.approx(_numbers(said), rel=1e-8)


def test_evaluate_and_audit_run_on_the_cluster(cluster: Any, tmp_path: Path) -> None:
    files = Files.of(MEASURED, tmp_path).put()
    for options in ((), ("--jackknife", 4)):
        near, far = files.evaluated(*options), files.evaluated(*options, *there(cluster))
        assert _numbers(far) == pytest.approx(_numbers(near), rel=1e-8, abs=1e-12)
    pages = []
    for k, more in enumerate(((), there(cluster))):
        code, _, errors = command.fedipw(
            "audit", "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "rounds",
            "--metrics", tmp_path / "loss.parquet", "--out", tmp_path / f"{k}.html",
            "--json", tmp_path / f"{k}.json", *more,
        )  # fmt: skip
        assert code == 0, errors
        pages.append(json.loads((tmp_path / f"{k}.json").read_text()))
    assert _numbers(pages[1]) == pytest.approx(_numbers(pages[0]), rel=1e-8, abs=1e-12)


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a document in their order."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return [number for one in inside for number in _numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []


# --- a lost worker; the cluster starts another in its place


@pytest.fixture
def doomed(cluster: Any) -> Iterator[Any]:
    with connected(cluster.scheduler_address) as made:
        made.wait_for_workers(WORKERS, timeout=120)
        yield made


def killed(client: Any) -> int:
    """Kill a worker and return how many blocks it held alone."""
    held, pids = client.has_what(), client.run(os.getpid)
    address = max(held, key=lambda worker: len(held[worker]))
    os.kill(pids[address], signal.SIGKILL)
    return len(held[address])


def test_a_worker_killed_between_fits_changes_nothing(doomed: Any) -> None:
    log, how = random_log(6, rounds=8), ParticipationSettings(refit_every=1)
    model = learner_of(log, replace(how, client=doomed), store=in_blocks)
    found = played(model, log, range(5))
    assert killed(doomed) >= 2  # blocks of rounds that the next fits need
    found += played(model, log, range(5, 8))
    assert_same(found, all_rounds(log, how, store=in_blocks))


@pytest.mark.parametrize("tries", [10, 1])
def test_a_worker_killed_in_the_middle_of_a_pass_changes_nothing(
    doomed: Any, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr("fedipw.tables.cluster._TRIES", tries)
    rng, stores = np.random.default_rng(0), (BlockStore(50), BlockStore(50, client=doomed))
    for _ in range(6):
        columns, labels = rng.normal(size=(2, 50)), (rng.random(50) < 0.5).astype(np.int8)
        for store in stores:
            store.append(columns.copy(), labels, np.arange(50))
    here, there = (store.rounds(0, 6) for store in stores)
    sum_over(there, _total)  # the blocks are there
    lost: list[int] = []
    killer = threading.Timer(0.6, lambda: lost.append(killed(doomed)))
    killer.start()
    if tries == 1:
        with pytest.raises(InputError, match="The Dask cluster lost workers in 1 passes"):
            sum_over(there, _slowly)
    else:
        found = sum_over(there, _slowly)
        np.testing.assert_allclose(found, sum_over(here, _slowly), rtol=1e-12)
    killer.join()
    assert lost[0] >= 2


def _slowly(block: Block) -> Any:
    time.sleep(0.4)
    return block.columns @ block.labels
