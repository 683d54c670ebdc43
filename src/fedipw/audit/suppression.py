"""Suppression of small cells: subgroups of too few clients or rows are merged or hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.special import expit

from fedipw.audit.rates import Levels, Tally
from fedipw.audit.values import FitKind, Histogram, StagePart, WeightPart
from fedipw.evaluation.diagnostics import (
    FINE_BINS,
    ODDS_REACH,
    QUANTILES,
    TOP,
    WEIGHT_BINS,
    CalibrationSums,
    ReliabilityBin,
    calibration_from,
)
from fedipw.numerics import FloatArray, IntArray
from fedipw.selection.coefficients import Coefficient, coefficient_notes, coefficients_of
from fedipw.selection.logistic import LogisticFit
from fedipw.selection.saved import StageModel
from fedipw.tables.formula import MISSING, OTHER, Factor, Term
from fedipw.tables.partitions import Block, Frame, Partitions, sum_over
from fedipw.weighting.functions import effective_sample_size

PROB_BINS = 30
_WIDE = 20.0  # ratio of the largest to the smallest probability beyond which bins are ratios
_FLAG = "flag"


def shown_histogram(
    edges: FloatArray, counts: Mapping[str, IntArray], min_cell: int, *, log_scale: bool
) -> Histogram:
    """Return a histogram in which each group has none or at least ``min_cell`` in every bin.

    Neighbouring bins are merged, from the left; a group that is smaller than that is left out.

    >>> found = shown_histogram(np.arange(5.0), {"a": np.array([9, 2, 0, 12])}, 10, log_scale=False)
    >>> found.edges, found.counts
    ((0.0, 2.0, 3.0, 4.0), {'a': (11, 0, 12)})
    """
    kept = {name: n for name, n in counts.items() if not 0 < n.sum() < min_cell}
    if not kept:
        return Histogram(edges=(float(edges[0]), float(edges[-1])), counts={}, log_scale=log_scale)
    cuts = _cuts(np.array(list(kept.values())), min_cell)
    return Histogram(
        edges=tuple(edges[cuts].tolist()),
        counts={k: tuple(np.add.reduceat(n, cuts[:-1]).tolist()) for k, n in kept.items()},
        log_scale=log_scale,
    )


def _cuts(counts: IntArray, min_cell: int) -> list[int]:
    """Return where to cut bins, so that each group (groups, bins) has none or enough in a piece.

    In all bins together each has.
    """

    def enough(first: int, last: int) -> bool:
        inside = counts[:, first:last].sum(axis=1)
        return bool(((inside == 0) | (inside >= min_cell)).all())

    cuts, end = [0], counts.shape[1]
    for k in range(1, end + 1):
        if enough(cuts[-1], k):
            cuts.append(k)
    if cuts[-1] == end:
        return cuts
    cuts.pop()  # what is left over goes to the bins before it
    while not enough(cuts[-1], end):
        cuts.pop()
    return [*cuts, end]


def prob_histogram(sums: CalibrationSums, groups: tuple[str, str], min_cell: int) -> Histogram:
    """Return the histogram of probabilities: of all rows and of those selected.

    Edges are about equal in ratio where probabilities differ by more than a factor of 20, else
    about equal in width; they lie on the edges of the fine bins, so that counts are exact.
    """
    rows, selected = sums.rows, np.rint(sums.selected).astype(np.int64)
    used = np.flatnonzero(rows)
    first, last = int(used[0]), int(used[-1]) + 1
    fine = expit(np.linspace(-ODDS_REACH, ODDS_REACH, FINE_BINS + 1))
    low, high = fine[first], fine[last]
    wide = bool(high > _WIDE * low)
    asked = (np.geomspace if wide else np.linspace)(low, high, PROB_BINS + 1)
    cuts = np.clip(np.searchsorted(fine, asked), first, last)
    cuts = np.unique(np.concatenate([[first], cuts, [last]]))
    counts = {
        name: np.add.reduceat(n, cuts[:-1])
        for name, n in zip(groups, (rows[:last], selected[:last]), strict=True)
    }
    return shown_histogram(fine[cuts], counts, min_cell, log_scale=wide)


def merged_reliability(bins: Sequence[ReliabilityBin], min_cell: int) -> tuple[ReliabilityBin, ...]:
    """Return the bins of a reliability curve, neighbours merged until each has enough rows."""
    counts = np.array([[one.count for one in bins]])
    if counts.sum() < min_cell:
        return ()
    return tuple(_joined(bins[a:b]) for a, b in pairwise(_cuts(counts, min_cell)))


def _joined(group: Sequence[ReliabilityBin]) -> ReliabilityBin:
    n = sum(one.count for one in group)
    prob = sum(one.count * one.mean_prob for one in group) / n
    rate = min(sum(one.count * one.rate for one in group) / n, 1.0)
    error = float(np.sqrt(rate * (1.0 - rate) / n))
    return ReliabilityBin(count=n, mean_prob=prob, rate=rate, standard_error=error)


class Coefficients(NamedTuple):
    """What a stage's probabilities are by, coefficients that can be shown, how many cannot."""

    shown: tuple[Coefficient, ...] = ()
    hidden: int = 0
    kind: FitKind = FitKind.RATE
    note: str = ""  # why the fit has a penalty
    notes: tuple[str, ...] = ()  # how coefficients should be taken


