"""Covariate balance: how far groups of clients lie from the population, before and after weights.

Moments are sums over rows, so the population may be larger than memory; only (q,) numbers are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import check_finite, check_rows, some
from fedipw.tables.partitions import Block, Frame, Partitions, sum_over
from fedipw.tables.targets import Targets

POPULATION: Final = "population"
RESPONDENTS: Final = "respondents"
ENROLLED_WEIGHTED: Final = "enrolled weighted"
RESPONDENTS_WEIGHTED: Final = "respondents weighted"
_TINY = 1e-12  # what rounding leaves of a deviation or a share that is 0


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Weighted mean and squares of columns; moments of two sets of rows add up."""

    rows: int  # with a weight other than 0
    weight: float  # sum of weights
    mean: FloatArray  # (q,)
    square: FloatArray  # (q,) weighted squares about the mean

    def __add__(self, other: Moments) -> Moments:
        weight, apart = self.weight + other.weight, other.mean - self.mean
        share = other.weight / weight if weight > 0.0 else 0.0
        square = self.square + other.square + apart**2 * (self.weight * share)
        return Moments(self.rows + other.rows, weight, self.mean + apart * share, square)

    @property
    def sd(self) -> FloatArray:
        """Standard deviations over n - 1 (E10), (q,); 0 for a column that does not vary."""
        if self.rows < 2:
            raise InputError(f"A standard deviation needs two rows or more, not {self.rows}.")
        sd = np.sqrt(self.square / self.weight * (self.rows / (self.rows - 1)))
        found: FloatArray = np.where(sd > _TINY * np.abs(self.mean), sd, 0.0)
        return found

    def outside(self, frame: Frame) -> Moments:
        """Return the moments in the columns' own units, of columns that were in a frame."""
        mean, square = frame.centre + frame.scale * self.mean, frame.scale**2 * self.square
        return replace(self, mean=mean, square=square)

    def with_rests(self, rests: Sequence[Sequence[int]]) -> Moments:
        r"""Return moments with one more column for each set of levels: the share of the level left.

        .. math:: \bar x_0 = 1 - \sum_{l > 0} \bar x_l, \quad
           S_0 = W \bar x_0 (1 - \bar x_0) \qquad (E12)

        with :math:`S` the squares about the mean and :math:`W` the sum of weights, exact for
        columns of 0 and 1.
        """
        if not rests:
            return self
        share = _rest_shares(self.mean, rests)
        square = self.weight * np.maximum(share * (1.0 - share), 0.0)
        mean, square = np.append(self.mean, share), np.append(self.square, square)
        return replace(self, mean=mean, square=square)


def _rest_shares(mean: FloatArray, rests: Sequence[Sequence[int]]) -> FloatArray:
    share = np.array([1.0 - mean[list(rest)].sum() for rest in rests])
    return np.where(np.abs(share) > _TINY, share, 0.0)


def weighted_moments(
    columns: FloatArray, weights: FloatArray | None = None, *, signed: bool = False
) -> Moments:
    r"""Return the moments of columns (q, m) under weights (m,), 1 each by default.

    .. math:: \bar x = \frac{\sum_i w_i x_i}{\sum_i w_i}, \qquad
       s^2 = \frac{n}{n - 1} \frac{\sum_i w_i (x_i - \bar x)^2}{\sum_i w_i} \qquad (E10)

    with n the number of rows that have weight. A common factor of the weights changes nothing; with
    ``signed`` some may be negative.

    >>> found = weighted_moments(np.array([[1.0, 2.0, 6.0]]), np.array([1.0, 1.0, 0.0]))
    >>> found.rows, found.mean, found.sd.round(4)
    (2, array([1.5]), array([0.7071]))
    """
    if columns.ndim != 2 or not columns.shape[1]:
        raise InputError(f"Columns must be (q, m) with m rows or more than none: {columns.shape}.")
    check_finite(columns.T, [f"column {j}" for j in range(len(columns))], "balance")
    if weights is None:
        weights = np.ones(columns.shape[1])
    check_rows(columns.shape[1], weights=weights)
    return _filled(_moments(columns, weights, signed=signed))


