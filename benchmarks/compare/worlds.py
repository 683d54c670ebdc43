"""Worlds with two-stage selection, as files of the formats that the commands read.

Small ones for numbers: each has one thing the others have not. Large ones for speed. The same seed
makes the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

PEOPLE, ENROLLED, TARGETS, NOISY = "people.parquet", "enrolled.csv", "targets.csv", "noisy.csv"
ROUNDS, METRICS, OTHER = "rounds", "metrics.parquet", "other.parquet"
_SYSTEMS, _REGIONS = ("android", "ios", "web"), ("coast", "hills", "plain", "isle")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Sizes of a world, and what its tables tell."""

    clients: int
    rounds: int
    seed: int
    intercept: float = -0.2  # of the log odds of enrollment
    steps: bool = False  # whether the ledger tells available, invited and replied apart
    text_ids: bool = False
    changes: bool = False  # whether clients join and leave
    missing: float = 0.0  # share of values that are missing
    totals: bool = False  # enrolled clients and totals in place of the population table


SMALL: Mapping[str, World] = {
    "table": World(clients=1500, rounds=16, seed=1),
    "steps": World(clients=1500, rounds=16, seed=2, steps=True, text_ids=True),
    "totals": World(clients=1800, rounds=14, seed=3, totals=True, text_ids=True),
    "changes": World(clients=1500, rounds=14, seed=4, changes=True),
    "missing": World(clients=1500, rounds=14, seed=5, missing=0.06),
}


def _expit(x: np.ndarray) -> np.ndarray:
    value: np.ndarray = 1.0 / (1.0 + np.exp(-x))
    return value


