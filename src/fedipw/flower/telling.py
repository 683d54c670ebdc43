"""What a round tells people and programs: metrics, and lines of the log."""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import polars as pl
    from flwr.app import MetricRecord

    from fedipw.flower.fates import Settled
    from fedipw.flower.screen import Screen, Screened
    from fedipw.weighting.rounds import RoundWeights

PREFIX: Final = "fedipw-"  # of the metrics added to a strategy's own
_LOG = getLogger("flwr.fedipw")


Facts = Mapping[str, float | list[float]]


def add_facts(metrics: MetricRecord, facts: Facts) -> None:
    """Add facts of a round to its metrics."""
    for name, value in facts.items():
        metrics[f"{PREFIX}{name}"] = value


def round_facts(fates: Settled, found: RoundWeights | None) -> dict[str, float | list[float]]:
    """Return what became of invitations, the weights in the order of the ledger, and diagnostics.

    A reply has no weight, and is not weighed, where a model lacks a value or does not know a level.
    """
    facts: dict[str, float | list[float]] = {
        "invited": len(fates.fates), **fates.counts(), "strays": fates.strays, "weighed": 0,
    }  # fmt: skip
    if found is None:
        return facts
    replies = found.replies
    facts |= {
        "weighed": len(found.weights),
        "weights": found.weights.tolist(),
        "weight-sum": found.total,
        "weight-largest": float(np.abs(found.weights).max()),
        "weights-negative": found.negative,
        "weights-trimmed": 0 if found.trimming is None else found.trimming.changed,
        "effective-replies": found.effective_replies,
        "participation-smallest": float(replies.participation_prob.min()),
    }
    if not np.isnan(replies.inclusion_prob).any():
        facts["inclusion-smallest"] = float(replies.inclusion_prob.min())
    return facts


def update_facts(
    found: RoundWeights | None, screening: Screened, screen: Screen, *, private: bool
) -> dict[str, float]:
    """Return what is known of the updates; if they are private, only what is known without them."""
    facts: dict[str, float] = {}
    if not private:
        facts["update-norm-largest"] = screening.largest_norm
    if screen.clip is not None:
        largest = 0.0 if found is None else float(np.abs(found.weights).max())
        facts["influence"] = screen.clip * largest
        if not private:
            facts["clipped"] = screening.clipped
    return facts


def log_round(
    work: str, index: int, fates: Settled, found: RoundWeights | None, ids: pl.Series
) -> None:
    """Log what became of a round, for people; ``ids`` are those of the clients by place."""
    told = ", ".join(f"{n} {fate}" for fate, n in fates.counts().items() if n)
    _LOG.info(
        "FedIPW: %s of round %d, %d invited: %s", work, index, len(fates.fates), told or "nobody"
    )
    for place, reason in fates.reasons.items():
        _LOG.warning("FedIPW: the reply of %r is left out: %s", ids[place], reason)
    if found is None:
        _LOG.warning("FedIPW: nothing to weigh in round %d: it is recorded and skipped", index)
        return
    _LOG.info(
        "FedIPW: weights sum to %.4g and count as %.4g replies; participation from %s%s",
        found.total, found.effective_replies, found.replies.source.value,
        f"; {found.note}" if found.note else "",
    )  # fmt: skip
