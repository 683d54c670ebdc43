"""Federated evaluation: the target population's metric with an interval, beside the plain one."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from cli.command import fedipw
from fedipw.flower import FedIPW
from fedipw.tables import Ledger

from .federations import INSIDE, LabFederation, Small

ROUNDS = 6


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LabFederation, Any]:
    """Return a run on the testbed in which clients report a covariate whose mean is known."""
    where = tmp_path_factory.mktemp("evaluated")
    world = LabFederation(seed=5, size=400, rounds=ROUNDS)
    strategy = FedIPW(
        FedAvg(fraction_evaluate=0.6, min_available_nodes=1), population=world.put(where),
        ledger=where / "ledger", covariates=world.columns,
    )  # fmt: skip
    return where, world, strategy.start(world.grid(), world.start, num_rounds=ROUNDS)


def test_weighting_moves_the_metric_to_the_population(
    evaluated: tuple[Path, LabFederation, Any],
) -> None:
    _, world, result = evaluated
    truth = float(world.federation.population.frame["z2"].mean())  # type: ignore[arg-type]
    told = result.evaluate_metrics_clientapp[ROUNDS]
    assert told["z2-plain"] > truth + 0.25  # those who reply are not the population
    assert told["z2-target-low"] < told["z2-target"] < told["z2-target-high"]
    assert told["z2-target-low"] < truth < told["z2-target-high"]
    assert abs(told["z2"] - truth) < 0.5 * (told["z2-plain"] - truth)
    assert told["fedipw-declined"] > 0


def test_the_command_finds_the_same_numbers_later(
    evaluated: tuple[Path, LabFederation, Any],
) -> None:
    where, _, result = evaluated
    code, out, err = fedipw(
        "evaluate", "--population", where / "people.parquet",
        "--rounds", where / "ledger" / "evaluation", "--missing", "drop",
        "--metrics", where / "ledger" / "evaluation" / "metrics" / "z2", "--by", "round", "--json",
    )  # fmt: skip
    assert code == 0, err
    lines = {(e["estimator"], e["group"]): e for e in json.loads(out)["estimates"]}
    told = result.evaluate_metrics_clientapp[ROUNDS]
    found = lines["hajek", f"round = {ROUNDS}"]
    assert found["estimate"] == pytest.approx(told["z2-target"], rel=1e-9)
    plain = lines["plain", f"round = {ROUNDS}"]
    assert plain["estimate"] == pytest.approx(told["z2-plain"], rel=1e-12)


def test_the_interval_follows_the_penalty(tmp_path: Path) -> None:
    keys = ("z2-target", "z2-target-low", "z2-target-high")
    told: dict[float, Any] = {}
    for l2 in (0.0, 20.0):
        where = tmp_path / f"{l2:g}"
        where.mkdir()
        world = LabFederation(seed=5, size=400, rounds=ROUNDS)
        strategy = FedIPW(
            FedAvg(fraction_evaluate=0.6, min_available_nodes=1), population=world.put(where),
            ledger=where / "ledger", covariates=world.columns, scheme="calibrated-quadratic", l2=l2,
        )  # fmt: skip
        result = strategy.start(world.grid(), world.start, num_rounds=ROUNDS)
        told[l2] = result.evaluate_metrics_clientapp[ROUNDS]
        evaluation = where / "ledger" / "evaluation"
        code, out, err = fedipw(
            "evaluate", "--population", where / "people.parquet", "--rounds", evaluation,
            "--metrics", evaluation / "metrics" / "z2", "--scheme", "calibrated-quadratic",
            "--l2", l2, "--missing", "drop", "--by", "round", "--json",
        )  # fmt: skip
        assert code == 0, err
        lines = {(e["estimator"], e["group"]): e for e in json.loads(out)["estimates"]}
        found = lines["hajek", f"round = {ROUNDS}"]
        for key, name in zip(keys, ("estimate", "low", "high"), strict=True):
            assert told[l2][key] == pytest.approx(found[name], rel=1e-9), (l2, key)
    for key in keys:
        assert abs(told[0.0][key] - told[20.0][key]) > 1e-3, key


def test_the_evaluation_ledger_tells_of_its_own_invitations(
    evaluated: tuple[Path, LabFederation, Any],
) -> None:
    where, world, _ = evaluated
    training, evaluation = Ledger(where / "ledger"), Ledger(where / "ledger" / "evaluation")
    assert training.rounds == evaluation.rounds == tuple(range(1, ROUNDS + 1))
    table = evaluation.read(3)
    assert table["invited"].sum() == int(0.6 * len(world.inside))
    assert set(table["fate"].drop_nulls()) == {"replied", "declined"}
    metrics = pl.read_parquet(where / "ledger" / "evaluation" / "metrics" / "z2" / "*.parquet")
    assert metrics.columns == ["unit_id", "round", "value", "n"]
    replied = table.filter("replied")["unit_id"].to_list()
    assert metrics.filter(round=3)["unit_id"].to_list() == replied


def test_a_strategy_that_does_not_evaluate_has_no_evaluation(tmp_path: Path) -> None:
    small = Small(tmp_path)
    result = small.trained(2)
    assert not result.evaluate_metrics_clientapp
    assert not (tmp_path / "ledger" / "evaluation").exists()
    assert not small.trained(2).evaluate_metrics_clientapp


def test_evaluation_in_some_rounds_goes_on_after_a_restart(tmp_path: Path) -> None:
    class Sometimes(FedAvg):
        def configure_evaluate(self, server_round: int, *rest: Any) -> Any:
            return super().configure_evaluate(server_round, *rest) if server_round % 2 else []

    small = Small(tmp_path)
    for rounds in (1, 2, 3, 5):
        result = small.trained(rounds, Sometimes(min_available_nodes=1))
    assert list(result.evaluate_metrics_clientapp) == [1, 3, 5]
    assert Ledger(tmp_path / "ledger" / "evaluation").rounds == (1, 2, 3)


def test_where_there_is_no_interval_the_reason_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path)
    small.people.with_columns(enrolled=pl.lit(True)).write_parquet(tmp_path / "people.parquet")
    with caplog.at_level("INFO", "flwr"):
        result = small.trained(1, FedAvg(min_available_nodes=1), scheme="participation-only")
    told = result.evaluate_metrics_clientapp[1]
    assert told["loss-plain"] == pytest.approx(0.1 * (INSIDE - 1) / 2)
    assert "loss-target" not in told
    assert any("no interval of loss: " in r.getMessage() and "all 60 clients are enrolled" in
               r.getMessage() for r in caplog.records)  # fmt: skip


def test_a_run_without_weights_has_an_interval_too(tmp_path: Path) -> None:
    found = {}
    for scheme in ("fedavg", "fedipw"):
        (tmp_path / scheme).mkdir()
        small = Small(tmp_path / scheme)
        told = small.trained(1, FedAvg(min_available_nodes=1), scheme=scheme)
        found[scheme] = told.evaluate_metrics_clientapp[1]
    for name in ("loss-target", "loss-target-low", "loss-target-high"):
        assert found["fedavg"][name] == pytest.approx(found["fedipw"][name], rel=1e-12)
    assert found["fedavg"]["loss"] == pytest.approx(found["fedavg"]["loss-plain"], rel=1e-12)
    assert found["fedavg"]["loss"] != pytest.approx(found["fedipw"]["loss"], rel=1e-3)


def test_odd_metrics_are_left_out_and_lists_are_averaged_only(tmp_path: Path) -> None:
    small = Small(tmp_path)
    app = small.grid.app
    answers: dict[int, dict[str, Any]] = {
        3: {"loss": float("nan"), "a/b": 1.0, "per class": [1.0, 2.0]},
        4: {"loss": 1.0},
    }
    usual = {"loss": 1.0, "a/b": 3.0, "per class": [1.0, 3.0]}

    def evaluate(message: Message, context: Any) -> Message:
        told = answers.get(int(context.node_config["k"]), usual)
        record = MetricRecord({"num-examples": 0, **told})
        return Message(RecordDict({"m": record}), reply_to=message)

    app._registered_funcs["evaluate.default"] = evaluate
    result = small.trained(1, FedAvg(min_available_nodes=1))
    told = result.evaluate_metrics_clientapp[1]
    assert told["fedipw-refused"] == 2
    assert told["per class"] == pytest.approx([1.0, 3.0])
    assert told["a/b"] == pytest.approx(3.0)
    folder = tmp_path / "ledger" / "evaluation" / "metrics"
    assert sorted(path.name for path in folder.iterdir()) == ["a%2Fb", "loss"]
    table = pl.read_parquet(folder / "loss" / "round-000001.parquet")
    assert table.columns == ["unit_id", "round", "value"]  # 0 examples count nothing
    outcomes = Ledger(tmp_path / "ledger" / "evaluation").read(1)["fate"]
    assert set(outcomes) == {
        "replied", "refused: metric 'loss' is not finite, or beyond 1e+100",
        "refused: records or metrics other than those of most replies",
    }  # fmt: skip


def test_devices_of_a_person_are_one_unit_of_the_interval(tmp_path: Path) -> None:
    told: list[Any] = []
    for cluster in (None, "person"):
        where = tmp_path / str(cluster)
        where.mkdir()
        world = LabFederation(seed=5, size=400, rounds=2)
        people = pl.read_parquet(world.put(where))
        if cluster is not None:
            people = people.with_columns(person=pl.int_range(pl.len()) // 4)
        strategy = FedIPW(
            FedAvg(fraction_evaluate=0.6, min_available_nodes=1), population=people,
            ledger=where / "ledger", covariates=world.columns, cluster=cluster,
        )  # fmt: skip
        result = strategy.start(world.grid(), world.start, num_rounds=2)
        told.append(result.evaluate_metrics_clientapp[2])
    alone, shared = told
    assert shared["z2-target"] == pytest.approx(alone["z2-target"], rel=1e-9)
    assert shared["z2-target-se"] != alone["z2-target-se"]
    assert shared["z2-target-low"] < shared["z2-target"] < shared["z2-target-high"]
