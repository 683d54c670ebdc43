"""Noise on the weighted sum: its size, its cost, and what one client can move."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    Result,
    Strategy,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import brentq
from scipy.stats import chi2, norm

from fedipw.errors import InputError
from fedipw.flower import FedIPW, GaussianNoise, InProcessGrid, Screen, describes
from fedipw.flower.outcomes import RoundOutcomes
from fedipw.flower.privacy import NoisySums
from fedipw.flower.screen import SentModel, screened
from fedipw.flower.weighted_sum import WeightedReply, summed_replies
from fedipw.selection.enrollment import enrollment_stage
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan, Replay
from worlds import World, drawn

DELTA = 1e-5
SIZE = 60  # people


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("population")
    drawn(World(size=SIZE, rounds=0)).write(where)
    return where / "people.parquet"


def update_of(unit: int, dimension: int) -> Any:
    """Return what a client adds to any model; its norm is between 1 and 5."""
    rng = np.random.default_rng([9, unit])
    direction = rng.normal(size=dimension)
    return direction / np.linalg.norm(direction) * rng.uniform(1.0, 5.0)


def grid_of(population: Path, updates: Callable[[int, int], Any] = update_of) -> InProcessGrid:
    inside = pl.read_parquet(population).filter("enrolled")["unit_id"].to_list()
    app = ClientApp()

    @describes(app)
    def about(context: Context, server_round: int) -> dict[str, int]:
        del server_round
        return {"unit_id": int(context.node_config["unit"])}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        theta = message.content.array_records["arrays"]["theta"].numpy()
        unit = int(context.node_config["unit"])
        moved = Array(theta + updates(unit, theta.size).astype(theta.dtype))
        content = RecordDict(
            {"arrays": ArrayRecord({"theta": moved}), "metrics": MetricRecord({"num-examples": 1})}
        )
        return Message(content, reply_to=message)

    return InProcessGrid(app, {1000 + unit: {"unit": unit} for unit in inside})


def model(theta: Any) -> ArrayRecord:
    return ArrayRecord({"theta": Array(np.asarray(theta))})


def private(
    population: Path,
    ledger: Path,
    noise: GaussianNoise | None,
    *,
    inner: Strategy | None = None,
    scheme: str = "fedipw",
    clip: float | None = 2.0,
) -> FedIPW:
    return FedIPW(
        FedAvg(fraction_evaluate=0.0) if inner is None else inner,
        population=population, ledger=ledger, scheme=scheme, screen=Screen(clip=clip), noise=noise,
    )  # fmt: skip


def run(
    strategy: FedIPW, population: Path, rounds: int = 1, start: Any = 0.0, dimension: int = 3
) -> Result:
    return strategy.start(grid_of(population), model(np.full(dimension, start)), num_rounds=rounds)


def theta_of(result: Result) -> Any:
    return result.arrays["theta"].numpy()


# ----- what it costs -----------------------------------------------------------------------------


def exact_delta(epsilon: float, multiplier: float) -> float:
    """Return the delta of one Gaussian mechanism, exactly (Balle and Wang, 2018, theorem 8)."""
    half, tail = 0.5 / multiplier, epsilon * multiplier
    return float(norm.cdf(half - tail) - np.exp(epsilon) * norm.cdf(-half - tail))


def exact_epsilon(multiplier: float) -> float:
    return float(brentq(lambda e: exact_delta(e, multiplier) - DELTA, 0.0, 100.0, xtol=1e-12))


def spent(multiplier: float, rounds: int) -> NoisySums:
    sums = NoisySums(GaussianNoise(multiplier=multiplier, delta=DELTA), clients=10)
    for _ in range(rounds):
        sums.spend()
    return sums


@pytest.mark.parametrize(("z", "rounds"), [(0.7, 1), (1.0, 10), (4.0, 100), (20.0, 1000)])
def test_epsilon_is_that_of_composed_gaussian_mechanisms(z: float, rounds: int) -> None:
    sums = spent(z, rounds)
    a = np.array(sums.state()["orders"])
    a = a[a > 1.01]
    renyi = rounds * a / (2.0 * z**2)  # of R Gaussian mechanisms
    closed = np.min(renyi + np.log1p(-1.0 / a) - np.log(DELTA * a) / (a - 1.0))
    assert sums.epsilon == pytest.approx(closed, rel=1e-9)
    # R of multiplier z are one of multiplier z / sqrt(R): what it costs exactly, and by PLD
    exact = exact_epsilon(z / np.sqrt(rounds))
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(z), rounds))
    assert exact <= accountant.get_epsilon(DELTA) * (1.0 + 1e-6)
    assert accountant.get_epsilon(DELTA) <= sums.epsilon <= 1.15 * exact


def test_nothing_is_spent_before_the_first_round() -> None:
    assert spent(1.0, 0).epsilon == 0.0


def test_rounds_of_different_multipliers_add_up() -> None:
    sums = spent(1.0, 2)
    later = NoisySums(GaussianNoise(multiplier=2.0, delta=DELTA), clients=10)
    later.restore(sums.state())
    assert later.epsilon == sums.epsilon
    later.spend()  # 2/1 + 1/4 = 9/4 = 1/z^2 of one mechanism
    assert later.epsilon == pytest.approx(spent(2.0 / 3.0, 1).epsilon, rel=1e-9)


# ----- the noise itself --------------------------------------------------------------------------

MANY = 20_000


@pytest.mark.parametrize("scheme", ["fedipw", "fedipw-hajek"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_noise_on_the_model_has_the_stated_size(
    population: Path, tmp_path: Path, scheme: str, dtype: type
) -> None:
    """Two-sided chi-square and mean at 1e-9 each; seeded, so it fails always or never."""
    start: Any = np.linspace(-1.0, 1.0, MANY).astype(dtype)
    found = []
    for k, noise in enumerate((None, GaussianNoise(multiplier=1.5, delta=DELTA, seed=3))):
        strategy = private(population, tmp_path / str(k), noise, scheme=scheme)
        found.append(run(strategy, population, start=start, dimension=MANY))
    plain, noisy = (theta_of(result).astype(np.float64) for result in found)
    plan = Plan(method=method_named(scheme), formulas=strategy.config.plan.formulas)
    stage = enrollment_stage(Population(population))
    table = next(iter(Replay(stage, Ledger(tmp_path / "1"), plan)))
    largest = float(table["weight"].max())  # type: ignore[arg-type]
    sd = 1.5 * 2.0 * largest  # z C max w
    metrics = found[1].train_metrics_clientapp[1]
    assert metrics["fedipw-influence"] == pytest.approx(2.0 * largest, rel=1e-12)
    low, high = chi2.ppf(5e-10, MANY), chi2.isf(5e-10, MANY)
    assert low < np.sum(((noisy - plain) / sd) ** 2) < high
    assert abs((noisy - plain).mean()) < norm.isf(5e-10) * sd / np.sqrt(MANY)
    assert high / low < 1.13  # an error of 6% in the deviation would show


def test_noise_is_drawn_anew_in_every_round_and_every_run(population: Path, tmp_path: Path) -> None:
    noise = GaussianNoise(multiplier=1.0, delta=DELTA)
    one, two = (run(private(population, tmp_path / n, noise), population) for n in "ab")
    assert not np.any(theta_of(one) == theta_of(two))
    sums = NoisySums(GaussianNoise(multiplier=1.0, delta=DELTA, seed=1), clients=5)
    shape = {"a": np.zeros(4)}
    assert not np.any(sums.noise(1, shape, 1.0)["a"] == sums.noise(2, shape, 1.0)["a"])
    np.testing.assert_array_equal(sums.noise(1, shape, 1.0)["a"], sums.noise(1, shape, 1.0)["a"])


def test_an_adaptive_server_steps_by_the_noisy_sum(population: Path, tmp_path: Path) -> None:
    """Adam's step by hand, from the noisy sum that plain averaging shows."""
    noise = GaussianNoise(multiplier=1.0, delta=DELTA, seed=4)
    start = np.array([0.5, -0.5, 2.0])
    sums = theta_of(run(private(population, tmp_path / "a", noise), population, start=start))
    clear = theta_of(run(private(population, tmp_path / "b", None), population, start=start))
    eta, b1, b2, tau = 0.3, 0.8, 0.95, 1e-2

    def stepped(gradient: Any) -> Any:
        m, v = (1.0 - b1) * gradient, (1.0 - b2) * gradient**2
        rate = eta * np.sqrt(1.0 - b2**2) / (1.0 - b1**2)  # Flower counts the first round as 2
        return start + rate * m / (np.sqrt(v) + tau)

    inner = FedAdam(fraction_evaluate=0.0, eta=eta, beta_1=b1, beta_2=b2, tau=tau)
    adam = theta_of(
        run(private(population, tmp_path / "c", noise, inner=inner), population, start=start)
    )
    np.testing.assert_allclose(adam, stepped(sums - start), rtol=1e-9)
    after = stepped(clear - start) + (sums - clear)  # noise that came after the step
    assert np.abs(adam - after).max() > 1e-3
    assert np.abs(adam - stepped(clear - start)).max() > 1e-3


