"""Augmented aggregation (O20): its equation, and what it is right for, by enumeration."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import comb

import numpy as np
import pytest

from fedipw.combining.regression import RegressionSums, UpdateRegression
from fedipw.errors import InputError
from fedipw.numerics import FloatArray, IntArray
from fedipw.selection.participation import Source
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.weighting.balance import Balance
from fedipw.weighting.methods import method_named
from fedipw.weighting.pipeline import Regression, Weighing
from fedipw.weighting.weigher import ClientNumbers, EnrollmentState, Replies, RoundWeights

# Sums of at most a thousand terms of order one.
EXACT = 1e-11
P = 4  # parameters of the model


def replies_of(ids: IntArray) -> Replies:
    """Return replies of these clients, certain in both stages."""
    sure = np.ones(len(ids))
    return Replies(
        index=1, unit_ids=ids, rows=ids, enrollment_prob=sure, participation_prob=sure,
        sample_counts=sure.astype(int), source=Source.KNOWN, invite_prob=sure,
    )  # fmt: skip


def given_weights(
    weights: FloatArray,
    raw: FloatArray | None = None,
    guarded: float = 20.0,
    *,
    within: FloatArray | None = None,
    reliance: float = 1.0,
    ids: IntArray | None = None,
) -> RoundWeights:
    return RoundWeights(
        replies=replies_of(np.arange(len(weights)) if ids is None else ids),
        weights=weights,
        raw=weights if raw is None else raw,
        within=np.ones(len(weights)) if within is None else within,
        reliance=reliance,
        clients=ClientNumbers(enrolled=60.0, effective=0.7 * guarded, guarded=guarded),
    )


ENROLLED = np.array([0.8, -0.3, 0.4, 0.2, -0.5])  # mean of the columns over the enrolled


def sums_of(updates: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Return what gives weighted sums of these updates for rows of weights."""

    def sums(rows: FloatArray) -> FloatArray:
        out: FloatArray = rows @ updates
        return out

    return sums


# The equation.


def plain_run(
    rounds: Sequence[tuple[RoundWeights, FloatArray, FloatArray]], settings: Regression, main: int
) -> list[FloatArray]:
    """Return the step of each round, (O20) client by client.

    The constant has no ridge; the others have one that grows with few clients and few replies,
    squares and products more of it. Clients that have not replied yet do not count.
    The step is by guarded weights, what is learnt by those before normalisation and guard, none
    above 8 times what a round has weighed so far, 5 equal shares in the smallest rounds.
    """
    q = rounds[0][1].shape[1]
    A, C, replies, rounds_ = np.zeros((q + 1, q + 1)), np.zeros((q + 1, P)), 0.0, 0.0
    steps, seen = [], set[int]()
    for given, columns, updates in rounds:
        used = 0
        if replies >= settings.per_moment * q:
            used = q
        elif replies >= settings.per_moment * main:
            used = main
        step = np.zeros(P)
        for v, update in zip(given.weights, updates, strict=True):
            step += v * update
        if used:
            penalised = A[: used + 1, : used + 1].copy()
            assert given.clients is not None
            n = given.clients.guarded * len(seen) / given.clients.enrolled
            for j in range(1, used + 1):
                rho = (settings.few_clients / n) ** 2 + settings.few_replies * used / replies
                if j > main:
                    rho += settings.few_products * used / n
                penalised[j, j] += rho * A[0, 0]
            beta = np.linalg.inv(penalised) @ C[: used + 1]
            apart = np.zeros(used + 1)
            apart[0] = 1.0
            apart[1:] = (1.0 - given.reliance) * ENROLLED[:used]
            for v, row in zip(given.weights, columns, strict=True):
                apart -= v * np.array([1.0, *row[:used]])
            step += apart @ beta
        steps.append(step)
        m = len(columns)
        most = max(settings.largest, 5.0 / m) * A[0, 0] / rounds_ if rounds_ else np.inf
        A, C, replies = settings.decay * A, settings.decay * C, settings.decay * replies
        for raw, row, update in zip(given.raw, columns, updates, strict=True):
            b, u = np.array([1.0, *row]), min(raw, most)
            A += u * np.outer(b, b)
            C += u * np.outer(b, update)
        replies, rounds_ = replies + m, settings.decay * rounds_ + 1.0
        seen |= set(given.replies.unit_ids.tolist())
    return steps


