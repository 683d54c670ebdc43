"""What a result depends on: the digest of its settings, versions and machine."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
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


def fingerprint_of(settings: Mapping[str, Any]) -> str:
    """Return a digest of the settings, in which their order counts."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()
