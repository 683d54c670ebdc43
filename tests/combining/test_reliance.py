"""Reliance on enrollment weights (O21) and on the regression (O24): equations, ends, weights."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedipw.combining.regression import UpdateRegression
from fedipw.combining.reliance import reliance_on_enrollment, reliance_on_regression
from fedipw.errors import InputError
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Testbed
from fedipw.numerics import FloatArray
from fedipw.selection.participation import Source
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.weighting.methods import method_named
from fedipw.weighting.pipeline import Regression
from fedipw.weighting.weigher import ClientNumbers, EnrollmentState, Replies, RoundWeights

P, Q, MAIN = 4, 3, 2
SETTINGS = Regression(adaptive=True, decay=0.9, per_moment=4.0)
NUMBERS = ClientNumbers(enrolled=160.0, effective=110.0, guarded=120.0)
ENROLLED = np.array([0.4, -0.2, 0.1])
Drawn = tuple[RoundWeights, FloatArray, FloatArray]


def drawn_rounds(seed: int, count: int, slope: float) -> list[Drawn]:
    """Return rounds whose updates follow the columns as strongly as ``slope`` says."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(count):
        m = int(rng.integers(8, 16))
        b = 0.5 + rng.standard_normal((m, Q))
        within = rng.uniform(0.5, 2.0, m)
        raw = within * np.exp(-0.4 * b[:, 0])
        updates = slope * b @ np.ones((Q, P)) + rng.standard_normal((m, P))
        ids, sure = rng.choice(140, m, replace=False), np.ones(m)
        replies = Replies(
            index=1, unit_ids=ids, rows=ids, enrollment_prob=sure, participation_prob=sure,
            sample_counts=sure.astype(int), source=Source.KNOWN, invite_prob=sure,
        )  # fmt: skip
        given = RoundWeights(
            replies=replies, weights=raw / raw.sum(), raw=raw, within=within, clients=NUMBERS
        )
        out.append((given, b, updates))
    return out


@dataclass
class Plain:
    """The sums of some rounds, reply by reply, and what (O21) and (O24) make of them."""

    A: FloatArray
    C: FloatArray
    plain: FloatArray
    mass: float
    squares: float
    replies: float
    share: float  # of the enrolled that replied

    @classmethod
    def of(cls, rounds: list[Drawn], g: float) -> "Plain":
        A, C = np.zeros((Q + 1, Q + 1)), np.zeros((Q + 1, P))
        plain, mass, squares, replies = np.zeros(P), 0.0, 0.0, 0.0
        seen: set[int] = set()
        for given, columns, updates in rounds:
            A, C, plain = g * A, g * C, g * plain
            mass, squares, replies = g * mass, g * squares, g * replies + len(columns)
            seen |= set(given.replies.unit_ids.tolist())
            for u, w, row, update in zip(given.raw, given.within, columns, updates, strict=True):
                b = np.array([1.0, *row])
                A += u * np.outer(b, b)
                C += u * np.outer(b, update)
                plain += w * update
                mass += w
                squares += u * float(update @ update)
        return cls(A, C, plain, mass, squares, replies, len(seen) / NUMBERS.enrolled)

    def penalised(self, settings: Regression) -> FloatArray:
        n = NUMBERS.guarded * self.share
        rho = (settings.few_clients / n) ** 2 + settings.few_replies * Q / self.replies
        slopes = [rho + (settings.few_products * Q / n if j >= MAIN else 0.0) for j in range(Q)]
        out: FloatArray = self.A + self.A[0, 0] * np.diag([0.0, *slopes])
        return out

    def residual(self, settings: Regression) -> float:
        """Return s^2 from the sums, all columns in use."""
        inverse, left = np.linalg.inv(self.penalised(settings)), self.squares
        beta = inverse @ self.C
        for p in range(P):
            left -= float(2.0 * beta[:, p] @ self.C[:, p] - beta[:, p] @ self.A @ beta[:, p])
        freedom = 1.0 - np.trace(inverse @ self.A) / (self.share * NUMBERS.effective)
        return float(left / self.A[0, 0] / max(float(freedom), 0.2))

    def reliance(self, settings: Regression) -> float:
        """Return (O21)."""
        change = self.C[0] / self.A[0, 0] - self.plain / self.mass
        n, D = self.share * NUMBERS.effective, self.share * NUMBERS.enrolled
        noise = self.residual(settings) * (1.0 / n - 1.0 / D)
        least = min(1.0, 10.0 / n)
        return float(least + (1.0 - least) * min(1.0, max(0.0, change @ change / noise - 1.0)))

    def correction(
        self, given: RoundWeights, b: FloatArray, settings: Regression
    ) -> tuple[float, FloatArray]:
        """Return (O24) of the next round, and its correction before that."""
        apart = np.append(1.0, (1.0 - given.reliance) * ENROLLED)
        for v, row in zip(given.weights, b, strict=True):
            apart = apart - v * np.array([1.0, *row])
        a = np.linalg.inv(self.penalised(settings)) @ apart
        whole: FloatArray = self.C.T @ a
        n, noise = self.share * NUMBERS.effective, 0.0
        for j in range(Q + 1):
            for k in range(Q + 1):
                noise += a[j] * self.A[j, k] * a[k]
        noise *= self.residual(settings) * self.A[0, 0] / n
        least = min(1.0, 50.0 / n)
        times = float(whole @ whole) / noise
        kept = least + (1.0 - least) * min(1.0, max(0.0, (times - 4.0) / 4.0))
        return kept, whole


