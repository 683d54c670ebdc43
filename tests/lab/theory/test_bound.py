"""The corrected bound on random problems, its lemmas, and where the printed one fails."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import (
    ConvexTriple,
    CurvedPair,
    FederatedLogistic,
    ProblemConstants,
    Schedule,
    TwoClients,
    UnequalPair,
    convergence_bound,
    logistic_constants,
    printed_bound,
    recommended_schedule,
    step_limit,
    target_weights,
)
from fedipw.lab.theory.bound import SMALL_DRIFT, SMALL_ERROR


@dataclass(frozen=True)
class Quadratics:
    """Clients 1/2 (theta - c)' A (theta - c) with eigenvalues of A between 0 and L."""

    A: np.ndarray  # (N, d, d)
    c: np.ndarray  # (N, d)

    def gradients(self, theta: np.ndarray) -> np.ndarray:
        """Each client's gradient at its own point: (..., N, d) to (..., N, d)."""
        out: np.ndarray = np.einsum("nij,...nj->...ni", self.A, theta - self.c)
        return out

    def loss(self, theta: np.ndarray) -> np.ndarray:
        gap = theta[..., None, :] - self.c
        each: np.ndarray = 0.5 * np.einsum("...ni,nij,...nj->...n", gap, self.A, gap)
        return np.asarray(each.mean(axis=-1))

    @property
    def best(self) -> np.ndarray:
        rhs = np.einsum("nij,nj->i", self.A, self.c)
        return np.linalg.solve(self.A.sum(axis=0), rhs)

    def constants(self, least_prob: float, noise: float) -> ProblemConstants:
        at = self.gradients(np.broadcast_to(self.best, self.c.shape))
        return ProblemConstants(
            smoothness=float(np.linalg.eigvalsh(self.A).max()),
            strong_convexity=float(np.linalg.eigvalsh(self.A.mean(axis=0)).min()),
            heterogeneity=float(np.sqrt(2 * (at**2).sum(axis=1).mean())),
            growth=float(np.sqrt(2.0)),
            noise=noise,
            population_size=len(self.c),
            least_prob=least_prob,
        )


def quadratics(rng: np.random.Generator) -> Quadratics:
    N, d = int(rng.integers(3, 30)), int(rng.integers(1, 5))
    roots = np.linalg.qr(rng.normal(size=(N, d, d)))[0]
    values = rng.uniform(0.2, 1.0, (N, d)) * rng.uniform(0.5, 5.0)
    A = np.einsum("nij,nj,nkj->nik", roots, values, roots)
    return Quadratics(A=A, c=rng.normal(size=(N, d)) * rng.uniform(0.1, 3.0))


