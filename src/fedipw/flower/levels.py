"""Levels of categories that clients answer: new ones are admitted at few rounds, not as they come.

A level that the participation model has not seen changes its design, and with it every past round:
the ledger is read anew. So a level that few clients answer is not used at first: a text is
``(other)``, in the ledger too, and a number that a formula takes as a category is missing. Such
levels are admitted when rounds 1, 2, 4, 8 and so on open, which reads fewer than twice as many
rounds anew as there are in all, whatever clients say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, final

import polars as pl

from fedipw.flower.covariates import LEVELS_MOST, Covariate
from fedipw.numerics import IntArray
from fedipw.tables.formula import MISSING, OTHER

CLIENTS: Final = 3  # that must answer a level before it is admitted
_WAITING: Final = 4 * LEVELS_MOST  # levels that are remembered until then
Level = str | float


@final
class CategoryLevels:
    """The levels that are known to the model, and those that may become so.

    A level is admitted at once if half of a round's answers have it, and at rounds 1, 2, 4, 8, ...
    if three clients have answered it (one, of fewer than twelve clients), most frequent first; up
    to fifty in all. Declared covariates have their declared levels from the start.

    Parameters
    ----------
    columns
        The covariates that clients are asked for.
    declared
        Those of them with declarations.
    coded
        Those that are categories even if they are numbers.
    clients
        Number of clients.
    """

    def __init__(
        self,
        columns: Sequence[str],
        declared: Mapping[str, Covariate],
        coded: Collection[str],
        clients: int,
    ) -> None:
        fixed = {name for name, how in declared.items() if how.levels is not None}
        self._columns = tuple(name for name in columns if name not in fixed)
        self._coded, self._needed = frozenset(coded), CLIENTS if clients >= 4 * CLIENTS else 1
        self._admitted: dict[str, set[Level]] = {}
        self._waiting: dict[str, dict[Level, list[int]]] = {}  # rows of the first who answered it

    def take(self, table: pl.DataFrame) -> None:
        """Take the levels of a closed round, all of them admitted by whoever wrote it."""
        for name in self._categories(table):
            known = set(table[name].drop_nulls().unique().to_list())
            self._admitted.setdefault(name, set()).update(known - {OTHER})

    def applied(
        self, table: pl.DataFrame, rows: IntArray, index: int, *, learn: bool = True
    ) -> tuple[pl.DataFrame, int]:
        """Return a round's table without levels that are not admitted, and how many those were."""
        moved = 0
        for name in self._categories(table):
            values: list[Level | None] = table[name].to_list()
            if learn:
                self._learn(name, values, rows, index)
            known, kind = self._admitted.get(name, set()), table.schema[name]
            stand_in = OTHER if kind == pl.String else None
            held = [v if v is None or v in known else stand_in for v in values]
            changed = sum(old != new for old, new in zip(values, held, strict=True))
            if changed:
                moved += changed
                table = table.with_columns(pl.Series(name, held, dtype=kind))
        return table, moved

    def state(self) -> dict[str, Any]:
        """Return the levels admitted, and those that wait with the clients that answered them."""
        return {
            name: {
                "admitted": sorted(self._admitted[name]),
                "waiting": [[level, rows] for level, rows in self._waiting.get(name, {}).items()],
            }
            for name in self._admitted
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._admitted = {name: set(saved["admitted"]) for name, saved in state.items()}
        self._waiting = {
            name: {level: list(rows) for level, rows in saved["waiting"]}
            for name, saved in state.items()
        }

    def _categories(self, table: pl.DataFrame) -> list[str]:
        return [
            name
            for name in self._columns
            if name in table.columns
            and (table.schema[name] == pl.String
                 or (name in self._coded and table.schema[name].is_float()))
        ]  # fmt: skip

    def _learn(self, name: str, values: Sequence[Level | None], rows: IntArray, index: int) -> None:
        admitted = self._admitted.setdefault(name, set())
        waiting = self._waiting.setdefault(name, {})
        told = Counter(v for v in values if v is not None and v not in {OTHER, MISSING})
        half = sum(told.values()) / 2.0
        for row, value in zip(rows.tolist(), values, strict=True):
            if value in told and value not in admitted:
                clients = waiting.setdefault(value, [])  # type: ignore[arg-type]
                if len(clients) < CLIENTS and row not in clients:
                    clients.append(row)
        frequent = sorted(waiting, key=lambda level: (-told[level], -len(waiting[level]), level))
        due = not index & (index - 1)  # a power of two
        for level in frequent:
            enough = len(waiting[level]) >= self._needed
            if len(admitted) < LEVELS_MOST and (told[level] >= half > 0.0 or (due and enough)):
                admitted.add(level)
        kept = {level: clients for level, clients in waiting.items() if level not in admitted}
        if len(kept) > _WAITING:  # those that most clients answered stay, the newest of equals
            order = sorted(enumerate(kept), key=lambda x: (-len(kept[x[1]]), -x[0]))
            chosen = {level for _, level in order[:_WAITING]}
            kept = {level: clients for level, clients in kept.items() if level in chosen}
        self._waiting[name] = kept
