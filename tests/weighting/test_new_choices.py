"""A choice of one's own is a class and a line in a registry, in every engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import polars as pl
import pytest

from cli.command import Files
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Testbed
from fedipw.numerics import FloatArray
from fedipw.weighting.functions import TrimReport
from fedipw.weighting.methods import METHODS, method_named
from fedipw.weighting.pipeline import BASES, GUARDS, Base, Guard, Probabilities
from fedipw.weighting.weigher import EnrollmentState, Replies
from flower.federations import INSIDE, Small
from worlds import NONLINEAR


@final
@dataclass(frozen=True, slots=True)
class ShareCap:
    """No weight above a share of the round's sum."""

    share: float = 0.1

    def applied(self, weights: FloatArray) -> TrimReport | None:
        cap = self.share * float(weights.sum())
        cut = np.minimum(weights, cap)
        mass = 1.0 - float(cut.sum() / weights.sum())
        return TrimReport(weights=cut, cap=cap, changed=int((weights > cap).sum()), mass=mass)

    def expected(self, weights: FloatArray, presence: FloatArray) -> FloatArray:
        return np.minimum(weights, self.share * float(presence @ weights))


@final
@dataclass(frozen=True, slots=True)
class Tempered:
    """The root of the inverse inclusion probability: half a correction, a quarter the spread."""

    probabilities: ClassVar = Probabilities.FITTED
    uses_enrollment: ClassVar = True

    def weights(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        out: FloatArray = 1.0 / (state.population_size * np.sqrt(replies.inclusion_prob))
        return out

    def within(self, replies: Replies, state: EnrollmentState) -> FloatArray:
        out: FloatArray = 1.0 / (state.enrolled_size * np.sqrt(replies.participation_prob))
        return out

    def largest(self, state: EnrollmentState) -> FloatArray:
        out: FloatArray = 1.0 / (state.population_size * np.sqrt(state.prob))
        return out


NAME = "base=tempered, normalisation=hajek, guard=share-cap(0.004)"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    guard: type[Guard] = ShareCap
    base: type[Base] = Tempered
    monkeypatch.setitem(GUARDS, "share-cap", guard)
    monkeypatch.setitem(BASES, "tempered", base)


def tempered(enrollment: pl.Series, participation: pl.Series, cap: float) -> FloatArray:
    """Return the weights of a round by hand."""
    raw = 1.0 / np.sqrt(enrollment.to_numpy() * participation.to_numpy())
    return np.asarray(np.minimum(raw / raw.sum(), cap))


def test_it_is_known_by_name_among_the_others() -> None:
    method = method_named(NAME)
    assert method.guard == ShareCap(0.004)
    assert method.base == Tempered()
    assert method_named("fedipw, guard=share-cap(0.2)").guard == ShareCap(0.2)
    assert NAME not in METHODS
    with pytest.raises(ValueError, match="Known: none, trim, temper, cap, share-cap"):
        method_named("guard=sharecup")


def test_it_weighs_a_ledger(tmp_path: Path) -> None:
    got, summary = Files.of(NONLINEAR, tmp_path).put().weighed("--scheme", NAME)
    assert summary["method"] == NAME
    assert summary["trimmed"] > 0
    for _, table in got.group_by("round"):
        expected = tempered(table["enrollment_prob"], table["participation_prob"], 0.004)
        np.testing.assert_allclose(table["weight"], expected, rtol=1e-12)


def test_it_is_simulated_with_its_limit() -> None:
    scenario = Scenario(
        seed=3, rounds=12, population=Testbed(size=400), methods=(NAME, "fedipw-hajek", "oracle")
    )
    run = scenario.simulation()
    run.advance(scenario.rounds)
    history = run.history()
    assert history.methods == (NAME, "fedipw-hajek", "oracle")
    assert history.trimmed[0].sum() > 0
    assert not history.trimmed[1:].any()
    plain, mine = history.of("fedipw-hajek"), history.of(NAME)
    assert np.isfinite(mine).all()
    assert np.abs(mine[-1] - plain[-1]).max() > 1e-4
    spread = {name: np.ptp(run.limits[name].given_enrolled) for name in history.methods}
    assert spread[NAME] < spread["fedipw-hajek"]


def test_it_weighs_the_rounds_of_a_flower_run(tmp_path: Path) -> None:
    small = Small(tmp_path)
    name = NAME.replace("0.004", "0.084")
    result = small.trained(2, scheme=name)
    metrics = result.train_metrics_clientapp[2]
    weights = np.array(metrics["fedipw-weights"])
    assert metrics["fedipw-weighed"] == INSIDE == len(weights)
    assert metrics["fedipw-weights-trimmed"] == (weights == weights.max()).sum() > 0
    np.testing.assert_allclose(weights.max(), 0.084, rtol=1e-12)
    moved = sum(sum(result.train_metrics_clientapp[k]["fedipw-weights"]) for k in (1, 2))
    np.testing.assert_allclose(result.arrays["theta"].numpy(), moved, rtol=1e-12)
    assert name in json.dumps(small.strategy(scheme=name).config.lines())
