"""Calibration as you go and augmented aggregation in the lab: plain loops, trainers, resuming."""

from dataclasses import dataclass, field, replace
from math import exp
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine import Simulation
from fedipw.lab.engine.jaxtrainer import JaxTrainer
from fedipw.lab.mechanisms import DailyParticipation, LogisticEnrollment
from fedipw.lab.scenario import Scenario, TrainingSettings
from fedipw.lab.testbed import Testbed
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from lab.engine.plain_rules import World, start

Vector = np.ndarray
METHODS = ("calibrated-online", "augmented", "augmented-online")
# Few enrolled: calibration on covariates alone, regression on their squares and products.
FEW = Scenario(
    seed=3,
    rounds=14,
    methods=METHODS,
    population=Testbed(size=150, rows=3, rows_max=6),
    training=TrainingSettings(local_steps=2, step_size=0.2),
)
# Strong selection and more enrolled: the rich map, uneven local work, and weights that are capped.
STRONG = Scenario(
    seed=1,
    rounds=10,
    methods=METHODS,
    population=Testbed(size=500, rows=3, rows_max=5),
    enrollment=LogisticEnrollment(strength=2.5),
    participation=DailyParticipation(covariate_coefficient=2.0, rate=0.25),
    training=TrainingSettings(local_steps=3, step_size=0.2, steps_coefficients={"z1": 2.0}),
)


# The methods again, from their equations, one client at a time.


@dataclass
class Map:
    """Balance columns, standardised by hand."""

    raw: Vector  # (N, q)
    mean: Vector  # of the population
    b: Vector  # (N, q) about the mean, over the enrolled clients' distance to it
    main: int = 3


def balance_map(world: World, clients_per_moment: int) -> Map:
    """Return z1, z2, z3, then squares and products, as far as the enrolled allow."""
    z1, z2, z3 = (world.population.frame[name].to_numpy() for name in ("z1", "z2", "z3"))
    columns, room = [z1, z2, z3], len(world.enrolled) // clients_per_moment
    squares, pairs = [z2**2, z3**2], [z1 * z2, z1 * z3, z2 * z3]  # z1 is 1 or -1
    if room >= 8:
        columns += squares + pairs
    elif room >= 5:
        columns += squares
    raw = np.column_stack(columns)
    mean = np.array([sum(column) / len(column) for column in columns])
    scale = [
        (sum((raw[i, j] - mean[j]) ** 2 for i in world.enrolled) / len(world.enrolled)) ** 0.5
        for j in range(len(columns))
    ]
    return Map(raw, mean, (raw - mean) / np.array(scale))


def inverse_logit_weights(world: World, of: Map) -> dict[int, float]:
    """Return q_i = (1 + exp(c'b_i)) / N with sum 1 and the population's means, by Newton."""
    size, inside = world.population.listed, world.enrolled
    rows = np.array([[1.0, *of.b[i]] for i in inside])
    goal = size * np.eye(1, rows.shape[1])[0] - rows.sum(axis=0)  # of those outside
    c = np.zeros(rows.shape[1])
    c[0] = np.log(size / len(inside) - 1.0)
    for _ in range(100):
        odds = np.exp(rows @ c)
        c = c + np.linalg.solve((odds[:, None] * rows).T @ rows, goal - odds @ rows)
    return {i: (1.0 + exp(float(row @ c))) / size for i, row in zip(inside, rows, strict=True)}


def guarded(weights: list[float], power: float | None, share: float) -> list[float]:
    """Return weights tempered (W19), then capped (W20) at the larger of a share and 5 / m."""
    if power is not None:
        total = sum(weights)
        raised = [w**power for w in weights]
        weights = [w * total / sum(raised) for w in raised]
    total = sum(weights)
    cap = min(1.0, max(share, 5.0 / len(weights))) * total
    held: set[int] = set()
    while True:
        rest = total - cap * len(held)
        free = sum(w for k, w in enumerate(weights) if k not in held)
        above = {k for k, w in enumerate(weights) if k not in held and w * rest / free > cap}
        if not above:
            return [cap if k in held else w * rest / free for k, w in enumerate(weights)]
        held |= above


@dataclass
class Choice:
    """What the three methods differ in."""

    online: bool
    regression: bool
    power: float | None
    share: float
    adaptive: bool = False


CHOICES = {
    "calibrated-online": Choice(online=True, regression=False, power=None, share=0.3),
    "augmented": Choice(online=False, regression=True, power=0.75, share=0.1, adaptive=True),
    "augmented-online": Choice(online=True, regression=True, power=0.5, share=0.1),
}


