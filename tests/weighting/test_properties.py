"""What holds for every method on drawn worlds: no two are the same, and influence is bounded."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.flower.config import RunConfig
from fedipw.flower.register import Register
from fedipw.flower.screen import Screen
from fedipw.selection.enrollment import EnrollmentStage, enrollment_stage
from fedipw.selection.participation import ParticipationSettings
from fedipw.tables.ledger import Ledger, Round
from fedipw.tables.population import Population
from fedipw.tables.targets import Targets
from fedipw.weighting.methods import METHODS, method_named
from fedipw.weighting.pipeline import Influence, Method, Probabilities, Weighing
from fedipw.weighting.replay import Observer, Plan, Replay
from fedipw.weighting.sources import TrueParticipation
from fedipw.weighting.weigher import EnrollmentState, FixedEnrollment, RoundWeights, Weigher
from worlds import World, drawn, enrollment_prob, reply_prob

ROUNDS, SIZE = 6, 400
SETTINGS = ParticipationSettings(refit_every=2, per_coefficient=3.0)
LIVE = [
    name
    for name, method in METHODS.items()
    if method.base.probabilities not in {Probabilities.TRUE, Probabilities.COLLAPSED}
]


WORLD = World(
    size=SIZE, rounds=ROUNDS, covariates=("z1", "z2"),
    enrollment=-0.5 + 0.9 * pl.col("z1") + 0.5 * pl.col("z2"),
    reply=-0.2 + 0.9 * pl.col("x") + 0.5 * pl.col("z1") - 3.5 * (pl.col("round") == ROUNDS),
)  # fmt: skip


@dataclass
class Selected:
    """A population that enrolls by choice, and rounds of which one has few replies."""

    people: pl.DataFrame
    prob: np.ndarray  # true enrollment probabilities
    ledger: Ledger
    part: list[np.ndarray]  # true participation probabilities of the enrolled

    @classmethod
    def drawn(cls, folder: Path, seed: int) -> Selected:
        given, first = replace(WORLD, seed=seed), pl.int_range(pl.len()) == 0
        tables = drawn(given)
        tables.rounds = [t.with_columns(pl.col("replied") | first) for t in tables.rounds]
        tables.write(folder)
        log = tables.log.partition_by("round", maintain_order=True)
        part = [reply_prob(given, rows) for rows in log]
        prob = enrollment_prob(given, tables.people)
        return cls(tables.people, prob, Ledger(folder / "rounds"), part)

    def table(self) -> EnrollmentStage:
        """Return enrollment by the population table."""
        return enrollment_stage(Population(self.people))

    def totals(self) -> EnrollmentStage:
        """Return enrollment by estimates of the population means, with standard errors."""
        shift = {"z1": 0.05, "z2": -0.04}
        targets = Targets(
            names=tuple(shift),
            values=np.array([float(self.people[n].mean()) + d for n, d in shift.items()]),  # type: ignore[arg-type]
            se=np.array([0.1, 0.03]),
        )
        enrolled = self.people.filter("enrolled").drop("enrolled")
        return enrollment_stage(Population.from_totals(enrolled, targets, SIZE))

    def weights(self, stage: EnrollmentStage, method: Method) -> np.ndarray:
        """Return the weights of all replies."""
        plan = Plan(method=method, settings=SETTINGS)
        return pl.concat(Replay(stage, self.ledger, plan))["weight"].to_numpy()

    def oracle(self, method: Method) -> np.ndarray:
        """Return the weights of all replies by the true probabilities."""
        state = EnrollmentState(
            unit_ids=np.arange(SIZE),
            sample_counts=np.ones(SIZE, dtype=np.int64),
            enrolled=self.people["enrolled"].to_numpy(),
            prob=self.prob,
            population_size=float(SIZE),
        )
        weigher = Weigher(FixedEnrollment(state), TrueParticipation(), {method.name: method})
        rows, out = np.flatnonzero(state.enrolled), []
        for index, (table, prob) in enumerate(zip(self.ledger, self.part, strict=True), 1):
            replied = table["replied"].to_numpy()
            weigher.open(
                Round(index=index, rows=rows, table=pl.DataFrame(), participation_prob=prob)
            )
            out.append(weigher.weigh(replied)[method.name].weights)
            weigher.close(replied)
        return np.concatenate(out)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_two_methods_give_equal_weights(tmp_path: Path, seed: int) -> None:
    """Each pair differs on noisy totals or on a population table, if not on both."""
    world = Selected.drawn(tmp_path, seed)
    table, totals = world.table(), world.totals()
    found: dict[str, dict[str, np.ndarray]] = {"table": {}, "totals": {}}
    for name, method in METHODS.items():
        if method.base.probabilities is Probabilities.TRUE:
            found["table"][name] = world.oracle(method)
            continue
        found["table"][name] = world.weights(table, method)
        try:
            found["totals"][name] = world.weights(totals, method)
        except InputError as error:
            assert "needs a table of the whole population" in str(error)  # noqa: PT017
    same = [
        (a, b)
        for a, b in combinations(METHODS, 2)
        if not any(
            {a, b} <= set(weights) and not np.allclose(weights[a], weights[b], rtol=1e-6, atol=0)
            for weights in found.values()
        )
    ]
    assert same == []
    assert len(found["table"]) == len(METHODS)
    assert {"fedavg", "participation-only", "efficient", "calibrated-noise-aware"} < set(
        found["totals"]
    )


def test_only_the_noise_aware_method_reads_standard_errors(tmp_path: Path) -> None:
    world = Selected.drawn(tmp_path, 3)
    noisy = world.totals()
    given = noisy.population.targets
    assert given is not None
    exact = Targets(names=given.names, values=given.values)
    enrolled = world.people.filter("enrolled").drop("enrolled")
    plain = enrollment_stage(Population.from_totals(enrolled, exact, SIZE))
    for name in LIVE:
        method = METHODS[name]
        if method.uses_enrollment:
            continue
        with_errors, without = (world.weights(stage, method) for stage in (noisy, plain))
        aware = "noise-aware" in name
        assert np.allclose(with_errors, without, rtol=1e-9, atol=0) is not aware, name


# Influence.


class Bounded(Observer):
    """Compares the weights of every round with the bound that was known before it."""

    def __init__(self) -> None:
        self.bounds: list[Influence] = []
        self.rounds: list[tuple[Influence, RoundWeights]] = []

    def enrolled(self, weighing: Weighing) -> None:
        self.bounds.append(weighing.influence())

    def weighed(self, steps: object, found: RoundWeights | None) -> None:
        del steps
        if found is not None:
            self.rounds.append((self.bounds[-1], found))


CLIP = 1.0 / 3.0
SHARES = re.compile(r"max w <= ([\d.e+-]+), since weights are shares")
FACTOR = re.compile(
    r"with e <= ([\d.e+-]+), so ([\d.e+-]+) over that probability"
    r"(?:, and at least ([\d.e+-]+))?; each round's"
)


def config_of(stage: EnrollmentStage, plan: Plan) -> RunConfig:
    register = Register.of(Path("nowhere"), stage.members)
    return RunConfig(
        stage=stage, plan=plan, evaluation=plan, columns=(), settings={}, register=register,
        present=stage,
    )  # fmt: skip


def printed(config: RunConfig) -> Influence:
    """Return the bound on a client's influence that a run prints at its start."""
    text = config.influence(Screen(clip=CLIP))
    if "known when a round closes" in text:
        return Influence()
    shares, factor = SHARES.search(text), FACTOR.search(text)
    if shares is not None:
        return Influence(share=float(shares[1]))
    assert factor is not None, text
    least = None if factor[3] is None else float(factor[3])
    assert float(factor[2]) >= CLIP * float(factor[1]) * (1 - 1e-3)
    return Influence(share=least, factor=float(factor[2]))


