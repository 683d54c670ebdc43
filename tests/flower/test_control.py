"""SCAFFOLD on a server: clients and server agree on control variates, whatever gets lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp

from fedipw.errors import InputError
from fedipw.flower import ControlVariate, FedIPW, InProcessGrid, Screen, declined, describes
from fedipw.flower.client import CONTROL, CONTROL_OWN, CONTROL_STATE, control_change
from fedipw.numerics import FloatArray

from .federations import INSIDE, Small, answered, moved, round_of, theta
from .test_augmentation import busy, bytes_of, goal, made
from .test_memory import EXACT, direct, kept, omega_of

SCHEME = "scaffold+efficient"
STEPS, SIZE = 3, 0.2
ROUNDS = 8
Spoilt = Callable[[int, int, Message], Message | None]  # a reply on its way: client, round


def honest(k: int, index: int, reply: Message) -> Message | None:
    del k, index
    return reply


class Federation:
    """The small federation, with clients that do SCAFFOLD's local steps on |y - goal|^2 / 2."""

    def __init__(self, small: Small, spoilt: Spoilt = honest) -> None:
        self.small, self.spoilt = small, spoilt
        self.got: list[tuple[int, int, bool]] = []  # round, client, whether its own came with it
        app = ClientApp()

        @describes(app)
        def about(context: Context, server_round: int) -> dict[str, Any]:
            del server_round
            k = int(context.node_config["k"])
            return {"unit_id": f"u{k}", "battery": 0.1 * (k % 7)}

        @app.train()
        def train(message: Message, context: Context) -> Message:
            k, index = int(context.node_config["k"]), round_of(message)
            self.got.append((index, k, CONTROL_OWN in message.content.array_records))
            if busy(k, index):
                return declined(message, "busy")
            control = ControlVariate.of(message, context)
            model = theta(message)
            for _ in range(STEPS):
                slope = (model - goal(k)).astype(model.dtype) + control.corrections["theta"]
                model = model - model.dtype.type(SIZE) * slope
            reply = control.reply(answered(message, {"theta": model}), steps=STEPS, step_size=SIZE)
            found = self.spoilt(k, index, reply)
            if found is None:
                raise RuntimeError("the reply never arrives")
            return found

        self.grid = InProcessGrid(app, {100 + k: {"k": k} for k in range(INSIDE)})

    def run(self, rounds: int, **settings: Any) -> FedIPW:
        strategy = self.small.strategy(scheme=SCHEME, **{"average": None, **settings})
        self.result = strategy.start(self.grid, self.small.start, num_rounds=rounds)
        return strategy

    def rows(self) -> list[int]:
        """Return the client in each row."""
        ids = self.small.people.head(INSIDE)["unit_id"].to_list()
        return [int(str(unit)[1:]) for unit in ids]

    def held(self, k: int, accepted: int, factor: float = 1.0) -> FloatArray:
        """Return a client's control variate as it will be in its next round."""
        state = self.grid.contexts[100 + k].state
        known = state.config_records[CONTROL_STATE]
        own = state.array_records[CONTROL]["theta"].numpy()
        if known["round"] == accepted:
            pending = state.array_records["fedipw-control-pending"]["theta"].numpy()
            return factor * (own + pending)
        assert known["base"] == accepted
        return own


def agree(federation: Federation, strategy: FedIPW, index: int) -> None:
    """Assert that c is the sum over the store, and the store what clients hold."""
    clients, total = kept(federation.small)
    omega = omega_of(strategy, index)
    np.testing.assert_allclose(total, direct(clients, omega), rtol=0.0, atol=EXACT)
    assert strategy.memory is not None
    state = strategy.memory.state()
    rows = federation.rows()
    for row, vector in clients.items():
        accepted, factor = int(state["latest"][row]), float(state["factors"][row])
        np.testing.assert_array_equal(federation.held(rows[row], accepted, factor), vector)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_server_and_clients_hold_the_same_numbers(tmp_path: Path, dtype: Any) -> None:
    federation = Federation(made(tmp_path, "a", dtype))
    for index in range(1, 6):
        strategy = federation.run(index)
        agree(federation, strategy, index)
    clients, _ = kept(federation.small)
    assert len(clients) > 8
    assert {v.dtype for v in clients.values()} == {np.dtype(dtype)}


