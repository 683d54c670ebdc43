"""Tables: files by suffix, directories of parts, or frames; read lazily, written whole or not."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, final

import numpy as np
import polars as pl

from fedipw.errors import InputError, NotFiniteError
from fedipw.numerics.checks import some
from fedipw.storage.atomic import check_place, unwritable, written_path
from fedipw.tables.columns import ENROLLED, ID, NO, YES

BATCH_ROWS = 131_072
CLAIM, RATIO = 4 * 2**30, 200  # bytes a file may claim to hold, and times its size beyond that
ALLOW = "FEDIPW_ALLOW_LARGE_FILES"
_MOST_PACKED = 1032  # bytes that one byte can stand for in a gzip file
_FLAGS = dict.fromkeys(YES, True) | dict.fromkeys(NO, False)


class ArrowStream(Protocol):
    """A frame of any library that speaks Arrow: polars, pandas, pyarrow, duckdb and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


TableLike: TypeAlias = "str | Path | pl.LazyFrame | ArrowStream | Table"


class Slice(NamedTuple):
    """Some rows of one file of a table."""

    path: Path
    first: int  # row of the file
    rows: int
    start: int  # rows of the table before it


class _Part(NamedTuple):
    """One file of a table, or a frame."""

    where: Path | str  # a frame has a name only
    query: pl.LazyFrame


