"""Arrays that go through the scratch file come back as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedipw.errors import InputError
from fedipw.storage.scratch import Room, Scratch

ARRAYS = arrays(
    st.sampled_from([np.float64, np.int8, np.int64, np.bool_]),
    array_shapes(max_dims=2, min_side=0, max_side=20),
)


@given(groups=st.lists(st.lists(ARRAYS, min_size=1, max_size=4), min_size=1, max_size=8))
def test_arrays_come_back_in_any_order(groups: list[list[np.ndarray]]) -> None:
    scratch, room = Scratch(), Room()
    places = [scratch.written(group) for group in groups]
    scratch.settled()
    for place, group in reversed(list(zip(places, groups, strict=True))):
        for got, given_array in zip(scratch.read(place, room), group, strict=True):
            assert got.dtype == given_array.dtype
            np.testing.assert_array_equal(got, given_array)


def test_a_place_for_the_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No scratch file"):
        Scratch(tmp_path / "none").written([np.zeros(1)])
