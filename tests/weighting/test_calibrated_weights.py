"""Calibrated and GREG weights: closed forms, enumeration, Proposition C, R's trimming."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.calibration import Distance, Entropy, InverseLogit, Linear, Logit, Quadratic
from fedipw.errors import InputError
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import Source
from fedipw.tables.population import Population
from fedipw.weighting.balance import Balance
from fedipw.weighting.functions import clamped
from fedipw.weighting.methods import method_named
from fedipw.weighting.pipeline import (
    Hajek,
    InverseParticipation,
    Method,
    OfEnrolled,
    Weighing,
)
from fedipw.weighting.weigher import EnrollmentState, Replies

REFERENCE = Path(__file__).parents[1] / "reference"
DISTANCES = [Quadratic(), Entropy(), Linear(), Logit(0.05, 8.0), InverseLogit()]
N, ENROLLED, COLUMNS = 12, 6, 2


def small(seed: int = 1) -> Balance:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((N, COLUMNS))
    inside = np.arange(N) < ENROLLED
    mean = 0.75 * matrix[inside].mean(axis=0)  # inside the hull of the enrolled and of the others
    return Balance(names=("a", "b"), matrix=matrix, enrolled=inside, mean=mean, population_size=N)


def state_of(balance: Balance, true_prob: np.ndarray | None = None) -> EnrollmentState:
    """Return enrollment in the clients of a balance map, each with probability one half."""
    count = len(balance.matrix)
    return EnrollmentState(
        unit_ids=np.arange(count),
        sample_counts=np.ones(count, dtype=np.int64),
        enrolled=balance.enrolled,
        prob=np.full(count, 0.5),
        population_size=balance.population_size,
        balances={"main": balance},
        true_prob=true_prob,
    )


def calibrated_by(distance: Distance | InverseLogit, *, hajek: bool = False) -> Method:
    """Return the calibrated method with any distance."""
    plain = Method(name="calibrated", base=InverseParticipation(), calibration=OfEnrolled(distance))
    return replace(plain, normalisation=Hajek()) if hajek else plain


def weighted(q: np.ndarray) -> Weighing:
    """Return the Hájek form of calibrated weights that are given."""
    return Weighing(
        method=calibrated_by(Linear(), hajek=True), state=state_of(small()), enrollment_weights=q
    )


def replies(rows: np.ndarray, prob: np.ndarray) -> Replies:
    return Replies(
        index=1,
        unit_ids=rows,
        rows=rows,
        enrollment_prob=np.full(len(rows), 0.5),
        participation_prob=prob[rows],
        sample_counts=np.ones(len(rows), dtype=np.int64),
        source=Source.KNOWN,
        invite_prob=np.ones(len(rows)),
    )


@pytest.mark.parametrize("distance", DISTANCES, ids=lambda d: type(d).__name__)
def test_proposition_c_holds_exactly_when_updates_are_linear_in_b(
    distance: Distance | InverseLogit,
) -> None:
    """E of the calibrated update over every participation set is the population's mean update."""
    balance, rng = small(), np.random.default_rng(2)
    slope, constant = rng.standard_normal((COLUMNS, 3)), rng.standard_normal(3)
    updates = balance.matrix @ slope + constant
    goal = balance.mean @ slope + constant
    prob = rng.uniform(0.2, 0.9, N)
    scheme = calibrated_by(distance).at(state_of(balance))
    total = np.zeros(3)
    for present in product([True, False], repeat=ENROLLED):
        rows = np.flatnonzero(present)
        if rows.size:
            chance = np.where(present, prob[:ENROLLED], 1 - prob[:ENROLLED]).prod()
            total += chance * scheme.weights(replies(rows, prob)) @ updates[rows]
    np.testing.assert_allclose(total, goal, atol=1e-12)


@pytest.mark.parametrize("distance", DISTANCES, ids=lambda d: type(d).__name__)
def test_what_b_does_not_explain_stays_as_bias(distance: Distance | InverseLogit) -> None:
    """With a term outside b the bias is that term's calibrated mean minus its population mean."""
    rng = np.random.default_rng(3)
    Z = rng.standard_normal(4000)
    inside = rng.random(4000) < 1 / (1 + np.exp(-Z))
    people = Population.of({"unit_id": np.arange(4000), "z": Z, "enrolled": inside})
    matrix = Z[:, None]
    balance = Balance(
        names=("z",),
        matrix=matrix,
        enrolled=inside,
        mean=matrix.mean(axis=0),
        population_size=people.listed,
    )
    q = balance.enrollment_weights(balance.calibration(distance))[inside]
    updates = 2.0 * Z + 0.5 * (Z**2 - 1.0)
    bias = q @ updates[inside] - updates.mean()
    assert np.isclose(bias, 0.5 * (q @ Z[inside] ** 2 - (Z**2).mean()), atol=1e-12)
    uncorrected = updates[inside].mean() - updates.mean()
    assert abs(bias) < 0.35 * abs(uncorrected)
    if isinstance(distance, InverseLogit):  # right model of enrollment: consistent all the same
        assert abs(bias) < 0.06  # six standard errors of this draw


