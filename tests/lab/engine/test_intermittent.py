"""Rules for clients that come and go: special cases, skipped rounds, and whom they leave out."""

from dataclasses import replace

import numpy as np
import pytest

from fedipw.combining.memory import MemorySum
from fedipw.errors import InputError
from fedipw.lab.engine import LogisticTrainer, RoundWork, RuleSettings
from fedipw.lab.engine.intermittent import (
    F3AST,
    CAFed,
    CorrelationAware,
    EchoedUpdates,
    KnownChains,
    RunningRates,
    TrackedGradients,
)
from fedipw.lab.mechanisms import DataAvailability
from fedipw.lab.recipes import INTERMITTENT
from fedipw.lab.scenario import Scenario, TrainingSettings
from fedipw.lab.testbed import Testbed

CLIENTS = Testbed(size=5, rows=4).draw(np.random.default_rng(0)).clients
TRAINER = LogisticTrainer(CLIENTS)
EVERYONE = np.ones(5, dtype=bool)
EQUAL = np.full(5, 0.2)
START = np.zeros(6)


def task(*clients: int, theta: np.ndarray = START) -> RoundWork:
    return RoundWork(clients=np.array(clients), theta=theta, key=0)


def update(client: int, theta: np.ndarray = START) -> np.ndarray:
    one: np.ndarray = TRAINER.updates(task(client, theta=theta))[0]
    return one


def moved(found: MemorySum) -> np.ndarray:
    assert found.total is not None
    return found.total


@pytest.mark.parametrize("name", [*INTERMITTENT, "debiased"])
def test_without_missing_clients_they_are_fedavg(name: str) -> None:
    """One local step, all enrolled clients in every round; CA-Fed keeps all if bias is dear."""
    scenario = Scenario(
        rounds=6,
        methods=("fedavg", name),
        population=Testbed(size=30),
        participation=DataAvailability(rate=1 - 1e-12),
        training=TrainingSettings(step_size=0.3),
        rules=RuleSettings(cafed=CAFed(bias=1e6, alone=5)),
    )
    run = scenario.simulation(limits=False)
    run.advance(6)
    history = run.history()
    assert (history.replies == run.federation.population.enrolled_size).all()
    plain, found = history.of("fedavg"), history.of(name)
    if name == "cafed":  # availability is counted from one reply and one miss: (r + 1) / (r + 2)
        np.testing.assert_allclose(found[1], plain[1] * 3 / 2, atol=1e-12)
    else:
        np.testing.assert_allclose(found, plain, atol=1e-12)


def test_fedawe_echoes_rounds_in_which_nobody_replied() -> None:
    rule = EchoedUpdates(EVERYONE, EQUAL, START)
    rule.begin(TRAINER, task(0, 1, 2, 3, 4))
    first = moved(rule.total(TRAINER, task(0), 1, None))
    np.testing.assert_allclose(first, update(0), atol=1e-14)
    # nobody in rounds 2 and 3; client 0 goes on from its own model, client 1 from the start
    second = moved(rule.total(TRAINER, task(0, 1, theta=first), 4, None))
    echoed = (first + 3 * update(0, first) + START + 4 * update(1)) / 2
    np.testing.assert_allclose(second, echoed - first, atol=1e-14)


@pytest.mark.parametrize("weights", [EQUAL, np.array([0.1, 0.4, 0.2, 0.05, 0.25])])
def test_fedawe_moves_the_weighted_mean_model_by_echoed_updates_alone(weights: np.ndarray) -> None:
    """Mixing keeps the weighted mean of the clients' models; echoes add up to the rounds."""
    rule, rng, theta = EchoedUpdates(EVERYONE, weights, START), np.random.default_rng(2), START
    rule.begin(TRAINER, task(0, 1, 2, 3, 4))
    own, last, echoed = np.zeros((5, 6)), np.zeros(5), np.zeros(6)
    for index in range(1, 9):
        present = np.flatnonzero(rng.random(5) < 0.5) if index < 8 else np.arange(5)
        if not len(present):
            continue
        for i in present:
            echoed += weights[i] * (index - last[i]) * update(int(i), own[i])
        theta = theta + moved(rule.total(TRAINER, task(*present, theta=theta), index, None))
        own[present], last[present] = theta, index
        np.testing.assert_allclose(rule.mean_model, weights @ own, atol=1e-12)
        np.testing.assert_allclose(rule.mean_model, echoed, atol=1e-12)
    np.testing.assert_allclose(theta, echoed, atol=1e-12)  # all present at last: one common model


