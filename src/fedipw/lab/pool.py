"""Tasks shared between processes, one thread each; whatever ends the run ends its workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import TypeVar

from threadpoolctl import threadpool_limits

from fedipw.errors import WorkerLostError
from fedipw.numerics.threads import limit_threads

T = TypeVar("T")
R = TypeVar("R")


def pooled(
    run: Callable[[T], R], tasks: Sequence[T], workers: int, *, warm: T | None = None
) -> Iterator[R]:
    """Yield what ``run``, which can be pickled, makes of each task, as results come.

    With one worker all tasks run in this process, in order. Linear algebra has one thread in either
    case, so that results do not depend on the number of workers. ``warm`` is a small task that is
    run first and alone: it compiles for all.
    """
    if workers == 1:
        with threadpool_limits(1):
            yield from map(run, tasks)
        return
    others = set(active_children())
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_worker_setup) as pool:
        try:
            if warm is not None:
                _submitted(pool, run, [warm])[0].result()
            for future in as_completed(_submitted(pool, run, tasks)):
                yield future.result()
        except BrokenProcessPool as error:
            raise WorkerLostError from error
        except BaseException:  # also Ctrl-C, and a caller that asks for no more
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


def _submitted(
    pool: ProcessPoolExecutor, run: Callable[[T], R], tasks: Sequence[T]
) -> list[Future[R]]:
    """Hand tasks to the pool, which starts workers as it needs them."""
    with _interrupts_held():
        return [pool.submit(run, task) for task in tasks]


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while workers start: they inherit this, and leave it to the parent."""
    if not hasattr(signal, "pthread_sigmask"):  # pragma: no cover, Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker_setup() -> None:
    limit_threads(1)
    threadpool_limits(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be held back
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave as soon as the parent is gone: a worker would wait for tasks for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
