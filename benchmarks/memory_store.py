"""``python -m benchmarks.memory_store``: what a memory of every client costs a Flower server.

5,000 clients with a model of a million float32 parameters reply in turn, 500 a round, all of them
once and some twice: the same replies are aggregated by FedAvg alone and by FedIPW with the memory
of ``efficient-hajek`` around FedAvg, in one process, in turns. FedIPW's time is whole, screening,
weights, files, ledger and checkpoint included. Memory is the peak of the aggregation beyond the
replies, with the sums of the last models' average, in copies of the model. The files take 20 GB of
the directory for temporary files (TMPDIR) meanwhile. How long the disk takes to write a round's
files is measured beside it. Results go to benchmarks/results/memory_store.json, and the table of
the documentation to docs/_static/memory-store.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.augmented import PLAIN, WHOLE, Clock, Size, copies
from fedipw.combining.tail import tail_length
from fedipw.lab.files import environment
from fedipw.numerics.threads import thread_count

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp.strategy import Strategy

    from fedipw.flower import FedIPW


RESULT = Path(__file__).parent / "results" / "memory_store.json"
TABLE = Path(__file__).parents[1] / "docs" / "_static" / "memory-store.md"
SCHEME, AVERAGE, MEMORY = "efficient-hajek", 0.2, "memory"
WRITTEN = "files_written_plainly"  # seconds of the disk alone
TAIL_COPIES = 2  # float64 sums of a float32 model


def watch(ours: FedIPW, plain: Strategy, clock: Clock, turn: Any) -> None:
    """Let a strategy time its rounds, and let another aggregate the same replies beside it."""
    assert ours.memory is not None
    memory = clock.timed(MEMORY, ours.memory.correction)
    ours.memory.correction = memory  # type: ignore[method-assign]
    strategies = {
        PLAIN: clock.watched(PLAIN, plain.aggregate_train),
        WHOLE: clock.watched(WHOLE, ours.aggregate_train),
    }

    def aggregate_train(index: int, replies: Iterable[Message]) -> Any:
        mine = list(replies)
        given = {PLAIN: copies(mine), WHOLE: mine}
        clock.index = index
        clock.loads.append(os.getloadavg()[0])
        order = (PLAIN, WHOLE) if index % 2 else (WHOLE, PLAIN)  # each first at times
        found = {name: strategies[name](index, given[name]) for name in order}
        turn(index + 1)
        return found[WHOLE]

    vars(ours)["aggregate_train"] = aggregate_train


def plainly_written(size: Size, where: Path) -> float:
    """Return the seconds in which as many files of that size are written and flushed in a row."""
    vector = np.random.default_rng(3).standard_normal(size.parameters, dtype=np.float32)
    began = time.perf_counter()
    for k in range(size.replies):
        with (where / f"plain-{k}").open("wb") as file:
            file.write(vector.data)
            os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    for k in range(size.replies):
        (where / f"plain-{k}").unlink()
    return seconds


def measured(size: Size) -> dict[str, Any]:
    """Return time, memory and disk of both on the same replies."""
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from fedipw.flower import FedIPW, InProcessGrid

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    people = size.people()
    ids = people.filter("enrolled")["unit_id"].to_list()
    model = np.random.default_rng(1).standard_normal(size.parameters, dtype=np.float32)
    nodes = {10 + k: {"row": k} for k in range(size.enrolled)}
    grid = InProcessGrid(size.app(ids), nodes)

    def turn(index: int) -> None:
        """Let the clients of a round's turn be online, and no others."""
        first = (index - 1) * size.replies
        grid.online = {10 + (first + k) % size.enrolled for k in range(size.replies)}

    turn(1)
    every, tail = -(-size.enrolled // size.replies), tail_length(size.rounds, AVERAGE)
    first, last = size.rounds - tail + 1, size.rounds
    clock = Clock(frozenset({first, last}))
    with tempfile.TemporaryDirectory() as where:
        ours = FedIPW(
            FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=1,
                   min_available_nodes=1),
            population=people, participation="battery", ledger=where, scheme=SCHEME,
            average=AVERAGE,
        )  # fmt: skip
        assert ours.memory is not None
        watch(ours, FedAvg(), clock, turn)
        start = ArrayRecord({"w": Array(model)})
        ours.memory.begin({"w": model}, {})
        told = ours.memory.line()
        ours.start(grid, start, num_rounds=size.rounds)
        plain = plainly_written(size, Path(where))
        files = list((Path(where) / "checkpoint" / "memory").glob("*.npy"))
        disk = sum(path.stat().st_size for path in files)
        blocks = sum(path.stat().st_blocks * 512 for path in files)
    seen = [r for r in range(every + 1, size.rounds + 1) if r not in clock.traced]  # files to read
    timed = {name: np.array([of[r] for r in seen]) for name, of in clock.seconds.items()}
    copy, peaks = 4.0 * size.parameters, clock.peaks
    averaging = peaks[WHOLE][last] / copy + TAIL_COPIES  # the sums are there before the round
    return {
        "clients": size.enrolled,
        "replies": size.replies,
        "parameters": size.parameters,
        "rounds": size.rounds,
        "timed_rounds": len(seen),
        "threads": thread_count(),
        "load": float(np.median(clock.loads)),
        "told": told.replace(where, "..."),
        "disk": {
            "clients": len(files) - 1,
            "bytes": disk,
            "blocks": blocks,
            "told_bytes": size.enrolled * (4 * size.parameters + 128)
            + 2 * (8 * size.parameters + 128),
        },
        "seconds": {
            **{name: float(np.median(found)) for name, found in timed.items()},
            WRITTEN: plain,
            "first_rounds": float(np.median([clock.seconds[WHOLE][r] for r in range(2, every)])),
        },
        "ratio": float(np.median(timed[WHOLE] / timed[PLAIN])),
        "model_copies": {
            "fedavg": peaks[PLAIN][last] / copy,
            "fedipw_first_averaged": peaks[WHOLE][first] / copy,
            "fedipw_averaging": averaging,
            "beyond_fedavg": max(
                averaging - peaks[PLAIN][last] / copy,
                (peaks[WHOLE][first] - peaks[PLAIN][first]) / copy,
            ),
            "wanted": 3.0,
        },
    }


