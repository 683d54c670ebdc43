"""Targets with standard errors: how far each is to be believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedipw.calibration.design import BalanceDesign, Frame, gram
from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics.types import FloatArray

TYPICAL_SHIFT = 0.55


def trusted_target(
    design: BalanceDesign,
    base: FloatArray,
    target: FloatArray,
    se: ArrayLike,
    *,
    typical_shift: float = TYPICAL_SHIFT,
) -> FloatArray:
    r"""Return targets drawn towards the enrolled means as far as their errors ask for, (q,).

    .. math:: \tilde\mu = m + S\, \kappa^2 R\, (\kappa^2 R + T)^{-1} S^{-1} (\hat\mu - m),
       \qquad T = \text{diag}(se_j^2 / s_j^2) \qquad (C10)

    m, S = diag(s) and R are the enrolled clients' means, standard deviations and correlations. This
    is the best linear guess of the population means when their shifts from the enrolled have
    standard deviation :math:`\kappa` (``typical_shift``, in standard deviations of the column) and
    correlate as the columns do. A target without error is believed, if the others do not
    contradict it; one with a large error moves the weights little. For uncorrelated columns the
    shift shrinks by :math:`\kappa^2/(\kappa^2 + se_j^2/s_j^2)`.
    """
    errors = np.array(se, dtype=np.float64)
    if errors.shape != target.shape or not np.isfinite(errors).all() or (errors < 0.0).any():
        raise InputError("Standard errors must be finite, 0 or more, and one per target.")
    check_positive(typical_shift, "typical_shift")
    moments = design.moments
    varies = moments.least < moments.largest
    scale = np.where(varies, moments.deviation, 1.0)
    square = gram(design, base, Frame(moments.mean, scale))
    centre = square[-1, :-1] / square[-1, -1]
    covariance = square[:-1, :-1] / square[-1, -1] - np.outer(centre, centre)
    prior = typical_shift**2 * np.where(np.outer(varies, varies), covariance, 0.0)
    enrolled = moments.mean + scale * centre
    shift = np.where(varies, (target - enrolled) / scale, 0.0)
    whole = prior + np.diag(errors**2 / scale**2)
    believed = prior @ np.linalg.lstsq(whole, shift, rcond=1e-12)[0]
    out: FloatArray = np.where(errors.any(), enrolled + scale * believed, target)
    return np.where(varies, out, target)
