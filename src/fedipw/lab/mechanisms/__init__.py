"""How clients get selected: enrollment once, participation round by round."""

from fedipw.lab.mechanisms.base import (
    EnrollmentMechanism,
    LogisticEnrollment,
    ParticipationMechanism,
    ParticipationProcess,
    RoundDraw,
    enrollment_draw,
)
from fedipw.lab.mechanisms.simulated import DailyParticipation, DataAvailability, MarkovAvailability
from fedipw.lab.mechanisms.trace import TraceAvailability

__all__ = [
    "DailyParticipation", "DataAvailability", "EnrollmentMechanism", "LogisticEnrollment",
    "MarkovAvailability", "ParticipationMechanism", "ParticipationProcess", "RoundDraw",
    "TraceAvailability", "enrollment_draw",
]  # fmt: skip
