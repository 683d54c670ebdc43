"""Designs: what they learn of a table, and what they make of it and of others."""

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.tables.design import Design, Missing, bound_design

NAN = float("nan")
PEOPLE = pl.DataFrame(
    {
        "age": [20.0, 40.0, 60.0, 30.0],
        "rooms": [1, 10, 2, 2],
        "os": ["ios", "android", "other", "ios"],
        "new": [True, False, True, True],
        "household income": [1.0, 2.0, 3.0, 4.0],
        "kind": pl.Series(["x", "y", "x", "y"], dtype=pl.Categorical),
        "size": pl.Series(["s", "l", "m", "s"], dtype=pl.Enum(["s", "m", "l"])),
        "one": ["same"] * 4,
    }
)


def bound(
    formula: str,
    frame: pl.DataFrame = PEOPLE,
    missing: Missing = Missing.ERROR,
    lump_below: float | None = None,
) -> Design:
    return bound_design(
        formula, frame.lazy(), frame.columns, missing=missing, lump_below=lump_below, where="people"
    )


@pytest.mark.parametrize(
    ("formula", "columns"),
    [
        ("age", {"age": [20, 40, 60, 30]}),
        ("age + age", {"age": [20, 40, 60, 30]}),
        ("rooms**2", {"rooms**2": [1, 100, 4, 4]}),
        ("new", {"new": [1, 0, 1, 1]}),
        ("new[no]", {"new[false]": [0, 1, 0, 0]}),
        ("C(new)", {"new[true]": [1, 0, 1, 1]}),
        ("os", {"os[ios]": [1, 0, 0, 1], "os[other]": [0, 0, 1, 0]}),
        ("os[android]", {"os[android]": [0, 1, 0, 0]}),
        ("os - os[ios]", {"os[other]": [0, 0, 1, 0]}),
        ("C(rooms)", {"rooms[2]": [0, 0, 1, 1], "rooms[10]": [0, 1, 0, 0]}),  # 10 after 2
        ("rooms[2.0] + rooms[7]", {"rooms[2]": [0, 0, 1, 1], "rooms[7]": [0, 0, 0, 0]}),
        ("C(rooms) + rooms[2]", {"rooms[2]": [0, 0, 1, 1], "rooms[10]": [0, 1, 0, 0]}),
        ("kind", {"kind[y]": [0, 1, 0, 1]}),
        ("size", {"size[m]": [0, 0, 1, 0], "size[s]": [1, 0, 0, 1]}),
        ("household income:age", {"household income:age": [20, 80, 180, 120]}),
        ("one", {}),
        ("one + age + one:age", {"age": [20, 40, 60, 30]}),
        ("os:kind", {"os[ios]:kind[y]": [0, 0, 0, 1], "os[other]:kind[y]": [0, 0, 0, 0]}),
        ("new*kind", {"new": [1, 0, 1, 1], "kind[y]": [0, 1, 0, 1], "new:kind[y]": [0, 0, 0, 1]}),
        ("ns(age, 20, 60)", {"ns(age, 20, 60)[1]": [0, 0.5, 1, 0.25]}),
        (
            "ns(age, 20, 40, 60):new",
            {
                "ns(age, 20, 40, 60)[1]:new": [0, 0, 1, 0.25],
                "ns(age, 20, 40, 60)[2]:new": [0, 0, 0.75, 0.25**3],
            },
        ),
        ("rooms + C(rooms) - rooms[10]", {"rooms": [1, 10, 2, 2], "rooms[2]": [0, 0, 1, 1]}),
        (". - os - kind - size - rooms - `household income` - one - age", {"new": [1, 0, 1, 1]}),
    ],
)  # fmt: skip
def test_designs_by_hand(formula: str, columns: dict[str, list[float]]) -> None:
    design = bound(formula)
    rows = design.rows(PEOPLE, "people")
    assert design.names == tuple(columns)
    expected = np.array(list(columns.values()), dtype=float).reshape(len(columns), 4)
    np.testing.assert_array_equal(rows.columns, expected)
    assert rows.columns.flags.c_contiguous
    assert rows.columns.dtype == np.float64
    assert (rows.kept, rows.missing, rows.unseen) == (None, {}, {})


def test_a_design_says_what_it_needs() -> None:
    design = bound("age:os + C(rooms) + new")
    assert design.columns == ("age", "os", "rooms", "new")
    assert design.kinds == {"age": "number", "os": "category", "rooms": "number", "new": "flag"}
    assert design.levels == {"os": ("android", "ios", "other"), "rooms": ("1", "2", "10")}
    assert (design.fills, design.lumped) == ({}, {})