def trained_excess(
    gradients: object,
    loss: object,
    start: np.ndarray,
    schedule: Schedule,
    prob: np.ndarray,
    ratio: np.ndarray,
    noise: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Run FedIPW as the theorem states it, 40 times side by side; returns final losses."""
    assert callable(gradients)
    assert callable(loss)
    reps, N, d = 40, len(prob), len(start)
    theta = np.tile(start, (reps, 1))
    for _ in range(schedule.rounds):
        y = np.repeat(theta[:, None, :], N, axis=1)
        for _ in range(schedule.local_steps):
            fuzz = rng.normal(size=(reps, N, d)) * noise / np.sqrt(d)
            y = y - schedule.step_size * (gradients(y) + fuzz)
        weight = (rng.random((reps, N)) < prob) * ratio / prob / N
        moved = np.einsum("rn,rnd->rd", weight, y - theta[:, None, :])
        theta = theta + schedule.server_step * moved
    final: np.ndarray = loss(theta)
    return final


def drawn_error(rng: np.random.Generator, problem: ProblemConstants) -> float:
    """A weight error within the theorem's conditions."""
    largest = np.sqrt(SMALL_ERROR / problem.condition) / problem.growth
    return float(min(0.5, largest) * rng.uniform(0.0, 1.0))


def drawn_schedule(rng: np.random.Generator, problem: ProblemConstants, inside: bool) -> Schedule:
    """Steps at up to the limit of steps, and at up to the drift condition's where asked."""
    gamma, K = float(rng.uniform(1.0, 2.0)), int(rng.integers(1, 21))
    step = step_limit(problem) * rng.uniform(0.3, 1.0)
    if inside:
        limit = gamma * np.sqrt(SMALL_DRIFT / problem.condition) / problem.growth
        step = min(step, limit / problem.smoothness)
    return Schedule(local_steps=K, step_size=step / (K * gamma), rounds=25, server_step=gamma)


@pytest.mark.parametrize("inside", [True, False], ids=["drift-condition", "convex-only"])
@pytest.mark.parametrize("block", range(6))
def test_the_corrected_bound_holds_on_random_quadratics(block: int, inside: bool) -> None:
    """12 blocks of 15 problems: convex clients, K from 1 to 20, with and without noise.

    Outside the drift condition nothing is proved; these well-conditioned clients (kappa below 25)
    stay below the number all the same.
    """
    rng = np.random.default_rng([block, inside])
    for case in range(15):
        federation = quadratics(rng)
        N, d = federation.c.shape
        prob = rng.uniform(0.1, 1.0, (N,))
        noise = float(rng.uniform(0.1, 2.0)) if case % 2 else 0.0
        eps = drawn_error(rng, federation.constants(1.0, noise))
        ratio = 1.0 + eps * rng.choice([-1.0, 1.0], (N,))
        least = float(np.minimum(prob, prob / ratio).min())  # of true and used probabilities
        problem = federation.constants(least, noise)
        schedule = drawn_schedule(rng, problem, inside)
        start = federation.best + rng.normal(size=d) * rng.uniform(0.0, 3.0)
        lowest = float(federation.loss(federation.best))
        final = trained_excess(
            federation.gradients, federation.loss, start, schedule, prob, ratio, noise, rng
        )
        bound = convergence_bound(
            problem,
            schedule,
            initial_gap=float(federation.loss(start)) - lowest,
            weight_error=eps,
        )
        assert all(c.holds for c in bound.conditions[:-1]), bound.statement
        assert bound.holds == bound.conditions[-1].holds
        assert bound.holds or not inside
        assert final.mean() - lowest <= bound.total


@pytest.mark.parametrize("block", range(4))
def test_the_corrected_bound_holds_on_random_logistic_problems(block: int) -> None:
    """4 blocks of 10 federations drawn from the testbed, exact constants, noise-free gradients."""
    rng = np.random.default_rng(100 + block)
    for _ in range(10):
        bed = Testbed(size=int(rng.integers(5, 30)), rows=8, features=int(rng.integers(1, 4)))
        clients = bed.draw(rng).clients
        N, l2 = clients.size, float(rng.uniform(0.05, 0.5))
        target = FederatedLogistic(clients, l2, target_weights(clients))
        prob = rng.uniform(0.2, 1.0, N)
        problem = logistic_constants(target, float(prob.min()))
        schedule = drawn_schedule(rng, problem, inside=bool(rng.integers(2)))
        eps = drawn_error(rng, problem)
        ratio = 1.0 - eps * rng.random(N)  # used probabilities above the true ones
        X = np.concatenate([clients.features, np.ones((len(clients.labels), 1))], axis=1).reshape(
            N, 8, -1
        )
        labels = clients.labels.reshape(N, 8)

        def gradients(
            y: np.ndarray, X: np.ndarray = X, labels: np.ndarray = labels, l2: float = l2
        ) -> np.ndarray:
            residual = 1 / (1 + np.exp(-np.einsum("nij,rnj->rni", X, y))) - labels
            out: np.ndarray = np.einsum("rni,nij->rnj", residual, X) / 8 + l2 * y
            return out

        start = rng.normal(size=clients.n_parameters)
        final = trained_excess(gradients, target.losses, start, schedule, prob, ratio, 0.0, rng)
        best = target.minimum().value
        bound = convergence_bound(
            problem,
            schedule,
            initial_gap=float(target.losses(start)[0]) - best,
            weight_error=eps,
        )
        assert all(c.holds for c in bound.conditions[:-1]), bound.statement
        assert final.mean() - best <= bound.total


@given(eps=st.floats(0.0, 0.5), mu=st.floats(1e-3, 1e3), a=st.floats(1e-3, 1e3))
def test_two_clients_meet_the_floor_with_equality(eps: float, mu: float, a: float) -> None:
    pair = TwoClients(strong_convexity=mu, distance=a)
    expected = 0.5 * eps**2 * pair.heterogeneity**2 / mu
    scale = mu * a**2
    assert abs(pair.suboptimality(eps) - expected) <= 1e-12 * scale


def test_two_clients_refuse_other_errors() -> None:
    with pytest.raises(InputError, match=r"eps_w must lie in \[0, 1/2\]"):
        TwoClients().minimiser(0.6)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), K=st.integers(1, 20), share=st.floats(0.01, 1.0))
