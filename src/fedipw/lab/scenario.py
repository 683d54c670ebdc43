"""A scenario: every setting of a simulated run, and the run built from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, final

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from fedipw.errors import InputError
from fedipw.lab.engine import (
    Composition,
    Federation,
    LocalWork,
    MemoryWeights,
    RuleSettings,
    Simulation,
    Training,
    tail_length,
)
from fedipw.lab.gaps import Gaps
from fedipw.lab.mechanisms import (
    DailyParticipation,
    EnrollmentMechanism,
    LogisticEnrollment,
    ParticipationMechanism,
    TraceAvailability,
    WaveParticipation,
    enrollment_draw,
)
from fedipw.lab.mechanisms.base import score_of
from fedipw.lab.recipes import Recipe, recipe_named
from fedipw.lab.streams import Streams
from fedipw.lab.testbed import PopulationModel, Testbed
from fedipw.lab.theory import FederatedLogistic, target_weights
from fedipw.numerics.checks import check_positive
from fedipw.selection import (
    FitWindow,
    ParticipationModel,
    ParticipationSettings,
    enrollment_fit,
)
from fedipw.tables.population import Population
from fedipw.tables.terms import formula_terms, term_of
from fedipw.weighting import Balance, Facts, Target, Weigher
from fedipw.weighting.registry import Method, SourceKind
from fedipw.weighting.schemes import FedAvg, Scheme
from fedipw.weighting.sources import Collapsed, Known, Propensities, TwoStage, Units, Unmodelled

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

    With ``steps_coefficients`` client i does max(1, round(local_steps + Z_i'c)) local steps. With
    ``secure_sum`` the server may see weighted sums only, so methods that read single updates are
    refused; the sum itself is exact here.
    """

    local_steps: int = 1
    step_size: float = 0.5
    batch_size: int | None = None
    server_step: float = 1.0
    l2: float = 0.05
    tail: float = 0.2
    steps_coefficients: Mapping[str, float] = field(default_factory=dict)
    secure_sum: bool = False

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
    population: PopulationModel = field(default_factory=Testbed)
    enrollment: EnrollmentMechanism = field(default_factory=LogisticEnrollment)
    participation: ParticipationMechanism = field(default_factory=DailyParticipation)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    propensity: PropensitySettings = field(default_factory=PropensitySettings)
    rules: RuleSettings = field(default_factory=RuleSettings)

    def __post_init__(self) -> None:
        check_positive(self.rounds, "rounds")
        if self.seed < 0:
            raise InputError(f"seed must be 0 or more, not {self.seed}.")
        tail_length(self.rounds, self.training.tail)
        for name in self.methods:
            self._check(recipe_named(name))
        if len(set(self.methods)) != len(self.methods):
            raise InputError(f"Each method can be run once, not {', '.join(self.methods)}.")

    def _check(self, recipe: Recipe) -> None:
        """Raise if a method does not go with the other settings."""
        if self.training.secure_sum and recipe.memory is not None:
            raise InputError(
                f"{recipe.name} keeps each client's latest vector ({recipe.memory}), and a secure "
                "sum shows the server none of them, only their weighted sum. Choose a method "
                "without memory, or leave secure_sum out."
            )
        if self.trim is not None and not recipe.weighs_replies:
            raise InputError(
                f"trim cuts the weights of replies, and {recipe.name} has none: {recipe.memory} "
                "combines by memory. Leave trim out, or the method."
            )

    @property
    def has_limits(self) -> bool:
        """Whether limits can be computed: not from observed replies, nor from reply histories."""
        observed = isinstance(self.participation, TraceAvailability | WaveParticipation)
        return not (observed or self.propensity.history)

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
        built = _Built(self, federation)
        return Simulation(
            federation,
            built.weighers(),
            self.training.training(population),
            streams.training,
            compositions=built.compositions(),
            limits_from=self.rounds // 2 + 1 if limits else None,
        )

    def settings(self) -> dict[str, Any]:
        """Return every setting as plain values, for records and fingerprints."""
        named = {
            **asdict(self),
            "participation_kind": type(self.participation).__name__,
            "population_kind": type(self.population).__name__,
        }
        plain: dict[str, Any] = json.loads(
            json.dumps(named, sort_keys=True, default=lambda v: getattr(v, "value", str(v)))
        )
        return plain

    def objective(self, federation: Federation) -> FederatedLogistic:
        """Return the target objective F of the drawn population."""
        by_sample = self.target is Target.SAMPLE
        weights = target_weights(federation.rows, by_sample=by_sample)
        return FederatedLogistic(federation.rows, self.training.l2, weights)


