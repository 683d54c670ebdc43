"""Checkpoints: nested arrays and plain values in one file, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedipw.errors import InputError
from fedipw.storage.atomic import remove_abandoned, written_file

_VERSION = 2
_FILE = "checkpoint.npz"
# what damaged bytes, or values of other kinds than were written, can raise
_DAMAGED = (
    OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, RecursionError,
    NotImplementedError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip


def save_checkpoint(
    directory: Path,
    state: Mapping[str, Any],
    fingerprint: str,
    *,
    name: str = _FILE,
    cleaned: bool = True,
) -> None:
    """Write a state to ``directory``, atomically: a kill leaves the former one or this one.

    What killed writers left there is removed; that lists the directory, unless not ``cleaned``.
    """
    arrays: dict[str, Any] = {}
    plain = _without_arrays(state, "", arrays)
    header = {"version": _VERSION, "fingerprint": fingerprint, "state": plain}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    arrays["digest"] = _digest(arrays)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory} cannot be made: {error.strerror}.") from error
    if cleaned:
        remove_abandoned(directory)
    # as np.savez does, which in older releases leaves the archive open on a full disk
    with (
        written_file(directory / name, cleaned=cleaned) as file,
        zipfile.ZipFile(file, "w") as archive,
    ):
        for part, array in arrays.items():
            with archive.open(f"{part}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)


def load_checkpoint(
    directory: Path,
    fingerprint: str,
    *,
    name: str = _FILE,
    remedy: str = "Remove it and run without --resume.",
) -> dict[str, Any] | None:
    """Return the saved state, none if there is none; an error if it belongs to other settings."""
    found = read_checkpoint(directory, name=name, remedy=remedy)
    if found is None:
        return None
    state, written = found
    if written != fingerprint:
        raise InputError(
            f"{directory / name} was written under other settings. Resume with the settings it was "
            "started with, or choose another output directory."
        )
    return state


def checkpoint_fingerprint(path: Path) -> str | None:
    """Return the fingerprint a checkpoint was saved under, without its arrays.

    None if there is no file or it cannot be read: whoever loads the checkpoint is told why.
    """
    try:
        header = _stored_arrays(path, "header")["header"]
        return str(json.loads(header.tobytes())["fingerprint"])
    except _DAMAGED:
        return None


def read_checkpoint(
    directory: Path, *, name: str = _FILE, remedy: str = ""
) -> tuple[dict[str, Any], str] | None:
    """Return a saved state and the fingerprint it was saved under, none if there is no file."""
    path = directory / name
    if not path.exists():
        return None
    try:
        arrays = _stored_arrays(path)
        digest = arrays.pop("digest")
        if not np.array_equal(digest, _digest(arrays)):
            raise ValueError("its contents are not those that were written")
        header = json.loads(arrays["header"].tobytes())
        parts = [header[name] for name in ("version", "fingerprint", "state")]
    except _DAMAGED as error:
        raise InputError(f"{path} is damaged ({error}). {remedy}") from error
    if parts[0] != _VERSION:
        raise InputError(f"{path} has version {header['version']}, this program reads {_VERSION}.")
    try:
        restored: dict[str, Any] = _with_arrays(header["state"], arrays)
    except _DAMAGED as error:
        raise InputError(f"{path} is damaged ({error}). {remedy}") from error
    if not isinstance(restored, dict):
        raise InputError(f"{path} is damaged (it holds no state). {remedy}")
    return restored, str(parts[1])


def _digest(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a digest of names, kinds, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        found.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return np.frombuffer(found.digest(), dtype=np.uint8)


def _stored_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Return arrays of a file, all by default; no object is unpickled and nothing is unpacked.

    Ours are stored as they are, so a file cannot claim more than its own size.
    """
    with path.open("rb") as opened:
        with zipfile.ZipFile(opened) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("it is compressed, which ours are not")
        opened.seek(0)
        with np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in names or file.files}


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
