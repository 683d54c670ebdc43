"""Participation behind a metric: the fitted steps, and what fitting them does to client totals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from fedipw.errors import InputError
from fedipw.evaluation.sums import Reweighed, client_sums, inverse_of, refitted
from fedipw.numerics.checks import check_rows
from fedipw.numerics.logistic import sigmoids
from fedipw.selection.fit import block_sums
from fedipw.tables.partitions import Block, Blocks, sum_over

if TYPE_CHECKING:
    from fedipw.numerics.types import CodeArray, FloatArray, IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPhase:
    r"""One fitted step of participation: its rows, and what fitting it does to client totals.

    A total :math:`\sum_i \kappa_i t_i` of replies weighted by 1/p moves with the step's
    coefficients, so fitting them adds to client i's contribution

    .. math:: -c_i' g, \qquad c_i = \sum_r x_{ir} (A_{ir} - \hat p_{ir}), \qquad
       g = I^{-1} \sum_{i, r} A_{ir} \frac{\kappa_i u_{ir}}{R\, \hat p_{ir}}
       (1 - \hat p^{step}_{ir})\, x_{ir} \qquad (E22)

    with I the step's information: the sums run over rounds, so a client's rounds may depend on each
    other.
    """

    rows: Blocks  # in a frame, labels say who passed
    clients: CodeArray  # (rows,) code of each row's client; n for those outside the sample
    beta: FloatArray  # (q + 1,) in the frame, constant last
    inverse: FloatArray  # (q + 1, q + 1), of the information
    scores: FloatArray  # c, (n, q + 1)
    leverage: FloatArray  # (n,) of a client's rows together
    replies: IntArray  # (m,) row of each reply, rising
    reply_prob: FloatArray  # (m,) of passing this step, at the replies

    @classmethod
    def of(
        cls, rows: Blocks, clients: CodeArray, beta: FloatArray, replies: IntArray, n: int
    ) -> StepPhase:
        """Return the phase of a fit, by two passes over its rows."""
        check_rows(rows.rows, clients=clients)
        if len(replies) and (np.diff(replies) <= 0).any():
            raise InputError("Replies must be in the order of the rows.")
        sums, _ = sum_over(rows, partial(block_sums, beta=beta))
        inverse = inverse_of(sums.hessian)
        scores, leverage, prob = np.zeros((n, len(beta))), np.zeros(n), np.empty(len(replies))
        for block in rows:
            p, mine = _prob(block.columns, beta), clients[block.start : block.start + block.rows]
            residual = block.labels - p
            for j, column in enumerate(block.columns):
                scores[:, j] += client_sums(mine, residual * column, n)
            scores[:, -1] += client_sums(mine, residual, n)
            leverage += client_sums(mine, p * (1.0 - p) * _lengths(block.columns, inverse), n)
            at, here = _replies_in(block, replies)
            prob[at] = p[here]
        return cls(
            rows=rows, clients=clients, beta=beta, inverse=inverse, scores=scores,
            leverage=np.minimum(leverage, 1.0), replies=replies, reply_prob=prob,
        )  # fmt: skip

    def deleted(self, groups: IntArray, count: int) -> Iterator[FloatArray]:
        """Yield the step's probabilities at the replies, (m,), fitted without each group."""
        of_rows = np.append(groups, -1)[self.clients]
        for g in range(count):
            beta = refitted(Reweighed(self.rows, 1.0 * (of_rows != g)), self.beta)
            prob = np.empty(len(self.replies))
            for block in self.rows:
                at, here = _replies_in(block, self.replies)
                prob[at] = _prob(block.columns[:, here], beta)
            yield prob

    def fitted_part(self, weights: FloatArray, values: FloatArray) -> FloatArray:
        """Return c'g of each client, (n, K), for replies of weights kappa / (R p) and values u."""
        total = np.zeros((len(self.beta), values.shape[1]))
        for block in self.rows:
            at, here = _replies_in(block, self.replies)
            pull = (weights[at] * (1.0 - self.reply_prob[at]))[:, None] * values[at]
            total[:-1] += block.columns[:, here] @ pull
            total[-1] += pull.sum(axis=0)
        return self.scores @ (self.inverse @ total)


def _replies_in(block: Block, replies: IntArray) -> tuple[slice, IntArray]:
    """Return which replies are rows of a block, and which rows of it they are."""
    first, last = np.searchsorted(replies, (block.start, block.start + block.rows))
    return slice(int(first), int(last)), replies[first:last] - block.start


def _prob(columns: FloatArray, beta: FloatArray) -> FloatArray:
    return sigmoids(np.ascontiguousarray(beta[:-1] @ columns + beta[-1]), shift=0.0)


def _lengths(columns: FloatArray, inverse: FloatArray) -> FloatArray:
    """Return x' I^-1 x of rows by column, the constant among x, (m,)."""
    within = np.einsum("jm,jm->m", columns, inverse[:-1, :-1] @ columns)
    out: FloatArray = within + 2.0 * (inverse[-1, :-1] @ columns) + inverse[-1, -1]
    return out
