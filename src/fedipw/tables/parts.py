"""Tables in parts: a directory of Parquet files that appears as a whole.

Parts are written under numbers, by one process or by many, in a staging directory beside the place;
:meth:`Parts.finish` moves them to the place together.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Final, final

import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.storage.atomic import scratch_directory, unwritable
from fedipw.storage.places import Place, children, place_of
from fedipw.storage.remote import Remote
from fedipw.tables.table import (
    SUCCESS,
    UNFINISHED,
    check_results,
    check_table_path,
    write_table,
)

PART_ROWS: Final = 1_000_000  # rows of a part that others follow
_MOST = 10**6  # parts, whose names sort as their numbers do
_NAME = re.compile(r"^part-[0-9]{6}\.parquet$")
_OWN = re.compile(rf"{_NAME.pattern}|^{SUCCESS}$|^{UNFINISHED}")


def is_in_parts(place: Place) -> bool:
    """Return whether a table is to be written in parts: a name without a suffix is a directory.

    >>> is_in_parts(Path("out/weights")), is_in_parts(Path("out/weights.parquet"))
    (True, False)
    """
    return not place.suffix


def check_output(place: Place) -> None:
    """Raise if a table, in one file or in parts, cannot be written, before any work is done."""
    if is_in_parts(place):
        check_parts_place(place)
    else:
        check_table_path(place)


def check_parts_place(place: Place) -> None:
    """Raise if parts cannot go to a directory: one with other files in it is never replaced."""
    if isinstance(place, Remote):
        place.check_writable()
    if place.is_file():
        raise InputError(f"{place} is a file; give a directory.")
    others = sorted(name for name in _names(place) if not _OWN.match(name))
    if others:
        raise InputError(
            f"{place} holds other files than the parts of a table ({some(others)}): it is not "
            "replaced. Choose another name, or a file with a suffix such as .parquet."
        )


def _names(place: Place) -> list[str]:
    """Return what is in a directory, nothing if it is not there."""
    try:
        return [one.name for one in children(place)] if place.is_dir() else []
    except OSError as error:
        raise unwritable(place, error) from error


@final
@dataclass(frozen=True)
class Parts:
    """A table that is being written in parts; it travels to other processes.

    :func:`written_parts` makes one. Until it is finished nothing is to be seen at ``place``.
    """

    place: Place
    stage: Place

    def write(self, number: int, frame: pl.DataFrame) -> None:
        """Write the part of a number, counted from 0; one that is there already is replaced.

        Any process that sees the files may call it, in any order, also twice for one part.
        """
        if not 0 <= number < _MOST:
            raise InputError(f"{self.place}: a table has fewer than {_MOST} parts, not {number}.")
        check_results(frame, self.place)
        write_table(frame, self.stage / part_name(number), cleaned=False)

    def check(self, count: int) -> None:
        """Raise unless this many parts are there."""
        found = len(_names(self.stage))
        if found != count:
            raise InputError(f"{self.place}: {found} parts are there, and {count} were written.")

    def finish(self) -> None:
        """Move the parts to their place, in order and numbered anew where numbers are missing."""
        written = _names(self.stage)
        if not written:
            raise InputError(f"There are no rows to write to {self.place}.")
        check_parts_place(self.place)
        if isinstance(self.place, Path) and isinstance(self.stage, Path):
            for number, name in enumerate(written):
                if name != part_name(number):
                    (self.stage / name).rename(self.stage / part_name(number))
            _exchange(self.place, self.stage)
        elif isinstance(self.place, Remote) and isinstance(self.stage, Remote):
            _publish(self.place, self.stage, written)


def _exchange(place: Path, stage: Path) -> None:
    """Rename a staging directory; a former one goes into the scratch directory, and with it."""
    former = stage.with_name("former")
    try:
        if place.exists():
            place.rename(former)
        try:
            stage.rename(place)
        except OSError:
            if former.exists():
                former.rename(place)
            raise
    except OSError as error:
        raise unwritable(place, error) from error


def _publish(place: Remote, stage: Remote, names: Sequence[str]) -> None:
    """Copy parts to their place within a store, with a sign at the end that all are there.

    Meanwhile there is a staging directory and no such sign: a table of this kind is not read.
    """
    (place / SUCCESS).remove()
    made = [part_name(number) for number in range(len(names))]
    for name, new in zip(names, made, strict=True):
        (stage / name).copied_to(place / new)
    for name in _names(place):
        if _NAME.match(name) and name not in made:
            (place / name).remove()
    (place / SUCCESS).mark()


def part_name(number: int) -> str:
    """Return the name of a part's file.

    >>> part_name(12)
    'part-000012.parquet'
    """
    return f"part-{number:06d}.parquet"


@contextmanager
def written_parts(place: str | Place) -> Iterator[Parts]:
    """Yield a table to write in parts; they get to their place at the end, unless an error came.

    On a disk a kill at any moment leaves the former table or the new one; between the two renames
    that replace a former table, neither. In a store parts wait in a directory ``_unfinished-...``
    within the place and are copied at the end, with an empty file ``_SUCCESS`` after the last one:
    while that is done, or was not done to the end, :class:`~fedipw.tables.table.Table` refuses to
    read the place.

    Examples
    --------
    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp()) / "weights"
    >>> with written_parts(out) as parts:
    ...     parts.write(1, pl.DataFrame({"unit_id": ["b"], "weight": [0.25]}))
    ...     parts.write(0, pl.DataFrame({"unit_id": ["a"], "weight": [0.75]}))
    ...     out.exists()
    False
    >>> pl.read_parquet(out)["unit_id"].to_list()
    ['a', 'b']
    """
    where = place_of(place)
    check_parts_place(where)
    if isinstance(where, Remote):
        with _staged(where) as made:
            yield made
        return
    where = where.absolute()  # other processes may have another working directory
    with scratch_directory(where) as beside:
        stage = beside / "parts"  # with the permissions that a new directory has
        stage.mkdir()
        made = Parts(where, stage)
        yield made
        made.finish()


@contextmanager
def _staged(place: Remote) -> Iterator[Parts]:
    """Yield parts that wait in a store."""
    stage = place / f"{UNFINISHED}{token_hex(8)}"
    try:
        made = Parts(place, stage)
        yield made
        made.finish()
    except BaseException:
        with suppress(InputError):  # what went wrong first is told
            stage.remove()
        raise
    stage.remove()


@contextmanager
def written_rows(
    place: str | Place, *, part_rows: int = PART_ROWS
) -> Iterator[Callable[[pl.DataFrame], None]]:
    """Yield a function that takes tables, in order; at the end they are one file, or parts.

    Parts have ``part_rows`` rows each, the last one fewer, wherever the tables given end.

    Examples
    --------
    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp()) / "weights"
    >>> with written_rows(out, part_rows=2) as write:
    ...     for k in range(5):
    ...         write(pl.DataFrame({"round": [k]}))
    >>> [pl.read_parquet(path).height for path in sorted(out.iterdir())]
    [2, 2, 1]
    """
    where = place_of(place)
    if is_in_parts(where):
        with written_parts(where) as parts:
            rows = _Rows(parts, part_rows)
            yield rows.add
            rows.close()
        return
    check_table_path(where)
    near = where if isinstance(where, Path) else Path(tempfile.gettempdir()) / where.name
    with scratch_directory(near) as beside:
        rows = _Rows(Parts(where, beside), part_rows)
        yield rows.add
        rows.close()
        made = [beside / part_name(number) for number in range(rows.done)]
        write_table(pl.scan_parquet(made, glob=False), where)


@dataclass
class _Rows:
    """Rows that come in any lengths and leave in parts of one length."""

    parts: Parts
    part_rows: int
    done: int = 0  # parts written
    _waiting: list[pl.DataFrame] = field(default_factory=list)
    _height: int = 0  # rows that wait

    def add(self, frame: pl.DataFrame) -> None:
        self._waiting.append(frame)
        self._height += frame.height
        while self._height > self.part_rows:
            joined = pl.concat(self._waiting, rechunk=True)  # bytes do not tell how rows came
            self._write(joined[: self.part_rows])
            self._waiting = [joined[self.part_rows :]]
            self._height -= self.part_rows

    def close(self) -> None:
        if not self._waiting:
            raise InputError(f"There are no rows to write to {self.parts.place}.")
        self._write(pl.concat(self._waiting, rechunk=True))

    def _write(self, frame: pl.DataFrame) -> None:
        self.parts.write(self.done, frame)
        self.done += 1
