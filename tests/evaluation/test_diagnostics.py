"""Diagnostics: against scikit-learn, R and plain sums, and the same for any partitioning."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from fedipw.errors import InputError
from fedipw.evaluation.diagnostics import (
    HOUR,
    Drift,
    auc,
    fitted_prob,
    model_calibration,
    partition_calibration,
    reply_rates,
    weight_diagnostics,
)
from fedipw.numerics.types import FloatArray, LabelArray
from fedipw.selection import CodedTable
from fedipw.tables.partitions import Block, Blocks
from fedipw.tables.tablefile import TableFile

REFERENCE = Path(__file__).parents[1] / "reference"
R = json.loads((REFERENCE / "ipw200_R.json").read_text())


def prob_column(block: Block) -> FloatArray:
    prob: FloatArray = block.columns[0]
    return prob


def cut(prob: FloatArray, labels: LabelArray, weights: FloatArray | None, at: set[int]) -> Blocks:
    edges = [0, *sorted(c for c in at if c < len(prob)), len(prob)]
    none = np.empty(0)
    return Blocks.of(
        [
            Block(prob[None, a:b], labels[a:b], none if weights is None else weights[a:b])
            for a, b in pairwise(edges)
        ]
    )


weight_arrays = arrays(np.float64, st.integers(1, 60), elements=st.floats(1e-3, 1e3))


def test_effective_size_equals_that_of_r() -> None:
    weights = pl.read_csv(REFERENCE / "ipw200_fitted_R.csv").filter(pl.col("e") == 1)["w"]
    found = weight_diagnostics(weights.to_numpy())
    assert found.effective_sample_size == pytest.approx(R["ess"], rel=1e-10)
    assert found.total == pytest.approx(R["sum_w"], rel=1e-10)


@given(weight_arrays)
def test_size_by_design_effect_is_the_effective_size(weights: FloatArray) -> None:
    found = weight_diagnostics(weights)
    assert found.count / found.design_effect == pytest.approx(found.effective_sample_size)
    assert found.design_effect == pytest.approx(1.0 + (weights.std() / weights.mean()) ** 2)
    assert found.counts.sum() == len(weights)
    assert found.largest_share <= found.top_share * (1.0 + 1e-12) <= 1.0 + 1e-9
    assert found.largest_share == pytest.approx(weights.max() / weights.sum())


@given(st.integers(1, 500), st.floats(1e-200, 1e200))
def test_equal_weights_have_design_effect_one(count: int, weight: float) -> None:
    found = weight_diagnostics(np.full(count, weight))
    assert found.design_effect == pytest.approx(1.0, rel=1e-12)
    assert found.top_share == pytest.approx(np.ceil(0.01 * count) / count)
    np.testing.assert_allclose(found.quantiles, 1.0, rtol=1e-12)
    assert found.counts.tolist() == [count]


@given(weight_arrays, st.integers(-600, 400))
def test_a_common_factor_changes_no_diagnostic(weights: FloatArray, power: int) -> None:
    one, other = weight_diagnostics(weights), weight_diagnostics(weights * 2.0**power)
    assert other.design_effect == one.design_effect
    assert other.top_share == one.top_share
    np.testing.assert_array_equal(other.quantiles, one.quantiles)
    np.testing.assert_array_equal(other.counts, one.counts)


def test_a_page_of_a_million_weights_stays_small() -> None:
    weights = np.random.default_rng(1).lognormal(0.0, 2.0, 1_000_000)
    found = weight_diagnostics(weights)
    assert len(found.counts) == 40
    assert found.counts.sum() == 1_000_000
    assert found.top_share == pytest.approx(np.sort(weights)[-10_000:].sum() / weights.sum())
    np.testing.assert_allclose(found.edges[1:] / found.edges[:-1], found.edges[1] / found.edges[0])


def test_zeros_are_counted_and_kept_out_of_the_histogram() -> None:
    found = weight_diagnostics(np.array([0.0, 1.0, 1.0, 2.0]))
    assert (found.zeros, found.count, found.counts.sum()) == (1, 4, 3)
    assert found.effective_sample_size == pytest.approx(16.0 / 6.0)


@pytest.mark.parametrize(
    "weights",
    [np.empty(0), np.zeros(3), np.array([1.0, -1.0]), np.array([1.0, np.nan]), np.ones((2, 2)),
     np.array([1.0, np.inf])],
)  # fmt: skip
def test_bad_weights_are_refused(weights: FloatArray) -> None:
    with pytest.raises(InputError, match="Weights must be"):
        weight_diagnostics(weights)


few_probs = st.sampled_from([0.0, 0.1, 0.1001, 0.25, 0.5, 0.9, 1.0]) | st.floats(0.0, 1.0)


@st.composite
def predictions(draw: st.DrawFn) -> tuple[FloatArray, LabelArray, FloatArray]:
    m = draw(st.integers(2, 60))
    prob = draw(arrays(np.float64, m, elements=few_probs))
    labels = draw(arrays(np.int8, m, elements=st.integers(0, 1)))
    weights = draw(arrays(np.float64, m, elements=st.floats(0.1, 5.0)))
    return prob, labels, weights


@given(predictions())
def test_auc_equals_that_of_scikit_learn(
    drawn: tuple[FloatArray, LabelArray, FloatArray],
) -> None:
    prob, labels, weights = drawn
    assume(0 < labels.sum() < len(labels))
    assert auc(prob, labels) == pytest.approx(roc_auc_score(labels, prob), abs=1e-12)
    known = roc_auc_score(labels, prob, sample_weight=weights)
    assert auc(prob, labels, weights) == pytest.approx(known, abs=1e-12)


@given(predictions(), st.sets(st.integers(1, 59), max_size=6), st.booleans(), st.integers(1, 12))
def test_any_partitioning_gives_the_calibration_of_arrays(
    drawn: tuple[FloatArray, LabelArray, FloatArray], at: set[int], weighted: bool, bins: int
) -> None:
    prob, labels, weights = drawn
    rows_count = weights if weighted else None
    known = model_calibration(prob, labels, rows_count, bins)
    found = partition_calibration(cut(prob, labels, rows_count, at), prob_column, bins)
    for name in ("rate", "mean_prob", "expected_error", "brier", "log_loss"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-12, abs=1e-12)
    assert [b.count for b in found.reliability] == [b.count for b in known.reliability]
    for one, other in zip(found.reliability, known.reliability, strict=True):
        assert one.mean_prob == pytest.approx(other.mean_prob, rel=1e-12, abs=1e-12)
        assert one.rate == pytest.approx(other.rate, rel=1e-12, abs=1e-12)
        assert one.standard_error == pytest.approx(other.standard_error, rel=1e-6, abs=1e-7)
    assert (found.auc is None) == (known.auc is None)
    if found.auc is not None and known.auc is not None:
        assert abs(found.auc - known.auc) <= found.auc_error + 1e-12
    assert known.auc_error == 0.0


@given(predictions(), st.integers(1, 12))
def test_reliability_counts_add_up(
    drawn: tuple[FloatArray, LabelArray, FloatArray], bins: int
) -> None:
    prob, labels, _ = drawn
    found = model_calibration(prob, labels, bins=bins)
    curve = found.reliability
    assert sum(b.count for b in curve) == found.rows == len(prob)
    assert sum(b.count * b.rate for b in curve) == pytest.approx(labels.sum())
    assert sum(b.count * b.mean_prob for b in curve) == pytest.approx(prob.sum())
    means = [b.mean_prob for b in curve]
    assert means == sorted(means)
    for b in curve:
        assert b.standard_error == pytest.approx(np.sqrt(max(b.rate * (1 - b.rate), 0) / b.count))


def test_bins_hold_about_as_many_rows_and_scores_equal_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    prob = rng.beta(1.0, 30.0, 50_000)
    labels = (rng.random(50_000) < prob).astype(np.int8)
    found = model_calibration(prob, labels)
    assert [b.count for b in found.reliability] == pytest.approx([5_000] * 10, rel=0.02)
    assert found.brier == pytest.approx(brier_score_loss(labels, prob), rel=1e-12)
    assert found.log_loss == pytest.approx(log_loss(labels, prob), rel=1e-10)
    assert found.ratio == pytest.approx(labels.sum() / prob.sum(), rel=1e-12)
    binned = partition_calibration(cut(prob, labels, None, {9, 20_000}), prob_column)
    assert binned.auc is not None
    assert found.auc is not None
    assert binned.auc_error < 1e-3
    assert abs(binned.auc - found.auc) <= binned.auc_error


def test_a_calibrated_model_has_smaller_error_than_one_that_is_not() -> None:
    rng = np.random.default_rng(5)
    prob = rng.uniform(0.05, 0.6, 40_000)
    labels = (rng.random(40_000) < prob).astype(np.int8)
    right, wrong = model_calibration(prob, labels), model_calibration(prob**2, labels)
    assert right.expected_error < 0.02 < wrong.expected_error
    assert wrong.auc == right.auc  # order is all that counts


def test_a_fitted_model_is_calibrated_from_its_coded_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    age = rng.normal(40.0, 10.0, 5_000)
    enrolled = rng.random(5_000) < 1.0 / (1.0 + np.exp(3.0 - 0.05 * age))
    people = pl.DataFrame({"age": age, "enrolled": enrolled})
    people.write_parquet(tmp_path / "people.parquet")
    coded = CodedTable.of(TableFile(tmp_path / "people.parquet"), "age")
    model = coded.model()
    found = partition_calibration(coded.partitions, fitted_prob(model.fit, coded.frame))
    known = model_calibration(model.prob(people)[0], enrolled)
    assert found.ratio == pytest.approx(1.0, rel=1e-9)  # the score of the intercept is 0
    assert found.log_loss == pytest.approx(-model.fit.log_likelihood / 5_000, rel=1e-9)
    assert found.brier == pytest.approx(known.brier, rel=1e-9)


def test_certain_mistakes_cost_an_infinite_log_loss_and_certain_truths_nothing() -> None:
    assert model_calibration(np.array([0.0, 1.0]), np.array([0, 1])).log_loss == 0.0
    assert model_calibration(np.array([0.0, 1.0]), np.array([1, 1])).log_loss == np.inf


def test_one_class_has_no_auc() -> None:
    prob, labels = np.array([0.3, 0.4]), np.array([1, 1], np.int8)
    assert model_calibration(prob, labels).auc is None
    with pytest.raises(InputError, match="both labels"):
        auc(prob, labels)


@pytest.mark.parametrize(
    ("prob", "labels", "weights", "message"),
    [
        ([], [], None, "above 0"),
        ([0.5, np.nan], [0, 1], None, "between 0 and 1"),
        ([0.5, 1.5], [0, 1], None, "between 0 and 1"),
        ([0.5, 0.5], [0, 2], None, "0 or 1"),
        ([0.5, 0.5], [0], None, "expected 2"),
        ([[0.5]], [0], None, "must be"),
        ([0.5, 0.5], [0, 1], [1.0, -1.0], "not negative"),
        ([0.5, 0.5], [0, 1], [0.0, 0.0], "both must be above 0"),
    ],
)
def test_bad_predictions_are_refused(
    prob: list[float], labels: list[int], weights: list[float] | None, message: str
) -> None:
    given_weights = None if weights is None else np.array(weights)
    with pytest.raises(InputError, match=message):
        model_calibration(np.array(prob), np.array(labels, np.int8), given_weights)


def test_bins_must_be_positive() -> None:
    with pytest.raises(InputError, match="0 bins"):
        model_calibration(np.array([0.5]), np.array([1], np.int8), bins=0)


def test_drift_is_seen_in_the_ratio() -> None:
    rounds = np.repeat([3, 1, 2], [4, 2, 2])
    replied = np.array([1, 1, 0, 0, 1, 0, 1, 1], dtype=np.bool_)
    prob = np.array([0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.9, 0.1])
    found = Drift.of_rows(rounds, replied, prob)
    assert found.rounds.tolist() == [1, 2, 3]
    assert found.clients.tolist() == [2, 2, 4]
    assert found.reply_rate.tolist() == [0.5, 1.0, 0.5]
    assert found.mean_prob.tolist() == [0.25, 0.5, 0.5]
    assert found.calibration_ratio.tolist() == [2.0, 2.0, 1.0]


def test_a_round_nobody_was_expected_in_has_no_ratio() -> None:
    one = np.array([1])
    found = Drift(rounds=one, clients=one, replies=np.array([0]), prob_sum=np.zeros(1))
    assert np.isnan(found.calibration_ratio).all()


@pytest.mark.parametrize(
    ("clients", "replies", "prob_sum"),
    [(0, 0, 0.0), (2, 3, 1.0), (2, -1, 1.0), (2, 1, 3.0), (2, 1, np.nan), (2, 1, -1.0)],
)
def test_impossible_rounds_are_refused(clients: int, replies: int, prob_sum: float) -> None:
    with pytest.raises(InputError, match="Round 7"):
        Drift(
            rounds=np.array([7]),
            clients=np.array([clients]),
            replies=np.array([replies]),
            prob_sum=np.array([prob_sum]),
        )


def test_no_rounds_or_unequal_columns_are_refused() -> None:
    none = np.empty(0, np.int64)
    with pytest.raises(InputError, match="no rounds"):
        Drift(rounds=none, clients=none, replies=none, prob_sum=np.empty(0))
    with pytest.raises(InputError, match="expected 2"):
        Drift.of_rows(np.array([1, 1]), np.array([True]), np.array([0.5]))


def test_rates_by_group_and_hour_count_every_row_once() -> None:
    times = [datetime(2024, 1, 1, hour) for hour in (9, 9, 21, 21, 9)]
    log = pl.DataFrame(
        {"os": ["b", "a", "a", None, "a"], "opened_at": times, "replied": [1, 0, 1, 1, 1]}
    ).with_columns(pl.col("replied").cast(pl.Boolean))
    cells = reply_rates(log.lazy(), ["os", HOUR])
    assert [(c.key, c.replies, c.rows) for c in cells] == [
        (("a", "9"), 1, 2),
        (("a", "21"), 1, 1),
        (("b", "9"), 1, 1),
        (("(missing)", "21"), 1, 1),
    ]
    assert cells[0].rate == 0.5
    with pytest.raises(InputError, match="no column country"):
        reply_rates(log.lazy(), ["country"])
    with pytest.raises(InputError, match="to group by"):
        reply_rates(log.lazy(), [])
    with pytest.raises(InputError, match="cannot be grouped"):
        reply_rates(log.lazy().with_columns(pl.col("opened_at").cast(pl.Date)), [HOUR])
