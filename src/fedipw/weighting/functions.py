"""Weights as pure functions of probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive, check_probability

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics import FloatArray


def horvitz_thompson_weights(inclusion_prob: ArrayLike, population_size: float) -> FloatArray:
    r"""Inverse-probability weights of the units in a round, over the population size.

    .. math:: w_i = \frac{1}{N \pi_i}, \quad i \in S. \qquad (W2)

    ``inclusion_prob`` is :math:`\pi_i = P(i \in S)`, enrollment and participation together. The
    weighted sum is unbiased for the population mean, however small the round; the weights sum to
    one only on average.

    >>> horvitz_thompson_weights([0.5, 0.25], population_size=10)
    array([0.2, 0.4])
    """
    size = check_positive(population_size, "population_size")
    return 1.0 / (size * check_probability(inclusion_prob, "inclusion_prob"))


def hajek_weights(inclusion_prob: ArrayLike) -> FloatArray:
    r"""Self-normalised inverse-probability weights of the units in a round.

    .. math:: w_i = \frac{1/\pi_i}{\sum_{j \in S} 1/\pi_j}, \quad i \in S. \qquad (W3)

    Weights sum to one: consistent for the population mean, not unbiased.

    >>> hajek_weights([0.5, 0.25])
    array([0.33333333, 0.66666667])
    """
    return _normalised(1.0 / check_probability(inclusion_prob, "inclusion_prob"))


def estimated_population_size(enrollment_prob: ArrayLike) -> float:
    r"""Population size from the enrolled clients' probabilities, for when N is unknown.

    .. math:: \hat N = \sum_{i \in E} 1/\pi^{enr}_i \qquad (W9)

    >>> estimated_population_size([0.5, 0.25])
    6.0
    """
    return float((1.0 / check_probability(enrollment_prob, "enrollment_prob")).sum())


def effective_sample_size(weights: FloatArray) -> float:
    r"""Kish's effective sample size, :math:`(\sum w)^2 / \sum w^2` (W10).

    >>> effective_sample_size(np.array([1.0, 1.0, 1.0, 1.0]))
    4.0
    """
    return float(weights.sum() ** 2 / (weights**2).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrimReport:
    """Trimmed weights and what trimming changed."""

    weights: FloatArray  # (m,)
    cap: float  # largest weight allowed
    changed: int  # number of weights cut
    mass: float  # size of weight cut off, as a share of the size before


def trimmed(weights: FloatArray, times_mean: float) -> TrimReport:
    r"""Cut weights at a multiple of their mean and say what was cut.

    .. math:: w_i' = \min(w_i,\; c \bar w) \qquad (W7)

    Trades bias for variance. The cut mass is not spread over the others. Weights of either sign
    are cut in size, at a multiple of their mean size.

    >>> report = trimmed(np.array([1.0, 1.0, 10.0]), times_mean=2.0)
    >>> report.weights, report.changed, round(report.mass, 3)
    (array([1., 1., 8.]), 1, 0.167)
    """
    if not times_mean >= 1.0:
        raise InputError(f"Trimming below the mean weight is not trimming: {times_mean!r} < 1.")
    size = np.abs(weights)
    cap, total = float(times_mean * size.mean()), float(size.sum())
    cut = np.clip(weights, -cap, cap)
    return TrimReport(
        weights=cut,
        cap=cap,
        changed=int((size > cap).sum()),
        mass=float(1.0 - np.abs(cut).sum() / total) if total else 0.0,
    )


def capped(weights: FloatArray, share: float, presence: FloatArray | None = None) -> TrimReport:
    r"""Cut weights at a share of a round and let the others carry what was cut.

    .. math:: w_i' = \text{sign}(w_i) \min(|w_i| f,\; c W), \qquad
       W = \sum_j |w_j|, \quad f \ge 1 \text{ such that } \sum_j |w_j'| = W \qquad (W20)

    c is ``share``. Where fewer than 1/c weights are not zero, all of them carry the same.
    ``presence`` (m,) counts each weight as often as it says.

    >>> report = capped(np.array([1.0, 2.0, 7.0]), share=0.5)
    >>> report.weights, report.changed, round(report.mass, 3)
    (array([1.66666667, 3.33333333, 5.        ]), 1, 0.2)
    """
    size = np.abs(weights)
    times = np.ones(len(size)) if presence is None else presence
    total = float(times @ size)
    cap = share * total
    if not total > 0.0 or size.max() <= cap:
        return TrimReport(weights=weights, cap=cap, changed=0, mass=0.0)
    # With the k largest at the cap, the others are raised to carry the rest: the smallest k that
    # leaves none of them above the cap.
    order = np.argsort(-size, kind="stable")
    sizes, counts = size[order], times[order]
    left = np.append(np.cumsum((counts * sizes)[::-1])[::-1], 0.0)  # of those after the first k
    held = np.append(0.0, np.cumsum(counts))
    for k in range(1, len(sizes) + 1):
        rest = total - cap * held[k]
        if rest <= 0.0 or left[k] <= 0.0:
            cap, factor = total / float(held[k]), 0.0
            break
        factor = rest / left[k]
        if sizes[k] * factor <= cap:
            break
    out = np.minimum(size * max(factor, 1.0), cap)
    out[order[:k]] = cap
    cut = float(times @ np.maximum(size - out, 0.0)) / total
    return TrimReport(weights=np.sign(weights) * out, cap=cap, changed=k, mass=cut)


def clamped(weights: FloatArray, low: float, high: float, *, strict: bool = True) -> TrimReport:
    r"""Hold weights in [low, high] and share what was cut or added equally among the others.

    .. math:: w_i' = \text{clip}(w_i, l, h) \text{ outside } [l, h], \qquad
       w_i' = w_i + \frac{\sum_k (w_k - \text{clip}(w_k, l, h))}{|\{k : l \le w_k \le h\}|}
       \text{ inside} \qquad (W13)

    The sum stays as it is. With ``strict`` this is repeated until no weight that was given a share
    is pushed outside, as survey statisticians do after raking.

    >>> clamped(np.array([1.0, 2.0, 6.0]), 0.0, 4.0).weights
    array([2., 3., 4.])
    """
    if not low < high:
        raise InputError(f"Weights cannot be held between {low!r} and {high!r}.")
    out, before = np.array(weights, dtype=np.float64), np.asarray(weights)
    while True:
        inside = (out >= low) & (out <= high)
        if inside.all():
            break
        held = np.clip(out, low, high)
        if not inside.any() or not low * len(out) <= out.sum() <= high * len(out):
            raise InputError(
                f"{len(out)} weights with sum {out.sum():.6g} cannot all lie between {low:g} and "
                f"{high:g}: widen the limits."
            )
        held[inside] += (out - held).sum() / inside.sum()
        out = held
        if not strict:
            break
    cut = np.maximum(before - np.clip(before, low, high), 0.0).sum()
    return TrimReport(
        weights=out,
        cap=high,
        changed=int(((before < low) | (before > high)).sum()),
        mass=float(cut / before.sum()),
    )


def _normalised(raw: FloatArray) -> FloatArray:
    weights: FloatArray = raw / raw.sum()
    return weights
