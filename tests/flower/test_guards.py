"""What one client can do is bounded by default, and every guard can be turned off."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st

from fedipw.combining.tail import TailAverage
from fedipw.errors import InputError
from fedipw.flower import Screen
from fedipw.flower.limits import OTHERS, _quantile_of_others
from fedipw.numerics import FloatArray
from fedipw.tables.ledger import Ledger

from .federations import INSIDE, Behaviour, Small, answered, theta

LIAR = 5


def sending(update: FloatArray) -> Behaviour:
    def reply(message: Message, index: int) -> Message:
        del index
        return answered(message, {"theta": theta(message) + update})

    return reply


def model(result: Any) -> FloatArray:
    return np.asarray(result.arrays["theta"].numpy())


# Long updates.


def test_a_liar_with_a_covariate_and_an_update_of_its_own_moves_the_model_within_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A battery 40 standard deviations out and an update 100 times as long as the others'.

    What the update did is the difference to a run in which the liar sends nothing new; the bound
    is ten times the median norm times the largest share.
    """
    models = []
    for name, update in (("still", np.zeros(3)), ("lying", np.array([100.0, 0.0, 0.0]))):
        (tmp_path / name).mkdir()
        small = Small(tmp_path / name, told={LIAR: {"battery": 40.0}})
        for k in range(INSIDE):
            small.behaviours[k] = sending(np.array([0.0, np.cos(k), np.sin(k)]))
        small.behaviours[LIAR] = sending(update)
        with caplog.at_level(logging.INFO, "flwr"):
            result = small.trained(1)
        models.append(model(result))
    told = result.train_metrics_clientapp[1]
    largest = max(told["fedipw-weights"])
    assert told["fedipw-influence"] == pytest.approx(10.0 * largest, rel=1e-12)  # median norm 1
    assert told["fedipw-clipped"] == 1
    assert largest <= 5.0 / INSIDE + 1e-12  # five equal shares of a round of twelve
    moved = float(np.linalg.norm(models[1] - models[0]))
    assert 0.0 < moved <= told["fedipw-influence"] * (1 + 1e-9)
    assert any("no update adds more than 10 x the median norm" in r.getMessage()
               for r in caplog.records)  # fmt: skip


def test_without_the_clip_it_moves_the_model_ten_times_as_far(tmp_path: Path) -> None:
    found = []
    for name, screen in (("clipped", Screen()), ("free", Screen(clip_at_median=None))):
        (tmp_path / name).mkdir()
        small = Small(tmp_path / name, dict.fromkeys(range(INSIDE), sending(np.eye(3)[1])))
        small.behaviours[LIAR] = sending(100.0 * np.eye(3)[0])
        found.append(small.trained(1, screen=screen))
    assert "fedipw-influence" not in found[1].train_metrics_clientapp[1]
    assert model(found[1])[0] == pytest.approx(10.0 * model(found[0])[0], rel=1e-9)


@pytest.mark.parametrize("bad", [0.5, float("nan"), 0.0, -1.0])
def test_a_clip_below_the_median_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="clip_at_median must be 1 or more"):
        Screen(clip_at_median=bad)


def test_two_replies_have_no_median_to_be_held_to() -> None:
    assert Screen().limit([1.0, 900.0]) == np.inf
    assert Screen().limit([1.0, 1.0, 900.0]) == 10.0
    assert Screen().limit([0.0, 0.0, 5.0]) == np.inf  # a model that has come to rest


# Answers.


def test_answers_are_taken_inside_what_others_answer_and_the_ledger_has_them_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, told={LIAR: {"battery": 40.0}})
    result = small.trained(2)
    assert [result.train_metrics_clientapp[r]["fedipw-winsorised"] for r in (1, 2)] == [1, 1]
    assert {small.round(r)["u5"]["battery"] for r in (1, 2)} == {0.6000000000000001}
    assert small.round(1)["u6"]["battery"] == pytest.approx(0.6)  # the largest of the others
    with caplog.at_level(logging.WARNING, "flwr"):
        again = small.trained(3)  # a resumed run knows the rounds before
    assert again.train_metrics_clientapp[3]["fedipw-winsorised"] == 1
    assert any("outside what other clients answered" in r.getMessage() for r in caplog.records)


