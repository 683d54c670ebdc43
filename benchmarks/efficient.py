"""``python -m benchmarks.efficient``: the efficient scheme against the efficiency bound (T9).

Mean excess loss of each scheme's limit over many seeds, over the mean of the bound; and of models
trained for 600 rounds. On the testbed, on one whose enrollment is no logistic model, and on another
population. Numbers go to benchmarks/results/efficient.json, a figure to docs/_static.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from fedipw.calibration import Distance, Entropy, InverseLogit, Linear
from fedipw.lab.files import environment
from fedipw.lab.mechanisms import (
    DailyParticipation,
    EnrollmentMechanism,
    LogisticEnrollment,
    MarkovAvailability,
    ParticipationMechanism,
    enrollment_draw,
)
from fedipw.lab.mechanisms.base import score_of
from fedipw.lab.scenario import Scenario
from fedipw.lab.style import new_figure, styled
from fedipw.lab.testbed import Streams, Testbed
from fedipw.lab.theory import FederatedLogistic, efficiency_bound, redrawn_variance, target_weights
from fedipw.numerics.threads import limit_threads
from fedipw.selection.coded import TableSettings
from fedipw.selection.enrollment import TableEnrollment
from fedipw.tables.population import Population
from fedipw.weighting.balance import Balance

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

HERE = Path(__file__).parent
RESULT = HERE / "results" / "efficient.json"
FIGURE = HERE.parent / "docs" / "_static" / "efficient.png"
L2 = 0.05
SHOWN = {
    "oracle": "true probabilities",
    "fedipw": "logistic model of Z",
    "entropy": "entropy on Z",
    "inverse-logit": "inverse-logit on Z",
    "rich entropy": "entropy on the rich map",
    "rich linear": "linear on the rich map",
    "efficient": "efficient",
}


@dataclass(frozen=True)
class ComplementaryLogLog:
    """Enrollment by P = 1 - exp(-exp(a + score)): no logistic model is right."""

    coefficients: tuple[float, float] = (0.7, 0.55)
    rate: float = 0.5

    def __call__(self, population: Population) -> FloatArray:
        score = score_of(population, {"z1": self.coefficients[0], "z2": self.coefficients[1]})
        low, high = -20.0, 20.0
        for _ in range(100):  # bisection for the mean rate
            middle = 0.5 * (low + high)
            mean = float(np.mean(-np.expm1(-np.exp(middle + score))))
            low, high = (middle, high) if mean < self.rate else (low, middle)
        return np.asarray(-np.expm1(-np.exp(low + score)))


@dataclass(frozen=True)
class Variant:
    """A population and how it is selected."""

    name: str
    testbed: Testbed
    enrollment: EnrollmentMechanism
    participation: ParticipationMechanism


def variants(size: int) -> tuple[Variant, ...]:
    other = Testbed(size=size, design_seed=777, features=8, loadings=(0.6, 1.2, 0.8))
    skew = LogisticEnrollment(coefficients={"z1": 0.5, "z2": 0.9, "z3": -0.6})
    return (
        Variant("testbed", Testbed(size=size), LogisticEnrollment(), DailyParticipation()),
        Variant(
            "misspecified enrollment",
            Testbed(size=size),
            ComplementaryLogLog(),
            DailyParticipation(),
        ),
        Variant("other population", other, skew, MarkovAvailability()),
    )


def limits(
    seed: int, variant: Variant, schemes: Sequence[str] = tuple(SHOWN), draws: int = 20
) -> dict[str, float]:
    """Return the excess loss of each scheme's limit, participation averaged out, and the bound.

    ``draws`` of every client's data estimate the variance in the bound, without bias from two on.
    """
    streams = Streams.of(seed)
    drawn = variant.testbed.draw(streams.population)
    prob = variant.enrollment(drawn.population)
    population = drawn.population.with_enrolled(enrollment_draw(prob, streams.enrollment))
    target = FederatedLogistic(drawn.clients, L2, target_weights(drawn.clients))
    best = target.minimum()
    inside = population.enrolled
    stage = TableEnrollment(population, ".", settings=TableSettings())
    enrolled = np.ones(population.enrolled_size, dtype=np.bool_)

    def excess(weights: FloatArray) -> float:
        everyone = np.zeros(len(inside))
        everyone[inside] = weights
        objective = FederatedLogistic(drawn.clients, L2, everyone)
        return float(target.losses(objective.minimum(best.point).point)[0] - best.value)

    def calibrated(kind: str, distance: Distance | InverseLogit) -> FloatArray:
        balance = Balance.of(stage.balance(kind, enrolled), enrolled, population.listed)
        return balance.enrollment_weights(balance.calibration(distance))

    weights: dict[str, Callable[[], FloatArray]] = {
        "oracle": lambda: 1.0 / prob[inside],
        "fedipw": lambda: 1.0 / stage.fitted(enrolled, required=True).prob,
        "entropy": lambda: calibrated("main", Entropy()),
        "inverse-logit": lambda: calibrated("main", InverseLogit()),
        "rich entropy": lambda: calibrated("rich", Entropy()),
        "rich linear": lambda: calibrated("rich", Linear()),
        "efficient": lambda: calibrated("rich", InverseLogit()),
    }

    rng = np.random.default_rng([seed, 1])
    variance = redrawn_variance(
        variant.testbed, population.matrix(), best.point, L2, rng, draws=draws
    )
    found = {name: excess(weights[name]()) for name in schemes}
    return {**found, "bound": efficiency_bound(target, prob, variance)}


def trained(
    seed: int, variant: Variant, methods: tuple[str, ...] = ("fedipw", "efficient")
) -> dict[str, float]:
    """Return the excess loss of the last model after 600 rounds."""
    scenario = Scenario(
        seed=seed,
        methods=methods,
        population=variant.testbed,
        enrollment=variant.enrollment,
        participation=variant.participation,
    )
    run = scenario.simulation(limits=False)
    run.advance(scenario.rounds)
    target, history = scenario.objective(run.federation), run.history()
    best = target.minimum()
    out: dict[str, float] = {}
    for method in history.methods:
        models = np.stack([history.of(method)[-1], history.tail_average(method)])
        last, tail = target.losses(models) - best.value
        out |= {f"{method}, last model": float(last), f"{method}, tail average": float(tail)}
    return out


def table(
    work: Callable[..., dict[str, float]], variant: Variant, seeds: int, pool: Any
) -> dict[str, FloatArray]:
    rows = list(pool.map(partial(work, variant=variant), range(seeds), chunksize=5))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def ratios(values: dict[str, FloatArray], bound: FloatArray) -> dict[str, dict[str, float]]:
    """Return mean over mean bound, with a standard error by linearisation."""
    out = {}
    for name, excess in values.items():
        if name != "bound":
            ratio = excess.mean() / bound.mean()
            paired = excess - ratio * bound if len(bound) == len(excess) else excess
            error = paired.std(ddof=1) / bound.mean() / np.sqrt(len(paired))
            out[name] = {"mean": excess.mean(), "ratio": ratio, "standard_error": error}
    return {k: {n: float(x) for n, x in v.items()} for k, v in out.items()}


def _setup() -> None:
    limit_threads(1)
    threadpool_limits(1)


def measured(seeds: int, trained_seeds: int, sizes: Sequence[int]) -> dict[str, Any]:
    result: dict[str, Any] = {"seeds": seeds, "trained_seeds": trained_seeds, "variants": {}}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=_setup) as pool:
        for size in sizes:
            for variant in variants(size):
                limit = table(limits, variant, seeds, pool)
                entry = {
                    "size": size,
                    "bound": float(limit["bound"].mean()),
                    "limit": ratios(limit, limit["bound"]),
                }
                if size == sizes[0]:
                    after = table(trained, variant, trained_seeds, pool)
                    entry["trained"] = ratios(after, limit["bound"][:trained_seeds])
                result["variants"][f"{variant.name}, N = {size}"] = entry
                _print(variant.name, entry)
    return result


def _print(name: str, entry: dict[str, Any]) -> None:
    print(f"{name}, N = {entry['size']}: bound {entry['bound']:.3g}")
    for kind in ("limit", "trained"):
        for method, row in entry.get(kind, {}).items():
            print(f"  {kind:8s}{method:26s}{row['ratio']:7.3f} +- {row['standard_error']:.3f}")


def draw(result: dict[str, Any]) -> None:
    with styled():
        names = [k for k, v in result["variants"].items() if "trained" in v]
        figure = new_figure(9.4, 3.6)
        axes = figure.subplots(1, len(names), sharey=True)
        for ax, name in zip(axes, names, strict=True):
            entry = result["variants"][name]
            rows = [entry["limit"][m] for m in SHOWN]
            rows.append(entry["trained"]["efficient, last model"])
            labels = [*SHOWN.values(), "efficient, trained"]
            colours = ["#999999"] * (len(SHOWN) - 1) + ["#0072B2", "#D55E00"]
            places = np.arange(len(rows))[::-1]
            ax.barh(
                places,
                [r["ratio"] for r in rows],
                xerr=[1.96 * r["standard_error"] for r in rows],
                color=colours,
                height=0.62,
                error_kw={"lw": 1.0, "capsize": 2},
            )
            ax.axvline(1.0, color="black", lw=1.0, ls="--")
            ax.set_yticks(places, labels)
            ax.set_title(name, loc="left", fontsize=9)
            ax.set_xlabel("mean excess loss / efficiency bound")
            ax.grid(axis="y", visible=False)
        figure.savefig(FIGURE, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--trained-seeds", type=int, default=100)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 4000])
    given = parser.parse_args()
    result = {**measured(given.seeds, given.trained_seeds, given.sizes), **environment()}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    draw(result)


if __name__ == "__main__":
    main()
