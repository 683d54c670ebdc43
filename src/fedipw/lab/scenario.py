"""A scenario: every setting of a simulated run, and the run built from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np
import polars as pl

from fedipw.combining.memory import MemoryWeights
from fedipw.combining.tail import tail_length
from fedipw.errors import InputError
from fedipw.lab.engine import (
    Composition,
    Federation,
    LocalWork,
    Regressed,
    RuleSettings,
    Simulation,
    Training,
)
from fedipw.lab.gaps import Gaps, ReplyShares
from fedipw.lab.invitations import RoundInvitations, SimulatedInvitations
from fedipw.lab.mechanisms import (
    DailyParticipation,
    EnrollmentMechanism,
    LogisticEnrollment,
    ParticipationMechanism,
    TraceAvailability,
    enrollment_draw,
)
from fedipw.lab.mechanisms.base import score_of
from fedipw.lab.observed import ObservedSource
from fedipw.lab.real import WaveParticipation
from fedipw.lab.recipes import Recipe, recipe_named
from fedipw.lab.testbed import PopulationDraw, PopulationModel, Streams, Testbed
from fedipw.lab.theory import FederatedLogistic, target_weights
from fedipw.numerics.checks import check_positive, check_probability
from fedipw.selection.classifiers import Estimator, estimator_named
from fedipw.selection.coded import TableSettings
from fedipw.selection.enrollment import (
    CLIENTS_PER_MOMENT,
    BalanceColumns,
    Needs,
    TableEnrollment,
    rich_design,
)
from fedipw.selection.participation import Participation, ParticipationSettings, Window, panel
from fedipw.selection.steps import REPLY_COLUMNS, Clock, Formulas, participation_steps
from fedipw.tables.columns import ENROLLED, INVITE_PROB, INVITED
from fedipw.tables.design import bound_design
from fedipw.tables.ledger import Round
from fedipw.tables.population import Members, Population
from fedipw.weighting.balance import Balance
from fedipw.weighting.invitations import PROPORTIONAL, InvitationDesign
from fedipw.weighting.methods import method_named
from fedipw.weighting.pipeline import Method, NoGuard, Probabilities, Regression, Weighing
from fedipw.weighting.sources import (
    CollapsedParticipation,
    NoParticipation,
    ParticipationSource,
    TrueParticipation,
)
from fedipw.weighting.weigher import EnrollmentState, FixedEnrollment, Weigher

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray, IntArray

PAPER_METHODS = ("fedavg", "participation-only", "fedipw", "oracle")


class Target(Enum):
    """What the target objective averages over."""

    CLIENT = "client"
    SAMPLE = "sample"


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
    """How both stages are estimated.

    ``enrollment`` and ``participation`` are formulas, of all covariates by default;
    ``enrollment_columns`` names columns instead of a formula. ``classifier`` is any that
    ``fedipw weights --classifier`` takes; it is cross-fitted where ``folds`` are given.
    Of past rounds only the ``last`` are fitted on, or older ones count less by ``decay``;
    ``day_length`` rounds are a day, for the clock. With ``known_participation`` true probabilities
    take the place of the participation model, while enrollment is still fitted.
    ``balance`` is a formula of the terms that calibrated and GREG methods balance, such as
    ``z1 + z2 + z2**2``; the enrollment model's by default.
    """

    window: Window = Window.PAST
    last: int | None = None
    decay: float = 1.0
    day_length: float = 24.0
    known_participation: bool = False
    classifier: str = "logistic"
    folds: int | None = None
    calibration: str | None = None
    per_coefficient: float = 10.0
    history: bool = False
    enrollment: str = "."
    participation: str = "."
    enrollment_columns: Sequence[str] | None = None
    balance: str | None = None

    def __post_init__(self) -> None:
        self.fitting(self.estimator(0))
        if self.window is Window.POOLED:
            raise InputError(
                "The pooled fit reads rounds to come, and a simulation weighs them one by one: use "
                "the window past or same-round."
            )
        if self.enrollment_columns is not None and self.enrollment != ".":
            raise InputError("Give enrollment as a formula or as columns, not both.")

    def estimator(self, seed: int | Sequence[int]) -> Estimator:
        """Return how probabilities are made of rows; ``seed`` is of the folds."""
        return estimator_named(
            self.classifier, folds=self.folds or 0, calibration=self.calibration, seed=seed
        )

    def fitting(self, estimator: Estimator) -> ParticipationSettings:
        """Return how participation is fitted, anew in each round."""
        return ParticipationSettings(
            window=self.window,
            last=self.last,
            decay=self.decay,
            clock=Clock(day_length=self.day_length),
            refit_every=1,
            per_coefficient=self.per_coefficient,
            estimator=estimator,
        )

    @property
    def reads_history(self) -> bool:
        """Whether participation depends on former replies."""
        named = set(re.findall(r"\w+", self.participation))
        return self.history or not named.isdisjoint(REPLY_COLUMNS)

    def enrollment_formula(self, population: Population) -> str:
        """Return what enrollment depends on."""
        if self.enrollment_columns is None:
            return self.enrollment
        population.require(self.enrollment_columns)
        if not self.enrollment_columns:
            raise InputError("Enrollment needs at least one covariate.")
        return " + ".join(f"`{c.replace('`', '``')}`" for c in self.enrollment_columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Population, selection, training and methods of one simulated run.

    The mechanisms of ``enrollment`` and ``participation`` are not used where the population comes
    with its selection (:class:`~fedipw.lab.observed.ObservedSource`).
    """

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
    invitations: SimulatedInvitations | None = None  # all enrolled are asked if none

    def __post_init__(self) -> None:
        check_positive(self.rounds, "rounds")
        if self.seed < 0:
            raise InputError(f"seed must be 0 or more, not {self.seed}.")
        tail_length(self.rounds, self.training.tail)
        for name in self.methods:
            self._check(recipe_named(name))
        if len(set(self.methods)) != len(self.methods):
            raise InputError(f"Each method can be run once, not {', '.join(self.methods)}.")
        if self.invitations is not None and self.invitations.learns:
            names = [recipe_named(name).weighting for name in self.methods]
            if self.invitations.method not in names:
                raise InputError(
                    f"Invitations by {self.invitations.method} follow what it learns from replies: "
                    "add it to the methods, or name one that needs no replies, such as efficient."
                )

    def _check(self, recipe: Recipe) -> None:
        """Raise if a method does not go with the other settings."""
        if self.training.secure_sum and recipe.memory and recipe.intermittent is None:
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
        return not (observed or self.is_observed or self.propensity.reads_history)

    @property
    def is_observed(self) -> bool:
        """Whether both stages come with the population, so that none is simulated."""
        return isinstance(self.population, ObservedSource)

    def simulation(self, *, limits: bool = True) -> Simulation:
        """Return the run before its first round.

        With ``limits`` it collects limit weights over the second half of the rounds, where true
        probabilities are known.
        """
        streams = Streams.of(self.seed)
        drawn = self.population.draw(streams.population)
        federation = self._federation(drawn, streams)
        built = _Methods(self, federation)
        weighers = built.weighers()
        return Simulation(
            replace(federation, invitations=built.invitations(weighers)),
            weighers,
            self.training.training(federation.population),
            streams.training,
            compositions=built.compositions(np.zeros(drawn.clients.n_parameters)),
            limits_from=self.rounds // 2 + 1 if limits else None,
        )

    def _federation(self, drawn: PopulationDraw, streams: Streams) -> Federation:
        """Return the clients with both stages: as observed, or simulated."""
        if drawn.observed is not None:
            return Federation(
                population=drawn.population.with_enrolled(drawn.observed.enrolled),
                clients=drawn.clients,
                participation=drawn.observed.process,
            )
        prob = self.enrollment(drawn.population)
        population = drawn.population.with_enrolled(enrollment_draw(prob, streams.enrollment))
        return Federation(
            population=population,
            clients=drawn.clients,
            participation=self.participation.start(
                population, drawn.clients, streams.participation
            ),
            enrollment_prob=prob,
        )

    def weighers(self, federation: Federation) -> list[Weigher]:
        """Return the weighers of the methods for any clients, such as those of a network."""
        return _Methods(self, federation).weighers()

    def compositions(self, federation: Federation, start: FloatArray) -> dict[str, Composition]:
        """Return how the methods train a model of any kind, from ``start`` (P,)."""
        return _Methods(self, federation).compositions(start)

    def stages(self, federation: Federation) -> Stages:
        """Return how both stages are fitted."""
        return Stages(self.propensity, federation, self.seed, self.invitations is not None)

    def settings(self) -> dict[str, Any]:
        """Return every setting as plain values, for records and fingerprints."""
        named = {
            **asdict(self),
            "participation_kind": type(self.participation).__name__,
            "population_kind": type(self.population).__name__,
        }
        if self.is_observed:
            for name in ("enrollment", "participation", "participation_kind"):
                del named[name]
        if self.invitations is None:  # as before there were any: checkpoints go on
            del named["invitations"]
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
class Stages:
    """Both stages of selection as they are fitted on a drawn population."""

    def __init__(
        self,
        settings: PropensitySettings,
        federation: Federation,
        seed: int,
        invited: bool = False,
    ) -> None:
        self._settings, self._federation, self._seed = settings, federation, seed
        self._invited = invited  # whether rounds say who was invited, with which probability

    @cached_property
    def enrollment(self) -> TableEnrollment:
        """Enrollment, by its formula."""
        settings, population = self._settings, self._federation.population
        return TableEnrollment(
            population,
            settings.enrollment_formula(population),
            settings=TableSettings(estimator=settings.estimator([self._seed, *b"enrollment"])),
        )

    @cached_property
    def enrollment_prob(self) -> FloatArray:
        """Fitted enrollment probabilities, (N,)."""
        population, stage = self._federation.population, self.enrollment
        stage.require(Needs(method="enrollment", probabilities=True))
        everyone = np.ones(population.members.size, dtype=np.bool_)
        model = stage.fitted(everyone, required=True).model
        assert model is not None
        prob = stage.everyone_prob(model)
        check_probability(
            prob[population.enrolled], "fitted enrollment probability of enrolled clients"
        )
        return prob

    def balance(self, kind: str) -> Balance:
        """Return balance columns of every client and their means: main, rich or wide."""
        population, settings = self._federation.population, self._settings
        design = self.enrollment.coded.design
        if kind in CLIENTS_PER_MOMENT:
            design = rich_design(self.enrollment.coded, population.enrolled_size, kind)
        elif settings.balance is not None:
            design = bound_design(settings.balance, population.frame.lazy(), population.covariates)
        matrix = design.rows(population.frame, "population table").columns.T.copy()
        main = len(self.enrollment.coded.design.terms) if kind in CLIENTS_PER_MOMENT else None
        columns = BalanceColumns(
            names=design.names, matrix=matrix, mean=matrix.mean(axis=0), leading=main
        )
        return Balance.of(columns, population.enrolled, population.listed)

    def participation(self, *, collapsed: bool = False) -> Participation:
        """Return the participation learner.

        Its rows are in a panel, since rounds list the same clients, unless only some are invited.
        ``collapsed`` is one model over everybody, enrolled, invited or not.
        """
        settings, population = self._settings, self._federation.population
        members = Members(population.frame.drop(ENROLLED))
        rows = np.arange(members.size) if collapsed else np.flatnonzero(population.enrolled)
        names = self._federation.participation.columns
        known = pl.DataFrame({n: np.zeros(len(rows)) for n in names})
        among = self._invited and not collapsed
        if among:
            flags = {INVITED: np.ones(len(rows), dtype=np.bool_), INVITE_PROB: np.ones(len(rows))}
            known = pl.DataFrame(flags).hstack(known)
        first = Round(index=1, rows=rows, table=known)
        formulas = Formulas(reply=settings.participation, history=settings.history)
        stage = b"collapsed" if collapsed else b"participation"
        how = settings.fitting(settings.estimator([self._seed, *stage]))
        steps = participation_steps(first, members, formulas)
        return Participation(members, steps, how, store=None if among else panel(how.estimator))


