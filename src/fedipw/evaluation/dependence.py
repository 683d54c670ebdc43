"""Whether replies go with the metric itself: what weights by covariates assume and can be checked.

Weights stand for clients that do not reply by those with the same covariates that do. That is right
if, given the covariates, a reply has nothing to do with the metric. A client that replied in some
rounds has shown its metric, so whether it replied in the others, too, can be held against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit

from fedipw.evaluation.phases import StepPhase, client_sums
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics import CodeArray, FloatArray, IntArray, LabelArray
from fedipw.numerics.logistic import logistic_sums
from fedipw.numerics.newton import newton_minimum
from fedipw.selection.saved import BlockProb, block_prob
from fedipw.tables.partitions import Block, added

ODDS_RATIO = 1.25  # of a reply per standard deviation of the metric, from which it matters
ERRORS = 3.0  # standard errors it may be off by chance
_FEWEST = 30  # clients with replies and others without, to look at all
_MOST_ROWS = 2_000_000  # of more, every k-th client is looked at
_DECREMENT = 1e-16  # of Newton's method, in squared standard errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """How the odds of a reply change with a client's metric, given the covariates.

    >>> Dependence(odds_ratio=2.0, low=1.7, high=2.4, errors=8.0, clients=900).matters
    True
    >>> Dependence(odds_ratio=1.1, low=1.05, high=1.15, errors=4.0, clients=9000).matters
    False
    """

    odds_ratio: float  # per standard deviation of the metric
    low: float  # of a 95% interval
    high: float
    errors: float  # log odds ratio over its standard error
    clients: int  # whose metric is known from another round

    @property
    def matters(self) -> bool:
        """Whether it is beyond chance and large: ignoring it leaves a bias no weight removes."""
        return abs(self.errors) > ERRORS and abs(math.log(self.odds_ratio)) > math.log(ODDS_RATIO)

    @property
    def words(self) -> str:
        """The odds ratio for people, with its interval."""
        return (
            f"{self.odds_ratio:.2f} times the odds of a reply per standard deviation of the metric "
            f"({self.low:.2f} to {self.high:.2f})"
        )


def reply_dependence(sample: TwoPhase, values: FloatArray) -> Dependence | None:
    r"""Return how replies go with a metric beyond the fitted probabilities.

    For client i and round r let :math:`u_{ir}` be the mean of its metric over its replies in all
    rounds but r, each less the mean of its round, in standard deviations of the metric. Over all
    rows of clients that have such a value

    .. math:: \operatorname{logit} P(A_{ir} = 1) = a + b\, \operatorname{logit} \hat p_{ir}
       + \gamma\, u_{ir} \qquad (E64)

    by maximum likelihood, with standard errors between clients (or clusters), so a client's replies
    may depend on each other. If replies are independent of the metric given the covariates,
    :math:`\gamma = 0`: the reply in round r is left out of u, and what selects clients into the
    rows is the past of others' rounds, in which replies do not depend on the metric either. Else a
    client with another metric replies with other odds than its covariates say, and no weight made
    of them corrects that. It shows nothing of clients that never reply.

    Of a ledger with more than two million rows every k-th client is looked at, so that memory does
    not grow with it. None with a single round, without a fitted step of participation, or with
    fewer than 30 clients in it that did and that did not reply. Of several steps (availability,
    reply) it is the one with the largest :math:`|\gamma|` in standard errors.

    Parameters
    ----------
    sample
        Replies with both phases.
    values
        The metric of each reply, (m,).
    """
    centred, spread = _centred(sample, values)
    if not spread > 0.0:
        return None
    found = [one for step in sample.steps for one in [_of_step(sample, step, centred)] if one]
    return max(found, key=lambda one: abs(one.errors), default=None)


def _centred(sample: TwoPhase, values: FloatArray) -> tuple[FloatArray, float]:
    """Return values less the mean of their round in standard deviations, (m,), and the latter."""
    counts = np.bincount(sample.round, minlength=sample.rounds)
    means = np.bincount(sample.round, values, sample.rounds) / np.maximum(counts, 1)
    apart = values - means[sample.round]
    spread = float(apart.std())
    scale = float(np.abs(values).max())
    if not spread > 1e-12 * max(scale, 1e-300):  # rounding
        return apart, 0.0
    return apart / spread, spread


class _Rows(NamedTuple):
    """Rows of clients whose metric is known from another round."""

    labels: LabelArray  # (k,) whether the step was passed
    columns: FloatArray  # (2, k) the fitted log odds, the metric
    unit: IntArray  # (k,) cluster or client
    client: IntArray  # (k,)


def _of_step(sample: TwoPhase, step: StepPhase, centred: FloatArray) -> Dependence | None:
    rows = _rows(sample, step, centred)
    both = [len(np.unique(rows.client[rows.labels == label])) for label in (0, 1)]
    if min(both) < _FEWEST or not rows.columns[1].std() > 0.0:
        return None
    flat = not rows.columns[0].std() > 1e-9  # fitted odds that are all alike
    columns = rows.columns[1:] if flat else rows.columns
    found = newton_minimum(
        lambda beta: logistic_sums(columns.T, rows.labels, np.empty(0), beta),
        np.zeros(len(columns) + 1),
        decrement_tol=_DECREMENT,
    )
    if not found.converged or not np.linalg.cond(found.hessian) < 1.0 / np.finfo(np.float64).eps:
        return None  # the coefficients run away, or are not told apart
    *slopes, intercept = found.point
    residual = rows.labels - expit(slopes @ columns + intercept)
    scores = np.column_stack(
        [np.bincount(rows.unit, residual * column, sample.units) for column in (*columns, 1.0)]
    )
    inverse = np.linalg.inv(found.hessian)
    spread = inverse @ (scores.T @ scores) @ inverse
    gamma, error = float(slopes[-1]), math.sqrt(float(spread[-2, -2]))
    return Dependence(
        odds_ratio=math.exp(gamma),
        low=math.exp(gamma - 1.96 * error),
        high=math.exp(gamma + 1.96 * error),
        errors=gamma / error,
        clients=len(np.unique(rows.client)),
    )


def _rows(sample: TwoPhase, step: StepPhase, centred: FloatArray) -> _Rows:
    n = sample.clients
    sums = client_sums(sample.client, centred, n)
    counts = np.bincount(sample.client, minlength=n)
    prob, every = block_prob(step.fit, step.frame), -(-step.rows.rows // _MOST_ROWS)

    def at_replies(first: int, last: int) -> tuple[IntArray, FloatArray]:
        here = slice(*np.searchsorted(step.replies, (first, last)).tolist())
        return step.replies[here] - first, centred[here]

    known = partial(_known_rows, prob=prob, codes=step.codes, sums=sums, counts=counts, every=every)
    labels, odds, metric, clients = step.rows.beside(known, at_replies, added)
    client = np.concatenate(clients)
    return _Rows(
        labels=np.concatenate(labels),
        columns=np.stack([np.concatenate(odds), np.concatenate(metric)]),
        unit=client if sample.clusters is None else sample.clusters.code[client],
        client=client,
    )


def _known_rows(
    block: Block,
    given: tuple[IntArray, FloatArray],
    *,
    prob: BlockProb,
    codes: CodeArray,
    sums: FloatArray,
    counts: IntArray,
    every: int,
) -> tuple[list[LabelArray], list[FloatArray], list[FloatArray], list[IntArray]]:
    """Return labels, log odds, metric and clients of the rows whose metric is known otherwise."""
    (here, values), mine = given, codes[block.clients]
    own, often = np.zeros(block.rows), np.zeros(block.rows)
    own[here], often[here] = values, 1.0
    inside = (mine < len(sums)) & (mine % every == 0)
    at = np.where(inside, mine, 0).astype(np.int64)
    left = np.where(inside, counts[at] - often, 0.0)
    known = left > 0.0
    return (
        [block.labels[known]],
        [logit(prob(block)[known])],
        [(sums[at] - own)[known] / left[known]],
        [at[known]],
    )
