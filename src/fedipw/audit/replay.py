"""What an audit keeps of a ledger while it is replayed: sums, counts and one weight per reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, final

import numpy as np
import polars as pl

from fedipw.audit.page import rounds_a_point
from fedipw.audit.rates import Clock, Tally, coder_of
from fedipw.audit.suppression import Coefficients, shown_coefficients, stage_part
from fedipw.audit.values import RoundLine, SilentGroup, StagePart
from fedipw.evaluation.diagnostics import CalibrationSums, calibration_sums
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.selection.participation import Source, StepRows
from fedipw.selection.saved import StageModel
from fedipw.tables.cells import SAMPLE, Cells
from fedipw.tables.columns import ASKED, AVAILABLE, INVITE_PROB, INVITED, OPENED_AT, REPLIED
from fedipw.tables.ledger import Ledger, Round
from fedipw.tables.partitions import added
from fedipw.tables.population import Members
from fedipw.weighting.pipeline import Weighing
from fedipw.weighting.replay import Observer
from fedipw.weighting.weigher import RoundWeights

RATE_COLUMNS = 12
_SAMPLE_ROUNDS = 8
_ALL_ROUNDS = 100  # up to which columns are cut by rounds spread over the whole ledger
_BY_CLIENT = ("reply_counts", "reply_weights", "present")
_BY_STEP = ("unknown_rows", "rates", "untold")
Cutter = Callable[[Sequence[str]], Mapping[str, Cells]]  # how columns of clients are cut


@final
@dataclass(eq=False)
class LedgerFacts(Observer):
    """Observes every round of a replay."""

    wants_steps = True

    members: Members
    past: bool = False  # whether rounds are weighed by what was known before them
    clock: tuple[str, Clock] | None = None
    reply_counts: IntArray = field(init=False)  # (n,) over the members
    reply_weights: FloatArray = field(init=False)  # (n,)
    present: BoolArray = field(init=False)  # (n,) enrolled in the last round with anyone
    present_in: int = 0  # that round
    tallies: list[Tally] = field(default_factory=list)
    skipped_columns: list[str] = field(default_factory=list)  # whose reply rates are not counted
    rounds: list[RoundFacts] = field(default_factory=list)
    sums: dict[str, CalibrationSums] = field(default_factory=dict)  # by step
    labels: dict[str, str] = field(default_factory=dict)
    unknown_rows: Counter[str] = field(default_factory=Counter)  # without a probability, by step
    rates: Counter[str] = field(default_factory=Counter)  # rounds with a constant rate, by step
    untold: Counter[str] = field(default_factory=Counter)  # rounds left out of the calibration
    weights: list[FloatArray] = field(default_factory=list)
    weighing: Weighing | None = None
    _round: tuple[int, pl.DataFrame] | None = None

    def __post_init__(self) -> None:
        n = self.members.size
        self.reply_counts, self.reply_weights = np.zeros(n, dtype=np.int64), np.zeros(n)
        self.present = np.zeros(n, dtype=np.bool_)

    def count(self, ledger: Ledger, min_cell: int, first: Sequence[str], cut: Cutter) -> None:
        """Count replies by columns of clients and ledger, a dozen at most; ``first`` come first."""
        own = sorted(self.members.covariates, key=lambda name: name not in first)
        logged = list(ledger.covariates)
        room = max(RATE_COLUMNS - len(logged), RATE_COLUMNS // 2)
        own, skipped = own[:room], own[room:]
        rest = RATE_COLUMNS - len(own)
        logged, skipped = logged[:rest], skipped + logged[rest:]
        sample = _round_sample(ledger, logged)
        cells = {**{name: Cells.of(sample[name]) for name in logged}, **cut(own)}
        for name in (*own, *logged):
            values = (self.members.frame if name in own else sample)[name]
            coder = coder_of(values, cells[name])
            if coder is None:
                skipped.insert(0, name)
                continue
            fixed = coder.codes(values) if name in own else None
            self.tallies.append(Tally(name, coder, min_cell, fixed))
        self.skipped_columns += skipped

    def read(self, round_: Round, table: pl.DataFrame) -> None:
        """Take a round as it stands in the ledger."""
        index, rows = round_.index, round_.rows
        self._round = index, table
        if not table.height:
            return
        self.present = np.zeros(self.members.size, dtype=np.bool_)
        self.present[rows], self.present_in = True, index
        replied = table[REPLIED].to_numpy()
        self.reply_counts[rows[replied]] += 1
        hour = 0 if self.clock is None else self.clock[1](index, table)
        for tally in self.tallies:
            tally.add(table, rows, replied, hour)

    def enrolled(self, weighing: Weighing) -> None:
        """Take enrollment as it is from this round on."""
        self.weighing = weighing

    def weighed(self, steps: Sequence[StepRows], found: RoundWeights | None) -> None:
        """Take the steps of the round and its weights."""
        assert self._round is not None
        index, table = self._round
        # a step with the round's own rate: no round was known before it
        own = self.past and any(step.source is Source.ROUND_RATE for step in steps)
        self.rounds.append(RoundFacts.of(index, table, () if own else steps, found))
        for step in steps:
            self._take_step(step)
        if found is not None:
            self.weights.append(found.weights)
            self.reply_weights[found.replies.rows] += found.weights  # one reply a client

    def _take_step(self, step: StepRows) -> None:
        self.rates[step.name] += step.source is not None and step.source.is_rate
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

    def elsewhere(self) -> LedgerFacts:
        """Return one that has seen nothing; enrollment is taken here."""
        return replace(
            self, tallies=[tally.empty() for tally in self.tallies], skipped_columns=[], rounds=[],
            sums={}, labels={}, unknown_rows=Counter(), rates=Counter(), untold=Counter(),
            weights=[], weighing=None, present_in=0,
        )  # fmt: skip

    def brought(self) -> dict[str, Any]:
        """Return all sums and counts."""
        return self.state()

    def merge(self, brought: Mapping[str, Any]) -> None:
        """Add the sums and counts of later rounds."""
        self.reply_counts += brought["reply_counts"]
        self.reply_weights += brought["reply_weights"]
        if brought["present_in"]:
            self.present, self.present_in = brought["present"], int(brought["present_in"])
        for tally, more in zip(self.tallies, brought["tallies"], strict=True):
            tally.merge(more)
        self.rounds += [
            RoundFacts(**dict(zip(_FACTS, one, strict=True))) for one in brought["rounds"]
        ]
        for name, sums in brought["sums"].items():
            found = CalibrationSums(*sums)
            self.sums[name] = added(self.sums[name], found) if name in self.sums else found
        self.labels.update(brought["labels"])
        for name in _BY_STEP:
            getattr(self, name).update(brought[name])
        self.weights.append(brought["weights"])

    def state(self) -> dict[str, Any]:
        """Return all sums and counts, and how they were counted."""
        return {
            "counted": self._counted(),
            **{name: getattr(self, name).copy() for name in _BY_CLIENT},
            "present_in": self.present_in,
            "tallies": [tally.state() for tally in self.tallies],
            "rounds": [astuple(one) for one in self.rounds],
            "sums": {name: list(sums) for name, sums in self.sums.items()},
            "labels": dict(self.labels),
            **{name: dict(getattr(self, name)) for name in _BY_STEP},
            "weights": np.concatenate([np.empty(0), *self.weights]),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved sums and counts back; ``ValueError`` if other columns or cells were counted."""
        if state["counted"] != self._counted():
            raise ValueError("reply rates are counted by other columns, levels or ranges")
        for name in _BY_CLIENT:
            setattr(self, name, state[name].copy())
        self.present_in = int(state["present_in"])
        for tally, saved in zip(self.tallies, state["tallies"], strict=True):
            tally.restore(saved)
        self.rounds = [RoundFacts(**dict(zip(_FACTS, one, strict=True))) for one in state["rounds"]]
        self.sums = {name: CalibrationSums(*sums) for name, sums in state["sums"].items()}
        self.labels = dict(state["labels"])
        for name in _BY_STEP:
            setattr(self, name, Counter(state[name]))
        self.weights = [state["weights"]]

    def _counted(self) -> list[Any]:
        """Return what is counted, and how, as plain values."""
        clock = None if self.clock is None else self.clock[0]
        return [self.past, clock, [tally.counted for tally in self.tallies]]

    def silent(self) -> tuple[SilentGroup, ...]:
        """Return the groups of clients that never replied, the largest first."""
        found = [group for tally in self.tallies for group in tally.silent()]
        return tuple(sorted(found, key=lambda group: (-group.clients, group.name)))

    def counted(self) -> list[Tally]:
        """Return the columns with few enough levels to be shown."""
        return [t for t in self.tallies if not t.overflowing]

    def stages(
        self, models: Mapping[str, StageModel], formulas: Mapping[str, str], min_cell: int
    ) -> tuple[tuple[StagePart, ...], int]:
        """Return the steps of participation, and how many coefficients are not shown.

        ``models`` are the last fits, ``formulas`` those asked for; both by step.
        """
        parts, hidden = [], 0
        for name, sums in self.sums.items():
            formula, shown = formulas[name], Coefficients()
            if name in models:
                formula = models[name].design.formula
                shown = shown_coefficients(
                    models[name], self.members.frame, self.counted(), min_cell
                )
            hidden += shown.hidden
            groups, left_out = ("rows", self.labels[name]), self.unknown_rows[name]
            part = stage_part(name, formula, sums, groups, shown, left_out, min_cell)
            parts.append(replace(part, rate_rounds=self.rates[name]))
        return tuple(parts), hidden


