"""The participation learner as a machine: refusals, other clients, saving and restoring."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from fedipw.errors import InputError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.classifiers import Classifier, Isotonic, Platt, cross_fit
from fedipw.selection.participation import (
    Participation,
    ParticipationSettings,
    Source,
    Window,
    panel,
)
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.steps import Formulas, participation_steps
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.tables import partitions
from fedipw.tables.ledger import Round
from worlds import Log

from .learner import STORES, Stores, fitted_prob, in_blocks, learner_of, played, random_log

CLIENTS, ROUNDS, SEED = 150, 8, 4
LOG = random_log(0, ROUNDS, CLIENTS, static=2, rate=-0.6)
BOOSTING = HistGradientBoostingClassifier(max_iter=5, min_samples_leaf=20, random_state=0)

EACH = ParticipationSettings(refit_every=1)
SETTINGS = {
    "default": ParticipationSettings(),
    "every round": EACH,
    "rolling": replace(EACH, last=2),
    "decay": replace(EACH, decay=0.8),
    "same round": ParticipationSettings(window=Window.SAME_ROUND),
    "history": EACH,
    "folds": replace(EACH, estimator=Classifier(folds=3, seed=SEED)),
    "classifier": replace(EACH, estimator=Classifier(NewtonLogistic(l2=1.0))),
    "boosting": replace(
        EACH, estimator=Classifier(BOOSTING, folds=3, calibration=Platt(), seed=SEED)
    ),
}
stores = pytest.mark.parametrize("store", STORES.values(), ids=STORES)
named = pytest.mark.parametrize("name", SETTINGS)


def new_model(name: str = "every round", store: Stores = STORES["panel"]) -> Participation:
    return learner_of(LOG, SETTINGS[name], Formulas(history=name == "history"), store)


def as_bytes(model: Participation, rounds: range) -> list[bytes]:
    return [
        told.prob.tobytes() + told.replies.tobytes() + told.source.value.encode()
        for told in played(model, LOG, rounds)
    ]


@stores
@named
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_restored_model_continues_to_the_same_bytes(name: str, stop: int, store: Stores) -> None:
    whole = as_bytes(new_model(name, store), range(ROUNDS))
    first = new_model(name, store)
    as_bytes(first, range(stop))
    saved = pickle.dumps(first.state())
    second = new_model(name, store)
    as_bytes(second, range(2))  # what it had seen before does not matter
    second.restore(pickle.loads(saved))
    assert second.rounds == stop
    assert as_bytes(second, range(stop, ROUNDS)) == whole[stop:]


@stores
@named
def test_a_state_goes_through_a_checkpoint_file(name: str, store: Stores, tmp_path: Path) -> None:
    model = new_model(name, store)
    as_bytes(model, range(4))
    save_checkpoint(tmp_path, model.state(), name)
    expected = as_bytes(model, range(4, ROUNDS))
    again = new_model(name, store)
    state = load_checkpoint(tmp_path, name)
    assert state is not None
    again.restore(state)
    assert as_bytes(again, range(4, ROUNDS)) == expected


@stores
def test_a_saved_state_does_not_move_with_its_model(store: Stores) -> None:
    model = new_model(store=store)
    as_bytes(model, range(3))
    state = model.state()
    expected = as_bytes(model, range(3, ROUNDS))
    model.restore(state)
    assert as_bytes(model, range(3, ROUNDS)) == expected


def test_rounds_of_several_blocks_are_restored_block_by_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums are over blocks in order, so their bytes depend on where a round is cut."""
    monkeypatch.setattr(partitions, "_BLOCK_BYTES", 1)
    log = random_log(1, rounds=4, clients=20_000)  # blocks of 8192 rows
    model = learner_of(log, store=in_blocks)
    played(model, log, range(2))
    again = learner_of(log, store=in_blocks)
    again.restore(pickle.loads(pickle.dumps(model.state())))
    for r in range(2, 4):
        one, two = (played(m, log, [r])[0] for m in (model, again))
        assert one.prob.tobytes() == two.prob.tobytes()


