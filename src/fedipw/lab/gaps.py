"""Participation read off a client's own past replies: FedAU's gaps, and shares of rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.errors import InputError
from fedipw.selection.participation import ReplyProb, Source, StepRows

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray
    from fedipw.tables.ledger import Round

CUTOFF = 50  # rounds after which a gap is closed without a reply


@final
class Gaps:
    r"""The mean gap between a client's replies stands for the inverse of its participation.

    .. math:: \hat\pi^{part}_{ir} = 1 / \bar g_{ir}, \qquad
       \bar g_{ir} = \frac{1}{M} \sum_{k=1}^{M} g_{ik} \quad (1 \text{ before the first}),
       \qquad (P6)

    :math:`g_{ik}` are the numbers of rounds from one reply to the next before round r, the first
    counted from the start; a gap is closed at ``cutoff`` rounds though no reply came (Wang and Ji
    2024). With participation weights alone it is FedAU, :math:`w_i = \bar g_i / N_{enr}`; with
    enrollment weights :math:`\bar g_i / (N \hat\pi^{enr}_i)`. ``clients`` is the number that may
    reply.
    """

    def __init__(self, clients: int, cutoff: int = CUTOFF) -> None:
        if cutoff < 1:
            raise InputError(f"cutoff must be at least 1 round, not {cutoff}.")
        self._cutoff = cutoff
        self._rows = np.empty(0, dtype=np.int64)
        self._mean = np.ones(clients)
        self._closed = np.zeros(clients, dtype=np.int64)  # gaps so far, M
        self._running = np.zeros(clients, dtype=np.int64)  # rounds since the last

    def open(self, round_: Round) -> None:
        """Take what is known before a round: who is listed."""
        self._rows = round_.rows

    def prob(self, replied: BoolArray) -> ReplyProb:
        """Return the probabilities of the replies."""
        prob = 1.0 / self._mean[self._rows[replied]]
        return ReplyProb(prob, np.ones(len(prob), dtype=np.bool_), Source.GAPS)

    def step_rows(self, replied: BoolArray) -> tuple[StepRows, ...]:
        """Return nothing: nothing is fitted."""
        del replied
        return ()

    def close(self, replied: BoolArray) -> tuple[BoolArray, ...]:
        """Count the round, and close the gaps of those who replied or waited too long."""
        self._running[self._rows] += 1
        done = self._rows[replied | (self._running[self._rows] >= self._cutoff)]
        count = self._closed[done]
        self._mean[done] = np.where(
            count == 0,
            self._running[done],
            (count * self._mean[done] + self._running[done]) / (count + 1),
        )
        self._closed[done] += 1
        self._running[done] = 0
        return ()

    def predicted(self, round_: Round) -> FloatArray:
        """Return all clients' probabilities; those never enrolled have no gaps, so the truth."""
        if round_.participation_prob is None:
            raise InputError("Clients that never enrolled have no gaps to predict from.")
        prob = round_.participation_prob.copy()
        known = np.isin(round_.rows, self._rows)
        prob[known] = 1.0 / self._mean[round_.rows[known]]
        return prob

    def state(self) -> dict[str, Any]:
        """Return the gaps so far."""
        return {
            "mean": self._mean.copy(),
            "closed": self._closed.copy(),
            "running": self._running.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved gaps back."""
        self._mean, self._closed, self._running = (
            np.array(state[key]) for key in ("mean", "closed", "running")
        )


@final
class ReplyShares:
    r"""The share of rounds a client replied in, the present one among them.

    .. math:: \hat\pi^{part}_{ir} = \frac{1}{r} \sum_{s=1}^{r} A_{is} \qquad (B1)

    With participation weights alone it is FedAvg debiased for correlated participation (Sun et al.
    2025), :math:`w_i = 1/(N_{enr} \hat\pi^{part}_i)`: the share tends to the client's long-run rate
    whatever the correlation between rounds. The paper scales each client's local work by the
    inverse of an online estimate; that the estimate is this share, and that the update is scaled
    (the same for one local step), is our reading of its summaries. With enrollment weights
    :math:`1/(N \hat\pi^{enr}_i \hat\pi^{part}_i)`. ``clients`` is the number that may reply.

    >>> import polars as pl
    >>> from fedipw.tables.ledger import Round
    >>> shares, both = ReplyShares(2), Round(index=1, rows=np.arange(2), table=pl.DataFrame())
    >>> shares.open(both)
    >>> _ = shares.close(np.array([True, False]))
    >>> shares.open(both)
    >>> shares.prob(np.array([True, True])).prob.tolist()
    [1.0, 0.5]
    """

    def __init__(self, clients: int) -> None:
        self._rows = np.empty(0, dtype=np.int64)
        self._replies = np.zeros(clients, dtype=np.int64)  # before the open round
        self._rounds = np.zeros(clients, dtype=np.int64)  # listed in, before the open round

    def open(self, round_: Round) -> None:
        """Take what is known before a round: who is listed."""
        self._rows = round_.rows

    def prob(self, replied: BoolArray) -> ReplyProb:
        """Return the shares of the replies, this one counted."""
        prob = self._share(self._rows[replied])
        return ReplyProb(prob, np.ones(len(prob), dtype=np.bool_), Source.FREQUENCY)

    def _share(self, rows: IntArray) -> FloatArray:
        share: FloatArray = (self._replies[rows] + 1) / (self._rounds[rows] + 1)
        return share

    def step_rows(self, replied: BoolArray) -> tuple[StepRows, ...]:
        """Return nothing: nothing is fitted."""
        del replied
        return ()

    def close(self, replied: BoolArray) -> tuple[BoolArray, ...]:
        """Count the round."""
        self._rounds[self._rows] += 1
        self._replies[self._rows[replied]] += 1
        return ()

    def predicted(self, round_: Round) -> FloatArray:
        """Return all clients' shares had they replied; those never enrolled have the truth."""
        if round_.participation_prob is None:
            raise InputError("Clients that never enrolled have no replies to predict from.")
        prob = round_.participation_prob.copy()
        known = np.isin(round_.rows, self._rows)
        prob[known] = self._share(round_.rows[known])
        return prob

    def state(self) -> dict[str, Any]:
        """Return the counts so far."""
        return {"replies": self._replies.copy(), "rounds": self._rounds.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved counts back."""
        self._replies, self._rounds = np.array(state["replies"]), np.array(state["rounds"])
