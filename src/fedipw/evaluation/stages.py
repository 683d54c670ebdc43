"""The two phases of selection behind a metric: what estimating each of them does to its error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np

from fedipw.errors import InputError
from fedipw.evaluation.sums import Reweighed, inverse_of, refitted
from fedipw.numerics.logistic import sigmoids
from fedipw.selection.fit import block_sums
from fedipw.tables.partitions import Block, Partitions, sum_over

if TYPE_CHECKING:
    from fedipw.calibration import Distance, InverseLogit
    from fedipw.numerics.types import FloatArray, IntArray, LabelArray
    from fedipw.selection.fit import LogisticFit
    from fedipw.tables.frames import Frame
    from fedipw.weighting.balance import Balance


class Without(NamedTuple):
    """Enrollment when a group of clients is left out."""

    weights: FloatArray  # (n,); of no use for the group left out
    share: float  # of the population that the weights stand for


class EnrollmentPhase(Protocol):
    """Enrollment weights of the n enrolled, and what estimating them explains of a total."""

    @property
    def weights(self) -> FloatArray:
        """How many clients of the population each of the enrolled stands for, (n,)."""
        ...

    @property
    def fraction(self) -> FloatArray:
        """The share of those that it is itself, (n,); 0 where the population's size is unknown."""
        ...

    @property
    def leverage(self) -> FloatArray:
        """How much each of the enrolled moves its own fit, (n,)."""
        ...

    def explained(self, totals: FloatArray) -> FloatArray:
        """Return the part s of weights times totals that the estimated weights explain, (n, K)."""
        ...

    def superpopulation(self, influence: FloatArray, totals: FloatArray) -> FloatArray | None:
        """Return the sum of squares of (E24), (K,); none where others are not known."""
        ...

    def target_variance(self, totals: FloatArray) -> FloatArray:
        """Return the variance that errors of the population means add, (K,)."""
        ...

    @property
    def units(self) -> int:
        """Number of clients that a jackknife cuts into groups."""
        ...

    def resampled(self, influence: FloatArray, totals: FloatArray) -> FloatArray:
        """Return the sum of squares that leaving out groups of the units measures, (K,)."""
        ...

    def deleted(self, groups: IntArray, count: int, rng: np.random.Generator) -> Iterator[Without]:
        """Yield the weights estimated anew without each of ``count`` groups in turn.

        ``groups`` (n,) are those of the enrolled, 0 to count - 1; clients that are not enrolled
        are given theirs by ``rng``, so that groups of all units are equally large.
        """
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedEnrollment:
    r"""Enrollment by a logistic model fitted on the whole population.

    Each of the enrolled stands for :math:`\kappa_i = 1/\hat\pi_i` clients. Fitting
    :math:`\hat\pi` takes from :math:`\kappa_i t_i` what the scores explain,

    .. math:: s_i = z_i' I^{-1} \sum_{j \in E} \frac{1 - \hat\pi_j}{\hat\pi_j}\, t_j z_j,
       \qquad I = \sum_{i=1}^N \hat\pi_i (1 - \hat\pi_i) z_i z_i'. \qquad (E20)
    """

    design: FloatArray  # (n, q + 1) of the enrolled, constant last
    prob: FloatArray  # (n,)
    inverse: FloatArray  # (q + 1, q + 1), of the information
    outside: FloatArray  # (q + 1, q + 1), sum over the others of prob^2 z z'
    population_size: int
    rows: Partitions  # the population, in the frame of the design
    beta: FloatArray  # (q + 1,) in the frame, constant last

    @classmethod
    def of(cls, partitions: Partitions, frame: Frame, fit: LogisticFit, columns: FloatArray
    ) -> FittedEnrollment:  # fmt: skip
        """Return the phase of a fit on a population in ``frame``; ``columns`` (q, n) are not."""
        beta = frame.matrix() @ np.append(fit.coefficients, fit.intercept)
        information, outside, rows = sum_over(partitions, partial(_population_sums, beta=beta))
        inside = frame.standard(columns.copy())
        return cls(
            design=np.vstack([inside, np.ones(columns.shape[1])]).T.copy(),
            prob=sigmoids(np.ascontiguousarray(beta[:-1] @ inside + beta[-1]), shift=0.0),
            inverse=inverse_of(information),
            outside=outside,
            population_size=rows,
            rows=partitions,
            beta=beta,
        )

    @property
    def weights(self) -> FloatArray:
        """1/probability, (n,)."""
        return 1.0 / self.prob

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

    def explained(self, totals: FloatArray) -> FloatArray:
        """Return s of (E20), (n, K)."""
        return self.design @ self._slope(totals)

    def superpopulation(self, influence: FloatArray, totals: FloatArray) -> FloatArray:
        """Return the sum over all N clients of squares about their mean, (K,)."""
        slope = self._slope(totals)
        enrolled = influence - (1.0 - self.prob)[:, None] * (self.design @ slope)
        squares = (enrolled**2).sum(axis=0) + np.einsum("jk,jl,lk->k", slope, self.outside, slope)
        mean = influence.sum(axis=0) / self.population_size  # scores sum to 0
        out: FloatArray = squares - self.population_size * mean**2
        return out

    def target_variance(self, totals: FloatArray) -> FloatArray:
        """Return 0: the population is known."""
        return np.zeros(totals.shape[1])

    @property
    def units(self) -> int:
        """All clients of the population."""
        return self.population_size

    def resampled(self, influence: FloatArray, totals: FloatArray) -> FloatArray:
        """Return that of the superpopulation: every client may be left out, (K,)."""
        return self.superpopulation(influence, totals)

    def deleted(self, groups: IntArray, count: int, rng: np.random.Generator) -> Iterator[Without]:
        """Yield weights of models fitted without each group."""
        enrolled = self.rows.reduced(_labels, np.append) == 1
        of_rows = np.empty(self.population_size, dtype=np.int64)
        of_rows[enrolled], of_rows[~enrolled] = groups, _others(self.units, groups, count, rng)
        for g in range(count):
            beta = refitted(Reweighed(self.rows, 1.0 * (of_rows != g)), self.beta)
            weights = 1.0 / sigmoids(np.ascontiguousarray(self.design @ beta), shift=0.0)
            yield Without(weights, float((of_rows != g).mean()))

    def _slope(self, totals: FloatArray) -> FloatArray:
        odds = (1.0 - self.prob) / self.prob
        slope: FloatArray = self.inverse @ (self.design.T @ (odds[:, None] * totals))
        return slope


