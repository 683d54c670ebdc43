"""What is known of a round, before it opens, of its replies, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedipw.errors import EmptyRoundError, InputError
from fedipw.weighting.functions import effective_sample_size

if TYPE_CHECKING:
    import polars as pl

    from fedipw.numerics.types import FloatArray, IdArray, IntArray
    from fedipw.selection import Source
    from fedipw.weighting.functions import TrimReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundOpening:
    """What the server knows of its n enrolled clients before a round's replies come in.

    A simulation gives covariates by row; a log gives its table of the round and the clients behind
    the table's rows.
    """

    index: int  # counted from 1
    covariates: FloatArray | None = None  # (n, q)
    participation_prob: FloatArray | None = None  # (n,) where known, as in a simulation
    table: pl.DataFrame | None = None  # (n rows) of a log: flags, covariates, invitations
    rows: IntArray | None = None  # (n,) rows of the units behind it; all enrolled ones if None

    def matrix(self) -> FloatArray:
        """Return the covariates by row, (n, q)."""
        if self.covariates is None:
            raise InputError(f"Round {self.index} opens without covariates.")
        return self.covariates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundReplies:
    """What is known of the clients that replied; row i is one of them."""

    index: int
    unit_ids: IdArray  # (m,)
    rows: IntArray  # (m,) rows of the table behind them
    enrollment_prob: FloatArray  # (m,)
    participation_prob: FloatArray  # (m,)
    sample_counts: IntArray  # (m,)
    source: Source  # where the participation probabilities came from

    def __post_init__(self) -> None:
        rows = {
            len(self.unit_ids),
            len(self.rows),
            len(self.enrollment_prob),
            len(self.participation_prob),
            len(self.sample_counts),
        }
        if len(rows) != 1:
            raise InputError(f"round {self.index}: fields disagree on rows: {sorted(rows)}")
        if rows == {0}:
            raise EmptyRoundError(f"round {self.index} is empty: skip it and record it.")

    @property
    def inclusion_prob(self) -> FloatArray:
        r"""The product of the two stages, :math:`p = \pi^{enr} \pi^{part}` (S1), (m,)."""
        return self.enrollment_prob * self.participation_prob


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundWeights:
    """The weights of a round's replies under one scheme, with what trimming did to them."""

    replies: RoundReplies
    weights: FloatArray  # (m,), 1/N included
    trimming: TrimReport | None = None
    note: str = ""  # what the scheme could not do in this round

    @property
    def negative(self) -> int:
        """Number of negative weights, which linear calibration and GREG can give."""
        return int((self.weights < 0.0).sum())

    @property
    def total(self) -> float:
        """Sum of weights: 1 on average for Horvitz–Thompson, 1 exactly for untrimmed Hájek."""
        return float(self.weights.sum())

    @property
    def effective_replies(self) -> float:
        """Effective sample size of the round (W10)."""
        return effective_sample_size(self.weights) if self.weights.any() else 0.0
