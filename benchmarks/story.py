"""``python -m benchmarks.story``: where weighting helps, where it does not, and what chance costs.

Runs scenarios that break the story (20 seeds, 600 rounds each) and 200 draws of the testbed for the
enrollment lottery. Results go to benchmarks/results/story.json; the docs show them.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from fedipw.combining.tail import tail_length
from fedipw.lab.files import environment
from fedipw.lab.mechanisms import DailyParticipation, LogisticEnrollment, enrollment_draw
from fedipw.lab.scenario import PropensitySettings, Scenario
from fedipw.lab.testbed import Streams, Testbed
from fedipw.lab.theory import FederatedLogistic, error_parts, lottery_term, target_weights
from fedipw.numerics.threads import limit_threads
from fedipw.selection.coded import table_model

RESULT = Path(__file__).parent / "results" / "story.json"
SEEDS, DRAWS = 20, 200
BASE = Scenario()
CASES = {
    "default": BASE,
    "opposing": replace(
        BASE, participation=DailyParticipation(coefficients={"z1": -1.0, "z2": -0.8})
    ),
    "no shift": replace(
        BASE, population=Testbed(shift=0.0, concept_shift=0.0, intercept_loadings=(0.0, 0.0, 0.0))
    ),
    "enrollment rate 0.05": replace(BASE, enrollment=LogisticEnrollment(rate=0.05)),
    "z2 missing": replace(BASE, propensity=PropensitySettings(enrollment_columns=("z1", "z3"))),
    "N = 200": replace(BASE, population=Testbed(size=200)),
    "strength 2": replace(BASE, enrollment=LogisticEnrollment(strength=2.0)),
}


def run_of(task: tuple[str, int]) -> dict[str, dict[str, float]]:
    """Return each method's limit and tail excess loss for one case and seed."""
    name, seed = task
    scenario = replace(CASES[name], seed=seed)
    run = scenario.simulation()
    run.advance(scenario.rounds)
    target, history = scenario.objective(run.federation), run.history()
    best, tail = target.minimum(), tail_length(scenario.rounds, scenario.training.tail)
    found = {}
    for method in history.methods:
        part = error_parts(target, run.limits[method], history.of(method)[-1])
        last = target.losses(history.of(method)[-tail:]) - best.value
        found[method] = {"limit": part.limit_excess_loss, "tail": float(last.mean())}
    return found


def lottery_of(task: tuple[float, int]) -> dict[str, float]:
    """Return the limit under fitted and under true enrollment probabilities, and (L3)."""
    strength, seed = task
    streams = Streams.of(seed)
    drawn = Testbed().draw(streams.population)
    prob = LogisticEnrollment(strength=strength)(drawn.population)
    enrolled = enrollment_draw(prob, streams.enrollment)
    population = drawn.population.with_enrolled(enrolled)
    fitted = table_model(population.clients).prob(population.frame)[0]
    target = FederatedLogistic(drawn.clients, BASE.training.l2, target_weights(drawn.clients))
    best = target.minimum()

    def excess(probabilities: np.ndarray) -> float:
        weighted = FederatedLogistic(drawn.clients, target.l2, enrolled / probabilities)
        return float(target.losses(weighted.minimum(best.point).point)[0] - best.value)

    return {"fitted": excess(fitted), "true": excess(prob), "term": lottery_term(target, prob)}


def main() -> None:
    """Run both studies on two processes."""
    context = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=_one_thread) as pool:
        tasks = [(name, seed) for name in CASES for seed in range(SEEDS)]
        runs = list(pool.map(run_of, tasks))
        draws = [(strength, seed) for strength in (1.0, 1.5) for seed in range(DRAWS)]
        lotteries = list(pool.map(lottery_of, draws, chunksize=10))
    cases: dict[str, Any] = {}
    for name in CASES:
        mine = [r for r, t in zip(runs, tasks, strict=True) if t[0] == name]
        cases[name] = {
            method: {k: _mean([m[method][k] for m in mine]) for k in ("limit", "tail")}
            for method in BASE.methods
        }
    lottery = {}
    for strength in (1.0, 1.5):
        part = [v for v, t in zip(lotteries, draws, strict=True) if t[0] == strength]
        gap = [v["true"] - v["fitted"] for v in part]
        lottery[str(strength)] = {
            **{k: _mean([v[k] for v in part]) for k in ("fitted", "true", "term")},
            "true_minus_fitted": _mean(gap),
            "share_fitted_better": float(np.mean(np.array(gap) > 0)),
        }
    result = {"seeds": SEEDS, "draws": DRAWS, "cases": cases, "lottery": lottery, **environment()}
    print(json.dumps(result, indent=2))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def _mean(values: list[float]) -> dict[str, float]:
    spread = np.std(values, ddof=1) / np.sqrt(len(values))
    return {"mean": float(np.mean(values)), "standard_error": float(spread)}


def _one_thread() -> None:
    limit_threads(1)
    threadpool_limits(1)


if __name__ == "__main__":
    main()
