"""The wrapped strategy: which ones weights can lead, and what they remember between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from fedipw.errors import InputError
from fedipw.flower.arrays import array_view

_RANKED = (Bulyan, FedMedian, FedTrimmedAvg, FedXgbBagging, FedXgbCyclic, Krum, MultiKrum, QFedAvg)
_PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
_SENT: Final = frozenset({"current_arrays"})  # set anew whenever a round is configured
_PLAIN = (bool, int, float, str)
_LOG = getLogger("flwr.fedipw")


def weight_key(strategy: Strategy) -> str:
    """Return the metric by which a strategy weighs replies; refuse one that weighs by none."""
    name = type(strategy).__name__
    if isinstance(strategy, _RANKED):
        raise InputError(
            f"{name} chooses or counts replies by a rule of its own and would not follow weights. "
            "Wrap FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi or FedProx; for bad replies see "
            "Screen."
        )
    if isinstance(strategy, _PRIVATE):
        raise InputError(
            f"{name} scales its noise to equal weights, too little for the largest of these. Wrap "
            "the strategy inside it and pass clip and noise=GaussianNoise(...)."
        )
    key = getattr(strategy, "weighted_by_key", None)
    if not isinstance(key, str):
        raise InputError(
            f"{name} has no weighted_by_key: it must average replies by a metric of that name."
        )
    return key


class InnerState:
    """What a strategy remembers: arrays such as moments, and plain values that have changed.

    Settings that stand as they were given are not part of it, so that a run can be resumed with
    others. What is of another kind cannot be saved and is named once.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._given = {k: v for k, v in vars(strategy).items() if isinstance(v, _PLAIN)}
        self._odd = {k for k, v in vars(strategy).items() if _packed(v) is None}
        self._named: set[str] = set()

    def packed(self) -> dict[str, Any]:
        """Return the state as arrays and plain values."""
        found = {}
        for name, value in vars(self.strategy).items():
            if name in _SENT or (name in self._given and self._given[name] == value):
                continue
            made = _packed(value)
            if made is not None:
                found[name] = made
            elif name not in self._odd | self._named:
                self._named.add(name)
                _LOG.warning(
                    "FedIPW: %s.%s (%s) cannot be saved: a resumed run starts without it.",
                    type(self.strategy).__name__, name, type(value).__name__,
                )  # fmt: skip
        return found

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        for name, made in packed.items():
            setattr(self.strategy, name, _unpacked(made))


def _packed(value: object) -> dict[str, Any] | None:
    """Return a value as kind and parts, none if it is of no known kind."""
    if value is None or isinstance(value, _PLAIN):
        return {"kind": "plain", "value": value}
    if isinstance(value, np.ndarray):
        return {"kind": "array", "value": value}
    if isinstance(value, ArrayRecord):
        return packed_record(value)
    if isinstance(value, list | tuple) and all(isinstance(v, np.ndarray) for v in value):
        return {"kind": "list", "value": list(value)}
    if isinstance(value, Mapping) and all(isinstance(v, np.ndarray) for v in value.values()):
        return {"kind": "dict", "keys": list(value), "value": list(value.values())}
    return None


def packed_record(record: ArrayRecord) -> dict[str, Any]:
    """Return a model as names and arrays."""
    return {
        "kind": "record",
        "keys": list(record),
        "value": [array_view(array) for array in record.values()],
    }


def _unpacked(made: Mapping[str, Any]) -> Any:
    value = made["value"]
    if made["kind"] == "record":
        return unpacked_record(made)
    return dict(zip(made["keys"], value, strict=True)) if made["kind"] == "dict" else value


def unpacked_record(made: Mapping[str, Any]) -> ArrayRecord:
    """Return the model of names and arrays."""
    return ArrayRecord(
        {k: Array(np.asarray(v)) for k, v in zip(made["keys"], made["value"], strict=True)}
    )
