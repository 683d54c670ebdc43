"""A scenario: every setting of a simulated run, and the run built from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from fedipw.data.mechanisms import (
    DailyParticipation,
    EnrollmentMechanism,
    LogisticEnrollment,
    ParticipationMechanism,
    TraceAvailability,
    enrollment_draw,
)
from fedipw.data.mechanisms.base import score_of
from fedipw.data.population import Population
from fedipw.data.streams import Streams
from fedipw.data.terms import formula_terms, term_of
from fedipw.data.testbed import Testbed
from fedipw.engine import Federation, LocalWork, Simulation, Training, tail_length
from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive
from fedipw.propensity import (
    FitWindow,
    ParticipationModel,
    ParticipationSettings,
    enrollment_fit,
)
from fedipw.theory import FederatedLogistic, target_weights
from fedipw.weights import Balance, Facts, Target, Weigher, method_named
from fedipw.weights.registry import Method, SourceKind
from fedipw.weights.schemes import enrollment_weights_of
from fedipw.weights.sources import Collapsed, Known, Propensities, TwoStage, Units, Unmodelled

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, IntArray

PAPER_METHODS = ("fedavg", "participation-only", "fedipw", "oracle")


class Classifier(Enum):
    """Named propensity classifiers; any scikit-learn classifier serves in Python."""

    LOGISTIC = "logistic"
    BOOSTING = "boosting"

    def estimator(self) -> Any:
        """Return the classifier, none for the default."""
        if self is Classifier.BOOSTING:
            return HistGradientBoostingClassifier(random_state=0)  # the same seed, the same bytes
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Local work, server step and the objective's penalty.

    With ``steps_coefficients`` client i does max(1, round(local_steps + Z_i'c)) local steps.
    """

    local_steps: int = 1
    step_size: float = 0.5
    batch_size: int | None = None
    server_step: float = 1.0
    l2: float = 0.05
    tail: float = 0.2
    steps_coefficients: Mapping[str, float] = field(default_factory=dict)

    def training(self, population: Population) -> Training:
        """Return the engine's settings for a population."""
        return Training(
            work=LocalWork(
                steps=self.local_steps, step_size=self.step_size, batch_size=self.batch_size
            ),
            server_step=self.server_step,
            l2=self.l2,
            steps=self._steps(population),
        )

    def _steps(self, population: Population) -> IntArray | None:
        if not self.steps_coefficients:
            return None
        wished = np.rint(self.local_steps + score_of(population, self.steps_coefficients))
        return np.maximum(1, wished).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PropensitySettings:
    """How both stages are estimated; ``enrollment_columns`` are all covariates by default.

    ``balance`` is a formula of the terms that calibrated and GREG methods balance, such as
    ``z1 + z2 + z2**2``; the enrollment columns by default.
    """

    window: FitWindow = FitWindow.PAST
    classifier: Classifier = Classifier.LOGISTIC
    folds: int | None = None
    per_coefficient: float = 10.0
    history: bool = False
    enrollment_columns: Sequence[str] | None = None
    balance: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Population, selection, training and methods of one simulated run."""

    seed: int = 0
    rounds: int = 600
    methods: Sequence[str] = PAPER_METHODS
    target: Target = Target.CLIENT
    trim: float | None = None
    population: Testbed = field(default_factory=Testbed)
    enrollment: EnrollmentMechanism = field(default_factory=LogisticEnrollment)
    participation: ParticipationMechanism = field(default_factory=DailyParticipation)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    propensity: PropensitySettings = field(default_factory=PropensitySettings)

    def __post_init__(self) -> None:
        check_positive(self.rounds, "rounds")
        if self.seed < 0:
            raise InputError(f"seed must be 0 or more, not {self.seed}.")
        tail_length(self.rounds, self.training.tail)
        for name in self.methods:
            method_named(name)
        if len(set(self.methods)) != len(self.methods):
            raise InputError(f"Each method can be run once, not {', '.join(self.methods)}.")

    @property
    def has_limits(self) -> bool:
        """Whether limits can be computed: not from a trace, nor from reply histories."""
        return not (isinstance(self.participation, TraceAvailability) or self.propensity.history)

    def simulation(self, *, limits: bool = True) -> Simulation:
        """Return the run before its first round.

        With ``limits`` it collects limit weights over the second half of the rounds, where true
        probabilities are known.
        """
        streams = Streams.of(self.seed)
        drawn = self.population.draw(streams.population)
        prob = self.enrollment(drawn.population)
        enrolled = enrollment_draw(prob, streams.enrollment)
        population = drawn.population.with_enrolled(enrolled)
        process = self.participation.start(population, drawn.clients, streams.participation)
        federation = Federation(
            population=population,
            clients=drawn.clients,
            participation=process,
            enrollment_prob=prob,
        )
        weighers = _weighers(self, federation)
        return Simulation(
            federation,
            weighers,
            self.training.training(population),
            streams.training,
            limits_from=self.rounds // 2 + 1 if limits else None,
            memories={
                name: enrollment_weights_of(scheme)
                for weigher in weighers
                for name, scheme in weigher.schemes.items()
                if method_named(name).memory
            },
        )

    def settings(self) -> dict[str, Any]:
        """Return every setting as plain values, for records and fingerprints."""
        named = {**asdict(self), "participation_kind": type(self.participation).__name__}
        plain: dict[str, Any] = json.loads(
            json.dumps(named, sort_keys=True, default=lambda v: getattr(v, "value", str(v)))
        )
        return plain

    def objective(self, federation: Federation) -> FederatedLogistic:
        """Return the target objective F of the drawn population."""
        by_sample = self.target is Target.SAMPLE
        weights = target_weights(federation.clients, by_sample=by_sample)
        return FederatedLogistic(federation.clients, self.training.l2, weights)


def _weighers(scenario: Scenario, federation: Federation) -> list[Weigher]:
    """Return one weigher for each kind of probabilities the methods need."""
    methods = [method_named(name) for name in scenario.methods]
    facts = _facts(scenario, federation, methods)
    weighers = []
    for kind in SourceKind:
        mine = [m for m in methods if m.source is kind]
        if mine:
            source = _source(kind, mine, scenario, federation)
            schemes = {m.name: m.scheme_for(facts, scenario.target) for m in mine}
            weighers.append(Weigher(source, schemes, trim=scenario.trim))
    return weighers


def _facts(scenario: Scenario, federation: Federation, methods: Sequence[Method]) -> Facts:
    """Return sizes, and the means methods need: those of the table's enrollment columns."""
    population = federation.population
    chosen = scenario.propensity.enrollment_columns
    columns = population.covariates if chosen is None else tuple(chosen)
    population.require(columns)
    needs = {m.balanced for m in methods}
    formula = scenario.propensity.balance
    if formula is None:
        terms = tuple(term_of(name, population.frame.schema) for name in columns)
    else:
        terms = formula_terms(formula, population.frame)
    return Facts(
        population.size,
        population.enrolled_size,
        balance=Balance.of(population, terms) if "balance" in needs else None,
        rich=Balance.rich(population, columns) if "rich" in needs else None,
        enrollment_prob=federation.enrollment_prob,
    )


