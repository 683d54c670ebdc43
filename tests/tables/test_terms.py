"""Terms by name: columns, levels, powers, products."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.tables.design import bound_design
from fedipw.tables.formula import (
    MISSING,
    Factor,
    Term,
    level_text,
    sorted_levels,
    term_matrix,
    term_of,
)


def formula_terms(formula: str, frame: pl.DataFrame) -> tuple[Term, ...]:
    """Return the terms that a formula makes of a table of clients."""
    names = [name for name in frame.columns if name not in {"unit_id", "enrolled"}]
    return bound_design(formula, frame.lazy(), names, checked=False).terms


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


def values(factor: Factor, frame: pl.DataFrame) -> list[float | None]:
    return frame.select(factor.expression(frame.schema)).to_series().to_list()


def test_factors_know_what_to_do_where_a_value_is_missing() -> None:
    frame = pl.DataFrame(
        {
            "age": [1.0, None, float("nan"), 3.0],
            "rooms": [1, None, 2, 2],
            "os": ["ios", None, MISSING, "android"],
            "new": [True, None, False, True],
        }
    )
    assert values(Factor("age", missing=True), frame) == [0.0, 1.0, 1.0, 0.0]
    assert values(Factor("age", level=MISSING), frame) == [0.0, 1.0, 1.0, 0.0]
    assert values(Factor("rooms", missing=True), frame) == [0.0, 1.0, 0.0, 0.0]
    assert values(Factor("os", missing=True), frame) == [0.0, 1.0, 0.0, 0.0]
    assert values(Factor("os", level=MISSING), frame) == [0.0, 1.0, 1.0, 0.0]
    assert values(Factor("age", fill=2.0), frame) == [1.0, 2.0, 2.0, 3.0]
    assert values(Factor("age", power=2, fill=2.0), frame) == [1.0, 4.0, 4.0, 9.0]
    assert values(Factor("age", knots=(1.0, 3.0), basis=1, fill=2.0), frame) == [0, 0.5, 0.5, 1]
    assert values(Factor("rooms", level="2", fill=0.0), frame) == [0.0, 0.0, 1.0, 1.0]
    assert values(Factor("os", level="ios", fill=0.0), frame) == [1.0, 0.0, 0.0, 0.0]
    assert values(Factor("new", level="false", fill=0.0), frame) == [0.0, 0.0, 1.0, 0.0]
    assert values(Factor("new", fill=0.5), frame) == [1.0, 0.5, 0.0, 1.0]


def test_levels_of_an_enumeration_and_levels_it_has_not() -> None:
    frame = pl.DataFrame({"os": pl.Series(["b", "a", None], dtype=pl.Enum(["b", "a"]))})
    assert values(Factor("os", level="a"), frame) == [0.0, 1.0, None]
    assert values(Factor("os", level="z"), frame) == [0.0, 0.0, None]
    assert [t.name for t in formula_terms("os", frame)] == ["os[b]"]  # sorted by spelling


def test_names_of_factors() -> None:
    spline = Factor("age", knots=(20.0, 40.5, 60.0), basis=2)
    assert spline.name == "ns(age, 20, 40.5, 60)[2]"
    assert Factor("age", missing=True).name == "age[missing]"
    assert len({spline, Factor("age", knots=(20.0, 40.5, 60.0), basis=2)}) == 1  # hashable


def test_formulas_take_terms_once_whatever_their_order() -> None:
    names = [t.name for t in formula_terms("rooms:age + age:rooms + age*rooms", FRAME)]
    assert names == ["rooms:age", "age", "rooms"]
    assert [t.name for t in formula_terms("age:age + age**2", FRAME)] == ["age**2"]
    assert [t.name for t in formula_terms("os:os", FRAME)] == ["os[ios]", "os[other]"]
    splines = formula_terms("ns(age, 0, 9):ns(age, 0, 9) + ns(age, 0, 9)", FRAME)
    assert len(splines) == 2


def test_products_of_categories_have_every_pair_of_levels_but_the_first() -> None:
    terms = formula_terms("os:C(rooms) + kind:new", FRAME)
    assert [t.name for t in terms] == ["os[ios]:rooms[2]", "os[other]:rooms[2]", "kind[y]:new"]
    np.testing.assert_array_equal(
        term_matrix(terms, FRAME), [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    )


def test_a_dot_leaves_out_ids_and_enrollment() -> None:
    frame = pl.DataFrame({"unit_id": ["a", "b"], "enrolled": [True, False], "age": [1, 2]})
    assert [t.name for t in formula_terms(".", frame)] == ["age"]
    with pytest.raises(InputError, match="'enrolled' names no column that may be used"):
        formula_terms("enrolled", frame)


def test_terms_are_taken_away_and_only_if_they_are_there() -> None:
    assert [t.name for t in formula_terms("age*rooms - age:rooms", FRAME)] == ["age", "rooms"]
    assert [t.name for t in formula_terms("os - os[ios]", FRAME)] == ["os[other]"]
    with pytest.raises(InputError, match="takes away 'rooms', which it has not"):
        formula_terms("age - rooms", FRAME)


def test_a_product_that_is_zero_everywhere_is_refused() -> None:
    with pytest.raises(InputError, match=r"os\[ios\]:os\[other\] is 0 in every row"):
        formula_terms("os[ios]:os[other]", FRAME)


def test_powers_and_splines_of_text_are_refused() -> None:
    for formula in ("os**2", "ns(os, 1, 2)"):
        with pytest.raises(InputError, match="'os' holds String, not numbers"):
            formula_terms(formula, FRAME)


def test_two_terms_never_have_one_name() -> None:
    frame = pl.DataFrame({"a": [2.0], "b": [3.0], "a:b": [7.0], "a**2": [1.0]})
    terms = formula_terms("a:b + `a`:`b` + a**2 + `a`**2", frame)
    assert [t.name for t in terms] == ["a:b", "`a`:`b`", "a**2", "`a`**2"]
    np.testing.assert_array_equal(term_matrix(terms, frame), [[7.0, 6.0, 1.0, 4.0]])


def test_levels_of_numbers_are_sorted_by_size_and_written_one_way() -> None:
    assert sorted_levels(pl.Series([10, 9, None])) == ("9", "10")
    assert sorted_levels(pl.Series([0.5, -0.0, 0.0, float("nan")])) == ("0", "0.5")
    assert sorted_levels(pl.Series([True, False])) == ("false", "true")
    assert level_text("2.0", pl.Int64(), "rooms") == "2"
    assert level_text("Yes", pl.Boolean(), "new") == "true"
    assert level_text(MISSING, pl.Int64(), "rooms") == MISSING


REFERENCE = Path(__file__).parent.parent / "reference" / "ns_R.csv"


@pytest.mark.parametrize(
    ("knots", "prefix"),
    [((0.0, 1.7, 4.0, 10.0), "a"), ((-1.0, 1.0, 2.0, 2.5, 7.0, 9.0), "b"), ((0.0, 10.0), "c")],
)
def test_splines_span_what_ns_of_r_spans(knots: tuple[float, ...], prefix: str) -> None:
    frame = pl.read_csv(REFERENCE)
    theirs = frame.select(f"^{prefix}[0-9]$").to_numpy()
    ours = term_matrix(formula_terms(f"ns(x, {', '.join(map(str, knots))})", frame), frame)
    assert ours.shape == theirs.shape == (frame.height, len(knots) - 1)
    for one, other in ((ours, theirs), (theirs, ours)):
        rest = other - one @ np.linalg.lstsq(one, other, rcond=None)[0]
        assert np.abs(rest).max() < 1e-10


def test_a_regression_on_a_spline_fits_what_r_fits() -> None:
    frame = pl.read_csv(REFERENCE)
    basis = term_matrix(formula_terms("ns(x, 0, 1.7, 4, 10)", frame), frame)
    matrix = np.column_stack([np.ones(frame.height), basis])
    y = frame["y"].to_numpy()
    fitted = matrix @ np.linalg.lstsq(matrix, y, rcond=None)[0]
    np.testing.assert_allclose(fitted, frame["fit_a"].to_numpy(), atol=1e-10)


def test_splines_are_straight_lines_outside_however_far() -> None:
    frame = pl.DataFrame({"x": [-3e8, -2e8, -1e8, 1e8, 2e8, 3e8]})
    for term in formula_terms("ns(x, 0, 1, 2, 5)", frame):
        below, above = np.split(term.values(frame), 2)
        for side in (below, above):
            assert abs(side[0] - 2 * side[1] + side[2]) <= 1e-15 * np.abs(side).max()


def test_the_term_of_a_name_is_what_it_was() -> None:
    assert term_of("age:new", FRAME.schema) == Term("age:new", (Factor("age"), Factor("new")))
    with pytest.raises(InputError, match="names no column"):
        term_of("C(rooms)", FRAME.schema)
