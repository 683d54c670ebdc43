"""Diagnostics: of weights, of a propensity model's calibration, and of drift over rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from scipy.special import xlog1py, xlogy

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows, some
from fedipw.numerics.logistic import sigmoids
from fedipw.tables.ledger import OPENED_AT, REPLIED
from fedipw.tables.partitions import Block, Partitions, sum_over
from fedipw.tables.terms import MISSING
from fedipw.weighting.functions import effective_sample_size

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray, LabelArray
    from fedipw.selection.fit import LogisticFit
    from fedipw.tables.frames import Frame

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
TOP = 0.01
WEIGHT_BINS = 40
FINE_BINS = 10_000  # of log odds, equal in width
RELIABILITY_BINS = 10
ODDS_REACH, _PER_UNIT = 20.0, FINE_BINS / 40.0  # |log odds| beyond share a bin; bins in a unit
BlockProb = Callable[[Block], "FloatArray"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightDiagnostics:
    """How uneven weights are; a common factor of all weights changes nothing but ``total``."""

    count: int  # n, zeros among them
    zeros: int
    total: float
    effective_sample_size: float  # (W10)
    design_effect: float  # (E13)
    largest_share: float  # of the total, in one weight
    top_share: float  # of the total, in the largest 1% of weights, one at least
    quantiles: FloatArray  # at QUANTILES, as multiples of the mean weight
    edges: FloatArray  # (bins + 1,) multiples of the mean weight, in equal ratios
    counts: IntArray  # (bins,) of the weights above 0


def weight_diagnostics(weights: FloatArray, bins: int = WEIGHT_BINS) -> WeightDiagnostics:
    r"""Return how uneven weights (m,) are.

    .. math:: \text{deff} = 1 + \text{cv}^2 = \frac{n \sum w^2}{(\sum w)^2} \qquad (E13)

    with cv the weights' standard deviation (over n) by their mean, so that n / deff is the
    effective sample size (W10).

    >>> found = weight_diagnostics(np.array([1.0, 1.0, 2.0, 4.0]))
    >>> round(found.effective_sample_size, 4), round(found.design_effect, 4), found.largest_share
    (2.9091, 1.375, 0.5)
    """
    if weights.ndim != 1 or not weights.size:
        raise InputError(f"Weights must be (m,) with m above 0, not {weights.shape}.")
    right = np.isfinite(weights) & (weights >= 0.0)
    if not right.all() or not weights.any() or bins < 1:
        raise InputError(
            f"Weights must be finite, not negative and not all 0 ({(~right).sum()} of {right.size} "
            f"are negative, infinite or missing), bins 1 or more, not {bins}."
        )
    unit = weights / weights.max()  # squares of large weights stay finite
    total, ess = float(unit.sum()), effective_sample_size(unit)
    top = int(np.ceil(TOP * len(unit)))
    multiples = unit / (total / len(unit))
    counts, edges = _log_histogram(multiples[multiples > 0.0], bins)
    return WeightDiagnostics(
        count=len(unit),
        zeros=int((unit == 0.0).sum()),
        total=float(weights.sum()),
        effective_sample_size=ess,
        design_effect=len(unit) / ess,
        largest_share=1.0 / total,
        top_share=float(np.partition(unit, len(unit) - top)[len(unit) - top :].sum() / total),
        quantiles=np.quantile(multiples, QUANTILES),
        edges=edges,
        counts=counts,
    )


def _log_histogram(values: FloatArray, bins: int) -> tuple[IntArray, FloatArray]:
    low, high = float(values.min()), float(values.max())
    if high <= low * (1.0 + 1e-9):  # equal but for rounding
        return np.array([len(values)], dtype=np.int64), np.array([low, high])
    edges = np.geomspace(low, high, bins + 1)
    counts, _ = np.histogram(values, edges)
    return counts.astype(np.int64), edges


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
    """How a model's probabilities agree with what happened."""

    rows: int
    rate: float  # share of label 1
    mean_prob: float
    reliability: tuple[ReliabilityBin, ...]
    expected_error: float  # (E14)
    auc: float | None  # (E15); none where all labels are the same
    auc_error: float  # the true AUC is no further from it (E16); 0 if exact
    brier: float  # (E17)
    log_loss: float  # (E17)

    @property
    def ratio(self) -> float:
        """Label 1 observed by label 1 expected (E18)."""
        return self.rate / self.mean_prob if self.mean_prob > 0.0 else np.nan


