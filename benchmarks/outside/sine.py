"""FedAWE's Table 2 under sine availability, on scikit-learn's digits (arXiv 2409.17446, section 7).

As in the paper: 100 clients whose labels are Dirichlet(0.1), base availability the product of a
client's label shares with random effects of the labels, a sine of period 20 and degree 0.3, ten
local steps of size eta / sqrt(t / 10 + 1), gradients clipped to norm 0.5, a server step of 1, the
initial local step tuned for each method, accuracies averaged over the last 50 rounds.

Not as in the paper: 1,797 images of 8 x 8 in place of SVHN's 99,289 of 32 x 32, a perceptron with
one hidden layer in place of a convolutional network, full local gradients (a client has about 14
images), no random crops, fewer rounds, more seeds. FedAvg over all clients, which counts missing
ones as updates of zero and is last in the paper, has no place among weightings here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.datasets import load_digits

from benchmarks.outside.trainers import GradientTrainer
from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine import Federation, LocalWork, Simulation, Training
from fedipw.lab.engine.intermittent import EchoedUpdates
from fedipw.lab.mechanisms import ScaledSineAvailability
from fedipw.lab.scenario import PropensitySettings, Scenario
from fedipw.lab.testbed import Streams
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray, IntArray

CLIENTS, LABELS, PIXELS, HIDDEN, LOCAL_STEPS, CLIP = 100, 10, 64, 32, 10, 0.5
LAST = 50  # rounds whose accuracies are averaged
MEAN = "fedawe, mean of models"
METHODS = {
    "fedawe": "FedAWE, newest model",
    "fedavg": "FedAvg over active",
    "fedau": "FedAU",
    "f3ast": "F3AST",
    "oracle": "FedAvg with known p",
    "mifa": "MIFA",
    "fedvarp": "FedVARP",
    "debiased": "Debiased FedAvg",
    "participation-only": "Participation-only, fitted",
}
PUBLISHED = {  # test accuracy in percent on SVHN, sine, Table 2 of the paper (mean, deviation)
    MEAN: (85.6, 0.9),
    "fedavg": (82.0, 1.3),
    "fedau": (82.5, 1.3),
    "f3ast": (82.3, 1.0),
    "oracle": (86.0, 1.0),
    "mifa": (84.1, 0.4),
    "fedvarp": (84.3, 0.1),
}
STEPS = (0.2, 0.5, 1.0)  # initial local steps that are tried
EARLY = {"step": 0.2, "rounds": 200, "seeds": 10}  # before training is done
TUNED_ON, TUNED_FOR = (1000, 1001), 300  # seeds and rounds, none of them in the results


@dataclass(frozen=True, kw_only=True)
class Images:
    """Every client's images, padded to one number of rows, and images nobody trains on."""

    x: FloatArray  # (N, n, 64)
    y: IntArray  # (N, n)
    real: FloatArray  # (N, n) 1 for rows, 0 for padding
    test_x: FloatArray
    test_y: IntArray

    @property
    def counts(self) -> IntArray:
        """Images of each client, (N,)."""
        counts: IntArray = self.real.sum(axis=1).astype(np.int64)
        return counts

    @property
    def shares(self) -> FloatArray:
        """Share of each label among a client's images, (N, 10)."""
        hot = self.y[:, :, None] == np.arange(LABELS)
        shares: FloatArray = (hot * self.real[:, :, None]).sum(axis=1) / self.counts[:, None]
        return shares


@cache
def _digits() -> tuple[FloatArray, IntArray]:
    images, labels = load_digits(return_X_y=True)
    return images / 16.0, labels


