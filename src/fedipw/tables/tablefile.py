"""Tables on disk that are read lazily, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.population import ENROLLED, ID, NO, YES

BATCH_ROWS = 131_072
_FLAGS = dict.fromkeys(YES, True) | dict.fromkeys(NO, False)


class Slice(NamedTuple):
    """Some rows of one file of a table."""

    path: Path
    first: int  # row of the file
    rows: int
    start: int  # rows of the table before it


@dataclass(frozen=True)
class TableFile:
    """A table on disk: one .parquet or .csv file, or a directory of .parquet files of one shape.

    Nothing is read before it is asked for, and never more than a few batches are in memory.
    ``unit_id`` of a CSV file is text, ``enrolled`` is true or false.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "people.parquet"
    >>> pl.DataFrame({"unit_id": ["a", "b", "c"], "age": [30, 61, 44]}).write_parquet(path)
    >>> table = TableFile(path)
    >>> table.rows, table.schema.names(), [b["age"].sum() for b in table.batches(["age"], rows=2)]
    (3, ['unit_id', 'age'], [91, 44])
    """

    path: Path

    @cached_property
    def parts(self) -> tuple[Path, ...]:
        """The files, in order of their names."""
        if self.path.is_dir():
            found = tuple(sorted(self.path.glob("*.parquet")))
            if not found:
                raise InputError(f"{self.path} holds no .parquet file.")
            return found
        if self.path.suffix.lower() not in {".parquet", ".csv"}:
            raise InputError(f"{self.path}: tables are .parquet or .csv files.")
        if not self.path.is_file():
            raise InputError(f"No file {self.path}.")
        return (self.path,)

    @cached_property
    def schema(self) -> pl.Schema:
        """Columns and types; every file must have the same."""
        first = _schema(self.parts[0])
        for part in self.parts[1:]:
            other = _schema(part)
            for name in [*first.names(), *other.names()]:
                here, there = other.get(name), first.get(name)
                if here != there:
                    raise InputError(
                        f"{part}: column {name!r} is {here or 'missing'}, in "
                        f"{self.parts[0].name} it is {there or 'missing'}. All files of a table "
                        "need the same columns."
                    )
        return first

    @cached_property
    def rows(self) -> int:
        """Number of rows; from the footers of Parquet files, counted in CSV."""
        return sum(self._part_rows)

    @cached_property
    def _part_rows(self) -> tuple[int, ...]:
        out = []
        for part in self.parts:
            with reading(part):
                out.append(int(_scan(part).select(pl.len()).collect().item()))
        return tuple(out)

    def require(self, names: Sequence[str]) -> None:
        """Raise if a column is missing."""
        lacking = [name for name in names if name not in self.schema]
        if lacking:
            raise InputError(
                f"{self.path} has no column {some(map(repr, lacking))}; it has "
                f"{some(self.schema.names())}."
            )

    def scan(self) -> pl.LazyFrame:
        """Return the table as a query."""
        names = self.schema.names()  # all files alike, or an error that names the odd one
        return (
            pl.concat([_scan(part).select(names) for part in self.parts])
            if len(self.parts) > 1
            else _scan(self.parts[0])
        )

    def batches(
        self, columns: Sequence[str] | None = None, *, rows: int = BATCH_ROWS
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows in order, some columns of them; no batch goes beyond one file."""
        chosen = self.schema.names() if columns is None else columns
        self.require(chosen)
        for part, size in zip(self.parts, self._part_rows, strict=True):
            done = 0
            with reading(part):
                query = _scan(part).select(chosen)
                for batch in query.collect_batches(chunk_size=rows, maintain_order=True, lazy=True):
                    done += batch.height
                    yield batch
            if done != size:  # batches may just end where a file is damaged
                raise InputError(f"{part}: only {done} of {size} rows are readable.")

    def collect(self, query: pl.LazyFrame) -> pl.DataFrame:
        """Return the result of a query on this table, computed in batches."""
        with reading(self.path):
            return query.collect(engine="streaming")

    def slices(self, rows: int) -> tuple[Slice, ...]:
        """Return ranges of at most this many rows that together are the table."""
        made, start = [], 0
        for part, size in zip(self.parts, self._part_rows, strict=True):
            for first in range(0, size, rows):
                made.append(Slice(part, first, min(rows, size - first), start + first))
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


def rows_of(part: Slice, columns: Sequence[str]) -> pl.DataFrame:
    """Return some rows of one file."""
    with reading(part.path):
        return _scan(part.path).select(columns).slice(part.first, part.rows).collect()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with a file into an error that names it."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"{path} is not a readable {path.suffix[1:] or 'parquet'} table ({reason}). Restore it."
        ) from error


def _schema(path: Path) -> pl.Schema:
    with reading(path):
        return _scan(path).collect_schema()


def _scan(path: Path) -> pl.LazyFrame:
    if path.suffix.lower() == ".parquet":
        query = pl.scan_parquet(path, glob=False)
    else:
        query = pl.scan_csv(
            path, schema_overrides={ID: pl.String}, infer_schema_length=None, glob=False
        )
    with reading(path):
        schema = query.collect_schema()
    twice = [name for name in schema.names() if name.endswith("_duplicated_0")]
    if twice:
        raise InputError(f"{path}: column {twice[0].removesuffix('_duplicated_0')!r} stands twice.")
    if schema.get(ENROLLED, pl.Boolean) == pl.Boolean:
        return query
    text = pl.col(ENROLLED).cast(pl.String).str.to_lowercase().str.strip_chars()
    with reading(path):
        odd = query.select(text.filter(~text.is_in(list(_FLAGS)))).head(1).collect()
    if odd.height:
        raise InputError(f"{path}: {ENROLLED!r} holds {odd.item()!r}; it must be true or false.")
    flags = text.replace_strict(_FLAGS, return_dtype=pl.Boolean, default=None)
    return query.with_columns(flags.alias(ENROLLED))
