"""What a scheme converges to, and how far that is from the target."""

from fedipw.theory.limit import ErrorParts, LimitWeights, error_parts, lottery_term
from fedipw.theory.objective import FederatedLogistic, target_weights

__all__ = [
    "ErrorParts",
    "FederatedLogistic",
    "LimitWeights",
    "error_parts",
    "lottery_term",
    "target_weights",
]