def test_local_drift_lemma(seed: int, K: int, share: float) -> None:
    """|y_k - x|^2 <= 16 eta^2 (k^2 |grad f_i(x)|^2 + k sigma^2) under eta L K <= 1/4.

    Moments of the noisy path are exact: for a quadratic in one dimension they are a recursion.
    """
    rng = np.random.default_rng(seed)
    curvature, gradient, sigma = rng.uniform(-3.0, 3.0), rng.normal(), rng.uniform(0.0, 2.0)
    eta = share / (4.0 * abs(curvature) * K)
    mean, variance = 0.0, 0.0
    for k in range(1, K + 1):
        mean = mean - eta * (gradient + curvature * mean)
        variance = (1.0 - eta * curvature) ** 2 * variance + eta**2 * sigma**2
        limit = 16.0 * eta**2 * (k**2 * gradient**2 + k * sigma**2)
        assert mean**2 + variance <= limit * (1 + 1e-9)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), K=st.integers(1, 20), eps=st.floats(0.0, 0.5))
def test_bias_lemma(seed: int, K: int, eps: float) -> None:
    """|b|^2 <= 2 eps^2 (G^2 + 2 L B^2 h + L^2 E) on noise-free local paths."""
    rng = np.random.default_rng(seed)
    federation = quadratics(rng)
    problem = federation.constants(1.0, 0.0)
    x = federation.best + rng.normal(size=federation.c.shape[1])
    eta = rng.uniform(0.01, 0.25) / (problem.smoothness * K)
    ratio = 1.0 + eps * rng.uniform(-1.0, 1.0, len(federation.c))
    y = np.tile(x, (len(federation.c), 1))
    bias, drift = np.zeros(len(x)), 0.0
    for _ in range(K):
        gradients = federation.gradients(y)
        bias += ((ratio - 1.0)[:, None] * gradients).mean(axis=0) / K
        drift += ((y - x) ** 2).sum(axis=1).mean() / K
        y = y - eta * gradients
    h = float(federation.loss(x) - federation.loss(federation.best))
    L, B2 = problem.smoothness, problem.growth**2
    limit = 2 * eps**2 * (problem.heterogeneity**2 + 2 * L * B2 * h + L**2 * drift)
    assert bias @ bias <= limit * (1 + 1e-9)


def test_the_printed_bound_fails_where_clients_are_not_convex() -> None:
    """All constants of the printed theorem hold, its bound goes to 0, and training diverges."""
    L, mu, N = 50.0, 1.0, 20_000
    problem = ProblemConstants(
        smoothness=L,
        strong_convexity=mu,
        heterogeneity=0.0,
        growth=float(np.sqrt((L**2 + (L - 2 * mu) ** 2) / (2 * L * mu))),  # exact
        population_size=N,
        least_prob=1.0,
    )
    step = 1.0 / (9.0 * L)
    assert step <= step_limit(problem)
    pair = CurvedPair(smoothness=L, strong_convexity=mu)
    assert pair.growth(local_steps=10, effective_step=step) > 1.002
    schedule = Schedule(local_steps=10, step_size=step / 10, rounds=100_000)
    printed = printed_bound(problem, schedule, initial_gap=1.0, weight_error=0.0, constant=1e6)
    assert printed < 1e-6
    corrected = convergence_bound(problem, schedule, initial_gap=1.0, weight_error=0.0)
    assert not corrected.holds
    assert corrected.statement.startswith("outside the theorem: drift (eta~ L)^2 kappa B^2")


