"""Time federated averaging rounds of FedJAX on a given logistic regression workload.

Reads the clients' data and the cohort of each round from an .npz file, runs those rounds with
``fedjax.algorithms.fed_avg.federated_averaging`` (CPU, float32) and writes the seconds of each
timed round and the final model to a JSON file. Compilation happens in the warm-up rounds.

    python peer_fedjax.py INPUT.npz --rounds 20 --warmup 3 --out OUT.json
"""

import argparse
import json
import os
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

# FedJAX 0.0.17 calls jax.tree_map, deprecated in JAX 0.4.28 and removed later. JAX 0.4.28 is the
# faster choice: 0.10 s a round against 0.14 to 0.18 with JAX 0.10.2.
if "tree_map" not in vars(jax):
    jax.tree_map = jax.tree_util.tree_map

import fedjax
from fedjax.algorithms import fed_avg

Client = tuple[int, fedjax.ClientDataset, jax.Array]

LOCAL_STEPS = 10
BATCH_SIZE = 16
LOCAL_LEARNING_RATE = 0.1
L2 = 0.05
NOTES = (
    "float32; cohorts of the file, in its order; num_epochs=None in ShuffleRepeatBatchHParams "
    "(its default of one pass would stop after 4 steps); L2 as a FedJAX regularizer; FedJAX "
    "weights clients by row count, which is the plain mean because all have the same count; "
    "client random keys are made before the timed rounds; XLA's thread pool is left at its "
    "default; with JAX 0.4.28 the rounds use one core (processor over wall time is 1.0)."
)


def zero_parameters(dimension: int) -> dict[str, jax.Array]:
    return {"weights": jnp.zeros(dimension), "intercept": jnp.zeros(())}


def per_example_loss(
    parameters: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array
) -> jax.Array:
    del key
    logits = batch["x"] @ parameters["weights"] + parameters["intercept"]
    return jnp.logaddexp(0.0, logits) - batch["y"] * logits


def federated_averaging(backend: str) -> fedjax.FederatedAlgorithm:
    with fedjax.for_each_client_backend(backend):
        return fed_avg.federated_averaging(
            fedjax.grad(per_example_loss, fedjax.regularizers.l2_regularizer(0.5 * L2)),
            client_optimizer=fedjax.optimizers.sgd(LOCAL_LEARNING_RATE),
            server_optimizer=fedjax.optimizers.sgd(1.0),
            client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
                batch_size=BATCH_SIZE, num_epochs=None, num_steps=LOCAL_STEPS
            ),
        )


def all_clients(arrays: dict[str, np.ndarray]) -> list[Client]:
    offsets = arrays["offsets"]
    if len(np.unique(np.diff(offsets))) != 1:
        raise ValueError("clients differ in row count: FedJAX would not take the plain mean")
    features = arrays["features"].astype(np.float32)
    labels = arrays["labels"].astype(np.float32)
    keys = list(jax.random.split(jax.random.PRNGKey(0), len(offsets) - 1))
    return [
        (client, fedjax.ClientDataset({"x": features[start:stop], "y": labels[start:stop]}), key)
        for client, (start, stop, key) in enumerate(
            zip(offsets[:-1], offsets[1:], keys, strict=True)
        )
    ]


def cohorts(arrays: dict[str, np.ndarray], rounds: int) -> list[list[Client]]:
    clients = all_clients(arrays)
    bounds = arrays["cohort_offsets"]
    if rounds > len(bounds) - 1:
        raise ValueError(f"the input holds fewer than {rounds} rounds")
    ids = arrays["cohort_ids"].tolist()
    return [[clients[i] for i in ids[bounds[r] : bounds[r + 1]]] for r in range(rounds)]


def trained_theta_and_seconds(
    arrays: dict[str, np.ndarray], rounds: int, backend: str
) -> tuple[np.ndarray, list[float]]:
    algorithm = federated_averaging(backend)
    state = algorithm.init(zero_parameters(arrays["features"].shape[1]))
    seconds = []
    for cohort in cohorts(arrays, rounds):
        start = time.perf_counter()
        state, diagnostics = algorithm.apply(state, cohort)
        jax.block_until_ready((state.params, diagnostics))
        seconds.append(time.perf_counter() - start)
    theta = np.append(state.params["weights"], state.params["intercept"])
    return theta.astype(np.float64), seconds


def population_loss(arrays: dict[str, np.ndarray], theta: np.ndarray) -> float:
    logits = arrays["features"] @ theta[:-1] + theta[-1]
    losses = np.logaddexp(0.0, logits) - arrays["labels"] * logits
    return float(losses.mean() + 0.5 * L2 * theta @ theta)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="the first round compiles")
    # Seconds a round on 2 cores: jit 0.10, pmap 0.58 (two host devices; not with JAX >= 0.10,
    # where device_put_sharded is gone), debug 47. FedJAX has no vmap backend.
    parser.add_argument("--backend", choices=("jit", "pmap", "debug"), default="jit")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    with np.load(arguments.input) as archive:
        arrays = dict(archive)
    theta, seconds = trained_theta_and_seconds(
        arrays, arguments.warmup + arguments.rounds, arguments.backend
    )
    timed = seconds[arguments.warmup :]
    result = {
        "peer": "fedjax",
        "versions": {
            name: metadata.version(name) for name in ("fedjax", "jax", "jaxlib", "optax", "numpy")
        },
        "python": platform.python_version(),
        "seconds_per_round_median": statistics.median(timed),
        "seconds_per_round": timed,
        "threads": 1,
        "final_loss": population_loss(arrays, theta),
        "theta": theta.tolist(),
        "notes": f"for_each_client backend {arguments.backend!r}; {NOTES}",
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