def stage_part(  # noqa: PLR0917
    stage: str,
    formula: str,
    sums: CalibrationSums,
    groups: tuple[str, str],
    coefficients: Coefficients,
    left_out: int,
    min_cell: int,
) -> StagePart:
    """Return a stage from the sums over its rows; ``groups`` name all rows and those selected."""
    found = calibration_from(sums)
    curve = merged_reliability(found.reliability, min_cell)
    apart = [one.count * abs(one.mean_prob - one.rate) for one in curve]
    return StagePart(
        stage=stage,
        kind=coefficients.kind,
        formula=formula,
        note=coefficients.note,
        rate_rounds=0,
        rows=found.rows,
        rate=found.rate,
        auc=found.auc,
        expected_error=sum(apart) / found.rows if curve else found.expected_error,
        calibration_ratio=found.ratio if np.isfinite(found.ratio) else None,
        reliability=curve,
        coefficients=coefficients.shown,
        coefficient_notes=coefficients.notes,
        left_out=left_out,
        prob=prob_histogram(sums, groups, min_cell),
    )


def weight_part(name: str, weights: FloatArray, min_cell: int) -> WeightPart | None:
    """Return how uneven weights (m,) are, none if they sum to nothing; some may be negative.

    >>> part = weight_part("replies", np.array([1.0, 1.0, 2.0, -1.0]), min_cell=1)
    >>> part.negative, round(part.effective_sample_size, 4), round(part.largest_share, 4)
    (1, 1.2857, 0.6667)
    """
    if not len(weights) or not weights.sum() > 0.0:
        return None
    unit = weights / np.abs(weights).max()  # squares of large weights stay finite
    total, size = float(unit.sum()), len(unit)
    top = int(np.ceil(TOP * size))
    multiples = unit / (total / size)
    drawn = multiples[multiples > 0.0]
    low, high = float(drawn.min()), float(drawn.max())
    edges = np.geomspace(low, high, WEIGHT_BINS + 1)
    if high <= low * (1.0 + 1e-9):  # equal but for rounding
        edges = np.array([low / 1.05, high * 1.05])
    counts = np.histogram(drawn, edges)[0].astype(np.int64)
    effective = effective_sample_size(unit)
    shares = np.quantile(multiples, QUANTILES).tolist()
    return WeightPart(
        name=name,
        count=size,
        zeros=int((unit == 0.0).sum()),
        negative=int((unit < 0.0).sum()),
        effective_sample_size=effective,
        design_effect=size / effective,
        largest_share=float(unit.max()) / total,
        top_share=float(np.partition(unit, size - top)[size - top :].sum()) / total,
        quantiles={f"{q:g}": x for q, x in zip(QUANTILES, shares, strict=True)},
        multiples=shown_histogram(edges, {name: counts}, min_cell, log_scale=True),
    )