def test_fedawe_keeps_only_models_that_somebody_still_has() -> None:
    rule = EchoedUpdates(EVERYONE, EQUAL, START)
    for index in range(1, 40):
        rule.total(TRAINER, task(index % 4), index, None)
    assert rule.state()["models"].shape == (5, 6)  # of four clients, and the start of the fifth


def test_fedawe_without_weight_among_the_replies_keeps_the_model() -> None:
    rule = EchoedUpdates(EVERYONE, np.array([0.0, 0.25, 0.25, 0.25, 0.25]), START)
    found = rule.total(TRAINER, task(0), 1, None)
    assert found.total is None
    assert found.note == "no reply has an enrollment weight"


def test_focus_at_the_solution_does_not_move() -> None:
    """With every client's gradient at the minimiser kept, steps and tracked gradients are zero."""
    weights = np.array([0.1, 0.4, 0.2, 0.05, 0.25])
    rule = TrackedGradients(EVERYONE, weights, START)
    theta = START
    for _ in range(3000):
        theta = theta + moved(rule.total(TRAINER, task(0, 1, 2, 3, 4, theta=theta), 1, None))
    longer = replace(task(3, 1, theta=theta), steps=np.array([6, 2]))
    np.testing.assert_allclose(moved(rule.total(TRAINER, longer, 1, None)), 0.0, atol=1e-12)
    sum_of = weights @ (-TRAINER.updates(task(0, 1, 2, 3, 4, theta=theta)) / TRAINER.work.step_size)
    np.testing.assert_allclose(sum_of, 0.0, atol=1e-12)


def test_f3ast_uses_those_it_used_least_and_rates_fade_in_empty_rounds() -> None:
    rule = RunningRates(EVERYONE, EQUAL, F3AST(beta=0.5, capacity=2))
    found = rule.total(TRAINER, task(0, 1, 2), 1, None)
    assert found.note == "1 replies beyond the capacity"
    rates = np.array([0.7, 0.7, 0.2, 0.2, 0.2])  # (1 - 0.5) * 2/5, and 0.5 for clients 0 and 1
    np.testing.assert_allclose(rule.state()["rates"], rates, rtol=1e-14)
    np.testing.assert_allclose(moved(found), 0.2 / 0.7 * (update(0) + update(1)), atol=1e-14)
    found = rule.total(TRAINER, task(0, 1, 4), 3, None)  # nobody in round 2
    rates = rates * 0.25 + np.array([0.5, 0.0, 0.0, 0.0, 0.5])
    np.testing.assert_allclose(rule.state()["rates"], rates, rtol=1e-14)
    expected = 0.2 / rates[0] * update(0) + 0.2 / rates[4] * update(4)
    np.testing.assert_allclose(moved(found), expected, atol=1e-14)


