"""The target-population loss along a run, as its replies tell it, with an interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fedipw.audit.style import look_of
from fedipw.errors import FedIPWError
from fedipw.evaluation import Group, HajekMean, TwoPhase, fitted_two_phase, population_means
from fedipw.weighting import Target

if TYPE_CHECKING:
    import polars as pl

    from fedipw.lab.engine import History, Simulation
    from fedipw.lab.scenario import Scenario
    from fedipw.lab.theory import FederatedLogistic
    from fedipw.numerics.types import IntArray

POINTS = 20  # times at which a run is evaluated
WINDOW = 10  # last rounds that are evaluated together


def evaluations(
    scenario: Scenario, run: Simulation, target: FederatedLogistic
) -> tuple[list[dict[str, Any]], str]:
    """Return what those who replied say of the target loss, by method and round, or why not.

    Each model is evaluated in the round it enters, by the clients that reply there; ten rounds are
    taken together. The weighted mean is Hájek's with its design-based interval (E23), both stages
    fitted on the whole run, beside the plain mean and the truth, which only a simulation knows.
    """
    try:
        sample = _sample(scenario, run)
    except FedIPWError as error:
        return [], f"No interval of the target loss: {error}"
    history = run.history()
    return list(_lines(scenario, run, target, history, sample)), ""


def _sample(scenario: Scenario, run: Simulation) -> TwoPhase:
    """Return all replies of the run, drawn again from its seed."""
    process = scenario.simulation(limits=False).federation.participation
    population = run.federation.population
    rows = np.flatnonzero(population.enrolled)
    drawn = [process.advance() for _ in range(run.rounds)]
    static = np.tile(population.matrix()[rows], (run.rounds, 1))
    moving = np.concatenate([draw.covariates[rows] for draw in drawn])
    return fitted_two_phase(
        population.matrix(scenario.propensity.enrollment_columns),
        population.enrolled,
        np.column_stack([static, moving]),
        np.tile(rows, run.rounds),
        np.repeat(np.arange(run.rounds), len(rows)),
        replied=np.concatenate([draw.replied[rows] for draw in drawn]),
    )


def _lines(
    scenario: Scenario,
    run: Simulation,
    target: FederatedLogistic,
    history: History,
    sample: TwoPhase,
) -> Iterator[dict[str, Any]]:
    rows = np.flatnonzero(run.federation.population.enrolled)
    counts = run.federation.clients.counts.astype(np.float64)[rows[sample.client]]
    mean = HajekMean(counts=counts if scenario.target is Target.SAMPLE else None)
    windows = list(_windows(run.rounds, sample))
    for name in history.methods:
        iterates = history.of(name)
        losses = np.zeros(len(sample.client))  # of the model that entered the reply's round
        for index in np.unique([r for w in windows for r in w]):
            here = sample.round == index
            losses[here] = target.client_losses(iterates[index])[rows[sample.client[here]]]
        truth = target.losses(iterates)
        groups = [Group(name=str(w[-1] + 1), rounds=w) for w in windows]
        found = population_means(sample, losses, [mean], groups)
        for window, line in zip(windows, found, strict=True):
            inside = np.isin(sample.round, window)
            share = counts[inside] if scenario.target is Target.SAMPLE else None
            yield {
                "method": name,
                "round": int(window[-1]) + 1,
                "truth": float(truth[window].mean()),
                "plain": float(np.average(losses[inside], weights=share)),
                "estimate": line.estimate,
                "low": line.low,
                "high": line.high,
            }


def _windows(rounds: int, sample: TwoPhase) -> Iterator[IntArray]:
    """Yield rounds in a row, evenly over the run, in which two clients or more replied."""
    width = max(1, min(WINDOW, rounds // POINTS))
    for last in np.unique(np.linspace(width, rounds, min(POINTS, rounds // width)).astype(int)):
        window = np.arange(last - width, last)
        if len(np.unique(sample.client[np.isin(sample.round, window)])) > 1:
            yield window


def run_curves(frame: pl.DataFrame, evaluated: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of a run's page: excess loss, distance, and the loss as replies tell it."""
    labels = {
        "excess_loss": ("Excess target loss F(θ) − F*", "Lower is better; 0 is the best model."),
        "distance": ("Distance |θ − θ*|", "How far the model is from the best one."),
    }
    charts: list[dict[str, Any]] = []
    for column, (label, caption) in labels.items():
        curves = [
            {
                "name": look_of(str(method)).label,
                "round": part["round"].to_list(),
                "value": part[column].to_list(),
                "low": None,
                "high": None,
            }
            for (method,), part in frame.group_by(["method"], maintain_order=True)
        ]
        charts.append({"title": label, "caption": caption, "y_label": label, "log": True,
                       "curves": curves})  # fmt: skip
    for name in dict.fromkeys(line["method"] for line in evaluated):
        charts.append(_told(name, [line for line in evaluated if line["method"] == name]))
    return charts


def _told(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    rounds = [line["round"] for line in lines]

    def curve(label: str, key: str, *, band: bool = False) -> dict[str, Any]:
        return {
            "name": label,
            "round": rounds,
            "value": [line[key] for line in lines],
            "low": [line["low"] for line in lines] if band else None,
            "high": [line["high"] for line in lines] if band else None,
        }

    return {
        "title": f"{look_of(name).label}: target loss as those who reply tell it",
        "caption": "Each model is evaluated by the clients that reply in its round, ten rounds "
        "together. The weighted mean estimates the loss of the whole population, with a 95% "
        "interval; the plain mean is about those who reply.",
        "y_label": "Loss F(θ)",
        "log": False,
        "curves": [
            curve("Weighted mean of replies, 95% interval", "estimate", band=True),
            curve("Plain mean of replies", "plain"),
            curve("Truth", "truth"),
        ],
    }