def flat_triple(mu: float = 1e-5) -> tuple[ConvexTriple, ProblemConstants]:
    """The convex clients of the counter-example, in equal shares of a large population."""
    problem = ProblemConstants(
        smoothness=1.0 + mu,
        strong_convexity=mu,
        heterogeneity=0.0,
        population_size=3e12,
        least_prob=1.0,
    )
    return ConvexTriple(strong_convexity=mu), problem


def test_the_convex_triple_has_the_constants_it_claims() -> None:
    triple, problem = flat_triple()
    m = triple.strong_convexity
    b = np.sqrt(m)
    two = [[b**2 / (4 * m), -b / 2], [-b / 2, m]]
    np.testing.assert_allclose(triple.curvatures, [[[1, b], [b, m]], two, two], rtol=1e-12)
    values = np.linalg.eigvalsh(triple.curvatures)
    assert values.min() > -1e-15  # convex
    np.testing.assert_allclose(values.max(), problem.smoothness, rtol=1e-12)
    mean = triple.curvatures.mean(axis=0)
    np.testing.assert_allclose(mean, np.diag([0.5, m]), atol=1e-15)
    # B = 1: mean |grad f_i|^2 <= 2 L (F - F*), so no eigenvalue of the difference is negative
    squares = (triple.curvatures @ triple.curvatures).mean(axis=0)
    assert np.linalg.eigvalsh(problem.smoothness * mean - squares).min() > -1e-15


def test_convexity_does_not_replace_the_drift_condition() -> None:
    """Only the drift condition fails, and excess loss ends above its start and above the bound.

    200 local steps of 30 rounds, one after the other, from the worst start.
    """
    triple, problem = flat_triple()
    step = step_limit(problem)
    schedule = Schedule(local_steps=200, step_size=step / 200, rounds=30)
    mean = triple.curvatures.mean(axis=0)
    root = np.sqrt(np.diag(mean))
    after = np.linalg.matrix_power(triple.round_map(200, step), 30)
    theta = np.linalg.svd(root[:, None] * after / root)[2][0] / root
    start = 0.5 * theta @ mean @ theta
    for _ in range(schedule.rounds):
        y = np.tile(theta, (3, 1))
        for _ in range(schedule.local_steps):
            y = y - schedule.step_size * np.einsum("ijk,ik->ij", triple.curvatures, y)
        theta = y.mean(axis=0)
    ratio = 0.5 * theta @ mean @ theta / start
    np.testing.assert_allclose(ratio, triple.growth(200, step, 30), rtol=1e-12)
    assert round(ratio, 6) == 1.000275

    bound = convergence_bound(problem, schedule, initial_gap=start, weight_error=0.0)
    assert round(bound.total / start, 6) == 0.999995
    assert ratio * start > bound.total
    assert not bound.holds
    assert [c.holds for c in bound.conditions] == [True, True, True, True, False]
    assert bound.statement == (
        "outside the theorem: drift (eta~ L)^2 kappa B^2 / gamma^2 = 1.56e+03 > 0.00208"
    )


def test_the_convex_triple_is_bounded_inside_the_drift_condition_and_for_one_local_step() -> None:
    triple, problem = flat_triple()
    short = np.sqrt(SMALL_DRIFT / problem.condition) / problem.smoothness
    for local_steps, step in ((200, short), (1, step_limit(problem))):
        for rounds in (1, 30, 200, 300, 10_000):
            schedule = Schedule(
                local_steps=local_steps, step_size=step / local_steps, rounds=rounds
            )
            bound = convergence_bound(problem, schedule, initial_gap=1.0, weight_error=0.0)
            assert bound.holds == (local_steps == 200)
            assert triple.growth(local_steps, step, rounds) <= bound.total