def test_columns_may_have_names_that_mean_something_elsewhere() -> None:
    frame = pl.DataFrame(
        {"variable": ["a", "b"], "value": ["c", "d"], "level": [1, 2], "len": [1, 3]}
    )
    design = bound("variable + value + C(level) + C(len)", frame)
    assert design.names == ("variable[b]", "value[d]", "level[2]", "len[3]")
    np.testing.assert_array_equal(design.rows(frame, "people").columns, [[0.0, 1.0]] * 4)


def test_what_is_taken_away_is_not_looked_at() -> None:
    frame = PEOPLE.with_columns(gone=pl.lit(None, dtype=pl.Float64), day=pl.date(2020, 1, 1))
    assert bound("age + gone + day - gone - day", frame).columns == ("age",)
    assert "gone" not in bound(". - gone - day", frame).columns


@pytest.mark.parametrize("kind", [pl.Float32, pl.Int8, pl.UInt64, pl.Decimal(10, 2), pl.Int16])
def test_numbers_of_every_type(kind: pl.DataType) -> None:
    frame = pl.DataFrame({"x": pl.Series([3, 1, 2]).cast(kind)})
    rows = bound("x + x**2 + C(x)", frame).rows(frame, "people")
    np.testing.assert_array_equal(
        rows.columns, [[3.0, 1.0, 2.0], [9.0, 1.0, 4.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    )


def test_numbers_may_change_their_width_but_not_their_kind() -> None:
    design = bound("rooms + C(rooms) + os")
    same = PEOPLE.with_columns(pl.col("rooms").cast(pl.Float64), pl.col("os").cast(pl.Categorical))
    np.testing.assert_array_equal(
        design.rows(same, "later").columns, design.rows(PEOPLE, "people").columns
    )


# Levels


def test_unknown_levels_are_an_error_unless_said_otherwise() -> None:
    design = bound("os + C(rooms)")
    later = PEOPLE.with_columns(os=pl.Series(["web", "ios", "web", "tv"]))
    message = r"later: 'os' has 2 level\(s\) in 3 rows that were not there .*: 'tv', 'web'\. Choose"
    with pytest.raises(InputError, match=message):
        design.rows(later, "later")
    with pytest.raises(InputError, match=r"'rooms' has 1 level\(s\) in 1 rows.*: '7'"):
        design.rows(PEOPLE.with_columns(rooms=pl.Series([1, 2, 7, 2])), "later")
    with pytest.raises(
        InputError, match=r"No row was missing at binding, so there is no \(missing"
    ):
        bound("os", PEOPLE, Missing.INDICATOR).rows(later, "later")


def test_rows_of_unknown_levels_are_dropped() -> None:
    design = bound("os + C(rooms)", PEOPLE, Missing.DROP)
    later = PEOPLE.with_columns(os=pl.Series(["web", "ios", "ios", None]))
    rows = design.rows(later.with_columns(rooms=pl.Series([1.0, 1.0, 3.0, 2.0])), "later")
    assert rows.kept is not None
    assert rows.kept.tolist() == [False, True, False, False]
    assert rows.missing == {"os": 2, "rooms": 1}
    assert rows.unseen == {"os": ("web",), "rooms": ("3",)}


def test_rare_levels_are_merged_and_take_unknown_ones_in() -> None:
    frame = pl.DataFrame({"os": ["ios"] * 10 + ["android"] * 8 + ["tv", "web"]})
    design = bound("os", frame, lump_below=0.1)
    assert design.levels == {"os": ("android", "ios", "(other)")}
    assert design.lumped == {"os": ("tv", "web")}
    rows = design.rows(pl.DataFrame({"os": ["ios", "web", "fridge", "android"]}), "later")
    np.testing.assert_array_equal(rows.columns, [[1, 0, 0, 0], [0, 1, 1, 0]])
    assert (rows.unseen, rows.missing) == ({"os": ("fridge",)}, {})
    assert bound("os", frame, lump_below=0.05).lumped == {}  # 1 of 20 is not below 0.05
    with pytest.raises(InputError, match=r"'os' has 1 level\(s\)"):
        bound("os", frame, lump_below=0.01).rows(pl.DataFrame({"os": ["fridge"]}), "later")


def test_merged_levels_and_missing_ones_side_by_side() -> None:
    frame = pl.DataFrame({"k": [1, 1, 1, 2, 2, 2, 3, None, None]})
    design = bound("C(k) + k[(other)]", frame, Missing.INDICATOR, lump_below=0.2)
    assert design.levels == {"k": ("1", "2", "(other)", "(missing)")}
    later = pl.DataFrame({"k": [1.0, 2.0, 3.0, 4.0, None, NAN]})
    rows = design.rows(later, "later")
    np.testing.assert_array_equal(
        rows.columns, [[0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]
    )
    assert (rows.missing, rows.unseen) == ({"k": 2}, {"k": ("4",)})
    dropped = bound("C(k)", frame, Missing.DROP, lump_below=0.2).rows(later, "later")
    assert dropped.kept is not None
    assert dropped.kept.tolist() == [True, True, True, True, False, False]


def test_all_levels_may_be_rare() -> None:
    frame = pl.DataFrame({"k": list(range(10)), "t": list("abcdefghij")})
    design = bound("C(k) + t", frame, lump_below=0.5)
    assert design.names == ()
    assert design.rows(frame, "people").columns.shape == (0, 10)


def test_levels_that_are_called_like_ours() -> None:
    frame = pl.DataFrame({"os": ["(missing)", "(other)", "z", None]})
    design = bound("os", frame, Missing.INDICATOR)
    assert design.levels == {"os": ("(other)", "z", "(missing)")}
    np.testing.assert_array_equal(
        design.rows(frame, "people").columns, [[0, 0, 1, 0], [1, 0, 0, 1]]
    )
    whole = frame.head(3)
    assert bound("os", whole).names == ("os[(other)]", "os[z]")
    with pytest.raises(InputError, match="'os' is missing in 1 of 4"):
        bound("os", whole).rows(frame, "later")


def test_more_levels_than_a_model_can_have() -> None:
    frame = pl.DataFrame({"id": [f"u{i:04}" for i in range(501)], "n": range(501)})
    message = r"people: 'id' has 501 levels \(u0000, .* and 496 more\), more than 500\. Merge rare"
    with pytest.raises(InputError, match=message):
        bound("id", frame)
    with pytest.raises(InputError, match="'n' has 501 levels"):
        bound("C(n)", frame)
    assert len(bound("id", frame.head(500)).names) == 499
    assert bound(". - id", frame).names == ("n",)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("os[IOS]", r"os\[IOS\]: this level is not in the table; did you mean 'ios'\? Levels: and"),
        ("rooms[two]", r"'rooms' holds numbers, 'two' is none"),
        ("C(rooms) + rooms[7]", r"rooms\[7\]: this level is not in the table"),
        ("new[maybe]", r"'new' is true or false"),
        ("os**2", r"'os' holds String, not numbers"),
        ("ns(os, 1, 2)", r"'os' holds String, not numbers"),
        ("age - age", r"'age - age' has no terms"),
        ("age - os", r"takes away 'os', which it has not"),
        ("age + os - age:os", r"takes away 'age:os', which it does not have"),
        ("agee", r"'agee' names no column; did you mean 'age'\?"),
    ],
)
def test_what_is_said_of_formulas_that_cannot_be_bound(formula: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bound(formula)


def test_only_covariates_may_be_named_and_they_must_be_there() -> None:
    with pytest.raises(InputError, match="'os' names no column that may be used"):
        bound_design("age + os", PEOPLE.lazy(), ["age"])
    with pytest.raises(InputError, match="clients has no column 'agee'; did you mean 'age'"):
        bound_design(".", PEOPLE.lazy(), ["agee"], where="clients")
    with pytest.raises(InputError, match="later has no column 'age'"):
        bound("age").rows(PEOPLE.drop("age"), "later")


def test_a_merged_level_cannot_be_named() -> None:
    with pytest.raises(InputError, match=r"os\[other\]: this level is merged into \(other\)\. Lev"):
        bound("os[other]", PEOPLE, lump_below=0.4)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, NAN])
def test_shares_below_which_levels_are_merged(share: float) -> None:
    with pytest.raises(InputError, match="lump_below must be a share between 0 and 1"):
        bound("os", PEOPLE, lump_below=share)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("age", ["a", "b"], r"later: 'age' holds String \(a category\), but was a number"),
        ("os", [1, 2], r"later: 'os' holds Int64 \(a number\), but was a category"),
        ("new", [1, 0], r"later: 'new' holds Int64 \(a number\), but was a flag"),
        ("age", [True, False], r"'age' holds Boolean \(a flag\), but was a number"),
        ("age", [[1], [2]], r"'age' holds List\(Int64\), neither numbers nor text"),
    ],
)
def test_columns_that_change_their_type(column: str, values: list[object], message: str) -> None:
    later = PEOPLE.head(2).with_columns(pl.Series(column, values))
    with pytest.raises(InputError, match=message):
        bound("age + os + new").rows(later, "later")


def test_dates_are_neither_numbers_nor_text() -> None:
    frame = PEOPLE.with_columns(day=pl.date(2020, 1, 1))
    with pytest.raises(InputError, match=r"'day' holds Date, neither numbers nor text.*days since"):
        bound("day", frame)
