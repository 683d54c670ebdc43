"""What an audit keeps of a ledger while it is replayed: sums, counts and one weight per reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

import numpy as np
import polars as pl

from fedipw.audit.cells import stage_part
from fedipw.audit.levels import shown_coefficients
from fedipw.audit.parts import StagePart
from fedipw.audit.roundlines import RoundFacts, own_rate
from fedipw.audit.tallies import (
    SAMPLE_ROWS,
    Clock,
    Tally,
    clock_of,
    coder_of,
)
from fedipw.evaluation.diagnostics import CalibrationSums, calibration_sums
from fedipw.selection.participation import Source
from fedipw.selection.steplog import LogWindow
from fedipw.tables.ledger import REPLIED, Ledger
from fedipw.tables.partitions import added

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray
    from fedipw.selection.logged import StepRows
    from fedipw.selection.stage import StageModel
    from fedipw.tables.members import Members
    from fedipw.weighting.logrun import LogPlan
    from fedipw.weighting.rounds import RoundWeights
    from fedipw.weighting.schemes import Scheme
    from fedipw.weighting.standing import Standing

RATE_COLUMNS = 12
_SAMPLE_ROUNDS = 8


@final
@dataclass(slots=True, eq=False)
class LedgerFacts:
    """Told of every round of a replay (:class:`fedipw.weighting.logrun.Watch`)."""

    members: Members
    past: bool  # whether rounds are weighed by what was known before them
    collapsed: bool  # whether rows of a round stand for all clients, enrolled or not
    tallies: list[Tally]
    clock: tuple[str, Clock] | None
    skipped_columns: list[str]  # whose reply rates are not counted
    reply_counts: IntArray  # (n,) over the members
    reply_weights: FloatArray  # (n,)
    present: BoolArray  # (n,) enrolled in the last round with anyone
    present_in: int = 0  # that round
    rounds: list[RoundFacts] = field(default_factory=list)
    sums: dict[str, CalibrationSums] = field(default_factory=dict)  # by step
    labels: dict[str, str] = field(default_factory=dict)
    unknown_rows: Counter[str] = field(default_factory=Counter)  # without a probability, by step
    rates: Counter[str] = field(default_factory=Counter)  # rounds with a constant rate, by step
    untold: Counter[str] = field(default_factory=Counter)  # rounds left out of the calibration
    weights: list[FloatArray] = field(default_factory=list)
    standing: Standing | None = None
    scheme: Scheme | None = None
    _round: tuple[int, pl.DataFrame, IntArray] | None = None

    @classmethod
    def of(
        cls,
        members: Members,
        ledger: Ledger,
        plan: LogPlan,
        min_cell: int,
        *,
        first: Sequence[str] = (),
        collapsed: bool = False,
    ) -> LedgerFacts:
        """Return what is ready to be told; ``first`` are columns to count before others."""
        tallies, skipped = _tallies(members, ledger, min_cell, first)
        n = members.size
        return cls(
            members=members,
            past=plan.settings.window is LogWindow.PAST and plan.models is None,
            collapsed=collapsed,
            tallies=tallies,
            clock=clock_of(ledger, plan.settings.day_length),
            skipped_columns=skipped,
            reply_counts=np.zeros(n, dtype=np.int64),
            reply_weights=np.zeros(n),
            present=np.zeros(n, dtype=np.bool_),
        )

    def read(self, index: int, table: pl.DataFrame, rows: IntArray) -> None:
        """Take a round as it stands in the ledger."""
        self._round = index, table, rows
        if not table.height:
            return
        self.present = np.zeros(self.members.size, dtype=np.bool_)
        self.present[rows], self.present_in = True, index
        replied = table[REPLIED].to_numpy()
        self.reply_counts[rows[replied]] += 1
        hour = 0 if self.clock is None else self.clock[1](index, table)
        for tally in self.tallies:
            tally.add(table, rows, replied, hour)

    def enrolled(self, standing: Standing, scheme: Scheme) -> None:
        """Take enrollment as it stands from this round on."""
        self.standing, self.scheme = standing, scheme

    def weighed(self, steps: Sequence[StepRows], found: RoundWeights | None) -> None:
        """Take the steps of the round and its weights."""
        assert self._round is not None
        index, table, _ = self._round
        own = self.past and own_rate(steps)
        self.rounds.append(RoundFacts.of(index, table, () if own else steps, found))
        for step in steps:
            self._take_step(step)
        if found is not None:
            self.weights.append(found.weights)
            rows = found.replies.rows
            if self.collapsed:
                rows = self.members.rows_of(pl.Series(found.replies.unit_ids), f"round {index}")
            self.reply_weights[rows] += found.weights  # one reply of a client in a round

    def _take_step(self, step: StepRows) -> None:
        if step.source not in {None, Source.MODEL}:
            self.rates[step.name] += 1
        if step.source is None or (self.past and step.source is Source.ROUND_RATE):
            self.untold[step.name] += bool(len(step.prob))
            return
        known = ~np.isnan(step.prob)
        self.unknown_rows[step.name] += int((~known).sum())
        self.labels[step.name] = step.label
        if known.any():
            prob, passed = step.prob[known], step.passed[known].astype(np.float64)
            found = calibration_sums(prob, passed, np.ones(len(prob)))
            before = self.sums.get(step.name)
            self.sums[step.name] = found if before is None else added(before, found)

    def counted(self) -> list[Tally]:
        """Return the columns with few enough levels to be shown."""
        return [t for t in self.tallies if not t.overflowing]

    def all_weights(self) -> FloatArray:
        """Return the weights of all replies, (m,)."""
        return np.concatenate([np.empty(0), *self.weights])

    def stages(
        self, models: Mapping[str, StageModel], formulas: Mapping[str, str], min_cell: int
    ) -> tuple[tuple[StagePart, ...], int]:
        """Return the steps of participation, and how many coefficients are not shown.

        ``models`` are the last fits, ``formulas`` those asked for; both by step.
        """
        parts, hidden = [], 0
        for name, sums in self.sums.items():
            part = stage_part(
                stage=name,
                formula=formulas[name],
                sums=sums,
                groups=("rows", self.labels[name]),
                coefficients=(),
                left_out=self.unknown_rows[name],
                min_cell=min_cell,
            )
            if name in models:
                shown, few = shown_coefficients(
                    models[name], self.members.frame, self.counted(), min_cell
                )
                formula = models[name].design.formula
                part, hidden = replace(part, formula=formula, coefficients=shown), hidden + few
            parts.append(part)
        return tuple(parts), hidden


def _tallies(
    members: Members, ledger: Ledger, min_cell: int, first: Sequence[str]
) -> tuple[list[Tally], list[str]]:
    """Return counts of columns of clients and ledger to be filled, and columns left out."""
    own = sorted(members.covariates, key=lambda name: name not in first)
    logged = list(ledger.covariates)
    room = max(RATE_COLUMNS - len(logged), RATE_COLUMNS // 2)
    skipped = own[room:]
    own = own[:room]
    skipped += logged[RATE_COLUMNS - len(own) :]
    logged = logged[: RATE_COLUMNS - len(own)]
    made: list[Tally] = []
    sample = _round_sample(ledger, logged)
    for name in (*own, *logged):
        frame = members.frame if name in own else sample
        coder = coder_of(frame[name])
        if coder is None:
            skipped.insert(0, name)
            continue
        fixed = coder.codes(frame[name]) if name in own else None
        made.append(Tally(name, coder, min_cell, fixed))
    return made, skipped


def _round_sample(ledger: Ledger, names: Sequence[str]) -> pl.DataFrame:
    """Return some columns of rows spread over the ledger."""
    rounds = ledger.rounds
    places = np.unique(np.linspace(0, len(rounds) - 1, _SAMPLE_ROUNDS).astype(np.int64))
    each = SAMPLE_ROWS // len(places)
    tables = [ledger.read(rounds[place]).select(names) for place in places.tolist()]
    return pl.concat([t.gather_every(max(1, -(-t.height // each))) for t in tables])
