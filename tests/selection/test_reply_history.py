"""Features of past replies against a slow loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedipw.errors import InputError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.steps import COLUMNS, ReplyHistory

replies = arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, max_side=12))  # (rounds, clients)


def after_all(replied: BoolArray) -> ReplyHistory:
    history = ReplyHistory.of(replied.shape[1])
    for row in replied:
        history = history.after(row)
    return history


def slow_features(replied: BoolArray, day: float) -> FloatArray:
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
                np.sin(2 * np.pi * r / day),
                np.cos(2 * np.pi * r / day),
            ]
        )
    return np.array(rows)


@settings(max_examples=150)
@given(replied=replies, day=st.floats(1.0, 48.0))
def test_features_equal_the_slow_loop(replied: BoolArray, day: float) -> None:
    got = after_all(replied).matrix(day_length=day)
    np.testing.assert_allclose(got, slow_features(replied, day), rtol=1e-13, atol=1e-13)


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
    features = ReplyHistory.of(4).matrix(day_length=24.0)
    assert features.shape == (4, len(COLUMNS))
    expected = [0.0, 0.5, 1.0, np.sin(np.pi / 12), np.cos(np.pi / 12)]
    np.testing.assert_allclose(features, np.tile(expected, (4, 1)), rtol=1e-15)


def test_wrong_rows_and_day_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="replied has 3 rows, expected 4"):
        ReplyHistory.of(4).after(np.ones(3, dtype=bool))
    for day in (0.0, -24.0, float("nan")):
        with pytest.raises(InputError, match=f"day_length must be above 0, not {day}"):
            ReplyHistory.of(4).matrix(day_length=day)
