"""One writer at a time in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedipw.errors import InputError, UnwritableError

try:
    import fcntl
except ImportError:  # pragma: no cover, no such locks on Windows
    fcntl = None  # type: ignore[assignment]

_FILE = ".lock"


@contextmanager
def locked(directory: str | Path, purpose: str) -> Iterator[None]:
    """Hold a directory for this ``with`` block alone, in this process and all others.

    The lock is advisory and of the system: it is gone when the process is, however it ends.
    ``purpose`` tells a second one what the first is doing, as in ``"writes the ledger"``.

    Examples
    --------
    >>> import tempfile
    >>> place = tempfile.mkdtemp()
    >>> with locked(place, "writes the ledger"), locked(place, "writes too"):
    ...     pass
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: ... is in use: process ... writes the ledger. Wait for it, or ...
    """
    place = Path(directory)
    with _held(place / _FILE, place, purpose):
        yield


@contextmanager
def claimed(place: str | Path, purpose: str) -> Iterator[None]:
    """Hold an output, a file or a directory, for this ``with`` block alone.

    Two programs that are asked for the same output would write one over the other: the second is
    told at once. The lock is a file beside the output.
    """
    path = Path(place)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableError(f"{path.parent} cannot be made: {error.strerror}.") from error
    with _held(path.with_name(f".{path.name}{_FILE}"), path, purpose):
        yield


@contextmanager
def _held(path: Path, place: Path, purpose: str) -> Iterator[None]:
    if fcntl is None:  # pragma: no cover
        yield
        return
    descriptor = _taken(path, place, purpose)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is held: whoever waits on it looks again
        os.close(descriptor)


def is_abandoned(path: Path) -> bool:
    """Return whether nobody holds a file or directory of :func:`hold` any longer."""
    if fcntl is None:  # pragma: no cover
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def hold(path: Path) -> int:
    """Return a descriptor by which a new file or directory is held until it is closed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _taken(path: Path, place: Path, purpose: str) -> int:
    """Return an open lock file, locked, with its holder written in it."""
    try:
        while True:
            # a link that was put there leads to somebody's file, which must not be written to
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, descriptor):
                    _sign(path, descriptor, purpose)
                    return descriptor
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace")
                os.close(descriptor)
                raise InputError(
                    f"{place} is in use: {holder or 'another process is starting there'}. "
                    "Wait for it, or choose another place."
                ) from None
            os.close(descriptor)  # a file the last holder has just removed
    except OSError as error:
        raise UnwritableError(
            f"{place} cannot be written, as it cannot be locked: {error.strerror}."
        ) from error


def _sign(path: Path, descriptor: int, purpose: str) -> None:
    """Write the holder into a lock file; one that a full disk leaves empty is removed."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} {purpose}".encode())
    except OSError:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)
        raise


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
