"""The limit solver: exact where theory gives the answer, and where training goes in the end."""

from dataclasses import replace

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.lab.engine import Simulation
from fedipw.lab.mechanisms import DataAvailability, LogisticEnrollment, enrollment_draw
from fedipw.lab.scenario import Scenario, TrainingSettings
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import (
    ErrorParts,
    FederatedLogistic,
    LimitWeights,
    error_parts,
    lottery_term,
    target_weights,
)

SMALL = Scenario(
    seed=1,
    rounds=40,
    methods=("fedavg", "participation-only", "fedipw", "oracle", "oracle-hajek"),
    population=Testbed(size=200),
)


def parts_of(scenario: Scenario) -> tuple[Simulation, dict[str, ErrorParts]]:
    run = scenario.simulation()
    run.advance(scenario.rounds)
    target = scenario.objective(run.federation)
    history = run.history()
    return run, {m: error_parts(target, run.limits[m], history.of(m)[-1]) for m in run.methods}


def test_the_three_errors_add_up() -> None:
    run, parts = parts_of(SMALL)
    target = SMALL.objective(run.federation)
    best, history = target.minimum(), run.history()
    for name, part in parts.items():
        excess = target.losses(history.of(name)[-1])[0] - best.value
        np.testing.assert_allclose(part.excess_loss, excess, rtol=1e-9, atol=1e-14)


def test_the_oracle_has_no_bias_and_participation_only_has() -> None:
    _, parts = parts_of(replace(SMALL, population=Testbed(size=1000)))
    assert abs(parts["oracle"].bias) < 1e-13
    assert parts["participation-only"].bias > 20 * parts["fedipw"].bias
    assert parts["fedavg"].bias > parts["participation-only"].bias


def test_horvitz_thompson_and_hajek_share_their_limit() -> None:
    _, parts = parts_of(SMALL)
    np.testing.assert_allclose(parts["oracle"].limit, parts["oracle-hajek"].limit, atol=2e-3)


def test_trimming_shows_as_bias_of_the_limit() -> None:
    _, whole = parts_of(SMALL)
    _, cut = parts_of(replace(SMALL, trim=1.5))
    assert abs(whole["oracle"].bias) < 1e-13
    assert cut["oracle"].bias > 1e-4
    assert abs(cut["fedavg"].bias - whole["fedavg"].bias) < 1e-13  # equal weights are never cut


def test_no_lottery_when_enrollment_is_certain() -> None:
    """With everyone almost surely enrolled the two limits coincide."""
    sure = replace(
        SMALL,
        methods=("fedavg", "oracle"),
        enrollment=LogisticEnrollment(strength=0.0, rate=1.0 - 1e-12),
    )
    _, parts = parts_of(sure)
    for part in parts.values():
        assert abs(part.lottery) < 1e-9
    assert abs(parts["oracle"].bias) < 1e-13


def test_equal_probabilities_leave_no_bias_even_to_fedavg() -> None:
    flat = replace(
        SMALL,
        methods=("fedavg", "oracle"),
        enrollment=LogisticEnrollment(strength=0.0),
        participation=DataAvailability(rate=0.3),
    )
    _, parts = parts_of(flat)
    for part in parts.values():
        assert abs(part.bias) < 1e-13


def test_long_training_settles_at_the_limit() -> None:
    """Averaged iterates come within a tenth of the distance between start and limit.

    One seeded run; over other seeds the distance stays below half of the bound used here.
    """
    long = replace(
        SMALL,
        rounds=1500,
        methods=("fedavg", "participation-only"),
        training=TrainingSettings(step_size=0.1),
    )
    run, parts = parts_of(long)
    for name, part in parts.items():
        average = run.history().tail_average(name, 0.6)
        assert np.linalg.norm(average - part.limit) < 0.1 * np.linalg.norm(part.limit)


def test_no_round_no_limit() -> None:
    with pytest.raises(InputError, match="No round"):
        _ = LimitWeights(np.ones(3, dtype=bool), np.ones(3)).given_enrolled


def test_the_lottery_term_is_the_oracle_s_mean_excess_over_enrollment_draws() -> None:
    """First-order term against the exact mean of 300 draws of one population of 2,000.

    Seeded; the mean has a standard error of 4%, so a bound of 20% fails by chance below 1e-5.
    """
    drawn = Testbed(size=2000).draw(np.random.default_rng(0))
    target = FederatedLogistic(drawn.clients, 0.05, target_weights(drawn.clients))
    prob, rng = LogisticEnrollment(strength=0.5)(drawn.population), np.random.default_rng(1)
    best, excess = target.minimum(), []
    for _ in range(300):
        weights = enrollment_draw(prob, rng) / prob
        limit = FederatedLogistic(drawn.clients, 0.05, weights).minimum(best.point).point
        excess.append(target.losses(limit)[0] - best.value)
    assert abs(np.mean(excess) / lottery_term(target, prob) - 1) < 0.2


def test_the_lottery_term_needs_equal_weights() -> None:
    clients = Testbed(size=10).draw(np.random.default_rng(0)).clients
    with pytest.raises(InputError, match="mean over clients"):
        lottery_term(FederatedLogistic(clients, 0.05, np.arange(1.0, 11.0)), np.full(10, 0.5))
