"""What commands share of the terminal: lines of text, and a progress bar on the error stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedipw.numerics.checks import visible

out, _err = Console(), Console(stderr=True)


def say(text: str) -> None:
    """Print a line as it is, however long."""
    # not by rich, which takes the square of a long word's length
    typer.echo("\n".join(map(visible, text.split("\n"))))


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
