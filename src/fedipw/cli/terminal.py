"""What commands print: sentences, tables, notices, and a progress bar.

Sentences and tables go to the output, notices and bars to the error stream. On a terminal a table
keeps to its width; anywhere else it is whole, one line a row, with tabs between the cells.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, TextIO

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import render
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedipw.errors import FedIPWWarning
from fedipw.numerics.checks import visible
from fedipw.storage.memory import check_memory

_PACKAGES: Final = ("fedipw", "numpy", "scipy", "polars", "numba", "scikit-learn")
_NARROW: Final = 12  # to which a column of texts may shrink
_BESIDE: Final = 3  # characters around a cell: a line and two spaces
_console, _err = Console(), Console(stderr=True)


@dataclass(frozen=True)
class Manner:
    """How much a command says besides its results."""

    quiet: bool = False  # tables and errors alone
    verbose: bool = False  # times, versions and warnings of libraries too


_manners: list[Manner] = [Manner()]  # the last one holds


def say(text: str) -> None:
    """Print a line as it is, however long; nothing with ``-q``."""
    # not by rich, which takes the square of a long word's length
    if not _manners[-1].quiet:
        typer.echo("\n".join(map(visible, text.split("\n"))))


def notice(text: str) -> None:
    """Print a line on the error stream; nothing with ``-q``."""
    if not _manners[-1].quiet:
        typer.echo(visible(text), err=True)


@contextmanager
def manner(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Hold how much is said; at the end say what it took, if that is wanted.

    Warnings of this package are notices. Those of libraries are shown with ``verbose``, and else
    counted: nobody should wonder about a message that is not about their input.
    """
    kept, unseen = warnings.showwarning, 0
    began, spent = time.perf_counter(), time.process_time()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        nonlocal unseen
        del file, line
        if issubclass(category, FedIPWWarning):
            notice(f"notice: {message}")
        elif verbose:
            where = f"{Path(filename).parent.name}/{Path(filename).name}:{lineno}"
            notice(f"{category.__name__} ({where}): {' '.join(str(message).split())}")
        else:
            unseen += 1

    _manners.append(Manner(quiet=quiet, verbose=verbose))
    warnings.showwarning = show
    try:
        if verbose:
            notice(f"{_versions()}; Python {sys.version.split()[0]} on {sys.platform}")
        yield
        if unseen:
            notice(f"{unseen} warning(s) of libraries were not shown; -v shows them.")
    finally:
        if verbose:
            taken, cpu = time.perf_counter() - began, time.process_time() - spent
            notice(f"{taken:.2f} s, {cpu:.2f} s of CPU{_memory()}")
        warnings.showwarning = kept
        _manners.pop()


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def _memory() -> str:
    try:
        import resource
    except ImportError:  # pragma: no cover, not on Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, bytes on macOS
    return f", at most {peak / (2**20 if sys.platform == 'darwin' else 2**10):.0f} MiB of memory"


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of how many are done, and of how many."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = _manners[-1].quiet or not _err.is_terminal
    with Progress(*columns, console=_err, transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=None)

        def step(done: int, total: int) -> None:
            check_memory()
            progress.update(task, completed=done, total=total)

        yield step


@dataclass(frozen=True)
class _Column:
    """A column of a table, as plain text."""

    head: str
    cells: tuple[str, ...]
    right: bool

    @property
    def is_text(self) -> bool:
        """Whether it may be wrapped: a number that is cut or broken is another number."""
        return not self.right and any(" " in cell or not _is_number(cell) for cell in self.cells)

    @property
    def widest(self) -> int:
        """Characters that it takes unwrapped."""
        return max(map(cell_len, (self.head, *self.cells)))

    @property
    def narrowest(self) -> int:
        """Characters that it takes at least; heads are wrapped between words."""
        head = max(map(cell_len, self.head.split()), default=0)
        body = max(map(cell_len, self.cells), default=0)
        return max(head, min(body, _NARROW) if self.is_text else body, 1)


class _Output:
    """Where tables go."""

    def print(self, table: Table, *, rows: int | None = None, grouped: bool = False) -> None:
        """Print a table: to the width of a terminal, or whole with tabs between the cells.

        Parameters
        ----------
        table
            Columns that are justified to the right, or hold numbers alone, are never wrapped.
        rows
            Most rows on a terminal.
        grouped
            Whether a terminal shows the first cell of equal ones below each other alone.
        """
        columns = [
            _Column(_plain(c.header), tuple(map(_plain, c.cells)), c.justify == "right")
            for c in table.columns
        ]
        title = "" if table.title is None else _plain(table.title)
        if not sys.stdout.isatty():
            _write_tabs(columns, title)
            return
        _draw(table, columns, title, rows=rows, grouped=grouped)


out = _Output()


def _write_tabs(columns: Sequence[_Column], title: str) -> None:
    lines = [f"# {title}"] if title else []
    lines.append("\t".join(c.head for c in columns))
    lines += ["\t".join(cells) for cells in zip(*(c.cells for c in columns), strict=True)]
    typer.echo("\n".join(lines))


def _draw(
    table: Table, columns: Sequence[_Column], title: str, *, rows: int | None, grouped: bool
) -> None:
    """Print to the width of the terminal: wrap texts, then leave out columns from the right."""
    count = len(columns[0].cells) if columns else 0
    shown = [replace(c, cells=c.cells[:rows]) for c in columns]
    left_out: list[str] = []
    while len(shown) > 1 and sum(c.narrowest + _BESIDE for c in shown) >= _console.width:
        left_out.append(shown.pop().head)
    made = Table(title=title or None, title_justify="left", box=table.box, pad_edge=table.pad_edge)
    for column, width in zip(shown, _widths(shown, _console.width), strict=True):
        made.add_column(
            Text(column.head), width=width, overflow="fold",
            justify="right" if column.right else "left",
        )  # fmt: skip
    for k, cells in enumerate(zip(*(c.cells for c in shown), strict=True)):
        same = grouped and k > 0 and cells[0] == shown[0].cells[k - 1]
        made.add_row(*(Text("" if same and j == 0 else cell) for j, cell in enumerate(cells)))
    _console.print(made)
    if rows is not None and count > rows:
        say(f"... and {count - rows} more rows; a pipe, a file or --json has them all.")
    if left_out:
        say(f"Too narrow for the columns {', '.join(reversed(left_out))}; a pipe has them all.")


def _widths(columns: Sequence[_Column], most: int) -> list[int]:
    """Return widths that fit, taken from the widest column first."""
    made = [c.widest for c in columns]
    least = [min(c.narrowest, c.widest) for c in columns]
    while sum(made) + _BESIDE * len(made) >= most:
        spare = [w if w > low else 0 for w, low in zip(made, least, strict=True)]
        if not any(spare):  # one column on a terminal of a few characters
            break
        made[spare.index(max(spare))] -= 1
    return made


def _plain(cell: object) -> str:
    """Return what a cell shows, without markup."""
    return visible(render(cell).plain if isinstance(cell, str) else str(cell))


def _is_number(cell: str) -> bool:
    try:
        float(cell.removeprefix("<").removesuffix("%") or "0")
    except ValueError:
        return cell in {"–", "-", "unknown"}
    return True
