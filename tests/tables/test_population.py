"""Populations: the same in every form, what is refused, by name, and what is known of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.selection.enrollment import enrollment_stage
from fedipw.tables import Population, Table, bound_design, write_table

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
    with pytest.raises(InputError, match=r"2 row\(s\) have no unit_id, the first is 2\."):
        Population.of(changed(unit_id=ids))


@pytest.mark.parametrize("ids", [["a", "b", "a"], [4, 5, 4]])
def test_duplicated_identifiers_are_named(ids: list[Any]) -> None:
    with pytest.raises(InputError, match=rf"1 value\(s\) stand more than once: {ids[0]}\. Keep"):
        Population.of(changed(unit_id=ids))


def test_many_duplicates_are_counted_once_each() -> None:
    with pytest.raises(InputError, match=r"7 value\(s\) .*: 0, 1, 2, 3, 4 and 2 more"):
        Population.of({"unit_id": [*range(7), *range(7), 99]})


def test_nobody_enrolled_is_refused() -> None:
    with pytest.raises(InputError, match=r"no client of 3 is enrolled.*Check the 'enrolled'"):
        Population.of(changed(enrolled=[False] * 3))


@pytest.mark.parametrize("flags", [[1, 0, 1], ["yes", "No", "YES"], ["true", " false", "True"]])
def test_flags_may_be_numbers_or_words(flags: list[Any]) -> None:
    assert Population.of(changed(enrolled=flags)).enrolled.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([True, None, False], "must be true or false in every row, not Boolean with 1 nulls"),
        ([1, None, 0], "must be true or false in every row, not Boolean with 1 nulls"),
        ([1, 2, 0], "holds '2'; it must be true or false"),
        (["yes", "maybe", "no"], "holds 'maybe'; it must be true or false"),
        ([1.0, 0.0, 0.5], "holds '.*'; it must be true or false"),
    ],
)
def test_flags_that_are_not_true_or_false_are_refused(flags: list[Any], said: str) -> None:
    with pytest.raises(InputError, match=f"'enrolled' {said}"):
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
    with pytest.raises(InputError, match=r"enrolled must be true or false, not int64"):
        population.with_enrolled(np.array([1, 0, 1]))
    with pytest.raises(InputError, match="no client of 3 is enrolled"):
        population.with_enrolled(np.zeros(3, dtype=bool))


# One population in many forms


class Speaks:
    """A frame of some library that is known by its Arrow stream alone, such as pyarrow's."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._frame.__arrow_c_stream__(requested_schema)


def devices(size: int = 400) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    age = rng.normal(40.0, 9.0, size)
    return pl.DataFrame(
        {
            "unit_id": [f"c{k:03d}" for k in range(size)],
            "age": age,
            "os": rng.choice(["ios", "web", "droid"], size),
            "urban": rng.random(size) < 0.4,
            "enrolled": rng.random(size) < 1.0 / (1.0 + np.exp(0.5 - 0.05 * (age - 40.0))),
        }
    )


def in_files(suffix: str) -> Callable[[pl.DataFrame, Path], Any]:
    def written(frame: pl.DataFrame, folder: Path) -> Path:
        write_table(frame, folder / f"people{suffix}")
        return folder / f"people{suffix}"

    return written


def in_parts(frame: pl.DataFrame, folder: Path) -> Path:
    for k in range(4):
        frame.slice(100 * k, 100).write_parquet(folder / f"{k}.parquet")
    return folder