@pytest.mark.parametrize(
    ("mu", "above"),
    [
        (1e-5, [True, True, True, False, False]),
        (5e-5, [True, True, False, False, False]),
        (1e-4, [False, False, False, False, False]),
    ],
)
def test_the_convex_triple_leaves_the_bound_where_it_is_flat(mu: float, above: list[bool]) -> None:
    triple, problem = flat_triple(mu)
    step, found = step_limit(problem), []
    for rounds in (1, 30, 200, 300, 10_000):
        schedule = Schedule(local_steps=200, step_size=step / 200, rounds=rounds)
        bound = convergence_bound(problem, schedule, initial_gap=1.0, weight_error=0.0)
        found.append(triple.growth(200, step, rounds) > bound.total)
    assert found == above


def test_the_printed_bound_fails_for_several_local_steps() -> None:
    """No noise, everyone takes part, exact weights, N without end: the drift stays."""
    pair = UnequalPair(smoothness=10.0, low_curvature=1.0)
    schedule = Schedule(local_steps=5, step_size=0.0004, rounds=10**6)
    problem = ProblemConstants(
        smoothness=10.0,
        strong_convexity=5.5,
        heterogeneity=np.sqrt(2.0),
        growth=np.sqrt(2.0),
        population_size=1e15,
        least_prob=1.0,
    )
    excess = pair.excess(local_steps=5, step_size=0.0004)
    gap = {"initial_gap": 1.0, "weight_error": 0.0}
    assert excess > 1e-6
    assert printed_bound(problem, schedule, **gap, constant=1e6) < excess
    corrected = convergence_bound(problem, schedule, **gap)
    assert corrected.holds
    assert excess <= corrected.total


def test_the_printed_variance_has_the_wrong_units() -> None:
    """Losses times s and steps divided by s: the same path, the excess times s.

    Every term of the corrected bound scales by s; the printed one does not.
    """

    def bounds(s: float) -> tuple[float, float]:
        problem = ProblemConstants(
            smoothness=2.0 * s,
            strong_convexity=s,
            heterogeneity=s,
            noise=0.5 * s,
            population_size=50,
            least_prob=0.5,
        )
        schedule = Schedule(local_steps=2, step_size=0.01 / s, rounds=100_000)
        corrected = convergence_bound(problem, schedule, initial_gap=s, weight_error=0.0)
        printed = printed_bound(problem, schedule, initial_gap=s, weight_error=0.0, constant=60.0)
        return corrected.total, printed

    (corrected, printed), (larger, same) = bounds(1.0), bounds(1e4)
    np.testing.assert_allclose(larger, 1e4 * corrected, rtol=1e-9)
    assert same < 0.9 * 1e4 * printed


def test_a_constant_enrollment_probability_has_a_printed_floor_and_no_bias() -> None:
    clients = Testbed(size=30).draw(np.random.default_rng(0)).clients
    target = FederatedLogistic(clients, 0.05, target_weights(clients))
    best = target.minimum().point
    halved = FederatedLogistic(clients, 0.05, 0.5 * target_weights(clients)).minimum().point
    np.testing.assert_allclose(halved, best, atol=1e-10)


