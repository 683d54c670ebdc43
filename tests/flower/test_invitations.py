"""Invitations by design on Flower: probabilities, weights, resumption, rests, bad input."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedipw.errors import InputError
from fedipw.flower import FedIPW, Invitations
from fedipw.lab.invitations import SimulatedInvitations
from fedipw.lab.scenario import Scenario
from fedipw.tables import Ledger
from fedipw.weighting.invitations import InclusionProbabilities

from .federations import LabFederation, Small, theta_of
from .test_same_as_engine import QUIET, Recorder, assert_same, offline_weights


def invited_of(where: Path) -> list[set[Any]]:
    """Return who was invited, round by round."""
    return [set(table.filter("invited")["unit_id"].to_list()) for table in Ledger(where / "ledger")]


def started(world: LabFederation, where: Path, inner: FedAvg | None = None, **settings: Any) -> Any:
    given = {"population": world.put(where), "covariates": world.columns, "winsorise": None}
    return FedIPW(
        inner or FedAvg(fraction_train=0.4, **QUIET), ledger=where / "ledger",
        **{**given, **settings},
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["augmented", "fedipw-hajek", "calibrated-online", "greg"])
def test_the_ledger_has_the_designs_probabilities(tmp_path: Path, scheme: str) -> None:
    world = LabFederation(size=240, rounds=4)
    strategy = started(world, tmp_path, scheme=scheme, invitations="proportional")
    strategy.start(world.grid(), world.start, num_rounds=world.rounds)
    whole = np.ones(len(world.inside), dtype=np.bool_)
    number = int(0.4 * len(world.inside))
    for index, table in enumerate(Ledger(tmp_path / "ledger"), start=1):
        prob = table["invite_prob"].to_numpy()
        assert table["invited"].sum() == number
        assert prob.sum() == pytest.approx(number, rel=1e-12)
        assert prob.min() >= 0.1 * number / len(prob) * (1 - 1e-12)
        if index == 1 and scheme == "calibrated-online":
            np.testing.assert_allclose(prob, number / len(prob), rtol=1e-12)
            continue
        assert prob.max() > 2.0 * prob.min()
        if scheme != "calibrated-online":  # whose weights have moved on since
            scores = strategy.rounds.live.standing(whole)
            design = InclusionProbabilities.of(scores, number, 0.1)
            np.testing.assert_allclose(prob, design.prob(scores), rtol=1e-12)


@pytest.mark.parametrize(
    "scheme",
    [
        "augmented, augmentation=regression",  # what updates say of weights is not in a ledger
        "augmented-online",
        "calibrated-online",
        "fedipw",
        "fedipw-hajek",
        "efficient",
    ],
)
@pytest.mark.parametrize("rest", [1, 2])
def test_weights_are_those_found_in_the_ledger_later(
    tmp_path: Path, scheme: str, rest: int
) -> None:
    world = LabFederation(size=240, rounds=4)
    inner = Recorder(fraction_train=0.3, **QUIET)
    how = Invitations(rest=rest)
    strategy = started(world, tmp_path, inner, scheme=scheme, invitations=how)
    strategy.start(world.grid(), world.start, num_rounds=world.rounds)
    found = offline_weights(
        tmp_path, "--population", tmp_path / "people.parquet", "--scheme", scheme
    )
    assert_same(world, inner.handed, found, rel=1e-9)


def test_a_stopped_run_goes_on_with_the_same_invitations(tmp_path: Path) -> None:
    world = LabFederation(size=200, rounds=6)
    places, how = [tmp_path / "whole", tmp_path / "parts"], Invitations(number=20, rest=2)
    models = []
    for place in places:
        place.mkdir()
        for rounds in [6] if place.name == "whole" else [2, 3, 6]:
            strategy = started(world, place, scheme="augmented-online", invitations=how, seed=4)
            models.append(strategy.start(world.grid(), world.start, num_rounds=rounds))
    assert invited_of(places[0]) == invited_of(places[1])
    np.testing.assert_array_equal(theta_of(models[0].arrays), theta_of(models[-1].arrays))
    for changed in ({"invitations": Invitations(number=21, rest=2)}, {"seed": 5}):
        again: dict[str, Any] = {"invitations": how, "seed": 4, **changed}
        with pytest.raises(InputError, match="other settings"):
            started(world, places[1], scheme="augmented-online", **again).start(
                world.grid(), world.start, num_rounds=7
            )


def test_invitations_of_a_client_lie_apart(tmp_path: Path) -> None:
    world = LabFederation(size=200, rounds=9)
    strategy = started(world, tmp_path, invitations=Invitations(number=8, rest=3))
    strategy.start(world.grid(), world.start, num_rounds=world.rounds)
    last: dict[Any, int] = {}
    for index, invited in enumerate(invited_of(tmp_path), start=1):
        assert len(invited) == 8
        assert all(index - last[unit] >= 3 for unit in invited & last.keys())
        last |= dict.fromkeys(invited, index)


@pytest.mark.parametrize("rest", [1, 3])
@pytest.mark.parametrize("method", ["augmented", "augmented-online", "fedipw"])
def test_flower_invites_and_trains_as_the_lab_does(tmp_path: Path, method: str, rest: int) -> None:
    class Invited(LabFederation):
        @property
        def scenario(self) -> Scenario:
            how = SimulatedInvitations(number=20, rest=rest, method=method)
            return Scenario(
                seed=self.seed, rounds=self.rounds, population=super().scenario.population,
                methods=self.methods, invitations=how,
            )  # fmt: skip

    world = Invited(seed=3, size=200, rounds=8, methods=(method,))
    strategy = started(
        world, tmp_path, FedAvg(**QUIET), scheme=method, refit_every=1, average=None, seed=3,
        invitations=Invitations(number=20, rest=rest),
    )  # fmt: skip
    result = strategy.start(world.grid(), world.start, num_rounds=world.rounds)
    expected = world.trained().of(method)[-1]
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(theta_of(result.arrays), expected, rtol=0.0, atol=1e-10)


def test_unavailable_clients_have_no_probability_and_the_rest_share_the_invitations(
    tmp_path: Path,
) -> None:
    small = Small(tmp_path)
    small.told = {2: None, 5: None}
    small.trained(2, invitations=Invitations(number=4))
    for index in (1, 2):
        rows = small.round(index)
        assert rows["u2"]["invite_prob"] is None
        assert not rows["u2"]["invited"]
        known = [row["invite_prob"] for row in rows.values() if row["available"]]
        assert len(known) == 10
        assert sum(known) == pytest.approx(4.0, rel=1e-12)


def test_fewer_available_than_invitations_are_all_invited_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path)
    small.told = dict.fromkeys(range(9))
    with caplog.at_level("INFO", logger="flwr"):
        small.trained(1, invitations=Invitations(number=5))
    rows = small.round()
    assert {unit for unit, row in rows.items() if row["invited"]} == {"u9", "u10", "u11"}
    assert all(row["invite_prob"] == 1.0 for row in rows.values() if row["available"])
    assert "all 3 available clients are invited, not 5" in caplog.text
    assert "5 invitations a round, in proportion to enrollment weights" in caplog.text


def test_the_number_may_be_above_the_strategys_own(tmp_path: Path) -> None:
    small = Small(tmp_path)
    inner = FedAvg(fraction_train=0.25, **QUIET)
    small.trained(1, inner, invitations=Invitations(kind="uniform", number=7))
    rows = small.round()
    assert sum(row["invited"] for row in rows.values()) == 7
    for row in rows.values():
        assert row["invite_prob"] == pytest.approx(7 / 12, rel=1e-12)


def test_uniform_is_the_strategys_own_sampling(tmp_path: Path) -> None:
    seen: list[list[set[Any]]] = []
    for settings in ({}, {"invitations": "uniform"}, {"invitations": Invitations(kind="uniform")}):
        where = tmp_path / str(len(seen))
        where.mkdir()
        small = Small(where)
        small.trained(3, FedAvg(fraction_train=0.5, **QUIET), **settings)
        seen.append(invited_of(where))
    assert seen[0] == seen[1] == seen[2]


def test_evaluation_stays_with_the_strategy(tmp_path: Path) -> None:
    world = LabFederation(size=200, rounds=3)
    inner = FedAvg(
        fraction_train=0.3, fraction_evaluate=0.5, min_train_nodes=1, min_evaluate_nodes=1,
        min_available_nodes=1,
    )  # fmt: skip
    strategy = started(world, tmp_path, inner, invitations="proportional")
    strategy.start(world.grid(), world.start, num_rounds=3)
    for table in Ledger(tmp_path / "ledger" / "evaluation"):
        assert table["invite_prob"].n_unique() == 1
    for table in Ledger(tmp_path / "ledger"):
        assert table["invite_prob"].n_unique() > 10


class Different(FedAvg):
    """FedAvg that tells each client another step size."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        for k, message in enumerate(super().configure_train(server_round, arrays, config, grid)):
            told = ConfigRecord({"server-round": server_round, "lr": 0.1 * k})
            content = RecordDict({"arrays": arrays, "config": told})
            yield Message(content, dst_node_id=message.metadata.dst_node_id, message_type="train")


