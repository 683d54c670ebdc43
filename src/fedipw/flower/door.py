"""What of clients' answers goes into a round: limits of numbers and levels of texts together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, final

import polars as pl

from fedipw.flower.covariates import Covariate
from fedipw.flower.levels import CategoryLevels
from fedipw.flower.limits import CovariateLimits
from fedipw.numerics import IntArray
from fedipw.tables.columns import ID
from fedipw.tables.ledger import Ledger, quarantined
from fedipw.tables.population import Members


class Admitted(NamedTuple):
    """A round's table as it is used, and how many answers were changed."""

    table: pl.DataFrame
    winsorised: int  # numbers taken at the edge of what others answered
    others: int  # categories taken as ``(other)`` or missing


@final
class Door:
    """The state that decides what of an answer is used, kept with the model after each round.

    Parameters
    ----------
    members
        The enrolled clients.
    columns
        The covariates that clients are asked for.
    declared
        Those of them with declarations.
    coded
        Those that are categories even if they are numbers.
    quantile
        Of the limits of numbers; none to take all as they are.
    """

    def __init__(
        self,
        members: Members,
        columns: Sequence[str],
        declared: Mapping[str, Covariate],
        coded: Collection[str],
        quantile: float | None,
    ) -> None:
        self._members, self._columns = members, tuple(columns)
        numbers = [name for name in columns if name not in coded]  # categories have levels
        self._limits = CovariateLimits(members, numbers, quantile)
        self._levels = CategoryLevels(columns, declared, coded, members.size)
        self.rounds = 0  # that it has taken

    def follow(self, ledger: Ledger, closed: int) -> None:
        """Take the closed rounds of a ledger that it has not seen, those another server wrote."""
        if not self._columns:
            self.rounds = closed
        for index in range(self.rounds + 1, closed + 1):
            table = ledger.read(index)
            table = table.with_columns(quarantined(table.schema))
            rows = self._members.rows_of(table[ID], str(ledger.directory))
            self._limits.take(table, rows)
            self._levels.take(table)
        self.rounds = max(self.rounds, closed)

    def admitted(self, table: pl.DataFrame, rows: IntArray, index: int, *, learn: bool) -> Admitted:
        """Return a round's table as it is used; with ``learn`` its values count in later ones."""
        table, winsorised = self._limits.applied(table, rows, learn=learn)
        table, others = self._levels.applied(table, rows, index, learn=learn)
        if learn:
            self.rounds = index
        return Admitted(table, winsorised, others)

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs."""
        return {
            "rounds": self.rounds,
            "clients": self._clients(),
            "limits": self._limits.state(),
            "levels": self._levels.state(),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Put back what was saved with a model; without it, begin anew and read the ledger."""
        if state is not None and state["clients"] != self._clients():
            state = None  # it is of other rows
        self._limits.restore({} if state is None else state["limits"])
        self._levels.restore({} if state is None else state["levels"])
        self.rounds = 0 if state is None else int(state["rounds"])

    def _clients(self) -> str:
        """Return a digest of the clients in their order, which what is kept is by."""
        ids = json.dumps(self._members.frame[ID].to_list(), default=str)
        return hashlib.sha256(ids.encode()).hexdigest()
