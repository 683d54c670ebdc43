"""Work on the workers of a Dask cluster: the only place that knows Dask.

Workers load rows of tables and of rounds from their files. A pass sends the coefficients out and
brings one sum back. What a lost worker held is loaded again.
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
from fedipw.tables.partitions import Block
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


class Shared:
    """A value that every worker has: sent when first needed, and again if all lost it.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    value
        Anything; it stays here too.
    """

    def __init__(self, client: Any, value: Any) -> None:
        self._client, self._value = client, value
        self._future: Any = None

    def future(self) -> Any:
        """Return the value as the workers know it."""
        if self._future is None or self._future.status != "finished":
            # in a list: what has entries of its own would be scattered one by one
            (self._future,) = self._client.scatter([self._value], broadcast=True, hash=False)
        return self._future


class Task:
    """A function of values, of what is shared and of other tasks, whose value a worker holds.

    What a lost worker held is made again from the same arguments.
    """

    def __init__(self, client: Any, function: Callable[..., Any], *args: Any) -> None:
        self._client, self._function, self._args = client, function, args
        self._future: Any = None

    def future(self) -> Any:
        """Return the value as the workers know it, or will."""
        if self._future is None or self._future.status in {"cancelled", "lost"}:
            given = [a.future() if isinstance(a, Shared | Task) else a for a in self._args]
            self._future = self._client.submit(self._function, *given, pure=False)
        return self._future


@final
class Workers:
    """The workers of a cluster, which go on when one of them is lost.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    """

    def __init__(self, client: Any) -> None:
        _require_package(client)
        self._client = client

    @property
    def count(self) -> int:
        """Number of threads that workers have together, 1 at least."""
        return max(1, sum(map(int, self._client.nthreads().values())))

    def shared(self, value: Any) -> Shared:
        """Return a value that every worker will have."""
        return Shared(self._client, value)

    def task(self, function: Callable[..., Any], *args: Any) -> Task:
        """Return a task; it is begun when ``begin`` or ``result`` asks for it."""
        return Task(self._client, function, *args)

    def begin(self, tasks: Sequence[Task]) -> None:
        """Let workers begin."""
        self._again(lambda: [task.future() for task in tasks])

    def result(self, task: Task) -> Any:
        """Return the value of a task."""
        return self._again(lambda: task.future().result())

    def reduced(
        self,
        function: Callable[..., T],
        tasks: Sequence[Task],
        given: Sequence[Any],
        combine: Callable[[T, T], T],
    ) -> T:
        """Return the function of each task's value and what is given beside it, combined in pairs.

        Pairs are always the same ones, wherever their values are.
        """

        def go() -> T:
            values = self._client.map(
                function, [task.future() for task in tasks], list(given), pure=False,
                key="fedipw-sum",
            )  # fmt: skip
            return _paired(self._client, values, combine)

        return self._again(go)

    def _again(self, work: Callable[[], T]) -> T:
        """Return what some work gives, tried again where a worker is lost meanwhile."""
        reason: Exception | None = None
        for _ in range(_TRIES):
            try:
                with warnings.catch_warnings():  # of numbers that must travel
                    warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
                    return work()
            except (CancelledError, OSError) as error:  # a worker is lost with what it held
                reason = error
                time.sleep(_PAUSE)  # until the scheduler knows, too
        raise InputError(
            f"The Dask cluster lost workers {_TRIES} times in one piece of work: {reason}."
        ) from reason


def _in_pairs(
    client: Any, blocks: Sequence[Any], function: Callable[[Block], T], combine: Callable[[T, T], T]
) -> T:
    return _paired(client, client.map(function, blocks, pure=False, key="fedipw-sum"), combine)


def _paired(client: Any, values: Sequence[Any], combine: Callable[[T, T], T]) -> T:
    while len(values) > 1:
        pairs = [
            client.submit(combine, values[k], values[k + 1], pure=False)
            for k in range(0, len(values) - 1, 2)
        ]
        values = [*pairs, *values[2 * len(pairs) :]]
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