_FITTED_ENROLLMENT = frozenset({Probabilities.FITTED, Probabilities.GAPS, Probabilities.RATES})


@final
class _Methods:
    """The weighers and compositions of a scenario's methods."""

    def __init__(self, scenario: Scenario, federation: Federation) -> None:
        self._scenario, self._federation = scenario, federation
        self._recipes = [recipe_named(name) for name in scenario.methods]
        self._stages = scenario.stages(federation)
        self._weighings: dict[str, Weighing] = {}

    def weighers(self) -> list[Weigher]:
        """Return one weigher for each kind of probabilities the methods need."""
        weighers = []
        for kind in Probabilities:
            mine = [r for r in self._recipes if r.source is kind]
            if mine:
                fitted = any(r.method.uses_enrollment for r in mine)
                state = FixedEnrollment(self._state(kind, fitted))
                methods = {r.weighting: self._reply_method(r) for r in mine}
                weighers.append(Weigher(state, self._source(kind), methods))
        return weighers

    def compositions(self, start: FloatArray) -> dict[str, Composition]:
        """Return how each method trains, from a model (P,)."""
        rules = self._scenario.rules
        return {
            r.name: Composition.of(
                r,
                rules,
                start,
                self._memory_weights(r) if r.memory else None,
                self._regressed(r.regression, len(start)) if r.regression else None,
            )
            for r in self._recipes
        }

    def invitations(self, weighers: Sequence[Weigher]) -> RoundInvitations | None:
        """Return whom the server invites; none if all enrolled clients are asked."""
        how, population = self._scenario.invitations, self._federation.population
        if how is None:
            return None
        design = InvitationDesign(how, self._scenario.seed)
        return RoundInvitations(
            design, population.unit_ids, population.enrolled, self._followed(how, weighers)
        )

    def _followed(
        self, how: SimulatedInvitations, weighers: Sequence[Weigher]
    ) -> Callable[[], Weighing]:
        """Return how to find the weights that invitations follow."""
        if how.learns:
            (weigher,) = [w for w in weighers if how.method in w.methods]
            return lambda: weigher.weighing_at(how.method, self._federation.population.enrolled)
        method = how.scores_of
        kind = method.base.probabilities

        def once() -> Weighing:
            return method.at(self._state(kind, method.uses_enrollment))

        return cache(once)

    def _regressed(self, how: Regression, size: int) -> Regressed:
        return Regressed.of(self._balances[how.balance], how, size)

    def _method(self, recipe: Recipe) -> Method:
        """Return a weighting, for the mean over clients or over samples."""
        by_samples = self._scenario.target is Target.SAMPLE
        return recipe.method.by_samples() if by_samples else recipe.method

    def _reply_method(self, recipe: Recipe) -> Method:
        """Return the weighting of a round's replies: a plain mean where memory does it all."""
        if not recipe.weighs_replies:
            return method_named("fedavg")
        return self._method(recipe).trimmed(self._scenario.trim)

    def _memory_weights(self, recipe: Recipe) -> MemoryWeights:
        """Return a weighting as memory uses it, calibrated once however many methods share it."""
        name, method = recipe.method.name, replace(self._method(recipe), guard=NoGuard())
        if name not in self._weighings:
            kind = method.base.probabilities
            self._weighings[name] = method.at(self._state(kind, method.uses_enrollment))
        return MemoryWeights.of(self._weighings[name])

    @cached_property
    def _balances(self) -> dict[str, Balance]:
        how, methods = self._scenario.invitations, [r.method for r in self._recipes]
        if how is not None and how.kind == PROPORTIONAL:
            methods.append(how.scores_of)
        kinds = frozenset().union(*(method.needs.balance for method in methods))
        return {kind: self._stages.balance(kind) for kind in sorted(kinds)}

    def _state(self, kind: Probabilities, fitted: bool) -> EnrollmentState:
        """Return enrollment with the probabilities of a kind, fitted if needed."""
        population, truth = self._federation.population, self._federation.enrollment_prob
        prob = np.ones(len(population.unit_ids))
        if kind is Probabilities.TRUE:
            if truth is None:
                raise InputError("The oracle needs true enrollment probabilities.")
            prob = truth
        elif fitted and kind in _FITTED_ENROLLMENT:
            prob = self._stages.enrollment_prob
        return EnrollmentState(
            unit_ids=population.unit_ids,
            sample_counts=self._federation.clients.counts,
            enrolled=population.enrolled,
            prob=prob,
            population_size=float(len(prob)),
            balances=self._balances,
            true_prob=truth,
        )

    def _source(self, kind: Probabilities) -> ParticipationSource:
        size = len(self._federation.population.unit_ids)
        made: Mapping[Probabilities, Callable[[], ParticipationSource]] = {
            Probabilities.NONE: NoParticipation,
            Probabilities.TRUE: TrueParticipation,
            Probabilities.GAPS: lambda: Gaps(size, self._scenario.rules.fedau.cutoff),
            Probabilities.RATES: lambda: ReplyShares(size),
            Probabilities.COLLAPSED: lambda: CollapsedParticipation(
                self._stages.participation(collapsed=True), np.arange(size)
            ),
            Probabilities.FITTED: self._fitted_source,
        }
        return made[kind]()

    def _fitted_source(self) -> ParticipationSource:
        """Return the learner, or the truth in its place where a scenario says so."""
        known = self._scenario.propensity.known_participation
        return TrueParticipation() if known else self._stages.participation()
