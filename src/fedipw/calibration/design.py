"""What is balanced: columns of the enrolled clients, and which of them say something new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import polars as pl

from fedipw.calibration.distances import UNBOUNDED, Family
from fedipw.errors import InfeasibleError, InputError
from fedipw.numerics import BoolArray, CodeArray, FloatArray, IntArray
from fedipw.numerics.checks import check_rows, some
from fedipw.numerics.dual import column_moments, dense_sums, margin_sums
from fedipw.tables.cluster import ClusterBlocks
from fedipw.tables.columns import ENROLLED
from fedipw.tables.formula import Term, term_matrix
from fedipw.tables.partitions import Block, Blocks, Partitions, rows_per_block, sum_over
from fedipw.tables.table import Slice, Table, rows_of

_VARIANCE = 1e-12  # share of a column's variance below which nothing is left of it
_CONSISTENT = 1e-6  # of the column's range: targets that follow may be rounded
_ROUNDING = 1e-12  # of a target that should be 0
_RELATED = 1e-6  # a smaller coefficient on a standardised column is rounding
SUBSAMPLE = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Unweighted moments of the columns over some rows; moments of other rows can be added."""

    rows: int
    mean: FloatArray  # (q,)
    square: FloatArray  # (q,), sum of squares about the mean
    least: FloatArray  # (q,)
    largest: FloatArray  # (q,)

    @property
    def deviation(self) -> FloatArray:
        """Standard deviations over n - 1, (q,)."""
        return np.sqrt(self.square / max(1, self.rows - 1))

    @property
    def varies(self) -> BoolArray:
        """Which columns are not constant, (q,)."""
        return self.least < self.largest

    def __add__(self, other: Moments) -> Moments:
        rows = self.rows + other.rows
        apart, share = other.mean - self.mean, other.rows / rows
        return Moments(
            rows,
            self.mean + apart * share,
            self.square + other.square + apart**2 * (self.rows * share),
            np.fmin(self.least, other.least),
            np.fmax(self.largest, other.largest),
        )


class Tilt(NamedTuple):
    """Ratios F(u) of rows, with u = point'((b - centre) / scale, 1)."""

    family: Family
    centre: FloatArray  # (q,)
    scale: FloatArray  # (q,)
    point: FloatArray  # (q + 1,), the constant last


@dataclass(frozen=True, slots=True, eq=False)
class DualSums:
    """Sums over rows at one tilt; gradient and Hessian have the constant last."""

    value: float
    largest: float  # largest u of any row
    gradient: FloatArray  # (q + 1,)
    hessian: FloatArray | None  # (q + 1, q + 1)

    def __add__(self, other: DualSums) -> DualSums:
        square = None
        if self.hessian is not None and other.hessian is not None:
            square = self.hessian + other.hessian
        return DualSums(
            self.value + other.value,
            max(self.largest, other.largest),
            self.gradient + other.gradient,
            square,
        )


class BalanceDesign(Protocol):
    """Rows of balance columns b_i, whatever holds them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, (q,)."""
        ...

    @property
    def rows(self) -> int:
        """Number of enrolled clients."""
        ...

    @property
    def moments(self) -> Moments:
        """Unweighted moments of the columns."""
        ...

    @property
    def implied(self) -> BoolArray:
        """Columns known to follow from those before them, (q,)."""
        ...

    def take(self, rows: slice | IntArray) -> BalanceDesign:
        """Return some of the rows, copied."""
        ...

    def sums(self, base: FloatArray, tilt: Tilt, ratio: FloatArray, *, hessian: bool) -> DualSums:
        """Return the dual's sums with base shares (n,) or (1,); leaves F(u) in ``ratio``, (n,)."""
        ...

    def dense(self) -> FloatArray:
        """Return all rows, (n, q); only for small problems."""
        ...


