"""CA-Fed's synthetic clusters with Markov clients (arXiv 2301.04632 and its authors' code).

As in their code: 24 clients in two clusters, 50 rows of ten normal features to train on and 150 to
test on, labels of a logistic model that the second cluster flips with probability 0.2; half of the
clients are available with probability 0.9 and half with 0.1; of the latter half have correlation
0.9 between rounds, all others almost none. 150 rounds, two local steps on batches of 32, momentum
0.9 and weight decay 0.01 on both sides, a random first model, the learning rates they tuned for
each method, availability known to all methods but F3AST.

Local momentum stays with a client between its rounds, as an optimizer's buffers do there.

Not as in their code: data and chains are drawn afresh for every seed (theirs are one data set and
three runs), F3AST's rates are estimated, accuracy is taken after every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import optax
from scipy.special import expit

from benchmarks.outside.trainers import GradientTrainer
from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine import Federation, LocalWork, RuleSettings, Simulation, Training
from fedipw.lab.engine.intermittent import F3AST, CAFed, CorrelationAware, KnownChains
from fedipw.lab.engine.jaxtrainer import OptaxStep
from fedipw.lab.mechanisms import RoundDraw
from fedipw.lab.mechanisms.base import CountedProcess
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Streams
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray, IntArray

CLIENTS, FEATURES, TRAIN, TEST, FLIP, BATCH, ROUNDS, DECAY = 24, 10, 50, 150, 0.2, 32, 150, 0.01


@dataclass(frozen=True)
class Tuned:
    """A method, as it is called there, with its rates."""

    label: str
    method: str
    local: float
    server: float


RUNS = {
    "unbiased": Tuned("Unbiased", "oracle", 0.03, 0.03),
    "f3ast": Tuned("F3AST", "f3ast", 0.03, 0.03),
    "adafed": Tuned("AdaFed", "oracle-hajek", 0.001, 1.0),
    "cafed": Tuned("CA-Fed", "cafed", 0.01, 0.3),
    "cafed, rates of unbiased": Tuned("CA-Fed", "cafed", 0.03, 0.03),
    "unbiased, rates of cafed": Tuned("Unbiased", "oracle", 0.01, 0.3),
    "mifa, rates of cafed": Tuned("MIFA", "mifa", 0.01, 0.3),
    "debiased, rates of cafed": Tuned("Debiased FedAvg", "debiased", 0.01, 0.3),
}
PUBLISHED = {  # maximum, time average and deviation of test accuracy in percent, authors' README
    "unbiased": (78.94, 75.33, 0.48),
    "f3ast": (78.97, 75.33, 0.40),
    "adafed": (78.69, 74.81, 0.59),
    "cafed": (79.03, 76.22, 0.28),
}


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Rows of every client, and their Markov chains."""

    x: FloatArray  # (N, 50, 11), the intercept last
    y: FloatArray  # (N, 50)
    test_x: FloatArray  # (N, 150, 11)
    test_y: FloatArray
    chains: KnownChains


