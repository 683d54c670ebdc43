"""The weigher's protocol and its sources."""

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.selection import NewtonLogistic, ParticipationModel, Source
from fedipw.weighting import (
    Collapsed,
    HorvitzThompson,
    Known,
    ParticipationOnly,
    RoundOpening,
    Scheme,
    TwoStage,
    Weigher,
)
from fedipw.weighting.sources import Units

N = 60


@pytest.fixture
def units() -> Units:
    rng = np.random.default_rng(0)
    return Units(
        unit_ids=np.array([f"u{i}" for i in range(N)]),
        sample_counts=rng.integers(1, 20, N),
        enrolled=rng.random(N) < 0.6,
        enrollment_prob=rng.uniform(0.2, 0.9, N),
        static=rng.normal(size=(N, 1)),
    )


def model_of(units: Units, rows: np.ndarray) -> ParticipationModel:
    return ParticipationModel(units.static[rows], ("z",), ("x",))


def rounds(units: Units, count: int) -> list[tuple[RoundOpening, np.ndarray]]:
    rng, n = np.random.default_rng(1), int(units.enrolled.sum())
    return [
        (RoundOpening(index=r, covariates=rng.normal(size=(n, 1))), rng.random(n) < 0.5)
        for r in range(1, count + 1)
    ]


def test_two_stage_weights_by_hand(units: Units) -> None:
    rows = np.flatnonzero(units.enrolled)
    schemes: dict[str, Scheme] = {
        "fedipw": HorvitzThompson(N),
        "part": ParticipationOnly(len(rows)),
    }
    weigher = Weigher(TwoStage(units, model_of(units, rows)), schemes)
    X: list[np.ndarray] = []
    y: list[np.ndarray] = []
    for opening, replied in rounds(units, 4):
        weigher.open(opening)
        given = weigher.weights(replied)
        if opening.index == 4:
            fit = NewtonLogistic().fit(np.vstack(X), np.concatenate(y))
            now = np.column_stack([units.static[rows], opening.matrix()])
            part = fit.predict_proba(now)[replied, 1]
            enroll = units.enrollment_prob[rows[replied]]
            np.testing.assert_allclose(given["part"].weights, 1 / (len(rows) * part), rtol=1e-9)
            np.testing.assert_allclose(given["fedipw"].weights, 1 / (N * enroll * part), rtol=1e-9)
            assert given["fedipw"].replies.source is Source.MODEL
            assert list(given["part"].replies.unit_ids) == list(units.unit_ids[rows[replied]])
        X.append(np.column_stack([units.static[rows], opening.matrix()]))
        y.append(replied)
        weigher.close(replied)


def test_rounds_open_and_close_in_turn(units: Units) -> None:
    weigher = Weigher(
        TwoStage(units, model_of(units, np.flatnonzero(units.enrolled))), {"w": HorvitzThompson(N)}
    )
    opening, replied = rounds(units, 1)[0]
    with pytest.raises(InputError, match="No round is open"):
        weigher.weights(replied)
    with pytest.raises(InputError, match="No round is open"):
        weigher.close(replied)
    weigher.open(opening)
    with pytest.raises(InputError, match="close it first"):
        weigher.open(opening)
    with pytest.raises(InputError, match="between rounds"):
        weigher.state()
    weigher.close(np.zeros_like(replied))  # an empty round closes too
    assert weigher.state()["replied"].shape == (1, len(replied))


def test_covariates_of_the_wrong_length_are_refused(units: Units) -> None:
    weigher = Weigher(Known(units), {"oracle": HorvitzThompson(N)})
    with pytest.raises(InputError, match=r"covariates has 3 rows, expected"):
        weigher.open(RoundOpening(index=1, covariates=np.zeros((3, 1))))


def test_the_oracle_refuses_rounds_without_known_probabilities(units: Units) -> None:
    weigher = Weigher(Known(units), {"oracle": HorvitzThompson(N)})
    opening, _ = rounds(units, 1)[0]
    with pytest.raises(InputError, match="oracle needs true participation"):
        weigher.open(opening)


def test_trimming_is_reported_with_the_weights(units: Units) -> None:
    rows = np.flatnonzero(units.enrolled)
    opening, replied = rounds(units, 1)[0]
    plain = Weigher(TwoStage(units, model_of(units, rows)), {"w": HorvitzThompson(N)})
    cut = Weigher(TwoStage(units, model_of(units, rows)), {"w": HorvitzThompson(N)}, trim=1.2)
    for weigher in (plain, cut):
        weigher.open(opening)
    before, after = plain.weights(replied)["w"], cut.weights(replied)["w"]
    assert before.trimming is None
    assert after.trimming is not None
    assert after.trimming.changed == (before.weights > 1.2 * before.weights.mean()).sum() > 0
    np.testing.assert_allclose(
        after.weights, np.minimum(before.weights, 1.2 * before.weights.mean())
    )


def test_collapsed_fills_the_covariates_nobody_can_observe(units: Units) -> None:
    """One model over all clients, non-enrolled ones with the enrolled mean of the round."""
    weigher = Weigher(
        Collapsed(units, model_of(units, np.arange(N))), {"collapsed": HorvitzThompson(N)}
    )
    rows = np.flatnonzero(units.enrolled)
    X: list[np.ndarray] = []
    y: list[np.ndarray] = []
    for opening, replied in rounds(units, 5):
        filled = np.full((N, 1), opening.matrix().mean())
        filled[rows] = opening.matrix()
        everyone = np.zeros(N, dtype=bool)
        everyone[rows] = replied
        weigher.open(opening)
        given = weigher.weights(replied)["collapsed"]
        if opening.index == 5:
            fit = NewtonLogistic().fit(np.vstack(X), np.concatenate(y))
            prob = fit.predict_proba(np.column_stack([units.static, filled]))[everyone, 1]
            np.testing.assert_allclose(given.weights, 1 / (N * prob), rtol=1e-9)
        X.append(np.column_stack([units.static, filled]))
        y.append(everyone)
        weigher.close(replied)


def test_a_restored_weigher_goes_on_to_the_same_bytes(units: Units) -> None:
    rows = np.flatnonzero(units.enrolled)
    whole = Weigher(TwoStage(units, model_of(units, rows)), {"w": HorvitzThompson(N)})
    played, last = rounds(units, 6), []
    for opening, replied in played:
        if opening.index == 4:
            state = whole.state()
        whole.open(opening)
        last.append(whole.weights(replied)["w"].weights)
        whole.close(replied)
    again = Weigher(TwoStage(units, model_of(units, rows)), {"w": HorvitzThompson(N)})
    again.restore(state)
    for (opening, replied), expected in zip(played[3:], last[3:], strict=True):
        again.open(opening)
        assert again.weights(replied)["w"].weights.tobytes() == expected.tobytes()
        again.close(replied)
