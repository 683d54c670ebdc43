"""Bounds under the marginal sensitivity model: against linear programmes, vertices and sorting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fedipw.errors import InputError
from fedipw.evaluation.sensitivity import SensitivityBounds, odds_ratio_at, sensitivity_bounds
from fedipw.lab.theory import sensitivity_errors
from fedipw.numerics import FloatArray, IntArray
from fedipw.weighting.functions import hajek_weights, horvitz_thompson_weights

FORMS = pytest.mark.parametrize("size", [None, 40.0], ids=["hajek", "horvitz-thompson"])


@dataclass(frozen=True)
class Case:
    y: FloatArray
    enrollment: FloatArray
    participation: FloatArray
    groups: IntArray | None
    odds_ratio: float
    participation_odds_ratio: float

    def bounds(self, **changed: Any) -> SensitivityBounds:
        settings_ = {
            "odds_ratio": self.odds_ratio,
            "participation_odds_ratio": self.participation_odds_ratio,
            "groups": self.groups,
        } | changed
        y = settings_.pop("y", self.y)
        return sensitivity_bounds(y, self.enrollment, self.participation, **settings_)

    def odds_ratio_at(self, value: float, size: float | None) -> float:
        return odds_ratio_at(
            value,
            self.y,
            self.enrollment,
            self.participation,
            participation_odds_ratio=self.participation_odds_ratio,
            groups=self.groups,
            population_size=size,
        )


@st.composite
def cases(draw: st.DrawFn, most: int = 8) -> Case:
    m = draw(st.integers(1, most))
    probability = st.floats(0.05, 1.0) | st.just(1.0)
    outcome = st.integers(-200, 200).map(lambda k: k / 100)  # ties, zeros; none a solver rounds off

    def column(of: st.SearchStrategy[float]) -> FloatArray:
        return np.array(draw(st.lists(of, min_size=m, max_size=m)))

    enrollment, groups = column(probability), None
    if draw(st.booleans()):
        groups = column(st.integers(0, 3).map(float)).astype(np.int64)
        enrollment = enrollment[[int(np.argmax(groups == g)) for g in groups]]
    return Case(
        y=column(outcome),
        enrollment=enrollment,
        participation=column(probability),
        groups=groups,
        odds_ratio=draw(st.floats(1.0, 10.0)),
        participation_odds_ratio=draw(st.just(1.0) | st.floats(1.0, 5.0)),
    )


def box(prob: FloatArray, odds_ratio: float) -> tuple[FloatArray, FloatArray]:
    """The model as it is written in the literature."""
    return 1 + (1 / prob - 1) / odds_ratio, 1 + (1 / prob - 1) * odds_ratio


def least_by_programme(case: Case, y: FloatArray, size: float | None) -> float:
    """Solve for w, u and, by Charnes and Cooper, the scale t: all linear in the three together.

    v_low u <= w <= v_high u and u_low t <= u <= u_high t, with sum w = 1 for Hájek and t = 1 for
    Horvitz–Thompson.
    """
    m = len(y)
    codes = np.arange(m) if case.groups is None else np.unique(case.groups, return_inverse=True)[1]
    n = int(codes.max()) + 1
    first = [int(np.argmax(codes == c)) for c in range(n)]
    v_low, v_high = box(case.participation, case.participation_odds_ratio)
    u_low, u_high = box(case.enrollment[first], case.odds_ratio)
    of, none = np.eye(n)[codes], np.zeros((m, 1))
    least = np.block(
        [
            [np.eye(m), -v_high[:, None] * of, none],
            [-np.eye(m), v_low[:, None] * of, none],
            [np.zeros((n, m)), np.eye(n), -u_high[:, None]],
            [np.zeros((n, m)), -np.eye(n), u_low[:, None]],
        ]
    )
    fixed = np.zeros(m + n + 1)
    if size is None:
        fixed[:m] = 1.0
    else:
        fixed[-1] = 1.0
    found = linprog(
        np.concatenate([y, np.zeros(n + 1)]),
        A_ub=least,
        b_ub=np.zeros(len(least)),
        A_eq=fixed[None],
        b_eq=[1.0],
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert found.status == 0
    assert found.x is not None
    return float(found.x[:m] @ y) / (1.0 if size is None else size)


@FORMS
@settings(max_examples=150)
@given(case=cases())
def test_bounds_equal_those_of_a_linear_programme(case: Case, size: float | None) -> None:
    bounds = case.bounds(population_size=size)
    assert bounds.low == pytest.approx(least_by_programme(case, case.y, size), rel=1e-9, abs=1e-9)
    assert bounds.high == pytest.approx(
        -least_by_programme(case, -case.y, size), rel=1e-9, abs=1e-9
    )


@FORMS
@settings(max_examples=40)
@given(case=cases(most=4))
def test_bounds_equal_the_extremes_over_every_corner(case: Case, size: float | None) -> None:
    groups = np.arange(len(case.y)) if case.groups is None else case.groups
    names = np.unique(groups)
    v, u = (
        box(case.participation, case.participation_odds_ratio),
        box(case.enrollment, case.odds_ratio),
    )
    values = []
    for rows in product([0, 1], repeat=len(case.y)):
        for clients in product([0, 1], repeat=len(names)):
            end = np.array(clients)[np.searchsorted(names, groups)]
            w = np.choose(end, u) * np.choose(rows, v)
            values.append(w @ case.y / (w.sum() if size is None else size))
    bounds = case.bounds(population_size=size)
    np.testing.assert_allclose(
        [bounds.low, bounds.high], [min(values), max(values)], rtol=1e-12, atol=1e-13
    )


def test_many_clients_have_the_bound_of_every_threshold_tried() -> None:
    rng = np.random.default_rng(3)
    client = rng.integers(0, 2_000, size=10_000)
    enrollment = rng.uniform(0.01, 1.0, size=2_000)[client]
    participation, y = rng.uniform(0.05, 1.0, size=10_000), rng.normal(size=10_000) ** 3
    bounds = sensitivity_bounds(y, enrollment, participation, 3.0, groups=client)

    names, first, code = np.unique(client, return_index=True, return_inverse=True)
    mass = np.bincount(code, 1 / participation)
    mean = np.bincount(code, y / participation) / mass
    order = np.argsort(mean)
    low, high = (end[order] * mass[order] for end in box(enrollment[first], 3.0))

    def means(below: FloatArray, above: FloatArray) -> FloatArray:
        """Of clients under the threshold at one end, and of the others at the other end."""
        k = np.arange(len(names) + 1)
        total = [
            np.concatenate([[0.0], np.cumsum(below * x)])[k]
            + np.concatenate([np.cumsum((above * x)[::-1])[::-1], [0.0]])[k]
            for x in (mean[order], np.ones(len(names)))
        ]
        return np.asarray(total[0] / total[1])

    assert bounds.low == pytest.approx(means(high, low).min(), rel=1e-11)
    assert bounds.high == pytest.approx(means(low, high).max(), rel=1e-11)
    assert (bounds.n_clients, bounds.n_rows) == (len(names), 10_000)


@FORMS
@given(case=cases())
def test_an_odds_ratio_of_one_leaves_the_estimate_exactly(case: Case, size: float | None) -> None:
    bounds = case.bounds(odds_ratio=1.0, participation_odds_ratio=1.0, population_size=size)
    assert bounds.low == bounds.estimate == bounds.high


@FORMS
@given(case=cases())
def test_the_estimate_is_that_of_the_weights(case: Case, size: float | None) -> None:
    inclusion = case.enrollment * case.participation
    weights = (
        hajek_weights(inclusion) if size is None else horvitz_thompson_weights(inclusion, size)
    )
    estimate = case.bounds(population_size=size).estimate
    assert estimate == pytest.approx(weights @ case.y, rel=1e-12, abs=1e-13)


@FORMS
@given(case=cases(), factor=st.floats(1.0, 4.0), stage=st.booleans())
def test_bounds_widen_with_either_odds_ratio(
    case: Case, size: float | None, factor: float, stage: bool
) -> None:
    name = "odds_ratio" if stage else "participation_odds_ratio"
    bounds = case.bounds(population_size=size)
    wider = case.bounds(population_size=size, **{name: getattr(case, name) * factor})
    assert wider.low <= bounds.low + 1e-13
    assert bounds.low <= bounds.estimate <= bounds.high
    assert bounds.high <= wider.high + 1e-13


@given(case=cases())
def test_a_multiplier_for_every_row_is_never_narrower(case: Case) -> None:
    bounds, free = case.bounds(), case.bounds(groups=None)
    assert free.low <= bounds.low + 1e-13
    assert bounds.high <= free.high + 1e-13


def test_a_client_alone_has_no_hajek_width_from_enrollment() -> None:
    y, pi, p = [0.0, 1.0], [0.3, 0.3], [0.5, 0.25]
    together = sensitivity_bounds(y, pi, p, 5.0, groups=["a", "a"])
    assert together.low == pytest.approx(2 / 3, rel=1e-15)
    assert together.high == pytest.approx(2 / 3, rel=1e-15)
    assert sensitivity_bounds(y, pi, p, 5.0).low < 0.5


@given(case=cases(), scale=st.floats(0.1, 10.0), shift=st.floats(-5.0, 5.0))
def test_hajek_bounds_follow_a_change_of_units(case: Case, scale: float, shift: float) -> None:
    bounds = case.bounds()
    moved, turned = case.bounds(y=scale * case.y + shift), case.bounds(y=shift - scale * case.y)
    expected = np.array([bounds.low, bounds.estimate, bounds.high])
    np.testing.assert_allclose(
        [moved.low, moved.estimate, moved.high], scale * expected + shift, rtol=1e-12, atol=1e-12
    )
    np.testing.assert_allclose(
        [turned.high, turned.estimate, turned.low], shift - scale * expected, rtol=1e-12, atol=1e-12
    )


@given(case=cases(), scale=st.floats(-10.0, 10.0), rounds=st.integers(1, 9))
def test_horvitz_thompson_bounds_follow_a_change_of_scale(
    case: Case, scale: float, rounds: int
) -> None:
    bounds = case.bounds(population_size=7.0)
    moved = case.bounds(y=scale * case.y, population_size=7.0, rounds=rounds)
    expected = sorted([scale * bounds.low / rounds, scale * bounds.high / rounds])
    np.testing.assert_allclose([moved.low, moved.high], expected, rtol=1e-12, atol=1e-13)


@given(case=cases(), value=st.floats(-1e3, 1e3))
def test_equal_outcomes_leave_a_point(case: Case, value: float) -> None:
    bounds = case.bounds(y=np.full(len(case.y), value))
    assert bounds.low == bounds.estimate == bounds.high == value


@given(case=cases())
def test_hajek_bounds_stay_in_the_range_of_the_outcomes(case: Case) -> None:
    bounds = case.bounds(odds_ratio=1e6)
    assert case.y.min() - 1e-14 <= bounds.low <= bounds.high <= case.y.max() + 1e-14


def test_an_outlying_outcome_costs_no_digits() -> None:
    y, pi = [1e12, 1.0, 2.0], [1.0, 1e-6, 1e-6]
    assert sensitivity_bounds(y, pi, [1.0] * 3, 1.0).estimate == pytest.approx(
        (1e12 + 3e6) / (2e6 + 1), rel=1e-15
    )


@FORMS
@settings(max_examples=200)
@given(case=cases(), share=st.floats(0.05, 1.0), upper=st.booleans())
def test_the_odds_ratio_at_a_value_puts_the_bound_there(
    case: Case, size: float | None, share: float, upper: bool
) -> None:
    none, far = (case.bounds(odds_ratio=x, population_size=size) for x in (1.0, 10.0))
    start, end = (none.high, far.high) if upper else (none.low, far.low)
    value = start + share * (end - start)
    assume(abs(end - start) > 1e-6)
    reached = case.odds_ratio_at(value, size)
    assert 1.0 <= reached <= 10.0 * (1.0 + 1e-10)
    bounds = case.bounds(odds_ratio=reached, population_size=size)
    assert (bounds.high if upper else bounds.low) == pytest.approx(value, rel=1e-10, abs=1e-12)


@FORMS
def test_the_odds_ratio_equals_one_found_by_bisection(size: float | None) -> None:
    rng = np.random.default_rng(8)
    y, pi, p = rng.normal(1.0, 1.0, 500), rng.uniform(0.05, 1.0, 500), rng.uniform(0.2, 1.0, 500)
    case = Case(y, pi, p, None, 1.0, 1.2)
    low, high, value = 1.0, 100.0, case.bounds(population_size=size).low - 0.3
    for _ in range(60):
        middle = math.sqrt(low * high)
        above = case.bounds(odds_ratio=middle, population_size=size).low > value
        low, high = (middle, high) if above else (low, middle)
    assert case.odds_ratio_at(value, size) == pytest.approx(low, rel=1e-12)


def test_a_value_the_bounds_include_already_needs_no_odds_ratio() -> None:
    y, pi, p = [0.0, 1.0, 3.0], [0.5, 0.2, 0.9], [0.5, 0.5, 0.5]
    bounds = sensitivity_bounds(y, pi, p, 1.0, participation_odds_ratio=2.0)
    assert bounds.low < bounds.estimate < bounds.high
    assert odds_ratio_at(bounds.estimate, y, pi, p) == 1.0
    assert odds_ratio_at(bounds.low, y, pi, p, participation_odds_ratio=2.0) == 1.0
    assert odds_ratio_at(bounds.low, y, pi, p) > 1.0


@pytest.mark.parametrize("value", [-0.5, 0.0, 1.0, 1.5])
def test_a_value_at_or_past_the_outcomes_is_never_reached(value: float) -> None:
    assert odds_ratio_at(value, [0.0, 1.0, 0.5], [0.5, 0.2, 0.9], [0.5, 0.5, 0.5]) == math.inf


def test_certain_enrollment_stops_the_bound_where_all_others_count_once() -> None:
    y, pi, p = [0.0, 1.0], [1.0, 0.25], [1.0, 1.0]  # weights 1 and 1 + 3 [1/L, L]
    assert sensitivity_bounds(y, pi, p, 1e9).low == pytest.approx(0.5, rel=1e-8)
    assert odds_ratio_at(0.5, y, pi, p) == math.inf
    assert odds_ratio_at(0.6, y, pi, p) == pytest.approx(6.0, rel=1e-14)  # 1 + 3/6 = 1.5
    assert odds_ratio_at(0.9, y, pi, p) == pytest.approx(8 / 3, rel=1e-14)  # 1 + 3 * 8/3 = 9
    assert odds_ratio_at(0.9, y, [1.0, 1.0], p) == math.inf


def test_the_odds_ratio_reads_as_an_error_of_the_weights() -> None:
    y, pi, p = [0.0, 1.0], [0.5, 0.5], [1.0, 1.0]
    errors = sensitivity_errors(pi, odds_ratio_at(1 / 3, y, pi, p))
    assert errors.centred == pytest.approx(1 / 3)  # weights 3 and 1.5


GOOD: dict[str, Any] = {
    "outcome": [0.0, 1.0],
    "enrollment_prob": [0.5, 0.5],
    "participation_prob": [0.5, 1.0],
    "odds_ratio": 2.0,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"enrollment_prob": [0.0, 0.5]}, "enrollment_prob must lie"),
        ({"participation_prob": [0.5, 1.1]}, "participation_prob must lie"),
        ({"enrollment_prob": [0.5]}, "enrollment_prob has 1 rows"),
        ({"participation_prob": [0.5]}, "participation_prob has 1 rows"),
        ({"outcome": [[0.0, 1.0]]}, "one axis"),
        ({"outcome": [0.0, np.nan]}, "missing or infinite"),
        ({"outcome": [0.0, np.inf]}, "missing or infinite"),
        ({"outcome": [], "enrollment_prob": [], "participation_prob": []}, "no reply"),
        ({"groups": [1]}, "groups has 1 rows"),
        ({"groups": [[1, 2]]}, "groups must have one axis"),
        ({"groups": ["a", "a"], "enrollment_prob": [0.5, 0.4]}, "client a: 0.4 and 0.5"),
        ({"participation_odds_ratio": 0.5}, "at least 1"),
        ({"population_size": 0.0}, "population_size"),
        ({"population_size": 5.0, "rounds": 0}, "rounds"),
    ],
)
def test_unusable_input_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sensitivity_bounds(**GOOD | changed)
    rest = {k: v for k, v in (GOOD | changed).items() if k != "odds_ratio"}
    with pytest.raises(InputError, match=message):
        odds_ratio_at(0.4, **rest)


@pytest.mark.parametrize("odds_ratio", [0.99, -1.0, math.nan, math.inf])
def test_an_odds_ratio_is_finite_and_at_least_one(odds_ratio: float) -> None:
    with pytest.raises(InputError, match="at least 1"):
        sensitivity_bounds(**GOOD | {"odds_ratio": odds_ratio})


def test_weights_past_floating_point_and_values_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="beyond what floating point"):
        sensitivity_bounds(**GOOD | {"odds_ratio": 1e300})
    with pytest.raises(InputError, match="must be finite"):
        odds_ratio_at(math.nan, [0.0], [0.5], [0.5])
