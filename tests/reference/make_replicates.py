"""Write replicates.csv: replicate weights of a small world, with two metrics and a subgroup.

Run from the root of the repository: PYTHONPATH=src:tests python tests/reference/make_replicates.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import polars as pl

import fedipw
from worlds import World, drawn

WORLD = World(
    size=160, rounds=2, seed=9, covariates=("age", "rich"), metric=3.0 + pl.col("age"), noise=1.0
)  # fmt: skip


def main() -> None:
    tables = drawn(WORLD)
    with tempfile.TemporaryDirectory() as folder:
        tables.write(Path(folder))
        found = fedipw.evaluate(
            tables.metrics, tables.people, Path(folder) / "rounds", replicates=10, seed=1
        )
    assert found.replicates is not None
    own = tables.metrics.join(tables.people.select("unit_id", "rich"), on="unit_id")
    table = found.replicates.table.join(own, on=["unit_id", "round"], maintain_order="left")
    table.write_csv(Path(__file__).parent / "replicates.csv")


if __name__ == "__main__":
    main()
