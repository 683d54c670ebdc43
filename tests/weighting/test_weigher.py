"""The weigher's protocol and its sources."""

from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from fedipw.errors import EmptyRoundError, InputError
from fedipw.selection.classifiers import Newton
from fedipw.selection.participation import Participation, Source, panel
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.steps import Formulas, participation_steps
from fedipw.tables.ledger import Round
from fedipw.tables.population import Members
from fedipw.weighting.methods import method_named
from fedipw.weighting.sources import CollapsedParticipation, NoParticipation, TrueParticipation
from fedipw.weighting.weigher import EnrollmentState, FixedEnrollment, Weigher

N = 60
Played = tuple[Round, np.ndarray]  # a round and who of its rows replied


@dataclass
class Drawn:
    """Clients with one covariate, of whom some are enrolled."""

    state: EnrollmentState
    z: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        return np.flatnonzero(self.state.enrolled)

    @property
    def members(self) -> Members:
        return Members(pl.DataFrame({"unit_id": self.state.unit_ids, "z": self.z}))

    def rounds(self, count: int) -> list[Played]:
        rng, n = np.random.default_rng(1), len(self.rows)
        played = []
        for index in range(1, count + 1):
            table = pl.DataFrame({"x": rng.normal(size=n)})
            replied = rng.random(n) < 0.5
            played.append((Round(index=index, rows=self.rows, table=table), replied))
        return played

    def learner(self, *, everyone: bool = False, store: str = "blocks") -> Participation:
        rows = np.arange(N) if everyone else self.rows
        first = Round(index=1, rows=rows, table=pl.DataFrame({"x": np.zeros(len(rows))}))
        steps = participation_steps(first, self.members, Formulas())
        place = panel(Newton()) if store == "panel" else None
        return Participation(self.members, steps, store=place)

    def weigher(self, *names: str, store: str = "blocks", trim: float | None = None) -> Weigher:
        methods = {name: method_named(name).trimmed(trim) for name in names}
        return Weigher(FixedEnrollment(self.state), self.learner(store=store), methods)

    def known(self) -> Weigher:
        methods = {"oracle": method_named("oracle")}
        return Weigher(FixedEnrollment(self.state), TrueParticipation(), methods)


@pytest.fixture
def drawn() -> Drawn:
    rng = np.random.default_rng(0)
    state = EnrollmentState(
        unit_ids=np.array([f"u{i}" for i in range(N)]),
        sample_counts=rng.integers(1, 20, N),
        enrolled=rng.random(N) < 0.6,
        prob=rng.uniform(0.2, 0.9, N),
        population_size=float(N),
    )
    return Drawn(state, rng.normal(size=N))


@pytest.mark.parametrize("store", ["blocks", "panel"])
def test_two_stage_weights_by_hand(drawn: Drawn, store: str) -> None:
    rows, state = drawn.rows, drawn.state
    weigher = drawn.weigher("fedipw", "participation-only", store=store)
    X: list[np.ndarray] = []
    y: list[np.ndarray] = []
    for round_, replied in drawn.rounds(4):
        weigher.open(round_)
        given = weigher.weigh(replied)
        both, part_only = given["fedipw"], given["participation-only"]
        now = np.column_stack([drawn.z[rows], round_.table["x"].to_numpy()])
        if round_.index == 4:
            fit = NewtonLogistic().fit(np.vstack(X), np.concatenate(y))
            part = fit.predict_proba(now)[replied, 1]
            enroll = state.prob[rows[replied]]
            np.testing.assert_allclose(part_only.weights, 1 / (len(rows) * part), rtol=1e-9)
            np.testing.assert_allclose(both.weights, 1 / (N * enroll * part), rtol=1e-9)
            assert both.replies.source is Source.MODEL
            assert list(both.replies.unit_ids) == list(state.unit_ids[rows[replied]])
            assert both.replies is part_only.replies  # probabilities are found once
        X.append(now)
        y.append(replied)
        weigher.close(replied)


def test_rounds_open_and_close_in_turn(drawn: Drawn) -> None:
    weigher = drawn.weigher("fedipw")
    round_, replied = drawn.rounds(1)[0]
    with pytest.raises(InputError, match="No round was opened yet"):
        _ = weigher.enrolled
    with pytest.raises(InputError, match="No round is open"):
        weigher.weigh(replied)
    with pytest.raises(InputError, match="No round is open"):
        weigher.close(replied)
    weigher.open(round_)
    with pytest.raises(InputError, match="close it first"):
        weigher.open(round_)
    with pytest.raises(InputError, match="between rounds"):
        weigher.state()
    weigher.close(np.zeros_like(replied))  # an empty round closes too
    assert weigher.state()["rounds"] == 1


