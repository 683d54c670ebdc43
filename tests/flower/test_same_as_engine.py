"""The same population, draws and seeds give the same numbers on Flower as in process."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy

from cli.command import fedipw
from fedipw.flower import FedIPW
from fedipw.flower.screen import metrics_of
from fedipw.lab.engine.server import Adam, Momentum, PlainStep, ServerStep, Yogi
from fedipw.lab.scenario import PropensitySettings
from fedipw.weighting.methods import METHODS
from fedipw.weighting.pipeline import Probabilities

from .federations import LabFederation, theta_of

CLOSE = 1e-10
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
ADAPTIVE: dict[str, Any] = {"beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
STEPS: dict[str, tuple[Callable[[], Strategy], ServerStep]] = {
    "FedAvg": (lambda: FedAvg(**QUIET), PlainStep()),
    "FedProx": (lambda: FedProx(proximal_mu=0.0, **QUIET), PlainStep()),
    "FedAvgM": (
        lambda: FedAvgM(server_learning_rate=0.8, server_momentum=0.5, **QUIET),
        Momentum(size=0.8, beta=0.5),
    ),
    "FedAdam": (lambda: FedAdam(eta=0.1, **ADAPTIVE, **QUIET), Adam(size=0.1, **ADAPTIVE)),
    "FedYogi": (lambda: FedYogi(eta=0.05, **ADAPTIVE, **QUIET), Yogi(size=0.05, **ADAPTIVE)),
}


SUMS = ("fedipw", "augmented-online")
MEMORY = (
    "efficient", "efficient-hajek", "fedvarp+fedipw", "fedvarp+fedipw-hajek", "mifa+efficient",
    "mifa+fedipw-hajek", "mifa", "scaffold+efficient", "scaffold+fedipw-hajek",
)  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        *product(("fedipw-hajek", "augmented"), STEPS),
        *product(SUMS, ("FedAvg", "FedAdam")),
        *product(MEMORY, ("FedAvg", "FedAdam")),
        ("efficient", "FedAvgM"),
    ],
)
def test_flower_gives_the_engines_model(tmp_path: Path, scheme: str, name: str) -> None:
    world = LabFederation(size=200, rounds=6, methods=(scheme,))
    inner, step = STEPS[name]
    wrapped = FedIPW(
        inner(), population=world.put(tmp_path), ledger=tmp_path / "ledger", scheme=scheme,
        covariates=world.columns, refit_every=1, winsorise=None, average=None,
    )  # fmt: skip
    result = wrapped.start(world.grid(), world.start, num_rounds=world.rounds)
    expected = world.trained(step).of(scheme)[-1]
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(theta_of(result.arrays), expected, rtol=0.0, atol=CLOSE)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (PropensitySettings(decay=0.7), {"decay": 0.7}),
        (PropensitySettings(last=3), {"window": 3}),
        (
            PropensitySettings(participation=". + hour_sin + z1:hour_cos", day_length=4.0),
            {"participation": ". + hour_sin + z1:hour_cos", "day_length": 4.0},
        ),
    ],
    ids=["decay", "rolling", "clock"],
)
def test_models_that_follow_a_drift_are_the_engines(
    tmp_path: Path, here: PropensitySettings, there: dict[str, Any]
) -> None:
    world = LabFederation(size=200, rounds=6, methods=("fedipw-hajek",), propensity=here)
    wrapped = FedIPW(
        FedAvg(**QUIET), population=world.put(tmp_path), ledger=tmp_path / "ledger",
        scheme="fedipw-hajek", covariates=world.columns, refit_every=1, winsorise=None,
        average=None, **there,
    )  # fmt: skip
    result = wrapped.start(world.grid(), world.start, num_rounds=world.rounds)
    expected = world.trained(STEPS["FedAvg"][1]).of("fedipw-hajek")[-1]
    plain = replace(world, propensity=PropensitySettings()).trained(STEPS["FedAvg"][1])
    assert np.abs(expected - plain.of("fedipw-hajek")[-1]).max() > 1e-4
    np.testing.assert_allclose(theta_of(result.arrays), expected, rtol=0.0, atol=CLOSE)


class Recorder(FedAvg):
    """FedAvg that keeps the weights it was handed, by node."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.handed: dict[int, dict[int, float]] = {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        self.handed[server_round] = {
            message.metadata.src_node_id: float(metrics_of(message.content)["num-examples"])  # type: ignore[arg-type]
            for message in replies[:-2]
        }
        return super().aggregate_train(server_round, replies)


KNOWN_LIVE = {Probabilities.NONE, Probabilities.FITTED}
LIVE = [
    # what updates say of enrollment weights is not in a ledger
    f"{m.name}, augmentation=regression" if m.augmentation.regression else m.name
    for m in METHODS.values()
    if m.base.probabilities in KNOWN_LIVE
]
TOTALS = ("calibrated", "participation-only", "efficient")
WITH_TOTALS = [m for m in LIVE if m.startswith(TOTALS) and not m.endswith("-hajek")]


