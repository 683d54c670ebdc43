"""The common jobs in one call each: weigh, calibrate, evaluate, audit.

Tables are anything a :class:`~fedipw.tables.population.Population` takes: a path or URL, or a
frame of polars, pandas or Arrow. Results are values that print well, in a notebook too, and become
frames.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from fedipw.errors import InputError
from fedipw.progress import shown_progress
from fedipw.tables.columns import ID
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.tables.table import (
    Table,
    TableLike,
    check_table_path,
    pandas_frame,
    paragraphs,
)
from fedipw.tables.targets import Targets, TargetsLike
from fedipw.weighting.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedipw.audit.values import Audit, Histogram
    from fedipw.calibration import Calibration
    from fedipw.evaluation.evaluate import Evaluation
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.selection.overlap import Overlap
    from fedipw.storage.places import Place
    from fedipw.weighting.replay import Plan, Record
    from fedipw.weighting.resume import SavedRun


class _Tabular:
    """A result that is a table."""

    table: pl.DataFrame

    def to_polars(self) -> pl.DataFrame:
        """Return the table as a polars frame."""
        return self.table

    def to_pandas(self) -> Any:
        """Return the table as a pandas frame; needs pandas."""
        return pandas_frame(self.table)

    def _repr_html_(self) -> str:
        return paragraphs(repr(self)) + self.table._repr_html_()


@dataclass(frozen=True, repr=False, eq=False)
class Weights(_Tabular):
    """One weight per reply of a ledger, with where it came from."""

    table: pl.DataFrame  # unit_id, round, the probabilities, weight
    method: str
    record: Record = field(repr=False)
    overlap: Overlap | None = None

    def summary(self) -> dict[str, Any]:
        """Return counts and extremes as plain values, as ``fedipw weights --json`` prints them."""
        found = self.overlap
        return {
            "method": self.method,
            **self.record.to_json(),
            "overlap": None if found is None else found.to_json(),
        }

    def models_table(self) -> pl.DataFrame:
        """Return the models' coefficients with odds ratios, 95% intervals and p-values (P9)."""
        return self.record.models_table()

    def __repr__(self) -> str:
        record = self.record.to_json()
        effective = record["mean_effective_replies"] or 0.0
        many = f"{self.table.height} replies of {self.record.rounds} rounds"
        lines = [f"Weights({self.method}: {many}, effective {effective:.1f} a round)"]
        lines += [f"  {self.record.population}"] * bool(self.record.population)
        lines += [f"  round {k} skipped: {why}" for k, why in list(self.record.skipped.items())[:3]]
        lines += [f"  {count} time(s): {note}" for note, count in self.record.notes.items()]
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Return a figure of the weights: their spread, and each round's effective number."""
        from fedipw.figures import weights_figure  # noqa: PLC0415

        return weights_figure(self.table)