def step(rule: UpdateRegression, one: Drawn) -> FloatArray:
    given, columns, updates = one
    squares = np.sum(updates**2, axis=1)
    return rule.step(given, columns, ENROLLED, lambda rows: rows @ updates, squares)


@pytest.mark.parametrize("slope", [0.0, 0.1, 0.3, 2.0])
def test_a_run_is_the_equation(slope: float) -> None:
    rounds = drawn_rounds(1, 30, slope)
    rule, found = UpdateRegression(P, moments=Q, main=MAIN, settings=SETTINGS), []
    for k, one in enumerate(rounds):
        whole, (given, columns, updates) = rule.used == Q + 1, one
        made = step(rule, one)
        # 4 x 4 systems with a ridge; sums of some hundred terms of order one
        if whole:
            kappa, added = Plain.of(rounds[:k], SETTINGS.decay).correction(given, columns, SETTINGS)
            expected = given.weights @ updates + kappa * added
            np.testing.assert_allclose(made, expected, rtol=0.0, atol=1e-9)
        if rule.used == Q + 1:
            found.append(rule.reliance)
            sums = Plain.of(rounds[: k + 1], SETTINGS.decay)
            assert rule.reliance == pytest.approx(sums.reliance(SETTINGS), abs=1e-9)
    assert len(found) > 20
    if slope == 2.0:
        assert found[-1] == 1.0
    if slope == 0.0:
        assert found[-1] < 0.6


def test_some_of_these_runs_rely_in_part() -> None:
    """So that both equations are tried between their ends."""
    lambdas, kappas = [], []
    for slope in (0.1, 0.2, 0.3):
        rounds = drawn_rounds(1, 30, slope)
        for k in range(15, 30):
            sums, (given, columns, _) = Plain.of(rounds[:k], SETTINGS.decay), rounds[k]
            lambdas.append(sums.reliance(SETTINGS))
            kappas.append(sums.correction(given, columns, SETTINGS)[0])
    for values in (np.array(lambdas), np.array(kappas)):
        assert np.sum((values > 0.6) & (values < 0.95)) > 3


def test_pieces_in_any_order_give_the_same_reliance() -> None:
    whole, parts = (UpdateRegression(P, moments=Q, settings=SETTINGS) for _ in range(2))
    for one in drawn_rounds(2, 15, 0.2):
        given, columns, updates = one
        step(whole, one)
        here = parts.round(given, columns, ENROLLED)
        for piece in (slice(3, P), slice(0, 1), slice(1, 3)):
            here.learn(piece, here.weights @ updates[:, piece])
        here.close(np.sum(updates**2, axis=1))
        assert parts.reliance == pytest.approx(whole.reliance, abs=1e-12)


def test_other_moments_keep_what_is_known_of_the_fit() -> None:
    """Columns in another order: the same correction, shrunk as much."""
    *before, (given, columns, _) = drawn_rounds(2, 20, 0.1)
    rule = UpdateRegression(P, moments=Q, settings=SETTINGS)
    for one in before:
        step(rule, one)
    order = [2, 0, 1]
    turned = rule.over(order, Q)
    expected = rule.round(given, columns, ENROLLED).correction(slice(None))
    found = turned.round(given, columns[:, order], ENROLLED[order]).correction(slice(None))
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-11)
    unknown = rule.state()
    del unknown["fit"]
    turned.restore(unknown)
    whole = turned.round(given, columns, ENROLLED).correction(slice(None))
    assert np.abs(whole).max() > 1.05 * np.abs(expected).max()


