"""Participation probabilities that are not learnt from rounds: none, true ones, one model for all.

The learner is :class:`fedipw.selection.participation.Participation`; these stand in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.selection.participation import Participation, ReplyProb, Source, StepRows
from fedipw.tables.columns import (
    ASKED,
    AVAILABLE,
    ENROLLED,
    FROM,
    ID,
    INVITE_PROB,
    INVITED,
    OPENED_AT,
    ROUND,
    UNTIL,
)
from fedipw.tables.ledger import Round
from fedipw.tables.population import Members, Population

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray

_NO_COVARIATES = {ID, ROUND, INVITED, AVAILABLE, ASKED, INVITE_PROB, OPENED_AT}


class ParticipationSource(Protocol):
    """Participation probabilities of rounds as they open and close."""

    def open(self, round_: Round) -> None:
        """Take what is known before a round."""
        ...

    def prob(self, replied: BoolArray) -> ReplyProb:
        """Return the probabilities of the replies; ``replied`` (n,) is over the round's rows."""
        ...

    def step_rows(self, replied: BoolArray) -> tuple[StepRows, ...]:
        """Return the fitted steps of the open round with all rows that could pass them."""
        ...

    def close(self, replied: BoolArray) -> tuple[BoolArray, ...]:
        """Take the replies of the round, (n,); return which rows each step is fitted on."""
        ...

    def predicted(self, round_: Round) -> FloatArray:
        """Return the probability of any clients in the open round, as if all were asked, (m,)."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs to go on to the same bytes."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        ...


class _Fixed:
    """A source that learns nothing."""

    def __init__(self) -> None:
        self._open: Round | None = None

    def open(self, round_: Round) -> None:
        """Take what is known before a round."""
        self._open = round_

    def step_rows(self, replied: BoolArray) -> tuple[StepRows, ...]:
        """Return nothing: nothing is fitted."""
        del replied
        return ()

    def close(self, replied: BoolArray) -> tuple[BoolArray, ...]:
        """Learn nothing."""
        del replied
        self._open = None
        return ()

    def state(self) -> dict[str, Any]:
        """Return nothing: nothing is learnt."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back nothing."""


@final
class NoParticipation(_Fixed):
    """No probabilities at all, for methods that read none; they stand as 1."""

    def prob(self, replied: BoolArray) -> ReplyProb:
        """Return ones."""
        count = int(np.count_nonzero(replied))
        return ReplyProb(np.ones(count), np.ones(count, dtype=np.bool_), Source.NONE)

    def predicted(self, round_: Round) -> FloatArray:
        """Return ones, (m,)."""
        return np.ones(len(round_.rows))


@final
class TrueParticipation(_Fixed):
    """True probabilities, as only a simulation has them (the oracle)."""

    def open(self, round_: Round) -> None:
        """Take what is known before a round."""
        _known(round_)
        super().open(round_)

    def prob(self, replied: BoolArray) -> ReplyProb:
        """Return the true probabilities of the replies."""
        if self._open is None:
            raise InputError("No round is open.")
        prob = _known(self._open)[replied]
        return ReplyProb(prob, np.ones(len(prob), dtype=np.bool_), Source.KNOWN)

    def predicted(self, round_: Round) -> FloatArray:
        """Return the true probabilities, (m,)."""
        return _known(round_)


def _known(round_: Round) -> FloatArray:
    if round_.participation_prob is None:
        raise InputError(
            "The oracle needs true participation probabilities; a trace or a log has none. "
            "Use an estimated scheme."
        )
    return round_.participation_prob


@final
class CollapsedParticipation:
    """One model of P(A = 1 | Z, X) over the whole population: the misspecified comparison.

    X of a client that is not enrolled does not exist; it is filled with the round's mean of a
    number and the round's most frequent value of anything else, and so is X of an enrolled client
    that was not observed. The whole population is held in memory.

    Parameters
    ----------
    learner
        Over everybody.
    places
        Where the clients that rounds list are among everybody, (n,).
    """

    def __init__(self, learner: Participation, places: IntArray) -> None:
        self.learner, self._places = learner, places
        self._listed = 0

    @classmethod
    def everyone(cls, population: Population) -> tuple[Members, IntArray]:
        """Return all clients of a table, and where those enrolled at some time are."""
        table = population.everyone("collapsed")
        frame = table.collect(table.scan())
        places = np.flatnonzero(frame[ENROLLED].to_numpy())
        return Members(frame.drop(ENROLLED, FROM, UNTIL, strict=False)), places

    def open(self, round_: Round) -> None:
        """Take what is known before a round and fill the rest."""
        self._listed = len(round_.rows)
        self.learner.open(self.filled(round_))

    def filled(self, round_: Round) -> Round:
        """Return a round with rows for everybody: those listed first."""
        inside = self._places[round_.rows]
        outside = np.setdiff1d(np.arange(self.learner.members.size), inside)
        table, schema = round_.table, round_.table.schema
        if table.width:
            filler = table.select(_fill(name, kind) for name, kind in schema.items())
            known = table.with_columns(
                pl.col(n).fill_null(filler[n][0]) for n in schema if n not in _NO_COVARIATES
            )
            others = pl.concat([filler] * len(outside)) if len(outside) else filler.clear()
            table = pl.concat([known, others])
        return Round(index=round_.index, rows=np.concatenate([inside, outside]), table=table)

    def prob(self, replied: BoolArray) -> ReplyProb:
        """Return the probabilities of the replies."""
        return self.learner.prob(self._spread(replied))

    def step_rows(self, replied: BoolArray) -> tuple[StepRows, ...]:
        """Return the one step with a row for everybody."""
        return self.learner.step_rows(self._spread(replied))

    def close(self, replied: BoolArray) -> tuple[BoolArray, ...]:
        """Take the replies of the round."""
        return self.learner.close(self._spread(replied))

    def predicted(self, round_: Round) -> FloatArray:
        """Return the one model's probabilities, each client with its own X, (m,)."""
        moved = Round(index=round_.index, rows=self._places[round_.rows], table=round_.table)
        return self.learner.predicted(moved)

    def _spread(self, replied: BoolArray) -> BoolArray:
        out = np.zeros(self.learner.members.size, dtype=np.bool_)
        out[: self._listed] = replied
        return out

    def state(self) -> dict[str, Any]:
        """Return the model's state."""
        return self.learner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self.learner.restore(state)


def _fill(name: str, kind: pl.DataType) -> pl.Expr:
    column = pl.col(name)
    if name in {INVITED, AVAILABLE, ASKED}:
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