def test_metrics_of_a_noisy_round_tell_nothing_of_single_updates(
    population: Path, tmp_path: Path
) -> None:
    noise = GaussianNoise(multiplier=1.0, delta=DELTA, seed=1)
    loud = run(private(population, tmp_path / "a", None), population)
    told = set(loud.train_metrics_clientapp[1])
    assert {"fedipw-update-norm-largest", "fedipw-clipped"} <= told
    quiet = run(private(population, tmp_path / "b", noise), population)
    left = set(quiet.train_metrics_clientapp[1])
    assert told - left == {"fedipw-update-norm-largest", "fedipw-clipped"}
    assert left - told == {"fedipw-epsilon"}


# ----- what one client can move ------------------------------------------------------------------

SENT = np.array([1.0, -2.0, 0.5, 30.0])
CLIP = 0.7
anything = arrays(np.float64, 4, elements=st.floats(-1e5, 1e5))


def aggregate(updates: list[Any], weights: list[float]) -> Any:
    """Return the model after clipping, weighting and averaging, as the strategy does it."""
    grid = grid_of_nothing(len(updates))
    sent = model(SENT)
    invited = {
        place: Message(RecordDict(), dst_node_id=place + 1, message_type="train")
        for place in range(len(updates))
    }
    grid.push_messages(invited.values())
    replies = []
    for place, update in enumerate(updates):
        content = RecordDict(
            {"arrays": model(SENT + update), "metrics": MetricRecord({"num-examples": 1.0})}
        )
        replies.append(Message(content, reply_to=invited[place]))
    outcomes, screen = RoundOutcomes.of(invited, replies), Screen(clip=CLIP)
    view = SentModel.of(sent)
    factors = screened(outcomes, view, screen).factors
    weighted = [WeightedReply(m, weights[k], factors[k]) for k, m in outcomes.replies.items()]
    handed = summed_replies(weighted, "num-examples", view)
    made, _ = FedAvg().aggregate_train(1, handed)
    assert made is not None
    return made["theta"].numpy()


