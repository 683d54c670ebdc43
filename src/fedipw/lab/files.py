"""Output files: all of them appear together, or none."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedipw.errors import InputError

_PACKAGES = ("fedipw", "numpy", "scipy", "scikit-learn", "polars", "numba", "matplotlib")


def check_directory(out: Path) -> None:
    """Raise if output cannot go to ``out``, before any work is done."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a directory.")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a directory whose files move into ``out`` at the end, unless an error was raised."""
    check_directory(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield stage
        out.mkdir(exist_ok=True)
        for file in sorted(stage.iterdir()):
            file.replace(out / file.name)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def environment() -> dict[str, Any]:
    """Return what a result depends on besides its settings."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: version(name) for name in _PACKAGES},
    }
