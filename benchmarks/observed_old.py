"""``python -m benchmarks.observed --data DIR``: both stages of selection as they were observed.

The population is the 2,845 respondents of the Michigan Behavioral Risk Factor Surveillance Survey
in ``mibrfss.csv`` (data ``mibrfss`` of the R package PracTools). Who has internet at home is
enrolled; who of them uses it at least daily replies in the one round there is. Nothing about
selection is simulated, and outcomes are known for everybody, so the truth is known.

Fixed before any estimate was looked at: both models are logistic with main effects of age, race,
education, income and gender, all as categories; weights are Hájek's and GREG's, the defaults of
``fedipw.evaluate``; the nine outcomes of ``OUTCOMES``. Nothing was tuned afterwards.

The table is not part of the project: ``--data`` or ``FEDIPW_DATA`` names its directory. Aggregates
go to benchmarks/results/observed.json, the table of the docs to docs/_static/observed.md and the
figure to docs/_static/observed.png; ``--saved`` makes the last two from the first.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

import fedipw
from fedipw.errors import InputError
from fedipw.lab.files import environment
from fedipw.lab.style import new_figure, styled

FILE = "mibrfss.csv"
RESULT = Path(__file__).parent / "results" / "observed.json"
STATIC = Path(__file__).parents[1] / "docs" / "_static"
COVARIATES = {
    "AGECAT": "age",
    "RACECAT": "race",
    "EDCAT": "education",
    "INCOMC3": "income",
    "GENDER": "gender",
}
FORMULA = " + ".join(COVARIATES.values())
INTERNET, USE, YES, DAILY = "INETHOME", "WEBUSE", 1, 1
ESTIMATORS = ("plain", "hajek", "greg")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A yes or no of every person: a column and the codes that mean yes."""

    title: str
    column: str
    codes: tuple[int, ...]


OUTCOMES = (
    Outcome("General health fair or poor", "GENHLTH", (4, 5)),
    Outcome("Physically active", "PHYSACT", (1,)),
    Outcome("High blood pressure", "HIGHBP", (1,)),
    Outcome("Arthritis", "ARTHRIT", (1,)),
    Outcome("Asthma", "ASTHMA", (1,)),
    Outcome("Smoked 100 cigarettes", "SMOKE100", (1,)),
    Outcome("Obese", "BMICAT3", (3,)),
    Outcome("Cholesterol checked", "CHOLCHK", (1,)),
    Outcome("Binge drinking", "BINGE2", (2,)),
)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The survey as a population, one round, and outcomes of everybody."""

    population: pl.DataFrame  # unit_id, enrolled, covariates
    round: pl.DataFrame  # unit_id, invited, replied: the enrolled
    outcomes: pl.DataFrame  # unit_id and a column of 0 and 1 for each outcome

    def metric(self, column: str) -> pl.DataFrame:
        """Return an outcome of the respondents: unit_id, round, value."""
        who = self.round.filter("replied").select("unit_id")
        found = who.join(self.outcomes, on="unit_id", maintain_order="left")
        one = pl.lit(1, dtype=pl.Int64).alias("round")
        return found.select("unit_id", one, pl.col(column).alias("value"))

    def truth(self, column: str) -> float:
        """Return the mean of an outcome over everybody."""
        return float(self.outcomes[column].mean())  # type: ignore[arg-type]


def observed(path: Path) -> Observed:
    """Read the survey; a missing column or value is an error that names it."""
    if not path.is_file():
        raise InputError(
            f"There is no {path}. Save the data `mibrfss` of the R package PracTools as {FILE} and "
            "give its directory by --data or FEDIPW_DATA."
        )
    table = pl.read_csv(path, infer_schema_length=None)
    needed = [*COVARIATES, INTERNET, USE, *(one.column for one in OUTCOMES)]
    absent = [name for name in needed if name not in table.columns]
    if absent:
        raise InputError(f"{path} has no column {', '.join(absent)}.")
    for name in needed:
        if table[name].null_count():
            row = int(table[name].is_null().arg_max() or 0) + 2
            raise InputError(f"{path}, line {row}: {name} is empty; every person needs a value.")
    table = table.with_row_index("unit_id").with_columns(pl.col("unit_id").cast(pl.Int64))
    inside = pl.col(INTERNET) == YES
    categories = [pl.col(old).cast(pl.String).alias(new) for old, new in COVARIATES.items()]
    yes = [
        pl.col(one.column).is_in(list(one.codes)).cast(pl.Float64).alias(one.column)
        for one in OUTCOMES
    ]
    return Observed(
        population=table.select("unit_id", inside.alias("enrolled"), *categories),
        round=table.filter(inside).select(
            "unit_id", pl.lit(True).alias("invited"), (pl.col(USE) == DAILY).alias("replied")
        ),
        outcomes=table.select("unit_id", *yes),
    )


def estimated(data: Observed) -> dict[str, Any]:
    """Return every outcome's truth and estimates, and the sizes behind them."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        ledger = fedipw.Ledger(Path(scratch) / "rounds")
        ledger.append(1, data.round)
        for outcome in OUTCOMES:
            found = fedipw.evaluate(
                data.metric(outcome.column),
                data.population,
                ledger,
                enrollment=FORMULA,
                participation=FORMULA,
            )
            for name in ESTIMATORS:
                line = found.of(name)
                rows.append(
                    {
                        "outcome": outcome.title,
                        "column": outcome.column,
                        "codes": list(outcome.codes),
                        "truth": data.truth(outcome.column),
                        "estimator": name,
                        "estimate": line.estimate,
                        "se": line.se,
                        "low": line.low,
                        "high": line.high,
                        "effective_sample_size": line.effective_sample_size,
                    }
                )
    return {
        "population": data.population.height,
        "enrolled": data.round.height,
        "respondents": int(data.round["replied"].sum()),
        "enrollment": FORMULA,
        "participation": FORMULA,
        "estimates": rows,
    }


