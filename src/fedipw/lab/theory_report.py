"""What theory says of a run at hand: weight errors, floors, the bound and its conditions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from fedipw.lab.engine import Simulation
from fedipw.lab.recipes import recipe_named
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import (
    FederatedLogistic,
    ProblemConstants,
    Schedule,
    convergence_bound,
    efficiency_bound,
    first_order_floor,
    largest_floor,
    logistic_constants,
    lottery_term,
    redrawn_variance,
    residual_variance,
    sensitivity_floor,
    weight_errors,
)
from fedipw.weighting import Target

ODDS_RATIOS = (1.05, 1.1, 1.25, 1.5, 2.0)


def constants_of(
    scenario: Scenario, run: Simulation, target: FederatedLogistic
) -> ProblemConstants | None:
    """Return the constants of a run with known truth and the mean over clients as its target."""
    if not run.limits or scenario.target is not Target.CLIENT:
        return None
    least = min(limit.least_inclusion_prob for limit in run.limits.values())
    return logistic_constants(target, least, batch_size=scenario.training.batch_size)


def problem_report(
    scenario: Scenario, run: Simulation, target: FederatedLogistic, problem: ProblemConstants
) -> dict[str, Any]:
    """Return constants, the lottery term and the efficiency bound."""
    grades = {k: v.value for k, v in (problem.grades or {}).items()}
    return {
        "constants": {**asdict(problem), "grades": grades, "condition": problem.condition},
        **enrollment_costs(scenario, run, target),
        "sensitivity": sensitivity_report(run, target, problem),
    }


def sensitivity_report(
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


def enrollment_costs(
    scenario: Scenario, run: Simulation, target: FederatedLogistic
) -> dict[str, float]:
    """Return what one draw of enrollment costs on average: the oracle (L3), and at least (T9).

    Clients' gradients are drawn anew on the testbed; of real clients there is one draw, and the
    residuals of a regression on Z stand for it.
    """
    prob = run.federation.enrollment_prob
    if prob is None:
        return {}
    theta, rng = target.minimum().point, np.random.default_rng([scenario.seed, 2])
    Z = run.federation.population.matrix()
    if isinstance(scenario.population, Testbed):
        variance = redrawn_variance(scenario.population, Z, theta, target.l2, rng)
    else:
        variance = residual_variance(target.client_gradients(theta), Z)
    return {
        "lottery_term": lottery_term(target, prob),
        "efficiency_bound": efficiency_bound(target, prob, variance),
    }


def method_report(
    scenario: Scenario,
    run: Simulation,
    target: FederatedLogistic,
    problem: ProblemConstants,
    method: str,
) -> dict[str, Any]:
    """Return a method's weight errors, first-order floor and bound."""
    ratio = target.clients.size * run.limits[method].over_enrollment
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
            "transient": bound.transient,
            "variance": bound.variance,
            "drift": bound.drift,
            "floor": bound.floor,
            "total": bound.total,
            "statement": unequal + bound.statement,
        },
    }
