"""Targets as they are published: totals, rounded shares, levels of any character, unknown names."""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fedipw
from fedipw.errors import InfeasibleError, InputError
from fedipw.selection.coded import table_model
from fedipw.selection.saved import StageModel
from fedipw.tables import Population, Table, Targets
from fedipw.tables.design import bound_design
from fedipw.tables.formula import formula_clauses, formula_names, level_named, term_of

ODD = ("(0,19]", "[20,30)", "a:b", "a]b", "a + b", "x]", "[", "`", "a**2", "ns(a, 1, 2)", "5%", " ")
LONG = ("os[" + " " * 8_000, "os[" + "] " * 8_000 + "x", "os" + "[" * 8_000, "os[a]x" * 4_000,
        "os['" + "'" * 8_000)  # fmt: skip
TOO_LITTLE = (
    r"the shares of 'os' sum to 0\.98, not 1, and enrolled clients have no other level: "
    r"os\[ios\] = 0\.33, os\[web\] = 0\.33, os\[tv\] = 0\.32\. Rounding to 2 decimals explains a "
    r"miss of 0\.015 at most\."
)


def phones(*levels: str, column: str = "os") -> pl.DataFrame:
    """Two clients of each level."""
    twice = [level for level in levels for _ in range(2)]
    return pl.DataFrame({"unit_id": range(len(twice)), column: twice})


def test_totals_are_divided_by_the_population_size() -> None:
    targets = Targets.of({"age": 45_000.0, "os[ios]": 300}, {"age": 500.0}, totals=1_000)
    assert targets.values.tolist() == [45.0, 0.3]
    assert targets.se is not None
    assert targets.se.tolist() == [0.5, 0.0]
    frame = phones("ios", "web")
    by_share = fedipw.calibrate(frame, {"os[ios]": 0.3}, population_size=1_000)
    by_count = fedipw.calibrate(frame, {"os[ios]": 300}, population_size=1_000, totals=True)
    assert by_count.table.equals(by_share.table)
    with pytest.raises(InputError, match=r"Totals need population_size: they are divided by it"):
        fedipw.calibrate(frame, {"os[ios]": 300}, totals=True)
    with pytest.raises(InputError, match=r"Totals .* need the population size"):
        Population.from_totals(frame, {"os[ios]": 300}, totals=True)
    with pytest.raises(InputError, match=r"os\[ios\] = 1200: the count of a level lies between"):
        Targets.of({"os[ios]": 1_200}, totals=1_000)
    with pytest.raises(InputError, match=r"counts of 'os' sum to 1010, more than N = 1000"):
        Targets.of({"os[ios]": 300, "os[web]": 710}, totals=1_000)
    with pytest.raises(InputError, match=r"Targets hold means already"):
        Targets.given(Targets.of({"age": 4.0}), totals=10.0)


