"""One vector per client on disk, in a file that says client and round, and a sum of them.

A file is written once, under the number of the round it belongs to, and never changed: a program
that is killed in the middle of a round finds the files of the rounds before it as they were. Which
round's file counts for a client is kept elsewhere, with what closes a round. Vectors are read and
written in pieces, so that none is in memory as a whole.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.storage.atomic import written_paths

_CLIENT = re.compile(r"^(\d{6,})-(\d{6,})\.npy$")
_SUM = re.compile(r"^sum-(\d{6,})\.npy$")
REMEDY = "Restore it from a backup of the same round, or begin with an empty ledger."


@final
class VectorStore:
    """Vectors of one length and type by client and round, and sums of them in float64.

    Parameters
    ----------
    directory
        Where the files go; it is made when the first is written.
    size
        Length of a vector.
    dtype
        Of the clients' vectors.

    Examples
    --------
    >>> import tempfile
    >>> store = VectorStore(Path(tempfile.mkdtemp()), 3, np.float32)
    >>> with store.writing(rows=[7], index=12) as (files, total):
    ...     store.put(files[7], slice(0, 3), np.array([1.0, 2.0, 3.0], dtype=np.float32))
    ...     store.put_sum(total, slice(0, 3), np.array([0.5, 1.0, 1.5]))
    >>> store.client(7, 12).name, store.vector(7, 12, slice(1, 3)).tolist()
    ('000007-000012.npy', [2.0, 3.0])
    """

    def __init__(self, directory: Path, size: int, dtype: Any) -> None:
        self.directory, self.size, self.dtype = directory, size, np.dtype(dtype)
        self._head = _header(self.dtype, size)
        self._sum_head = _header(np.dtype(np.float64), size)

    @property
    def bytes_each(self) -> int:
        """Size of a client's file."""
        return len(self._head) + self.size * int(self.dtype.itemsize)

    @property
    def bytes_of_sum(self) -> int:
        """Size of the file of a sum."""
        return len(self._sum_head) + self.size * 8

    def client(self, row: int, index: int) -> Path:
        """Return the file of a client's vector of a round."""
        return self.directory / f"{row:06d}-{index:06d}.npy"

    def sum(self, index: int) -> Path:
        """Return the file of the sum after a round."""
        return self.directory / f"sum-{index:06d}.npy"

    @contextmanager
    def writing(self, rows: Iterable[int], index: int) -> Iterator[tuple[dict[int, Path], Path]]:
        """Yield empty files for clients' vectors of a round, by row, and one for the sum.

        They are on the disk under their names when the block ends, and gone if it fails.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.directory} cannot be made: {error.strerror}.") from error
        places = {row: self.client(row, index) for row in rows}
        with written_paths([*places.values(), self.sum(index)]) as made:
            yield {row: made[place] for row, place in places.items()}, made[self.sum(index)]

    def put(self, file: Path, piece: slice, values: NDArray[Any]) -> None:
        """Write some of a vector's numbers."""
        _write(file, self._head, piece, values.astype(self.dtype, copy=False))

    def put_sum(self, file: Path, piece: slice, values: NDArray[Any]) -> None:
        """Write some of a sum's numbers."""
        _write(file, self._sum_head, piece, values.astype(np.float64, copy=False))

    def vector(self, row: int, index: int, piece: slice) -> NDArray[Any]:
        """Return some of the numbers of a client's vector."""
        return _read(self.client(row, index), self._head, self.dtype, piece)

    def total(self, index: int, piece: slice) -> NDArray[np.float64]:
        """Return some of the numbers of the sum after a round."""
        return _read(self.sum(index), self._sum_head, np.dtype(np.float64), piece)

    def check(self, latest: Mapping[int, int], total: int) -> bool:
        """Raise if a client's file is missing or damaged; return whether the sum's file is there.

        ``latest`` are rounds by row, ``total`` is the round of the sum, 0 if there is none.
        """
        for row, index in latest.items():
            path = self.client(row, index)
            if not _whole(path, self._head, self.bytes_each, REMEDY):
                raise InputError(
                    f"{path} is missing: it holds what is remembered of a client. {REMEDY}"
                )
        remove = "Remove it, and it is made anew from the clients' files."
        return not total or _whole(self.sum(total), self._sum_head, self.bytes_of_sum, remove)

    def keep_only(self, latest: Mapping[int, int], total: int) -> None:
        """Remove all other vectors and sums, and what killed writers left."""
        kept = {self.client(row, index).name for row, index in latest.items()}
        kept.add(self.sum(total).name)
        with suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                own = _CLIENT.match(path.name) or _SUM.match(path.name)
                left = path.name.startswith(".") and path.name.endswith(".partial")
                if left or (own and path.name not in kept):
                    path.unlink(missing_ok=True)

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove files that no longer count."""
        for path in paths:
            path.unlink(missing_ok=True)

    def scratch(self) -> BinaryIO:
        """Return a file without a name on the same disk, which is gone when it is closed."""
        file: BinaryIO = tempfile.TemporaryFile(buffering=0, dir=self.directory)  # noqa: SIM115
        return file

    def room(self) -> tuple[int, int]:
        """Return the bytes its files take, and those free on their disk."""
        taken = 0
        with suppress(FileNotFoundError):
            taken = sum(path.stat().st_size for path in self.directory.glob("*.npy"))
        there = self.directory
        while not there.exists():
            there = there.parent
        return taken, shutil.disk_usage(there).free


def _header(dtype: np.dtype[Any], size: int) -> bytes:
    """Return the first bytes of a file with such a vector."""
    stream = BytesIO()
    form: dict[str, Any] = {
        "descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,),
    }  # fmt: skip
    npy.write_array_header_1_0(stream, form)
    return stream.getvalue()


def _opened(path: Path, flags: int, work: Callable[[int], Any], remedy: str) -> Any:
    """Return what is done with an open file; errors of the disk are told with its name."""
    try:
        descriptor = os.open(path, flags)
        try:
            return work(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}. {remedy}") from error


def _write(path: Path, head: bytes, piece: slice, values: NDArray[Any]) -> None:
    def work(descriptor: int) -> None:
        if piece.start == 0:
            write_all(descriptor, np.frombuffer(head, dtype=np.uint8), 0)
        write_all(descriptor, values, len(head) + piece.start * values.itemsize)

    _opened(path, os.O_WRONLY, work, "Free space on its disk and start again.")


def write_all(descriptor: int, values: NDArray[Any], place: int) -> None:
    """Write an array's numbers at a place of an open file."""
    rest = np.ascontiguousarray(values).view(np.uint8).data
    while rest:
        done = os.pwrite(descriptor, rest, place)
        rest, place = rest[done:], place + done


def _read(path: Path, head: bytes, dtype: np.dtype[Any], piece: slice) -> NDArray[Any]:
    out = np.empty(piece.stop - piece.start, dtype=dtype)

    def work(descriptor: int) -> None:
        rest, place = out.view(np.uint8).data, len(head) + piece.start * dtype.itemsize
        while rest:
            done = os.preadv(descriptor, [rest], place)
            if done == 0:
                raise InputError(f"{path} ends too early. {REMEDY}")
            rest, place = rest[done:], place + done

    _opened(path, os.O_RDONLY, work, REMEDY)
    return out


def _whole(path: Path, head: bytes, size: int, remedy: str) -> bool:
    """Return whether a file is there; raise if it is not one of this length and type."""
    if not path.exists():
        return False

    def work(descriptor: int) -> tuple[bytes, int]:
        return os.pread(descriptor, len(head), 0), os.fstat(descriptor).st_size

    begin, found = _opened(path, os.O_RDONLY, work, remedy)
    if begin != head or found != size:
        raise InputError(
            f"{path} is damaged: {found:,} bytes instead of {size:,}, or another type. {remedy}"
        )
    return True
