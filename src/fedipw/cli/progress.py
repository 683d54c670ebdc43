"""A progress bar on the terminal's error stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_err = Console(stderr=True)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of how many are done, and of how many."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = not _err.is_terminal
    with Progress(*columns, console=_err, transient=True, disable=quiet) as progress:
        task = progress.add_task(what, total=None)

        def step(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield step
