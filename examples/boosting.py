"""Boosted enrollment probabilities: where they help, where they only add noise.

Run ``python examples/boosting.py``: two worlds of 20,000 clients with known truth, 16 draws each,
under a minute on two cores. In the first, enrollment and outcome follow a product and a threshold,
which logistic regression on the covariates misses. In the second, it is right as it stands. Every
method gives enrollment probabilities; the population mean of the outcome is then estimated from
enrolled clients alone, by Horvitz–Thompson and Hájek weights. The last two rows calibrate weights
to the population means of covariates, squares and products, from 1 and from 1/probability.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import expit, logit, xlogy
from sklearn.ensemble import HistGradientBoostingClassifier

from fedipw.calibration import Entropy, calibrated
from fedipw.lab.mechanisms.base import solved_intercept
from fedipw.selection.classifiers import Isotonic, Platt, client_folds, cross_fit
from fedipw.selection.propensity import NewtonLogistic
from fedipw.weighting.functions import (
    effective_sample_size,
    hajek_weights,
    horvitz_thompson_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedipw.numerics import BoolArray, FloatArray

COVARIATES = 6  # two or three of them matter
RATE = 0.3  # share enrolled
NONE, TRUTH, PLATT = "no weights", "true probabilities", "  with Platt"


@dataclass(frozen=True)
class World:
    """How enrollment and outcome follow from covariates (N, q), and the terms that are right."""

    title: str
    log_odds: Callable[[FloatArray], FloatArray]
    outcome: Callable[[FloatArray], FloatArray]
    terms: Callable[[FloatArray], FloatArray]


CURVED = World(
    "Enrollment by a product and a threshold",
    log_odds=lambda z: 0.8 * z[:, 0] * z[:, 1] + 1.2 * (z[:, 2] > 0.5),
    outcome=lambda z: z[:, 0] * z[:, 1] + 1.5 * (z[:, 2] > 0.5) + 0.5 * z[:, 3],
    terms=lambda z: np.column_stack([z[:, 0] * z[:, 1], z[:, 2] > 0.5]).astype(float),
)
STRAIGHT = World(
    "Enrollment logistic in the covariates",
    log_odds=lambda z: 0.6 * z[:, 0] + 0.6 * z[:, 1] - 0.4 * z[:, 2],
    outcome=lambda z: z[:, 0] + z[:, 1] - 0.5 * z[:, 2] + 0.5 * z[:, 3],
    terms=lambda z: z[:, :3],
)


def logistic(X: FloatArray, enrolled: BoolArray) -> FloatArray:
    """Return probabilities by unpenalised logistic regression on these columns, (N,)."""
    prob: FloatArray = NewtonLogistic().fit(X, enrolled).predict_proba(X)[:, 1]
    return prob


def probabilities(
    world: World, Z: FloatArray, enrolled: BoolArray, leaves: int, rng: np.random.Generator
) -> dict[str, FloatArray]:
    """Return everyone's enrollment probability by method, (N,) each."""
    boosting = HistGradientBoostingClassifier(
        max_leaf_nodes=leaves, early_stopping=False, random_state=0
    )
    clients = np.arange(len(Z))
    fit = cross_fit(boosting, Z, enrolled, client_folds(enrolled, clients, folds=5, rng=rng))
    return {
        "logistic, covariates": logistic(Z, enrolled),
        "logistic, right terms": logistic(world.terms(Z), enrolled),
        "boosting, not cross-fitted": boosting.fit(Z, enrolled).predict_proba(Z)[:, 1],
        "boosting, cross-fitted": fit.prob,
        PLATT: fit.calibrated(enrolled, Platt()).prob,
        "  with isotonic": fit.calibrated(enrolled, Isotonic(rows_per_class=20)).prob,
    }


def moment_weights(Z: FloatArray, enrolled: BoolArray, base: FloatArray) -> FloatArray:
    """Return weights of the enrolled, summing to 1, that meet the population's first moments."""
    first, second = np.triu_indices(Z.shape[1])
    b = np.column_stack([Z, Z[:, first] * Z[:, second]])
    return calibrated(b[enrolled], b.mean(axis=0), distance=Entropy(), base=base).weights


