"""Augmented aggregation on a server: state, types, changed enrollment, and a client that lies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, Strategy

from fedipw.audit.training import recorded_reliance
from fedipw.errors import InputError
from fedipw.flower import declined
from fedipw.numerics import FloatArray
from fedipw.tables.ledger import Ledger

from .federations import INSIDE, Behaviour, Small, answered, theta

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
INNER: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**QUIET),
    "FedAdam": lambda: FedAdam(eta=0.1, **QUIET),
}
LEARNING = ("calibrated-online", "augmented", "augmented-online")
REGRESSING = ("augmented", "augmented-online")
ROUNDS = 8


def goal(k: int) -> FloatArray:
    """Return the model that client k wants."""
    return np.array([0.1 * k - 0.5, np.cos(k), (0.2 * k - 1.0) ** 2])


def busy(k: int, index: int) -> bool:
    """Return whether client k declines a round: some always reply, others in some rounds."""
    return (3 * k + 5 * index) % 7 < k % 4


def pulled(k: int) -> Behaviour:
    """Return a client that moves the model a third of the way to its own, when it replies."""

    def reply(message: Message, index: int) -> Message:
        if busy(k, index):
            return declined(message, "busy")
        model = theta(message)
        return answered(message, {"theta": model + ((goal(k) - model) / 3.0).astype(model.dtype)})

    return reply


def made(where: Path, name: str, dtype: Any = np.float64) -> Small:
    (where / name).mkdir()
    small = Small(where / name, {k: pulled(k) for k in range(INSIDE)})
    small.start = ArrayRecord({"theta": Array(np.zeros(3, dtype=dtype))})
    return small


def bytes_of(result: Any) -> bytes:
    found: bytes = result.arrays["theta"].numpy().tobytes()
    return found


@pytest.mark.parametrize(
    ("scheme", "inner"), [*((scheme, "FedAvg") for scheme in LEARNING), ("augmented", "FedAdam")]
)
def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path, scheme: str, inner: str) -> None:
    whole = made(tmp_path, "whole").trained(ROUNDS, INNER[inner](), scheme=scheme)
    parts = made(tmp_path, "parts")
    for rounds in (1, 4, ROUNDS):
        resumed = parts.trained(rounds, INNER[inner](), scheme=scheme)
    assert bytes_of(resumed) == bytes_of(whole)
    for index in range(1, ROUNDS + 1):
        one, two = (r.train_metrics_clientapp[index]["fedipw-weights"] for r in (whole, resumed))
        assert one == two


@pytest.mark.parametrize("scheme", REGRESSING)
def test_the_correction_moves_the_model_and_not_the_weights(tmp_path: Path, scheme: str) -> None:
    with_it = made(tmp_path, "with").trained(ROUNDS, scheme=f"{scheme}, augmentation=regression")
    without = made(tmp_path, "without").trained(ROUNDS, scheme=f"{scheme}, augmentation=none")
    for index in range(1, ROUNDS + 1):
        one, two = (r.train_metrics_clientapp[index]["fedipw-weights"] for r in (with_it, without))
        assert one == two
    apart = with_it.arrays["theta"].numpy() - without.arrays["theta"].numpy()
    assert np.abs(apart).max() > 1e-3  # so a lost regression shows in the bytes of the other tests


@pytest.mark.parametrize("scheme", REGRESSING)
def test_float32_models_keep_float32_state_near_the_float64_run(
    tmp_path: Path, scheme: str
) -> None:
    """Updates of order 1 in float32 over 8 rounds err by some 1e-6; 1e-4 is far above that."""
    found = {}
    for dtype in (np.float32, np.float64):
        small = made(tmp_path, np.dtype(dtype).name, dtype)
        strategy = small.strategy(scheme=scheme)
        result = strategy.start(small.grid, small.start, num_rounds=ROUNDS)
        assert strategy.augmenter is not None
        state = strategy.augmenter.state()["rule"]
        assert state["cross"][0].dtype == dtype
        assert state["gram"].dtype == np.float64
        found[dtype] = result.arrays["theta"].numpy()
        assert found[dtype].dtype == dtype
    np.testing.assert_allclose(found[np.float32], found[np.float64], rtol=0.0, atol=1e-4)
    assert not np.array_equal(found[np.float32], found[np.float64])


def test_half_precision_models_are_regressed_in_single_precision(tmp_path: Path) -> None:
    small = made(tmp_path, "half", np.float16)
    strategy = small.strategy(scheme="augmented")
    result = strategy.start(small.grid, small.start, num_rounds=3)
    assert strategy.augmenter is not None
    assert strategy.augmenter.state()["rule"]["cross"][0].dtype == np.float32
    assert np.isfinite(result.arrays["theta"].numpy()).all()


def counting(k: int) -> Behaviour:
    """Return a client that also counts, in an array of integers."""

    def reply(message: Message, index: int) -> Message:
        if busy(k, index):
            return declined(message, "busy")
        seen, model = message.content.array_records["arrays"]["seen"].numpy(), theta(message)
        counted = seen + np.array([k, 1], seen.dtype)
        return answered(message, {"seen": counted, "theta": model + (goal(k) - model) / 3.0})

    return reply


@pytest.mark.parametrize("stop", [1, 5])
def test_integer_arrays_are_left_alone_by_the_correction(tmp_path: Path, stop: int) -> None:
    """They are averaged by shares of the weights, in every round and after a restart."""
    alone, both = made(tmp_path, "alone"), made(tmp_path, "both")
    both.behaviours = {k: counting(k) for k in range(INSIDE)}
    both.start = ArrayRecord(
        {"seen": Array(np.array([0, 0])), "theta": Array(np.zeros(3))}
    )  # the integers first, so that parameters after them would shift
    both.trained(stop, scheme="augmented")
    result, plain = (small.trained(5, scheme="augmented") for small in (both, alone))
    assert bytes_of(result) == bytes_of(plain)
    expected = np.zeros(2)
    for index in range(1, 6):
        weights = np.maximum(result.train_metrics_clientapp[index]["fedipw-weights"], 0.0)
        replied = [k for k in range(INSIDE) if not busy(k, index)]
        clients = zip(_in_order(both, replied), weights, strict=True)
        step = sum(weight * np.array([k, 1.0]) for k, weight in clients) / weights.sum()
        expected = np.rint(expected + step)
    np.testing.assert_array_equal(result.arrays["seen"].numpy(), expected)


def _in_order(small: Small, clients: list[int]) -> list[int]:
    """Return clients in the order of the ledger's rows, which is that of the weights."""
    rows = [int(str(unit)[1:]) for unit in small.round()]
    return [k for k in rows if k in clients]


