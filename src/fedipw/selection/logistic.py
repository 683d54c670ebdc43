"""Maximum-likelihood logistic regression by Newton's method, over rows wherever they lie.

:func:`logistic_fit` takes any rows that can be summed over (arrays, files, a cluster, a panel of
rounds): every step is one sum (P1), so memory is O(q^2) whatever the number of rows.
:class:`~fedipw.selection.propensity.NewtonLogistic` is the same fit as a scikit-learn classifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from fedipw.errors import InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import LARGEST
from fedipw.numerics.logistic import ColumnSums, column_sums, sigmoids
from fedipw.numerics.newton import NewtonResult, NewtonStatus, Sums, newton_minimum
from fedipw.selection.separation import separating_columns
from fedipw.tables.partitions import Block, Changed, Frame, Partitions, frame_of, sum_over

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray

GRADIENT_TOL = 1e-12  # of the mean log-likelihood, in units of curvature about 1
DECREMENT_TOL = 1e-16  # a Newton step this short is taken and not looked at again
RANK_TOL = 1e-10  # share of a column's square that columns before it leave unexplained
_WIDE = 100  # columns up to which a fit is tried with no more rows, and told to separate
# how a fit was found, for people
_RECORDED = ("rows", "total_weight", "selected", "log_likelihood", "iterations", "passes",
             "gradient_norm")  # fmt: skip
SUSPECT = 15.0  # |log odds| beyond which separation is looked for


@dataclass(frozen=True, kw_only=True, eq=False)
class LogisticFit:
    r"""Coefficients that maximise the likelihood, and how far the fit got.

    :math:`\text{logit}\, P = x'\beta + \beta_0`. ``information`` is the observed information at the
    maximum, penalty included, of columns in ``frame``; a fit read from a file has the covariance
    that was saved in its place.
    """

    names: tuple[str, ...]
    coefficients: FloatArray  # (q,)
    intercept: float
    frame: Frame
    information: FloatArray | None = None  # (q + 1, q + 1), intercept last, 0 where left out
    saved_covariance: FloatArray | None = None  # (q + 1, q + 1)
    constant: tuple[str, ...]  # columns that never varied: coefficient 0
    collinear: tuple[str, ...]  # columns that follow from those before them: coefficient 0
    separating: tuple[str, ...] = ()  # columns that part the classes: no maximum exists
    l2: float
    rows: int = 0
    total_weight: float = 0.0
    selected: float = 0.0  # weight of rows with label 1
    log_likelihood: float = np.nan
    iterations: int = 0
    passes: int = 0  # over all rows
    gradient_norm: float = 0.0
    status: NewtonStatus = NewtonStatus.CONVERGED

    @property
    def dropped(self) -> tuple[str, ...]:
        """Columns left out, in their order."""
        out = {*self.constant, *self.collinear}
        return tuple(name for name in self.names if name in out)

    @property
    def converged(self) -> bool:
        """Whether this is the maximum."""
        return self.status is NewtonStatus.CONVERGED and not self.separating

    cross_fitted = False

    @property
    def point(self) -> FloatArray:
        """Coefficients and, last, the intercept, (q + 1,)."""
        return np.append(self.coefficients, self.intercept)

    @property
    def kept(self) -> BoolArray:
        """Which columns, and last the intercept, were not left out, (q + 1,)."""
        return np.append(~np.isin(self.names, self.dropped), True)

    @cached_property
    def covariance(self) -> FloatArray:
        """Inverse of the observed information, (q + 1, q + 1), intercept last, 0 where left out."""
        if self.saved_covariance is not None:
            return self.saved_covariance
        inside = np.zeros((len(self.names) + 1, len(self.names) + 1))
        if self.information is not None:
            chosen = np.ix_(self.kept, self.kept)
            inside[chosen] = np.linalg.pinv(self.information[chosen], hermitian=True)
        back = self.frame.inverse()
        outside: FloatArray = back @ inside @ back.T
        return outside

    @property
    def standard_errors(self) -> FloatArray:
        """Of coefficients and, last, the intercept, (q + 1,); NaN for columns left out."""
        variance = np.where(self.kept, np.diag(self.covariance), np.nan)
        errors: FloatArray = np.sqrt(variance)
        return errors

    def log_odds(self, columns: FloatArray) -> FloatArray:
        """Return the log odds of rows that lie by column, (q, m) to (m,)."""
        odds: FloatArray = self.coefficients @ columns + self.intercept
        return odds

    def prob(self, columns: FloatArray, clients: IntArray | None = None) -> FloatArray:
        """Return the fitted probability of rows that lie by column, (q, m) to (m,)."""
        del clients  # one model for all
        return sigmoids(np.ascontiguousarray(self.log_odds(columns)), shift=0.0)

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restored` makes the same probabilities and the next start of."""
        return {
            "coefficients": self.coefficients, "intercept": self.intercept, "l2": self.l2,
            "information": self.information, "constant": list(self.constant),
            "collinear": list(self.collinear), "status": self.status.value,
            **{name: getattr(self, name) for name in _RECORDED},
        }  # fmt: skip

    @classmethod
    def restored(
        cls, names: tuple[str, ...], frame: Frame, state: Mapping[str, Any]
    ) -> LogisticFit:
        """Return a fit from its saved state."""
        information = state["information"]
        return cls(
            names=names, frame=frame, coefficients=np.array(state["coefficients"]),
            intercept=float(state["intercept"]), l2=float(state["l2"]),
            information=None if information is None else np.array(information),
            constant=tuple(state["constant"]), collinear=tuple(state["collinear"]),
            status=NewtonStatus(state["status"]),
            **{name: state[name] for name in _RECORDED},
        )  # fmt: skip

    def informed_by(self, rows: Partitions) -> LogisticFit:
        """Return the fit with its information at the maximum itself, by one pass over its rows."""
        if self.information is None:
            return self
        at, _ = likelihood_sums(rows, self.frame.matrix() @ self.point)
        ridge = np.diag(np.append(self.l2 / self.frame.scale**2, 0.0))
        both = np.outer(self.kept, self.kept)
        return replace(self, information=np.where(both, at.hessian + ridge, 0.0))

    def checked(self) -> LogisticFit:
        """Return itself, or raise if there is no maximum or it was not reached."""
        if self.separating:
            raise SeparationError(self.separating, self.rows)
        if not self.converged:
            raise NotConvergedError(self.iterations, self.gradient_norm, GRADIENT_TOL)
        return self


