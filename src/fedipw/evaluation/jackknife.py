"""Standard errors by leaving out groups of clients and fitting everything anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import FedIPWError, InputError
from fedipw.evaluation.estimators import Estimate, Group, Linear, MeanEstimator, population_means

if TYPE_CHECKING:
    from fedipw.evaluation.sample import TwoPhase
    from fedipw.numerics.types import FloatArray

GROUPS = 50


def jackknife_means(
    sample: TwoPhase,
    values: FloatArray,
    estimators: Sequence[MeanEstimator],
    groups: Sequence[Group] = (Group(),),
    *,
    rng: np.random.Generator,
    count: int = GROUPS,
    confidence: float = 0.95,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Estimate, ...]:
    r"""Estimate means with errors by a jackknife over clients.

    The M clients are cut at random into G groups: the whole population where enrollment was fitted
    on it, the enrolled elsewhere. With :math:`\hat\mu_{(g)}` the mean without group g, both stages
    fitted anew,

    .. math:: \hat V = \frac{G - 1}{G} \sum_g \big(\hat\mu_{(g)} - \bar\mu\big)^2
       - \frac{M}{M - 1} (Q - \hat V_{E23}) \qquad (E30)

    The first sum measures Q, the squares of clients' contributions about their mean, as if clients
    had been drawn from more of their kind; the rest, linearised and without leverages
    (:meth:`TwoPhase.finite`), takes off what the population's being finite does to it. So it is the
    check on (E23); it costs G fits of each stage, and has G - 1 degrees of freedom at most. Errors
    of population means add to it as they do to (E23).

    Parameters
    ----------
    sample, values, estimators, groups, confidence
        As in :func:`population_means`.
    rng
        Draws the groups.
    count
        G, at most the number of enrolled clients.
    progress
        Receives groups done and groups in all.
    """
    count = min(count, sample.clients)
    if count < 2:
        raise InputError(f"A jackknife needs two groups or more, not {count}.")
    found = population_means(sample, values, estimators, groups, confidence=confidence)
    of_clients = (rng.permutation(sample.enrollment.units) % count)[: sample.clients]
    lines = [(estimator, group) for group in groups for estimator in estimators]
    means = np.full((count, len(found)), np.nan)
    try:
        for g, (rest, share) in enumerate(sample.deleted(of_clients, count, rng)):
            kept = of_clients[sample.client] != g
            for k, (estimator, group) in enumerate(lines):
                if np.isfinite(found[k].estimate):
                    means[g, k] = _mean(rest, values[kept], estimator.part(kept), group, share)
            if progress is not None:
                progress(g + 1, count)
    except FedIPWError as error:
        raise InputError(
            f"The jackknife cannot leave out one of its {count} groups of clients: {error} Use "
            "another number of groups, or none (0)."
        ) from error
    spread = (count - 1) / count * ((means - means.mean(axis=0)) ** 2).sum(axis=0)
    return tuple(
        _with_spread(line, sample, estimator.linear(sample, values, group), spread[k], count)
        if np.isfinite(line.se)
        else line
        for k, (line, (estimator, group)) in enumerate(zip(found, lines, strict=True))
    )


def _mean(
    rest: TwoPhase, values: FloatArray, estimator: MeanEstimator, group: Group, share: float
) -> float:
    """Return a mean over what is left of a group, NaN if there is none."""
    size = None if group.size is None else group.size * share
    try:
        return estimator.linear(rest, values, replace(group, size=size)).estimate
    except InputError:
        return np.nan


def _with_spread(
    line: Estimate, sample: TwoPhase, linear: Linear, spread: float, count: int
) -> Estimate:
    """Return a line with the error of (E30), ``spread`` its first sum."""
    if not np.isfinite(spread):
        reason = "without one of the jackknife's groups there is no estimate: use more of them"
        return line.with_error(np.nan, np.nan, reason)
    u = linear.values[:, None]
    taken, reason = float(sample.finite(u)[0]), ""
    if abs(spread - taken) <= 1e-12 * spread:
        taken = spread
    if spread < taken:
        taken, reason = 0.0, "nothing taken off for the finite population: too little is left"
    variance = spread - taken + float(sample.enrollment.target_variance(sample.totals(u))[0])
    return line.with_error(float(np.sqrt(variance)), min(line.freedom, count - 1.0), reason)
