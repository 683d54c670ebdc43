"""Participation that changes from round to round, against closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedipw.errors import InputError
from fedipw.lab.config import PARTICIPATION, scenario_from
from fedipw.lab.mechanisms import (
    ChangePointParticipation,
    DriftingParticipation,
    ParticipationMechanism,
    RoundDraw,
    ScaledSineAvailability,
    SineParticipation,
    TrendParticipation,
)
from fedipw.lab.testbed import Testbed
from fedipw.numerics import FloatArray

FALSE_ALARM = 1e-6  # of each comparison, two-sided
LIMIT = float(stats.norm.isf(FALSE_ALARM / 2))
DRAWN = Testbed(size=500, rows=2, features=1).draw(np.random.default_rng(1))
KINDS: dict[str, DriftingParticipation] = {
    "sine": SineParticipation(period=20.0, level=0.3),
    "trend": TrendParticipation(length=50, drift={"z1": 1.0}),
    "change-point": ChangePointParticipation(at=8, drift={"z2": -1.2, "z3": 0.5}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def rounds(settings: ParticipationMechanism, count: int) -> list[RoundDraw]:
    process = settings.start(DRAWN.population, DRAWN.clients, np.random.default_rng(2))
    assert process.columns == ()
    return [process.advance() for _ in range(count)]


def prob_of(drawn: RoundDraw) -> FloatArray:
    assert drawn.participation_prob is not None
    return drawn.participation_prob


def z(name: str) -> FloatArray:
    return DRAWN.population.matrix((name,))[:, 0]


def swing(kind: str, r: int) -> float:
    """The signals, written out once more."""
    if kind == "sine":
        return math.sin(math.pi * r / 10)
    if kind == "trend":
        return r / 50 if r < 50 else 1.0
    return 0.0 if r <= 7 else 1.0


@every_kind
def test_log_odds_differ_from_the_first_round_by_what_the_signal_adds(kind: str) -> None:
    settings = KINDS[kind]
    drawn = rounds(settings, 60)
    own = sum(c * z(n) for n, c in settings.coefficients.items())
    moved = settings.level + sum(c * z(n) for n, c in settings.drift.items())
    intercepts = []
    for r, one in enumerate(drawn, 1):
        p = prob_of(one)
        intercepts.append(np.log(p / (1 - p)) - own - swing(kind, r) * moved)
    np.testing.assert_allclose(intercepts, np.full((60, 500), intercepts[0][0]), atol=1e-12)


@every_kind
def test_the_mean_rate_is_that_asked_for(kind: str) -> None:
    settings = KINDS[kind]
    means = [prob_of(one).mean() for one in rounds(settings, 100)]
    assert abs(np.mean(means) - settings.rate) <= 1e-12


def test_a_scaled_sine_has_the_mean_of_its_closed_form() -> None:
    settings = ScaledSineAvailability(gamma=0.4, period=25, rate=0.3)
    prob = np.array([prob_of(one) for one in rounds(settings, 75)])
    base = prob[24] / 0.6  # the sine of a whole period is 0
    assert abs(base.mean() - 0.3) <= 1e-12
    np.testing.assert_allclose(prob[:25].mean(axis=0), 0.6 * base, rtol=1e-12)
    np.testing.assert_allclose(prob[:25], prob[50:], rtol=1e-12)
    for r, p in enumerate(prob, 1):
        np.testing.assert_allclose(p, base * (0.4 * math.sin(0.08 * math.pi * r) + 0.6), rtol=1e-12)


def test_a_scaled_sine_takes_its_base_from_a_column() -> None:
    population = DRAWN.population
    shares = np.linspace(0.05, 0.95, 500)
    with_base = type(population).of(
        {"unit_id": np.arange(500), "share": shares, "enrolled": np.ones(500, bool)}
    )
    settings = ScaledSineAvailability(gamma=0.0, base="share")
    process = settings.start(with_base, DRAWN.clients, np.random.default_rng(2))
    np.testing.assert_array_equal(prob_of(process.advance()), shares)
    bad = type(population).of({"unit_id": [0, 1], "share": [0.5, 1.5], "enrolled": [True, True]})
    with pytest.raises(InputError, match="share"):
        settings.start(bad, DRAWN.clients, np.random.default_rng(2))


@pytest.mark.parametrize("settings", [*KINDS.values(), ScaledSineAvailability(period=7.5)])
def test_replies_are_drawn_with_the_probabilities_reported(
    settings: ParticipationMechanism,
) -> None:
    """Sums over 40 rounds, plain and by z2, are of independent replies: 1e-6 each."""
    drawn = rounds(settings, 40)
    for scores in (np.ones(500), z("z2")):
        excess = sum(float(scores @ (one.replied - prob_of(one))) for one in drawn)
        spread = sum(float(scores**2 @ (prob_of(one) * (1 - prob_of(one)))) for one in drawn)
        assert abs(excess) / math.sqrt(spread) < LIMIT


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SineParticipation, {"period": 1.0}, "period must be 2"),
        (SineParticipation, {"rate_rounds": 0}, "rate_rounds must be at least 1"),
        (TrendParticipation, {"length": 0}, "length must be at least 1"),
        (ChangePointParticipation, {"at": 0}, "counted from 1, not 0"),
        (ScaledSineAvailability, {"gamma": 0.5}, "gamma must lie in"),
        (ScaledSineAvailability, {"period": float("nan")}, "period must be 2"),
    ],
)
def test_settings_without_meaning_are_refused(
    kind: type, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        kind(**settings)


def test_scenario_files_name_them(tmp_path: Path) -> None:
    made = {}
    for kind, more in {
        "sine": "period = 30.0\nlevel = 0.5", "trend": "length = 90", "change-point": "at = 40",
        "scaled-sine": "gamma = 0.2",
    }.items():  # fmt: skip
        path = tmp_path / f"{kind}.toml"
        path.write_text(f'[participation]\nkind = "{kind}"\ndrift = {{ z1 = 2.0 }}\n{more}\n')
        if kind == "scaled-sine":
            path.write_text(f'[participation]\nkind = "{kind}"\n{more}\n')
        made[kind] = scenario_from(path).participation
        assert type(made[kind]) is PARTICIPATION[kind]
    assert made["sine"] == SineParticipation(period=30.0, level=0.5, drift={"z1": 2.0})
    assert made["trend"] == TrendParticipation(length=90, drift={"z1": 2.0})
    assert made["change-point"] == ChangePointParticipation(at=40, drift={"z1": 2.0})
    assert made["scaled-sine"] == ScaledSineAvailability(gamma=0.2)
