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
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import polars as pl
from threadpoolctl import threadpool_limits

from benchmarks.regimes import REGIMES
from fedipw.combining.memory import MemorySum
from fedipw.errors import FedIPWError, InputError
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
from fedipw.private.newton import (
    PARTICIPATION,
    ClientRows,
    OncePerPass,
    RowPlan,
    private_fit,
)
from fedipw.private.noise import multiplier_for
from fedipw.private.noisy import NoisyTerms
from fedipw.private.quantise import FixedPointCode
from fedipw.private.sums import LocalSums, SumRequest, SumResult
from fedipw.selection.logistic import logistic_fit
from fedipw.tables.partitions import Block, Blocks
from fedipw.weighting.online import OnlineSettings

if TYPE_CHECKING:
    from fedipw.lab.engine.composition import Composition
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
SIZES = {1_000: 100, 10_000: 1_000}  # population, and fewest contributors of a noisy sum
EPSILONS = (2.0, 8.0, 32.0)
NOISY_LIMITS = TermLimits(clip=0.5, largest_weight=4.0)
RADIUS = 3.0  # of standardised columns, main effects alone
UNCODED = 2  # seeds on which sums without coding are trained by too
DELTA = 1e-5
Summed = Callable[[SumRequest, "FloatArray"], SumResult]


def coded(request: SumRequest, vectors: FloatArray) -> SumResult:
    """Return a sum of vectors (m, L) as the protocol makes it, in words of 32 bits, all at once."""
    code = FixedPointCode(bound=request.bound, terms=len(vectors))
    found = code.coded(vectors.ravel())
    words = found.words.reshape(vectors.shape).sum(axis=0, dtype=code.dtype)
    return SumResult(
        total=code.decoded(words), contributors=len(vectors), dropped=0, clipped=found.clipped,
        error=code.error(len(vectors)),
    )  # fmt: skip


def exact(request: SumRequest, vectors: FloatArray) -> SumResult:
    """Return the sum of the same vectors without coding."""
    del request
    return SumResult(
        total=vectors.sum(axis=0), contributors=len(vectors), dropped=0, clipped=0, error=0.0
    )


def client_vectors(
    terms: RoundTerms, base: FloatArray, columns: FloatArray, updates: FloatArray
) -> FloatArray:
    """Return what each client adds to a round (M4), (m, L), all at once; nobody's row is cut."""
    how, m, q = terms.limits, len(base), columns.shape[1]
    most = how.largest_weight * terms.unit
    b = np.clip(columns, -how.largest_column, how.largest_column)
    e = base * np.exp(np.clip(b @ terms.coefficients, -how.largest_exponent, how.largest_exponent))
    norm = np.linalg.norm(updates, axis=1)
    short = updates * np.minimum(1.0, how.clip / norm)[:, None]
    beyond = np.abs(columns).max(axis=1) > how.largest_column
    cut = np.column_stack([e > most, beyond, norm > how.clip]).astype(np.float64)
    e = np.minimum(e, most)[:, None]
    mild, upper = e**terms.temper, np.triu_indices(q)
    cross = e[:, :, None] * b[:, :, None] * short[:, None, :]
    return terms.parts.stacked(
        weight=e, square=e**2, first=e * b, second=e * (b[:, :, None] * b[:, None, :])[:, *upper],
        cut=cut, update=e * short, cross=cross.reshape(m, -1),
        tempered=mild, tempered_square=mild**2, tempered_first=mild * b,
        tempered_update=mild * short,
    )  # fmt: skip


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
    memory_weights = counted = None
    follows_work = True

    def __post_init__(self) -> None:
        self.state = PrivateCalibration.begun(self.balance, OnlineSettings())

    @classmethod
    def of(cls, weights: str, balance: Balance, summed: Summed, **more: Any) -> PrivateTraining:
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
        vectors = client_vectors(terms, base, self.columns[task.clients], updates)
        if len(self.cut) % 50 == 0:  # they are those that clients make themselves
            for k, i in enumerate(task.clients[:5]):
                own = terms.contribution(float(base[k]), self.columns[i], updates[k])
                np.testing.assert_allclose(vectors[k], own, atol=1e-12)
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
            self.regression = PrivateRegression(len(self.balance.names), self.main, self.enrolled)
        return MemorySum(total=self.regression.corrected(totals))


