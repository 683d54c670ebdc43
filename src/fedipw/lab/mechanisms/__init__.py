"""How clients get selected: enrollment once, participation round by round."""

from fedipw.lab.mechanisms.base import (
    EnrollmentMechanism,
    LogisticEnrollment,
    ParticipationMechanism,
    ParticipationProcess,
    RoundDraw,
    enrollment_draw,
)
from fedipw.lab.mechanisms.drifting import (
    ChangePointParticipation,
    DriftingParticipation,
    ScaledSineAvailability,
    SineParticipation,
    TrendParticipation,
)
from fedipw.lab.mechanisms.simulated import DailyParticipation, DataAvailability, MarkovAvailability
from fedipw.lab.mechanisms.trace import TraceAvailability

__all__ = [
    "ChangePointParticipation", "DailyParticipation", "DataAvailability", "DriftingParticipation",
    "EnrollmentMechanism", "LogisticEnrollment", "MarkovAvailability", "ParticipationMechanism",
    "ParticipationProcess", "RoundDraw", "ScaledSineAvailability", "SineParticipation",
    "TraceAvailability", "TrendParticipation", "enrollment_draw",
]  # fmt: skip
