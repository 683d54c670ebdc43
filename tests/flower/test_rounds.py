"""Who is asked and invited, the outcome of each invitation, and its record in the ledger."""

import logging
import os
import random
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedipw.errors import InputError
from fedipw.flower import Outcome, declined
from fedipw.flower.outcomes import RoundOutcomes, outcome_of
from fedipw.selection.participation import StepLearner
from fedipw.tables import Ledger

from .federations import INSIDE, SIZE, Small, answered, moved, theta


def fails(message: Message, index: int) -> Message:
    raise RuntimeError(f"{message.metadata.message_type} of round {index} failed")


def test_the_ledger_records_each_outcome(tmp_path: Path) -> None:
    small = Small(
        tmp_path,
        {
            0: fails,
            1: lambda m, _: declined(m, "on battery"),
            2: lambda m, _: Message(Error(5, "offline"), reply_to=m),
            3: lambda m, _: Message(Error(4, "late"), reply_to=m),
            4: lambda m, _: Message(Error(8, "killed"), reply_to=m),
            5: lambda m, _: Message(Error(7, "bad app"), reply_to=m),
        },
        {7: None},
    )
    small.grid.online -= {108}
    small.grid.loses = lambda m: (
        m.metadata.dst_node_id == 106 and "query" not in (m.metadata.message_type)
    )
    result = small.trained(ask_timeout=0.01)
    outcomes = {unit: row["fate"] for unit, row in small.round().items()}
    assert outcomes == {
        "u0": "raised: RuntimeError('train of round 1 failed')",
        "u1": "declined", "u2": "lost", "u3": "expired", "u4": "crashed",
        "u5": "failed", "u6": "silent", "u7": None, "u8": None,
        "u9": "replied", "u10": "replied", "u11": "replied",
    }  # fmt: skip
    rows = small.round()
    assert [u for u, row in rows.items() if not row["available"]] == ["u7", "u8"]
    assert {row["battery"] for u, row in rows.items() if u in {"u7", "u8"}} == {None}
    assert all(row["invited"] == row["available"] for row in rows.values())
    assert [u for u, row in rows.items() if row["replied"]] == ["u9", "u10", "u11"]
    told = result.train_metrics_clientapp[1]
    for outcome in Outcome:
        count = [str(fate).split(":")[0] for fate in outcomes.values()].count(outcome.value)
        assert told[f"fedipw-{outcome.value}"] == count


def test_every_code_has_an_outcome() -> None:
    found = {code: outcome_of(Error(code)).value for code in (*range(9), 1000, 4321)}
    assert found == {
        0: "failed", 1: "failed", 2: "raised", 3: "expired", 4: "expired", 5: "lost", 6: "failed",
        7: "failed", 8: "crashed", 1000: "declined", 4321: "declined",
    }  # fmt: skip


def test_answers_to_other_rounds_and_second_answers_do_not_count(tmp_path: Path) -> None:
    small = Small(tmp_path)
    wrapped = small.strategy(scheme="fedavg")
    sent = list(wrapped.configure_train(1, small.start, ConfigRecord(), small.grid))
    replies = list(small.grid.send_and_receive(sent))
    old = moved(sent[0], 1)
    old.metadata.__dict__["_reply_to_message_id"] = "message of long ago"
    made = RoundOutcomes.of(wrapped.rounds.invited, [*replies, replies[0], old])
    assert made.strays == 2
    assert set(made.outcomes.values()) == {Outcome.REPLIED}
    _, metrics = wrapped.aggregate_train(1, [*replies, replies[0], old])
    assert metrics is not None
    assert metrics["fedipw-strays"] == 2
    assert metrics["fedipw-replied"] == INSIDE


def test_invitations_have_the_probability_of_the_strategys_sampling(tmp_path: Path) -> None:
    small = Small(tmp_path, told={3: None})
    small.trained(3, FedAvg(fraction_train=0.5, fraction_evaluate=0.0), ask_timeout=0.01)
    chosen = []
    for index in (1, 2, 3):
        rows = small.round(index)
        available = [u for u, row in rows.items() if row["available"]]
        invited = [u for u, row in rows.items() if row["invited"]]
        assert len(available) == INSIDE - 1
        assert {rows[u]["invite_prob"] for u in available} == {len(invited) / len(available)}
        assert rows["u3"]["invite_prob"] is None
        assert len(invited) == 5
        chosen.append(tuple(invited))
    assert len(set(chosen)) > 1