def test_rounds_must_be_opened_first() -> None:
    model = new_model()
    with pytest.raises(InputError, match=r"No round is open: call open\(round\) first"):
        model.prob(LOG.replied[0])
    with pytest.raises(InputError, match="No round is open"):
        model.close(LOG.replied[0])
    played(model, LOG, range(1))
    with pytest.raises(InputError, match="No round is open"):
        model.prob(LOG.replied[0])


def test_covariates_of_other_rows_are_refused_with_the_round() -> None:
    with pytest.raises(InputError, match=r"Round 2: 149 rows of covariates for 150 clients"):
        Round(index=2, rows=np.arange(150), table=pl.DataFrame({"x1": np.zeros(149)}))


@stores
@pytest.mark.parametrize("columns", [{}, {"y": np.zeros(CLIENTS)}], ids=["none", "another"])
def test_a_covariate_that_a_round_does_not_have_is_named(
    columns: dict[str, FloatArray], store: Stores
) -> None:
    model = new_model(store=store)
    played(model, LOG, range(1))
    table = pl.DataFrame(columns)
    model.open(Round(index=2, rows=np.arange(CLIENTS), table=table))
    with pytest.raises(InputError, match=r"round 2 has no column 'x1'"):
        model.prob(LOG.replied[1])


@pytest.mark.parametrize("replied", [np.ones(1, bool), np.ones(CLIENTS - 1, bool)])
def test_replies_of_wrong_length_are_refused_and_change_nothing(replied: BoolArray) -> None:
    model = new_model()
    played(model, LOG, range(2))
    model.open(LOG.round(2))
    for told in (model.prob, model.close):
        with pytest.raises(InputError, match=rf"replied has {len(replied)} rows, expected 150"):
            told(replied)
    assert model.rounds == 2
    assert as_bytes(model, range(2, 4)) == as_bytes(new_model(), range(4))[2:]


@stores
@pytest.mark.parametrize("name", ["every round", "history"])
def test_a_missing_covariate_is_named_with_round_and_row(name: str, store: Stores) -> None:
    model = new_model(name, store)
    played(model, LOG, range(1))
    bad = LOG.covariates.copy()
    bad[1, 17, 0] = np.nan
    model.open(LOG._replace(covariates=bad).round(1))
    with pytest.raises(InputError, match=r"round 2: 'x1' is missing in 1 of 150 rows \(row 17\)"):
        model.prob(LOG.replied[1])


def with_hole(value: float) -> Log:
    bad = LOG.static.copy()
    bad[3, 1] = value
    return LOG._replace(static=bad)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_missing_constant_covariate_is_refused_by_a_panel(value: float) -> None:
    with pytest.raises(InputError, match="A panel needs all values of every client"):
        learner_of(with_hole(value))


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "is missing in 1 of 150 rows"), (np.inf, "is infinite in 1")]
)
@pytest.mark.parametrize("columns", ["round", "none"])
def test_a_missing_constant_covariate_is_named_when_a_round_lists_the_client(
    value: float, message: str, columns: str
) -> None:
    log = with_hole(value)
    if columns == "none":
        log = log._replace(covariates=log.covariates[:, :, :0])
    model = learner_of(log, store=in_blocks)
    model.open(log.round(0))
    with pytest.raises(InputError, match=f"round 1: 'z2' {message}"):
        model.prob(log.replied[0])


def test_a_client_with_missing_values_that_no_round_lists_is_no_matter() -> None:
    log, others = with_hole(np.nan), np.delete(np.arange(CLIENTS), 3)
    model = learner_of(log, store=in_blocks)
    part = Log(LOG.static[others], LOG.covariates[:, others], LOG.replied[:, others])
    for r in range(4):
        table = log.round(r).table
        model.open(Round(index=r + 1, rows=others, table=table[others]))
        found = model.prob(log.replied[r, others])
        model.close(log.replied[r, others])
    expected = fitted_prob(part, slice(0, 3), 3)[part.replied[3]]
    np.testing.assert_allclose(found.prob, expected, rtol=1e-9)


