"""The private app in one process, beside the plain mean: ``python -m private.run``."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

import numpy as np
from private.private_app import POPULATION, client, enrolled_people, start, strategy, target

from fedipw.flower import InProcessGrid, RecordingGrid


def main(rounds: int) -> None:
    """Train, and print what the server received and how good its model is."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    clients = enrolled_people()
    grid = RecordingGrid(
        InProcessGrid(client, {100 + k: {"partition-id": k} for k in range(len(clients))})
    )
    with tempfile.TemporaryDirectory() as scratch:
        made = strategy(Path(scratch) / "ledger", nodes=len(clients), minimum=5)
        result = made.start(grid, start(), num_rounds=rounds)
    told = result.train_metrics_clientapp[rounds]
    plain = np.mean([person.optimum for person in clients], axis=0)
    print(f"{len(clients)} of {POPULATION} people are enrolled; the target is the mean over all")
    print(f"last sum: {told['fedipw-contributors']} clients, count as "
          f"{told['fedipw-effective-replies']:.1f}")  # fmt: skip
    print(f"received: {len(grid.received)} messages, {grid.size / 1e6:.2f} MB")
    print(f"an age among them: {grid.holds([person.age for person in clients])}")
    ours = result.arrays["theta"].numpy()
    print(f"distance to the target: {np.linalg.norm(ours - target()):.3f}")
    print(f"  of the mean over the enrolled: {np.linalg.norm(plain - target()):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    main(parser.parse_args().rounds)
