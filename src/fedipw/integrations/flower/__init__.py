"""FedIPW on Flower: a strategy that wraps any other, and helpers for clients."""

from fedipw.integrations.flower.client import declined, describes
from fedipw.integrations.flower.fates import Fate
from fedipw.integrations.flower.privacy import GaussianNoise
from fedipw.integrations.flower.screen import Screen
from fedipw.integrations.flower.strategy import FedIPW

__all__ = ["Fate", "FedIPW", "GaussianNoise", "Screen", "declined", "describes"]
