"""Set-up mistakes and slow clients: the server says what it heard, and ends instead of waiting."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from cli.command import fedipw
from fedipw.errors import InputError
from fedipw.flower import InProcessGrid, describes
from fedipw.flower.preflight import Hearing

from ..federations import INSIDE, Small, moved

QUICK: dict[str, Any] = {"patience": 0.05, "ask_timeout": 0.01}


def ended(small: Small, **settings: Any) -> str:
    with pytest.raises(InputError) as found:
        small.trained(1, **{**QUICK, **settings})
    assert not (small.where / "ledger" / "round-000001.parquet").exists()
    return str(found.value)


def test_a_client_app_without_a_description_is_named(tmp_path: Path) -> None:
    small, app = Small(tmp_path), ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        return moved(message, 1)

    small.grid = InProcessGrid(app, {100 + k: {"k": k} for k in range(INSIDE)})
    said = ended(small)
    assert "0 clients could be used, of 12 nodes online" in said
    assert "12 nodes (such as 100): could not describe itself: " in said
    assert "fedipw" in said


def test_a_description_that_raises_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small, app = Small(tmp_path), ClientApp()

    @describes(app)
    def about(context: Context, server_round: int) -> dict[str, float]:
        del server_round
        raise OSError(f"no battery on this {'desk' if int(context.node_config['k']) else 'table'}")

    small.grid = InProcessGrid(app, {100 + k: {"k": k} for k in range(INSIDE)})
    with caplog.at_level(logging.WARNING, "flwr"):
        said = ended(small)
    assert "11 nodes (such as 101): could not describe itself: OSError('no battery on this" in said
    assert "node 100: could not describe itself: OSError('no battery on this table')" in said
    lines = [r.getMessage() for r in caplog.records if "no battery" in r.getMessage()]
    assert len(lines) == 2  # one a kind


def test_identifiers_that_match_nothing_are_shown_beside_those_of_the_table(
    tmp_path: Path,
) -> None:
    small = Small(tmp_path, told={k: {"unit_id": f"000{k}"} for k in range(INSIDE)})
    ids = list(range(small.people.height))
    small.people.with_columns(unit_id=pl.Series(ids)).write_parquet(tmp_path / "people.parquet")
    said = ended(small)
    assert "12 nodes (such as 100): answered as one who is not enrolled" in said
    assert "first '0000' (str)" in said
    assert "such as 0 (int)" in said


def test_covariates_that_nobody_has_are_named(tmp_path: Path) -> None:
    said = ended(Small(tmp_path), participation="battery + mood")
    assert "12 nodes (such as 100): its answer lacks 'mood'" in said


def test_nobody_online_ends_too_and_later_rounds_wait_no_longer(tmp_path: Path) -> None:
    small = Small(tmp_path)
    online, small.grid.online = small.grid.online, set()
    assert "0 clients could be used, of 0 nodes online" in ended(small)
    small.grid.online = online
    small.trained(2, **QUICK)
    small.grid.online = {100, 101}
    with pytest.raises(InputError, match="2 clients could be used, of 2 nodes online"):
        small.trained(3, FedAvg(fraction_evaluate=0.0, min_available_nodes=5), **QUICK)
    small.grid.online = online
    assert 3 in small.trained(3, **QUICK).train_metrics_clientapp


def test_a_round_that_grows_goes_on_waiting(tmp_path: Path) -> None:
    """Each look at the nodes finds one more: the limit is on waiting without any change."""
    small = Small(tmp_path)

    class Growing(InProcessGrid):
        looks = 0

        def get_node_ids(self) -> Iterable[int]:
            self.looks += 1
            time.sleep(0.02)
            return sorted(self.online)[: self.looks]

    grown = Growing(small.grid.app, {100 + k: {"k": k} for k in range(INSIDE)})
    wrapped = small.strategy(patience=0.2)
    wrapped.roster.open(1, wrapped._clock())
    counts = [len(wrapped.roster.available(grown)) for _ in range(INSIDE)]
    assert counts == list(range(1, INSIDE + 1))


def test_a_directory_that_cannot_be_written_is_an_error_before_anybody_is_asked(
    tmp_path: Path,
) -> None:
    small = Small(tmp_path)
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "checkpoint").write_text("a file in its place")
    with pytest.raises(InputError, match="checkpoint cannot be written"):
        small.trained(1)
    assert small.asked == []


def test_errors_of_training_are_in_the_ledger_and_it_stays_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(message: Message, index: int) -> Message:
        del message
        raise ValueError(f"no data\x1b in round {index}\nTraceback" + "x" * 10_000)

    small = Small(tmp_path, {0: fails, 1: fails})
    with caplog.at_level(logging.WARNING, "flwr"):
        small.trained(2)
    fate = small.round(2)["u0"]["fate"]
    assert fate.startswith("raised: ValueError('no data")
    assert len(fate) < 200
    assert "\n" not in fate
    said = [r.getMessage() for r in caplog.records if "clients raised" in r.getMessage()]
    assert [line[:48] for line in said] == ["FedIPW: 2 clients raised an error: 2 x ValueErro"] * 2
    code, _, errors = fedipw(
        "weights", "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "ledger",
        "--participation", "battery", "--scheme", "fedipw-hajek", "--missing", "drop", "--soft",
        "--out", tmp_path / "weights.parquet",
    )  # fmt: skip
    assert code == 0, errors
    assert pl.read_parquet(tmp_path / "weights.parquet").height == 2 * (INSIDE - 2)


class SlowGrid(InProcessGrid):
    """Answers to questions can be pulled only after some looks, as of a queue of slow clients."""

    delay = 3

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.questions = 0
        self._due: dict[str, int] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        made = list(super().push_messages(sent))
        for name, message in zip(made, sent, strict=True):
            asks = "query" in message.metadata.message_type
            self.questions += asks
            self._due[name] = self.delay if asks else 0
        return made

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = []
        for name in message_ids:
            self._due[name] = self._due.get(name, 0) - 1
            if self._due[name] < 0:
                ready.append(name)
        return super().pull_messages(ready)


def test_slow_clients_are_asked_once_and_their_late_answers_used(tmp_path: Path) -> None:
    """A question is not asked anew while it is open, however often the strategy looks."""
    small = Small(tmp_path)
    grid = SlowGrid(small.grid.app, {100 + k: {"k": k} for k in range(INSIDE)})
    wrapped = small.strategy(ask_timeout=60.0)
    wrapped.roster.open(1, wrapped._clock())
    found = []
    for _ in range(4):
        wrapped.roster._asked_at.clear()  # as if the time to wait for answers had passed
        found.append(len(wrapped.roster.available(grid)))
    assert found == [0, 0, 0, INSIDE]
    assert grid.questions == INSIDE


def test_questions_that_live_too_long_are_given_up(tmp_path: Path) -> None:
    small = Small(tmp_path)
    grid = SlowGrid(small.grid.app, {100 + k: {"k": k} for k in range(INSIDE)})
    grid.delay = 10**6
    wrapped = small.strategy(ask_timeout=0.001)
    wrapped.roster.open(1, wrapped._clock())
    assert wrapped.roster.available(grid) == []
    time.sleep(0.02)
    assert wrapped.roster.available(grid) == []
    assert grid.questions == 2 * INSIDE


def test_kinds_of_faults_are_bounded() -> None:
    hearing = Hearing()
    for node in range(1000):
        hearing.fault(node, f"fault {node}")
    assert hearing.nodes == 1000
    assert len(hearing.lines()) == 6
    assert hearing.lines()[0].startswith("950 nodes (such as 50): other faults")
