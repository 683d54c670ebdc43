"""Metrics that clients report, and the two-phase sample they make with the ledger behind them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final, final

import numpy as np
import polars as pl

from fedipw.calibration import Entropy
from fedipw.errors import InputError
from fedipw.evaluation.estimators import GregMean
from fedipw.evaluation.phases import (
    CalibratedEnrollment,
    EnrollmentPhase,
    FittedEnrollment,
    KnownEnrollment,
    ReferenceEnrollment,
    StepPhase,
)
from fedipw.evaluation.sample import Clusters, TwoPhase
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.numerics.checks import LARGEST, some
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.selection.logistic import LogisticFit
from fedipw.selection.participation import Participation, Source
from fedipw.selection.rowstore import LedgerStore
from fedipw.selection.saved import ENROLLMENT
from fedipw.tables.columns import ID, INVITE_PROB, INVITED, REPLIED, ROUND
from fedipw.tables.ledger import Ledger, Round
from fedipw.tables.table import Table, TableLike, odd_number
from fedipw.weighting.pipeline import Method
from fedipw.weighting.replay import Observer, Plan, Progress
from fedipw.weighting.spread import replay_of
from fedipw.weighting.weigher import EnrollmentState, StagedEnrollment

VALUE: Final = "value"
COUNT: Final = "n"
_OTHER: Final = "(other)"  # value of another metric on the same client and round


@dataclass(frozen=True)
class Metrics:
    """What clients reported: ``unit_id``, ``round``, ``value``, and ``n`` where known.

    Examples
    --------
    >>> made = Metrics(pl.DataFrame({"unit_id": ["a", "b"], "round": [1, 1], "value": [0.4, 0.7]}))
    >>> made.rounds, made.of(1)["value"].to_list()
    ((1,), [0.4, 0.7])
    """

    frame: pl.DataFrame
    where: str = "metrics"

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise InputError(f"{self.where}{fault}")

    def _faults(self) -> Iterator[str]:
        frame = self.frame
        lacking = [n for n in (ID, ROUND, VALUE) if n not in frame.columns]
        if lacking:
            yield f" has no column {some(map(repr, lacking))}; it has {some(frame.columns)}."
        if not frame.height:
            yield " has no rows."
        for name in (ID, ROUND, VALUE, *([COUNT] if COUNT in frame.columns else [])):
            if frame[name].null_count():
                yield f": {frame[name].null_count()} rows have no {name!r}."
        texts = [n for n in (ROUND, VALUE, COUNT) if frame.schema.get(n) == pl.String]
        if texts:
            yield f": {odd_number(frame[texts[0]])}."
        if not frame.schema[ROUND].is_integer():
            yield f": {ROUND!r} must hold whole numbers."
        kind = frame.schema[VALUE]
        if not (kind.is_numeric() or kind == pl.Boolean):
            yield f": {VALUE!r} must hold numbers, not {kind}."
        values = frame[VALUE].cast(pl.Float64)
        odd, large = int((~values.is_finite()).sum()), int((values.abs() > LARGEST).sum())
        if odd:
            yield f": {odd} values are not finite. Leave such rows out."
        if large:
            yield (
                f": {large} values are beyond {LARGEST:g}, where squares overflow. Scale the "
                "metric down or leave such rows out."
            )
        if COUNT in frame.columns:
            counts = frame[COUNT]  # NaN > 0 holds in Polars
            if not counts.dtype.is_numeric() or not bool(
                ((counts > 0) & (counts.cast(pl.Float64) <= LARGEST)).all()
            ):
                yield f": {COUNT!r} must hold finite numbers above 0, {LARGEST:g} at most."
        doubled = [p for p in self._by_round.values() if p[ID].n_unique() != p.height]
        if doubled:
            twice = pl.concat([part.filter(pl.col(ID).is_duplicated()) for part in doubled])
            yield (
                f": {twice.height} rows share {ID} and {ROUND} with another, such as "
                f"{some(str(v) for v in twice.select(ID, ROUND).rows()[:3])}. Keep one value per "
                "client and round."
            )

    @classmethod
    def read(cls, source: TableLike, *, id: str = ID) -> Metrics:  # noqa: A002
        """Return the metrics of a table: a file, a directory of parts or a frame.

        ``id`` is the column of identifiers.
        """
        table = Table(source, id=id)
        table.require([ID, ROUND, VALUE])
        names = [n for n in (ID, ROUND, VALUE, COUNT) if n in table.schema]
        return cls(table.collect(table.scan().select(names)), table.name)

    @cached_property
    def _by_round(self) -> dict[int, pl.DataFrame]:
        parts = self.frame.partition_by(ROUND, as_dict=True)
        return {int(key[0]): part for key, part in parts.items()}

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds with a value, in order."""
        return tuple(sorted(self._by_round))

    def of(self, index: int) -> pl.DataFrame | None:
        """Return the rows of a round, none if it has none."""
        return self._by_round.get(index)

    def digest(self, last: int) -> str:
        """Return a digest of the rows of rounds up to ``last``."""
        found = hashlib.sha256()
        for index in self.rounds:
            if index <= last:
                found.update(self._by_round[index].hash_rows(seed=1).to_numpy().tobytes())
        return found.hexdigest()

    def of_rounds(self, rounds: Sequence[int]) -> Metrics | None:
        """Return the metrics of some rounds, none if they have none."""
        parts = [part for index in rounds if (part := self.of(index)) is not None]
        return Metrics(pl.concat(parts), self.where) if parts else None

    def against(self, other: Metrics) -> Metrics:
        """Return the differences to another model's metrics on the same clients and rounds."""
        apart = pl.col(VALUE).cast(pl.Float64) - pl.col(_OTHER)
        made = self._beside(other).with_columns(apart.alias(VALUE)).drop(_OTHER)
        return Metrics(made, f"{self.where} less {other.where}")

    def over(self, other: Metrics) -> Metrics:
        """Return the same with another metric on the same clients and rounds, to be divided by."""
        return Metrics(self._beside(other), f"{self.where} over {other.where}")

    def _beside(self, other: Metrics) -> pl.DataFrame:
        """Return the rows with the values of another metric on the same clients and rounds."""
        keys = (pl.col(ID).cast(pl.String).alias("(id)"), pl.col(ROUND).cast(pl.Int64).alias("(r)"))
        both = self.frame.with_columns(keys).join(
            other.frame.select(*keys, pl.col(VALUE).cast(pl.Float64).alias(_OTHER)),
            on=["(id)", "(r)"], how="inner", maintain_order="left",
        ).drop("(id)", "(r)")  # fmt: skip
        if both.height != self.frame.height or both.height != other.frame.height:
            raise InputError(
                f"{self.where} and {other.where} must be of the same clients and rounds: "
                f"{self.frame.height} and {other.frame.height} rows, {both.height} in both."
            )
        return both


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
    under: FloatArray | None = None  # (m,) denominators of a ratio, where there is one
    by_classifier: tuple[str, ...] = ()  # stages and steps whose error is therefore not known
    enrollment_notes: tuple[str, ...] = ()  # what was done to targets, or stood in for a model

    def notes(self) -> tuple[str, ...]:
        """Return what people should know."""
        out = [*self.enrollment_notes, *self.sample.enrollment.notes]
        if self.left_out:
            out.append(f"{self.left_out} replies have a missing value or an unknown level.")
        if self.unreported:
            out.append(
                f"{self.unreported} replies have no metric and were left out: if who reports "
                "depends on the metric, no weight corrects that."
            )
        if self.by_classifier:
            out.append(
                f"Probabilities of {' and '.join(self.by_classifier)} are by a classifier and "
                "taken as known: standard errors and intervals, those of a jackknife too, leave "
                "out that they were estimated."
            )
        related = [rho for rho in self.sample.correlations if rho > 0.0]
        if related:
            out.append(
                f"A client's replies are related over {len(related)} round(s) beyond what the "
                f"model explains (correlation {related[0]:.2f} from one round to the next)."
            )
        return tuple(out)


