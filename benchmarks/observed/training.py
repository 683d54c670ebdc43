"""Models of an outcome, trained by those who reply and judged on everybody.

Every seed draws a bootstrap population: persons with replacement, with their flags, replies and
data. One row of data a person, so a client is a person; 100 rounds of one full gradient step; the
model averaged over the last fifth of the rounds. The rounds observed are repeated.

Fixed beforehand: the label of the survey is high blood pressure and its features are the eight
other outcomes, with the demographic covariates as features too in a second scenario; in a third
replies are drawn by how often a person uses the internet. Of OULAD the label is whether the course
was passed and the features are what is known at registration, in presentations of October 2014, the
last of each module; GGG is left out, since in some bootstrap populations of its 749 registrations
the model of participation has no maximum. Everybody is enrolled there, so methods that need a model
of enrollment are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.special import expit

from fedipw.lab.comparison import mean_interval, paired
from fedipw.lab.open_data import COVARIATES, MichiganPopulation, OuladPopulation, SurveyReplies
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import PopulationModel
from fedipw.numerics import FloatArray

ROUNDS = 100
METHODS = ("fedavg", "participation-only-hajek", "fedipw-hajek", "efficient-hajek", "augmented",
           "augmented-online")  # fmt: skip
NEEDS_ENROLLMENT = ("fedipw-hajek",)
BEST = "best for everybody"  # the minimum of the loss over everybody, for the scale
HEALTH = MichiganPopulation(path=Path()).features
PRESENTATIONS = tuple(f"{module}-2014J" for module in ("AAA", "BBB", "CCC", "DDD", "EEE", "FFF"))
MEASURES: Final[Mapping[str, str]] = {
    "excess_loss": "excess loss",
    "accuracy": "accuracy",
    "gap": "mean prediction less share",
    "subgroup_gap": "largest gap of a subgroup",
    "subgroup_accuracy": "least accuracy of a subgroup",
}


@dataclass(frozen=True)
class Case:
    """A population, its subgroups and the methods run on it."""

    title: str
    population: PopulationModel
    subgroups: tuple[str, ...]
    methods: tuple[str, ...] = METHODS


def cases(data: Path) -> dict[str, Case]:
    """Return the scenarios by name."""
    file, age = data / "mibrfss.csv", ("age", "income")
    everything = f"{HEALTH} + {' + '.join(COVARIATES.values())}"
    one, two = (
        MichiganPopulation(path=file, bootstrap=True, features=features)
        for features in (HEALTH, everything)
    )
    often = MichiganPopulation(path=file, bootstrap=True, replies=SurveyReplies.FREQUENCY)
    rest = tuple(name for name in METHODS if name not in NEEDS_ENROLLMENT)
    return {
        "survey": Case("survey, health in the model", one, age),
        "survey-demographics": Case("survey, demographics in the model too", two, age),
        "survey-frequency": Case("survey, replies drawn by frequency", often, age),
        **{
            name: Case(
                f"course {name}",
                OuladPopulation(path=data, presentation=name, bootstrap=True),
                ("education", "age"),
                rest,
            )
            for name in PRESENTATIONS
        },
    }


def judged(case: Case, seed: int, rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """Return how the model of each method serves everybody of one bootstrap population."""
    scenario = Scenario(population=case.population, methods=case.methods, rounds=rounds, seed=seed)
    run = scenario.simulation(limits=False)
    run.advance(rounds)
    target, history = scenario.objective(run.federation), run.history()
    best, clients = target.minimum(), run.federation.rows
    models = {name: history.tail_average(name) for name in case.methods} | {BEST: best.point}
    frame = run.federation.population.frame
    out = {}
    for name, theta in models.items():
        prob = expit(clients.features @ theta[:-1] + theta[-1])
        right, gap = (prob > 0.5) == clients.labels, prob - clients.labels
        parts = {
            f"{column} = {level}": (float(gap[inside].mean()), float(right[inside].mean()))
            for column in case.subgroups
            for level in sorted(frame[column].unique().to_list())
            for inside in [(frame[column] == level).to_numpy()]
        }
        out[name] = {
            "excess_loss": float(target.losses(theta)[0]) - best.value,
            "accuracy": float(right.mean()),
            "gap": float(gap.mean()),
            "subgroup_gap": max(abs(one) for one, _ in parts.values()),
            "subgroup_accuracy": min(one for _, one in parts.values()),
            "subgroups": {key: one for key, (one, _) in parts.items()},
        }
    return out


def training(data: Path, seeds: int) -> dict[str, Any]:
    """Return every scenario's means over seeds and paired differences from FedAvg."""
    return {
        "seeds": seeds,
        "rounds": ROUNDS,
        "cases": {name: summary(case, seeds) for name, case in cases(data).items()},
    }


def summary(case: Case, seeds: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return a scenario's means and paired differences."""
    found = [judged(case, seed, rounds) for seed in range(seeds)]

    def of(method: str, measure: str) -> FloatArray:
        return np.array([one[method][measure] for one in found])

    methods = {
        method: {
            measure: {
                "mean": mean_interval(of(method, measure)).mean,
                "worst": float(of(method, measure).max()),
                "against_fedavg": asdict(paired(of(method, measure), of("fedavg", measure))),
            }
            for measure in MEASURES
        }
        | {"subgroups": _subgroups([one[method]["subgroups"] for one in found])}
        for method in (*case.methods, BEST)
    }
    return {"title": case.title, "methods": methods}


def _subgroups(found: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in found for name in one)
    return {name: float(np.mean([one[name] for one in found if name in one])) for name in names}
