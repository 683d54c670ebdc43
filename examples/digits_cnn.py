"""A convolutional network on handwritten digits, for clients that are not those who take part.

Run ``python examples/digits_cnn.py`` (needs the extra ``jax``; some minutes on two cores). Every
client holds a dozen of scikit-learn's digits. Two covariates are known of all of them: ``z1`` moves
which digits a client writes, from low to high ones, and ``z2`` how often its images come upside
down. Clients with upright images and low digits enroll and reply more often. The network is trained
with plain means, with weights for participation alone, and with weights for both stages (by
Horvitz–Thompson and by Hájek), on the same rounds. Printed are loss and accuracy over all clients,
whether they enrolled or not, their means over seeds, and paired differences to the plain mean with
standard errors.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine import Federation, LocalWork, Simulation, Training
from fedipw.lab.engine.jaxtrainer import JaxTrainer
from fedipw.lab.mechanisms import LogisticEnrollment, MarkovAvailability, enrollment_draw
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Streams
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

ENROLLMENT = LogisticEnrollment(coefficients={"z1": -0.8, "z2": -1.2}, rate=0.4)
PARTICIPATION = MarkovAvailability(coefficients={"z1": -0.4, "z2": -0.6}, rate=0.25, memory=0.5)
WORK = LocalWork(steps=5, step_size=0.2, batch_size=8)
METHODS = ("fedavg", "participation-only", "fedipw", "fedipw-hajek")


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return a 3 x 3 convolution of images (rows, h, w, c) as one product of matrices.

    Faster on processors than ``lax.conv``, above all backwards and for several clients at once.
    """
    h, w = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = [x[:, i : i + h, j : j + w] for i in range(3) for j in range(3)]
    return jnp.concatenate(patches, axis=-1) @ kernel


def logits(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return the scores of the ten digits, (rows, 10)."""
    for layer in ("first", "second"):
        x = jax.nn.relu(convolved(x, params[layer]))
        rows, h, w, c = x.shape
        x = x.reshape(rows, h // 2, 2, w // 2, 2, c).mean(axis=(2, 4))
    return x.reshape(len(x), -1) @ params["dense"] + params["intercept"]


def cross_entropy(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the loss of each image, (rows,)."""
    scores = jax.nn.log_softmax(logits(params, x))
    return -jnp.take_along_axis(scores, y[:, None], axis=1)[:, 0]


def correct(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return whether each image is recognised, (rows,)."""
    return (logits(params, x).argmax(axis=1) == y).astype(x.dtype)


def start(rng: np.random.Generator) -> dict[str, Any]:
    """Return random weights, 1,874 of them."""
    shapes = {"first": (9, 8), "second": (72, 16), "dense": (64, 10)}
    drawn = {k: rng.normal(size=s) * np.sqrt(2.0 / s[0]) for k, s in shapes.items()}
    return {**drawn, "intercept": np.zeros(10)}


def clients(size: int, rng: np.random.Generator) -> tuple[Population, ArrayClients]:
    """Return the population's table and every client's images."""
    images, digits = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1) / 16.0
    of_digit = [np.flatnonzero(digits == d) for d in range(10)]
    z = rng.uniform(-1.7, 1.7, size=(size, 2))
    counts = rng.integers(8, 17, size)
    owner = np.repeat(np.arange(size), counts)
    taste = z[owner, :1] * (np.arange(10) - 4.5) / 3.0
    labels = (taste + rng.gumbel(size=taste.shape)).argmax(axis=1)  # exp(taste) to one another
    rows = np.array([rng.choice(of_digit[d]) for d in labels])
    turned = rng.random(len(rows)) < 1.0 / (1.0 + np.exp(-2.0 * z[owner, 1]))
    x = np.where(turned[:, None, None, None], images[rows, ::-1, ::-1], images[rows])
    table = Population.of({"unit_id": np.arange(size), "z1": z[:, 0], "z2": z[:, 1]})
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return table, ArrayClients(features=x, labels=labels, offsets=offsets)


def one_seed(seed: int, *, size: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return mean loss and accuracy over all clients, by method."""
    streams = Streams.of(seed)
    table, data = clients(size, streams.population)
    enrolled = enrollment_draw(ENROLLMENT(table), streams.enrollment)
    population = table.with_enrolled(enrolled)
    process = PARTICIPATION.start(population, data, streams.participation)
    federation = Federation(population=population, clients=data, participation=process)
    trainer = JaxTrainer(cross_entropy, start(streams.population), data, WORK)
    run = Simulation(
        federation,
        Scenario(methods=METHODS).weighers(federation),
        Training(work=WORK),
        streams.training,
        trainer=trainer,
        keep_iterates=False,
    )
    run.advance(rounds)
    return {
        name: (trainer.losses(theta).mean(), trainer.means(correct, theta).mean())
        for name, theta in run.models.items()
    }


def summary(*, seeds: int, size: int, rounds: int) -> dict[str, FloatArray]:
    """Return loss and accuracy of each seed, by method, (seeds, 2) each."""
    found = [one_seed(seed, size=size, rounds=rounds) for seed in range(seeds)]
    return {name: np.array([one[name] for one in found]) for name in METHODS}


def printed(found: dict[str, FloatArray]) -> str:
    """Return means over seeds, and differences to FedAvg with their standard errors."""
    lines = [f"{'all clients':20}{'loss':>8}{'to fedavg':>20}{'accuracy':>12}{'to fedavg':>20}"]
    for name, values in found.items():
        off = values - found["fedavg"]
        error = off.std(axis=0, ddof=1) / np.sqrt(len(off)) if len(off) > 1 else np.full(2, np.nan)
        cells = [
            f"{values[:, k].mean():{w}.3f}{off[:, k].mean():+12.3f} ± {error[k]:.3f}"
            for k, w in ((0, 8), (1, 12))
        ]
        lines.append(f"{name:20}{''.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    print(printed(summary(seeds=options.seeds, size=options.clients, rounds=options.rounds)))


if __name__ == "__main__":
    main()
