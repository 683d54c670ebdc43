"""Tables: files by suffix, directories of parts, or frames; read lazily, written whole or not."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, final

import numpy as np
import polars as pl

from fedipw.errors import FedIPWWarning, InputError, NotFiniteError
from fedipw.numerics.checks import shown, some, visible
from fedipw.storage.atomic import unwritable
from fedipw.storage.places import (
    Place,
    check_place,
    children,
    copies_of,
    local_file,
    place_of,
    written_path,
)
from fedipw.storage.remote import Copy, Remote
from fedipw.tables.columns import ENROLLED, ID, NO, YES

BATCH_ROWS = 131_072
CLAIM, RATIO = 4 * 2**30, 200  # bytes a file may claim to hold, and times its size beyond that
ALLOW = "FEDIPW_ALLOW_LARGE_FILES"
_MOST_PACKED = 1032  # bytes that one byte can stand for in a gzip file
_FLAGS = dict.fromkeys(YES, True) | dict.fromkeys(NO, False)
_MARKS = ",;\t|"  # between the cells of a text file
_TEXTS = (pl.String, pl.Categorical, pl.Enum)
_HEADER = 2**20  # bytes of a text file's first line
UNFINISHED, SUCCESS = "_unfinished-", "_SUCCESS"  # in a store: where parts wait, that all are there


class ArrowStream(Protocol):
    """A frame of any library that speaks Arrow: polars, pandas, pyarrow, duckdb and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


