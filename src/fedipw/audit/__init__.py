"""Audits: who is missing, how much it matters, how far to trust the weights, as plain values."""

from fedipw.audit.gather import audit_facts
from fedipw.audit.metricpart import metric_part
from fedipw.audit.parts import Audit, Finding, Level, Verdict
from fedipw.audit.verdict import judged

__all__ = [
    "Audit",
    "Finding",
    "Level",
    "Verdict",
    "audit_facts",
    "judged",
    "metric_part",
]