def logistic_fit(
    partitions: Partitions,
    names: Sequence[str],
    *,
    frame: Frame | None = None,
    l2: float = 0.0,
    start: FloatArray | None = None,
    max_iter: int = 100,
    decrement_tol: float = DECREMENT_TOL,
) -> LogisticFit:
    r"""Fit by Newton's method over partitions.

    .. math:: \min_\beta \; \ell(\beta) + \tfrac{1}{2} l_2 |\beta_{1..q}|^2 \qquad (P4)

    with :math:`\ell` of (P1). Columns that are constant or follow from those before them are left
    out and named. Separation is looked for where the fit does not converge or log odds are
    extreme, and proved by a linear programme.

    Parameters
    ----------
    partitions
        Rows with labels, their columns already in ``frame``.
    names
        Names of the q columns.
    frame
        The affine change the columns have gone through, to about mean 0 and deviation 1. It does
        not move the maximum, only conditions the steps; results are in the original units. Without
        it one pass finds it, and each pass applies it.
    l2
        Ridge penalty in the original units; 0 is maximum likelihood. The intercept is free.
    start
        First coefficients and, last, intercept, in original units; 0 and the log odds of the
        overall rate by default. A former fit saves passes.
    max_iter
        Limit on Newton steps.
    decrement_tol
        A Newton step whose decrement is this small is taken without another pass.

    Examples
    --------
    >>> from fedipw.tables.partitions import Blocks
    >>> X, y = np.array([[0.0], [0.0], [1.0], [1.0], [1.0]]), np.array([0, 1, 0, 1, 1], np.int8)
    >>> fit = logistic_fit(Blocks.of_arrays(X, y), ["x"])
    >>> fit.prob(np.array([[1.0]])).round(6), fit.standard_errors.round(4)
    (array([0.666667]), array([1.8708, 1.4142]))
    """
    if not 0.0 <= l2 <= LARGEST:
        raise InputError(f"l2 must be 0 or more, and {LARGEST:g} at most, not {l2!r}.")
    names = tuple(names)
    q = len(names)
    if q > _WIDE and q >= partitions.rows and l2 == 0.0:
        raise InputError(
            f"{q} columns and {partitions.rows} rows: with no more rows than columns any two "
            "groups can be told apart, and no probability can be fitted. Name fewer columns in the "
            "formula, or add an L2 penalty (`l2=...`, --l2)."
        )
    if frame is None:
        frame = frame_of(partitions, q)
        partitions = Changed(partitions, frame.block)
    return fitted(
        PartitionRows(partitions), names, frame=frame, l2=l2, start=start, max_iter=max_iter,
        decrement_tol=decrement_tol,
    )  # fmt: skip


