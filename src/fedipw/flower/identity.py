"""Which node speaks for which client, when several say they do.

Nodes name the client they are, and a server cannot see whether that is true. Five rules say who is
believed:

1. A node is one client. If it names a second one it is neither, for as long as it is online.
2. The first node that names a client holds it: while it is online nobody else speaks for it.
3. While the holder is offline another node may stand in, and gives way when the holder is back. A
   holder that is online but has not answered in :data:`SILENT` rounds is taken as offline.
4. Several nodes that name a client nobody holds: the one that Flower registered first holds it.
   Where that is not known they take turns, round by round, until one of them is left.
5. With authenticated nodes a client is held by a public key, on disk and for good, in place of
   rules 2 and 3: a node with another key is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from flwr.serverapp import Grid

from fedipw.errors import InputError
from fedipw.storage.atomic import write_text

FILE: Final = "identities.json"  # in the ledger's directory
SILENT: Final = 3  # rounds without an answer after which a holder gives way
_HOLDERS: Final = 8  # nodes that are remembered as holders of one client


@dataclass(slots=True)
class _Claims:
    """What is known of one client's nodes."""

    nodes: set[int] = field(default_factory=set)  # online, and say they are this client
    holders: list[int] = field(default_factory=list)  # that held it, the first one first

    def forget(self, node: int) -> None:
        """Forget a node that has named another client too."""
        self.nodes.discard(node)
        if node in self.holders:
            self.holders.remove(node)


