"""Blocks of rows on the workers of a Dask cluster: the only place that knows Dask.

Each partition is loaded by a worker from the files and stays there; a pass sends the coefficients
out and brings one sum back. If a worker is lost its partitions are loaded again by another.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.partitions import Block
from fedipw.tables.table import Slice

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

T = TypeVar("T")


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
        values = self._client.map(function, self._blocks, pure=False, key="fedipw-sum")
        while len(values) > 1:
            pairs = [
                self._client.submit(combine, values[k], values[k + 1], pure=False)
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
