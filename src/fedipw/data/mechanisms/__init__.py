"""How clients get selected: enrollment once, participation round by round."""

from fedipw.data.mechanisms.availability import DataAvailability, MarkovAvailability
from fedipw.data.mechanisms.base import (
    EnrollmentMechanism,
    ParticipationMechanism,
    ParticipationProcess,
    RoundDraw,
)
from fedipw.data.mechanisms.daily import DailyParticipation
from fedipw.data.mechanisms.enrollment import LogisticEnrollment, enrollment_draw
from fedipw.data.mechanisms.trace import TraceAvailability
from fedipw.data.mechanisms.waves import WaveParticipation

__all__ = [
    "DailyParticipation",
    "DataAvailability",
    "EnrollmentMechanism",
    "LogisticEnrollment",
    "MarkovAvailability",
    "ParticipationMechanism",
    "ParticipationProcess",
    "RoundDraw",
    "TraceAvailability",
    "WaveParticipation",
    "enrollment_draw",
]
