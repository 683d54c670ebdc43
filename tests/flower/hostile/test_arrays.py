"""Attacks by arrays and metrics: the run goes on, the model moves within the bound."""

import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedipw.flower import Screen, strategy

from ..federations import INSIDE, Behaviour, Small

MODEL: dict[str, Any] = {
    "theta": np.zeros(3, dtype=np.float32),
    "bn.running_mean": np.zeros(2, dtype=np.float32),
    "bn.running_var": np.ones(2, dtype=np.float32),
    "bn.num_batches_tracked": np.array(100, dtype=np.int64),
}
Made = Callable[[dict[str, Array]], None]  # changes the arrays of an honest reply


def single(values: list[float]) -> Any:
    return np.array(values, dtype=np.float32)


def honest(message: Message) -> dict[str, Array]:
    """Return what honest clients send: every array moves a little."""
    arrays = {k: v.numpy() for k, v in message.content.array_records["arrays"].items()}
    arrays["theta"] += np.float32(1.0)
    arrays["bn.running_mean"] += np.float32(0.25)
    arrays["bn.running_var"] += np.float32(0.5)
    return {k: Array(np.asarray(v + 4 if v.dtype.kind == "i" else v)) for k, v in arrays.items()}


def reply(message: Message, arrays: dict[str, Array], **metrics: Any) -> Message:
    told = MetricRecord({"num-examples": 10, "loss": 0.5, **metrics})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": told}), reply_to=message)


def sending(change: Made) -> Behaviour:
    def behaviour(message: Message, index: int) -> Message:
        del index
        arrays = honest(message)
        content = reply(message, arrays)
        record = content.content.array_records["arrays"]
        for key, array in record.items():
            arrays[key] = array
        change(arrays)
        for key, array in arrays.items():
            record[key] = array
        return content

    return behaviour


def federation(where: Path, attackers: dict[int, Behaviour]) -> Small:
    small = Small(where)
    small.start = ArrayRecord({key: Array(value) for key, value in MODEL.items()})
    small.behaviours = dict.fromkeys(range(INSIDE), sending(lambda _: None))
    small.behaviours |= attackers
    return small


def arrays_of(result: Any) -> dict[str, Any]:
    return {key: array.numpy() for key, array in result.arrays.items()}


def with_header(text: str, data: bytes = bytes(12), version: int = 1) -> bytes:
    """Return bytes of an array whose header is this text."""
    raw = text.encode() + b"\n"
    length = struct.pack("<H", len(raw)) if version == 1 else struct.pack("<I", len(raw))
    return b"\x93NUMPY" + bytes([version, 0]) + length + raw + data


