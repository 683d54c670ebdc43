"""``python -m benchmarks.jaxtrainer``: the JAX trainer beside pfl-research and a plain loop.

A 784-128-10 network, 50 clients a round, 10 local steps of batch 20. The peers run on PyTorch in an
environment under .benchmarks/, made on first use. All take turns, several times, so that whatever
else the machine does hits them alike. Results go to benchmarks/results/jaxtrainer.json, tables to
docs/_static.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine import LocalWork, RoundWork
from fedipw.lab.engine.jaxtrainer import JaxTrainer, Loss
from fedipw.lab.files import environment

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULT = HERE / "results" / "jaxtrainer.json"
STATIC = ROOT / "docs" / "_static"
CLIENTS, ROWS, COHORT = 200, 100, 50
WORK = LocalWork(steps=10, step_size=0.1, batch_size=20)
ROUNDS, WARMUP = 10, 2
PEERS = {  # kind, threads of a process, two processes
    "pfl, 1 process": ("pfl", 1, False),
    "pfl, 2 processes": ("pfl", 1, True),
    "plain PyTorch loop": ("loop", 1, False),
}
THREADED = {  # on a busy machine PyTorch's threads mostly wait for each other
    "pfl, 2 threads": ("pfl", 2, False),
    "plain PyTorch loop, 2 threads": ("loop", 2, False),
}


def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the cross-entropy of each row, (rows,)."""
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]


def inputs() -> dict[str, np.ndarray]:
    """Return rows of ten overlapping classes, weights to start from and the cohorts."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, CLIENTS * ROWS)
    centres = rng.normal(size=(10, 784))
    features = rng.normal(size=(len(labels), 784)) + 0.1 * centres[labels]
    cohorts = [rng.choice(CLIENTS, COHORT, replace=False) for _ in range(ROUNDS + WARMUP)]
    return {
        "features": features.astype(np.float32),
        "labels": labels,
        "offsets": np.arange(0, len(labels) + 1, ROWS),
        "cohorts": np.array(cohorts),
        "w1": (rng.normal(size=(784, 128)) / 28.0).astype(np.float32),
        "b1": np.zeros(128, np.float32),
        "w2": (rng.normal(size=(128, 10)) / 11.0).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def made(arrays: dict[str, np.ndarray], block: int | None = None) -> JaxTrainer:
    data = ArrayClients(**{name: arrays[name] for name in ("features", "labels", "offsets")})
    params = {name: arrays[name] for name in ("w1", "b1", "w2", "b2")}
    return JaxTrainer(loss, params, data, WORK, block=block)


def own_rounds(trainer: JaxTrainer, cohorts: np.ndarray) -> tuple[list[float], float]:
    """Return the seconds of each round after the warm-up, and the loss at the end."""
    theta, seconds = trainer.start, []
    for index, cohort in enumerate(cohorts):
        began = time.perf_counter()
        task = RoundWork(clients=cohort, theta=theta, key=index)
        theta = theta + trainer.total(task, np.full(len(cohort), 1.0 / len(cohort)))
        seconds.append(time.perf_counter() - began)
    return seconds[WARMUP:], float(trainer.losses(theta).mean())


def peer_report(
    peer: tuple[str, int, bool], bin_: Path, data: Path, scratch: Path
) -> dict[str, Any]:
    kind, threads, processes = peer
    out = scratch / "peer.json"
    script = [str(HERE / "jaxtrainer_pfl.py"), str(data), "--peer", kind, "--threads", str(threads)]
    options = ["--rounds", str(ROUNDS), "--warmup", str(WARMUP), "--out", str(out)]
    launcher = [str(bin_ / "torchrun"), "--nproc_per_node", "2"] if processes else []
    subprocess.run(
        [*(launcher or [str(bin_ / "python")]), *script, *options],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def peer_environment(directory: Path) -> Path:
    """Return the bin directory of the peers' environment, made if it is not there."""
    if not (directory / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)  # first: no other build of it
        requirements = HERE / "requirements-jaxtrainer.txt"
        subprocess.run([*pip, "-r", str(requirements)], check=True)
    return directory / "bin"


def compared(
    arrays: dict[str, np.ndarray],
    repeats: int,
    bin_: Path | None,
    peers: dict[str, tuple[str, int, bool]],
) -> dict[str, Any]:
    """Return seconds per round of all, in turns, and the losses they end at."""
    trainer = made(arrays)
    seconds: dict[str, list[float]] = {}
    losses, versions = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "input.npz"
        np.savez(data, **arrays)
        for _ in range(repeats):
            timed, losses["fedipw"] = own_rounds(trainer, arrays["cohorts"])
            seconds.setdefault("fedipw", []).extend(timed)
            for name, peer in peers.items() if bin_ is not None else ():
                report = peer_report(peer, bin_, data, Path(scratch))
                seconds.setdefault(name, []).extend(report["seconds_per_round"])
                losses[name], versions = report["final_loss"], report["versions"]
                if not np.isclose(report["final_loss"], losses["fedipw"], rtol=0.01):
                    sys.exit(f"{name} computes something else: {losses}")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds_per_round": medians,
        "least_seconds_per_round": {name: min(values) for name, values in seconds.items()},
        "times_ours": {name: value / medians["fedipw"] for name, value in medians.items()},
        "loss_at_the_end": losses,
        "peer_versions": versions,
    }


SIZES = (1, 4, 8, 16, 32)
NETWORKS = ((16, 16, 4), (64, 32, 10), (256, 128, 10), (784, 128, 10), (784, 512, 10))