def gram(
    design: BalanceDesign, base: FloatArray, centre: FloatArray, scale: FloatArray
) -> FloatArray:
    """Return the base-weighted second moments of the standardised columns, constant last."""
    tilt = Tilt(UNBOUNDED, centre, scale, np.zeros(len(centre) + 1))  # F' = 1
    square = design.sums(base, tilt, np.empty(design.rows), hessian=True).hessian
    assert square is not None
    return square


@final
@dataclass(frozen=True, eq=False)
class Dense:
    """A matrix of balance columns, (n, q), read where it lies and never copied."""

    matrix: FloatArray
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2 or self.matrix.shape[1] != len(self.names):
            raise InputError(
                f"Balance columns have shape {self.matrix.shape}, expected (rows, "
                f"{len(self.names)})."
            )
        check_names(self.names)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.matrix)

    @cached_property
    def moments(self) -> Moments:
        """Moments of the columns, in one pass."""
        return Moments(self.rows, *column_moments(self.matrix))

    @property
    def implied(self) -> BoolArray:
        """None."""
        return np.zeros(len(self.names), dtype=np.bool_)

    def take(self, rows: slice | IntArray) -> Dense:
        """Return some of the rows, copied."""
        return Dense(np.ascontiguousarray(self.matrix[rows]), self.names)

    def sums(self, base: FloatArray, tilt: Tilt, ratio: FloatArray, *, hessian: bool) -> DualSums:
        """Return the dual's sums."""
        family, centre, scale, point = tilt
        return DualSums(
            *dense_sums(self.matrix, base, centre, scale, point, family, ratio, hessian=hessian)
        )

    def dense(self) -> FloatArray:
        """Return the matrix."""
        return self.matrix


@final
@dataclass(frozen=True, eq=False)
class Margins:
    """Indicators of the levels of V categorical variables, given by codes.

    ``codes`` (n, V) counts levels from 0; ``levels`` names them, variable by variable. Columns are
    all levels in turn, so that targets are one share per level. The indicator matrix is never
    built: memory is one small integer per client and variable.
    """

    codes: CodeArray
    levels: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.shape[1] != len(self.levels):
            raise InputError(
                f"Codes have shape {self.codes.shape}, expected (rows, {len(self.levels)})."
            )
        if not np.issubdtype(self.codes.dtype, np.integer):
            raise InputError(f"Codes must be whole numbers, not {self.codes.dtype}.")
        check_names(self.names)
        sizes = np.array([len(names) for names in self.levels])
        if self.codes.size and (self.codes.min() < 0 or (self.codes.max(axis=0) >= sizes).any()):
            raise InputError(
                "A code names no level: codes count from 0 below the number of levels."
            )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.codes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all levels in turn."""
        return tuple(name for names in self.levels for name in names)

    @cached_property
    def _offsets(self) -> IntArray:
        sizes = [len(names) for names in self.levels]
        return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)

    @cached_property
    def moments(self) -> Moments:
        """Moments of indicators, from counts."""
        counts = [
            np.bincount(self.codes[:, v], minlength=len(names))
            for v, names in enumerate(self.levels)
        ]
        n = self.rows
        share = np.concatenate(counts) / n
        least, largest = (share >= 1.0).astype(np.float64), (share > 0.0).astype(np.float64)
        return Moments(n, share, share * (1.0 - share) * n, least, largest)

    @property
    def implied(self) -> BoolArray:
        """The last level of each variable: indicators of a category sum to one."""
        out = np.zeros(len(self.names), dtype=np.bool_)
        out[np.cumsum([len(names) for names in self.levels]) - 1] = True
        return out

    def take(self, rows: slice | IntArray) -> Margins:
        """Return some of the rows, copied."""
        return Margins(np.ascontiguousarray(self.codes[rows]), self.levels)

    def sums(self, base: FloatArray, tilt: Tilt, ratio: FloatArray, *, hessian: bool) -> DualSums:
        """Return the dual's sums: raw indicators first, then their affine change."""
        family, centre, scale, point = tilt
        raw = np.append(point[:-1] / scale, point[-1] - float(point[:-1] @ (centre / scale)))
        value, largest, gradient, square = margin_sums(
            self.codes, self._offsets, base, raw, family, ratio, hessian=hessian
        )
        change = np.diag(np.append(1.0 / scale, 1.0))
        change[:-1, -1] = -centre / scale
        gradient = change @ gradient
        if square is not None:
            square = change @ square @ change.T
        return DualSums(value, largest, gradient, square)

    def dense(self) -> FloatArray:
        """Return the indicators."""
        out = np.zeros((self.rows, len(self.names)))
        out[np.arange(self.rows)[:, None], self._offsets + self.codes] = 1.0
        return out


