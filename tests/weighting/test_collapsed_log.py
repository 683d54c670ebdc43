"""The collapsed model on tables, and how a log's fits are timed, against plain loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.errors import SeparationError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.classifiers import Newton
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.steps import Formulas
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan, Record, Replay
from worlds import World, drawn

CLIENTS, ROUNDS = 300, 6


class Log:
    """A population in which nobody of one system is enrolled, and its rounds."""

    def __init__(self, folder: Path, *, silent: tuple[int, ...] = ()) -> None:
        odds = pl.when(pl.col("os") == "web").then(-np.inf).otherwise("z")
        quiet = pl.col("round").is_in([r + 1 for r in silent])
        given = drawn(
            World(
                size=CLIENTS, rounds=ROUNDS, seed=3, covariates=("z", "os"), changing=("x", "net"),
                enrollment=odds, reply=pl.when(quiet).then(-np.inf).otherwise(pl.col("x") - 0.5),
            )
        )  # fmt: skip
        given.write(folder)
        self.people, self.table = given.people, folder / "people.parquet"
        self.ledger = Ledger(folder / "rounds")
        names = ("z", "os", "enrolled")
        self.z, self.system, self.enrolled = (self.people[name].to_numpy() for name in names)
        self.x, self.net, self.replied = (
            np.stack([t[name].to_numpy() for t in given.rounds]) for name in ("x", "net", "replied")
        )

    def weights(self, plan: Plan) -> tuple[pl.DataFrame, Record]:
        replay = Replay(enrollment_stage(Population(self.table), "z"), self.ledger, plan)
        return pl.concat(replay), replay.record

    def everyone(self, r: int) -> tuple[FloatArray, BoolArray]:
        """Return the covariates of all clients in a round, filled, and who replied."""
        wifi = (self.net[r] == "wifi").astype(float)
        common = float(wifi.mean() > 0.5)
        X = np.column_stack([
            self.z, self.system == "ios", self.system == "web", np.full(CLIENTS, self.x[r].mean()),
            np.full(CLIENTS, common),
        ]).astype(float)  # fmt: skip
        X[self.enrolled, 3], X[self.enrolled, 4] = self.x[r], wifi
        replied = np.zeros(CLIENTS, dtype=bool)
        replied[self.enrolled] = self.replied[r]
        return X, replied


PLAN = Plan(method=method_named("collapsed"), formulas=Formulas(reply="z + os + x + net"))


def test_collapsed_weights_are_those_of_one_model_of_everyone(tmp_path: Path) -> None:
    log = Log(tmp_path)
    pooled = replace(
        PLAN, settings=ParticipationSettings(window=Window.POOLED, estimator=Newton(0.5))
    )
    got, _ = log.weights(pooled)  # the ridge, since nobody of the web ever replies
    rows = [log.everyone(r) for r in range(ROUNDS)]
    fit = NewtonLogistic(l2=0.5).fit(
        np.vstack([X for X, _ in rows]), np.hstack([y for _, y in rows])
    )
    for r, (X, replied) in enumerate(rows):
        prob = fit.predict_proba(X)[replied, 1]
        mine = got.filter(pl.col("round") == r + 1)
        assert mine["unit_id"].to_list() == np.flatnonzero(replied).tolist()
        np.testing.assert_allclose(mine["participation_prob"], prob, rtol=1e-9)
        np.testing.assert_allclose(mine["weight"], 1 / (CLIENTS * prob), rtol=1e-9)
        assert (mine["enrollment_prob"] == 1.0).all()


def test_a_system_nobody_enrolled_with_separates_the_collapsed_model(tmp_path: Path) -> None:
    with pytest.raises(SeparationError, match=r"os\[web\] separate\(s\).* stage participation"):
        Log(tmp_path).weights(PLAN)
    soft = replace(PLAN, settings=replace(PLAN.settings, soft=True))
    got, record = Log(tmp_path / "soft").weights(soft)
    assert "model with a penalty, without one it separates" in record.sources
    assert any("participation by a fit with a penalty of 1" in note for note in record.notes)
    assert got["participation_prob"].null_count() == 0


@pytest.mark.parametrize("silent", [(), (4,)])
def test_a_due_refit_waits_for_the_next_round_with_replies(
    tmp_path: Path, silent: tuple[int, ...]
) -> None:
    log = Log(tmp_path, silent=silent)
    settings = ParticipationSettings(refit_every=2, per_coefficient=1.0)
    plan = Plan(method=method_named("fedipw"), settings=settings, formulas=Formulas(reply="x"))
    got, record = log.weights(plan)
    behind = {2: 1, 3: 2, 4: 2, 5: 4, 6: 5 if silent else 4}  # rounds fitted on
    for r, past in behind.items():
        if r - 1 in silent:
            continue
        x, y = log.x[:past].reshape(-1, 1), log.replied[:past].ravel()
        prob = NewtonLogistic().fit(x, y).predict_proba(log.x[r - 1][:, None])[:, 1]
        mine = got.filter(pl.col("round") == r)["participation_prob"]
        np.testing.assert_allclose(mine, prob[log.replied[r - 1]], rtol=1e-9)
    assert record.skipped == ({5: "nobody replied"} if silent else {})


def test_late_refits_cost_two_passes(tmp_path: Path) -> None:
    odds = pl.col("x") + 0.5 * pl.col("z") - 1.0
    world = World(size=8_000, rounds=40, seed=8, covariates=("z",), reply=odds)
    drawn(world).write(tmp_path)
    ledger = Ledger(tmp_path / "rounds")
    passes = []
    for last in (20, 40):
        few = Ledger(tmp_path / f"first-{last}")
        for index in range(1, last + 1):
            few.append(index, ledger.read(index))
        stage = enrollment_stage(Population(tmp_path / "people.parquet"))
        plan = Plan(method=method_named("fedipw"), settings=ParticipationSettings(refit_every=5))
        replay = Replay(stage, few, plan)
        for _ in replay:
            pass
        passes.append((replay.record.refits, replay.record.passes))
    (refits, before), (more, after) = passes
    assert more - refits == 4  # before rounds 21, 26, 31 and 36
    assert after - before <= 2 * (more - refits)


def test_few_enrolled_at_first_give_a_constant_rate(tmp_path: Path) -> None:
    log = Log(tmp_path)
    start = np.where(np.arange(CLIENTS) % 9 == 0, 1, 3)
    log.people.with_columns(enrolled_from=pl.Series(start)).write_parquet(log.table)
    folder, ids = tmp_path / "joined", np.flatnonzero(log.enrolled)
    ledger = Ledger(folder)
    for index in range(1, ROUNDS + 1):
        here = start[ids] <= index
        ledger.append(index, log.ledger.read(index).filter(pl.Series(here)))
    log.ledger = ledger
    got, record = log.weights(replace(PLAN, method=method_named("fedipw")))
    early = got.filter(pl.col("round") <= 2)["enrollment_prob"].unique()
    first = int((start[ids] == 1).sum())
    np.testing.assert_allclose(early, [first / CLIENTS], rtol=1e-12)
    assert any("constant enrollment rate" in note for note in record.notes)
    fit = NewtonLogistic().fit(log.z[:, None], log.enrolled)
    later = got.filter(pl.col("round") > 2)
    expected = fit.predict_proba(log.z[later["unit_id"].to_numpy()][:, None])[:, 1]
    np.testing.assert_allclose(later["enrollment_prob"], expected, rtol=1e-9)