def vector_sum(
    noisy: NoisyTerms, base: FloatArray, columns: FloatArray, updates: FloatArray
) -> FloatArray:
    """Return the sum of the clients' vectors (N6) before noise, (L,), flags of what was cut too."""
    terms, q = noisy.terms, columns.shape[1]
    length, norm = np.linalg.norm(columns, axis=1), np.linalg.norm(updates, axis=1)
    b = columns * np.minimum(1.0, noisy.radius / length)[:, None]
    limit, most = terms.limits.largest_exponent, terms.limits.largest_weight * terms.unit
    e = base * np.exp(np.clip(b @ terms.coefficients, -limit, limit))
    over = {"weight": e > most, "first": length > noisy.radius, "update": norm > terms.limits.clip}
    e = np.minimum(e, most)
    short = updates * np.minimum(1.0, terms.limits.clip / norm)[:, None]
    upper = np.triu_indices(q)
    sums = {
        "weight": np.array([e.sum()]), "first": e @ b,
        "second": ((e[:, None] * b).T @ b)[upper], "update": e @ short,
    }  # fmt: skip
    flags = {name: float(over[name].sum()) if name in over else 0.0 for name in sums}
    return noisy.parts.summed(sums, flags)


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
        total = vector_sum(noisy, base, self.columns[task.clients], updates)
        if not self.cut:  # the sums in bulk are those of the clients' own vectors
            few = [noisy.vector(float(base[k]), self.columns[i], updates[k])
                   for k, i in enumerate(task.clients[:9])]  # fmt: skip
            bulk = vector_sum(noisy, base[:9], self.columns[task.clients[:9]], updates[:9])
            np.testing.assert_allclose(bulk, np.sum(few, axis=0), atol=1e-9)
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
        population = drawn.population.with_enrolled(enrollment_draw(prob, self._streams.enrollment))
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
            self._streams.training, compositions=cast("Mapping[str, Composition]", methods),
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
        if form == "private" or seed < UNCODED
    }
    return [{"regime": name, "seed": seed, **row} for row in run.rows(methods)]


