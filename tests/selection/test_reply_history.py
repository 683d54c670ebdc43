"""Features of past replies against a slow loop."""

from __future__ import annotations

from datetime import date, datetime
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedipw.errors import InputError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.steps import CLOCK_COLUMNS, REPLY_COLUMNS, Clock, ReplyHistory

replies = arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, max_side=12))  # (rounds, clients)


def after_all(replied: BoolArray) -> ReplyHistory:
    history = ReplyHistory.of(replied.shape[1])
    for row in replied:
        history = history.after(row)
    return history


def slow_features(replied: BoolArray) -> FloatArray:
    """Return the columns for the round after those in ``replied``, client by client."""
    rounds, clients = replied.shape
    r = rounds + 1
    rows = []
    for i in range(clients):
        last = 0
        total = 0
        for s in range(1, rounds + 1):
            if replied[s - 1, i]:
                last, total = s, total + 1
        rows.append(
            [
                float(rounds > 0 and bool(replied[rounds - 1, i])),
                (total + 1) / (r + 1),
                float(r - last),
            ]
        )
    return np.array(rows)


@settings(max_examples=150)
@given(replied=replies)
def test_features_equal_the_slow_loop(replied: BoolArray) -> None:
    got = after_all(replied).matrix()
    np.testing.assert_allclose(got, slow_features(replied), rtol=1e-13, atol=1e-13)


@settings(max_examples=50)
@given(index=st.integers(1, 10**6), day=st.floats(1.0, 48.0))
def test_the_clock_by_rounds_is_its_definition(index: int, day: float) -> None:
    clock = Clock(day_length=day)
    now = clock.columns(clock.time(pl.DataFrame(), index), origin=0.0)
    assert list(now) == [*CLOCK_COLUMNS, "elapsed"]
    turn = 2 * np.pi * index / day
    assert list(now.values()) == [np.sin(turn), np.cos(turn), index / day]


@pytest.mark.parametrize(
    ("moment", "hours", "hour"),
    [
        (datetime(2026, 3, 4, 6), 24.0, 6.0),
        (datetime(2026, 3, 4, 8, 30, tzinfo=ZoneInfo("Europe/Berlin")), 24.0, 7.5),
        (date(2026, 3, 4), 24.0, 0.0),
        (datetime(1970, 1, 8, 1), 168.0, 1.0),
    ],
)
def test_the_clock_by_time_is_the_hour_in_utc(moment: date, hours: float, hour: float) -> None:
    clock, table = Clock(day_hours=hours), pl.DataFrame({"opened_at": [moment, moment]})
    now = clock.time(table, 5)
    found = clock.columns(now, origin=now - 2 * hours)
    turn = 2 * np.pi * hour / hours
    np.testing.assert_allclose(list(found.values()), [np.sin(turn), np.cos(turn), 2.0], atol=1e-9)


@settings(max_examples=100)
@given(replied=replies, data=st.data())
def test_features_never_depend_on_the_present_round_or_later(
    replied: BoolArray, data: st.DataObject
) -> None:
    present = data.draw(st.integers(0, len(replied) - 1))
    other = replied.copy()
    other[present:] = data.draw(arrays(np.bool_, other[present:].shape))
    np.testing.assert_array_equal(
        after_all(replied[:present]).matrix(), after_all(other[:present]).matrix()
    )
    # the features are fixed when the round opens: closing it makes a new history
    before = after_all(replied[:present])
    fixed = before.matrix()
    before.after(other[present])
    np.testing.assert_array_equal(before.matrix(), fixed)


def test_before_any_round_everybody_is_alike() -> None:
    features = ReplyHistory.of(4).matrix()
    assert features.shape == (4, len(REPLY_COLUMNS))
    expected = [0.0, 0.5, 1.0]
    np.testing.assert_allclose(features, np.tile(expected, (4, 1)), rtol=1e-15)


def test_wrong_rows_and_clocks_are_refused() -> None:
    with pytest.raises(InputError, match="replied has 3 rows, expected 4"):
        ReplyHistory.of(4).after(np.ones(3, dtype=bool))
    for day in (0.0, -24.0, float("nan")):
        with pytest.raises(InputError, match=f"A day has .* rounds, not {day}"):
            Clock(day_length=day)
        with pytest.raises(InputError, match=f"A cycle has .* hours, not {day}"):
            Clock(day_hours=day)
    for table in (pl.DataFrame({"x": [1.0]}), pl.DataFrame({"opened_at": [3]})):
        with pytest.raises(InputError, match="Round 7 has no 'opened_at'"):
            Clock(day_hours=24.0).time(table, 7)
