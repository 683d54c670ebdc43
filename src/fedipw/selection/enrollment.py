"""Enrollment probabilities, fitted once on the population table before the first round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_probability, some
from fedipw.selection.crossfit import ScoreCalibration, cross_fitted_prob
from fedipw.selection.model import PropensityModel, fitted_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedipw.numerics.types import FloatArray
    from fedipw.tables.population import Population


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnrollmentFit:
    """Estimated P(E = 1 | Z) of every client, and the model behind it (none if cross-fitted)."""

    columns: tuple[str, ...]
    prob: FloatArray  # (N,)
    model: PropensityModel | None
    dropped: tuple[str, ...]  # collinear or constant columns left out of the fit


def enrollment_fit(
    population: Population,
    columns: Sequence[str] | None = None,
    *,
    classifier: Any = None,
    folds: int | None = None,
    calibration: ScoreCalibration | None = None,
    rng: np.random.Generator | None = None,
) -> EnrollmentFit:
    """Fit P(E = 1 | Z) on pre-enrollment columns.

    Parameters
    ----------
    population
        Table with ``enrolled``.
    columns
        Pre-enrollment covariates; all by default. A post-enrollment column is refused.
    classifier
        Any scikit-learn classifier; unpenalised logistic regression by default.
    folds
        Cross-fit with this many folds (advised for machine-learning classifiers).
    calibration
        ``Platt()`` or ``Isotonic()`` of the scores of folds left out; needs folds.
    rng
        Chance for the folds.

    Examples
    --------
    >>> from fedipw.lab.testbed import Testbed
    >>> from fedipw.lab.mechanisms import LogisticEnrollment, enrollment_draw
    >>> rng = np.random.default_rng(0)
    >>> people = Testbed(size=400).draw(rng).population
    >>> people = people.with_enrolled(enrollment_draw(LogisticEnrollment()(people), rng))
    >>> fit = enrollment_fit(people)
    >>> bool(np.isclose(fit.prob.mean(), people.enrolled.mean()))  # the score equation
    True
    """
    names = population.covariates if columns is None else tuple(columns)
    population.require(names)
    late = [n for n in names if n in population.post_enrollment]
    if late:
        raise InputError(
            f"{some(repr(n) for n in late)} is known only after enrollment (null for all "
            f"{population.size - population.enrolled_size} non-enrolled clients), so it cannot "
            "explain enrollment. Leave it to the participation stage."
        )
    if not names:
        raise InputError("Enrollment needs at least one covariate.")
    Z, enrolled = population.matrix(names), population.enrolled
    if enrolled.all():
        raise InputError(
            f"All {population.size} clients are enrolled: there is no enrollment stage to correct, "
            "or the table lists only enrolled clients. Use participation weights alone, or "
            "calibrate to population totals."
        )
    if calibration is not None and folds is None:
        raise InputError("Scores are calibrated out of fold: give the number of folds.")
    if folds is None:
        model = fitted_model(classifier, Z, enrolled, names)
        prob = model.predict_proba(Z)[:, 1]
        dropped = getattr(model.classifier_, "dropped_", ())
    else:
        if rng is None:
            raise InputError("Cross-fitting draws folds: pass rng=numpy.random.default_rng(seed).")
        units = np.arange(population.size)
        prob = cross_fitted_prob(
            classifier, Z, enrolled, units, folds=folds, rng=rng, names=names,
            calibration=calibration,
        )  # fmt: skip
        model, dropped = None, ()
    check_probability(prob[enrolled], "fitted enrollment probability of enrolled clients")
    return EnrollmentFit(
        columns=names, prob=prob, model=model, dropped=tuple(names[j] for j in dropped)
    )
