"""The round ledger: a directory with one Parquet file for each closed round.

Files are named ``round-000001.parquet`` and so on, written under a temporary name and renamed, so
that a reader never sees half a round. ``ledger.json`` holds the version of the format.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import LARGEST, SHOWN, SMALLEST, some
from fedipw.storage.atomic import remove_abandoned, write_text
from fedipw.storage.lock import locked
from fedipw.storage.places import Place, copies_of, local_file, place_of
from fedipw.storage.remote import Copy, Remote
from fedipw.tables.columns import (
    ASKED,
    AVAILABLE,
    ID,
    INVITE_PROB,
    INVITED,
    OPENED_AT,
    OWN_COLUMNS,
    REPLIED,
    ROUND,
)
from fedipw.tables.table import (
    ALLOW,
    CLAIM,
    RATIO,
    check_claim,
    check_same_columns,
    odd_number,
    paragraphs,
    reading,
    write_table,
)

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray

VERSION: Final = 1
_REQUIRED = (ROUND, ID, INVITED, REPLIED)
_FLAGS = (ASKED, AVAILABLE, INVITED, REPLIED)
_FILE = re.compile(r"^round-([0-9]{6,18})\.parquet$")
_VERSION_FILE = "ledger.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """What a server knows of the clients of a round before replies come in.

    ``table`` has one row per enrolled client: covariates of the round, and what of ``available``,
    ``invited`` and ``invite_prob`` is known. ``rows`` are the clients behind them, as places in
    the table of clients.
    """

    index: int  # counted from 1
    rows: IntArray  # (m,)
    table: pl.DataFrame  # m rows
    participation_prob: FloatArray | None = None  # (m,) true, where known, as in a simulation

    def __post_init__(self) -> None:
        if self.table.height != len(self.rows) and self.table.width:
            raise InputError(
                f"Round {self.index}: {self.table.height} rows of covariates for "
                f"{len(self.rows)} clients."
            )

    def present(self, size: int) -> BoolArray:
        """Return who of ``size`` clients has a row, (size,)."""
        out = np.zeros(size, dtype=np.bool_)
        out[self.rows] = True
        return out


@dataclass(frozen=True)
class Ledger:
    """Closed rounds on disk, one row per enrolled client and round.

    Columns are ``round``, ``unit_id``, ``invited`` and ``replied``, optionally ``available`` and
    ``invite_prob`` (the server's own sampling probability given available), ``asked`` (whether a
    sample of clients that the server asked has the client), ``opened_at`` (one date or time for the
    whole round), ``fate`` (the outcome of an invitation, for people to read:
    no formula may use it), and pre-round covariates, null where not observed. With ``since`` the
    rounds before that one are left alone. ``id`` is a column that holds the identifiers if the
    files have it, in place of ``unit_id``; such a ledger can be read and not be written to, nor can
    one at a URL: a store has no locks. Rounds at a URL are copied to the temporary directory.

    Examples
    --------
    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "rounds")
    >>> ledger.append(1, pl.DataFrame({"unit_id": ["a", "b"], "invited": [True, True],
    ...                                "replied": [True, False], "battery": [0.9, 0.2]}))
    >>> ledger.rounds, ledger.covariates
    ((1,), ('battery',))
    """

    directory: Place
    since: int = 1
    id: str = ID

    def __init__(
        self,
        directory: str | Place,
        since: int = 1,
        *,
        id: str = ID,  # noqa: A002
    ) -> None:
        if not isinstance(directory, str | Path | Remote):
            kind = type(directory).__name__
            raise InputError(f"A ledger is a directory, given as str or Path, not {kind}.")
        object.__setattr__(self, "directory", place_of(directory))
        object.__setattr__(self, "since", since)
        object.__setattr__(self, "id", id)

    def absolute(self) -> Ledger:
        """Return the same ledger by a place that holds in any working directory."""
        where = self.directory
        return Ledger(
            where.absolute() if isinstance(where, Path) else where, self.since, id=self.id
        )

    def __getstate__(self) -> dict[str, object]:
        """Return what travels to other processes: not the copies of remote files, made there."""
        return {"directory": self.directory, "since": self.since, "id": self.id}

    def _repr_html_(self) -> str:
        rounds = self.rounds
        found = f"rounds {rounds[0]} to {rounds[-1]}" if rounds else "no closed round"
        known = f"; covariates {some(self.covariates)}" if rounds and self.covariates else ""
        return paragraphs(f"Ledger({self.directory}: {found}{known})")

    @property
    def rounds(self) -> tuple[int, ...]:
        """Numbers of the closed rounds, in order; a round being written is not among them.

        Each look lists the directory: whoever needs them more than once keeps them.
        """
        if not self.directory.is_dir():
            return ()
        try:
            names = self._names()
        except OSError as error:
            raise InputError(f"{self.directory} cannot be read: {error.strerror}.") from error
        numbers = sorted([int(match[1]) for match in map(_FILE.match, names) if match])
        return tuple(numbers[bisect_left(numbers, self.since) :])

    def _names(self) -> list[str]:
        """Return the names of the files."""
        if isinstance(self.directory, Path):
            return os.listdir(self.directory)
        found = {file.name: file for file in self.directory.iterdir()}
        self._listed.clear()
        self._listed.update(found)
        return list(found)

    @cached_property
    def _listed(self) -> dict[str, Remote]:
        """Files at a URL as last listed, whose versions need not be asked for again."""
        return {}

    @cached_property
    def _scanned(self) -> list[Copy]:
        """Copies that a query reads."""
        return []

    @cached_property
    def schema(self) -> pl.Schema:
        """Columns and types, those of the first closed round."""
        self.require_rounds()
        return self._schema_of(self.since)

    @property
    def covariates(self) -> tuple[str, ...]:
        """Pre-round covariates."""
        return tuple(n for n in self.schema.names() if n not in {ID, *OWN_COLUMNS})

    def require_rounds(self) -> tuple[int, ...]:
        """Return the closed rounds; raise if there is none, one is missing, or another format."""
        if not self.directory.is_dir():
            raise InputError(f"No ledger directory {self.directory}.")
        self._check_version()
        rounds = self.rounds
        if not rounds:
            raise InputError(
                f"{self.directory} holds no closed round; files are named round-000001.parquet."
            )
        if rounds[-1] - self.since + 1 > len(rounds):
            present = set(rounds)
            absent = (r for r in range(self.since, rounds[-1] + 1) if r not in present)
            first = ", ".join(map(str, islice(absent, SHOWN)))
            count = rounds[-1] - self.since + 1 - len(rounds)
            more = f" and {count - SHOWN} more" if count > SHOWN else ""
            raise InputError(
                f"{self.directory}: round {first}{more} is missing; rounds {self.since} to "
                f"{rounds[-1]} are expected. Restore the file(s), or leave out all later rounds."
            )
        return rounds

    def read(self, index: int) -> pl.DataFrame:
        """Return one closed round, checked."""
        path = self._closed_path(index)
        with local_file(path) as file, reading(path, file):
            self._check_columns(self._schema_of(index), path)
            # no more rows than its bytes can honestly hold, without another look at the file
            most = 10**6 + 64 * file.stat().st_size
            frame = pl.read_parquet(file, n_rows=None if os.environ.get(ALLOW) else most + 1)
            frame = frame.rename(self._renamed(frame.columns, path))
            if frame.height > most:
                check_claim(file, CLAIM + RATIO * frame.height * 64, path)
        check_round(frame, index, str(path))
        return frame

    def scan(self) -> pl.LazyFrame:
        """Return all closed rounds as a query; files of other columns or types are errors.

        Of rounds at a URL, copies of all of them stay for as long as the ledger is used.
        """
        rounds = self.require_rounds()
        held = copies_of(self._place(index) for index in rounds)
        for index in rounds[1:]:
            self._check_columns(self._schema_of(index), self._place(index))
        query = pl.scan_parquet([copy.path for copy in held], glob=False)
        self._scanned[:] = held
        first = self._place(self.since)
        return query.rename(self._renamed(query.collect_schema().names(), first))

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """Yield the closed rounds in order, one in memory at a time."""
        for index in self.require_rounds():
            yield self.read(index)

    @contextmanager
    def writing(self, *, cleaned: bool = True) -> Iterator[LedgerWriter]:
        """Hold the ledger for one writer, as a server does for as long as it runs.

        What killed writers left is removed; that lists the directory, unless not ``cleaned``.
        """
        directory = self._made()
        with locked(directory, "writes the ledger"):
            if cleaned:
                remove_abandoned(directory)
            yield LedgerWriter(self)

    @property
    def folder(self) -> Path:
        """The directory of a server's ledger, on a local disk; raise if it is at a URL."""
        if isinstance(self.directory, Remote):
            raise InputError(
                f"{self.directory} is at a URL: a server keeps its ledger and its checkpoint in a "
                "local directory, which it can lock. Copy closed rounds to the store from there."
            )
        return self.directory

    def _made(self) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.directory} cannot be made: {error.strerror}.") from error
        return self.folder

    def append(self, index: int, frame: pl.DataFrame) -> None:
        """Write a round that has closed; the next number only, and never over another.

        The ledger is held meanwhile: a program that keeps it with :meth:`writing` appends there.
        """
        closed = _closed(index, frame)
        directory = self._made()
        # what others left is cleaned by whoever holds the ledger for long: that lists the directory
        with locked(directory, "writes the ledger"):
            self._write(index, closed)

    def has(self, index: int) -> bool:
        """Return whether a round is closed, without a look at the others."""
        path = self._place(index)
        return (isinstance(path, Remote) and path.version is not None) or path.is_file()

    def _write(self, index: int, frame: pl.DataFrame) -> None:
        if self.id != ID:
            raise InputError(f"A ledger is written with {ID!r}: open it without id=.")
        follows = index == self.since or self.has(index - 1)
        if index < self.since or not follows or self.has(index):
            last = max(self.rounds, default="none")
            raise InputError(f"Round {index} cannot be closed: the last closed round is {last}.")
        path = self._place(index)
        if index > self.since:
            self._check_columns(frame.schema, path)
        self._write_version()
        names = frame.columns if index == self.since else self.schema.names()
        write_table(frame.select(names), path, cleaned=False)

    def path(self, index: int) -> Path:
        """Return the file of a round of a ledger on a local disk."""
        return self.folder / _name(index)

    def _place(self, index: int) -> Place:
        """Return where the file of a round is."""
        if isinstance(self.directory, Remote) and _name(index) in self._listed:
            return self._listed[_name(index)]
        return self.directory / _name(index)

    def _closed_path(self, index: int) -> Place:
        if not self.has(index):
            raise InputError(f"No round {index} in {self.directory}.")
        return self._place(index)

    def _schema_of(self, index: int) -> pl.Schema:
        path = self._closed_path(index)
        with local_file(path) as file, reading(path, file):
            found = pl.read_parquet_schema(file)
        names = self._renamed(list(found), path)
        return pl.Schema({names.get(name, name): kind for name, kind in found.items()})

    def _renamed(self, names: Sequence[str], path: Place) -> dict[str, str]:
        """Return the new name of the column of identifiers, where it has another."""
        if self.id == ID or self.id not in names:
            return {}
        if ID in names:
            raise InputError(
                f"{path} has both {self.id!r}, which --id (id=) names, and {ID!r}: leave one out."
            )
        return {self.id: ID}

    def _check_columns(self, schema: pl.Schema, path: Place) -> None:
        check_same_columns(schema, self.schema, str(path), self._place(self.since).name)

    def _check_version(self) -> None:
        path = self.directory / _VERSION_FILE
        if not path.exists():
            return  # rounds written by hand
        try:
            with local_file(path) as file:
                version = json.loads(file.read_text(encoding="utf-8"))["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: {error}.") from error
        if version != VERSION:
            raise InputError(f"{path} has version {version}, this program reads {VERSION}.")

    def _write_version(self) -> None:
        path = self.folder / _VERSION_FILE
        if not path.exists():
            write_text(path, json.dumps({"version": VERSION}) + "\n")