@dataclass(frozen=True, repr=False, eq=False)
class CalibratedWeights(_Tabular):
    """Weights of enrolled clients that reproduce population means; they sum to one."""

    table: pl.DataFrame  # unit_id, weight
    calibration: Calibration

    def __repr__(self) -> str:
        found = self.calibration
        return (
            f"CalibratedWeights({self.table.height} clients, effective "
            f"{found.effective_sample_size:.1f}; {len(found.names)} targets met to "
            f"{found.largest_violation:.1e} sd, {found.status.value})"
        )

    def plot(self) -> Figure:
        """Return a figure of the weights' spread."""
        from fedipw.figures import calibrated_figure  # noqa: PLC0415

        return calibrated_figure(self.table["weight"].to_numpy())


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """An audit: who is missing, how much it matters, how far weights can be trusted."""

    audit: Audit

    def save(
        self,
        path: str | Place,
        json_path: str | Place | None = None,
        card_path: str | Place | None = None,
    ) -> None:
        """Write the page, and the same numbers as JSON and the card as Markdown if asked."""
        from fedipw.audit.pages import audit_page  # noqa: PLC0415
        from fedipw.storage.places import place_of, write_texts  # noqa: PLC0415

        texts = {place_of(path): audit_page(self.audit)}
        if json_path is not None:
            numbers = json.dumps(self.audit.to_json(), indent=1, allow_nan=False)
            texts[place_of(json_path)] = numbers + "\n"
        if card_path is not None:
            texts[place_of(card_path)] = self.card()
        write_texts(texts)

    def card(self) -> str:
        """Return a summary in the manner of a model card, as Markdown: see ``docs/audit.md``."""
        from fedipw.audit.card import card_markdown  # noqa: PLC0415

        assert self.audit.card is not None
        return card_markdown(self.audit.card)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain values."""
        return self.audit.to_json()

    def __repr__(self) -> str:
        verdict = self.audit.verdict
        assert verdict is not None
        lines = [f"Report: {verdict.headline}"]
        lines += [f"  {x.question} {x.answer}. {x.text}" for x in verdict.findings]
        lines += [f"  Not corrected: {line}" for line in verdict.uncorrected]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return paragraphs(repr(self))

    def plot(self) -> Figure:
        """Return a figure of balance and overlap, those of them that are known."""
        from fedipw.figures import report_figure  # noqa: PLC0415

        return report_figure(self.audit.balance, self._enrollment_prob)

    def love_plot(self) -> Figure:
        """Return standardised differences from the population before and after weighting."""
        from fedipw.figures import love_figure  # noqa: PLC0415

        if self.audit.balance is None:
            raise InputError("Balance is not known: see Report.audit.unknown.")
        return love_figure(self.audit.balance)

    def overlap_plot(self) -> Figure:
        """Return enrollment probabilities of the enrolled and of all others."""
        from fedipw.figures import overlap_figure  # noqa: PLC0415

        if self._enrollment_prob is None:
            raise InputError(
                "Enrollment has no fitted probabilities here: overlap needs a table of the whole "
                "population."
            )
        return overlap_figure(self._enrollment_prob)

    @property
    def _enrollment_prob(self) -> Histogram | None:
        found = [part.prob for part in self.audit.stages if part.stage == "enrollment"]
        return found[0] if found and found[0].counts else None


def weigh(
    population: Population | TableLike,
    rounds: Ledger | str | Path,
    *,
    id: str = ID,  # noqa: A002
    progress: bool | None = None,
    state: str | Path | None = None,
    **settings: Any,
) -> Weights:
    """Weigh every reply of a ledger by the inverse of its selection probabilities.

    Parameters
    ----------
    population
        Who is to be served; a path or a frame is a table of everybody, for totals use
        ``Population.from_totals``.
    rounds
        The ledger: a directory of closed rounds.
    id
        The column of identifiers in tables that are not opened yet, and in rounds that have it.
    progress
        Whether to show how far it is; by default in notebooks, once it takes two seconds.
    state
        Directory of what earlier calls have learnt: of a ledger that grew, only new rounds are
        read, with the same weights. It is saved to at the end.
    settings
        Formulas, method, classifier and others: the fields of
        :class:`~fedipw.weighting.settings.Settings`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import fedipw
    >>> rng = np.random.default_rng(0)
    >>> age, ids = rng.normal(size=300), np.arange(300)
    >>> enrolled = rng.random(300) < 1 / (1 + np.exp(-age))
    >>> devices = pl.DataFrame({"unit_id": ids, "age": age, "enrolled": enrolled})
    >>> rounds = fedipw.Ledger(tempfile.mkdtemp())
    >>> for index in (1, 2, 3):
    ...     rounds.append(index, pl.DataFrame({
    ...         "unit_id": ids[enrolled], "invited": True,
    ...         "replied": rng.random(enrolled.sum()) < 0.4}))
    >>> fedipw.weigh(devices, rounds, enrollment="age", participation="age").table.columns[-1]
    'weight'
    """
    from fedipw.weighting.spread import replay_of  # noqa: PLC0415

    stage, ledger, plan = _job(population, rounds, settings, id)
    with shown_progress("rounds", progress) as step, _going_on(state, "weights") as saved:
        replay = replay_of(stage, ledger, plan, progress=step, saved=saved)
        if saved is None:
            tables = list(replay)
        else:
            for table in replay:
                saved.keep(table)
            tables = [pl.read_parquet(path) for path in saved.tables]
    if not tables:
        raise InputError("No round has a reply that can be weighed.")
    found = stage.overlap(replay.record.enrollment, threshold=0.01)
    return Weights(pl.concat(tables), plan.method.name, replay.record, found)


def calibrate(
    enrolled: TableLike,
    targets: TargetsLike,
    *,
    distance: str = "quadratic",
    bounds: tuple[float, float] | None = None,
    base: str | None = None,
    population_size: float | None = None,
    slack: float | None = None,
    totals: bool = False,
    id: str = ID,  # noqa: A002
) -> CalibratedWeights:
    """Weigh enrolled clients so that their means are the population's.

    Parameters
    ----------
    enrolled
        Enrolled clients; rows with ``enrolled`` false are ignored.
    targets
        Population means by name (a dict), a file or a frame.
    distance, bounds
        ``quadratic``, ``entropy``, ``linear``, ``logit`` or ``inverse-logit``; bounds of
        weight * N / base for quadratic and logit.
    base, population_size
        Column of base weights, and N.
    slack
        Allow each mean to miss by this many standard deviations of its column.
    totals
        Whether targets are population totals, counts of levels: they are divided by N.
    id
        The column of identifiers.

    Examples
    --------
    >>> import fedipw
    >>> phones = pl.DataFrame({"unit_id": ["a", "b", "c"], "os": ["ios", "ios", "android"]})
    >>> fedipw.calibrate(phones, {"os[android]": 0.6}).table["weight"].round(6).to_list()
    [0.2, 0.2, 0.6]
    """
    from fedipw.calibration import Box, calibrated_table, distance_named  # noqa: PLC0415

    table, found = calibrated_table(
        Table(enrolled, id=id),
        Targets.given(targets, totals=_checked_totals(population_size) if totals else None),
        distance=distance_named(distance, bounds),
        base=base,
        population_size=population_size,
        slack=None if slack is None else Box(slack),
    )
    return CalibratedWeights(table, found)


def evaluate(
    metrics: TableLike,
    population: Population | TableLike,
    rounds: Ledger | str | Path,
    *,
    by: str | Sequence[str] = (),
    confidence: float = 0.95,
    sensitivity: Sequence[float] = (),
    jackknife: int = 0,
    samples: bool = False,
    against: TableLike | None = None,
    quantile: float | Sequence[float] = (),
    ratio_to: TableLike | None = None,
    total: bool = False,
    difference: str | Sequence[str] = (),
    replicate_weights: str | Path | None = None,
    replicates: int = 0,
    interval: str = "auto",
    resamples: int = 1000,
    proportion: bool | None = None,
    cluster: str | None = None,
    seed: int = 0,
    predict: Any = None,
    allow_missing: bool = False,
    id: str = ID,  # noqa: A002
    progress: bool | None = None,
    **settings: Any,
) -> Evaluation:
    """Estimate a metric's mean over the whole population from its respondents.

    Parameters
    ----------
    metrics
        ``unit_id``, ``round``, ``value`` and optionally ``n``: a path or a frame.
    population, rounds, id, progress, settings
        As of :func:`weigh`.
    by
        Columns of the clients to group by; ``round`` gives each round.
    confidence, sensitivity, jackknife, samples
        Of the intervals; odds ratios of the sensitivity analysis; groups of a jackknife; the mean
        over samples in place of clients.
    against
        Another model's metrics on the same clients and rounds: all is about the paired difference.
    quantile, total
        Shares of the population whose quantiles to add; whether to add totals.
    ratio_to
        Another metric of the same clients and rounds: adds the ratio of the two totals.
    difference
        Of the groups of ``by``: ``rest`` compares each with all others, ``pairs`` each with each,
        and a group such as ``os=ios`` all others with it.
    replicate_weights, replicates, seed
        File for replicate weights, how many (50 if there is a file), and the seed of their groups
        of clients, of a jackknife's, of a bootstrap and of folds. The result has them as
        ``replicates``.
    interval, resamples
        Kind of interval: ``auto``, ``t``, ``logit``, ``beta``, ``jeffreys`` or ``bootstrap``
        (:mod:`fedipw.evaluation.intervals`), and resamples of a bootstrap over clients.
    proportion
        Whether the metric is a share; if its values are 0 and 1 by default.
    cluster
        Column of what clients share, such as a person with several devices: standard errors are
        then between clusters.
    predict
        Adds the prediction-powered mean: ``boosting``, ``forest``, ``linear``, the dotted name of a
        scikit-learn regressor or one itself, of the metric on the enrollment model's columns.
    allow_missing
        Leave replies without a metric out, and count them.
    """
    from fedipw.evaluation.evaluate import EvaluationPlan, evaluated  # noqa: PLC0415
    from fedipw.evaluation.intervals import interval_named  # noqa: PLC0415
    from fedipw.evaluation.logged import Metrics, logged_two_phase  # noqa: PLC0415
    from fedipw.evaluation.prediction import checked_regression  # noqa: PLC0415
    from fedipw.evaluation.replicates import REPLICATES  # noqa: PLC0415

    values = Metrics.read(metrics, id=id)
    if against is not None:
        values = values.against(Metrics.read(against, id=id))
        proportion = bool(proportion)  # differences, even if all of them should be 0 or 1
    if ratio_to is not None:
        values = values.over(Metrics.read(ratio_to, id=id))
    if replicate_weights is not None:
        check_table_path(replicate_weights)
        replicates = replicates or REPLICATES
    kind = interval_named(interval, replicates=resamples, proportion=proportion, seed=seed)
    who = _population(population, id).clustered(cluster)
    stage, ledger, plan = _job(who, rounds, {"fit": "pooled", **settings}, id)
    checked_regression(predict, stage)
    with shown_progress("rounds", progress) as step:
        logged = logged_two_phase(
            stage, ledger, values, plan, allow_missing=allow_missing, progress=step
        )
    asked = EvaluationPlan(
        by=(by,) if isinstance(by, str) else tuple(by), confidence=confidence,
        odds_ratios=tuple(sensitivity), jackknife=jackknife, by_samples=samples,
        quantiles=(quantile,) if isinstance(quantile, float | int) else tuple(quantile),
        totals=total,
        difference=(difference,) if isinstance(difference, str) else tuple(difference),
        replicates=replicates, seed=seed, interval=kind,
        predict=predict,
    )  # fmt: skip
    found = evaluated(logged, stage, plan.method.name, asked)
    if replicate_weights is not None and found.replicates is not None:
        found.replicates.write(replicate_weights)
    return found


def audit(
    population: Population | TableLike,
    rounds: Ledger | str | Path | None = None,
    *,
    metrics: TableLike | None = None,
    metric_name: str = "metric",
    by: str | Sequence[str] = (),
    cluster: str | None = None,
    title: str = "Selection audit",
    threshold: float = 0.01,
    min_cell: int = 10,
    memory: bool | None = None,
    invitations: bool | None = None,
    id: str = ID,  # noqa: A002
    progress: bool | None = None,
    state: str | Path | None = None,
    **settings: Any,
) -> Report:
    """Say who is missing, how much it matters, and how far weights can be trusted.

    Parameters
    ----------
    population, rounds, id, progress, state, settings
        As of :func:`weigh`; without rounds only enrollment is audited.
    metrics, metric_name, by
        A metric of the replies, what it is called, and columns to group it by.
    cluster
        Column of what clients share, as of :func:`evaluate`.
    title
        Of the page.
    threshold, min_cell
        A probability counted as small; subgroups with fewer clients or rows are not shown.
    memory, invitations
        Whether a server may keep every client's latest update, and whether it chooses whom to
        invite, where that is known: for the method it recommends.

    Examples
    --------
    >>> import numpy as np
    >>> import fedipw
    >>> rng = np.random.default_rng(1)
    >>> age = rng.normal(40.0, 10.0, 500)
    >>> devices = pl.DataFrame({"unit_id": np.arange(500), "age": age,
    ...                         "enrolled": rng.random(500) < 0.01 * age})
    >>> fedipw.audit(devices).audit.sizes.enrolled
    194
    """
    from fedipw.audit.gather import MetricRequest, audit_facts  # noqa: PLC0415
    from fedipw.audit.training import Means  # noqa: PLC0415
    from fedipw.audit.verdict import judged  # noqa: PLC0415
    from fedipw.evaluation.logged import Metrics  # noqa: PLC0415

    request = None
    if metrics is not None:
        if rounds is None:
            raise InputError("A metric belongs to replies: give the rounds too.")
        columns = (by,) if isinstance(by, str) else tuple(by)
        request = MetricRequest(values=Metrics.read(metrics, id=id), name=metric_name, by=columns)
    who, chosen = _population(population, id).clustered(cluster), _settings(settings)
    ledger = None if rounds is None else _ledger(rounds, id)
    stage = chosen.stage(who, later=() if ledger is None else ledger.covariates)
    if state is not None and ledger is None:
        raise InputError("A state holds what was learnt from rounds: give the rounds too.")
    with shown_progress("rounds", progress) as step, _going_on(state, "audit") as saved:
        found = audit_facts(
            stage, ledger, chosen.plan(who), threshold=threshold, min_cell=min_cell, title=title,
            metric=request, progress=step, saved=saved,
        )  # fmt: skip
    return Report(judged(found, Means(memory=memory, invitations=invitations)))


@contextmanager
def _going_on(state: str | Path | None, job: str) -> Iterator[SavedRun | None]:
    """Yield what earlier calls of a job have learnt, none where there is no place for it."""
    if state is None:
        yield None
        return
    from fedipw.weighting.resume import saved_run  # noqa: PLC0415

    with saved_run(state, job) as saved:
        yield saved


def _checked_totals(size: float | None) -> float:
    if size is None:
        raise InputError("Totals need population_size: they are divided by it.")
    return size


def _job(
    population: Population | TableLike,
    rounds: Ledger | str | Path,
    settings: dict[str, Any],
    column: str,
) -> tuple[EnrollmentStage, Ledger, Plan]:
    who, ledger = _population(population, column), _ledger(rounds, column)
    chosen = _settings(settings)
    return chosen.stage(who, later=ledger.covariates), ledger, chosen.plan(who)


def _population(given: Population | TableLike, column: str) -> Population:
    return given if isinstance(given, Population) else Population(given, id=column)


def _ledger(given: Ledger | str | Path, column: str) -> Ledger:
    if not isinstance(given, Ledger | str | Path):
        raise InputError(f"rounds is a Ledger or the path of one, not {type(given).__name__}.")
    ledger = given if isinstance(given, Ledger) else Ledger(given, id=column)
    ledger.require_rounds()
    return ledger


def _settings(given: dict[str, Any]) -> Settings:
    known = asdict(Settings())
    strange = sorted(set(given) - set(known))
    if strange:
        raise InputError(f"There is no setting {', '.join(strange)}; there are {', '.join(known)}.")
    if isinstance(given.get("models"), str):
        given = {**given, "models": Path(given["models"])}
    return Settings(**given)