def fitted(
    rows: LikelihoodRows,
    names: tuple[str, ...],
    *,
    frame: Frame,
    l2: float = 0.0,
    start: FloatArray | None = None,
    max_iter: int = 100,
    decrement_tol: float = DECREMENT_TOL,
) -> LogisticFit:
    """Fit (P4) over rows that are known by their sums alone, already in ``frame``.

    :func:`logistic_fit` is this over partitions; rows that stay with the clients they are about
    have the same fit by secure sums.
    """
    q = len(names)
    run = _Run(rows, l2 / frame.scale**2)
    point = run.rate_only(q) if start is None else run.likelier(frame.matrix() @ start)
    everything = np.ones(q + 1, dtype=np.bool_)
    if start is not None:
        near = run.one_step(point, decrement_tol)
        if near is not None:
            return _result(names, frame, run, near, kept=everything, constant=~everything, l2=l2)
    kept, constant = run.independent(point)
    if start is not None and not kept.all():  # where rows are sure, curvature hides their columns
        point = run.rate_only(q)
        kept, constant = run.independent(point)
    if point[:-1][~kept[:-1]].any():
        point = np.where(kept, point, 0.0)
    found = run.minimum(point, kept, max_iter, decrement_tol)
    suspect = not found.converged or run.largest > SUSPECT
    positions = rows.separating(kept[:-1]) if suspect and l2 == 0.0 else ()
    return _result(
        names, frame, run, found, kept=kept, constant=constant, positions=positions, l2=l2
    )


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Rows and their weight, in all and with label 1."""

    rows: int
    weight: float
    selected: float

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.rows + other.rows, self.weight + other.weight, self.selected + other.selected
        )


def _counts(block: Block) -> Counts:
    if len(block.weights):
        return Counts(block.rows, float(block.weights.sum()), float(block.weights @ block.labels))
    return Counts(block.rows, float(block.rows), float(np.count_nonzero(block.labels)))


def _checked(counts: Counts) -> Counts:
    if not 0.0 < counts.selected < counts.weight:
        kind = "selected" if counts.selected > 0.0 else "not selected"
        raise InputError(
            f"All {counts.rows} rows are {kind}: a probability of selection needs both kinds."
        )
    return counts


def block_sums(block: Block, beta: FloatArray) -> tuple[ColumnSums, Counts]:
    """Return (P1) over a block with its derivatives, and the block's counts."""
    return column_sums(block.columns, block.labels, block.weights, beta), _counts(block)


def likelihood_sums(rows: Partitions, beta: FloatArray) -> tuple[ColumnSums, Counts]:
    """Return (P1) over all rows with its derivatives, and their counts.

    Rows that know a faster way than block by block, such as a panel of rounds, have a method of
    this name.
    """
    own = getattr(rows, "likelihood_sums", None)
    if own is not None:
        found: tuple[ColumnSums, Counts] = own(beta)
        return found
    return sum_over(rows, partial(block_sums, beta=beta))


