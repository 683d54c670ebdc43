"""Probabilities of both selection stages, estimated."""

from fedipw.selection.crossfit import (
    CrossFit,
    Isotonic,
    Platt,
    ScoreCalibration,
    client_folds,
    cross_fit,
    cross_fitted_prob,
)
from fedipw.selection.enrollment import EnrollmentFit, enrollment_fit
from fedipw.selection.fit import LogisticFit, logistic_fit
from fedipw.selection.history import ReplyHistory
from fedipw.selection.logged import LoggedParticipation
from fedipw.selection.logistic import NewtonLogistic
from fedipw.selection.model import PropensityModel
from fedipw.selection.participation import (
    FitWindow,
    ParticipationModel,
    ParticipationSettings,
    Source,
)
from fedipw.selection.reference import ReferenceFit, reference_sample_fit
from fedipw.selection.stage import StageModel
from fedipw.selection.steplog import LogSettings, LogWindow
from fedipw.selection.steps import Formulas, Step, participation_steps
from fedipw.selection.tables import CodedTable, TableSettings, table_model

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
