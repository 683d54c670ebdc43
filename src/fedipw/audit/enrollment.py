"""What an audit says of enrollment: its model, its overlap, and the balance of covariates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from fedipw.audit.suppression import coefficients_but, nonzero_rows, small_terms, stage_part
from fedipw.audit.values import OverlapPart, StagePart
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
from fedipw.evaluation.diagnostics import CalibrationSums, calibration_sums
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.enrollment import EnrollmentStage, member_columns, relabelled
from fedipw.selection.overlap import Cell, Overlap, empty_cells, overlap
from fedipw.selection.saved import BlockProb, StageModel, block_prob
from fedipw.tables.columns import ENROLLED
from fedipw.tables.formula import term_of
from fedipw.tables.partitions import Block, sum_over

MOST_EMPTY = 200  # cells with nobody enrolled that are listed


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableFacts:
    """The parts of an audit that a table of clients gives."""

    stage: StagePart | None
    overlap: OverlapPart | None
    balance: BalanceTable | None
    hidden_coefficients: int = 0
    unlisted: int = 0  # empty cells beyond those listed


def population_facts(
    stage: EnrollmentStage,
    model: StageModel | None,
    groups: Groups,
    *,
    threshold: float,
    min_cell: int,
) -> TableFacts:
    """Return what a population table says, with enrollment as it is in ``groups``."""
    coded = stage.coded
    assert coded is not None
    design = coded.design
    counts = nonzero_rows(coded.partitions, coded.frame)
    small = small_terms(
        design.terms, counts, coded.rows, min_cell=min_cell, kinds=design.kinds,
        levels=design.levels,
    )  # fmt: skip
    columns, known = member_columns(coded, stage.members)
    whole = partition_moments(coded.partitions, coded.frame)
    table = BalanceTable.of(
        design.names, whole, groups.moments(columns, known), levels=design.levels
    )
    fitted: StagePart | None = None
    found: Overlap | None = None
    hidden = 0
    if model is None:
        cells = empty_cells(coded.table, design.columns)
    else:
        rows = relabelled(coded, groups.enrolled, known)
        coefficients, hidden = coefficients_but(model, small)
        prob = block_prob(model.fit, coded.frame)
        fitted = stage_part(
            stage=model.stage,
            formula=model.design.formula,
            sums=sum_over(rows, partial(_block_sums, prob=prob)),
            groups=(POPULATION, ENROLLED),
            coefficients=coefficients,
            left_out=coded.left_out,
            min_cell=min_cell,
        )
        found = overlap(coded, model, threshold=threshold, partitions=rows)
        cells = found.empty_cells
    large = tuple(cell for cell in cells if cell.population >= min_cell)
    return TableFacts(
        stage=fitted,
        overlap=_overlap_part(found, threshold, large, len(cells) - len(large)),
        balance=table.without(small),
        hidden_coefficients=hidden,
        unlisted=max(0, len(large) - MOST_EMPTY),
    )


def _overlap_part(
    found: Overlap | None, threshold: float, empty: tuple[Cell, ...], small: int
) -> OverlapPart:
    """Return the overlap; without a model only the cells with nobody enrolled are known."""
    return OverlapPart(
        threshold=threshold,
        smallest_prob=None if found is None else found.smallest[0],
        below=None if found is None else found.below,
        share_below=None if found is None else found.share_below,
        estimated_size=None if found is None else found.estimated_size,
        effective_sample_size=None if found is None else found.effective_sample_size,
        empty=empty[:MOST_EMPTY],
        empty_small=small,
    )


def _block_sums(block: Block, prob: BlockProb) -> CalibrationSums:
    return calibration_sums(prob(block), block.labels.astype(np.float64), np.ones(block.rows))


def totals_facts(stage: EnrollmentStage, groups: Groups, *, min_cell: int) -> TableFacts:
    """Return what population totals say: the balance of the columns they are about."""
    frame, targets = stage.members.frame, stage.population.targets
    if targets is None:
        return TableFacts(stage=None, overlap=None, balance=None)
    matrix = stage.balance("main", groups.enrolled).matrix
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
    return TableFacts(stage=None, overlap=None, balance=table.without(small))
