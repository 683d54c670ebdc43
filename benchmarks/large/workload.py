"""A large population, its rounds and two metrics of the replies, written once for all sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from scipy.optimize import brentq
from scipy.special import expit

from fedipw.tables import Ledger

SYSTEMS, NETWORKS = ("android", "ios", "web"), ("cell", "wifi")
TRUTH = {"loss": 0.55, "accuracy": 0.5}  # expected values over the population


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many clients there are, how many of them enroll on average, and how many rounds."""

    clients: int = 20_000_000
    enrolled: int = 200_000
    rounds: int = 500

    @property
    def ledgers(self) -> tuple[int, ...]:
        """The rounds of three ledgers: a tenth, a half and all of them."""
        return tuple(sorted({max(1, self.rounds // 10), max(1, self.rounds // 2), self.rounds}))


@dataclass(frozen=True, slots=True)
class Log:
    """Files of a population and of a ledger with so many rounds."""

    folder: Path
    length: int

    @property
    def people(self) -> Path:
        return self.folder / "people.parquet"

    @property
    def rounds(self) -> Path:
        return self.folder / str(self.length) / "rounds"

    def metric(self, name: str) -> Path:
        return self.folder / str(self.length) / f"{name}.parquet"

    @property
    def rows(self) -> int:
        """Number of rows of the ledger."""
        counted = pl.scan_parquet(self.rounds / "round-*.parquet").select(pl.len()).collect()
        return int(counted.item())


def logs(folder: Path) -> list[Log]:
    """Return the ledgers that lie in a folder, the shortest first."""
    lengths = sorted(int(path.parent.name) for path in folder.glob("*/rounds"))
    return [Log(folder, length) for length in lengths]


def counts(folder: Path) -> dict[str, int]:
    """Return the number of clients of a population on disk, and of enrolled ones."""
    people = pl.scan_parquet(folder / "people.parquet")
    found = people.select(clients=pl.len(), enrolled=pl.col("enrolled").sum()).collect()
    return {name: int(found[name].item()) for name in found.columns}


def intercept(share: float) -> float:
    """Return the intercept with which this share of the population enrolls on average.

    >>> round(intercept(0.01), 3)
    -5.221
    """
    nodes, masses = np.polynomial.hermite_e.hermegauss(41)
    spread = np.hypot(0.8, 0.5)  # of the normal part of the log odds
    masses = masses / masses.sum()

    def excess(level: float) -> float:
        mean = [float(masses @ expit(level + spread * nodes + ios)) for ios in (0.0, 0.0, 0.5)]
        return float(np.mean(mean)) - share

    return float(brentq(excess, -40.0, 40.0, xtol=1e-12))


def write(folder: Path, size: Size, *, seed: int = 25) -> int:
    """Write population, ledgers and metrics; return the number of enrolled clients."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    log = Log(folder, size.rounds)
    ids, z = _people(log.people, size, rng)
    log.rounds.parent.mkdir()
    metrics = []
    with Ledger(log.rounds).writing() as ledger:
        for index, (table, values) in enumerate(_rounds(ids, z, size.rounds, rng), start=1):
            ledger.append(index, table)
            metrics.append(values.with_columns(round=pl.lit(index, dtype=pl.Int64)))
    known = pl.concat(metrics)
    for length in size.ledgers:
        part = Log(folder, length)
        if length != size.rounds:
            _link(log.rounds, part.rounds, length)
        for name in TRUTH:
            chosen = known.filter(pl.col("round") <= length)
            chosen.select("unit_id", "round", value=name).write_parquet(part.metric(name))
    return len(ids)


def _people(
    path: Path, size: Size, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Write the population; return identifiers (n,) and covariates (3, n) of the enrolled."""
    z = rng.standard_normal((3, size.clients))
    system = rng.integers(0, len(SYSTEMS), size.clients, dtype=np.uint8)
    odds = intercept(size.enrolled / size.clients) + 0.8 * z[0] - 0.5 * z[1] + 0.5 * (system == 1)
    enrolled = rng.random(size.clients) < expit(odds)
    people = {"unit_id": np.arange(size.clients), "enrolled": enrolled}
    people |= {"os": _words(system, SYSTEMS), **{f"z{j + 1}": z[j] for j in range(3)}}
    pl.DataFrame(people).write_parquet(path)
    ids = np.flatnonzero(enrolled)
    return ids, z[:, ids]


def _rounds(
    ids: np.ndarray, z: np.ndarray, rounds: int, rng: np.random.Generator
) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
    """Yield each round's rows, and the metrics of its replies."""
    n = len(ids)
    for index in range(1, rounds + 1):
        battery, wifi = rng.standard_normal(n), rng.random(n) < 0.5
        wave = 0.3 * np.sin(2 * np.pi * index / 24)
        odds = -3.4 + 0.6 * battery + 0.3 * z[1] + 0.4 * wifi + wave
        replied = rng.random(n) < expit(odds)
        rows = {"unit_id": ids, "invited": np.ones(n, dtype=np.bool_), "replied": replied}
        rows |= {"battery": battery, "network": _words(wifi, NETWORKS)}
        k = np.count_nonzero(replied)
        loss = 0.5 + 0.1 * z[0, replied] + 0.1 * rng.random(k)
        accuracy = (rng.random(k) < expit(z[1, replied])).astype(np.float64)
        values = {"unit_id": ids[replied], "loss": loss, "accuracy": accuracy}
        yield pl.DataFrame(rows), pl.DataFrame(values)


def _words(codes: np.ndarray, levels: tuple[str, ...]) -> pl.Series:
    """Return texts by their codes, (n,), without one Python object per row."""
    return pl.Series(levels).gather(pl.Series(codes.astype(np.uint32)))


def _link(source: Path, target: Path, rounds: int) -> None:
    """Make a ledger of the first rounds of another, of hard links to its files."""
    target.mkdir(parents=True)
    names = ["ledger.json", *(f"round-{index:06d}.parquet" for index in range(1, rounds + 1))]
    for name in names:
        os.link(source / name, target / name)
