"""What a server keeps and does in a round does not grow with the rounds it has closed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
from benchmarks.augmented import Size
from benchmarks.live import measured, state_bytes, trained

TINY = Size(replies=16, enrolled=24, population=60, parameters=4, covariates=1)
_SHARED = (ModuleType, type, FunctionType, BuiltinFunctionType)  # code, not what a server keeps


def kept(root: object) -> tuple[int, int]:
    """Return how many objects an object holds, and their bytes."""
    seen, ahead = {id(root): root}, [root]
    while ahead:
        for one in gc.get_referents(ahead.pop()):
            if id(one) not in seen and not isinstance(one, _SHARED):
                seen[id(one)] = one
                ahead.append(one)
    return len(seen), sum(map(sys.getsizeof, seen.values()))


@pytest.mark.parametrize("settings", [{"window": 10}, {"decay": 0.3}])
def test_a_server_that_forgets_keeps_as_much_after_many_rounds(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    found = {}
    for index, (server, *_) in enumerate(trained(tmp_path, TINY, **settings), 1):
        if index in (40, 80):
            gc.collect()
            found[index] = (*kept(server), state_bytes(tmp_path))
        if index == 80:
            break
    # one number kept per round would be 40 objects and 1.3 kB more
    for before, after, room in zip(found[40], found[80], (20, 600, 600), strict=True):
        assert after - before <= room


def test_no_directory_of_rounds_is_listed_in_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []

    def watched(function: Any) -> Any:
        def call(path: Any = ".") -> Any:
            listed.append(Path(path))
            return function(path)

        return call

    rounds = trained(tmp_path, TINY)
    for _ in islice(rounds, 2):  # the first look at what there is
        pass
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    list((tmp_path / "checkpoint").glob("*"))
    assert listed == [tmp_path / "checkpoint"]  # a look at a directory is seen
    listed.clear()
    for _ in islice(rounds, 12):  # a refit and a snapshot are among them
        pass
    assert not {tmp_path, tmp_path / "checkpoint"} & set(listed)
    assert len(list((tmp_path / "checkpoint").glob("round-*.npz"))) == 1


def test_the_benchmark_of_live_servers_measures_each_number_of_rounds() -> None:
    found: Iterator[dict[str, float]] = measured({"window": 4}, (3, 6), TINY)
    first, second = found
    assert (first["rounds"], second["rounds"]) == (3, 6)
    assert min(*first.values(), *second.values()) > 0.0
