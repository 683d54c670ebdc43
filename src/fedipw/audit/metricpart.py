"""The part of an audit that tells of a metric."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedipw.audit.parts import EstimateLine, MetricPart, SensitivityLine
from fedipw.evaluation.estimates import EVERYONE
from fedipw.evaluation.evaluate import Evaluation, EvaluationPlan, evaluated
from fedipw.numerics.checks import some

if TYPE_CHECKING:
    from fedipw.evaluation.estimates import Estimate
    from fedipw.evaluation.logged import LoggedSample
    from fedipw.weighting.people import KnownPopulation, KnownTotals

ODDS_RATIOS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
_ROUNDING = 1e-12  # of the values, below which two means are the same


def metric_part(
    logged: LoggedSample,
    people: KnownPopulation | KnownTotals,
    method: str,
    *,
    name: str,
    plan: EvaluationPlan,
    min_cell: int,
) -> MetricPart:
    """Return a metric on the population, its groups, and how far unobserved drivers could go.

    Groups with fewer than ``min_cell`` clients that replied are left out and counted.
    """
    mean = float(logged.values.mean())
    asked = replace(plan, odds_ratios=ODDS_RATIOS, conclusion=mean)
    found = evaluated(logged, people, method, asked)
    same = abs(found.moved.difference) <= _ROUNDING * float(np.abs(logged.values).max())
    small = {e.group for e in found.estimates if e.clients < min_cell and e.group != EVERYONE}
    lines = tuple(_line(e) for e in found.estimates if e.group not in small)
    return MetricPart(
        name=name,
        rounds=found.rounds,
        confidence=plan.confidence,
        estimates=lines,
        sensitivity=tuple(
            SensitivityLine(
                odds_ratio=s.odds_ratio, low=s.low, high=s.high, weight_error=s.weight_error
            )
            for s in found.sensitivity
        ),
        plain_odds_ratio=_reverse(found),
        moved=_known(0.0 if same else found.moved.difference),
        moved_error=_known(found.moved.se),
        hidden=len(small),
        gain=_known(found.moved.gain),
        sensitivity_reason=found.sensitivity_reason,
    )


def _reverse(found: Evaluation) -> float | None:
    at = found.sensitivity[0].reverses_at if found.sensitivity else None
    return at if at is not None and math.isfinite(at) else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _line(line: Estimate) -> EstimateLine:
    return EstimateLine(
        group=line.group,
        estimator=line.estimator,
        estimate=_known(line.estimate),
        standard_error=_known(line.se),
        low=_known(line.low),
        high=_known(line.high),
        effective_sample_size=_known(line.effective_sample_size),
        clients=line.clients,
        replies=line.replies,
        reason=line.reason,
    )


def metric_notes(part: MetricPart, min_cell: int) -> tuple[str, ...]:
    """Return what people should know of a metric's part."""
    out = []
    if part.hidden:
        out.append(f"{part.hidden} group(s) of the metric have fewer than {min_cell} clients.")
    if part.sensitivity_reason:
        out.append(f"No sensitivity analysis: {part.sensitivity_reason}.")
    reasons = dict.fromkeys(e.reason for e in part.estimates if e.reason)
    for reason in reasons:
        who = [f"{e.estimator} of {e.group}" for e in part.estimates if e.reason == reason]
        out.append(f"{some(who)}: {reason}.")
    return tuple(out)