FORMS: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    **{suffix: in_files(suffix) for suffix in (".parquet", ".csv", ".csv.gz", ".tsv", ".feather")},
    "text of a path": lambda frame, folder: str(in_files(".parquet")(frame, folder)),
    "directory": in_parts,
    "polars": lambda frame, _: frame,
    "query": lambda frame, _: frame.lazy(),
    "pandas": lambda frame, _: pd.DataFrame(frame.to_dict(as_series=False)),
    "arrow": lambda frame, _: Speaks(frame),
    "table": lambda frame, _: Table(frame),
    "table of a path": lambda frame, folder: Table(in_parts(frame, folder)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_population_is_the_same_in_every_form(form: str, tmp_path: Path) -> None:
    frame = devices()
    population = Population(FORMS[form](frame, tmp_path))
    assert (population.size, population.listed, population.lists_everyone) == (400, 400, True)
    assert population.covariates == ("age", "os", "urban")
    members = population.members
    assert members.frame.equals(frame.filter("enrolled"))
    assert members.covariates == ("age", "os", "urban")
    assert repr(population) == f"Population({members.size} enrolled of 400)"
    design = bound_design("age + os", frame.lazy(), ["age", "os"])
    moments = population.moments(design)
    assert moments.names == ("age", "os[ios]", "os[web]")
    expected = design.rows(frame, "table").columns.mean(axis=1)
    np.testing.assert_allclose(moments.mean, expected, rtol=1e-13)
    assert moments.se is None
    stage, plain = (enrollment_stage(p) for p in (population, Population(frame)))
    present = np.ones(members.size, dtype=np.bool_)
    np.testing.assert_allclose(
        stage.fitted(present, required=True).prob, plain.fitted(present, required=True).prob,
        rtol=1e-12,
    )  # fmt: skip
    assert (stage.size, stage.formula) == (400, ".")


@pytest.mark.parametrize("form", FORMS)
def test_enrolled_clients_and_totals_come_in_every_form(form: str, tmp_path: Path) -> None:
    inside = devices().filter("enrolled").drop("enrolled")
    targets = pl.DataFrame({"name": ["age", "os[web]"], "value": [41.0, 0.3], "se": [0.1, 0.0]})
    (tmp_path / "people").mkdir()
    (tmp_path / "targets").mkdir()
    if form in {"directory", "table of a path"}:
        targets_given: Any = targets  # a directory of four parts needs more rows
    else:
        targets_given = FORMS[form](targets, tmp_path / "targets")
    given = FORMS[form](inside, tmp_path / "people")
    population = Population.from_totals(given, targets_given, size=5_000)
    listed = inside.head(400)
    assert population.members.frame.equals(listed)
    assert (population.size, population.listed) == (5_000, listed.height)
    assert not population.lists_everyone
    moments = population.moments(["os[web]", "age"])
    assert moments.mean.tolist() == [0.3, 41.0]
    assert moments.se is not None
    assert moments.se.tolist() == [0.0, 0.1]
    stage = enrollment_stage(population)
    balance = stage.balance("main", np.ones(listed.height, dtype=np.bool_))
    np.testing.assert_array_equal(balance.matrix[:, 0], listed["age"].to_numpy())
    np.testing.assert_array_equal(balance.matrix[:, 1], listed["os"].to_numpy() == "web")


# Totals and samples


def test_totals_count_only_enrolled_clients_where_flags_say_so() -> None:
    frame = devices()
    population = Population.from_totals(frame, {"age": 41.0})
    assert population.members.frame.equals(frame.filter("enrolled"))
    assert population.size is None
    inside = frame["enrolled"].sum()
    assert repr(population) == f"Population({inside} enrolled, means of age known)"


def test_moments_of_totals_are_looked_up_by_name() -> None:
    frame = devices()
    population = Population.from_totals(frame, {"age": 41.0, "os[web]": 0.3, "os[ios]": 0.2})
    design = bound_design("os", frame.lazy(), ["os"])
    moments = population.moments(design)
    assert (moments.names, moments.mean.tolist(), moments.se) == (
        ("os[ios]", "os[web]"), [0.2, 0.3], None,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"no target for urban, os\[droid\]"):
        population.moments(["age", "urban", "os[droid]"])


def test_moments_of_names_need_targets() -> None:
    with pytest.raises(InputError, match="names alone need targets: give a design"):
        Population(devices()).moments(["age"])


def test_moments_of_a_sample_are_weighted_with_their_errors() -> None:
    frame = devices()
    sample = frame.drop("enrolled", "unit_id")[::4].with_columns(d=pl.int_range(pl.len()) % 3 + 2.5)
    population = Population.from_sample(frame.filter("enrolled"), sample, "d")
    d = sample["d"].to_numpy()
    assert population.size == pytest.approx(d.sum())
    assert not population.lists_everyone
    assert "reference sample of 100" in repr(population)
    moments = population.moments(bound_design("age", frame.lazy(), ["age"]))
    age, share = sample["age"].to_numpy(), d / d.sum()
    np.testing.assert_allclose(moments.mean, [share @ age], rtol=1e-14)
    assert moments.se is not None
    np.testing.assert_allclose(moments.se, [np.sqrt(share**2 @ (age - share @ age) ** 2)])


@pytest.mark.parametrize("make", ["totals", "sample"])
def test_what_needs_everybody_says_what_to_do_instead(make: str) -> None:
    frame = devices()
    population = Population.from_totals(frame, {"age": 41.0})
    if make == "sample":
        population = Population.from_sample(frame, frame.with_columns(d=pl.lit(2.0)), "d")
    with pytest.raises(InputError, match=r"collapsed needs a table of the whole .*calibrated"):
        population.everyone("collapsed")
    assert Population(frame).everyone("collapsed").rows == 400


@pytest.mark.parametrize("odd", [[1, 2], {"unit_id": [1]}, 7, None, np.zeros((2, 2)), b"x"])
def test_what_is_no_table_is_told_what_is(odd: Any) -> None:
    said = rf"A table is a path \(str or Path\) or a frame \(.*not {type(odd).__name__}\."
    with pytest.raises(InputError, match=said):
        Population(odd)
    with pytest.raises(InputError, match=said):
        Population.from_totals(odd, {"age": 41.0})
    for enrolled, sample in ((odd, devices()), (devices(), odd)):
        with pytest.raises(InputError, match=said):
            Population.from_sample(enrolled, sample, "age")


def test_what_are_no_targets_and_no_size_is_told_what_is() -> None:
    for odd in ([("age", 45.0)], 45.0, None):
        with pytest.raises(InputError, match=rf"Targets are values by name .*{type(odd).__name__}"):
            Population.from_totals(devices(), odd)  # type: ignore[arg-type]
    sizes: list[Any] = [0, -1.0, np.nan, np.inf, "1000", [5]]
    for size in sizes:
        with pytest.raises(InputError, match="population_size must be a finite number above 0"):
            Population.from_totals(devices(), {"age": 41.0}, size=size)


def test_a_table_without_flags_lists_nobody_as_enrolled() -> None:
    population = Population(devices().drop("enrolled"))
    assert repr(population) == "Population(400 clients of 400)"
    with pytest.raises(InputError, match="has no column 'enrolled'; it has unit_id, age, os"):
        _ = population.members


def test_a_path_is_read_when_it_is_needed(tmp_path: Path) -> None:
    population = Population(tmp_path / "none.parquet")
    with pytest.raises(InputError, match=r"No file .*none\.parquet"):
        _ = population.members
