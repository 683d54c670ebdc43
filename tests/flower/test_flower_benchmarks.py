"""The benchmarks of the default method on Flower, run small, and its kernel by a plain loop."""

from typing import Any

import numpy as np
import pytest
from benchmarks import memory_store, round_time
from benchmarks.augmented import Size, measured
from benchmarks.network import METHODS, World, run, summary

from fedipw.combining.regression import UpdateRegression
from fedipw.flower.augmentation import _added
from fedipw.selection.participation import Source
from fedipw.weighting.weigher import ClientNumbers, EnrollmentState, RoundWeights

ROUNDS = 3


def test_a_network_with_few_replies() -> None:
    world = World(seed=0, size=1_000, rate=0.1, replies=20.0)
    lines = [run(world, method, rounds=ROUNDS) for method in METHODS]
    assert len({line["averaged"] for line in lines[1:]}) == len(METHODS) - 1
    assert [line["name"] for line in lines[-2:]] == ["augmented", "augmented-online"]
    for line in summary(lines):
        assert 0.1 < line["last_ten"] < 1.0, line
        assert line["worst_round"] <= line["last_ten"] + 0.1


def test_time_and_memory_of_a_regression() -> None:
    size = Size(parameters=20_000, replies=30, rounds=8, enrolled=150, population=400)
    found = measured(size)
    assert found["moments"] == 10
    assert found["ratio"] > found["ratio_without_checkpoint"] > 0.0
    assert found["seconds"]["fedipw"] > found["seconds"]["regression"] > 0.0


def test_time_of_a_whole_round() -> None:
    size = Size(parameters=2_000, replies=10, rounds=5, enrolled=60, population=150, covariates=2)
    found = round_time.measured(size)
    assert (found["method"], found["rounds"]) == ("augmented", 3)
    seconds = found["seconds"]
    assert seconds["fedipw"] > seconds["regression"] > 0.0
    assert found["ratio"] > 0.0


def test_time_of_rounds_by_their_number() -> None:
    size = Size(parameters=10, replies=5, enrolled=30, population=80, covariates=2)
    found = round_time.growth((3, 6), size, last=3)
    assert list(found) == ["3", "6"]
    for seconds in found.values():
        assert 0.0 < seconds["configure_train"] <= seconds["configure_train_largest"]
        assert 0.0 < seconds["aggregate_train"] <= seconds["aggregate_train_largest"]


def test_time_memory_and_disk_of_a_memory_of_clients() -> None:
    """Beside pieces of vectors and small objects of each reply, no more than the models' sums."""
    size = Size(parameters=1_000_000, replies=10, rounds=8, enrolled=30, population=100)
    found = memory_store.measured(size)
    assert found["disk"]["clients"] == 30
    assert found["disk"]["bytes"] == 30 * (4_000_000 + 128) + 8_000_000 + 128
    assert found["disk"]["bytes"] <= found["disk"]["told_bytes"]
    assert "30 clients x 4.0 MB = up to 136.0 MB" in found["told"]
    # what is seen beyond FedAvg is the average of the last models, two copies, less its own noise
    assert 1.0 < found["model_copies"]["beyond_fedavg"] <= found["model_copies"]["wanted"]
    assert "10 of 30 clients" in memory_store.table(found)


@pytest.mark.parametrize("shift", [0, 1])  # bytes by which replies are not aligned
@pytest.mark.parametrize(("kept", "sent"), [("f4", "f4"), ("f8", "f8"), ("f4", "f8"), ("f2", "f2")])
@pytest.mark.parametrize(("size", "replies"), [(1, 1), (513, 8), (16_385, 33), (40_001, 70)])
def test_sums_of_updates_by_a_plain_loop(
    kept: str, sent: str, size: int, replies: int, shift: int
) -> None:
    rng: Any = np.random.default_rng(size)
    model = rng.standard_normal(size).astype(kept)
    bytes_ = [(model + 0.1 * rng.standard_normal(size)).astype(sent).tobytes()
              for _ in range(replies)]  # fmt: skip
    models = [np.frombuffer(b"x" * shift + one, dtype=sent, offset=shift) for one in bytes_]
    rule = UpdateRegression(size, moments=3, dtype="f8" if kept == "f8" else "f4")
    dtype, v = rule.cross.dtype, np.full(replies, 1.0 / replies)
    ids = np.arange(replies)
    state = EnrollmentState(unit_ids=ids, sample_counts=ids + 1, enrolled=ids >= 0, prob=v,
                            population_size=float(replies))  # fmt: skip
    given = RoundWeights(replies=state.replies(1, ids, v, Source.KNOWN), weights=v, raw=v, within=v,
                         clients=ClientNumbers(replies, replies, replies))  # fmt: skip
    here = rule.round(given, rng.standard_normal((replies, 3)), np.zeros(3))
    _added(here, 0, here.weights, models, model)
    expected = np.zeros((4, size))
    for weights, one in zip(here.weights.T, models, strict=True):
        update = one.astype(dtype) - model.astype(dtype)
        expected += np.outer(weights, update.astype(np.float64))
    # each of (replies) terms is rounded, and so are their sums
    scale = np.abs(here.weights).sum(axis=1, keepdims=True)
    error = np.abs(rule.cross - expected) / scale
    assert error.max() < 4.0 * np.finfo(dtype).eps
