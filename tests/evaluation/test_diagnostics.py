"""Calibration of models: against scikit-learn and plain sums, the same for any partitioning."""

from __future__ import annotations

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
    CalibrationSums,
    ModelCalibration,
    calibration_from,
    calibration_sums,
)
from fedipw.numerics import FloatArray, LabelArray
from fedipw.selection.coded import CodedTable
from fedipw.selection.logistic import LogisticFit
from fedipw.selection.saved import BlockProb, block_prob
from fedipw.tables.partitions import Block, Blocks, Partitions, sum_over
from fedipw.tables.table import Table


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


few_probs = st.sampled_from([0.0, 0.1, 0.1001, 0.25, 0.5, 0.9, 1.0]) | st.floats(0.0, 1.0)


@st.composite
def predictions(draw: st.DrawFn) -> tuple[FloatArray, LabelArray, FloatArray]:
    m = draw(st.integers(2, 60))
    prob = draw(arrays(np.float64, m, elements=few_probs))
    labels = draw(arrays(np.int8, m, elements=st.integers(0, 1)))
    weights = draw(arrays(np.float64, m, elements=st.floats(0.1, 5.0)))
    return prob, labels, weights


def calibration(
    prob: FloatArray, labels: LabelArray, weights: FloatArray | None = None, bins: int = 10
) -> ModelCalibration:
    rows_count = np.ones(len(prob)) if weights is None else weights
    return calibration_from(calibration_sums(prob, labels.astype(np.float64), rows_count), bins)


def partition_calibration(blocks: Partitions, prob: BlockProb, bins: int = 10) -> ModelCalibration:
    """The same by one pass over blocks."""

    def sums(block: Block) -> CalibrationSums:
        weights = block.weights if len(block.weights) else np.ones(block.rows)
        return calibration_sums(prob(block), block.labels.astype(np.float64), weights)

    return calibration_from(sum_over(blocks, sums), bins)


@given(predictions(), st.booleans())
def test_the_auc_is_within_its_error_of_that_of_scikit_learn(
    drawn: tuple[FloatArray, LabelArray, FloatArray], weighted: bool
) -> None:
    prob, labels, weights = drawn
    assume(0 < labels.sum() < len(labels))
    found = calibration(prob, labels, weights if weighted else None)
    known = roc_auc_score(labels, prob, sample_weight=weights if weighted else None)
    assert found.auc is not None
    assert abs(found.auc - known) <= found.auc_error + 1e-12


@given(predictions(), st.sets(st.integers(1, 59), max_size=6), st.booleans(), st.integers(1, 12))
def test_any_partitioning_gives_the_calibration_of_arrays(
    drawn: tuple[FloatArray, LabelArray, FloatArray], at: set[int], weighted: bool, bins: int
) -> None:
    prob, labels, weights = drawn
    rows_count = weights if weighted else None
    known = calibration(prob, labels, rows_count, bins)
    found = partition_calibration(cut(prob, labels, rows_count, at), prob_column, bins)
    for name in ("rate", "mean_prob", "expected_error", "brier", "log_loss"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-12, abs=1e-12)
    assert [b.count for b in found.reliability] == [b.count for b in known.reliability]
    for one, other in zip(found.reliability, known.reliability, strict=True):
        assert one.mean_prob == pytest.approx(other.mean_prob, rel=1e-12, abs=1e-12)
        assert one.rate == pytest.approx(other.rate, rel=1e-12, abs=1e-12)
        assert one.standard_error == pytest.approx(other.standard_error, rel=1e-6, abs=1e-7)
    assert (found.auc is None) == (known.auc is None)
    assert found.auc == pytest.approx(known.auc, abs=1e-12)
    assert found.auc_error == pytest.approx(known.auc_error, abs=1e-12)


@given(predictions(), st.integers(1, 12))
def test_reliability_counts_add_up(
    drawn: tuple[FloatArray, LabelArray, FloatArray], bins: int
) -> None:
    prob, labels, _ = drawn
    found = calibration(prob, labels, bins=bins)
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
    found = calibration(prob, labels)
    assert [b.count for b in found.reliability] == pytest.approx([5_000] * 10, rel=0.02)
    assert found.brier == pytest.approx(brier_score_loss(labels, prob), rel=1e-12)
    assert found.log_loss == pytest.approx(log_loss(labels, prob), rel=1e-10)
    assert found.ratio == pytest.approx(labels.sum() / prob.sum(), rel=1e-12)
    assert found.auc is not None
    assert found.auc_error < 1e-3
    assert abs(found.auc - roc_auc_score(labels, prob)) <= found.auc_error


def test_a_calibrated_model_has_smaller_error_than_one_that_is_not() -> None:
    rng = np.random.default_rng(5)
    prob = rng.uniform(0.05, 0.6, 40_000)
    labels = (rng.random(40_000) < prob).astype(np.int8)
    right, wrong = calibration(prob, labels), calibration(prob**2, labels)
    assert right.expected_error < 0.02 < wrong.expected_error
    assert right.auc is not None
    assert wrong.auc is not None  # order is all that counts
    assert abs(wrong.auc - right.auc) <= right.auc_error + wrong.auc_error


def test_a_fitted_model_is_calibrated_from_its_coded_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    age = rng.normal(40.0, 10.0, 5_000)
    enrolled = rng.random(5_000) < 1.0 / (1.0 + np.exp(3.0 - 0.05 * age))
    people = pl.DataFrame({"age": age, "enrolled": enrolled})
    people.write_parquet(tmp_path / "people.parquet")
    coded = CodedTable.of(Table(tmp_path / "people.parquet"), "age")
    model = coded.model()
    assert isinstance(model.fit, LogisticFit)
    found = partition_calibration(coded.partitions, block_prob(model.fit, coded.frame))
    known = calibration(model.prob(people)[0], enrolled.astype(np.int8))
    assert found.ratio == pytest.approx(1.0, rel=1e-9)  # the score of the intercept is 0
    assert found.log_loss == pytest.approx(-model.fit.log_likelihood / 5_000, rel=1e-9)
    assert found.brier == pytest.approx(known.brier, rel=1e-9)


def test_certain_mistakes_cost_an_infinite_log_loss_and_certain_truths_nothing() -> None:
    assert calibration(np.array([0.0, 1.0]), np.array([0, 1])).log_loss == 0.0
    assert calibration(np.array([0.0, 1.0]), np.array([1, 1])).log_loss == np.inf


def test_one_class_has_no_auc() -> None:
    prob, labels = np.array([0.3, 0.4]), np.array([1, 1], np.int8)
    assert calibration(prob, labels).auc is None


def test_rows_without_weight_have_no_calibration() -> None:
    with pytest.raises(InputError, match="both must be above 0"):
        calibration(np.array([0.5, 0.5]), np.array([0, 1], np.int8), np.zeros(2))


def test_bins_must_be_positive() -> None:
    with pytest.raises(InputError, match="0 bins"):
        calibration(np.array([0.5]), np.array([1], np.int8), bins=0)