@final
@dataclass(frozen=True, eq=False)
class Partitioned:
    """Rows of balance columns wherever partitions are; only ratios, one per row, are in memory.

    They may be in files larger than memory, or with the workers of a cluster.

    Examples
    --------
    >>> from fedipw.calibration import Entropy, calibrated
    >>> ages = np.array([[20.0], [30.0], [60.0]])
    >>> blocks = Blocks.of_arrays(ages, np.zeros(0, dtype=np.int8))
    >>> calibrated(Partitioned(blocks, ("age",)), [45.0], distance=Entropy()).weights.round(4)
    array([0.1889, 0.2482, 0.563 ])
    """

    partitions: Partitions
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check_names(self.names)

    @classmethod
    def of_terms(
        cls, table: Table, terms: Sequence[Term], *, client: Any = None, scratch: Path | None = None
    ) -> Partitioned:
        """Return terms as columns, of the enrolled rows of a table on disk."""
        names = tuple(term.name for term in terms)
        flags = [ENROLLED] if ENROLLED in table.schema else []
        used = tuple(dict.fromkeys([*flags, *(f.column for term in terms for f in term.factors)]))
        rows = rows_per_block(len(terms))
        if client is not None:
            load = partial(_loaded, used=used, terms=tuple(terms))
            return cls(ClusterBlocks(client, load, _enrolled_slices(table, rows)), names)
        blocks = Blocks(directory=scratch)
        for batch in table.batches(used, rows=rows):
            block = _block(batch, terms)
            if block.rows:
                blocks.append(block)
        return cls(blocks, names)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.partitions.rows

    @cached_property
    def moments(self) -> Moments:
        """Moments of the columns, in one pass."""
        return sum_over(self.partitions, _block_moments)

    @property
    def implied(self) -> BoolArray:
        """None."""
        return np.zeros(len(self.names), dtype=np.bool_)

    def take(self, rows: slice | IntArray) -> Dense:
        """Return some of the rows, in memory."""
        wanted = np.arange(self.rows)[rows]
        return Dense(
            np.vstack(sum_over(self.partitions, partial(_rows, wanted=wanted))), self.names
        )

    def sums(self, base: FloatArray, tilt: Tilt, ratio: FloatArray, *, hessian: bool) -> DualSums:
        """Return the dual's sums."""
        rows, shared = self.partitions, base
        if len(base) > 1 and isinstance(rows, ClusterBlocks):
            rows, shared = rows.with_weights(base), np.empty(0)
        found, parts = sum_over(rows, partial(_dual_sums, base=shared, tilt=tilt, hessian=hessian))
        ratio[:] = np.concatenate(parts)
        return found

    def dense(self) -> FloatArray:
        """Return all rows."""
        return self.take(slice(None)).dense()


def _enrolled_slices(table: Table, rows: int) -> list[Slice]:
    """Return slices with an enrolled row; ``start`` counts the enrolled rows before each."""
    slices = table.slices(rows)
    if ENROLLED not in table.schema:
        return list(slices)
    flags = table.collect(table.scan().select(ENROLLED)).to_series().to_numpy()
    before = np.concatenate([[0], np.cumsum(flags)])
    moved = [part._replace(start=int(before[part.start])) for part in slices]
    ends = [int(before[part.start + part.rows]) for part in slices]
    return [part for part, end in zip(moved, ends, strict=True) if end > part.start]


