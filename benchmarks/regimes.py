"""``python -m benchmarks.regimes``: methods where replies are many, few, skewed or hard to model.

Fourteen regimes of the testbed, from the plain one to few replies, rare levels and wrong models,
and one in which a covariate known before a round predicts updates. Every method trains on the same
rounds of the same seeds; the measure is the excess target loss of the tail average, beside that of
the last model. Numbers go to benchmarks/results/regimes.json, a table and a figure to docs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from threadpoolctl import threadpool_limits

from fedipw.errors import FedIPWError
from fedipw.lab.files import environment
from fedipw.lab.mechanisms import DailyParticipation, LogisticEnrollment, MarkovAvailability
from fedipw.lab.mechanisms.base import solved_intercept
from fedipw.lab.scenario import PropensitySettings, Scenario
from fedipw.lab.style import look_of, new_figure, styled
from fedipw.lab.testbed import PopulationDraw, Testbed
from fedipw.numerics.logistic import sigmoids
from fedipw.numerics.threads import limit_threads
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

HERE = Path(__file__).parent
RESULT = HERE / "results" / "regimes.json"
TABLE = HERE.parent / "docs" / "_static" / "regimes.md"
FIGURE = HERE.parent / "docs" / "_static" / "regimes.png"
ROUNDS = 300
METHODS = (
    "fedavg", "participation-only-hajek", "fedipw", "fedipw-hajek", "efficient-hajek",
    "calibrated-online", "augmented", "augmented, augmentation=regression", "augmented-online",
    "scaffold+efficient",
)  # fmt: skip
IN_TABLE = (
    "fedavg", "augmented", "augmented-online", "efficient-hajek", "fedipw-hajek", "fedipw",
    "calibrated-online",
)  # fmt: skip


@dataclass(frozen=True)
class Covariates:
    """The testbed with other client covariates: heavy tails, many of them, or rare levels."""

    testbed: Testbed = field(default_factory=Testbed)
    heavy: bool = False  # z2 and z3 are Student's t with 3 degrees of freedom, not clipped
    noise: int = 0  # covariates that drive nothing, correlated with z2
    levels: int = 0  # levels of a region, each half as frequent as the one before

    def draw(self, rng: np.random.Generator) -> PopulationDraw:
        """Return a population and its clients' data."""
        size = self.testbed.size
        Z = np.column_stack([2.0 * rng.integers(0, 2, size) - 1.0, rng.standard_normal((size, 2))])
        if self.heavy:
            Z[:, 1:] = rng.standard_t(3.0, (size, 2)) / np.sqrt(3.0)
        columns: dict[str, Any] = {
            "unit_id": np.arange(size), **{f"z{j + 1}": Z[:, j] for j in range(3)}
        }  # fmt: skip
        for k in range(self.noise):
            columns[f"n{k + 1}"] = 0.5 * Z[:, 1] + rng.standard_normal(size)
        moved = Z.copy()
        if self.levels:
            share = 0.5 ** np.arange(self.levels)
            level = rng.choice(self.levels, size, p=share / share.sum())
            columns["region"] = [f"region {k + 1}" for k in level]
            moved[:, 0] += np.where(level % 2 == 0, 0.5, -0.5)  # regions differ in their data
        clients = self.testbed.clients_given(moved, rng)
        return PopulationDraw(population=Population.of(columns), clients=clients)


@dataclass(frozen=True)
class CurvedEnrollment:
    """Enrollment by squares and products of the covariates, which its model leaves out."""

    rate: float = 0.5

    def __call__(self, population: Population) -> FloatArray:
        """Return enrollment probabilities, (N,)."""
        z1, z2 = population.matrix(("z1", "z2")).T
        score = 0.5 * z1 + 0.8 * z2 + 0.6 * (z2**2 - 1.0) + 0.5 * z1 * z2
        return sigmoids(score, solved_intercept(lambda: [score], self.rate))


class Regime(NamedTuple):
    """A scenario and what is special about it."""

    title: str
    scenario: Scenario


