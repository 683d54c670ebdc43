"""Weighted means of an outcome, with standard errors that know the propensity was estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedipw.errors import InputError
from fedipw.evaluation.phases import inverse_of
from fedipw.numerics import BoolArray, FloatArray
from fedipw.numerics.checks import check_probability, check_rows

_BLOCK = 4096  # rows in memory at a time
_SCORE_TOL = 1e-5  # of the score equations, over the sum of |Z|


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedMean:
    """A mean over the population from its selected units, and how far to trust it."""

    estimate: float
    se: float  # by M-estimation: the probabilities were estimated by logistic regression
    se_known: float  # as if the probabilities were known
    effective_sample_size: float  # of the weights, (W10)
    estimated_size: float  # sum of 1/probability over the selected
    population_size: int  # N
    selected_size: int  # m


def horvitz_thompson_mean(
    outcome: ArrayLike, Z: ArrayLike, selected: ArrayLike, prob: ArrayLike
) -> WeightedMean:
    r"""Mean over the population by weights 1/(N π), and its standard error.

    .. math::
       \hat\mu = \frac{1}{N} \sum_i w_i y_i, \qquad
       \text{se}^2 = \frac{1}{N^2} \sum_i \left[w_i y_i - \hat\mu
       - (E_i - \hat\pi_i)\, Z_i'a\right]^2 \qquad (W14)

    with :math:`w_i = E_i/\hat\pi_i`, :math:`a = I^{-1} \sum_i (1 - \hat\pi_i)\, w_i y_i Z_i` and
    :math:`I = \sum_i \hat\pi_i (1 - \hat\pi_i) Z_i Z_i'`; the last term is what estimating
    :math:`\pi` changes, and ``se_known`` leaves it out. This is the superpopulation form: the N
    units are themselves independent draws, and the error is about the mean they were drawn from.

    Parameters
    ----------
    outcome
        y of the selected units in the order of the rows, (m,).
    Z
        Design of the logistic model of selection, its constant included, (N, q).
    selected
        Who is selected, (N,).
    prob
        Probabilities fitted on ``Z`` and ``selected`` by maximum likelihood, (N,). Others, such as
        those of a penalised model or of boosting, are refused: (W14) does not hold for them.

    Examples
    --------
    >>> Z, selected = np.ones((4, 1)), np.array([True, False, True, False])
    >>> mean = horvitz_thompson_mean([1.0, 3.0], Z, selected, [0.5, 0.5, 0.5, 0.5])
    >>> mean.estimate, round(mean.se, 6), round(mean.se_known, 6)
    (2.0, 0.707107, 1.224745)
    """
    return _checked(outcome, Z, selected, prob).mean(normalised=False)


def hajek_mean(
    outcome: ArrayLike, Z: ArrayLike, selected: ArrayLike, prob: ArrayLike
) -> WeightedMean:
    r"""Mean over the population by weights 1/π over their sum, and its standard error.

    .. math::
       \hat\mu = \frac{\sum_i w_i y_i}{\sum_i w_i}, \qquad
       \text{se}^2 = \frac{\sum_i \left[w_i (y_i - \hat\mu) - (E_i - \hat\pi_i)\, Z_i'a\right]^2}
       {\left(\sum_i w_i\right)^2} \qquad (W15)

    with :math:`a = I^{-1} \sum_i (1 - \hat\pi_i)\, w_i (y_i - \hat\mu) Z_i` and the rest as in
    (W14), arguments included. Superpopulation form.

    >>> Z, selected = np.ones((4, 1)), np.array([True, False, True, False])
    >>> mean = hajek_mean([1.0, 3.0], Z, selected, [0.5, 0.5, 0.5, 0.5])
    >>> mean.estimate, round(mean.se, 6), round(mean.se_known, 6)
    (2.0, 0.707107, 0.707107)
    """
    return _checked(outcome, Z, selected, prob).mean(normalised=True)


def _checked(outcome: ArrayLike, Z: ArrayLike, selected: ArrayLike, prob: ArrayLike) -> _Sample:
    y, p = np.asarray(outcome, dtype=np.float64), np.asarray(prob, dtype=np.float64)
    design, flags = np.asarray(Z, dtype=np.float64), np.asarray(selected)
    if flags.dtype != np.bool_ or flags.ndim != 1:
        raise InputError(
            f"selected must be (N,) of true and false, not {flags.shape} of {flags.dtype}."
        )
    if (y.ndim, design.ndim, p.ndim) != (1, 2, 1):
        raise InputError(
            f"Expected outcome (m,), Z (N, q) and prob (N,), not {y.shape}, {design.shape} and "
            f"{p.shape}."
        )
    check_rows(len(flags), Z=design, prob=p)
    if not flags.any():
        raise InputError("Nobody is selected: there is nothing to take the mean of.")
    check_rows(int(flags.sum()), outcome=y)
    check_probability(p, "prob")
    if not (np.isfinite(y.sum()) and np.isfinite(design.sum())):  # NaN and infinity add up
        raise InputError("outcome and Z must be finite: fill or drop missing values first.")
    return _Sample(y, design, flags, p)


class _Block(NamedTuple):
    Z: FloatArray
    residual: FloatArray  # E - π
    variance: FloatArray  # π (1 - π)
    w: FloatArray
    y: FloatArray  # 0 where not selected


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """The arrays, read block by block: memory beyond them is O(q^2)."""

    outcome: FloatArray  # (m,)
    Z: FloatArray  # (N, q)
    selected: BoolArray  # (N,)
    prob: FloatArray  # (N,)

    def blocks(self) -> Iterator[_Block]:
        seen = 0
        for start in range(0, len(self.selected), _BLOCK):
            rows = slice(start, start + _BLOCK)
            flags, p = self.selected[rows], self.prob[rows]
            y = np.zeros(len(p))
            y[flags] = self.outcome[seen : seen + flags.sum()]
            seen += int(flags.sum())
            yield _Block(self.Z[rows], flags - p, p * (1.0 - p), flags / p, y)

    def mean(self, *, normalised: bool) -> WeightedMean:
        """Return (W15) if normalised, by the sum of weights, else (W14), by N."""
        total, weight, squares = np.sum([(b.w @ b.y, b.w.sum(), b.w @ b.w) for b in self.blocks()],
                                        axis=0).tolist()  # fmt: skip
        size = weight if normalised else float(len(self.selected))
        mean = total / size
        centre, constant = (mean, 0.0) if normalised else (0.0, mean)
        a, found = self._slope(centre), np.zeros(2)
        for b in self.blocks():
            known = b.w * (b.y - centre) - constant
            estimated = known - b.residual * (b.Z @ a)
            found += (estimated @ estimated, known @ known)
        se, se_known = (np.sqrt(found) / size).tolist()
        return WeightedMean(
            estimate=mean,
            se=se,
            se_known=se_known,
            effective_sample_size=weight**2 / squares,
            estimated_size=weight,
            population_size=len(self.selected),
            selected_size=len(self.outcome),
        )

    def _slope(self, centre: float) -> FloatArray:
        """Return a of (W14) and (W15), or raise if the scores of the fit are not 0."""
        q = self.Z.shape[1]
        information, slope, score, scale = np.zeros((q, q)), np.zeros(q), np.zeros(q), np.zeros(q)
        for b in self.blocks():
            information += b.Z.T @ (b.variance[:, None] * b.Z)
            slope += (b.variance * b.w**2 * (b.y - centre)) @ b.Z  # π (1 - π) w² = (1 - π) w
            score += b.residual @ b.Z
            scale += np.abs(b.Z).sum(axis=0)
        off = np.abs(score) / np.where(scale > 0.0, scale, 1.0)
        worst = int(off.argmax())
        if off[worst] > _SCORE_TOL:
            raise InputError(
                f"prob is not the maximum-likelihood fit of a logistic model on Z: the score of "
                f"column {worst} is {score[worst]:.3g}, not 0. Give the design the model was "
                "fitted on, its constant included, and fit it without penalty "
                "(`NewtonLogistic()`); for other models use a bootstrap over clients."
            )
        return inverse_of(information) @ slope
