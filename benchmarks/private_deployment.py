"""Private training on a real deployment, with a node killed in the middle of a sum.

``python -m benchmarks.private_deployment`` starts a SuperLink and five SuperNodes on loopback, runs
the app of ``examples/flower/private``, kills one node when it is asked for its masked vector in the
first round, and saves what the ledger has of each round. Most of the time is that of processes:
Flower starts one for every message to a node, and a round has five messages to each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedipw.lab.files import environment
from fedipw.tables.ledger import Ledger

RESULTS = Path(__file__).parent / "results" / "private_deployment.json"
EXAMPLES = Path(__file__).parents[1] / "examples" / "flower"
HELD = 2  # the node that is killed
HOLDING = '''"""The client app, one node of which waits at a stage of a sum until it is killed."""

import time
from pathlib import Path

from private_app import client_app


def hold(message, context, call_next):
    """Leave a mark and wait, if this is the node and the stage."""
    record = message.content.config_records.get("fedipw-sum", {})
    if record.get("stage") == "mask" and context.node_config.get("held", False):
        Path(str(context.node_config["mark"])).touch()
        time.sleep(600)
    return call_next(message, context)


client = client_app([hold])
'''


def app_with_hold(where: Path) -> Path:
    """Return a copy of the example whose clients can be held at a stage."""
    app = where / "app"
    shutil.copytree(EXAMPLES / "private", app, ignore=shutil.ignore_patterns("run.py", "__*"))
    (app / "holding.py").write_text(HOLDING, encoding="utf-8")
    config = app / "pyproject.toml"
    text = config.read_text(encoding="utf-8").replace("private_app:client", "holding:client")
    config.write_text(text, encoding="utf-8")
    return app


def deployed(where: Path, *, nodes: int, rounds: int, timeout: float) -> dict[str, Any]:
    """Run the app, kill a node in mid-protocol, and return the outcome of every invitation."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from loopback import Deployment, end, owned, until
    finally:
        sys.path.pop(0)
    mark, app, began = where / "held", app_with_hold(where), time.monotonic()
    with Deployment(where / "flower") as deployment:
        for k in range(nodes):
            deployment.add_node({"partition-id": k, "held": k == HELD, "mark": str(mark)})
        common = f'minimum=4 stage-timeout={timeout} participation-rate=1.0 output="{where}"'
        run = deployment.submitted(app, f"num-server-rounds=1 nodes={nodes} {common}")
        until(mark.exists, "the node that is to be killed", 300.0)
        end([deployment.nodes[HELD]], at_once=True)
        log = deployment.finished(run, 600.0)
        if rounds > 1:  # a second server goes on with those that are left
            left = f"num-server-rounds={rounds} nodes={nodes - 1} {common}"
            log += deployment.run(app, left, 600.0)
    ledger = Ledger(where / "ledger")
    train = [
        json.loads((where / "ledger" / "checkpoint" / f"train-{k:06d}.json").read_text())
        for k in ledger.rounds
    ]
    return {
        "seconds": time.monotonic() - began, "log": log, "left": owned(deployment.started),
        "metrics": [found["metrics"] for found in train],
        "outcomes": [ledger.read(k).filter("invited")["fate"].to_list() for k in ledger.rounds],
    }  # fmt: skip


def main(nodes: int, rounds: int, timeout: float) -> None:
    with tempfile.TemporaryDirectory(prefix="private-") as scratch:
        found = deployed(Path(scratch), nodes=nodes, rounds=rounds, timeout=timeout)
    print(f"{found['seconds']:.0f} s, {len(found['left'])} processes left")
    for index, (metrics, outcomes) in enumerate(
        zip(found["metrics"], found["outcomes"], strict=True), 1
    ):
        kept = metrics.get("fedipw-contributors", 0)
        print(f"round {index}: sum of {kept} clients; {outcomes}")
    saved = {
        "environment": environment(), "nodes": nodes, "seconds": found["seconds"],
        "contributors": [m.get("fedipw-contributors", 0) for m in found["metrics"]],
        "sum_seconds": [m.get("fedipw-sum-seconds") for m in found["metrics"]],
        "outcomes": found["outcomes"],
    }  # fmt: skip
    RESULTS.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60.0)
    given = parser.parse_args()
    main(given.nodes, given.rounds, given.timeout)
