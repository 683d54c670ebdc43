"""A run goes on where it was: the same model, the same memory, and honest refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy
from sklearn.naive_bayes import GaussianNB

from fedipw.errors import InputError
from fedipw.flower import declined
from fedipw.tables import Ledger

from .federations import Small, moved

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
INNER: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**QUIET),
    "FedProx": lambda: FedProx(**QUIET),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.7, server_learning_rate=0.5, **QUIET),
    "FedAdam": lambda: FedAdam(eta=0.1, **QUIET),
    "FedYogi": lambda: FedYogi(eta=0.1, **QUIET),
    "FedAdagrad": lambda: FedAdagrad(eta=0.1, **QUIET),
}


def made(where: Path, name: str) -> Small:
    (where / name).mkdir()
    return Small(where / name)


@pytest.mark.parametrize("name", INNER)
def test_a_strategys_memory_goes_on(tmp_path: Path, name: str) -> None:
    whole = made(tmp_path, "whole").trained(5, INNER[name]())
    parts = made(tmp_path, "parts")
    parts.trained(2, INNER[name]())
    resumed = parts.trained(5, INNER[name]())
    np.testing.assert_array_equal(resumed.arrays["theta"].numpy(), whole.arrays["theta"].numpy())
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    assert list(resumed.train_metrics_clientapp) == [1, 2, 3, 4, 5]


class Forgetful(FedAvg):
    """A strategy that counts, and remembers something that cannot be saved."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.count = 0
        self.log: Any = None

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.count += 1
        self.log = {"round": object()}
        return super().aggregate_train(server_round, replies)


def test_what_changed_is_restored_what_was_set_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path)
    with caplog.at_level("WARNING", "flwr"):
        small.trained(3, Forgetful(**QUIET))
    assert [r.getMessage() for r in caplog.records if "cannot be saved" in r.getMessage()] == [
        "FedIPW: Forgetful.log (dict) cannot be saved: a resumed run starts without it."
    ]
    inner = Forgetful(**{**QUIET, "min_train_nodes": 3})
    small.trained(3, inner)
    assert (inner.count, inner.log, inner.min_train_nodes) == (3, None, 3)


def test_evaluation_on_the_server_goes_on_too(tmp_path: Path) -> None:
    small, calls = Small(tmp_path), []

    def evaluate(index: int, arrays: ArrayRecord) -> MetricRecord | None:
        calls.append(index)
        return None if index == 1 else MetricRecord({"sum": float(arrays["theta"].numpy().sum())})

    for rounds in (2, 2, 4):
        result = small.strategy(scheme="fedavg").start(
            small.grid, small.start, num_rounds=rounds, evaluate_fn=evaluate
        )
    assert calls == [0, 1, 2, 3, 4]
    found = {k: v["sum"] for k, v in result.evaluate_metrics_serverapp.items()}
    assert found == {0: 0.0, 2: 6.0, 3: 9.0, 4: 12.0}


def test_a_run_that_is_done_returns_its_model(tmp_path: Path) -> None:
    small = Small(tmp_path)
    first = small.trained(3)
    for rounds in (3, 1):
        again = small.trained(rounds)
        np.testing.assert_array_equal(again.arrays["theta"].numpy(), first.arrays["theta"].numpy())
    assert len(small.asked) == 3 * 12


def test_a_server_goes_on_after_the_rounds_of_another(tmp_path: Path) -> None:
    def tired(message: Message, index: int) -> Message:
        return declined(message) if index in {1, 4} else moved(message, index)

    whole, small = made(tmp_path, "whole"), made(tmp_path, "parts")
    for each in (whole, small):
        each.behaviours = dict.fromkeys((1, 4, 6, 7), tired)
    expected = whole.trained(5)
    small.trained(1)
    late = small.strategy()  # knows of one round
    small.trained(3)
    found = late.start(small.grid, small.start, num_rounds=5)
    np.testing.assert_array_equal(found.arrays["theta"].numpy(), expected.arrays["theta"].numpy())
    assert found.train_metrics_clientapp == expected.train_metrics_clientapp


