"""Settings all tests share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from threadpoolctl import threadpool_limits

settings.register_profile("untimed", deadline=None)  # how long an example takes is no property
settings.load_profile("untimed")

LONGEST = (  # first those that mostly wait for processes, some way apart
    "test_deployment.py",
    "test_calibrated_panels.py",
    "test_commands.py",
    "test_audit_page.py",
    "test_killed.py",
    "test_logged_weights.py",
    "test_same_as_engine.py",
    "test_examples_flower.py",
    "test_study.py",
    "test_figure1.py",
    "test_jax_trainer.py",
    "test_calibration_large.py",
    "test_study_page.py",
    "test_cluster.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first: at the end they would wait for each other."""
    place = {name: k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(autouse=True, scope="session")
def _library_threads() -> Iterator[None]:
    """Keep BLAS and OpenMP to one thread: at test sizes more of them only wait for each other.

    Unless a number is asked for, as by ``python -m benchmarks.matrix``.
    """
    with threadpool_limits(int(os.environ.get("OPENBLAS_NUM_THREADS", "1"))):
        yield
