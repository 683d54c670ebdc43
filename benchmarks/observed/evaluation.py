"""Nine shares of a survey's persons, estimated from its daily internet users; and coverage.

The population is the 2,845 respondents of the Michigan Behavioral Risk Factor Surveillance Survey.
Who has internet at home is enrolled; who of them uses it at least daily replies in the one round
there is. Nothing about selection is simulated, and outcomes are known for everybody.

Fixed before any estimate was looked at: models are logistic with main effects of age, race,
education, income and gender, all as categories; the nine outcomes; the estimators below at their
defaults. Nothing was tuned afterwards.

Coverage is over bootstrap populations: persons drawn with replacement, with their flags and
outcomes, whose truth is their own mean. A residual bias of the table stays in all of them, so a
second set of populations has both stages redrawn by the probabilities fitted to the table: there
the covariates explain selection by construction.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import fedipw
from fedipw.evaluation.evaluate import EvaluationPlan, evaluated
from fedipw.evaluation.logged import LoggedSample, Metrics, logged_two_phase
from fedipw.lab.observed import ObservedTables, RecordedReplies
from fedipw.lab.open_data import COVARIATES, OUTCOMES, MichiganPopulation
from fedipw.numerics import FloatArray
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.selection.propensity import PropensityModel
from fedipw.tables.columns import ENROLLED, ID
from fedipw.weighting.settings import Settings

FILE = "mibrfss.csv"
FORMULA = " + ".join(COVARIATES.values())
PREDICT = "linear"
BOTH = {"plain": "plain", "ht": "horvitz-thompson", "hajek": "hajek", "greg": "greg",
        "powered": "prediction-powered"}  # fmt: skip
ESTIMATORS = {
    "plain": "respondents, plain mean",
    "ht": "both stages, HT",
    "hajek": "both stages, Hájek",
    "greg": "both stages, GREG",
    "powered": "both stages, prediction-powered",
    "totals": "totals only, Hájek",
    "participation": "participation only, Hájek",
    "enrollment": "enrollment only, Hájek",
}


@dataclass(frozen=True, slots=True)
class Estimated:
    """An outcome's mean over the population by one estimator, and the truth."""

    outcome: str
    estimator: str
    truth: float
    estimate: float
    se: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """The estimate less the truth."""
        return self.estimate - self.truth

    @property
    def holds(self) -> bool:
        """Whether the interval holds the truth."""
        return self.low <= self.truth <= self.high


def survey(directory: Path) -> ObservedTables:
    """Return the survey."""
    return MichiganPopulation(path=directory / FILE).tables()


def shares(frame: pl.DataFrame) -> dict[str, float]:
    """Return the share of every level of every covariate: what a census table has."""
    return {
        f"{column}[{level}]": share
        for column in COVARIATES.values()
        for level, share in frame[column].value_counts(normalize=True).sort(column).iter_rows()
    }


def estimates(tables: ObservedTables, *, predict: bool = True) -> list[Estimated]:
    """Return every outcome by every estimator; the replies are replayed once a set of stages."""
    everyone, enrolled = tables.clients, tables.clients.filter(ENROLLED)
    totals = fedipw.Population.from_totals(enrolled, shares(everyone), size=everyone.height)
    alone = fedipw.Population.from_totals(enrolled, shares(enrolled), size=enrolled.height)
    found: list[Estimated] = []
    with tempfile.TemporaryDirectory() as scratch:
        ledger = tables.ledger(Path(scratch) / "rounds")
        plan = EvaluationPlan(predict=PREDICT if predict else None)
        names = BOTH if predict else {k: v for k, v in BOTH.items() if k != "powered"}
        both = _logged(fedipw.Population(everyone), ledger, tables, enrollment=FORMULA)
        found += _means(both, tables, names, plan)
        found += _means(_constant(both), tables, {"enrollment": "hajek"})
        found += _means(_logged(totals, ledger, tables), tables, {"totals": "hajek"})
        found += _means(_logged(alone, ledger, tables), tables, {"participation": "hajek"})
    order = {name: k for k, name in enumerate(ESTIMATORS)}
    return sorted(found, key=lambda one: ([*OUTCOMES].index(one.outcome), order[one.estimator]))


@dataclass(frozen=True)
class _Replayed:
    """A two-phase sample of the replies, and whose they are."""

    logged: LoggedSample
    stage: EnrollmentStage
    rows: Any  # (m,) of the population


