"""Blocks of rows on the workers of a Dask cluster: the only place that knows Dask.

Rows of a table are loaded by the workers from its files; rows of rounds are sent to them. A pass
sends the coefficients out and brings one sum back. What a lost worker held is loaded or sent again.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.partitions import Block, Blocks
from fedipw.tables.table import Slice

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

T = TypeVar("T")
_TRIES = 10  # passes that may lose a worker before the cluster is given up
_PAUSE = 0.5  # seconds between them


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield a client of the scheduler at an address such as ``tcp://10.0.0.1:8786``."""
    try:
        from distributed import Client  # noqa: PLC0415
        from distributed.comm import get_address_host_port  # noqa: PLC0415
    except ImportError:
        raise InputError(
            "A Dask scheduler needs the extra `dask`: pip install 'fedipw[dask]'."
        ) from None
    try:
        get_address_host_port(address)  # a client of what is no address takes long to go away
        client = Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(f"No Dask scheduler answers at {address}: {error}.") from error
    try:
        yield client
    finally:
        client.close()


@final
class ClusterBlocks:
    """Blocks that workers hold.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    load
        The block of a slice of a table; runs on a worker, which must see the files.
    slices
        What to load.
    """

    def __init__(
        self, client: Any, load: Callable[[Slice], Block], slices: Sequence[Slice]
    ) -> None:
        if not slices:
            raise InputError("There are no rows.")
        _require_package(client)
        self._client = client
        self._blocks = client.map(load, slices, pure=False, key="fedipw-load")
        counts = client.gather(client.map(_rows, self._blocks, pure=False, key="fedipw-rows"))
        self._ends = np.cumsum(counts)
        self.rows = int(self._ends[-1])
        if self.rows < sum(part.rows for part in slices):  # a block counts the rows kept before it
            starts = (self._ends - np.array(counts)).tolist()
            self._blocks = client.map(
                _placed, self._blocks, starts, pure=False, key="fedipw-placed"
            )

    def with_weights(self, weights: FloatArray) -> ClusterBlocks:
        """Return the same blocks with other weights, (n,); a block's own go to its worker only."""
        made = copy.copy(self)
        parts = np.split(weights, self._ends[:-1])
        with warnings.catch_warnings():  # a number per row must travel, and more rows are more
            warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
            made._blocks = self._client.map(
                _weighted, self._blocks, parts, pure=False, key="fedipw-weights"
            )
        return made

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        """Return the function's values of all blocks, combined in pairs, always the same ones."""
        return _in_pairs(self._client, self._blocks, function, combine)


@final
class WorkerCopies:
    """Copies of blocks that workers hold, one scattered future each.

    A block is sent when it is first summed over. It stays with its
    :class:`~fedipw.tables.partitions.Blocks`, in memory or in the scratch file here; neither the
    scheduler nor a second worker keeps it. If a worker is lost, what it held is sent again from
    there, and the pass is made again.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    """

    def __init__(self, client: Any) -> None:
        _require_package(client)
        self._client = client
        self._sent: dict[int, Any] = {}  # futures by the place of the block

    def reduced(
        self, blocks: Blocks, first: int, function: Callable[[Block], T],
        combine: Callable[[T, T], T],
    ) -> T:  # fmt: skip
        """Return the function's values of these blocks, combined in pairs, always the same ones."""
        for _ in range(_TRIES):
            try:
                copies = [self._copy(blocks, k, first + k) for k in range(len(blocks))]
                return _in_pairs(self._client, copies, function, combine)
            except (CancelledError, OSError) as error:  # a worker is lost with what it held
                reason = error
                time.sleep(_PAUSE)  # until the scheduler knows, too
        raise InputError(
            f"The Dask cluster lost workers in {_TRIES} passes over the rows of rounds: {reason}."
        ) from reason

    def forget(self, first: int, last: int) -> None:
        """Let workers drop the copies of blocks at places ``first`` up to ``last``."""
        for place in range(first, last):
            self._sent.pop(place, None)

    def _copy(self, blocks: Blocks, k: int, place: int) -> Any:
        """Return the copy of the k-th of some blocks, made where there is none."""
        if place not in self._sent or self._sent[place].status != "finished":
            # in a list: a block is a tuple, whose entries would be scattered one by one
            (self._sent[place],) = self._client.scatter(list(blocks.part(k, k + 1)), hash=False)
        return self._sent[place]


def _in_pairs(
    client: Any, blocks: Sequence[Any], function: Callable[[Block], T], combine: Callable[[T, T], T]
) -> T:
    values = client.map(function, blocks, pure=False, key="fedipw-sum")
    while len(values) > 1:
        pairs = [
            client.submit(combine, values[k], values[k + 1], pure=False)
            for k in range(0, len(values) - 1, 2)
        ]
        values = pairs + values[2 * len(pairs) :]
    result: T = values[0].result()
    return result


def _require_package(client: Any) -> None:
    """Raise if a worker lacks this package: it could not read its tasks, and nobody would tell."""
    known = client.run(lambda: find_spec("fedipw") is not None)  # a lambda travels by value
    lacking = [address for address, there in known.items() if not there]
    if lacking:
        raise InputError(f"Dask worker {some(lacking)} cannot import fedipw: install it there.")


def _weighted(block: Block, weights: FloatArray) -> Block:
    return block._replace(weights=weights)


def _rows(block: Block) -> int:
    return block.rows


def _placed(block: Block, start: int) -> Block:
    return block._replace(start=start)
