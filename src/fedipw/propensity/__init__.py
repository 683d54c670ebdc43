"""Probabilities of both selection stages, estimated."""

from fedipw.propensity.enrollment import EnrollmentFit, enrollment_fit
from fedipw.propensity.history import ReplyHistory
from fedipw.propensity.logistic import NewtonLogistic
from fedipw.propensity.model import PropensityModel, cross_fitted_prob
from fedipw.propensity.participation import (
    FitWindow,
    ParticipationModel,
    ParticipationSettings,
    Source,
)
from fedipw.propensity.reference import ReferenceFit, reference_sample_fit

__all__ = [
    "EnrollmentFit",
    "FitWindow",
    "NewtonLogistic",
    "ParticipationModel",
    "ParticipationSettings",
    "PropensityModel",
    "ReferenceFit",
    "ReplyHistory",
    "Source",
    "cross_fitted_prob",
    "enrollment_fit",
    "reference_sample_fit",
]
