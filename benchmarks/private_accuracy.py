"""``python -m benchmarks.private_accuracy``: what private training costs in accuracy.

Calibration as you go by secure sums, on the rounds of benchmarks.regimes: clients weigh themselves,
their vectors are coded as the protocol codes them, and the server steps from the totals. Beside it
stand the same sums without coding, and methods that know all covariates, whose numbers are those of
regimes.json on the same draws. A second table adds noise at stated epsilon, a third shows the
coverage of metrics by secure sums. Numbers go to benchmarks/results/private_accuracy.json, tables
to docs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from threadpoolctl import threadpool_limits

from benchmarks.regimes import REGIMES
from fedipw.combining.memory import MemorySum
from fedipw.errors import InputError
from fedipw.lab.engine.simulation import Federation, Simulation
from fedipw.lab.files import environment
from fedipw.lab.mechanisms import enrollment_draw
from fedipw.lab.testbed import Streams, Testbed
from fedipw.numerics.threads import limit_threads
from fedipw.private.augmentation import TEMPER, PrivateRegression
from fedipw.private.calibration import (
    BalanceMap,
    PrivateCalibration,
    RoundTerms,
    RoundTotals,
    TermLimits,
)
from fedipw.private.metrics import (
    CALIBRATION,
    ERRORS,
    MetricPlan,
    OwnReplies,
    PrivateMetric,
    calibration_contribution,
    error_contribution,
    private_means,
)
from fedipw.private.noise import multiplier_for
from fedipw.private.noisy import NoisyTerms
from fedipw.private.sums import LocalSums, SumRequest, SumResult
from fedipw.weighting.online import OnlineSettings

if TYPE_CHECKING:
    from fedipw.lab.engine.local import RoundWork, Trainer
    from fedipw.lab.scenario import Scenario
    from fedipw.numerics import FloatArray
    from fedipw.weighting.balance import Balance
    from fedipw.weighting.weigher import RoundWeights

HERE = Path(__file__).parent
RESULT = HERE / "results" / "private_accuracy.json"
STATIC = HERE.parent / "docs" / "_static"
REGIMES_RESULT = HERE / "results" / "regimes.json"
ROUNDS = 300
SHOWN = ("testbed", "A", "B", "both-wrong")
BESIDE = (
    "fedavg", "participation-only-hajek", "fedipw", "augmented", "calibrated-online",
    "augmented-online",
)  # fmt: skip
LIMITS = TermLimits(clip=4.0)  # no update of the testbed is that long
NOISY_LIMITS = TermLimits(clip=0.5, largest_weight=4.0)
RADIUS = 3.0  # of standardised columns, main effects alone
DELTA = 1e-5
Summed = Callable[[SumRequest, Sequence["FloatArray"]], SumResult]


def coded(request: SumRequest, vectors: Sequence[FloatArray]) -> SumResult:
    """Return a sum as the protocol makes it, in words of 32 bits."""
    clients = [{request.purpose: lambda _, v=v: v} for v in vectors]
    return LocalSums(clients, minimum=1).sum(request)


def exact(request: SumRequest, vectors: Sequence[FloatArray]) -> SumResult:
    """Return the sum of the same vectors without coding."""
    total = np.sum(np.clip(vectors, -request.bound, request.bound), axis=0)
    return SumResult(total=total, contributors=len(vectors), dropped=0, clipped=0, error=0.0)


@dataclass(eq=False)
class PrivateTraining:
    """A method of a simulation that trains by secure sums: the server's side of every round.

    It takes the place of :class:`~fedipw.lab.engine.Composition`. Base weights are those of the
    weights it reads, before any normalisation: 1, or one over the participation probability, whose
    coefficients clients would be sent.
    """

    weights: str  # whose base it reads: fedavg has equal ones
    balance: BalanceMap
    columns: FloatArray  # standardised, of every client, (N, q)
    summed: Summed
    augmented: bool = False
    main: int = 0  # columns that are covariates
    enrolled: int = 0  # clients; the server knows who is enrolled
    state: PrivateCalibration = field(init=False)
    regression: PrivateRegression | None = None
    cut: list[tuple[int, int, int]] = field(default_factory=list)
    reliance = 1.0
    server = None
    memory_weights = None
    follows_work = True

    def __post_init__(self) -> None:
        self.state = PrivateCalibration.begun(self.balance, OnlineSettings())

    @classmethod
    def of(
        cls, weights: str, balance: Balance, summed: Summed, **more: Any
    ) -> PrivateTraining:
        """Return it before the first round."""
        shown = BalanceMap(names=balance.names, mean=balance.mean, scale=balance.scale)
        return cls(
            weights, shown, balance.standardised(), summed, main=balance.main,
            enrolled=int(balance.enrolled.sum()), **more,
        )  # fmt: skip

    def begin(self, trainer: Trainer, task: RoundWork) -> None:
        """Nothing is to be checked."""

    def terms(self, base: FloatArray, parameters: int) -> RoundTerms:
        """Return what clients are sent; before the first round the unit is the mean base."""
        unit = self.state.unit(float(base.mean()))
        return RoundTerms(
            balance=self.balance, coefficients=self.state.online.coefficients, unit=unit,
            limits=LIMITS, parameters=parameters, augmented=self.augmented,
            temper=TEMPER if self.augmented else 1.0,
        )  # fmt: skip

    def total(self, trainer: Trainer, task: RoundWork, given: RoundWeights) -> MemorySum:
        """Return the step of a round, from the totals alone."""
        updates, base = trainer.updates(task), given.raw
        terms = self.terms(base, updates.shape[1])
        vectors = [
            terms.contribution(float(d), self.columns[i], update)
            for d, i, update in zip(base, task.clients, updates, strict=True)
        ]
        totals = RoundTotals.of(terms, self.summed(terms.request, vectors))
        self.cut.append(totals.cut)
        # rounding of doubles is not among the tolerances of a sum without coding
        fault = totals.fault(terms) if totals.tolerance else ""
        if fault:
            return MemorySum(total=None, note=fault)
        self.state = self.state.after(totals)
        if not self.augmented:
            return MemorySum(total=totals.step)
        if self.regression is None:
            self.regression = PrivateRegression(
                len(self.balance.names), self.main, self.enrolled
            )
        return MemorySum(total=self.regression.corrected(totals))


@dataclass(eq=False)
class NoisyTraining(PrivateTraining):
    """The same with noise in every sum, and with the bounds that noise asks for.

    The clients' shares are drawn at once, from a seed, with the deviation of their sum: a study
    must repeat.
    """

    multiplier: float = 1.0
    fewest: int = 10
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def total(self, trainer: Trainer, task: RoundWork, given: RoundWeights) -> MemorySum:
        """Return the step of a round, from noisy totals."""
        updates, base = trainer.updates(task), given.raw
        noisy = NoisyTerms(
            terms=replace(self.terms(base, updates.shape[1]), limits=NOISY_LIMITS), radius=RADIUS,
            multiplier=self.multiplier, fewest=self.fewest,
        )  # fmt: skip
        total = np.zeros(noisy.parts.length)
        for d, i, update in zip(base, task.clients, updates, strict=True):
            total += noisy.vector(float(d), self.columns[i], update)
        total += noisy.noise.sum_sd(len(updates)) * self.rng.standard_normal(len(total))
        try:
            totals = noisy.read(total, len(updates))
        except InputError as error:
            return MemorySum(total=None, note=str(error))
        self.cut.append(totals.cut)
        self.state = self.state.after(totals)
        return MemorySum(total=totals.step)


class Run:
    """A federation of a regime, drawn as benchmarks.regimes draws it, and methods on its rounds."""

    def __init__(self, scenario: Scenario, balance: str = "rich") -> None:
        self.scenario, self._streams = scenario, Streams.of(scenario.seed)
        drawn = scenario.population.draw(self._streams.population)
        prob = scenario.enrollment(drawn.population)
        population = drawn.population.with_enrolled(
            enrollment_draw(prob, self._streams.enrollment)
        )
        process = scenario.participation.start(
            population, drawn.clients, self._streams.participation
        )
        self.federation = Federation(
            population=population, clients=drawn.clients, participation=process,
            enrollment_prob=prob,
        )  # fmt: skip
        self.balance = scenario.stages(self.federation).balance(balance)

    def rows(self, methods: Mapping[str, PrivateTraining]) -> list[dict[str, Any]]:
        """Train and return the excess loss of each method's tail average and last model."""
        bases = tuple(dict.fromkeys(method.weights for method in methods.values()))
        weighers = replace(self.scenario, methods=bases).weighers(self.federation)
        run = Simulation(
            self.federation, weighers, self.scenario.training.training(self.federation.population),
            self._streams.training, compositions=methods,
        )  # fmt: skip
        run.advance(self.scenario.rounds)
        target, history = self.scenario.objective(self.federation), run.history()
        best = target.minimum().value
        return [
            {
                "method": name,
                "tail": float(target.losses(history.tail_average(name))[0] - best),
                "last": float(target.losses(history.of(name)[-1])[0] - best),
                "replies": float(history.replies.mean()),
                "cut": np.sum(method.cut, axis=0).tolist(),
                "skipped": sum(bool(note) for note in history.note[history.methods.index(name)]),
            }
            for name, method in methods.items()
        ]


def trained(job: tuple[str, int], rounds: int) -> list[dict[str, Any]]:
    """Return a seed's rows of the private methods of a regime, coded and not."""
    name, seed = job
    run = Run(replace(REGIMES[name].scenario, seed=seed, rounds=rounds, methods=("fedavg",)))
    kinds = {
        "": ("fedavg", False),
        ", participation base": ("participation-only-hajek", False),
        ", augmented": ("fedavg", True),
    }
    methods = {
        f"{form}{tag}": PrivateTraining.of(base, run.balance, summed, augmented=augmented)
        for tag, (base, augmented) in kinds.items()
        for form, summed in (("private", coded), ("uncoded", exact))
    }
    return [{"regime": name, "seed": seed, **row} for row in run.rows(methods)]