def test_the_ledger_is_held_while_a_server_runs_and_free_after_it(tmp_path: Path) -> None:
    small = Small(tmp_path)
    ledger = Ledger(tmp_path / "ledger")

    def evaluate(_: int, __: ArrayRecord) -> MetricRecord | None:
        with pytest.raises(InputError, match="writes the ledger"), ledger.writing():
            pass
        if ledger.rounds == (1,):
            raise RuntimeError("out of memory")
        return None

    with pytest.raises(RuntimeError, match="out of memory"):
        small.strategy().start(small.grid, small.start, num_rounds=3, evaluate_fn=evaluate)
    with ledger.writing(), pytest.raises(InputError, match="writes the ledger"):
        small.trained(3)
    assert small.asked == [(1, 100 + k) for k in range(12)]
    small.trained(3)
    assert ledger.rounds == (1, 2, 3)
    assert not (tmp_path / "ledger" / ".lock").exists()


def test_only_the_model_of_the_last_round_is_kept(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.trained(3)
    kept = sorted(path.name for path in (tmp_path / "ledger" / "checkpoint").glob("*.npz"))
    assert kept == ["round-000003.npz"]


@pytest.mark.parametrize(
    "other",
    [
        {"scheme": "participation-only"}, {"participation": "battery + age"},
        {"enrollment": "age**2"}, {"availability": "age", "history": True}, {"trim": 3.0},
        {"decay": 0.9}, {"window": 5}, {"day_length": 7.0},
        {"refit_every": 3}, {"l2": 1.0}, {"folds": 3}, {"classifier": "boosting", "folds": 2},
    ],
)  # fmt: skip
def test_other_settings_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    small = Small(tmp_path)
    small.trained(2)
    with pytest.raises(InputError, match=r"under other settings|other columns|not those of"):
        small.trained(3, **other)


def test_a_classifier_itself_is_part_of_the_settings(tmp_path: Path) -> None:
    whole, parts = made(tmp_path, "whole"), made(tmp_path, "parts")
    given: dict[str, Any] = {"folds": 2, "classifier": GaussianNB()}
    expected = whole.trained(3, **given)
    parts.trained(2, **given)
    with pytest.raises(InputError, match="under other settings"):
        parts.trained(3, folds=2, classifier=GaussianNB(var_smoothing=0.1))
    found = parts.trained(3, folds=2, classifier=GaussianNB())
    assert found.train_metrics_clientapp == expected.train_metrics_clientapp
    assert len(set(found.train_metrics_clientapp[3]["fedipw-weights"])) > 2


def test_another_model_is_refused(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.trained(2)
    small.start = ArrayRecord({"theta": Array(np.zeros(4))})
    with pytest.raises(InputError, match="other arrays than initial_arrays"):
        small.trained(3)


def test_a_ledger_without_its_model_is_refused(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.trained(2)
    path = tmp_path / "ledger" / "checkpoint" / "round-000002.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"round-000002.npz is damaged .* empty ledger"):
        small.trained(3)
    path.unlink()
    with pytest.raises(InputError, match=r"2 closed rounds, but .*round-000002.npz is missing"):
        small.trained(3)


def test_damaged_metrics_and_rounds_are_named(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.trained(2)
    told = tmp_path / "ledger" / "checkpoint" / "train-000001.json"
    before = told.read_text()
    told.write_text("{")
    with pytest.raises(InputError, match=r"train-000001.json is damaged"):
        small.trained(3)
    told.write_text(before)
    (tmp_path / "ledger" / "round-000002.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"round-000002.parquet is not a readable"):
        small.trained(3)


def test_what_was_written_of_a_round_that_never_closed_is_not_looked_at(tmp_path: Path) -> None:
    whole = made(tmp_path, "whole").trained(3)
    parts = made(tmp_path, "parts")
    parts.trained(2)
    folder = parts.where / "ledger" / "checkpoint"
    (folder / "round-000003.npz").write_bytes(b"half a model")
    (folder / "train-000003.json").write_text(json.dumps({"metrics": {"loss": 99.0}}))
    (parts.where / "ledger" / ".round-000003.parquet.partial").write_bytes(b"half a round")
    resumed = parts.trained(3)
    np.testing.assert_array_equal(resumed.arrays["theta"].numpy(), whole.arrays["theta"].numpy())
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    assert Ledger(parts.where / "ledger").rounds == (1, 2, 3)


def test_a_strategy_that_makes_no_model_of_a_round_is_recorded(tmp_path: Path) -> None:
    class Silent(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            made = super().aggregate_train(server_round, replies)
            return (None, None) if server_round == 2 else made

    small = Small(tmp_path)
    strategy: Strategy = Silent(**QUIET)
    result = small.trained(3, strategy, scheme="fedavg")
    np.testing.assert_allclose(result.arrays["theta"].numpy(), 2.0)
    assert Ledger(tmp_path / "ledger").rounds == (1, 2, 3)