def _round_sample(ledger: Ledger, names: Sequence[str]) -> pl.DataFrame:
    """Return some columns of rows spread over the ledger; eight rounds at most are read for it.

    Of a ledger of more than 100 rounds it is the first 100, 200, 500, 1,000, 2,000 and so on, so
    that a ledger that grows is mostly cut in the same places.
    """
    if not names:
        return pl.DataFrame()
    rounds = ledger.rounds
    rounds = rounds[: _settled_rounds(len(rounds))]
    places = np.unique(np.linspace(0, len(rounds) - 1, _SAMPLE_ROUNDS).astype(np.int64))
    each = SAMPLE // len(places)
    tables = [ledger.read(rounds[place]).select(names) for place in places.tolist()]
    return pl.concat([t.gather_every(max(1, -(-t.height // each))) for t in tables])


def _settled_rounds(count: int) -> int:
    """Return how many of a ledger's first rounds its columns are cut by: all up to 100.

    >>> [_settled_rounds(count) for count in (7, 100, 101, 499, 1100, 4999, 5000)]
    [7, 100, 100, 200, 1000, 2000, 5000]
    """
    if count <= _ALL_ROUNDS:
        return count
    scale: int = 10 ** (len(str(count)) - 1)
    return max(step for step in (scale, 2 * scale, 5 * scale) if step <= count)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """What is kept of one round; NaN is unknown."""

    index: int
    opened_at: str | None
    rows: int
    invited: int
    replies: int
    expected: float  # replies
    observed: float  # replies, in proportion to the expected ones (E18)
    effective: float
    weight_sum: float
    largest_share: float
    skipped: bool

    @classmethod
    def of(
        cls, index: int, table: pl.DataFrame, steps: Sequence[StepRows], found: RoundWeights | None
    ) -> RoundFacts:
        """Return the facts of a round from its rows, its steps and its weights."""
        share, ratio = expected_share(table, steps)
        total = np.nan if found is None else found.total
        return cls(
            index=index,
            opened_at=_moment(table),
            rows=table.height,
            invited=int(table[INVITED].sum()),
            replies=int(table[REPLIED].sum()),
            expected=share * table.height,
            observed=share * table.height * ratio,
            effective=np.nan if found is None else found.effective_replies,
            weight_sum=total,
            largest_share=float(found.weights.max()) / total if found and total > 0.0 else np.nan,
            skipped=found is None,
        )


_FACTS = tuple(one.name for one in fields(RoundFacts))


def expected_share(table: pl.DataFrame, steps: Sequence[StepRows]) -> tuple[float, float]:
    r"""Return the share of a round's rows expected to reply, and replies by expected ones (E18).

    .. math:: \prod_k \frac{1}{|C_k|} \sum_{i \in C_k} \hat p_{ik}

    with :math:`C_k` the rows that could pass step k and whose probability is known. The means of
    later steps are over those who got there, so nothing is needed of clients that were offline or
    not invited, and the product is a consistent estimate of the mean of (P5) over all rows. The
    step *invited* has the server's own probabilities, or the share that was invited where these
    are not known of everyone who could be. Both are NaN where a step was given no probability.
    """
    share, ratio = 1.0, 1.0
    for k, step in enumerate(steps):
        known = ~np.isnan(step.prob)
        if not known.any():
            return np.nan, np.nan
        mean = float(step.prob[known].mean())
        share *= mean * (len(known) / table.height if k == 0 else 1.0)  # of all clients: collapsed
        ratio *= float(step.passed[known].mean()) / mean if mean > 0.0 else np.nan
    if steps and steps[-1].among == INVITED:
        mean, passed = _invitations(table)
        share, ratio = share * mean, ratio * (passed / mean if mean > 0.0 else np.nan)
    return (share, ratio) if steps else (np.nan, np.nan)


def _invitations(table: pl.DataFrame) -> tuple[float, float]:
    """Return the mean probability of an invitation and the share invited, of those available."""
    could = table.filter(AVAILABLE) if AVAILABLE in table.columns else table
    passed = could[INVITED].to_numpy()
    prob = could[INVITE_PROB].cast(pl.Float64).fill_null(np.nan).to_numpy()
    if not len(prob):
        return np.nan, np.nan
    mean = float(prob.mean())
    if ASKED in table.columns:  # its share is in the first step already (P8)
        mean /= float(table[ASKED].mean())  # type: ignore[arg-type]
    share = float(passed.mean())
    return (share if np.isnan(mean) else mean), share


def _moment(table: pl.DataFrame) -> str | None:
    if OPENED_AT not in table.columns or not table.height:
        return None
    moment = table[OPENED_AT][0]
    return moment.isoformat() if hasattr(moment, "isoformat") else str(moment)


def round_lines(
    rounds: Sequence[RoundFacts], reliance: Mapping[int, float]
) -> tuple[RoundLine, ...]:
    """Return a line for each round; above 400 rounds one for a few in a row, 200 at most.

    ``reliance`` is on enrollment weights (O21), by round, where it is known.
    """
    size = rounds_a_point(len(rounds))
    return tuple(_line(rounds[k : k + size], reliance) for k in range(0, len(rounds), size))


def _line(rounds: Sequence[RoundFacts], reliance: Mapping[int, float]) -> RoundLine:
    rows, replies = sum(r.rows for r in rounds), sum(r.replies for r in rounds)
    told = [r for r in rounds if np.isfinite(r.expected)]
    expected = sum(r.expected for r in told)
    compared = [r for r in told if np.isfinite(r.observed) and r.expected > 0.0]
    return RoundLine(
        first=rounds[0].index,
        last=rounds[-1].index,
        opened_at=rounds[0].opened_at,
        enrolled=rows / len(rounds),
        invited=sum(r.invited for r in rounds) / len(rounds),
        replies=replies / len(rounds),
        reply_rate=replies / rows if rows else None,
        expected_rate=expected / sum(r.rows for r in told) if told else None,
        calibration_ratio=(
            sum(r.observed for r in compared) / sum(r.expected for r in compared)
            if compared
            else None
        ),
        effective_replies=_mean([r.effective for r in rounds]),
        weight_sum=_mean([r.weight_sum for r in rounds]),
        largest_share=max((r.largest_share for r in rounds if r.largest_share > 0.0), default=None),
        skipped=sum(r.skipped for r in rounds),
        reliance=_mean([reliance.get(r.index, np.nan) for r in rounds]),
    )


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else None