def model_calibration(
    prob: FloatArray,
    labels: LabelArray | BoolArray,
    weights: FloatArray | None = None,
    bins: int = RELIABILITY_BINS,
) -> ModelCalibration:
    r"""Return the calibration of probabilities (m,) of labels (m,); the AUC is exact.

    Rows are put in order of their probability and cut in ``bins`` of about as many rows, equal
    probabilities together. With :math:`W_k` the weight of bin k, :math:`\bar p_k` its mean
    probability and :math:`\bar y_k` the share of label 1,

    .. math:: \text{ECE} = \sum_k \frac{W_k}{W} |\bar p_k - \bar y_k| \qquad (E14)

    .. math:: \text{Brier} = \frac{1}{W} \sum_i w_i (y_i - p_i)^2, \quad
       \text{log loss} = -\frac{1}{W} \sum_i w_i
       \{y_i \log p_i + (1 - y_i) \log (1 - p_i)\} \qquad (E17)

    >>> found = model_calibration(np.array([0.2, 0.2, 0.6, 0.6]), np.array([0, 0, 1, 0]), bins=2)
    >>> [(b.count, b.mean_prob, b.rate) for b in found.reliability]
    [(2, 0.2, 0.0), (2, 0.6, 0.5)]
    >>> round(found.expected_error, 3), round(found.brier, 3), round(found.auc, 3)
    (0.15, 0.15, 0.833)
    """
    rows = _checked(prob, labels, weights)
    found = calibration_from(calibration_sums(*rows), bins)
    return found if found.auc is None else replace(found, auc=_exact_area(*rows), auc_error=0.0)


def partition_calibration(
    partitions: Partitions, prob: BlockProb, bins: int = RELIABILITY_BINS
) -> ModelCalibration:
    """Return :func:`model_calibration` over partitions by one pass, the AUC by fine bins (E16).

    ``prob`` gives the probabilities (m,) of a block's rows, see :func:`fitted_prob`.
    """
    return calibration_from(sum_over(partitions, partial(_block_sums, prob=prob)), bins)


def fitted_prob(fit: LogisticFit, frame: Frame) -> BlockProb:
    """Return what gives a fit's probabilities of blocks whose columns are in a frame."""
    beta = frame.matrix() @ np.append(fit.coefficients, fit.intercept)
    return partial(_framed_prob, beta=beta)


def _framed_prob(block: Block, beta: FloatArray) -> FloatArray:
    return sigmoids(np.ascontiguousarray(beta[:-1] @ block.columns + beta[-1]), shift=0.0)


def _block_sums(block: Block, prob: BlockProb) -> CalibrationSums:
    weights = block.weights if len(block.weights) else None
    return calibration_sums(*_checked(prob(block), block.labels, weights))


