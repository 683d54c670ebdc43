"""The two phases behind a reply, and what estimating each of them does to the error of a mean.

Enrollment is known, fitted or calibrated; participation is a product of fitted steps. Fits may have
a ridge penalty (P4): it counts in the information that their coefficients move by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedipw.calibration import Distance, InverseLogit
from fedipw.errors import InputError
from fedipw.numerics import CodeArray, FloatArray, IntArray, LabelArray
from fedipw.numerics.logistic import sigmoids
from fedipw.selection.enrollment import ReferenceRows, reference_sample_fit
from fedipw.selection.logistic import LogisticFit, block_sums, logistic_fit
from fedipw.tables.partitions import (
    Block,
    Changed,
    Frame,
    Partitions,
    RoundRows,
    added,
    sum_over,
)
from fedipw.weighting.balance import Balance

T = TypeVar("T")
ByUnit = Callable[[FloatArray], FloatArray]  # sums (n, K) by cluster, (C, K)
_RANK_TOL = 1e-10  # of eigenvalues of an information, columns scaled to one


def client_sums(client: CodeArray, values: FloatArray, n: int) -> FloatArray:
    """Return the sums of values (m,) by client, (n,); codes of n do not count."""
    return np.bincount(client, values, n + 1)[:n].astype(np.float64, copy=False)


def inverse_of(information: FloatArray) -> FloatArray:
    """Return the inverse of an information; columns that follow from others share theirs."""
    size = np.sqrt(np.diag(information))
    scale = np.where(size > 0.0, size, 1.0)
    both = np.outer(scale, scale)
    inside = np.linalg.pinv(information / both, rcond=_RANK_TOL, hermitian=True)
    out: FloatArray = inside / both
    return out


def _ridge(frame: Frame, fit: LogisticFit) -> FloatArray:
    """Return the penalty of coefficients in a frame, constant last, (q + 1,)."""
    return np.append(fit.l2 / frame.scale**2, 0.0)


def _in_frame(frame: Frame, fit: LogisticFit) -> FloatArray:
    """Return a fit's coefficients in a frame, constant last, (q + 1,)."""
    beta: FloatArray = frame.matrix() @ np.append(fit.coefficients, fit.intercept)
    return beta


def _refitted(rows: Partitions, frame: Frame, fit: LogisticFit) -> FloatArray:
    """Return coefficients in the frame, constant last, of the same fit on other rows."""
    start = np.append(fit.coefficients, fit.intercept)
    again = logistic_fit(rows, fit.names, frame=frame, l2=fit.l2, start=start)
    return _in_frame(frame, again.checked())


def _with_weights(block: Block, weights: FloatArray) -> Block:
    given = weights[block.start : block.start + block.rows]
    return block._replace(weights=given * block.weights if len(block.weights) else given)


