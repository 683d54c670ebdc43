"""Summaries of studies against SciPy and numbers worked out by hand."""

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from fedipw.lab.comparison import (
    comparison_table,
    holm,
    mean_interval,
    paired,
    rank_table,
    ranks,
    summary_table,
)

MEASURE = "tail_excess_loss"


def results_of(rows: Sequence[tuple[str, str, int, float | None]]) -> pl.DataFrame:
    """Rows of scenario, method, seed and value; a missing value is a failure."""
    nothing = dict.fromkeys(
        ("limit_excess_loss", "optimisation", "lottery", "bias", "mean_effective_replies")
    )
    return pl.DataFrame(
        [
            {
                "scenario": scenario,
                "method": method,
                "seed": seed,
                MEASURE: value,
                "failure": "diverged" if value is None else None,
                **nothing,
            }
            for scenario, method, seed, value in rows
        ],
        schema_overrides={MEASURE: pl.Float64, **dict.fromkeys(nothing, pl.Float64)},
        infer_schema_length=None,
    )


def grid(**values: list[float | None]) -> pl.DataFrame:
    """One scenario; the values of each method by seed."""
    seeds = range(len(next(iter(values.values()))))
    return results_of([("s", m, k, v[k]) for k in seeds for m, v in values.items()])


def test_a_paired_comparison_is_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.gamma(2.0, 1.0, 12), rng.gamma(2.0, 1.3, 12)
    found, reference = paired(y, x), stats.ttest_rel(y, x)
    low, high = reference.confidence_interval(0.95)
    assert found.p == pytest.approx(reference.pvalue, rel=1e-10)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-10)
    assert found.difference == pytest.approx((y - x).mean())
    assert found.better == (y < x).mean()


def test_the_ratio_of_means_by_hand() -> None:
    """Of y = (2, 4, 6), x = (1, 2, 6): means 4 and 3; variances 4 and 7, covariance 5."""
    found = paired(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 6.0]))
    spread = (4 / 16 + 7 / 9 - 2 * 5 / 12) / 3
    factor = np.exp(stats.t.ppf(0.975, 2) * np.sqrt(spread))
    assert found.ratio == pytest.approx(4 / 3)
    assert found.ratio_low == pytest.approx(4 / 3 / factor)
    assert found.ratio_high == pytest.approx(4 / 3 * factor)


def test_intervals_cover_the_difference_as_often_as_they_say() -> None:
    """2000 seeded draws of ten pairs; 95% give or take four standard errors."""
    rng = np.random.default_rng(1)
    draws = rng.standard_normal((2000, 10)) + 0.3
    inside = [
        f.low <= 0.3 <= f.high
        for f in map(mean_interval, draws)
        if f.low is not None and f.high is not None
    ]
    assert abs(np.mean(inside) - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 2000)


@pytest.mark.parametrize(
    ("values", "reference", "verdict"),
    [
        ([1.0, 1.1, 0.9], [2.0, 2.1, 1.9], "lower"),
        ([2.0, 2.1, 1.9], [1.0, 1.1, 0.9], "higher"),
        ([1.0, 3.0, 2.0], [2.0, 1.0, 3.5], "no difference shown"),
        ([1.0, 1.0], [1.0, 1.0], "no difference shown"),
        ([1.0], [2.0], "no difference shown"),
        ([], [], "no difference shown"),
    ],
)
def test_verdicts(values: list[float], reference: list[float], verdict: str) -> None:
    assert paired(np.array(values), np.array(reference)).verdict == verdict


def test_equal_differences_leave_no_doubt_and_equal_values_all_of_it() -> None:
    x = np.array([1.0, 2.0, 4.0])
    assert paired(x + 1.0, x).p == 0.0
    assert paired(x, x).p == 1.0
    assert paired(x, x).ratio == 1.0
    assert paired(-x, x).ratio is None  # of a mean that is not positive
    assert paired(x[:1], x[1:2]).p is None
    assert paired(x[:1], x[1:2]).ratio == 0.5


