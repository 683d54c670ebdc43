"""Markov chains and availability tied to local data."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from fedipw.errors import InputError
from fedipw.lab.clients import ClientData
from fedipw.lab.mechanisms import DataAvailability, MarkovAvailability, RoundDraw
from fedipw.lab.mechanisms.base import score_of, solved_intercept
from fedipw.lab.testbed import Testbed
from fedipw.numerics import FloatArray
from fedipw.numerics.logistic import sigmoids

FALSE_ALARM = 1e-6  # of each comparison, two-sided
LIMIT = float(stats.norm.isf(FALSE_ALARM / 2))
DRAWN = Testbed(size=1000, rows=3, rows_max=30, features=2).draw(np.random.default_rng(1))


def chain(settings: MarkovAvailability, count: int) -> list[RoundDraw]:
    process = settings.start(DRAWN.population, DRAWN.clients, np.random.default_rng(2))
    assert process.columns == ("was_available",)
    return [process.advance() for _ in range(count)]


def prob_of(drawn: RoundDraw) -> FloatArray:
    assert drawn.participation_prob is not None
    return drawn.participation_prob


def stationary_rates(settings: MarkovAvailability) -> FloatArray:
    score = score_of(DRAWN.population, settings.coefficients)
    return sigmoids(score, solved_intercept(lambda: [score], settings.rate))


@pytest.mark.parametrize("memory", [0.0, 0.3, 0.95])
def test_transitions_follow_their_definition(memory: float) -> None:
    settings = MarkovAvailability(memory=memory)
    rates, drawn = stationary_rates(settings), chain(settings, 5)
    assert abs(rates.mean() - 0.25) <= 1e-12
    for before, after in pairwise(drawn):
        np.testing.assert_array_equal(after.covariates[:, 0], before.replied)
        expected = (1.0 - memory) * rates + memory * before.replied
        np.testing.assert_allclose(prob_of(after), expected, rtol=1e-14)


def test_the_chain_keeps_its_stationary_rate_and_memory() -> None:
    """Every round's count and the lag-1 products are sums over independent clients: 1e-6 each."""
    settings = MarkovAvailability(memory=0.8)
    rates = stationary_rates(settings)
    drawn = chain(settings, 41)
    spread = np.sqrt((rates * (1.0 - rates)).sum())
    for index in (0, 1, 20, 40):
        assert abs((drawn[index].replied - rates).sum()) / spread < LIMIT
    products = (drawn[39].replied - rates) * (drawn[40].replied - rates)
    covariance = 0.8 * rates * (1.0 - rates)
    score = (products - covariance).sum() / np.sqrt(((products - covariance) ** 2).sum())
    assert abs(score) < LIMIT


def test_no_memory_is_independence() -> None:
    """Probabilities never move, and replies of two rounds are uncorrelated: 1e-6."""
    settings = MarkovAvailability(memory=0.0)
    rates, drawn = stationary_rates(settings), chain(settings, 3)
    for r in drawn:
        np.testing.assert_array_equal(prob_of(r), rates)
    products = (drawn[0].replied - rates) * (drawn[1].replied - rates)
    assert abs(products.sum()) / np.sqrt(((rates * (1.0 - rates)) ** 2).sum()) < LIMIT


@pytest.mark.parametrize("memory", [1.0, -0.1, 2.0, float("nan")])
def test_a_memory_outside_is_refused(memory: float) -> None:
    with pytest.raises(InputError, match=rf"memory must lie in \[0, 1\), not {memory}"):
        MarkovAvailability(memory=memory)


def data_round(settings: DataAvailability, clients: ClientData = DRAWN.clients) -> RoundDraw:
    return settings.start(DRAWN.population, clients, np.random.default_rng(3)).advance()


def rising(prob: FloatArray, by: FloatArray) -> bool:
    """Tell whether probabilities strictly rise with distinct values of ``by``."""
    order = np.argsort(by, kind="stable")
    steps, rises = np.diff(prob[order]), np.diff(by[order])
    return bool((steps[rises > 0] > 0).all() and np.allclose(steps[rises == 0], 0.0, atol=1e-15))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_probabilities_rise_or_fall_with_the_number_of_rows(sign: float) -> None:
    prob = prob_of(data_round(DataAvailability(size=2.0 * sign)))
    assert rising(prob if sign > 0 else -prob, DRAWN.clients.counts.astype(float))
    assert abs(prob.mean() - 0.25) <= 1e-12


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_probabilities_rise_or_fall_with_the_share_of_ones(sign: float) -> None:
    prob = prob_of(data_round(DataAvailability(label=1.5 * sign, rate=0.4)))
    assert rising(prob if sign > 0 else -prob, DRAWN.clients.label_share)
    assert abs(prob.mean() - 0.4) <= 1e-12


def test_one_standard_deviation_moves_the_log_odds_by_the_coefficient() -> None:
    settings = DataAvailability(size=0.7, label=-0.4, coefficients={"z1": 0.5})
    prob = prob_of(data_round(settings))
    log_rows, share = np.log(DRAWN.clients.counts), DRAWN.clients.label_share
    Z = DRAWN.population.matrix()
    expected = 0.5 * Z[:, 0] + 0.7 * (log_rows - log_rows.mean()) / log_rows.std()
    expected -= 0.4 * (share - share.mean()) / share.std()
    log_odds = np.log(prob / (1.0 - prob))
    np.testing.assert_allclose(log_odds - log_odds[0], expected - expected[0], atol=1e-12)


def test_a_server_sees_the_size_unless_told_not_to() -> None:
    shown = DataAvailability(size=1.0).start(
        DRAWN.population, DRAWN.clients, np.random.default_rng(3)
    )
    assert shown.columns == ("log_rows",)
    seen = shown.advance()
    log_rows = np.log(DRAWN.clients.counts)
    expected = (log_rows - log_rows.mean()) / log_rows.std()
    np.testing.assert_allclose(seen.covariates[:, 0], expected, atol=1e-14)
    hidden = DataAvailability(size=1.0, observe_size=False).start(
        DRAWN.population, DRAWN.clients, np.random.default_rng(3)
    )
    assert hidden.columns == ()
    unseen = hidden.advance()
    assert unseen.covariates.shape == (1000, 0)
    np.testing.assert_array_equal(unseen.replied, seen.replied)


def test_replies_of_every_round_follow_the_constant_probabilities() -> None:
    """Sum of A - p over fifty rounds; false alarm 1e-6."""
    process = DataAvailability(size=1.0).start(
        DRAWN.population, DRAWN.clients, np.random.default_rng(4)
    )
    drawn = [process.advance() for _ in range(50)]
    prob = prob_of(drawn[0])
    assert all((prob_of(r) == prob).all() for r in drawn)
    surprise = sum(float((r.replied - prob).sum()) for r in drawn)
    assert abs(surprise) / np.sqrt(50.0 * (prob * (1.0 - prob)).sum()) < LIMIT


def test_availability_by_size_needs_clients_of_different_size() -> None:
    equal = Testbed(size=1000, rows=4, features=2).draw(np.random.default_rng(0)).clients
    with pytest.raises(InputError, match=r"all have 4 rows. Set rows_max above rows"):
        data_round(DataAvailability(size=1.0), equal)
    assert data_round(DataAvailability(label=1.0), equal).covariates.shape == (1000, 0)
