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
from fedipw.evaluation.sensitivity import SensitivityBounds, odds_ratio_at, sensitivity_bounds

__all__ = [
    "HOUR",
    "BalanceTable",
    "Drift",
    "ModelCalibration",
    "Moments",
    "RateCell",
    "SensitivityBounds",
    "WeightDiagnostics",
    "auc",
    "balance_groups",
    "fitted_prob",
    "model_calibration",
    "odds_ratio_at",
    "partition_calibration",
    "partition_moments",
    "reply_rates",
    "sensitivity_bounds",
    "standardised_differences",
    "weight_diagnostics",
    "weighted_moments",
]