def test_a_panel_holds_rounds_of_the_same_clients() -> None:
    model = new_model()
    played(model, LOG, range(1))
    few = np.arange(CLIENTS - 1)
    model.open(Round(index=2, rows=few, table=LOG.round(1).table[:-1]))
    with pytest.raises(InputError, match="A panel holds rounds of the same clients: use blocks"):
        model.close(LOG.replied[1, :-1])


# Clients that are in no round


def with_others(log: Log, static: FloatArray, name: str, store: Stores) -> Participation:
    """Return a learner of a log that knows other clients, too, which no round lists."""
    both = log._replace(static=np.concatenate([log.static, static]))
    members, chosen = both.members(), SETTINGS[name]
    steps = participation_steps(log.round(0), members, Formulas(history=name == "history"))
    return Participation(members, steps, chosen, store=store(chosen))


def asked(log: Log, x: FloatArray, at: int) -> Round:
    """Return the clients beyond those of a log as a round, with covariates (m, q_x)."""
    rows, columns = len(log.static) + np.arange(len(x)), {f"x{j + 1}": c for j, c in enumerate(x.T)}
    return Round(index=at + 1, rows=rows, table=pl.DataFrame(columns))


@stores
@pytest.mark.parametrize("name", ["every round", "same round", "classifier"])
def test_the_last_fit_speaks_of_other_clients(name: str, store: Stores) -> None:
    """A twin of a client gets its probability, someone else another."""
    others = np.concatenate([LOG.static, LOG.static[:7] + 1.0])
    x = np.concatenate([LOG.covariates[4], LOG.covariates[4][:7]])
    model = with_others(LOG, others, name, store)
    played(model, LOG, range(4))
    model.open(LOG.round(4))
    model.prob(LOG.replied[4])
    found = model.predicted(asked(LOG, x, 4))
    own = model.step_rows(LOG.replied[4])[0].prob
    np.testing.assert_allclose(found[:CLIENTS], own, rtol=1e-13)
    np.testing.assert_array_equal(model.predicted(LOG.round(4)), own)
    assert (found[CLIENTS:] != own[:7]).all()


def test_clients_in_no_fold_get_the_mean_of_the_folds_models() -> None:
    new_static, new_x = LOG.static[:5] - 0.5, LOG.covariates[3][:5]
    model = with_others(LOG, new_static, "folds", STORES["panel"])
    played(model, LOG, range(3))
    model.open(LOG.round(3))
    model.prob(LOG.replied[3])
    fold_of = np.random.default_rng(SEED).permutation(CLIENTS) % 3

    def trained_without(fold: int) -> FloatArray:
        rest = fold_of != fold
        part = Log(LOG.static[rest], LOG.covariates[:, rest], LOG.replied[:, rest])
        fit = NewtonLogistic().fit(*part.stacked(slice(0, 3)))
        return fit.predict_proba(np.column_stack([new_static, new_x]))[:, 1]

    expected = np.mean([trained_without(fold) for fold in range(3)], axis=0)
    np.testing.assert_allclose(model.predicted(asked(LOG, new_x, 3)), expected, rtol=1e-13)


def test_in_blocks_everybody_has_a_fold_and_a_model_that_never_saw_it() -> None:
    """Folds are drawn over all members, of whom any may join later."""
    new_static, new_x = LOG.static[:5] - 0.5, LOG.covariates[3][:5]
    model = with_others(LOG, new_static, "folds", in_blocks)
    played(model, LOG, range(3))
    model.open(LOG.round(3))
    model.prob(LOG.replied[3])
    fold_of = np.random.default_rng(SEED).permutation(CLIENTS + 5) % 3
    X, y = LOG.stacked(slice(0, 3))
    expected = []
    for fold, row in zip(fold_of[-5:], np.column_stack([new_static, new_x]), strict=True):
        rest = np.tile(fold_of[:-5] != fold, 3)
        fit = NewtonLogistic().fit(X[rest], y[rest])
        expected.append(fit.predict_proba(row[None])[0, 1])
    np.testing.assert_allclose(model.predicted(asked(LOG, new_x, 3)), expected, rtol=1e-13)