class Without(NamedTuple):
    """Enrollment when a group of clients is left out."""

    weights: FloatArray  # (n,); of no use for the group left out
    share: float  # of the population that the weights stand for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnrollmentPhase:
    """Enrollment weights of the n enrolled, and what estimating them explains of a total.

    What is given here holds for weights that nobody estimated.
    """

    weights: FloatArray  # how many clients of the population each of the enrolled stands for, (n,)
    population_size: int | None = None  # where the population's clients are known
    own: FloatArray | float = 1.0  # how many clients each is itself: its base weight, (n,)

    @property
    def fraction(self) -> FloatArray:
        """The share of those that it is itself, (n,); 0 where the population's size is unknown."""
        return self.own / np.maximum(self.weights, self.own)

    @property
    def leverage(self) -> FloatArray:
        """How much each of the enrolled moves its own fit, (n,)."""
        return np.zeros(len(self.weights))

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of the weights."""
        return ()

    def explained(self, totals: FloatArray) -> FloatArray:
        """Return the part s of weights times totals that the estimated weights explain, (n, K)."""
        return np.zeros_like(totals)

    def superpopulation(self, influence: FloatArray, totals: FloatArray) -> FloatArray | None:
        """Return the sum of squares of (E24), (K,); none where others are not known."""
        del totals
        if self.population_size is None:
            return None
        mean = influence.sum(axis=0) / self.population_size
        out: FloatArray = (influence**2).sum(axis=0) - self.population_size * mean**2
        return out

    def target_variance(self, totals: FloatArray) -> FloatArray:
        """Return the variance that errors of the population means add, (K,)."""
        return np.zeros(totals.shape[1])

    @property
    def units(self) -> int:
        """Number of clients that a jackknife cuts into groups."""
        return len(self.weights)

    def resampled(self, influence: FloatArray, totals: FloatArray, by_unit: ByUnit) -> FloatArray:
        """Return the sum of squares that leaving out groups of the units measures, (K,)."""
        left = by_unit(influence - self.explained(totals))
        out: FloatArray = ((left - left.mean(axis=0)) ** 2).sum(axis=0)
        return out

    def deleted(self, groups: IntArray, count: int, rng: np.random.Generator) -> Iterator[Without]:
        """Yield the weights estimated anew without each of ``count`` groups in turn.

        ``groups`` (n,) are those of the enrolled, 0 to count - 1; clients that are not enrolled
        are given theirs by ``rng``, so that groups of all units are equally large.
        """
        del rng
        for g in range(count):
            yield Without(self.weights, float((groups != g).mean()))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedEnrollment(EnrollmentPhase):
    r"""Enrollment by a logistic model fitted on the whole population.

    Each of the enrolled stands for :math:`\kappa_i = 1/\hat\pi_i` clients. Fitting
    :math:`\hat\pi` takes from :math:`\kappa_i t_i` what the scores explain,

    .. math:: s_i = z_i' I^{-1} \sum_{j \in E} \frac{1 - \hat\pi_j}{\hat\pi_j}\, t_j z_j,
       \qquad I = \sum_{i=1}^N \hat\pi_i (1 - \hat\pi_i) z_i z_i' + l_2 D, \qquad (E20)

    with D the identity but for the constant, whose coefficient has no penalty.

    Where rows of the population stand for :math:`a_i` clients, their base weights,
    :math:`\kappa_i = a_i / \hat\pi_i` and

    .. math:: s_i = a_i z_i' I^{-1} \sum_{j \in E} a_j \frac{1 - \hat\pi_j}{\hat\pi_j}\, t_j z_j,
       \qquad I = \sum_{i=1}^{rows} a_i \hat\pi_i (1 - \hat\pi_i) z_i z_i' + l_2 D. \qquad (E62)

    A row enrolls as a whole, so it is the unit whose chance is counted: rows and their base weights
    are taken as given, and a row counted twice is one draw, not two.
    """

    design: FloatArray  # (n, q + 1) of the enrolled, constant last
    prob: FloatArray  # (n,)
    inverse: FloatArray  # (q + 1, q + 1), of the information
    outside: FloatArray  # (q + 1, q + 1), sum over the others of prob^2 z z'
    score: FloatArray  # (q + 1,) sum over all N of (E - prob) z; 0 without a penalty
    population_size: int
    rows: Partitions  # the population, in the frame of the design
    frame: Frame
    fit: LogisticFit

    @classmethod
    def of(
        cls, partitions: Partitions, frame: Frame, fit: LogisticFit, columns: FloatArray,
        own: FloatArray | float = 1.0,
    ) -> FittedEnrollment:  # fmt: skip
        """Return the phase of a fit on a population in ``frame``; ``columns`` (q, n) are not.

        ``own`` are the base weights of the enrolled, (n,).
        """
        beta, ridge = _in_frame(frame, fit), _ridge(frame, fit)
        information, outside, rows = sum_over(partitions, partial(_population_sums, beta=beta))
        inside = frame.standard(columns.copy())
        prob = sigmoids(np.ascontiguousarray(beta[:-1] @ inside + beta[-1]), shift=0.0)
        return cls(
            weights=own / prob,
            own=own,
            design=np.vstack([inside, np.ones(columns.shape[1])]).T.copy(),
            prob=prob,
            inverse=inverse_of(information + np.diag(ridge)),
            outside=outside,
            score=ridge * beta,
            population_size=rows,
            rows=partitions,
            frame=frame,
            fit=fit,
        )

    @property
    def fraction(self) -> FloatArray:
        """The probability, (n,)."""
        return self.prob

    @property
    def leverage(self) -> FloatArray:
        """Of the rows of the enrolled in the fit, (n,)."""
        length = np.einsum("ij,jk,ik->i", self.design, self.inverse, self.design)
        out: FloatArray = self.own * self.prob * (1.0 - self.prob) * length
        return out

    def explained(self, totals: FloatArray) -> FloatArray:
        """Return s of (E20), with base weights (E62), (n, K)."""
        return _column(self.own) * (self.design @ self._slope(totals))

    def superpopulation(self, influence: FloatArray, totals: FloatArray) -> FloatArray:
        """Return the sum over all N clients of squares about their mean, (K,)."""
        return self.resampled(influence, totals, _itself)

    @property
    def units(self) -> int:
        """All clients of the population."""
        return self.population_size

    def resampled(self, influence: FloatArray, totals: FloatArray, by_unit: ByUnit) -> FloatArray:
        """Return that of the superpopulation: every client may be left out, (K,)."""
        slope = self._slope(totals)
        enrolled = by_unit(influence - (1.0 - self.prob)[:, None] * self.explained(totals))
        squares = (enrolled**2).sum(axis=0) + np.einsum("jk,jl,lk->k", slope, self.outside, slope)
        units = self.population_size - len(influence) + len(enrolled)
        mean = (influence.sum(axis=0) - self.score @ slope) / units
        out: FloatArray = squares - units * mean**2
        return out

    def deleted(self, groups: IntArray, count: int, rng: np.random.Generator) -> Iterator[Without]:
        """Yield weights of models fitted without each group."""
        enrolled = self.rows.reduced(_labels, np.append) == 1
        mass = self.rows.reduced(_masses, np.append)
        of_rows = np.empty(self.population_size, dtype=np.int64)
        of_rows[enrolled], of_rows[~enrolled] = groups, _others(self.units, groups, count, rng)
        for g in range(count):
            rest = Changed(self.rows, partial(_with_weights, weights=1.0 * (of_rows != g)))
            beta = _refitted(rest, self.frame, self.fit)
            weights = self.own / sigmoids(np.ascontiguousarray(self.design @ beta), shift=0.0)
            yield Without(weights, float(np.average(of_rows != g, weights=mass)))

    def _slope(self, totals: FloatArray) -> FloatArray:
        odds = self.own * (1.0 - self.prob) / self.prob
        slope: FloatArray = self.inverse @ (self.design.T @ (odds[:, None] * totals))
        return slope


def _column(values: FloatArray | float) -> FloatArray | float:
    return values[:, None] if isinstance(values, np.ndarray) else values


def _masses(block: Block) -> FloatArray:
    return block.weights.copy() if len(block.weights) else np.ones(block.rows)


def _population_sums(block: Block, beta: FloatArray) -> tuple[FloatArray, FloatArray, int]:
    sums, _ = block_sums(block, beta)
    others = block.labels == 0
    rows = np.vstack([block.columns, np.ones(block.rows)])[:, others]
    prob = sigmoids(np.ascontiguousarray(beta @ rows), shift=0.0)
    if len(block.weights):
        prob = prob * block.weights[others]
    return sums.hessian, (rows * prob**2) @ rows.T, block.rows


def _itself(values: FloatArray) -> FloatArray:
    return values


def _labels(block: Block) -> LabelArray:
    return block.labels.copy()  # a block of a scratch file lends its memory to the next


def _others(units: int, taken: IntArray, count: int, rng: np.random.Generator) -> IntArray:
    """Return groups of the units that have none yet, so that all groups are equally large.

    Where clusters have made some groups larger than that, the others share what is left.
    """
    room = np.bincount(np.arange(units) % count, minlength=count)
    room -= np.bincount(taken, minlength=count)
    while (room < 0).any():
        over, open_ = int(-room[room < 0].sum()), np.flatnonzero(room > 0)
        room = np.maximum(room, 0)
        room[open_] -= np.bincount(np.arange(over) % len(open_), minlength=len(open_))
    return rng.permutation(np.repeat(np.arange(count), room))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibratedEnrollment(EnrollmentPhase):
    r"""Enrollment by calibration to population means.

    Each of the enrolled stands for :math:`\kappa_i = N q_i` clients. With the slopes
    :math:`F_i' = F'(\lambda'b_i)` of the calibrated weights, calibration takes from
    :math:`\kappa_i t_i`

    .. math:: s_i = \kappa_i b_i' B, \qquad
       B = \Big(\sum_{j \in E} F_j' b_j b_j'\Big)^{-1} \sum_{j \in E} F_j' b_j t_j. \qquad (E21)

    Where N is not known the total is that of the enrolled, which changes no mean, and nothing is
    taken off for the finite population: the fraction is 0, and intervals are too wide rather than
    too narrow. Standard errors of the targets add :math:`N^2 B' \text{diag}(se^2) B`.

    With base weights d, :math:`d_i b_i` takes the place of :math:`b_i` in s and of one of the two
    in B's inverse: the respondents of all rounds together are calibrated with their numbers of
    replies as base, and stand for both stages.

    Base weights a of the clients themselves, from which calibration starts (``source.base``), are
    in :math:`\kappa_i = N q_i` already, and their slopes are :math:`a_i F_i'`:

    .. math:: B = \Big(\sum_{j \in E} a_j F_j' b_j b_j'\Big)^{-1}
       \sum_{j \in E} a_j F_j' b_j t_j. \qquad (E63)
    """

    balance: FloatArray  # (n, q) in deviations from the target
    scale: FloatArray  # (q,) of the deviations
    slopes: FloatArray  # F', (n,)
    size: float | None  # N
    source: Balance
    distance: Distance | InverseLogit
    target_error: FloatArray | None = None  # (q,)
    base: FloatArray | float = 1.0  # d, (n,)
    warned: tuple[str, ...] = ()  # that the targets are nearly infeasible
    reference: ReferenceRows | None = None  # whose means the targets are, in their columns

    @classmethod
    def of(
        cls,
        balance: Balance,
        distance: Distance | InverseLogit,
        base: FloatArray | None = None,
    ) -> CalibratedEnrollment:
        """Return the phase of a balance calibrated by a distance, from base weights (n,)."""
        found = balance.calibration(distance, base=base)
        size = balance.population_size if base is None else np.nan
        scale = np.where(found.deviation > 0.0, found.deviation, 1.0)
        known = bool(np.isfinite(size))
        own = 1.0 if balance.base is None else balance.base[balance.enrolled]
        return cls(
            weights=found.weights * (size if known else len(found.weights)) / _or_one(base),
            balance=balance.matrix[balance.enrolled] - found.target,
            scale=scale,
            slopes=distance.slope(found.ratio) * own,
            size=size if known else None,
            source=balance,
            distance=distance,
            target_error=balance.se,
            base=_or_one(base),
            warned=found.warnings(),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Whether the targets are nearly infeasible (C14)."""
        return self.warned

    @property
    def fraction(self) -> FloatArray:
        """1/(N q), at most 1, (n,); 0 where N is not known."""
        own = 0.0 * self.own if self.size is None else self.own
        return own / np.maximum(self.weights, self.own)

    @property
    def leverage(self) -> FloatArray:
        """Of the rows of the enrolled in the regression behind B, (n,)."""
        b = self._columns
        tilt = self.slopes * self.base
        own = np.einsum("ij,jk,ik->i", b, inverse_of((tilt[:, None] * b).T @ b), b)
        out: FloatArray = np.minimum(tilt * own, 1.0)
        return out

    @property
    def _columns(self) -> FloatArray:
        return np.column_stack([self.balance / self.scale, np.ones(len(self.balance))])

    def _slope(self, totals: FloatArray) -> FloatArray:
        b = self._columns
        tilt = self.slopes * self.base
        inverse = inverse_of((tilt[:, None] * b).T @ b)
        found: FloatArray = inverse @ ((self.slopes[:, None] * b).T @ totals)
        return found

    def explained(self, totals: FloatArray) -> FloatArray:
        """Return s of (E21), (n, K)."""
        own = self.weights * self.base
        return own[:, None] * (self._columns @ self._slope(totals))

    def target_variance(self, totals: FloatArray) -> FloatArray:
        """Return what standard errors of the targets add, (K,); of a sample's means (E61)."""
        total = float((self.weights * self.base).sum())
        if self.reference is not None:
            rows = (self.reference.columns - self.source.mean) / self.scale
            mass = total / float(self.reference.weights.sum())
            return sampled_variance(
                mass * (rows @ self._slope(totals)[:-1]), self.reference.weights
            )
        if self.target_error is None:
            return np.zeros(totals.shape[1])
        slope = self._slope(totals)[:-1] * (total * self.target_error / self.scale)[:, None]
        out: FloatArray = (slope**2).sum(axis=0)
        return out

    def deleted(self, groups: IntArray, count: int, rng: np.random.Generator) -> Iterator[Without]:
        """Yield weights calibrated without each group; the population keeps its size."""
        del rng
        for g in range(count):
            enrolled = self.source.enrolled.copy()
            enrolled[enrolled] = groups != g
            rest = groups != g
            base = self.base[rest] if isinstance(self.base, np.ndarray) else None
            found = replace(self.source, enrolled=enrolled).calibration(self.distance, base=base)
            weights = np.zeros(len(groups))
            total = float((self.weights * self.base).sum())
            weights[rest] = found.weights * total / _or_one(base)
            yield Without(weights, 1.0)