def holds(row: Mapping[str, Any]) -> bool:
    """Return whether an interval holds the truth."""
    return bool(row["low"] <= row["truth"] <= row["high"])


def markdown(saved: Mapping[str, Any]) -> str:
    """Return the docs' table: errors in percentage points; ✗ marks intervals that miss."""
    heads = ("respondents, plain", "Hájek", "GREG")
    lines = [
        "| outcome, share in the population | " + " | ".join(heads) + " |",
        "|---|--:|--:|--:|",
    ]
    by = _by_outcome(saved)
    for title, rows in by.items():
        cells = []
        for name in ESTIMATORS:
            row = rows[name]
            error, half = (
                100 * (row["estimate"] - row["truth"]),
                50 * (row["high"] - row["low"]),
            )
            cells.append(f"{error:+.1f} ± {half:.1f}{'' if holds(row) else ' ✗'}")
        lines.append(
            f"| {title}, {100 * rows['plain']['truth']:.1f}% | " + " | ".join(cells) + " |"
        )
    errors = [
        (sum((row["estimate"] - row["truth"]) ** 2 for row in part) / len(part)) ** 0.5
        for part in ([rows[name] for rows in by.values()] for name in ESTIMATORS)
    ]
    held = [sum(holds(rows[name]) for rows in by.values()) for name in ESTIMATORS]
    lines.append(
        "| root mean square error; intervals that hold the truth | "
        + " | ".join(f"{100 * e:.1f}; {h} of {len(by)}" for e, h in zip(errors, held, strict=True))
        + " |"
    )
    return "\n".join(lines) + "\n"


def draw(saved: Mapping[str, Any], path: Path) -> None:
    """Draw errors of all estimates with their intervals; the truth is the line at zero."""
    looks = {  # Okabe and Ito's palette, with markers
        "plain": ("respondents, plain mean", "#D55E00", "o"),
        "hajek": ("weighted, Hájek mean", "#0072B2", "D"),
        "greg": ("weighted, GREG mean", "#009E73", "s"),
    }
    by = _by_outcome(saved)
    with styled():
        figure = new_figure(8.0, 5.2)
        ax = figure.subplots()
        for offset, (name, (label, colour, marker)) in zip(
            (-0.24, 0.0, 0.24), looks.items(), strict=True
        ):
            part = [rows[name] for rows in by.values()]
            middle = [100 * (row["estimate"] - row["truth"]) for row in part]
            sides = (
                [100 * (row["estimate"] - row["low"]) for row in part],
                [100 * (row["high"] - row["estimate"]) for row in part],
            )
            places = [k + offset for k in range(len(part))]
            ax.errorbar(middle, places, xerr=sides, fmt=marker, color=colour, label=label,
                        markersize=5, capsize=2.5, linewidth=1.3)  # fmt: skip
        ax.axvline(0.0, color="#000000", linewidth=1.0)
        ax.grid(visible=False, axis="y")
        titles = [f"{title} ({100 * rows['plain']['truth']:.0f}%)" for title, rows in by.items()]
        ax.set_yticks(range(len(by)), titles)
        ax.set_ylim(len(by) - 0.5, -0.5)
        for k in range(1, len(by)):
            ax.axhline(k - 0.5, color="#bbbbbb", linewidth=0.5)
        ax.annotate("truth", (0.0, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
                    textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
        ax.set_xlabel("estimate less the truth (percentage points), with 95% interval")
        figure.suptitle(
            f"All {saved['population']:,} persons of a health survey, estimated from the "
            f"{saved['respondents']:,} who use the internet at home every day",
            fontsize=10,
        )
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=160)


def _by_outcome(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for row in saved["estimates"]:
        out.setdefault(row["outcome"], {})[row["estimator"]] = row
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Estimate, or read what was saved, and write results, table and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDIPW_DATA"))
    parser.add_argument("--saved", type=Path, help="make table and figure of this JSON")
    parser.add_argument("--out", type=Path, help="write everything to this directory instead")
    chosen = parser.parse_args(arguments)
    if chosen.saved is None and chosen.data is None:
        parser.error(f"give the directory of {FILE} by --data or FEDIPW_DATA")
    if chosen.saved is None:
        saved = {**environment(), **estimated(observed(Path(chosen.data) / FILE))}
        result = RESULT if chosen.out is None else chosen.out / RESULT.name
        result.write_text(json.dumps(saved, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    else:
        saved = json.loads(chosen.saved.read_text(encoding="utf-8"))
    place = chosen.out or STATIC
    (place / "observed.md").write_text(markdown(saved), encoding="utf-8")
    draw(saved, place / "observed.png")
    print(markdown(saved))


if __name__ == "__main__":
    main()
