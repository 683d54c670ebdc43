"""Participation as observed: who answered in each wave of a real survey."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.mechanisms.base import RoundDraw
from fedipw.lab.realtables import raw_columns, real_source
from fedipw.numerics.checks import some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedipw.lab.arrayclients import ArrayClients
    from fedipw.lab.clients import ClientData
    from fedipw.numerics.types import BoolArray, FloatArray, IdArray, IntArray
    from fedipw.tables.population import Population

_NAME = "nlswork"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveParticipation:
    """Replies of the 15 waves of nlswork: each round is one wave, 1968 to 1988.

    A woman replied in a wave if the data set has a row of her for it, complete or not: she was
    interviewed and had a wage. The sample was drawn once, in 1968, so all women could reply in
    every wave, and a wave before a woman's first row is a wave she did not reply in. Women
    without any row are not in the data set.

    Nothing about replies is simulated, so there are no true probabilities: neither the oracle nor
    limits can be computed. Pre-round covariates come from earlier waves and the calendar alone:

    ``age``
        in decades from 30, by the calendar: year of the wave less year of birth;
    ``age_squared``
        its square;
    ``replied_before``
        whether she replied in the wave before, 0 in the first;
    ``reply_rate``
        share of earlier waves she replied in, as if half a reply came with an extra wave, so 0.5 in
        the first.

    Parameters
    ----------
    shuffled
        Draw a wave at random for every round; by default waves follow in order and start again
        after the last. Either way a wave's covariates are those of its own past.

    Examples
    --------
    >>> from fedipw.lab.realdata import RealPopulation
    >>> rng = np.random.default_rng(0)
    >>> drawn = RealPopulation(name="nlswork").draw(rng)
    >>> process = WaveParticipation().start(drawn.population, drawn.clients, rng)
    >>> [int(process.advance().replied.sum()) for _ in range(3)]
    [1368, 1231, 1686]
    """

    shuffled: bool = False

    def start(
        self, population: Population, clients: ClientData | ArrayClients, rng: np.random.Generator
    ) -> WaveProcess:
        """Return a process over the women of the population."""
        del clients  # who replied is in the data set
        table = wave_table()
        rows = _rows_of(population, table)
        return WaveProcess(
            [table.covariates(wave)[rows] for wave in range(len(table.years))],
            table.replied[rows],
            rng if self.shuffled else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaveTable:
    """Who replied in which wave."""

    unit_ids: IdArray  # (N,), rising
    birth_years: FloatArray  # (N,), 19..
    years: IntArray  # (waves,), rising, 19..
    replied: BoolArray  # (N, waves)

    columns = ("age", "age_squared", "replied_before", "reply_rate")

    def covariates(self, wave: int) -> FloatArray:
        """Return what was known before a wave counted from 0, (N, 4)."""
        earlier = self.replied[:, :wave]
        age = (self.years[wave] - self.birth_years - 30.0) / 10.0
        last = earlier[:, -1].astype(np.float64) if wave else np.zeros(len(age))
        rate = (earlier.sum(axis=1) + 0.5) / (wave + 1.0)
        return np.column_stack([age, age**2, last, rate])


@lru_cache(maxsize=1)
def wave_table() -> WaveTable:
    """Return the waves of nlswork; read once in a process.

    >>> table = wave_table()
    >>> table.replied.shape, int(table.replied.sum()), table.years[[0, -1]].tolist()
    ((4711, 15), 28534, [68, 88])
    """
    source = real_source(_NAME)
    frame = raw_columns(source.package, source.item, ("idcode", "year", "birth_yr"))
    ids, first, who = np.unique(frame["idcode"].to_numpy(), return_index=True, return_inverse=True)
    years, wave = np.unique(frame["year"].to_numpy(), return_inverse=True)
    replied = np.zeros((len(ids), len(years)), dtype=bool)
    replied[who, wave] = True
    births = frame["birth_yr"].to_numpy()[first].astype(np.float64)
    return WaveTable(unit_ids=ids, birth_years=births, years=years, replied=replied)


def _rows_of(population: Population, table: WaveTable) -> IntArray:
    """Return each client's row of the table, or refuse clients that are not of nlswork."""
    expected = tuple(real_source(_NAME).covariates)
    if population.covariates != expected:
        raise InputError(
            f"Waves are of the women of {_NAME}, with covariates {some(expected)}; this population "
            f"has {some(population.covariates)}. Use RealPopulation(name='{_NAME}')."
        )
    strangers = ~np.isin(population.unit_ids, table.unit_ids)
    if strangers.any():
        raise InputError(
            f"{int(strangers.sum())} clients are no women of {_NAME} "
            f"({some(population.unit_ids[strangers].tolist())})."
        )
    rows: IntArray = np.searchsorted(table.unit_ids, population.unit_ids)
    return rows


@final
class WaveProcess:
    """A running :class:`WaveParticipation`."""

    columns = WaveTable.columns

    def __init__(
        self, covariates: list[FloatArray], replied: BoolArray, rng: np.random.Generator | None
    ) -> None:
        self._covariates, self._replied, self._rng, self._round = covariates, replied, rng, 0

    def advance(self) -> RoundDraw:
        """Return the next round."""
        waves = len(self._covariates)
        wave = self._round % waves if self._rng is None else int(self._rng.integers(waves))
        self._round += 1
        return RoundDraw(
            index=self._round,
            covariates=self._covariates[wave],
            participation_prob=None,
            replied=self._replied[:, wave].copy(),
        )

    def state(self) -> dict[str, Any]:
        """Return the round, and where chance stands if waves are drawn."""
        drawn = {} if self._rng is None else {"rng": self._rng.bit_generator.state}
        return {"round": self._round, **drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._round = int(state["round"])
        if self._rng is not None:
            self._rng.bit_generator.state = state["rng"]
