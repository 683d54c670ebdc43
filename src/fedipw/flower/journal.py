"""What a run leaves on disk beside its ledger, so that it can go on after a kill.

A round of training counts as done when its file stands in the ledger, and the model after it is
written before that. A killed server therefore finds the model of its last closed round, and what
was written of a round that never closed is not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from fedipw.errors import InputError
from fedipw.flower.inner import packed_record, unpacked_record
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.tables.tables import write_texts

TRAINED, EVALUATED, SERVER = "train", "evaluate", "server"


class Journal:
    """Models and metrics of a run by round.

    Parameters
    ----------
    directory
        Where files go.
    settings
        What must not change when a run is resumed.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        self._fingerprint = json.dumps(dict(settings), sort_keys=True)

    def save_model(self, index: int, model: ArrayRecord, state: dict[str, Any]) -> None:
        """Write the model after a round and what else the next one needs."""
        whole = {"model": packed_record(model), **state}
        save_checkpoint(self.directory, whole, self._fingerprint, name=_model_file(index))

    def load_model(self, index: int) -> tuple[ArrayRecord, dict[str, Any]]:
        """Return the model after a round and what was saved with it."""
        name = _model_file(index)
        state = load_checkpoint(
            self.directory, self._fingerprint, name=name,
            remedy="Restore it, or begin with an empty ledger.",
        )  # fmt: skip
        if state is None:
            raise InputError(
                f"The ledger has {index} closed rounds, but {self.directory / name} is missing: "
                "there is no model to go on with. Restore it, or begin with an empty ledger."
            )
        return unpacked_record(state.pop("model")), state

    def forget_models(self, before: int) -> None:
        """Remove models of earlier rounds."""
        for path in self.directory.glob("round-*.npz"):
            if path.name < _model_file(before):
                path.unlink(missing_ok=True)

    def write(self, kind: str, index: int, metrics: MetricRecord | None, **facts: Any) -> None:
        """Write a round's metrics of one kind; none are written too, as such."""
        self.directory.mkdir(parents=True, exist_ok=True)
        plain = {"metrics": None if metrics is None else dict(metrics), **facts}
        write_texts({self._path(kind, index): json.dumps(plain) + "\n"})

    def read(self, kind: str, index: int) -> dict[str, Any] | None:
        """Return what was written of a round, none if nothing was."""
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


def _model_file(index: int) -> str:
    return f"round-{index:06d}.npz"