@pytest.mark.parametrize("value", [300.0, 30.0, 1.5])
def test_a_count_without_totals_is_told_what_to_do(value: float) -> None:
    message = (
        rf"os\[ios\] = {value:g}: the share of a level lies between 0 and 1\. If this is a count, "
        r"divide by N or pass --totals \(totals=\) with the population size; if it is a "
        r"percentage, divide by 100\."
    )
    with pytest.raises(InputError, match=message):
        Targets.of({"os[ios]": value})
    with pytest.raises(InputError, match="the share of a level lies between 0 and 1"):
        fedipw.calibrate(pl.DataFrame({"unit_id": [1, 2], "wifi": [True, False]}), {"wifi": value})


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.33, 0.33, 0.33), "sum to 0.99, which rounding to 2 decimals explains"),
        ((0.34, 0.33, 0.34), "sum to 1.01, which rounding to 2 decimals explains"),
        ((0.3, 0.3, 0.3), "sum to 0.9, which rounding to 1 decimals explains"),
        ((0.6, 0.3, 0.2), "sum to 1.1, which rounding to 1 decimals explains"),
        ((0.3333, 0.3333, 0.3333), "sum to 0.9999, which rounding to 4 decimals explains"),
    ],
)
def test_shares_that_miss_1_by_rounding_are_rescaled_and_said_so(
    shares: tuple[float, ...], said: str
) -> None:
    frame, names = phones("ios", "web", "tv"), ("os[ios]", "os[web]", "os[tv]")
    found = fedipw.calibrate(frame, dict(zip(names, shares, strict=True)))
    (note,) = found.calibration.notes
    assert note == f"The shares of 'os' {said}: rescaled to sum to 1."
    each = found.table["weight"].to_numpy().reshape(3, 2).sum(axis=1)
    assert each == pytest.approx([share / sum(shares) for share in shares], rel=1e-12)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.33, 0.33, 0.32), TOO_LITTLE),
        ((0.36, 0.33, 0.33), r"shares of 'os' sum to 1\.02, more than 1: .* Rounding to 2 "),
        ((1.0, 1.0, 0.0), r"shares of 'os' sum to 2, more than 1"),
    ],
)
def test_shares_further_off_are_an_error_that_gives_their_sum(
    shares: tuple[float, ...], message: str
) -> None:
    frame, names = phones("ios", "web", "tv"), ("os[ios]", "os[web]", "os[tv]")
    with pytest.raises(InputError, match=message):
        fedipw.calibrate(frame, dict(zip(names, shares, strict=True)))


def test_shares_of_some_levels_may_sum_to_less() -> None:
    found = fedipw.calibrate(phones("ios", "web", "tv"), {"os[ios]": 0.3, "os[web]": 0.3})
    assert found.calibration.notes == ()
    assert found.table["weight"].to_numpy()[-2:].sum() == pytest.approx(0.4, rel=1e-12)


def test_counts_miss_n_by_what_rounding_to_whole_clients_explains() -> None:
    frame = phones("ios", "web", "tv")
    counts = {"os[ios]": 333, "os[web]": 333, "os[tv]": 333}
    found = fedipw.calibrate(frame, counts, population_size=1_000, totals=True)
    (note,) = found.calibration.notes
    assert note == (
        "The counts of 'os' sum to 999, which rounding to 0 decimals explains: rescaled to sum to "
        "N = 1000."
    )
    with pytest.raises(InputError, match=r"counts of 'os' sum to 998, not N = 1000"):
        fedipw.calibrate(frame, counts | {"os[tv]": 332}, population_size=1_000, totals=True)


def test_decimals_are_those_written_in_32_bits_too() -> None:
    frame = pl.DataFrame({"name": ["os[a]", "os[b]"], "value": [0.33, 0.66]})
    narrow = frame.with_columns(pl.col("value").cast(pl.Float32))
    assert Targets.given(narrow).decimals == Targets.given(frame).decimals == (2, 2)


@pytest.mark.parametrize("level", [level for level in ODD if level.strip()])
def test_levels_may_hold_any_character(level: str, tmp_path: Path) -> None:
    frame = phones(level, "other", column="agecat")
    path = tmp_path / "t.csv"
    pl.DataFrame({"name": [f"agecat[{level}]"], "value": [0.3]}).write_csv(path)
    found = fedipw.calibrate(frame, path)
    assert found.table["weight"].to_numpy()[:2].sum() == pytest.approx(0.3, rel=1e-12)


@pytest.mark.parametrize("level", [level for level in ODD if '"' not in level])
def test_levels_in_quotes_may_hold_any_character_in_formulas(level: str) -> None:
    frame = phones(level, "other", column="agecat").with_columns(age=pl.int_range(4))
    design = bound_design(f'agecat["{level}"] + age', frame.lazy(), ["agecat", "age"])
    assert design.rows(frame, "t").columns[0].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_levels_end_where_a_sign_follows() -> None:
    frame = phones("(0,19]", "a:b", column="agecat").with_columns(age=pl.int_range(4))
    for formula in ("agecat[(0,19]] + age", "age + agecat[(0,19]]", "agecat[(0,19]]:age + age"):
        design = bound_design(formula, frame.lazy(), ["agecat", "age"])
        assert "agecat[(0,19]]" in design.names[0] + design.names[-1]
    assert formula_names("agecat[(0,19]] + plan[a:b] + age") == ("agecat", "plan", "age")
    product = term_of("agecat[(0,19]]:age", frame.schema)
    assert product.values(frame).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_names_of_columns_in_backquotes() -> None:
    frame = pl.DataFrame({"unit_id": [1, 2], "a[b]:c": ["x]", "y"]})
    found = fedipw.calibrate(frame, {"`a[b]:c`[x]]": 0.25})
    assert found.table["weight"].to_list() == pytest.approx([0.25, 0.75], rel=1e-12)
    assert level_named("`a[b]:c`[x]]") == ("a[b]:c", "x]")