def drawn_rounds(seed: int, count: int) -> list[tuple[RoundWeights, FloatArray, FloatArray]]:
    rng, out = np.random.default_rng(seed), []
    for _ in range(count):
        m = int(rng.integers(4, 12))
        raw, columns = rng.exponential(1.0, m), 0.5 + rng.standard_normal((m, 5))
        tempered = np.sqrt(raw)
        given = given_weights(
            tempered / tempered.sum(),
            raw,
            float(rng.uniform(20.0, 80.0)),
            within=rng.exponential(1.0, m),
            reliance=float(rng.uniform(0.0, 1.0)),
            ids=rng.choice(40, m, replace=False),
        )
        updates = np.sin(columns[:, :P]) + columns @ np.ones((5, P)) + rng.standard_normal((m, P))
        out.append((given, columns, updates))
    return out


@pytest.mark.parametrize(
    "settings",
    [
        Regression(),
        Regression(decay=0.8, few_clients=9.0, few_replies=0.7, few_products=5.0, per_moment=4.0),
        Regression(largest=0.4, per_moment=4.0),  # which bounds some
    ],
)
def test_a_run_is_the_equation_round_by_round(settings: Regression) -> None:
    rounds = drawn_rounds(0, 30)
    rule, seen = UpdateRegression(P, moments=5, main=2, settings=settings), []
    for (given, columns, updates), expected in zip(
        rounds, plain_run(rounds, settings, 2), strict=True
    ):
        seen.append(rule.used)
        step = rule.step(given, columns, ENROLLED, sums_of(updates))
        # 6 x 6 systems with a ridge, conditions below 1e3
        np.testing.assert_allclose(step, expected, rtol=0.0, atol=1e-11)
    assert seen[0] == 0
    assert {0, 3, 6} <= set(seen) <= {0, 1, 3, 6}  # first the covariates, then the rest
    assert seen == sorted(seen)


def test_products_and_clients_that_did_not_reply_change_a_run() -> None:
    """So that the test above could fail: the same rounds without that part of the ridge."""
    rounds, last = drawn_rounds(0, 30), []
    for settings in (Regression(), Regression(few_products=0.0)):
        rule = UpdateRegression(P, moments=5, main=2, settings=settings)
        for given, columns, updates in rounds:
            step = rule.step(given, columns, ENROLLED, sums_of(updates))
        last.append(step)
    everybody = UpdateRegression(P, moments=5, main=2, settings=Regression())
    for given, columns, updates in rounds:
        clients = ClientNumbers(40.0, 28.0, 40.0)
        step = everybody.step(replace(given, clients=clients), columns, ENROLLED, sums_of(updates))
    last.append(step)
    assert np.abs(last[0] - last[1]).max() > 0.01
    assert np.abs(last[0] - last[2]).max() > 0.01


def test_parameters_in_pieces_are_all_at_once() -> None:
    whole, parts = (UpdateRegression(P, moments=5, settings=Regression()) for _ in range(2))
    for given, columns, updates in drawn_rounds(1, 20):
        step = whole.step(given, columns, ENROLLED, sums_of(updates))
        here = parts.round(given, columns, ENROLLED)
        pieces = []
        for piece in (slice(0, 1), slice(1, 3), slice(3, P)):
            part = updates[:, piece]
            pieces.append(given.weights @ part + here.correction(piece))
            here.learn(piece, here.weights @ part)
        here.close()
        np.testing.assert_allclose(np.concatenate(pieces), step, rtol=0.0, atol=1e-12)


def test_a_rounds_own_updates_do_not_enter_its_correction() -> None:
    rule = UpdateRegression(P, moments=5, settings=Regression())
    *before, (given, columns, updates) = drawn_rounds(2, 16)
    for g, b, u in before:
        rule.step(g, b, ENROLLED, sums_of(u))
    state = rule.state()
    corrections = []
    for factor in (0.0, 1.0, -100.0):
        rule.restore(state)
        step = rule.step(given, columns, ENROLLED, sums_of(factor * updates))
        corrections.append(step - given.weights @ (factor * updates))
    assert np.abs(corrections[0]).max() > 0.1
    np.testing.assert_allclose(corrections[1:], [corrections[0]] * 2, rtol=0.0, atol=1e-10)


