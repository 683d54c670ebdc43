"""Two-phase variances against every outcome of small designs and against refitted derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

import numpy as np
import pytest
from scipy.optimize import root
from scipy.special import expit

from fedipw.calibration import Distance, Entropy, InverseLogit, Linear, Logit, Quadratic
from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    GregMean,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    MeanEstimator,
)
from fedipw.evaluation.phases import (
    CalibratedEnrollment,
    EnrollmentPhase,
    FittedEnrollment,
    KnownEnrollment,
    StepPhase,
)
from fedipw.evaluation.quantiles import population_quantiles
from fedipw.evaluation.sample import TwoPhase
from fedipw.evaluation.statistics import Contrast, Difference, Ratio
from fedipw.numerics import BoolArray, CodeArray, FloatArray, IntArray
from fedipw.selection.logistic import LogisticFit, logistic_fit
from fedipw.tables.partitions import NOBODY, Block, Blocks, Frame
from fedipw.weighting.balance import Balance


@dataclass(frozen=True, kw_only=True, eq=False)
class Given(TwoPhase):
    """A sample whose correlations between rounds are known instead of estimated."""

    known: tuple[float, ...] = ()

    @cached_property
    def correlations(self) -> tuple[float, ...]:
        return self.known


@dataclass(frozen=True)
class Design:
    """A tiny population: each client enrolls with pi and replies in rounds by a joint law.

    The law is Bahadur's: the product of the rounds' own probabilities times one plus the sum over
    pairs of rho z z, z the standardised replies. Its pairs have the correlations of (E25).
    """

    y: FloatArray  # (N, R)
    pi: FloatArray  # (N,)
    p: FloatArray  # (N, R)
    rho: tuple[float, ...] = ()  # by lag

    def patterns(self, i: int) -> Iterator[tuple[BoolArray, float]]:
        """Who replies when, given enrollment, and how likely it is."""
        p = self.p[i]
        for pattern in product([True, False], repeat=len(p)):
            a = np.array(pattern)
            z = (a - p) / np.sqrt(p * (1 - p)) if self.rho else np.zeros(len(p))
            pairs = combinations(range(len(p)), 2)
            tied = sum(self.rho[s - r - 1] * z[r] * z[s] for r, s in pairs) if self.rho else 0.0
            prob = float(np.where(a, p, 1 - p).prod() * (1.0 + tied))
            assert prob >= 0.0
            yield a, prob

    def outcomes(self) -> Iterator[tuple[list[BoolArray | None], float]]:
        """Replies of every client, none for those not enrolled, and the probability of it all."""
        states: list[list[tuple[BoolArray | None, float]]] = [
            [(None, 1 - pi), *((a, pi * q) for a, q in self.patterns(i))]
            for i, pi in enumerate(self.pi)
        ]
        for chosen in product(*states):
            yield [a for a, _ in chosen], float(np.prod([q for _, q in chosen]))

    def sample(self, replies: list[BoolArray | None]) -> tuple[TwoPhase, FloatArray] | None:
        """The two-phase sample of an outcome and its values, none without a reply."""
        kept = [(i, a) for i, a in enumerate(replies) if a is not None]
        inside = [i for i, _ in kept]
        rows = [(k, i, r) for k, (i, a) in enumerate(kept) for r in np.flatnonzero(a)]
        if not rows:
            return None
        code, i, r = np.array(rows).T
        made = Given(
            client=code, round=r, prob=self.p[i, r], rounds=self.p.shape[1],
            enrollment=KnownEnrollment(weights=1 / self.pi[inside], population_size=len(self.pi)),
            known=self.rho,
        )  # fmt: skip
        return made, self.y[i, r]


def drawn_design(seed: int, size: int, rounds: int, rho: tuple[float, ...] = ()) -> Design:
    rng = np.random.default_rng(seed)
    return Design(
        y=rng.normal(1.0, 2.0, size=(size, rounds)),
        pi=rng.uniform(0.2, 0.9, size=size),
        p=rng.uniform(0.4, 0.7, size=(size, rounds)),
        rho=rho,
    )


@pytest.mark.parametrize(
    "design",
    [
        drawn_design(1, 5, 1),
        drawn_design(2, 4, 2),
        drawn_design(3, 4, 2, rho=(0.3,)),
        drawn_design(4, 3, 3, rho=(0.3, 0.15)),
    ],
    ids=["one round", "independent rounds", "related rounds", "two lags"],
)
def test_over_every_outcome_the_estimate_and_its_variance_are_unbiased(design: Design) -> None:
    everyone = Group(size=len(design.pi))
    mean = second = variance = total = 0.0
    for replies, prob in design.outcomes():
        total += prob
        found = design.sample(replies)
        if found is None:  # an empty sum
            continue
        sample, values = found
        linear = HorvitzThompsonMean().linear(sample, values, everyone)
        mean += prob * linear.estimate
        second += prob * linear.estimate**2
        variance += prob * float(sample.variance(linear.values[:, None]).variance[0])
    assert total == pytest.approx(1.0, abs=1e-12)
    assert mean == pytest.approx(design.y.mean(), rel=1e-12)
    assert variance == pytest.approx(second - mean**2, rel=1e-12)


@pytest.mark.parametrize("rho", [(), (0.3, 0.15)], ids=["independent", "related"])
def test_the_chance_of_participation_is_unbiased_for_a_clients_own_variance(
    rho: tuple[float, ...],
) -> None:
    design = drawn_design(5, 1, 3, rho)
    mean = second = chance = 0.0
    for a, prob in design.patterns(0):
        found = design.sample([a])
        if found is not None:
            own = found[1][:, None]
            t = float(found[0].totals(own)[0, 0])
            mean, second = mean + prob * t, second + prob * t**2
            chance += prob * float(found[0].chance(own)[0, 0])
    assert mean == pytest.approx(design.y.mean(), rel=1e-12)
    assert chance == pytest.approx(second - mean**2, rel=1e-12)


def test_one_round_has_no_correlations_to_estimate() -> None:
    phase = KnownEnrollment(weights=np.full(3, 2.0))
    client = np.arange(3)
    sample = TwoPhase(
        client=client, round=0 * client, prob=np.full(3, 0.5), rounds=1, enrollment=phase
    )
    assert sample.correlations == ()


def test_leverage_makes_the_first_sum_that_of_means_without_each_client() -> None:
    # without fits and with sure replies, dividing by 1 - h is leaving out: mean - mean_(i) exactly
    rng = np.random.default_rng(9)
    y, kappa = rng.normal(size=12), rng.uniform(1.5, 9.0, size=12)
    client = np.arange(12)
    sample = TwoPhase(
        client=client, round=0 * client, prob=np.ones(12), rounds=1,
        enrollment=KnownEnrollment(weights=kappa),
    )  # fmt: skip
    linear = HajekMean().linear(sample, y, Group())
    got = sample.variance(linear.values[:, None], linear.leverage[:, None])
    without = np.array([np.average(np.delete(y, i), weights=np.delete(kappa, i)) for i in client])
    squares = (without - linear.estimate) ** 2
    assert got.variance[0] == pytest.approx(((1 - 1 / kappa) * squares).sum(), rel=1e-12)
    assert got.freedom[0] == pytest.approx(squares.sum() ** 2 / (squares**2).sum(), rel=1e-12)


def subgroups(design: Design) -> Contrast:
    inside = np.arange(len(design.pi)) < 2
    return Contrast(
        Group(name="a", inside=inside, size=2.0),
        Group(name="b", inside=~inside, size=len(design.pi) - 2.0),
    )


def rounds(design: Design) -> Contrast:
    sides = [Group(name=f"{r}", size=float(len(design.pi)), rounds=np.array([r])) for r in (0, 1)]
    return Contrast(*sides)


@pytest.mark.parametrize(
    ("design", "kind"),
    [(drawn_design(2, 4, 2), "subgroups"), (drawn_design(3, 4, 2, rho=(0.3,)), "rounds")],
    ids=["of subgroups", "of rounds, whose replies are related"],
)
def test_over_every_outcome_a_difference_and_its_variance_are_unbiased(
    design: Design, kind: str
) -> None:
    sides = {"subgroups": subgroups, "rounds": rounds}[kind](design)
    truth = design.y[:2].mean() - design.y[2:].mean()
    if kind == "rounds":
        truth = design.y[:, 0].mean() - design.y[:, 1].mean()
    mean = second = variance = apart = 0.0
    for replies, prob in design.outcomes():
        found = design.sample(replies)
        if found is None:
            continue
        sample, y = found
        enrolled = np.array([a is not None for a in replies])
        here = Contrast(*(_of_enrolled(side, enrolled) for side in sides))
        # sides without a reply add 0 to a Horvitz–Thompson sum: taken apart, not refused
        one, two = (HorvitzThompsonMean().linear(sample, y, side) for side in here)
        difference, u = one.estimate - two.estimate, one.values - two.values
        if all((side.flags(sample) > 0).any() and _clients(sample, side) > 1 for side in here):
            made = Difference.between(HorvitzThompsonMean(), [here])
            got = made.linear(sample, y, here.both())
            assert got.estimate == difference
            np.testing.assert_array_equal(got.values, u)
        mean += prob * difference
        second += prob * difference**2
        variance += prob * _variance(sample, u)
        apart += prob * (_variance(sample, one.values) + _variance(sample, two.values))
    assert mean == pytest.approx(truth, rel=1e-12)
    assert variance == pytest.approx(second - mean**2, rel=1e-12)
    if kind == "rounds":  # the clients are the same ones: variances of both sides do not add up
        assert abs(apart / variance - 1) > 0.02


def _of_enrolled(side: Group, enrolled: np.ndarray) -> Group:
    inside = None if side.inside is None else side.inside[enrolled]
    return Group(name=side.name, inside=inside, size=side.size, rounds=side.rounds)


def _clients(sample: TwoPhase, side: Group) -> int:
    return len(np.unique(sample.client[side.flags(sample) > 0]))


def _variance(sample: TwoPhase, u: FloatArray) -> float:
    return float(sample.variance(u[:, None]).variance[0])


def test_over_every_outcome_quantiles_are_those_of_the_definition() -> None:
    design = drawn_design(7, 6, 1)
    y = np.array([[1.0], [1.0], [2.0], [5.0], [5.0], [9.0]])
    seen = set()
    for replies, _ in design.outcomes():
        found = design.sample(replies)
        if found is None:
            continue
        sample, _ = found
        own = y[[i for i, a in enumerate(replies) if a is not None], 0][sample.client]
        for p in (0.1, 0.5, 0.75):
            (line,) = population_quantiles(sample, own, [p])
            shares = {v: sample.weights[own <= v].sum() / sample.weights.sum() for v in set(own)}
            assert line.estimate == min(v for v, share in shares.items() if share >= p - 1e-12)
            assert line.low <= line.estimate <= line.high or line.reason
            seen.add(line.estimate)
    assert seen == {1.0, 2.0, 5.0, 9.0}


# Linearisation. Let row i of every table count w_i times: in the fit or calibration of enrollment,
# in the fits of the steps, and in the weighted sums of the mean. The derivative of the mean in w_i
# at 1, everything fitted anew, is client i's influence: kappa t - c'g less what estimating
# enrollment takes. `influence` takes s off the enrolled; a fitted model takes (1 - pi) s, and from
# those not enrolled -pi s, which (E23) and (E24) account for: pi s is added back here.


@dataclass
class World:
    """A population, enrollment, and three rounds of availability, invitation and reply."""

    steps: int
    shift: float = 0.0  # of the first target from the population's mean
    l2: float = 0.0  # of every logistic fit
    size: int = 90
    rounds: int = 3
    Z: FloatArray = field(init=False)
    enrolled: BoolArray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(10)
        self.Z = rng.normal(size=(self.size, 2))
        self.target = self.Z.mean(axis=0) + np.array([self.shift, 0.0])
        self.enrolled = rng.random(self.size) < expit(0.3 + 0.8 * self.Z[:, 0])
        self.ids = np.flatnonzero(self.enrolled)
        self.row_client = np.tile(self.ids, self.rounds)
        self.row_round = np.repeat(np.arange(self.rounds), len(self.ids))
        rows = len(self.row_client)
        self.X = np.column_stack([self.Z[self.row_client], rng.normal(size=rows)])
        there = rng.random(rows) < expit(1.0 + 0.5 * self.X[:, 0])
        self.available = there if self.steps == 2 else np.ones(rows, dtype=bool)
        self.invite = rng.uniform(0.5, 0.9, rows) if self.steps == 2 else np.ones(rows)
        self.invited = self.available & (rng.random(rows) < self.invite)
        self.replied = self.invited & (rng.random(rows) < expit(0.4 - self.X[:, 2]))
        self.y = rng.normal(1.0 + self.X[:, 0] + self.X[:, 2], 1.0)

    @property
    def replies(self) -> tuple[IntArray, FloatArray]:
        """Rows and values of the replies."""
        rows = np.flatnonzero(self.replied)
        return rows, self.y[rows]

    def step_tables(self) -> list[tuple[FloatArray, BoolArray, BoolArray]]:
        """Columns, who could pass and who did, of each fitted step."""
        reply = (self.X, self.invited, self.replied)
        first = (self.X[:, :2], np.ones(len(self.X), dtype=bool), self.available)
        return [first, reply] if self.steps == 2 else [reply]

    def mean(self, weights: FloatArray, enrollment: Enrollment, kind: str) -> float:
        """The mean with these row weights of clients, (N,), everything estimated anew."""
        prob = self.invite.copy()
        for X, among, passed in self.step_tables():
            own = weights[self.row_client] * among
            prob *= expit(with_constant(X) @ logistic(X, passed, own, self.l2))
        rows, y = self.replies
        who = self.row_client[rows]
        kappa = np.zeros(self.size)
        kappa[self.ids] = enrollment(self, weights)
        w = weights[who] * kappa[who] / (self.rounds * prob[rows])
        if kind == "horvitz-thompson":
            return float(w @ y) / self.size
        if kind == "hajek":
            return float(w @ y / w.sum())
        B = with_constant(self.Z[who] - self.target)
        slope = np.linalg.solve((w[:, None] * B).T @ B, B.T @ (w * y))
        return float(slope[-1])

    def sample(self, phase: EnrollmentPhase) -> TwoPhase:
        code, rows = np.cumsum(self.enrolled) - 1, np.flatnonzero(self.replied)
        steps = []
        for X, among, passed in self.step_tables():
            found = framed_fit(X[among], passed[among], self.l2, self.row_client[among])
            places = np.cumsum(among)[rows] - 1
            steps.append(StepPhase.of(*found, codes=code, replies=places, n=len(self.ids)))
        prob = self.invite[rows] * np.prod([step.reply_prob for step in steps], axis=0)
        return TwoPhase(
            client=code[self.row_client[rows]], round=self.row_round[rows], prob=prob,
            rounds=self.rounds, enrollment=phase, steps=tuple(steps),
        )  # fmt: skip

    def estimators(self) -> list[MeanEstimator]:
        greg = GregMean(self.Z[self.enrolled], self.target)
        return [HorvitzThompsonMean(), HajekMean(), greg]


Enrollment = Callable[[World, FloatArray], FloatArray]


def with_constant(X: FloatArray) -> FloatArray:
    return np.column_stack([X, np.ones(len(X))])


def logistic(X: FloatArray, y: BoolArray, weights: FloatArray, l2: float) -> FloatArray:
    """Coefficients by plain Newton, constant last, with a ridge penalty in the columns' units."""
    design, beta = with_constant(X), np.zeros(X.shape[1] + 1)
    penalty = l2 * np.append(np.ones(X.shape[1]), 0.0)
    for _ in range(12):
        p = expit(design @ beta)
        beta += np.linalg.solve(
            (design.T * (weights * p * (1 - p))) @ design + np.diag(penalty),
            design.T @ (weights * (y - p)) - penalty * beta,
        )
    return beta


