"""The population table: what is refused, by name, and what is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.tables import Population

GOOD: dict[str, list[Any]] = {
    "unit_id": ["a", "b", "c"],
    "age": [30, 61, 45],
    "income": [1.5, 2.5, 3.5],
    "urban": [True, False, True],
    "enrolled": [True, False, True],
}


def changed(**columns: list[Any]) -> dict[str, list[Any]]:
    return {**GOOD, **columns}


@pytest.mark.parametrize("ids", [["a", "b", "c"], [7, 3, 5]], ids=["text", "integer"])
def test_a_table_is_read_as_it_stands(ids: list[Any]) -> None:
    population = Population.of(changed(unit_id=ids))
    assert population.size == 3
    assert population.unit_ids.tolist() == ids
    assert population.enrolled.tolist() == [True, False, True]
    assert population.enrolled_size == 2
    assert population.covariates == ("age", "income", "urban")
    expected = [[30.0, 1.5, 1.0], [61.0, 2.5, 0.0], [45.0, 3.5, 1.0]]
    np.testing.assert_array_equal(population.matrix(), expected)


def test_columns_come_in_the_order_asked_for() -> None:
    got = Population.of(GOOD).matrix(["urban", "age"])
    np.testing.assert_array_equal(got, [[1.0, 30.0], [0.0, 61.0], [1.0, 45.0]])
    assert got.dtype == np.float64
    assert Population.of(GOOD).matrix([]).shape == (3, 0)


def test_a_missing_identifier_column_is_refused() -> None:
    with pytest.raises(InputError, match=r"no 'unit_id' column; it has age.*needs an identifier"):
        Population(pl.DataFrame({"age": [1, 2]}))


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(InputError, match="no rows"):
        Population(pl.DataFrame({"unit_id": []}))


@pytest.mark.parametrize("ids", [["a", None, None], [1, None, None]])
def test_null_identifiers_are_counted(ids: list[Any]) -> None:
    with pytest.raises(InputError, match="2 rows of the population table have no unit_id"):
        Population.of(changed(unit_id=ids))


@pytest.mark.parametrize("ids", [["a", "b", "a"], [4, 5, 4]])
def test_duplicated_identifiers_are_named(ids: list[Any]) -> None:
    with pytest.raises(InputError, match=rf"1 value\(s\) stand more than once: {ids[0]}\. Keep"):
        Population.of(changed(unit_id=ids))


def test_many_duplicates_are_counted_once_each() -> None:
    with pytest.raises(InputError, match=r"7 value\(s\) .*: 0, 1, 2, 3, 4 and 2 more"):
        Population.of({"unit_id": [*range(7), *range(7), 99]})


def test_nobody_enrolled_is_refused() -> None:
    with pytest.raises(InputError, match=r"No client of 3 is enrolled.*Check the 'enrolled'"):
        Population.of(changed(enrolled=[False] * 3))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([1, 0, 1], "not Int64 with 0 nulls"),
        (["yes", "no", "yes"], "not String with 0 nulls"),
        ([True, None, False], "not Boolean with 1 nulls"),
        ([1.0, 0.0, 1.0], "not Float64 with 0 nulls"),
    ],
)
def test_flags_that_are_not_true_or_false_are_refused(flags: list[Any], said: str) -> None:
    with pytest.raises(InputError, match=f"'enrolled' must be true or false in every row, {said}"):
        Population.of(changed(enrolled=flags))


def test_enrollment_is_asked_for_when_absent() -> None:
    population = Population.of({"unit_id": [1, 2], "age": [3, 4]})
    assert population.covariates == ("age",)
    with pytest.raises(InputError, match=r"no 'enrolled' column. Draw enrollment first"):
        _ = population.enrolled


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_a_missing_value_is_named_with_its_row(missing: float | None) -> None:
    population = Population.of(changed(income=[1.0, missing, 2.0]))
    with pytest.raises(InputError, match=r"'income' \(1 of 3 rows, first at row 1\)") as caught:
        population.matrix()
    assert "'age'" not in str(caught.value)
    assert population.matrix(["age"]).shape == (3, 1)  # the other columns stay usable


def test_a_missing_integer_or_flag_is_named_too() -> None:
    population = Population.of(changed(age=[30, None, 45], urban=[None, True, None]))
    with pytest.raises(InputError, match=r"'age' \(1 of 3 .*'urban' \(2 of 3 rows, first at row 0"):
        population.matrix()


def test_a_text_covariate_is_refused_with_its_type() -> None:
    population = Population.of(changed(region=["north", "south", "south"]))
    with pytest.raises(InputError, match=r"numeric or boolean; 'region' \(String\) are not"):
        population.matrix()
    assert population.matrix(["age", "urban"]).shape == (3, 2)


@pytest.mark.parametrize("name", ["height", "unit_id", "enrolled"])
def test_an_unknown_column_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(InputError, match=rf"No covariate column '{name}'.*it has age, income"):
        Population.of(GOOD).matrix(["age", name])


def test_columns_known_only_after_enrollment_are_found() -> None:
    population = Population.of(
        changed(
            battery=[0.5, None, 0.9],  # null exactly where not enrolled
            partly=[None, None, 1.0],  # null there and elsewhere
            never=[None, None, None],  # null everywhere: a missing column, not a late one
            gap=[None, 2.0, 3.0],  # null for an enrolled client only
        )
    )
    assert population.post_enrollment == {"battery", "partly"}


def test_nothing_is_late_when_all_are_enrolled() -> None:
    population = Population.of(changed(battery=[0.5, None, 0.9], enrolled=[True] * 3))
    assert population.post_enrollment == frozenset()


def test_other_flags_on_the_same_clients() -> None:
    population = Population.of(GOOD)
    other = population.with_enrolled(np.array([False, True, False]))
    assert other.enrolled.tolist() == [False, True, False]
    assert population.enrolled.tolist() == [True, False, True]
    assert other.covariates == population.covariates
    np.testing.assert_array_equal(other.matrix(), population.matrix())


def test_flags_of_wrong_length_or_all_false_are_refused() -> None:
    population = Population.of(GOOD)
    with pytest.raises(InputError, match="enrolled has 2 rows, expected 3"):
        population.with_enrolled(np.array([True, False]))
    with pytest.raises(InputError, match="No client of 3 is enrolled"):
        population.with_enrolled(np.zeros(3, dtype=bool))
