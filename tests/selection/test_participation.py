"""Participation probabilities round by round: predictable, honest about their source."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from fedipw.errors import InputError
from fedipw.numerics.types import BoolArray, FloatArray
from fedipw.selection import (
    FitWindow,
    NewtonLogistic,
    ParticipationModel,
    ParticipationSettings,
    ReplyHistory,
    Source,
)

PAST, SAME = FitWindow.PAST, FitWindow.SAME_ROUND
seeds = st.integers(0, 2**32 - 1)


class Log(NamedTuple):
    """Constant covariates (n, 1), covariates (R, n, 1) and replies (R, n)."""

    static: FloatArray
    covariates: FloatArray
    replied: BoolArray


def random_log(seed: int = 0, rounds: int = 5, clients: int = 120, rate: float = -0.7) -> Log:
    rng = np.random.default_rng(seed)
    static, covariates = rng.normal(size=(clients, 1)), rng.normal(size=(rounds, clients, 1))
    log_odds = rate + 0.5 * static[:, 0] + 0.7 * covariates[:, :, 0]
    return Log(static, covariates, rng.random((rounds, clients)) < expit(log_odds))


def model_of(
    log: Log, settings: ParticipationSettings | None = None, seed: int = 9
) -> ParticipationModel:
    rng = np.random.default_rng(seed)
    return ParticipationModel(log.static, ("z",), ("x",), settings, rng)


def all_rounds(
    log: Log, settings: ParticipationSettings | None = None
) -> list[tuple[FloatArray, Source]]:
    """Run every round in order and return what each was told."""
    model, told = model_of(log, settings), []
    for covariates, replied in zip(log.covariates, log.replied, strict=True):
        model.open(covariates)
        told.append(model.prob(replied))
        model.close(replied)
    return told


def stacked(log: Log, rounds: slice) -> tuple[FloatArray, BoolArray]:
    """Return rows (z, x) and replies of some rounds."""
    x = log.covariates[rounds]
    X = np.column_stack([np.tile(log.static, (len(x), 1)), x.reshape(-1, 1)])
    return X, log.replied[rounds].ravel()


def fitted_prob(log: Log, rounds: slice, at: int) -> FloatArray:
    """Return what logistic regression on ``rounds`` says of round ``at``."""
    model = NewtonLogistic().fit(*stacked(log, rounds))
    return model.predict_proba(np.column_stack([log.static, log.covariates[at]]))[:, 1]


@settings(max_examples=30)
@given(
    seed=seeds, present=st.integers(1, 4), history=st.booleans(), folds=st.sampled_from([None, 3])
)
def test_past_fits_are_predictable(
    seed: int, present: int, history: bool, folds: int | None
) -> None:
    log = random_log(seed)
    later = log.replied.copy()
    rng = np.random.default_rng(seed)
    later[present:] = rng.random(later[present:].shape) < 0.5
    changed = log._replace(replied=later)
    chosen = ParticipationSettings(history=history, folds=folds)
    before, after = all_rounds(log, chosen), all_rounds(changed, chosen)
    for r in range(present + 1):  # up to and with the round whose replies were changed
        np.testing.assert_array_equal(before[r][0], after[r][0])
        assert before[r][1] is after[r][1]


@settings(max_examples=20)
@given(seed=seeds, present=st.integers(1, 4))
def test_same_round_fits_are_not(seed: int, present: int) -> None:
    log = random_log(seed)
    other = log.replied.copy()
    other[present] = np.random.default_rng(seed).random(120) < 0.5
    chosen = ParticipationSettings(window=SAME)
    before = all_rounds(log, chosen)[present][0]
    after = all_rounds(log._replace(replied=other), chosen)[present][0]
    assert (before != after).all()


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_past_fit_is_logistic_regression_on_all_earlier_rounds(at: int) -> None:
    log = random_log()
    prob, source = all_rounds(log)[at]
    assert source is Source.MODEL
    np.testing.assert_allclose(prob, fitted_prob(log, slice(0, at), at), rtol=1e-9)


def test_a_past_fit_does_not_depend_on_which_rounds_were_asked_for() -> None:
    log = random_log(rounds=6)
    silent = model_of(log)
    for covariates, replied in zip(log.covariates[:5], log.replied[:5], strict=True):
        silent.open(covariates)
        silent.close(replied)
    silent.open(log.covariates[5])
    np.testing.assert_allclose(silent.prob(log.replied[5])[0], all_rounds(log)[5][0], rtol=1e-9)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_same_round_fit_is_logistic_regression_on_that_round(at: int) -> None:
    log = random_log()
    prob, source = all_rounds(log, ParticipationSettings(window=SAME))[at]
    assert source is Source.MODEL
    np.testing.assert_allclose(prob, fitted_prob(log, slice(at, at + 1), at), rtol=1e-9)


def exact_replies(clients: int, count: int) -> BoolArray:
    replied = np.zeros(clients, dtype=bool)
    replied[np.random.default_rng(count).permutation(clients)[:count]] = True
    return replied


@pytest.mark.parametrize("window", [PAST, SAME])
@pytest.mark.parametrize(
    ("count", "enough"),
    [(1, False), (30, False), (31, True), (89, True), (90, False), (119, False)],
)
def test_a_rate_serves_until_ten_replies_and_non_replies_per_coefficient(
    window: FitWindow, count: int, enough: bool
) -> None:
    log = random_log(rounds=2)  # three coefficients: more than thirty of each are needed
    replied = np.array([exact_replies(120, count), exact_replies(120, count)])
    told = all_rounds(log._replace(replied=replied), ParticipationSettings(window=window))
    prob, source = told[1]
    rate_source = Source.PAST_RATE if window is PAST else Source.ROUND_RATE
    assert source is (Source.MODEL if enough else rate_source)
    if not enough:
        np.testing.assert_array_equal(prob, count / 120)


def test_the_rule_can_be_set_and_counts_history_columns() -> None:
    log = random_log(rounds=2)
    replied = np.array([exact_replies(120, 40)] * 2)
    log = log._replace(replied=replied)
    assert all_rounds(log, ParticipationSettings(per_coefficient=14.0))[1][1] is Source.PAST_RATE
    assert all_rounds(log, ParticipationSettings(per_coefficient=13.0))[1][1] is Source.MODEL
    assert all_rounds(log, ParticipationSettings(history=True))[1][1] is Source.PAST_RATE


def test_the_rate_of_the_past_counts_every_earlier_round() -> None:
    log = random_log(rounds=3)
    replied = np.array([exact_replies(120, 3), exact_replies(120, 8), exact_replies(120, 50)])
    prob, source = all_rounds(log._replace(replied=replied))[2]
    assert source is Source.PAST_RATE
    np.testing.assert_array_equal(prob, 11 / 240)


def test_the_first_round_uses_its_own_rate() -> None:
    log = random_log()
    prob, source = all_rounds(log)[0]
    assert source is Source.ROUND_RATE
    np.testing.assert_array_equal(prob, log.replied[0].mean())


def test_empty_rounds_before_leave_no_past() -> None:
    log = random_log()
    model = model_of(log)
    model.open(log.covariates[0])
    model.close(np.zeros(120, dtype=bool))
    model.open(log.covariates[1])
    prob, source = model.prob(log.replied[1])
    assert source is Source.ROUND_RATE
    np.testing.assert_array_equal(prob, log.replied[1].mean())


@pytest.mark.parametrize("window", [PAST, SAME])
def test_an_empty_round_is_refused(window: FitWindow) -> None:
    log = random_log()
    model = model_of(log, ParticipationSettings(window=window))
    model.open(log.covariates[0])
    model.close(log.replied[0])
    model.open(log.covariates[1])
    with pytest.raises(InputError, match=r"Nobody replied in round 2: skip it and record it"):
        model.prob(np.zeros(120, dtype=bool))


@pytest.mark.parametrize("classifier", [None, NewtonLogistic()])
def test_a_model_that_separates_falls_back_to_the_rate_and_says_so(
    classifier: NewtonLogistic | None,
) -> None:
    log = random_log()
    split = np.tile(log.static[:, 0] > 0.2, (5, 1))
    told = all_rounds(log._replace(replied=split), ParticipationSettings(classifier=classifier))
    prob, source = told[3]
    assert source is Source.SEPARATED_RATE
    np.testing.assert_allclose(prob, split[0].mean(), rtol=1e-15)


def test_a_model_that_does_not_converge_falls_back_to_the_rate_and_says_so() -> None:
    log = random_log()
    hasty = ParticipationSettings(classifier=NewtonLogistic(max_iter=1))
    prob, source = all_rounds(log, hasty)[3]
    assert source is Source.UNCONVERGED_RATE
    np.testing.assert_allclose(prob, log.replied[:3].mean(), rtol=1e-15)


@settings(max_examples=10)
@given(seed=seeds, client=st.integers(0, 119))
def test_cross_fitting_keeps_a_clients_own_past_out(seed: int, client: int) -> None:
    log = random_log(seed, rounds=4)
    other = log.replied.copy()
    other[:3, client] = ~other[:3, client]
    chosen = ParticipationSettings(folds=4)
    before, source = all_rounds(log, chosen)[3]
    after, _ = all_rounds(log._replace(replied=other), chosen)[3]
    assert source is Source.MODEL
    assert before[client] == after[client]
    assert (before != after).any()  # it does shape the others'


def test_cross_fitted_probabilities_equal_a_plain_loop() -> None:
    log = random_log(rounds=3)
    prob, source = all_rounds(log, ParticipationSettings(folds=3))[2]
    fold_of = np.random.default_rng(9).permutation(120) % 3
    expected = np.empty(120)
    for fold in range(3):
        others, own = fold_of != fold, fold_of == fold
        part = Log(log.static[others], log.covariates[:, others], log.replied[:, others])
        fit = NewtonLogistic().fit(*stacked(part, slice(0, 2)))
        X = np.column_stack([log.static, log.covariates[2]])
        expected[own] = fit.predict_proba(X[own])[:, 1]
    assert source is Source.MODEL
    np.testing.assert_array_equal(prob, expected)


def test_cross_fitting_needs_chance_and_enough_clients() -> None:
    static = np.zeros((5, 1))
    with pytest.raises(InputError, match="Cross-fitting draws folds: pass rng"):
        ParticipationModel(static, ("z",), ("x",), ParticipationSettings(folds=2))
    for folds in (1, 6):
        with pytest.raises(InputError, match=rf"{folds} folds over 5 clients: need 2 to 5"):
            ParticipationModel(
                static, ("z",), ("x",), ParticipationSettings(folds=folds), np.random.default_rng(0)
            )


def test_any_classifier_serves() -> None:
    log = random_log(rounds=3)
    boosting = HistGradientBoostingClassifier(max_iter=3, random_state=0)
    X = np.column_stack([log.static, log.covariates[2]])
    with threadpool_limits(1):  # tiny fits: threads would only wait for each other
        prob, source = all_rounds(log, ParticipationSettings(classifier=boosting))[2]
        expected = boosting.fit(*stacked(log, slice(0, 2))).predict_proba(X)[:, 1]
    assert source is Source.MODEL
    np.testing.assert_array_equal(prob, expected)


def test_history_columns_enter_the_fit() -> None:
    log = random_log(rounds=8)
    chosen = ParticipationSettings(history=True, day_length=6.0)
    prob, source = all_rounds(log, chosen)[7]
    history, blocks = ReplyHistory.of(120), []
    for x, replied in zip(log.covariates, log.replied, strict=True):
        blocks.append(np.column_stack([log.static, x, history.matrix(day_length=6.0)]))
        history = history.after(replied)
    fit = NewtonLogistic().fit(np.concatenate(blocks[:7]), log.replied[:7].ravel())
    assert source is Source.MODEL
    np.testing.assert_allclose(prob, fit.predict_proba(blocks[7])[:, 1], rtol=1e-8)
    assert model_of(log, chosen).names[1:] == (
        "last_reply",
        "reply_rate",
        "rounds_since_reply",
        "hour_sin",
        "hour_cos",
    )