def test_they_can_be_taken_as_they_are(tmp_path: Path) -> None:
    small = Small(tmp_path, told={LIAR: {"battery": 40.0}})
    result = small.trained(1, winsorise=None)
    assert result.train_metrics_clientapp[1]["fedipw-winsorised"] == 0
    assert small.round(1)["u5"]["battery"] == 40.0
    with pytest.raises(InputError, match="winsorise is a quantile above"):
        small.strategy(winsorise=0.3)


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    unknown=st.integers(0, 3),
    quantile=st.sampled_from([0.6, 0.9, 0.99, 1.0]),
)
def test_the_limit_of_a_client_is_a_quantile_of_the_others(
    values: list[float], unknown: int, quantile: float
) -> None:
    array = np.array([*values, *[np.nan] * unknown])
    found = _quantile_of_others(array, quantile)
    for k in range(len(values)):
        others = np.sort(np.delete(np.array(values), k))
        if len(values) <= OTHERS:
            assert found[k] == np.inf
        else:
            place = int(np.ceil(quantile * (len(others) - 1)))
            assert found[k] == others[place]


# Few replies, and the model that is returned.


def test_few_effective_replies_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path)
    for k in range(4, INSIDE):
        small.told[k] = None  # not available
    with caplog.at_level(logging.WARNING, "flwr"):
        small.trained(1)
    assert any("few replies carry the weight of round 1: 4 replies" in r.getMessage()
               for r in caplog.records)  # fmt: skip


def drifting(message: Message, index: int) -> Message:
    return answered(message, {"theta": theta(message) + float(index)})


def test_the_average_of_the_last_fifth_is_returned_and_the_last_model_kept(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.behaviours |= dict.fromkeys(range(INSIDE), drifting)
    strategy = small.strategy()
    result = strategy.start(small.grid, small.start, num_rounds=10)
    # after round r the model is 1 + ... + r; the last two are 45 and 55
    np.testing.assert_allclose(model(result), 50.0, rtol=1e-12)
    assert strategy.last_model is not None
    np.testing.assert_allclose(strategy.last_model["theta"].numpy(), 55.0, rtol=1e-12)
    again = small.strategy().start(small.grid, small.start, num_rounds=10)  # nothing left to do
    np.testing.assert_array_equal(model(again), model(result))
    plain = small.strategy(average=None).start(small.grid, small.start, num_rounds=10)
    np.testing.assert_allclose(model(plain), 55.0, rtol=1e-12)
    with pytest.raises(InputError, match="A tail must be a fraction"):
        small.strategy(average=0.0)


def test_a_longer_run_averages_its_own_last_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path)
    small.behaviours |= dict.fromkeys(range(INSIDE), drifting)
    small.trained(5)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = small.trained(10)
    np.testing.assert_allclose(model(result), 50.0, rtol=1e-12)
    assert not any("the average leaves out" in r.getMessage() for r in caplog.records)
    with caplog.at_level(logging.WARNING, "flwr"):
        wide = small.trained(11, average=1.0)
    assert any("leaves out 10 rounds" in r.getMessage() for r in caplog.records)
    np.testing.assert_allclose(model(wide), 66.0, rtol=1e-12)
    assert len(Ledger(tmp_path / "ledger").rounds) == 11


def test_an_average_keeps_types_and_can_be_saved() -> None:
    tail = TailAverage()
    for k in range(3):
        tail.add({"w": np.full(2, k, dtype=np.float32), "n": np.array([k + 1, 7])})
    again = TailAverage.of(tail.state())
    again.add({"w": np.full(2, 9.0, dtype=np.float32), "n": np.array([9, 7])})
    mean = again.mean()
    assert {name: str(array.dtype) for name, array in mean.items()} == {
        "w": "float32",
        "n": "int64",
    }
    np.testing.assert_array_equal(mean["w"], np.float32(3.0))
    np.testing.assert_array_equal(mean["n"], [4, 7])
