"""Reply rates by the levels of a column and by the hour, counted round by round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import polars as pl

from fedipw.audit.values import HeatPart, RateLine, RatePart, SilentGroup
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.tables.cells import Cells
from fedipw.tables.columns import OPENED_AT
from fedipw.tables.formula import MISSING, number_text
from fedipw.tables.ledger import Ledger

MOST_LEVELS = 500  # of a column; with more it is not counted
HEAT_LEVELS = 20
HEAT_COLUMNS = 3
LONGEST_DAY = 48  # rounds
_Key = tuple[int, float, str]  # how levels are put in order
Clock = Callable[[int, pl.DataFrame], int]


@final
class Levels:
    """Each value is a level; what is missing is one too.

    >>> coder = Levels()
    >>> coder.codes(pl.Series(["b", None, "a", "b"])).tolist(), coder.labels
    ([1, 2, 0, 1], ['a', 'b', '(missing)'])
    """

    relation = "="

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.keys: list[_Key] = []
        self._known: dict[float | str, int] = {}
        self._missing = -1

    @property
    def cut(self) -> list[float]:
        """Limits between levels: none."""
        return []

    def state(self) -> list[Any]:
        """Return the levels so far, in the order of their numbers; none is what is missing."""
        out: list[float | str | None] = [None] * len(self.labels)
        for value, place in self._known.items():
            out[place] = value
        return out

    def places(self, state: Sequence[Any]) -> list[int]:
        """Return the numbers here of another one's levels; new ones get the next numbers."""
        out = []
        for value in state:
            if value is None:
                if self._missing < 0:
                    self._missing = self._next(None)
                out.append(self._missing)
            else:
                if value not in self._known:
                    self._known[value] = self._next(value)
                out.append(self._known[value])
        return out

    def restore(self, state: Sequence[Any]) -> None:
        """Put saved levels back."""
        self.labels, self.keys, self._known, self._missing = [], [], {}, -1
        for value in state:
            place = self._next(value)
            if value is None:
                self._missing = place
            else:
                self._known[value] = place

    def codes(self, values: pl.Series) -> IntArray:
        """Return the level of each value, (m,); new levels get the next numbers."""
        values = _plain(values)
        for value in values.drop_nulls().unique().sort().to_list():
            if value not in self._known:
                self._known[value] = self._next(value)
        if values.null_count() and self._missing < 0:
            self._missing = self._next(None)
        if not self._known:
            return np.full(len(values), max(self._missing, 0), dtype=np.int64)
        found = values.replace_strict(
            list(self._known), list(self._known.values()), default=None, return_dtype=pl.Int64
        )
        return found.fill_null(self._missing).to_numpy()

    def _next(self, value: float | str | None) -> int:
        if value is None:
            text, key = MISSING, (2, 0.0, "")
        elif isinstance(value, str):
            text, key = value, (1, 0.0, value)
        else:
            text, key = number_text(value), (0, float(value), "")
        self.labels.append(text)
        self.keys.append(key)
        return len(self.labels) - 1


@final
class Ranges:
    """Numbers in the fifths of their column; the upper limit of each belongs to it.

    >>> coder = Ranges(Cells("age", True, (10.0, 20.0)))
    >>> coder.codes(pl.Series([10.0, 11.0, None, 30.0])).tolist(), coder.labels
    ([0, 1, 3, 2], ['(-inf, 10]', '(10, 20]', '(20, inf]', '(missing)'])
    """

    relation = "in"

    def __init__(self, cells: Cells) -> None:
        self._edges = np.array(cells.edges)
        self.labels = [*cells.ranges(), MISSING]
        self.keys: list[_Key] = [(0, float(k), "") for k in range(len(self.labels))]

    @property
    def cut(self) -> list[float]:
        """Limits between the ranges."""
        return [float(edge) for edge in self._edges]

    def state(self) -> list[Any]:
        """Return nothing: ranges do not grow."""
        return []

    def places(self, state: Sequence[Any]) -> list[int] | None:
        """Return none: ranges are numbered alike everywhere."""
        del state
        return None

    def restore(self, state: Sequence[Any]) -> None:
        """Put nothing back."""

    def codes(self, values: pl.Series) -> IntArray:
        """Return the fifth of each number, (m,)."""
        numbers = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
        places = np.searchsorted(self._edges, numbers, side="left")
        return np.where(np.isnan(numbers), len(self.labels) - 1, places)


