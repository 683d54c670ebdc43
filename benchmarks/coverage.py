"""``python -m benchmarks.coverage``: how often intervals of a metric hold the truth.

The testbed's population is drawn once, with each client's loss under the best model as its metric.
Enrollment and participation are drawn again and again, both propensities estimated on each draw.
For every number of rounds the share of nominal 95% intervals that hold the population's mean is
counted, for the design-based intervals of fedipw and for those that leave something out:

- naive: unweighted replies, taken as independent;
- one phase: weighted replies, taken as independent draws with known weights;
- superpopulation: both phases by M-estimation, as if the population itself were a sample.

Results go to benchmarks/results/coverage.json, the table of the docs to docs/_static/coverage.md.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedipw.evaluation.estimators import (
    GregMean,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    MeanEstimator,
    population_means,
)
from fedipw.lab.files import environment
from fedipw.lab.mechanisms import (
    DailyParticipation,
    LogisticEnrollment,
    MarkovAvailability,
    ParticipationMechanism,
    enrollment_draw,
)
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import FederatedLogistic, target_weights
from fedipw.lab.two_phase import fitted_two_phase

RESULT = Path(__file__).parent / "results" / "coverage.json"
TABLE = Path(__file__).parents[1] / "docs" / "_static" / "coverage.md"
ROUNDS = (1, 5, 20, 300)
KINDS: dict[str, tuple[str, ParticipationMechanism]] = {
    "daily": ("own state and hour of the day, in the model", DailyParticipation()),
    "markov": ("two-state Markov chain, its memory not in the model", MarkovAvailability()),
}
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Task:
    """Some draws of one row of the table."""

    kind: str
    rounds: int
    first: int
    draws: int
    size: int


def draws(task: Task) -> list[dict[str, tuple[float, float]]]:
    """Return lower and upper ends by interval, of each draw, less the truth."""
    drawn = Testbed(size=task.size).draw(np.random.default_rng(1))
    Z, target = (
        drawn.population.matrix(),
        FederatedLogistic(drawn.clients, 0.05, target_weights(drawn.clients)),
    )
    metric = target.client_losses(target.minimum().point)
    truth, prob = float(metric.mean()), LogisticEnrollment()(drawn.population)
    mechanism = KINDS[task.kind][1]
    out = []
    for seed in range(task.first, task.first + task.draws):
        rng = np.random.default_rng([seed, task.rounds])
        enrolled = enrollment_draw(prob, rng)
        ids = np.flatnonzero(enrolled)
        process = mechanism.start(drawn.population, drawn.clients, rng)
        rounds = [process.advance() for _ in range(task.rounds)]
        static = np.tile(Z[ids], (task.rounds, 1))
        X = static
        if task.kind == "daily":
            X = np.column_stack([static, np.concatenate([r.covariates[ids] for r in rounds])])
        replied = np.concatenate([r.replied[ids] for r in rounds])
        index = np.repeat(np.arange(task.rounds), len(ids))
        sample = fitted_two_phase(Z, enrolled, X, np.tile(ids, task.rounds), index, replied=replied)
        out.append(_intervals(sample, metric[ids][sample.client], Z, enrolled, truth))
    return out


def _intervals(
    sample: Any, values: np.ndarray, Z: np.ndarray, enrolled: np.ndarray, truth: float
) -> dict[str, tuple[float, float]]:
    greg = GregMean(Z[enrolled], Z.mean(axis=0))
    estimators: list[MeanEstimator] = [HajekMean(), greg, HorvitzThompsonMean()]
    found = population_means(sample, values, estimators, [Group(size=len(Z))])
    ends = {f.estimator: (f.low - truth, f.high - truth) for f in found}
    hajek = found[0]
    w = sample.weights / sample.weights.sum()
    alone = float(np.sqrt((w**2 * (values - hajek.estimate) ** 2).sum()))
    plain = float(values.std(ddof=1) / np.sqrt(len(values)))
    for name, mean, se in (
        ("one phase", hajek.estimate, alone),
        ("naive", float(values.mean()), plain),
        ("superpopulation", hajek.estimate, hajek.se_superpopulation or np.nan),
    ):
        ends[name] = (mean - Z95 * se - truth, mean + Z95 * se - truth)
    return ends


def row(kind: str, rounds: int, ends: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Return one row of the table."""
    made: dict[str, Any] = {"kind": kind, "rounds": rounds, "draws": len(ends)}
    for name in ends[0]:
        sides = np.array([e[name] for e in ends])
        made[name] = {
            "coverage": float(((sides[:, 0] <= 0.0) & (sides[:, 1] >= 0.0)).mean()),
            "mean_width": float((sides[:, 1] - sides[:, 0]).mean()),
            "sd_of_estimate": float(sides.mean(axis=1).std()),
            "bias": float(sides.mean()),
        }
    return made


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for the docs."""
    names = {
        "hajek": "Hájek",
        "greg": "GREG",
        "horvitz-thompson": "HT",
        "superpopulation": "superpopulation",
        "one phase": "one phase",
        "naive": "naive",
    }
    lines = [
        "| participation | rounds | " + " | ".join(names.values()) + " |",
        "|---|---:|" + "---:|" * len(names),
    ]
    for r in rows:
        cells = " | ".join(f"{100 * r[name]['coverage']:.1f}" for name in names)
        lines.append(f"| {r['kind']} | {r['rounds']} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, nargs="*", default=list(ROUNDS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for kind in KINDS:
            for rounds in arguments.rounds:
                part = max(1, arguments.draws // 20)
                tasks = [
                    Task(kind, rounds, first, min(part, arguments.draws - first), arguments.size)
                    for first in range(0, arguments.draws, part)
                ]
                ends = [e for done in pool.map(draws, tasks) for e in done]
                rows.append(row(kind, rounds, ends))
                print(json.dumps(rows[-1]), flush=True)
    result = {"nominal": 0.95, "population": arguments.size, "rows": rows}
    arguments.out.write_text(json.dumps(result | environment(), indent=2) + "\n")
    arguments.table.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