def spoiling(k: int, index: int, reply: Message) -> Message | None:
    """Return replies of which some never arrive and some are refused."""
    chance = (7 * k + 3 * index) % 5
    if chance == 0:
        return None
    if chance == 1:
        reply.content["arrays"] = ArrayRecord({"theta": Array(np.full(3, np.nan))})
    return reply


def test_lost_and_refused_replies_leave_both_sides_agreeing(tmp_path: Path) -> None:
    federation = Federation(made(tmp_path, "a"), spoiling)
    outcomes = set()
    for index in range(1, ROUNDS + 1):
        strategy = federation.run(index)
        agree(federation, strategy, index)
        outcomes |= {str(row["fate"]) for row in federation.small.round(index).values()}
    raised = "raised: RuntimeError('the reply never arrives')"
    assert {"replied", raised, "refused: NaN or infinite values"} <= outcomes


@pytest.mark.parametrize("lost", [False, True])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path: Path, lost: bool) -> None:
    """Also when no client has its context any more: it is sent its own control variate."""
    whole, parts = Federation(made(tmp_path, "whole")), Federation(made(tmp_path, "parts"))
    whole.run(ROUNDS)
    for rounds in (2, 5, ROUNDS):
        parts.run(rounds)
        if lost:
            for context in parts.grid.contexts.values():
                context.state = RecordDict()
    assert bytes_of(parts.result) == bytes_of(whole.result)
    assert not any(own for _, _, own in whole.got)  # nobody lost anything
    sent = {index for index, _, own in parts.got if own}
    assert sent & {3, 6}
    assert 2 not in sent


def test_a_client_that_lost_its_state_begins_again_and_the_mean_stays_exact(
    tmp_path: Path,
) -> None:
    federation = Federation(made(tmp_path, "a"))
    strategy = federation.small.strategy(scheme=SCHEME, average=None)

    def forget(message: Message) -> bool:
        if message.metadata.message_type == "train" and round_of(message) == 4:
            federation.grid.contexts[message.metadata.dst_node_id].state = RecordDict()
        return False

    federation.grid.loses = forget
    strategy.start(federation.grid, federation.small.start, num_rounds=6)
    assert not any(own for _, _, own in federation.got)
    agree(federation, strategy, 6)


def test_enrollment_that_changes_keeps_the_mean_exact(tmp_path: Path) -> None:
    small = made(tmp_path, "a")
    row = pl.int_range(pl.len())
    since = pl.when(row < INSIDE - 2).then(1).when(row < INSIDE).then(4)
    until = pl.when(row == 1).then(5)
    people = small.people.with_columns(enrolled_from=since, enrolled_until=until)
    people.write_parquet(small.where / "people.parquet")
    federation = Federation(small)
    means: dict[int, Any] = {}

    def spoilt(k: int, index: int, reply: Message) -> Message | None:
        del k
        means.setdefault(index, reply.content.config_records[CONTROL]["length"])
        return reply

    federation.spoilt = spoilt
    for index in range(1, ROUNDS + 1):
        strategy = federation.run(index)
        agree(federation, strategy, index)
        assert (1 in kept(small)[0]) == (index < 5)
    assert set(means) == set(range(1, ROUNDS + 1))


def extra(name: str, record: Any) -> Spoilt:
    def spoilt(k: int, index: int, reply: Message) -> Message:
        if (k, index) == (5, 3):
            reply.content[name] = record
        return reply

    return spoilt


def control(**values: Any) -> Any:
    return ConfigRecord({"base": 0, "length": STEPS * SIZE, **values})