class LikelihoodRows(Protocol):
    """Rows behind a fit: the sums that Newton's method asks for, wherever rows are."""

    @property
    def value_error(self) -> float:
        """How far the mean log-likelihood of two passes may be off, beyond rounding."""

    def counts(self) -> Counts:
        """Return the number of rows and of those with label 1."""

    def sums(self, beta: FloatArray) -> tuple[ColumnSums, Counts]:
        """Return (P1) with its derivatives at a point, (q + 1,), and the counts."""

    def separating(self, kept: BoolArray) -> tuple[int, ...]:
        """Return columns among those kept, (q,), that separate the classes; none if none do."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PartitionRows:
    """Rows in partitions, of which any function can be taken."""

    partitions: Partitions
    value_error = 0.0

    def counts(self) -> Counts:
        """Return them by a pass that computes nothing."""
        return sum_over(self.partitions, _counts)

    def sums(self, beta: FloatArray) -> tuple[ColumnSums, Counts]:
        """Return the sums over all blocks."""
        return likelihood_sums(self.partitions, beta)

    def separating(self, kept: BoolArray) -> tuple[int, ...]:
        """Return a minimal set of columns, proved by a linear programme over rows."""
        return separating_columns(self.partitions, kept)


@dataclass(slots=True, eq=False)
class _Run:
    """The mean penalised log-likelihood, and what was seen on the way."""

    rows: LikelihoodRows
    ridge: FloatArray  # (q,)
    passes: int = 0
    counts: Counts = field(default_factory=lambda: Counts(0, 0.0, 0.0))
    largest: float = 0.0
    value: float = 0.0  # log-likelihood at the last point
    _known: tuple[FloatArray, Sums] | None = field(default=None)

    def sums(self, beta: FloatArray) -> Sums:
        """Return value, gradient and Hessian at full length (q + 1,)."""
        if self._known is not None and np.array_equal(self._known[0], beta):
            return self._known[1]
        at, counts = self.rows.sums(beta)
        self.passes, self.counts = self.passes + 1, _checked(counts)
        self.largest, self.value = at.largest, -at.value
        weight = self.counts.weight
        penalty = np.append(self.ridge, 0.0) / weight
        out = Sums(
            at.value / weight + 0.5 * float(penalty @ beta**2),
            at.gradient / weight + penalty * beta,
            at.hessian / weight + np.diag(penalty),
        )
        self._known = beta.copy(), out
        return out

    def rate_only(self, q: int) -> FloatArray:
        """Return the point without covariates, (q + 1,): a pass that computes nothing."""
        counts = self.counts if self.counts.rows else _checked(self.rows.counts())
        point = np.zeros(q + 1)
        point[-1] = np.log(counts.selected / (counts.weight - counts.selected))
        return point

    def likelier(self, point: FloatArray) -> FloatArray:
        """Return a start, (q + 1,), or the point without covariates where that is likelier."""
        value = self.sums(point).value
        share = self.counts.selected / self.counts.weight
        alone = -share * np.log(share) - (1.0 - share) * np.log1p(-share)
        return point if value <= alone else self.rate_only(len(point) - 1)

    def one_step(self, point: FloatArray, decrement_tol: float) -> NewtonResult | None:
        """Return the minimum where one Newton step from a start reaches it, by one pass.

        None where it does not, where a column follows from others, or where log odds are extreme:
        those cases are looked at with care.
        """
        at = self.sums(point)
        if self.largest > SUSPECT or not _all_independent(at.hessian):
            return None
        step = np.linalg.solve(at.hessian, at.gradient)
        decrement = float(step @ at.gradient)
        if not 0.0 <= decrement <= decrement_tol:
            return None
        return NewtonResult(
            point=point - step, value=at.value, hessian=at.hessian, iterations=1,
            gradient_norm=float(np.linalg.norm(at.gradient)), status=NewtonStatus.CONVERGED,
            tolerance=GRADIENT_TOL,
        )  # fmt: skip

    def independent(self, point: FloatArray) -> tuple[BoolArray, BoolArray]:
        """Return which columns to keep, intercept last, and which never vary, (q + 1,) each."""
        hessian = self.sums(point).hessian
        if self.ridge.all() and len(self.ridge):
            return np.ones(len(point), dtype=np.bool_), np.zeros(len(point), dtype=np.bool_)
        return independent_columns(hessian)

    def minimum(
        self, point: FloatArray, kept: BoolArray, max_iter: int, decrement_tol: float
    ) -> NewtonResult:
        """Return the minimum over the kept columns.

        Steps are taken in units in which each column's curvature at ``point`` is about 1: a level
        of one row in millions counts as much as any. Units are powers of 2, so nothing is rounded.
        """
        curvature = np.diag(self.sums(point).hessian)[kept]
        unit = np.exp2(-np.round(0.5 * np.log2(curvature)))
        both = np.outer(unit, unit)

        def objective(some: FloatArray) -> Sums:
            beta = np.zeros(len(kept))
            beta[kept] = unit * some
            at = self.sums(beta)
            hessian = at.hessian[np.ix_(kept, kept)]
            return Sums(at.value, unit * at.gradient[kept], both * hessian)

        found = newton_minimum(
            objective,
            point[kept] / unit,
            gradient_tol=GRADIENT_TOL,
            decrement_tol=decrement_tol,
            max_iterations=max_iter,
            value_error=lambda: self.rows.value_error,
        )
        return replace(found, point=unit * found.point, hessian=found.hessian / both)


def independent_columns(gram: FloatArray) -> tuple[BoolArray, BoolArray]:
    """Return columns that do not follow from those before them, and those without variation.

    ``gram`` (q + 1, q + 1) holds products of columns with the constant last, which comes first in
    order. A column stays if more than ``RANK_TOL`` of its square is its own.

    >>> x = np.array([[0.0, 1, 2, 3], [1, 3, 5, 7], [1, 1, 1, 1]])  # the second is 2 x + 1
    >>> kept, constant = independent_columns(x @ x.T)
    >>> kept.tolist(), constant.tolist()
    ([True, False, True], [False, False, False])
    """
    if _all_independent(gram):
        return np.ones(len(gram), dtype=np.bool_), np.zeros(len(gram), dtype=np.bool_)
    order = [len(gram) - 1, *range(len(gram) - 1)]
    kept = np.zeros(len(gram), dtype=np.bool_)
    constant = np.zeros(len(gram), dtype=np.bool_)
    rows: list[FloatArray] = []  # of the Cholesky factor, one per kept column
    for j in order:
        known = np.array([row[j] for row in rows])
        own = gram[j, j] - float(known @ known)
        if len(rows) == 1:
            around = own
        elif rows:
            around = gram[j, j] - rows[0][j] ** 2
        else:
            around = gram[j, j]
        constant[j] = bool(rows) and not around > RANK_TOL * gram[j, j]
        if constant[j] or not own > RANK_TOL * around:
            continue
        kept[j] = True
        row = gram[j] - sum((r[j] * r for r in rows), np.zeros(len(gram)))
        rows.append(row / np.sqrt(own))
    return kept, constant


def _all_independent(gram: FloatArray) -> bool:
    """Return whether every column stays: the common case, decided by one factorisation."""
    order = np.arange(-1, len(gram) - 1)  # the constant first
    ordered = gram[order[:, None], order]
    try:
        factor = np.linalg.cholesky(ordered)
    except np.linalg.LinAlgError:
        return False
    square = np.diag(ordered)[1:]
    around = square - factor[1:, 0] ** 2
    own = np.diag(factor)[1:] ** 2
    return bool((around > RANK_TOL * square).all() and (own > RANK_TOL * around).all())


def _result(
    names: tuple[str, ...],
    frame: Frame,
    run: _Run,
    found: NewtonResult,
    *,
    kept: BoolArray,
    constant: BoolArray,
    positions: tuple[int, ...] = (),
    l2: float,
) -> LogisticFit:
    point = np.zeros(len(kept))
    point[kept] = found.point
    beta = point[:-1] / frame.scale
    information = None
    if found.status is NewtonStatus.CONVERGED and not positions:
        information = np.zeros((len(kept), len(kept)))
        information[np.ix_(kept, kept)] = run.counts.weight * found.hessian
    left = ~kept & ~constant
    return LogisticFit(
        names=names,
        coefficients=beta,
        intercept=float(point[-1] - beta @ frame.centre),
        frame=frame,
        information=information,
        constant=tuple(n for n, c in zip(names, constant[:-1], strict=True) if c),
        collinear=tuple(n for n, c in zip(names, left[:-1], strict=True) if c),
        separating=tuple(names[j] for j in positions),
        rows=run.counts.rows,
        total_weight=run.counts.weight,
        selected=run.counts.selected,
        log_likelihood=run.value,
        l2=l2,
        iterations=found.iterations,
        passes=run.passes,
        gradient_norm=found.gradient_norm,
        status=found.status,
    )