def convolving(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the cross-entropy of a network with two convolutions on 8 x 8 images, (rows,)."""
    x = x.reshape(-1, 8, 8, 1)
    for name in ("first", "second"):
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, params[name], (2, 2), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x)
    logits = x.reshape(len(x), -1) @ params["w"]
    return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]


def models() -> dict[str, tuple[Loss, dict[str, np.ndarray], int]]:
    """Return models of several sizes: loss, weights and number of inputs."""
    rng = np.random.default_rng(2)

    def weights(*shape: int) -> np.ndarray:
        return rng.normal(size=shape) / np.sqrt(shape[-2])

    found: dict[str, tuple[Loss, dict[str, np.ndarray], int]] = {}
    for inputs, hidden, classes in NETWORKS:
        found[f"{inputs}-{hidden}-{classes} network"] = (
            loss,
            {
                "w1": weights(inputs, hidden),
                "b1": np.zeros(hidden),
                "w2": weights(hidden, classes),
                "b2": np.zeros(classes),
            },
            inputs,
        )
    kernels = {"first": weights(3, 3, 1, 8), "second": weights(3, 3, 8, 16), "w": weights(64, 10)}
    found["two convolutions, 8 × 8 images"] = (convolving, kernels, 64)
    return found


def blocks(repeats: int) -> list[dict[str, Any]]:
    """Return microseconds of one step of one client, by model and by clients side by side."""
    rng, found = np.random.default_rng(3), []
    for name, (of, params, inputs) in models().items():
        data = ArrayClients(
            features=rng.normal(size=(CLIENTS * ROWS, inputs)).astype(np.float32),
            labels=rng.integers(0, 4, CLIENTS * ROWS),
            offsets=np.arange(0, CLIENTS * ROWS + 1, ROWS),
        )
        trainers = {size: JaxTrainer(of, params, data, WORK, block=size) for size in SIZES}
        seconds: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(repeats + 1):  # the first compiles
            for size, trainer in trainers.items():
                task = RoundWork(clients=np.arange(64), theta=trainer.start, key=0)
                began = time.perf_counter()
                trainer.total(task, np.full(64, 1.0 / 64))
                seconds[size].append(time.perf_counter() - began)
        steps = 64 * WORK.steps
        found.append(
            {
                "model": name,
                "parameters": len(trainers[1].start),
                "block_by_rule": JaxTrainer(of, params, data, WORK).block,
                "microseconds": {
                    str(size): 1e6 * statistics.median(values[1:]) / steps
                    for size, values in seconds.items()
                },
            }
        )
    return found


def tables(result: dict[str, Any]) -> None:
    """Write the tables of docs/speed.md."""
    lines = ["| | seconds a round | times ours |", "| --- | --- | --- |"]
    versions = result["peer_versions"]
    for name, seconds in result["seconds_per_round"].items():
        label = "`JaxTrainer`" if name == "fedipw" else name
        label = label.replace("pfl,", f"pfl-research {versions.get('pfl', '')},")
        lines.append(f"| {label} | {seconds:.3f} | {result['times_ours'][name]:.1f} |")
    (STATIC / "jax-benchmark.md").write_text("\n".join(lines) + "\n")
    heads = " | ".join(f"block {size}" if size == 1 else str(size) for size in SIZES)
    lines = [f"| model | parameters | {heads} | by rule |", "| --- |" + " --- |" * (len(SIZES) + 2)]
    for row in result["blocks"]:
        cells = " | ".join(f"{row['microseconds'][str(size)]:.3g}" for size in SIZES)
        lines.append(
            f"| {row['model']} | {row['parameters']:,} | {cells} | {row['block_by_rule']} |"
        )
    (STATIC / "jax-blocks.md").write_text("\n".join(lines) + "\n")


def scaling(arrays: dict[str, np.ndarray]) -> list[dict[str, float]]:
    """Return seconds per client and bytes of a call by cohort size; clients may come twice."""
    trainer, found = made(arrays), []
    rng = np.random.default_rng(1)
    for size in (8, 50, 200, 512, 2000, 5000):
        task = RoundWork(clients=rng.integers(0, CLIENTS, size), theta=trainer.start, key=0)
        weights = np.full(size, 1.0 / size)
        trainer.total(task, weights)
        began = time.perf_counter()
        trainer.total(task, weights)
        per_client = (time.perf_counter() - began) / size
        megabytes = trainer.call_bytes(size) / 2**20
        found.append({"clients": size, "seconds_per_client": per_client, "megabytes": megabytes})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=ROOT / ".benchmarks" / "pfl")
    parser.add_argument("--skip-peers", action="store_true", help="measure ours only")
    parser.add_argument("--threads", action="store_true", help="peers with two threads as well")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--note", default="", help="what else the machine was doing")
    arguments = parser.parse_args()
    arrays = inputs()
    peers = {**PEERS, **(THREADED if arguments.threads else {})}
    bin_ = None if arguments.skip_peers else peer_environment(arguments.environment)
    result: dict[str, Any] = {
        "workload": "784-128-10 network, 50 of 200 clients, 10 steps of batch 20, float32",
        "note": arguments.note,
        "repeats": arguments.repeats,
        "rounds_each": ROUNDS,
        **compared(arrays, arguments.repeats, bin_, peers),
        "block_by_rule": made(arrays).block,
        "blocks": blocks(3 * arguments.repeats),
        "scaling": scaling(arrays),
        "jax": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        **environment(),
    }
    print(json.dumps(result, indent=2))
    if not arguments.skip_peers:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
        tables(result)


if __name__ == "__main__":
    main()
