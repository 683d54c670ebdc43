"""``python -m benchmarks.prediction``: what a prediction gains, and what it costs where it is idle.

A population is drawn once, with four covariates and a metric that depends on them as a row says.
Enrollment and participation in five rounds are drawn again and again, both propensities estimated
on each draw by logistic regression on the covariates, and the population's mean estimated by
Hájek's mean, by GREG and by the prediction-powered mean with boosting, its default. Counted are
how often nominal 95% intervals hold the mean, how wide they are, the squared errors, and whether
the prediction-powered mean errs more than Hájek's on the same draws by more than chance.

Results go to benchmarks/results/prediction.json, the docs' table to docs/_static/prediction.md.
They are saved twenty times on the way: any of these is a smaller study of the same kind.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit
from threadpoolctl import threadpool_limits

from fedipw.evaluation.estimators import EVERYONE, GregMean, Group, HajekMean, population_means
from fedipw.evaluation.prediction import CrossFitted, PredictionPoweredMean, Regressor
from fedipw.lab.files import environment
from fedipw.lab.two_phase import fitted_two_phase

RESULT = Path(__file__).parent / "results" / "prediction.json"
TABLE = Path(__file__).parents[1] / "docs" / "_static" / "prediction.md"
ROUNDS, CYCLES = 5, 20
NAMES = {"hajek": "Hájek", "greg": "GREG", "prediction-powered": "prediction-powered"}


@dataclass(frozen=True)
class World:
    """A population, and how its metric depends on the covariates."""

    metric: str
    size: int
    draws: int


WORLDS = (
    World("unrelated", 3000, 1000),
    World("nonlinear", 3000, 1000),
    World("linear", 3000, 200),
    World("nonlinear, 0 or 1", 3000, 200),
    World("unrelated", 600, 1000),
    World("nonlinear", 600, 1000),
)


def population(world: World) -> tuple[np.ndarray, np.ndarray]:
    """Return covariates (N, 4) and the metric in every round, (N, R)."""
    rng, n = np.random.default_rng(7), world.size
    Z = np.column_stack(
        [rng.normal(size=(n, 2)), rng.gamma(2.0, size=n) - 2.0, rng.random(n) < 0.4]
    )
    bent = 2.0 * np.sin(2.0 * Z[:, 0]) + 1.5 * (Z[:, 1] > 0.0) * Z[:, 3] + Z[:, 1] ** 2
    mean = {"unrelated": np.zeros(n), "linear": Z[:, 0] + Z[:, 1]}.get(world.metric, bent)
    y = (mean + rng.normal(size=n))[:, None] + 0.5 * rng.normal(size=(n, ROUNDS))
    return Z, (y > 1.0).astype(float) if world.metric.endswith("0 or 1") else y


def draw(Z: np.ndarray, y: np.ndarray, seed: int) -> dict[str, Any]:
    """Return estimate, lower and upper end of each mean less the truth, and the power."""
    rng = np.random.default_rng([seed, len(Z)])
    odds = -1.2 + 0.6 * Z[:, 0] - 0.4 * Z[:, 1] + 0.3 * Z[:, 3]
    enrolled = rng.random(len(Z)) < expit(odds)
    ids = np.flatnonzero(enrolled)
    x = rng.normal(size=(ROUNDS, len(ids)))
    replied = rng.random(x.shape) < expit(-0.8 + 0.5 * x + 0.4 * Z[ids, 0])
    sample = fitted_two_phase(
        Z, enrolled, np.column_stack([np.tile(Z[ids], (ROUNDS, 1)), x.ravel()]),
        np.tile(ids, ROUNDS), np.repeat(np.arange(ROUNDS), len(ids)), replied=replied.ravel(),
    )  # fmt: skip
    values = y[ids][sample.client, sample.round]
    fit = CrossFitted.of(Regressor.named("boosting"), Z[ids], sample, values, seed=seed)
    means = {EVERYONE: np.array([model.at(Z).mean() for model in fit.models])}
    powered = PredictionPoweredMean.tuned(fit, means, sample, values, [Group()])
    greg, truth = GregMean(Z[ids], Z.mean(axis=0)), float(y.mean())
    found = population_means(sample, values, [HajekMean(), greg, powered])
    ends: dict[str, Any] = {
        f.estimator: (f.estimate - truth, f.low - truth, f.high - truth) for f in found
    }
    return ends | {"power": powered.powers[EVERYONE], "clients": found[0].clients}


def row(world: World, seconds: float, made: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row of the table."""
    out: dict[str, Any] = {
        "metric": world.metric, "population": world.size, "draws": len(made), "seconds": seconds,
        "clients": float(np.mean([m["clients"] for m in made])),
        "power": float(np.median([m["power"] for m in made])),
    }  # fmt: skip
    errors = {name: np.array([m[name] for m in made]) for name in NAMES}
    hajek = errors["hajek"]
    usual = float((hajek[:, 2] - hajek[:, 1]).mean())
    for name, e in errors.items():
        worse = e[:, 0] ** 2 - hajek[:, 0] ** 2
        spread = float(worse.std(ddof=1) / np.sqrt(len(worse)))
        out[name] = {
            "coverage": float(((e[:, 1] <= 0.0) & (e[:, 2] >= 0.0)).mean()),
            "mean_width": float((e[:, 2] - e[:, 1]).mean()),
            "width_over_hajek": float((e[:, 2] - e[:, 1]).mean()) / usual,
            "bias": float(e[:, 0].mean()),
            "rmse_over_hajek": float(np.sqrt((e[:, 0] ** 2).mean() / (hajek[:, 0] ** 2).mean())),
            # of squared error beyond Hájek's on the same draws, in standard errors
            "worse_than_hajek": float(worse.mean() / spread) if spread else 0.0,
        }  # fmt: skip
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for the docs."""
    names = [
        "metric",
        "N",
        "respondents",
        "draws",
        "power",
        *(f"{n}, coverage" for n in NAMES.values()),
    ]
    names += [f"{n}, {k}" for k in ("width", "error") for n in list(NAMES.values())[1:]]
    lines = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    for r in rows:
        parts = [
            *(f"{100 * r[name]['coverage']:.1f}" for name in NAMES),
            *(f"{r[name][key]:.3f}" for key in ("width_over_hajek", "rmse_over_hajek")
              for name in ("greg", "prediction-powered")),
        ]  # fmt: skip
        lines.append(
            f"| {r['metric']} | {r['population']} | {r['clients']:.0f} | {r['draws']} | "
            f"{r['power']:.2f} | " + " | ".join(parts) + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, help="of every row, in place of its own number")
    parser.add_argument("--rows", type=int, nargs="*", help="these alone; others stay as saved")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    chosen = list(range(len(WORLDS))) if arguments.rows is None else arguments.rows
    rows: dict[int, Any] = {}
    if arguments.rows is not None:
        rows = dict(enumerate(json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]))
    made: dict[int, list[dict[str, Any]]] = {k: [] for k in chosen}
    seconds = dict.fromkeys(chosen, 0.0)
    with threadpool_limits(1):
        for cycle, k in product(range(CYCLES), chosen):
            start, (Z, y) = time.process_time(), population(WORLDS[k])
            part = (arguments.draws or WORLDS[k].draws) // CYCLES
            made[k] += [draw(Z, y, seed) for seed in range(cycle * part, (cycle + 1) * part)]
            seconds[k] += time.process_time() - start
            rows[k] = row(WORLDS[k], seconds[k], made[k])
            known = [rows[j] for j in sorted(rows)]
            result = {"nominal": 0.95, "rounds": ROUNDS, "seeds": "0 to draws - 1", "rows": known}
            saved = json.dumps(result | environment(), indent=2) + "\n"
            arguments.out.write_text(saved, encoding="utf-8")
            arguments.table.write_text(table(known), encoding="utf-8")
            print(json.dumps(rows[k]), flush=True)


if __name__ == "__main__":
    main()
