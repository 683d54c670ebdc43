"""``python -m benchmarks.matrix``: the numeric tests under the linear algebra of other processors.

Each cell is a kernel of OpenBLAS, a number of threads and a seed of Hypothesis; its tests are
those of ``make portable``, which is one odd cell. Results go to benchmarks/results/matrix.json,
cell by cell: a run that was stopped goes on with ``--resume``. ``used`` says which kernels that
gave: a build without kernels of its own for a processor takes those of another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from fedipw.lab.files import environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "matrix.json"
KERNELS = ("Haswell", "Zen", "SkylakeX", "Nehalem", "Prescott")
THREADS, SEEDS = (1, 2), (1, 2, 3)
ASK = """
import scipy.linalg, threadpoolctl
found = [one for one in threadpoolctl.threadpool_info() if one["internal_api"] == "openblas"]
print(*sorted({f"{one['architecture']} x{one['num_threads']}" for one in found}))
"""
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")


def numeric_tests() -> list[str]:
    """Return the arguments by which ``make numeric`` names the numeric tests."""
    asked = ["make", "--no-print-directory", "--silent", "numeric"]
    return subprocess.run(
        asked, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def cell(kernel: str, threads: int, seed: int, tests: list[str], workers: int) -> dict[str, Any]:
    """Return how the tests ended in one cell."""
    limits = {"OPENBLAS_CORETYPE": kernel} | dict.fromkeys(
        ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(threads)
    )
    env = {**os.environ, **limits}
    used = subprocess.run(
        [sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    began = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "--numprocesses", str(workers),
         "--hypothesis-seed", str(seed), *tests],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = (ran.stdout.strip().splitlines() or [""])[-1]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    return {
        "kernel": kernel, "threads": threads, "seed": seed, "used": used,
        "code": ran.returncode,
        **{word: int(number) for number, word in _COUNT.findall(last)}, "failures": failed,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--workers", type=int, default=(os.cpu_count() or 1) + 1)
    parser.add_argument("--resume", action="store_true", help="keep the cells of the last run")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    cells: list[dict[str, Any]] = []
    if asked.resume and asked.out.exists():
        cells = json.loads(asked.out.read_text(encoding="utf-8"))["cells"]
    known = {(one["kernel"], one["threads"], one["seed"]) for one in cells}
    tests = numeric_tests()
    for kernel, threads, seed in product(asked.kernels, THREADS, SEEDS):
        if (kernel, threads, seed) in known:
            continue
        cells.append(cell(kernel, threads, seed, tests, asked.workers))
        print(cells[-1], flush=True)
        made = {"cells": cells, "tests": tests, "made_with": environment()}
        asked.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return int(any(one["code"] for one in cells))


if __name__ == "__main__":
    sys.exit(main())
