"""Files for ``fedipw evaluate``: a population, a ledger and metrics, to be spoilt and run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedipw.numerics import BoolArray, FloatArray

from .command import fedipw


@dataclass
class Files:
    """A population of 240 clients, a ledger of four rounds and a metric of every reply."""

    where: Path
    people: pl.DataFrame
    rounds: list[pl.DataFrame]
    metrics: pl.DataFrame

    @property
    def inside(self) -> pl.DataFrame:
        return self.people.filter("enrolled")

    def put(self) -> None:
        self.people.write_parquet(self.where / "people.parquet")
        self.inside.write_parquet(self.where / "enrolled.parquet")
        self.metrics.write_parquet(self.where / "loss.parquet")
        (self.where / "rounds").mkdir(exist_ok=True)
        for k, table in enumerate(self.rounds, 1):
            table.write_parquet(self.where / "rounds" / f"round-{k:06d}.parquet")

    def targets(self, *lines: str, head: str = "name,value") -> None:
        (self.where / "targets.csv").write_text("\n".join([head, *lines, ""]))

    def run(
        self, *options: object, source: str = "population", metrics: str = "loss.parquet"
    ) -> tuple[int, str, str]:
        """Return exit code, output and errors of the command on what lies in the directory."""
        given: tuple[object, ...] = ("--population", self.where / "people.parquet")
        if source == "targets":
            given = ("--enrolled", self.where / "enrolled.parquet")
            given += ("--targets", self.where / "targets.csv")
        return fedipw(
            "evaluate", *given, "--rounds", self.where / "rounds",
            "--metrics", self.where / metrics, *options,
        )  # fmt: skip

    def found(self, *options: object, **how: Any) -> dict[str, Any]:
        """Return the JSON of a run; numbers that JSON does not have are refused."""

        def never(name: str) -> None:
            raise AssertionError(name)

        code, out, err = self.run(*options, "--json", **how)
        assert code == 0, err
        made: dict[str, Any] = json.loads(out, parse_constant=never)
        return made

    def listing(self) -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in sorted(self.where.rglob("*")) if p.is_file()}


def drawn_files(where: Path) -> Files:
    rng, size = np.random.default_rng(5), 240

    def drawn(odds: FloatArray) -> BoolArray:
        return np.asarray(rng.random(len(odds)) < 1 / (1 + np.exp(-odds)))

    age, rich = rng.normal(size=size), rng.choice(["no", "yes"], size)
    people = pl.DataFrame(
        {"unit_id": np.arange(100, 100 + size), "enrolled": drawn(0.5 * age), "age": age}
    ).with_columns(rich=pl.Series(rich))
    inside, rounds, told = people.filter("enrolled"), [], []
    ids, own = inside["unit_id"], inside["age"].to_numpy()
    for k in range(1, 5):
        x = rng.normal(size=len(ids))
        replied = drawn(0.4 * x + 0.3 * own)
        table = pl.DataFrame({"round": np.full(len(ids), k), "unit_id": ids, "x": x})
        rounds.append(table.with_columns(invited=pl.lit(value=True), replied=pl.Series(replied)))
        value, n = rng.normal(1.0 + own + 0.5 * x), rng.integers(1, 50, len(ids))
        made = table.select("unit_id", "round").with_columns(value=pl.Series(value), n=pl.Series(n))
        told.append(made.filter(replied))
    return Files(where, people, rounds, pl.concat(told))
