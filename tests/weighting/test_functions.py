"""Weights against closed forms and exhaustive enumeration."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedipw.errors import EmptyRoundError, InputError
from fedipw.selection.participation import Source
from fedipw.weighting.functions import (
    effective_sample_size,
    estimated_population_size,
    hajek_weights,
    horvitz_thompson_weights,
    trimmed,
)
from fedipw.weighting.methods import method_named
from fedipw.weighting.pipeline import Weighing
from fedipw.weighting.weigher import EnrollmentState, Replies

ENROLL = np.array([0.3, 0.8, 0.5, 0.9])
PART = np.array([0.6, 0.2, 0.7, 0.4])
VALUE = np.array([[4.0, 1.0], [-1.0, 0.5], [2.0, -3.0], [0.5, 2.0]])

probabilities = arrays(np.float64, st.integers(1, 40), elements=st.floats(1e-3, 1.0))


def replies(rows: list[int], enroll: np.ndarray = ENROLL, part: np.ndarray = PART) -> Replies:
    return Replies(
        index=1,
        unit_ids=np.array(rows),
        rows=np.array(rows),
        enrollment_prob=enroll[rows],
        participation_prob=part[rows],
        sample_counts=np.array(rows) + 1,
        source=Source.KNOWN,
        invite_prob=np.ones(len(rows)),
    )


def weighing(name: str, size: float = 4) -> Weighing:
    """Return a method for a population of this size; replies bring their own probabilities."""
    state = EnrollmentState(
        unit_ids=np.arange(4),
        sample_counts=np.arange(4) + 1,
        enrolled=np.ones(4, dtype=np.bool_),
        prob=ENROLL,
        population_size=size,
    )
    return method_named(name).at(state)


def moments(scheme: Weighing) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the weighted sum over every enrollment and every participation."""
    mean, second = np.zeros(2), np.zeros(2)
    for enrolled in product([True, False], repeat=4):
        p_enrolled = np.where(enrolled, ENROLL, 1 - ENROLL).prod()
        for available in product([True, False], repeat=4):
            p_available = np.where(available, PART, 1 - PART).prod()
            rows = [i for i in range(4) if enrolled[i] and available[i]]
            total = scheme.weights(replies(rows)) @ VALUE[rows] if rows else np.zeros(2)
            mean += p_enrolled * p_available * total
            second += p_enrolled * p_available * total**2
    return mean, second - mean**2


def test_horvitz_thompson_is_unbiased_with_its_closed_variance() -> None:
    mean, variance = moments(weighing("fedipw"))
    pi = ENROLL * PART
    np.testing.assert_allclose(mean, VALUE.mean(axis=0), rtol=1e-12)  # (A1)
    closed = ((1 - pi) / pi)[:, None] * VALUE**2 / 4**2  # (A3)
    np.testing.assert_allclose(variance, closed.sum(axis=0), rtol=1e-12)


def test_hajek_is_another_estimator_biased_where_horvitz_thompson_is_not() -> None:
    mean, _ = moments(weighing("fedipw-hajek"))
    assert np.all(np.abs(mean - VALUE.mean(axis=0)) > 0.01)


def test_naive_mean_is_biased() -> None:
    mean, _ = moments(weighing("fedavg"))
    assert np.all(np.abs(mean - VALUE.mean(axis=0)) > 0.01)


def test_inclusion_probability_is_the_product_of_the_stages() -> None:
    included = np.zeros(4)
    for enrolled in product([True, False], repeat=4):
        for available in product([True, False], repeat=4):
            chance = np.where(enrolled, ENROLL, 1 - ENROLL).prod()
            chance *= np.where(available, PART, 1 - PART).prod()
            included += chance * (np.array(enrolled) & np.array(available))
    np.testing.assert_allclose(included, replies([0, 1, 2, 3]).inclusion_prob, rtol=1e-12)  # (S1)


@given(
    enroll=arrays(np.float64, 12, elements=st.floats(0.2, 1.0)),
    part=arrays(np.float64, 12, elements=st.floats(0.2, 1.0)),
    error=arrays(np.float64, (2, 12), elements=st.floats(-0.1, 0.1)),
    replied=arrays(np.bool_, 12),
    value=arrays(np.float64, (12, 3), elements=st.floats(-10, 10)),
)
def test_plug_in_remainder_inequality(
    enroll: np.ndarray,
    part: np.ndarray,
    error: np.ndarray,
    replied: np.ndarray,
    value: np.ndarray,
) -> None:
    """The distance of plug-in and oracle sums is at most U e / c^2, e at most the stages' sum."""
    if not replied.any():
        return
    enroll_hat = np.clip(enroll + error[0], 0.1, 1.0)
    part_hat = np.clip(part + error[1], 0.1, 1.0)
    truth, plugged = enroll * part, enroll_hat * part_hat
    rows = np.flatnonzero(replied).tolist()
    scheme = weighing("fedipw", 12)
    plug_in = scheme.weights(replies(rows, enroll_hat, part_hat)) @ value[rows]
    oracle = scheme.weights(replies(rows, enroll, part)) @ value[rows]
    e = np.abs(plugged - truth).max()
    stages = np.abs(enroll_hat - enroll).max() + np.abs(part_hat - part).max()
    c = min(truth.min(), plugged.min())
    u = np.linalg.norm(value[rows], axis=1).sum() / 12
    assert e <= stages + 1e-12
    assert np.linalg.norm(plug_in - oracle) <= u * e / c**2 + 1e-9  # (A2)