@final
class Identities:
    """Nodes by client, and who of several is believed.

    Parameters
    ----------
    ids
        Identifiers of the clients, by row.
    keys
        File of the public keys that hold clients, where Flower authenticates nodes; else none.
    """

    def __init__(self, ids: Iterable[object], keys: Path | None = None) -> None:
        self._ids = [str(unit) for unit in ids]
        self._file, self._pinned = keys, {} if keys is None else _read(keys)
        self._unit_of = {key: unit for unit, key in self._pinned.items()}
        self._unsaved = False
        self._row_of: dict[int, int] = {}  # by node
        self._claims: dict[int, _Claims] = {}  # by row
        self._online: set[int] = set()
        self._liars: set[int] = set()  # online, and have named several clients
        self._heard: dict[int, int] = {}  # round of a node's last answer
        self._infos: dict[int, Any] = {}  # Flower's, by node
        self.stand_ins = 0  # clients that another node than their first speaks for
        self.contested = 0  # clients that several nodes say they are

    @property
    def authenticated(self) -> bool:
        """Whether clients are held by public keys."""
        return self._file is not None

    def row_of(self, node: int) -> int:
        """Return the client that a node that is online has named."""
        return self._row_of[node]

    def knows(self, node: int) -> bool:
        """Return whether a node that is online has named its client."""
        return node in self._row_of

    def online(self, nodes: Iterable[int]) -> None:
        """Take which nodes are online; what those that left have said does not count any more."""
        self._online = set(nodes)
        for node in set(self._row_of) - self._online:
            self._claims[self._row_of.pop(node)].nodes.discard(node)
        self._liars &= self._online
        self._heard = {node: at for node, at in self._heard.items() if node in self._online}
        self._infos = {node: info for node, info in self._infos.items() if node in self._online}

    def claim(self, node: int, row: int, index: int, grid: Grid) -> str | None:
        """Take that a node says it is a client, in a round; return why it is not believed."""
        before = self._row_of.get(node)
        if before is not None and before != row:
            self._liars.add(node)
            self._claims[self._row_of.pop(node)].forget(node)
        if node in self._liars:
            return "has named several clients"
        self._heard[node] = index
        if self.authenticated:
            refused = self._key_fault(node, row, grid)
            if refused:
                return refused
        self._row_of[node] = row
        self._claims.setdefault(row, _Claims()).nodes.add(node)
        return None

    def speakers(self, index: int, grid: Grid, *, asked: bool) -> dict[int, int]:
        """Return the node that speaks for each client in a round, by row.

        ``asked`` is whether nodes are asked in every round, so that silence says something.
        """
        self.stand_ins = self.contested = 0
        found = {}
        for row, claims in self._claims.items():
            if claims.nodes:
                node = self._speaker(row, claims, index, grid, asked)
                if node is not None:
                    found[row] = node
        self._save()
        return found

    def _speaker(
        self, row: int, claims: _Claims, index: int, grid: Grid, asked: bool
    ) -> int | None:
        if len(claims.nodes) == 1:
            (node,) = claims.nodes
            if claims.holders == [node]:
                return node
        self.contested += len(claims.nodes) > 1
        awake = claims.nodes
        if asked and len(claims.nodes) > 1:
            recent = {n for n in claims.nodes if index - self._heard.get(n, index) < SILENT}
            awake = recent or awake
        for node in claims.holders:
            if node in awake:
                self.stand_ins += self._stands_in(node, claims)
                return node
        chosen, settled = self._chosen(sorted(awake), index, grid)
        if settled:
            self._hold(row, claims, chosen)
            self.stand_ins += self._stands_in(chosen, claims)
        return chosen

    def _stands_in(self, node: int, claims: _Claims) -> bool:
        return node != claims.holders[0] and not self.authenticated

    def _chosen(self, nodes: list[int], index: int, grid: Grid) -> tuple[int, bool]:
        """Return the one of several new nodes that is believed, and whether for good."""
        if len(nodes) == 1:
            return nodes[0], True
        times = {node: str(getattr(self._info(node, grid), "registered_at", "")) for node in nodes}
        first = min(times.values())
        if first and list(times.values()).count(first) == 1:
            return min(nodes, key=lambda node: times[node]), True
        return nodes[index % len(nodes)], False

    def _hold(self, row: int, claims: _Claims, node: int) -> None:
        unit, key = self._ids[row], self._key(node)
        if self.authenticated and self._pinned.get(unit) != key:
            self._pinned[unit], self._unit_of[key], self._unsaved = key, unit, True
        if len(claims.holders) == _HOLDERS:
            del claims.holders[1]
        claims.holders.append(node)

    def _key_fault(self, node: int, row: int, grid: Grid) -> str | None:
        self._info(node, grid)
        key, pinned = self._key(node), self._pinned.get(self._ids[row])
        if not key:
            return "has no public key, and authenticated=True asks for one"
        if pinned is not None and key != pinned:
            return (
                "has another public key than the client it names; if the client has changed its "
                f"key, remove its line in {self._file}"
            )
        if self._unit_of.get(key, self._ids[row]) != self._ids[row]:
            return f"has the public key of another client, by {self._file}"
        return None

    def _key(self, node: int) -> str:
        key = getattr(self._infos.get(node), "public_key", b"")
        return bytes(key).hex() if isinstance(key, bytes | bytearray) else ""

    def _info(self, node: int, grid: Grid) -> Any:
        """Return what Flower says of a node, none where the installed release says nothing."""
        if node not in self._infos and hasattr(grid, "get_nodes"):
            self._infos = {int(info.node_id): info for info in grid.get_nodes()}
        return self._infos.get(node)

    def _save(self) -> None:
        if self._file is None or not self._unsaved:
            return
        text = json.dumps({"version": 1, "keys": self._pinned}, indent=0, sort_keys=True)
        write_text(self._file, text + "\n")
        self._unsaved = False


def _read(path: Path) -> dict[str, str]:
    """Return the keys of a file, none if there is no file yet."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        keys: Mapping[str, Any] = saved["keys"]
        if saved["version"] != 1 or not all(isinstance(key, str) for key in keys.values()):
            raise ValueError("it is of another version")
        return {str(unit): str(key) for unit, key in keys.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} holds the clients' public keys and cannot be read ({error}). Restore it, or "
            "remove it to let the first node that names a client hold it again."
        ) from error
