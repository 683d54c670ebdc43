"""Metrics of the target population from replies: estimates, and how far to trust them."""

from fedipw.evaluation.balance import (
    BalanceTable,
    Moments,
    balance_groups,
    partition_moments,
    standardised_differences,
    weighted_moments,
)
from fedipw.evaluation.diagnostics import (
    HOUR,
    Drift,
    ModelCalibration,
    RateCell,
    WeightDiagnostics,
    auc,
    fitted_prob,
    model_calibration,
    partition_calibration,
    reply_rates,
    weight_diagnostics,
)
from fedipw.evaluation.estimates import (
    Estimate,
    Estimator,
    GregMean,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    population_means,
)
from fedipw.evaluation.evaluate import (
    Evaluation,
    EvaluationPlan,
    Sensitivity,
    evaluated,
    groups_by,
)
from fedipw.evaluation.fitted import fitted_two_phase
from fedipw.evaluation.jackknife import jackknife_means
from fedipw.evaluation.logged import LoggedSample, logged_two_phase
from fedipw.evaluation.metrics import Metrics
from fedipw.evaluation.plain import Moved, moved_by_weights, plain_means
from fedipw.evaluation.sensitivity import SensitivityBounds, odds_ratio_at, sensitivity_bounds
from fedipw.evaluation.stages import (
    CalibratedEnrollment,
    EnrollmentPhase,
    FittedEnrollment,
    KnownEnrollment,
)
from fedipw.evaluation.steps import StepPhase
from fedipw.evaluation.twophase import TwoPhase, Variance

__all__ = [
    "HOUR",
    "BalanceTable",
    "CalibratedEnrollment",
    "Drift",
    "EnrollmentPhase",
    "Estimate",
    "Estimator",
    "Evaluation",
    "EvaluationPlan",
    "FittedEnrollment",
    "GregMean",
    "Group",
    "HajekMean",
    "HorvitzThompsonMean",
    "KnownEnrollment",
    "LoggedSample",
    "Metrics",
    "ModelCalibration",
    "Moments",
    "Moved",
    "RateCell",
    "Sensitivity",
    "SensitivityBounds",
    "StepPhase",
    "TwoPhase",
    "Variance",
    "WeightDiagnostics",
    "auc",
    "balance_groups",
    "evaluated",
    "fitted_prob",
    "fitted_two_phase",
    "groups_by",
    "jackknife_means",
    "logged_two_phase",
    "model_calibration",
    "moved_by_weights",
    "odds_ratio_at",
    "partition_calibration",
    "partition_moments",
    "plain_means",
    "population_means",
    "reply_rates",
    "sensitivity_bounds",
    "standardised_differences",
    "weight_diagnostics",
    "weighted_moments",
]
