"""Small synthetic worlds: a population that enrolls by choice, and rounds in which some reply.

A ``World`` says what to draw. ``drawn`` gives its ``Tables``: the population, one table for each
closed round, and the metrics of the replies; a test may change them before it writes them with
``Tables.write``. ``arrays`` gives the rounds as a ``Log`` of arrays instead.

Covariates are standard normal, but for those of ``DRAWS``. Log odds and means are expressions of
a row's columns: those of the client, and in rounds also ``round`` and the round's covariates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import polars as pl
from scipy.special import expit

from fedipw.numerics import BoolArray, FloatArray
from fedipw.tables.ledger import Round
from fedipw.tables.population import Members

STEPS = ("available", "invite_prob")
OPENED = datetime(2026, 3, 1)
EVERYONE = pl.lit(np.inf)  # log odds of a stage that all pass


def _one_of(*levels: object, p: tuple[float, ...] | None = None) -> Callable[..., Any]:
    return lambda rng, n: rng.choice(levels, n, p=p)


DRAWS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "os": _one_of("android", "ios", "web", p=(0.5, 0.3, 0.2)),
    "rich": _one_of("no", "yes"),
    "region": _one_of("north", "south", "coast", "islands"),
    "net": _one_of("wifi", "cell"),
    "network": _one_of("3g", "4g", "wifi"),
    "memory_gb": _one_of(2.0, 4.0, 8.0, 16.0),
    "rooms": lambda rng, n: rng.integers(1, 5, n),
    "flat": lambda _, n: np.ones(n),
    "battery": lambda rng, n: rng.random(n),
}


@dataclass(frozen=True, kw_only=True)
class World:
    """What to draw; by default the first covariates, which are numbers then, drive both stages."""

    size: int = 400
    rounds: int = 12
    seed: int = 0
    ids: int | str = 0  # the first of the numbers, or a pattern such as "u{}"
    covariates: tuple[str, ...] = ("age",)  # of clients
    changing: tuple[str, ...] = ("x",)  # covariates of rounds
    steps: tuple[str, ...] = ()  # of STEPS; those who are not available report nothing
    hours: int = 0  # between rounds; 0 leaves no clock in the ledger
    enrollment: pl.Expr | None = None  # log odds
    reply: pl.Expr | None = None  # log odds
    metric: pl.Expr | None = None  # mean of the metric; None leaves no metrics
    noise: float = 1.0  # standard deviation of the metric around its mean

    @property
    def client_effect(self) -> pl.Expr:
        return pl.col(self.covariates[0]) if self.covariates else pl.lit(0.0)

    @property
    def round_effect(self) -> pl.Expr:
        return pl.col(self.changing[0]) if self.changing else pl.lit(0.0)


# A metric of the replies, for evaluations; and selection that no logistic regression fits.
MEASURED = World(
    size=240, rounds=4, seed=5, ids=100, covariates=("age", "rich"),
    metric=1.0 + pl.col("age") + 0.5 * pl.col("x"),
)  # fmt: skip
NONLINEAR = World(
    size=900, rounds=6, seed=5, covariates=("z1", "z2"),
    enrollment=0.8 * pl.col("z1") - 0.5 * pl.col("z2").abs(),
    reply=-0.3 + 1.5 * (pl.col("x") > 0.3) + 0.4 * pl.col("z1"),
)  # fmt: skip


def enrollment_prob(world: World, people: pl.DataFrame) -> FloatArray:
    """Return the true enrollment probabilities of clients."""
    odds = 0.8 * world.client_effect if world.enrollment is None else world.enrollment
    return _prob(people, odds)


def reply_prob(world: World, rows: pl.DataFrame) -> FloatArray:
    """Return the true probabilities with which rows of the log reply, once they are invited."""
    odds = -0.3 + 0.8 * world.round_effect + 0.4 * world.client_effect
    return _prob(rows, odds if world.reply is None else world.reply)


def population_table(world: World) -> pl.DataFrame:
    """Return the population table."""
    rng, n = np.random.default_rng([world.seed, 1]), world.size
    own: dict[str, Any] = {"unit_id": [_unit(world.ids, k) for k in range(n)]}
    people = pl.DataFrame(own | {name: _drawn(name, rng, n) for name in world.covariates})
    enrolled = rng.random(n) < enrollment_prob(world, people)
    return people.insert_column(1, pl.Series("enrolled", enrolled))


def ledger_rounds(world: World, people: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the tables of the closed rounds, a row for each enrolled client."""
    rng, inside = np.random.default_rng([world.seed, 2]), people.filter("enrolled")
    own, n, tables = inside.drop("unit_id", "enrolled"), inside.height, []
    for k in range(1, world.rounds + 1):
        now = pl.DataFrame({name: _drawn(name, rng, n) for name in world.changing})
        rows = pl.concat([own, now], how="horizontal").with_columns(round=pl.lit(k))
        passed, flags = np.ones(n, dtype=bool), {}
        if "available" in world.steps:
            passed = flags["available"] = rng.random(n) < _prob(rows, 1 + 0.5 * world.client_effect)
        seen, prob = pl.lit(pl.Series(passed)), rng.uniform(0.5, 1.0, n)
        now = now.select(pl.when(seen).then(pl.all()))
        if "invite_prob" in world.steps:
            now = now.with_columns(invite_prob=pl.when(seen).then(pl.lit(pl.Series(prob))))
            passed = passed & (rng.random(n) < prob)
        flags |= {"invited": passed, "replied": passed & (rng.random(n) < reply_prob(world, rows))}
        table = pl.DataFrame({"round": np.full(n, k), "unit_id": inside["unit_id"], **flags})
        if world.hours:
            table = table.with_columns(opened_at=OPENED + timedelta(hours=world.hours * k))
        tables.append(pl.concat([table, now], how="horizontal"))
    return tables


