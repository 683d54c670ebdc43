"""Clients that behave as the configuration of their node says.

They answer the server's question by hand, as a device without fedipw would: a process is started
for every message, and here it imports nothing but Flower.
"""

import time
from pathlib import Path

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

BUSY = 1000
HANGS_IN, HELD_IN = 2, 3  # rounds
LAST = 5  # the round in which some are silent or somebody else
HELD = 0  # the node that waits while there is a file `hold`

app = ClientApp()


@app.query("fedipw")
def answer(message: Message, context: Context) -> Message:
    index = int(message.content.config_records["fedipw"]["server-round"])  # type: ignore[arg-type]
    unit, behaviour = int(context.node_config["unit"]), str(context.node_config["behaviour"])
    charge = -40.0 if behaviour == "lies" else battery(unit, index)
    if behaviour == "declines" and index == LAST:
        unit = int(context.node_config["other"])
    told = ConfigRecord({"unit_id": unit, "battery": charge})
    return Message(RecordDict({"fedipw": told}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    index = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
    node, marks = int(context.node_config["node"]), Path(str(context.node_config["marks"]))
    (marks / f"{index}-{node}-{time.time_ns()}").touch()
    while node == HELD and index == HELD_IN and (marks / "hold").exists():
        time.sleep(0.1)
    behaviour = str(context.node_config["behaviour"])
    if behaviour == "raises":
        raise RuntimeError("out of memory")
    if behaviour == "declines" or (behaviour == "odd" and index % 2 == 0):
        return Message(Error(BUSY, "busy"), reply_to=message)
    if (behaviour == "hangs" and index == HANGS_IN) or (behaviour == "silent" and index == LAST):
        time.sleep(3600.0)
    theta = message.content.array_records["arrays"]["theta"].numpy()
    made = theta + update(int(context.node_config["unit"]), index)
    if behaviour == "nan":
        made[0] = np.nan
    arrays, metrics = ArrayRecord({"theta": Array(made)}), MetricRecord({"num-examples": 10})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def battery(unit: int, index: int) -> float:
    """Return the charge of a client before a round."""
    return float(np.random.default_rng([unit, index]).random())


def update(unit: int, index: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Return what a client adds to the model in a round, (3,)."""
    return np.random.default_rng([unit, index, 1]).standard_normal(3)
