"""Populations whose selection was observed: flags, replies and data from tables, nothing simulated.

Who is enrolled and who replied in which round are facts of a table, so there are no true
probabilities: neither the oracle nor limits can be computed. What is known of everybody, outcomes
and data, gives the truth that estimates and models are judged by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.lab.clients import ClientData
from fedipw.lab.mechanisms.base import CountedProcess, ParticipationProcess, RoundDraw
from fedipw.lab.mechanisms.trace import TraceProcess
from fedipw.lab.testbed import ObservedSelection, PopulationDraw
from fedipw.numerics.checks import some
from fedipw.tables.columns import ENROLLED, ID, REPLIED, ROUND
from fedipw.tables.design import bound_design
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.tables.table import Table

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray

_KEYS = (ROUND, ID, REPLIED)


class ObservedReplies(Protocol):
    """How the clients of an observed population reply, one row a client."""

    def taken(self, rows: IntArray) -> ObservedReplies:
        """Return the replies of some clients, each as often as it is named."""

    def process(self, enrolled: BoolArray, rng: np.random.Generator) -> ParticipationProcess:
        """Return the rounds as a process."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedReplies:
    """Replies round by round as they were recorded; those not enrolled never reply.

    After the last round the rounds start again if ``cycle`` is true, else the run ends in an error.
    """

    replied: BoolArray  # (R, N)
    covariates: FloatArray  # (R, N, q) known before a round; NaN of clients that are not enrolled
    columns: tuple[str, ...] = ()  # (q,)
    cycle: bool = False
    where: str = "the rounds observed"

    def taken(self, rows: IntArray) -> RecordedReplies:
        """Return the replies of some clients."""
        return replace(self, replied=self.replied[:, rows], covariates=self.covariates[:, rows])

    def process(self, enrolled: BoolArray, rng: np.random.Generator) -> ParticipationProcess:
        """Return the rounds in order."""
        del enrolled, rng  # the record says who replied
        blocks = list(zip(self.covariates, self.replied, strict=True))
        return TraceProcess(blocks, self.columns, cycle=self.cycle, where=self.where)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnReplies:
    """Replies drawn anew in every round with each client's observed frequency.

    A modelling step: how often a client replies is observed, in which rounds it does is not.
    """

    rate: FloatArray  # (N,) in [0, 1]

    def __post_init__(self) -> None:
        odd = ~((self.rate >= 0.0) & (self.rate <= 1.0))
        if odd.any():
            row = int(odd.argmax())
            raise InputError(
                f"A reply rate lies between 0 and 1; row {row + 1} has {self.rate[row]}."
            )

    def taken(self, rows: IntArray) -> DrawnReplies:
        """Return the frequencies of some clients."""
        return DrawnReplies(rate=self.rate[rows])

    def process(self, enrolled: BoolArray, rng: np.random.Generator) -> ParticipationProcess:
        """Return rounds drawn with these frequencies."""
        return RateProcess(np.where(enrolled, self.rate, 0.0), rng)


