"""``python -m benchmarks.compare OLD_CHECKOUT``: an old commit against the working tree.

Numbers: both checkouts run the same commands on the same files, and every number they write is
compared; a difference that ``expected.py`` does not explain ends in exit code 1. Speed: both run
larger commands in turns, and the best time and peak memory of each are compared. Only the command
line and its files are used, so that everything behind them may change. Results go to
benchmarks/results/compare.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.compare.checkout import Checkout
from benchmarks.compare.numbers import compared_numbers, print_lines
from benchmarks.compare.speed import compared_speed, print_timings

RESULT = Path(__file__).parents[1] / "results" / "compare.json"
_PACKAGES = ("numpy", "scipy", "scikit-learn", "polars", "numba")


def environment() -> dict[str, Any]:
    """Return what the results depend on besides the checkouts."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "load": os.getloadavg()[0],  # near the number of cores or below, or times mean little
        "versions": {name: version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="directory of the old checkout")
    parser.add_argument("--only", choices=("numbers", "speed"))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each timed command")
    parser.add_argument("--scratch", type=Path, help="new directory for worlds and outputs, kept")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    if not (asked.old / "src" / "fedipw").is_dir():
        parser.error(f"{asked.old} is no checkout: it has no src/fedipw.")
    if asked.scratch is not None and asked.scratch.exists():
        parser.error(f"{asked.scratch} exists: kernels compiled before may be stale.")
    with ExitStack() as stack:
        scratch = asked.scratch
        if scratch is None:
            made = tempfile.TemporaryDirectory(prefix="fedipw-compare-")
            scratch = Path(stack.enter_context(made))
        scratch = scratch.resolve()
        old = Checkout("old", asked.old.resolve(), scratch / "cache")
        new = Checkout("new", Path(__file__).resolve().parents[2], scratch / "cache")
        result: dict[str, Any] = {"old": old.commit(), "new": new.commit()}
        same = True
        if asked.only != "speed":
            began = time.perf_counter()
            lines = compared_numbers(old, new, scratch / "numbers")
            print_lines(lines)
            same = all(line.same for line in lines)
            result["numbers"] = {
                "seconds": time.perf_counter() - began,
                "lines": [line.to_json() for line in lines],
            }
        if asked.only != "numbers":
            began = time.perf_counter()
            timings = compared_speed(old, new, scratch / "speed", asked.repeats)
            print_timings(timings, asked.repeats)
            result["speed"] = {
                "seconds": time.perf_counter() - began,
                "repeats": asked.repeats,
                "timings": [timing.to_json() for timing in timings],
            }
    asked.out.write_text(json.dumps(result | environment(), indent=1) + "\n", encoding="utf-8")
    print(f"Wrote {asked.out}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
