"""Valid inputs of every command, small, and what may be done to them before a command runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.fuzz.values import LONG, NUMBERS, ORDINARY, TEXTS, Rng, one_of, series, text

BASES = 12


@dataclass
class Inputs:
    """Tables by name, options by name, and files changed after they are written."""

    tables: dict[str, pl.DataFrame]  # people, enrolled, sample, metrics
    rounds: list[pl.DataFrame]
    targets: pl.DataFrame
    options: dict[str, list[str]] = field(default_factory=dict)
    suffix: str = ".parquet"
    spoilt: list[Callable[[Path], None]] = field(default_factory=list)  # after writing
    changed: list[str] = field(default_factory=list)  # what was done, in words

    def copy(self) -> Inputs:
        return replace(
            self, tables=dict(self.tables), rounds=list(self.rounds), options=dict(self.options),
            spoilt=[], changed=[],
        )  # fmt: skip

    def write(self, where: Path) -> None:
        for name, frame in self.tables.items():
            _write(frame, where / f"{name}{self.suffix}")
        (where / "rounds").mkdir()
        for k, frame in enumerate(self.rounds, 1):
            _write(frame, where / "rounds" / f"round-{k:06d}.parquet")
        _write(self.targets, where / "targets.csv", where / "targets.parquet")
        for spoil in self.spoilt:
            spoil(where)


def _write(frame: pl.DataFrame, path: Path, other: Path | None = None) -> None:
    """Write a table; what a text file cannot hold goes to a Parquet file of the same name."""
    try:
        frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        path.unlink(missing_ok=True)
        frame.write_parquet(path.with_suffix(".parquet") if other is None else other)


@cache
def base(index: int) -> Inputs:
    """Return one of a few valid worlds: people, rounds, targets, a sample and metrics."""
    rng = np.random.default_rng([77, index])
    n, rounds = (120, 240, 60, 400)[index % 4], (4, 3, 6, 12)[index % 4]
    steps = index % 3 == 1
    people: dict[str, Any] = {
        "unit_id": np.arange(n) if index % 2 else [f"u{k}" for k in range(n)],
        "age": rng.normal(40.0, 10.0, n),
        "os": rng.choice(["android", "ios", "web"], n, p=[0.5, 0.3, 0.2]),
        "rooms": rng.integers(1, 6, n),
    }
    score = 0.06 * (people["age"] - 40.0) + 0.4 * (people["os"] == "ios")
    people["enrolled"] = rng.random(n) < 1.0 / (1.0 + np.exp(-score))
    frame = pl.DataFrame(people)
    inside = frame.filter("enrolled")
    m, log = inside.height, []
    for k in range(1, rounds + 1):
        battery, there = rng.random(m), np.ones(m, dtype=bool)
        columns: dict[str, Any] = {"round": np.full(m, k), "unit_id": inside["unit_id"]}
        if steps:
            there = columns["available"] = rng.random(m) < 0.8
            columns["invite_prob"] = np.where(there, 0.7, np.nan)
        invited = columns["invited"] = there & (rng.random(m) < 0.7)
        columns["replied"] = invited & (rng.random(m) < 0.2 + 0.6 * battery)
        columns["battery"] = battery
        made = pl.DataFrame(columns)
        log.append(made.with_columns(pl.col("invite_prob").fill_nan(None)) if steps else made)
    replies = pl.concat([t.filter("replied").select("unit_id", "round") for t in log])
    counts = pl.Series("n", rng.integers(1, 50, replies.height))
    value = pl.Series("value", rng.normal(1.0, 0.5, replies.height))
    sample = frame.sample(n // 3, seed=index).with_columns(pl.lit(3.0).alias("design_weight"))
    targets = pl.DataFrame({
        "name": ["age", "os[ios]"],
        "value": [_mean(frame["age"]), _mean(frame["os"] == "ios")],
    })  # fmt: skip
    return Inputs(
        tables={
            "people": frame, "enrolled": inside.drop("enrolled"), "sample": sample.drop("enrolled"),
            "metrics": replies.with_columns(value, counts),
        },
        rounds=log, targets=targets,
    )  # fmt: skip


def mutated(inputs: Inputs, rng: Rng, used: tuple[str, ...]) -> None:
    """Change one thing of the inputs that a command uses."""
    what = one_of(rng, used)
    if what == "options":
        return
    if what == "files":
        _spoil_file(inputs, rng)
        return
    if what == "rounds":
        _change_ledger(inputs, rng)
        return
    frame = inputs.targets if what == "targets" else inputs.tables[what]
    made, done = changed_frame(frame, rng)
    inputs.changed.append(f"{what}: {done}")
    if what == "targets":
        inputs.targets = made
    else:
        inputs.tables[what] = made


def changed_frame(frame: pl.DataFrame, rng: Rng) -> tuple[pl.DataFrame, str]:
    """Return a table with one change, and the change in words."""
    name = one_of(rng, frame.columns) if frame.width else ""
    kind = int(rng.integers(19))
    n = frame.height
    if not frame.width or not n:
        return frame, "nothing"
    if kind in {0, 1, 2}:  # one odd number, in one row, some or all
        value, rows = one_of(rng, NUMBERS if rng.random() < 0.5 else ORDINARY), _rows(rng, n)
        if not frame.schema[name].is_numeric():
            value_text = text(rng)
            made = pl.Series(name, [value_text if r else str(v) for r, v in zip(rows, frame[name])])
            return frame.with_columns(made), f"{name} = {value_text[:20]!r} in {rows.sum()} rows"
        values = np.where(rows, value, frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy())
        return frame.with_columns(pl.Series(name, values)), f"{name} = {value!r} in {rows.sum()}"
    if kind == 3:
        return frame.with_columns(series(rng, name, n)), f"{name} of another type"
    if kind == 4:
        return frame.with_columns(series(rng, text(rng), n)), "one more column"
    if kind == 5:
        factor = one_of(rng, (1e-310, 1e-200, 1e-99, 1e-30, 1e12, 1e99, 1e101, 1e200, 1e305))
        numbers = [c for c, t in frame.schema.items() if t.is_float()]
        return frame.with_columns(pl.col(numbers) * factor), f"floats times {factor:g}"
    if kind == 6:
        numbers = [c for c, t in frame.schema.items() if t.is_float()]
        shift = one_of(rng, (1e6, 1e12, 1e15, 1e18))
        return frame.with_columns(pl.col(numbers) + shift), f"floats plus {shift:g}"
    if kind == 7:
        rows = _rows(rng, n)
        lost = pl.when(pl.Series(rows)).then(None).otherwise(pl.col(name)).alias(name)
        return frame.with_columns(lost), f"{name} missing in {rows.sum()} rows"
    if kind == 8:
        return frame.drop(name), f"no {name}"
    if kind == 9:
        return frame.head(int(one_of(rng, (0, 1, 2, 3)))), "few rows"
    if kind == 10:
        return pl.concat([frame, frame.head(1)]), "a row twice"
    if kind == 11:
        return frame.sample(n, shuffle=True, seed=int(rng.integers(2**31))), "rows in another order"
    if kind == 12:
        new = text(rng)
        if new in frame.columns:
            return frame, "nothing"
        return frame.rename({name: new}), f"{name} is {new[:20]!r}"
    if kind == 13:
        if "enrolled" in frame.columns:
            flags = one_of(rng, ([True] * n, [False] * n, [True] + [False] * (n - 1)))
            return frame.with_columns(pl.Series("enrolled", flags)), "enrolled all, none or one"
        return frame.with_columns(frame[name].alias(f"{name} again")), f"{name} twice"
    if kind == 14:
        more = int(one_of(rng, (30, 30, 150, 300)))
        wide = {f"w{k}": rng.normal(size=n) for k in range(more)}
        return frame.with_columns(**wide), f"{more} more columns"
    if kind == 15:
        floats = [c for c, t in frame.schema.items() if t.is_numeric() and c != "unit_id"]
        if len(floats) < 2 or "enrolled" not in frame.columns:
            return frame.with_columns(pl.lit(1.0).alias("flat")), "a constant column"
        told = frame["enrolled"].to_list()  # of any type: it may have been changed before
        same = pl.Series([float(value == told[0]) for value in told], dtype=pl.Float64)
        apart = same + 1e-9 * frame[floats[0]].cast(pl.Float64)
        return frame.with_columns(apart.alias("apart")), "a column that separates"
    if kind == 16:
        levels = pl.Series("many", [f"{k % max(1, n // 2)}" for k in range(n)])
        return frame.with_columns(levels), "a category of many levels"
    if kind == 17:
        long = pl.Series("long", [LONG] + ["a"] * (n - 1))
        return frame.with_columns(long), "a text of 1 MB"
    words = [str(one_of(rng, TEXTS)) for _ in range(n)]
    return frame.with_columns(pl.Series("words", words)), "a column of odd words"


def _mean(column: pl.Series) -> float:
    known = column.drop_nulls().cast(pl.Float64).to_numpy()
    return float(known.mean()) if len(known) else 0.0


def _rows(rng: Rng, n: int) -> np.ndarray:
    rows = np.zeros(n, dtype=bool)
    rows[rng.integers(n)] = True
    return one_of(rng, (rows, rng.random(n) < 0.5, np.ones(n, dtype=bool)))


def _change_ledger(inputs: Inputs, rng: Rng) -> None:
    kind, rounds = int(rng.integers(6)), inputs.rounds
    if kind < 3 and rounds:
        at = int(rng.integers(len(rounds)))
        rounds[at], done = changed_frame(rounds[at], rng)
        inputs.changed.append(f"round {at + 1}: {done}")
    elif kind == 3:  # the same change in every round
        seed = int(rng.integers(2**31))
        found = [changed_frame(t, np.random.default_rng(seed)) for t in rounds]
        inputs.rounds = [made for made, _ in found]
        inputs.changed.append(f"every round: {found[0][1] if found else ''}")
    elif kind == 4:
        inputs.rounds = rounds[: int(one_of(rng, (0, 1, 2)))]
        inputs.changed.append("few rounds")
    else:
        name = one_of(rng, (
            "round-999999999999.parquet", "round-000002.parquet", "round-0000000.parquet", ".lock",
            "ledger.json", "round-٠٠٠٠٠١.parquet", "notes.txt", "round-000099.parquet", "snapshot",
        ))  # fmt: skip

        def stray(where: Path) -> None:
            path = where / "rounds" / name
            if rng_flag and path.exists():
                path.unlink()
            elif not path.exists():
                path.mkdir() if name == "snapshot" else path.write_bytes(b"")

        rng_flag = bool(rng.random() < 0.5)
        inputs.spoilt.append(stray)
        inputs.changed.append(f"stray or missing {name}")


def _spoil_file(inputs: Inputs, rng: Rng) -> None:
    """Damage one file: flipped bits, a part cut off, nothing left, a directory or link instead."""
    seed = int(rng.integers(2**31))
    inputs.changed.append("a damaged file")

    def spoil(where: Path) -> None:
        chance = np.random.default_rng(seed)
        files = sorted(p for p in where.rglob("*") if p.is_file())
        damage(files[int(chance.integers(len(files)))], chance)

    inputs.spoilt.append(spoil)


def damage(path: Path, rng: Rng) -> None:
    """Damage a file in one of several ways."""
    data, kind = bytearray(path.read_bytes()), int(rng.integers(7))
    if kind < 3 and data:
        for _ in range(int(one_of(rng, (1, 1, 2, 8)))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(data))
    elif kind == 3:
        path.write_bytes(bytes(data[: int(rng.integers(len(data) + 1))]))
    elif kind == 4:
        path.write_bytes(bytes(data) + rng.bytes(int(rng.integers(1, 50))))
    elif kind == 5:
        path.unlink()
        path.symlink_to(path.name) if rng.random() < 0.5 else path.mkdir()
    else:
        path.write_bytes(one_of(rng, (b"", b"\x00" * 100, b"PAR1", rng.bytes(200))))


def changed_json(value: Any, rng: Rng) -> Any:
    """Return JSON values with one of them replaced."""
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            for key, inner in part.items():
                places.append((part, key))
                walk(inner)
        elif isinstance(part, list):
            for k, inner in enumerate(part):
                places.append((part, k))
                walk(inner)

    whole = json.loads(json.dumps(value))
    walk(whole)
    if not places or rng.random() < 0.05:
        return one_of(rng, ([1], {}, None, 3, "x", [], [[[]]], True))
    holder, key = places[int(rng.integers(len(places)))]
    kind = int(rng.integers(4))
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = one_of(rng, (None, [], {}, "x", True, [1], {"a": 1}, -1, 10**30, 1e308))
    elif kind == 2:
        holder[key] = one_of(rng, NUMBERS)
    else:
        holder[key] = text(rng)
    return whole