def excess_log_loss(prob: FloatArray, truth: FloatArray) -> float:
    """Return the expected log loss of ``prob`` on new labels, less that of the truth."""
    off = xlogy(truth, truth / prob) + xlogy(1.0 - truth, (1.0 - truth) / (1.0 - prob))
    return float(off.mean())


def calibration_slope(prob: FloatArray, truth: FloatArray) -> float:
    """Return the slope of the true log odds on the fitted ones: below 1 is over-confident."""
    twice = np.tile(logit(prob)[:, None], (2, 1))
    labels, weight = np.repeat([1, 0], len(prob)), np.append(truth, 1.0 - truth)
    return float(NewtonLogistic().fit(twice, labels, weight).coef_[0, 0])


def one_draw(world: World, clients: int, leaves: int, seed: int) -> dict[str, tuple[float, ...]]:
    """Return errors of HT and Hájek, effective sample size, excess log loss, slope, by method."""
    rng = np.random.default_rng(seed)
    Z = rng.uniform(-np.sqrt(3.0), np.sqrt(3.0), size=(clients, COVARIATES))
    score = world.log_odds(Z)
    truth = expit(score + solved_intercept(lambda: [score], RATE))
    outcome = world.outcome(Z) + rng.standard_normal(clients)
    enrolled = rng.random(clients) < truth
    y, mean, nan = outcome[enrolled], outcome.mean(), float("nan")
    probs = {TRUTH: truth, **probabilities(world, Z, enrolled, leaves, rng)}
    ones = np.ones(len(y))
    weights = {
        NONE: ones / len(y),
        **{name: hajek_weights(prob[enrolled]) for name, prob in probs.items()},
        "calibrated to moments": moment_weights(Z, enrolled, ones),
        "  from Platt's": moment_weights(Z, enrolled, 1.0 / probs[PLATT][enrolled]),
    }
    found: dict[str, tuple[float, ...]] = {}
    for name, w in weights.items():
        rest: tuple[float, ...] = (nan, nan, nan)
        if name in probs:
            ht = horvitz_thompson_weights(probs[name][enrolled], population_size=clients)
            fit = (measure(probs[name], truth) for measure in (excess_log_loss, calibration_slope))
            rest = (float(ht @ y - mean), *fit)
        found[name] = (rest[0], float(w @ y - mean), effective_sample_size(w), *rest[1:])
    return found


def summary(world: World, *, clients: int, leaves: int, seeds: int) -> dict[str, tuple[float, ...]]:
    """Return bias and RMSE of HT, of Hájek, then means of the other measures, by method."""
    draws = [one_draw(world, clients, leaves, seed) for seed in range(seeds)]
    rows: dict[str, tuple[float, ...]] = {}
    for name in draws[0]:
        values = np.array([draw[name] for draw in draws])
        bias, rmse = values[:, :2].mean(axis=0), np.sqrt((values[:, :2] ** 2).mean(axis=0))
        rows[name] = (bias[0], rmse[0], bias[1], rmse[1], *values[:, 2:].mean(axis=0))
    return rows


def printed(title: str, rows: dict[str, tuple[float, ...]]) -> str:
    """Return the table as text; a dash where a measure does not exist."""
    head = f"{'':27}{'HT bias':>8}{'rmse':>7}{'Hájek bias':>12}{'rmse':>7}{'ESS':>7}"
    lines = [title, f"{head}{'excess':>9}{'slope':>7}"]
    for name, row in rows.items():
        formats = ("8.3f", "7.3f", "12.3f", "7.3f", "7.0f", "9.4f", "7.2f")
        cells = [
            f"{'-':>{form.split('.')[0]}}" if np.isnan(value) else f"{value:{form}}"
            for value, form in zip(row, formats, strict=True)
        ]
        lines.append(f"{name:27}{''.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--leaves", type=int, default=8, help="leaves of each boosted tree")
    options = vars(parser.parse_args())
    for world in (CURVED, STRAIGHT):
        print(printed(world.title, summary(world, **options)), end="\n\n")


if __name__ == "__main__":
    main()
