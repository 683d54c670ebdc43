"""``python -m benchmarks.round_time``: a whole round on a server of 5,000 enrolled clients.

500 replies of a model with a million float32 parameters, two or four covariates in the table and
one that all clients are asked for. FedAvg alone, and FedIPW with its default method around FedAvg,
configure and aggregate the same rounds in one process, in turns. FedIPW's time is whole: questions
and their answers, screening, weights, ledger, checkpoint and closing of the round; what clients do
meanwhile is in neither. Parts are given beside it, and how ``configure_train`` grows with the
rounds: in these runs, and in a small federation up to a thousand rounds. Results go to
benchmarks/results/round_time.json, all runs of them.
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
from typing import Any

import numpy as np

from benchmarks.augmented import REGRESSION, Clock, Size, copies
from fedipw.lab.files import environment
from fedipw.numerics.threads import thread_count

RESULT = Path(__file__).parent / "results" / "round_time.json"
LARGE = Size(replies=500, enrolled=5_000, population=12_500, rounds=14, covariates=2)
SMALL = Size(replies=20, enrolled=200, population=500, parameters=10, covariates=2)
GROWTH = (10, 200, 1_000)  # rounds at which the time of a round is looked at
WARM, WANTED = 2, 1.25
PARTS = {
    "questions": ("roster", "available"),
    "opening": ("rounds", "open"),
    REGRESSION: ("augmenter", "correction"),
    "weights": ("rounds", "weights"),
    "closing": ("rounds", "close"),
    "checkpoint": ("journal", "save_model"),
    "fedavg_inside": ("strategy", "aggregate_train"),
}


def measured(size: Size, scheme: str | None = None) -> dict[str, Any]:
    """Return seconds of the rounds of both, and of FedIPW's parts."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message
    from flwr.serverapp.strategy import FedAvg

    from fedipw.flower import FedIPW, InProcessGrid

    class TimedGrid(InProcessGrid):
        """Time that clients take, and a network would."""

        spent = 0.0

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            start = time.perf_counter()
            found = super().send_and_receive(messages, timeout=timeout)
            self.spent += time.perf_counter() - start
            return found

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    people = size.people()
    ids = people.filter("enrolled")["unit_id"].to_list()
    model = np.random.default_rng(1).standard_normal(size.parameters, dtype=np.float32)
    grid = TimedGrid(size.app(ids), {10 + k: {"row": k} for k in range(size.enrolled)})
    how: dict[str, Any] = {
        "fraction_train": size.replies / size.enrolled,
        "fraction_evaluate": 0.0,
    }
    clock, rows, loads, processor = Clock(frozenset()), [], [], []
    with tempfile.TemporaryDirectory() as where:
        plain, ours = FedAvg(**how), FedIPW(
            FedAvg(**how), population=people, participation="battery", ledger=where, scheme=scheme
        )  # fmt: skip
        for name, (owner, function) in PARTS.items():
            part = getattr(ours, owner)
            if part is not None:
                setattr(part, function, clock.timed(name, getattr(part, function)))
        arrays = ArrayRecord({"w": Array(model)})
        for index in range(1, size.rounds + 1):
            clock.index, grid.spent = index, 0.0
            loads.append(os.getloadavg()[0])
            start = time.perf_counter()
            cpu = {"plain": 0.0, "fedipw": 0.0}
            sent = list(ours.configure_train(index, arrays, ConfigRecord(), grid))
            configured = time.perf_counter() - start - grid.spent
            asked = grid.spent
            replies = list(grid.send_and_receive(sent))
            start = time.perf_counter()
            list(plain.configure_train(index, arrays, ConfigRecord(), grid))
            alone, spent, mine = time.perf_counter() - start, {}, copies(replies)
            made = None
            for name in ("plain", "fedipw") if index % 2 else ("fedipw", "plain"):
                start, before = time.perf_counter(), time.process_time()
                if name == "plain":
                    plain.aggregate_train(index, mine)
                else:
                    made, _ = ours.aggregate_train(index, replies)
                spent[name] = time.perf_counter() - start
                cpu[name] = time.process_time() - before
            rows.append((alone + spent["plain"], configured, spent["fedipw"], asked))
            processor.append(cpu["fedipw"] / cpu["plain"])
            assert made is not None
            arrays = made
    plainly, configured_, aggregated, _ = np.array(rows[WARM:]).T
    ratio = (configured_ + aggregated) / plainly
    seconds = {name: np.array(list(found.values()))[WARM:] for name, found in clock.seconds.items()}
    half = len(configured_) // 2
    return {
        "enrolled": size.enrolled,
        "replies": size.replies,
        "parameters": size.parameters,
        "method": ours.config.plan.method.name,
        "rounds": len(ratio),
        "threads": thread_count(),
        "load": float(np.median(loads)),
        "seconds": {
            "fedavg": float(np.median(plainly)),
            "fedipw": float(np.median(configured_ + aggregated)),
            "configure_train": float(np.median(configured_)),
            "aggregate_train": float(np.median(aggregated)),
            **{name: float(np.median(found)) for name, found in seconds.items()},
        },
        "configure_train_later_over_earlier": float(
            np.median(configured_[half:]) / np.median(configured_[:half])
        ),
        "ratio": float(np.median(ratio)),
        "ratio_quartiles": np.quantile(ratio, [0.25, 0.75]).tolist(),
        "ratio_of_aggregation": float(np.median(aggregated / plainly)),
        "processor_ratio_of_aggregation": float(np.median(processor[WARM:])),
    }


