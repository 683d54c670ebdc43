"""What ``fedipw weights`` goes through on the way from a command to a weight."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import polars as pl
import pytest

from fedipw.tables.ledger import Ledger
from worlds import NONLINEAR

from .command import Files

# of them, one each holds the output while it is made, knows URLs, copies what is at one, writes in
# parts, minds the memory, and chooses between this machine and a cluster
MOST_MODULES = 31


def entered(call: Any) -> set[str]:
    """Return the modules of fedipw, the command line aside, called until the last weight is made.

    What follows, the report of how near selection comes to leaving clients out, is not counted.
    """
    found: set[str] = set()
    done = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal done
        name = frame.f_globals.get("__name__", "")
        done = done or (name == "fedipw.selection.enrollment" and frame.f_code.co_name == "overlap")
        if (
            not done
            and event == "call"
            and name.startswith("fedipw.")
            and not name.startswith("fedipw.cli")
        ):
            found.add(name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("options", [(), ("--participation-fit", "pooled")])
def test_a_weight_passes_few_modules(tmp_path: Path, options: tuple[object, ...]) -> None:
    files = Files.of(NONLINEAR, tmp_path).put()
    files.weighed(*options)  # modules are loaded before anything is counted
    modules = entered(lambda: files.weighed(*options))
    print(f"{len(modules)} modules {options}:", *sorted(modules), sep="\n  ")
    assert len(modules) <= MOST_MODULES, sorted(modules)


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ((), 1),
        (("--scheme", "fedavg"), 1),
        (("--history", "--window", 3), 1),
        (("--participation-fit", "same-round"), 1),
        (("--participation-fit", "pooled"), 2),
        (("--participation-fit", "pooled", "--classifier", "boosting"), 2),
        (("--scheme", "collapsed"), 1),
    ],
)
def test_a_ledger_is_read_once_or_twice_if_pooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], times: int
) -> None:
    files, reads = Files.of(NONLINEAR, tmp_path).put(), Counter[int]()
    read, collect, queries = Ledger.read, pl.LazyFrame.collect, []

    def counted(self: Ledger, index: int) -> pl.DataFrame:
        reads[index] += 1
        with monkeypatch.context() as patch:  # reading a file is a query of its own
            patch.setattr(pl.LazyFrame, "collect", collect)
            return read(self, index)

    def watched(self: pl.LazyFrame, *args: Any, **named: Any) -> Any:
        if "round-0000" in self.explain(optimized=False):
            queries.append(self.explain())
        return collect(self, *args, **named)

    monkeypatch.setattr(Ledger, "read", counted)
    monkeypatch.setattr(pl.LazyFrame, "collect", watched)
    files.weighed(*options)
    assert reads == dict.fromkeys(range(1, NONLINEAR.rounds + 1), times)
    assert queries == []
