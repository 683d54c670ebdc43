"""What is given in place of a strategy, and strategies that do not follow weights."""

import copy
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedYogi

from fedipw.errors import InputError
from fedipw.flower import FedIPW

from .federations import Small

HOW: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}


class PlainMean(FedAvg):
    """It keeps ``weighted_by_key`` and does not look at it."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        del server_round
        models = [next(iter(m.content.array_records.values())) for m in replies]
        mean = {
            key: Array(np.mean([model[key].numpy() for model in models], axis=0))
            for key in models[0]
        }
        return ArrayRecord(mean), MetricRecord()


class Median(FedAvg):
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        del server_round
        models = [next(iter(m.content.array_records.values())) for m in replies]
        middle = {
            key: Array(np.median([model[key].numpy() for model in models], axis=0))
            for key in models[0]
        }
        return ArrayRecord(middle), MetricRecord()


class FirstReply(FedAdam):
    """An adaptive step towards the first reply, whatever the weights."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return super().aggregate_train(server_round, list(replies)[:1])


class Counting(FedAvg):
    """One that follows weights and has a state of its own."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.calls = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.calls += 1
        return super().aggregate_train(server_round, replies)


class Locked(Counting):
    """A lock cannot be copied."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.lock = threading.Lock()


class OwnYogi(FedYogi):
    pass


class OwnMomentum(FedAvgM):
    pass


@pytest.mark.parametrize("kind", [PlainMean, Median, FirstReply])
def test_a_strategy_that_ignores_weights_is_refused_before_the_first_round(
    tmp_path: Path, kind: type[FedAvg]
) -> None:
    small = Small(tmp_path)
    with pytest.raises(InputError, match=f"{kind.__name__} does not follow weights"):
        small.trained(1, kind(**HOW))
    assert small.asked == []  # no client was troubled
    strategy = small.strategy(kind(**HOW))
    with pytest.raises(InputError, match="does not follow weights"):  # a loop of one's own
        strategy.configure_train(1, small.start, ConfigRecord(), small.grid)


@pytest.mark.parametrize(
    "inner",
    [Counting(**HOW), OwnYogi(eta=0.01, **HOW), OwnMomentum(server_momentum=0.9, **HOW)],
    ids=lambda inner: type(inner).__name__,
)
def test_one_that_follows_weights_is_tried_on_a_copy(
    tmp_path: Path, inner: FedAvg, caplog: pytest.LogCaptureFixture
) -> None:
    small, tried = Small(tmp_path), copy.deepcopy(inner)
    with caplog.at_level(logging.WARNING, "flwr"):
        small.trained(2, tried, scheme="fedipw")
    assert not any("could not be tried" in r.getMessage() for r in caplog.records)
    assert getattr(tried, "calls", 2) == 2
    small.trained(3, copy.deepcopy(inner), scheme="fedipw")  # with a state from disk


def test_one_that_cannot_be_copied_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small, inner = Small(tmp_path), Locked(**HOW)
    with caplog.at_level(logging.WARNING, "flwr"):
        small.trained(1, inner, scheme="fedavg")
    (line,) = [r.getMessage() for r in caplog.records if "could not be tried" in r.getMessage()]
    assert "Locked" in line
    assert "num-examples" in line
    assert inner.calls == 1


MISTAKES: dict[str, tuple[Any, str]] = {
    "a class": (FedAvg, r"must be an instance: write FedAvg\(\)"),
    "the older interface": (OlderFedAvg(), "older interface, flwr.server"),
    "a table": (pl.DataFrame({"unit_id": [1]}), "this is a DataFrame. Tables go to population="),
    "a pandas table": (pd.DataFrame({"unit_id": [1]}), "this is a DataFrame"),
    "a path": ("devices.parquet", "this is a str"),
    "nothing": (None, "this is a NoneType"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_strategy_is_refused_with_what_to_write(tmp_path: Path, name: str) -> None:
    given, words = MISTAKES[name]
    small = Small(tmp_path)
    with pytest.raises(InputError, match=words):
        FedIPW(given, population=small.people, ledger=tmp_path / "ledger")


def test_a_population_may_be_a_frame_of_pandas(tmp_path: Path) -> None:
    small = Small(tmp_path)
    frame = pd.DataFrame(small.people.to_dict(as_series=False))
    assert small.strategy(population=frame).config.stage.members.size == 12


def test_every_strategy_of_flowers_that_is_not_tried_would_pass(tmp_path: Path) -> None:
    small = Small(tmp_path)
    for name in ("FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedProx"):
        kind = getattr(flowers, name)
        own = type(f"Own{name}", (kind,), {})
        more = {"proximal_mu": 0.1} if name == "FedProx" else {}
        strategy = small.strategy(own(**HOW, **more))
        strategy._probe()