def framed_fit(
    X: FloatArray, y: BoolArray, l2: float, clients: CodeArray = NOBODY
) -> tuple[Blocks, Frame, LogisticFit]:
    """Rows in a frame that is far from the columns' own units, and the fit on them."""
    frame = Frame(np.linspace(-1.0, 2.0, X.shape[1]), np.linspace(0.3, 4.0, X.shape[1]))
    made = Block(frame.standard(X.T.copy()), y.astype(np.int8), np.empty(0), clients=clients)
    rows, names = Blocks.of([made]), [f"x{j}" for j in range(X.shape[1])]
    return rows, frame, logistic_fit(rows, names, frame=frame, l2=l2).checked()


def fitted_weights(world: World, weights: FloatArray) -> FloatArray:
    beta = logistic(world.Z, world.enrolled, weights, world.l2)
    return np.asarray(1 / expit(with_constant(world.Z[world.enrolled]) @ beta))


def fitted_phase(world: World) -> FittedEnrollment:
    columns = np.ascontiguousarray(world.Z[world.enrolled].T)
    return FittedEnrollment.of(*framed_fit(world.Z, world.enrolled, world.l2), columns)


STEPS = pytest.mark.parametrize("steps", [1, 2], ids=["one step", "three steps"])
RIDGE = pytest.mark.parametrize("l2", [0.0, 8.0], ids=["likelihood", "ridge"])