def test_a_model_without_floating_point_arrays_is_refused(tmp_path: Path) -> None:
    def whole(message: Message, index: int) -> Message:
        return answered(message, {"theta": theta(message) + index})

    small = Small(tmp_path, dict.fromkeys(range(INSIDE), whole))
    small.start = ArrayRecord({"theta": Array(np.zeros(3, dtype=np.int64))})
    with pytest.raises(InputError, match="no array of the model is floating-point"):
        small.trained(1, scheme="augmented")


def growing(where: Path, name: str) -> Small:
    """Return a federation in which eight more enroll in round 4, enough for a square of age."""
    small = made(where, name)
    row = pl.int_range(pl.len())
    since = pl.when(row < INSIDE).then(1).when(row < INSIDE + 8).then(4)
    people = small.people.with_columns(enrolled=row < INSIDE + 8, enrolled_from=since)
    people.write_parquet(small.where / "people.parquet")
    return small


@pytest.mark.parametrize("scheme", REGRESSING)
def test_a_run_goes_on_when_enrollment_changes_and_keeps_its_columns(
    tmp_path: Path, scheme: str
) -> None:
    whole, parts = growing(tmp_path, "whole"), growing(tmp_path, "parts")
    first = whole.strategy(scheme=scheme)
    first.start(whole.grid, whole.start, num_rounds=3)
    assert first.augmenter is not None
    before = first.augmenter.state()
    second = whole.strategy(scheme=scheme)
    second.start(whole.grid, whole.start, num_rounds=4)
    assert second.augmenter is not None
    after = second.augmenter.state()
    assert before["names"] == after["names"]  # the map counts all that are ever enrolled
    assert after["scale"][0] == before["scale"][0]  # what was learnt stays in its units
    # replies remembered: earlier rounds count .99 as much
    replied = sum(row["replied"] for row in whole.round(4).values())
    total = 0.99 * before["rule"]["sizes"][0] + replied
    assert after["rule"]["sizes"][0] == pytest.approx(total, rel=1e-12)
    result = parts.trained(ROUNDS, scheme=scheme)
    assert bytes_of(whole.trained(ROUNDS, scheme=scheme)) == bytes_of(result)


