"""The in-process engine: local training, combining, the loop, checkpoints."""

from fedipw.engine.checkpoint import load_checkpoint, save_checkpoint
from fedipw.engine.composition import Composition, MemoryWeights
from fedipw.engine.history import History, tail_length
from fedipw.engine.local import (
    LocalWork,
    LogisticTrainer,
    RoundWork,
    Trainer,
    client_updates,
    weighted_update,
)
from fedipw.engine.memory import ControlVariates, LatestUpdates, Memory, MemorySum, UpdateMemory
from fedipw.engine.rules import RuleSettings, work_done
from fedipw.engine.server import Adam, Amplified, Momentum, PlainStep, ServerStep, Yogi
from fedipw.engine.simulation import Federation, Simulation, Training

__all__ = [
    "Adam",
    "Amplified",
    "Composition",
    "ControlVariates",
    "Federation",
    "History",
    "LatestUpdates",
    "LocalWork",
    "LogisticTrainer",
    "Memory",
    "MemorySum",
    "MemoryWeights",
    "Momentum",
    "PlainStep",
    "RoundWork",
    "RuleSettings",
    "ServerStep",
    "Simulation",
    "Trainer",
    "Training",
    "UpdateMemory",
    "Yogi",
    "client_updates",
    "load_checkpoint",
    "save_checkpoint",
    "tail_length",
    "weighted_update",
    "work_done",
]