def header(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


def bytes_are(data: bytes) -> Made:
    def change(arrays: dict[str, Array]) -> None:
        arrays["theta"].data = data

    return change


def array_is(key: str, value: Any) -> Made:
    def change(arrays: dict[str, Array]) -> None:
        arrays[key] = Array(np.asarray(value))

    return change


UNREADABLE: dict[str, bytes] = {
    "true as a size": with_header(header("(True, 3)")),
    "minus signs": with_header(header("(" + "-" * 9_000 + "3,)")),
    "brackets": with_header(header("(" + "(" * 3_000 + "3" + ")" * 3_000 + ",)")),
    "larger than its bytes": with_header(header("(4,)")),
    "a thousand billion": with_header(header("(1000000000000,)")),
    "huge": with_header(header("(" + "9" * 4_000 + ",)")),
    "product": with_header(header("(4294967296, 4294967296, 4294967296)")),
    "negative": with_header(header("(-1,)")),
    "negative pair": with_header(header("(-1, -3)")),
    "a power": with_header(header("(3**9**9,)")),
    "floating": with_header(header("(3.0,)")),
    "no tuple": with_header(header("None")),
    "objects": with_header(header("(3,)", "'|O'"), bytes(24)),
    "fields": with_header(header("(3,)", "[('a', '<f4')]")),
    "unknown type": with_header(header("(3,)", "'<q9'")),
    "no type": with_header(header("(3,)", "''")),
    "code": with_header("__import__('os').abort()"),
    "not closed": with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,"),
    "nothing": b"",
    "magic alone": b"\x93NUMPY",
    "another version": with_header(header("(3,)"), version=1).replace(b"\x01\x00", b"\x09\x00", 1),
    "a header beyond the end": b"\x93NUMPY\x01\x00\xff\xff" + bytes(30),
    "a long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + bytes(30),
    "many sizes": with_header(header("(" + "1, " * 70 + "3)")),
}
BAD: dict[str, tuple[Made, str]] = {
    **{name: (bytes_are(data), "'theta' cannot be read") for name, data in UNREADABLE.items()},
    "no bytes": (lambda a: setattr(a["theta"], "data", None), "Error while it was read"),
    "a number": (lambda a: setattr(a["theta"], "data", 7), "Error while it was read"),
    "beyond the type": (array_is("theta", [1e300, 0.0, 0.0]), "beyond float32"),
    "NaN buffer": (array_is("bn.running_var", single([1, np.nan])), "NaN or infinite"),
    "infinite buffer": (array_is("bn.running_mean", single([1, np.inf])), "NaN or infinite"),
    "negative variance": (array_is("bn.running_var", single([1, -1])), "is negative"),
    "negative counter": (array_is("bn.num_batches_tracked", -1), "is negative"),
    "buffer's shape": (array_is("bn.running_var", np.ones(3, np.float32)), "shape (3,)"),
    "counter's type": (array_is("bn.num_batches_tracked", np.int32(100)), "is int32, not int64"),
    "floating counter": (array_is("bn.num_batches_tracked", 104.0), "is float64, not int64"),
    "whole variance": (array_is("bn.running_var", np.ones(2, np.int64)), "is int64, not float32"),
}


def batches(names: list[str], size: int = 4) -> list[list[str]]:
    return [names[k : k + size] for k in range(0, len(names), size)]


@pytest.mark.parametrize("names", batches(list(BAD)), ids=lambda names: names[0])
def test_replies_that_cannot_be_used_are_refused_and_the_run_goes_on(
    tmp_path: Path, names: list[str]
) -> None:
    """Four attackers of twelve clients, in both rounds: the model is that of the others."""
    small = federation(tmp_path, {k: sending(BAD[name][0]) for k, name in enumerate(names)})
    result = small.trained(2, scheme="fedavg", average=None)
    for index in (1, 2):
        rows = small.round(index)
        for k, name in enumerate(names):
            assert rows[f"u{k}"]["fate"].startswith("refused: "), name
            assert BAD[name][1] in rows[f"u{k}"]["fate"], name
            assert len(rows[f"u{k}"]["fate"]) < 200
        assert sum(row["replied"] for row in rows.values()) == INSIDE - len(names)
    model = arrays_of(result)
    np.testing.assert_allclose(model["theta"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(model["bn.running_var"], 2.0, rtol=1e-6)
    assert model["bn.num_batches_tracked"] == 108


LIES: dict[str, tuple[str, Any]] = {
    "variance": ("bn.running_var", single([1e18, 0.0])),
    "mean": ("bn.running_mean", single([-1e12, 1e12])),
    "counter": ("bn.num_batches_tracked", np.int64(2**62)),
}


@pytest.mark.parametrize("scheme", ["fedavg", "fedipw", "augmented", "fedvarp+fedipw"])
@pytest.mark.parametrize("name", LIES)
def test_one_client_moves_a_buffer_by_its_share_of_ten_median_distances(
    tmp_path: Path, name: str, scheme: str
) -> None:
    key, lie = LIES[name]
    made = []
    for folder, value in (("honest", None), ("lying", lie)):
        (tmp_path / folder).mkdir()
        change: Made = (lambda _: None) if value is None else array_is(key, value)
        small = federation(tmp_path / folder, {5: sending(change)})
        made.append(small.trained(1, scheme=scheme))
    told = made[1].train_metrics_clientapp[1]
    assert told["fedipw-buffers-clipped"] == 1
    assert made[0].train_metrics_clientapp[1]["fedipw-buffers-clipped"] == 0
    weights = np.maximum(told["fedipw-weights"], 0.0)
    distance = {"variance": np.sqrt(0.5), "mean": np.sqrt(0.125), "counter": 4.0}[name]
    bound = 10.0 * distance * weights.max() / weights.sum()
    was, now = (arrays_of(result)[key].astype(np.float64) for result in made)
    moved = float(np.linalg.norm(now - was))
    # the honest value is itself one step from what was sent; integers are rounded
    assert 0.0 < moved <= bound + distance * weights.max() / weights.sum() + (name == "counter")
    assert (arrays_of(made[1])["bn.running_var"] >= 0.0).all()
    if scheme == "fedavg":
        np.testing.assert_array_equal(arrays_of(made[0])["theta"], arrays_of(made[1])["theta"])


def test_buffers_that_most_leave_alone_stay_as_they_are(tmp_path: Path) -> None:
    def still(arrays: dict[str, Array]) -> None:
        arrays["bn.running_var"] = Array(MODEL["bn.running_var"])

    small = federation(tmp_path, dict.fromkeys(range(INSIDE), sending(still)))
    small.behaviours[2] = sending(array_is("bn.running_var", single([9.0, 9.0])))
    model = arrays_of(small.trained(1, scheme="fedipw"))
    np.testing.assert_array_equal(model["bn.running_var"], MODEL["bn.running_var"])


def test_integers_do_not_keep_updates_from_being_clipped(tmp_path: Path) -> None:
    """A model with counters is clipped at the median, and with a fixed norm."""
    for folder, screen, most in (
        ("median", Screen(), 10.0 * np.sqrt(3.0)), ("fixed", Screen(clip=2.0), 2.0),
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        small = federation(tmp_path / folder, {1: sending(array_is("theta", single([3e4, 0, 0])))})
        result = small.trained(1, scheme="fedavg", screen=screen)
        told = result.train_metrics_clientapp[1]
        assert told["fedipw-clipped"] >= 1
        assert told["fedipw-influence"] == pytest.approx(most / INSIDE)
        # eleven honest updates of one, and one of the limit
        expected = (11.0 * min(1.0, most / np.sqrt(3.0)) + most) / INSIDE
        assert arrays_of(result)["theta"][0] == pytest.approx(expected, rel=1e-5)


def test_weights_too_large_to_add_by_skip_the_step_and_the_round_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = federation(tmp_path, {})
    monkeypatch.setattr(strategy, "LARGEST_SUM", 0.5)  # shares sum to one
    with caplog.at_level(logging.WARNING, "flwr"):
        result = small.trained(1, scheme="fedavg")
    assert result.train_metrics_clientapp[1]["fedipw-steps-skipped"] == 1
    assert any("too large to add updates by" in r.getMessage() for r in caplog.records)
    for key, value in MODEL.items():
        np.testing.assert_array_equal(arrays_of(result)[key], value)
    monkeypatch.undo()
    again = small.trained(2, scheme="fedavg", average=None)
    np.testing.assert_allclose(arrays_of(again)["theta"], 1.0, rtol=1e-6)


# Metrics.


def telling(**metrics: Any) -> Behaviour:
    return lambda message, _: reply(message, honest(message), **metrics)


@pytest.mark.parametrize("scheme", ["fedavg", "fedipw", "augmented"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_that_is_not_finite_does_not_discard_the_update(
    tmp_path: Path, bad: float, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    losses = {k: telling(loss=0.1 * k) for k in range(INSIDE)}
    small = federation(tmp_path, {**losses, 4: telling(loss=bad)})
    with caplog.at_level(logging.WARNING, "flwr"):
        result = small.trained(1, scheme=scheme)
    rows = small.round()
    assert all(row["fate"] == "replied" for row in rows.values())
    told = result.train_metrics_clientapp[1]
    assert told["fedipw-metrics-not-finite"] == 1
    assert told["fedipw-weighed"] == INSIDE
    kept = [(0.1 * int(unit[1:]), w)
            for unit, w in zip(rows, told["fedipw-weights"], strict=True)
            if unit != "u4"]  # fmt: skip
    loss, weights = np.array(kept).T
    assert told["loss"] == pytest.approx(loss @ weights / weights.sum(), rel=1e-9)
    assert any("'loss' of 'u4'" in r.getMessage() for r in caplog.records)


def test_a_metric_that_is_finite_nowhere_is_left_out(tmp_path: Path) -> None:
    small = federation(tmp_path, dict.fromkeys(range(INSIDE), telling(loss=float("nan"))))
    told = small.trained(1, scheme="fedavg").train_metrics_clientapp[1]
    assert "loss" not in told
    assert told["fedipw-metrics-not-finite"] == INSIDE


def renamed(message: Message, index: int) -> Message:
    """Return a reply whose metrics have other names, from the second round on."""
    if index == 1:
        return reply(message, honest(message))
    told = MetricRecord({"num-examples": 10, "loss2": 0.5})
    arrays = ArrayRecord(honest(message))
    return Message(RecordDict({"arrays": arrays, "metrics": told}), reply_to=message)


@pytest.mark.parametrize("first", [0, INSIDE // 2])  # rows of the attackers, before or after
@pytest.mark.parametrize("restart", [False, True])
def test_a_tie_of_metric_names_goes_to_those_of_earlier_rounds(
    tmp_path: Path, first: int, restart: bool
) -> None:
    liars = range(first, first + INSIDE // 2)
    small = federation(tmp_path, dict.fromkeys(liars, renamed))
    if restart:
        small.trained(1, scheme="fedavg")
    small.trained(3, scheme="fedavg")
    for index in (2, 3):
        for k in range(INSIDE):
            assert small.round(index)[f"u{k}"]["replied"] == (k not in liars)


@pytest.mark.parametrize("first", [0, INSIDE // 2])
def test_a_tie_in_the_first_round_goes_to_replies_with_the_weight_key(
    tmp_path: Path, first: int
) -> None:
    def without(message: Message, index: int) -> Message:
        del index
        arrays, told = ArrayRecord(honest(message)), MetricRecord({"loss": 0.5})
        return Message(RecordDict({"arrays": arrays, "metrics": told}), reply_to=message)

    liars = range(first, first + INSIDE // 2)
    small = federation(tmp_path, dict.fromkeys(liars, without))
    small.trained(1, scheme="fedavg")
    for k in range(INSIDE):
        assert small.round()[f"u{k}"]["replied"] == (k not in liars)


def test_a_metrics_function_sees_only_real_replies_and_their_weights(tmp_path: Path) -> None:
    seen: list[list[dict[str, Any]]] = []

    def largest(records: list[RecordDict], key: str) -> MetricRecord:
        seen.append([dict(next(iter(record.metric_records.values()))) for record in records])
        assert all(len(record.array_records) == 1 for record in records)
        assert key == "num-examples"
        return MetricRecord({"largest-loss": max(float(told["loss"]) for told in seen[-1])})

    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=1, train_metrics_aggr_fn=largest)
    losses = {k: telling(loss=0.1 * k) for k in range(INSIDE)}
    small = federation(tmp_path, {**losses, 11: telling(loss=float("nan"))})
    result = small.trained(2, inner, scheme="fedipw", screen=Screen(clip=1.0))
    assert [len(records) for records in seen] == [INSIDE - 1] * 2
    for index in (1, 2):
        told = result.train_metrics_clientapp[index]
        assert told["largest-loss"] == pytest.approx(1.0)
        by_loss = {round(10 * found["loss"]): found["num-examples"] for found in seen[index - 1]}
        rows = [int(unit[1:]) for unit in small.round(index)]
        weights = dict(zip(rows, told["fedipw-weights"], strict=True))
        assert by_loss == {k: weights[k] for k in range(INSIDE - 1)}
    assert inner.train_metrics_aggr_fn is largest


def test_a_metrics_function_that_raises_costs_the_metrics_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def logarithm(records: list[RecordDict], key: str) -> MetricRecord:
        del key
        losses = [float(next(iter(r.metric_records.values()))["loss"]) for r in records]  # type: ignore[arg-type]
        if min(losses) <= 0.0:
            raise ValueError("log of a negative number")
        return MetricRecord({"log-loss": float(np.log(losses).mean())})

    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=1, train_metrics_aggr_fn=logarithm)
    small = federation(tmp_path, {3: telling(loss=-1.0)})
    with caplog.at_level(logging.WARNING, "flwr"):
        result = small.trained(1, inner, scheme="fedavg")
    np.testing.assert_allclose(arrays_of(result)["theta"], 1.0, rtol=1e-6)
    assert "log-loss" not in result.train_metrics_clientapp[1]
    assert any("raised ValueError: log of a negative" in r.getMessage() for r in caplog.records)