@dataclass
class Kept:
    """The sums of (O20) and (O21), and how far enrollment weights are relied on."""

    A: Vector
    C: Vector
    plain: Vector
    mass: float = 0.0
    squares: float = 0.0
    replies: float = 0.0
    rounds: float = 0.0
    reliance: float = 1.0
    left: float | None = None  # s^2
    seen: set[int] = field(default_factory=set)  # clients that replied

    def used(self, wide: Map) -> int:
        """Return the number of columns in use."""
        every = wide.b.shape[1]
        return every if self.replies >= 10 * every else 3 if self.replies >= 30 else 0

    def penalised(self, used: int, n: float) -> Vector:
        out = self.A[: used + 1, : used + 1].copy()
        for j in range(1, used + 1):
            rho = (14.0 / n) ** 2 + 2.0 * used / self.replies
            out[j, j] += (rho + (2.0 * used / n if j > 3 else 0.0)) * self.A[0, 0]
        return out

    def correction(self, apart: Vector, n: float, effective: float) -> Vector:
        """Return what the regression adds to a step, as far as it is more than noise (O24)."""
        used = len(apart) - 1
        a = np.linalg.inv(self.penalised(used, n)) @ apart
        whole: Vector = a @ self.C[: used + 1]
        if self.left is None:
            return whole
        spread = a @ self.A[: used + 1, : used + 1] @ a
        times = float(whole @ whole) / (self.left * self.A[0, 0] * spread / effective)
        least = min(1.0, 50.0 / effective)
        kept: Vector = (least + (1.0 - least) * min(1.0, max(0.0, (times - 4.0) / 4.0))) * whole
        return kept

    def learn(
        self, raw: list[float], within: list[float], columns: list[Vector], updates: list[Vector]
    ) -> None:
        m = len(raw)
        most = max(8.0, 5.0 / m) * self.A[0, 0] / self.rounds if self.rounds else np.inf
        self.A, self.C, self.plain = 0.99 * self.A, 0.99 * self.C, 0.99 * self.plain
        self.mass, self.squares = 0.99 * self.mass, 0.99 * self.squares
        self.replies, self.rounds = 0.99 * self.replies + m, 0.99 * self.rounds + 1.0
        for x, y, row, d in zip(raw, within, columns, updates, strict=True):
            b, u = np.array([1.0, *row]), min(x, most)
            self.A += u * np.outer(b, b)
            self.C += u * np.outer(b, d)
            self.plain += y * d
            self.mass += y
            self.squares += u * float(d @ d)

    def rely(self, wide: Map, numbers: tuple[float, float, float], *, adaptive: bool) -> None:
        replied, effective, even = numbers
        used = self.used(wide)
        gram, cross = self.A[: used + 1, : used + 1], self.C[: used + 1]
        inverse = np.linalg.inv(self.penalised(used, even))
        beta = inverse @ cross
        explained = sum(
            2.0 * beta[:, p] @ cross[:, p] - beta[:, p] @ gram @ beta[:, p]
            for p in range(cross.shape[1])
        )
        left = max(self.squares - explained, 0.0) / self.A[0, 0]
        left /= max(1.0 - float(np.trace(inverse @ gram)) / effective, 0.2)
        self.left = left
        if not adaptive:
            return
        noise = left * (1.0 / effective - 1.0 / replied)
        apart = self.C[0] / self.A[0, 0] - self.plain / self.mass
        least = min(1.0, 10.0 / effective)
        shown = min(1.0, max(0.0, float(apart @ apart) / noise - 1.0))
        self.reliance = least + (1.0 - least) * shown


def kish(weights: list[float]) -> float:
    return sum(weights) ** 2 / sum(x * x for x in weights)