@final
class Table:
    """A table: a file, a directory of .parquet files of one shape, or a frame.

    Nothing is read before it is asked for, and never more than a few batches are in memory; a frame
    is not copied. ``unit_id`` of a text file is text, ``enrolled`` is true or false.

    Parameters
    ----------
    source
        A path to a .parquet, .csv, .csv.gz, .tsv or .feather file, or to a directory; or a frame of
        polars, pandas, or any library that speaks Arrow.

    Examples
    --------
    >>> people = pl.DataFrame({"unit_id": ["a", "b", "c"], "age": [30, 61, 44]})
    >>> table = Table(people)
    >>> table.rows, table.schema.names(), [b["age"].sum() for b in table.batches(["age"], rows=2)]
    (3, ['unit_id', 'age'], [91, 44])
    >>> Table([30, 61, 44])
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: A table is a path (str or Path) or a frame (polars, pandas or any ...
    """

    def __init__(self, source: TableLike) -> None:
        self.path: Path | None = None
        self._frame: pl.DataFrame | pl.LazyFrame | None = None
        if isinstance(source, Table):
            self.path, self._frame = source.path, source._frame
        elif isinstance(source, str | Path):
            self.path = Path(source)
        else:
            self._frame = _frame_of(source)

    def __repr__(self) -> str:
        return f"Table({self.name})"

    @property
    def name(self) -> str:
        """How errors call it."""
        return "the table given" if self.path is None else str(self.path)

    @cached_property
    def parts(self) -> tuple[_Part, ...]:
        """The files, in order of their names."""
        if self.path is None:
            assert self._frame is not None
            return (_Part(self.name, _with_flags(self._frame.lazy(), self.name)),)
        paths = [self.path]
        if self.path.is_dir():
            paths = sorted(self.path.glob("*.parquet"))
            if not paths:
                raise InputError(f"{self.path} holds no .parquet file.")
        elif _format(self.path) and not self.path.is_file():
            raise InputError(f"No file {self.path}.")
        return tuple(_Part(path, _scan(path)) for path in paths)

    @cached_property
    def schema(self) -> pl.Schema:
        """Columns and types; every file must have the same."""
        first, *others = self.parts
        wanted, name = first.query.collect_schema(), Path(first.where).name
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
            with reading(part.where):
                out.append(int(part.query.select(pl.len()).collect().item()))
        return tuple(out)

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
            if isinstance(part.where, Path):
                check_claim(part.where, rows * 8 * max(1, len(self.schema)))
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
        with reading(self.path or self.name):
            return asked.collect(engine=self._engine)

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
            with reading(part.where):
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
                made.append(Slice(part.where, first, min(rows, size - first), start + first))
            start += size
        return tuple(made)

    def sample(self, rows: int, columns: Sequence[str], pieces: int = 8) -> pl.DataFrame:
        """Return about this many rows, in a few runs spread over the table."""
        if self.rows <= rows:
            return self.collect(self.scan().select(columns))
        each = max(1, rows // pieces)
        starts = np.linspace(0, self.rows - each, pieces).astype(np.int64).tolist()
        runs = [self.scan().select(columns).slice(start, each) for start in starts]
        return pl.concat([self.collect(run) for run in runs])


def check_claim(path: Path, claim: int) -> None:
    """Raise if a file claims more bytes than a stated size and than it can honestly hold.

    A few kilobytes can claim to be terabytes of zeros. Beyond :data:`CLAIM` bytes, and
    :data:`RATIO` times its size on disk, a file is refused, unless the environment variable
    ``FEDIPW_ALLOW_LARGE_FILES`` is set.
    """
    if claim <= CLAIM or os.environ.get(ALLOW):
        return
    size = path.stat().st_size
    if claim > RATIO * max(1, size):
        raise InputError(
            f"{path} has {size} bytes and claims to hold {claim / 2**30:.3g} GiB, {RATIO} times as "
            f"much or more: that is no table but a trap, or one of a single value. If you trust "
            f"it, set {ALLOW}=1."
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
    with reading(part.path):
        return _scan(part.path).select(columns).slice(part.first, part.rows).collect()


def read_table(source: TableLike) -> pl.DataFrame:
    """Return a whole table; one that is missing, damaged or of another kind is an error."""
    return Table(source).collect()


def write_table(
    frame: pl.DataFrame | pl.LazyFrame, path: str | Path, *, cleaned: bool = True
) -> None:
    """Write a table by suffix; the result of a query is written as it comes.

    See :func:`~fedipw.storage.atomic.written_path` for ``cleaned``.
    """
    place = Path(path)
    check_table_path(place)
    with written_path(place, cleaned=cleaned) as temporary:
        try:
            _FORMATS[_format(place)].write(frame.lazy(), temporary)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            raise unwritable(place, error) from error


def check_results(frame: pl.DataFrame, where: str | Path) -> None:
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


def check_table_path(path: Path) -> None:
    """Raise if a table cannot be written to ``path``, before any work is done."""
    _format(path)
    check_place(path)


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Turn whatever goes wrong with a table into an error that names it."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = str(error).split("\n")[0]
        if isinstance(where, str):
            raise InputError(f"{where} cannot be read: {reason}") from error
        kind = where.suffix[1:] or "parquet"
        raise InputError(
            f"{where} is not a readable {kind} table ({reason}). Restore it."
        ) from error


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

    scan: Callable[[Path], pl.LazyFrame]
    write: Callable[[pl.LazyFrame, Path], object]


def _text(separator: str) -> _Format:
    def scan(path: Path) -> pl.LazyFrame:
        return pl.scan_csv(
            path, separator=separator, schema_overrides={ID: pl.String}, infer_schema_length=None,
            glob=False,
        )  # fmt: skip

    return _Format(scan, lambda query, path: query.sink_csv(path, separator=separator))


def _write_gzip(query: pl.LazyFrame, path: Path) -> None:
    # without a name and a time in it: equal tables are equal files
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        query.sink_csv(packed)  # type: ignore[call-overload]


_FORMATS = {
    ".parquet": _Format(
        lambda path: pl.scan_parquet(path, glob=False), lambda query, path: query.sink_parquet(path)
    ),
    ".csv": _text(","),
    ".csv.gz": _text(",")._replace(write=_write_gzip),
    ".tsv": _text("\t"),
    ".feather": _Format(
        lambda path: pl.scan_ipc(path, glob=False),
        # in the layout that other programs read, too
        lambda query, path: query.sink_ipc(path, compat_level=pl.CompatLevel.oldest()),
    ),
}


def _format(path: Path) -> str:
    """Return the suffix that says how a file is written."""
    for suffix in _FORMATS:
        if path.name.lower().endswith(suffix):
            return suffix
    *most, last = _FORMATS
    raise InputError(f"{path}: tables are {', '.join(most)} or {last} files, by suffix.")


def _scan(path: Path) -> pl.LazyFrame:
    with reading(path):
        if _format(path) == ".csv.gz":
            check_claim(path, _packed_size(path))
        query = _FORMATS[_format(path)].scan(path)
        names = query.collect_schema().names()
    twice = [name for name in names if name.endswith("_duplicated_0")]
    if twice:
        raise InputError(f"{path}: column {twice[0].removesuffix('_duplicated_0')!r} stands twice.")
    return _with_flags(query, path)


def _with_flags(query: pl.LazyFrame, where: Path | str) -> pl.LazyFrame:
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


def pandas_frame(frame: pl.DataFrame) -> Any:
    """Return a polars frame as a pandas one; needs pandas."""
    try:
        import pandas as pd  # noqa: PLC0415
    except ImportError as error:
        raise InputError("A pandas frame needs pandas: pip install pandas.") from error
    return pd.DataFrame(frame.to_dict(as_series=False))