def noisy(job: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """Return a seed's rows with noise at each epsilon, and without any under the same bounds."""
    size, seed = job
    scenario = replace(
        REGIMES["testbed"].scenario, population=Testbed(size=size), seed=seed, rounds=rounds,
        methods=("fedavg",),
    )  # fmt: skip
    run = Run(scenario, "main")
    multipliers = {"no noise": 1e-9} | {
        f"epsilon {e:g}": multiplier_for(e, rounds, DELTA) for e in EPSILONS
    }
    methods: dict[str, PrivateTraining] = {
        name: NoisyTraining.of(
            "fedavg", run.balance, exact, multiplier=z, fewest=SIZES[size],
            rng=np.random.default_rng([seed, k]),
        )
        for k, (name, z) in enumerate(multipliers.items())
    }  # fmt: skip
    rows = run.rows(methods)
    plain = scenario.simulation(limits=False)
    plain.advance(rounds)
    target, history = scenario.objective(plain.federation), plain.history()
    best = target.minimum().value
    rows.append({
        "method": "fedavg",
        "tail": float(target.losses(history.tail_average("fedavg"))[0] - best),
        "last": float(target.losses(history.of("fedavg")[-1])[0] - best),
        "replies": float(history.replies.mean()),
    })  # fmt: skip
    return [
        {"size": size, "seed": seed, "multiplier": multipliers.get(row["method"]), **row}
        for row in rows
    ]


METRICS = (PrivateMetric(name="loss", low=0.0, high=20.0), PrivateMetric(name="wrong", share=True))


def covered(job: tuple[int, int]) -> list[dict[str, Any]]:
    """Return whether intervals by secure sums hold the population's means, for one draw.

    One of the testbed's populations is enrolled and replies in so many rounds of evaluation; each
    client has one value of each metric, the same in all rounds.
    """
    rounds, seed = job
    run = Run(replace(REGIMES["testbed"].scenario, seed=seed, methods=("fedavg",)))
    enrolled, rng = run.federation.population.enrolled, np.random.default_rng([seed, 77])
    draws = [run.federation.participation.advance().replied & enrolled for _ in range(rounds)]
    count = np.sum(draws, axis=0)
    z1, z2 = run.federation.population.matrix(("z1", "z2")).T
    values = np.column_stack([
        np.exp(0.2 * z1 + 0.4 * z2 + 0.4 * rng.standard_normal(len(z1))),
        rng.random(len(z1)) < 1.0 / (1.0 + np.exp(1.0 - 0.5 * z1 - 0.7 * z2)),
    ])  # fmt: skip
    clients = [
        OwnReplies(
            balance=run.balance.matrix[i], values=np.tile(values[i], (count[i], 1)),
            base=np.ones(count[i]),
        )
        for i in np.flatnonzero(count)
    ]  # fmt: skip
    functions = [
        {CALIBRATION: partial(calibration_contribution, own=own),
         ERRORS: partial(error_contribution, own=own)}
        for own in clients
    ]  # fmt: skip
    plan = MetricPlan(
        metrics=METRICS, mean=run.balance.mean, scale=run.balance.scale,
        largest_base=float(rounds), reach=12.0,
    )  # fmt: skip
    try:
        found = private_means(LocalSums(functions, minimum=10, bits=64), plan)
    except FedIPWError as error:
        return [{"rounds": rounds, "seed": seed, "metric": m.name, "failure": str(error)}
                for m in METRICS]  # fmt: skip
    out = []
    for metric, truth, own in zip(METRICS, values.mean(axis=0), values.T, strict=True):
        line, seen = found.estimates[metric.name], np.repeat(own, count)
        half = 1.96 * seen.std() / np.sqrt(len(seen))
        out.append({
            "rounds": rounds, "seed": seed, "metric": metric.name,
            "covered": bool(line.low <= truth <= line.high), "width": line.high - line.low,
            "error": line.estimate - truth, "respondents": len(clients),
            "exchanges": found.exchanges, "effective": line.effective_sample_size,
            "plain": bool(abs(seen.mean() - truth) <= half), "warned": bool(line.warnings),
            "failure": None,
        })  # fmt: skip
    return out


def missing(seed: int) -> list[dict[str, Any]]:
    """Return what a participation fit by secure sums gets wrong where clients never answer.

    A share of the enrolled clients is missing, at random or those that reply least, of the 50
    rounds of which each client has its own rows.
    """
    run, rounds = Run(replace(REGIMES["testbed"].scenario, seed=seed, methods=("fedavg",))), 50
    population = run.federation.population
    ids = np.flatnonzero(population.enrolled)
    Z = population.matrix()[ids]
    draws = [run.federation.participation.advance() for _ in range(rounds)]
    x = np.array([draw.covariates[ids, 0] for draw in draws])
    replied = np.array([draw.replied[ids] for draw in draws])
    known = [draw.participation_prob for draw in draws]
    truth = np.array([prob[ids] for prob in known if prob is not None])
    blocks = [
        Block(
            np.vstack([np.repeat(Z[k][:, None], rounds, axis=1), x[:, k]]),
            replied[:, k].astype(np.int8), np.empty(0),
        )
        for k in range(len(ids))
    ]  # fmt: skip
    names = ("z1", "z2", "z3", "x")
    plan = RowPlan(
        names=names, low=np.array([-1.0, -3.0, -6.0, -8.0]), high=np.array([1.0, 3.0, 6.0, 8.0]),
        most_rows=rounds,
    )  # fmt: skip
    pooled, out = logistic_fit(Blocks.of(blocks), names).checked(), []
    chance, rate = np.random.default_rng([seed, 5]).random(len(ids)), replied.mean(axis=0)
    for who, order in (("at random", chance), ("that reply least", rate + 1e-6 * chance)):
        for share in (0.0, 0.1, 0.3):
            gone = np.argsort(order)[: round(share * len(ids))]
            functions = [
                {} if k in set(gone.tolist()) else {PARTICIPATION: OncePerPass(block)}
                for k, block in enumerate(blocks)
            ]
            sums = LocalSums(functions, minimum=10, bits=64)
            fit = private_fit(ClientRows(sums, plan, clients=len(ids))).fit
            prob = np.concatenate([fit.prob(block.columns) for block in blocks])
            ratio = (truth / prob.reshape(len(ids), rounds).T)[replied]
            out.append({
                "seed": seed, "missing": who, "share": share, "passes": fit.passes,
                "apart": float(np.abs(fit.point - pooled.point).max()),
                "rate": float(fit.selected / fit.rows), "rate_of_all": float(replied.mean()),
                "weight_error": float(np.std(ratio / ratio.mean())),
            })  # fmt: skip
    return out


def _start() -> None:
    limit_threads(1)
    threadpool_limits(1)


def mapped(
    work: Callable[[Any], list[dict[str, Any]]], jobs: Iterable[Any], workers: int
) -> pl.DataFrame:
    """Return the rows of all jobs, shared between processes."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start) as pool:
        return pl.DataFrame(
            [row for part in pool.map(work, jobs) for row in part], infer_schema_length=None
        )


def accuracy_table(found: pl.DataFrame) -> str:
    """Return excess loss by regime: private methods, and others of regimes.json on their draws."""
    saved = pl.DataFrame(
        json.loads(REGIMES_RESULT.read_text())["results"], infer_schema_length=None
    )
    jobs = found.select("regime", "seed").unique()
    beside = saved.join(jobs, on=["regime", "seed"], how="semi").filter(
        pl.col("method").is_in(BESIDE)
    )
    shown = [
        *BESIDE,
        *(m for m in found["method"].unique(maintain_order=True) if "uncoded" not in m),
    ]
    rows = pl.concat([beside.select("regime", "method", "tail"),
                      found.select("regime", "method", "tail")])  # fmt: skip
    names = [n for n in SHOWN if n in set(found["regime"])]
    lines = ["| method | " + " | ".join(REGIMES[n].title for n in names) + " |",
             "|---|" + "---:|" * len(names)]  # fmt: skip
    for method in shown:
        cells = []
        for name in names:
            tails = 1e3 * rows.filter(regime=name, method=method)["tail"].to_numpy()
            cells.append(f"{_short(tails.mean())} ({_short(tails.max())})")
        lines.append(f"| {method if 'private' in method else f'`{method}`'} | "
                     + " | ".join(cells) + " |")  # fmt: skip
    cells = []
    for name in names:
        mine = found.filter(regime=name)
        plain = mine.filter(pl.col("method").str.starts_with("uncoded")).with_columns(
            pl.col("method").str.replace("uncoded", "private")
        )
        apart = mine.join(plain, on=["seed", "method"], suffix="_plain")
        cells.append(
            f"{1e3 * float((apart['tail'] - apart['tail_plain']).abs().to_numpy().max()):.1g}"
        )
    lines.append("| *largest change by coding* | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def noise_table(found: pl.DataFrame) -> str:
    """Return excess loss by epsilon and size."""
    lines = ["| clients | replies a round | FedAvg | private, no noise | "
             + " | ".join(f"epsilon {e:g}" for e in sorted(EPSILONS, reverse=True)) + " |",
             "|---:|---:|" + "---:|" * (2 + len(EPSILONS))]  # fmt: skip
    for size in found["size"].unique(maintain_order=True).to_list():
        mine, cells = found.filter(size=size), []
        for method in ("fedavg", "no noise",
                       *(f"epsilon {e:g}" for e in sorted(EPSILONS, reverse=True))):  # fmt: skip
            tails = 1e3 * mine.filter(method=method)["tail"].to_numpy()
            cells.append(f"{_short(tails.mean())} ({_short(tails.max())})")
        replies = mine["replies"].to_numpy().mean()
        lines.append(f"| {size:,} | {replies:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def coverage_table(found: pl.DataFrame) -> str:
    """Return coverage and width by metric and rounds."""
    lines = [
        "| metric | rounds | respondents | covered | by the plain mean | width | sums | none |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    by = found.group_by("metric", "rounds", maintain_order=True).agg(
        pl.col("covered", "plain", "respondents", "exchanges").mean(),
        pl.col("width").median(),
        failures=pl.col("failure").count(),
    )
    for row in by.sort("metric", "rounds").iter_rows(named=True):
        lines.append(
            f"| {row['metric']} | {row['rounds']} | {row['respondents']:.0f} | "
            f"{100 * row['covered']:.1f} | {100 * row['plain']:.1f} | {row['width']:.3f} | "
            f"{row['exchanges']:.1f} | {row['failures']} |"
        )
    return "\n".join(lines) + "\n"


def missing_table(found: pl.DataFrame) -> str:
    """Return what missing clients do to a participation fit."""
    lines = [
        "| clients that never answer | largest change | rate in the fit | rate of all | spread |",
        "|---|---:|---:|---:|---:|",
    ]
    by = found.group_by("missing", "share", maintain_order=True).agg(
        pl.col("apart", "rate", "rate_of_all", "weight_error").mean()
    )
    for row in by.iter_rows(named=True):
        who = f"{row['share']:.0%}, {row['missing']}" if row["share"] else "none"
        if row["share"] or row["missing"] == "at random":
            lines.append(
                f"| {who} | {row['apart']:.2g} | {row['rate']:.3f} | {row['rate_of_all']:.3f} | "
                f"{row['weight_error']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    """Return a number with as many digits as chance leaves."""
    digits = 2 if value < 1.0 else 1 if value < 100.0 else 0
    return f"{value:.{digits}f}"


TABLES: Mapping[str, Callable[[pl.DataFrame], str]] = {
    "accuracy": accuracy_table, "noise": noise_table, "coverage": coverage_table,
    "missing": missing_table,
}  # fmt: skip


def results(name: str, seeds: int, workers: int, rounds: int = ROUNDS) -> pl.DataFrame:
    """Return the rows of one part of the study."""
    if name == "accuracy":
        jobs = [(n, s) for n in SHOWN for s in range(max(1, seeds // 2) if n == "B" else seeds)]
        return mapped(partial(trained, rounds=rounds), jobs, workers)
    if name == "noise":
        sizes = [(size, s) for size in SIZES for s in range(max(1, seeds // 4))]
        return mapped(partial(noisy, rounds=rounds), sizes, workers)
    if name == "coverage":
        return mapped(covered, [(r, s) for r in (1, 5, 20) for s in range(25 * seeds)], workers)
    return mapped(missing, range(max(1, seeds // 4)), workers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study, or parts of it, and write results and tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="half for B, a quarter with noise")
    parser.add_argument("--only", nargs="*", choices=[*TABLES], default=[*TABLES])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write JSON here, and no tables")
    chosen = parser.parse_args(arguments)
    path = chosen.out or RESULT
    made = json.loads(path.read_text()) if path.exists() else {}
    for name in chosen.only:
        found = results(name, chosen.seeds, chosen.workers, chosen.rounds)
        made = {**made, name: found.to_dicts(), **environment()}
        path.write_text(json.dumps(made) + "\n")
        table = TABLES[name](found)
        print(table, flush=True)
        if chosen.out is None:
            (STATIC / f"private-{name}.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