def plain_model(
    world: World, name: str, participation: list[dict[int, float]], *, evened: bool = False
) -> tuple[Vector, list[float]]:
    """Return the last model and the reliance of each round.

    ``participation`` are the fitted probabilities of each round.
    """
    how, rich, wide = CHOICES[name], balance_map(world, 25), balance_map(world, 8)
    q = {} if how.online else inverse_logit_weights(world, rich)
    k, w, size = rich.b.shape[1], wide.b.shape[1], len(world.enrolled)
    lam, S0, S1, S2 = np.zeros(k), 0.0, np.zeros(k), np.zeros((k, k))
    kept = Kept(np.zeros((w + 1, w + 1)), np.zeros((w + 1, len(start(world)))), start(world))
    theta, relied = start(world), []
    enrolled_mean = sum(wide.b[i] for i in world.enrolled) / size
    for r, replies in enumerate(world.rounds):
        stands = {i: exp(float(lam @ rich.b[i])) if how.online else q[i] for i in world.enrolled}
        within = [1.0 if how.online else 1.0 / (size * participation[r][i]) for i in replies]
        raw = [stands[i] if how.online else stands[i] / participation[r][i] for i in replies]
        at = kept.reliance
        relied.append(at)
        moved = [y * (x / y) ** at for x, y in zip(raw, within, strict=True)]
        v = guarded([x / sum(moved) for x in moved], how.power, how.share)
        updates = [world.update(i, theta) for i in replies]
        if evened:
            work = sum(x * world.K[i] for x, i in zip(v, replies, strict=True))
            updates = [work * d / world.K[i] for d, i in zip(updates, replies, strict=True)]
        step = sum((x * d for x, d in zip(v, updates, strict=True)), start(world))
        if how.regression:
            even = kish(guarded([stands[i] ** at for i in world.enrolled], how.power, how.share))
            own, used = kish([stands[i] for i in world.enrolled]), kept.used(wide)
            if used:
                apart = np.append(1.0, (1.0 - at) * enrolled_mean[:used])
                for x, i in zip(v, replies, strict=True):
                    apart = apart - x * np.array([1.0, *wide.b[i, :used]])
                share = len(kept.seen) / size
                step = step + kept.correction(apart, share * even, share * own)
            if how.online:  # their scale grows with lambda
                raw = [x * len(raw) / sum(raw) for x in raw]
            kept.learn(raw, within, [wide.b[i] for i in replies], updates)
            kept.seen |= set(replies)
            share = len(kept.seen) / size
            numbers = (share * size, share * own, share * even)
            kept.rely(wide, numbers, adaptive=how.adaptive)
        if how.online:
            S0, S1, S2 = 0.97 * S0, 0.97 * S1, 0.97 * S2
            for i in replies:
                e, b = stands[i], rich.b[i]
                S0, S1, S2 = S0 + e, S1 + e * b, S2 + e * np.outer(b, b)
            m = S1 / S0
            V = S2 / S0 - np.outer(m, m) + 0.02 * np.eye(k)
            lam = lam - np.clip(2.0 * 0.03 * np.linalg.inv(V) @ m, -0.3, 0.3)
        theta = theta + step
    return theta, relied


def fitted_participation(scenario: Scenario) -> list[dict[int, float]]:
    """Return the probabilities that the participation model gives the replies of each round."""
    twin = replace(scenario, methods=("augmented",)).simulation(limits=False)
    (weigher,) = twin._weighers
    rows, out = np.flatnonzero(twin.federation.population.enrolled), []
    for _ in range(scenario.rounds):
        draw = twin.federation.participation.advance()
        weigher.open(twin.known(draw, rows))
        found = weigher.weigh(draw.replied[rows])["augmented"].replies
        out.append(dict(zip(found.rows.tolist(), found.participation_prob.tolist(), strict=True)))
        weigher.close(draw.replied[rows])
    return out


def trained(scenario: Scenario, methods: tuple[str, ...] = METHODS) -> Simulation:
    run = replace(scenario, methods=methods).simulation(limits=False)
    run.advance(scenario.rounds)
    return run


@dataclass
class Case:
    scenario: Scenario
    run: Simulation
    plain: dict[str, tuple[Vector, list[float]]]  # last models, and the reliance of each round


@pytest.fixture(scope="module", params=["few", "strong"])
def case(request: pytest.FixtureRequest) -> Case:
    scenario = {"few": FEW, "strong": STRONG}[request.param]
    world = World(scenario)
    assert all(world.rounds)
    prob = fitted_participation(scenario)
    plain = {name: plain_model(world, name, prob) for name in METHODS}
    return Case(scenario, trained(scenario), plain)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_equals_its_plain_loop(case: Case, name: str) -> None:
    """Models of order one; systems of nine with a ridge keep about twelve digits."""
    found, (expected, relied) = case.run.models[name], case.plain[name]
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-10)
    history = case.run.history()
    told = history.reliance[history.methods.index(name)]
    np.testing.assert_allclose(told, relied, rtol=0.0, atol=1e-9)
    assert (told.min() < 0.9) == (name == "augmented")
    others = [case.run.models[other] for other in METHODS if other != name]
    assert min(float(np.abs(found - other).max()) for other in others) > 1e-3


