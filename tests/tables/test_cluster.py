"""Rows on the workers of a real Dask cluster: the local answer, also when a worker is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.naive_bayes import GaussianNB

from clusters import started
from fedipw.calibration import Distance, Entropy, Partitioned, Quadratic, calibrated
from fedipw.errors import InputError, SeparationError
from fedipw.numerics import FloatArray
from fedipw.selection.classifiers import Classifier, Newton
from fedipw.selection.coded import CodedTable, TableSettings, table_model
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.logistic import LogisticFit, block_sums, logistic_fit
from fedipw.selection.overlap import overlap
from fedipw.tables import Targets, partitions
from fedipw.tables.cluster import ClusterBlocks, connected
from fedipw.tables.design import Missing
from fedipw.tables.formula import term_of
from fedipw.tables.partitions import Block, sum_over
from fedipw.tables.parts import written_parts
from fedipw.tables.population import Population
from fedipw.tables.table import Slice, Table, rows_of

distributed: Any = pytest.importorskip("distributed")

FORMULA = "age*os + flag"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started(workers=2) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[Any]:
    with connected(cluster.scheduler_address) as made:
        yield made


def people(n: int, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    age, os_, flag = rng.normal(40, 9, n), rng.choice(["ios", "web"], n), rng.random(n) < 0.3
    odds = 0.05 * (age - 40) - 0.6 * (os_ == "ios") + 0.5 * flag - 0.8
    return pl.DataFrame(
        {
            "unit_id": np.arange(n),
            "age": age,
            "os": os_,
            "flag": flag,
            "count": rng.integers(1, 5, n),
            "enrolled": rng.random(n) < 1.0 / (1.0 + np.exp(-odds)),
        }
    )


def in_parts(frame: pl.DataFrame, folder: Path, rows: int) -> Table:
    folder.mkdir(exist_ok=True)
    for k, start in enumerate(range(0, frame.height, rows)):
        frame.slice(start, rows).write_parquet(folder / f"part-{k:03d}.parquet")
    return Table(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return in_parts(people(30_000), tmp_path_factory.mktemp("people"), 7_000)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of 8192 rows, so that a table of a few thousand rows has several."""
    monkeypatch.setattr(partitions, "_BLOCK_BYTES", 1)


def coefficients(fit: LogisticFit) -> FloatArray:
    return np.append(fit.coefficients, fit.intercept)


def assert_same_fit(a: LogisticFit, b: LogisticFit) -> None:
    np.testing.assert_allclose(coefficients(a), coefficients(b), rtol=1e-10)
    np.testing.assert_allclose(a.covariance, b.covariance, rtol=1e-8)
    assert a.log_likelihood == pytest.approx(b.log_likelihood, rel=1e-12)
    assert (a.names, a.rows, a.selected, a.dropped) == (b.names, b.rows, b.selected, b.dropped)


@pytest.mark.parametrize("weight", [None, "count"])
@pytest.mark.parametrize("l2", [0.0, 0.5])
def test_a_fit_on_the_cluster_is_the_local_one(
    client: Any, table: Table, weight: str | None, l2: float
) -> None:
    local = table_model(table, FORMULA, weight=weight, settings=TableSettings(estimator=Newton(l2)))
    there = table_model(
        table, FORMULA, weight=weight, settings=TableSettings(estimator=Newton(l2), client=client)
    )
    assert_same_fit(there.logistic(), local.logistic())
    assert there.design == local.design


