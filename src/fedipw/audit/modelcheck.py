"""Whether the models of selection agree with what happened, beyond what chance explains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from fedipw.selection.stage import ENROLLMENT

if TYPE_CHECKING:
    from fedipw.audit.parts import Audit, StagePart

OFF = 0.1  # by which a model's totals may miss
ERRORS = 3.0  # standard errors they may miss by chance


class Faults(NamedTuple):
    """What does not agree, a clause each."""

    enrollment: tuple[str, ...]
    participation: tuple[str, ...]


def model_faults(audit: Audit) -> Faults:
    """Return where the selected are not those the models expect."""
    first = [s for s in audit.stages if s.stage == ENROLLMENT]
    later = [s for s in audit.stages if s.stage != ENROLLMENT]
    return Faults(
        (*_of_stages(first), *_of_size(audit)),
        (*_of_stages(later), *_of_last_rounds(audit)),
    )


def _beyond(ratio: float, expected: float) -> bool:
    """Return whether observed by expected is off, for a count with this mean."""
    return abs(ratio - 1.0) > max(OFF, ERRORS / math.sqrt(expected) if expected > 0.0 else OFF)


def _of_stages(stages: list[StagePart]) -> list[str]:
    out = []
    for stage in stages:
        ratio = stage.calibration_ratio
        expected = sum(bin_.count * bin_.mean_prob for bin_ in stage.reliability)
        if ratio is None or not _beyond(ratio, expected):
            continue
        out.append(
            f"{stage.stage} expects {1.0 / ratio:.2f} times those selected"
            if ratio > 0.0
            else f"{stage.stage} expects {expected:.0f} and none were selected"
        )
    return out


def _of_last_rounds(audit: Audit) -> list[str]:
    told = [
        ((line.last - line.first + 1) * line.enrolled * line.expected_rate, line.calibration_ratio)
        for line in audit.rounds
        if line.expected_rate is not None and line.calibration_ratio is not None
    ]
    late = told[-max(1, len(told) // 4) :]
    expected = sum(count for count, _ in late)
    if not expected > 0.0:
        return []
    ratio = sum(count * ratio for count, ratio in late) / expected
    if not _beyond(ratio, expected):
        return []
    return [f"in the last rounds {ratio:.2f} replies came for each expected"]


def _of_size(audit: Audit) -> list[str]:
    reach, population = audit.overlap, audit.sizes.population
    if reach is None or reach.estimated_size is None or not population:
        return []
    left_out = sum(s.left_out for s in audit.stages if s.stage == ENROLLMENT)
    known = population - left_out  # weights stand for clients with all their values
    ratio = reach.estimated_size / known if known > 0.0 else math.inf
    if not _beyond(ratio, reach.effective_sample_size or math.inf):
        return []
    return [f"weights of the enrolled sum to {ratio:.2f} times the population"]