def _block(frame: pl.DataFrame, terms: Sequence[Term], start: int = 0) -> Block:
    rows = frame.filter(ENROLLED) if ENROLLED in frame.columns else frame
    columns = np.ascontiguousarray(term_matrix(terms, rows).T)
    return Block(columns, np.zeros(0, dtype=np.int8), np.empty(0), start)


def _loaded(part: Slice, used: tuple[str, ...], terms: tuple[Term, ...]) -> Block:
    """Return the block of a slice; workers call it."""
    return _block(rows_of(part, used), terms, part.start)


def _block_moments(block: Block) -> Moments:
    return Moments(block.rows, *column_moments(block.columns.T))


def _dual_sums(
    block: Block, base: FloatArray, tilt: Tilt, *, hessian: bool
) -> tuple[DualSums, list[FloatArray]]:
    """Return a block's sums, and its ratios in a list: lists of blocks add up in order.

    Without ``base`` its weights are the base shares.
    """
    share = block.weights if len(base) == 0 else base
    if len(base) > 1:
        share = base[block.start : block.start + block.rows]
    ratio, (family, centre, scale, point) = np.empty(block.rows), tilt
    found = dense_sums(block.columns.T, share, centre, scale, point, family, ratio, hessian=hessian)
    return DualSums(*found), [ratio]


def _rows(block: Block, wanted: IntArray) -> list[FloatArray]:
    first, last = np.searchsorted(wanted, [block.start, block.start + block.rows])
    here = wanted[first:last] - block.start
    return [np.ascontiguousarray(block.columns[:, here].T)]


def design_of(balance: FloatArray | BalanceDesign, names: Sequence[str] | None) -> BalanceDesign:
    """Return a design from a matrix and its columns' names."""
    if not isinstance(balance, np.ndarray) and hasattr(balance, "moments"):
        if names is not None:
            raise InputError("A design names its own columns: leave out names.")
        return balance
    matrix = np.asarray(balance, dtype=np.float64)
    if matrix.ndim != 2:
        raise InputError(f"Balance columns have shape {matrix.shape}, expected (rows, columns).")
    if names is None:
        names = [f"b{j + 1}" for j in range(matrix.shape[1])]
    check_rows(matrix.shape[1], names=np.array(names, dtype=object))
    return Dense(matrix, tuple(names))


def check_names(names: tuple[str, ...]) -> None:
    """Raise if a column's name stands twice."""
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"Balance columns must be named once each; {some(twice)} is not.")


class Independence(NamedTuple):
    """Which columns are constrained, and why the others are not."""

    kept: BoolArray  # (q,)
    dropped: dict[str, str]  # name and reason


def independence(design: BalanceDesign, target: FloatArray) -> Independence:
    """Return the columns to constrain; a dependent column whose target disagrees is an error."""
    moments = design.moments
    scale = np.where(moments.varies, moments.deviation, 1.0)
    kept, relation = _independent(design, scale)
    dropped = _dropped_constants(design, target)
    for j in np.flatnonzero(~kept & moments.varies).tolist():
        size = float(moments.largest[j] - moments.least[j])
        standard = (target[kept] - moments.mean[kept]) / scale[kept]
        follows = float(moments.mean[j] + scale[j] * (relation[j, kept] @ standard))
        off = float(target[j]) - follows
        if abs(off) > _CONSISTENT * size:
            raise _dependent_error(design, relation[j], j, target, follows)
        dropped[design.names[j]] = f"follows from {_named(design, relation[j])}" + (
            f"; its target is off by {off:.2g}" if abs(off) > 1e-10 * size else ""
        )
    return Independence(kept, dropped)


def variation(design: BalanceDesign, target: FloatArray) -> Independence:
    """Return all columns that vary: with a tolerance they need not be independent."""
    return Independence(design.moments.varies, _dropped_constants(design, target))


