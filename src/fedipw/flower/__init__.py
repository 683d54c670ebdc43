"""FedIPW on Flower: a strategy that wraps any other, and helpers for clients.

Names are imported when they are asked for: Flower starts a process for every message to a client,
and a client that only describes itself does not wait for the server's part.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedipw.flower.client import ControlVariate, declined, describes
    from fedipw.flower.covariates import Covariate
    from fedipw.flower.inprocess import InProcessGrid
    from fedipw.flower.outcomes import Outcome
    from fedipw.flower.privacy import GaussianNoise
    from fedipw.flower.private import Private
    from fedipw.flower.private_client import PrivateClient
    from fedipw.flower.progress import RoundReport
    from fedipw.flower.recorder import RecordingGrid
    from fedipw.flower.screen import Screen
    from fedipw.flower.stopping import StopWhen
    from fedipw.flower.strategy import FedIPW
    from fedipw.weighting.invitations import Invitations

__all__ = [
    "ControlVariate", "Covariate", "FedIPW", "GaussianNoise", "InProcessGrid", "Invitations",
    "Outcome", "Private", "PrivateClient", "RecordingGrid", "RoundReport", "Screen", "StopWhen",
    "declined", "describes",
]  # fmt: skip

_HOMES = {
    "ControlVariate": "client",
    "Covariate": "covariates",
    "FedIPW": "strategy",
    "GaussianNoise": "privacy",
    "InProcessGrid": "inprocess",
    "Invitations": "invitations",
    "Outcome": "outcomes",
    "Private": "private",
    "PrivateClient": "private_client",
    "RecordingGrid": "recorder",
    "RoundReport": "progress",
    "Screen": "screen",
    "StopWhen": "stopping",
    "declined": "client",
    "describes": "client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
