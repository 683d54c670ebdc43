"""Intercepts solved for a rate, and enrollment with one uniform per client."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit

from fedipw.errors import InputError
from fedipw.lab.mechanisms import LogisticEnrollment, enrollment_draw
from fedipw.lab.mechanisms.base import score_of, solved_intercept
from fedipw.lab.testbed import Testbed
from fedipw.numerics import FloatArray
from fedipw.tables import Population

rates = st.floats(0.001, 0.999)
probabilities = arrays(np.float64, st.integers(1, 40), elements=st.floats(1e-3, 1.0))


def people(size: int = 300) -> Population:
    return Testbed(size=size, rows=1).draw(np.random.default_rng(0)).population


@settings(max_examples=300)
@given(arrays(np.float64, st.integers(1, 50), elements=st.floats(-50.0, 50.0)), rates)
def test_the_solved_intercept_gives_the_rate(scores: FloatArray, rate: float) -> None:
    a = solved_intercept(lambda: [scores], rate)
    assert abs(expit(a + scores).mean() - rate) <= 1e-12


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), rate=rates)
def test_scores_may_come_in_pieces_of_any_size(seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    pieces = [rng.normal(size=rng.integers(1, 9)) for _ in range(5)]
    a = solved_intercept(lambda: iter(pieces), rate)
    assert abs(expit(a + np.concatenate(pieces)).mean() - rate) <= 1e-12


@pytest.mark.parametrize("scores", [[-1000.0, 1000.0], [800.0, 800.0], [-5e4, 0.0, 2.0]])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.8])
def test_far_scores_still_reach_the_rate(scores: list[float], rate: float) -> None:
    values = np.array(scores)
    a = solved_intercept(lambda: [values], rate)
    rounding = np.spacing(abs(a))  # of the intercept itself
    assert abs(expit(a + values).mean() - rate) <= 1e-12 + rounding


def test_equal_scores_have_a_closed_form() -> None:
    a = solved_intercept(lambda: [np.full(7, 3.0)], 0.2)
    assert a == pytest.approx(np.log(0.25) - 3.0, rel=1e-13)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_rate_outside_is_refused(rate: float) -> None:
    with pytest.raises(InputError, match="strictly between 0 and 1") as caught:
        solved_intercept(lambda: [np.zeros(3)], rate)
    assert repr(rate) in str(caught.value)


def test_a_score_is_the_weighted_sum_of_named_columns() -> None:
    population = people()
    Z = population.matrix(["z1", "z3"])
    got = score_of(population, {"z3": -2.0, "z1": 0.5})
    np.testing.assert_allclose(got, 0.5 * Z[:, 0] - 2.0 * Z[:, 1], rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(score_of(population, {}), np.zeros(population.listed))
    with pytest.raises(InputError, match="No covariate column 'z9'"):
        score_of(population, {"z9": 1.0})


@settings(max_examples=50)
@given(strength=st.floats(0.0, 5.0), rate=rates)
def test_enrollment_has_its_mean_rate_and_its_odds_ratios(strength: float, rate: float) -> None:
    population = people(size=60)
    prob = LogisticEnrollment(strength=strength, rate=rate)(population)
    assert abs(prob.mean() - rate) <= 1e-12
    Z = population.matrix()
    score = strength * (Z[:, 0] + 0.8 * Z[:, 1])
    middle = int(np.abs(prob - 0.5).argmin())  # where log odds are read off most exactly
    intercept = np.log(prob[middle] / (1.0 - prob[middle])) - score[middle]
    np.testing.assert_allclose(prob, expit(intercept + score), rtol=1e-10)


@settings(max_examples=50)
@given(rate=rates, pair=st.lists(st.floats(0.0, 6.0), min_size=2, max_size=2))
def test_strength_pulls_the_ends_apart(rate: float, pair: list[float]) -> None:
    # d pi_i / ds = pi_i (1 - pi_i) (score_i - a weighted mean score): the ends move outwards
    population = people(size=60)
    score = score_of(population, {"z1": 1.0, "z2": 0.8})
    weak, strong = (LogisticEnrollment(strength=s, rate=rate)(population) for s in sorted(pair))
    top, bottom = int(score.argmax()), int(score.argmin())
    assert strong[top] >= weak[top] - 1e-12
    assert strong[bottom] <= weak[bottom] + 1e-12


def test_no_strength_is_no_selection() -> None:
    prob = LogisticEnrollment(strength=0.0, rate=0.3)(people())
    np.testing.assert_allclose(prob, 0.3, rtol=1e-13)


@settings(max_examples=100)
@given(probabilities, st.integers(0, 2**32 - 1))
def test_enrollment_uses_one_uniform_per_client(probs: FloatArray, seed: int) -> None:
    probs = np.append(probs, 1.0)  # somebody enrolls
    rng = np.random.default_rng(seed)
    drawn = enrollment_draw(probs, rng)
    reference = np.random.default_rng(seed)
    np.testing.assert_array_equal(drawn, reference.random(len(probs)) < probs)
    assert rng.random() == reference.random()  # the stream stands where N uniforms leave it


@settings(max_examples=100)
@given(probabilities, st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
def test_raising_probabilities_never_unenrolls_anybody(
    probs: FloatArray, seed: int, raised: float
) -> None:
    probs = np.append(probs, 1.0)
    before = enrollment_draw(probs, np.random.default_rng(seed))
    after = enrollment_draw(probs + raised * (1.0 - probs), np.random.default_rng(seed))
    assert (after | ~before).all()


def test_certain_enrollment_enrolls_everybody() -> None:
    assert enrollment_draw(np.ones(1000), np.random.default_rng(0)).all()


def test_nobody_enrolled_is_an_error_with_the_numbers() -> None:
    with pytest.raises(InputError, match=r"No client of 4 enrolled at a mean probability of 1e-12"):
        enrollment_draw(np.full(4, 1e-12), np.random.default_rng(0))


@pytest.mark.parametrize("bad", [0.0, 1.2, np.nan])
def test_probabilities_outside_are_named_with_their_rows(bad: float) -> None:
    probs = np.array([0.5, bad, 0.5, bad])
    with pytest.raises(InputError, match=r"enrollment probability .*2 of 4 .*row 1: .*row 3: "):
        enrollment_draw(probs, np.random.default_rng(0))
