"""Models, the wrapped strategy's state and metrics on disk, to resume a run after a kill.

A round of training is closed when its file is in the ledger, and the model after it is written
before that. A killed server therefore finds the model of its last closed round, and ignores what
was written of a round that never closed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedipw.errors import InputError
from fedipw.flower.arrays import array_view, packed_array
from fedipw.storage.atomic import write_texts
from fedipw.storage.checkpoint import checkpoint_fingerprint, read_checkpoint, save_checkpoint

TRAINED, EVALUATED, SERVER = "train", "evaluate", "server"
_SENT: Final = frozenset({"current_arrays"})  # set anew whenever a round is configured
_PLAIN = (bool, int, float, str)
_LOG = getLogger("flwr.fedipw")


class Journal:
    """Models and metrics of a run by round; its settings must be the same when it is resumed."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.directory, self._settings = directory, dict(settings)
        self._last: int | None = None  # the one model there is, once the others were removed
        self._cleaned = False  # whether what a killed server left was looked for
        self._fingerprint = json.dumps(self._settings, sort_keys=True)

    def save_model(self, index: int, model: ArrayRecord, state: dict[str, Any]) -> None:
        """Write the model after a round and the state the next one needs."""
        whole = {"model": _packed(model), **state}
        first, self._cleaned = not self._cleaned, True  # the directory has a file for every round
        save_checkpoint(
            self.directory, whole, self._fingerprint, name=_model_file(index), cleaned=first
        )

    def load_model(self, index: int) -> tuple[ArrayRecord, dict[str, Any]]:
        """Return the model after a round and the state saved with it."""
        name = _model_file(index)
        remedy = "Restore it, or begin with an empty ledger."
        found = read_checkpoint(self.directory, name=name, remedy=remedy)
        if found is None:
            raise InputError(
                f"The ledger has {index} closed rounds, but {self.directory / name} is missing: "
                f"there is no model to go on with. {remedy}"
            )
        state, written = found
        self._require(written, name)
        return _unpacked(state.pop("model")), state

    def check(self, index: int) -> None:
        """Raise if the model after a round was written under other settings, naming them.

        Reads no model, and writes nothing.
        """
        written = checkpoint_fingerprint(self.directory / _model_file(index))
        if written is not None:
            self._require(written, _model_file(index))

    def _require(self, written: str, name: str) -> None:
        differs = self._differs(written)
        if differs:
            raise InputError(
                f"{self.directory / name} was written under other settings: {differs}. Go on with "
                "those it was started with, or begin with an empty ledger."
            )

    def _differs(self, written: str) -> str:
        """Return what differs from the settings a model was written under, old -> new.

        Enrollment is not among them: it may change.
        """
        try:
            before = dict(json.loads(written))
        except (ValueError, TypeError):
            return "they cannot be read"
        names = sorted({*before, *self._settings} - {"clients"})
        now = json.loads(self._fingerprint)
        pairs = ((name, before.get(name), now.get(name)) for name in names)
        return "; ".join(f"{name}: {_word(a)} -> {_word(b)}" for name, a, b in pairs if a != b)

    def forget_models(self, before: int) -> None:
        """Remove models of earlier rounds; the directory is listed once, not in every round."""
        last, self._last = self._last, before
        if last is not None:
            old = [self.directory / _model_file(index) for index in range(last, before)]
        else:
            models = self.directory.glob("round-*.npz")
            old = [path for path in models if path.name < _model_file(before)]
        for path in old:
            path.unlink(missing_ok=True)

    def write(self, kind: str, index: int, metrics: MetricRecord | None, **more: Any) -> None:
        """Write a round's metrics of one kind, also if there are none."""
        self.directory.mkdir(parents=True, exist_ok=True)
        plain = {"metrics": None if metrics is None else dict(metrics), **more}
        write_texts({self._path(kind, index): json.dumps(plain) + "\n"}, cleaned=False)

    def read(self, kind: str, index: int) -> dict[str, Any] | None:
        """Return the record written for a round, none if there is none."""
        path = self._path(kind, index)
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is damaged: {error}.") from error
        if found["metrics"] is not None:
            found["metrics"] = MetricRecord(found["metrics"])
        return found

    def metrics(self, kind: str, index: int) -> MetricRecord | None:
        """Return a round's metrics of one kind, none if there are none."""
        found = self.read(kind, index)
        return None if found is None else found["metrics"]

    def _path(self, kind: str, index: int) -> Path:
        return self.directory / f"{kind}-{index:06d}.json"


def _word(value: object) -> str:
    """Return a setting for people.

    >>> _word("age + os"), _word(["battery", "hour"]), _word(None)
    ("'age + os'", "'battery', 'hour'", 'none')
    """
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return repr(value)


def _model_file(index: int) -> str:
    return f"round-{index:06d}.npz"


class InnerState:
    """The wrapped strategy's state: arrays such as moments, and plain values that have changed.

    Settings that are as they were given are not part of it, so that a run can be resumed with
    others. A value of another kind cannot be saved; the log names it once.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._given = {k: v for k, v in vars(strategy).items() if isinstance(v, _PLAIN)}
        self._unsaved = {k for k, v in vars(strategy).items() if _packed(v) is None}

    def packed(self) -> dict[str, Any]:
        """Return the state as arrays and plain values."""
        found = {}
        for name, value in vars(self.strategy).items():
            if name in _SENT or (name in self._given and self._given[name] == value):
                continue
            made = _packed(value)
            if made is not None:
                found[name] = made
            elif name not in self._unsaved:
                self._unsaved.add(name)
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
    """Return a value with its kind, none if the kind is unknown."""
    if value is None or isinstance(value, _PLAIN):
        return {"kind": "plain", "value": value}
    if isinstance(value, np.ndarray):
        return {"kind": "array", "value": value}
    if isinstance(value, ArrayRecord):
        arrays = [array_view(array) for array in value.values()]
        types = [array.dtype for array in value.values()]  # NumPy has no bfloat16
        return {"kind": "record", "keys": list(value), "value": arrays, "types": types}
    if isinstance(value, list | tuple) and all(isinstance(v, np.ndarray) for v in value):
        return {"kind": "list", "value": list(value)}
    if isinstance(value, Mapping) and all(isinstance(v, np.ndarray) for v in value.values()):
        return {"kind": "dict", "keys": list(value), "value": list(value.values())}
    return None


def _unpacked(made: Mapping[str, Any]) -> Any:
    kind, value = made["kind"], made["value"]
    if kind in {"plain", "array", "list"}:
        return value
    if kind == "record":
        types = made.get("types") or [str(array.dtype) for array in value]
        found = zip(made["keys"], value, types, strict=True)
        return ArrayRecord({key: packed_array(array, name) for key, array, name in found})
    return dict(zip(made["keys"], value, strict=True))
