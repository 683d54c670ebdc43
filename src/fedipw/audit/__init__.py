"""Audits: who is missing, how much it matters, how far to trust the weights, as plain values."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Audit(ModuleType):
    """The package itself, which can be called: ``fedipw.audit(devices, rounds)``."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        from fedipw.api import audit  # noqa: PLC0415

        return audit(*args, **settings)


sys.modules[__name__].__class__ = _Audit
