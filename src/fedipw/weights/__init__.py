"""One number per reply: weights, schemes, and the weigher every engine uses."""

from fedipw.weights.balance import Balance
from fedipw.weights.functions import (
    TrimReport,
    clamped,
    effective_sample_size,
    estimated_population_size,
    hajek_weights,
    horvitz_thompson_weights,
    trimmed,
)
from fedipw.weights.registry import METHODS, Facts, Method, Target, method_named
from fedipw.weights.rounds import RoundOpening, RoundReplies, RoundWeights
from fedipw.weights.schemes import (
    Calibrated,
    FedAvg,
    Greg,
    Hajek,
    HorvitzThompson,
    ParticipationOnly,
    SampleHajek,
    Scheme,
)
from fedipw.weights.sources import Collapsed, Known, Propensities, TwoStage, Unmodelled
from fedipw.weights.weigher import Weigher

__all__ = [
    "METHODS",
    "Balance",
    "Calibrated",
    "Collapsed",
    "Facts",
    "FedAvg",
    "Greg",
    "Hajek",
    "HorvitzThompson",
    "Known",
    "Method",
    "ParticipationOnly",
    "Propensities",
    "RoundOpening",
    "RoundReplies",
    "RoundWeights",
    "SampleHajek",
    "Scheme",
    "Target",
    "TrimReport",
    "TwoStage",
    "Unmodelled",
    "Weigher",
    "clamped",
    "effective_sample_size",
    "estimated_population_size",
    "hajek_weights",
    "horvitz_thompson_weights",
    "method_named",
    "trimmed",
]