def reply_metrics(world: World, log: pl.DataFrame) -> pl.DataFrame:
    """Return a value and a sample count of every reply."""
    if world.metric is None:
        return pl.DataFrame()
    rng, rows = np.random.default_rng([world.seed, 3]), log.filter("replied")
    noise, count = world.noise * rng.normal(size=rows.height), rng.integers(1, 50, rows.height)
    value = world.metric + pl.Series(noise)
    return rows.select("unit_id", "round", value=value, n=pl.Series(count))


def drawn(world: World) -> Tables:
    """Return all tables of a world."""
    people = population_table(world)
    tables = Tables(people, ledger_rounds(world, people))
    return replace(tables, metrics=reply_metrics(world, tables.log))


@dataclass
class Tables:
    """The tables of a world, to be changed and written."""

    people: pl.DataFrame
    rounds: list[pl.DataFrame] = field(default_factory=list)
    metrics: pl.DataFrame = field(default_factory=pl.DataFrame)

    @property
    def inside(self) -> pl.DataFrame:
        """The enrolled clients."""
        return self.people.filter("enrolled")

    @property
    def log(self) -> pl.DataFrame:
        """All rows of the rounds with what is known of their clients."""
        known = self.people.drop("enrolled")
        return pl.concat(self.rounds or [known.clear()]).join(
            known, on="unit_id", maintain_order="left"
        )

    @property
    def replies(self) -> pl.DataFrame:
        """All replies, by round and in the order of the rows."""
        return pl.concat(self.rounds).filter("replied").select("unit_id", "round")

    def means(self, *names: str) -> dict[str, float]:
        """Return population means of numbers, and of levels such as ``os[ios]``."""
        found = {}
        for name in names:
            column, _, level = name.removesuffix("]").partition("[")
            values = self.people[column]
            found[name] = float(np.mean((values == level if level else values).to_numpy()))
        return found

    def changed(self, index: int, **columns: pl.Expr | pl.Series) -> Self:
        """Return the tables with other columns in one round, counted from 1."""
        rounds = list(self.rounds)
        rounds[index - 1] = rounds[index - 1].with_columns(**columns)
        return replace(self, rounds=rounds)

    def kept(self, where: pl.Expr) -> Self:
        """Return the tables in which, of the enrolled, only clients of a part are enrolled."""
        people = self.people.with_columns(enrolled=pl.col("enrolled") & where)
        own = pl.col("unit_id").is_in(people.filter("enrolled")["unit_id"].implode())
        metrics = self.metrics.filter(own) if self.metrics.width else self.metrics
        rounds = [table.filter(own) for table in self.rounds]
        return replace(self, people=people, rounds=rounds, metrics=metrics)

    def write(
        self, where: Path, kind: str = "parquet", targets: Mapping[str, float] | None = None
    ) -> None:
        """Write what there is: people, enrolled, rounds, loss and targets."""
        where.mkdir(exist_ok=True)
        for name, frame in (("people", self.people), ("enrolled", self.inside.drop("enrolled"))):
            path = where / f"{name}.{kind}"
            frame.write_parquet(path) if kind == "parquet" else frame.write_csv(path)
        for k, table in enumerate(self.rounds, 1):
            (where / "rounds").mkdir(exist_ok=True)
            table.write_parquet(where / "rounds" / f"round-{k:06d}.parquet")
        if self.metrics.width:
            self.metrics.write_parquet(where / "loss.parquet")
        if targets is not None:
            lines = [f"{name},{value!r}" for name, value in targets.items()]
            (where / "targets.csv").write_text("\n".join(["name,value", *lines, ""]))


class Log(NamedTuple):
    """Constant covariates (n, q_z), covariates (R, n, q_x) and replies (R, n) of the enrolled."""

    static: FloatArray
    covariates: FloatArray
    replied: BoolArray

    def members(self) -> Members:
        """Return the clients, whose columns are z1, z2 and so on."""
        columns = {f"z{j + 1}": z for j, z in enumerate(self.static.T)}
        return Members(pl.DataFrame({"unit_id": range(len(self.static)), **columns}))

    def round(self, r: int) -> Round:
        """Return a round, counted from 0, whose columns are x1, x2 and so on."""
        columns = {f"x{j + 1}": x for j, x in enumerate(self.covariates[r].T)}
        return Round(index=r + 1, rows=np.arange(len(self.static)), table=pl.DataFrame(columns))

    def stacked(self, rounds: slice) -> tuple[FloatArray, BoolArray]:
        """Return rows (z, x) and replies of some rounds."""
        x = self.covariates[rounds]
        X = np.column_stack([np.tile(self.static, (len(x), 1)), x.reshape(-1, x.shape[2])])
        return X, self.replied[rounds].ravel()


def arrays(world: World) -> Log:
    """Return the rounds of a world as arrays; its covariates must be numbers."""
    tables = drawn(world)
    return Log(
        static=tables.inside.select(world.covariates).to_numpy(),
        covariates=np.stack([t.select(world.changing).to_numpy() for t in tables.rounds]),
        replied=np.stack([t["replied"].to_numpy() for t in tables.rounds]),
    )


def _unit(ids: int | str, k: int) -> int | str:
    return ids.format(k) if isinstance(ids, str) else ids + k


def _drawn(name: str, rng: np.random.Generator, n: int) -> Any:
    return DRAWS[name](rng, n) if name in DRAWS else rng.normal(size=n)


def _prob(rows: pl.DataFrame, log_odds: pl.Expr) -> FloatArray:
    odds = rows.with_columns(log_odds.cast(pl.Float64).alias("log odds"))["log odds"]
    return np.asarray(expit(odds.to_numpy()))
