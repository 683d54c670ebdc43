"""A real Dask cluster on this machine, for tests."""

from __future__ import annotations

import logging
from typing import Any

import pytest


def started(workers: int = 2) -> Any:
    """Return a cluster of worker processes, to be used in a with statement."""
    distributed = pytest.importorskip("distributed")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # lost workers are meant
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=True,
        dashboard_address="127.0.0.1:0",  # any free port: another run may have the usual one
        host="127.0.0.1",
    )
