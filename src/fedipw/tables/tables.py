"""Tables on disk: Parquet or CSV by suffix, read whole or refused, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.population import ENROLLED, ID, NO, YES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def read_table(path: Path) -> pl.DataFrame:
    """Return a table; ``unit_id`` of a CSV file is text, ``enrolled`` is true or false.

    A file that is missing, damaged or of another kind is an error that names it.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: tables are .parquet or .csv files.")
    if not path.is_file():
        raise InputError(f"No file {path}.")
    try:
        frame = reader(path)
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable {path.suffix[1:]} table: {error}") from error
    twice = [name for name in frame.columns if name.endswith("_duplicated_0")]
    if twice:
        raise InputError(f"{path}: column {twice[0].removesuffix('_duplicated_0')!r} stands twice.")
    return frame.with_columns(_flags(frame[ENROLLED], path)) if ENROLLED in frame.columns else frame


def write_table(frame: pl.DataFrame, path: Path) -> None:
    """Write a table under a temporary name and rename it: readers never see half of it."""
    written_from(frame.lazy(), path)


def written_from(query: pl.LazyFrame, path: Path) -> None:
    """Write the result of a query as it comes, under a temporary name, and rename it."""
    check_table_path(path)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        if path.suffix.lower() == ".parquet":
            query.sink_parquet(temporary)
        else:
            query.sink_csv(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write text files under temporary names and rename them: all of them appear, or none."""
    made: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            check_place(path)
            made[path] = path.with_name(f".{path.name}.partial")
            with made[path].open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in made.items():
            temporary.replace(path)
    except OSError as error:
        raise InputError(f"{some(map(str, texts))} cannot be written: {error.strerror}.") from error
    finally:
        for temporary in made.values():
            temporary.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Raise if a file cannot be written to ``path``, before any work is done."""
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: its directory does not exist or it is one.")


def check_table_path(path: Path) -> None:
    """Raise if a table cannot be written to ``path``, before any work is done."""
    if path.suffix.lower() not in _READERS:
        raise InputError(f"{path}: tables are written as .parquet or .csv, by suffix.")
    check_place(path)


def _csv(path: Path) -> pl.DataFrame:
    return pl.read_csv(path, schema_overrides={ID: pl.String}, infer_schema_length=None)


_READERS: dict[str, Callable[[Path], pl.DataFrame]] = {
    ".parquet": pl.read_parquet,
    ".csv": _csv,
}


def _flags(column: pl.Series, path: Path) -> pl.Series:
    """Return ``enrolled`` as booleans, from true/false, yes/no or 1/0 in any case."""
    if column.dtype == pl.Boolean:
        return column
    text = column.cast(pl.String).str.to_lowercase().str.strip_chars()
    odd = text.filter(~text.is_in([*YES, *NO]) & text.is_not_null())
    if len(odd):
        raise InputError(f"{path}: {ENROLLED!r} holds {odd[0]!r}; it must be true or false.")
    return text.is_in(list(YES)).alias(ENROLLED) if not column.null_count() else column