@pytest.mark.parametrize(
    ("scheme", "source"),
    [*((m, "population") for m in LIVE), *((m, "totals") for m in WITH_TOTALS)],
)
def test_weights_are_those_found_in_the_ledger_later(
    tmp_path: Path, scheme: str, source: str
) -> None:
    world = LabFederation(size=240, rounds=3)
    people = world.put(tmp_path)
    known: dict[str, Any] = {"population": people}
    options: list[object] = ["--population", people]
    if source == "totals":
        known = {
            "enrolled": tmp_path / "enrolled.parquet", "targets": tmp_path / "targets.csv",
            "population_size": world.size,
        }  # fmt: skip
        options = [
            "--enrolled", known["enrolled"], "--targets", known["targets"],
            "--population-size", world.size,
        ]  # fmt: skip
    inner = Recorder(fraction_train=0.8, **QUIET)
    FedIPW(
        inner, ledger=tmp_path / "ledger", scheme=scheme, covariates=world.columns, **known
    ).start(world.grid(), world.start, num_rounds=world.rounds)
    found = offline_weights(tmp_path, *options, "--scheme", scheme)
    assert_same(world, inner.handed, found, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (
            {"participation": ". + hour_sin + z1:hour_cos + elapsed", "day_hours": 24.0},
            ("--participation", ". + hour_sin + z1:hour_cos + elapsed", "--day-hours", 24),
        ),
        ({"decay": 0.6}, ("--decay", 0.6)),
        ({"window": 2}, ("--window", 2)),
    ],
    ids=["clock", "decay", "rolling"],
)
def test_models_that_follow_a_drift_are_those_of_the_ledger(
    tmp_path: Path, settings: dict[str, Any], options: tuple[object, ...]
) -> None:
    """Rounds open five hours apart, and a second server goes on after the third."""
    world = LabFederation(size=240, rounds=6)
    people, inner = world.put(tmp_path), Recorder(fraction_train=0.8, **QUIET)
    for until in (3, 6):
        first = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=5 * (until - 3))
        moments = iter([first + timedelta(hours=5 * k) for k in range(50)])
        FedIPW(
            inner, ledger=tmp_path / "ledger", scheme="fedipw", covariates=world.columns,
            population=people, refit_every=1, average=None,
            clock=partial(next, moments), **settings,
        ).start(world.grid(), world.start, num_rounds=until)  # fmt: skip
    found = offline_weights(
        tmp_path, "--population", people, "--scheme", "fedipw", "--refit-every", 1, *options
    )
    assert set(inner.handed) == set(range(1, 7))
    assert_same(world, inner.handed, found, rel=1e-9)


def offline_weights(where: Path, *options: object) -> pl.DataFrame:
    """Return what the command finds in a ledger."""
    out = where / "weights.parquet"
    given = ("--rounds", where / "ledger", "--out", out, "--force")
    code, _, err = fedipw("weights", *given, *options)
    assert code == 0, err
    return pl.read_parquet(out)


def assert_same(
    world: LabFederation, handed: dict[int, dict[int, float]], found: pl.DataFrame, *, rel: float
) -> None:
    ids = world.federation.population.frame["unit_id"].to_list()
    for (index,), part in found.group_by(["round"]):
        offline = dict(part.select("unit_id", "weight").rows())
        used = {ids[world.inside[node - 1000]]: w for node, w in handed[int(str(index))].items()}
        assert used.keys() == offline.keys()
        for unit, weight in offline.items():
            assert used[unit] == pytest.approx(weight, rel=rel, abs=1e-12)
    assert len(handed) == world.rounds


def boosted(world: LabFederation, where: Path, rounds: int) -> tuple[Recorder, Any]:
    """Train with boosted trees for both stages, from wherever an earlier run got to."""
    inner = Recorder(fraction_train=0.8, **QUIET)
    wrapped = FedIPW(
        inner, population=where / "people.parquet", ledger=where / "ledger",
        covariates=world.columns, classifier="boosting", folds=3, scheme="fedipw-hajek",
    )  # fmt: skip
    return inner, wrapped.start(world.grid(), world.start, num_rounds=rounds)


def test_boosting_gives_the_weights_of_the_command_and_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    world = LabFederation(size=240, rounds=4)
    places = [tmp_path / "whole", tmp_path / "parts"]
    for place in places:
        place.mkdir()
        world.put(place)
    inner, whole = boosted(world, places[0], world.rounds)
    options = ("--population", places[0] / "people.parquet", "--missing", "drop")
    found = offline_weights(places[0], *options, "--classifier", "boosting", "--folds", 3)
    assert_same(world, inner.handed, found, rel=1e-10)
    assert found["enrollment_prob"].n_unique() > 10
    last = found.filter(round=world.rounds)
    assert last["participation_prob"].n_unique() > 10  # a model's, not a rate
    logistic = offline_weights(places[0], *options).filter(round=world.rounds)
    assert (logistic["weight"] - last["weight"]).abs().max() > 1e-3  # type: ignore[operator]
    boosted(world, places[1], 2)
    _, resumed = boosted(world, places[1], world.rounds)
    np.testing.assert_array_equal(theta_of(resumed.arrays), theta_of(whole.arrays))