def _name(index: int) -> str:
    return f"round-{index:06d}.parquet"


@dataclass(frozen=True)
class LedgerWriter:
    """A ledger that nobody else writes to."""

    ledger: Ledger

    def append(self, index: int, frame: pl.DataFrame) -> None:
        """Write a round that has closed; the next number only, and never over another."""
        self.ledger._write(index, _closed(index, frame))


def _closed(index: int, frame: pl.DataFrame) -> pl.DataFrame:
    """Return a round as it is kept, checked."""
    if ROUND not in frame.columns:
        frame = frame.with_columns(pl.lit(index, dtype=pl.Int64).alias(ROUND))
    check_round(frame, index, f"round {index}")
    return frame


def check_round(frame: pl.DataFrame, index: int, where: str) -> None:
    """Raise if a round's rows cannot be: missing columns, doubled clients, replies uninvited."""
    lacking = [name for name in _REQUIRED if name not in frame.columns]
    if lacking:
        raise InputError(f"{where} has no column {some(lacking)}; it has {some(frame.columns)}.")
    for name in _FLAGS:
        if name in frame.columns and (frame[name].dtype != pl.Boolean or frame[name].null_count()):
            raise InputError(
                f"{where}: {name!r} must be true or false in every row, not {frame[name].dtype} "
                f"with {frame[name].null_count()} nulls."
            )
    if frame[ID].null_count():
        raise InputError(f"{where}: {frame[ID].null_count()} rows have no {ID}.")
    if frame[ID].n_unique() != frame.height:
        twice = frame[ID].filter(frame[ID].is_duplicated()).unique(maintain_order=True)
        raise InputError(f"{where}: {ID} {some(twice.to_list())} stands more than once.")
    if not frame[ROUND].dtype.is_integer() and frame.height:
        raise InputError(
            f"{where}: column {ROUND!r} holds {frame[ROUND].dtype}, not whole numbers."
        )
    others = frame[ROUND].filter(frame[ROUND] != index)
    if len(others) or frame[ROUND].null_count():
        raise InputError(f"{where}: column {ROUND!r} holds {some(others.unique().to_list())}.")
    _check_order(frame, INVITED, REPLIED, where)
    if AVAILABLE in frame.columns:
        _check_order(frame, AVAILABLE, INVITED, where)
        if ASKED in frame.columns:
            _check_order(frame, ASKED, AVAILABLE, where)
    if INVITE_PROB in frame.columns:
        _check_invite_prob(frame, where)
    if OPENED_AT in frame.columns and frame.height:
        moments = frame[OPENED_AT]
        if moments.n_unique() > 1 or moments.null_count():
            raise InputError(
                f"{where}: {OPENED_AT!r} must hold one date or time for the whole round."
            )