def test_clients_without_a_history_cannot_be_predicted_from_one() -> None:
    model = new_model("history")
    played(model, LOG, range(3))
    with pytest.raises(InputError, match="no reply history to predict from"):
        model.predicted(LOG.round(3))


def test_nothing_is_predicted_before_a_fit() -> None:
    model = new_model()
    played(model, LOG, range(2))
    model.open(LOG.round(2))
    with pytest.raises(InputError, match=r"No fit was used .*: call prob\(replied\) first"):
        model.predicted(LOG.round(2))


def test_no_covariates_at_all_are_refused_with_the_way_out() -> None:
    bare = Log(np.empty((CLIENTS, 0)), np.empty((ROUNDS, CLIENTS, 0)), LOG.replied)
    with pytest.raises(InputError, match=r"no covariate to explain participation .*Use history"):
        learner_of(bare)


def test_history_alone_is_enough() -> None:
    bare = Log(np.empty((CLIENTS, 0)), np.empty((ROUNDS, CLIENTS, 0)), LOG.replied)
    for store in STORES.values():
        model = learner_of(bare, EACH, Formulas(reply="last_reply + reply_rate"), store)
        found = played(model, bare, range(ROUNDS))
        assert found[-1].source is Source.MODEL


# Calibrated scores


@pytest.mark.parametrize("calibration", [Platt(), Isotonic(rows_per_class=20)], ids=repr)
@stores
def test_calibrated_scores_come_from_the_folds_left_out(
    calibration: Platt | Isotonic, store: Stores
) -> None:
    clients, rounds, folds = 240, 6, 3
    log = random_log(5, rounds, clients)
    boosting = HistGradientBoostingClassifier(max_iter=20, random_state=0)
    chosen = ParticipationSettings(
        estimator=Classifier(boosting, folds=folds, calibration=calibration, seed=9), refit_every=1
    )
    found = played(learner_of(log, chosen, store=store), log, range(rounds))[-1]
    assert found.source is Source.MODEL
    fold_of = np.random.default_rng(9).permutation(clients) % folds
    X, y = log.stacked(slice(0, rounds - 1))
    past = cross_fit(boosting, X, y, np.tile(fold_of, rounds - 1), calibration=calibration)
    now, expected = log.stacked(slice(rounds - 1, rounds))[0], np.empty(clients)
    for k in range(folds):
        score = past.models[k].predict_proba(now[fold_of == k])[:, 1]
        expected[fold_of == k] = past.maps[k].prob(score)
    np.testing.assert_allclose(found.prob, expected, rtol=1e-12)


def test_calibration_without_folds_is_refused() -> None:
    with pytest.raises(InputError, match="number of folds"):
        Classifier(calibration=Platt())


def test_a_panel_is_made_for_the_estimator_that_reads_it() -> None:
    """Trees get columns as they are, Newton's method standardised ones."""
    log = random_log(clients=120)
    scaled = log._replace(covariates=100.0 * log.covariates + 7.0)
    for estimator, plain in ((Classifier(BOOSTING), True), (EACH.estimator, False)):
        model = learner_of(
            scaled, replace(EACH, estimator=estimator), store=lambda s: panel(s.estimator)
        )
        played(model, scaled, range(1))
        X, _, clients = model.steps[0].store.rounds(0, 1).matrix()
        np.testing.assert_allclose(X, scaled.stacked(slice(0, 1))[0], rtol=1e-12)
        np.testing.assert_array_equal(clients, np.arange(120))
        frame = model.steps[0].store.frame
        assert frame is not None
        assert bool((frame.scale == 1.0).all()) == plain
