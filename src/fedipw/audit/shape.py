"""Whether values read from a file have the shape of the dataclass they were written from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def misfits(value: Any, kind: Any, where: str = "") -> Iterator[str]:
    """Give the places at which plain values are not what a type says.

    Numbers that are not known are null, so null serves for any number.

    >>> from fedipw.audit.parts import EmptyPart
    >>> list(misfits({"name": "os = web", "population": "many"}, EmptyPart))
    ['population']
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, Mapping):
            yield where
            return
        for name, hint in _hints(kind).items():
            if name in value:
                yield from misfits(value[name], hint, f"{where}.{name}".lstrip("."))
            else:
                yield f"{where}.{name}".lstrip(".")
    elif origin in {Union, UnionType}:
        if value is not None or NoneType not in inner:  # a type or nothing: there are no others
            yield from misfits(value, next(c for c in inner if c is not NoneType), where)
    elif origin is tuple:
        listed = isinstance(value, list | tuple)
        yield from _each(dict(enumerate(value)), inner[0], where) if listed else [where]
    elif origin is Mapping:
        yield from _each(value, inner[1], where) if isinstance(value, Mapping) else [where]
    elif not _is_plain(value, kind):
        yield where


def _each(values: Mapping[Any, Any], kind: Any, where: str) -> Iterator[str]:
    for key, item in values.items():
        yield from misfits(item, kind, f"{where}.{key}".lstrip("."))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_plain(value: Any, kind: Any) -> bool:
    if kind in {int, float}:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return value is None or (number and math.isfinite(value))
    if issubclass(kind, Enum):
        return value in {member.value for member in kind}
    return isinstance(value, kind)
