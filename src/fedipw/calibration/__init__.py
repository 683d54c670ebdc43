"""From a few population totals to weights: calibration of the enrolled clients."""

from fedipw.calibration.design import BalanceDesign, Dense, Margins
from fedipw.calibration.distances import (
    Distance,
    Entropy,
    InverseLogit,
    Linear,
    Logit,
    Quadratic,
)
from fedipw.calibration.dual import Status
from fedipw.calibration.noise import trusted_target
from fedipw.calibration.partitioned import Partitioned
from fedipw.calibration.result import Box, Calibration, Ridge, Slack
from fedipw.calibration.solve import calibrated
from fedipw.calibration.units import balancing, calibrated_table

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
    "balancing",
    "calibrated",
    "calibrated_table",
    "trusted_target",
]
