"""What must hold of a command that ended: its exit code, its files, its numbers.

Numbers are checked against plain computations, so that a wrong answer is found too, not only a
traceback.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

CODES = {0, 2, 3, 4}
_CLOSE = 1e-8


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of every file below a directory."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "directory"
    return found


def ending(code: int, err: str) -> Iterator[str]:
    """Yield what is wrong with how a command ended."""
    if code not in CODES:
        yield f"exit code {code}: {err[-400:]}"
    if "Traceback" in err or "that are not finite" in err:
        yield f"message: {err[-400:]}"
    if code and not err.strip():
        yield f"exit code {code} without a message"
    if len(err) > 20_000:
        yield f"a message of {len(err)} characters"


def files(
    before: dict[str, str], after: dict[str, str], outputs: set[str], code: int
) -> Iterator[str]:
    """Yield inputs that changed, and files that should not be there."""
    for name, digest in before.items():
        if name not in outputs and after.get(name) != digest:
            yield f"{name} was changed"
    allowed = outputs if code == 0 else set()
    for name in after.keys() - before.keys():
        if not any(name == out or name.startswith(f"{out}/") for out in allowed):
            yield f"{name} was left behind"


def strict_json(text: str) -> Any:
    """Return JSON, or raise if it has numbers that JSON does not have."""

    def never(name: str) -> None:
        raise ValueError(f"{name} in JSON")

    return json.loads(text, parse_constant=never)


def not_finite(frame: pl.DataFrame) -> list[str]:
    """Return the columns of a table with a number that is not finite."""
    floats = [n for n, kind in frame.schema.items() if kind.is_float()]
    return [n for n in floats if not bool(frame[n].drop_nulls().is_finite().all())]


def weights(table: pl.DataFrame, where: Path, scheme: str, size: int | None) -> Iterator[str]:
    """Yield what is wrong with a table of weights; ``size`` is N where everybody counts."""
    for name in not_finite(table):
        yield f"{name} is not finite"
    probs = ["enrollment_prob", "participation_prob", "inclusion_prob"]
    table = table.with_columns(pl.col(probs).cast(pl.Float64))  # a CSV column of nulls is text
    known = table.drop_nulls(["enrollment_prob"])
    product = known["enrollment_prob"] * known["participation_prob"]
    if not np.allclose(product, known["inclusion_prob"], rtol=_CLOSE, atol=0.0):
        yield "inclusion_prob is not the product of the stages"
    prob = table["participation_prob"].to_numpy()
    if not ((prob > 0.0) & (prob <= 1.0)).all():
        yield "a participation probability outside (0, 1]"
    for part in table.partition_by("round"):
        index, weight = int(part["round"][0]), part["weight"].to_numpy()
        path = where / "rounds" / f"round-{index:06d}.parquet"
        replied = pl.read_parquet(path).filter("replied")["unit_id"].cast(pl.String)
        if not set(part["unit_id"].cast(pl.String)) <= set(replied):
            yield f"round {index} weighs clients that did not reply"
        if part["unit_id"].n_unique() != part.height:
            yield f"round {index} weighs a client twice"
        if scheme.endswith("hajek") and not math.isclose(weight.sum(), 1.0, rel_tol=_CLOSE):
            yield f"{scheme}: weights of round {index} sum to {weight.sum()!r}"
        inverse = 1.0 / part["inclusion_prob"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        expected = None
        if scheme == "fedipw" and size is not None:
            expected = inverse / size
        elif scheme == "fedipw-hajek":
            expected = inverse / inverse.sum()
        elif scheme == "fedavg":
            expected = np.full(part.height, 1.0 / part.height)
        if expected is not None and not np.allclose(weight, expected, rtol=_CLOSE, atol=0.0):
            yield f"{scheme}: weights of round {index} are not those of the probabilities"


def calibration(
    table: pl.DataFrame, units: pl.DataFrame, targets: pl.DataFrame, *, negative: bool
) -> Iterator[str]:
    """Yield what is wrong with calibrated weights, by plain weighted means."""
    for name in not_finite(table):
        yield f"{name} is not finite"
    weight = table["weight"].to_numpy()
    if not math.isclose(weight.sum(), 1.0, rel_tol=1e-9):
        yield f"weights sum to {weight.sum()!r}"
    if not negative and (weight < -1e-15).any():
        yield "a weight is negative"
    inside = units.filter("enrolled") if "enrolled" in units.columns else units
    if table.height != inside.height:
        yield f"{table.height} weights for {inside.height} clients"
        return
    for name, value in targets.select("name", "value").iter_rows():
        column, _, level = name.partition("[")
        if column not in inside.columns:
            continue
        if level:
            x = (inside[column].cast(pl.String) == level.removesuffix("]")).to_numpy()
        elif inside.schema[column].is_numeric():
            x = inside[column].cast(pl.Float64).to_numpy()
        else:
            continue
        spread = float(np.ptp(x.astype(np.float64)))
        miss = abs(float(weight @ x) - float(value))
        if miss > 1e-6 * spread + 1e-9 * float(np.abs(x).max()):
            yield f"the mean of {name} is off by {miss:g}, its values span {spread:g}"


def means(
    estimates: list[dict[str, Any]], pooled: pl.DataFrame, metrics: pl.DataFrame, size: int
) -> Iterator[str]:
    """Yield where HT and Hájek means differ from plain sums over the replies' probabilities."""
    keys = [pl.col("unit_id").cast(pl.String), pl.col("round").cast(pl.Int64)]
    both = metrics.with_columns(keys).join(
        pooled.with_columns(keys).select("unit_id", "round", "inclusion_prob"),
        on=["unit_id", "round"],
    )
    if both.height != metrics.height:
        return
    inverse, y = 1.0 / both["inclusion_prob"].to_numpy(), both["value"].cast(pl.Float64).to_numpy()
    expected = {
        "horvitz-thompson": float(inverse @ y) / (size * both["round"].n_unique()),
        "hajek": float(inverse @ y) / float(inverse.sum()),
    }
    scale = float(np.abs(y).max())
    for line in estimates:
        want = expected.get(line["estimator"])
        if line["group"] != "everyone" or want is None or line["estimate"] is None:
            continue
        if abs(line["estimate"] - want) > 1e-6 * max(abs(want), scale):
            yield f"{line['estimator']} is {line['estimate']!r}, by a plain sum {want!r}"


def page(text: str) -> Iterator[str]:
    """Yield what is wrong with a page: cut off, or with characters that are not seen."""
    if not text.rstrip().endswith("</html>"):
        yield "the page is cut off"
    hidden = {
        c
        for c in text
        if c not in "\n\t" and (ord(c) < 32 or c in "\u202e\u2066\u2069\u200b\ufeff")
    }
    if hidden:
        yield f"the page holds hidden characters: {hidden!r}"