def test_the_state_goes_through_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rounds = drawn_rounds(3, 12)
    one, two = (UpdateRegression(P, moments=5, main=2, settings=Regression()) for _ in range(2))
    for given, columns, updates in rounds[:8]:
        one.step(given, columns, ENROLLED, sums_of(updates))
    save_checkpoint(tmp_path, one.state(), "settings")
    state = load_checkpoint(tmp_path, "settings")
    assert state is not None
    two.restore(state)
    for given, columns, updates in rounds[8:]:
        left, right = (rule.step(given, columns, ENROLLED, sums_of(updates)) for rule in (one, two))
        assert left.tobytes() == right.tobytes()


def test_other_moments_keep_what_was_learnt_of_those_before() -> None:
    """Columns reordered: the same steps. A new one: nothing changes until it is learnt of."""
    rounds = drawn_rounds(4, 14)
    rule = UpdateRegression(P, moments=5, settings=Regression(few_clients=11.0, few_replies=0.0))
    for given, columns, updates in rounds[:-1]:
        rule.step(given, columns, ENROLLED, sums_of(updates))
    given, columns, updates = rounds[-1]
    order = [3, 0, 4, 1, 2]
    turned, wider, narrower = (
        rule.over(order, 5),
        rule.over([*range(5), None], 6),
        rule.over([2, 0], 2),
    )
    expected = rule.round(given, columns, ENROLLED).correction(slice(None))
    found = turned.round(given, columns[:, order], ENROLLED[order]).correction(slice(None))
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-11)
    more = np.column_stack([columns, np.full(len(columns), 7.0)])
    found = wider.round(given, more, np.append(ENROLLED, 0.0)).correction(slice(None))
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-11)
    state = rule.state()
    kept = [0, 3, 1]
    np.testing.assert_array_equal(narrower.state()["cross"], state["cross"][kept])
    np.testing.assert_array_equal(narrower.state()["gram"], state["gram"][np.ix_(kept, kept)])
    assert narrower.used == 3
    step = wider.step(given, more, np.append(ENROLLED, 0.0), sums_of(updates))
    assert np.isfinite(step).all()
    assert wider.state()["gram"][6, 6] == pytest.approx(49.0 * given.raw.sum(), rel=1e-12)


def test_bad_settings_are_refused() -> None:
    for decay in (0.0, 1.0, float("nan")):
        with pytest.raises(InputError, match="decay must lie between 0 and 1"):
            Regression(decay=decay)


# What it is right for: a population of ten, every outcome of a round.

N = 10
RNG = np.random.default_rng(11)
B = RNG.standard_normal((N, 2))
B -= B.mean(axis=0)  # the population's means are zero
PI = RNG.uniform(0.2, 0.9, N)
LINEAR = np.column_stack([np.ones(N), B]) @ RNG.standard_normal((3, P))
CURVED = LINEAR + 2.0 * np.sin(3.0 * B[:, :1]) + RNG.standard_normal((N, P))
BETA = 3.0 * RNG.standard_normal((3, P))  # of no relation to anything
HT = "base=true-inclusion, normalisation=horvitz-thompson, augmentation=regression"
HAJEK = "base=true-inclusion, normalisation=hajek, augmentation=regression"


def weighing_of(name: str, prob: FloatArray, b: FloatArray) -> Weighing:
    """Return a method whose probabilities of enrollment are these; everybody can be in a round."""
    n = len(prob)
    balance = Balance(
        names=("b0", "b1"), matrix=b, enrolled=np.ones(n, dtype=bool), mean=np.zeros(2),
        population_size=float(n),
    )  # fmt: skip
    state = EnrollmentState(
        unit_ids=np.arange(n), sample_counts=np.ones(n, dtype=np.int64),
        enrolled=np.ones(n, dtype=bool), prob=prob, population_size=float(n),
        balances={"wide": balance},
    )  # fmt: skip
    return method_named(name).at(state)