def test_consistency_in_the_population_size() -> None:
    """Linear mean updates plus noise: the error falls as one over the root of N.

    Errors at N = 100 N' are on average a tenth; a ratio above 0.5 over 40 draws has a chance
    below 1e-6.
    """

    def error(size: int, seed: int) -> float:
        rng = np.random.default_rng([size, seed])
        Z = rng.standard_normal((size, 2))
        inside = rng.random(size) < 1 / (1 + np.exp(-Z[:, 0] - 0.5 * Z[:, 1]))
        updates = Z @ [1.0, -2.0] + rng.standard_normal(size)
        balance = Balance(
            names=("a", "b"), matrix=Z, enrolled=inside, mean=Z.mean(axis=0), population_size=size
        )
        q = balance.enrollment_weights(balance.calibration(Quadratic()))[inside]
        return float((q @ updates[inside] - updates.mean()) ** 2)

    small_n, large_n = (np.mean([error(n, s) for s in range(40)]) for n in (200, 20_000))
    assert np.sqrt(large_n / small_n) < 0.5


def test_greg_is_its_formula_and_reproduces_the_means() -> None:
    rng = np.random.default_rng(4)
    m = 30
    matrix = rng.standard_normal((m, 2))
    balance = Balance(
        names=("a", "b"),
        matrix=matrix,
        enrolled=np.ones(m, dtype=bool),
        mean=np.array([0.2, -0.1]),
        population_size=60,
    )
    given = replies(np.arange(m), rng.uniform(0.2, 0.9, m))
    d = 1.0 / (60 * given.inclusion_prob)
    b = np.column_stack([np.ones(m), matrix])
    mu = np.array([1.0, 0.2, -0.1])
    expected = d * (1 + b @ np.linalg.solve((d[:, None] * b).T @ b, mu - d @ b))
    scheme = method_named("greg").at(state_of(balance))
    np.testing.assert_allclose(scheme.weights(given), expected, rtol=1e-12)
    np.testing.assert_allclose(scheme.weights(given) @ b, mu, atol=1e-13)
    found = method_named("greg-nonnegative").at(state_of(balance)).weighed(given)
    assert found.note == ""
    assert found.weights.min() >= 0.0
    np.testing.assert_allclose(found.weights @ b, mu, atol=1e-11)


def test_greg_is_consistent_when_only_the_linear_model_is_right() -> None:
    """Wrong probabilities, updates exactly linear in b: the GREG total is exact."""
    rng = np.random.default_rng(5)
    m = 40
    matrix = rng.standard_normal((m, 2))
    balance = Balance(
        names=("a", "b"),
        matrix=matrix,
        enrolled=np.ones(m, dtype=bool),
        mean=np.array([0.3, 0.1]),
        population_size=80,
    )
    wrong = replies(np.arange(m), rng.uniform(0.05, 1.0, m))
    updates = 1.0 + matrix @ [2.0, -1.0]
    goal = 1.0 + balance.mean @ [2.0, -1.0]
    plain, greg = (method_named(name).at(state_of(balance)) for name in ("fedipw", "greg"))
    assert np.isclose(greg.weights(wrong) @ updates, goal, rtol=1e-12)
    assert abs(plain.weights(wrong) @ updates - goal) > 0.1


def test_small_rounds_are_not_balanced_and_say_so() -> None:
    balance = replace(small(), enrolled=np.ones(N, dtype=bool), population_size=24)
    given, state = replies(np.arange(12), np.full(N, 0.5)), state_of(balance)
    found = method_named("greg").at(state).weighed(given)
    np.testing.assert_array_equal(found.weights, method_named("fedipw").at(state).weights(given))
    assert found.note == "not balanced: 12 replies, 15 needed"
    assert method_named("greg-hajek").at(state).weighed(given).note == found.note


def test_a_nonnegative_round_without_solution_keeps_its_weights() -> None:
    m = 20
    matrix = np.random.default_rng(6).standard_normal((m, 1))
    balance = Balance(
        names=("a",),
        matrix=matrix,
        enrolled=np.ones(m, dtype=bool),
        mean=np.array([9.0]),
        population_size=40,
    )
    given = replies(np.arange(m), np.full(m, 0.5))
    state = state_of(balance)
    found = method_named("greg-nonnegative").at(state).weighed(given)
    np.testing.assert_array_equal(found.weights, method_named("fedipw").at(state).weights(given))
    assert found.note == "not balanced: InfeasibleError"


