"""Bad replies are recorded and left out; one client moves the model by so much and no more."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedAvgM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedipw.errors import DivergedError, InputError
from fedipw.flower import FedIPW, Screen

from .federations import INSIDE, Behaviour, LabFederation, Small, answered, theta


def metrics(**more: Any) -> MetricRecord:
    return MetricRecord({"num-examples": 10, "loss": 0.5, **more})


def content(message: Message, **records: Any) -> Message:
    return Message(RecordDict(records), reply_to=message)


def good(message: Message) -> ArrayRecord:
    return ArrayRecord({"theta": Array(theta(message) + 1.0)})


def bytes_of(array: Any, data: bytes) -> Array:
    made = Array(np.asarray(array))
    made.data = data
    return made


def header_of(array: Any, other: Any) -> bytes:
    """Return the bytes of an array behind the header of another."""
    a, b = Array(np.asarray(array)).data, Array(np.asarray(other)).data
    return b[: len(b) - np.asarray(other).nbytes] + a[len(a) - np.asarray(array).nbytes :]


BAD: dict[str, tuple[Callable[[Message], Message], str]] = {
    "NaN": (lambda m: answered(m, {"theta": [1.0, np.nan, 1.0]}, loss=0.5), "NaN or infinite"),
    "infinite": (lambda m: answered(m, {"theta": [1.0, 2.0, -np.inf]}, loss=0.5), "NaN or inf"),
    "overflow": (lambda m: answered(m, {"theta": [1e200, 0.0, 0.0]}, loss=0.5), "NaN or infinite"),
    "absurd": (lambda m: answered(m, {"theta": [1e9, 0.0, 0.0]}, loss=0.5), "norm 1e+09"),
    "keys": (lambda m: answered(m, {"beta": np.ones(3)}, loss=0.5), "keys other than"),
    "more keys": (
        lambda m: answered(m, {"theta": np.ones(3), "b": np.ones(1)}, loss=0.5), "keys other than",
    ),
    "shape": (lambda m: answered(m, {"theta": np.ones(4)}, loss=0.5), "shape (4,), not (3,)"),
    "turned": (lambda m: answered(m, {"theta": np.ones((3, 1))}, loss=0.5), "shape (3, 1)"),
    "whole numbers": (lambda m: answered(m, {"theta": np.ones(3, int)}, loss=0.5), "is int64"),
    "no arrays": (lambda m: content(m, metrics=metrics()), "0 array records"),
    "two records": (
        lambda m: content(m, arrays=good(m), more=good(m), metrics=metrics()), "2 array records",
    ),
    "no metrics": (lambda m: content(m, arrays=good(m)), "0 metric records"),
    "two metric records": (
        lambda m: content(m, arrays=good(m), metrics=metrics(), more=metrics()), "2 metric records",
    ),
    "other names": (lambda m: content(m, weights=good(m), metrics=metrics()), "other than those"),
    "other metrics": (
        lambda m: content(m, arrays=good(m), metrics=metrics(age=3)), "other than those of most",
    ),
    "a list": (
        lambda m: content(m, arrays=good(m), metrics=metrics(loss=[0.5])), "other than those",
    ),
    "cut off": (
        lambda m: content(
            m, arrays=ArrayRecord({"theta": bytes_of(np.ones(3), Array(np.ones(3)).data[:-3])}),
            metrics=metrics(),
        ),
        "'theta' cannot be read",
    ),
    "no array": (
        lambda m: content(
            m, arrays=ArrayRecord({"theta": bytes_of(np.ones(3), b"\x93NUMPY\x01")}),
            metrics=metrics(),
        ),
        "'theta' cannot be read",
    ),
    "another header": (
        lambda m: content(
            m, arrays=ArrayRecord({"theta": bytes_of(np.ones(3), header_of(np.ones(3), "abc"))}),
            metrics=metrics(),
        ),
        "'theta' cannot be read",
    ),
    "another kind": (
        lambda m: content(
            m, arrays=ArrayRecord({"theta": Array("float64", (3,), "torch", b"123")}),
            metrics=metrics(),
        ),
        "'theta' cannot be read",
    ),
    "nothing": (lambda m: content(m, config=ConfigRecord({"a": 1})), "0 array records"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_recorded_and_left_out(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    reply, words = BAD[name]
    small = Small(tmp_path, {3: lambda message, _: reply(message)})
    with caplog.at_level(logging.WARNING, "flwr"):
        result = small.trained(scheme="fedavg")
    row = small.round()["u3"]
    assert (row["invited"], row["replied"]) == (True, False)
    assert row["fate"].startswith("refused: ")
    assert words in row["fate"]
    assert sum(r["replied"] for r in small.round().values()) == INSIDE - 1
    np.testing.assert_allclose(result.arrays["theta"].numpy(), 1.0)  # the others' mean
    assert result.train_metrics_clientapp[1]["fedipw-refused"] == 1
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(0.5)
    assert any("is refused" in record.message for record in caplog.records)


def test_a_reply_of_another_precision_counts(tmp_path: Path) -> None:
    small = Small(
        tmp_path, {3: lambda m, _: answered(m, {"theta": np.ones(3, np.float32)}, loss=0.5)}
    )
    np.testing.assert_allclose(small.trained(scheme="fedavg").arrays["theta"].numpy(), 1.0)
    assert small.round()["u3"]["fate"] == "replied"


def test_a_round_of_bad_replies_leaves_the_model_alone(tmp_path: Path) -> None:
    small = Small(tmp_path, dict.fromkeys(range(INSIDE), lambda m, _: BAD["NaN"][0](m)))
    result = small.trained(rounds=2)
    np.testing.assert_array_equal(result.arrays["theta"].numpy(), 0.0)
    assert {row["fate"] for row in small.round(2).values()} == {"refused: NaN or infinite values"}
    assert result.train_metrics_clientapp[2]["fedipw-weighed"] == 0


def test_a_model_that_runs_away_stops_the_run_before_the_round_counts(tmp_path: Path) -> None:
    far = np.full(3, 3e38, np.float32)
    behaviours = dict.fromkeys(range(INSIDE), lambda m, _: answered(m, {"theta": far}, loss=0.5))
    small = Small(tmp_path, behaviours)
    small.start = ArrayRecord({"theta": Array(np.zeros(3, np.float32))})
    inner = FedAvgM(server_learning_rate=3.0, fraction_evaluate=0.0, min_available_nodes=1)
    with np.errstate(over="ignore"), pytest.raises(DivergedError):
        small.trained(1, inner, screen=Screen(max_norm=1e40), scheme="fedavg")
    assert not (tmp_path / "ledger" / "round-000001.parquet").exists()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    update=st.lists(st.floats(-1e5, 1e5), min_size=3, max_size=3),
    clip=st.floats(1e-3, 1e3),
    scheme=st.sampled_from(["fedipw", "fedipw-hajek", "participation-only"]),
)
def test_no_client_moves_the_model_by_more_than_its_weight_times_the_clip(
    tmp_path_factory: pytest.TempPathFactory, update: list[float], clip: float, scheme: str
) -> None:
    moves, bounds = [], []

    def moving(by: Any) -> Behaviour:
        return lambda m, _: answered(m, {"theta": theta(m) + by}, loss=0.5)

    for mine in (np.array(update), np.zeros(3)):
        small = Small(tmp_path_factory.mktemp("w"), {0: moving(mine)})
        result = small.trained(screen=Screen(clip=clip), scheme=scheme)
        moves.append(result.arrays["theta"].numpy())
        told = result.train_metrics_clientapp[1]
        bounds.append(told["fedipw-influence"])
        assert told["fedipw-influence"] == pytest.approx(clip * told["fedipw-weight-largest"])
    apart = float(np.linalg.norm(moves[0] - moves[1]))
    assert apart <= bounds[0] * (1.0 + 1e-9) + 1e-9


def test_clipping_keeps_short_updates_and_metrics_as_they_are(tmp_path: Path) -> None:
    long = {k: lambda m, _: answered(m, {"theta": theta(m) + 100.0}, loss=9.0) for k in (0, 1)}
    (tmp_path / "a").mkdir()
    small = Small(tmp_path / "a", long)
    result = small.trained(screen=Screen(clip=2.0), scheme="fedavg")
    short, cut = 1.0, 2.0 / np.sqrt(3.0)
    expected = (2 * cut + (INSIDE - 2) * short) / INSIDE
    np.testing.assert_allclose(result.arrays["theta"].numpy(), expected)
    told = result.train_metrics_clientapp[1]
    assert told["fedipw-clipped"] == 2
    assert told["loss"] == pytest.approx((2 * 9.0 + (INSIDE - 2) * 0.5) / INSIDE)


def test_the_bound_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = Small(tmp_path)
    with caplog.at_level(logging.INFO, "flwr"):
        small.trained(screen=Screen(clip=2.0))
    told = [r.getMessage() for r in caplog.records if "no client moves" in r.getMessage()]
    assert len(told) == 1
    assert "2 x max w" in told[0]


LATER, SHARES, FACTOR = "known when a round closes", "since weights are shares", "e / (part"
BOUNDS = {
    "fedavg": SHARES,
    "fedipw": FACTOR,
    "fedipw-hajek": SHARES,
    "participation-only": FACTOR,
    "greg": LATER,
    "greg-hajek": LATER,
    "greg-nonnegative": ", and at least 0.7;",
    "greg-nonnegative-hajek": SHARES,
    "calibrated-quadratic": FACTOR,
    "calibrated-quadratic-hajek": SHARES,
    "calibrated-linear": FACTOR,
    "calibrated-linear-hajek": LATER,
    "calibrated-linear-hajek, guard=trim(3)": LATER,
}
LIMITS = re.compile(r"(?:x max w <= |, and at least )([0-9.e+-]+)")
OVER = re.compile(r"so ([0-9.e+-]+) over that probability")


@pytest.mark.parametrize("scheme", BOUNDS)
def test_no_round_exceeds_the_bound_printed_at_the_start(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, clip = LabFederation(seed=3, size=200, rounds=5), 0.7
    strategy = FedIPW(
        FedAvg(fraction_train=0.8, fraction_evaluate=0.0, min_available_nodes=1),
        population=world.put(tmp_path), ledger=tmp_path / "ledger", covariates=world.columns,
        scheme=scheme, screen=Screen(clip=clip),
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "flwr"):
        result = strategy.start(world.grid(), world.start, num_rounds=world.rounds)
    (line,) = (r.getMessage() for r in caplog.records if "no client moves" in r.getMessage())
    assert BOUNDS[scheme] in line
    limit, over = LIMITS.search(line), OVER.search(line)
    assert (limit is None and over is None) == (BOUNDS[scheme] == LATER)
    rounds: dict[int, Any] = dict(result.train_metrics_clientapp)
    for found in rounds.values():
        assert found["fedipw-influence"] == clip * found["fedipw-weight-largest"] > 0.0
        bound = 0.0 if BOUNDS[scheme] != LATER else np.inf
        if limit is not None:
            bound = float(limit[1])
        if over is not None:
            bound = max(bound, float(over[1]) / found["fedipw-participation-smallest"])
        assert found["fedipw-influence"] <= bound * (1.0 + 1e-9)


@pytest.mark.parametrize("bad", [{"clip": 0.0}, {"clip": -1.0}, {"max_norm": float("nan")}])
def test_limits_must_be_positive(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Screen(**bad)
