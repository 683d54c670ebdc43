"""The two-phase sample behind a ledger and the metrics of its replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.evaluation.estimates import GregMean
from fedipw.evaluation.metrics import COUNT, VALUE, Metrics
from fedipw.evaluation.stages import CalibratedEnrollment, FittedEnrollment
from fedipw.evaluation.steps import StepPhase
from fedipw.evaluation.twophase import TwoPhase
from fedipw.numerics.checks import some
from fedipw.selection.logged import LoggedParticipation
from fedipw.selection.steplog import LogSettings, LogWindow
from fedipw.selection.steps import participation_steps
from fedipw.tables.ledger import AFTERWARDS, INVITE_PROB, INVITED, OPENED_AT, REPLIED
from fedipw.tables.population import ID
from fedipw.weighting.people import KnownPopulation, KnownTotals
from fedipw.weighting.registry import HAJEK
from fedipw.weighting.replay import LogPlan, check_present

if TYPE_CHECKING:
    from fedipw.evaluation.stages import EnrollmentPhase
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray
    from fedipw.tables.ledger import Ledger
    from fedipw.weighting.registry import Method

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedSample:
    """Replies with a metric as a two-phase sample, and what was left out on the way."""

    sample: TwoPhase
    values: FloatArray  # (m,)
    counts: FloatArray | None  # (m,) samples behind each value, where known
    rounds: IntArray  # (R,) numbers of the rounds evaluated
    members: IntArray  # (n,) rows of the members in the sample
    regression: GregMean | None
    population_size: float | None  # N
    left_out: int  # replies without the covariates a model needs
    incomplete: int  # replies of clients in the sample that are left out for either reason
    unreported: int  # replies of evaluated rounds without a metric
    participation: dict[str, Any] = field(default_factory=dict)  # fitted steps by name

    def notes(self) -> tuple[str, ...]:
        """Return what people should know."""
        out = []
        if self.left_out:
            out.append(f"{self.left_out} replies have a missing value or an unknown level.")
        if self.unreported:
            out.append(
                f"{self.unreported} replies have no metric and were left out: if who reports "
                "depends on the metric, no weight corrects that."
            )
        related = [rho for rho in self.sample.correlations if rho > 0.0]
        if related:
            out.append(
                f"A client's replies are related over {len(related)} round(s) beyond what the "
                f"model explains (correlation {related[0]:.2f} from one round to the next)."
            )
        return tuple(out)


def logged_two_phase(
    people: KnownPopulation | KnownTotals,
    ledger: Ledger,
    metrics: Metrics,
    plan: LogPlan,
    *,
    allow_missing: bool = False,
    progress: Progress | None = None,
) -> LoggedSample:
    """Return the replies of a ledger with their metrics as a two-phase sample.

    Participation is fitted on all rounds of the ledger; rounds without any metric help to fit it
    and are not evaluated. Enrollment is fitted or calibrated as the plan's method says.

    Parameters
    ----------
    people
        A population table, or enrolled clients and totals.
    ledger
        Closed rounds.
    metrics
        Values of the replies of some rounds.
    plan
        Method of enrollment and formulas.
    allow_missing
        Leave replies without a metric out, and count them, instead of raising.
    progress
        Told of rounds done and rounds in all.
    """
    check_method(people, plan.method)
    strange = sorted(set(metrics.rounds) - set(ledger.rounds))
    if strange:
        raise InputError(f"{metrics.where}: round {some(strange)} is not in {ledger.directory}.")
    steps = participation_steps(ledger, people.members, plan.formulas)
    settings = LogSettings(window=LogWindow.POOLED, day_length=plan.settings.day_length)
    learner = LoggedParticipation(people.members, steps, settings, scratch=plan.scratch)
    found = _Collected(people.members.size, len(steps), allow_missing)
    for done, (index, table) in enumerate(zip(ledger.rounds, ledger, strict=True), start=1):
        found.round(people, ledger, index, table, metrics, learner)
        if progress is not None:
            progress(done, len(ledger.rounds))
    return found.sample(people, plan.method, learner, metrics)


def check_method(people: KnownPopulation | KnownTotals, method: Method) -> None:
    """Raise unless the error of a metric weighted by a method is known."""
    people.require(method)
    size = people.size if isinstance(people, KnownPopulation) else people.population_size
    if size is not None and size < people.members.size:
        raise InputError(
            f"A population of {size:g} cannot have {people.members.size} enrolled clients: correct "
            "the population size."
        )
    if method.name.removesuffix(HAJEK) != "fedipw" and method.distance is None:
        raise InputError(
            f"{method.name} has no standard error here. Use fedipw, efficient or a calibrated "
            "method; HT, Hájek and GREG forms of the mean are all given."
        )
    if method.name.startswith("calibrated-noise-aware"):
        raise InputError(
            "calibrated-noise-aware has no standard error here: use calibrated-entropy; standard "
            "errors of targets enter the interval."
        )


@dataclass(slots=True, eq=False)
class _Collected:
    """What a pass over the ledger leaves in memory."""

    size: int
    steps: int
    allow_missing: bool
    clients: list[list[IntArray]] = field(init=False)  # members behind the rows of each step
    offsets: list[int] = field(init=False)
    client: list[IntArray] = field(default_factory=list)
    code: list[IntArray] = field(default_factory=list)
    value: list[FloatArray] = field(default_factory=list)
    count: list[FloatArray] = field(default_factory=list)
    invite: list[FloatArray] = field(default_factory=list)
    places: list[list[IntArray]] = field(init=False)  # of replies among the rows of each step
    rounds: list[int] = field(default_factory=list)
    lost: list[IntArray] = field(default_factory=list)  # members behind replies left out
    left_out: int = 0
    unreported: int = 0

    def __post_init__(self) -> None:
        self.clients = [[] for _ in range(self.steps)]
        self.places = [[] for _ in range(self.steps)]
        self.offsets = [0] * self.steps

    def round(  # noqa: PLR0917
        self,
        people: KnownPopulation | KnownTotals,
        ledger: Ledger,
        index: int,
        table: pl.DataFrame,
        metrics: Metrics,
        learner: LoggedParticipation,
    ) -> None:
        """Take one closed round."""
        where = f"{ledger.directory} round {index}"
        members = people.members
        rows = members.rows_of(table[ID], where)
        moment = table[OPENED_AT][0] if OPENED_AT in table.columns and table.height else None
        present = members.present(index, moment)
        if not present.all():
            raise InputError(
                f"{where}: {int((~present).sum())} of {members.size} members are not enrolled "
                "then. A metric is evaluated over rounds with the same enrollment: give a ledger "
                "and a table of such rounds."
            )
        check_present(members, rows, present, where)
        replied = table[REPLIED].to_numpy()
        learner.open(table.drop(AFTERWARDS, strict=False), rows)
        taken = learner.close(replied)
        self._replies(rows, replied, taken, table, metrics, index, people)
        for k, flags in enumerate(taken):
            self.clients[k].append(rows[flags].astype(np.int32))
            self.offsets[k] += int(flags.sum())

    def _replies(  # noqa: PLR0917
        self,
        rows: IntArray,
        replied: BoolArray,
        taken: tuple[BoolArray, ...],
        table: pl.DataFrame,
        metrics: Metrics,
        index: int,
        people: KnownPopulation | KnownTotals,
    ) -> None:
        reported, where = metrics.of(index), f"{metrics.where} round {index}"
        if reported is None:
            return
        values, counts = np.full(self.size, np.nan), np.full(self.size, np.nan)
        who = people.members.rows_of(reported[ID], where)
        values[who] = reported[VALUE].cast(pl.Float64).to_numpy()
        if COUNT in reported.columns:
            counts[who] = reported[COUNT].cast(pl.Float64).to_numpy()
        heard = np.zeros(self.size, dtype=np.bool_)
        heard[rows[replied]] = True
        silent = who[~heard[who]]
        if silent.size:
            raise InputError(
                f"{where}: {silent.size} client(s) have a metric and did not reply: "
                f"{some(people.members.frame[ID][silent].to_list())}. Leave their rows out, or "
                f"correct {REPLIED!r} in the ledger."
            )
        lost = replied & np.isnan(values[rows])
        if lost.any() and not self.allow_missing:
            raise InputError(
                f"{where}: {int(lost.sum())} of {int(replied.sum())} replies have no metric. Add "
                "them, leave the whole round out, or allow missing metrics (--missing-metrics)."
            )
        known = np.logical_and.reduce([replied & ~lost, *taken])
        self.unreported += int(lost.sum())
        self.left_out += int((replied & ~lost & ~known).sum())
        self.lost.append(rows[replied & ~known])
        chosen = np.flatnonzero(known)
        self.client.append(rows[chosen])
        self.code.append(np.full(len(chosen), len(self.rounds)))
        self.value.append(values[rows[chosen]])
        if COUNT in reported.columns:
            self.count.append(counts[rows[chosen]])
        self.rounds.append(index)
        for k, flags in enumerate(taken):
            self.places[k].append(self.offsets[k] + np.cumsum(flags)[chosen] - 1)
        if INVITE_PROB in table.columns:
            self.invite.append(table[INVITE_PROB].cast(pl.Float64).to_numpy()[chosen])

    def sample(
        self,
        people: KnownPopulation | KnownTotals,
        method: Method,
        learner: LoggedParticipation,
        metrics: Metrics,
    ) -> LoggedSample:
        """Fit participation on all rounds and enrollment, and return the sample."""
        client = np.concatenate(self.client) if self.client else np.empty(0, dtype=np.int64)
        if not client.size:
            raise InputError(
                f"{metrics.where}: no evaluated round has a reply that can be weighed."
            )
        models = learner.pooled(certain=True)
        phase, inside, regression = _enrollment(people, method)
        n = int(inside.sum())
        codes = np.full(self.size, n)
        codes[inside] = np.arange(n)
        kept = inside[client]
        steps = []
        for k, log in enumerate(learner.logs):
            if log.step.name not in models:
                continue  # everybody passed
            assert log.frame is not None
            fit = models[log.step.name].fit
            beta = log.frame.matrix() @ np.append(fit.coefficients, fit.intercept)
            rows = codes.astype(np.int32)[np.concatenate(self.clients[k])]
            self.clients[k] = []
            steps.append(
                StepPhase.of(log.blocks, rows, beta, np.concatenate(self.places[k])[kept], n)
            )
        prob = np.prod([np.ones(int(kept.sum())), *(step.reply_prob for step in steps)], axis=0)
        if learner.logs[-1].step.among == INVITED and self.invite:
            prob = prob * np.concatenate(self.invite)[kept]
        made = TwoPhase(
            client=codes[client[kept]],
            round=np.concatenate(self.code)[kept],
            prob=prob,
            rounds=len(self.rounds),
            enrollment=phase,
            steps=tuple(steps),
            times=np.array(self.rounds),
        )
        counts = np.concatenate(self.count)[kept] if self.count else None
        size = people.size if isinstance(people, KnownPopulation) else people.population_size
        return LoggedSample(
            sample=made,
            values=np.concatenate(self.value)[kept],
            counts=counts,
            rounds=np.array(self.rounds),
            members=np.flatnonzero(inside),
            regression=regression,
            population_size=None if size is None else float(size),
            left_out=self.left_out + int((~kept).sum()),
            incomplete=int(inside[np.concatenate(self.lost)].sum()),
            unreported=self.unreported,
            participation=models,
        )


def _enrollment(
    people: KnownPopulation | KnownTotals, method: Method
) -> tuple[EnrollmentPhase, BoolArray, GregMean | None]:
    """Return the phase, which members are in it, and the regression their columns allow."""
    everyone = np.ones(people.members.size, dtype=np.bool_)
    standing = people.at(everyone, method)
    inside = standing.units.enrolled
    phase: EnrollmentPhase
    if method.distance is not None:
        balance = standing.facts.balance_for(method.name, rich=method.balanced == "rich")
        phase = CalibratedEnrollment.of(balance, method.distance)
        return phase, inside, GregMean(balance.matrix[balance.enrolled], balance.mean)
    assert isinstance(people, KnownPopulation)
    if standing.model is None:
        raise InputError(
            f"Enrollment has no model ({standing.note}). Every client is enrolled in all rounds: "
            "leave the dates of enrollment out of the table."
        )
    columns, _ = people.columns
    rows = people.rows_at(everyone)
    phase = FittedEnrollment.of(rows, people.coded.frame, standing.model.fit, columns)
    return phase, inside, GregMean(columns.T.copy(), people.coded.means())
