"""A scratch file of arrays: without a name, gone with its last user.

The file is read with plain reads, not mapped: what the system caches of it is not this process's
memory.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from fedipw.errors import InputError

_BEHIND = 4  # groups of arrays that may wait to be written


class Stored(NamedTuple):
    """Where some arrays lie in the file."""

    offset: int
    arrays: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]  # their types and shapes

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(kind.itemsize * int(np.prod(shape)) for kind, shape in self.arrays)


class Room:
    """A buffer that grows to the largest group of arrays read into it."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)

    def of(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return this many bytes of it."""
        if self._bytes.size < size:
            self._bytes = np.empty(size, dtype=np.uint8)
        return self._bytes[:size]


@final
class Scratch:
    """Arrays on disk, written behind the caller's back while the next ones are made.

    ``directory`` is where the file goes, the system's temporary directory by default.

    Examples
    --------
    >>> scratch = Scratch()
    >>> place = scratch.written([np.arange(3.0), np.array([[1], [0]], dtype=np.int8)])
    >>> scratch.settled()
    >>> [array.tolist() for array in scratch.read(place, Room())]
    [[0.0, 1.0, 2.0], [[1], [0]]]
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory, self._end = directory, 0
        self._file: Any = None
        self._writing: deque[Future[None]] = deque()

    @classmethod
    def over(cls, path: Path) -> Scratch:
        """Return a file that is there already, to be read where its arrays are known to lie.

        It may be added to or removed meanwhile.
        """
        made = cls()
        made._file = path.open("rb", buffering=0)
        return made

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def written(self, arrays: Iterable[np.ndarray]) -> Stored:
        """Put arrays at the end; ``settled`` waits until they are there."""
        if self._file is None:
            try:
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._directory)  # noqa: SIM115
            except OSError as error:
                raise InputError(f"No scratch file can be made: {error}.") from error
        given, offset = tuple(arrays), self._end
        self._end += sum(_room(array.nbytes) for array in given)
        self._writing.append(_writer().submit(self._write, given, offset))
        if len(self._writing) > _BEHIND:
            self._writing.popleft().result()
        return Stored(offset, tuple((array.dtype, array.shape) for array in given))

    def settled(self) -> None:
        """Wait until everything is written."""
        while self._writing:
            self._writing.popleft().result()

    def read(self, place: Stored, room: Room) -> tuple[np.ndarray, ...]:
        """Return arrays that last until the room is used again."""
        sizes = [kind.itemsize * int(np.prod(shape)) for kind, shape in place.arrays]
        starts = [0, *accumulate(map(_room, sizes))]
        end = max(
            (start + size for start, size in zip(starts, sizes, strict=False) if size), default=0
        )
        got = room.of(end)
        done = 0
        while done < got.size:
            step = os.preadv(self._file.fileno(), [got[done:].data], place.offset + done)
            if step == 0:
                raise OSError("the scratch file is shorter than what was written to it")
            done += step
        return tuple(
            got[start : start + size].view(kind).reshape(shape)
            for start, size, (kind, shape) in zip(starts, sizes, place.arrays, strict=False)
        )

    def _write(self, arrays: tuple[np.ndarray, ...], offset: int) -> None:
        try:
            for array in arrays:
                rest = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
                while rest.size:
                    done = os.pwrite(self._file.fileno(), rest.data, offset)
                    offset, rest = offset + done, rest[done:]
                offset = _room(offset)
        except OSError as error:
            raise InputError(
                f"The scratch file could not grow beyond {offset / 2**30:.1f} GiB "
                f"({error.strerror}): free space in {self._directory or tempfile.gettempdir()} or "
                "set TMPDIR to a larger disk."
            ) from error


def _room(size: int) -> int:
    """Return a size rounded up, so that what follows lies at a multiple of 8 bytes."""
    return size + -size % 8


@cache
def _writer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)