def grid_of_nothing(nodes: int) -> InProcessGrid:
    return InProcessGrid(ClientApp(), {k + 1: {} for k in range(nodes)}, loses=lambda _: True)


@settings(max_examples=60)
@given(
    others=st.lists(anything, min_size=1, max_size=4),
    mine=anything,
    instead=st.one_of(anything, st.just(np.full(4, np.nan)), st.just(np.full(4, 1e200))),
    data=st.data(),
)
def test_one_client_moves_the_sum_by_no_more_than_clip_times_the_largest_weight(
    others: list[Any], mine: Any, instead: Any, data: st.DataObject
) -> None:
    weight = st.floats(-0.5, 3.0)
    n = len(others) + 1
    weights = data.draw(st.lists(weight, min_size=n, max_size=n))
    bound = CLIP * max(map(abs, weights))
    slack = 1e-9  # rounding of a sum of terms up to 100
    before = aggregate([*others, mine], weights)
    after = aggregate([*others, instead], weights)  # a refused reply is a weight without an update
    nothing = aggregate([*others, np.zeros(4)], weights)
    assert np.linalg.norm(after - before) <= 2.0 * bound + slack
    assert np.linalg.norm(before - nothing) <= bound + slack
    assert np.linalg.norm(after - nothing) <= bound + slack


def test_the_bound_is_reached() -> None:
    far = np.array([1e5, 0.0, 0.0, 0.0])
    weights = [0.5, 2.0]
    moved = aggregate([np.zeros(4), far], weights) - aggregate([np.zeros(4), -far], weights)
    assert np.linalg.norm(moved) == pytest.approx(2.0 * CLIP * 2.0, rel=1e-9)


# ----- the budget --------------------------------------------------------------------------------


def test_training_stops_before_the_round_that_would_exceed_the_budget(
    population: Path, tmp_path: Path
) -> None:
    limit = 0.5 * (spent(2.0, 2).epsilon + spent(2.0, 3).epsilon)
    noise = GaussianNoise(multiplier=2.0, delta=DELTA, max_epsilon=limit)
    strategy = private(population, tmp_path / "a", noise)
    found = run(strategy, population, rounds=5)
    assert list(found.train_metrics_clientapp) == [1, 2]
    assert found.arrays
    assert len(Ledger(tmp_path / "a").rounds) == 2
    with pytest.raises(InputError, match=r"Round 3 is not begun: another round would spend more"):
        strategy.configure_train(3, found.arrays, ConfigRecord(), grid_of(population))
    assert strategy.noise is not None
    assert strategy.noise.epsilon == spent(2.0, 2).epsilon < limit
    done = run(private(population, tmp_path / "a", noise), population, rounds=2)
    assert done.train_metrics_clientapp[2]["fedipw-epsilon"] == spent(2.0, 2).epsilon


