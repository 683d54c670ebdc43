"""Populations: who is to be served, who of them is enrolled and when.

A table may say that enrollment changes over time with the columns ``enrolled_from`` (first round or
moment) and ``enrolled_until`` (the first one no longer), null where there is no such limit.
Whole numbers are rounds; dates and times are compared with the ledger's column ``opened_at``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import (
    check_finite,
    check_magnitude,
    check_positive,
    check_rows,
    some,
)
from fedipw.tables.columns import ENROLLED, FROM, ID, NO, OPENED_AT, UNTIL, YES
from fedipw.tables.design import Design
from fedipw.tables.formula import is_number, near, nearest_first
from fedipw.tables.table import Table, TableLike, odd_number, paragraphs
from fedipw.tables.targets import Targets, TargetsLike

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics import BoolArray, FloatArray, IdArray, IntArray

__all__ = [
    "ENROLLED", "FROM", "ID", "NO", "UNTIL", "YES",
    "Members", "Population", "PopulationMeans", "ReferenceSample",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PopulationMeans:
    """Population means of the columns of a balance map, with errors where they are estimates."""

    names: tuple[str, ...]
    mean: FloatArray  # (q,)
    se: FloatArray | None = None  # (q,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceSample:
    """A probability sample of the population, with design weights that sum to about its size."""

    table: Table
    weight: str  # name of the column of design weights
    weights: FloatArray  # (m,)

    @classmethod
    def of(cls, table: TableLike, weight: str) -> ReferenceSample:
        """Return the sample in a table, its design weights in a column."""
        given = Table(table)
        given.require([weight])
        values = given.collect(given.scan().select(weight))[weight]
        if not values.dtype.is_numeric():
            raise InputError(f"{given.name}: {odd_number(values)}.")
        weights = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
        if not (np.isfinite(weights).all() and (weights > 0.0).all()):
            raise InputError(f"{given.name}: weights in {weight!r} must be finite and above 0.")
        check_magnitude(weights, repr(weight), given.name)
        return cls(table=given, weight=weight, weights=weights)


@final
class Population:
    """Who is to be served: clients, who of them is enrolled when, and what is known of the rest.

    The rest is known by a table that lists everybody, by totals alone
    (:meth:`from_totals`), or by a reference sample (:meth:`from_sample`). What needs population
    means asks for :meth:`moments` and works with any of them; what needs the clients that are not
    enrolled asks for :meth:`everyone`, which says what to do instead where they are not known.

    Parameters
    ----------
    table
        One row per client: a file, a directory of Parquet files, or a frame (polars, pandas, Arrow)
        with ``unit_id``, ``enrolled`` and covariates.
    base
        Column of base weights, where a row stands for more clients than itself: the population is
        as large as their sum, and its means are weighted by them. It is no covariate.
    id
        The column of identifiers, where it is not ``unit_id``.

    Examples
    --------
    >>> devices = Population(pl.DataFrame({"unit_id": ["a", "b"], "age": [30, 61],
    ...                                    "enrolled": [True, False]}))
    >>> devices.size, devices.members.size, devices.covariates
    (2, 1, ('age',))
    >>> phones = pl.DataFrame({"unit_id": ["a", "c"], "age": [30, 44]})
    >>> Population.from_totals(phones, {"age": 41.5}, size=1000)
    Population(2 enrolled of 1000, means of age known)
    """

    targets: Targets | None = None
    sample: ReferenceSample | None = None
    base: str | None = None  # column of base weights
    cluster: str | None = None  # column of what clients share, such as a person
    _size: float | None = None
    _checked = False

    def __init__(
        self,
        table: TableLike,
        *,
        base: str | None = None,
        id: str = ID,  # noqa: A002
    ) -> None:
        self.clients, self.base = Table(table, id=id), base
        if self.clients.path is None:
            self.check()

    @classmethod
    def of(cls, columns: Mapping[str, ArrayLike | Sequence[object]]) -> Population:
        """Return a population from columns by name."""
        return cls(pl.DataFrame(dict(columns)))

    @classmethod
    def from_totals(
        cls,
        enrolled: TableLike,
        targets: TargetsLike,
        size: float | None = None,
        *,
        totals: bool = False,
        base: str | None = None,
        id: str = ID,  # noqa: A002
    ) -> Population:
        """Return a population known by its enrolled clients and by means from outside.

        Rows of ``enrolled`` with ``enrolled`` false are ignored; ``size`` is the population's. With
        ``totals`` the targets are population totals, counts of levels, and are divided by it.
        ``base`` names the column of base weights that calibration starts from.
        """
        if size is not None:
            check_magnitude(check_positive(size, "population_size"), "population_size")
        if totals and size is None:
            raise InputError(
                "Totals (--totals, totals=) need the population size (--population-size, size=): "
                "they are divided by it."
            )
        made = cls.__new__(cls)
        made.clients, made.base = Table(enrolled, id=id), base
        made.targets = Targets.given(targets, totals=size if totals else None)
        made._size = size
        return made

    @classmethod
    def from_sample(
        cls,
        enrolled: TableLike,
        sample: TableLike,
        weight: str,
        *,
        id: str = ID,  # noqa: A002
    ) -> Population:
        """Return a population known by its enrolled clients and a reference sample of it.

        ``weight`` names the column of design weights, inverse inclusion probabilities that sum to
        about the population's size.
        """
        made = cls.__new__(cls)
        made.clients, made.sample = Table(enrolled, id=id), ReferenceSample.of(sample, weight)
        made._size = float(made.sample.weights.sum())
        return made

    def __repr__(self) -> str:
        listed = self._has_flags or not self.lists_everyone
        inside = f"{self.members.size} enrolled" if listed else f"{self.clients.rows} clients"
        of = "" if self.size is None else f" of {self.size:.6g}"
        known = ""
        if self.targets is not None:
            known = f", means of {some(self.targets.names)} known"
        elif self.sample is not None:
            known = f", reference sample of {self.sample.table.rows}"
        return f"Population({inside}{of}{known})"

    def _repr_html_(self) -> str:
        first = self.clients.collect(self.clients.scan().head(5))
        return paragraphs(repr(self)) + first._repr_html_()

    def stamp(self) -> dict[str, Any]:
        """Return plain values that differ once what is known of the population has changed."""
        targets, sample = self.targets, self.sample
        named = None
        if targets is not None:
            se = None if targets.se is None else targets.se.tolist()
            named = [targets.names, targets.values.tolist(), se, targets.decimals, targets.notes]
        return {
            "clients": self.clients.stamp(),
            "base": self.base,
            "size": None if self.lists_everyone else self.size,
            "targets": named,
            "sample": None if sample is None else [sample.table.stamp(), sample.weight],
        }

    @property
    def lists_everyone(self) -> bool:
        """Whether every client of the population has a row, enrolled or not."""
        return self.targets is None and self.sample is None

    @property
    def size(self) -> float | None:
        """Number of clients, N; none where it was not given."""
        if not self.lists_everyone:
            return self._size
        return self.clients.rows if self.base is None else float(self._base_sum)

    @cached_property
    def _base_sum(self) -> float:
        self.check()
        column = pl.col(self.base or "").cast(pl.Float64)
        return float(self.clients.collect(self.clients.scan().select(column.sum())).item())

    @cached_property
    def member_base(self) -> FloatArray | None:
        """Base weights of the members, (n,), none where every row counts once."""
        if self.base is None:
            return None
        return self.members.frame[self.base].cast(pl.Float64).to_numpy()

    @property
    def listed(self) -> int:
        """Number of clients that have a row."""
        return self.clients.rows

    def everyone(self, purpose: str) -> Table:
        """Return the table of all clients, or say what ``purpose`` can do without it."""
        if not self.lists_everyone:
            raise InputError(
                f"{purpose} needs a table of the whole population. With totals alone use a "
                "calibrated method, such as calibrated-quadratic."
            )
        return self.clients

    @cached_property
    def members(self) -> Members:
        """Everybody who is enrolled at some time, in memory."""
        self.check()
        query = self.clients.scan()
        if self._has_flags:
            query = query.filter(pl.col(ENROLLED))
        elif self.lists_everyone:
            self.clients.require([ENROLLED])
        return Members(self.clients.collect(query).drop(*self._shared), base=self.base)

    def with_targets(self, targets: Targets) -> Population:
        """Return the same population with other targets, such as shares that were rescaled."""
        made = copy(self)
        made.targets = targets
        return made

    @property
    def _shared(self) -> tuple[str, ...]:
        return () if self.cluster is None else (self.cluster,)

    def clustered(self, column: str | None) -> Population:
        """Return the same population with clients that share a value of a column in one cluster.

        The column, such as the person that a device belongs to, is then no covariate any more. None
        leaves every client by itself.

        >>> devices = Population(pl.DataFrame({"unit_id": ["a", "b", "c"], "who": ["x", "x", "y"],
        ...                                    "age": [30, 30, 61], "enrolled": [True] * 3}))
        >>> devices.clustered("who").covariates
        ('age',)
        """
        if column is None:
            return self
        table, own = self.clients, {ID, ENROLLED, FROM, UNTIL, self.base}
        if column not in table.schema or column in own:
            raise InputError(
                f"{table.name} has no column {column!r} to cluster clients by; it has "
                f"{some(n for n in table.schema.names() if n not in own)}."
            )
        lacking = pl.col(column).is_null()
        if table.schema[column].is_float():
            lacking |= pl.col(column).is_nan()
        rows = int(table.collect(table.scan().select(lacking.sum())).item())
        if rows:
            raise InputError(
                f"{table.name}: {rows} clients have no {column!r}, so it is not known whom they "
                f"share it with. Give a client that shares with nobody a value of its own, such as "
                f"its {ID}."
            )
        made = copy(self)
        made.__dict__.pop("members", None)
        made.cluster = column
        return made

    def with_members(self, members: Members) -> Population:
        """Return the same population with other members, such as some that left."""
        made = copy(self)
        made.__dict__["members"] = members
        return made

    @property
    def _has_flags(self) -> bool:
        return ENROLLED in self.clients.schema

    def check(self) -> None:
        """Raise if the table is not one row per client with an identifier and enrollment flags."""
        if self._checked:
            return
        table = self.clients
        if ID not in table.schema:
            raise InputError(
                f"{table.name} has no {ID!r} column; it has {some(table.schema.names())}. Every "
                "client needs an identifier."
            )
        if table.rows == 0:
            raise InputError(f"{table.name} has no rows.")
        _require_unique_ids(table)
        if self._has_flags:
            _check_flags(table)
        if self.base is not None:
            ignored = self._has_flags and not self.lists_everyone
            rows = table.scan().filter(ENROLLED) if ignored else table.scan()
            _check_base(table, self.base, rows)
        table.warn_of_odd_cells()
        self._checked = True

    def moments(self, balance: Design | Sequence[str]) -> PopulationMeans:
        """Return the population means of a balance map, streamed from the table or looked up.

        ``balance`` is a design over the columns of the table, or names of targets.
        """
        if self.targets is not None:
            names = balance.names if isinstance(balance, Design) else tuple(balance)
            known = {name: k for k, name in enumerate(self.targets.names)}
            lacking = [name for name in names if name not in known]
            if lacking:
                raise InputError(f"There is no target for {some(lacking)}.")
            places, se = [known[name] for name in names], self.targets.se
            return PopulationMeans(
                names=names,
                mean=self.targets.values[places],
                se=None if se is None else se[places],
            )
        if not isinstance(balance, Design):
            raise InputError(
                "Population means of names alone need targets: give a design (bound_design)."
            )
        if self.sample is None:
            mean = _design_means(self.clients, balance, self.base)
            return PopulationMeans(names=balance.names, mean=mean)
        mean, se = _sample_means(self.sample.table, balance, self.sample.weights)
        return PopulationMeans(names=balance.names, mean=mean, se=se)

    @property
    def covariates(self) -> tuple[str, ...]:
        """Names of all covariate columns."""
        known = {ID, ENROLLED, FROM, UNTIL, self.base, self.cluster}
        return tuple(c for c in self.clients.schema.names() if c not in known)

    @cached_property
    def frame(self) -> pl.DataFrame:
        """The listed clients, in memory."""
        return self.clients.collect(self.clients.scan())

    @cached_property
    def unit_ids(self) -> IdArray:
        """Identifiers of the listed clients, (N,)."""
        return self.frame[ID].to_numpy()

    @cached_property
    def enrolled(self) -> BoolArray:
        """Which of the listed clients are enrolled, (N,)."""
        if not self._has_flags:
            raise InputError(
                f"{self.clients.name} has no {ENROLLED!r} column. Draw enrollment first, or add "
                "the column."
            )
        return self.frame[ENROLLED].to_numpy()

    @property
    def enrolled_size(self) -> int:
        """Number of enrolled clients, N_enr."""
        return int(self.enrolled.sum())

    def matrix(self, columns: Sequence[str] | None = None) -> FloatArray:
        """Return covariates as floats, (N, q), in the order asked for; all of them by default."""
        names = self.covariates if columns is None else tuple(columns)
        self.require(names)
        text = [n for n in names if not is_number(self.frame.schema[n])]
        if text:
            kinds = some(f"{n!r} ({self.frame[n].dtype})" for n in text)
            raise InputError(f"Covariates must be numeric or boolean; {kinds} are not.")
        out = np.empty((self.frame.height, len(names)))
        for j, name in enumerate(names):
            out[:, j] = self.frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
        check_finite(out, names, "population table")
        return out

    def require(self, names: Sequence[str]) -> None:
        """Raise if a name is not a covariate."""
        for name in names:
            if name not in self.covariates:
                raise InputError(
                    f"No covariate column {name!r} in {self.clients.name}; it has "
                    f"{some(self.covariates)}."
                )

    def with_enrolled(self, enrolled: BoolArray) -> Population:
        """Return the same clients with other enrollment flags."""
        check_rows(self.frame.height, enrolled=enrolled)
        if np.asarray(enrolled).dtype != np.bool_:
            raise InputError(f"enrolled must be true or false, not {np.asarray(enrolled).dtype}.")
        return Population(self.frame.with_columns(pl.Series(ENROLLED, enrolled)))


def _check_flags(table: Table) -> None:
    kind, flag = table.schema[ENROLLED], pl.col(ENROLLED)
    missing, rows = table.collect(table.scan().select(flag.null_count(), pl.len())).row(0)
    if kind != pl.Boolean or missing:
        raise InputError(
            f"{table.name}: {ENROLLED!r} must be true or false in every row, not {kind} with "
            f"{missing} nulls."
        )
    if not table.collect(table.scan().select(flag.any())).item():
        raise InputError(
            f"{table.name}: no client of {rows} is enrolled: there is nobody to train and nothing "
            f"to weight. Check the {ENROLLED!r} column or the enrollment mechanism."
        )


def _check_base(table: Table, base: str, rows: pl.LazyFrame) -> None:
    """Raise unless every one of some rows has a base weight above 0."""
    if base in {ID, ENROLLED, FROM, UNTIL}:
        raise InputError(f"{table.name}: {base!r} holds no base weights.")
    if base not in table.schema:
        raise InputError(
            f"No base weight column {base!r} in {table.name}{near(base, table.schema.names())} It "
            f"has {some(nearest_first(base, table.schema.names()))}."
        )
    kind = table.schema[base]
    if not kind.is_numeric():
        odd = odd_number(table.collect(table.scan().select(base))[base])
        raise InputError(f"{table.name}: base weights: {odd}.")
    value = pl.col(base).cast(pl.Float64)
    bad = value.is_null() | ~value.is_finite() | (value <= 0.0)
    count, least, most = table.collect(
        rows.select(bad.sum(), value.min().alias("least"), value.max().alias("most"))
    ).row(0)
    if count:
        raise InputError(
            f"{table.name}: base weights in {base!r} must be finite and above 0 in every row; "
            f"{count} are not. Leave such rows out."
        )
    check_magnitude([least, most], repr(base), table.name)


def _sample_means(
    table: Table, design: Design, weights: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the means of design columns by a weighted sample, and their errors."""
    rows = design.rows(table.collect(table.scan().select(design.columns)), table.name)
    share = weights[rows.known] / weights[rows.known].sum()
    mean = rows.columns @ share
    se: FloatArray = np.sqrt((rows.columns - mean[:, None]) ** 2 @ share**2)
    return mean, se