def logged_two_phase(
    stage: EnrollmentStage,
    ledger: Ledger,
    metrics: Metrics,
    plan: Plan,
    *,
    allow_missing: bool = False,
    progress: Progress | None = None,
) -> LoggedSample:
    """Return the replies of a ledger with their metrics as a two-phase sample, by one pass over it.

    Participation is fitted on all rounds of the ledger, as the plan says; rounds without any metric
    help to fit it and are not evaluated. Enrollment is fitted or calibrated by the plan's method.

    Parameters
    ----------
    stage
        What is known of enrollment.
    ledger
        Closed rounds.
    metrics
        Values of the replies of some rounds.
    plan
        Method of enrollment, formulas and settings of the fits.
    allow_missing
        Leave replies without a metric out, and count them, instead of raising.
    progress
        Receives rounds done and rounds in all.
    """
    check_method(stage, plan.method)
    found = MetricCollector(stage, ledger, metrics, allow_missing=allow_missing)
    replay = replay_of(stage, ledger, plan, observers=[found], progress=progress)
    return found.sample(plan.method, replay.learn())


def check_method(stage: EnrollmentStage, method: Method) -> None:
    """Raise unless the error of a metric weighted by a method is known."""
    stage.require(method.needs)
    size, members = stage.size, stage.members.size
    if size is not None and size < members:
        raise InputError(
            f"A population of {size:g} cannot have {members} enrolled clients: correct the "
            "population size."
        )
    calibrated = method.calibration.distance is not None or method.calibration.pools_respondents
    fitted = method.needs.probabilities and not method.calibration.balance
    if not (calibrated or fitted):
        raise InputError(
            f"{method.name} has no standard error here. Use fedipw, efficient or a calibrated "
            "method; HT, Hájek and GREG forms of the mean are all given."
        )
    if getattr(method.calibration, "noise_aware", False):
        raise InputError(
            f"{method.name} has no standard error here: use calibrated-entropy; standard errors "
            "of targets enter the interval."
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reported:
    """The replies of an evaluated round that have a value and all covariates."""

    index: int
    members: IntArray  # (k,)
    values: FloatArray  # (k,)
    counts: FloatArray  # (k,); NaN where not known
    under: FloatArray  # (k,); NaN without a denominator
    invite_prob: FloatArray  # (k,); 1 where the ledger has none
    places: tuple[IntArray, ...]  # (k,) among the rows of each step
    lost: IntArray  # members behind the other replies
    unreported: int  # of those, without a value


@final
class MetricCollector(Observer):
    """Collects a metric's replies while a ledger is read; the learner keeps the coded rows.

    Arguments are those of :func:`logged_two_phase`.
    """

    learns = True

    def __init__(
        self,
        stage: EnrollmentStage,
        ledger: Ledger,
        metrics: Metrics,
        *,
        allow_missing: bool = False,
    ) -> None:
        strange = sorted(set(metrics.rounds) - set(ledger.rounds))
        if strange:
            raise InputError(
                f"{metrics.where}: round {some(strange)} is not in {ledger.directory}."
            )
        self._stage: EnrollmentStage | None = stage  # none elsewhere
        self._members = stage.members
        self._metrics: Metrics | None = metrics  # none elsewhere, of rounds without any
        self._allow_missing = allow_missing
        self._where = str(ledger.directory)
        self._rounds: list[_Reported] = []
        self._rows: list[int] = []  # of each step so far
        self._last = 0  # round that was learnt

    def learnt(self, round_: Round, table: pl.DataFrame, taken: Sequence[BoolArray]) -> None:
        """Take one closed round, and which rows of it each step is fitted on."""
        absent = self._members.size - len(round_.rows)
        if absent:
            raise InputError(
                f"{self._where} round {round_.index}: {absent} of {self._members.size} "
                "members are not enrolled then. A metric is evaluated over rounds with the same "
                "enrollment: give a ledger and a table of such rounds."
            )
        before, self._last = self._rows or [0] * len(taken), round_.index
        self._rows = [n + int(flags.sum()) for n, flags in zip(before, taken, strict=True)]
        if self._metrics is not None and self._metrics.of(round_.index) is not None:
            self._rounds.append(self._reported(round_, table, taken, before))

    def elsewhere(self) -> MetricCollector:
        """Return one without any metric yet."""
        made = copy.copy(self)
        made._stage = made._metrics = None
        return made

    def told(self, rounds: Sequence[int]) -> Metrics | None:
        """Return the metrics of some rounds."""
        assert self._metrics is not None
        return self._metrics.of_rounds(rounds)

    def begun(self, told: Metrics | None) -> MetricCollector:
        """Return one for the rounds of some metrics."""
        made = copy.copy(self)
        made._metrics, made._rounds, made._rows = told, [], []
        return made

    def brought(self) -> tuple[list[int], list[_Reported]]:
        """Return how many rows each step had, and the replies."""
        return self._rows, self._rounds

    def merge(self, brought: tuple[list[int], list[_Reported]]) -> None:
        """Take the replies of later rounds."""
        rows, rounds = brought
        before = self._rows or [0] * len(rows)
        for found in rounds:
            places = tuple(n + own for n, own in zip(before, found.places, strict=True))
            self._rounds.append(replace(found, places=places))
        self._rows = [n + more for n, more in zip(before, rows, strict=True)]

    def state(self) -> dict[str, Any]:
        """Return the replies so far, with a digest of the metrics they had."""
        assert self._metrics is not None
        return {
            "last": self._last,
            "metrics": self._metrics.digest(self._last),
            "rows": list(self._rows),
            "rounds": [
                {one.name: getattr(found, one.name) for one in fields(_Reported)}
                for found in self._rounds
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved replies back; ``ValueError`` if their metrics have changed since."""
        last = int(state["last"])
        assert self._metrics is not None
        if state["metrics"] != self._metrics.digest(last):
            raise ValueError("metrics of earlier rounds have changed")
        self._rounds = [
            _Reported(**{**saved, "places": tuple(saved["places"])}) for saved in state["rounds"]
        ]
        self._rows, self._last = [int(rows) for rows in state["rows"]], last

    def _reported(
        self, round_: Round, table: pl.DataFrame, taken: Sequence[BoolArray], before: Sequence[int]
    ) -> _Reported:
        """Return the replies of a round; ``taken`` are the rows of each step, after so many."""
        assert self._metrics is not None
        index, rows = round_.index, round_.rows
        members, where = self._members, f"{self._metrics.where} round {index}"
        reported, replied = self._metrics.of(index), table[REPLIED].to_numpy()
        assert reported is not None
        values, counts, under = np.full((3, members.size), np.nan)
        who = members.rows_of(reported[ID], where)
        values[who] = reported[VALUE].cast(pl.Float64).to_numpy()
        if COUNT in reported.columns:
            counts[who] = reported[COUNT].cast(pl.Float64).to_numpy()
        if _OTHER in reported.columns:
            under[who] = reported[_OTHER].to_numpy()
        heard = np.zeros(members.size, dtype=np.bool_)
        heard[rows[replied]] = True
        silent = who[~heard[who]]
        if silent.size:
            raise InputError(
                f"{where}: {silent.size} client(s) have a metric and did not reply: "
                f"{some(members.frame[ID][silent].to_list())}. Leave their rows out, or "
                f"correct {REPLIED!r} in the ledger."
            )
        lost = replied & np.isnan(values[rows])
        if lost.any() and not self._allow_missing:
            raise InputError(
                f"{where}: {int(lost.sum())} of {int(replied.sum())} replies have no metric. Add "
                "them, leave the whole round out, or allow missing metrics (--missing-metrics)."
            )
        known = np.logical_and.reduce([replied & ~lost, *taken])
        chosen, invite = np.flatnonzero(known), np.ones(len(rows))
        if INVITE_PROB in table.columns:
            invite = table[INVITE_PROB].cast(pl.Float64).to_numpy()
        return _Reported(
            index=index,
            members=rows[chosen],
            values=values[rows[chosen]],
            counts=counts[rows[chosen]],
            under=under[rows[chosen]],
            invite_prob=invite[chosen],
            places=tuple(
                n + np.cumsum(flags)[chosen] - 1 for n, flags in zip(before, taken, strict=True)
            ),
            lost=rows[replied & ~known],
            unreported=int(lost.sum()),
        )

    def sample(self, method: Method, learner: Participation) -> LoggedSample:
        """Fit participation on all rounds and enrollment, and return the sample.

        ``learner`` has seen the rounds that were collected.
        """
        rounds, stage = self._rounds, self._stage
        assert self._metrics is not None
        assert stage is not None
        if not any(len(found.members) for found in rounds):
            raise InputError(
                f"{self._metrics.where}: no evaluated round has a reply that can be weighed."
            )
        client = np.concatenate([found.members for found in rounds])
        pooled = method.calibration.pools_respondents
        invited, regression = np.concatenate([found.invite_prob for found in rounds]), None
        if pooled:
            phase, inside, invited = _respondents(stage, method, rounds)
            models = {}
        else:  # enrollment first, as weights are made: of two failures it is the one to be told
            phase, inside, regression = _enrollment(stage, method)
            models = learner.pooled(certain=True)
        fits = [model.note for model in models.values() if model.note]
        notes = [
            *filter(None, [stage.narrowed]), *stage.notes,
            *(f"{note[:1].upper()}{note[1:]}." for note in fits),
        ]  # fmt: skip
        if regression is None and not pooled:
            notes.append("No GREG mean: the population means that it needs are estimates.")
        n = int(inside.sum())
        codes = np.full(len(inside), n, dtype=np.int32)
        codes[inside] = np.arange(n)
        kept = inside[client]
        steps, prob = [], np.ones(int(kept.sum()))
        by_classifier = [ENROLLMENT] if isinstance(phase, KnownEnrollment) else []
        for k, step in enumerate(learner.steps):
            if step.step.name not in models:
                continue  # everybody passed
            store, fit = step.store, models[step.step.name].fit
            assert isinstance(store, LedgerStore)
            assert store.frame is not None
            replies = np.concatenate([found.places[k] for found in rounds])[kept]
            if not isinstance(fit, LogisticFit):  # its own error is not known: taken as given
                X, _, clients = store.rounds(0, learner.rounds).matrix()
                prob = prob * fit.prob(X[replies].T, clients[replies])
                by_classifier.append(step.step.name)
                continue
            steps.append(
                StepPhase.of(
                    store.whole(), store.frame, fit, codes=codes, replies=replies, n=n,
                )
            )  # fmt: skip
            prob = prob * steps[-1].reply_prob
        if pooled or learner.steps[-1].step.among == INVITED:
            prob = prob * invited[kept]
        lost = np.concatenate([found.lost for found in rounds])
        unreported = sum(found.unreported for found in rounds)
        counts = np.concatenate([found.counts for found in rounds])[kept]
        under = np.concatenate([found.under for found in rounds])[kept]
        code = np.repeat(np.arange(len(rounds)), [len(found.members) for found in rounds])
        numbers = np.array([found.index for found in rounds])
        size = None if pooled else stage.size  # respondents stand for shares, not clients
        return LoggedSample(
            sample=TwoPhase(
                client=codes[client[kept]].astype(np.int64),
                round=code[kept],
                prob=prob,
                rounds=len(rounds),
                enrollment=phase,
                steps=tuple(steps),
                times=numbers,
                clusters=member_clusters(stage, np.flatnonzero(inside)),
            ),
            values=np.concatenate([found.values for found in rounds])[kept],
            counts=None if np.isnan(counts).any() else counts,
            under=None if np.isnan(under).any() else under,
            rounds=numbers,
            members=np.flatnonzero(inside),
            regression=regression,
            population_size=None if size is None else float(size),
            left_out=len(lost) - unreported + int((~kept).sum()),
            incomplete=int(inside[lost].sum()),
            unreported=unreported,
            by_classifier=tuple(by_classifier),
            enrollment_notes=tuple(notes),
        )


def member_clusters(stage: EnrollmentStage, members: IntArray) -> Clusters | None:
    """Return the clusters of some members (n,), none where clients are not clustered.

    How many clusters and pairs the population has is known where everybody is listed.
    """
    population, column = stage.population, stage.population.cluster
    if column is None:
        return None
    table = population.clients
    key = pl.col(ID).cast(pl.String)
    listed = table.collect(table.scan().select(key, pl.col(column)))
    mine = stage.members.frame.select(key)[members].join(
        listed, on=ID, how="left", maintain_order="left"
    )
    codes = np.unique(mine[column].rank("dense").to_numpy(), return_inverse=True)[1]
    if stage.coded is None:
        return Clusters(code=codes.astype(np.int64))
    sizes = table.collect(stage.coded.listed_rows().group_by(column).agg(pl.len().alias("n")))["n"]
    pairs = float((sizes.cast(pl.Float64) * (sizes - 1) / 2.0).sum())
    return Clusters(code=codes.astype(np.int64), count=len(sizes), pairs=pairs)


def _respondents(
    stage: EnrollmentStage, method: Method, rounds: Sequence[_Reported]
) -> tuple[EnrollmentPhase, BoolArray, FloatArray]:
    """Return both stages as one phase: respondents calibrated with their replies as base.

    Also which members are in it, and the inverse of each reply's own base weight, (m,), in units of
    the largest: replies count alike unless some were less likely to be invited (W21).
    """
    client = np.concatenate([found.members for found in rounds])
    heard = np.bincount(client, minlength=stage.members.size) > 0
    state = StagedEnrollment(stage, method).at(heard)
    inside = state.enrolled
    balance = state.balance_for(method.name, method.calibration.balance)
    base = np.concatenate([_base(found, method, state) for found in rounds])
    prob: FloatArray = base.min() / base
    counts = np.bincount(client, 1.0 / prob, stage.members.size).astype(np.float64)
    return CalibratedEnrollment.of(balance, Entropy(), counts[inside]), inside, prob


def _base(found: _Reported, method: Method, state: EnrollmentState) -> FloatArray:
    """Return the base weights of a round's replies without participation, (k,)."""
    if not len(found.members):
        return np.empty(0)
    ones = np.ones(len(found.members))
    replies = state.replies(found.index, found.members, ones, Source.NONE, found.invite_prob)
    return method.base.weights(replies, state)


def _enrollment(
    stage: EnrollmentStage, method: Method
) -> tuple[EnrollmentPhase, BoolArray, GregMean | None]:
    """Return the phase, which members are in it, and the regression their columns allow."""
    everyone = np.ones(stage.members.size, dtype=np.bool_)
    state = StagedEnrollment(stage, method).at(everyone)
    inside, distance = state.enrolled, method.calibration.distance
    if distance is not None:
        balance = state.balance_for(method.name, method.calibration.balance)
        phase = CalibratedEnrollment.of(balance, distance)
        own = 1.0 if stage.own is None else stage.own[inside]
        phase = replace(phase, reference=stage.reference, own=own)
        if balance.se is not None and balance.se.any():
            return phase, inside, None  # of means that are estimates its error is not known
        return phase, inside, GregMean(balance.matrix[balance.enrolled], balance.mean)
    if stage.reference is not None:
        columns = stage.balance("main", inside).matrix[inside]
        return ReferenceEnrollment.of(stage.reference, columns), inside, None
    if state.model is None or stage.coded is None:
        raise InputError(
            f"Enrollment has no model ({state.note}). Every client is enrolled in all rounds: "
            "leave the dates of enrollment out of the table."
        )
    main, fit = stage.balance("main", inside), state.model.fit
    regression = GregMean(main.matrix[inside], main.mean)
    if not isinstance(fit, LogisticFit):  # its own error is not known: taken as given
        known = KnownEnrollment(weights=1.0 / state.prob[inside], population_size=stage.coded.rows)
        return known, inside, regression
    columns = np.ascontiguousarray(main.matrix[inside].T)
    own = 1.0 if stage.own is None else stage.own[inside]
    fitted = FittedEnrollment.of(stage.coded.partitions, stage.coded.frame, fit, columns, own)
    return fitted, inside, regression