def test_rounds_without_anything_to_weigh_say_why(drawn: Drawn) -> None:
    weigher = drawn.weigher("fedipw")
    round_, replied = drawn.rounds(1)[0]
    weigher.open(round_)
    with pytest.raises(EmptyRoundError, match="nobody replied"):
        weigher.weigh(np.zeros_like(replied))
    with pytest.raises(InputError, match="replied"):
        weigher.weigh(replied[:-1])
    weigher.close(replied)
    weigher.open(Round(index=2, rows=np.array([], dtype=np.int64), table=pl.DataFrame()))
    with pytest.raises(EmptyRoundError, match="nobody is enrolled"):
        weigher.weigh(np.array([], dtype=np.bool_))


def test_covariates_of_the_wrong_length_are_refused(drawn: Drawn) -> None:
    with pytest.raises(InputError, match=r"3 rows of covariates for \d+ clients"):
        Round(index=1, rows=drawn.rows, table=pl.DataFrame({"x": np.zeros(3)}))


def test_drawn_enrollment_lists_every_enrolled_client_in_every_round(drawn: Drawn) -> None:
    weigher = Weigher(
        FixedEnrollment(drawn.state), NoParticipation(), {"fedavg": method_named("fedavg")}
    )
    with pytest.raises(InputError, match="must list every enrolled client"):
        weigher.open(Round(index=1, rows=drawn.rows[1:], table=pl.DataFrame()))


def test_the_oracle_refuses_rounds_without_known_probabilities(drawn: Drawn) -> None:
    round_, _ = drawn.rounds(1)[0]
    with pytest.raises(InputError, match="oracle needs true participation"):
        drawn.known().open(round_)


def test_the_oracle_weighs_by_true_probabilities(drawn: Drawn) -> None:
    weigher, rows = drawn.known(), drawn.rows
    prob = np.random.default_rng(2).uniform(0.2, 0.9, len(rows))
    weigher.open(Round(index=1, rows=rows, table=pl.DataFrame(), participation_prob=prob))
    replied = np.arange(len(rows)) % 3 == 0
    found = weigher.weigh(replied)["oracle"]
    expected = 1 / (N * drawn.state.prob[rows] * prob)
    np.testing.assert_allclose(found.weights, expected[replied], rtol=1e-14)
    assert found.replies.source is Source.KNOWN


def test_trimming_is_reported_with_the_weights(drawn: Drawn) -> None:
    round_, replied = drawn.rounds(1)[0]
    plain, cut = drawn.weigher("fedipw"), drawn.weigher("fedipw", trim=1.2)
    for weigher in (plain, cut):
        weigher.open(round_)
    before, after = plain.weigh(replied)["fedipw"], cut.weigh(replied)["fedipw"]
    assert before.trimming is None
    assert after.trimming is not None
    assert after.trimming.changed == (before.weights > 1.2 * before.weights.mean()).sum() > 0
    np.testing.assert_allclose(
        after.weights, np.minimum(before.weights, 1.2 * before.weights.mean())
    )


def test_collapsed_fills_the_covariates_nobody_can_observe(drawn: Drawn) -> None:
    """One model over all clients, non-enrolled ones with the enrolled mean of the round."""
    source = CollapsedParticipation(drawn.learner(everyone=True), np.arange(N))
    weigher = Weigher(
        FixedEnrollment(drawn.state), source, {"collapsed": method_named("collapsed")}
    )
    rows = drawn.rows
    X: list[np.ndarray] = []
    y: list[np.ndarray] = []
    for round_, replied in drawn.rounds(5):
        x = round_.table["x"].to_numpy()
        filled, everyone = np.full(N, x.mean()), np.zeros(N, dtype=bool)
        filled[rows], everyone[rows] = x, replied
        weigher.open(round_)
        given = weigher.weigh(replied)["collapsed"]
        now = np.column_stack([drawn.z, filled])
        if round_.index == 5:
            fit = NewtonLogistic().fit(np.vstack(X), np.concatenate(y))
            prob = fit.predict_proba(now)[everyone, 1]
            np.testing.assert_allclose(given.weights, 1 / (N * prob), rtol=1e-9)
            assert given.replies.rows.tolist() == rows[replied].tolist()
        X.append(now)
        y.append(everyone)
        weigher.close(replied)


@pytest.mark.parametrize("store", ["blocks", "panel"])
def test_a_restored_weigher_goes_on_to_the_same_bytes(drawn: Drawn, store: str) -> None:
    whole = drawn.weigher("fedipw", store=store)
    played, last = drawn.rounds(6), []
    for round_, replied in played:
        if round_.index == 4:
            state = whole.state()
        whole.open(round_)
        last.append(whole.weigh(replied)["fedipw"].weights)
        whole.close(replied)
    again = drawn.weigher("fedipw", store=store)
    again.restore(state)
    for (round_, replied), expected in zip(played[3:], last[3:], strict=True):
        again.open(round_)
        assert again.weigh(replied)["fedipw"].weights.tobytes() == expected.tobytes()
        again.close(replied)
