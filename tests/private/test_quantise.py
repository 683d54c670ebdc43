"""The fixed-point code: its error bound, its range, and what it counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedipw.errors import InputError
from fedipw.private.quantise import FixedPointCode
from fedipw.private.sums import (
    LocalSums,
    Part,
    Parts,
    SumNotOpenedError,
    SumRequest,
    contribution_words,
)


@given(
    values=arrays(np.float64, (7, 3), elements=st.floats(-1.0, 1.0)),
    bound=st.floats(1e-6, 1e6),
    bits=st.sampled_from([32, 64]),
)
def test_a_sum_is_within_its_error_bound(
    values: np.ndarray[tuple[int, int], np.dtype[np.float64]], bound: float, bits: int
) -> None:
    code = FixedPointCode(bound=bound, terms=7, bits=bits)
    words = np.zeros(3, dtype=code.dtype)
    for row in values * bound:
        coded = code.coded(row)
        assert coded.clipped == 0
        words += coded.words
    exact = (values * bound).sum(axis=0)
    # decoding and the exact sum round too, each by a few units in the last place of 7 B
    rounding = 7 * bound * 2.0**-49
    assert np.abs(code.decoded(words) - exact).max() <= code.error(7) + rounding


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("terms", [1, 3, 200])
def test_the_largest_sum_does_not_wrap_around(bits: int, terms: int) -> None:
    code = FixedPointCode(bound=3.0, terms=terms, bits=bits)
    for sign in (-1.0, 1.0):
        words = np.zeros(1, dtype=code.dtype)
        for _ in range(terms):
            words += code.coded(np.array([sign * 3.0])).words
        np.testing.assert_allclose(code.decoded(words), sign * 3.0 * terms, rtol=1e-6)


def test_values_beyond_the_bound_are_cut_and_counted() -> None:
    coded = FixedPointCode(bound=1.0, terms=4).coded(np.array([0.5, -1.5, 1.0, 9.0]))
    assert coded.clipped == 2
    decoded = FixedPointCode(bound=1.0, terms=4).decoded(coded.words)
    np.testing.assert_allclose(decoded, [0.5, -1.0, 1.0, 1.0], atol=1e-8)


def test_a_number_that_is_not_finite_is_refused() -> None:
    with pytest.raises(InputError, match="not finite"):
        FixedPointCode(bound=1.0, terms=4).coded(np.array([0.5, np.nan]))


def test_a_code_without_room_for_its_terms_is_refused() -> None:
    with pytest.raises(InputError, match="less than 8 bits"):
        FixedPointCode(bound=1.0, terms=2**25)
    with pytest.raises(InputError, match="32 or 64 bits"):
        FixedPointCode(bound=1.0, terms=2, bits=16)


def test_local_sums_count_what_was_cut_and_who_is_missing() -> None:
    def adds(value: float) -> dict[str, object]:
        return {"x": lambda _: np.array([value, 1.0])}

    clients = [adds(0.25), adds(7.0), adds(-0.5), {}, {"x": lambda _: None}]
    found = LocalSums(clients, minimum=3).sum(SumRequest(purpose="x", length=2))  # type: ignore[arg-type]
    assert (found.contributors, found.dropped, found.clipped) == (3, 2, 1)
    assert np.abs(found.total - [0.75, 3.0]).max() <= found.error
    with pytest.raises(SumNotOpenedError, match="3 clients are left"):
        LocalSums(clients, minimum=4).sum(SumRequest(purpose="x", length=2))  # type: ignore[arg-type]


def test_a_vector_of_another_length_is_refused() -> None:
    request, code = SumRequest(purpose="x", length=2), FixedPointCode(bound=1.0, terms=2)
    with pytest.raises(InputError, match="not \\(2,\\)"):
        contribution_words(np.zeros(3), request, code)


def test_parts_come_back_by_name_and_empty_ones_have_no_room() -> None:
    parts = Parts(a=Part(2, 4.0), none=Part(0, 1.0), b=Part(1, 100.0))
    assert parts.length == 3
    total = sum(parts.packed(a=np.array([k, -k]), b=np.array([10.0 * k])) for k in (1.0, 2.0))
    found = parts.unpacked(np.asarray(total))
    np.testing.assert_allclose(found["a"], [3.0, -3.0])
    np.testing.assert_allclose(found["b"], [30.0])
    with pytest.raises(InputError, match="not one of 3"):
        parts.unpacked(np.zeros(4))