def test_workers_copy_the_parts_that_they_reach_by_url(client: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    here = in_parts(people(9_000), tmp_path / "people", 3_000)
    url = Table(f"simplecache::file://{tmp_path}/people")
    there = table_model(url, FORMULA, settings=TableSettings(client=client))
    assert_same_fit(there.logistic(), table_model(here, FORMULA).logistic())


@pytest.mark.parametrize("start", ["", "simplecache::file://"])
def test_workers_write_parts(client: Any, tmp_path: Path, start: str) -> None:
    frame = people(3_000).select("unit_id", "age")
    with written_parts(f"{start}{tmp_path}/weights") as parts:
        pieces = list(frame.iter_slices(1_000))
        client.gather(client.map(parts.write, range(3), pieces, pure=False))
    assert Table(tmp_path / "weights").collect().equals(frame)


@pytest.mark.parametrize("distance", [Quadratic(), Entropy()], ids=["quadratic", "entropy"])
def test_calibration_on_the_cluster_gives_the_local_weights(
    client: Any, table: Table, distance: Distance
) -> None:
    age = table.collect(table.scan().select("age")).to_series().to_numpy()
    targets = Targets.of({"age": float(age.mean() + 0.2 * age.std()), "flag": 0.4})
    terms = [term_of(name, table.schema) for name in targets.names]
    here = calibrated(Partitioned.of_terms(table, terms), targets.values, distance=distance)
    there = Partitioned.of_terms(table, terms, client=client)
    assert isinstance(there.partitions, ClusterBlocks)
    found = calibrated(there, targets.values, distance=distance)
    np.testing.assert_allclose(found.weights, here.weights, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(found.achieved, targets.values, rtol=1e-9)


def test_sums_on_the_cluster_have_the_same_bytes_every_time(client: Any, table: Table) -> None:
    coded = CodedTable.of(table, FORMULA, settings=TableSettings(client=client))
    assert isinstance(coded.partitions, ClusterBlocks)
    fits = [coded.model().logistic() for _ in range(2)]
    assert coefficients(fits[0]).tobytes() == coefficients(fits[1]).tobytes()
    assert fits[0].covariance.tobytes() == fits[1].covariance.tobytes()


def test_sums_means_and_overlap_are_the_local_ones(client: Any, table: Table) -> None:
    here = CodedTable.of(table, FORMULA)
    there = CodedTable.of(table, FORMULA, settings=TableSettings(client=client))
    np.testing.assert_allclose(there.means(), here.means(), rtol=1e-12)
    beta = np.linspace(-1.0, 1.0, len(here.design.names) + 1)
    a, b = (sum_over(c.partitions, lambda block: block_sums(block, beta)[0]) for c in (here, there))
    assert a.value == pytest.approx(b.value, rel=1e-13)
    np.testing.assert_allclose(a.gradient, b.gradient, rtol=1e-11)
    np.testing.assert_allclose(a.hessian, b.hessian, rtol=1e-11)
    assert a.largest == b.largest
    model = here.model()
    near, far = overlap(here, model, threshold=0.2), overlap(there, model, threshold=0.2)
    np.testing.assert_allclose(near.smallest, far.smallest, rtol=1e-13)
    assert (near.below, near.enrolled, near.empty_cells) == (far.below, far.enrolled, ())
    assert near.estimated_size == pytest.approx(far.estimated_size, rel=1e-12)
    assert near.effective_sample_size == pytest.approx(far.effective_sample_size, rel=1e-12)


def test_values_are_combined_in_the_order_of_rows(client: Any, table: Table) -> None:
    coded = CodedTable.of(table, "age", settings=TableSettings(client=client))
    starts = coded.partitions.reduced(lambda block: [block.start], lambda a, b: a + b)
    assert starts == [0, 7_000, 14_000, 21_000, 28_000]
    assert sum_over(coded.partitions, lambda block: block.rows) == coded.partitions.rows == 30_000


def test_two_tables_on_one_cluster_do_not_mix(client: Any, table: Table, tmp_path: Path) -> None:
    other = in_parts(people(9_000, seed=1), tmp_path / "other", 3_000)
    settings = TableSettings(client=client)
    first, second = (CodedTable.of(t, FORMULA, settings=settings) for t in (table, other))
    for coded, local in ((first, table), (second, other), (first, table)):
        assert_same_fit(coded.model().logistic(), table_model(local, FORMULA).logistic())


# --- errors


@pytest.mark.parametrize("address", ["nowhere://127.0.0.1:1", "127.0.0.1", "tcp://host:port", ""])
def test_what_is_no_address_is_named_at_once(address: str) -> None:
    before = set(threading.enumerate())
    with (
        pytest.raises(InputError, match=f"No Dask scheduler answers at {address}: "),
        connected(address),
    ):
        pass
    assert set(threading.enumerate()) <= before  # no half-made client is left behind


@pytest.fixture(scope="module", autouse=True)
def silence() -> Iterator[Future[str]]:
    """Ask where nobody listens, while other tests run: giving up takes ten seconds."""
    address = "tcp://127.0.0.1:9"  # the port that discards

    def asked() -> str:
        with pytest.raises(InputError) as caught, connected(address):
            pass
        return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(asked)


def test_where_nobody_listens_is_named(silence: Future[str]) -> None:
    assert silence.result(60).startswith("No Dask scheduler answers at tcp://127.0.0.1:9: ")


def test_a_missing_value_on_a_worker_reaches_the_caller(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample does not see it: only the worker that loads the rows can."""
    monkeypatch.setattr("fedipw.selection.coded.SAMPLE_ROWS", 80)
    frame = people(9_000).with_columns(
        age=pl.when(pl.int_range(pl.len()) == 5_004).then(None).otherwise("age")
    )
    table = in_parts(frame, tmp_path / "people", 3_000)
    with pytest.raises(InputError, match=r"part-001.parquet from row 1: 'age' is missing in 1 of"):
        table_model(table, FORMULA, settings=TableSettings(client=client))
    assert_same_fit(  # and the workers are fit for more
        table_model(table, "os + flag", settings=TableSettings(client=client)).logistic(),
        table_model(table, "os + flag").logistic(),
    )


def test_a_file_damaged_after_planning_is_named_by_the_worker(client: Any, tmp_path: Path) -> None:
    def ages(part: Slice) -> Block:
        rows = rows_of(part, ["age"])
        return Block(rows.to_numpy().T.copy(), np.zeros(rows.height, np.int8), np.empty(0))

    table = in_parts(people(9_000), tmp_path / "people", 3_000)
    slices = table.slices(3_000)
    assert ClusterBlocks(client, ages, slices).rows == 9_000
    path = tmp_path / "people" / "part-001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"part-001.parquet is not a readable parquet table"):
        ClusterBlocks(client, ages, slices)


HIDING = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] == "fedipw"
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_workers_without_the_package_are_named(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could not read a single task, and the fit would wait for them without end."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with started(workers=1) as bare, connected(bare.scheduler_address) as client:
        (address,) = client.scheduler_info()["workers"]
        with pytest.raises(InputError, match=f"Dask worker {address} cannot import fedipw"):
            table_model(table, FORMULA, settings=TableSettings(client=client))


def test_separation_is_named_across_workers(client: Any, tmp_path: Path) -> None:
    frame = people(9_000)
    rare = (pl.int_range(pl.len()) % 4_000) == 17
    frame = frame.with_columns(
        os=pl.when(rare).then(pl.lit("zune")).otherwise("os"), enrolled=pl.col("enrolled") | rare
    )
    table = in_parts(frame, tmp_path / "people", 3_000)
    with pytest.raises(SeparationError) as caught:
        table_model(table, "age + os", settings=TableSettings(client=client))
    assert caught.value.columns == ("os[zune]",)


def test_no_rows_at_all_and_blocks_without_rows(client: Any, tmp_path: Path) -> None:
    settings = TableSettings(client=client, missing=Missing.DROP)
    empty = in_parts(people(3_000).clear(), tmp_path / "empty", 1)
    people(0).write_parquet(tmp_path / "empty" / "part-000.parquet")
    with pytest.raises(InputError, match="There are no rows"):
        table_model(Table(empty), "age + flag", settings=settings)
    frame = people(6_000).with_columns(
        age=pl.when(pl.int_range(pl.len()) < 2_000).then(None).otherwise("age")
    )
    table = in_parts(frame, tmp_path / "gaps", 2_000)  # nothing is left of the first part
    there = CodedTable.of(table, "age + os", settings=settings)
    here = CodedTable.of(table, "age + os", settings=TableSettings(missing=Missing.DROP))
    assert there.left_out == here.left_out == 2_000
    model = there.model()
    assert_same_fit(model.logistic(), here.model().logistic())
    near, far = overlap(here, model, cells=False), overlap(there, model, cells=False)
    np.testing.assert_allclose(near.smallest, far.smallest, rtol=1e-13)
    assert near.population == far.population == 4_000


@pytest.mark.parametrize("missing", [Missing.ERROR, Missing.DROP])
def test_cross_fitting_on_the_cluster_gives_the_local_probabilities(
    client: Any, tmp_path: Path, missing: Missing
) -> None:
    """Each client is asked of the model of its fold, also where rows before it were left out."""
    frame = people(9_000)
    if missing is Missing.DROP:
        frame = frame.with_columns(
            age=pl.when(pl.int_range(pl.len()) % 7 == 3).then(None).otherwise("age")
        )
    table = in_parts(frame, tmp_path / "people", 2_000)
    how = Classifier(GaussianNB(), folds=3)
    here, there = (
        enrollment_stage(
            Population(table),
            "age + flag",
            settings=TableSettings(missing=missing, estimator=how, client=workers),
        )
        for workers in (None, client)
    )
    present = np.ones(here.members.size, dtype=np.bool_)
    near, far = (stage.fitted(present, required=True) for stage in (here, there))
    np.testing.assert_array_equal(near.known, far.known)
    np.testing.assert_allclose(far.prob[far.known], near.prob[near.known], rtol=1e-12)
    assert here.size == there.size
    assert near.model is not None
    assert far.model is not None
    one, two = here.overlap(near.model, 0.2), there.overlap(far.model, 0.2)
    assert one is not None
    assert two is not None
    assert one.below == two.below
    np.testing.assert_allclose(two.smallest, one.smallest, rtol=1e-12)


def test_enrollment_while_some_have_left_is_fitted_on_the_cluster(
    client: Any, table: Table
) -> None:
    here, there = (
        enrollment_stage(Population(table), FORMULA, settings=TableSettings(client=workers))
        for workers in (None, client)
    )
    present = np.arange(here.members.size) % 3 > 0
    near, far = (stage.fitted(present, required=True) for stage in (here, there))
    np.testing.assert_allclose(far.prob, near.prob, rtol=1e-10)


# --- a lost worker; last, for the cluster is not what it was


class _Slow:
    """A pass over blocks that takes its time, so that a kill falls into the middle of a fit."""

    def __init__(self, inner: ClusterBlocks) -> None:
        self.inner, self.rows, self.passes = inner, inner.rows, 0

    def reduced(self, function: Any, combine: Any) -> Any:
        def slowly(block: Block) -> Any:
            time.sleep(0.05)
            return function(block)

        found = self.inner.reduced(slowly, combine)
        self.passes += 1
        return found


def test_a_worker_killed_in_the_middle_of_a_fit_changes_nothing(client: Any, table: Table) -> None:
    coded = CodedTable.of(table, FORMULA, settings=TableSettings(client=client))
    assert isinstance(coded.partitions, ClusterBlocks)
    before = set(client.run(os.getpid).values())
    assert len(before) == 2
    slow = _Slow(coded.partitions)
    killed_after: list[int] = []

    def kill() -> None:
        while slow.passes < 2:  # passes are under way
            time.sleep(0.005)
        os.kill(min(before), signal.SIGKILL)
        killed_after.append(slow.passes)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    fit = logistic_fit(slow, coded.design.names, frame=coded.frame).checked()
    total = slow.passes
    killer.join()
    assert killed_after[0] < total  # the fit was not over: passes came after the kill
    assert_same_fit(fit, table_model(table, FORMULA).logistic())
    client.wait_for_workers(2, timeout=30)
    after = set(client.run(os.getpid).values())
    assert min(before) not in after
    assert_same_fit(coded.model().logistic(), fit)  # what was lost has been loaded again
