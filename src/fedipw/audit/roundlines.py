"""Rounds of a ledger as lines: replies against what was expected, and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.audit.parts import RoundLine
from fedipw.selection.participation import Source
from fedipw.tables.ledger import AVAILABLE, INVITE_PROB, INVITED, OPENED_AT, REPLIED

if TYPE_CHECKING:
    from fedipw.selection.logged import StepRows
    from fedipw.weighting.rounds import RoundWeights

MOST_ROUNDS = 400  # shown one by one
MERGED_ROUNDS = 200  # lines, where there are more


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """What is kept of one round; NaN is unknown."""

    index: int
    opened_at: str | None
    rows: int
    invited: int
    replies: int
    expected: float  # replies
    observed: float  # replies, in proportion to the expected ones (E18)
    effective: float
    weight_sum: float
    largest_share: float
    skipped: bool

    @classmethod
    def of(
        cls, index: int, table: pl.DataFrame, steps: Sequence[StepRows], found: RoundWeights | None
    ) -> RoundFacts:
        """Return the facts of a round from its rows, its steps and its weights."""
        share, ratio = expected_share(table, steps)
        total = np.nan if found is None else found.total
        return cls(
            index=index,
            opened_at=_moment(table),
            rows=table.height,
            invited=int(table[INVITED].sum()),
            replies=int(table[REPLIED].sum()),
            expected=share * table.height,
            observed=share * table.height * ratio,
            effective=np.nan if found is None else found.effective_replies,
            weight_sum=total,
            largest_share=float(found.weights.max()) / total if found and total > 0.0 else np.nan,
            skipped=found is None,
        )


def expected_share(table: pl.DataFrame, steps: Sequence[StepRows]) -> tuple[float, float]:
    r"""Return the share of a round's rows expected to reply, and replies by expected ones (E18).

    .. math:: \prod_k \frac{1}{|C_k|} \sum_{i \in C_k} \hat p_{ik}

    with :math:`C_k` the rows that could pass step k and whose probability is known. The means of
    later steps are over those who got there, so nothing is needed of clients that were offline or
    not invited, and the product is a consistent estimate of the mean of (P5) over all rows. The
    step *invited* has the server's own probabilities, or the share that was invited where these
    are not known of everyone who could be. Both are NaN where a step was given no probability.
    """
    share, ratio = 1.0, 1.0
    for k, step in enumerate(steps):
        known = ~np.isnan(step.prob)
        if not known.any():
            return np.nan, np.nan
        mean = float(step.prob[known].mean())
        share *= mean * (len(known) / table.height if k == 0 else 1.0)  # of all clients: collapsed
        ratio *= float(step.passed[known].mean()) / mean if mean > 0.0 else np.nan
    if steps and steps[-1].among == INVITED:
        mean, passed = _invitations(table)
        share, ratio = share * mean, ratio * (passed / mean if mean > 0.0 else np.nan)
    return (share, ratio) if steps else (np.nan, np.nan)


def _invitations(table: pl.DataFrame) -> tuple[float, float]:
    """Return the mean probability of an invitation and the share invited, of those available."""
    could = table.filter(AVAILABLE) if AVAILABLE in table.columns else table
    passed = could[INVITED].to_numpy()
    prob = could[INVITE_PROB].cast(pl.Float64).fill_null(np.nan).to_numpy()
    if not len(prob):
        return np.nan, np.nan
    mean = float(prob.mean())
    share = float(passed.mean())
    return (share if np.isnan(mean) else mean), share


def _moment(table: pl.DataFrame) -> str | None:
    if OPENED_AT not in table.columns or not table.height:
        return None
    moment = table[OPENED_AT][0]
    return moment.isoformat() if hasattr(moment, "isoformat") else str(moment)


def own_rate(steps: Sequence[StepRows]) -> bool:
    """Return whether a step was given the round's own rate, for want of any round before it."""
    return any(step.source is Source.ROUND_RATE for step in steps)


def round_lines(rounds: Sequence[RoundFacts]) -> tuple[RoundLine, ...]:
    """Return a line for each round; above 400 rounds one for a few in a row, 200 at most."""
    size = 1 if len(rounds) <= MOST_ROUNDS else -(-len(rounds) // MERGED_ROUNDS)
    return tuple(_line(rounds[k : k + size]) for k in range(0, len(rounds), size))


def _line(rounds: Sequence[RoundFacts]) -> RoundLine:
    rows, replies = sum(r.rows for r in rounds), sum(r.replies for r in rounds)
    told = [r for r in rounds if np.isfinite(r.expected)]
    expected = sum(r.expected for r in told)
    compared = [r for r in told if np.isfinite(r.observed) and r.expected > 0.0]
    return RoundLine(
        first=rounds[0].index,
        last=rounds[-1].index,
        opened_at=rounds[0].opened_at,
        enrolled=rows / len(rounds),
        invited=sum(r.invited for r in rounds) / len(rounds),
        replies=replies / len(rounds),
        reply_rate=replies / rows if rows else np.nan,
        expected_rate=expected / sum(r.rows for r in told) if told else None,
        calibration_ratio=(
            sum(r.observed for r in compared) / sum(r.expected for r in compared)
            if compared
            else None
        ),
        effective_replies=_mean([r.effective for r in rounds]),
        weight_sum=_mean([r.weight_sum for r in rounds]),
        largest_share=max((r.largest_share for r in rounds if r.largest_share > 0.0), default=None),
        skipped=sum(r.skipped for r in rounds),
    )


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else None