def write_world(directory: Path, world: World) -> None:
    """Write the population, or enrolled clients and totals, the ledger and two metrics."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(world.seed)
    n = world.clients
    age, income = rng.normal(45.0, 15.0, n).clip(18.0, 90.0), rng.standard_normal(n)
    system = rng.choice(_SYSTEMS, n, p=(0.5, 0.3, 0.2))
    region = rng.choice(_REGIONS, n, p=(0.4, 0.3, 0.24, 0.06))
    odds = world.intercept - 0.03 * (age - 45.0) + 0.5 * income + 0.5 * (system == "ios")
    enrolled = rng.random(n) < _expit(odds - 0.3 * (region == "hills"))
    ids = np.array([f"c{i:06d}" for i in range(n)]) if world.text_ids else np.arange(n)
    people = pl.DataFrame(
        {"unit_id": ids, "enrolled": enrolled, "age": age, "income": income, "os": system}
        | {"region": region}
    )
    since, until = np.ones(n, dtype=np.int64), np.full(n, world.rounds + 1)
    if world.changes:
        since = np.where(rng.random(n) < 0.3, rng.choice([3, 6, 9], n), since)
        until = np.where(rng.random(n) < 0.2, rng.choice([10, 12], n), until)
        people = people.with_columns(
            pl.Series("enrolled_from", since).replace(1, None),
            pl.Series("enrolled_until", until).replace(world.rounds + 1, None),
        )
    if world.missing:
        people = people.with_columns(
            _with_holes(people[name], world.missing, rng) for name in ("age", "os")
        )
    if world.totals:
        people.filter("enrolled").drop("enrolled").write_csv(directory / ENROLLED)
        _write_targets(directory, people)
    else:
        people.write_parquet(directory / PEOPLE)
    inside = np.flatnonzero(enrolled)
    traits = np.stack([(age - 45.0) / 15.0, income])
    members = _Members(ids, inside, since, until, traits)
    _write_rounds(directory, world, members, rng)


@dataclass(frozen=True, slots=True)
class _Members:
    """Clients, of whom ``inside`` are enrolled from one round to before another."""

    ids: np.ndarray  # (N,)
    inside: np.ndarray  # (n,) places of the enrolled
    since: np.ndarray  # (N,)
    until: np.ndarray  # (N,)
    traits: np.ndarray  # (2, N)

    def at(self, index: int) -> np.ndarray:
        """Return the places of those enrolled in a round."""
        began, ended = self.since[self.inside] <= index, self.until[self.inside] <= index
        places: np.ndarray = self.inside[began & ~ended]
        return places


def _with_holes(column: pl.Series, share: float, rng: np.random.Generator) -> pl.Series:
    holes = pl.Series(rng.random(len(column)) < share)
    return pl.select(pl.when(holes).then(None).otherwise(column).alias(column.name)).to_series()


def _write_targets(directory: Path, people: pl.DataFrame) -> None:
    """Write population means, without and with standard errors."""
    values = {name: people[name].mean() for name in ("age", "income")}
    for column in ("os", "region"):
        for level in people[column].unique().sort()[1:]:
            values[f"{column}[{level}]"] = (people[column] == level).mean()
    targets = pl.DataFrame({"name": list(values), "value": list(values.values())}, strict=False)
    targets.write_csv(directory / TARGETS)
    errors = 0.02 * np.where(np.array(list(values)) == "age", 15.0, 0.5)
    targets.with_columns(pl.Series("se", errors)).write_csv(directory / NOISY)


def _write_rounds(
    directory: Path,
    world: World,
    members: _Members,
    rng: np.random.Generator,
) -> None:
    """Write a ledger, and what the replies report of two models."""
    (directory / ROUNDS).mkdir()
    reports, others, ids = [], [], members.ids
    for index in range(1, world.rounds + 1):
        now = members.at(index)
        z, m = members.traits[:, now], len(now)
        battery, network = rng.standard_normal(m), rng.choice(["cell", "wifi"], m)
        wave = 0.4 * np.sin(2.0 * np.pi * index / 24.0)
        available = rng.random(m) < _expit(0.4 + 0.5 * z[0] + wave)
        asked = np.where(z[1] > 0.0, 0.7, 0.5)
        invited = available & (rng.random(m) < asked)
        odds = 0.5 + 0.6 * battery + 0.3 * z[1] + 0.4 * (network == "wifi")
        replied = invited & (rng.random(m) < _expit(odds))
        table = pl.DataFrame(
            {"round": np.full(m, index), "unit_id": ids[now], "invited": invited}
            | {"replied": replied, "battery": battery, "network": network}
        )
        if world.steps:
            unseen = pl.Series(~available)
            table = table.with_columns(
                pl.Series("available", available),
                pl.Series("invite_prob", asked),
                pl.lit(datetime(2026, 1, 1) + timedelta(hours=index)).alias("opened_at"),
                *(pl.when(unseen).then(None).otherwise(pl.col(n)).alias(n) for n in
                  ("battery", "network")),
            )  # fmt: skip
        if world.missing:
            table = table.with_columns(_with_holes(table["battery"], world.missing, rng))
        table.write_parquet(directory / ROUNDS / f"round-{index:06d}.parquet")
        value = 0.5 + 0.1 * z[0, replied] + 0.05 * battery[replied]
        noise = 0.1 * rng.standard_normal((2, len(value)))
        who: dict[str, Any] = {"unit_id": ids[now[replied]], "round": np.full(len(value), index)}
        counts = rng.integers(5, 40, len(value))
        reports.append(pl.DataFrame(who | {"value": value + noise[0], "n": counts}))
        others.append(pl.DataFrame(who | {"value": value + 0.02 + noise[1], "n": counts}))
    pl.concat(reports).write_parquet(directory / METRICS)
    pl.concat(others).write_parquet(directory / OTHER)


def write_wide(directory: Path, clients: int, columns: int, seed: int = 6) -> None:
    """Write a population of many rows and columns, of whom few are enrolled, and two rounds."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    beta = 0.2 * rng.standard_normal(columns)
    z = rng.standard_normal((columns, clients))
    enrolled = rng.random(clients) < _expit(beta @ z - 4.0)
    people = {"unit_id": np.arange(clients), "enrolled": enrolled}
    names = {f"z{j + 1}": z[j] for j in range(columns)}
    pl.DataFrame(people | names).write_parquet(directory / PEOPLE)
    inside = np.flatnonzero(enrolled)
    (directory / ROUNDS).mkdir()
    for index in (1, 2):
        replied = rng.random(len(inside)) < _expit(z[0, inside])
        table = {"round": np.full(len(inside), index), "unit_id": inside}
        table |= {"invited": np.ones_like(replied), "replied": replied}
        pl.DataFrame(table).write_parquet(directory / ROUNDS / f"round-{index:06d}.parquet")


def write_units(directory: Path, rows: int, columns: int, seed: int = 7) -> None:
    """Write enrolled clients and means to calibrate them to."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((columns, rows))
    names = [f"z{j + 1}" for j in range(columns)]
    units = pl.DataFrame({"unit_id": np.arange(rows)} | dict(zip(names, z, strict=True)))
    units.write_parquet(directory / PEOPLE)
    values = 0.2 * rng.standard_normal(columns)
    pl.DataFrame({"name": names, "value": values}).write_csv(directory / TARGETS)


# Written in processes of their own, so that making them does not count as a command's memory.
LARGE: Mapping[str, Callable[[Path, float], None]] = {
    "ledger": lambda path, scale: write_world(
        path, World(clients=_scaled(45_000, scale), rounds=100, seed=8)
    ),
    "wide": lambda path, scale: write_wide(path, _scaled(2_000_000, scale), 20),
    "units": lambda path, scale: write_units(path, _scaled(200_000, scale), 10),
    "audit": lambda path, scale: write_world(
        path, World(clients=_scaled(200_000, scale), rounds=50, seed=9, intercept=-2.5, steps=True)
    ),
}


def _scaled(rows: int, scale: float) -> int:
    return max(2_000, int(rows * scale))