def divided(rng: np.random.Generator) -> Images:
    """Return the digits divided among clients by Dirichlet label shares, a fifth kept for tests."""
    images, labels = _digits()
    order = rng.permutation(len(labels))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    while True:
        shares = rng.dirichlet(np.full(LABELS, 0.1), size=CLIENTS)
        rows: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(LABELS):
            mine = train[labels[train] == label]
            ends = np.round(len(mine) * np.cumsum(shares[:, label]) / shares[:, label].sum())
            for client, part in enumerate(np.split(mine, ends[:-1].astype(int))):
                rows[client].extend(part.tolist())
        if all(rows):  # a client without images has no loss
            break
    longest = max(map(len, rows))
    shapes = ((PIXELS,), (), ())
    x, y, real = (np.zeros((CLIENTS, longest, *shape), np.float32) for shape in shapes)
    for client, mine in enumerate(rows):
        x[client, : len(mine)], y[client, : len(mine)] = images[mine], labels[mine]
        real[client, : len(mine)] = 1.0
    return Images(x=x, y=y.astype(np.int64), real=real, test_x=images[test], test_y=labels[test])


def _layers(theta: FloatArray) -> tuple[FloatArray, ...]:
    """Return the four arrays of models (..., P)."""
    ends = np.cumsum([PIXELS * HIDDEN, HIDDEN, HIDDEN * LABELS])
    a, b, c, d = np.split(theta, ends, axis=-1)
    first = a.reshape(*theta.shape[:-1], PIXELS, HIDDEN)
    return first, b, c.reshape(*theta.shape[:-1], HIDDEN, LABELS), d