@STEPS
@RIDGE
def test_influences_equal_derivatives_with_a_fitted_model_of_enrollment(
    steps: int, l2: float
) -> None:
    world = World(steps, l2=l2)
    phase = fitted_phase(world)
    sample, step = world.sample(phase), 1e-4 * np.eye(world.size)
    for estimator in world.estimators():
        linear = estimator.linear(sample, world.replies[1], Group(size=world.size))
        start = world.mean(np.ones(world.size), fitted_weights, estimator.name)
        assert linear.estimate == pytest.approx(start, rel=1e-10)
        means = [
            [world.mean(1 + sign * move, fitted_weights, estimator.name) for sign in (1, -1)]
            for move in step
        ]
        slopes = np.subtract(*np.array(means).T) / 2e-4
        u = linear.values[:, None]
        s = phase.explained(sample.totals(u))[:, 0]
        own = sample.influence(u)[:, 0] + phase.prob * s
        np.testing.assert_allclose(
            own, slopes[world.enrolled], rtol=1e-5, atol=1e-6 * np.abs(slopes).max()
        )
        wide = sample.variance(u).superpopulation  # squares of all N, the others' among them
        assert wide is not None
        assert wide[0] == pytest.approx(((slopes - slopes.mean()) ** 2).sum(), rel=1e-6)