def fixed(beta: FloatArray) -> UpdateRegression:
    """Return a regression that has learnt these coefficients, (3, P), from a gram matrix."""
    rule = UpdateRegression(P, moments=2, settings=Regression(few_clients=0.0, few_replies=0.0))
    root = np.array([[2.0, 0.3, 0.1], [0.0, 1.5, -0.4], [0.0, 0.0, 1.2]])
    gram = 1000.0 * root.T @ root
    saved = rule.state() | {"gram": gram, "cross": gram @ beta, "sizes": [1e6, 100.0, 100.0]}
    rule.restore(saved)
    return rule


def outcomes(pi: FloatArray) -> Iterator[tuple[float, IntArray]]:
    """Return every set of replies with its probability."""
    for present in product([True, False], repeat=len(pi)):
        yield float(np.where(present, pi, 1.0 - pi).prod()), np.flatnonzero(present)


def round_step(
    rule: UpdateRegression, weighing: Weighing, rows: IntArray, b: FloatArray, updates: FloatArray
) -> FloatArray:
    """Return (O20) of a round without learning from it."""
    if not len(rows):  # nothing to weigh: the regression alone
        nothing = RegressionSums(mean=np.zeros(3), gram=np.zeros((3, 3)), replies=0)
        numbers = ClientNumbers(float(N), float(N), float(N))
        return rule.opened(nothing, numbers, np.zeros(2)).correction(slice(None))
    replies = weighing.state.replies(1, rows, np.ones(len(rows)), Source.KNOWN)
    given = weighing.weighed(replies)
    here = rule.round(given, b[rows], np.zeros(2))
    step: FloatArray = given.weights @ updates[rows] + here.correction(slice(None))
    return step


def expectation(rule: UpdateRegression, prob: FloatArray, updates: FloatArray) -> FloatArray:
    """Return the mean step over all rounds, drawn by PI and weighed by ``prob``."""
    weighing, mean = weighing_of(HT, prob, B), np.zeros(P)
    for chance, rows in outcomes(PI):
        mean += chance * round_step(rule, weighing, rows, B, updates)
    return mean


@pytest.mark.parametrize("beta", [np.zeros((3, P)), BETA, -7.0 * BETA], ids=["0", "b", "-7b"])
def test_with_true_probabilities_it_is_unbiased_whatever_the_coefficients(
    beta: FloatArray,
) -> None:
    found = expectation(fixed(beta), PI, CURVED)
    np.testing.assert_allclose(found, CURVED.mean(axis=0), rtol=0.0, atol=EXACT)


def test_with_wrong_probabilities_the_coefficients_matter() -> None:
    """So that the test above could fail."""
    wrong = PI**2
    apart = expectation(fixed(BETA), wrong, CURVED) - CURVED.mean(axis=0)
    assert np.abs(apart).max() > 0.1
    assert (
        np.abs(apart - (expectation(fixed(-BETA), wrong, CURVED) - CURVED.mean(axis=0))).max() > 1
    )


def learnt(updates: FloatArray, prob: FloatArray, name: str = HT) -> UpdateRegression:
    """Return a regression after twelve rounds of these updates, weighed by these probabilities."""
    rng, weighing = np.random.default_rng(5), weighing_of(name, prob, B)
    settings = Regression(few_clients=0.0, few_replies=0.0, per_moment=3.0)
    rule = UpdateRegression(P, moments=2, settings=settings)
    for index in range(1, 13):
        rows = np.flatnonzero(rng.random(N) < PI)
        replies = weighing.state.replies(index, rows, np.ones(len(rows)), Source.KNOWN)
        rule.step(weighing.weighed(replies), B[rows], np.zeros(2), sums_of(updates[rows]))
    assert rule.used == 3
    return rule


