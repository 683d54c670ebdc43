"""``python -m benchmarks.live``: what a round costs a server that has closed many of them.

200 enrolled clients, 40 of them invited to a round, and a model of ten parameters, so that nothing
but the server's own work is seen. FedIPW with its default method around FedAvg trains in process:
with all rounds past, with a window and with a decay, each in a process of its own. At some numbers
of rounds it gives the processor time of ``configure_train`` and ``aggregate_train`` (median of the
last 20 rounds, and the largest, which is that of a refit), the memory of the process, and the bytes
of the server's state on disk: checkpoint and snapshot, without the ledger and the metrics of each
round, which are the record of the run. Results go to benchmarks/results/live.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.augmented import Size
from fedipw.lab.files import environment

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from fedipw.flower import FedIPW

RESULT = Path(__file__).parent / "results" / "live.json"
SMALL = Size(replies=40, enrolled=200, population=500, parameters=10, covariates=2)
ROUNDS: Final = (20, 200, 1_000, 2_000)
LAST: Final = 20  # rounds before each of these, of which the median is taken
KINDS: Final[dict[str, dict[str, Any]]] = {
    "all rounds past": {},
    "window of 20": {"window": 20},
    "decay of 0.9": {"decay": 0.9},
}


def client_app(ids: Sequence[int]) -> ClientApp:
    """Return what every node runs: the fuller its battery, the more often it replies."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from fedipw.flower import declined, describes

    app = ClientApp()

    def battery(node: int, index: int) -> float:
        return (node * 7_919 + index * 104_729) % 1_000 / 1_000

    @describes(app)
    def about(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
        row = int(context.node_config["row"])
        return {"unit_id": ids[row], "battery": battery(context.node_id, server_round)}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        index = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        chance = np.random.default_rng([index, context.node_id]).random(2)
        if chance[0] > 0.2 + 0.6 * battery(context.node_id, index):
            return declined(message, "busy")
        made = message.content.array_records["arrays"]["w"].numpy() + np.float32(chance[1])
        metrics = MetricRecord({"num-examples": 20, "loss": 0.5})
        content = RecordDict({"arrays": ArrayRecord({"w": Array(made)}), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def trained(
    folder: Path, size: Size = SMALL, **settings: Any
) -> Iterator[tuple[FedIPW, float, float]]:
    """Train for ever, a round at a time; yield the server and the processor seconds of a round.

    The seconds are those of ``configure_train`` and of ``aggregate_train``.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedipw.flower import FedIPW, InProcessGrid

    people = size.people()
    ids = people.filter("enrolled")["unit_id"].to_list()
    grid = InProcessGrid(client_app(ids), {10 + k: {"row": k} for k in range(size.enrolled)})
    inner = FedAvg(fraction_train=size.replies / size.enrolled, fraction_evaluate=0.0)
    arrays = ArrayRecord({"w": Array(np.zeros(size.parameters, dtype=np.float32))})
    server = FedIPW(
        inner, population=people, participation="battery", ledger=folder, **settings
    )  # fmt: skip
    index = 0
    while True:
        index += 1
        start = time.process_time()
        sent = list(server.configure_train(index, arrays, ConfigRecord(), grid))
        configured = time.process_time() - start
        replies = list(grid.send_and_receive(sent))
        start = time.process_time()
        made, _ = server.aggregate_train(index, replies)
        aggregated = time.process_time() - start
        arrays = arrays if made is None else made
        yield server, configured, aggregated


def state_bytes(folder: Path) -> int:
    """Return the bytes of what a restart reads, without the ledger and the metrics of rounds."""
    record = ("round-", "train-", "evaluate-")
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(record)
    )


def resident() -> int:
    """Return the bytes of memory this process has now."""
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = next(line for line in lines if line.startswith("VmRSS:"))
    return 1024 * int(found.split()[1])


def measured(
    settings: dict[str, Any], rounds: Sequence[int] = ROUNDS, size: Size = SMALL
) -> Iterator[dict[str, float]]:
    """Yield times, memory and bytes of state at each of these numbers of rounds."""
    import_module("flwr.serverapp")  # sets a level of its own
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    configured: list[float] = []
    aggregated: list[float] = []
    with tempfile.TemporaryDirectory() as where:
        for _, first, second in trained(Path(where), size, **settings):
            configured.append(first)
            aggregated.append(second)
            index = len(configured)
            if index in rounds:
                late = slice(max(index - LAST, 1), index)  # the first round compiles
                yield {
                    "rounds": index,
                    "configure_train": float(np.median(configured[late])),
                    "configure_train_largest": max(configured[late]),
                    "aggregate_train": float(np.median(aggregated[late])),
                    "aggregate_train_largest": max(aggregated[late]),
                    "resident": resident(),
                    "state_bytes": state_bytes(Path(where)),
                }
            if index == max(rounds):
                return


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each kind in a process of its own, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=list(ROUNDS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--kind", choices=list(KINDS), help="measure this one here and print it")
    chosen = parser.parse_args(arguments)
    if chosen.kind is not None:
        for found in measured(KINDS[chosen.kind], chosen.rounds):
            print(json.dumps(found), flush=True)
        return
    runs = {}
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.live", "--kind", kind, "--rounds"]
        made = subprocess.run(
            [*command, *map(str, chosen.rounds)], stdout=subprocess.PIPE, text=True, check=True
        )
        runs[kind] = [json.loads(line) for line in made.stdout.splitlines()]
        print(kind, json.dumps(runs[kind], indent=1), flush=True)
    result = {**environment(), "size": asdict(SMALL), "runs": runs}
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
