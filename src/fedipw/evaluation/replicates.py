"""Replicate weights: the error of any statistic, for any other tool to go on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from fedipw.evaluation.estimators import (
    Group,
    HajekMean,
    jackknife_count,
    jackknife_samples,
)
from fedipw.evaluation.logged import LoggedSample
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics import FloatArray
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.storage.places import Place
from fedipw.tables.columns import ID, ROUND
from fedipw.tables.table import check_results, write_table

REPLICATES = 50
WEIGHT: Final = "weight"
PREFIX: Final = "rep_"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicateWeights:
    """One weight per reply, and again without each group of clients."""

    table: pl.DataFrame  # unit_id, round, weight, rep_1 to rep_G
    scale: float  # of the sum of squares (E50): nothing is taken off for the finite population
    scale_finite: float | None  # with it the error of this metric's Hájek mean is (E30)
    seed: int

    @property
    def count(self) -> int:
        """Number of replicates, G."""
        return self.table.width - 3

    def write(self, path: str | Place) -> None:
        """Write the table by suffix."""
        check_results(self.table, path)
        write_table(self.table, path)

    def to_json(self) -> dict[str, Any]:
        """Return what goes with the table as plain values."""
        return {
            "count": self.count,
            "scale": self.scale,
            "scale_finite": self.scale_finite,
            "freedom": self.count - 1,
            "seed": self.seed,
        }


def jackknife_weights(sample: TwoPhase, count: int, rng: np.random.Generator) -> FloatArray:
    r"""Weights of the replies without each of G random groups of clients, (m, G).

    Both stages are fitted or calibrated anew without the group. Its own replies weigh 0; the others
    stand for the whole population: with s the share of it that is left,

    .. math:: w^{(g)}_{ir} = \frac{\kappa^{(g)}_i}{s_g R\, \hat p^{(g)}_{ir}}, \qquad
       \hat V = \frac{G - 1}{G} \sum_g \big(\hat\theta_{(g)} - \bar\theta\big)^2 \qquad (E50)

    for any statistic :math:`\hat\theta` of weights and values, :math:`\hat\theta_{(g)}` the same
    with the weights of g. It is the first sum of (E30).

    Parameters
    ----------
    sample
        The replies and both phases.
    count
        G, at most the number of enrolled clients.
    rng
        Draws the groups.

    Examples
    --------
    >>> from fedipw.evaluation.phases import KnownEnrollment
    >>> phase = KnownEnrollment(weights=np.full(4, 3.0), population_size=12)
    >>> sample = TwoPhase(client=np.arange(4), round=np.zeros(4, dtype=int), prob=np.ones(4),
    ...                   rounds=1, enrollment=phase)
    >>> jackknife_weights(sample, 4, np.random.default_rng(0)).sum(axis=0).tolist()
    [12.0, 12.0, 12.0, 12.0]
    """
    count = jackknife_count(sample, count)
    out = np.zeros((len(sample.client), count), order="F")
    for g, (kept, rest, share) in enumerate(jackknife_samples(sample, count, rng)):
        out[kept, g] = rest.weights / share
    return out


def replicate_weights(
    logged: LoggedSample, stage: EnrollmentStage, count: int = REPLICATES, seed: int = 0
) -> ReplicateWeights:
    """Return replicate weights of the replies with a metric (E50).

    Parameters
    ----------
    logged, stage
        Replies with values, and what is known of enrollment behind them.
    count
        Replicates, at most the number of enrolled clients.
    seed
        Of the groups of clients; a jackknife (E30) with the same seed leaves out the same groups.
    """
    sample = logged.sample
    again = jackknife_weights(sample, count, np.random.default_rng(seed))
    ids = stage.members.frame[ID][logged.members[sample.client]]
    columns = {f"{PREFIX}{g + 1}": again[:, g] for g in range(again.shape[1])}
    own = {ID: ids, ROUND: logged.rounds[sample.round], WEIGHT: sample.weights}
    scale = (again.shape[1] - 1) / again.shape[1]
    share = _finite_share(sample, logged.values, again, scale)
    return ReplicateWeights(
        table=pl.DataFrame({**own, **columns}),
        scale=scale,
        scale_finite=None if share is None else scale * share,
        seed=seed,
    )


def _finite_share(
    sample: TwoPhase, values: FloatArray, again: FloatArray, scale: float
) -> float | None:
    """Return what (E30) is of (E50) for Hájek's mean, none if nothing of it is left."""
    means = again.T @ values / again.sum(axis=0)
    spread = scale * float(((means - means.mean()) ** 2).sum())
    u = HajekMean().linear(sample, values, Group()).values[:, None]
    left = spread - float(sample.finite(u)[0])
    left += float(sample.enrollment.target_variance(sample.totals(u))[0])
    return left / spread if spread > 0.0 and left > 0.0 else None
