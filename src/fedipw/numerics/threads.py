"""Work on ranges shared between threads; compiled kernels release the interpreter lock.

Results never depend on the number of threads: a range writes only to places of its own, and
whoever called adds them up in order.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

_WORTH_SHARING = 100_000.0  # elementary operations below which handing over costs more


class _Limit:
    threads = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def limit_threads(threads: int) -> None:
    """Set how many threads kernels may use in this process (all cores at first)."""
    _Limit.threads = max(1, threads)


def thread_count() -> int:
    """Return how many threads kernels may use in this process."""
    return _Limit.threads


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def over_ranges(count: int, function: Callable[[int, int], None], *, work: float) -> None:
    """Call ``function(start, stop)`` on ranges that together cover 0 to ``count``.

    ``work`` is a rough number of operations; small jobs stay on the calling thread.
    """
    parts = min(_Limit.threads, count)
    if parts <= 1 or work < _WORTH_SHARING:
        function(0, count)
        return
    edges = [count * k // parts for k in range(parts + 1)]
    pool = _pool(parts)
    others = [pool.submit(function, edges[k], edges[k + 1]) for k in range(1, parts)]
    function(edges[0], edges[1])
    for other in others:
        other.result()


@contextmanager
def without_collection() -> Iterator[None]:
    """Do not look for reference cycles meanwhile, where very many objects are made and kept."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