def _regimes() -> Mapping[str, Regime]:
    def of(title: str, **settings: Any) -> Regime:
        return Regime(title, Scenario(rounds=ROUNDS, **settings))

    few = DailyParticipation(rate=0.05)
    hidden = PropensitySettings(enrollment="z1 + z2", participation="z1 + z2 + x")
    return {
        "testbed": of("N = 1,000, 50% enrolled, about 155 replies a round"),
        "small": of("N = 200", population=Testbed(size=200)),
        "rate-05": of("5% enrolled", enrollment=LogisticEnrollment(rate=0.05)),
        "A": of(
            "N = 5,000, 2% enrolled, about 10 replies a round",
            population=Testbed(size=5000), enrollment=LogisticEnrollment(rate=0.02),
            participation=few,
        ),
        "B": of(
            "N = 20,000, 10% enrolled, about 80 replies a round",
            population=Testbed(size=20_000), enrollment=LogisticEnrollment(rate=0.1),
            participation=DailyParticipation(rate=0.02),
        ),
        "heavy-tails": of("covariates with heavy tails", population=Covariates(heavy=True)),
        "20-covariates": of("17 covariates that drive nothing", population=Covariates(noise=17)),
        "rare-levels": of("a region of 8 levels, the rarest 0.4%", population=Covariates(levels=8)),
        "autocorrelation": of(
            "availability hardly changes (autocorrelation .99)",
            participation=DailyParticipation(autocorrelation=0.99),
        ),
        "markov": of("Markov availability, memory .95",
                     participation=MarkovAvailability(memory=0.95)),
        "both-wrong": of(
            "both models of selection are wrong",
            enrollment=CurvedEnrollment(),
            propensity=PropensitySettings(participation="z1 + z2"),
        ),
        "strength-2": of("enrollment strength 2", enrollment=LogisticEnrollment(strength=2.0)),
        "strength-3": of("enrollment strength 3", enrollment=LogisticEnrollment(strength=3.0)),
        "no-shift": of(
            "selection says nothing about the data",
            population=Testbed(shift=0.0, concept_shift=0.0, intercept_loadings=(0.0, 0.0, 0.0)),
        ),
        "x-predicts": of(
            "a covariate known before a round predicts updates",
            population=Testbed(loadings=(1.0, 1.0, 1.0), intercept_loadings=(0.6, 0.6, 0.6)),
            participation=DailyParticipation(covariate_loadings={"z2": 0.4, "z3": 1.0}),
            propensity=hidden,
        ),
    }  # fmt: skip


REGIMES = _regimes()