def partition_moments(partitions: Partitions, frame: Frame | None = None) -> Moments:
    """Return the moments of rows in partitions, their own weights counted, by one pass.

    ``frame`` is the affine change the columns have gone through; moments are in original units.

    >>> from fedipw.tables.partitions import Blocks
    >>> rows = Blocks.of_arrays(np.array([[1.0], [2.0], [6.0]]), np.zeros(3, np.int8))
    >>> partition_moments(rows).mean
    array([3.])
    """
    found = _filled(sum_over(partitions, _block_moments))
    return found if frame is None else found.outside(frame)


def _block_moments(block: Block) -> Moments:
    return _moments(block.columns, block.weights if len(block.weights) else np.ones(block.rows))


def _moments(columns: FloatArray, weights: FloatArray, *, signed: bool = False) -> Moments:
    if not (np.isfinite(weights) & (signed | (weights >= 0.0))).all():
        raise InputError("Weights of groups must be finite and not negative.")
    total = float(weights.sum())
    mean = columns @ weights / (total if total > 0.0 else 1.0)
    square = (columns - mean[:, None]) ** 2 @ weights
    return Moments(int((weights != 0.0).sum()), total, mean, square)


def _filled(found: Moments) -> Moments:
    if not (np.isfinite(found.weight) and found.weight > 0.0):
        raise InputError(f"The weights of a group sum to {found.weight:g}: it has no mean.")
    if not (np.isfinite(found.mean) & np.isfinite(found.square)).all():
        raise InputError("Some columns have values that are missing, infinite or too large.")
    return found