def test_rounds_in_which_nobody_carries_weight() -> None:
    given = replies(np.arange(3), np.full(N, 0.5))
    assert not weighted(np.zeros(N)).weights(given).any()
    assert weighted(np.zeros(N)).weighed(given).note == "no reply carries weight"


def test_negative_weights_normalise_if_their_sum_is_positive() -> None:
    given = replies(np.arange(3), np.full(N, 1.0))
    q = np.zeros(N)
    q[:3] = [0.5, 0.7, -0.2]
    np.testing.assert_allclose(weighted(q).weights(given), [0.5, 0.7, -0.2])
    with pytest.raises(InputError, match="need a positive sum"):
        weighted(-q).weights(given)


@pytest.mark.parametrize("trim", [None, 2.0])
def test_a_round_without_a_positive_sum_carries_no_weight_and_says_why(trim: float | None) -> None:
    given = replies(np.arange(3), np.full(N, 1.0))
    q = np.zeros(N)
    q[:3] = [-0.5, -0.7, 0.2]
    scheme = weighted(q)
    found = replace(scheme, method=scheme.method.trimmed(trim)).weighed(given)
    assert found.weights.tolist() == [0.0, 0.0, 0.0]
    assert "need a positive sum" in found.note
    assert (found.total, found.effective_replies) == (0.0, 0.0)


@pytest.mark.parametrize("distance", DISTANCES, ids=lambda d: type(d).__name__)
def test_weights_over_enrollment_are_calibrated_in_the_mean(
    distance: Distance | InverseLogit,
) -> None:
    rng = np.random.default_rng(7)
    matrix = rng.standard_normal((500, 2))
    prob = 1 / (1 + np.exp(-0.7 * matrix[:, 0]))
    balance = Balance(
        names=("a", "b"),
        matrix=matrix,
        enrolled=rng.random(500) < prob,
        mean=matrix.mean(axis=0),
        population_size=500,
    )
    q = balance.expected_weights(distance, prob)
    assert np.isclose((prob * q).sum(), 1.0)
    np.testing.assert_allclose((prob * q) @ matrix, balance.mean, atol=1e-12)
    scheme = calibrated_by(distance, hajek=True).at(state_of(balance, prob))
    units = replies(np.arange(500), np.full(500, 0.4))
    given = scheme.over_enrollment().expected_weights(units, 0.4 * prob)
    np.testing.assert_allclose(given, prob * q, rtol=1e-12)
    drawn, inside = balance.enrollment_weights(balance.calibration(distance)), balance.enrolled
    assert scheme.enrollment_weights is not None
    np.testing.assert_array_equal(scheme.enrollment_weights, drawn)
    np.testing.assert_array_equal(scheme.inverse_enrollment(), np.where(inside, drawn, 0.0))


def test_the_rich_map_asks_for_clients_behind_each_moment() -> None:
    def people(size: int) -> Population:
        rng = np.random.default_rng(8)
        columns = {f"z{j}": rng.standard_normal(size) for j in range(3)}
        inside = np.arange(size) % 2 == 0
        return Population.of({"unit_id": np.arange(size), "enrolled": inside, **columns})

    def names(size: int) -> tuple[str, ...]:
        stage = enrollment_stage(people(size))
        return stage.balance("rich", np.ones(stage.members.size, dtype=np.bool_)).names

    assert len(names(450)) == 9  # 225 enrolled, 25 for each moment
    assert names(440)[3:] == ("z0**2", "z1**2", "z2**2")
    assert names(290) == ("z0", "z1", "z2")


def test_methods_that_need_means_say_so() -> None:
    unknown = replace(state_of(small()), balances={})
    for name in ("efficient", "calibrated-entropy"):
        with pytest.raises(InputError, match=f"{name} needs population means"):
            method_named(name).at(unknown)
    with pytest.raises(InputError, match="greg needs population means"):
        method_named("greg").at(unknown).weights(replies(np.arange(3), np.full(N, 0.5)))
    assert method_named("fedipw").at(unknown).enrollment_weights is None


def test_trimming_of_r_survey() -> None:
    frame = pl.read_csv(REFERENCE / "api_apiclus1_trim.csv")
    raked = frame["raked"].to_numpy()
    once = clamped(raked, 25.0, 38.0, strict=False)
    strict = clamped(raked, 25.0, 38.0)
    np.testing.assert_allclose(once.weights, frame["trim_once"].to_numpy(), rtol=1e-12)
    np.testing.assert_allclose(strict.weights, frame["trim_strict"].to_numpy(), rtol=1e-12)
    assert np.isclose(strict.weights.sum(), raked.sum())
    assert strict.changed == int(((raked < 25) | (raked > 38)).sum())
    with pytest.raises(InputError, match="cannot all lie between"):
        clamped(np.array([1.0, 2.0]), 2.0, 3.0)
