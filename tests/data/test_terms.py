"""Terms by name: columns, levels, powers, products."""

import numpy as np
import polars as pl
import pytest

from fedipw.data.terms import formula_terms, rich_terms, term_matrix, term_of
from fedipw.errors import InputError

FRAME = pl.DataFrame(
    {
        "age": [20.0, 40.0, 60.0],
        "rooms": [1, 2, 2],
        "os": ["ios", "android", "other"],
        "new": [True, False, True],
        "a:b": [7.0, 8.0, 9.0],
        "kind": pl.Series(["x", "y", "x"], dtype=pl.Categorical),
    }
)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("age", [20.0, 40.0, 60.0]),
        ("age**2", [400.0, 1600.0, 3600.0]),
        ("age ** 3", [8e3, 64e3, 216e3]),
        ("os[android]", [0.0, 1.0, 0.0]),
        ("rooms[2]", [0.0, 1.0, 1.0]),
        ("new", [1.0, 0.0, 1.0]),
        ("new[false]", [0.0, 1.0, 0.0]),
        ("kind[y]", [0.0, 1.0, 0.0]),
        ("age:rooms", [20.0, 80.0, 120.0]),
        ("age:os[other]", [0.0, 0.0, 60.0]),
        ("age**2:rooms:new", [400.0, 0.0, 7200.0]),
        ("a:b", [7.0, 8.0, 9.0]),  # a column of that very name comes first
        ("os[windows]", [0.0, 0.0, 0.0]),
    ],
)
def test_names_and_their_values(name: str, values: list[float]) -> None:
    np.testing.assert_array_equal(term_of(name, FRAME.schema).values(FRAME), values)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("height", r"'height' names no column.*Columns: age, rooms, os"),
        ("age:height", r"'age:height' names no column"),
        ("os", r"'os' holds String, not numbers: name one of its levels, as in os\[level\]"),
        ("os**2", r"'os' holds String"),
        ("age**0", r"names no column"),
        ("rooms[two]", r"'rooms' holds numbers, 'two' is none"),
        ("new[maybe]", r"'new' is true or false"),
        ("", r"'' names no column"),
    ],
)
def test_names_of_nothing(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        term_of(name, FRAME.schema).values(FRAME)


def test_missing_values_stay_missing() -> None:
    frame = pl.DataFrame({"age": [1.0, None], "os": [None, "ios"]})
    assert np.isnan(term_of("age**2", frame.schema).values(frame)[1])
    assert np.isnan(term_of("os[ios]", frame.schema).values(frame)[0])


def test_a_formula_names_each_term_once_and_spreads_text() -> None:
    names = [t.name for t in formula_terms("age + age + os + age:os[ios]", FRAME)]
    assert names == ["age", "os[ios]", "os[other]", "age:os[ios]"]
    with pytest.raises(InputError, match="empty term"):
        formula_terms("age + ", FRAME)


def test_rich_terms_square_what_varies_and_multiply_what_differs() -> None:
    names = [t.name for t in rich_terms(["age", "new", "os"], FRAME)]
    assert names == [
        "age",
        "new",
        "os[ios]",
        "os[other]",
        "age**2",
        "age:new",
        "age:os[ios]",
        "age:os[other]",
        "new:os[ios]",
        "new:os[other]",
    ]
    matrix = term_matrix(rich_terms(["age", "rooms"], FRAME), FRAME)
    age, rooms = np.array([20.0, 40.0, 60.0]), np.array([1.0, 2.0, 2.0])
    np.testing.assert_array_equal(matrix, np.column_stack([age, rooms, age**2, age * rooms]))
