"""From a few population totals to weights: calibration of the enrolled clients."""

from fedipw.calibration.design import BalanceDesign, Dense, Margins, Partitioned
from fedipw.calibration.distances import (
    Distance,
    Entropy,
    InverseLogit,
    Linear,
    Logit,
    Quadratic,
    distance_named,
)
from fedipw.calibration.dual import Status
from fedipw.calibration.solve import Box, Calibration, Ridge, Slack, calibrated, trusted_target
from fedipw.calibration.tables import calibrated_table

__all__ = [
    "BalanceDesign",
    "Box",
    "Calibration",
    "Dense",
    "Distance",
    "Entropy",
    "InverseLogit",
    "Linear",
    "Logit",
    "Margins",
    "Partitioned",
    "Quadratic",
    "Ridge",
    "Slack",
    "Status",
    "calibrated",
    "calibrated_table",
    "distance_named",
    "trusted_target",
]
