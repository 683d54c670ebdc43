"""Before the first round, and while a round waits: what was heard of nodes that cannot be used."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Final, final

from fedipw.errors import InputError
from fedipw.flower.covariates import brief
from fedipw.storage.atomic import unwritable

_KINDS: Final = 50  # kinds of faults that are told apart
_LISTED: Final = 5  # of them that a message lists
_LOG = getLogger("flwr.fedipw")


def check_writable(directory: Path) -> None:
    """Raise if no file can be written to a directory, which is made if need be."""
    path = directory / ".probe"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0")
        path.unlink()
    except OSError as error:
        raise unwritable(directory, error) from error


@dataclass(slots=True)
class _Fault:
    nodes: set[int] = field(default_factory=set)
    first: str = ""  # the first node's own words


@final
class Hearing:
    """Why nodes cannot be used in a round: faults by kind, each with its first example.

    The log has a line for a kind when it first occurs in a run; the counts of a round are in its
    metrics.
    """

    def __init__(self) -> None:
        self._faults: dict[str, _Fault] = {}  # of the round
        self._logged: set[str] = set()

    def open(self) -> None:
        """Forget what was heard in the round before."""
        self._faults = {}

    def fault(self, node: int, kind: str, said: str = "") -> None:
        """Take that a node cannot be used; ``said`` is an example of what it said, or nothing."""
        if kind not in self._faults and len(self._faults) >= _KINDS:
            kind, said = "other faults", ""
        found = self._faults.setdefault(kind, _Fault(first=said))
        found.nodes.add(node)

    def cleared(self, node: int) -> None:
        """Take that a node can be used after all."""
        for found in self._faults.values():
            found.nodes.discard(node)

    @property
    def nodes(self) -> int:
        """Number of nodes that cannot be used."""
        return len(set().union(*(found.nodes for found in self._faults.values())))

    def lines(self) -> list[str]:
        """Return each kind with its count and first example, the most frequent first."""
        counts = Counter({kind: len(found.nodes) for kind, found in self._faults.items()})
        made = [self._line(kind, n) for kind, n in counts.most_common(_LISTED) if n]
        rest = sum(1 for n in counts.values() if n) - len(made)
        return made if rest <= 0 else [*made, f"and {rest} more kinds"]

    def log(self) -> None:
        """Log the kinds that this run has not logged."""
        for kind, found in self._faults.items():
            if found.nodes and kind not in self._logged and len(self._logged) < 10 * _KINDS:
                self._logged.add(kind)
                _LOG.warning("FedIPW: %s; not logged again", self._line(kind, len(found.nodes)))

    def _line(self, kind: str, count: int) -> str:
        first = self._faults[kind].first
        node = min(self._faults[kind].nodes)
        who = f"node {node}" if count == 1 else f"{count} nodes (such as {node})"
        return f"{who}: {kind}" + (f", first {first}" if first else "")


@final
class Patience:
    """A limit on how long a round waits without any change in who can be used.

    Parameters
    ----------
    seconds
        The limit; none to wait for ever.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._usable, self._since = -1, 0.0

    def open(self) -> None:
        """Begin anew, with a round."""
        self._usable = -1

    def waited(self, usable: int, online: int, hearing: Hearing, known: str) -> None:
        """Take how many clients can be used now; raise if nothing has changed for too long.

        ``known`` is an example of the identifiers that clients have in the table.
        """
        now = time.monotonic()
        if usable > self._usable:
            self._usable, self._since = usable, now
            return
        if self._seconds is None or now - self._since < self._seconds:
            return
        heard = hearing.lines() or ["no node said anything"]
        raise InputError(
            f"{usable} clients could be used, of {online} nodes online, and the strategy waits for "
            f"more: nothing has changed for {self._seconds:g} s. Heard: {'; '.join(heard)}. "
            f"Identifiers in the table are such as {known}. Mend the client app, lower the "
            "strategy's min_available_nodes, or pass patience= to wait longer."
        )


def example(said: object) -> str:
    """Return an identifier with its type, as messages show it.

    >>> example("0007"), example(7)
    ("'0007' (str)", '7 (int)')
    """
    return f"{brief(said)} ({type(said).__name__})"
