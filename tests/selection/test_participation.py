"""Participation probabilities round by round: predictable, honest about their source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier

from fedipw.errors import InputError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.classifiers import Classifier
from fedipw.selection.participation import ParticipationSettings, Source, Window
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.steps import Clock, Formulas, ReplyHistory
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


def discounted_prob(log: Log, decay: float, at: int, reach: int | None = None) -> FloatArray:
    """Return what logistic regression with row weights says of round ``at``, by plain Newton."""
    first = 0 if reach is None else max(0, at - reach)
    parts = [log.stacked(slice(r, r + 1)) for r in range(first, at)]
    X, y = np.vstack([x for x, _ in parts]), np.concatenate([y for _, y in parts]).astype(float)
    weights = np.concatenate(
        [np.full(len(y), decay ** (at - 1 - r)) for r, (_, y) in enumerate(parts, first)]
    )
    rows, beta = np.column_stack([X, np.ones(len(X))]), np.zeros(X.shape[1] + 1)
    for _ in range(40):
        p = 1.0 / (1.0 + np.exp(-rows @ beta))
        curvature = (rows * (weights * p * (1.0 - p))[:, None]).T @ rows
        beta -= np.linalg.solve(curvature, rows.T @ (weights * (p - y)))
    odds = log.stacked(slice(at, at + 1))[0] @ beta[:-1] + beta[-1]
    return np.asarray(1.0 / (1.0 + np.exp(-odds)))


@stores
@pytest.mark.parametrize(("decay", "every"), [(0.9, 1), (0.5, 1), (0.9, 3), (0.02, 1)])
def test_a_decayed_fit_is_logistic_regression_with_weights(
    decay: float, every: int, store: Stores
) -> None:
    """With 0.02 only six rounds are read: the seventh would weigh 6.4e-11."""
    log = random_log(rounds=9)
    how = ParticipationSettings(decay=decay, refit_every=every, per_coefficient=5.0)
    assert how.reach is not None
    assert decay**how.reach < 1e-10 <= decay ** (how.reach - 1)
    for at, found in enumerate(all_rounds(log, how, store=store)[1:], start=1):
        until = at if at <= every else at - at % every
        expected = discounted_prob(log, decay, until)
        if until == at:
            assert found.source is Source.MODEL
            np.testing.assert_allclose(found.prob, expected, rtol=1e-8)


@stores
def test_a_decay_and_a_rolling_window_go_together(store: Stores) -> None:
    log, how = random_log(rounds=7), ParticipationSettings(decay=0.8, last=3, refit_every=1)
    for at, found in enumerate(all_rounds(log, how, store=store)[1:], start=1):
        np.testing.assert_allclose(found.prob, discounted_prob(log, 0.8, at, 3), rtol=1e-8)


@stores
@pytest.mark.parametrize("last", [None, 2])
def test_a_decay_of_one_is_none(last: int | None, store: Stores) -> None:
    log, plain = random_log(rounds=5), ParticipationSettings(last=last, refit_every=1)
    both = [all_rounds(log, how, store=store) for how in (plain, replace(plain, decay=1.0))]
    for one, other in zip(*both, strict=True):
        assert one.prob.tobytes() == other.prob.tobytes()


def test_counts_and_rates_are_discounted_too() -> None:
    """Four rounds of 120: the newest of weight 1, and the rate of a round without a model."""
    log = random_log(rounds=5)
    how = ParticipationSettings(decay=0.5, refit_every=1, per_coefficient=1000.0)
    found = all_rounds(log, how)[4]
    weights = np.array([0.125, 0.25, 0.5, 1.0])
    rate = float(weights @ log.replied[:4].sum(axis=1)) / (120 * weights.sum())
    assert found.source is Source.PAST_RATE
    np.testing.assert_allclose(found.prob, rate, rtol=1e-14)
    fewest = min(rate, 1 - rate) * 120 * weights.sum() / 3  # of three coefficients
    for per, source in ((fewest * 0.999, Source.MODEL), (fewest * 1.001, Source.PAST_RATE)):
        asked = learner_of(log, replace(how, per_coefficient=per))
        for r in range(4):
            asked.open(log.round(r))
            asked.close(log.replied[r])
        assert played(asked, log, [4])[0].source is source


@stores
def test_a_saved_model_of_a_decayed_fit_has_its_weighted_information(store: Stores) -> None:
    log = random_log(rounds=6)
    model = learner_of(log, ParticipationSettings(decay=0.7, refit_every=1), store=store)
    played(model, log, range(6))
    fit = model.fitted()["participation"].logistic()
    X, y = log.stacked(slice(0, 5))
    weights = np.repeat(0.7 ** np.arange(4.0, -1.0, -1.0), 120)
    by_hand = NewtonLogistic().fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(fit.standard_errors, by_hand.standard_errors_, rtol=1e-8)
    np.testing.assert_allclose(fit.total_weight, weights.sum(), rtol=1e-12)


@stores
@pytest.mark.parametrize("formula", [". + hour_sin:x1 + hour_cos", ". + elapsed + elapsed:z1"])
def test_the_clock_enters_a_formula(formula: str, store: Stores) -> None:
    log = random_log(rounds=9)
    how = ParticipationSettings(clock=Clock(day_length=5.0), refit_every=1)
    found = all_rounds(log, how, Formulas(reply=formula), store)[8]
    blocks = []
    for r, x in enumerate(log.covariates, 1):
        own, turn = np.column_stack([log.static, x]), 2 * np.pi * r / 5
        time = [np.sin(turn) * x[:, 0], np.full(120, np.cos(turn))]
        if "elapsed" in formula:
            time = [np.full(120, r / 5), r / 5 * log.static[:, 0]]
        blocks.append(np.column_stack([own, *time]))
    fit = NewtonLogistic().fit(np.concatenate(blocks[:8]), log.replied[:8].ravel())
    assert found.source is Source.MODEL
    np.testing.assert_allclose(found.prob, fit.predict_proba(blocks[8])[:, 1], rtol=1e-8)


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
    chosen = ParticipationSettings(clock=Clock(day_length=6.0), refit_every=1)
    found = all_rounds(log, chosen, formulas, store)[7]
    history, blocks = ReplyHistory.of(120), []
    for r, (x, replied) in enumerate(zip(log.covariates, log.replied, strict=True), 1):
        turn = np.tile([np.sin(np.pi * r / 3), np.cos(np.pi * r / 3)], (120, 1))
        blocks.append(np.column_stack([log.static, x, history.matrix(), turn]))
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
    for decay in (0.0, -0.5, 1.01, float("nan")):
        with pytest.raises(InputError, match=rf"decay must lie in \(0, 1\], not {decay}"):
            ParticipationSettings(decay=decay)
    for window in (SAME, Window.POOLED):
        with pytest.raises(InputError, match=f"the {window.value} fit counts all of its rounds"):
            ParticipationSettings(decay=0.9, window=window)
    with pytest.raises(InputError, match="a classifier or folds take rows as they are"):
        ParticipationSettings(decay=0.9, estimator=Classifier(folds=3))