@given(pi=probabilities, scale=st.floats(0.1, 1.0))
def test_hajek_weights_forget_a_common_factor(pi: np.ndarray, scale: float) -> None:
    weights = hajek_weights(pi)
    assert np.isclose(weights.sum(), 1.0)
    np.testing.assert_allclose(hajek_weights(scale * pi), weights, rtol=1e-9)


@given(pi=probabilities, scale=st.floats(0.1, 1.0))
def test_horvitz_thompson_weights_do_not_forget_it(pi: np.ndarray, scale: float) -> None:
    np.testing.assert_allclose(
        horvitz_thompson_weights(scale * pi, 100) * scale,
        horvitz_thompson_weights(pi, 100),
        rtol=1e-9,
    )


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_equal_probabilities_give_back_fedavg(part: float) -> None:
    rows = [0, 2, 3]
    same = replies(rows, np.full(4, 0.75 / part if part == 1.0 else 1.0), np.full(4, part))
    average = weighing("fedavg").weights(same)
    np.testing.assert_allclose(weighing("fedipw-hajek").weights(same), average, rtol=1e-15)
    size = len(rows) / same.inclusion_prob[0]  # as many replies as expected
    np.testing.assert_allclose(weighing("fedipw", size).weights(same), average, rtol=1e-15)


@given(
    weights=arrays(np.float64, st.integers(1, 30), elements=st.floats(1e-6, 1e3)),
    times=st.floats(1.0, 5.0),
)
def test_trimming_reports_all_it_did(weights: np.ndarray, times: float) -> None:
    report = trimmed(weights, times)
    assert report.weights.max() <= report.cap
    assert report.changed == (report.weights != weights).sum()
    lost = (weights - report.weights).sum() / weights.sum()
    np.testing.assert_allclose(report.mass, lost, atol=1e-12)


@given(
    weights=arrays(np.float64, st.integers(1, 30), elements=st.floats(-1e3, 1e3)),
    times=st.floats(1.0, 5.0),
)
def test_weights_of_either_sign_are_cut_in_size(weights: np.ndarray, times: float) -> None:
    report, opposite = trimmed(weights, times), trimmed(-weights, times)
    assert np.abs(report.weights).max() <= report.cap
    np.testing.assert_array_equal(opposite.weights, -report.weights)
    assert report.changed == opposite.changed == (report.weights != weights).sum()
    assert 0.0 <= report.mass < 1.0


def test_nothing_is_cut_of_weights_that_are_all_zero() -> None:
    report = trimmed(np.zeros(3), 2.0)
    assert (report.changed, report.mass, report.cap) == (0, 0.0, 0.0)


@given(weights=arrays(np.float64, st.integers(1, 30), elements=st.floats(1e-3, 1e3)))
def test_effective_sample_size_lies_between_one_and_the_count(weights: np.ndarray) -> None:
    size = effective_sample_size(weights)
    assert 1.0 - 1e-9 <= size <= len(weights) * (1 + 1e-9)


def test_estimated_population_size_is_unbiased() -> None:
    mean = 0.0
    for enrolled in product([True, False], repeat=4):
        rows = np.flatnonzero(enrolled)
        if rows.size:
            chance = np.where(enrolled, ENROLL, 1 - ENROLL).prod()
            mean += chance * estimated_population_size(ENROLL[rows])
    np.testing.assert_allclose(mean, 4.0, rtol=1e-12)


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.5, np.nan])
def test_impossible_probabilities_are_named(bad: float) -> None:
    with pytest.raises(InputError, match=r"inclusion_prob must lie in \(0, 1\]; 1 of 3.*row 1"):
        hajek_weights([0.5, bad, 0.5])
    with pytest.raises(InputError, match="inclusion_prob"):
        horvitz_thompson_weights([0.5, bad, 0.5], 3)


def test_bad_sizes_and_caps_are_refused() -> None:
    with pytest.raises(InputError, match="population_size must be"):
        horvitz_thompson_weights([0.5], 0)
    with pytest.raises(InputError, match="not trimming"):
        trimmed(np.ones(3), 0.5)


def test_an_empty_round_has_no_replies() -> None:
    with pytest.raises(EmptyRoundError, match="no reply has all the values needed"):
        replies([])
