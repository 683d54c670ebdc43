"""The distance of two arrays: the naive sum, in any type and layout, and what is not finite."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedipw.numerics.compiled import squared_distance


@given(
    shape=array_shapes(max_dims=3, max_side=6),
    kind=st.sampled_from([np.float16, np.float32, np.float64]),
    data=st.data(),
)
def test_it_is_the_sum_of_squared_differences(shape: Any, kind: Any, data: Any) -> None:
    a, b = (data.draw(arrays(kind, shape, elements=st.floats(-100, 100, width=16))) for _ in "ab")
    expected = float(((a.astype(np.float64) - b.astype(np.float64)) ** 2).sum())
    assert squared_distance(a, b) == pytest.approx(expected, rel=1e-12)
    assert squared_distance(np.asfortranarray(a), b) == pytest.approx(expected, rel=1e-12)
    assert squared_distance(a, a) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
@pytest.mark.parametrize("place", [0, 1, 500, 999])
def test_what_is_not_finite_shows(bad: float, place: int) -> None:
    a = np.zeros(1000)
    a[place] = bad
    assert not np.isfinite(squared_distance(a, np.zeros(1000)))


def test_read_only_bytes_will_do() -> None:
    a = np.frombuffer(np.arange(4.0).tobytes())
    assert squared_distance(a, np.zeros(4)) == 14.0