def _scores(theta: FloatArray, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return hidden units and the log-probabilities of labels."""
    first, b, second, d = _layers(theta)
    hidden = np.maximum(x @ first + b[..., None, :], 0.0)
    scores = hidden @ second + d[..., None, :]
    scores -= scores.max(axis=-1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def clipped_gradient(
    images: Images, clients: IntArray, models: FloatArray, key: int, step: int
) -> FloatArray:
    """Return the gradients of mean cross-entropy, each of norm 0.5 at most, (m, P)."""
    del key, step  # all rows are used
    x, y, real = images.x[clients], images.y[clients], images.real[clients]
    models = models.astype(np.float32)  # five times as fast
    hidden, log_prob = _scores(models, x)
    off = (np.exp(log_prob) - (y[..., None] == np.arange(LABELS))) * real[..., None]
    off /= real.sum(axis=1)[:, None, None]
    second = _layers(models)[2]
    back = (off @ second.swapaxes(-1, -2)) * (hidden > 0.0)
    parts = (x.swapaxes(-1, -2) @ back, back.sum(1), hidden.swapaxes(-1, -2) @ off, off.sum(1))
    slope = np.concatenate([part.reshape(len(clients), -1) for part in parts], axis=1)
    norm = np.linalg.norm(slope, axis=1, keepdims=True)
    clipped: FloatArray = slope * np.minimum(1.0, CLIP / np.maximum(norm, 1e-300))
    return clipped


def client_losses(images: Images, theta: FloatArray, clients: IntArray) -> FloatArray:
    """Return clients' mean cross-entropies, (m,)."""
    log_prob = _scores(theta, images.x[clients])[1]
    each = -np.take_along_axis(log_prob, images.y[clients][..., None], -1)[..., 0]
    real = images.real[clients]
    means: FloatArray = (each * real).sum(axis=1) / real.sum(axis=1)
    return means


def accuracy(theta: FloatArray, images: Images) -> float:
    """Return the share of test images that are recognised."""
    return float((_scores(theta, images.test_x)[1].argmax(axis=-1) == images.test_y).mean())


def first_model(rng: np.random.Generator) -> FloatArray:
    """Return random weights by Kaiming's rule."""
    first = rng.normal(size=PIXELS * HIDDEN) * np.sqrt(2.0 / PIXELS)
    second = rng.normal(size=HIDDEN * LABELS) * np.sqrt(2.0 / HIDDEN)
    return np.concatenate([first, np.zeros(HIDDEN), second, np.zeros(LABELS)])


def one_seed(
    seed: int, step: float, rounds: int, methods: tuple[str, ...] = tuple(METHODS)
) -> dict[str, float]:
    """Return each method's mean test accuracy over the last rounds, in percent."""
    streams = Streams.of(seed)
    images = divided(streams.population)
    effects = streams.population.uniform(0.0, np.repeat([1.0, 0.5], LABELS // 2))
    table = {f"label{c}": images.shares[:, c] for c in range(1, LABELS)}
    base = images.shares @ effects
    population = Population.of({"unit_id": np.arange(CLIENTS), **table, "p": base})
    population = population.with_enrolled(np.ones(CLIENTS, dtype=bool))
    counts = images.counts
    # the engine counts rows; the trainer below has the images
    data = ArrayClients(
        features=np.zeros((counts.sum(), 1)),
        labels=np.zeros(counts.sum()),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
    )
    participation = ScaledSineAvailability(gamma=0.3, period=20.0, base="p")
    federation = Federation(
        population=population,
        clients=data,
        participation=participation.start(population, data, streams.participation),
        enrollment_prob=np.ones(CLIENTS),
    )
    scenario = Scenario(
        methods=methods,
        participation=participation,
        propensity=PropensitySettings(participation=" + ".join(table)),
    )
    start = first_model(streams.population)
    work = LocalWork(steps=LOCAL_STEPS, step_size=step)
    trainer = GradientTrainer(
        gradient=partial(clipped_gradient, images),
        loss=partial(client_losses, images),
        start=start,
        work=work,
        clients=CLIENTS,
        plain_sgd=False,
    )
    compositions = scenario.compositions(federation, start)
    run = Simulation(
        federation,
        scenario.weighers(federation),
        Training(work=work),
        streams.training,
        compositions=compositions,
        trainer=trainer,
        keep_iterates=False,
    )
    found: dict[str, list[float]] = {name: [] for name in methods}
    echoed = compositions["fedawe"].intermittent if "fedawe" in methods else None

    def after(done: int) -> None:
        trainer.work = replace(work, step_size=step / np.sqrt(done / 10.0 + 1.0))
        if done > rounds - LAST:
            for name, theta in run.models.items():
                found[name].append(100.0 * accuracy(theta, images))
            if isinstance(echoed, EchoedUpdates):  # the authors evaluate this one
                mean = accuracy(echoed.mean_model, images)
                found.setdefault(MEAN, []).append(100.0 * mean)

    run.advance(rounds, after=after)
    return {name: float(np.mean(values)) for name, values in found.items()}


def tuned(
    steps: tuple[float, ...] = STEPS,
    seeds: tuple[int, ...] = TUNED_ON,
    rounds: int = TUNED_FOR,
    methods: tuple[str, ...] = tuple(METHODS),
) -> dict[str, float]:
    """Return the initial local step with which each method is best, on seeds of their own."""
    found = {step: [one_seed(seed, step, rounds, methods) for seed in seeds] for step in steps}
    mean = {
        step: {m: np.mean([one[m] for one in runs]) for m in methods}
        for step, runs in found.items()
    }
    return {m: max(steps, key=lambda step: mean[step][m]) for m in methods}


def study(seeds: int = 16, rounds: int = 500) -> dict[str, Any]:
    """Return accuracies by method and seed with the tuned local steps."""
    step_of = tuned()
    found: dict[str, list[float]] = {m: [] for m in (MEAN, *METHODS)}
    for seed in range(seeds):
        for step in sorted(set(step_of.values())):
            mine = tuple(m for m in METHODS if step_of[m] == step)
            for name, value in one_seed(seed, step, rounds, mine).items():
                found[name].append(value)
        print(f"sine: {seed + 1} of {seeds} seeds", flush=True)
    early = [one_seed(k, EARLY["step"], int(EARLY["rounds"])) for k in range(int(EARLY["seeds"]))]
    return {
        "rounds": rounds,
        "seeds": seeds,
        "steps": step_of | {MEAN: step_of["fedawe"]},
        "accuracy": found,
        "early": EARLY | {"accuracy": {m: [one[m] for one in early] for m in early[0]}},
    }