def _check_order(frame: pl.DataFrame, first: str, then: str, where: str) -> None:
    odd = frame.filter(pl.col(then) & ~pl.col(first))
    if odd.height:
        raise InputError(
            f"{where}: {odd.height} client(s) {then} without being {first}: "
            f"{some(odd[ID].to_list())}."
        )


def _check_invite_prob(frame: pl.DataFrame, where: str) -> None:
    if not frame[INVITE_PROB].dtype.is_numeric():
        raise InputError(f"{where}: {odd_number(frame[INVITE_PROB])}.")
    if not frame[INVITED].any() and frame[INVITE_PROB].null_count() == frame.height:
        return  # nobody could be invited
    due = pl.col(AVAILABLE) if AVAILABLE in frame.columns else pl.col(INVITED)
    prob = pl.col(INVITE_PROB).cast(pl.Float64)
    odd = frame.filter(due & ~((prob >= SMALLEST) & (prob <= 1.0)).fill_null(False))
    if odd.height:
        raise InputError(
            f"{where}: {INVITE_PROB!r} must lie in (0, 1], and not below {SMALLEST:g}, where a "
            "client could be invited; "
            f"{odd.height} row(s) do not ({ID} {some(odd[ID].to_list())})."
        )


LONGEST_TEXT: Final = 200  # characters of a text that a live server accepts


def quarantined(schema: pl.Schema) -> list[pl.Expr]:
    """Return the covariates of a ledger with null for values that no live server accepts.

    Those are infinite numbers, NaN, numbers beyond 1e100 or nearer to 0 than 1e-100, and texts of
    more than 200 characters. An older server may have written them.

    Examples
    --------
    >>> poisoned = pl.DataFrame({"battery": [0.5, 1e308], "network": ["wifi", "x" * 1000]})
    >>> poisoned.with_columns(quarantined(poisoned.schema)).rows()
    [(0.5, 'wifi'), (None, None)]
    """
    made = []
    for name, kind in schema.items():
        column = pl.col(name)
        if name in {ID, *OWN_COLUMNS}:
            continue
        if kind.is_float():
            size = column.abs()
            usual = (size <= LARGEST) & ((size >= SMALLEST) | (size == 0.0))
            made.append(pl.when(usual).then(column).alias(name))  # NaN is above all numbers
        elif kind == pl.String:
            made.append(pl.when(column.str.len_chars() <= LONGEST_TEXT).then(column).alias(name))
    return made