def nonzero_rows(partitions: Partitions, frame: Frame) -> IntArray:
    """Return in how many rows each column is not 0, (q,), by one pass."""
    return sum_over(partitions, partial(_nonzero, frame=frame))


def _nonzero(block: Block, frame: Frame) -> IntArray:
    centre, scale = frame.centre[:, None], frame.scale[:, None]
    values = np.abs(centre + scale * block.columns)
    return np.asarray((values > 1e-9 * (np.abs(centre) + scale)).sum(axis=1), dtype=np.int64)


def small_terms(
    terms: Sequence[Term],
    counts: IntArray,
    rows: int,
    *,
    min_cell: int,
    kinds: Mapping[str, str],
    levels: Mapping[str, Sequence[str]] | None = None,
) -> frozenset[str]:
    """Return the names of terms that tell of some clients, but fewer than ``min_cell``.

    ``counts`` (q,) says in how many of all ``rows`` each term is not 0, ``kinds`` what a column
    holds, ``levels`` those of each category: the one without a term is looked at too.
    """
    small = set()
    for term, n in zip(terms, counts.tolist(), strict=True):
        flags = [kinds.get(f.column) == _FLAG for f in term.factors]
        # 0 but for the rows of a level, a flag or of missing values
        marks = any(flags) or any(f.level is not None or f.missing for f in term.factors)
        if (marks and 0 < n < min_cell) or (flags == [True] and 0 < rows - n < min_cell):
            small.add(term.name)
    own = {term.level: n for term, n in zip(terms, counts.tolist(), strict=True) if term.level}
    for column, known in (levels or {}).items():
        beside = [own[column, level] for level in known if (column, level) in own]
        if len(beside) == len(known) - 1 and 0 < rows - sum(beside) < min_cell:
            small |= {f"{column}[{level}]" for level in known if (column, level) not in own}
    return frozenset(small)


def coefficients_but(model: StageModel, hidden: frozenset[str]) -> Coefficients:
    """Return a model's coefficients without the hidden ones.

    Those left out of the fit are 0. A classifier has none. The intercept says nothing of a group.
    """
    every = coefficients_of(model.fit)[:-1]
    shown = tuple(one for one in every if one.name not in hidden)
    return Coefficients(
        shown, len(every) - len(shown), _kind(model), model.note, coefficient_notes(model)
    )


def _kind(model: StageModel) -> FitKind:
    if not isinstance(model.fit, LogisticFit):
        return FitKind.CLASSIFIER
    return FitKind.PENALISED if model.fit.l2 > 0.0 else FitKind.LOGISTIC


def shown_coefficients(
    model: StageModel, frame: pl.DataFrame, tallies: Sequence[Tally], min_cell: int
) -> Coefficients:
    """Return the coefficients whose levels have enough clients.

    Levels of columns of ``frame`` are counted there, those of the ledger in ``tallies``; a level
    that was not counted is hidden.
    """
    design, logged = model.design, {tally.column: tally for tally in tallies}
    counts = cache(lambda column: _level_counts(frame[column]))

    def large(column: str, levels: Sequence[str], *, empty: bool = False) -> bool:
        """Return whether a union of levels has enough clients; ``empty``: or none at all."""
        if column in frame.columns:
            n = sum(counts(column).get(level, 0) for level in levels)
            return n >= min_cell or (empty and n == 0)
        return column in logged and logged[column].many_clients(levels, empty=empty)

    def enough(factor: Factor) -> bool:
        column = factor.column
        if factor.level is None and not factor.missing:
            return design.kinds[column] != _FLAG or all(
                large(column, (text,), empty=True) for text in ("true", "false")
            )
        level = MISSING if factor.missing else factor.level
        return large(column, design.lumped.get(column, ()) if level == OTHER else (str(level),))

    hidden = frozenset(
        term.name for term in design.terms if not all(enough(factor) for factor in term.factors)
    )
    return coefficients_but(model, hidden)


def _level_counts(values: pl.Series) -> dict[str, int]:
    coder = Levels()
    counts = np.bincount(coder.codes(values), minlength=len(coder.labels))
    return dict(zip(coder.labels, counts.tolist(), strict=True))
