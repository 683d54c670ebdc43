"""What an audit says of enrollment: its model, its reach, and the balance of covariates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.audit.cells import stage_part
from fedipw.audit.levels import coefficients_but, nonzero_rows, small_terms
from fedipw.audit.parts import (
    BalanceCell,
    BalanceLine,
    BalancePart,
    EmptyPart,
    OverlapPart,
    StagePart,
)
from fedipw.errors import InputError
from fedipw.evaluation.balance import (
    ENROLLED_WEIGHTED,
    PARTICIPANTS,
    PARTICIPANTS_WEIGHTED,
    POPULATION,
    BalanceTable,
    Moments,
    partition_moments,
    weighted_moments,
)
from fedipw.evaluation.diagnostics import CalibrationSums, calibration_sums, fitted_prob
from fedipw.selection.overlap import Cell, empty_cells, overlap
from fedipw.tables.partitions import sum_over
from fedipw.tables.population import ENROLLED
from fedipw.tables.terms import term_of
from fedipw.weighting.balance import Balance
from fedipw.weighting.schemes import enrollment_weights_of

if TYPE_CHECKING:
    from fedipw.evaluation.diagnostics import BlockProb
    from fedipw.numerics.types import BoolArray, FloatArray
    from fedipw.selection.stage import StageModel
    from fedipw.tables.partitions import Block, Partitions
    from fedipw.weighting.people import KnownPopulation, KnownTotals
    from fedipw.weighting.schemes import Scheme
    from fedipw.weighting.standing import Standing

MOST_EMPTY = 200  # parts with nobody enrolled that are listed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Weights of the members in each group, (n,); 0 outside it."""

    enrolled: BoolArray
    enrollment_weights: FloatArray | None = None
    reply_counts: FloatArray | None = None
    reply_weights: FloatArray | None = None

    def moments(self, columns: FloatArray, known: BoolArray) -> dict[str, Moments]:
        """Return the moments of the groups with anybody; ``columns`` are of the known, (q, m)."""
        weights = {
            ENROLLED: self.enrolled.astype(np.float64),
            PARTICIPANTS: self.reply_counts,
            ENROLLED_WEIGHTED: self.enrollment_weights,
            PARTICIPANTS_WEIGHTED: self.reply_weights,
        }
        found = {
            name: signed_moments(columns, w[known]) for name, w in weights.items() if w is not None
        }
        return {name: moments for name, moments in found.items() if moments is not None}


def signed_moments(columns: FloatArray, weights: FloatArray) -> Moments | None:
    """Return moments under weights of which some may be negative; none if they sum to nothing."""
    total = float(weights.sum())
    if not total > 0.0:
        return None
    if (weights >= 0.0).all():
        return weighted_moments(columns, weights)
    mean = columns @ weights / total
    square = (columns - mean[:, None]) ** 2 @ weights
    return Moments(rows=int((weights != 0.0).sum()), weight=total, mean=mean, square=square)


def enrollment_weights(standing: Standing, scheme: Scheme) -> FloatArray | None:
    """Return the weight of each enrolled member, (n,), 0 for others; none if nothing gives one.

    That of calibration where the scheme is calibrated, else the inverse of the fitted probability.
    """
    enrolled, prob = standing.units.enrolled, standing.units.enrollment_prob
    try:
        return np.where(enrolled, enrollment_weights_of(scheme), 0.0)
    except InputError:  # not a calibrated scheme
        if np.isnan(prob[enrolled]).any():
            return None
        out = np.zeros(len(prob))
        out[enrolled] = 1.0 / prob[enrolled]
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableFacts:
    """The parts of an audit that a table of clients gives."""

    stage: StagePart | None
    overlap: OverlapPart | None
    balance: BalancePart | None
    hidden_coefficients: int = 0
    unlisted: int = 0  # such parts beyond those listed


def population_facts(
    people: KnownPopulation,
    model: StageModel | None,
    groups: Groups,
    *,
    threshold: float,
    min_cell: int,
) -> TableFacts:
    """Return what a population table says, with enrollment as it is in ``groups``."""
    coded, design = people.coded, people.coded.design
    counts = nonzero_rows(coded.partitions, coded.frame)
    small = small_terms(
        design.terms, counts, people.size, min_cell=min_cell, kinds=design.kinds,
        levels=design.levels,
    )  # fmt: skip
    columns, known = people.columns
    whole = partition_moments(coded.partitions, coded.frame)
    found = groups.moments(columns, known)
    table = BalanceTable.of(design.names, whole, found, levels=design.levels)
    if model is None:
        reach, unlisted = _no_model(empty_cells(coded.table, design.columns), threshold, min_cell)
        return TableFacts(
            stage=None, overlap=reach, balance=_balance_part(table, small), unlisted=unlisted
        )
    rows = people.rows_at(groups.enrolled)
    stage = _stage(people, model, rows, small, min_cell)
    reach, unlisted = _overlap(people, model, rows, threshold, min_cell)
    return TableFacts(
        stage=stage,
        overlap=reach,
        balance=_balance_part(table, small),
        hidden_coefficients=len(design.names) - len(stage.coefficients),
        unlisted=unlisted,
    )