def _design_means(table: Table, design: Design, base: str | None) -> FloatArray:
    """Return the means of design columns over a table, by base weights where it has some."""
    total, mass, done = np.zeros(len(design.terms)), 0.0, 0
    more = [] if base is None or base in design.columns else [base]
    for batch in table.batches([*design.columns, *more]):
        coded = design.rows(batch, f"{table.name} from row {done + 1}")
        if base is None:
            total, mass = total + coded.columns.sum(axis=1), mass + coded.columns.shape[1]
        else:
            weights = batch[base].cast(pl.Float64).to_numpy()[coded.known]
            total, mass = total + coded.columns @ weights, mass + float(weights.sum())
        done += batch.height
    return total / mass


@dataclass(frozen=True)
class Members:
    """Enrolled clients: ``unit_id``, covariates, and dates where enrollment changes.

    Examples
    --------
    >>> people = pl.DataFrame({"unit_id": ["a", "b"], "age": [30, 61], "enrolled_from": [None, 3]})
    >>> members = Members(people)
    >>> members.covariates, members.rows_of(pl.Series(["b", "a"]), "round 1").tolist()
    (('age',), [1, 0])
    >>> members.present(2).tolist(), members.present(3).tolist()
    ([True, False], [True, True])
    """

    frame: pl.DataFrame
    # (n,) who is enrolled no more, where that has changed between two starts of a server: rounds
    # that are closed then list whom they list
    former: BoolArray | None = field(default=None, compare=False)
    base: str | None = None  # column of base weights, which is no covariate

    def __post_init__(self) -> None:
        if ID not in self.frame.columns:
            raise InputError(
                f"The table of clients has no {ID!r} column; it has {some(self.frame.columns)}."
            )
        ids = self.frame[ID]
        if not len(ids):
            raise InputError("No client is enrolled: there is nobody to weigh.")
        if ids.null_count():
            raise InputError(f"{ids.null_count()} enrolled clients have no {ID}.")
        if ids.n_unique() != len(ids):
            twice = ids.filter(ids.is_duplicated()).unique(maintain_order=True)
            raise InputError(
                f"{ID} must be unique; {len(twice)} enrolled client(s) stand more than once: "
                f"{some(twice.to_list())}. Keep one row per client."
            )
        for name in (FROM, UNTIL):
            if name in self.frame.columns:
                _check_moment(self.frame[name])

    @property
    def size(self) -> int:
        """Number of clients that are enrolled at some time."""
        return self.frame.height

    @property
    def gone(self) -> BoolArray:
        """Who is enrolled no more, (n,), other than by dates."""
        return np.zeros(self.size, dtype=np.bool_) if self.former is None else self.former

    @property
    def listed(self) -> int:
        """Number of clients that the table of clients lists as enrolled."""
        return self.size - int(self.gone.sum())

    @property
    def covariates(self) -> tuple[str, ...]:
        """What is known of every client."""
        known = {ID, ENROLLED, FROM, UNTIL, self.base}
        return tuple(n for n in self.frame.columns if n not in known)

    @property
    def dated(self) -> bool:
        """Whether clients join or leave at rounds or moments that the table tells."""
        return FROM in self.frame.columns or UNTIL in self.frame.columns

    @property
    def changes(self) -> bool:
        """Whether clients join or leave."""
        return self.dated or self.former is not None

    @cached_property
    def _places(self) -> pl.DataFrame:
        return self.frame.select(ID).with_row_index("(place)")

    def rows_of(self, ids: pl.Series, where: str) -> IntArray:
        """Return the rows of clients by identifier, (m,); raise if one is not enrolled."""
        asked = pl.DataFrame({ID: self._like_ours(ids, where)})
        found = asked.join(self._places, on=ID, how="left", maintain_order="left")["(place)"]
        if found.null_count():
            strange = ids.filter(found.is_null())
            raise InputError(
                f"{where}: {len(strange)} client(s) are not enrolled according to the table of "
                f"clients: {some(strange.to_list())}. Correct {ENROLLED!r} there, or leave their "
                "rows out here."
            )
        return found.to_numpy().astype(np.int64)

    def _like_ours(self, ids: pl.Series, where: str) -> pl.Series:
        """Return identifiers in the type of the table: numbers and their text are the same."""
        ours, theirs = self.frame.schema[ID], ids.dtype
        if ours == theirs:
            return ids
        if ours.is_integer() and theirs.is_integer():
            return ids.cast(ours, strict=False)  # a number too large is nobody's
        if ours == pl.String and theirs.is_integer():
            return ids.cast(pl.String)
        if ours.is_integer() and theirs == pl.String:
            numbers = ids.cast(ours, strict=False)  # what is no number is nobody's, nor is 007
            return numbers.set(numbers.cast(pl.String) != ids, None)
        raise InputError(f"{where}: {ID} is {theirs}, in the table of clients it is {ours}.")

    def present(self, index: int, opened_at: date | datetime | None = None) -> BoolArray:
        """Return who is enrolled in a round, (n,)."""
        inside = ~self.gone
        for name in (FROM, UNTIL):
            if name not in self.frame.columns:
                continue
            moment: int | date | datetime = index
            if isinstance(self.frame.schema[name], pl.Date | pl.Datetime):
                if opened_at is None:
                    raise InputError(
                        f"{name!r} holds {self.frame.schema[name]}: round {index} of the ledger "
                        f"needs a column {OPENED_AT!r} to compare it with."
                    )
                moment = opened_at
            limit = pl.col(name)
            kept = limit <= moment if name == FROM else limit > moment
            try:
                inside &= self.frame.select(kept.fill_null(True)).to_series().to_numpy()
            except pl.exceptions.PolarsError as error:
                raise InputError(
                    f"{name!r} holds {self.frame.schema[name]}, which cannot be compared with "
                    f"{moment!r} of round {index}: give both the same kind and time zone."
                ) from error
        return inside


