"""One number per reply: weights, schemes, and the weigher every engine uses."""

from fedipw.weighting.balance import Balance
from fedipw.weighting.functions import (
    TrimReport,
    clamped,
    effective_sample_size,
    estimated_population_size,
    hajek_weights,
    horvitz_thompson_weights,
    trimmed,
)
from fedipw.weighting.live import LiveLog
from fedipw.weighting.logged import Logged
from fedipw.weighting.logrun import LogPlan, LogRecord, logged_weights
from fedipw.weighting.means import WeightedMean, hajek_mean, horvitz_thompson_mean
from fedipw.weighting.people import KnownPopulation, KnownTotals
from fedipw.weighting.registry import METHODS, Facts, Method, Target, method_named
from fedipw.weighting.rounds import RoundOpening, RoundReplies, RoundWeights
from fedipw.weighting.schemes import (
    Calibrated,
    FedAvg,
    Greg,
    Hajek,
    HorvitzThompson,
    ParticipationOnly,
    SampleHajek,
    Scheme,
)
from fedipw.weighting.sources import Collapsed, Known, Propensities, TwoStage, Unmodelled
from fedipw.weighting.standing import People, Standing
from fedipw.weighting.weigher import Weigher

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
