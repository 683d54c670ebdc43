"""Availability replayed from a recorded log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.lab.mechanisms.base import CountedProcess, RoundDraw
from fedipw.numerics.checks import check_finite, some

if TYPE_CHECKING:
    from fedipw.lab.clients import ArrayClients, ClientData
    from fedipw.numerics import BoolArray, FloatArray
    from fedipw.tables.population import Population

_KEYS = ("round", "unit_id", "replied")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAvailability:
    """Rounds read from a .parquet or .csv file with ``round``, ``unit_id`` and ``replied``.

    Further numeric columns are pre-round covariates. Every round of the file must hold every client
    of the population. True probabilities are unknown, so the oracle cannot be run on a trace. After
    the last round the trace starts again if ``cycle`` is true, else the run ends in an error.
    """

    path: Path
    cycle: bool = False

    def start(
        self, population: Population, clients: ClientData | ArrayClients, rng: np.random.Generator
    ) -> TraceProcess:
        """Return a process over these clients."""
        del clients, rng  # nothing is drawn: the log says who replied
        frame = _read(self.path)
        covariates = tuple(c for c in frame.columns if c not in _KEYS)
        blocks = [
            _aligned(part, number, population, covariates, self.path)
            for (number,), part in sorted(frame.group_by(["round"]), key=lambda item: item[0][0])
        ]
        return TraceProcess(blocks, covariates, cycle=self.cycle, where=str(self.path))


def _read(path: Path) -> pl.DataFrame:
    if not path.exists():
        raise InputError(f"No trace file {path}.")
    if path.suffix not in {".csv", ".parquet"}:
        raise InputError(f"A trace must be .csv or .parquet, not {path.name}.")
    try:
        frame = pl.read_csv(path) if path.suffix == ".csv" else pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path} cannot be read ({error}); write it again.") from error
    missing = [c for c in _KEYS if c not in frame.columns]
    if missing:
        raise InputError(f"{path} has no column {some(missing)}; it has {some(frame.columns)}.")
    if frame.height == 0:
        raise InputError(f"{path} has no rows.")
    numeric = {c for c, kind in frame.schema.items() if kind.is_numeric() or kind == pl.Boolean}
    text = [c for c in frame.columns if c not in {*_KEYS, *numeric}]
    if text:
        raise InputError(f"{path}: pre-round covariates must be numeric; {some(text)} are not.")
    if frame["replied"].dtype != pl.Boolean or frame["replied"].null_count():
        raise InputError(f"{path}: replied must be true or false in every row.")
    if not frame["round"].dtype.is_integer():
        raise InputError(f"{path}: round must be a whole number, not {frame['round'].dtype}.")
    if frame["round"].null_count():
        raise InputError(f"{path}: {frame['round'].null_count()} rows have no round.")
    return frame


def _aligned(
    part: pl.DataFrame, number: Any, population: Population, names: tuple[str, ...], path: Path
) -> tuple[FloatArray, BoolArray]:
    """Return one round's covariates and replies in the population's order."""
    if part["unit_id"].n_unique() != part.height:
        raise InputError(f"{path}: round {number} names a unit_id more than once.")
    ids = population.frame.select("unit_id")
    try:
        joined = ids.join(part, on="unit_id", how="left", maintain_order="left")
        strangers = part.join(ids, on="unit_id", how="anti")["unit_id"].to_list()
    except pl.exceptions.SchemaError as error:
        raise InputError(
            f"{path}: unit_id is {part['unit_id'].dtype} but the population's is "
            f"{population.frame['unit_id'].dtype}."
        ) from error
    if strangers:
        raise InputError(
            f"{path}: round {number} names {len(strangers)} clients that are not in the population "
            f"({some(strangers)}). Leave them out of the trace."
        )
    absent = joined.filter(pl.col("replied").is_null())["unit_id"]
    if len(absent):
        raise InputError(
            f"{path}: round {number} lacks {len(absent)} of {population.listed} clients "
            f"({some(absent.to_list())}). Give every client a row with replied true or false."
        )
    covariates = joined.select(pl.col(names).cast(pl.Float64)).to_numpy() if names else None
    block = np.empty((population.listed, 0)) if covariates is None else covariates
    check_finite(block, names, f"{path}, round {number}")
    return np.ascontiguousarray(block), joined["replied"].to_numpy()


@final
class TraceProcess(CountedProcess):
    """Recorded rounds in order, such as a running :class:`TraceAvailability`."""

    def __init__(
        self,
        rounds: list[tuple[FloatArray, BoolArray]],
        columns: tuple[str, ...],
        *,
        cycle: bool,
        where: str,
    ) -> None:
        super().__init__(None)
        self.columns, self._rounds, self._cycle, self._where = columns, rounds, cycle, where

    def advance(self) -> RoundDraw:
        """Return the next round of the log."""
        if self.round >= len(self._rounds) and not self._cycle:
            raise InputError(
                f"{self._where} holds {len(self._rounds)} rounds and round "
                f"{self.round + 1} was asked for. Ask for fewer rounds or set cycle = true."
            )
        covariates, replied = self._rounds[self.round % len(self._rounds)]
        self.round += 1
        return RoundDraw(
            index=self.round, covariates=covariates, participation_prob=None, replied=replied
        )