def _check_moment(column: pl.Series) -> None:
    kind = column.dtype
    if not (kind.is_integer() or kind in {pl.Date, pl.Null} or isinstance(kind, pl.Datetime)):
        raise InputError(
            f"{column.name!r} must hold round numbers or dates, not {kind}. Times in a CSV file "
            "are text: use Parquet."
        )


_BUCKET_ROWS = 24_000_000  # identifiers whose hashes are sorted at a time


def _require_unique_ids(table: Table) -> None:
    """Raise if ``unit_id`` is missing somewhere or stands twice.

    Hashes of identifiers are sorted, some of them at a time; what looks equal there is compared in
    full.
    """
    table.require([ID])
    ids = table.scan().select(ID)
    missing = table.collect(ids.select(pl.col(ID).null_count())).item()
    if missing:
        lost = table.collect(ids.with_row_index().filter(pl.col(ID).is_null()).head(1))
        first = lost["index"][0] + 1
        raise InputError(f"{table.name}: {missing} row(s) have no {ID}, the first is {first}.")
    buckets = max(1, -(-table.rows // _BUCKET_ROWS))
    hashed = ids.select(pl.col(ID).hash().alias("(hash)"))
    suspects = np.empty(0, dtype=np.uint64)
    for bucket in range(buckets):
        mine = hashed.filter((pl.col("(hash)") // 2**40) % buckets == bucket)
        found = np.sort(table.collect(mine if buckets > 1 else hashed)["(hash)"].to_numpy())
        suspects = np.append(suspects, np.unique(found[1:][found[1:] == found[:-1]]))
    if suspects.size:
        _compare(table, suspects)


def _compare(table: Table, suspects: Any) -> None:
    same = pl.Series("(hash)", suspects)
    query = (
        table.scan()
        .select(ID)
        .filter(pl.col(ID).hash().is_in(same.implode()))
        .group_by(ID)
        .len()
        .filter(pl.col("len") > 1)
        .sort(ID)
    )
    twice = table.collect(query)
    if twice.height:
        raise InputError(
            f"{table.name}: {ID} must be unique; {twice.height} value(s) stand more than once: "
            f"{some(twice[ID].to_list())}. Keep one row per client."
        )