TableLike: TypeAlias = "str | Path | Remote | pl.LazyFrame | ArrowStream | Table"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the files of a table are written, where that is not as usual."""

    id: str = ID  # column of the clients' identifiers
    separator: str | None = None  # between the cells of text; none is the one of the header

    def __post_init__(self) -> None:
        given = self.separator
        if given is not None and (len(given) != 1 or not given.isascii() or given in '"\r\n'):
            raise InputError(
                f"A separator is one character, such as ; or | or a tab, not {shown(given)}."
            )


class Slice(NamedTuple):
    """Some rows of one file of a table."""

    path: Place
    first: int  # row of the file
    rows: int
    start: int  # rows of the table before it
    dialect: Dialect = Dialect()


class _Part(NamedTuple):
    """One file of a table, or a frame."""

    where: Place | str  # a frame has a name only
    query: pl.LazyFrame
    copy: Copy | None = None  # of the file, which is there for as long as this part is


@final
class Table:
    """A table: a file, a directory of .parquet files of one shape, or a frame.

    Nothing is read before it is asked for, and never more than a few batches are in memory; a frame
    is not copied. ``unit_id`` of a text file is text, ``enrolled`` is true or false. Files at a URL
    are copied to the temporary directory once and stay there for as long as the table is used.

    Parameters
    ----------
    source
        A path or URL of a .parquet, .csv, .csv.gz, .tsv or .feather file, or of a directory; or a
        frame of polars, pandas, or any library that speaks Arrow.
    id
        The column of the clients' identifiers; it is ``unit_id`` in all that is made of the table.
    separator
        What stands between the cells of a text file. Without one it is the first of comma,
        semicolon, tab and bar that the header has (of a .tsv file, a tab if it has one).

    Examples
    --------
    >>> people = pl.DataFrame({"unit_id": ["a", "b", "c"], "age": [30, 61, 44]})
    >>> table = Table(people)
    >>> table.rows, table.schema.names(), [b["age"].sum() for b in table.batches(["age"], rows=2)]
    (3, ['unit_id', 'age'], [91, 44])
    >>> Table(people.rename({"unit_id": "device"}), id="device").schema.names()
    ['unit_id', 'age']
    >>> Table([30, 61, 44])
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: A table is a path (str or Path) or a frame (polars, pandas or any ...
    """

    def __init__(
        self,
        source: TableLike,
        *,
        id: str = ID,  # noqa: A002 (as the option is called)
        separator: str | None = None,
    ) -> None:
        self.path: Place | None = None
        self._frame: pl.DataFrame | pl.LazyFrame | None = None
        self._dialect = Dialect(id, separator)
        if isinstance(source, Table):
            self.path, self._frame, self._dialect = source.path, source._frame, source._dialect
        elif isinstance(source, str | Path | Remote):
            self.path = place_of(source)
        else:
            self._frame = _frame_of(source)

    def __repr__(self) -> str:
        return f"Table({self.name})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels to other processes: not the copies of remote files, made there."""
        here = {"parts", "_honest"} if isinstance(self.path, Remote) else set()
        return {name: value for name, value in self.__dict__.items() if name not in here}

    @property
    def name(self) -> str:
        """How errors call it."""
        return "the table given" if self.path is None else str(self.path)

    @cached_property
    def parts(self) -> tuple[_Part, ...]:
        """The files, in order of their names."""
        if self.path is None:
            assert self._frame is not None
            query = _identified(self._frame.lazy(), self._dialect.id, self.name)
            return (_Part(self.name, _with_flags(query, self.name)),)
        places = [self.path]
        if self.path.is_dir():
            places = _parts_in(self.path)
        elif _format(self.path) and not self.path.is_file():
            raise InputError(f"No file {self.path}.")
        return tuple(
            _Part(place, _scan(copy.path, self._dialect, place), copy)
            for place, copy in zip(places, copies_of(places), strict=True)
        )

    @cached_property
    def schema(self) -> pl.Schema:
        """Columns and types; every file must have the same."""
        first, *others = self.parts
        wanted, name = first.query.collect_schema(), Path(str(first.where)).name
        for part in others:
            check_same_columns(part.query.collect_schema(), wanted, str(part.where), name)
        return wanted

    @cached_property
    def rows(self) -> int:
        """Number of rows; from the footers of Parquet files, counted in text."""
        return sum(self._part_rows)

    @cached_property
    def _part_rows(self) -> tuple[int, ...]:
        out = []
        for part in self.parts:
            with _reading(part):
                out.append(int(part.query.select(pl.len()).collect().item()))
        return tuple(out)

    def stamp(self) -> list[Any]:
        """Return plain values that differ once the table has changed.

        Names, sizes and times of its files; a digest of a frame's columns and rows.
        """
        if isinstance(self.path, Remote):
            raise InputError(
                f"{self.name} is at a URL, of which it is not known when it changes: a saved state "
                "(--state, state=) goes with local tables."
            )
        if self.path is not None:
            found = [Path(str(part.where)) for part in self.parts]
            return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in found]
        frame = self.collect()
        digest = hashlib.sha256(str(list(frame.schema.items())).encode())
        digest.update(frame.hash_rows(seed=1).to_numpy().tobytes())
        return [digest.hexdigest()]

    def require(self, names: Sequence[str]) -> None:
        """Raise if a column is missing."""
        lacking = [name for name in names if name not in self.schema]
        if lacking:
            raise InputError(
                f"{self.name} has no column {some(map(repr, lacking))}; it has "
                f"{some(self.schema.names())}."
            )

    @cached_property
    def _honest(self) -> tuple[_Part, ...]:
        """The parts, none of which claims to be far larger than it can honestly be."""
        for part, rows in zip(self.parts, self._part_rows, strict=True):
            if part.copy is not None:
                check_claim(part.copy.path, rows * 8 * max(1, len(self.schema)), part.where)
        return self.parts

    def scan(self) -> pl.LazyFrame:
        """Return the table as a query."""
        names = self.schema.names()  # all files alike, or an error that names the odd one
        if len(self._honest) == 1:
            return self._honest[0].query
        return pl.concat([part.query.select(names) for part in self._honest])

    def collect(self, query: pl.LazyFrame | None = None) -> pl.DataFrame:
        """Return the result of a query on this table, computed in batches; all of it by default."""
        asked = self.scan() if query is None else query
        with reading(self.path or self.name, self._only_file):
            return asked.collect(engine=self._engine)

    @property
    def _only_file(self) -> Path | None:
        """The local file, if there is one."""
        copy = self.parts[0].copy
        return None if copy is None or len(self.parts) > 1 else copy.path

    @property
    def _engine(self) -> Literal["in-memory", "streaming"]:
        """Which engine reads it: streaming would copy what is in memory already."""
        return "in-memory" if isinstance(self._frame, pl.DataFrame) else "streaming"

    def batches(
        self, columns: Sequence[str] | None = None, *, rows: int = BATCH_ROWS
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows in order, some columns of them; no batch goes beyond one file."""
        chosen = self.schema.names() if columns is None else columns
        self.require(chosen)
        for part, size in zip(self._honest, self._part_rows, strict=True):
            done = 0
            with _reading(part):
                query = part.query.select(chosen)
                for batch in (
                    query.collect(engine=self._engine).iter_slices(rows)
                    if isinstance(self._frame, pl.DataFrame)
                    else query.collect_batches(chunk_size=rows, maintain_order=True, lazy=True)
                ):
                    done += batch.height
                    yield batch
            if done != size:  # batches may just end where a file is damaged
                raise InputError(f"{part.where}: only {done} of {size} rows are readable.")

    def slices(self, rows: int) -> tuple[Slice, ...]:
        """Return ranges of at most this many rows of files that together are the table."""
        made, start = [], 0
        for part, size in zip(self.parts, self._part_rows, strict=True):
            if isinstance(part.where, str):
                raise InputError(
                    "The table given is in memory, where the workers of a cluster cannot read it: "
                    "write it to a file they see."
                )
            for first in range(0, size, rows):
                many = min(rows, size - first)
                made.append(Slice(part.where, first, many, start + first, self._dialect))
            start += size
        return tuple(made)

    def warn_of_odd_cells(self) -> None:
        """Warn of columns of a text file that are numbers but for a few cells: they are text."""
        for part in self.parts:
            if isinstance(part.where, str) or _format(part.where) not in _TEXT_FILES:
                continue
            texts = [n for n, kind in self.schema.items() if kind == pl.String]
            for name in texts:
                if name not in {ID, ENROLLED}:
                    _warn_of_odd_cell(part, name)

    def sample(self, rows: int, columns: Sequence[str], pieces: int = 8) -> pl.DataFrame:
        """Return about this many rows, in a few runs spread over the table."""
        if self.rows <= rows:
            return self.collect(self.scan().select(columns))
        each = max(1, rows // pieces)
        starts = np.linspace(0, self.rows - each, pieces).astype(np.int64).tolist()
        runs = [self.scan().select(columns).slice(start, each) for start in starts]
        return pl.concat([self.collect(run) for run in runs])


def _parts_in(directory: Place) -> list[Place]:
    """Return the files of a table in parts, in order of their names."""
    try:
        found = children(directory)
    except OSError as error:
        raise InputError(f"{directory} cannot be read: {error.strerror}.") from error
    names = {place.name for place in found}
    if SUCCESS not in names and any(name.startswith(UNFINISHED) for name in names):
        raise InputError(
            f"{directory} is being written, or was left unfinished: it has no {SUCCESS}. Wait, or "
            "write it again."
        )
    parts = [place for place in found if place.name.endswith(".parquet")]
    if not parts:
        raise InputError(f"{directory} holds no .parquet file.")
    return parts


def check_claim(path: Path, claim: int, where: Place | str | None = None) -> None:
    """Raise if a file claims more bytes than a stated size and than it can honestly hold.

    A few kilobytes can claim to be terabytes of zeros. Beyond :data:`CLAIM` bytes, and
    :data:`RATIO` times its size on disk, a file is refused, unless the environment variable
    ``FEDIPW_ALLOW_LARGE_FILES`` is set. ``where`` is what errors call it, if not by its path.
    """
    if claim <= CLAIM or os.environ.get(ALLOW):
        return
    size = path.stat().st_size
    if claim > RATIO * max(1, size):
        raise InputError(
            f"{where or path} has {size} bytes and claims to hold {claim / 2**30:.3g} GiB, "
            f"{RATIO} times as much or more: that is no table but a trap, or one of a single "
            f"value. If you trust it, set {ALLOW}=1."
        )


def _packed_size(path: Path) -> int:
    """Return how many bytes a packed file holds, or where it is too many to go on counting."""
    size, held = path.stat().st_size, 0
    if size * _MOST_PACKED <= CLAIM:
        return 0
    with gzip.open(path) as file:
        while part := file.read(2**20):
            held += len(part)
            if held > max(CLAIM, RATIO * size):
                break
    return held


def rows_of(part: Slice, columns: Sequence[str]) -> pl.DataFrame:
    """Return some rows of one file."""
    with local_file(part.path) as file, reading(part.path, file):
        query = _scan(file, part.dialect, part.path)
        return query.select(columns).slice(part.first, part.rows).collect()


def read_table(source: TableLike) -> pl.DataFrame:
    """Return a whole table; one that is missing, damaged or of another kind is an error."""
    return Table(source).collect()


def write_table(
    frame: pl.DataFrame | pl.LazyFrame, path: str | Place, *, cleaned: bool = True
) -> None:
    """Write a table by suffix; the result of a query is written as it comes.

    See :func:`~fedipw.storage.atomic.written_path` for ``cleaned``.
    """
    place = place_of(path)
    check_table_path(place)
    with written_path(place, cleaned=cleaned) as temporary:
        try:
            _FORMATS[_format(place)].write(frame.lazy(), temporary)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            raise unwritable(place, error) from error


def check_results(frame: pl.DataFrame, where: str | Place) -> None:
    """Raise if a table of results holds a number that is not finite; a null is none.

    >>> check_results(pl.DataFrame({"unit_id": ["a"], "weight": [float("inf")]}), "weights.csv")
    Traceback (most recent call last):
    ...
    fedipw.errors.NotFiniteError: weights.csv would hold 1 number(s) that are not finite, in ...
    """
    floats = [name for name, kind in frame.schema.items() if kind.is_float()]
    counts = frame.select((~pl.col(floats).is_finite()).sum()).row(0) if floats else ()
    bad = {name: count for name, count in zip(floats, counts, strict=True) if count}
    if bad:
        raise NotFiniteError(str(where), tuple(bad), sum(bad.values()))


def check_table_path(path: str | Place) -> None:
    """Raise if a table cannot be written to ``path``, before any work is done."""
    place = place_of(path)
    _format(place)
    check_place(place)


@contextmanager
def reading(where: Place | str, file: Path | None = None) -> Iterator[None]:
    """Turn whatever goes wrong with a table into an error that names it.

    ``file`` is the local file that is read, where ``where`` is not.
    """
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        path = where if isinstance(where, Path) else file
        if path is None:
            reason = str(error).split("\n", maxsplit=1)[0]
            raise InputError(f"{where} cannot be read: {reason}") from error
        raise InputError(_unreadable(path, str(error), where)) from error


@contextmanager
def _reading(part: _Part) -> Iterator[None]:
    with reading(part.where, None if part.copy is None else part.copy.path):
        yield


def _unreadable(path: Path, said: str, where: Place | str) -> str:
    """Return why a file cannot be read, without the advice of the library that read it.

    That advice is on options which users of this package do not have.
    """
    kind, reason = path.suffix[1:] or "parquet", said.split("\n", maxsplit=1)[0]
    remedy = "Restore it."
    if "utf-8" in said.lower():
        return f"{where} {_encoding(path)}"
    if "more fields than" in said:
        reason, remedy = _long_line(path), "Put cells that hold the separator in quotes."
    elif "properly escaped" in said:
        reason, remedy = 'a quote (") is opened and not closed', "Close it."
    reason = reason.replace(str(path), str(where))
    return f"{where} is not a readable {kind} table ({reason}). {remedy}"


def _encoding(path: Path) -> str:
    """Return in words how a text file that is not UTF-8 seems to be written, and what to do."""
    with _opened(path) as file:
        first = file.read(4)
        looks = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}.get(first[:2], "")
        if not looks and b"\x00" in first:
            looks = "UTF-16LE" if first[1:2] == b"\x00" else "UTF-16BE"
        file.seek(0)
        where = ""
        for number, line in enumerate(file if not looks else (), start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                odd = line[error.start]
                looks = "WINDOWS-1252 (Latin-1)"
                sign = bytes([odd]).decode("cp1252", errors="replace")
                where = f": line {number} has the byte 0x{odd:02X}, there {sign!r}"
                break
    name = looks.split(" ")[0] or "ITS-ENCODING"
    return (
        f"is not UTF-8; it looks like {looks or 'another encoding'}{where}. Convert it: iconv -f "
        f"{name} -t UTF-8 {path.name} > converted.csv"
    )


def _long_line(path: Path) -> str:
    """Return which line of a text file has more cells than its header."""
    with _opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
        lines = csv.reader(text, delimiter=_separator(path))
        heads = len(next(lines, []))
        for cells in lines:
            if len(cells) > heads:
                return f"line {lines.line_num} has more fields than the header: {len(cells)}"
    return "a line has more fields than the header"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Yield a text file as bytes, unpacked if it is packed."""
    with path.open("rb") as plain:
        packed = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        if not packed:
            yield plain
            return
        with gzip.open(plain) as file:
            yield file


def _separator(path: Path) -> str:
    """Return what stands between the names of a text file's columns."""
    with _opened(path) as file:
        head = re.sub(r'"[^"]*"', "", file.readline(_HEADER).decode("utf-8", errors="replace"))
    usual = "\t" if _format(path) == ".tsv" else ","
    return next((mark for mark in usual + _MARKS if mark in head), usual)


def check_same_columns(schema: pl.Schema, first: pl.Schema, where: str, first_name: str) -> None:
    """Raise if a file has other columns or types than the first one of its table."""
    lacking = [name for name in first.names() if name not in schema]
    more = [name for name in schema if name not in first]
    if lacking or more:
        raise InputError(
            f"{where} has other columns than {first_name}: "
            f"{'no ' + some(lacking) if lacking else 'also ' + some(more)}."
        )
    changed = [name for name in first if schema[name] != first[name]]
    if changed:
        name = changed[0]
        raise InputError(
            f"{where}: column {name!r} is {schema[name]}, in {first_name} it is {first[name]}."
        )


class _Format(NamedTuple):
    """How files of one suffix are read and written."""

    scan: Callable[[Path, Dialect, Place], pl.LazyFrame]  # errors name the place
    write: Callable[[pl.LazyFrame, Path], object]


def _text(separator: str) -> _Format:
    return _Format(_scan_text, lambda query, path: query.sink_csv(path, separator=separator))


def _scan_text(path: Path, dialect: Dialect, where: Place) -> pl.LazyFrame:
    """Return a text file as a query; where commas do not part cells, they may part decimals."""
    separator = dialect.separator or _separator(path)

    def scanned(*, decimal_comma: bool) -> pl.LazyFrame:
        return pl.scan_csv(
            path, separator=separator, schema_overrides={dialect.id: pl.String},
            infer_schema_length=None, glob=False, decimal_comma=decimal_comma,
        )  # fmt: skip

    query = scanned(decimal_comma=False)
    if separator == ",":
        return query
    points = query.collect_schema()
    if all(kind != pl.String for name, kind in points.items() if name != dialect.id):
        return query
    other = scanned(decimal_comma=True)
    commas = other.collect_schema()
    by_comma = [n for n in points if points[n] == pl.String and commas[n].is_float()]
    by_point = [n for n in points if commas[n] == pl.String and points[n].is_float()]
    if by_comma and by_point:
        raise InputError(
            f"{where} has decimal commas in column {by_comma[0]!r} and decimal points in "
            f"{by_point[0]!r}: write all of them with points."
        )
    return other if by_comma else query


def _write_gzip(query: pl.LazyFrame, path: Path) -> None:
    # without a name and a time in it: equal tables are equal files
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        query.sink_csv(packed)  # type: ignore[call-overload]


_FORMATS = {
    ".parquet": _Format(
        lambda path, *_: pl.scan_parquet(path, glob=False),
        lambda query, path: query.sink_parquet(path),
    ),
    ".csv": _text(","),
    ".csv.gz": _text(",")._replace(write=_write_gzip),
    ".tsv": _text("\t"),
    ".feather": _Format(
        lambda path, *_: pl.scan_ipc(path, glob=False),
        # in the layout that other programs read, too
        lambda query, path: query.sink_ipc(path, compat_level=pl.CompatLevel.oldest()),
    ),
}


_TEXT_FILES = (".csv", ".csv.gz", ".tsv")


def _format(path: Place) -> str:
    """Return the suffix that says how a file is written."""
    for suffix in _FORMATS:
        if path.name.lower().endswith(suffix):
            return suffix
    *most, last = _FORMATS
    raise InputError(f"{path}: tables are {', '.join(most)} or {last} files, by suffix.")


def _scan(path: Path, dialect: Dialect, where: Place) -> pl.LazyFrame:
    with reading(where, path):
        if _format(path) == ".csv.gz":
            check_claim(path, _packed_size(path), where)
        query = _FORMATS[_format(path)].scan(path, dialect, where)
        names = query.collect_schema().names()
    twice = [name for name in names if name.endswith("_duplicated_0")]
    if twice:
        name = twice[0].removesuffix("_duplicated_0")
        raise InputError(f"{where}: column {name!r} stands twice.")
    return _with_flags(_identified(query, dialect.id, where), where)


def _identified(query: pl.LazyFrame, column: str, where: Place | str) -> pl.LazyFrame:
    """Return a table whose identifiers are in ``unit_id``, whatever they are called there."""
    if column == ID:
        return query
    with reading(where):
        names = query.collect_schema().names()
    if column not in names:
        raise InputError(
            f"{where} has no column {column!r} of identifiers; it has {some(names)}. Name another "
            f"one by --id (id=)."
        )
    if ID in names:
        raise InputError(
            f"{where} has both {column!r}, which --id (id=) names, and {ID!r}: leave one of them "
            "out."
        )
    return query.rename({column: ID})


def odd_number(column: pl.Series) -> str:
    """Return which cell of a column that must hold numbers holds none, in words.

    >>> odd_number(pl.Series("age", ["30", "n/a", "61"]))
    "row 2, column 'age': 'n/a' is not a number"
    >>> odd_number(pl.Series("age", [True, False]))
    "column 'age' must hold numbers, not Boolean"
    """
    if column.dtype in _TEXTS:
        odd = (_as_number(column.cast(pl.String)).is_null() & column.is_not_null()).arg_true()
        if len(odd):
            more = f" ({len(odd)} such cells)" if len(odd) > 1 else ""
            cell = shown(column[int(odd[0])])
            return f"row {odd[0] + 1}, column {column.name!r}: {cell} is not a number{more}"
    return f"column {column.name!r} must hold numbers, not {column.dtype}"


_Column = TypeVar("_Column", pl.Series, pl.Expr)


def _as_number(text: _Column) -> _Column:
    return text.str.strip_chars().cast(pl.Float64, strict=False)


def _warn_of_odd_cell(part: _Part, name: str) -> None:
    """Warn if a column of texts has more numbers than other cells."""
    column = pl.col(name)
    odd = column.is_not_null() & _as_number(column).is_null()
    with _reading(part):
        texts, given = part.query.select(odd.sum(), column.count().alias("(n)")).collect().row(0)
        if not 0 < texts < 0.5 * given:
            return
        first = part.query.select(column).with_row_index("(row)").filter(odd).head(1).collect()
    row, cell = first.row(0)
    warnings.warn(
        f"{part.where} row {row + 1}, column {name!r}: {shown(cell)} is not a number ({texts} of "
        f"{given} cells are not), so the column is text and each of its values a category. If it "
        "holds numbers, leave such cells empty.",
        FedIPWWarning,
        stacklevel=3,
    )


def _with_flags(query: pl.LazyFrame, where: Place | str) -> pl.LazyFrame:
    """Return a table with ``enrolled`` as true or false, from numbers or text in any case."""
    with reading(where):
        kind = query.collect_schema().get(ENROLLED, pl.Boolean)
    if kind == pl.Boolean:
        return query
    if not (kind.is_numeric() or kind in (pl.String, pl.Categorical, pl.Enum, pl.Null)):
        raise InputError(f"{where}: {ENROLLED!r} holds {kind}; it must be true or false.")
    text = pl.col(ENROLLED).cast(pl.String).str.to_lowercase().str.strip_chars()
    with reading(where):
        odd = query.select(text.filter(~text.is_in(list(_FLAGS)))).head(1).collect()
    if odd.height:
        raise InputError(f"{where}: {ENROLLED!r} holds {odd.item()!r}; it must be true or false.")
    flags = text.replace_strict(_FLAGS, return_dtype=pl.Boolean, default=None)
    return query.with_columns(flags.alias(ENROLLED))


def _frame_of(source: object) -> pl.DataFrame | pl.LazyFrame:
    """Return a frame of any library in polars, without a copy where that can be."""
    if isinstance(source, pl.DataFrame | pl.LazyFrame):
        return source
    try:
        if type(source).__module__.split(".")[0] == "pandas" and hasattr(source, "columns"):
            return _of_pandas(source)
        if hasattr(source, "__arrow_c_stream__"):
            return pl.DataFrame(source)
    except (ImportError, TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise InputError(f"The {type(source).__name__} given cannot be read: {error}.") from error
    raise InputError(
        "A table is a path (str or Path) or a frame (polars, pandas or any with an Arrow stream), "
        f"not {type(source).__name__}."
    )


def _of_pandas(frame: Any) -> pl.DataFrame:
    """Return a pandas frame; pyarrow is used where it is installed, and not needed."""
    try:
        return pl.from_pandas(frame)
    except ImportError:
        columns = []
        for name in frame.columns:
            values = frame[name].to_numpy()
            if values.dtype == object:
                lost = frame[name].isna()
                values = [None if gone else v for v, gone in zip(values, lost, strict=True)]
            columns.append(pl.Series(str(name), values, nan_to_null=True))
        return pl.DataFrame(columns)


def paragraphs(text: str) -> str:
    """Return lines of text as HTML, for notebooks.

    >>> paragraphs("2 < 3")
    '<p>2 &lt; 3</p>'
    """
    return "".join(f"<p>{escape(visible(line))}</p>" for line in text.splitlines())


def pandas_frame(frame: pl.DataFrame) -> Any:
    """Return a polars frame as a pandas one; needs pandas."""
    try:
        import pandas as pd  # noqa: PLC0415
    except ImportError as error:
        raise InputError("A pandas frame needs pandas: pip install pandas.") from error
    return pd.DataFrame(frame.to_dict(as_series=False))
