"""A limit on the memory of this process: rows beyond a share of it go to scratch files.

Memory is that of the process, so there is one limit for all of it while a command runs.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fedipw.errors import InputError

SMALLEST: Final = 800 * 10**6  # that a command can be asked to keep to: libraries need half of it
_USUAL: Final = 256 * 2**20  # of blocks of rows, where no limit is given
_SHARE: Final = 8  # of what is left beside the libraries, for each kind of blocks
_LIBRARIES: Final = 500 * 10**6
_EVERY: Final = 0.02  # seconds between two looks
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?I?)B?\s*", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """Return a size in bytes.

    >>> bytes_of("3GB"), bytes_of("1.5 GiB"), bytes_of("900M")
    (3000000000, 1610612736, 900000000)
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].upper() not in _UNITS:
        raise InputError(f"{text!r} is no size of memory: write it as in 3GB, 1.5GiB or 900MB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


class _Watch(threading.Thread):
    """Looks at the memory of this process while it runs."""

    def __init__(self, limit: int) -> None:
        super().__init__(daemon=True, name="fedipw-memory")
        self.limit, self.peak = limit, resident()
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(_EVERY):
            self.peak = max(self.peak, resident())

    def stop(self) -> None:
        self._end.set()
        self.join()


_watches: list[_Watch] = []  # the limit that holds is the last


@contextmanager
def memory_limit(size: int | None) -> Iterator[None]:
    """Keep to this many bytes while the context lasts; no limit if none.

    Blocks of rows that are made meanwhile keep a share of it in memory. What cannot be kept to is
    noticed by :func:`check_memory`.
    """
    if size is None:
        yield
        return
    if size < SMALLEST:
        raise InputError(
            f"A command keeps to {SMALLEST / 1e6:.0f} MB of memory at least, not to "
            f"{size / 1e6:.0f} MB: the libraries alone need half of that."
        )
    watch = _Watch(size)
    watch.start()
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
        watch.stop()


def block_memory() -> int:
    """Return how many bytes of one kind of blocks may stay in memory.

    >>> block_memory() // 2**20
    256
    >>> with memory_limit(10 * 10**9):
    ...     block_memory() // 10**6
    1187
    """
    return (_watches[-1].limit - _LIBRARIES) // _SHARE if _watches else _USUAL


def check_memory() -> None:
    """Raise if more than the limit was used since it holds."""
    if not _watches:
        return
    watch = _watches[-1]
    peak = watch.peak = max(watch.peak, resident())
    if peak > watch.limit:
        raise InputError(
            f"{peak / 1e9:.2f} GB of memory were used, more than the {watch.limit / 1e9:.2f} GB to "
            "keep to: a few numbers for each enrolled client and each reply must be held. Raise "
            "--memory, or use the workers of a cluster (--scheduler)."
        )


def resident() -> int:
    """Return the bytes of memory that this process holds now, its peak where that is not told."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource  # noqa: PLC0415

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