def _or_one(base: FloatArray | None) -> FloatArray | float:
    return 1.0 if base is None else base


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownEnrollment(EnrollmentPhase):
    """Enrollment weights from outside, 1/probability: nothing was estimated."""

    signed: bool = False  # whether weights may be negative, as those of a linear calibration

    def __post_init__(self) -> None:
        if not (np.isfinite(self.weights) & (self.signed | (self.weights >= 0.0))).all():
            raise InputError("Enrollment weights must be finite and not negative.")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPhase:
    r"""One fitted step of participation: its rows, and what fitting it does to client totals.

    A total :math:`\sum_i \kappa_i t_i` of replies weighted by 1/p moves with the step's
    coefficients, so fitting them adds to client i's contribution

    .. math:: -c_i' g, \qquad c_i = \sum_r x_{ir} (A_{ir} - \hat p_{ir}), \qquad
       g = I^{-1} \sum_{i, r} A_{ir} \frac{\kappa_i u_{ir}}{R\, \hat p_{ir}}
       (1 - \hat p^{step}_{ir})\, x_{ir} \qquad (E22)

    with I the step's information, its ridge penalty included: the sums run over rounds, so a
    client's rounds may depend on each other.
    """

    rows: RoundRows  # in a frame, labels say who passed
    frame: Frame
    fit: LogisticFit
    codes: CodeArray  # (N,) code of each client that rows belong to; n for those outside the sample
    inverse: FloatArray  # (q + 1, q + 1), of the information
    scores: FloatArray  # c, (n, q + 1)
    leverage: FloatArray  # (n,) of a client's rows together
    replies: IntArray  # (m,) row of each reply, rising
    reply_prob: FloatArray  # (m,) of passing this step, at the replies

    @classmethod
    def of(
        cls,
        rows: RoundRows,
        frame: Frame,
        fit: LogisticFit,
        *,
        codes: CodeArray,
        replies: IntArray,
        n: int,
    ) -> StepPhase:
        """Return the phase of a fit on rows in ``frame``, by two passes over them."""
        if len(replies) and (np.diff(replies) <= 0).any():
            raise InputError("Replies must be in the order of the rows.")
        beta = _in_frame(frame, fit)
        sums, _ = sum_over(rows, partial(block_sums, beta=beta))
        inverse = inverse_of(sums.hessian + np.diag(_ridge(frame, fit)))
        scored = partial(_scored, beta=beta, inverse=inverse, codes=codes, n=n)
        scores, leverage, prob = rows.beside(scored, partial(_places, replies), added)
        return cls(
            rows=rows, frame=frame, fit=fit, codes=codes, inverse=inverse, scores=scores,
            leverage=np.minimum(leverage, 1.0), replies=replies, reply_prob=np.concatenate(prob),
        )  # fmt: skip

    def deleted(self, groups: IntArray, count: int) -> Iterator[FloatArray]:
        """Yield the step's probabilities at the replies, (m,), fitted without each group."""
        of_clients = np.append(groups, -1)[self.codes]
        for g in range(count):
            rest = Changed(self.rows, partial(_without, kept=1.0 * (of_clients != g)))
            beta = _refitted(rest, self.frame, self.fit)
            at = partial(_places, self.replies)
            yield np.concatenate(self.rows.beside(partial(_reply_prob, beta=beta), at, added))

    def fitted_part(self, weights: FloatArray, values: FloatArray) -> FloatArray:
        """Return c'g of each client, (n, K), for replies of weights kappa / (R p) and values u."""

        def pulls(first: int, last: int) -> tuple[IntArray, FloatArray]:
            at = _between(self.replies, first, last)
            pull = (weights[at] * (1.0 - self.reply_prob[at]))[:, None] * values[at]
            return self.replies[at] - first, pull

        total = self.rows.beside(_pulled, pulls, added)
        return self.scores @ (self.inverse @ total)