def test_sampling_follows_the_seed_and_leaves_other_chance_alone(tmp_path: Path) -> None:
    chosen = []
    for k, seed in enumerate((1, 1, 2)):
        (tmp_path / str(k)).mkdir()
        small = Small(tmp_path / str(k))
        random.seed(99)
        small.trained(2, FedAvg(fraction_train=0.5, fraction_evaluate=0.0), seed=seed)
        assert random.random() == random.Random(99).random()
        chosen.append([u for i in (1, 2) for u, r in small.round(i).items() if r["invited"]])
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_client_that_comes_back_as_another_node_is_the_same_client(tmp_path: Path) -> None:
    small = Small(tmp_path)
    wrapped = small.strategy()
    wrapped.start(small.grid, small.start, num_rounds=1)
    small.grid.contexts[777] = small.grid.contexts.pop(100)
    small.grid.online = small.grid.online - {100} | {777}
    wrapped.start(small.grid, small.start, num_rounds=2)
    assert small.round(2)["u0"]["replied"]


@pytest.mark.parametrize("participation", ["battery", "age"])
def test_two_nodes_that_claim_to_be_the_same_client_count_once(
    tmp_path: Path, participation: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, told={1: {"unit_id": "u0"}})
    with caplog.at_level(logging.WARNING, "flwr"):
        small.trained(scheme="fedavg", participation=participation)
    rows = small.round()
    assert rows["u0"]["replied"]
    assert not rows["u1"]["available"]
    assert any("another node speaks for" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"unit_id": "nobody"}, "who is not enrolled"),
        ({"unit_id": "u40"}, "who is not enrolled"),
        ({"unit_id": True}, "without a unit_id"),
        ({"battery": float("nan")}, "'battery' is nan"),
        ({"battery": "full"}, "'battery' is String"),
        ({"battery": [0.5]}, "must be a number, text or flag"),
    ],
)
def test_a_strange_answer_leaves_a_client_out_of_the_round(
    tmp_path: Path, told: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, told={5: told})
    with caplog.at_level(logging.WARNING, "flwr"):
        small.trained(2)
    assert not small.round(2)["u5"]["available"]
    assert sum(row["available"] for row in small.round(2).values()) == INSIDE - 1
    assert any(words in r.getMessage() for r in caplog.records)


def test_an_answer_that_lacks_a_covariate_leaves_a_client_out(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.trained(covariates=["battery", "wifi"])
    assert small.round()["u0"]["wifi"] is True
    (tmp_path / "b").mkdir()
    other = Small(tmp_path / "b")
    result = other.trained(participation="battery + mood", scheme="fedavg", ask_timeout=0.01,
                           inner=FedAvg(fraction_evaluate=0.0, min_train_nodes=0,
                                        min_available_nodes=0))  # fmt: skip
    assert result.train_metrics_clientapp[1]["fedipw-available"] == 0
    assert not any(row["available"] for row in other.round().values())


def test_clients_are_asked_every_round_only_if_there_is_something_to_ask(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.trained(3, participation="age")
    assert sorted(small.asked) == [(1, 100 + k) for k in range(INSIDE)]
    (tmp_path / "b").mkdir()
    other = Small(tmp_path / "b")
    other.trained(3, participation="age + battery")
    assert len(other.asked) == 3 * INSIDE


def test_a_round_nobody_is_there_for_is_recorded_and_skipped(tmp_path: Path) -> None:
    small = Small(tmp_path)
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=0, min_available_nodes=0)
    wrapped = small.strategy(inner)
    wrapped.start(small.grid, small.start, num_rounds=1)
    before = small.grid.online
    small.grid.online = set()
    wrapped.start(small.grid, small.start, num_rounds=2)
    small.grid.online = before
    result = wrapped.start(small.grid, small.start, num_rounds=3)
    assert not any(row["available"] for row in small.round(2).values())
    assert result.train_metrics_clientapp[2]["fedipw-invited"] == 0
    assert sum(row["replied"] for row in small.round(3).values()) == INSIDE


def test_clients_that_join_later_are_not_invited_before(tmp_path: Path) -> None:
    small = Small(tmp_path)
    joins = [3 if k == 2 else None for k in range(small.people.height)]
    small.people.with_columns(pl.Series("enrolled_from", joins)).write_parquet(
        tmp_path / "people.parquet"
    )
    small.trained(3)
    assert [("u2" in small.round(index)) for index in (1, 2, 3)] == [False, False, True]


def test_a_client_that_leaves_between_training_and_evaluation_is_not_evaluated(
    tmp_path: Path,
) -> None:
    small = Small(tmp_path)
    opened = [datetime(2026, 3, 1, hour, tzinfo=UTC) for hour in (4, 6)]
    left = [datetime(2026, 3, 1, 5, tzinfo=UTC) if k == 2 else None for k in range(SIZE)]
    small.people.with_columns(pl.Series("enrolled_until", left)).write_parquet(
        tmp_path / "people.parquet"
    )
    moments = iter(opened)
    inner = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    result = small.trained(1, inner, clock=lambda: next(moments))
    found = result.evaluate_metrics_clientapp[1]
    names = ("available", "invited", "replied", "strays")
    assert [found[f"fedipw-{name}"] for name in names] == [INSIDE - 1] * 3 + [0]
    assert small.round()["u2"]["replied"]
    rows = Ledger(tmp_path / "ledger" / "evaluation").read(1)
    assert rows["unit_id"].to_list() == [f"u{k}" for k in range(INSIDE) if k != 2]
    assert rows["replied"].all()
    assert set(rows["opened_at"]) == {opened[1]}


def test_a_round_knows_when_it_opened(tmp_path: Path) -> None:
    small = Small(tmp_path)
    moment = datetime(2026, 3, 1, 4, tzinfo=UTC)
    small.trained(clock=lambda: moment)
    assert {row["opened_at"] for row in small.round().values()} == {moment}


def test_messages_live_no_longer_than_a_round(tmp_path: Path) -> None:
    lives: set[tuple[str, float]] = set()

    def seen(message: Message) -> bool:
        lives.add((message.metadata.message_type.split(".")[0], message.metadata.ttl))
        return False

    small = Small(tmp_path)
    small.grid.loses = seen
    small.strategy(ask_timeout=7.0).start(small.grid, small.start, num_rounds=1, timeout=90.0)
    assert lives == {("query", 10 * 7.0), ("train", 90.0)}  # late answers are of use


class Picky(FedAvg):
    """A strategy that writes to a node of its own choice."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        sent = list(super().configure_train(server_round, arrays, config, grid))
        sent[0].metadata.dst_node_id = 4242
        return sent


class Double(FedAvg):
    """A strategy that writes to everybody twice."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return [
            *super().configure_train(server_round, arrays, config, grid),
            *super().configure_train(server_round, arrays, config, grid),
        ]