def test_recommended_steps_and_rounds_reach_the_accuracy() -> None:
    problem = ProblemConstants(
        smoothness=2.0,
        strong_convexity=0.5,
        heterogeneity=0.7,
        noise=0.3,
        growth=1.4,
        population_size=500,
        least_prob=0.1,
    )
    for accuracy in (1.0, 0.05):
        advice = recommended_schedule(
            problem, accuracy, initial_gap=3.0, weight_error=0.01, local_steps=4, server_step=1.5
        )
        bound = convergence_bound(problem, advice, initial_gap=3.0, weight_error=0.01)
        assert bound.holds
        assert bound.total <= accuracy
    with pytest.raises(InputError, match=r"below the floor .* no number of rounds"):
        recommended_schedule(problem, 1e-4, initial_gap=3.0, weight_error=0.05)
    assert recommended_schedule(problem, 1.0, initial_gap=0.1).rounds == 0
    with pytest.raises(InputError, match=r"No schedule .* eps_w\^2"):
        recommended_schedule(problem, 50.0, initial_gap=3.0, weight_error=0.4)
    with pytest.raises(InputError, match=r"No schedule .* 1/gamma = 2 > 1"):
        recommended_schedule(problem, 1.0, initial_gap=3.0, server_step=0.5)


def test_each_failed_condition_is_stated() -> None:
    problem = ProblemConstants(
        smoothness=1.0, strong_convexity=0.1, heterogeneity=1.0, population_size=10, least_prob=0.1
    )
    wild = Schedule(local_steps=2, step_size=1.0, rounds=1, server_step=0.5)
    bound = convergence_bound(problem, wild, initial_gap=1.0, weight_error=0.83)
    assert not bound.holds
    failed = ("effective step = 1 >", "1/gamma = 2 > 1", "eps_w = 0.83 > 0.5", "eps_w^2", "drift")
    for words in failed:
        assert words in bound.statement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strong_convexity": 0.0}, "must be strongly convex"),
        ({"strong_convexity": 3.0}, "exceeds L"),
        ({"smoothness": float("inf")}, "smoothness L"),
        ({"least_prob": 0.0}, "p_min must lie in"),
        ({"heterogeneity": float("nan")}, "heterogeneity must be finite"),
        ({"growth": 0.5}, "growth must be finite and at least 1"),
        ({"noise": -1.0}, "noise must be finite"),
        ({"population_size": 0}, "population_size"),
    ],
)
def test_impossible_constants_are_refused(change: dict[str, float], message: str) -> None:
    fine = {
        "smoothness": 2.0,
        "strong_convexity": 1.0,
        "heterogeneity": 1.0,
        "population_size": 10,
        "least_prob": 0.5,
    }
    with pytest.raises(InputError, match=message):
        ProblemConstants(**(fine | change))  # type: ignore[arg-type]


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(InputError, match="K must be at least 1"):
        Schedule(local_steps=0, step_size=0.1, rounds=1)
    with pytest.raises(InputError, match="rounds must be 0 or more"):
        Schedule(local_steps=1, step_size=0.1, rounds=-1)
    problem = ProblemConstants(
        smoothness=1.0, strong_convexity=1.0, heterogeneity=1.0, population_size=10, least_prob=0.5
    )
    fine = Schedule(local_steps=1, step_size=0.1, rounds=1)
    with pytest.raises(InputError, match="initial_gap"):
        convergence_bound(problem, fine, initial_gap=-1.0, weight_error=0.0)
    with pytest.raises(InputError, match="weight_error"):
        convergence_bound(problem, fine, initial_gap=1.0, weight_error=float("nan"))
    for pair in (CurvedPair(smoothness=2.0, strong_convexity=1.0),):
        with pytest.raises(InputError, match="K must be at least 1"):
            pair.growth(local_steps=0, effective_step=0.1)
    with pytest.raises(InputError, match="smoothness must be"):
        CurvedPair(smoothness=0.0, strong_convexity=1.0)
    with pytest.raises(InputError, match="mu must be at most 1/2"):
        ConvexTriple(strong_convexity=0.6)
    with pytest.raises(InputError, match="K must be at least 1"):
        ConvexTriple(strong_convexity=0.1).growth(local_steps=0, effective_step=0.1, rounds=1)
    with pytest.raises(InputError, match="low_curvature must be"):
        UnequalPair(smoothness=1.0, low_curvature=-1.0)
    with pytest.raises(InputError, match="K must be at least 1"):
        UnequalPair(smoothness=2.0, low_curvature=1.0).excess(local_steps=0, step_size=0.1)