def _between(replies: IntArray, first: int, last: int) -> slice:
    """Return which replies are among rows first up to last."""
    start, stop = np.searchsorted(replies, (first, last))
    return slice(int(start), int(stop))


def _places(replies: IntArray, first: int, last: int) -> IntArray:
    """Return the places of replies within rows first up to last."""
    return replies[_between(replies, first, last)] - first


def _scored(
    block: Block, here: IntArray, *, beta: FloatArray, inverse: FloatArray, codes: CodeArray, n: int
) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
    """Return what a block adds to c and the leverages, and its replies' probabilities."""
    p, mine = _prob(block.columns, beta), codes[block.clients]
    residual = block.labels - p
    scores = np.empty((n, len(beta)))
    for j, column in enumerate((*block.columns, 1.0)):
        scores[:, j] = client_sums(mine, residual * column, n)
    leverage = client_sums(mine, p * (1.0 - p) * _lengths(block.columns, inverse), n)
    return scores, leverage, [p[here]]


def _without(block: Block, kept: FloatArray) -> Block:
    return block._replace(weights=kept[block.clients])


def _reply_prob(block: Block, here: IntArray, *, beta: FloatArray) -> list[FloatArray]:
    return [_prob(block.columns[:, here], beta)]


def _pulled(block: Block, given: tuple[IntArray, FloatArray]) -> FloatArray:
    here, pull = given
    return np.vstack([block.columns[:, here] @ pull, pull.sum(axis=0)])