def _stage(
    people: KnownPopulation,
    model: StageModel,
    rows: Partitions,
    small: frozenset[str],
    min_cell: int,
) -> StagePart:
    prob = fitted_prob(model.fit, people.coded.frame)
    return stage_part(
        stage=model.stage,
        formula=model.design.formula,
        sums=sum_over(rows, partial(_block_sums, prob=prob)),
        groups=(POPULATION, ENROLLED),
        coefficients=coefficients_but(model, small),
        left_out=people.coded.left_out,
        min_cell=min_cell,
    )


def _block_sums(block: Block, prob: BlockProb) -> CalibrationSums:
    return calibration_sums(prob(block), block.labels.astype(np.float64), np.ones(block.rows))


def _overlap(
    people: KnownPopulation, model: StageModel, rows: Partitions, threshold: float, min_cell: int
) -> tuple[OverlapPart, int]:
    found = overlap(people.coded, model, threshold=threshold, partitions=rows)
    shown, small = shown_cells(found.empty_cells, min_cell)
    part = OverlapPart(
        threshold=threshold,
        smallest_prob=found.smallest[0],
        below=found.below,
        share_below=found.share_below,
        estimated_size=found.estimated_size,
        effective_sample_size=found.effective_sample_size,
        empty=shown[:MOST_EMPTY],
        empty_small=small,
    )
    return part, max(0, len(shown) - MOST_EMPTY)


def _no_model(cells: Sequence[Cell], threshold: float, min_cell: int) -> tuple[OverlapPart, int]:
    """Return the parts with nobody enrolled, where nothing else is known of the reach."""
    shown, small = shown_cells(cells, min_cell)
    part = OverlapPart(
        threshold=threshold, smallest_prob=None, below=None, share_below=None, estimated_size=None,
        effective_sample_size=None, empty=shown[:MOST_EMPTY], empty_small=small,
    )  # fmt: skip
    return part, max(0, len(shown) - MOST_EMPTY)


def shown_cells(cells: Sequence[Cell], min_cell: int) -> tuple[tuple[EmptyPart, ...], int]:
    """Return the cells of enough clients, and how many others there are."""
    shown = tuple(
        EmptyPart(name=cell.name, population=cell.population)
        for cell in cells
        if cell.population >= min_cell
    )
    return shown, len(cells) - len(shown)


def totals_facts(people: KnownTotals, groups: Groups, *, min_cell: int) -> TableFacts:
    """Return what population totals say: the balance of the columns they are about."""
    frame, targets = people.members.frame, people.targets
    matrix = Balance.of_targets(frame, targets, np.nan).matrix
    terms = [term_of(name, frame.schema) for name in targets.names]
    inside = matrix[groups.enrolled]
    small = small_terms(
        terms,
        (inside != 0.0).sum(axis=0),
        len(inside),
        min_cell=min_cell,
        kinds={name: "flag" for name, kind in frame.schema.items() if kind == pl.Boolean},
    )
    everyone = np.ones(len(matrix), dtype=np.bool_)
    found = groups.moments(matrix.T, everyone)
    weights = groups.enrollment_weights
    scaled = weights is not None and bool((weights >= 0.0).all())
    table = BalanceTable.of_targets(
        targets, found, scale_group=ENROLLED_WEIGHTED if scaled else ENROLLED
    )
    return TableFacts(stage=None, overlap=None, balance=_balance_part(table, small))


def _balance_part(table: BalanceTable, small: frozenset[str]) -> BalancePart:
    lines = tuple(
        BalanceLine(
            name=row.name,
            mean=row.mean,
            sd=row.sd,
            groups={cell.group: _cell(cell.mean, cell.smd) for cell in row.groups},
        )
        for row in table.rows
        if row.name not in small
    )
    return BalancePart(
        scale_from=table.scale_from,
        groups=table.groups,
        lines=lines,
        hidden=len(table.rows) - len(lines),
    )


def _cell(mean: float, smd: float) -> BalanceCell:
    return BalanceCell(mean=mean, smd=smd if np.isfinite(smd) else None)
