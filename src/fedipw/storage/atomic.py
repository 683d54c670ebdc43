"""Files that appear whole or not at all.

A file is written under a name of its own beside its place, opened exclusively, flushed to disk and
renamed over the place; then the directory is flushed too. A kill at any moment leaves the former
file or the new one, and two writers never share a temporary.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from fedipw.errors import InputError, UnwritableError
from fedipw.storage.lock import locked

_ABANDONED = 86_400.0  # seconds without a byte after which a temporary's writer must be gone


@contextmanager
def written_path(path: str | Path) -> Iterator[Path]:
    """Yield an empty file for a library that writes by path; it becomes ``path`` at the end.

    >>> target = Path(tempfile.mkdtemp()) / "model.bin"
    >>> with written_path(target) as temporary:
    ...     _ = temporary.write_bytes(b"whole")
    ...     target.exists()
    False
    >>> target.read_bytes()
    b'whole'
    """
    place = Path(path)
    with _temporary(place) as temporary:
        yield temporary
        _flush(temporary)
        _rename({temporary: place})


@contextmanager
def written_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes ``path`` at the end, unless an error was raised."""
    with written_path(path) as temporary, temporary.open("wb") as file:
        yield file


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8."""
    write_texts({Path(path): text})


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write text files; none is renamed before all of them are on the disk."""
    with ExitStack() as stack:
        made = {}
        for path, text in texts.items():
            check_place(path)
            temporary = stack.enter_context(_temporary(path))
            temporary.write_text(text, encoding="utf-8")
            _flush(temporary)
            made[temporary] = path
        _rename(made)


@contextmanager
def written_directory(path: str | Path) -> Iterator[Path]:
    """Yield a directory beside ``path`` whose files move there at the end, unless an error came.

    Files of the same names are replaced, others stay. Two programs that end at the same moment
    do not mix their files: one of them gets an error.
    """
    out = Path(path)
    check_directory(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise unwritable(out, error) from error
    try:
        yield stage
        made = {file: out / file.name for file in sorted(stage.iterdir())}
        for file in made:
            _flush(file)
        out.mkdir(exist_ok=True)
        with locked(out, "moves results"):
            _rename(made)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def check_place(path: Path) -> None:
    """Raise if a file cannot be written to ``path``, before any work is done."""
    try:
        impossible = path.is_dir() or not path.parent.is_dir()
    except OSError as error:  # a name too long, for one
        raise unwritable(path, error) from error
    if impossible:
        raise InputError(f"{path} cannot be written: its directory does not exist or it is one.")


def check_directory(path: Path) -> None:
    """Raise if files cannot go to the directory ``path``, before any work is done."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; give a directory.")


def remove_abandoned(directory: Path) -> None:
    """Remove what killed writers left in a directory: temporaries nobody wrote to for a day."""
    for path in directory.glob(".*.partial"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()


@contextmanager
def _temporary(place: Path) -> Iterator[Path]:
    """Yield a new empty file beside a place; if it is still there at the end it is removed."""
    path = place.with_name(f".{place.name}.{token_hex(8)}.partial")
    try:
        with path.open("xb"):  # exclusively: never over what another writer made
            pass
        yield path
    except OSError as error:
        raise unwritable(place, error) from error
    finally:
        with suppress(OSError):
            path.unlink()


def _rename(made: Mapping[Path, Path]) -> None:
    for temporary, place in made.items():
        temporary.replace(place)
    for directory in {place.parent for place in made.values()}:
        _flush(directory)


def _flush(path: Path) -> None:
    """Bring a file, or the names in a directory, onto the disk."""
    if path.is_dir() and os.name != "posix":
        return  # only there can directories be opened
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems know no flush of directories
        if not (path.is_dir() and error.errno in {errno.EINVAL, errno.ENOTSUP}):
            raise
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: Exception) -> UnwritableError:
    """Return the error that a file cannot be written, by what went wrong."""
    reason = getattr(error, "strerror", None) or str(error).split("\n", maxsplit=1)[0]
    return UnwritableError(f"{path} cannot be written: {reason.removesuffix('.')}.")
