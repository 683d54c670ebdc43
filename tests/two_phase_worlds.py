"""A small population with two metrics, of which who enrolls and who replies is drawn anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from fedipw.calibration import Entropy
from fedipw.evaluation.estimators import (
    GregMean,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    MeanEstimator,
)
from fedipw.evaluation.phases import CalibratedEnrollment
from fedipw.evaluation.sample import TwoPhase
from fedipw.evaluation.statistics import Contrast
from fedipw.lab.two_phase import fitted_two_phase
from fedipw.numerics import FloatArray
from fedipw.weighting.balance import Balance


@dataclass
class Small:
    """A small world with a truth: both stages are drawn and fitted."""

    sample: TwoPhase
    y: FloatArray  # of the replies
    x: FloatArray
    sides: Contrast
    estimators: list[MeanEstimator]
    truth: dict[str, float]
    balance: Balance

    def calibrated(self) -> TwoPhase:
        """The same replies with enrollment calibrated to the population's means."""
        s, phase = self.sample, CalibratedEnrollment.of(self.balance, Entropy())
        return TwoPhase(
            client=s.client, round=s.round, prob=s.prob, rounds=s.rounds, enrollment=phase,
            steps=s.steps,
        )  # fmt: skip


def drawn_world(rng: np.random.Generator, size: int, rounds: int = 3) -> Small:
    """The population is fixed; who enrolls and who replies is ``rng``'s."""
    fixed = np.random.default_rng(77)
    Z = fixed.normal(size=(size, 2))
    y = 2.0 + Z[:, :1] + fixed.normal(size=(size, rounds))  # of every client and round
    x = np.exp(0.3 * Z[:, :1] + 0.3 * fixed.normal(size=(size, rounds)))
    side = fixed.random(size) < expit(0.5 * Z[:, 0])
    enrolled = rng.random(size) < expit(0.4 + 0.6 * Z[:, 0])
    ids = np.flatnonzero(enrolled)
    client, when = np.repeat(ids, rounds), np.tile(np.arange(rounds), len(ids))
    replied = rng.random(len(client)) < expit(0.2 + 0.6 * Z[client, 0])
    sample = fitted_two_phase(Z, enrolled, Z[client], client, when, replied=replied)
    at = (client[replied], when[replied])
    sides = Contrast(
        Group(name="a", inside=side[ids], size=float(side.sum())),
        Group(name="b", inside=~side[ids], size=float((~side).sum())),
    )
    truth = {
        "quantile 0.5": float(np.quantile(y, 0.5, method="inverted_cdf")),
        "quantile 0.9": float(np.quantile(y, 0.9, method="inverted_cdf")),
        "ratio": float(y.sum() / x.sum()),
        "total": float(y.sum() / rounds),
        "total of a": float(y[side].sum() / rounds),
        "difference": float(y[side].mean() - y[~side].mean()),
    }
    greg = GregMean(Z[enrolled], Z.mean(axis=0))
    means: list[MeanEstimator] = [HorvitzThompsonMean(), HajekMean(), greg]
    balance = Balance(
        names=("a", "b"), matrix=Z, enrolled=enrolled, mean=Z.mean(axis=0), population_size=size
    )
    return Small(sample, y[at], x[at], sides, means, truth, balance)