def standardised_differences(
    group_mean: FloatArray, mean: FloatArray, sd: FloatArray
) -> FloatArray:
    r"""Standardised mean differences of a group against the population, (q,).

    .. math:: \text{SMD} = \frac{\bar x_{group} - \bar x_{pop}}{s} \qquad (E11)

    Where a column does not vary, 0 if the means agree and infinite if they do not.

    >>> standardised_differences(np.array([2.0, 1.0]), np.array([1.0, 1.0]), np.array([4.0, 0.0]))
    array([0.25, 0.  ])
    """
    check_rows(len(mean), group_mean=group_mean, sd=sd)
    apart = group_mean - mean
    same = np.abs(apart) <= _TINY * np.maximum(np.abs(mean), np.abs(group_mean))
    flat = sd == 0.0
    limits = np.where(same, 0.0, np.copysign(np.inf, apart))
    out: FloatArray = np.where(flat, limits, apart / np.where(flat, 1.0, sd))
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceCell:
    """One column in one group."""

    mean: float
    smd: float | None  # (E11); none where the scale is 0 and the means differ


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceLine:
    """One column, or one level of a category."""

    name: str
    mean: float  # of the population
    sd: float
    groups: Mapping[str, BalanceCell]


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceTable:
    """Standardised mean differences of groups against the population.

    Examples
    --------
    >>> everyone = np.array([[20.0, 30.0, 40.0, 50.0], [0.0, 0.0, 1.0, 1.0]])
    >>> weighted = weighted_moments(everyone[:, :3], np.array([1.0, 1.0, 2.0]))
    >>> table = BalanceTable.of(["age", "os[web]"], weighted_moments(everyone),
    ...                         {"enrolled weighted": weighted}, levels={"os": ("ios", "web")})
    >>> [(line.name, round(line.groups["enrolled weighted"].smd, 3)) for line in table.lines]
    [('age', -0.194), ('os[ios]', 0.0), ('os[web]', 0.0)]
    """

    scale_from: str  # whose standard deviation is the unit: the population, or a group
    groups: tuple[str, ...]
    lines: tuple[BalanceLine, ...]
    hidden: int  # levels of too few clients to be shown

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        population: Moments,
        groups: Mapping[str, Moments],
        *,
        levels: Mapping[str, Sequence[str]] | None = None,
    ) -> BalanceTable:
        """Return the balance against a population whose rows are known.

        ``names`` are those of the q columns (``design.names``), ``levels`` those of each category
        (``design.levels``): where all but one are columns, the one left gets a row too (E12).
        """
        places, rests = _places(names, levels or {})
        _check_columns(len(names), {POPULATION: population, **groups})
        whole = population.with_rests(rests)
        return cls._made(places, whole.mean, whole.sd, groups, rests, POPULATION)

    @classmethod
    def of_targets(
        cls,
        targets: Targets,
        groups: Mapping[str, Moments],
        *,
        levels: Mapping[str, Sequence[str]] | None = None,
        scale_group: str = ENROLLED_WEIGHTED,
    ) -> BalanceTable:
        """Return the balance against population means; the scale is a weighted group's deviation.

        Columns of the groups are in the order of the targets. ``scale_group`` names the group whose
        standard deviation stands for the population's, which is not known.
        """
        places, rests = _places(targets.names, levels or {})
        _check_columns(len(targets.names), groups)
        if scale_group not in groups:
            raise InputError(f"No group {scale_group!r} to take the scale from: {some(groups)}.")
        base = groups[scale_group].with_rests(rests)
        mean = np.append(targets.values, _rest_shares(targets.values, rests))
        return cls._made(places, mean, base.sd, groups, rests, scale_group)

    @classmethod
    def _made(  # noqa: PLR0917
        cls,
        places: Sequence[tuple[str, int]],
        mean: FloatArray,
        sd: FloatArray,
        groups: Mapping[str, Moments],
        rests: Sequence[Sequence[int]],
        scale_from: str,
    ) -> BalanceTable:
        means = {group: found.with_rests(rests).mean for group, found in groups.items()}
        smds = {group: standardised_differences(m, mean, sd) for group, m in means.items()}

        def line(name: str, j: int) -> BalanceLine:
            cells = {group: _cell(means[group][j], smds[group][j]) for group in groups}
            return BalanceLine(name=name, mean=float(mean[j]), sd=float(sd[j]), groups=cells)

        lines = tuple(line(name, j) for name, j in places)
        return cls(scale_from=scale_from, groups=tuple(groups), lines=lines, hidden=0)

    def without(self, names: Collection[str]) -> BalanceTable:
        """Return the table with the lines of these names hidden."""
        shown = tuple(line for line in self.lines if line.name not in names)
        return replace(self, lines=shown, hidden=self.hidden + len(self.lines) - len(shown))


def _cell(mean: float, smd: float) -> BalanceCell:
    return BalanceCell(mean=float(mean), smd=float(smd) if np.isfinite(smd) else None)


def _places(
    names: Sequence[str], levels: Mapping[str, Sequence[str]]
) -> tuple[list[tuple[str, int]], list[list[int]]]:
    """Return lines with their columns, and of levels that have none those beside them."""
    places = [(name, j) for j, name in enumerate(names)]
    index = dict(places)
    rests: list[list[int]] = []
    if not names or len(index) < len(names):
        raise InputError("Columns need names, each its own.")
    for column, known in levels.items():
        absent = [level for level in known if f"{column}[{level}]" not in index]
        if len(absent) != 1 or len(known) == 1:
            continue  # all are columns, or what is left is more than one level
        beside = [index[f"{column}[{level}]"] for level in known if level != absent[0]]
        row = (f"{column}[{absent[0]}]", len(names) + len(rests))
        places.insert(next(k for k, (_, j) in enumerate(places) if j == min(beside)), row)
        rests.append(beside)
    return places, rests


def _check_columns(q: int, groups: Mapping[str, Moments]) -> None:
    if not groups:
        raise InputError("There is no group to compare.")
    for name, found in groups.items():
        if len(found.mean) != q:
            raise InputError(f"Group {name!r} has {len(found.mean)} columns, expected {q}.")