def drawn(rng: np.random.Generator) -> Clusters:
    """Return a draw of the data and of the clients' kinds."""
    truth = rng.normal(size=FEATURES)
    x, test_x = (rng.normal(size=(CLIENTS, rows, FEATURES)) for rows in (TRAIN, TEST))
    second = np.arange(CLIENTS)[:, None] >= CLIENTS // 2

    def labels(features: FloatArray) -> FloatArray:
        prob = expit(features @ truth)
        prob = np.where(second, FLIP * (1.0 - prob) + (1.0 - FLIP) * prob, prob)
        return (rng.random(prob.shape) < prob).astype(np.float64)

    kind = rng.permutation(np.repeat([0, 1, 2], [CLIENTS // 2, CLIENTS // 4, CLIENTS // 4]))
    availability = np.where(kind == 0, 0.9, 0.1)
    little = 0.5 * (rng.normal(0.0, 0.01, size=CLIENTS) + 0.01)
    return Clusters(
        x=_with_one(x),
        y=labels(x),
        test_x=_with_one(test_x),
        test_y=labels(test_x),
        chains=KnownChains(availability=availability, correlation=np.where(kind == 1, 0.9, little)),
    )


def _with_one(features: FloatArray) -> FloatArray:
    return np.concatenate([features, np.ones((*features.shape[:-1], 1))], axis=-1)


class ChainProcess(CountedProcess):
    """Clients that are two-state Markov chains; what is known of a round is the long-run rate."""

    columns = ()

    def __init__(self, chains: KnownChains, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._chains, self._draw = chains, rng
        self._present = rng.random(len(chains.availability)) < chains.availability

    def advance(self) -> RoundDraw:
        """Return the next round."""
        rate, correlation = self._chains.availability, self._chains.correlation
        if self.round:
            coming = (1.0 - correlation) * rate + correlation * self._present
            self._present = self._draw.random(len(rate)) < coming
        self.round += 1
        return RoundDraw(
            index=self.round,
            covariates=np.empty((len(rate), 0)),
            participation_prob=rate,
            replied=self._present.copy(),
        )


def batch_gradient(
    data: Clusters, clients: IntArray, models: FloatArray, key: int, step: int
) -> FloatArray:
    """Return gradients of mean logistic losses on random batches, with weight decay, (m, P)."""
    ranks = np.random.default_rng([key, step]).random((CLIENTS, TRAIN))
    rows = np.argsort(ranks, axis=1)[clients, :BATCH]
    x, y = data.x[clients[:, None], rows], data.y[clients[:, None], rows]
    off = expit(np.einsum("mnp,mp->mn", x, models)) - y
    slope: FloatArray = np.einsum("mnp,mn->mp", x, off) / BATCH + DECAY * models
    return slope


def mean_losses(data: Clusters, theta: FloatArray, clients: IntArray) -> FloatArray:
    """Return clients' mean logistic losses on their training rows, (m,)."""
    u = data.x[clients] @ theta
    means: FloatArray = (np.logaddexp(0.0, u) - data.y[clients] * u).mean(axis=1)
    return means


def one_run(seed: int, run_name: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Return maximum, time average and late deviation of test accuracy, in percent."""
    how, streams = RUNS[run_name], Streams.of(seed)
    data = drawn(streams.population)
    population = Population.of({"unit_id": np.arange(CLIENTS), "z": np.zeros(CLIENTS)})
    federation = Federation(
        population=population.with_enrolled(np.ones(CLIENTS, dtype=bool)),
        clients=ArrayClients(
            features=np.zeros((CLIENTS, 1)),
            labels=np.zeros(CLIENTS),
            offsets=np.arange(CLIENTS + 1),
        ),
        participation=ChainProcess(data.chains, streams.participation),
        enrollment_prob=np.ones(CLIENTS),
    )
    rules = RuleSettings(
        f3ast=F3AST(beta=1.0 / ROUNDS, capacity=12), cafed=CAFed(smoothing=0.2, alone=1000)
    )
    scenario = Scenario(methods=(how.method,), rules=rules)
    work = LocalWork(steps=2, step_size=how.local)
    trainer = GradientTrainer(
        gradient=partial(batch_gradient, data),
        loss=partial(mean_losses, data),
        start=streams.training.uniform(-1.0, 1.0, FEATURES + 1) / np.sqrt(FEATURES),
        work=work,
        clients=CLIENTS,
        momentum=0.9,
        velocity=np.zeros((CLIENTS, FEATURES + 1)),
    )
    compositions = scenario.compositions(federation, trainer.start)
    if how.method == "cafed":
        everyone, share = np.ones(CLIENTS, dtype=bool), np.full(CLIENTS, 1.0 / CLIENTS)
        known = CorrelationAware(everyone, share, rules.cafed, data.chains)
        compositions["cafed"].intermittent = known
    server = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(how.server, momentum=0.9))
    run = Simulation(
        federation,
        scenario.weighers(federation),
        Training(work=work, optimizer=OptaxStep(server)),
        streams.training,
        compositions=compositions,
        trainer=trainer,
    )
    trainer.velocity = np.zeros((CLIENTS, FEATURES + 1))  # CA-Fed trained clients alone before
    run.advance(rounds)
    models = run.history().iterates[0, 1:]
    right = (np.einsum("nip,rp->rni", data.test_x, models) > 0.0) == (data.test_y > 0.5)
    accuracy = 100.0 * right.mean(axis=(1, 2))
    return {
        "maximum": float(accuracy.max()),
        "time_average": float(accuracy.mean()),
        "deviation": float(accuracy[rounds // 2 :].std()),
    }


def study(seeds: int = 30, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the three figures by method and seed."""
    found = {name: [one_run(seed, name, rounds) for seed in range(seeds)] for name in RUNS}
    return {
        "rounds": rounds,
        "seeds": seeds,
        "runs": {
            name: {key: [one[key] for one in runs] for key in runs[0]}
            for name, runs in found.items()
        },
    }
