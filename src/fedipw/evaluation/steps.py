"""Participation behind a metric: the fitted steps, and what fitting them does to client totals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from fedipw.data.partitions import Block, Blocks, sum_over
from fedipw.errors import InputError
from fedipw.evaluation.sums import Reweighed, client_sums, inverse_of, refitted
from fedipw.numerics.checks import check_rows
from fedipw.numerics.logistic import sigmoids
from fedipw.propensity.fit import block_sums

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, IntArray


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
    clients: IntArray  # (rows,) code of each row's client; n for those outside the sample
    beta: FloatArray  # (q + 1,) in the frame, constant last
    inverse: FloatArray  # (q + 1, q + 1), of the information
    leverage: FloatArray  # (n,) of a client's rows together
    replies: IntArray  # (m,) row of each reply, rising
    reply_prob: FloatArray  # (m,) of passing this step, at the replies

    @classmethod
    def of(
        cls, rows: Blocks, clients: IntArray, beta: FloatArray, replies: IntArray, n: int
    ) -> StepPhase:
        """Return the phase of a fit, by two passes over its rows."""
        check_rows(rows.rows, clients=clients)
        if len(replies) and (np.diff(replies) <= 0).any():
            raise InputError("Replies must be in the order of the rows.")
        sums, _ = sum_over(rows, partial(block_sums, beta=beta))
        inverse = inverse_of(sums.hessian)
        leverage = np.zeros(n)
        for block in rows:
            x, here = _design(block), slice(block.start, block.start + block.rows)
            p = sigmoids(np.ascontiguousarray(beta @ x), shift=0.0)
            own = p * (1.0 - p) * np.einsum("jm,jk,km->m", x, inverse, x, optimize=True)
            leverage += client_sums(clients[here], own, n)
        return cls(
            rows=rows, clients=clients, beta=beta, inverse=inverse,
            leverage=np.minimum(leverage, 1.0), replies=replies,
            reply_prob=_reply_prob(rows, replies, beta),
        )  # fmt: skip

    def deleted(self, groups: IntArray, count: int) -> Iterator[FloatArray]:
        """Yield the step's probabilities at the replies, (m,), fitted without each group."""
        of_rows = np.append(groups, -1)[self.clients]
        for g in range(count):
            beta = refitted(Reweighed(self.rows, 1.0 * (of_rows != g)), self.beta)
            yield _reply_prob(self.rows, self.replies, beta)

    def fitted_part(self, moved: FloatArray, n: int) -> FloatArray:
        """Return c'g of each client, (n, K), for replies that weigh kappa u / (R p), (m, K)."""
        pull = moved * (1.0 - self.reply_prob)[:, None]
        slope = self.inverse @ self._sum(lambda x, at: x @ pull[at])
        out = np.zeros((n, moved.shape[1]))
        for block in self.rows:
            x, here = _design(block), slice(block.start, block.start + block.rows)
            residual = block.labels - sigmoids(np.ascontiguousarray(self.beta @ x), shift=0.0)
            out += client_sums(self.clients[here], (residual * (slope.T @ x)).T, n)
        return out

    def _sum(self, function: Callable[[FloatArray, slice], FloatArray]) -> FloatArray:
        """Return a sum over replies of a function of their rows, (q + 1, K)."""
        total: FloatArray | float = 0.0
        for block in self.rows:
            first, last = np.searchsorted(self.replies, (block.start, block.start + block.rows))
            if last > first:
                x = _design(block)[:, self.replies[first:last] - block.start]
                total = total + function(x, slice(first, last))
        if isinstance(total, float):
            raise InputError("There is no reply.")
        return total


def _reply_prob(rows: Blocks, replies: IntArray, beta: FloatArray) -> FloatArray:
    """Return the probability of each reply's row, (m,)."""
    prob = np.empty(len(replies))
    for block in rows:
        first, last = np.searchsorted(replies, (block.start, block.start + block.rows))
        x = _design(block)[:, replies[first:last] - block.start]
        prob[first:last] = sigmoids(np.ascontiguousarray(beta @ x), shift=0.0)
    return prob


def _design(block: Block) -> FloatArray:
    return np.vstack([block.columns, np.ones(block.rows)])