@settings(max_examples=8)
@given(data=st.data())
def test_no_weight_exceeds_the_influence_that_was_announced(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 10_000))
    trim = data.draw(st.sampled_from([None, 1.0, 1.5, 4.0]))
    world = Selected.drawn(tmp_path_factory.mktemp("world"), seed)
    for stage in (world.table(), world.totals()):
        for name in LIVE:
            if METHODS[name].uses_enrollment and not stage.population.lists_everyone:
                continue
            plan = Plan(method=method_named(name).trimmed(trim), settings=SETTINGS)
            seen = Bounded()
            for _ in Replay(stage, world.ledger, plan, observers=[seen]):
                pass
            assert len(seen.rounds) == ROUNDS
            said = printed(config_of(stage, plan))
            for bound, found in seen.rounds:
                assert said.known == bound.known, name
                prob, size = found.replies.participation_prob, np.abs(found.weights)
                least = bound.bound(prob)
                assert (size <= least * (1 + 1e-9)).all(), name
                assert (said.bound(prob) >= CLIP * least).all(), name


def test_weights_of_either_sign_have_no_bound_before_a_round(tmp_path: Path) -> None:
    """GREG and self-normalised signed weights can be of any size; calibrated ones are known."""
    world = Selected.drawn(tmp_path, 0)
    unknown = {"greg", "greg-hajek", "calibrated-linear-hajek"}
    for name in LIVE:
        seen = Bounded()
        plan = Plan(method=METHODS[name], settings=SETTINGS)
        for _ in Replay(world.table(), world.ledger, plan, observers=[seen]):
            pass
        assert seen.bounds[0].known is (name not in unknown), name
        shares = METHODS[name].normalisation.self_normalised or name == "greg-nonnegative"
        assert seen.bounds[0].share == (1.0 if shares and name not in unknown else None), name


@pytest.mark.parametrize("guard", ["cap", "temper(0.5)", "temper(0.9) then cap(0.2)"])
def test_a_guard_that_raises_others_leaves_the_bound_of_a_horvitz_thompson_form_open(
    tmp_path: Path, guard: str
) -> None:
    """What is cut from one reply is carried by the others, beyond 1 / (N pi) of theirs."""
    world, seen = Selected.drawn(tmp_path, 0), Bounded()
    plan = Plan(method=method_named(f"fedipw, guard={guard}"), settings=SETTINGS)
    for _ in Replay(world.table(), world.ledger, plan, observers=[seen]):
        pass
    assert not seen.bounds[0].known
    other = Bounded()
    plan = Plan(method=method_named(f"fedipw-hajek, guard={guard}"), settings=SETTINGS)
    for _ in Replay(world.table(), world.ledger, plan, observers=[other]):
        pass
    assert other.bounds[0].share == 1.0  # shares stay shares


def test_a_change_of_enrollment_leaves_the_printed_bound_open(tmp_path: Path) -> None:
    world = Selected.drawn(tmp_path, 0)
    joins = pl.when(pl.col("z1") > 0).then(2).alias("enrolled_from")
    stage = enrollment_stage(Population(world.people.with_columns(joins)))
    plan = Plan(method=method_named("fedipw"))
    assert not printed(config_of(stage, plan)).known
    shares = Plan(method=method_named("fedipw-hajek"))
    assert printed(config_of(stage, shares)).share is not None