def test_different_messages_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    small = Small(tmp_path)
    called: list[int] = []

    def noted(message: Message, index: int) -> Message:
        called.append(index)
        raise AssertionError(message)

    small.behaviours = dict.fromkeys(range(12), noted)
    inner = Different(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    with pytest.raises(InputError, match="different messages to different clients"):
        small.trained(1, inner, invitations="proportional")
    assert not called
    assert not Ledger(tmp_path / "ledger").rounds


def test_equal_messages_that_are_not_the_same_object_pass(tmp_path: Path) -> None:
    class Copies(FedAvg):
        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            for message in super().configure_train(server_round, arrays, config, grid):
                told = ConfigRecord({"server-round": server_round, "lr": 0.1})
                content = RecordDict({"arrays": arrays, "config": told})
                node = message.metadata.dst_node_id
                yield Message(content, dst_node_id=node, message_type="train")

    small = Small(tmp_path)
    inner = Copies(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    small.trained(1, inner, invitations=Invitations(number=5))
    assert sum(row["replied"] for row in small.round().values()) == 5


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"invitations": Invitations(number=13)}, "13 invitations a round are more than the 12"),
        ({"invitations": "sometimes"}, "uniform or proportional, not 'sometimes'"),
        ({"invitations": "proportional", "scheme": "fedavg"}, "fedavg has none"),
        (
            {"invitations": "proportional", "scheme": "participation-only"},
            "participation-only has none",
        ),
        ({"invitations": "proportional", "scheme": "calibrated-linear"}, "some below zero"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        Small(tmp_path).strategy(**settings)


def test_clients_join_with_their_own_group_and_the_design_goes_on(tmp_path: Path) -> None:
    small = Small(tmp_path)
    frame = pl.read_parquet(tmp_path / "people.parquet")
    late = pl.when(pl.col("unit_id") == "u3").then(3).otherwise(None).cast(pl.Int64)
    frame.with_columns(late.alias("enrolled_from")).write_parquet(tmp_path / "people.parquet")
    small.trained(5, invitations=Invitations(number=2, rest=2))
    assert "u3" not in small.round(1)
    groups: dict[str, set[int]] = {}
    for index in range(1, 6):
        for unit, row in small.round(index).items():
            if row["invited"]:
                groups.setdefault(unit, set()).add(index % 2)
    assert all(len(found) == 1 for found in groups.values())
    assert "u3" in small.round(3)
