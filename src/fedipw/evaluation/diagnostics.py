"""How far a propensity model's probabilities agree with what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import xlog1py, xlogy

from fedipw.errors import InputError
from fedipw.numerics import FloatArray, IntArray

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)  # of weights that are shown
TOP = 0.01  # share of the largest weights that are added up
WEIGHT_BINS = 40
FINE_BINS = 10_000  # of log odds, equal in width
RELIABILITY_BINS = 10
ODDS_REACH, _PER_UNIT = 20.0, FINE_BINS / 40.0  # |log odds| beyond share a bin; bins in a unit


class CalibrationSums(NamedTuple):
    """What calibration needs of rows, by fine bins of log odds; adds up over partitions."""

    rows: IntArray  # (b,)
    weight: FloatArray  # (b,)
    square: FloatArray  # (b,) of weights
    selected: FloatArray  # (b,) weight of label 1
    prob: FloatArray  # (b,) weighted probabilities
    brier: float
    log_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Rows with about the same probability: log odds closer than 0.004 are not told apart."""

    count: int
    mean_prob: float
    rate: float  # observed share of label 1
    standard_error: float  # of the rate, binomial


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalibration:
    r"""How a model's probabilities agree with what happened.

    Rows are put in order of their probability and cut in bins of about as many rows. With
    :math:`W_k` the weight of bin k, :math:`\bar p_k` its mean probability and :math:`\bar y_k` the
    share of label 1,

    .. math:: \text{ECE} = \sum_k \frac{W_k}{W} |\bar p_k - \bar y_k| \qquad (E14)

    .. math:: \text{Brier} = \frac{1}{W} \sum_i w_i (y_i - p_i)^2, \quad
       \text{log loss} = -\frac{1}{W} \sum_i w_i
       \{y_i \log p_i + (1 - y_i) \log (1 - p_i)\} \qquad (E17)

    The AUC (E15) is known by fine bins of log odds, from one pass over any number of rows (E16).
    """

    rows: int
    rate: float  # share of label 1
    mean_prob: float
    reliability: tuple[ReliabilityBin, ...]
    expected_error: float  # (E14)
    auc: float | None  # (E15); none where all labels are the same
    auc_error: float  # the true AUC is no further from it (E16)
    brier: float  # (E17)
    log_loss: float  # (E17)

    @property
    def ratio(self) -> float:
        """Label 1 observed by label 1 expected (E18)."""
        return self.rate / self.mean_prob if self.mean_prob > 0.0 else np.nan


def calibration_sums(prob: FloatArray, labels: FloatArray, weights: FloatArray) -> CalibrationSums:
    """Return what calibration needs of rows (m,) with labels 0 and 1.

    >>> prob, labels = np.array([0.2, 0.2, 0.6, 0.6]), np.array([0.0, 0.0, 1.0, 0.0])
    >>> found = calibration_from(calibration_sums(prob, labels, np.ones(4)), bins=2)
    >>> [(b.count, b.mean_prob, b.rate) for b in found.reliability]
    [(2, 0.2, 0.0), (2, 0.6, 0.5)]
    >>> round(found.expected_error, 3), round(found.brier, 3), round(found.auc, 3)
    (0.15, 0.15, 0.833)
    """
    with np.errstate(divide="ignore"):
        odds = np.log(prob) - np.log1p(-prob)
    place = np.clip((odds + ODDS_REACH) * _PER_UNIT, 0, FINE_BINS - 1).astype(np.int64)
    loss = -(xlogy(labels, prob) + xlog1py(1.0 - labels, -prob))
    return CalibrationSums(
        np.bincount(place, minlength=FINE_BINS),
        _totals(place, weights, FINE_BINS),
        _totals(place, weights**2, FINE_BINS),
        _totals(place, weights * labels, FINE_BINS),
        _totals(place, weights * prob, FINE_BINS),
        float(weights @ (labels - prob) ** 2),
        float(weights[weights > 0.0] @ loss[weights > 0.0]),
    )


def calibration_from(sums: CalibrationSums, bins: int = RELIABILITY_BINS) -> ModelCalibration:
    """Return the calibration behind some sums."""
    total = float(sums.weight.sum())
    if bins < 1 or not total > 0.0:
        raise InputError(f"{bins} bins of total weight {total:g}: both must be above 0.")
    before = np.cumsum(sums.rows) - sums.rows
    part = bins * (2 * before + sums.rows) // (2 * int(sums.rows.sum()))  # of the middle row
    part = np.minimum(part, bins - 1)
    rows, weight, square, selected, prob = (_totals(part, x, bins) for x in sums[:5])
    some_rows = weight > 0.0
    rate, mean = selected[some_rows] / weight[some_rows], prob[some_rows] / weight[some_rows]
    spread = np.sqrt(np.maximum(rate * (1.0 - rate), 0.0) * square[some_rows]) / weight[some_rows]
    curve = zip(
        rows[some_rows].tolist(), mean.tolist(), rate.tolist(), spread.tolist(), strict=True
    )
    positive, negative = sums.selected, np.maximum(sums.weight - sums.selected, 0.0)
    both = positive.sum() > 0.0 and negative.sum() > 0.0
    area, error = _area(positive, negative) if both else (None, 0.0)
    return ModelCalibration(
        rows=int(sums.rows.sum()),
        rate=float(positive.sum()) / total,
        mean_prob=float(sums.prob.sum()) / total,
        reliability=tuple(
            ReliabilityBin(count=int(n), mean_prob=p, rate=r, standard_error=se)
            for n, p, r, se in curve
        ),
        expected_error=float(weight[some_rows] @ np.abs(mean - rate)) / total,
        auc=area,
        auc_error=error,
        brier=sums.brier / total,
        log_loss=sums.log_loss / total,
    )


def _totals(place: IntArray, values: np.ndarray, bins: int) -> FloatArray:
    return np.bincount(place, values, bins).astype(np.float64, copy=False)


def _area(positive: FloatArray, negative: FloatArray) -> tuple[float, float]:
    r"""Return the AUC of rows in ordered bins, and its largest error: pairs within a bin.

    .. math:: \widehat{\text{AUC}} = \frac{\sum_b P_b (N_{<b} + N_b / 2)}{P N}, \qquad
       |\widehat{\text{AUC}} - \text{AUC}| \le \frac{\sum_b P_b N_b}{2 P N} \qquad (E16)
    """
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    inside = 0.5 * float(positive @ negative) / float(pairs)
    return float(positive @ below) / float(pairs) + inside, inside
