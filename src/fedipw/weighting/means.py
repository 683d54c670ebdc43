"""Weighted means of an outcome, with standard errors that know the propensity was estimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_probability, check_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike

    from fedipw.numerics.types import BoolArray, FloatArray

_BLOCK = 4096  # rows in memory at a time
_SCORE_TOL = 1e-5  # of the score equations, over the sum of |Z|
_RANK_TOL = 1e-10  # of the information's eigenvalues, columns scaled to one


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
    data = _Sample.checked(outcome, Z, selected, prob)
    total, weight, squares = data.weight_sums()
    mean = total / data.size
    se, se_known = data.errors(centre=0.0, constant=mean)
    return WeightedMean(
        estimate=mean,
        se=se / data.size,
        se_known=se_known / data.size,
        effective_sample_size=weight**2 / squares,
        estimated_size=weight,
        population_size=data.size,
        selected_size=len(data.outcome),
    )


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
    data = _Sample.checked(outcome, Z, selected, prob)
    total, weight, squares = data.weight_sums()
    mean = total / weight
    se, se_known = data.errors(centre=mean, constant=0.0)
    return WeightedMean(
        estimate=mean,
        se=se / weight,
        se_known=se_known / weight,
        effective_sample_size=weight**2 / squares,
        estimated_size=weight,
        population_size=data.size,
        selected_size=len(data.outcome),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample:
    """The arrays, read block by block: memory beyond them is O(q^2)."""

    outcome: FloatArray  # (m,)
    Z: FloatArray  # (N, q)
    selected: BoolArray  # (N,)
    prob: FloatArray  # (N,)

    @classmethod
    def checked(
        cls, outcome: ArrayLike, Z: ArrayLike, selected: ArrayLike, prob: ArrayLike
    ) -> _Sample:
        y, p = np.asarray(outcome, dtype=np.float64), np.asarray(prob, dtype=np.float64)
        design, flags = np.asarray(Z, dtype=np.float64), np.asarray(selected)
        if flags.dtype != np.bool_ or flags.ndim != 1:
            raise InputError(
                f"selected must be (N,) of true and false, not {flags.shape} of {flags.dtype}."
            )
        if design.ndim != 2 or p.ndim != 1 or y.ndim != 1:
            raise InputError(
                f"Expected outcome (m,), Z (N, q) and prob (N,), not {y.shape}, {design.shape} and "
                f"{p.shape}."
            )
        check_rows(len(flags), Z=design, prob=p)
        if not flags.any():
            raise InputError("Nobody is selected: there is nothing to take the mean of.")
        check_rows(int(flags.sum()), outcome=y)
        if not (p.min() > 0.0 and p.max() <= 1.0):
            check_probability(p, "prob")
        if not (np.isfinite(y.sum()) and np.isfinite(design.sum())):  # NaN and infinity add up
            raise InputError("outcome and Z must be finite: fill or drop missing values first.")
        return cls(outcome=y, Z=design, selected=flags, prob=p)

    @property
    def size(self) -> int:
        return len(self.selected)

    def blocks(self) -> Iterator[tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]]:
        """Yield Z, E - π, π (1 - π), w and y of some rows; y is 0 where not selected."""
        seen = 0
        for start in range(0, self.size, _BLOCK):
            rows = slice(start, start + _BLOCK)
            flags, p = self.selected[rows], self.prob[rows]
            y = np.zeros(len(p))
            y[flags] = self.outcome[seen : seen + flags.sum()]
            seen += int(flags.sum())
            yield self.Z[rows], flags - p, p * (1.0 - p), flags / p, y

    def weight_sums(self) -> tuple[float, float, float]:
        """Return the sums of w y, w and w²."""
        sums = np.zeros(3)
        for _, _, _, w, y in self.blocks():
            sums += (w @ y, w.sum(), w @ w)
        return float(sums[0]), float(sums[1]), float(sums[2])

    def errors(self, centre: float, constant: float) -> tuple[float, float]:
        """Return N se and N se_known of (W14), or (W15) with a centre and N replaced."""
        q = self.Z.shape[1]
        information, slope, score, scale = np.zeros((q, q)), np.zeros(q), np.zeros(q), np.zeros(q)
        for Z, residual, variance, w, y in self.blocks():
            information += Z.T @ (variance[:, None] * Z)
            slope += (variance * w**2 * (y - centre)) @ Z  # π (1 - π) w² = (1 - π) w
            score += residual @ Z
            scale += np.abs(Z).sum(axis=0)
        self._check_maximum(score, scale)
        a = _solved(information, slope)
        squares = np.zeros(2)
        for Z, residual, _, w, y in self.blocks():
            known = w * (y - centre) - constant
            estimated = known - residual * (Z @ a)
            squares += (estimated @ estimated, known @ known)
        return float(np.sqrt(squares[0])), float(np.sqrt(squares[1]))

    def _check_maximum(self, score: FloatArray, scale: FloatArray) -> None:
        off = np.abs(score) / np.where(scale > 0.0, scale, 1.0)
        worst = int(off.argmax())
        if off[worst] > _SCORE_TOL:
            raise InputError(
                f"prob is not the maximum-likelihood fit of a logistic model on Z: the score of "
                f"column {worst} is {score[worst]:.3g}, not 0. Give the design the model was "
                "fitted on, its constant included, and fit it without penalty "
                "(`NewtonLogistic()`); for other models use a bootstrap over clients."
            )


def _solved(information: FloatArray, slope: FloatArray) -> FloatArray:
    """Return I^{-1} slope; of collinear columns any solution gives the same standard error."""
    size = np.sqrt(np.diag(information))
    scale = np.where(size > 0.0, size, 1.0)
    scaled = information / np.outer(scale, scale)
    found: FloatArray = np.linalg.lstsq(scaled, slope / scale, rcond=_RANK_TOL)[0]
    return found / scale
