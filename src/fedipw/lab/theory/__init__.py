"""What a scheme converges to, how far that is from the target, and what bounds it."""

from fedipw.evaluation.sensitivity import (
    WeightErrors,
    sensitivity_errors,
    sensitivity_ratios,
)
from fedipw.lab.theory.bound import (
    Bound,
    Condition,
    Schedule,
    convergence_bound,
    printed_bound,
    recommended_schedule,
    step_limit,
    variance_constant,
)
from fedipw.lab.theory.constants import (
    Grade,
    ProblemConstants,
    estimated_constants,
    logistic_constants,
)
from fedipw.lab.theory.floors import (
    SensitivityFloor,
    efficiency_bound,
    enrollment_costs,
    estimated_efficiency_bound,
    exact_floor,
    first_order_floor,
    largest_floor,
    participation_only_errors,
    redrawn_variance,
    residual_variance,
    sensitivity_floor,
    weight_errors,
)
from fedipw.lab.theory.instances import ConvexTriple, CurvedPair, TwoClients, UnequalPair
from fedipw.lab.theory.limit import ErrorParts, LimitWeights, error_parts, lottery_term
from fedipw.lab.theory.objective import FederatedLogistic, target_weights

__all__ = [
    "Bound", "Condition", "ConvexTriple", "CurvedPair", "ErrorParts", "FederatedLogistic", "Grade",
    "LimitWeights", "ProblemConstants", "Schedule", "SensitivityFloor", "TwoClients", "UnequalPair",
    "WeightErrors",
    "convergence_bound", "efficiency_bound", "enrollment_costs", "error_parts",
    "estimated_constants", "estimated_efficiency_bound", "exact_floor", "first_order_floor",
    "largest_floor", "logistic_constants", "lottery_term", "participation_only_errors",
    "printed_bound", "recommended_schedule", "redrawn_variance", "residual_variance",
    "sensitivity_errors", "sensitivity_floor", "sensitivity_ratios", "step_limit", "target_weights",
    "variance_constant", "weight_errors",
]  # fmt: skip
