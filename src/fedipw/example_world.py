"""A small world to try everything with: tables, rounds and metrics whose truth is known.

5,000 phones have a keyboard app. Younger people, iOS and some regions enroll more often; phones
that are charged and on wifi reply more often. Two metrics of the model differ between the same
groups, so that the plain mean of the replies is wrong; here the truth is known.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics import FloatArray, IntArray
from fedipw.storage.atomic import scratch_directory, unwritable, write_text
from fedipw.tables.columns import ENROLLED, ID, INVITED, REPLIED, ROUND
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.tables.table import paragraphs, write_table

SEED: Final = 2026
DEVICES: Final = 5_000
ROUNDS: Final = 30
KINDS: Final = ("table", "totals")
_REGIONS: Final = ("Île-de-France", "北海道", "Αττική", "القاهرة", "Київ", "São Paulo")
_SHARES: Final = (0.24, 0.14, 0.10, 0.20, 0.12, 0.20)
_ENROLLS: Final = (0.5, 0.7, 0.0, -0.9, -0.3, -0.2)  # log odds by region
_MISTAKES: Final = (-0.15, 0.1, 0.0, 0.35, 0.2, 0.05)  # log of the error rate by region
_RATE: Final = 0.3  # of enrollment
_LOW_INCOME, _GAPS = 24_000.0, 0.09
EVERYONE: Final = "everyone"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Example:
    """Phones, rounds and metrics; what nobody sees in practice is the truth.

    Examples
    --------
    >>> import fedipw
    >>> world = fedipw.example()
    >>> world.devices.columns
    ['unit_id', 'age', 'os', 'region', 'income', 'enrolled']
    >>> world
    Example(5000 devices, 1538 enrolled, 30 rounds, 15863 replies)
    >>> round(world.truth("error_rate"), 4)
    0.0779
    """

    devices: pl.DataFrame  # unit_id, age, os, region, income, enrolled
    rounds: tuple[pl.DataFrame, ...]  # of the enrolled: battery, wifi, invited, replied
    metrics: Mapping[str, pl.DataFrame]  # of the replies: unit_id, round, value
    truths: pl.DataFrame  # metric, group, value: over all devices and rounds

    def __repr__(self) -> str:
        replies = sum(int(one[REPLIED].sum()) for one in self.rounds)
        return (
            f"Example({self.devices.height} devices, {self.enrolled.height} enrolled, "
            f"{len(self.rounds)} rounds, {replies} replies)"
        )

    def _repr_html_(self) -> str:
        return paragraphs(repr(self)) + self.devices.head(5)._repr_html_()

    @property
    def population(self) -> Population:
        """Every device, as a population table."""
        return Population(self.devices)

    @property
    def enrolled(self) -> pl.DataFrame:
        """The enrolled devices alone, as a server with nothing but totals has them."""
        return self.devices.filter(pl.col(ENROLLED)).drop(ENROLLED)

    @property
    def targets(self) -> pl.DataFrame:
        """Population means as an office would publish them: age, shares of systems and regions."""
        shares = {
            f"{column}[{level}]": round(count / self.devices.height, 3)
            for column in ("os", "region")
            for level, count in self.devices[column].value_counts().sort(column).iter_rows()
        }
        age = round(float(self.devices["age"].mean()), 2)  # type: ignore[arg-type]
        names, values = ["age", *shares], [age, *shares.values()]
        return pl.DataFrame({"name": names, "value": values})

    def ledger(self, directory: str | Path) -> Ledger:
        """Write the rounds to a new or empty directory, and return the ledger."""
        made = Ledger(Path(directory))
        for index, one in enumerate(self.rounds, start=1):
            made.append(index, one)
        return made

    def truth(self, metric: str, group: str = EVERYONE) -> float:
        """Return a metric's mean over all devices of a group and all rounds.

        ``group`` is ``everyone``, or a level such as ``os = ios``.
        """
        found = self.truths.filter((pl.col("metric") == metric) & (pl.col("group") == group))
        if not found.height:
            raise InputError(
                f"There is no truth of {metric!r} for {group!r}; metrics are "
                f"{', '.join(self.metrics)}, groups {', '.join(self.truths['group'].unique())}."
            )
        return float(found["value"][0])

    def save(self, directory: str | Path, kind: str = "table") -> tuple[str, ...]:
        """Write the world as files to a directory that is not there yet; return commands to try.

        ``kind`` is ``table``, or ``totals``: without the table of all devices, so that only the
        enrolled and the population's totals are known.
        """
        if kind not in KINDS:
            raise InputError(f"An example is of the kind {' or '.join(KINDS)}, not {kind!r}.")
        place = Path(directory)
        if place.exists() or place.is_symlink():
            raise InputError(f"{place} is there already: choose a directory that is not.")
        tried = commands(place, kind)
        with scratch_directory(place) as stage:
            made = stage / "made"
            made.mkdir()
            if kind == "table":
                write_table(self.devices, made / "devices.csv")
            write_table(self.enrolled, made / "enrolled.csv")
            write_table(self.targets, made / "targets.csv")
            write_table(self.truths, made / "truth.csv")
            for name, values in self.metrics.items():
                write_table(values, made / f"{name}.csv")
            self.ledger(made / "rounds")
            write_text(made / "README.md", _readme(tried))
            try:
                made.rename(place)
            except OSError as error:
                raise unwritable(place, error) from error
        return tried


def example(seed: int = SEED) -> Example:
    """Return a small world whose truth is known, the same for the same seed."""
    rng = np.random.default_rng(seed)
    devices = _devices(rng)
    mistakes, keeps = _outcomes(rng, devices)
    inside = devices[ENROLLED].to_numpy()
    rounds, values = [], []
    everyone = np.empty((ROUNDS, DEVICES))
    for index in range(1, ROUNDS + 1):
        everyone[index - 1] = mistakes * np.exp(0.2 * rng.normal(size=DEVICES))
        rounds.append(_round(rng, devices, index))
        heard = np.flatnonzero(inside)[rounds[-1][REPLIED].to_numpy()]
        values.append((heard, index, everyone[index - 1, heard]))
    reported = {
        "error_rate": _reported(devices, values),
        "kept": _reported(devices, [(who, index, keeps[who]) for who, index, _ in values]),
    }
    truths = _truths(devices, {"error_rate": everyone.mean(axis=0), "kept": keeps})
    return Example(
        devices=devices,
        rounds=tuple(rounds),
        metrics=MappingProxyType(reported),
        truths=truths,
    )


def _devices(rng: np.random.Generator) -> pl.DataFrame:
    """Return the registry: who enrolled depends on everything in it."""
    age = np.round(18.0 + 62.0 * rng.beta(1.6, 2.2, DEVICES)).astype(np.int64)
    system = rng.choice(["android", "ios", "other"], DEVICES, p=[0.66, 0.29, 0.05])
    region = rng.choice(len(_REGIONS), DEVICES, p=_SHARES)
    income = np.round(np.exp(rng.normal(10.2 + 0.15 * (system == "ios"), 0.45)), -2)
    gap = rng.random(DEVICES) < _GAPS
    score = (
        -0.04 * (age - 45.0)
        + 0.8 * (system == "ios")
        + np.array(_ENROLLS)[region]
        + np.where(gap, -0.4, 0.012 * (income - _LOW_INCOME) / 1_000.0)
    )
    prob = _sigmoid(score + _shift(score, _RATE))
    return pl.DataFrame(
        {
            ID: [f"d{k:04d}" for k in range(DEVICES)],
            "age": age,
            "os": system,
            "region": np.array(_REGIONS)[region],
            "income": pl.Series(income).set(pl.Series(gap), None),
            ENROLLED: rng.random(DEVICES) < prob,
        }
    )


def _outcomes(rng: np.random.Generator, devices: pl.DataFrame) -> tuple[FloatArray, FloatArray]:
    """Return each device's own error rate, and whether its owner keeps the keyboard, 0 or 1."""
    age, system = devices["age"].to_numpy(), devices["os"].to_numpy()
    region = np.array([_REGIONS.index(name) for name in devices["region"]])
    known = 0.016 * (age - 45.0) - 0.25 * (system == "ios") + np.array(_MISTAKES)[region]
    mistakes = 0.07 * np.exp(known + 0.3 * rng.normal(size=DEVICES))
    liked = _sigmoid(0.9 - 0.035 * (age - 45.0) - 0.8 * np.array(_MISTAKES)[region])
    return mistakes, (rng.random(DEVICES) < liked).astype(np.float64)


