"""The in-process engine: local training, combining, the loop, checkpoints."""

from fedipw.lab.engine.composition import Composition, Regressed
from fedipw.lab.engine.history import History
from fedipw.lab.engine.local import LocalWork, LogisticTrainer, RoundWork, Trainer
from fedipw.lab.engine.rules import RuleSettings, work_done
from fedipw.lab.engine.server import Adam, Amplified, Momentum, PlainStep, ServerStep, Yogi
from fedipw.lab.engine.simulation import Federation, Simulation, Training

__all__ = [
    "Adam", "Amplified", "Composition", "Federation", "History", "LocalWork", "LogisticTrainer",
    "Momentum", "PlainStep", "Regressed", "RoundWork", "RuleSettings",
    "ServerStep", "Simulation", "Trainer", "Training", "Yogi", "work_done",
]  # fmt: skip
