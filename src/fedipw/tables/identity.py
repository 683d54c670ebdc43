"""Whether identifiers are unique, in memory that does not grow with the table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.population import ID

if TYPE_CHECKING:
    from fedipw.tables.tablefile import TableFile

_BUCKET_ROWS = 4_000_000


def require_unique_ids(table: TableFile) -> None:
    r"""Raise if ``unit_id`` is missing somewhere or stands twice.

    Hashes of identifiers are dealt into files small enough to sort one by one; what looks equal
    there is compared in full.

    >>> from pathlib import Path
    >>> from fedipw.tables import TableFile
    >>> path = Path(tempfile.mkdtemp()) / "people.csv"
    >>> _ = path.write_text("unit_id,age\na,30\nb,61\na,44\n")
    >>> require_unique_ids(TableFile(path))
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: ...people.csv: unit_id must be unique; 1 value(s) stand more than...
    """
    table.require([ID])
    buckets = max(1, -(-table.rows // _BUCKET_ROWS))
    with tempfile.TemporaryDirectory(prefix="fedipw-ids-") as directory:
        files = [open(f"{directory}/{k}", "w+b") for k in range(buckets)]  # noqa: SIM115
        try:
            for hashes in _hashes(table):
                _deal(hashes, files)
            suspects = np.concatenate([_repeated(file) for file in files])
        finally:
            for file in files:
                file.close()
    if suspects.size:
        _compare(table, suspects)


def _hashes(table: TableFile) -> Iterator[Any]:
    done = 0
    for batch in table.batches([ID], rows=1_000_000):
        missing = batch[ID].null_count()
        if missing:
            first = done + int(batch[ID].is_null().arg_max() or 0) + 1
            raise InputError(f"{table.path}: {missing} row(s) have no {ID}, the first is {first}.")
        yield batch[ID].hash().to_numpy()
        done += batch.height


def _deal(hashes: Any, files: list[Any]) -> None:
    if len(files) == 1:
        files[0].write(hashes.tobytes())
        return
    bucket = (hashes >> np.uint64(40)) % np.uint64(len(files))
    order = np.argsort(bucket, kind="stable")
    edges = np.searchsorted(bucket[order], np.arange(len(files) + 1, dtype=np.uint64))
    for k, file in enumerate(files):
        file.write(hashes[order[edges[k] : edges[k + 1]]].tobytes())


def _repeated(file: Any) -> Any:
    file.seek(0)
    hashes = np.sort(np.frombuffer(file.read(), dtype=np.uint64))
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def _compare(table: TableFile, suspects: Any) -> None:
    same = pl.Series("(hash)", suspects)
    query = (
        table.scan()
        .select(ID)
        .filter(pl.col(ID).hash().is_in(same.implode()))
        .group_by(ID)
        .len()
        .filter(pl.col("len") > 1)
        .sort(ID)
    )
    twice = table.collect(query)
    if twice.height:
        raise InputError(
            f"{table.path}: {ID} must be unique; {twice.height} value(s) stand more than once: "
            f"{some(twice[ID].to_list())}. Keep one row per client."
        )