def _round(rng: np.random.Generator, devices: pl.DataFrame, index: int) -> pl.DataFrame:
    """Return a round of the enrolled: charged phones on wifi reply, those of older people less."""
    enrolled = devices.filter(pl.col(ENROLLED))
    battery = np.round(rng.beta(2.0, 1.4, enrolled.height), 2)
    wifi = (rng.random(enrolled.height) < 0.6).astype(np.int64)
    score = -2.4 + 1.8 * battery + 0.9 * wifi - 0.015 * (enrolled["age"].to_numpy() - 45.0)
    return pl.DataFrame(
        {
            ROUND: pl.Series([index] * enrolled.height, dtype=pl.Int64),
            ID: enrolled[ID],
            INVITED: [True] * enrolled.height,
            REPLIED: rng.random(enrolled.height) < _sigmoid(score),
            "battery": battery,
            "wifi": wifi,
        }
    )


def _reported(
    devices: pl.DataFrame, values: list[tuple[IntArray, int, FloatArray]]
) -> pl.DataFrame:
    parts = [
        pl.DataFrame(
            {ID: devices[ID][who], "value": found}, schema_overrides={"value": pl.Float64}
        ).select(ID, pl.lit(index, dtype=pl.Int64).alias(ROUND), "value")
        for who, index, found in values
    ]
    return pl.concat(parts)


