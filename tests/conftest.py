"""Settings all tests share."""

from collections.abc import Iterator

import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True, scope="session")
def _one_library_thread() -> Iterator[None]:
    """Keep BLAS and OpenMP to one thread: at test sizes more of them only wait for each other."""
    with threadpool_limits(1):
        yield
