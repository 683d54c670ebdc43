"""The paper's Figure 1 on the testbed.

A: excess loss over rounds. B: over enrollment strength. C: aggregate calibration over rounds.
D: calibration to noisy moments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.calibration import Distance, Entropy, Quadratic
from fedipw.combining.tail import tail_length
from fedipw.errors import InfeasibleError, InputError
from fedipw.lab.engine import Simulation
from fedipw.lab.figure1_page import Curve, draw_figure, figure_page
from fedipw.lab.files import environment
from fedipw.lab.mechanisms import LogisticEnrollment
from fedipw.lab.pool import pooled
from fedipw.lab.scenario import PAPER_METHODS, Scenario
from fedipw.lab.theory import FederatedLogistic, enrollment_costs, error_parts
from fedipw.selection.enrollment import BalanceColumns
from fedipw.storage.atomic import check_directory, written_directory
from fedipw.tables.table import check_results
from fedipw.weighting.balance import Balance

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

PANELS = "ABCD"
STRENGTHS = (0.0, 0.5, 1.0, 1.5, 2.0)
_A_STRENGTH = 1.0
CALIBRATED_METHODS = (
    "participation-only", "calibrated-quadratic", "calibrated-entropy", "fedipw", "efficient",
)  # fmt: skip
NOISE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)  # standard deviations of each moment
NOISY_METHODS = (
    "participation-only", "calibrated-quadratic", "calibrated-entropy", "calibrated-noise-aware",
)  # fmt: skip
_SHOWN = {"A": PAPER_METHODS, "B": PAPER_METHODS, "C": CALIBRATED_METHODS, "D": NOISY_METHODS}
_PARTS = ("excess_loss", "optimisation", "lottery", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSettings:
    """What is run: panels, seeds 0 to ``seeds`` - 1, rounds, and processes."""

    panels: str = PANELS
    seeds: int = 10
    rounds: int = 600
    workers: int = 2

    def __post_init__(self) -> None:
        unknown = [p for p in self.panels if p not in PANELS]
        if unknown or not self.panels or len(set(self.panels)) != len(self.panels):
            raise InputError(
                f"--panels {self.panels!r}: give one or more of {', '.join(PANELS)}, each once."
            )
        for name in ("seeds", "rounds", "workers"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1, not {getattr(self, name)}.")

    @property
    def strengths(self) -> tuple[float, ...]:
        """Enrollment strengths that must be run."""
        return STRENGTHS if "B" in self.panels else (_A_STRENGTH,)

    def cells(self) -> list[Cell]:
        """Return all runs: one per strength and seed."""
        return [
            Cell(seed=seed, strength=s, rounds=self.rounds, panels=self.panels)
            for s in self.strengths
            for seed in range(self.seeds)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One seed at one enrollment strength, all methods."""

    seed: int
    strength: float
    rounds: int
    panels: str = PANELS

    @property
    def whole(self) -> bool:
        """Whether all rounds are kept, and panels C and D made, at this strength."""
        return self.strength == _A_STRENGTH

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods to run: the paper's for A and B, calibrated ones for C."""
        first = PAPER_METHODS if set("AB") & set(self.panels) else ("participation-only",)
        second = CALIBRATED_METHODS if "C" in self.panels and self.whole else ()
        return tuple(dict.fromkeys((*first, *second)))

    @property
    def scenario(self) -> Scenario:
        """The testbed with this enrollment strength."""
        base = Scenario(seed=self.seed, rounds=self.rounds, methods=self.methods)
        return replace(base, enrollment=LogisticEnrollment(strength=self.strength))

    def result(self) -> CellResult:
        """Run it."""
        scenario = self.scenario
        run = scenario.simulation()
        run.advance(self.rounds)
        target, history = scenario.objective(run.federation), run.history()
        best = target.minimum()
        tail = tail_length(self.rounds, scenario.training.tail)
        since = 1 if self.whole else self.rounds + 1 - tail
        iterates = history.iterates[:, since:]
        losses = target.losses(iterates.reshape(-1, iterates.shape[2])).reshape(iterates.shape[:2])
        parts = {m: error_parts(target, run.limits[m], history.of(m)[-1]) for m in history.methods}
        prob = run.federation.enrollment_prob
        return CellResult(
            cell=self,
            methods=history.methods,
            since=since,
            excess_loss=losses - best.value,
            distance=np.linalg.norm(iterates - best.point, axis=2),
            parts={m: {k: getattr(p, k) for k in _PARTS} for m, p in parts.items()},
            least_enrollment_prob=float("nan") if prob is None else float(prob.min()),
            skipped=int(history.skipped.sum()),
            costs=enrollment_costs(target, run.federation, scenario.population, self.seed)
            if self.whole
            else {},
            noisy=noisy_limits(run, target, self.seed) if self.whole and "D" in self.panels else [],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellResult:
    """Excess loss and distance of each method from round ``since`` on."""

    cell: Cell
    methods: tuple[str, ...]
    since: int
    excess_loss: FloatArray  # (M, rounds kept)
    distance: FloatArray  # (M, rounds kept)
    parts: dict[str, dict[str, float]]  # by method
    least_enrollment_prob: float
    skipped: int
    costs: dict[str, float]  # of one draw of enrollment, at the strength of panel A
    noisy: list[Line]  # of panel D


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A method's values over rounds, strength or moment noise; NaN where there are none."""

    method: str
    x: FloatArray
    excess_loss: FloatArray
    distance: FloatArray


def noisy_limits(run: Simulation, target: FederatedLogistic, seed: int) -> list[Line]:
    """Return the limits of a run when population moments are known with errors.

    Each moment gets an error of sd ``noise`` times the column's own sd over the population; all
    noise levels share one draw, scaled, and infeasible moments have no limit. The participation
    stage is that of the run: each enrolled client's true over fitted participation probability,
    averaged over rounds.
    """
    population, best = run.federation.population, target.minimum()
    matrix = population.matrix()
    columns = BalanceColumns(names=population.covariates, matrix=matrix, mean=matrix.mean(axis=0))
    balance = Balance.of(columns, population.enrolled, population.listed)
    spread = balance.matrix.std(axis=0, ddof=1)
    error = spread * np.random.default_rng([seed, *b"moments"]).standard_normal(len(spread))
    participation = run.limits["participation-only"].given_enrolled

    def outcome(weights: FloatArray | None) -> tuple[float, float]:
        if weights is None:
            return float("nan"), float("nan")
        objective = FederatedLogistic(target.clients, target.l2, participation * weights)
        theta = objective.minimum(best.point).point
        loss = float(target.losses(theta)[0] - best.value)
        return loss, float(np.linalg.norm(theta - best.point))

    def weights(method: str, noise: float) -> FloatArray | None:
        if method == "participation-only":
            return np.ones(len(matrix))
        noisy = replace(balance, mean=balance.mean + noise * error)
        aware = method == "calibrated-noise-aware"
        if aware:
            noisy = replace(noisy, se=noise * spread)
        rule: Distance = Quadratic() if method == "calibrated-quadratic" else Entropy()
        try:
            return noisy.enrollment_weights(noisy.calibration(rule, noise_aware=aware))
        except InfeasibleError:
            return None

    found = []
    for method in NOISY_METHODS:
        outcomes = np.array([outcome(weights(method, noise)) for noise in NOISE])
        found.append(Line(method, np.array(NOISE), outcomes[:, 0], outcomes[:, 1]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FigureTables:
    """Summary of the panels, and the three errors by strength, method and seed."""

    summary: pl.DataFrame
    errors: pl.DataFrame
    costs: dict[str, float]  # of one draw of enrollment, mean over seeds


def reproduce(
    out: Path, settings: FigureSettings, progress: Callable[[int, int], None] | None = None
) -> FigureTables:
    """Run the figure and write all its files to ``out``; returns its tables."""
    check_directory(out)
    began = time.perf_counter()
    cells = settings.cells()
    results = []
    warm = replace(cells[0], rounds=3)
    for result in pooled(Cell.result, cells, settings.workers, warm=warm):
        results.append(result)
        if progress is not None:
            progress(len(results), len(cells))
    results.sort(key=lambda r: (r.cell.strength, r.cell.seed))
    rows, limits = _rows(results, settings.panels), _limits(results)
    summary = _summary(rows)
    for name, table in (("results", rows), ("summary", summary), ("errors", limits)):
        check_results(table, out / f"{name}.csv")
    with written_directory(out) as stage:
        rows.write_csv(stage / "results.csv")
        summary.write_csv(stage / "summary.csv")
        limits.write_csv(stage / "errors.csv")
        least = {
            s: min(r.least_enrollment_prob for r in results if r.cell.strength == s)
            for s in settings.strengths
        }
        draw_figure(stage, _curves(rows, settings.panels), least)
        manifest = _manifest(settings, least, results, time.perf_counter() - began)
        (stage / "manifest.json").write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")
        page = figure_page(stage / "figure1.svg", summary, limits, manifest)
        (stage / "index.html").write_text(page, encoding="utf-8")
    return FigureTables(summary=summary, errors=limits, costs=manifest["enrollment_costs"])


def _rows(results: Sequence[CellResult], panels: str) -> pl.DataFrame:
    """Return panel, method, x, seed, excess_loss, distance."""
    return pl.concat(
        pl.DataFrame(
            {
                "panel": [panel] * len(line.x),
                "method": [line.method] * len(line.x),
                "x": line.x,
                "seed": np.full(len(line.x), result.cell.seed),
                "excess_loss": line.excess_loss,
                "distance": line.distance,
            },
            nan_to_null=True,  # an infeasible draw of D keeps its row with empty values
        )
        for panel in sorted(panels)
        for result in results
        for line in _lines(result, panel)
    )


def _lines(result: CellResult, panel: str) -> list[Line]:
    """Return what a run shows in a panel."""
    cell, loss, distance = result.cell, result.excess_loss, result.distance
    if panel == "D":
        return result.noisy
    if panel == "B":
        tail = tail_length(cell.rounds, cell.scenario.training.tail)
        x = np.array([cell.strength])
        loss, distance = (v[:, -tail:].mean(axis=1, keepdims=True) for v in (loss, distance))
    elif cell.whole:
        x = np.arange(result.since, cell.rounds + 1, dtype=np.float64)
    else:
        return []
    rows = {method: result.methods.index(method) for method in _SHOWN[panel]}
    return [Line(method, x, loss[m], distance[m]) for method, m in rows.items()]


def _summary(rows: pl.DataFrame) -> pl.DataFrame:
    """Return panel, method, x, mean, sd, n, infeasible (of excess_loss)."""
    loss = pl.col("excess_loss")
    return rows.group_by("panel", "method", "x", maintain_order=True).agg(
        mean=loss.mean(), sd=loss.std(), n=loss.count(), infeasible=loss.null_count()
    )


def _limits(results: Sequence[CellResult]) -> pl.DataFrame:
    """Return the three errors of the last iterate, by strength, method and seed."""
    return pl.DataFrame(
        [
            {"strength": r.cell.strength, "method": method, "seed": r.cell.seed, **parts}
            for r in results
            for method, parts in r.parts.items()
        ]
    )


def _curves(rows: pl.DataFrame, panels: str) -> dict[str, list[Curve]]:
    """Return each method's line.

    Over rounds (A, C) the median and quartiles of excess loss; over strength (B) its mean and
    standard error; over moment noise (D) those of the distance to the best model.
    """

    def shown(panel: str) -> tuple[pl.Expr, pl.Expr, pl.Expr, pl.Expr]:
        value = pl.col("distance" if panel == "D" else "excess_loss")
        if panel in "AC":
            low, high = (value.quantile(x, "linear") for x in (0.25, 0.75))
            return value.median(), low, high, value.mean()
        error = value.std().fill_null(0.0) / value.count().sqrt()
        return value.mean(), value.mean() - error, value.mean() + error, value.mean()

    def curve(panel: str, method: str) -> Curve:
        centre, low, high, mean = shown(panel)
        mine = rows.filter((pl.col("panel") == panel) & (pl.col("method") == method))
        missing = pl.col("distance").null_count()
        part = mine.group_by("x").agg(
            centre=centre, low=low, high=high, mean=mean, infeasible=missing
        )
        columns = ("x", "centre", "low", "high", "mean", "infeasible")
        return Curve(method, *(part.sort("x")[c].to_numpy() for c in columns))

    return {p: [curve(p, m) for m in _SHOWN[p]] for p in panels}


def _manifest(
    settings: FigureSettings,
    least: dict[float, float],
    results: Sequence[CellResult],
    seconds: float,
) -> dict[str, Any]:
    return {
        "command": "fedipw reproduce",
        "settings": asdict(settings),
        "seeds": list(range(settings.seeds)),
        "scenario": Cell(seed=0, strength=_A_STRENGTH, rounds=settings.rounds).scenario.settings(),
        "strengths": list(settings.strengths),
        "moment_noise": list(NOISE) if "D" in settings.panels else [],
        "least_enrollment_prob": {str(s): p for s, p in least.items()},
        "skipped_rounds": sum(r.skipped for r in results),
        "enrollment_costs": {
            name: float(np.mean([r.costs[name] for r in results if r.costs]))
            for name in ("lottery_term", "efficiency_bound")
        },
        "seconds": round(seconds, 2),
        **environment(),
    }
