"""Coefficients of a selection model with odds ratios, intervals and p-values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from scipy.special import erfc, ndtri

from fedipw.selection.classifiers import Fit
from fedipw.selection.logistic import LogisticFit
from fedipw.selection.saved import ENROLLMENT, StageModel

CONFIDENCE: Final = 0.95  # of the intervals
INTERCEPT: Final = "(intercept)"
PENALISED_NOTE: Final = (
    "Coefficients of a penalised fit are shrunk towards 0: they have no intervals and no p-values."
)
CLASSIFIER_NOTE: Final = "A classifier has no coefficients."
ROWS_NOTE: Final = (
    "Rows of a client in several rounds are counted as independent: where its replies are related, "
    "intervals are too short and p-values too small."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    r"""One coefficient of a logistic model, with Wald's interval and test.

    .. math:: e^{\hat\beta \pm z_{1-\alpha/2}\, s}, \qquad p = 2\, \Phi(-|\hat\beta| / s)
       \qquad (P9)

    with s the standard error from the observed information, as R's ``glm``, ``confint.default`` and
    ``summary`` give them. What is not finite, or has no standard error, is none.

    Examples
    --------
    >>> found = Coefficient.of("age", 0.7, 0.2)
    >>> [round(x, 4) for x in (found.odds_ratio, found.low, found.high, found.p_value)]
    [2.0138, 1.3607, 2.9802, 0.0005]
    >>> Coefficient.of("age", 0.7, 0.2, tested=False).p_value is None
    True
    """

    name: str
    value: float  # on the scale of log odds
    standard_error: float | None
    odds_ratio: float | None = None
    low: float | None = None  # of the odds ratio, at 95%
    high: float | None = None
    p_value: float | None = None  # of the coefficient being 0

    @classmethod
    def of(
        cls, name: str, value: float, standard_error: float, *, tested: bool = True
    ) -> Coefficient:
        """Return a coefficient; not ``tested``, it has no interval and no p-value."""
        known = math.isfinite(standard_error) and standard_error > 0.0
        half = float(ndtri(0.5 + CONFIDENCE / 2.0)) * standard_error
        test = known and tested
        return cls(
            name=name,
            value=value,
            standard_error=standard_error if known else None,
            odds_ratio=_exp(value) if known else None,
            low=_exp(value - half) if test else None,
            high=_exp(value + half) if test else None,
            p_value=float(erfc(abs(value) / standard_error / math.sqrt(2.0))) if test else None,
        )


def _exp(value: float) -> float | None:
    try:
        return math.exp(value)
    except OverflowError:
        return None


def coefficients_of(fit: Fit) -> tuple[Coefficient, ...]:
    """Return the coefficients of a fit, the intercept last; a classifier or a rate has none.

    Those left out of the fit are 0, without a standard error.
    """
    if not isinstance(fit, LogisticFit):
        return ()
    names, values = (*fit.names, INTERCEPT), fit.point.tolist()
    return tuple(
        Coefficient.of(name, value, error, tested=fit.l2 == 0.0)
        for name, value, error in zip(names, values, fit.standard_errors.tolist(), strict=True)
    )


def coefficient_notes(model: StageModel) -> tuple[str, ...]:
    """Return how the coefficients of a stage should be taken, a sentence each."""
    fit = model.fit
    if not isinstance(fit, LogisticFit):
        return (CLASSIFIER_NOTE,)
    if fit.l2 > 0.0:
        return (PENALISED_NOTE,)
    return () if model.stage == ENROLLMENT else (ROWS_NOTE,)