def table(found: dict[str, Any]) -> str:
    """Return the page's table."""
    seconds, memory, disk = found["seconds"], found["model_copies"], found["disk"]
    of = f"{found['clients']:,} clients, {found['parameters']:,} float32 parameters"
    beyond = f"{memory['beyond_fedavg']:.2f}, of them {TAIL_COPIES} for the average of the models"
    files = f"{disk['bytes'] / 1e9:.2f} GB; told before: up to {disk['told_bytes'] / 1e9:.2f} GB"
    whole = f"{seconds['fedipw']:.1f}, of them {seconds['memory']:.1f} for the memory"
    rows = {
        "replies in a round": f"{found['replies']:,} of {of}",
        "memory beyond FedAvg's on the same replies, in models": beyond,
        "files of all clients": files,
        "seconds of a round": f"{whole}; FedAvg alone {seconds['fedavg']:.1f}",
        "seconds in which this disk writes a round's files": f"{seconds[WRITTEN]:.1f}",
    }
    lines = ["| `python -m benchmarks.memory_store` | |", "|---|---|"]
    lines += [f"| {what} | {value} |" for what, value in rows.items()]
    note = f"Medians over rounds; {found['threads']} cores, load {found['load']:.1f} meanwhile."
    return "\n".join([*lines, "", note]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=5_000)
    parser.add_argument("--replies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--parameters", type=int, default=Size.parameters)
    parser.add_argument("--out", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    size = Size(
        parameters=chosen.parameters, replies=chosen.replies, rounds=chosen.rounds,
        enrolled=chosen.clients, population=5 * chosen.clients // 2,
    )  # fmt: skip
    found = measured(size)
    print(json.dumps(found, indent=1))
    chosen.out.parent.mkdir(exist_ok=True)
    if chosen.out == RESULT:
        TABLE.write_text(table(found), encoding="utf-8")
    chosen.out.write_text(json.dumps({**environment(), **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