def test_a_budget_that_is_reached_exactly_is_not_exceeded(population: Path, tmp_path: Path) -> None:
    noise = GaussianNoise(multiplier=2.0, delta=DELTA, max_epsilon=spent(2.0, 2).epsilon)
    run(private(population, tmp_path / "a", noise), population, rounds=2)
    again = run(private(population, tmp_path / "a", noise), population, rounds=3)
    assert list(again.train_metrics_clientapp) == [1, 2]


def test_a_resumed_run_has_spent_what_the_first_one_spent(population: Path, tmp_path: Path) -> None:
    noise = GaussianNoise(multiplier=2.0, delta=DELTA, seed=1)
    run(private(population, tmp_path / "a", noise), population, rounds=2)
    again = private(population, tmp_path / "a", noise)
    found = run(again, population, rounds=3)
    told = [found.train_metrics_clientapp[r]["fedipw-epsilon"] for r in (1, 2, 3)]
    assert told == [spent(2.0, r).epsilon for r in (1, 2, 3)]
    whole = run(private(population, tmp_path / "b", noise), population, rounds=3)
    np.testing.assert_array_equal(theta_of(found), theta_of(whole))


def test_a_round_that_a_crash_cut_off_is_trained_anew_and_counted_once(
    population: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = GaussianNoise(multiplier=2.0, delta=DELTA)
    strategy = private(population, tmp_path / "a", noise)
    run(strategy, population, rounds=1)

    def killed(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(strategy.rounds, "close", killed)
        with pytest.raises(KeyboardInterrupt):
            run(strategy, population, rounds=2)
    files = sorted(path.name for path in (tmp_path / "a" / "checkpoint").glob("round-*.npz"))
    assert files == ["round-000001.npz", "round-000002.npz"]  # the second was never released
    resumed = private(population, tmp_path / "a", noise)
    found = run(resumed, population, rounds=2)
    assert found.train_metrics_clientapp[2]["fedipw-epsilon"] == spent(2.0, 2).epsilon


@pytest.mark.parametrize(
    "other",
    [
        GaussianNoise(multiplier=2.0, delta=1e-6),
        GaussianNoise(multiplier=2.0, delta=DELTA, max_epsilon=100.0),
        None,
    ],
)
def test_other_privacy_settings_are_refused_when_a_run_is_resumed(
    population: Path, tmp_path: Path, other: GaussianNoise | None
) -> None:
    run(
        private(population, tmp_path / "a", GaussianNoise(multiplier=2.0, delta=DELTA)),
        population,
    )
    expected = "trained with noise" if other is None else "does not fit these settings"
    with pytest.raises(InputError, match=expected):
        run(private(population, tmp_path / "a", other), population, rounds=2)


def test_noise_cannot_begin_in_the_middle_of_a_run(population: Path, tmp_path: Path) -> None:
    run(private(population, tmp_path / "a", None), population)
    late = private(population, tmp_path / "a", GaussianNoise(multiplier=2.0, delta=DELTA))
    with pytest.raises(InputError, match="trained without noise"):
        run(late, population, rounds=2)


# ----- what is refused ---------------------------------------------------------------------------


def test_noise_without_a_bound_on_updates_is_refused(population: Path, tmp_path: Path) -> None:
    noise = GaussianNoise(multiplier=1.0, delta=DELTA)
    with pytest.raises(InputError, match="bounded influence"):
        private(population, tmp_path / "a", noise, clip=None)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda s: DifferentialPrivacyServerSideFixedClipping(s, 1.0, 1.0, 5),
        lambda s: DifferentialPrivacyServerSideAdaptiveClipping(s, 1.0, 50),
        lambda s: DifferentialPrivacyClientSideFixedClipping(s, 1.0, 1.0, 5),
        lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, 1.0, 50),
    ],
)
def test_flowers_own_private_strategies_are_refused(
    population: Path, tmp_path: Path, wrapped: Callable[[Strategy], Strategy]
) -> None:
    with pytest.raises(InputError, match=r"equal weights.*noise=GaussianNoise"):
        private(population, tmp_path / "a", None, inner=wrapped(FedAvg()))


@pytest.mark.parametrize(
    "bad",
    [{"multiplier": 0.0}, {"multiplier": np.inf}, {"delta": 0.0}, {"delta": 1.0},
     {"max_epsilon": -1.0}],
)  # fmt: skip
def test_settings_without_meaning_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        GaussianNoise(**{"multiplier": 1.0, "delta": DELTA, **bad})  # type: ignore[arg-type]
