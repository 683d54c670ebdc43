"""Border checks and errors: each names the thing, the numbers and a remedy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedipw.errors import (
    DivergedError,
    FedIPWError,
    InputError,
    NotConvergedError,
    SeparationError,
)
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import (
    check_finite,
    check_offsets,
    check_positive,
    check_probability,
    check_rows,
    some,
)


@given(st.lists(st.integers(), max_size=20))
def test_some_shows_five_and_counts_the_rest(items: list[int]) -> None:
    text = some(items)
    assert text.startswith(", ".join(map(str, items[:5])))
    assert text.endswith(f" and {len(items) - 5} more") == (len(items) > 5)


@given(arrays(np.float64, st.integers(0, 30), elements=st.floats(1e-100, 1.0)))
def test_probabilities_come_back_as_they_are(probs: FloatArray) -> None:
    np.testing.assert_array_equal(check_probability(probs), probs)


@pytest.mark.parametrize("bad", [0.0, -0.25, 1.5, np.nan, np.inf, -np.inf, np.nextafter(1.0, 2.0)])
def test_a_probability_outside_is_named_with_its_row(bad: float) -> None:
    with pytest.raises(InputError) as caught:
        check_probability([0.5, 0.25, bad, 1.0], name="participation_prob")
    message = str(caught.value)
    assert "participation_prob must lie in (0, 1]" in message
    assert "1 of 4 do not" in message
    assert f"row 2: {bad!r}".replace("np.float64(", "").replace(")", "") in message
    assert "leave it out of the target population or change the selection model" in message


def test_many_bad_probabilities_are_counted_not_listed() -> None:
    with pytest.raises(InputError, match=r"8 of 9 do not \(row 1: .* and 3 more\)"):
        check_probability([0.5, *[0.0] * 8])


def test_a_bad_column_is_named_with_count_and_first_row() -> None:
    matrix = np.ones((4, 3))
    matrix[2, 1] = matrix[3, 1] = np.nan
    matrix[1, 2] = np.inf
    with pytest.raises(InputError) as caught:
        check_finite(matrix, ("age", "income", "region"), "population table")
    message = str(caught.value)
    assert message.startswith("population table: ")
    assert "'income' (2 of 4 rows, first at row 2)" in message
    assert "'region' (1 of 4 rows, first at row 1)" in message
    assert "'age'" not in message
    assert "Fill or drop them before fitting, or leave the column out." in message


@given(arrays(np.float64, (5, 2), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_a_finite_matrix_passes(matrix: FloatArray) -> None:
    check_finite(matrix, ("a", "b"), "table")


@pytest.mark.parametrize("bad", [0, -1, -0.5, float("nan"), float("inf")])
def test_a_number_that_is_not_positive_is_named(bad: float) -> None:
    with pytest.raises(InputError, match="step must be a finite number above 0") as caught:
        check_positive(bad, "step")
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("good", [5e-324, 1, 1e300])
def test_a_positive_number_comes_back(good: float) -> None:
    assert check_positive(good, "step") == good


def test_an_array_of_wrong_length_is_named() -> None:
    check_rows(3, a=np.zeros(3), b=np.zeros((3, 2)))
    with pytest.raises(InputError, match="b has 2 rows, expected 3"):
        check_rows(3, a=np.zeros(3), b=np.zeros(2))


ERRORS = [
    (InputError("age is missing."), ["age is missing"]),
    (SeparationError(("age", "region"), 50), ["age, region", "50 rows", "L2 penalty"]),
    (NotConvergedError(7, 0.5, 1e-9), ["7 iterations", "0.5", "1e-09", "Standardise"]),
    (DivergedError("FedAvg", 12, 3.5), ["FedAvg", "round 12", "3.5", "Lower the local step"]),
]


@pytest.mark.parametrize(("error", "parts"), ERRORS, ids=lambda value: type(value).__name__)
def test_errors_say_what_and_what_next_and_travel_between_processes(
    error: FedIPWError, parts: list[str]
) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args
    assert [part for part in parts if part not in str(error)] == []


@pytest.mark.parametrize("error", [InputError("x"), SeparationError(("age",), 5)])
def test_input_errors_are_value_errors(error: FedIPWError) -> None:
    assert isinstance(error, ValueError)


def test_a_spread_of_rounding_is_none_and_one_of_a_few_more_digits_is_refused() -> None:
    constant = 1e15 + np.array([[0.0, 0.125, 0.25]])
    check_offsets(constant, ["battery"], "rounds")
    with pytest.raises(InputError, match="'battery' varies by 1 around 1e"):
        check_offsets(1e15 + np.array([[0.0, 0.25, 1.0]]), ["battery"], "rounds")
