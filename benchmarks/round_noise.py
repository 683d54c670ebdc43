"""Noise of a round's weighted mean of updates at the target minimiser, under some invitations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedipw.weighting.invitations import InclusionProbabilities, systematic_sample
from fedipw.weighting.methods import method_named
from fedipw.weighting.weigher import EnrollmentState

if TYPE_CHECKING:
    from fedipw.lab.scenario import Scenario
    from fedipw.numerics import BoolArray, FloatArray, IntArray

FLOOR = 0.1
UNIFORM, PROPORTIONAL, NEYMAN = "uniform", "proportional", "proportional, over root of reply"
DRAWS, ROUNDS = 500, 400  # of invitations, and of rounds, behind a variance


class Clients(NamedTuple):
    """The enrolled at the target minimiser, and rounds of their true participation."""

    weights: FloatArray  # omega, (n,) those of efficient
    gradients: FloatArray  # (n, P)
    residuals: FloatArray  # (n, P) of their regression on the balance columns, by omega
    prob: FloatArray  # (R, n) of a reply
    replied: BoolArray  # (R, n)


def clients_of(scenario: Scenario, rounds: int = ROUNDS) -> Clients:
    """Return the enrolled of a scenario's draw."""
    scenario = replace(scenario, methods=("efficient",))
    federation = scenario.simulation(limits=False).federation
    target, stages = scenario.objective(federation), scenario.stages(federation)
    population = federation.population
    balance = stages.balance("rich")
    size = population.listed
    state = EnrollmentState(
        unit_ids=population.unit_ids, sample_counts=np.ones(size, dtype=np.int64),
        enrolled=population.enrolled, prob=np.ones(size), population_size=float(size),
        balances={"rich": balance},
    )  # fmt: skip
    omega = method_named("efficient").at(state).standing()
    assert omega is not None
    inside = np.flatnonzero(population.enrolled)
    q, g = omega[inside], target.client_gradients(target.minimum().point)[inside]
    b = np.column_stack([np.ones(len(inside)), balance.standardised(inside)])
    weighted = b * q[:, None]
    slopes = np.linalg.lstsq(weighted.T @ b, weighted.T @ g)[0]
    draws = [federation.participation.advance() for _ in range(rounds)]
    return Clients(
        weights=q,
        gradients=g,
        residuals=g - b @ slopes,
        prob=np.stack(
            [d.participation_prob[inside] for d in draws if d.participation_prob is not None]
        ),
        replied=np.stack([d.replied[inside] for d in draws]),
    )


def designs(clients: Clients, number: int) -> dict[str, FloatArray]:
    """Return inclusion probabilities of so many invitations, (n,), by the name of their design."""
    q = clients.weights
    scores = {UNIFORM: np.ones(len(q)), PROPORTIONAL: q, NEYMAN: q / np.sqrt(clients.prob.mean(0))}
    return {name: InclusionProbabilities.of(s, number, FLOOR).prob(s) for name, s in scores.items()}


def horvitz_thompson_variance(
    clients: Clients, values: FloatArray, prob: FloatArray, rng: np.random.Generator
) -> float:
    r"""Return the trace of the variance of a round's Horvitz–Thompson mean, given enrollment.

    .. math:: \text{Var}_S\Big(\sum_{i \in S} \frac{\omega_i y_i}{a_i}\Big) + \sum_i
       \frac{\omega_i^2 |y_i|^2}{a_i} \Big(\frac{1}{\pi_i} - 1\Big)

    The part of invitations is by draws of the design, that of replies by this formula with the
    mean of 1/pi over rounds.
    """
    each = clients.weights[:, None] * values / prob[:, None]
    totals = np.stack([each[_drawn(prob, rng)].sum(axis=0) for _ in range(DRAWS)])
    odds = (1.0 / clients.prob).mean(axis=0) - 1.0
    return float(totals.var(axis=0).sum() + (prob * odds) @ (each**2).sum(axis=1))


def self_normalised_error(
    clients: Clients, values: FloatArray, prob: FloatArray, rng: np.random.Generator
) -> float:
    """Return the mean squared error of a round's Hájek mean about the mean of the enrolled."""
    q, errors = clients.weights, []
    aim = q @ values / q.sum()
    for reply, replied in zip(clients.prob, clients.replied, strict=True):
        rows = _drawn(prob, rng)
        rows = rows[replied[rows]]
        if len(rows):
            w = q[rows] / (prob[rows] * reply[rows])
            errors.append(float(((w @ values[rows] / w.sum() - aim) ** 2).sum()))
    return float(np.mean(errors))


def _drawn(prob: FloatArray, rng: np.random.Generator) -> IntArray:
    return systematic_sample(prob, rng.permutation(len(prob)), rng.random())