def test_the_worlds_use_what_they_are_for(case: Case) -> None:
    few = case.scenario is FEW
    history = case.run.history()
    trimmed = dict(zip(history.methods, history.trimmed.sum(axis=1), strict=True))
    rich, wide = (balance_map(World(case.scenario), k).b.shape[1] for k in (25, 8))
    assert (rich, wide) == ((3, 8) if few else (8, 8))
    assert few or trimmed["augmented"] > 0


def test_fednova_evens_the_work_before_the_regression() -> None:
    world, prob = World(STRONG), fitted_participation(STRONG)
    assert len(set(world.K)) > 1
    run = trained(STRONG, ("fednova+augmented",))
    expected, _ = plain_model(world, "augmented", prob, evened=True)
    np.testing.assert_allclose(run.models["fednova+augmented"], expected, rtol=0.0, atol=1e-10)


# The JAX trainer.


def logistic(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    u = x @ p["a"] + p["b"]
    return jnp.logaddexp(0.0, u) - y * u


def ridge(p: dict[str, jax.Array]) -> jax.Array:
    return 0.5 * 0.05 * (p["a"] @ p["a"] + p["b"] ** 2)


@pytest.mark.parametrize(("dtype", "close"), [(np.float64, 1e-10), (np.float32, 1e-5)])
def test_the_jax_trainer_gives_the_same_run(dtype: type[np.floating], close: float) -> None:
    """In float32 an update of order 0.1 errs by 1e-8, and fourteen rounds add them up."""
    made = FEW.simulation(limits=False)
    data = made.federation.rows
    trainer = JaxTrainer(
        logistic,
        {"a": np.zeros(5), "b": np.zeros(())},
        ArrayClients(features=data.features, labels=data.labels, offsets=data.offsets),
        made.training.work,
        penalty=ridge,
        dtype=dtype,
    )
    run = Simulation(
        made.federation, made._weighers, made.training, np.random.default_rng(0),
        compositions=made._methods, trainer=trainer,
    )  # fmt: skip
    run.advance(FEW.rounds)
    world, prob = World(FEW), fitted_participation(FEW)
    for name in METHODS:
        expected, _ = plain_model(world, name, prob)
        np.testing.assert_allclose(run.models[name], expected, rtol=0.0, atol=close)


# State.

RESUMED = (*METHODS, "fedadam+augmented", "fednova+augmented-online", "fedprox+augmented")


@pytest.mark.parametrize("stop", [1, 6])
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_from_its_files_to_the_same_bytes(
    name: str, stop: int, tmp_path: Path
) -> None:
    training = replace(STRONG.training, batch_size=2)
    scenario = replace(STRONG, methods=(name,), rounds=9, training=training)
    whole, first, second = (scenario.simulation() for _ in range(3))
    whole.advance(9)
    first.advance(stop)
    save_checkpoint(tmp_path, first.state(), "settings")
    state = load_checkpoint(tmp_path, "settings")
    assert state is not None
    second.restore(state)
    second.advance(9 - stop)
    one, two = whole.history(), second.history()
    assert one.iterates.tobytes() == two.iterates.tobytes()
    np.testing.assert_array_equal(one.effective_replies, two.effective_replies)
    np.testing.assert_array_equal(one.trimmed_mass, two.trimmed_mass)
    left, right = whole.limits[name], second.limits[name]
    assert left.given_enrolled.tobytes() == right.given_enrolled.tobytes()
    np.testing.assert_equal(second.state(), whole.state())  # what was learnt, to the last bit


@pytest.mark.parametrize("name", ["calibrated-online", "augmented-online"])
def test_what_was_learnt_is_in_the_state(name: str) -> None:
    """So that resuming without it would not end in the same bytes."""
    run = trained(FEW, (name,))
    (state,) = run.state()["weighers"].values()
    learnt = state["learnt"][name]
    assert np.abs(learnt["coefficients"]).max() > 0.05
    (memory,) = run.state()["memories"].values()
    assert ("cross" in memory) == name.startswith("augmented")


def test_methods_do_not_depend_on_who_runs_beside_them() -> None:
    together = trained(FEW, (*METHODS, "fedipw", "efficient", "fedavg"))
    for name in METHODS:
        assert trained(FEW, (name,)).models[name].tobytes() == together.models[name].tobytes()
