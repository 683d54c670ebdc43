"""What a result depends on besides its settings."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from typing import Any

_PACKAGES = ("fedipw", "numpy", "scipy", "scikit-learn", "polars", "numba", "matplotlib")


def environment() -> dict[str, Any]:
    """Return the versions and the machine a result was made with."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: version(name) for name in _PACKAGES},
    }