def test_the_state_goes_through_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rounds = drawn_rounds(3, 12, 0.2)
    one, two = (UpdateRegression(P, moments=Q, settings=SETTINGS) for _ in range(2))
    for drawn in rounds[:8]:
        step(one, drawn)
    save_checkpoint(tmp_path, one.state(), "settings")
    state = load_checkpoint(tmp_path, "settings")
    assert state is not None
    two.restore(state)
    for drawn in rounds[8:]:
        assert step(one, drawn).tobytes() == step(two, drawn).tobytes()
        assert one.reliance == two.reliance


def test_the_ends_of_reliance() -> None:
    assert reliance_on_enrollment(0.0, 0.0, 100.0) == 1.0  # no noise, nothing to lose
    assert reliance_on_enrollment(0.0, 1.0, 5.0) == 1.0  # too few clients to show anything
    assert reliance_on_enrollment(0.0, 1.0, 1000.0) == pytest.approx(0.01)
    assert reliance_on_enrollment(2.0, 1.0, 1000.0) == 1.0


def test_the_ends_of_reliance_on_a_regression() -> None:
    assert reliance_on_regression(1.0, 0.0, 1000.0) == 1.0  # no noise, nothing to lose
    assert reliance_on_regression(1e-9, 1.0, 50.0) == 1.0  # too few clients to show anything
    assert reliance_on_regression(0.0, 1.0, 1000.0) == pytest.approx(0.05)
    assert reliance_on_regression(4.0, 1.0, 1000.0) == pytest.approx(0.05)
    assert reliance_on_regression(7.0, 1.0, 1000.0) == pytest.approx(0.05 + 0.95 * 0.75)
    assert reliance_on_regression(8.0, 1.0, 1000.0) == 1.0


def test_what_cannot_be_relied_on_in_part_is_refused() -> None:
    with pytest.raises(InputError, match="nothing corrects enrollment"):
        method_named("participation-only-hajek, augmentation=adaptive-regression")
    with pytest.raises(InputError, match="either sign"):
        method_named("calibrated-linear-hajek, augmentation=adaptive-regression")
    rule = UpdateRegression(P, moments=Q, settings=SETTINGS)
    given, columns, updates = drawn_rounds(4, 1, 0.0)[0]
    with pytest.raises(InputError, match="squared norms"):
        rule.step(given, columns, ENROLLED, lambda rows: rows @ updates)


@pytest.mark.parametrize("base", ["fedipw-hajek", "augmented, guard=none", "augmented"])
def test_weights_go_from_participation_alone_to_enrollment_weights_whole(base: str) -> None:
    """With reliance 0 they are those of the enrolled, with 1 those of the method."""
    scenario = Scenario(rounds=3, population=Testbed(size=300), methods=("fedipw",))
    run = scenario.simulation(limits=False)
    stages = scenario.stages(run.federation)
    people = run.federation.population
    state = EnrollmentState(
        unit_ids=people.unit_ids, sample_counts=np.ones(300, dtype=np.int64),
        enrolled=people.enrolled, prob=stages.enrollment_prob, population_size=300.0,
        balances={kind: stages.balance(kind) for kind in ("rich", "wide")},
    )  # fmt: skip
    method = method_named(base)
    rows = np.flatnonzero(people.enrolled)[:40]
    pi = np.linspace(0.1, 0.9, 40)
    weighing, replies = method.at(state), state.replies(1, rows, pi, Source.KNOWN)
    none, half, whole = (weighing.weighed(replies, at) for at in (0.0, 0.5, 1.0))
    alone = method_named("participation-only-hajek").at(state).weighed(replies).weights
    bound = method.guard.applied(alone)
    np.testing.assert_allclose(none.weights, alone if bound is None else bound.weights, rtol=1e-12)
    np.testing.assert_allclose(whole.weights, weighing.weighed(replies).weights, rtol=0.0)
    if base != "augmented":  # the cap is not a power
        middle = np.sqrt(none.weights * whole.weights)
        np.testing.assert_allclose(half.weights, middle / middle.sum(), rtol=1e-12)
    assert np.abs(none.weights - whole.weights).max() > 1e-3
