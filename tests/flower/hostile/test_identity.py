"""Nodes that say they are somebody else's client: who is believed, and for how long."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedipw.errors import InputError
from fedipw.flower import InProcessGrid
from fedipw.flower.identity import SILENT, Identities

from ..federations import INSIDE, Small


@dataclass(frozen=True)
class Info:
    """What Flower knows of a node."""

    node_id: int
    public_key: bytes = b""
    registered_at: str = ""


@dataclass
class World(Small):
    """A small federation whose nodes can be joined by impostors."""

    keys: dict[int, bytes] = field(default_factory=dict)  # by node
    since: dict[int, str] = field(default_factory=dict)  # when nodes were registered

    def __post_init__(self) -> None:
        super().__post_init__()
        world = self

        class KnownGrid(InProcessGrid):
            def get_nodes(self) -> Iterable[Any]:
                return [
                    Info(node, world.keys.get(node, b""), world.since.get(node, ""))
                    for node in sorted(self.online)
                ]

        plain = self.grid
        self.grid = KnownGrid(plain.app, {100 + k: {"k": k} for k in range(INSIDE)})
        self.seen: list[set[int]] = []  # nodes that were invited, by round
        self.grid.loses = self._note

    def _note(self, message: Any) -> bool:
        if message.metadata.message_type == "train":
            index = int(message.content.config_records["config"]["server-round"])
            while len(self.seen) < index:
                self.seen.append(set())
            self.seen[index - 1].add(message.metadata.dst_node_id)
        return False

    def join(self, node: int, k: int) -> None:
        """Let a node come online that says it is client k."""
        self.grid.contexts[node] = InProcessGrid(self.grid.app, {node: {"k": k}}).contexts[node]
        self.grid.online.add(node)


@pytest.mark.parametrize("participation", ["battery", "age"])
def test_a_lower_node_does_not_displace_the_one_that_was_first(
    tmp_path: Path, participation: str
) -> None:
    world = World(tmp_path)
    wrapped = world.strategy(participation=participation)
    wrapped.start(world.grid, world.start, num_rounds=1)
    for k in range(INSIDE):
        world.join(1 + k, k)
    result = wrapped.start(world.grid, world.start, num_rounds=4)
    for index in range(4):
        assert world.seen[index] == {100 + k for k in range(INSIDE)}
    assert result.train_metrics_clientapp[4]["fedipw-contested"] == INSIDE
    assert all(row["replied"] for row in world.round(4).values())


def test_a_stand_in_gives_way_when_the_holder_is_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    wrapped = world.strategy()
    wrapped.start(world.grid, world.start, num_rounds=1)
    world.grid.online.discard(100)
    world.join(7, 0)
    stood = wrapped.start(world.grid, world.start, num_rounds=2).train_metrics_clientapp[2]
    world.grid.online.add(100)
    wrapped.start(world.grid, world.start, num_rounds=3)
    assert [7 in nodes for nodes in world.seen] == [False, True, False]
    assert [100 in nodes for nodes in world.seen] == [True, False, True]
    assert stood["fedipw-stand-ins"] == 1


def test_a_node_that_names_one_client_after_the_other_blocks_none(tmp_path: Path) -> None:
    """Every round it says it is another client that is away; those come back the round after."""
    world = World(tmp_path)
    wrapped = world.strategy()
    thief = 5
    world.join(thief, 0)
    for index in range(1, 6):
        world.grid.contexts[thief].node_config["k"] = index
        away = 100 + index
        world.grid.online.discard(away)
        wrapped.start(world.grid, world.start, num_rounds=index)
        world.grid.online.add(away)
    rows = [world.round(index) for index in range(1, 6)]
    # it was the first to name client 1, and is nobody once it names client 2
    assert [thief in nodes for nodes in world.seen] == [True, False, False, False, False]
    for index in range(2, 6):
        assert rows[index - 1][f"u{index - 1}"]["replied"]  # back at once
        assert not rows[index - 1][f"u{index}"]["available"]


def test_the_node_that_was_registered_first_is_believed(tmp_path: Path) -> None:
    world = World(tmp_path, since={3: "2026-02-01", 100: "2026-01-01"})
    world.join(3, 0)
    world.strategy().start(world.grid, world.start, num_rounds=2)
    assert [3 in nodes for nodes in world.seen] == [False, False]
    assert [100 in nodes for nodes in world.seen] == [True, True]


def test_where_that_is_not_known_they_take_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.join(3, 0)
    wrapped = world.strategy()
    with caplog.at_level(logging.WARNING, "flwr"):
        wrapped.start(world.grid, world.start, num_rounds=4)
    assert [100 in nodes for nodes in world.seen] == [True, False, True, False]
    assert [3 in nodes for nodes in world.seen] == [False, True, False, True]
    said = [r.getMessage() for r in caplog.records if "another node speaks" in r.getMessage()]
    assert len(said) == 1
    world.grid.online.discard(3)
    wrapped.start(world.grid, world.start, num_rounds=5)
    world.grid.online.add(3)
    wrapped.start(world.grid, world.start, num_rounds=7)
    assert all(100 in nodes for nodes in world.seen[4:])  # it was alone, and holds the client


def test_a_holder_that_is_silent_gives_way(tmp_path: Path) -> None:
    world = World(tmp_path)
    wrapped = world.strategy(ask_timeout=0.001)
    wrapped.start(world.grid, world.start, num_rounds=1)
    world.join(777, 0)
    note = world.grid.loses
    world.grid.loses = lambda m: (
        note(m) or (m.metadata.dst_node_id == 100 and "query" in m.metadata.message_type)
    )
    wrapped.start(world.grid, world.start, num_rounds=6)
    found = [777 in nodes for nodes in world.seen]
    assert found == [False] * SILENT + [True] * (6 - SILENT)


def keyed(where: Path) -> World:
    return World(where, keys={100 + k: bytes([k, 1]) for k in range(INSIDE)})


def test_a_key_holds_its_client_over_restarts(tmp_path: Path) -> None:
    world = keyed(tmp_path)
    world.strategy(authenticated=True).start(world.grid, world.start, num_rounds=1)
    saved = json.loads((tmp_path / "ledger" / "identities.json").read_text())["keys"]
    assert saved == {f"u{k}": bytes([k, 1]).hex() for k in range(INSIDE)}
    world.grid.online.discard(100)
    world.join(2, 0)
    world.keys[2] = b"thief"
    wrapped = world.strategy(authenticated=True)
    wrapped.start(world.grid, world.start, num_rounds=2)
    assert not world.round(2)["u0"]["available"]
    assert any("another public key" in line for line in wrapped.roster.hearing.lines())
    world.join(3, 0)  # the client itself, as another node
    world.keys[3] = bytes([0, 1])
    world.strategy(authenticated=True).start(world.grid, world.start, num_rounds=3)
    assert 3 in world.seen[2]
    assert 2 not in world.seen[2]


def test_a_change_of_key_is_allowed_by_removing_its_line(tmp_path: Path) -> None:
    world = keyed(tmp_path)
    world.strategy(authenticated=True).start(world.grid, world.start, num_rounds=1)
    world.keys[100] = b"new"
    world.strategy(authenticated=True).start(world.grid, world.start, num_rounds=2)
    assert not world.round(2)["u0"]["available"]
    path = tmp_path / "ledger" / "identities.json"
    path.write_text("\n".join(line for line in path.read_text().split("\n") if '"u0"' not in line))
    world.strategy(authenticated=True).start(world.grid, world.start, num_rounds=3)
    assert world.round(3)["u0"]["replied"]
    path.write_text("[]")
    with pytest.raises(InputError, match=r"identities.json holds the clients' public keys"):
        world.strategy(authenticated=True)


def test_a_key_speaks_for_one_client(tmp_path: Path) -> None:
    world = keyed(tmp_path)
    world.grid.online.discard(105)
    wrapped = world.strategy(authenticated=True)
    wrapped.start(world.grid, world.start, num_rounds=1)
    world.grid.online.discard(104)
    world.join(900, 5)
    world.keys[900] = world.keys[104]
    wrapped.start(world.grid, world.start, num_rounds=2)
    assert not world.round(2)["u5"]["available"]
    assert any("key of another client" in line for line in wrapped.roster.hearing.lines())


def test_nodes_without_keys_are_not_authenticated(tmp_path: Path) -> None:
    world = World(tmp_path)
    wrapped = world.strategy(authenticated=True, patience=0.01)
    with pytest.raises(InputError, match=r"12 nodes .*has no public key"):
        wrapped.start(world.grid, world.start, num_rounds=1)


def test_holders_are_remembered_up_to_a_number(tmp_path: Path) -> None:
    grid = InProcessGrid(Small(tmp_path).app(), {})
    known = Identities(["a"])
    for node in range(1, 100):
        known.online([node])
        assert known.claim(node, 0, node, grid) is None
        assert known.speakers(node, grid, asked=True) == {0: node}
    known.online([1, 99])
    known.claim(1, 0, 100, grid)
    known.claim(99, 0, 100, grid)
    assert known.speakers(100, grid, asked=True) == {0: 1}  # the first of all is not forgotten