def test_influences_of_a_ratio_are_its_derivatives_with_both_stages_fitted_anew() -> None:
    world = World(2)
    phase = fitted_phase(world)
    sample, rows = world.sample(phase), world.replies[0]
    over, under = world.y.copy(), np.exp(0.3 * world.X[:, 2])

    def ratio(weights: FloatArray) -> float:
        sums = []
        for world.y in (over, under):
            sums.append(world.mean(weights, fitted_weights, "horvitz-thompson"))
        return sums[0] / sums[1]

    linear = Ratio(under[rows]).linear(sample, over[rows], Group())
    assert linear.estimate == pytest.approx(ratio(np.ones(world.size)), rel=1e-10)
    chosen = world.ids[::4]
    steps = [1e-4 * (np.arange(world.size) == i) for i in chosen]
    slopes = [(ratio(1 + step) - ratio(1 - step)) / 2e-4 for step in steps]
    u = linear.values[:, None]
    own = sample.influence(u)[:, 0] + phase.prob * phase.explained(sample.totals(u))[:, 0]
    at = np.searchsorted(world.ids, chosen)
    np.testing.assert_allclose(own[at], slopes, rtol=1e-5, atol=1e-6 * np.abs(slopes).max())


def calibrated_weights(distance: Distance | InverseLogit) -> Enrollment:
    """Solve sum w F(lambda'b) b = total by a general solver, apart from the library's."""

    def solved(world: World, weights: FloatArray) -> FloatArray:
        b = with_constant(world.Z[world.enrolled] - world.target)
        own, n = weights[world.enrolled], len(b)
        total = world.size if isinstance(distance, InverseLogit) else n
        goal = np.append(np.zeros(b.shape[1] - 1), total)

        def miss(at: FloatArray) -> FloatArray:
            return np.asarray(b.T @ (own * distance.ratio(b @ at)) - goal)

        found = root(miss, np.zeros(3), tol=1e-13)
        assert np.abs(found.fun).max() < 1e-9
        return np.asarray(distance.ratio(b @ found.x) * (world.size / total))

    return solved


