"""A small population and ledger for ``fedipw weights``, with numbers as covariates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedipw.tables.ledger import Ledger

from .command import fedipw

ROUNDS = 6


def sigmoid(odds: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-odds)))


@dataclass(frozen=True)
class WeightsFiles:
    """A population table, a table of the enrolled, a reference sample and a ledger."""

    where: Path
    people: pl.DataFrame

    @classmethod
    def put(cls, where: Path, *, size: int = 900, seed: int = 5) -> WeightsFiles:
        rng = np.random.default_rng(seed)
        z = rng.normal(size=(size, 2))
        enrolled = rng.random(size) < sigmoid(0.8 * z[:, 0] - 0.5 * np.abs(z[:, 1]))
        people = pl.DataFrame(
            {"unit_id": np.arange(size), "enrolled": enrolled, "z1": z[:, 0], "z2": z[:, 1]}
        )
        people.write_parquet(where / "people.parquet")
        inside = people.filter("enrolled")
        inside.drop("enrolled").write_parquet(where / "enrolled.parquet")
        ledger = Ledger(where / "rounds")
        for index in range(1, ROUNDS + 1):
            x = rng.normal(size=inside.height)
            odds = -0.3 + 1.5 * (x > 0.3) + 0.4 * inside["z1"].to_numpy()
            ledger.append(
                index,
                inside.select("unit_id", invited=True).with_columns(
                    replied=pl.Series(rng.random(inside.height) < sigmoid(odds)), x=pl.Series(x)
                ),
            )
        return cls(where, people)

    def run(
        self, *options: object, out: str = "w.parquet", source: str = "population"
    ) -> tuple[int, str, str]:
        """Return exit code, output and errors."""
        who: tuple[object, ...] = ("--population", self.where / "people.parquet")
        if source == "reference":
            who = ("--enrolled", self.where / "enrolled.parquet", "--reference")
            who += (self.where / "sample.parquet", "--reference-weight", "design_weight")
        return fedipw(
            "weights", *who, "--rounds", self.where / "rounds", "--out", self.where / out, *options
        )

    def weighed(self, *options: object, **how: Any) -> tuple[pl.DataFrame, dict[str, Any]]:
        """Return the weights and the summary."""
        code, out, err = self.run(*options, "--json", **how)
        assert code == 0, err
        return pl.read_parquet(self.where / "w.parquet"), json.loads(out)