def test_cafed_leaves_out_by_correlation_before_availability() -> None:
    """Its two passes written out, with chains known."""
    known = KnownChains(
        availability=np.array([0.9, 0.9, 0.1, 0.1, 0.5]),
        correlation=np.array([0.0, 0.0, 0.9, 0.1, -0.95]),
    )
    rule = CorrelationAware(EVERYONE, EQUAL, CAFed(alone=400, bias=0.5), known)
    rule.begin(TRAINER, task(0, 1, 2, 3, 4))
    found = rule.total(TRAINER, task(0, 2, 4), 1, None)
    everyone = np.arange(5)
    heard = np.full(5, TRAINER.losses(START, np.array([0, 2, 4])).mean())
    heard[[0, 2, 4]] = TRAINER.losses(START, np.array([0, 2, 4]))
    excess = heard - rule._least
    assert (excess > 0).all()

    def error(kept: list[int]) -> float:
        mass = len(kept) / 5
        return float(excess[kept].mean() + 0.5 * excess.max() * (1.0 - mass) ** 2)

    kept = everyone.tolist()
    for client in (4, 2, 3, 0, 1, 2, 3, 4, 0, 1):  # by |correlation|, then by availability
        less = [i for i in kept if i != client]
        if len(less) < len(kept) and less and error(kept) - error(less) >= 0.0:
            kept = less
    assert 1 < len(kept) < 5
    np.testing.assert_array_equal(np.flatnonzero(rule.counted), kept)
    weights = rule.counted[[0, 2, 4]] * 0.2 / known.availability[[0, 2, 4]]
    expected = sum(w * update(i) for w, i in zip(weights, (0, 2, 4), strict=True))
    np.testing.assert_allclose(moved(found), expected, atol=1e-14)


def test_cafed_counts_availability_and_correlation() -> None:
    """Client 0 in rounds 1, 2, 5; client 1 in none; rounds 3 and 4 are empty."""
    rule = CorrelationAware(EVERYONE, EQUAL, CAFed(alone=1))
    for index in (1, 2, 5):
        rule.total(TRAINER, task(0), index, None)
    availability, correlation = rule._chains()
    np.testing.assert_allclose(availability[:2], [4 / 7, 1 / 7])
    # 1 1 0 0 1: of two moves from 1 one stays, of two from 0 one stays; and one of each before
    np.testing.assert_allclose(correlation[:2], [2 / 4 + 2 / 4 - 1, 1 / 2 + 5 / 6 - 1])


def test_cafed_without_anybody_that_counts_keeps_the_model() -> None:
    known = KnownChains(availability=EQUAL, correlation=np.array([0.9, 0.0, 0.0, 0.0, 0.0]))
    rule = CorrelationAware(EVERYONE, EQUAL, CAFed(alone=1, bias=0.0, tolerance=0.0), known)
    rule.total(TRAINER, task(1, 2, 3, 4), 1, None)
    rule._losses[0] = 10.0  # far above the others: leaving it out lowers the error
    found = rule.total(TRAINER, task(0, theta=np.full(6, 5.0)), 2, None)
    assert found.total is None
    assert "all replies among them" in found.note


def test_who_cafed_leaves_out_is_left_out_of_its_limit() -> None:
    scenario = Scenario(rounds=30, methods=("cafed",), population=Testbed(size=60))
    run = scenario.simulation()
    run.advance(30)
    rule = run._methods["cafed"].intermittent
    assert rule is not None
    assert rule.counted is not None
    out = rule.counted == 0.0
    assert 0 < out.sum() < run.federation.population.enrolled_size
    limit = run.limits["cafed"].given_enrolled
    enrolled = run.federation.population.enrolled
    assert limit[enrolled & out].mean() < limit[enrolled & ~out].mean()
    assert (limit[~enrolled] == 0.0).all()


@pytest.mark.parametrize("name", ["fedawe", "f3ast", "cafed"])
def test_negative_enrollment_weights_are_refused(name: str) -> None:
    weights = np.array([-0.1, 0.4, 0.2, 0.25, 0.25])
    settings = getattr(RuleSettings(), name)
    with pytest.raises(InputError, match=f"{name} needs enrollment weights that are not negative"):
        settings.rule(EVERYONE, weights, START)


def test_losses_of_clients_are_those_of_the_objective() -> None:
    scenario = Scenario(population=Testbed(size=20, rows=3, rows_max=9))
    run = scenario.simulation(limits=False)
    theta, who = np.random.default_rng(1).normal(size=6), np.array([7, 2, 19])
    target = scenario.objective(run.federation)
    np.testing.assert_allclose(run.trainer.losses(theta), target.client_losses(theta), rtol=1e-12)
    np.testing.assert_allclose(
        run.trainer.losses(theta, who), target.client_losses(theta)[who], rtol=1e-12
    )