@pytest.mark.parametrize("kind", [Picky, Double])
def test_a_strategy_may_write_to_available_clients_once(tmp_path: Path, kind: type[FedAvg]) -> None:
    small = Small(tmp_path)
    with pytest.raises(InputError, match="must write to available clients, once to each"):
        small.trained(1, kind(fraction_evaluate=0.0))
    assert not Ledger(tmp_path / "ledger").rounds


def test_a_strategy_that_invites_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="invited none of 12 available"):
        Small(tmp_path).trained(1, FedAvg(fraction_train=0.0, fraction_evaluate=0.0))


def test_a_round_in_which_nobody_happens_to_be_invited_is_recorded(tmp_path: Path) -> None:
    """A twentieth of twelve clients is none."""
    small = Small(tmp_path)
    inner = FedAvg(fraction_train=0.05, fraction_evaluate=0.0, min_train_nodes=0)
    result = small.trained(2, inner)
    assert Ledger(tmp_path / "ledger").rounds == (1, 2)
    assert not any(row["invited"] for row in small.round(2).values())
    assert result.train_metrics_clientapp[2]["fedipw-invited"] == 0


def test_another_loop_than_start_begins_with_an_empty_ledger(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.trained(2)
    with pytest.raises(InputError, match="2 closed rounds, so the next is 3, not 1"):
        small.strategy().configure_train(1, small.start, ConfigRecord(), small.grid)
    with pytest.raises(InputError, match="was not opened"):
        small.strategy().aggregate_train(3, [])


def test_weights_and_the_wrapped_strategys_own_clients_counts_do_not_mix(tmp_path: Path) -> None:
    """A client cannot raise its weight by what it reports as its number of examples."""

    def greedy(message: Message, index: int) -> Message:
        del index
        return answered(message, {"theta": theta(message) + 5.0}, **{"num-examples": 10**9}, loss=1)

    small = Small(tmp_path, {0: greedy})
    result = small.trained(scheme="fedavg")
    expected = (5.0 + (INSIDE - 1) * 1.0) / INSIDE
    np.testing.assert_allclose(result.arrays["theta"].numpy(), expected)


def test_configuring_a_round_reads_and_fits_nothing_of_past_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes does not grow with the number of rounds: what was learnt is learnt at close."""

    def busy(message: Message, index: int) -> Message:
        who = int(message.metadata.dst_node_id)
        return declined(message) if (index + who) % 3 == 0 else moved(message, index)

    small, calls = Small(tmp_path, dict.fromkeys(range(INSIDE), busy)), []
    wrapped, arrays = small.strategy(scheme="fedipw", refit_every=1), small.start

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **settings: Any) -> Any:
            calls.append(name)
            return original(*args, **settings)

        monkeypatch.setattr(owner, name, call)

    for name in ("read", "scan"):
        counted(Ledger, name)
    for name in ("listdir", "scandir"):
        counted(os, name)
    counted(StepLearner, "refit")
    for index in range(1, 13):
        before = len(calls)
        sent = list(wrapped.configure_train(index, arrays, ConfigRecord(), small.grid))
        assert index <= 2 or calls[before:] == []  # the first closed round says what columns are
        made, _ = wrapped.aggregate_train(index, small.grid.send_and_receive(sent))
        assert made is not None
        arrays = made
    assert "refit" in calls  # so that it would have been seen