def _checked(
    prob: FloatArray, labels: LabelArray | BoolArray, weights: FloatArray | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    if prob.ndim != 1 or not prob.size:
        raise InputError(f"Probabilities must be (m,) with m above 0, not {prob.shape}.")
    weights = np.ones(len(prob)) if weights is None else weights
    check_rows(len(prob), labels=labels, weights=weights)
    if not ((prob >= 0.0) & (prob <= 1.0)).all():
        raise InputError("Probabilities must lie between 0 and 1, none missing.")
    if not np.isin(labels, (0, 1)).all() or not (np.isfinite(weights) & (weights >= 0.0)).all():
        raise InputError("Labels must be 0 or 1, row weights finite and not negative.")
    return prob, labels.astype(np.float64), weights


def calibration_sums(prob: FloatArray, labels: FloatArray, weights: FloatArray) -> CalibrationSums:
    """Return what calibration needs of rows (m,) with labels 0 and 1; sums of rows add up."""
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


def auc(
    prob: FloatArray, labels: LabelArray | BoolArray, weights: FloatArray | None = None
) -> float:
    r"""Return the exact chance that a row of label 1 has a larger probability than one of label 0.

    .. math:: \text{AUC} = \frac{\sum_{i: y_i = 1} \sum_{j: y_j = 0} w_i w_j
       \left(1[p_i > p_j] + \tfrac{1}{2} 1[p_i = p_j]\right)}
       {\sum_{y_i = 1} w_i \sum_{y_j = 0} w_j} \qquad (E15)

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    rows = _, y, w = _checked(prob, labels, weights)
    if not w @ y > 0.0 or not w @ (1.0 - y) > 0.0:
        raise InputError("The AUC needs rows of both labels.")
    return _exact_area(*rows)


def _exact_area(prob: FloatArray, labels: FloatArray, weights: FloatArray) -> float:
    values, place = np.unique(prob, return_inverse=True)
    positive = _totals(place, weights * labels, len(values))
    return _area(positive, _totals(place, weights * (1.0 - labels), len(values)))[0]


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drift:
    r"""Replies against probabilities, round by round.

    .. math:: c_r = \frac{\sum_i A_{ir}}{\sum_i \hat\pi_{ir}} \qquad (E18)

    near 1 while the model holds.

    >>> found = Drift.of_rows(np.array([1, 1, 2, 2]), np.array([True, False, True, True]),
    ...                       np.array([0.5, 0.5, 0.4, 0.6]))
    >>> found.reply_rate, found.calibration_ratio
    (array([0.5, 1. ]), array([1., 2.]))
    """

    rounds: IntArray  # (R,)
    clients: IntArray  # (R,) that could have replied
    replies: IntArray  # (R,)
    prob_sum: FloatArray  # (R,)

    def __post_init__(self) -> None:
        check_rows(
            len(self.rounds), clients=self.clients, replies=self.replies, prob_sum=self.prob_sum
        )
        if not len(self.rounds):
            raise InputError("There are no rounds.")
        right = (self.clients > 0) & (self.replies >= 0) & (self.replies <= self.clients)
        right &= (self.prob_sum >= 0.0) & (self.prob_sum <= self.clients * (1.0 + 1e-9))
        if not right.all():
            raise InputError(
                f"Round {some(self.rounds[~right].tolist())}: replies and the sum of probabilities "
                "must lie between 0 and the number of clients, which must be above 0."
            )

    @classmethod
    def of_rows(cls, rounds: IntArray, replied: BoolArray, prob: FloatArray) -> Drift:
        """Return the drift of rows (m,), one for each client and round."""
        check_rows(len(rounds), replied=replied, prob=prob)
        known, place = np.unique(rounds, return_inverse=True)
        counts = np.bincount(place, minlength=len(known))
        replies = _totals(place, replied, len(known)).astype(np.int64)
        sums = _totals(place, prob, len(known))
        return cls(rounds=known, clients=counts, replies=replies, prob_sum=sums)

    @property
    def reply_rate(self) -> FloatArray:
        """Share of clients that replied, (R,)."""
        return self.replies / self.clients

    @property
    def mean_prob(self) -> FloatArray:
        """Mean probability, (R,)."""
        return self.prob_sum / self.clients

    @property
    def calibration_ratio(self) -> FloatArray:
        """Replies by the sum of probabilities (E18), (R,); NaN where that sum is 0."""
        expected = np.where(self.prob_sum > 0.0, self.prob_sum, np.nan)
        return self.replies / expected


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCell:
    """Replies of one group of rows."""

    key: tuple[str, ...]  # levels of the columns asked for
    rows: int
    replies: int

    @property
    def rate(self) -> float:
        """Share of rows with a reply."""
        return self.replies / self.rows


HOUR = pl.col(OPENED_AT).dt.hour().alias("hour")


def reply_rates(log: pl.LazyFrame, by: Sequence[str | pl.Expr]) -> tuple[RateCell, ...]:
    """Return counts of replies by columns of a log, ``HOUR`` among them where rounds have a time.

    >>> log = pl.LazyFrame({"os": ["a", "b", "a"], "replied": [True, False, False]})
    >>> [(cell.key, cell.replies, cell.rows) for cell in reply_rates(log, ["os"])]
    [(('a',), 1, 2), (('b',), 0, 1)]
    """
    keys = [pl.col(name) if isinstance(name, str) else name for name in by]
    lacking = {REPLIED, *(r for k in keys for r in k.meta.root_names())} - {*log.collect_schema()}
    if lacking or not keys:
        raise InputError(f"The log has no column {some(sorted(lacking)) or 'to group by'}.")
    query = log.group_by(keys).agg(
        pl.len().alias("(rows)"), pl.col(REPLIED).sum().alias("(replies)")
    )
    try:
        found = query.collect(engine="streaming")
    except pl.exceptions.PolarsError as error:  # the hour of a date, say
        raise InputError(f"The log cannot be grouped by {some(keys)}: {error}.") from error
    found = found.sort(found.columns[: len(keys)], nulls_last=True)
    return tuple(
        RateCell(key=tuple(MISSING if x is None else str(x) for x in key), rows=n, replies=replies)
        for *key, n, replies in found.iter_rows()
    )