@given(level=st.text(min_size=1, max_size=12).filter(lambda text: text == text.strip()))
@example(level="x]:os[ios")
def test_what_is_written_for_a_level_is_read_as_it(level: str) -> None:
    """By its name, unless the name is a product of terms too; then in quotes."""
    schema = pl.Schema({"os": pl.String(), "age": pl.Float64()})
    term = term_of(f"os[{level}]", schema)
    if len(term.factors) == 1 and level[0] not in "`\"'":
        assert term.level == ("os", level)
    quotes = [mark for mark in "\"'`" if mark not in level]
    for mark in quotes[:1]:
        assert term_of(f"os[{mark}{level}{mark}]", schema).level == ("os", level)


@pytest.mark.parametrize("text", LONG)
def test_names_are_read_in_time_by_their_length(text: str) -> None:
    started = time.process_time()
    with pytest.raises(InputError):
        formula_clauses(text, ["os"])
    level_named(text)
    formula_names(text)
    assert time.process_time() - started < 1.0  # squares of the length take tens of seconds


def test_an_unknown_level_lists_those_there_are_the_closest_first() -> None:
    frame = phones("ios", "web", "tv", "watch", "car", "android", "vr")
    with pytest.raises(InfeasibleError) as caught:
        fedipw.calibrate(frame, {"os[andriod]": 0.3})
    assert caught.value.why == (
        "no enrolled client has os[andriod]; did you mean 'android'? Levels of 'os': android, car, "
        "ios, tv, vr and 2 more."
    )
    with pytest.raises(InfeasibleError, match=r"has os\[Web\]; did you mean 'web'\?"):
        fedipw.calibrate(frame, {"os[Web]": 0.3})
    assert fedipw.calibrate(frame, {"os[fridge]": 0.0, "os[ios]": 0.2}).table.height == 14


def test_an_unknown_column_lists_those_there_are() -> None:
    with pytest.raises(InputError) as caught:
        fedipw.calibrate(phones("ios").with_columns(height=1.0), {"hieght": 3.0})
    assert str(caught.value) == (
        "'hieght' names no column of the table, nor a level such as os[android], a power such as "
        "age**2 or a product such as age:height; did you mean 'height'? Columns: height, unit_id, "
        "os."
    )


def test_one_level_is_a_target_once() -> None:
    rooms = pl.DataFrame({"unit_id": [1, 2], "rooms": [2.0, 3.0]})
    with pytest.raises(InputError, match=r"rooms\[2\], rooms\[2\.0\] are the same level"):
        fedipw.calibrate(rooms, {"rooms[2]": 0.3, "rooms[2.0]": 0.3})


def test_a_saved_model_keeps_levels_of_any_character(tmp_path: Path) -> None:
    frame = pl.concat([phones(*ODD, column="kind")] * 3).with_columns(
        unit_id=pl.int_range(pl.len()), enrolled=pl.int_range(pl.len()) % 5 < 2
    )
    model = table_model(Table(frame), "kind")
    model.save(tmp_path / "m.json")
    again = StageModel.load(tmp_path / "m.json")
    assert again.logistic().names == tuple(f"kind[{level}]" for level in sorted(ODD)[1:])
    assert again.prob(frame)[0].tolist() == model.prob(frame)[0].tolist()
