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
from fedipw.weights.live import LiveLog
from fedipw.weights.logged import Logged
from fedipw.weights.logrun import LogPlan, LogRecord, logged_weights
from fedipw.weights.means import WeightedMean, hajek_mean, horvitz_thompson_mean
from fedipw.weights.people import KnownPopulation, KnownTotals
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
from fedipw.weights.standing import People, Standing
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
    "KnownPopulation",
    "KnownTotals",
    "LiveLog",
    "LogPlan",
    "LogRecord",
    "Logged",
    "Method",
    "ParticipationOnly",
    "People",
    "Propensities",
    "RoundOpening",
    "RoundReplies",
    "RoundWeights",
    "SampleHajek",
    "Scheme",
    "Standing",
    "Target",
    "TrimReport",
    "TwoStage",
    "Unmodelled",
    "Weigher",
    "WeightedMean",
    "clamped",
    "effective_sample_size",
    "estimated_population_size",
    "hajek_mean",
    "hajek_weights",
    "horvitz_thompson_mean",
    "horvitz_thompson_weights",
    "logged_weights",
    "method_named",
    "trimmed",
]