def trained(job: tuple[str, int], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return a seed's rows: excess loss of each method's tail average and last model."""
    name, seed = job
    scenario = replace(REGIMES[name].scenario, seed=seed, methods=tuple(methods))
    try:
        run = scenario.simulation(limits=False)
        run.advance(scenario.rounds)
    except FedIPWError as error:
        if len(methods) == 1:
            return [{"regime": name, "seed": seed, "method": methods[0], "failure": str(error)}]
        return [row for method in methods for row in trained(job, [method])]
    target, history = scenario.objective(run.federation), run.history()
    best = target.minimum().value
    return [
        {
            "regime": name,
            "seed": seed,
            "method": method,
            "tail": float(target.losses(history.tail_average(method))[0] - best),
            "last": float(target.losses(history.of(method)[-1])[0] - best),
            "replies": float(history.replies.mean()),
        }
        for method in methods
    ]


def _start() -> None:
    limit_threads(1)
    threadpool_limits(1)


def results(jobs: Sequence[tuple[str, int]], methods: Sequence[str], workers: int) -> pl.DataFrame:
    """Return one row per regime, seed and method."""
    work = partial(trained, methods=methods)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start) as pool:
        rows = [row for part in pool.map(work, jobs) for row in part]
    wanted = {
        "regime": pl.String, "seed": pl.Int64, "method": pl.String, "tail": pl.Float64,
        "last": pl.Float64, "replies": pl.Float64, "failure": pl.String,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=wanted)


def summary(found: pl.DataFrame) -> pl.DataFrame:
    """Return mean, worst seed and seeds lost to FedAvg, by regime and method."""
    base = found.filter(method="fedavg").select("regime", "seed", fedavg="tail")
    joined = found.join(base, on=["regime", "seed"], how="left")
    return joined.group_by("regime", "method", maintain_order=True).agg(
        seeds=pl.col("tail").count(),
        tail=pl.col("tail").mean(),
        worst=pl.col("tail").max(),
        last=pl.col("last").mean(),
        worst_last=pl.col("last").max(),
        losses=(pl.col("tail") > pl.col("fedavg")).sum(),
        failures=pl.col("failure").count(),
        replies=pl.col("replies").mean(),
    )


def text_table(table: pl.DataFrame) -> str:
    """Return mean and worst tail excess, in thousandths, one line per regime (losses, failures)."""
    methods = table["method"].unique(maintain_order=True).to_list()
    lines = [f"{'':16}" + "".join(f"{m[-20:]:>21}" for m in methods)]
    for name in table["regime"].unique(maintain_order=True):
        cells = []
        for method in methods:
            row = table.row(by_predicate=(pl.col("regime") == name) & (pl.col("method") == method),
                            named=True)  # fmt: skip
            if row["tail"] is None:
                cells.append(f"failed {row['failures']}")
                continue
            extra = f" L{row['losses']}" * bool(row["losses"])
            extra += f" F{row['failures']}" * bool(row["failures"])
            cells.append(f"{1e3 * row['tail']:.2f} ({1e3 * row['worst']:.3g}){extra}")
        lines.append(f"{name:16}" + "".join(f"{cell:>21}" for cell in cells))
    return "\n".join(lines)


def markdown(table: pl.DataFrame) -> str:
    """Return the table of the docs: mean and worst tail excess, in thousandths."""
    methods = [m for m in IN_TABLE if m in set(table["method"])]
    lines = [
        "| regime | " + " | ".join(f"`{m}`" for m in methods) + " |",
        "|---|" + "---:|" * len(methods),
    ]
    for name in table["regime"].unique(maintain_order=True):
        cells = []
        for method in methods:
            row = table.row(by_predicate=(pl.col("regime") == name) & (pl.col("method") == method),
                            named=True)  # fmt: skip
            text = f"{_short(1e3 * row['tail'])} ({_short(1e3 * row['worst'])})"
            text += f" ↑{row['losses']}" if row["losses"] else ""
            cells.append(text + (f" †{row['failures']}" if row["failures"] else ""))
        lines.append(f"| {REGIMES[name].title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    """Return a number with as many digits as chance leaves."""
    digits = 2 if value < 1.0 else 1 if value < 100.0 else 0
    return f"{value:.{digits}f}"


def draw(found: pl.DataFrame, path: Path) -> None:
    """Draw every seed's tail excess, one row a regime."""
    hidden = {"fedipw", "scaffold+efficient", "augmented, augmentation=regression"}
    shown = [m for m in METHODS if m not in hidden]
    names = [n for n in REGIMES if n in set(found["regime"])]
    with styled():
        figure = new_figure(9.0, 0.62 * len(names) + 1.4)
        ax = figure.subplots()
        for k, method in enumerate(shown):
            look, shift = look_of(method), 0.36 - 0.72 * k / (len(shown) - 1)
            for row, name in enumerate(names):
                tails = found.filter(regime=name, method=method)["tail"].drop_nulls()
                here = np.full(len(tails), -row + shift)
                ax.plot(tails, here, ".", color=look.colour, alpha=0.25, markersize=4)
                ax.plot(
                    float(tails.to_numpy().mean()), -row + shift, look.marker, color=look.colour,
                    markersize=6, label=look.label if row == 0 else None,
                )  # fmt: skip
        ax.set_xscale("log")
        ax.set_xlabel("excess target loss of the tail average (dots: seeds, marks: means)")
        titles = [fill(REGIMES[name].title, 34) for name in names]
        ax.set_yticks([-row for row in range(len(names))], titles)
        ax.set_ylim(0.5 - len(names), 0.5)
        ax.grid(axis="y", visible=False)
        for row in range(len(names) - 1):
            ax.axhline(-row - 0.5, color="#dddddd", linewidth=0.6)
        figure.legend(loc="outside upper center", ncols=4)
        figure.savefig(path, dpi=160)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the regimes and write results, table and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="per regime, half for B")
    parser.add_argument("--only", nargs="*", choices=[*REGIMES], default=[*REGIMES])
    parser.add_argument("--methods", nargs="*", default=[*METHODS])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write JSON here, and no table or figure")
    chosen = parser.parse_args(arguments)
    jobs = [
        (name, chosen.first_seed + seed)
        for name in chosen.only
        for seed in range(max(1, chosen.seeds // 2) if name == "B" else chosen.seeds)
    ]
    found = results(jobs, chosen.methods, chosen.workers)
    table = summary(found)
    print(text_table(table))
    made = {"summary": table.to_dicts(), "results": found.to_dicts(), **environment()}
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(made) + "\n")
        return
    RESULT.write_text(json.dumps(made) + "\n")
    TABLE.write_text(markdown(table), encoding="utf-8")
    draw(found, FIGURE)


if __name__ == "__main__":
    main()
