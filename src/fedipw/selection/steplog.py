"""Coded rounds of one step of participation, and fits on some of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.selection.fit import LogisticFit, block_sums, logistic_fit
from fedipw.selection.stage import StageModel
from fedipw.tables.frames import Frame
from fedipw.tables.partitions import Block, Blocks, rows_per_block, sum_over

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray
    from fedipw.selection.steps import Step


class LogWindow(Enum):
    """Which rounds of a log the probabilities of round r are fitted on."""

    PAST = "past"  # rounds before r
    POOLED = "pooled"  # all rounds, r and later ones among them
    SAME_ROUND = "same-round"  # round r alone


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How participation is fitted on a log.

    ``last`` makes a rolling window of past rounds. With ``refit_every`` 10 the first ten rounds are
    refitted one by one, while there is little to learn from, and every tenth after that. A constant
    rate is used, and recorded, until both kinds of rows exceed ``per_coefficient`` times the
    coefficients.
    """

    window: LogWindow = LogWindow.PAST
    last: int | None = None  # of past rounds, only this many
    refit_every: int = 10  # rounds between fits on past rounds
    per_coefficient: float = 10.0
    l2: float = 0.0  # ridge penalty (P4)
    day_length: float = 24.0  # rounds in a day, for the clock columns

    def __post_init__(self) -> None:
        if self.refit_every < 1:
            raise InputError(f"refit_every must be 1 or more, not {self.refit_every}.")
        if self.last is not None and (self.last < 1 or self.window is not LogWindow.PAST):
            raise InputError("A rolling window is 1 or more of the past rounds.")

    def due(self, past: int, fitted_on: int) -> bool:
        """Return whether a round with this many before it asks for a new fit."""
        return past <= self.refit_every or past - fitted_on >= self.refit_every


@dataclass(slots=True, eq=False)
class StepLog:
    """Coded rounds of one step and its fits."""

    step: Step
    settings: LogSettings
    blocks: Blocks
    frame: Frame | None = None
    edges: list[int] = field(default_factory=lambda: [0])  # of rounds in the blocks
    counts: list[tuple[int, int]] = field(default_factory=list)  # rows and passes per round
    sums: list[FloatArray] = field(default_factory=list)  # of the columns of each round, (q,)
    left_out: int = 0
    fit: LogisticFit | None = None
    fitted_from: int = 0  # first round of the fit
    fitted_on: int = 0  # rounds up to the last of the fit
    fits: int = 0
    passes: int = 0

    def code(self, frame: pl.DataFrame, where: str) -> tuple[FloatArray, BoolArray | None]:
        """Return the columns of some rows, (q, m), and which rows had all their values."""
        coded = self.step.design.rows(frame, where)
        return coded.columns, coded.kept

    def append(
        self,
        frame: pl.DataFrame,
        where: str,
        coded: tuple[FloatArray, BoolArray | None] | None = None,
    ) -> BoolArray:
        """Take a closed round and return which of its rows are fitted on, (n,).

        ``coded`` is what :meth:`code` made of the rows that could pass.
        """
        among = self.step.rows(frame)
        rows = frame if among is None else frame.filter(pl.Series(among))
        columns, kept = self.code(rows, where) if coded is None else coded
        labels = rows[self.step.label].to_numpy().astype(np.int8)
        if kept is not None:
            self.left_out += int((~kept).sum())
            labels = labels[kept]
        self.sums.append(columns.sum(axis=1))
        if self.frame is None and columns.shape[1]:
            self.frame = Frame.of(columns)
        if self.frame is not None:
            columns = self.frame.standard(columns)
        size = rows_per_block(len(columns))
        for first in range(0, columns.shape[1], size):
            part = np.ascontiguousarray(columns[:, first : first + size])
            self.blocks.append(Block(part, labels[first : first + size], np.empty(0)))
        self.edges.append(len(self.blocks))
        self.counts.append((len(labels), int(labels.sum())))
        taken = np.ones(frame.height, dtype=np.bool_) if among is None else among.copy()
        taken[taken] = True if kept is None else kept
        return taken

    def rate(self, first: int, last: int) -> float | None:
        """Return the share that passed in rounds first up to last, none without such rows."""
        rows, passed = self._totals(first, last)
        return passed / rows if passed > 0 else None

    def _totals(self, first: int, last: int) -> tuple[int, int]:
        chosen = self.counts[first:last]
        return sum(n for n, _ in chosen), sum(s for _, s in chosen)

    def enough(self, first: int, last: int) -> bool:
        """Return whether both kinds of rows are many enough for a model."""
        rows, passed = self._totals(first, last)
        sums = np.sum(self.sums[first:last], axis=0)
        needed = self.settings.per_coefficient * self.step.coefficients(sums, rows)
        return min(passed, rows - passed) > needed

    def refit(self, first: int, last: int) -> LogisticFit:
        """Fit on rounds first up to last, from the last fit on."""
        rounds = self.blocks.part(self.edges[first], self.edges[last])
        if self.frame is None:
            raise InputError(
                f"No row of {last - first} round(s) tells of the step {self.step.name!r}: there is "
                "nothing to fit it on."
            )
        rows, passed = self._totals(first, last)
        if passed in {0, rows}:
            raise InputError(
                f"The step {self.step.name!r} cannot be fitted: {passed} of the {rows} rows of "
                f"rounds {first + 1} to {last} passed it."
            )
        start = None
        if self.fit is not None and self.fit.converged:
            start = self._start(first, last)
        found = logistic_fit(
            rounds, self.step.design.names, frame=self.frame, l2=self.settings.l2, start=start
        )
        self.fits, self.passes = self.fits + 1, self.passes + found.passes
        self.fit, self.fitted_from, self.fitted_on = found.checked(), first, last
        return self.fit

    def _start(self, first: int, last: int) -> FloatArray:
        """Return the last fit moved one Newton step by the newest rounds alone.

        At the last fit the older rounds' gradient is zero and their Hessian is known, so this step
        costs no pass over them, and the fit that follows is a pass or two.
        """
        fit = self.fit
        assert fit is not None
        assert self.frame is not None
        point = np.append(fit.coefficients, fit.intercept)
        new = self.blocks.part(self.edges[self.fitted_on], self.edges[last])
        if first > 0 or not len(new) or self.settings.window is not LogWindow.PAST:
            return point
        kept = np.append(~np.isin(fit.names, fit.dropped), True)
        into = self.frame.matrix()  # of original coefficients into those of the frame
        beta = into @ point
        at = sum_over(new, partial(block_sums, beta=beta))[0]
        within = (into @ fit.covariance @ into.T)[np.ix_(kept, kept)]
        hessian = np.linalg.pinv(within, hermitian=True) + at.hessian[np.ix_(kept, kept)]
        step = np.zeros(len(beta))
        step[kept] = np.linalg.lstsq(hessian, at.gradient[kept])[0]
        moved: FloatArray = self.frame.inverse() @ (beta - step)
        return moved

    def model(self) -> StageModel:
        """Return the last fit with its design."""
        if self.fit is None:
            raise InputError(f"The step {self.step.name!r} has no fit.")
        return StageModel(
            stage=self.step.name, design=self.step.design, fit=self.fit, left_out=self.left_out
        )
