"""``python -m benchmarks.moments``: calibration to noisy moments, many seeds (panel D at length).

Distance of each method's limit to the best model by noise of the population moments, for three
strengths of enrollment, with the ratio of noise-aware calibration to the better of exact
calibration and no enrollment correction and a paired 95% interval of
distance(noise-aware) - 1.05 distance(better). Numbers go to benchmarks/results/moments.json.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from fedipw.lab.figure1 import NOISE, NOISY_METHODS, noisy_limits
from fedipw.lab.files import environment
from fedipw.lab.mechanisms import LogisticEnrollment
from fedipw.lab.scenario import Scenario
from fedipw.numerics.threads import limit_threads

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

RESULT = Path(__file__).parent / "results" / "moments.json"
STRENGTHS = (1.0, 0.5, 0.0)
ROUNDS = 40  # enough for participation to average out in the limit weights


def distances(task: tuple[float, int]) -> FloatArray:
    """Return distances by method and noise, NaN where infeasible."""
    strength, seed = task
    scenario = Scenario(seed=seed, rounds=ROUNDS, methods=("participation-only",))
    scenario = replace(scenario, enrollment=LogisticEnrollment(strength=strength))
    run = scenario.simulation()
    run.advance(ROUNDS)
    found = noisy_limits(run, scenario.objective(run.federation), seed)
    return np.stack([limit.distance for limit in found])


def compared(values: FloatArray) -> list[dict[str, Any]]:
    """Return one row per noise level from (seeds, methods, noise)."""
    rows = []
    for k, noise in enumerate(NOISE):
        at = {m: values[:, j, k] for j, m in enumerate(NOISY_METHODS)}
        means = {m: float(np.nanmean(v)) for m, v in at.items()}
        aware = at["calibrated-noise-aware"]
        others = ("participation-only", "calibrated-entropy", "calibrated-quadratic")
        better = min(others, key=lambda m: means[m])
        both = ~np.isnan(aware) & ~np.isnan(at[better])
        excess = aware[both] - 1.05 * at[better][both]
        error = 1.96 * excess.std(ddof=1) / np.sqrt(both.sum())
        rows.append(
            {
                "noise": noise,
                "mean_distance": means,
                "infeasible": {m: int(np.isnan(v).sum()) for m, v in at.items()},
                "better": better,
                "ratio": float(aware[both].mean() / at[better][both].mean()),
                "above_1.05": [float(excess.mean() - error), float(excess.mean() + error)],
            }
        )
    return rows


def _setup() -> None:
    limit_threads(1)
    threadpool_limits(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    seeds = parser.parse_args().seeds
    result: dict[str, Any] = {"seeds": seeds, "strengths": {}}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=_setup) as pool:
        for strength in STRENGTHS:
            tasks = [(strength, seed) for seed in range(seeds)]
            rows = compared(np.stack(list(pool.map(distances, tasks, chunksize=5))))
            result["strengths"][str(strength)] = rows
            print(f"enrollment strength {strength:g}")
            for row in rows:
                shown = "  ".join(f"{m} {v:.3f}" for m, v in row["mean_distance"].items())
                low, high = row["above_1.05"]
                print(f"  {row['noise']:.2f}  {shown}  ratio {row['ratio']:.3f}"
                      f"  [{low:+.4f}, {high:+.4f}]")  # fmt: skip
    RESULT.write_text(json.dumps({**result, **environment()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
