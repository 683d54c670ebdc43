"""Limits on what clients say of themselves: nobody is taken to lie far outside all others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics import FloatArray, IntArray
from fedipw.tables.population import Members

OTHERS = 10  # clients whose values must be known before anybody is held to their extremes
FEW = 3  # clients whose values must be known before anybody is held to their quartiles
FENCE = 3.0  # distances between the quartiles that a value may lie beyond them


@final
class CovariateLimits:
    r"""Numbers that clients answer, taken inside what other clients answered.

    .. math:: x_{ir} \leftarrow \min\big(x_{ir},\; Q_q(\{h_j\}),\;
       Q_{3/4}(\{h_j\}) + 3\,(Q_{3/4}(\{h_j\}) - Q_{1/4}(\{l_j\}))\big), \quad j \ne i
       \qquad (P7)

    and likewise from below: :math:`h_j` and :math:`l_j` are the other clients' own extremes over
    all rounds so far, Q their quantiles. A client that claims a value far outside cannot give
    itself a probability that no other client has. The first bound holds one liar among a hundred
    clients; the second, once four clients are known, holds as long as fewer than a quarter of them
    lie, unless half of them always answer the same. The ledger holds the values as they were used.

    Parameters
    ----------
    members
        The enrolled clients.
    columns
        The covariates that clients are asked for.
    quantile
        q; none to take all values as they are.
    """

    def __init__(self, members: Members, columns: Sequence[str], quantile: float | None) -> None:
        if quantile is not None and not 0.5 < quantile <= 1.0:
            raise InputError(f"winsorise is a quantile above 0.5 and at most 1, not {quantile!r}.")
        self._members, self._columns, self._quantile = members, tuple(columns), quantile
        self._extremes: dict[str, tuple[FloatArray, FloatArray]] = {}

    def take(self, table: pl.DataFrame, rows: IntArray) -> None:
        """Take the values of a closed round."""
        if self._quantile is not None:
            for name, values in self._numbers(table):
                self._seen(name, rows, values)

    def applied(
        self, table: pl.DataFrame, rows: IntArray, *, learn: bool = True
    ) -> tuple[pl.DataFrame, int]:
        """Return a round's table with values inside the limits, and how many were moved."""
        if self._quantile is None:
            return table, 0
        moved = 0
        for name, values in self._numbers(table):
            low, high = self._limits(name, rows, values)
            held = np.where(np.isnan(values), values, np.clip(values, low, high))
            changed = int(np.count_nonzero((held != values) & ~np.isnan(values)))
            if changed:
                moved += changed
                table = table.with_columns(pl.Series(name, held).fill_nan(None))
            if learn:
                self._seen(name, rows, held)
        return table, moved

    def state(self) -> dict[str, Any]:
        """Return the extremes so far, by covariate."""
        return {name: [low, high] for name, (low, high) in self._extremes.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved extremes back."""
        self._extremes = {
            name: (np.array(low, dtype=np.float64), np.array(high, dtype=np.float64))
            for name, (low, high) in state.items()
        }

    def _numbers(self, table: pl.DataFrame) -> Iterator[tuple[str, FloatArray]]:
        for name in self._columns:
            if name in table.columns and table.schema[name].is_float():
                yield name, table[name].fill_null(math.nan).to_numpy().astype(np.float64)

    def _seen(self, name: str, rows: IntArray, values: FloatArray) -> None:
        low, high = self._known(name)
        low[rows], high[rows] = np.fmin(low[rows], values), np.fmax(high[rows], values)

    def _known(self, name: str) -> tuple[FloatArray, FloatArray]:
        if name not in self._extremes:
            nothing = np.full(self._members.size, np.nan)
            self._extremes[name] = (nothing, nothing.copy())
        return self._extremes[name]

    def _limits(
        self, name: str, rows: IntArray, values: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the limits of each client of a round by the others, its values among theirs."""
        low, high = (extreme.copy() for extreme in self._known(name))
        low[rows], high[rows] = np.fmin(low[rows], values), np.fmax(high[rows], values)
        assert self._quantile is not None
        upper = _quantile_of_others(high, self._quantile)[rows]
        lower = -_quantile_of_others(-low, self._quantile)[rows]
        third = _quantile_of_others(high, 0.75, FEW)[rows]
        first = -_quantile_of_others(-low, 0.75, FEW)[rows]
        width = np.full(len(rows), np.inf)
        told = np.isfinite(third) & (third > first)
        width[told] = FENCE * (third[told] - first[told])
        third[~told], first[~told] = 0.0, 0.0
        return np.maximum(lower, first - width), np.minimum(upper, third + width)


def _quantile_of_others(values: FloatArray, quantile: float, least: int = OTHERS) -> FloatArray:
    """Return the upper quantile of all other clients' values, (n,); infinite where few are known.

    Few are ``least`` clients or fewer.

    >>> _quantile_of_others(np.append(np.arange(20.0), 900.0), 0.99)[[0, 20]].tolist()
    [900.0, 19.0]
    """
    known = np.flatnonzero(~np.isnan(values))
    out = np.full(len(values), np.inf)
    if len(known) <= least:
        return out
    order = known[np.argsort(values[known], kind="stable")]
    place = math.ceil(quantile * (len(order) - 2))  # among the others, in ascending order
    out[known] = values[order[place]]
    # for those at or before that place the others' value is one further on
    out[order[: place + 1]] = values[order[place + 1]]
    return out