@final
class RateProcess(CountedProcess):
    """Running :class:`DrawnReplies`."""

    columns: tuple[str, ...] = ()

    def __init__(self, rate: FloatArray, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._rate = rate

    def advance(self) -> RoundDraw:
        """Return the next round."""
        assert self.rng is not None
        self.round += 1
        return RoundDraw(
            index=self.round,
            covariates=np.empty((len(self._rate), 0)),
            participation_prob=None,
            replied=self.rng.random(len(self._rate)) < self._rate,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedTables:
    """Everybody of a population: who is enrolled, who replied, and what is known of all.

    >>> people = pl.DataFrame({"unit_id": [1, 2, 3], "enrolled": [True, True, False],
    ...                        "age": [30, 60, 70]})
    >>> rounds = pl.DataFrame({"round": [1, 1], "unit_id": [2, 1], "replied": [True, False]})
    >>> ill = pl.DataFrame({"ill": [0, 1, 1]})
    >>> tables = ObservedTables(clients=people, replies=recorded(rounds, people), outcomes=ill)
    >>> tables.metric("ill").rows(), round(tables.truth("ill"), 3)
    ([(2, 1, 1.0)], 0.667)
    """

    clients: pl.DataFrame  # unit_id, enrolled, covariates
    replies: ObservedReplies
    outcomes: pl.DataFrame  # a row a client: numbers known of everybody

    def __post_init__(self) -> None:
        if self.outcomes.height != self.clients.height:
            raise InputError(
                f"Outcomes have {self.outcomes.height} rows and clients {self.clients.height}."
            )

    @property
    def enrolled(self) -> BoolArray:
        """Who is enrolled, (N,)."""
        return self.clients[ENROLLED].to_numpy()

    @property
    def covariates(self) -> tuple[str, ...]:
        """Columns of the clients that selection may depend on."""
        return tuple(name for name in self.clients.columns if name not in {ID, ENROLLED})

    def resampled(self, rng: np.random.Generator) -> ObservedTables:
        """Return a bootstrap population: as many clients drawn with replacement, as new ones.

        Flags, replies, covariates and outcomes of a client stay together.
        """
        return self.taken(rng.integers(self.clients.height, size=self.clients.height))

    def taken(self, rows: IntArray) -> ObservedTables:
        """Return some clients, each as often as it is named, as clients of their own."""
        return ObservedTables(
            clients=self.clients[rows].with_columns(pl.Series(ID, np.arange(len(rows)))),
            replies=self.replies.taken(rows),
            outcomes=self.outcomes[rows],
        )

    def frames(self, rounds: int = 1) -> Iterator[pl.DataFrame]:
        """Yield rounds as a ledger holds them: unit_id, invited, replied of the enrolled.

        Replies that are drawn are the same at every call.
        """
        process = self.replies.process(self.enrolled, np.random.default_rng(0))
        inside, names = self.enrolled, process.columns
        ids = self.clients.select(ID).filter(pl.Series(inside))
        for _ in range(rounds):
            draw = process.advance()
            yield ids.with_columns(
                pl.lit(value=True).alias("invited"),
                pl.Series(REPLIED, draw.replied[inside]),
                *(pl.Series(n, draw.covariates[inside, j]) for j, n in enumerate(names)),
            )

    def ledger(self, directory: Path, rounds: int = 1) -> Ledger:
        """Write rounds to a ledger."""
        made = Ledger(directory)
        for index, frame in enumerate(self.frames(rounds), start=1):
            made.append(index, frame)
        return made

    def metric(self, outcome: str, rounds: int = 1) -> pl.DataFrame:
        """Return an outcome of the respondents of each round: unit_id, round, value."""
        known = self.clients.select(ID).with_columns(
            self.outcomes[outcome].cast(pl.Float64).alias("value")
        )
        parts = [
            frame.filter(REPLIED)
            .select(ID, pl.lit(index, dtype=pl.Int64).alias(ROUND))
            .join(known, on=ID, maintain_order="left")
            for index, frame in enumerate(self.frames(rounds), start=1)
        ]
        return pl.concat(parts)

    def truth(self, outcome: str) -> float:
        """Return the mean of an outcome over everybody."""
        return float(self.outcomes[outcome].cast(pl.Float64).to_numpy().mean())


def recorded(
    rounds: pl.DataFrame, clients: pl.DataFrame, *, cycle: bool = False, where: str = "rounds"
) -> RecordedReplies:
    """Return the replies of a table with ``round``, ``unit_id`` and ``replied``.

    Further columns of numbers are known before a round. Every round lists every enrolled client
    once, and nobody else.
    """
    lacking = [name for name in _KEYS if name not in rounds.columns]
    if lacking:
        raise InputError(f"{where} has no column {some(lacking)}; it has {some(rounds.columns)}.")
    names = tuple(name for name in rounds.columns if name not in _KEYS)
    check_cells(rounds, rounds.columns, where)
    rounds = rounds.with_columns(flags(rounds[REPLIED], where))
    text = [n for n in names if not (rounds[n].dtype.is_numeric() or rounds[n].dtype == pl.Boolean)]
    if text:
        raise InputError(f"{where}: columns known before a round must be numbers; {some(text)} "
                         "are not. Recode them, or leave them out.")  # fmt: skip
    if not rounds[ROUND].dtype.is_integer():
        raise InputError(f"{where}: round must be a whole number, not {rounds[ROUND].dtype}.")
    if rounds[ID].dtype != clients[ID].dtype:
        rounds = rounds.with_columns(pl.col(ID).cast(pl.String))
        clients = clients.with_columns(pl.col(ID).cast(pl.String))
    ids = clients.select(ID, ENROLLED)
    numbers = sorted(rounds[ROUND].unique().to_list())
    replied = np.zeros((len(numbers), clients.height), dtype=np.bool_)
    known = np.full((len(numbers), clients.height, len(names)), np.nan)
    for at, (number, part) in enumerate(
        (number, rounds.filter(pl.col(ROUND) == number)) for number in numbers
    ):
        if part[ID].n_unique() != part.height:
            twice = part.filter(pl.col(ID).is_duplicated())[ID][0]
            raise InputError(f"{where}: round {number} lists {twice} more than once.")
        joined = ids.join(part, on=ID, how="left", maintain_order="left")
        strange = part.join(ids.filter(ENROLLED), on=ID, how="anti")[ID].to_list()
        if strange:
            raise InputError(
                f"{where}: round {number} lists {len(strange)} clients that are not enrolled "
                f"({some(strange)}). Leave their rows out, or correct their flag."
            )
        absent = joined.filter(pl.col(ENROLLED) & pl.col(REPLIED).is_null())[ID].to_list()
        if absent:
            raise InputError(
                f"{where}: round {number} lacks {len(absent)} enrolled clients ({some(absent)}). "
                "Give every enrolled client a row in every round, with replied true or false."
            )
        replied[at] = joined[REPLIED].fill_null(value=False).to_numpy()
        for j, name in enumerate(names):
            known[at, :, j] = joined[name].cast(pl.Float64).to_numpy()
    return RecordedReplies(
        replied=replied, covariates=known, columns=names, cycle=cycle, where=where
    )


def flags(column: pl.Series, where: str) -> pl.Series:
    """Return a column of true and false, or of 1 and 0, as flags; raise at anything else.

    >>> flags(pl.Series("replied", [1, 0]), "rounds.csv").to_list()
    [True, False]
    >>> flags(pl.Series("replied", ["yes", "no"]), "rounds.csv")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: rounds.csv, row 1: replied is 'yes'; it must be true or false.
    """
    if column.dtype == pl.Boolean:
        return column
    for row, value in enumerate(column.to_list(), start=1):
        if value not in (0, 1):
            raise InputError(
                f"{where}, row {row}: {column.name} is {value!r}; it must be true or false."
            )
    return column.cast(pl.Boolean)


def check_cells(frame: pl.DataFrame, names: Sequence[str], where: str) -> None:
    """Raise at the first missing column or cell; rows are counted from 1, without the header."""
    lacking = [name for name in names if name not in frame.columns]
    if lacking:
        raise InputError(f"{where} has no column {some(lacking)}; it has {some(frame.columns)}.")
    for name in names:
        empty = frame[name].is_null()
        if frame[name].dtype.is_float():
            empty = empty | frame[name].is_nan().fill_null(value=True)
        if empty.any():
            row = int(empty.arg_max() or 0) + 1
            raise InputError(
                f"{where}, row {row}: {name} is empty; every row needs a value. Fill it, or give "
                "what is missing a level of its own."
            )


def check_codes(frame: pl.DataFrame, codes: Mapping[str, Sequence[Any]], where: str) -> None:
    """Raise at the first cell of a column that is none of its codes.

    >>> check_codes(pl.DataFrame({"GENDER": [1, 3]}), {"GENDER": (1, 2)}, "persons.csv")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: persons.csv, row 2: GENDER is 3; its codes are 1, 2.
    """
    check_cells(frame, list(codes), where)
    for name, known in codes.items():
        for row, value in enumerate(frame[name].to_list(), start=1):
            if value not in known:
                raise InputError(
                    f"{where}, row {row}: {name} is {value!r}; its codes are "
                    f"{', '.join(map(str, known))}."
                )


def read(path: Path, what: str, *, id: str = ID) -> pl.DataFrame:  # noqa: A002
    """Return a table of any kind fedipw reads; ``what`` says what file would be right."""
    if not path.exists():
        raise InputError(f"There is no {path}. It must be {what}.")
    table = Table(path, id=id)
    return table.collect(table.scan())


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSource(ABC):
    """A population with selection as observed, as scenarios take it.

    ``features`` is a formula of the model's features; each column has mean 0 and variance 1 over
    the table. With ``bootstrap`` every seed draws a population of as many clients with replacement;
    without it all seeds have the same. The rounds start again after the last one.
    """

    path: Path
    features: str = "."
    bootstrap: bool = False

    @abstractmethod
    def tables(self) -> ObservedTables:
        """Return the tables, outcomes among them."""

    @abstractmethod
    def rows(self, tables: ObservedTables) -> ModelRows:
        """Return the clients' data."""

    def at(self, directory: Path) -> ObservedSource:
        """Return the same with its paths relative to a directory."""
        return replace(self, path=directory / self.path)

    def draw(self, rng: np.random.Generator) -> PopulationDraw:
        """Return the population with its observed selection and data, resampled if asked for."""
        tables = self.tables()
        data, size = self.rows(tables), tables.clients.height
        rows = np.arange(size)
        if self.bootstrap:
            rows = rng.integers(size, size=size)
            tables = tables.taken(rows)
        process = tables.replies.process(tables.enrolled, rng)
        return PopulationDraw(
            population=Population(tables.clients.drop(ENROLLED)),
            clients=data.of(rows),
            observed=ObservedSelection(enrolled=tables.enrolled, process=process),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelRows:
    """Data of all clients, sorted by client."""

    features: FloatArray  # (rows, d)
    labels: BoolArray  # (rows,)
    counts: IntArray  # (N,)

    def of(self, clients: IntArray) -> ClientData:
        """Return the data of some clients, each as often as it is named."""
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        counts = self.counts[clients]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = np.repeat(starts[clients] - offsets[:-1], counts) + np.arange(offsets[-1])
        return ClientData(
            features=np.ascontiguousarray(self.features[rows]),
            labels=self.labels[rows].astype(np.int8),
            offsets=offsets,
        )


def model_rows(
    frame: pl.DataFrame, formula: str, names: Sequence[str], label: pl.Series, where: str
) -> ModelRows:
    """Return one row of data a client: columns of a formula, scaled, and labels."""
    return ModelRows(
        features=_scaled(frame, formula, names, where),
        labels=flags(label, where).to_numpy(),
        counts=np.ones(frame.height, dtype=np.int64),
    )


def _scaled(frame: pl.DataFrame, formula: str, names: Sequence[str], where: str) -> FloatArray:
    design = bound_design(formula, frame.lazy(), names, where=where)
    matrix = design.rows(frame, where).columns.T
    spread = matrix.std(axis=0)
    if not (spread > 0.0).all():
        flat = [name for name, sd in zip(design.names, spread, strict=True) if not sd > 0.0]
        raise InputError(f"{where}: feature {some(flat)} has the same value in all rows.")
    scaled: FloatArray = (matrix - matrix.mean(axis=0)) / spread
    return scaled


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPopulation(ObservedSource):
    """Any population in tables: ``kind = "observed"``.

    Parameters
    ----------
    path
        The population: ``unit_id``, ``enrolled``, covariates, and what the model reads unless
        ``data`` has it.
    rounds
        The replies: a file with ``round``, ``unit_id``, ``replied`` and columns known before a
        round, or a ledger. Every round lists every enrolled client.
    label, features
        The column of the model's label, 0 or 1 of everybody, and a formula of its features.
    covariates
        Columns that selection may depend on; by default all that are neither label nor feature.
    reply_rate
        In place of ``rounds``: a column of the population with the share of rounds in which a
        client replies. Replies are then drawn.
    data
        A file with ``unit_id``, features and label, where clients have several rows.
    id
        The column of identifiers in all three.
    """

    label: str
    rounds: Path | None = None
    covariates: tuple[str, ...] | None = None
    reply_rate: str | None = None
    data: Path | None = None
    id: str = ID

    def __post_init__(self) -> None:
        if (self.rounds is None) == (self.reply_rate is None):
            raise InputError(
                "An observed population has its replies in rounds, a file or a ledger, or a column "
                "reply_rate: give one of the two."
            )

    def at(self, directory: Path) -> ObservedPopulation:
        """Return the same with its paths relative to a directory."""
        return replace(
            self,
            path=directory / self.path,
            rounds=None if self.rounds is None else directory / self.rounds,
            data=None if self.data is None else directory / self.data,
        )

    def tables(self) -> ObservedTables:
        """Return the tables, checked."""
        frame, where = self._population(), str(self.path)
        clients = frame.select(ID, ENROLLED, *self._covariates(frame))
        return ObservedTables(
            clients=clients,
            replies=self._replies(frame, clients),
            outcomes=frame.select(flags(frame[self.label], where).cast(pl.Float64))
            if self.data is None
            else frame.select(ENROLLED),
        )

    def _population(self) -> pl.DataFrame:
        frame = read(self.path, "the table of the population", id=self.id)
        where = str(self.path)
        label = [self.label] if self.data is None else []
        rate = [] if self.reply_rate is None else [self.reply_rate]
        check_cells(frame, [ID, ENROLLED, *label, *rate, *(self.covariates or ())], where)
        check_cells(frame, frame.columns if self.covariates is None else [], where)
        if frame[ID].n_unique() != frame.height:
            raise InputError(f"{where}: two clients share the {self.id} "
                             f"{frame.filter(pl.col(ID).is_duplicated())[ID][0]}.")  # fmt: skip
        frame = frame.with_columns(flags(frame[ENROLLED], where))
        if not frame[ENROLLED].any():
            raise InputError(f"{where}: nobody is enrolled.")
        return frame

    def _covariates(self, frame: pl.DataFrame) -> tuple[str, ...]:
        if self.covariates is not None:
            return self.covariates
        taken = {ID, ENROLLED, self.label, self.reply_rate}
        if self.data is None and self.features != ".":
            taken |= {*self._features(frame)}
        return tuple(name for name in frame.columns if name not in taken)

    def _features(self, frame: pl.DataFrame) -> tuple[str, ...]:
        """Return the columns of a table that the features are made of."""
        taken = {ID, ENROLLED, self.label, self.reply_rate}
        names = [name for name in frame.columns if name not in taken]
        return bound_design(self.features, frame.lazy(), names, where=str(self.path)).columns

    def _replies(self, frame: pl.DataFrame, clients: pl.DataFrame) -> ObservedReplies:
        if self.reply_rate is not None:
            column = frame[self.reply_rate]
            if not column.dtype.is_numeric():
                raise InputError(f"{self.path}: {self.reply_rate} must hold numbers.")
            return DrawnReplies(rate=column.cast(pl.Float64).to_numpy())
        assert self.rounds is not None
        if self.rounds.is_dir():
            ledger = Ledger(self.rounds, id=self.id)
            ledger.require_rounds()
            rounds = ledger.scan().select(*_KEYS, *ledger.covariates).collect()
        else:
            rounds = read(self.rounds, "the replies: round, unit_id, replied", id=self.id)
        return recorded(rounds, clients, cycle=True, where=str(self.rounds))

    def rows(self, tables: ObservedTables) -> ModelRows:
        """Return the clients' data: a row each, or those of the data file."""
        if self.data is None:
            frame = self._population()
            return model_rows(
                frame, self.features, self._features(frame), frame[self.label], str(self.path)
            )
        where = str(self.data)
        frame = read(self.data, "the clients' rows: unit_id, features, label", id=self.id)
        check_cells(frame, frame.columns, where)
        check_cells(frame, [self.label], where)
        places = tables.clients.select(ID).with_row_index("(at)")
        joined = frame.join(places, on=ID, how="left", maintain_order="left")
        if joined["(at)"].null_count():
            strange = joined.filter(pl.col("(at)").is_null())[ID].to_list()
            raise InputError(f"{where}: {some(strange)} are not in {self.path}.")
        counts = np.bincount(joined["(at)"].to_numpy(), minlength=tables.clients.height)
        if not counts.all():
            without = tables.clients[ID].filter(pl.Series(counts == 0)).to_list()
            raise InputError(
                f"{where}: {len(without)} clients of the population have no row ({some(without)}); "
                "the loss over everybody needs one of each."
            )
        ordered = joined.sort("(at)", maintain_order=True).drop("(at)")
        names = [name for name in ordered.columns if name not in {ID, self.label}]
        return replace(
            model_rows(ordered, self.features, names, ordered[self.label], where),
            counts=counts.astype(np.int64),
        )
