"""How formulas are written, and what is said of those that cannot be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.tables.formula import Part, formula_clauses, near

COLUMNS = ["age", "os", "rooms", "household income", "a:b", "a", "b", "C", "x-1", "size [cm]", "ns"]


def added(formula: str, columns: list[str] = COLUMNS) -> list[tuple[Part, ...]]:
    clauses = formula_clauses(formula, columns)
    assert all(clause.adds for clause in clauses)
    return [parts for clause in clauses for parts in clause.products]


@pytest.mark.parametrize(
    ("formula", "parts"),
    [
        ("age", [Part("age")]),
        ("  age  ", [Part("age")]),
        ("`age`", [Part("age")]),
        ("age**2", [Part("age", power=2)]),
        ("age ** 12", [Part("age", power=12)]),
        ("os[ios]", [Part("os", level="ios")]),
        ("os [ i os ]", [Part("os", level="i os")]),
        ("os[a+b:c*d-e]", [Part("os", level="a+b:c*d-e")]),
        ('age["[18,25)"]', [Part("age", level="[18,25)")]),
        ("age['x]']", [Part("age", level="x]")]),
        ("age[` x `]", [Part("age", level=" x ")]),
        ("os[]", [Part("os", level="")]),
        ("C(rooms)", [Part("rooms", category=True)]),
        ("C( rooms )", [Part("rooms", category=True)]),
        ("C", [Part("C")]),
        ("C(C)", [Part("C", category=True)]),
        ("ns(age, 20, 40.5, 6e1)", [Part("age", knots=(20.0, 40.5, 60.0))]),
        ("ns(age,-1,+2)", [Part("age", knots=(-1.0, 2.0))]),
        ("ns(ns,0,1)", [Part("ns", knots=(0.0, 1.0))]),
        ("C(household income)", [Part("household income", category=True)]),
        ("household income**2", [Part("household income", power=2)]),
        ("a:b", [Part("a:b")]),  # a column of that very name comes first
        ("`a`:b", [Part("a"), Part("b")]),
        ("a : b", [Part("a"), Part("b")]),
        ("a:b:age", [Part("a:b"), Part("age")]),
        ("x-1", [Part("x-1")]),
        ("size [cm]", [Part("size [cm]")]),
        ("age:os[ios]:C(rooms)", [Part("age"), Part("os", level="ios"), Part("rooms", True)]),
    ],
)
def test_one_product(formula: str, parts: list[Part]) -> None:
    assert added(formula) == [tuple(parts)]


def test_a_star_is_short_for_every_product_small_ones_first() -> None:
    names = [[part.column for part in parts] for parts in added("age*os*rooms")]
    assert names == [
        *[["age"], ["os"], ["rooms"]],
        *[["age", "os"], ["age", "rooms"], ["os", "rooms"]],
        ["age", "os", "rooms"],
    ]
    both = [[part.column for part in parts] for parts in added("age**2*os:rooms")]
    assert both == [["age"], ["os", "rooms"], ["age", "os", "rooms"]]


def test_a_dot_is_every_column_and_a_minus_takes_away() -> None:
    everything, minus, plus = formula_clauses(". - os*age + age**2", ["age", "os"])
    assert everything.products == ((Part("age"),), (Part("os"),))
    assert (minus.adds, minus.text) == (False, "os*age")
    assert minus.products == ((Part("os"),), (Part("age"),), (Part("os"), Part("age")))
    assert plus.products == ((Part("age", power=2),),)
    assert formula_clauses("-.", ["age"])[0].adds is False


def test_a_column_called_dot_or_one_is_that_column() -> None:
    assert added(".", ["a", "."]) == [(Part("."),)]
    assert added("1", ["1"]) == [(Part("1"),)]
    assert added("log(x)", ["x", "log(x)"]) == [(Part("log(x)"),)]


def test_backticks_in_names_are_doubled() -> None:
    assert added("`a``b`", ["a`b"]) == [(Part("a`b"),)]


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("", r"character 1: an empty term"),
        ("age + ", r"character 7: an empty term"),
        ("+ age", r"character 1: an empty term"),
        ("age ++ os", r"character 6: an empty term"),
        ("age + hight", r"'age \+ hight', character 7: 'hight' names no column"),
        ("Age", r"'Age' names no column; did you mean 'age'\? Columns: age, os, rooms"),
        ("room", r"did you mean 'rooms'\?"),
        ("zzzz", r"'zzzz' names no column\. Columns: age"),
        ("`agee`", r"'agee' names no column; did you mean 'age'\?"),
        ("`age", r"character 1: a backtick is not closed"),
        ("age os", r"'age os' names no column"),
        ("age:hight", r"character 5: 'hight' names no column"),
        ("age^2", r"'age\^2' names no column \(powers are written a\*\*2\)"),
        ("y ~ age", r"a formula has no left side"),
        ("age/os", r"nested terms are written a \+ a:b"),
        ("(1|os)", r"parentheses stand in C\(...\) and ns\(...\) only"),
        ("(age + os)", r"character 1: parentheses"),
        ("age)", r"'\)' cannot stand here; terms are joined by \+ - : or \*"),
        ("age[ios] x", r"the level of 'age' has no closing '\]' with a sign or nothing behind"),
        ("age[ios", r"the level of 'age' has no closing '\]'"),
        ("log(age)", r"log\(...\) is no function of formulas; there are C\(a\) and ns"),
        ("C(age", r"C\(age ... has no closing '\)'"),
        ("C(height)", r"character 3: 'height' names no column"),
        ("C(age, 2)", r"has no closing"),
        ("age**0", r"the power of 'age' must be a whole number, 1 or more"),
        ("age**-1", r"the power of 'age' must be a whole number"),
        ("age**1.5", r"the power of 'age' must be a whole number"),
        ("age**", r"the power of 'age' must be a whole number"),
        ("age**os", r"the power of 'age' must be a whole number"),
        ("os[ios]**2", r"character 8: '\*\*2' cannot stand here"),
        ("ns(age)", r"needs two or more increasing knots.*it has none"),
        ("ns(age, 3)", r"needs two or more increasing knots.*it has 3"),
        ("ns(age, 3, 3)", r"needs two or more increasing knots"),
        ("ns(age, 5, 3)", r"needs two or more increasing knots.*it has 5, 3"),
        ("ns(age, 1, x)", r"the knots of ns\(age, ...\) must be numbers, not 1, x"),
        ("ns(age, 1, inf)", r"must be finite"),
        ("ns(age, 1, nan)", r"must be finite"),
        ("ns(age, 1, 2", r"has no closing '\)'"),
        (".:age", r"'.' stands for every covariate and must stand alone"),
        (".5", r"must stand alone"),
        ("age - 1", r"the constant is always part of the model"),
        ("0 + age", r"the constant is always part of the model"),
    ],
)
def test_what_is_said_of_formulas_that_cannot_be_read(formula: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        formula_clauses(formula, COLUMNS)


def test_a_column_that_may_not_be_used_is_told_from_one_that_is_not_there() -> None:
    with pytest.raises(InputError, match="'enrolled' names no column that may be used, though"):
        formula_clauses("age + enrolled", ["age"], others=["enrolled"])


def test_near_names() -> None:
    assert near("OS", COLUMNS) == "; did you mean 'os'?"
    assert near("q", []) == "."


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5, unique=True))
def test_every_name_works_in_backticks(names: list[str]) -> None:
    formula = " + ".join(f"`{name.replace('`', '``')}`" for name in names)
    assert added(formula, names) == [(Part(name),) for name in names]


@given(st.text(alphabet="ab+-*:.[]()`,12 Cns", max_size=15))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        clauses = formula_clauses(text, ["a", "b"])
    except InputError:
        return
    assert all(part.column in {"a", "b"} for c in clauses for parts in c.products for part in parts)


def test_columns_a_dot_does_not_mean_may_be_named() -> None:
    dot, named = formula_clauses(". + hour", ["age"], more=["hour"])
    assert dot.products == ((Part("age"),),)
    assert named.products == ((Part("hour"),),)
