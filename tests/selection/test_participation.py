"""Participation probabilities round by round: predictable, honest about their source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier

from fedipw.errors import InputError
from fedipw.numerics import BoolArray
from fedipw.selection.classifiers import Classifier
from fedipw.selection.participation import ParticipationSettings, Source, Window
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.steps import Formulas, ReplyHistory
from worlds import Log

from .learner import STORES, Stores, all_rounds, fitted_prob, learner_of, played, random_log

PAST, SAME = Window.PAST, Window.SAME_ROUND
SEED = 9
seeds = st.integers(0, 2**32 - 1)
stores = pytest.mark.parametrize("store", STORES.values(), ids=STORES)


def cross_fitted(folds: int) -> ParticipationSettings:
    return ParticipationSettings(estimator=Classifier(folds=folds, seed=SEED), refit_every=1)


def same_round() -> ParticipationSettings:
    return ParticipationSettings(window=SAME)


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
    chosen, formulas = None if folds is None else cross_fitted(folds), Formulas(history=history)
    before = all_rounds(log, chosen, formulas)
    after = all_rounds(log._replace(replied=later), chosen, formulas)
    for r in range(present + 1):  # up to and with the round whose replies were changed
        np.testing.assert_array_equal(before[r].prob, after[r].prob)
        assert before[r].source is after[r].source


@settings(max_examples=20)
@given(seed=seeds, present=st.integers(1, 4))
def test_same_round_fits_are_not(seed: int, present: int) -> None:
    log = random_log(seed)
    other = log.replied.copy()
    other[present] = np.random.default_rng(seed).random(120) < 0.5
    before = all_rounds(log, same_round())[present].prob
    after = all_rounds(log._replace(replied=other), same_round())[present].prob
    assert (before != after).all()


@stores
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_past_fit_is_logistic_regression_on_all_earlier_rounds(at: int, store: Stores) -> None:
    log = random_log()
    found = all_rounds(log, store=store)[at]
    assert found.source is Source.MODEL
    np.testing.assert_allclose(found.prob, fitted_prob(log, slice(0, at), at), rtol=1e-9)


@stores
@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_rolling_fit_is_logistic_regression_on_the_last_rounds(last: int, store: Stores) -> None:
    log = random_log(rounds=6)
    rolling = ParticipationSettings(last=last, refit_every=1)
    for at, found in enumerate(all_rounds(log, rolling, store=store)[1:], start=1):
        rounds = slice(max(0, at - last), at)
        assert found.source is Source.MODEL
        np.testing.assert_allclose(found.prob, fitted_prob(log, rounds, at), rtol=1e-9)


@stores
def test_fits_are_kept_for_as_many_rounds_as_asked(store: Stores) -> None:
    """One by one up to the third round, then every third."""
    log = random_log(rounds=11)
    found = all_rounds(log, ParticipationSettings(refit_every=3), store=store)
    for at, until in {1: 1, 2: 2, 3: 3, 4: 3, 5: 3, 6: 6, 7: 6, 8: 6, 9: 9, 10: 9}.items():
        np.testing.assert_allclose(found[at].prob, fitted_prob(log, slice(0, until), at), rtol=1e-9)


def test_a_past_fit_does_not_depend_on_which_rounds_were_asked_for() -> None:
    log = random_log(rounds=6)
    silent = learner_of(log)
    for r in range(5):
        silent.open(log.round(r))
        silent.close(log.replied[r])
    found = played(silent, log, [5])[0]
    np.testing.assert_allclose(found.prob, all_rounds(log)[5].prob, rtol=1e-9)


@stores
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_same_round_fit_is_logistic_regression_on_that_round(at: int, store: Stores) -> None:
    log = random_log()
    found = all_rounds(log, same_round(), store=store)[at]
    assert found.source is Source.MODEL
    np.testing.assert_allclose(found.prob, fitted_prob(log, slice(at, at + 1), at), rtol=1e-9)


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
    window: Window, count: int, enough: bool
) -> None:
    log = random_log(rounds=2)  # three coefficients: more than thirty of each are needed
    replied = np.array([exact_replies(120, count), exact_replies(120, count)])
    log = log._replace(replied=replied)
    found = all_rounds(log, ParticipationSettings(window=window))[1]
    rate_source = Source.PAST_RATE if window is PAST else Source.ROUND_RATE
    assert found.source is (Source.MODEL if enough else rate_source)
    if not enough:
        np.testing.assert_array_equal(found.prob, count / 120)


def test_the_rule_can_be_set_and_counts_history_columns() -> None:
    log = random_log(rounds=2)._replace(replied=np.array([exact_replies(120, 40)] * 2))

    def source(per_coefficient: float, *, history: bool = False) -> Source:
        chosen = ParticipationSettings(per_coefficient=per_coefficient)
        return all_rounds(log, chosen, Formulas(history=history))[1].source

    assert source(14.0) is Source.PAST_RATE
    assert source(13.0) is Source.MODEL
    assert source(10.0, history=True) is Source.PAST_RATE


def test_the_rate_of_the_past_counts_every_earlier_round() -> None:
    replied = np.array([exact_replies(120, 3), exact_replies(120, 8), exact_replies(120, 50)])
    found = all_rounds(random_log(rounds=3)._replace(replied=replied))[2]
    assert found.source is Source.PAST_RATE
    np.testing.assert_array_equal(found.prob, 11 / 240)


def test_the_first_round_uses_its_own_rate() -> None:
    log = random_log()
    found = all_rounds(log)[0]
    assert found.source is Source.ROUND_RATE
    np.testing.assert_array_equal(found.prob, log.replied[0].mean())


def test_empty_rounds_before_leave_no_past() -> None:
    log = random_log()
    model = learner_of(log)
    model.open(log.round(0))
    model.close(np.zeros(120, dtype=bool))
    found = played(model, log, [1])[0]
    assert found.source is Source.ROUND_RATE
    np.testing.assert_array_equal(found.prob, log.replied[1].mean())


@pytest.mark.parametrize("window", [PAST, SAME])
def test_an_empty_round_is_refused(window: Window) -> None:
    log = random_log()
    model = learner_of(log, ParticipationSettings(window=window))
    played(model, log, [0])
    model.open(log.round(1))
    with pytest.raises(InputError, match=r"Nobody replied in round 2: skip it and record it"):
        model.prob(np.zeros(120, dtype=bool))


@stores
@pytest.mark.parametrize("kind", ["newton", "classifier"])
def test_a_model_that_separates_falls_back_to_the_rate_and_says_so(
    kind: str, store: Stores
) -> None:
    log = random_log()
    log = log._replace(replied=np.tile(log.static[:, 0] > 0.2, (5, 1)))
    chosen = ParticipationSettings()
    if kind == "classifier":
        chosen = ParticipationSettings(estimator=Classifier(NewtonLogistic()))
    found = all_rounds(log, chosen, store=store)[3]
    assert found.source is Source.SEPARATED_RATE
    np.testing.assert_allclose(found.prob, log.replied[0].mean(), rtol=1e-15)


@stores
def test_or_to_a_model_with_a_penalty_where_that_is_asked_for(store: Stores) -> None:
    log = random_log()
    log = log._replace(replied=np.tile(log.static[:, 0] > 0.2, (5, 1)))
    found = all_rounds(log, ParticipationSettings(soft=True), store=store)[3]
    assert found.source is Source.PENALISED
    X, y = log.stacked(slice(0, 3))
    model = NewtonLogistic(l2=1.0).fit(X, y)
    expected = model.predict_proba(log.stacked(slice(3, 4))[0])[:, 1]
    np.testing.assert_allclose(found.prob, expected, rtol=1e-7)
    assert found.prob.min() < 0.1
    assert found.prob.max() > 0.9


def test_a_model_that_does_not_converge_falls_back_to_the_rate_and_says_so() -> None:
    log = random_log()
    hasty = ParticipationSettings(estimator=Classifier(NewtonLogistic(max_iter=1)))
    found = all_rounds(log, hasty)[3]
    assert found.source is Source.UNCONVERGED_RATE
    np.testing.assert_allclose(found.prob, log.replied[:3].mean(), rtol=1e-15)


def test_after_separation_more_rounds_give_a_model_again() -> None:
    """A fit that failed leaves no start behind for the next one."""
    log = random_log(rounds=8)
    replied = log.replied.copy()
    replied[:3] = log.static[:, 0] > 0.2
    log = log._replace(replied=replied)
    found = all_rounds(log)
    assert [f.source for f in found[1:4]] == [Source.SEPARATED_RATE] * 3
    assert found[4].source is Source.MODEL
    for at in range(4, 8):
        np.testing.assert_allclose(found[at].prob, fitted_prob(log, slice(0, at), at), rtol=1e-9)


@stores
@settings(max_examples=10)
@given(seed=seeds, client=st.integers(0, 119))
def test_cross_fitting_keeps_a_clients_own_past_out(store: Stores, seed: int, client: int) -> None:
    log = random_log(seed, rounds=4)
    other = log.replied.copy()
    other[:3, client] = ~other[:3, client]
    before = all_rounds(log, cross_fitted(4), store=store)[3]
    after = all_rounds(log._replace(replied=other), cross_fitted(4), store=store)[3]
    assert before.source is Source.MODEL
    assert before.prob[client] == after.prob[client]
    assert (before.prob != after.prob).any()  # it does shape the others'


@stores
def test_cross_fitted_probabilities_equal_a_plain_loop(store: Stores) -> None:
    log = random_log(rounds=3)
    found = all_rounds(log, cross_fitted(3), store=store)[2]
    fold_of = np.random.default_rng(SEED).permutation(120) % 3
    expected = np.empty(120)
    for fold in range(3):
        others, own = fold_of != fold, fold_of == fold
        part = Log(log.static[others], log.covariates[:, others], log.replied[:, others])
        fit = NewtonLogistic().fit(*part.stacked(slice(0, 2)))
        expected[own] = fit.predict_proba(log.stacked(slice(2, 3))[0][own])[:, 1]
    assert found.source is Source.MODEL
    np.testing.assert_allclose(found.prob, expected, rtol=1e-13)


@stores
@pytest.mark.parametrize("folds", [1, 121])
def test_cross_fitting_needs_folds_between_two_and_the_clients(folds: int, store: Stores) -> None:
    with pytest.raises(InputError, match=rf"{folds} folds over 120 clients: need 2 to 120"):
        all_rounds(random_log(), cross_fitted(folds), store=store)


@stores
def test_any_classifier_serves(store: Stores) -> None:
    log = random_log(rounds=3)
    boosting = HistGradientBoostingClassifier(max_iter=3, random_state=0)
    chosen = ParticipationSettings(estimator=Classifier(boosting), refit_every=1)
    found = all_rounds(log, chosen, store=store)[2]
    expected = boosting.fit(*log.stacked(slice(0, 2)))
    assert found.source is Source.MODEL
    prob = expected.predict_proba(log.stacked(slice(2, 3))[0])[:, 1]
    np.testing.assert_array_equal(found.prob, prob)


@stores
def test_history_columns_enter_the_fit(store: Stores) -> None:
    log, formulas = random_log(rounds=8), Formulas(history=True)
    chosen = ParticipationSettings(day_length=6.0, refit_every=1)
    found = all_rounds(log, chosen, formulas, store)[7]
    history, blocks = ReplyHistory.of(120), []
    for x, replied in zip(log.covariates, log.replied, strict=True):
        blocks.append(np.column_stack([log.static, x, history.matrix(day_length=6.0)]))
        history = history.after(replied)
    fit = NewtonLogistic().fit(np.concatenate(blocks[:7]), log.replied[:7].ravel())
    assert found.source is Source.MODEL
    np.testing.assert_allclose(found.prob, fit.predict_proba(blocks[7])[:, 1], rtol=1e-8)
    (step,) = learner_of(log, chosen, formulas).steps
    assert step.step.design.names[2:] == (
        "last_reply",
        "reply_rate",
        "rounds_since_reply",
        "hour_sin",
        "hour_cos",
    )


@stores
def test_all_rounds_pooled_are_logistic_regression_on_all_of_them(store: Stores) -> None:
    log = random_log(rounds=4)
    model = learner_of(log, ParticipationSettings(window=Window.POOLED), store=store)
    for r in range(4):
        model.open(log.round(r))
        model.close(log.replied[r])
    fit = model.pooled()["participation"].logistic()
    expected = NewtonLogistic().fit(*log.stacked(slice(None)))
    np.testing.assert_allclose(fit.coefficients, expected.coef_[0], rtol=1e-9)
    np.testing.assert_allclose(fit.intercept, expected.intercept_[0], rtol=1e-9)
    np.testing.assert_allclose(fit.standard_errors, expected.standard_errors_, rtol=1e-8)


def test_a_round_without_any_past_fit_can_be_looked_at() -> None:
    """Steps of a round nobody replied in: nothing is fitted, and later rounds do not notice."""
    log = random_log()
    model = learner_of(log)
    played(model, log, range(3))
    silent = np.zeros(120, dtype=bool)
    model.open(log.round(3))
    (rows,) = model.step_rows(silent)
    model.close(silent)
    assert rows.source is Source.MODEL
    np.testing.assert_allclose(rows.prob, fitted_prob(log, slice(0, 2), 3), rtol=1e-9)
    replied = log.replied.copy()
    replied[3] = False
    other = log._replace(replied=replied)
    unasked = learner_of(other)
    played(unasked, other, range(3))
    unasked.open(log.round(3))
    unasked.close(silent)
    last = [played(m, other, [4])[0].replies.tobytes() for m in (model, unasked)]
    assert last[0] == last[1]


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="refit_every must be 1 or more, not 0"):
        ParticipationSettings(refit_every=0)
    for bad in ({"last": 0}, {"last": 3, "window": SAME}, {"last": 3, "window": Window.POOLED}):
        with pytest.raises(InputError, match="rolling window is 1 or more of the past rounds"):
            ParticipationSettings(**bad)
