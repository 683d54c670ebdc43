"""Weights of enrolled clients by fedipw: ``python by_fedipw.py PEOPLE OUT``; prints JSON."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

from fedipw.selection.coded import table_model
from fedipw.tables import Table


def main(people: str, out: str) -> dict[str, Any]:
    model = table_model(Table(Path(people)))
    enrolled = pl.scan_parquet(people).filter("enrolled").collect()
    prob, _ = model.prob(enrolled)
    enrolled.select("unit_id", weight=pl.Series(1.0 / prob)).write_parquet(out)
    return {"version": version("fedipw")}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