def _prob(columns: FloatArray, beta: FloatArray) -> FloatArray:
    return sigmoids(np.ascontiguousarray(beta[:-1] @ columns + beta[-1]), shift=0.0)


def _lengths(columns: FloatArray, inverse: FloatArray) -> FloatArray:
    """Return x' I^-1 x of rows by column, the constant among x, (m,)."""
    within = np.einsum("jm,jm->m", columns, inverse[:-1, :-1] @ columns)
    out: FloatArray = within + 2.0 * (inverse[-1, :-1] @ columns) + inverse[-1, -1]
    return out


def sampled_variance(values: FloatArray, weights: FloatArray) -> FloatArray:
    r"""Return the design variance of weighted sums of values (m, K) over a sample of weights d.

    .. math:: \hat V = \frac{m}{m - 1} \sum_{j=1}^m \Big(1 - \frac{1}{d_j}\Big)
       (d_j v_j - \bar v)^2, \qquad \bar v = \frac{\sum_j (1 - 1/d_j) d_j v_j}{\sum_j (1 - 1/d_j)}
       \qquad (E61)

    Hájek's approximation for a sample of fixed size drawn without replacement, with probabilities
    1/d and without strata or clusters; exact for simple random sampling, 0 for a census. Weights
    below 1 count as 1. Strata make it too large, clusters too small.

    >>> y = np.array([[1.0], [2.0], [6.0]])
    >>> sampled_variance(y, np.full(3, 4.0))  # 12^2 (1 - 3/12) 7 / 3
    array([252.])
    """
    share = 1.0 - 1.0 / np.maximum(weights, 1.0)
    if not share.any():
        return np.zeros(values.shape[1])
    each = weights[:, None] * values
    apart = each - share @ each / share.sum()
    out: FloatArray = share @ apart**2 * (len(weights) / max(len(weights) - 1, 1))
    return out


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceEnrollment(EnrollmentPhase):
    r"""Enrollment by a logistic model fitted on the enrolled and a reference sample R (P3).

    The total of :math:`\kappa_i t_i`, :math:`\kappa_i = 1/\hat\pi_i`, moves with both samples,

    .. math:: \sum_{i \in E} (\kappa_i t_i - z_i'g) + \sum_{j \in R} d_j \hat\pi_j z_j'g, \qquad
       g = \Big(\sum_{j \in R} d_j \hat\pi_j (1 - \hat\pi_j) z_j z_j'\Big)^{-1}
       \sum_{i \in E} \frac{1 - \hat\pi_i}{\hat\pi_i}\, t_i z_i \qquad (E60)

    The first sum is explained as by (E20), :math:`s_i = z_i'g`, with the information estimated by
    the reference sample; the second adds the variance of that sample's design (E61), drawn
    independently of enrollment. With the whole population as the sample it is
    :class:`FittedEnrollment`.
    """

    design: FloatArray  # (n, q + 1) of the enrolled, standardised, constant last
    prob: FloatArray  # (n,)
    inverse: FloatArray  # (q + 1, q + 1), of the information
    sampled: FloatArray  # (m, q + 1) pi z of the reference sample
    columns: FloatArray  # (n, q) of the enrolled as they are
    rows: ReferenceRows

    @classmethod
    def of(cls, rows: ReferenceRows, columns: FloatArray) -> ReferenceEnrollment:
        """Return the phase of the enrolled, whose design columns are (n, q)."""
        names, d = rows.design.names, rows.weights
        fit = reference_sample_fit(columns, rows.columns, d, names)
        centre = d @ rows.columns / d.sum()
        scale = np.sqrt(d @ (rows.columns - centre) ** 2 / d.sum())

        def standard(x: FloatArray) -> FloatArray:
            return np.column_stack([(x - centre) / scale, np.ones(len(x))])

        z, p = standard(rows.columns), fit.prob_at(rows.columns)
        return cls(
            weights=1.0 / fit.prob,
            design=standard(columns),
            prob=fit.prob,
            inverse=inverse_of((z * (d * p * (1.0 - p))[:, None]).T @ z),
            sampled=p[:, None] * z,
            columns=columns,
            rows=rows,
        )

    @property
    def fraction(self) -> FloatArray:
        """The probability, (n,)."""
        return self.prob

    @property
    def leverage(self) -> FloatArray:
        """Of the rows of the enrolled in the fit, (n,)."""
        own = np.einsum("ij,jk,ik->i", self.design, self.inverse, self.design)
        out: FloatArray = self.prob * (1.0 - self.prob) * own
        return out

    @property
    def notes(self) -> tuple[str, ...]:
        """What the error of the reference sample rests on."""
        text = (
            f"Standard errors count the sampling error of the {len(self.rows.weights)} rows of the "
            "reference sample as that of a sample of fixed size without strata or clusters, and "
            "take the sum of its weights for the population's size."
        )
        return (text,)

    def explained(self, totals: FloatArray) -> FloatArray:
        """Return s of (E60), (n, K)."""
        return self.design @ self._slope(totals)

    def target_variance(self, totals: FloatArray) -> FloatArray:
        """Return the variance of the reference sample's design (E61), (K,)."""
        return sampled_variance(self.sampled @ self._slope(totals), self.rows.weights)

    def deleted(self, groups: IntArray, count: int, rng: np.random.Generator) -> Iterator[Without]:
        """Yield weights fitted without each group of the enrolled; the sample stays whole."""
        del rng
        rows = self.rows
        for g in range(count):
            rest = self.columns[groups != g]
            fit = reference_sample_fit(rest, rows.columns, rows.weights, rows.design.names)
            yield Without(1.0 / fit.prob_at(self.columns), 1.0)

    def _slope(self, totals: FloatArray) -> FloatArray:
        odds = (1.0 - self.prob) / self.prob
        slope: FloatArray = self.inverse @ (self.design.T @ (odds[:, None] * totals))
        return slope
