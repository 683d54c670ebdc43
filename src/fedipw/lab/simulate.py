"""``fedipw simulate``: one scenario from a file, with checkpoints, a history and a summary.

The summary says how far each method came, what theory says of it, and how the target loss looks to
a server that has the replies alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.errors import FedIPWError, InputError, UnwritableError
from fedipw.evaluation.estimators import Group, HajekMean, population_means
from fedipw.evaluation.sample import TwoPhase
from fedipw.lab.engine import Simulation
from fedipw.lab.files import environment, fingerprint_of
from fedipw.lab.recipes import recipe_named
from fedipw.lab.run_page import run_page
from fedipw.lab.scenario import Scenario, Target
from fedipw.lab.theory import (
    FederatedLogistic,
    ProblemConstants,
    Schedule,
    convergence_bound,
    enrollment_costs,
    error_parts,
    first_order_floor,
    largest_floor,
    logistic_constants,
    sensitivity_floor,
    weight_errors,
)
from fedipw.lab.two_phase import fitted_two_phase
from fedipw.storage.atomic import check_directory, written_directory
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.tables.table import check_results

if TYPE_CHECKING:
    from fedipw.numerics import IntArray

_CHECKPOINTS = 20  # about this many over a run
ODDS_RATIOS = (1.05, 1.1, 1.25, 1.5, 2.0)
POINTS = 20  # times at which a run is evaluated
WINDOW = 10  # last rounds that are evaluated together


def simulate(
    scenario: Scenario,
    out: Path,
    *,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run a scenario and write history, summary, checkpoint and page; returns the summary.

    A run killed at any moment goes on with ``resume`` and ends in the same bytes as one that was
    never stopped. Without ``resume`` an unfinished run of the same directory is an error, so that
    nothing is lost by accident.
    """
    check_directory(out)
    checkpoint = out / "checkpoint"
    fingerprint = fingerprint_of(scenario.settings())
    run = scenario.simulation(limits=scenario.has_limits)
    if resume:
        state = load_checkpoint(checkpoint, fingerprint)
        if state is None:
            raise InputError(f"Nothing to resume: no checkpoint in {checkpoint}.")
        run.restore(state)
    elif (checkpoint / "checkpoint.npz").exists() and not (out / "summary.json").exists():
        raise InputError(
            f"{out} holds an unfinished run. Add --resume to go on with it, or choose another "
            "--out."
        )
    every = max(1, scenario.rounds // _CHECKPOINTS)

    def after(done: int) -> None:
        if done % every == 0 or done == scenario.rounds:
            save_checkpoint(checkpoint, run.state(), fingerprint)
        if progress is not None:
            progress(done, scenario.rounds)

    try:
        if not resume:
            save_checkpoint(checkpoint, run.state(), fingerprint)
            (out / "summary.json").unlink(missing_ok=True)  # from here on this run is unfinished
        run.advance(scenario.rounds - run.rounds, after=after)
        return _written(scenario, run, out)
    except FedIPWError as error:
        # without space the run can go on later; else it would fail again where it did
        if not (resume or isinstance(error, UnwritableError)):
            (checkpoint / "checkpoint.npz").unlink(missing_ok=True)
        for made in (checkpoint, out):
            with suppress(OSError):  # where something is in it
                made.rmdir()
        raise


def _written(scenario: Scenario, run: Simulation, out: Path) -> dict[str, Any]:
    target = scenario.objective(run.federation)
    frame = run.history().frame(target, target.minimum().point)
    evaluated, missing = _evaluations(scenario, run, target)
    summary = _summary(scenario, run, target, frame) | {"evaluation": evaluated}
    page = run_page(summary, frame, scenario.settings(), missing)
    check_results(frame, out / "history.parquet")
    with written_directory(out) as stage:
        frame.write_parquet(stage / "history.parquet")
        (stage / "summary.json").write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
        (stage / "index.html").write_text(page, encoding="utf-8")
    return summary


def _summary(
    scenario: Scenario, run: Simulation, target: FederatedLogistic, frame: pl.DataFrame
) -> dict[str, Any]:
    history, best = run.history(), target.minimum()
    population, problem = run.federation.population, _constants(scenario, run, target)
    methods = {}
    for name in history.methods:
        mine = frame.filter(pl.col("method") == name)
        average = history.tail_average(name, scenario.training.tail)
        row: dict[str, Any] = {
            "excess_loss": mine["excess_loss"][-1],
            "distance": mine["distance"][-1],
            "tail_average_excess_loss": float(target.losses(average)[0] - best.value),
            "mean_effective_replies": mine["effective_replies"].drop_nans().mean(),
            "mean_weight_sum": mine["weight_sum"].drop_nans().mean(),
            "trimmed": int(mine["trimmed"].sum()),
            "theta": history.of(name)[-1].tolist(),
        }
        if name in run.limits:
            parts = error_parts(target, run.limits[name], history.of(name)[-1])
            row["errors"] = {k: getattr(parts, k) for k in ("optimisation", "lottery", "bias")}
            if problem is not None:
                row["theory"] = _method_theory(scenario, run, target, problem, name)
        methods[name] = row
    return {
        "seed": scenario.seed,
        "rounds": history.rounds,
        "skipped_rounds": int(history.skipped.sum()),
        "population_size": population.listed,
        "enrolled_size": population.enrolled_size,
        "mean_replies": float(history.replies.mean()),
        "target": scenario.target.value,
        "best_loss": best.value,
        "best_theta": best.point.tolist(),
        "theory": {} if problem is None else _problem_theory(scenario, run, target, problem),
        "methods": methods,
        **environment(),
    }


def _constants(
    scenario: Scenario, run: Simulation, target: FederatedLogistic
) -> ProblemConstants | None:
    """Return the constants of a run with known truth and the mean over clients as its target."""
    if not run.limits or scenario.target is not Target.CLIENT:
        return None
    least = min(limit.least_inclusion_prob for limit in run.limits.values())
    return logistic_constants(target, least, batch_size=scenario.training.batch_size)


def _problem_theory(
    scenario: Scenario, run: Simulation, target: FederatedLogistic, problem: ProblemConstants
) -> dict[str, Any]:
    """Return constants, the lottery term, the efficiency bound and the sensitivity."""
    grades = {k: v.value for k, v in (problem.grades or {}).items()}
    return {
        "constants": {**asdict(problem), "grades": grades, "condition": problem.condition},
        **enrollment_costs(target, run.federation, scenario.population, scenario.seed),
        "sensitivity": _sensitivity(run, target, problem),
    }


def _sensitivity(
    run: Simulation, target: FederatedLogistic, problem: ProblemConstants
) -> list[dict[str, float | None]]:
    """Return what unobserved drivers of enrollment could do to training, by odds ratio."""
    prob = run.federation.enrollment_prob
    if prob is None:
        return []
    found = [sensitivity_floor(target, prob, odds_ratio) for odds_ratio in ODDS_RATIOS]
    return [
        {
            "odds_ratio": one.odds_ratio,
            "weight_error": one.weight_error,
            "floor": one.floor,
            "largest_floor": least if np.isfinite(least) else None,
        }
        for one in found
        for least in [largest_floor(one.weight_error, problem)]
    ]


def _method_theory(
    scenario: Scenario,
    run: Simulation,
    target: FederatedLogistic,
    problem: ProblemConstants,
    method: str,
) -> dict[str, Any]:
    """Return a method's weight errors, first-order floor and bound."""
    ratio = target.clients.size * run.limits[method].over_enrollment
    if not (ratio > 0.0).all():
        return {"bound": {"statement": "outside the theorem: some limit weights are 0 or below"}}
    errors, training = weight_errors(ratio), scenario.training
    schedule = Schedule(
        local_steps=training.local_steps,
        step_size=training.step_size,
        rounds=run.rounds,
        server_step=training.server_step,
    )
    start = np.zeros(target.clients.n_parameters)
    gap = float(target.losses(start)[0] - target.minimum().value)
    bound = convergence_bound(problem, schedule, initial_gap=gap, weight_error=errors.raw)
    unequal = "outside the theorem: clients differ in local steps; " * bool(
        training.steps_coefficients
    )
    if recipe_named(method).rules or recipe_named(method).memory:
        unequal = "outside the theorem, which is about weighted sums alone; " + unequal
    return {
        "weight_error": asdict(errors),
        "first_order_floor": first_order_floor(target, ratio),
        "bound": {
            **{k: getattr(bound, k) for k in ("transient", "variance", "drift", "floor", "total")},
            "statement": unequal + bound.statement,
        },
    }


def _evaluations(
    scenario: Scenario, run: Simulation, target: FederatedLogistic
) -> tuple[list[dict[str, Any]], str]:
    """Return what replies say of the target loss, by method and round, or why not.

    Each model is evaluated in the round it enters, by the clients that reply there; ten rounds are
    taken together. The weighted mean is Hájek's with its design-based interval (E23), both stages
    fitted on the whole run, beside the plain mean and the truth, which only a simulation knows.
    """
    try:
        sample = _sample(scenario, run)
    except FedIPWError as error:
        return [], f"No interval of the target loss: {error}"
    return list(_lines(scenario, run, target, sample)), ""


def _sample(scenario: Scenario, run: Simulation) -> TwoPhase:
    """Return all replies of the run, drawn again from its seed, in the columns of both stages."""
    stages, population = scenario.stages(run.federation), run.federation.population
    process = scenario.simulation(limits=False).federation.participation
    if scenario.invitations is not None and scenario.invitations.learns:
        raise InputError(
            f"invitations followed what {scenario.invitations.method} had learnt before each round."
        )
    learner, rows = stages.participation(), np.flatnonzero(population.enrolled)
    asked, prob = [], []  # of each round: how many clients, and how likely they were to be
    for _ in range(run.rounds):
        draw = process.advance()
        learner.open(run.known(draw, rows))
        invited = run.invited(draw.index)
        flags = np.ones(len(draw.replied), dtype=np.bool_) if invited is None else invited.flags
        among = rows[flags[rows]]
        learner.close((draw.replied & flags)[rows])
        asked.append(len(among))
        prob.append(np.ones(len(among)) if invited is None else invited.prob[among])
    X, replied, client = learner.steps[0].store.rounds(0, run.rounds).matrix()
    Z = stages.enrollment.coded.design.rows(population.frame, "population table").columns.T
    found = fitted_two_phase(
        Z,
        population.enrolled,
        X,
        client,
        np.repeat(np.arange(run.rounds), asked),
        replied=replied,
    )
    return replace(found, prob=found.prob * np.concatenate(prob)[replied])


def _lines(
    scenario: Scenario, run: Simulation, target: FederatedLogistic, sample: TwoPhase
) -> Iterator[dict[str, Any]]:
    history = run.history()
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
