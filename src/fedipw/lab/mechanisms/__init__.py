"""How clients get selected: enrollment once, participation round by round."""

from fedipw.lab.mechanisms.availability import DataAvailability, MarkovAvailability
from fedipw.lab.mechanisms.base import (
    EnrollmentMechanism,
    ParticipationMechanism,
    ParticipationProcess,
    RoundDraw,
)
from fedipw.lab.mechanisms.daily import DailyParticipation
from fedipw.lab.mechanisms.enrollment import LogisticEnrollment, enrollment_draw
from fedipw.lab.mechanisms.trace import TraceAvailability
from fedipw.lab.mechanisms.waves import WaveParticipation

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