def _population_sums(block: Block, beta: FloatArray) -> tuple[FloatArray, FloatArray, int]:
    sums, _ = block_sums(block, beta)
    rows = np.vstack([block.columns, np.ones(block.rows)])[:, block.labels == 0]
    prob = sigmoids(np.ascontiguousarray(beta @ rows), shift=0.0)
    return sums.hessian, (rows * prob**2) @ rows.T, block.rows


def _labels(block: Block) -> LabelArray:
    return block.labels.copy()  # a block of a scratch file lends its memory to the next


def _others(units: int, taken: IntArray, count: int, rng: np.random.Generator) -> IntArray:
    """Return groups of the units that have none yet, so that all groups are equally large."""
    room = np.bincount(np.arange(units) % count, minlength=count)
    room -= np.bincount(taken, minlength=count)
    if (room < 0).any():
        raise InputError("A group of the jackknife has more enrolled clients than its share.")
    return rng.permutation(np.repeat(np.arange(count), room))


def _squares(influence: FloatArray) -> FloatArray:
    """Return sums of squares about the mean, (K,)."""
    out: FloatArray = ((influence - influence.mean(axis=0)) ** 2).sum(axis=0)
    return out


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibratedEnrollment:
    r"""Enrollment by calibration to population means.

    Each of the enrolled stands for :math:`\kappa_i = N q_i` clients. With the slopes
    :math:`F_i' = F'(\lambda'b_i)` of the calibrated weights, calibration takes from
    :math:`\kappa_i t_i`

    .. math:: s_i = \kappa_i b_i' B, \qquad
       B = \Big(\sum_{j \in E} F_j' b_j b_j'\Big)^{-1} \sum_{j \in E} F_j' b_j t_j. \qquad (E21)

    Where N is not known the total is that of the enrolled, which changes no mean, and nothing is
    taken off for the finite population: the fraction is 0, and intervals are too wide rather than
    too narrow. Standard errors of the targets add :math:`N^2 B' \text{diag}(se^2) B`.
    """

    balance: FloatArray  # (n, q) in deviations from the target
    scale: FloatArray  # (q,) of the deviations
    shares: FloatArray  # q_i, (n,), summing to 1
    slopes: FloatArray  # F', (n,)
    size: float | None  # N
    source: Balance
    distance: Distance | InverseLogit
    target_error: FloatArray | None = None  # (q,)

    @classmethod
    def of(cls, balance: Balance, distance: Distance | InverseLogit) -> CalibratedEnrollment:
        """Return the phase of a balance calibrated by a distance."""
        found = balance.calibration(distance)
        size = balance.population_size
        scale = np.where(found.deviation > 0.0, found.deviation, 1.0)
        return cls(
            balance=balance.matrix[balance.enrolled] - found.target,
            scale=scale,
            shares=found.weights,
            slopes=distance.slope(found.ratio),
            size=size if np.isfinite(size) else None,
            source=balance,
            distance=distance,
            target_error=balance.se,
        )

    @property
    def weights(self) -> FloatArray:
        """N q, or n q where N is not known, (n,)."""
        return self.shares * (len(self.shares) if self.size is None else self.size)

    @property
    def fraction(self) -> FloatArray:
        """1/(N q), at most 1, (n,); 0 where N is not known."""
        if self.size is None:
            return np.zeros(len(self.shares))
        return 1.0 / np.maximum(self.weights, 1.0)

    @property
    def leverage(self) -> FloatArray:
        """Of the rows of the enrolled in the regression behind B, (n,)."""
        b = self._columns
        own = np.einsum("ij,jk,ik->i", b, inverse_of((self.slopes[:, None] * b).T @ b), b)
        out: FloatArray = np.minimum(self.slopes * own, 1.0)
        return out

    @property
    def _columns(self) -> FloatArray:
        return np.column_stack([self.balance / self.scale, np.ones(len(self.balance))])

    def _slope(self, totals: FloatArray) -> FloatArray:
        b = self._columns
        tilted = self.slopes[:, None] * b
        found: FloatArray = inverse_of(tilted.T @ b) @ (tilted.T @ totals)
        return found

    def explained(self, totals: FloatArray) -> FloatArray:
        """Return s of (E21), (n, K)."""
        return self.weights[:, None] * (self._columns @ self._slope(totals))

    def superpopulation(self, influence: FloatArray, totals: FloatArray) -> FloatArray | None:
        """Return nothing: how the population varies is not known from its means."""
        del influence, totals
        return None

    def target_variance(self, totals: FloatArray) -> FloatArray:
        """Return what standard errors of the targets add, (K,)."""
        if self.target_error is None:
            return np.zeros(totals.shape[1])
        slope = (
            self._slope(totals)[:-1]
            * (self.weights.sum() * self.target_error / self.scale)[:, None]
        )
        out: FloatArray = (slope**2).sum(axis=0)
        return out

    @property
    def units(self) -> int:
        """The enrolled."""
        return len(self.shares)

    def resampled(self, influence: FloatArray, totals: FloatArray) -> FloatArray:
        """Return the squares of what calibration leaves of the enrolled, (K,)."""
        return _squares(influence - self.explained(totals))

    def deleted(self, groups: IntArray, count: int, rng: np.random.Generator) -> Iterator[Without]:
        """Yield weights calibrated without each group; the population keeps its size."""
        del rng
        for g in range(count):
            enrolled = self.source.enrolled.copy()
            enrolled[enrolled] = groups != g
            found = replace(self.source, enrolled=enrolled).calibration(self.distance)
            weights = np.zeros(len(groups))
            weights[groups != g] = found.weights * self.weights.sum()
            yield Without(weights, 1.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownEnrollment:
    """Enrollment weights from outside: nothing was estimated."""

    weights: FloatArray  # 1/probability, (n,)
    population_size: int | None = None
    signed: bool = False  # whether weights may be negative, as those of a linear calibration

    def __post_init__(self) -> None:
        if not (np.isfinite(self.weights) & (self.signed | (self.weights >= 0.0))).all():
            raise InputError("Enrollment weights must be finite and not negative.")

    @property
    def fraction(self) -> FloatArray:
        """1/weight, at most 1, (n,)."""
        return 1.0 / np.maximum(self.weights, 1.0)

    @property
    def leverage(self) -> FloatArray:
        """None, (n,)."""
        return np.zeros(len(self.weights))

    def explained(self, totals: FloatArray) -> FloatArray:
        """Return 0, (n, K)."""
        return np.zeros_like(totals)

    def superpopulation(self, influence: FloatArray, totals: FloatArray) -> FloatArray | None:
        """Return the sum over all N clients of squares about their mean, (K,)."""
        del totals
        if self.population_size is None:
            return None
        mean = influence.sum(axis=0) / self.population_size
        out: FloatArray = (influence**2).sum(axis=0) - self.population_size * mean**2
        return out

    def target_variance(self, totals: FloatArray) -> FloatArray:
        """Return 0: the population is known."""
        return np.zeros(totals.shape[1])

    @property
    def units(self) -> int:
        """The enrolled."""
        return len(self.weights)

    def resampled(self, influence: FloatArray, totals: FloatArray) -> FloatArray:
        """Return the squares of the enrolled, (K,)."""
        del totals
        return _squares(influence)

    def deleted(self, groups: IntArray, count: int, rng: np.random.Generator) -> Iterator[Without]:
        """Yield the weights: nothing is estimated."""
        del rng
        for g in range(count):
            yield Without(self.weights, float((groups != g).mean()))
