"""Run many cases and save what they did: ``python -m benchmarks.fuzz --cases 20000``."""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from pathlib import Path

from benchmarks.fuzz.run import WAIT, Result, run_case
from fedipw.lab.files import environment


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="run this case alone and keep its files")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--out", type=Path, help="file for the result, JSON")
    asked = parser.parse_args()
    cases = range(asked.first, asked.first + asked.cases)
    if asked.only is not None:
        cases = range(asked.only, asked.only + 1)
    result, started = Result(seed=asked.seed), time.perf_counter()
    for index in cases:
        faulthandler.dump_traceback_later(2 * WAIT, exit=True)  # work in C that never returns
        known = len(result.faults)
        run_case(asked.seed, index, result, keep=asked.only is not None)
        for fault in result.faults[known:]:
            print(
                f"case {fault.case} ({fault.kind}: {fault.about}): {fault.why}\n"
                f"  {fault.arguments}\n",
                flush=True,
            )
        if (index + 1) % 500 == 0:
            print(f"{index + 1} cases, {len(result.faults)} faults", file=sys.stderr, flush=True)
        if time.perf_counter() - started > 60.0 * asked.minutes:
            break
    faulthandler.cancel_dump_traceback_later()
    result.seconds = time.perf_counter() - started
    made = {**result.to_json(), "first": asked.first, "made_with": environment()}
    if asked.out is not None:
        asked.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    shown = {name: made[name] for name in ("cases", "kinds", "codes", "slowest", "seconds")}
    print(json.dumps({**shown, "faults": len(result.faults)}))
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
