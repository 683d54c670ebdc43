"""The in-process engine: local training, combining, the loop, checkpoints."""

from fedipw.engine.checkpoint import load_checkpoint, save_checkpoint
from fedipw.engine.history import History, tail_length
from fedipw.engine.local import LocalWork, RoundWork, client_updates, weighted_update
from fedipw.engine.memory import UpdateMemory
from fedipw.engine.server import Adam, Momentum, PlainStep, ServerStep, Yogi
from fedipw.engine.simulation import Federation, Simulation, Training

__all__ = [
    "Adam",
    "Federation",
    "History",
    "LocalWork",
    "Momentum",
    "PlainStep",
    "RoundWork",
    "ServerStep",
    "Simulation",
    "Training",
    "UpdateMemory",
    "Yogi",
    "client_updates",
    "load_checkpoint",
    "save_checkpoint",
    "tail_length",
    "weighted_update",
]
