"""The participation model as a machine: refusals, other clients, saving and restoring."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from fedipw.errors import InputError
from fedipw.numerics.types import BoolArray, FloatArray
from fedipw.selection import (
    FitWindow,
    NewtonLogistic,
    ParticipationModel,
    ParticipationSettings,
    Platt,
    Source,
    cross_fit,
)

CLIENTS, ROUNDS = 150, 8
RNG = np.random.default_rng(0)
STATIC = RNG.normal(size=(CLIENTS, 2))
COVARIATES = RNG.normal(size=(ROUNDS, CLIENTS, 1))
REPLIED = RNG.random((ROUNDS, CLIENTS)) < 1.0 / (1.0 + np.exp(0.6 - COVARIATES[:, :, 0]))


def new_model(settings: ParticipationSettings | None = None) -> ParticipationModel:
    return ParticipationModel(STATIC, ("z1", "z2"), ("x",), settings, np.random.default_rng(4))


def played(model: ParticipationModel, rounds: range) -> list[bytes]:
    told = []
    for r in rounds:
        model.open(COVARIATES[r])
        prob, source = model.prob(REPLIED[r])
        model.close(REPLIED[r])
        told.append(prob.tobytes() + source.value.encode())
    return told


SETTINGS = {
    "default": ParticipationSettings(),
    "same round": ParticipationSettings(window=FitWindow.SAME_ROUND),
    "history": ParticipationSettings(history=True),
    "folds": ParticipationSettings(folds=3),
    "classifier": ParticipationSettings(classifier=NewtonLogistic(l2=1.0)),
}


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_restored_model_continues_to_the_same_bytes(
    chosen: ParticipationSettings, stop: int
) -> None:
    whole = played(new_model(chosen), range(ROUNDS))
    first = new_model(chosen)
    played(first, range(stop))
    saved = pickle.dumps(first.state())
    second = new_model(chosen)
    played(second, range(2))  # what it had seen before does not matter
    second.restore(pickle.loads(saved))
    assert second.rounds == stop
    assert played(second, range(stop, ROUNDS)) == whole[stop:]


def test_a_saved_state_does_not_move_with_its_model() -> None:
    model = new_model()
    played(model, range(3))
    state = model.state()
    expected = played(model, range(3, ROUNDS))
    model.restore(state)
    assert played(model, range(3, ROUNDS)) == expected


def test_rounds_must_be_opened_first() -> None:
    model = new_model()
    with pytest.raises(InputError, match=r"No round is open: call open\(covariates\) first"):
        model.prob(REPLIED[0])
    with pytest.raises(InputError, match="No round is open"):
        model.close(REPLIED[0])
    played(model, range(1))
    with pytest.raises(InputError, match="No round is open"):
        model.prob(REPLIED[0])


@pytest.mark.parametrize("shape", [(CLIENTS - 1, 1), (CLIENTS, 2), (CLIENTS,), (CLIENTS, 0)])
def test_covariates_of_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = new_model()
    played(model, range(1))
    with pytest.raises(InputError, match=rf"Round 2: .*expected \({CLIENTS}, 1\)") as caught:
        model.open(np.zeros(shape))
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("replied", [np.ones(1, bool), np.ones(CLIENTS - 1, bool)])
def test_replies_of_wrong_length_are_refused_and_change_nothing(replied: BoolArray) -> None:
    model = new_model()
    played(model, range(2))
    model.open(COVARIATES[2])
    for told in (model.prob, model.close):
        with pytest.raises(InputError, match=rf"replied has {len(replied)} rows, expected 150"):
            told(replied)
    assert model.rounds == 2
    assert played(model, range(2, 4)) == played(new_model(), range(4))[2:]


@pytest.mark.parametrize("history", [False, True])
def test_a_missing_covariate_is_named_with_round_and_row(history: bool) -> None:
    model = new_model(ParticipationSettings(history=history))
    played(model, range(1))
    bad = COVARIATES[1].copy()
    bad[17, 0] = np.nan
    with pytest.raises(InputError, match=r"round 2: .*'x' \(1 of 150 rows, first at row 17\)"):
        model.open(bad)


def test_a_missing_constant_covariate_is_named() -> None:
    bad = STATIC.copy()
    bad[3, 1] = np.inf
    with pytest.raises(
        InputError, match=r"enrolled clients: .*'z2' \(1 of 150 rows, first at row 3"
    ):
        ParticipationModel(bad, ("z1", "z2"), ("x",))


@pytest.mark.parametrize("name", ["default", "same round", "classifier"])
def test_the_last_fit_speaks_of_other_clients(name: str) -> None:
    model = new_model(SETTINGS[name])
    played(model, range(4))
    model.open(COVARIATES[4])
    prob, _ = model.prob(REPLIED[4])
    np.testing.assert_array_equal(model.elsewhere(STATIC, COVARIATES[4]), prob)
    some = model.elsewhere(STATIC[:7] + 1.0, COVARIATES[4][:7])
    assert some.shape == (7,)
    assert (some != prob[:7]).all()


def test_clients_in_no_fold_get_the_mean_of_the_folds_models() -> None:
    model = new_model(SETTINGS["folds"])
    played(model, range(3))
    model.open(COVARIATES[3])
    model.prob(REPLIED[3])
    fold_of = np.random.default_rng(4).permutation(CLIENTS) % 3
    new_static, new_x = STATIC[:5] - 0.5, COVARIATES[3][:5]

    def trained_without(fold: int) -> FloatArray:
        others = fold_of != fold
        X = np.column_stack(
            [np.tile(STATIC[others], (3, 1)), COVARIATES[:3, others].reshape(-1, 1)]
        )
        fit = NewtonLogistic().fit(X, REPLIED[:3, others].ravel())
        return fit.predict_proba(np.column_stack([new_static, new_x]))[:, 1]

    expected = np.mean([trained_without(fold) for fold in range(3)], axis=0)
    np.testing.assert_allclose(model.elsewhere(new_static, new_x), expected, rtol=1e-13)


def test_clients_without_a_history_cannot_be_predicted_from_one() -> None:
    model = new_model(SETTINGS["history"])
    played(model, range(3))
    with pytest.raises(InputError, match="no reply history to predict from"):
        model.elsewhere(STATIC, COVARIATES[3])


def test_no_covariates_at_all_is_the_rate() -> None:
    model = ParticipationModel(np.empty((CLIENTS, 0)), (), ())
    for r in range(3):
        model.open(np.empty((CLIENTS, 0)))
        prob, _ = model.prob(REPLIED[r])
        model.close(REPLIED[r])
    np.testing.assert_allclose(prob, REPLIED[:2].mean(), rtol=1e-12)


def test_calibrated_scores_come_from_the_folds_left_out() -> None:
    rng = np.random.default_rng(5)
    clients, rounds = 240, 6
    z, folds = rng.normal(size=(clients, 1)), 3
    settings = ParticipationSettings(
        classifier=HistGradientBoostingClassifier(max_iter=20), folds=folds, calibration=Platt()
    )
    model = ParticipationModel(z, ("z",), ("x",), settings, np.random.default_rng(9))
    X, y = [], []
    for _ in range(rounds):
        x = rng.normal(size=(clients, 1))
        replied = rng.random(clients) < 1 / (1 + np.exp(-x[:, 0] - z[:, 0]))
        model.open(x)
        got, source = model.prob(replied)
        model.close(replied)
        X.append(np.column_stack([z, x]))
        y.append(replied)
    assert source is Source.MODEL
    fold_of = np.random.default_rng(9).permutation(clients) % folds
    past = cross_fit(
        settings.classifier,
        np.vstack(X[:-1]),
        np.concatenate(y[:-1]),
        np.tile(fold_of, rounds - 1),
        calibration=Platt(),
    )
    expected = np.empty(clients)
    for k in range(folds):
        score = past.models[k].predict_proba(X[-1][fold_of == k])[:, 1]
        expected[fold_of == k] = past.maps[k].prob(score)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_calibration_without_folds_is_refused() -> None:
    with pytest.raises(InputError, match="number of folds"):
        ParticipationSettings(calibration=Platt())