def subsample(design: BalanceDesign, base: FloatArray) -> tuple[BalanceDesign, FloatArray]:
    """Return about 20,000 rows spread over all, and their base shares."""
    rows = slice(None, None, design.rows // SUBSAMPLE)
    part = design.take(rows)
    return part, np.array([1.0 / part.rows]) if len(base) == 1 else base[rows] / base[rows].sum()


def conflict_rows(
    design: BalanceDesign, target: FloatArray, columns: Sequence[int] | IntArray
) -> tuple[tuple[str, float, float, float], ...]:
    """Return name, target, least and largest value of some columns, for an error."""
    moments = design.moments
    return tuple(
        (design.names[j], float(target[j]), float(moments.least[j]), float(moments.largest[j]))
        for j in columns
    )


def _independent(design: BalanceDesign, scale: FloatArray) -> tuple[BoolArray, FloatArray]:
    """Return which columns are independent, (q,), and how the others follow, (q, q).

    A column that depends on others over all rows does so over some of them, so a subsample that
    shows none but those implied by the design spares the pass over the data.
    """
    mean, varies = design.moments.mean, design.moments.varies
    base = np.array([1.0 / design.rows])  # dependence is one of rows, whatever their weight
    if design.rows > 2 * SUBSAMPLE and varies.all():
        kept, relation = _factor(gram(*subsample(design, base), mean, scale), varies)
        if not (~kept & ~design.implied).any():
            return kept, relation
    return _factor(gram(design, base, mean, scale), varies)


def _factor(square: FloatArray, varies: BoolArray) -> tuple[BoolArray, FloatArray]:
    """Sweep columns in their order out of a Gram matrix (constant last), those that are new."""
    q = len(varies)
    mean = square[-1, :-1] / square[-1, -1]
    full = square[:-1, :-1] - square[-1, -1] * np.outer(mean, mean)
    rest, first = full, np.diag(full)
    kept = np.zeros(q, dtype=np.bool_)
    for j in np.flatnonzero(varies):
        if rest[j, j] > _VARIANCE * max(first[j], 1e-300):
            kept[j] = True
            rest = rest - np.outer(rest[:, j], rest[j]) / rest[j, j]
    relation = np.zeros((q, q))
    if not kept.all() and kept.any():
        relation[:, kept] = np.linalg.solve(full[np.ix_(kept, kept)], full[kept]).T
    return kept, relation


def _named(design: BalanceDesign, relation: FloatArray) -> str:
    names = [design.names[k] for k in np.flatnonzero(np.abs(relation) > _RELATED)]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _dropped_constants(design: BalanceDesign, target: FloatArray) -> dict[str, str]:
    """Return columns that are constant; one whose target is another value is an error."""
    dropped = {}
    for j in np.flatnonzero(~design.moments.varies).tolist():
        name, value = design.names[j], float(design.moments.least[j])
        if abs(float(target[j]) - value) > _CONSISTENT * abs(value) + _ROUNDING:
            raise InfeasibleError(
                f"All {design.rows} enrolled clients have {name} = {value:.6g}, so no weights "
                f"give a mean of {float(target[j]):.6g}.",
                conflict_rows(design, target, [j]),
                ways_out=(
                    "correct the target",
                    "leave this constraint out: nobody enrolled can stand for those it is about",
                    "merge the level with another that enrolled clients have",
                ),
            )
        dropped[name] = f"constant, {value:.6g}, for all enrolled clients"
    return dropped


def _dependent_error(
    design: BalanceDesign, relation: FloatArray, j: int, target: FloatArray, follows: float
) -> InfeasibleError:
    others = np.flatnonzero(np.abs(relation) > _RELATED)
    why = (
        f"{design.names[j]} follows from {_named(design, relation)} among the enrolled clients; "
        f"their targets make it {follows:.6g}, not {float(target[j]):.6g}."
    )
    ways = ("correct the targets", "leave one of them out", "allow a tolerance with a slack")
    return InfeasibleError(why, conflict_rows(design, target, [*others, j]), ways_out=ways)
