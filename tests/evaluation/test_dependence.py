"""Replies that depend on the metric itself are seen; those that do not raise no alarm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

import fedipw
from fedipw.evaluation.dependence import Dependence
from fedipw.evaluation.evaluate import Evaluation


class World:
    """Replies on one covariate and, by ``tilt``, on the metric."""

    def __init__(self, place: Path, seed: int, *, tilt: float = 0.0, rounds: int = 4) -> None:
        rng = np.random.default_rng(seed)
        size = 500
        self.age = rng.normal(size=size)
        self.enrolled = rng.random(size) < expit(0.8 + 0.5 * self.age)
        self.metric = 0.6 * self.age + rng.normal(size=size)
        apart = self.metric - 0.6 * self.age
        prob = expit(-0.2 + 0.6 * self.age + tilt * apart)
        self.replied = rng.random((rounds, size)) < prob
        self.people = pl.DataFrame(
            {"unit_id": np.arange(size), "enrolled": self.enrolled, "age": self.age}
        )
        self.ledger = fedipw.Ledger(place / f"{seed}-{tilt}-{rounds}")
        ids = np.flatnonzero(self.enrolled)
        for index, flags in enumerate(self.replied, start=1):
            frame = {"unit_id": ids, "invited": True, "replied": flags[ids]}
            self.ledger.append(index, pl.DataFrame(frame))

    def evaluated(self, values: np.ndarray | None = None) -> Evaluation:
        values = self.metric if values is None else values
        rows = [
            (int(i), r + 1, float(values[i]))
            for r, flags in enumerate(self.replied)
            for i in np.flatnonzero(flags & self.enrolled)
        ]
        table = pl.DataFrame(rows, schema=["unit_id", "round", "value"], orient="row")
        return fedipw.evaluate(table, self.people, self.ledger)

    def dependence(self, values: np.ndarray | None = None) -> Dependence:
        found = self.evaluated(values).dependence
        assert found is not None
        return found


def test_the_odds_ratio_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """Rows built one by one, scikit-learn's fit, and errors between clients summed by hand."""
    world = World(tmp_path, 1, tilt=0.5)
    ids = np.flatnonzero(world.enrolled)
    X = np.tile(world.age[ids], len(world.replied))[:, None]
    y = np.concatenate([flags[ids] for flags in world.replied])
    fitted = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(X, y)
    means = [world.metric[flags & world.enrolled].mean() for flags in world.replied]
    apart = {
        (i, r): world.metric[i] - means[r]
        for r, flags in enumerate(world.replied)
        for i in np.flatnonzero(flags & world.enrolled)
    }
    spread = np.std([*apart.values()])
    rows = []
    for r in range(len(world.replied)):
        for i in ids:
            others = [apart[i, s] for s in range(len(world.replied)) if s != r and (i, s) in apart]
            if others:
                odds = logit(fitted.predict_proba([[world.age[i]]])[0, 1])
                rows.append((i, world.replied[r, i], odds, np.mean(others) / spread))
    who, label, odds, u = (np.array(column) for column in zip(*rows, strict=True))
    design = np.column_stack([odds, u])
    model = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(design, label)
    gamma = model.coef_[0, 1]
    full = np.column_stack([np.ones(len(u)), design])
    p = model.predict_proba(design)[:, 1]
    inverse = np.linalg.inv(full.T @ (full * (p * (1 - p))[:, None]))
    meat = np.zeros((3, 3))
    for i in np.unique(who):
        score = ((label - p)[who == i, None] * full[who == i]).sum(axis=0)
        meat += np.outer(score, score)
    error = np.sqrt((inverse @ meat @ inverse)[2, 2])
    found = world.dependence()
    np.testing.assert_allclose(np.log(found.odds_ratio), gamma, rtol=1e-4)
    np.testing.assert_allclose(found.errors, gamma / error, rtol=1e-4)
    np.testing.assert_allclose(found.low, np.exp(gamma - 1.96 * error), rtol=1e-4)
    assert found.clients == len(np.unique(who))


def test_no_alarm_where_replies_follow_the_covariates(tmp_path: Path) -> None:
    """Beyond 3 errors with a chance of 0.27% a draw: 2 of 20 or more in 0.13% of runs."""
    found = [World(tmp_path, seed).dependence() for seed in range(20)]
    assert sum(abs(one.errors) > 3.0 for one in found) <= 1
    assert sum(one.matters for one in found) <= 1


@pytest.mark.parametrize("tilt", [0.8, -0.8])
def test_dependence_is_seen_with_its_sign_and_warned_of(tmp_path: Path, tilt: float) -> None:
    """Expected beyond 6 standard errors: missed, or of the wrong sign, in 1 of 1,000 runs."""
    found = World(tmp_path, 3, tilt=tilt).evaluated()
    assert found.dependence is not None
    assert found.dependence.matters
    assert (found.dependence.odds_ratio > 1.0) == (tilt > 0.0)
    assert any("replies depend on the metric itself" in note for note in found.notes)
    assert found.to_json()["dependence"]["clients"] == found.dependence.clients


def test_of_many_rows_every_kth_client_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, 8, tilt=0.8)
    whole = world.dependence()
    monkeypatch.setattr("fedipw.evaluation.dependence._MOST_ROWS", int(world.enrolled.sum()))
    found = world.dependence()  # four rounds: every fourth client
    assert 0.2 * whole.clients < found.clients < 0.3 * whole.clients
    assert found.low < whole.odds_ratio < found.high
    assert found.odds_ratio > 1.0


def test_scale_and_origin_do_not_matter_and_the_sign_inverts(tmp_path: Path) -> None:
    world = World(tmp_path, 4, tilt=0.4)
    one, other = world.dependence(), world.dependence(7.0 - 3.0 * world.metric)
    assert other.odds_ratio == pytest.approx(1.0 / one.odds_ratio, rel=1e-6)
    assert other.errors == pytest.approx(-one.errors, rel=1e-6)


def test_a_small_effect_is_no_alarm_however_certain() -> None:
    small = Dependence(odds_ratio=1.1, low=1.09, high=1.11, errors=40.0, clients=10**6)
    unsure = Dependence(odds_ratio=2.0, low=0.8, high=5.0, errors=1.5, clients=40)
    large = Dependence(odds_ratio=0.5, low=0.4, high=0.6, errors=-9.0, clients=400)
    assert [one.matters for one in (small, unsure, large)] == [False, False, True]


def test_where_it_cannot_be_seen_there_is_none(tmp_path: Path) -> None:
    world = World(tmp_path, 5)
    assert world.evaluated(np.ones(len(world.metric))).dependence is None
    single = World(tmp_path, 6, rounds=1).evaluated()
    assert single.dependence is None
    assert single.to_json()["dependence"] is None


def test_bounds_of_both_stages_hold_those_of_enrollment(tmp_path: Path) -> None:
    world = World(tmp_path, 7)
    rows = world.ledger
    values = [
        (int(i), r + 1, float(world.metric[i]))
        for r, flags in enumerate(world.replied)
        for i in np.flatnonzero(flags & world.enrolled)
    ]
    table = pl.DataFrame(values, schema=["unit_id", "round", "value"], orient="row")
    found = fedipw.evaluate(table, world.people, rows, sensitivity=[1.0, 2.0]).sensitivity
    for one in found:
        assert one.both_low is not None
        assert one.both_high is not None
        assert one.both_low <= one.low <= one.high <= one.both_high
    assert found[0].both_low == pytest.approx(found[0].both_high, rel=1e-12)
    wide = found[1].both_low
    assert wide is not None
    assert wide < found[1].low