def _logged(
    population: fedipw.Population, ledger: fedipw.Ledger, tables: ObservedTables, **settings: str
) -> _Replayed:
    how = Settings(fit="pooled", participation=FORMULA, **settings)  # type: ignore[arg-type]
    stage = how.stage(population)
    values = Metrics(tables.metric(next(iter(OUTCOMES))))
    logged = logged_two_phase(stage, ledger, values, how.plan(population))
    ids = stage.members.frame[ID].to_numpy()[logged.members][logged.sample.client]
    places = {int(one): k for k, one in enumerate(tables.clients[ID].to_list())}
    return _Replayed(logged, stage, np.array([places[int(one)] for one in ids]))


def _constant(of: _Replayed) -> _Replayed:
    """Return the replies with one probability for all: enrollment is corrected alone."""
    sample = of.logged.sample
    rate = len(sample.client) / of.stage.members.size
    flat = replace(sample, prob=np.full(len(sample.client), rate), steps=())
    return replace(of, logged=replace(of.logged, sample=flat))


def _means(
    of: _Replayed,
    tables: ObservedTables,
    names: Mapping[str, str],
    plan: EvaluationPlan | None = None,
) -> Iterator[Estimated]:
    for outcome in OUTCOMES:
        values = tables.outcomes[outcome].to_numpy()[of.rows]
        found = evaluated(replace(of.logged, values=values), of.stage, "", plan)
        for name, estimator in names.items():
            line = found.of(estimator)
            yield Estimated(
                outcome=outcome,
                estimator=name,
                truth=tables.truth(outcome),
                estimate=line.estimate,
                se=line.se,
                low=line.low,
                high=line.high,
            )


def fitted_probabilities(tables: ObservedTables) -> tuple[FloatArray, FloatArray]:
    """Return both stages' probabilities of everybody, fitted to the table, (N,) each."""
    names = [*COVARIATES.values()]
    levels = tables.clients.select(names).to_dummies(drop_first=True)
    X = levels.to_numpy().astype(np.float64)
    inside = tables.enrolled
    assert isinstance(tables.replies, RecordedReplies)
    replied = tables.replies.replied[0]
    model = PropensityModel
    first = model().fit(X, inside).predict_proba(X)[:, 1]
    second = model().fit(X[inside], replied[inside]).predict_proba(X)[:, 1]
    return first, second


def redrawn(
    tables: ObservedTables, prob: tuple[FloatArray, FloatArray], rng: np.random.Generator
) -> ObservedTables:
    """Return a bootstrap population with both stages drawn by given probabilities."""
    rows = rng.integers(tables.clients.height, size=tables.clients.height)
    taken = tables.taken(rows)
    enrolled = rng.random(len(rows)) < prob[0][rows]
    replied = enrolled & (rng.random(len(rows)) < prob[1][rows])
    assert isinstance(taken.replies, RecordedReplies)
    return replace(
        taken,
        clients=taken.clients.with_columns(pl.Series(ENROLLED, enrolled)),
        replies=replace(taken.replies, replied=replied[None]),
    )


def coverage(tables: ObservedTables, populations: int, *, seed: int = 0) -> dict[str, Any]:
    """Return errors and coverage over bootstrap populations, with selection kept and redrawn."""
    prob = fitted_probabilities(tables)
    kept: list[Estimated] = []
    drawn: list[Estimated] = []
    for k in range(populations):
        kept += estimates(tables.resampled(np.random.default_rng([seed, k, 0])))
        drawn += estimates(redrawn(tables, prob, np.random.default_rng([seed, k, 1])))
    return {
        "populations": populations,
        "observed": _summary(kept, populations),
        "redrawn": _summary(drawn, populations),
    }


def _summary(found: list[Estimated], populations: int) -> list[dict[str, Any]]:
    out = []
    for outcome in OUTCOMES:
        for estimator in ESTIMATORS:
            part = [x for x in found if (x.outcome, x.estimator) == (outcome, estimator)]
            errors = np.array([x.error for x in part])
            bias = float(errors.mean())
            centred = [x.low <= x.truth + bias <= x.high for x in part]
            out.append(
                {
                    "outcome": outcome,
                    "estimator": estimator,
                    "bias": bias,
                    "rmse": float(np.sqrt((errors**2).mean())),
                    "sd": float(errors.std(ddof=1)) if populations > 1 else 0.0,
                    "mean_se": float(np.mean([x.se for x in part])),
                    "coverage": float(np.mean([x.holds for x in part])),
                    "coverage_centred": float(np.mean(centred)),
                }
            )
    return out
