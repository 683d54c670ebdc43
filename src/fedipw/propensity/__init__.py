"""Probabilities of both selection stages, estimated."""

from fedipw.propensity.crossfit import (
    CrossFit,
    Isotonic,
    Platt,
    ScoreCalibration,
    client_folds,
    cross_fit,
    cross_fitted_prob,
)
from fedipw.propensity.enrollment import EnrollmentFit, enrollment_fit
from fedipw.propensity.fit import LogisticFit, logistic_fit
from fedipw.propensity.history import ReplyHistory
from fedipw.propensity.logged import LoggedParticipation
from fedipw.propensity.logistic import NewtonLogistic
from fedipw.propensity.model import PropensityModel
from fedipw.propensity.participation import (
    FitWindow,
    ParticipationModel,
    ParticipationSettings,
    Source,
)
from fedipw.propensity.reference import ReferenceFit, reference_sample_fit
from fedipw.propensity.stage import StageModel
from fedipw.propensity.steplog import LogSettings, LogWindow
from fedipw.propensity.steps import Formulas, Step, participation_steps
from fedipw.propensity.tables import CodedTable, TableSettings, table_model

__all__ = [
    "CodedTable",
    "CrossFit",
    "EnrollmentFit",
    "FitWindow",
    "Formulas",
    "Isotonic",
    "LogSettings",
    "LogWindow",
    "LoggedParticipation",
    "LogisticFit",
    "NewtonLogistic",
    "ParticipationModel",
    "ParticipationSettings",
    "Platt",
    "PropensityModel",
    "ReferenceFit",
    "ReplyHistory",
    "ScoreCalibration",
    "Source",
    "StageModel",
    "Step",
    "TableSettings",
    "client_folds",
    "cross_fit",
    "cross_fitted_prob",
    "enrollment_fit",
    "logistic_fit",
    "participation_steps",
    "reference_sample_fit",
    "table_model",
]