def _truths(devices: pl.DataFrame, metrics: Mapping[str, FloatArray]) -> pl.DataFrame:
    rows = []
    for name, values in metrics.items():
        frame = devices.with_columns(pl.Series("value", values))
        rows.append((name, EVERYONE, float(values.mean())))
        for column in ("os", "region"):
            means = frame.group_by(column).agg(pl.col("value").mean()).sort(column)
            rows += [(name, f"{column} = {level}", mean) for level, mean in means.iter_rows()]
    return pl.DataFrame(rows, schema=["metric", "group", "value"], orient="row")


def commands(place: Path, kind: str = "table") -> tuple[str, ...]:
    """Return five commands to try on an example in a directory."""
    folder = shlex.quote(str(place))
    who = f"--population {folder}/devices.csv --missing indicator"
    if kind == "totals":
        who = (
            f"--enrolled {folder}/enrolled.csv --targets {folder}/targets.csv "
            f"--population-size {DEVICES} --missing indicator"
        )
    rest = f"{who} --rounds {folder}/rounds"
    totals = f"{folder}/enrolled.csv --targets {folder}/targets.csv"
    further = "--sensitivity 1.5" if kind == "table" else "--by region"
    return (
        f"fedipw audit {rest} --metrics {folder}/error_rate.csv --out {folder}/audit.html",
        f"fedipw weights {rest} --out {folder}/weights.csv",
        f"fedipw evaluate {rest} --metrics {folder}/error_rate.csv --by os",
        f"fedipw evaluate {rest} --metrics {folder}/kept.csv {further}",
        f"fedipw calibrate {totals} --distance entropy --out {folder}/calibrated.csv",
    )


def _readme(tried: tuple[str, ...]) -> str:
    lines = "\n".join(f"    {line}" for line in tried)
    return f"""# A small world to try fedipw with

| file | what it holds |
|---|---|
| devices.csv | all devices (none with --kind totals): age, os, region, income with gaps, enrolled |
| enrolled.csv, targets.csv | the enrolled alone, and the population's means |
| rounds/ | 30 rounds: battery and wifi of the enrolled, who was invited and who replied |
| error_rate.csv | metric of each reply: share of words its owner corrects |
| kept.csv | metric of each reply: 1 if its owner keeps the keyboard |
| truth.csv | means of both metrics over all devices: what nobody knows in practice |

Everything is drawn by a program; no row is of a person.

{lines}
"""


def _shift(score: FloatArray, rate: float) -> float:
    """Return the intercept that gives a mean rate, by halving."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _sigmoid(score + middle).mean() > rate else (middle, high)
    return 0.5 * (low + high)


def _sigmoid(score: FloatArray) -> FloatArray:
    return 1.0 / (1.0 + np.exp(-score))