@given(st.lists(st.floats(0.0, 1.0), max_size=12))
def test_holm_is_ordered_as_the_p_values_and_at_most_bonferroni(p_values: list[float]) -> None:
    adjusted = [p for p in holm(p_values) if p is not None]
    assert len(adjusted) == len(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1.0, len(p_values) * p) + 1e-12
    order = np.argsort(p_values, kind="stable")
    assert np.all(np.diff(np.array(adjusted)[order]) >= 0.0) if adjusted else True


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.02, 0.03, 0.5]) == pytest.approx([0.04, 0.06, 0.06, 0.5])
    assert holm([]) == []


@given(arrays(np.float64, (5, 4), elements=st.sampled_from([0.1, 0.2, 0.3, 0.4])))
def test_ranks_are_those_of_scipy(values: np.ndarray) -> None:
    table = results_of([("s", f"m{j}", i, float(values[i, j])) for i in range(5) for j in range(4)])
    found = ranks(table, MEASURE)["rank"].to_numpy().reshape(5, 4)
    np.testing.assert_array_equal(found, stats.rankdata(values, axis=1))


def test_failures_rank_last_and_share_it() -> None:
    table = grid(a=[3.0, None], b=[1.0, None], c=[2.0, 5.0])
    summary = summary_table(table, MEASURE)
    assert summary["mean_rank"].to_list() == [(3 + 2.5) / 2, (1 + 2.5) / 2, (2 + 1) / 2]
    assert summary["failures"].to_list() == [1, 1, 0]
    assert summary["n"].to_list() == [1, 1, 2]


def test_a_summary_by_hand() -> None:
    table = grid(a=[1.0, 2.0, 6.0], b=[1.0, None, 2.0], c=[None, None, None])
    summary = summary_table(table, MEASURE)
    assert summary["method"].to_list() == ["a", "b", "c"]
    first, second, third = summary.to_dicts()
    assert (first["mean"], first["median"], first["n"]) == (3.0, 2.0, 3)
    assert first["se"] == pytest.approx(np.sqrt(7 / 3))
    assert first["high"] == pytest.approx(3 + stats.t.ppf(0.975, 2) * np.sqrt(7 / 3))
    assert (second["mean"], second["n"], second["failures"]) == (1.5, 2, 1)
    assert (third["mean"], third["se"], third["median"], third["failures"]) == (None, None, None, 3)


def test_pairs_are_the_seeds_that_both_have_whatever_the_order() -> None:
    table = grid(a=[1.0, 2.0, None, 4.0], b=[None, 3.0, 5.0, 7.0], c=[1.0, 1.0, 1.0, None])
    found = comparison_table(table.reverse(), MEASURE, {"s": "b"}).sort("method")
    assert found["method"].to_list() == ["a", "c"]
    assert found["n"].to_list() == [2, 2]
    assert found["difference"].to_list() == [-2.0, -3.0]
    assert found["better"].to_list() == [1.0, 1.0]


def test_holm_is_within_a_scenario() -> None:
    rng = np.random.default_rng(2)
    rows = [
        (scenario, method, seed, float(rng.gamma(2.0)))
        for scenario in ("s", "t")
        for seed in range(6)
        for method in ("a", "b", "c")
    ]
    table = comparison_table(results_of(rows), MEASURE, {"s": "a", "t": "b"})
    for scenario in ("s", "t"):
        part = table.filter(pl.col("scenario") == scenario)
        assert part["p_holm"].to_list() == holm(part["p"].to_list())
    assert table["reference"].to_list() == ["a", "a", "b", "b"]


def test_the_overall_rank_is_among_methods_that_every_scenario_has() -> None:
    rows = [
        ("s", "a", 0, 3.0),
        ("s", "extra", 0, 2.0),
        ("s", "b", 0, 1.0),
        ("t", "a", 0, 1.0),
        ("t", "b", 0, 2.0),
    ]
    found = rank_table(results_of(rows), MEASURE)
    assert found.to_dicts() == [
        {"method": "a", "mean_rank": 1.5, "scenarios": 2},
        {"method": "b", "mean_rank": 1.5, "scenarios": 2},
    ]
    alone = [("s", "a", 0, 3.0), ("t", "b", 0, 1.0)]
    assert rank_table(results_of(alone), MEASURE).is_empty()
