"""``python -m benchmarks.large.workers``: a Dask cluster of two processes, until input ends.

Prints the scheduler's address. Scheduler and nannies are in this process, workers are its children.
"""

from __future__ import annotations

import logging
import sys
import tempfile


def main() -> None:
    from distributed import LocalCluster

    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # a worker is lost on purpose
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # any free port
            local_directory=scratch,
        ) as cluster,
    ):
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