def growth(
    rounds: Sequence[int] = GROWTH, size: Size = SMALL, last: int = 20
) -> dict[str, dict[str, float]]:
    """Return processor seconds of ``configure_train`` and ``aggregate_train`` by number of rounds.

    The median, and the largest, of the ``last`` rounds up to each number.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedipw.flower import FedIPW, InProcessGrid

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    people = size.people()
    ids = people.filter("enrolled")["unit_id"].to_list()
    grid = InProcessGrid(size.app(ids), {10 + k: {"row": k} for k in range(size.enrolled)})
    inner = FedAvg(fraction_train=size.replies / size.enrolled, fraction_evaluate=0.0)
    arrays = ArrayRecord({"w": Array(np.zeros(size.parameters, dtype=np.float32))})
    spent: dict[str, list[float]] = {"configure_train": [], "aggregate_train": []}
    with tempfile.TemporaryDirectory() as where:
        ours = FedIPW(inner, population=people, participation="battery", ledger=where)
        for index in range(1, max(rounds) + 1):
            start = time.process_time()
            sent = list(ours.configure_train(index, arrays, ConfigRecord(), grid))
            spent["configure_train"].append(time.process_time() - start)
            replies = list(grid.send_and_receive(sent))
            start = time.process_time()
            made, _ = ours.aggregate_train(index, replies)
            spent["aggregate_train"].append(time.process_time() - start)
            arrays = arrays if made is None else made
    found: dict[str, dict[str, float]] = {}
    for index in rounds:
        found[str(index)] = {}
        for name, seconds in spent.items():
            late = seconds[max(index - last, 1) : index]  # the first round compiles
            found[str(index)] |= {name: float(np.median(late)), f"{name}_largest": max(late)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=LARGE.rounds)
    parser.add_argument("--replies", type=int, default=LARGE.replies)
    parser.add_argument("--enrolled", type=int, default=LARGE.enrolled)
    parser.add_argument("--parameters", type=int, default=LARGE.parameters)
    parser.add_argument("--covariates", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=3, help="runs of each, all of which are kept")
    parser.add_argument("--growth", type=int, nargs="+", default=list(GROWTH))
    parser.add_argument("--scheme", default=None)
    parser.add_argument("--out", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    runs = []
    for covariates in chosen.covariates * chosen.times:
        size = Size(
            rounds=chosen.rounds, replies=chosen.replies, enrolled=chosen.enrolled,
            parameters=chosen.parameters, population=5 * chosen.enrolled // 2,
            covariates=covariates,
        )  # fmt: skip
        runs.append({"covariates": covariates, **measured(size, chosen.scheme)})
        print(json.dumps(runs[-1], indent=1), flush=True)
    ratios = {
        str(covariates): [run["ratio"] for run in runs if run["covariates"] == covariates]
        for covariates in chosen.covariates
    }
    grown = growth(chosen.growth)
    print(json.dumps(grown, indent=1), flush=True)
    made = {
        **environment(), "wanted": WANTED, "ratios": ratios, "runs": runs, "by_rounds": grown,
    }  # fmt: skip
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