def _source(
    kind: SourceKind,
    methods: Sequence[Method],
    scenario: Scenario,
    federation: Federation,
) -> Propensities:
    population = federation.population
    if kind is SourceKind.NONE:
        return Unmodelled(_units(federation, np.ones(population.size)))
    if kind is SourceKind.KNOWN:
        if federation.enrollment_prob is None:
            raise InputError("The oracle needs true enrollment probabilities.")
        return Known(_units(federation, federation.enrollment_prob))
    settings = scenario.propensity
    participation = ParticipationSettings(
        window=settings.window,
        classifier=settings.classifier.estimator(),
        folds=settings.folds,
        per_coefficient=settings.per_coefficient,
        history=settings.history,
    )
    static, names = population.matrix(), population.covariates
    columns = federation.participation.columns
    if kind is SourceKind.COLLAPSED:
        units = _units(federation, np.ones(population.size))
        rng = _folding(scenario, "collapsed")
        return Collapsed(units, ParticipationModel(static, names, columns, participation, rng))
    prob = np.ones(population.size)
    if any(m.uses_enrollment for m in methods):
        prob = enrollment_fit(
            population,
            settings.enrollment_columns,
            classifier=settings.classifier.estimator(),
            folds=settings.folds,
            rng=_folding(scenario, "enrollment"),
        ).prob
    rng = _folding(scenario, "participation")
    model = ParticipationModel(static[population.enrolled], names, columns, participation, rng)
    return TwoStage(_units(federation, prob), model)


def _folding(scenario: Scenario, stage: str) -> np.random.Generator:
    """Return the chance of a stage's folds, whichever methods run."""
    return np.random.default_rng([scenario.seed, *stage.encode()])


def _units(federation: Federation, enrollment_prob: FloatArray) -> Units:
    population = federation.population
    return Units(
        unit_ids=population.unit_ids,
        sample_counts=federation.clients.counts,
        enrolled=population.enrolled,
        enrollment_prob=enrollment_prob,
        static=population.matrix(),
    )
