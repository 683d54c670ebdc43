"""The collapsed comparison on tables: the whole population as if it could reply.

One model of P(replied | Z, X) over all clients ignores that enrollment came first. X of a client
that is not enrolled does not exist; it is filled with the round's mean of a number and the round's
most frequent value of anything else, and so is X of an enrolled client that was not observed. The
whole population is held in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import polars as pl

from fedipw.tables.ledger import AVAILABLE, INVITE_PROB, INVITED, OPENED_AT, ROUND
from fedipw.tables.members import FROM, UNTIL, Members
from fedipw.tables.population import ENROLLED, ID
from fedipw.weighting.registry import Facts, Method
from fedipw.weighting.rounds import RoundOpening
from fedipw.weighting.standing import Standing, units_of

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, IntArray
    from fedipw.tables.tablefile import TableFile


_NO_COVARIATES = {ID, ROUND, INVITED, AVAILABLE, INVITE_PROB, OPENED_AT}


@final
@dataclass(frozen=True, eq=False)
class Everyone:
    """All clients of a population table, enrolled or not."""

    members: Members
    places: IntArray  # rows of those enrolled at some time, in their order

    @classmethod
    def of(cls, table: TableFile) -> Everyone:
        """Return the clients of a table; dates stay with the enrolled."""
        frame = table.collect(table.scan())
        places = np.flatnonzero(frame[ENROLLED].to_numpy())
        return cls(Members(frame.drop(ENROLLED, FROM, UNTIL, strict=False)), places)

    def require(self, method: Method) -> None:
        """Accept what got this far."""

    def at(self, present: BoolArray, method: Method) -> Standing:
        """Return a standing in which enrollment is no stage: its probability is 1."""
        del method
        units = units_of(self.members, present, np.ones(self.members.size))
        return Standing(units=units, facts=Facts(float(self.members.size), float(present.sum())))

    def everyone(self) -> Everyone:
        """Return itself."""
        return self

    def filled(self, opening: RoundOpening, replied: BoolArray) -> tuple[RoundOpening, BoolArray]:
        """Return a round with rows for all others, who did not reply."""
        assert opening.table is not None
        assert opening.rows is not None
        inside = self.places[opening.rows]
        outside = np.setdiff1d(np.arange(self.members.size), inside)
        schema = opening.table.schema
        filler = opening.table.select(_fill(name, kind) for name, kind in schema.items())
        known = opening.table.with_columns(
            pl.col(n).fill_null(filler[n][0]) for n in schema if n not in _NO_COVARIATES
        )
        others = pl.concat([filler] * len(outside)) if len(outside) else filler.clear()
        others = others.with_columns(self.members.frame[ID][outside].cast(schema[ID]).alias(ID))
        whole = RoundOpening(
            index=opening.index,
            table=pl.concat([known, others]),
            rows=np.concatenate([inside, outside]),
        )
        return whole, np.concatenate([replied, np.zeros(len(outside), dtype=np.bool_)])


def _fill(name: str, kind: pl.DataType) -> pl.Expr:
    column = pl.col(name)
    if name in {INVITED, AVAILABLE}:
        return pl.lit(False).alias(name)
    if name == INVITE_PROB:
        return pl.lit(None, dtype=kind).alias(name)
    if name in {ROUND, ID, OPENED_AT}:
        return column.first()
    if kind.is_float():
        return column.fill_nan(None).mean().cast(kind)
    if kind.is_numeric():
        return column.mean().round().cast(kind)
    return column.drop_nulls().mode().sort().first()