_UNCOUNTED = (pl.Object, pl.Binary, pl.Unknown, pl.Duration)  # have no text
Coder = Levels | Ranges  # turns values of a column into numbers of levels


def coder_of(values: pl.Series, cells: Cells) -> Coder | None:
    """Return how a column with these values and cells is counted; none if it cannot be."""
    if values.dtype.is_nested() or isinstance(values.dtype, _UNCOUNTED):
        return None
    if not cells.is_category:
        return Ranges(cells)
    return None if _plain(values).drop_nulls().n_unique() > MOST_LEVELS else Levels()


def _plain(values: pl.Series) -> pl.Series:
    """Return numbers as floats without NaN, all else as text."""
    if values.dtype.is_numeric():
        numbers = values.cast(pl.Float64).fill_nan(None)
        return numbers.set(numbers.is_infinite().fill_null(value=False), None)
    return values.cast(pl.String)


@dataclass(slots=True, eq=False)
class Tally:
    """Rows and replies of one column's levels by hour, and whether enough clients are behind them.

    A client counts once in a round, so a level with enough rows in one round has enough clients;
    those of rarer levels are remembered until there are enough.
    """

    column: str
    coder: Coder
    min_cell: int
    fixed: IntArray | None = None  # (n,) levels of the members, of a column that does not change
    counts: dict[int, IntArray] = field(default_factory=dict)  # rows and replies, by hour
    many: set[int] = field(default_factory=set)  # levels of enough clients
    few: dict[int, set[int]] = field(default_factory=dict)  # clients of other levels

    def _clients(self, level: int) -> int | None:
        """Return how many members have a level, of a column that does not change."""
        return None if self.fixed is None else int((self.fixed == level).sum())

    def silent(self) -> list[SilentGroup]:
        """Return the levels of enough clients of whom none ever replied.

        Only of columns that do not change: of others a client has another level in another round.
        """
        if self.fixed is None or self.overflowing:
            return []
        rows, replies = self.totals()
        return [
            SilentGroup(
                name=f"{self.column} {self.coder.relation} {self.coder.labels[k]}",
                clients=int((self.fixed == k).sum()),
                rows=int(rows[k]),
                population=None,
            )
            for k in np.flatnonzero((rows >= self.min_cell) & (replies == 0)).tolist()
            if k in self.many
        ]

    @property
    def overflowing(self) -> bool:
        """Whether there are too many levels to count."""
        return len(self.coder.labels) > MOST_LEVELS

    def add(self, table: pl.DataFrame, members: IntArray, replied: BoolArray, hour: int) -> None:
        """Count a round; ``members`` (m,) are the clients behind its rows."""
        codes = self.coder.codes(table[self.column]) if self.fixed is None else self.fixed[members]
        if self.overflowing:
            return
        rows, replies = (np.bincount(c, minlength=MOST_LEVELS) for c in (codes, codes[replied]))
        self.counts[hour] = self.counts.get(hour, 0) + np.array([rows, replies])
        self.many.update(np.flatnonzero(rows >= self.min_cell).tolist())
        rare = np.array([n > 0 and k not in self.many for k, n in enumerate(rows.tolist())])
        for place in np.flatnonzero(rare[codes]) if rare.any() else ():
            level = int(codes[place])
            clients = self.few.setdefault(level, set())
            clients.add(int(members[place]))
            if len(clients) >= self.min_cell:
                self.many.add(level)

    @property
    def counted(self) -> list[Any]:
        """What is counted, and how, as plain values."""
        return [self.column, self.coder.relation, self.coder.cut, self.min_cell]

    def state(self) -> dict[str, Any]:
        """Return all counts."""
        return {
            "levels": self.coder.state(),
            "counts": {str(hour): counts.copy() for hour, counts in self.counts.items()},
            "many": sorted(self.many),
            "few": {str(level): sorted(clients) for level, clients in self.few.items()},
        }

    def empty(self) -> Tally:
        """Return one that has counted nothing, of the same levels."""
        return Tally(self.column, copy.deepcopy(self.coder), self.min_cell, self.fixed)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of another one, of later rounds; it may number its levels otherwise."""
        place = self.coder.places(state["levels"])
        for hour, counts in state["counts"].items():
            mine = np.zeros((2, MOST_LEVELS), dtype=np.int64)
            size = MOST_LEVELS if place is None else len(place)
            at = np.arange(MOST_LEVELS) if place is None else np.array(place, dtype=np.int64)
            inside = at < MOST_LEVELS
            mine[:, at[inside]] = counts[:, :size][:, inside]
            self.counts[int(hour)] = self.counts.get(int(hour), 0) + mine
        moved = (lambda k: k) if place is None else place.__getitem__
        self.many.update(moved(k) for k in state["many"])
        for level, clients in state["few"].items():
            k = moved(int(level))
            known = self.few.setdefault(k, set())
            known.update(clients)
            if len(known) >= self.min_cell:
                self.many.add(k)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved counts back."""
        self.coder.restore(state["levels"])
        self.counts = {int(hour): counts.copy() for hour, counts in state["counts"].items()}
        self.many = set(state["many"])
        self.few = {int(level): set(clients) for level, clients in state["few"].items()}

    def many_clients(self, levels: Sequence[str], *, empty: bool) -> bool:
        """Return whether a union of levels has enough clients; ``empty``: or is never seen."""
        places = [k for k, label in enumerate(self.coder.labels) if label in levels]
        if any(k in self.many for k in places):
            return True
        clients = {client for k in places for client in self.few.get(k, ())}
        return len(clients) >= self.min_cell or (empty and not places)

    def totals(self) -> IntArray:
        """Return rows and replies of each level over all hours, (2, levels)."""
        none = np.zeros((2, MOST_LEVELS), dtype=np.int64)
        return sum(self.counts.values(), none)[:, : len(self.coder.labels)]

    def shown(self, most: int = MOST_LEVELS) -> list[int]:
        """Return the levels of enough rows and clients, the ``most`` largest of them, in order."""
        rows = self.totals()[0]
        large = [k for k in range(len(rows)) if rows[k] >= self.min_cell and k in self.many]
        large = sorted(large, key=lambda k: (-rows[k], self.coder.keys[k]))[:most]
        return sorted(large, key=lambda k: self.coder.keys[k])

    def part(self) -> RatePart:
        """Return the reply rates of the levels that can be shown."""
        rows, replies = self.totals()
        lines = tuple(
            RateLine(
                level=self.coder.labels[k],
                rows=int(rows[k]),
                replies=int(replies[k]),
                rate=float(replies[k] / rows[k]),
                clients=self._clients(k),
            )
            for k in self.shown()
        )
        hidden = int((rows > 0).sum()) - len(lines)
        return RatePart(column=self.column, lines=lines, hidden=hidden)

    def spread(self) -> float:
        """Return the variance of the reply rate between the levels shown; 0 of one level."""
        rows, replies = self.totals()[:, self.shown()]
        if len(rows) < 2:
            return 0.0
        rate = replies / rows
        return float(rows @ (rate - replies.sum() / rows.sum()) ** 2 / rows.sum())

    def heat(self, clock: str) -> HeatPart:
        """Return the rates by hour and level, of the largest levels."""
        levels, hours = self.shown(HEAT_LEVELS), sorted(self.counts)
        rows, replies = np.transpose([self.counts[h][:, levels] for h in hours], (1, 2, 0))
        enough = rows >= self.min_cell

        def known(values: FloatArray | IntArray) -> tuple[tuple[Any, ...], ...]:
            return tuple(map(tuple, np.where(enough, values, np.array(None)).tolist()))

        return HeatPart(
            column=self.column,
            clock=clock,
            hours=tuple(hours),
            levels=tuple(self.coder.labels[k] for k in levels),
            rate=known(replies / np.maximum(rows, 1)),
            rows=known(rows),
        )


def heat_parts(tallies: Sequence[Tally], clock: str) -> tuple[HeatPart, ...]:
    """Return the maps of the columns between whose levels rates differ most, three at most."""
    useful = [t for t in tallies if len(t.shown()) > 1 and len(t.counts) > 1]
    chosen = sorted(useful, key=lambda t: -t.spread())[:HEAT_COLUMNS]
    return tuple(t.heat(clock) for t in useful if t in chosen)


def clock_of(ledger: Ledger, day_length: float) -> tuple[str, Clock] | None:
    """Return what tells the hour of a round, and its name; none if nothing does.

    The hour is that of ``opened_at``. Without it, it is the round's number in its day, if there are
    two days or more.
    """
    if isinstance(ledger.schema.get(OPENED_AT), pl.Datetime):
        return "hour", lambda _, table: int(table[OPENED_AT][0].hour)
    if 2.0 <= day_length <= LONGEST_DAY and len(ledger.rounds) >= 2.0 * day_length:
        return "round of the day", lambda index, _: int((index - 1) % day_length)
    return None