DISTANCES: dict[str, Distance | InverseLogit] = {
    "quadratic": Quadratic(), "linear": Linear(), "entropy": Entropy(),
    "logit": Logit(0.2, 4.0), "inverse-logit": InverseLogit(),
}  # fmt: skip


@STEPS
@pytest.mark.parametrize(("name", "l2"), [*((name, 0.0) for name in DISTANCES), ("entropy", 8.0)])
def test_influences_equal_derivatives_with_calibrated_enrollment(
    name: str, l2: float, steps: int
) -> None:
    distance = DISTANCES[name]
    world = World(steps, shift=-0.9 if name == "quadratic" else 0.0, l2=l2)
    balance = Balance(
        names=("a", "b"), matrix=world.Z, enrolled=world.enrolled, mean=world.target,
        population_size=world.size,
    )  # fmt: skip
    phase, again = CalibratedEnrollment.of(balance, distance), calibrated_weights(distance)
    np.testing.assert_allclose(phase.weights, again(world, np.ones(world.size)), rtol=1e-8)
    assert (phase.weights == 0.0).any() == (name == "quadratic")
    sample = world.sample(phase)
    for estimator in world.estimators():
        linear = estimator.linear(sample, world.replies[1], Group(size=world.size))
        own = sample.influence(linear.values[:, None])[:, 0]
        slopes = []
        for i in world.ids[::3]:
            move = 1e-4 * (np.arange(world.size) == i)
            up, down = (world.mean(1 + d, again, estimator.name) for d in (move, -move))
            slopes.append((up - down) / 2e-4)
        scale = np.abs(own).max()
        np.testing.assert_allclose(own[::3], slopes, rtol=1e-5, atol=2e-6 * scale)


PHASE = KnownEnrollment(weights=np.full(3, 2.0))
GOOD = {"client": [0, 1], "round": [0, 0], "prob": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"client": [0, 3]}, "coded 0 to 2"),
        ({"client": [-1, 0]}, "coded 0 to 2"),
        ({"round": [0, 1]}, "coded 0 to 0"),
        ({"client": [1, 1]}, "two replies in one round"),
        ({"prob": [0.5, 0.0]}, "participation_prob must lie"),
        ({"prob": [0.5]}, "prob has 1 rows"),
        ({"client": [], "round": [], "prob": []}, "no reply"),
    ],
)
def test_samples_that_cannot_be_are_refused(changed: dict[str, list[float]], message: str) -> None:
    given = GOOD | changed
    client, index = (np.array(given[name], dtype=np.int64) for name in ("client", "round"))
    with pytest.raises(InputError, match=message):
        TwoPhase(
            client=client, round=index, prob=np.array(given["prob"]), rounds=1, enrollment=PHASE
        )


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_enrollment_weights_from_outside_are_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(InputError, match="finite and not negative"):
        KnownEnrollment(weights=np.array([2.0, weight]))
