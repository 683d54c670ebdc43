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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO
from urllib.parse import quote

from fedipw.errors import InputError, UnwritableError
from fedipw.storage.lock import hold, is_abandoned, locked

_FLUSHES = 8  # files flushed at a time: a disk writes their journal together
_ABANDONED = 86_400.0  # seconds without a byte after which a temporary's writer must be gone
_YOUNG = 2.0  # seconds within which one may just have been made, and not be held yet
_SUFFIX = ".partial"
_LONGEST = 200  # characters of a quoted name: file systems have 255, with what is added to it


@contextmanager
def written_path(path: str | Path, *, cleaned: bool = True) -> Iterator[Path]:
    """Yield an empty file for a library that writes by path; it becomes ``path`` at the end.

    What killed writers left beside it is removed; that lists the directory, unless not ``cleaned``.

    >>> target = Path(tempfile.mkdtemp()) / "model.bin"
    >>> with written_path(target) as temporary:
    ...     _ = temporary.write_bytes(b"whole")
    ...     target.exists()
    False
    >>> target.read_bytes()
    b'whole'
    """
    place = Path(path)
    with _temporary(place, cleaned=cleaned) as temporary:
        yield temporary
        _flush(temporary)
        _rename({temporary: place})


@contextmanager
def written_paths(paths: Iterable[Path]) -> Iterator[dict[Path, Path]]:
    """Yield an empty file for each path; at the end all get their names, none if an error came.

    None is renamed before all are on the disk; they are flushed side by side.
    """
    with ExitStack() as stack:
        made = {path: stack.enter_context(_temporary(path)) for path in paths}
        yield made
        with ThreadPoolExecutor(_FLUSHES) as pool:
            for _ in pool.map(_flush, made.values()):
                pass
        _rename({temporary: path for path, temporary in made.items()})


@contextmanager
def written_file(path: str | Path, *, cleaned: bool = True) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes ``path`` at the end, unless an error was raised."""
    with written_path(path, cleaned=cleaned) as temporary, temporary.open("wb") as file:
        yield file


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8."""
    write_texts({Path(path): text})


def write_texts(texts: Mapping[Path, str], *, cleaned: bool = True) -> None:
    """Write text files; none is renamed before all of them are on the disk.

    See :func:`written_path` for ``cleaned``.
    """
    with ExitStack() as stack:
        made = {}
        for path, text in texts.items():
            check_place(path)
            temporary = stack.enter_context(_temporary(path, cleaned=cleaned))
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
    with scratch_directory(out) as stage:
        yield stage
        made = {file: out / file.name for file in sorted(stage.iterdir())}
        for file in made:
            _flush(file)
        out.mkdir(exist_ok=True)
        with locked(out, "moves results"):
            _rename(made)


@contextmanager
def scratch_directory(place: Path) -> Iterator[Path]:
    """Yield a directory beside a place for what it is made of; it is removed at the end.

    What a killed program left there for the same place is removed first. Whatever the system
    refuses is an error that names the place.
    """
    held = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(place)
        made = tempfile.mkdtemp(prefix=f".{place.name}-", suffix=_SUFFIX, dir=place.parent)
        stage = Path(made)
        held = hold(stage)
    except OSError as error:
        raise unwritable(place, error) from error
    try:
        yield stage
    except OSError as error:
        raise unwritable(place, error) from error
    finally:
        os.close(held)
        shutil.rmtree(stage, ignore_errors=True)
        with suppress(OSError):  # where there are too few descriptors even for that
            for name in os.listdir(stage):
                (stage / name).unlink()
            stage.rmdir()


def _remove_leftovers(place: Path) -> None:
    """Remove what killed programs left beside a place: what is still written is held."""
    start = f".{place.name}"
    for path in place.parent.iterdir():
        if not (path.name.startswith((f"{start}.", f"{start}-")) and path.name.endswith(_SUFFIX)):
            continue
        with suppress(OSError):
            young = time.time() - path.lstat().st_mtime < _YOUNG
            if path.is_symlink() or young or not is_abandoned(path):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_file_name(text: str) -> bool:
    """Return whether a text, its special characters quoted, can be the name of a file or directory.

    >>> is_file_name("top-5 accuracy"), is_file_name(".."), is_file_name("x" * 300)
    (True, False, False)
    """
    try:
        made = quote(text, safe="")
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return made not in {"", ".", ".."} and len(made) <= _LONGEST


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
    """Remove what killed writers left in a directory: temporaries that nobody holds.

    Also those to which nobody wrote for a day, where the file system knows no locks.
    """
    for path in directory.glob(f".*{_SUFFIX}"):
        with suppress(OSError):
            age = time.time() - path.lstat().st_mtime
            if age > _ABANDONED or (age > _YOUNG and is_abandoned(path)):
                path.unlink()


@contextmanager
def _temporary(place: Path, *, cleaned: bool = True) -> Iterator[Path]:
    """Yield a new empty file beside a place; if it is still there at the end it is removed.

    ``cleaned`` is whether to look for what killed writers left, which lists the directory.
    """
    path, held = place.with_name(f".{place.name}.{token_hex(8)}{_SUFFIX}"), None
    try:
        if cleaned:
            _remove_leftovers(place)
        with path.open("xb"):  # exclusively: never over what another writer made
            pass
        held = hold(path)
        yield path
    except OSError as error:
        raise unwritable(place, error) from error
    finally:
        if held is not None:
            os.close(held)
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


def unwritable(path: object, error: BaseException) -> UnwritableError:
    """Return the error that a file, by its path or URL, cannot be written, by what went wrong."""
    reason = getattr(error, "strerror", None) or str(error).split("\n", maxsplit=1)[0]
    return UnwritableError(f"{path} cannot be written: {reason.removesuffix('.')}.")
