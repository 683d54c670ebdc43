"""Checkpoints: nested arrays and plain values in one file, written whole or not at all."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedipw.errors import InputError
from fedipw.storage.atomic import remove_abandoned, written_file

_VERSION = 1
_FILE = "checkpoint.npz"


def save_checkpoint(
    directory: Path, state: Mapping[str, Any], fingerprint: str, *, name: str = _FILE
) -> None:
    """Write a state to ``directory``, atomically: a kill leaves the former one or this one."""
    arrays: dict[str, Any] = {}
    plain = _without_arrays(state, "", arrays)
    header = {"version": _VERSION, "fingerprint": fingerprint, "state": plain}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory} cannot be made: {error.strerror}.") from error
    remove_abandoned(directory)
    with written_file(directory / name) as file:
        np.savez(file, **arrays)


def load_checkpoint(
    directory: Path,
    fingerprint: str,
    *,
    name: str = _FILE,
    remedy: str = "Remove it and run without --resume.",
) -> dict[str, Any] | None:
    """Return the saved state, none if there is none; an error if it belongs to other settings."""
    path = directory / name
    if not path.exists():
        return None
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays["header"].tobytes())
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path} is damaged ({error}). {remedy}") from error
    if header["version"] != _VERSION:
        raise InputError(f"{path} has version {header['version']}, this program reads {_VERSION}.")
    if header["fingerprint"] != fingerprint:
        raise InputError(
            f"{path} was written under other settings. Resume with the settings it was started "
            "with, or choose another output directory."
        )
    restored: dict[str, Any] = _with_arrays(header["state"], arrays)
    return restored


def _without_arrays(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a JSON-able copy, arrays moved to ``arrays`` under their path."""
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return {"__array__": path}
    if isinstance(value, Mapping):
        return {str(k): _without_arrays(v, f"{path}/{k}", arrays) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(v, f"{path}/{k}", arrays) for k, v in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__array__"}:
            return arrays[value["__array__"]]
        return {k: _with_arrays(v, arrays) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_arrays(v, arrays) for v in value]
    return value