@final
class _Built:
    """The weighers and compositions of a scenario's methods."""

    def __init__(self, scenario: Scenario, federation: Federation) -> None:
        self._scenario, self._federation = scenario, federation
        self._recipes = [recipe_named(name) for name in scenario.methods]
        self._facts = _facts(scenario, federation, [r.method for r in self._recipes])
        self._schemes: dict[str, Scheme] = {}
        self._enrollment_prob: FloatArray | None = None

    def weighers(self) -> list[Weigher]:
        """Return one weigher for each kind of probabilities the methods need."""
        weighers = []
        for kind in SourceKind:
            mine = [r for r in self._recipes if r.source is kind]
            if mine:
                source = self._source(kind, any(r.method.uses_enrollment for r in mine))
                schemes = {r.weighting: self._reply_scheme(r) for r in mine}
                weighers.append(Weigher(source, schemes, trim=self._scenario.trim))
        return weighers

    def compositions(self) -> dict[str, Composition]:
        """Return how each method trains."""
        start = np.zeros(self._federation.rows.n_parameters)
        rules = self._scenario.rules
        return {
            r.name: Composition.of(r, rules, start, self._memory_weights(r) if r.memory else None)
            for r in self._recipes
        }

    def _scheme(self, method: Method) -> Scheme:
        """Return a weighting's scheme, made once however many methods share it."""
        if method.name not in self._schemes:
            made = method.scheme_for(self._facts, self._scenario.target)
            self._schemes[method.name] = made
        return self._schemes[method.name]

    def _reply_scheme(self, recipe: Recipe) -> Scheme:
        """Return the scheme of a round's replies: a plain mean where memory does the weighing."""
        return self._scheme(recipe.method) if recipe.weighs_replies else FedAvg()

    def _memory_weights(self, recipe: Recipe) -> MemoryWeights:
        kind, fitted = recipe.method.source, recipe.method.uses_enrollment
        return MemoryWeights.of(self._scheme(recipe.method), self._units(kind, fitted))

    def _units(self, kind: SourceKind, fitted: bool) -> Units:
        """Return the clients with the enrollment probabilities of a source, fitted if needed."""
        population, truth = self._federation.population, self._federation.enrollment_prob
        prob = np.ones(population.size)
        if kind is SourceKind.KNOWN:
            if truth is None:
                raise InputError("The oracle needs true enrollment probabilities.")
            prob = truth
        elif kind in {SourceKind.TWO_STAGE, SourceKind.GAPS} and fitted:
            prob = self._fitted()
        return Units(
            unit_ids=population.unit_ids,
            sample_counts=self._federation.clients.counts,
            enrolled=population.enrolled,
            enrollment_prob=prob,
            static=population.matrix(),
        )

    def _fitted(self) -> FloatArray:
        """Return fitted enrollment probabilities, (N,), fitted once."""
        if self._enrollment_prob is None:
            settings = self._scenario.propensity
            self._enrollment_prob = enrollment_fit(
                self._federation.population,
                settings.enrollment_columns,
                classifier=settings.classifier.estimator(),
                folds=settings.folds,
                rng=_folding(self._scenario, "enrollment"),
            ).prob
        return self._enrollment_prob

    def _source(self, kind: SourceKind, fitted: bool) -> Propensities:
        units = self._units(kind, fitted)
        if kind is SourceKind.NONE:
            return Unmodelled(units)
        if kind is SourceKind.KNOWN:
            return Known(units)
        if kind is SourceKind.GAPS:
            return Gaps(units, self._scenario.rules.fedau.cutoff)
        if kind is SourceKind.COLLAPSED:
            return Collapsed(units, self._participation(units.static, "collapsed"))
        static = units.static[units.enrolled]
        return TwoStage(units, self._participation(static, "participation"))

    def _participation(self, static: FloatArray, stage: str) -> ParticipationModel:
        settings = self._scenario.propensity
        how = ParticipationSettings(
            window=settings.window,
            classifier=settings.classifier.estimator(),
            folds=settings.folds,
            per_coefficient=settings.per_coefficient,
            history=settings.history,
        )
        names, columns = (
            self._federation.population.covariates,
            self._federation.participation.columns,
        )
        return ParticipationModel(static, names, columns, how, _folding(self._scenario, stage))


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


def _folding(scenario: Scenario, stage: str) -> np.random.Generator:
    """Return the chance of a stage's folds, whichever methods run."""
    return np.random.default_rng([scenario.seed, *stage.encode()])
