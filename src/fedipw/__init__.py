"""Federated learning that serves the target population.

The common jobs need this import alone; names are loaded when they are asked for.

>>> import fedipw
>>> sorted(fedipw.__all__)[:3]
['CalibratedWeights', 'Evaluation', 'FedIPWError']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedipw.api import CalibratedWeights as CalibratedWeights
    from fedipw.api import Report as Report
    from fedipw.api import Weights as Weights
    from fedipw.api import audit as audit
    from fedipw.api import calibrate as calibrate
    from fedipw.api import evaluate as evaluate
    from fedipw.api import weigh as weigh
    from fedipw.errors import FedIPWError as FedIPWError
    from fedipw.errors import InputError as InputError
    from fedipw.evaluation.evaluate import Evaluation as Evaluation
    from fedipw.example_world import example as example
    from fedipw.tables.ledger import Ledger as Ledger
    from fedipw.tables.population import Population as Population
    from fedipw.tables.targets import Targets as Targets
    from fedipw.weighting.methods import METHODS as METHODS
    from fedipw.weighting.settings import Settings as Settings
    from fedipw.weighting.weigher import Weigher as Weigher

    __version__: str

_HOMES = {
    "CalibratedWeights": "api",
    "Evaluation": "evaluation.evaluate",
    "FedIPWError": "errors",
    "InputError": "errors",
    "Ledger": "tables.ledger",
    "METHODS": "weighting.methods",
    "Population": "tables.population",
    "Report": "api",
    "Settings": "weighting.settings",
    "Targets": "tables.targets",
    "Weigher": "weighting.weigher",
    "Weights": "api",
    "calibrate": "api",
    "evaluate": "api",
    "example": "example_world",
    "weigh": "api",
}

__all__ = [*_HOMES, "__version__", "audit"]  # noqa: PLE0604 (names are strings)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("fedipw")
    if name == "audit":  # a package that can be called
        return import_module(f"{__name__}.audit")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