LIES: dict[str, tuple[Spoilt, str]] = {
    "no record": (extra(CONTROL, ArrayRecord()), "array records, not one"),
    "arrays": (
        extra("more", ArrayRecord({"theta": Array(np.zeros(3))})),
        "2 array records, not one",
    ),
    "nan": (extra(CONTROL, control(length=float("nan"))), "a local path of length nan"),
    "infinite": (extra(CONTROL, control(length=float("inf"))), "a local path of length inf"),
    "negative": (extra(CONTROL, control(length=-1.0)), "a local path of length -1.0"),
    "zero": (extra(CONTROL, control(length=0.0)), "a local path of length 0.0"),
    "text": (extra(CONTROL, control(length="long")), "a local path of length 'long'"),
    "whole": (extra(CONTROL, control(length=1)), "a local path of length 1"),
    "empty": (extra(CONTROL, ConfigRecord()), "a local path of length None"),
    "tiny": (extra(CONTROL, control(length=1e-12)), "a control variate of norm"),
    "smallest": (extra(CONTROL, control(length=5e-324)), "a control variate of norm inf"),
    "another round": (extra(CONTROL, control(base=7)), "a control variate of round 7"),
    "a flag": (extra(CONTROL, control(base=True)), "a control variate of round True"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_a_control_variate_is_refused_and_recorded(tmp_path: Path, lie: str) -> None:
    spoilt, why = LIES[lie]
    assert not busy(5, 3)
    lying = Federation(made(tmp_path, "lying"), spoilt)
    silent = Federation(made(tmp_path, "silent"), lambda k, i, r: None if (k, i) == (5, 3) else r)
    for federation in (lying, silent):
        strategy = federation.run(5)
        agree(federation, strategy, 5)
    fate = str(lying.small.round(3)["u5"]["fate"])
    assert fate.startswith("refused: "), fate
    assert why in fate
    assert bytes_of(lying.result) == bytes_of(silent.result)


def test_a_client_without_the_helper_is_refused(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.behaviours = dict.fromkeys(range(INSIDE), moved)
    strategy = small.strategy(scheme=SCHEME)
    strategy.start(small.grid, small.start, num_rounds=1)
    fates = {str(row["fate"]) for row in small.round().values()}
    assert fates == {"refused: no control variate: its app needs fedipw.flower.ControlVariate"}


def test_a_large_control_variate_is_clipped_on_both_sides(tmp_path: Path) -> None:
    """One client says that its path was a thousand times shorter."""

    def spoilt(k: int, index: int, reply: Message) -> Message:
        if (k, index) == (5, 2):
            reply.content.config_records[CONTROL]["length"] = 1e-3 * STEPS * SIZE
        return reply

    assert not busy(5, 2)
    federation = Federation(made(tmp_path, "a"), spoilt)
    strategy = federation.run(2, screen=Screen(max_norm=1e9))
    clients, _ = kept(federation.small)
    row = federation.rows().index(5)
    assert strategy.memory is not None
    factor = strategy.memory.state()["factors"][row]
    assert 0.0 < factor < 0.1
    norms = sorted(float(np.linalg.norm(v)) for v in clients.values())
    # ten times the median of the round's before clipping, which is at most that of the largest
    assert float(np.linalg.norm(clients[row])) <= 10.0 * norms[-2] * (1.0 + 1e-12)
    federation.run(4, screen=Screen(max_norm=1e9))


def test_the_helper_says_what_is_wrong(tmp_path: Path) -> None:
    small = Small(tmp_path)
    raised: list[str] = []

    def train(message: Message, index: int) -> Message:
        del index
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        for steps, size in ((0, 0.1), (1, float("nan")), (-1, 0.1)):
            try:
                ControlVariate.of(message, context).reply(
                    answered(message, {"theta": theta(message)}), steps=steps, step_size=size
                )
            except InputError as error:
                raised.append(str(error))
        return declined(message)

    small.behaviours = {0: train}
    small.trained(1, scheme="fedavg")
    assert "The server sent no control variates" in raised[0]
    raised.clear()
    (tmp_path / "b").mkdir()
    other = Small(tmp_path / "b")
    other.behaviours = {0: train}
    other.trained(1, scheme=SCHEME)
    assert len(raised) == 3
    assert all("steps times step_size must be positive" in text for text in raised)


def test_a_change_is_the_published_one() -> None:
    """(O15): the difference of the new control variate and the old, for any old one."""
    rng = np.random.default_rng(3)
    sent, trained, mean, own = rng.standard_normal((4, 5))
    new = own - mean + (sent - trained) / 0.6
    found = own + control_change(sent, trained, mean, 0.6)
    np.testing.assert_allclose(found, new, rtol=0.0, atol=1e-14)
