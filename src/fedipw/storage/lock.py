"""One writer at a time in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedipw.errors import InputError

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
    if fcntl is None:  # pragma: no cover
        yield
        return
    descriptor = _taken(place, purpose)
    try:
        yield
    finally:
        with suppress(OSError):
            (place / _FILE).unlink()  # while it is held: whoever waits on it looks again
        os.close(descriptor)


def _taken(place: Path, purpose: str) -> int:
    """Return the open lock file of a directory, locked, with its holder written in it."""
    path = place / _FILE
    try:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, descriptor):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} {purpose}".encode())
                    return descriptor
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace")
                os.close(descriptor)
                raise InputError(
                    f"{place} is in use: {holder or 'another process is starting there'}. "
                    "Wait for it, or choose another directory."
                ) from None
            os.close(descriptor)  # a file the last holder has just removed
    except OSError as error:
        raise InputError(f"{place} cannot be locked: {error.strerror}.") from error


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
