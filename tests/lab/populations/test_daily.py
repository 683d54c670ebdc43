"""Daily participation: its rate exactly, its covariate by the law of an AR(1) and a day cycle."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit

from fedipw.errors import InputError
from fedipw.lab.mechanisms import DailyParticipation, RoundDraw
from fedipw.lab.testbed import Testbed
from fedipw.numerics import FloatArray

FALSE_ALARM = 1e-6  # of each comparison, two-sided
LIMIT = float(stats.norm.isf(FALSE_ALARM / 2))
DRAWN = Testbed(size=400, rows=1).draw(np.random.default_rng(1))


def rounds(settings: DailyParticipation, count: int, seed: int = 2) -> list[RoundDraw]:
    process = settings.start(DRAWN.population, DRAWN.clients, np.random.default_rng(seed))
    assert process.columns == ("x",)
    return [process.advance() for _ in range(count)]


def covariate(settings: DailyParticipation, count: int) -> FloatArray:
    """Return X, (rounds, clients)."""
    return np.array([drawn.covariates[:, 0] for drawn in rounds(settings, count)])


def probabilities(drawn: list[RoundDraw]) -> FloatArray:
    """Return the true probabilities, (rounds, clients)."""
    found = [r.participation_prob for r in drawn]
    return np.array([prob for prob in found if prob is not None])


@pytest.mark.parametrize(
    "settings",
    [
        DailyParticipation(),
        DailyParticipation(rate=0.6, rate_rounds=7),
        DailyParticipation(coefficients={}, covariate_loadings={}, covariate_coefficient=0.0),
    ],
)
def test_the_mean_rate_over_the_stated_rounds_is_exact(settings: DailyParticipation) -> None:
    prob = probabilities(rounds(settings, settings.rate_rounds))
    assert prob.shape == (settings.rate_rounds, 400)
    assert abs(prob.mean() - settings.rate) <= 1e-12


def test_the_default_rate_is_a_quarter_over_a_hundred_rounds() -> None:
    assert (DailyParticipation().rate, DailyParticipation().rate_rounds) == (0.25, 100)


def test_log_odds_are_linear_in_the_covariates() -> None:
    Z = DRAWN.population.matrix()
    prob, x = probabilities(rounds(DailyParticipation(), 3)), covariate(DailyParticipation(), 3)
    intercept = np.log(prob / (1.0 - prob)) - 0.4 * Z[:, 0] - 0.6 * Z[:, 1] - 0.8 * x
    np.testing.assert_allclose(intercept, intercept[0, 0], atol=1e-12)


def test_replies_follow_their_probabilities() -> None:
    """Sums of A - p over 200 rounds, alone and along X: false alarm 1e-6 each."""
    drawn = rounds(DailyParticipation(), 200)
    prob = probabilities(drawn)
    x = np.array([r.covariates[:, 0] for r in drawn])
    surprise = np.array([r.replied for r in drawn]) - prob
    spread = prob * (1.0 - prob)
    assert abs(surprise.sum()) / np.sqrt(spread.sum()) < LIMIT
    assert abs((x * surprise).sum()) / np.sqrt((x**2 * spread).sum()) < LIMIT
    # and no memory beyond X: consecutive surprises are uncorrelated
    products = surprise[1:] * surprise[:-1]
    assert abs(products.sum()) / np.sqrt((spread[1:] * spread[:-1]).sum()) < LIMIT


@pytest.mark.parametrize("rho", [0.7, 0.0, -0.5])
def test_the_slow_part_is_a_stationary_ar1(rho: float) -> None:
    """Innovations are independent N(0, 1): four exact laws, false alarm 1e-6 each."""
    bare = DailyParticipation(autocorrelation=rho, covariate_loadings={}, day_amplitude=0.0)
    x = covariate(bare, 60)
    n = x.shape[1]
    low, high = stats.chi2(n).interval(1.0 - FALSE_ALARM)
    for r in (0, 59):  # unit variance in the first round and in the last
        assert low < (x[r] ** 2).sum() < high
    innovation = (x[1:] - rho * x[:-1]) / np.sqrt(1.0 - rho**2)
    low, high = stats.chi2(innovation.size).interval(1.0 - FALSE_ALARM)
    assert low < (innovation**2).sum() < high
    # lag-1 correlation: given the past, sum x innovation is N(0, sum x^2)
    assert abs((x[:-1] * innovation).sum()) / np.sqrt((x[:-1] ** 2).sum()) < LIMIT


def test_the_mean_of_the_covariate_follows_z() -> None:
    loaded = covariate(DailyParticipation(covariate_loadings={"z2": 0.4, "z3": -1.0}), 2)
    bare = covariate(DailyParticipation(covariate_loadings={}), 2)
    Z = DRAWN.population.matrix()
    expected = np.tile(0.4 * Z[:, 1] - Z[:, 2], (2, 1))
    np.testing.assert_allclose(loaded - bare, expected, atol=1e-14)


@pytest.mark.parametrize(("length", "amplitude"), [(24.0, 0.5), (7.0, 2.0)])
def test_the_day_cycle_has_its_period_and_amplitude(length: float, amplitude: float) -> None:
    """Phases are uniform: Kolmogorov-Smirnov with false alarm 1e-6."""
    cyclic = DailyParticipation(day_length=length, day_amplitude=amplitude)
    count = 2 * int(length)
    day = covariate(cyclic, count) - covariate(DailyParticipation(day_amplitude=0.0), count)
    period = int(length)
    np.testing.assert_allclose(day[period:], day[:-period], atol=1e-12)
    # a sinusoid of this period: d(r + 1) + d(r - 1) = 2 cos(2 pi / day) d(r), amplitude by phase
    turn = 2.0 * np.pi / length
    np.testing.assert_allclose(day[2:] + day[:-2], 2.0 * np.cos(turn) * day[1:-1], atol=1e-12)
    sine, cosine = day[0], (day[1] - np.cos(turn) * day[0]) / np.sin(turn)  # at the first round
    np.testing.assert_allclose(np.hypot(sine, cosine), amplitude, rtol=1e-12)
    phase = (np.arctan2(sine, cosine) - turn) % (2.0 * np.pi)
    assert stats.kstest(phase / (2.0 * np.pi), "uniform").pvalue > FALSE_ALARM


def test_covariates_do_not_depend_on_the_participation_model() -> None:
    weak, strong = DailyParticipation(), DailyParticipation(covariate_coefficient=3.0, rate=0.7)
    np.testing.assert_array_equal(covariate(weak, 5), covariate(strong, 5))


def test_replies_share_their_uniforms_across_rates() -> None:
    rare, often = (rounds(DailyParticipation(rate=rate), 5) for rate in (0.2, 0.5))
    for fewer, more in zip(rare, often, strict=True):
        assert (more.replied | ~fewer.replied).all()


def test_rounds_are_counted_from_one() -> None:
    assert [r.index for r in rounds(DailyParticipation(), 3)] == [1, 2, 3]


@pytest.mark.parametrize("rho", [1.0, -1.0, 1.5, float("nan")])
def test_an_autocorrelation_without_stationary_law_is_refused(rho: float) -> None:
    with pytest.raises(InputError, match=f"autocorrelation must lie .* not {rho}"):
        DailyParticipation(autocorrelation=rho)


def test_no_round_to_take_the_rate_over_is_refused() -> None:
    with pytest.raises(InputError, match="rate_rounds must be at least 1, not 0"):
        DailyParticipation(rate_rounds=0)


def test_the_intercept_matches_a_direct_evaluation() -> None:
    settings = DailyParticipation(rate_rounds=10)
    Z, x = DRAWN.population.matrix(), covariate(settings, 10)
    prob = probabilities(rounds(settings, 10))
    intercept = float(np.log(prob[0, 0] / (1.0 - prob[0, 0]))) - float(
        0.4 * Z[0, 0] + 0.6 * Z[0, 1] + 0.8 * x[0, 0]
    )
    direct = expit(intercept + 0.4 * Z[:, 0] + 0.6 * Z[:, 1] + 0.8 * x)
    np.testing.assert_allclose(direct.mean(), 0.25, rtol=1e-11)