LIAR, FACTOR, LATE = 5, 100.0, 6


def lying(sent: FloatArray) -> Behaviour:
    """Return client LIAR, which in the last round sends an update of its own making."""

    def reply(message: Message, index: int) -> Message:
        if index == LATE:
            return answered(message, {"theta": theta(message) + sent})
        return pulled(LIAR)(message, index)

    return reply


def test_a_liar_moves_a_round_by_no_more_than_its_share(tmp_path: Path) -> None:
    """It sends an update 100 times as long, and is the only one like the clients outside.

    The same run with an update of zero in its place tells what the update did.
    """
    moved, weights, lie = {}, {}, FACTOR * np.array([0.6, -0.8, 0.0])
    for name, scheme, sent in (
        ("lie", "augmented", lie),
        ("nothing", "augmented", np.zeros(3)),
        ("unguarded", "augmented, guard=none", np.zeros(3)),
    ):
        small = made(tmp_path, name)
        age = (
            pl.when(pl.int_range(pl.len()) < INSIDE)
            .then("age")
            .otherwise(2.7 + 0.1 * pl.col("age"))
        )
        alone = pl.when(unit_id=f"u{LIAR}").then(3.0).otherwise(age)
        small.people.with_columns(age=alone).write_parquet(small.where / "people.parquet")
        small.behaviours[LIAR] = lying(sent)
        before = small.trained(LATE - 1, scheme=scheme)
        after = small.trained(LATE, scheme=scheme)
        moved[name] = after.arrays["theta"].numpy() - before.arrays["theta"].numpy()
        replied = [k for k in range(INSIDE) if k == LIAR or not busy(k, LATE)]
        place = _in_order(small, replied).index(LIAR)
        weights[name] = after.train_metrics_clientapp[LATE]["fedipw-weights"][place]
    share = max(0.1, 5.0 / len(replied))
    assert share < 0.6 < weights["unguarded"]
    assert weights["lie"] == pytest.approx(share, rel=1e-12)
    influence = float(np.linalg.norm(moved["lie"] - moved["nothing"]))
    assert 0.0 < influence <= share * float(np.linalg.norm(lie)) * (1.0 + 1e-12)
    longest = max(float(np.linalg.norm(goal(k) / 3.0)) for k in range(INSIDE))
    assert np.linalg.norm(lie) > FACTOR * longest


def test_the_reliance_of_every_round_is_told_and_an_audit_finds_it(tmp_path: Path) -> None:
    small = made(tmp_path, "told")
    result = small.trained(ROUNDS, scheme="augmented")
    told = {
        index: float(result.train_metrics_clientapp[index]["fedipw-reliance"])
        for index in range(1, ROUNDS + 1)
    }
    assert told[1] == 1.0  # nothing was learnt before
    assert all(0.0 <= value <= 1.0 for value in told.values())
    assert min(told.values()) < 1.0
    assert recorded_reliance(Ledger(small.where / "ledger")) == told
    plain = made(tmp_path, "plain").trained(2, scheme="fedipw-hajek")
    assert plain.train_metrics_clientapp[2]["fedipw-reliance"] == 1.0