@pytest.mark.parametrize("name", [HT, HAJEK, f"{HAJEK}, guard=temper(0.5) then cap"])
def test_wrong_probabilities_with_a_right_regression_give_the_mean_in_every_round(
    name: str,
) -> None:
    wrong = np.clip(PI[::-1] ** 2, 0.05, 1.0)
    rule, weighing = learnt(LINEAR, wrong, name), weighing_of(name, wrong, B)
    plain = []
    for _, rows in outcomes(PI):
        step = round_step(rule, weighing, rows, B, LINEAR)
        # coefficients are exact up to a condition of about 100
        np.testing.assert_allclose(step, LINEAR.mean(axis=0), rtol=0.0, atol=1e-10)
        if len(rows):
            replies = weighing.state.replies(1, rows, np.ones(len(rows)), Source.KNOWN)
            plain.append(weighing.weighed(replies).weights @ LINEAR[rows])
    assert np.abs(np.array(plain) - LINEAR.mean(axis=0)).max() > 0.5  # the weights alone


def test_right_probabilities_with_a_wrong_regression_are_unbiased() -> None:
    """What was learnt is wrong, of curved updates and by wrong weights, and it does not matter."""
    rule = learnt(CURVED, np.clip(PI[::-1], 0.05, 1.0))
    found = expectation(rule, PI, CURVED)
    np.testing.assert_allclose(found, CURVED.mean(axis=0), rtol=0.0, atol=EXACT)


def test_a_right_regression_leaves_the_variance_of_the_residuals() -> None:
    """With true probabilities: Horvitz–Thompson's variance of updates less their prediction."""
    beta: FloatArray = np.linalg.lstsq(np.column_stack([np.ones(N), B]), CURVED)[0].astype(float)
    residuals = CURVED - np.column_stack([np.ones(N), B]) @ beta
    weighing, rule = weighing_of(HT, PI, B), fixed(beta)
    steps = [(chance, round_step(rule, weighing, rows, B, CURVED)) for chance, rows in outcomes(PI)]
    found = sum(chance * (step - CURVED.mean(axis=0)) ** 2 for chance, step in steps)
    expected = (((1.0 - PI) / PI)[:, None] * residuals**2).sum(axis=0) / N**2
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    plain = (((1.0 - PI) / PI)[:, None] * CURVED**2).sum(axis=0) / N**2
    assert (expected < plain).all()


# Hájek: consistent as the population grows, exact expectations over copies of three clients.

KINDS = 3
KIND_B = np.array([[-1.0, 0.5], [0.2, -1.0], [0.8, 0.5]])
KIND_PI = np.array([0.3, 0.6, 0.8])
KIND_UPDATES = np.random.default_rng(2).standard_normal((KINDS, P))


def hajek_error(copies: int, beta: FloatArray, prob: FloatArray) -> float:
    """Return the bias of (O20) with Hájek's weights, over rounds with at least one reply.

    A round is how many of each kind replied: copies are alike.
    """
    b, updates = np.repeat(KIND_B, copies, axis=0), np.repeat(KIND_UPDATES, copies, axis=0)
    weighing, rule = weighing_of(HAJEK, np.repeat(prob, copies), b), fixed(beta)
    binomial = [
        [comb(copies, k) * p**k * (1.0 - p) ** (copies - k) for k in range(copies + 1)]
        for p in KIND_PI
    ]
    mean, mass = np.zeros(P), 0.0
    for counts in product(range(copies + 1), repeat=KINDS):
        if any(counts):
            chance = float(np.prod([binomial[i][k] for i, k in enumerate(counts)]))
            rows = np.concatenate([i * copies + np.arange(k) for i, k in enumerate(counts)])
            mean += chance * round_step(rule, weighing, rows, b, updates)
            mass += chance
    return float(np.abs(mean / mass - KIND_UPDATES.mean(axis=0)).max())


def test_hajek_augmented_is_consistent() -> None:
    assert KIND_B.mean(axis=0) == pytest.approx([0.0, 0.0], abs=1e-15)
    errors = [hajek_error(copies, BETA, KIND_PI) for copies in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 8.0
    # the bias of a ratio falls as one over the population
    np.testing.assert_allclose(errors[-2] / errors[-1], 2.0, rtol=0.1)
    # with wrong probabilities and wrong coefficients it does not
    stays = [hajek_error(copies, BETA, KIND_PI[::-1]) for copies in (4, 8)]
    assert min(stays) > 10.0 * errors[-1]
    np.testing.assert_allclose(stays[0] / stays[1], 1.0, rtol=0.2)
