"""How wrong weights are: raw, centred, root mean square, and under unobserved selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_probability, check_rows

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightErrors:
    r"""Three sizes of the weight ratio's distance from a constant.

    .. math::
       \epsilon_{raw} = \max_i |\rho_i - 1|, \qquad
       \epsilon_{centred} = \frac{\rho_{max} - \rho_{min}}{\rho_{max} + \rho_{min}}, \qquad
       \epsilon_{rms} = \sqrt{\text{mean}\,(\rho_i/\bar\rho - 1)^2} \qquad (T3)

    A constant ratio only rescales the step, so the raw error can be large where nothing is biased;
    the centred and the mean-square errors then vanish. Bounds stated for the centred error hold
    with the server step multiplied by ``step_factor`` :math:`c = (\rho_{max} + \rho_{min})/2`, as
    long as :math:`c\gamma \ge 1` and :math:`p_{min}` bounds :math:`c\hat p` too.
    """

    raw: float
    centred: float
    rms: float
    step_factor: float


def weight_errors(ratio: ArrayLike) -> WeightErrors:
    """Return the errors of weight ratios rho = p / p_hat, (n,), all above 0.

    >>> errors = weight_errors([0.5, 0.5, 0.5])  # half the step, and no bias at all
    >>> errors.raw, errors.centred, errors.rms
    (0.5, 0.0, 0.0)
    """
    rho = np.asarray(ratio, dtype=np.float64)
    if rho.size == 0 or not (np.isfinite(rho).all() and (rho > 0.0).all()):
        raise InputError("Weight ratios must be finite and above 0, and at least one.")
    top, bottom = float(rho.max()), float(rho.min())
    return WeightErrors(
        raw=float(np.abs(rho - 1.0).max()),
        centred=(top - bottom) / (top + bottom),
        rms=float(np.sqrt(np.mean((rho / rho.mean() - 1.0) ** 2))),
        step_factor=0.5 * (top + bottom),
    )


def weight_ratio(inclusion_prob: ArrayLike, used_prob: ArrayLike) -> FloatArray:
    r"""Return :math:`\rho_i = p_i / \hat p_i` (T3) of true and used probabilities, (n,)."""
    true = check_probability(inclusion_prob, "inclusion_prob")
    used = check_probability(used_prob, "used_prob")
    check_rows(len(true), used_prob=used)
    return true / used


def relative_ratio(expected: ArrayLike, reference: ArrayLike) -> FloatArray:
    """Return one scheme's expected weights (L1) against another's, both scaled to sum to n.

    With the target's equal weights as reference it is the ratio rho of the scheme itself, up to a
    common factor.
    """
    ours, theirs = np.asarray(expected, np.float64), np.asarray(reference, np.float64)
    check_rows(len(ours), reference=theirs)
    if not ((ours > 0.0).all() and (theirs > 0.0).all()):
        raise InputError("Expected weights must be above 0 to be compared.")
    ratio: FloatArray = (ours / ours.sum()) / (theirs / theirs.sum())
    return ratio


def participation_only_errors(enrollment_prob: ArrayLike) -> WeightErrors:
    r"""Return the errors left when participation is corrected and enrollment is not.

    Then :math:`\rho_i = \pi^{enr}_i` even with participation known exactly, so the raw error is
    :math:`\max_i |1 - \pi^{enr}_i|`: the corollary on enrollment omitted.

    >>> participation_only_errors([0.2, 0.6]).raw
    0.8
    """
    return weight_errors(check_probability(enrollment_prob, "enrollment_prob"))


def sensitivity_ratios(prob: ArrayLike, odds_ratio: float) -> tuple[FloatArray, FloatArray]:
    r"""Return the least and largest rho if unobserved drivers move the odds by up to Lambda.

    Under the marginal sensitivity model (Tan 2006) the true :math:`1/\pi` lies in
    :math:`1 + (1/\hat\pi - 1)[1/\Lambda, \Lambda]`, so

    .. math:: \rho = \frac{\pi}{\hat\pi} \in
       \left[\frac{1}{\hat\pi + (1 - \hat\pi)\Lambda},\;
       \frac{1}{\hat\pi + (1 - \hat\pi)/\Lambda}\right] \qquad (T4)

    >>> low, high = sensitivity_ratios([0.5], 1.0)
    >>> float(low[0]), float(high[0])
    (1.0, 1.0)
    """
    if not (np.isfinite(odds_ratio) and odds_ratio >= 1.0):
        raise InputError(f"Lambda is an odds ratio of at least 1, not {odds_ratio!r}.")
    hat = check_probability(prob, "prob")
    return 1.0 / (hat + (1.0 - hat) * odds_ratio), 1.0 / (hat + (1.0 - hat) / odds_ratio)


def sensitivity_errors(prob: ArrayLike, odds_ratio: float) -> WeightErrors:
    """Return the largest errors the marginal sensitivity model allows at Lambda.

    Raw and centred errors are attained, the centred one by two different clients at opposite ends
    of their ranges; the root mean square is an upper bound, the largest coefficient of variation
    of numbers no further apart.
    """
    low, high = sensitivity_ratios(prob, odds_ratio)
    raw = max(float(high.max()) - 1.0, 1.0 - float(low.min()))
    if len(low) == 1:  # a single client has nobody to differ from
        return WeightErrors(raw=raw, centred=0.0, rms=0.0, step_factor=float(low[0] + high[0]) / 2)
    highest, lowest = np.argsort(high)[-2:], np.argsort(low)[:2]
    pairs = [(float(high[i]), float(low[j])) for i in highest for j in lowest if i != j]
    top, bottom = max(pairs, key=lambda pair: pair[0] / pair[1])
    return WeightErrors(
        raw=raw,
        centred=(top - bottom) / (top + bottom),
        rms=(top - bottom) / (2.0 * float(np.sqrt(top * bottom))),
        step_factor=0.5 * (top + bottom),
    )
