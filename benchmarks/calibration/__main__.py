"""``python -m benchmarks.calibration``: our calibration, its peers and one pass, in one run.

Python peers live in environments of their own, made on first use; the peers of R need
``apt-get install r-base-core r-cran-survey r-cran-sampling libopenblas0-pthread``. Every solver
runs in a fresh process. Results go to benchmarks/results/calibration.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration.workload import Rows, margin_rows, numeric_rows, one_pass
from fedipw.lab.files import environment

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "calibration.json"
LOADING = 60.0  # seconds that a process may take besides its solve
GIGABYTES = 16
ACCURATE, SAME = 1e-6, 1e-3  # standardised violation; distance to the reference weights of mean 1
KINDS = ("linear", "quadratic", "entropy", "logit")
BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
OF_R = ("survey", "survey-calibrate", "sampling")
SOLVES = {
    "fedipw": (*KINDS, "margins"),
    "survey": (*KINDS, "margins"),
    "survey-calibrate": (*KINDS, "margins"),
    "sampling": (*KINDS, "margins"),
    "svy": ("linear", "margins"),
    "empirical_calibration": ("quadratic", "entropy", "margins"),
    "survey_kit": ("entropy", "margins"),
    "ebal": ("entropy", "margins"),
    "cvxpy": (*KINDS, "margins"),
}
CANNOT = {
    "svy": "calibration is linear only, raking is of margins only",
    "empirical_calibration": "weights of its quadratic are never negative; no logit distance",
    "survey_kit": "entropy only; its bounds clip the weights of the entropy, which is not logit",
    "ebal": "entropy only",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path("/tmp/fedipw-calibration-peers"))
    parser.add_argument("--skip-peers", action="store_true", help="measure ours and one pass only")
    parser.add_argument("--only", nargs="+", choices=SOLVES, default=list(SOLVES))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a solve may take")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    names = ["fedipw"] if arguments.skip_peers else arguments.only
    launchers = {name: _launcher(name, arguments.environments) for name in names}
    result: dict[str, Any] = {"rows": arguments.rows, "cases": {}, "one_pass": {}}
    for label, kinds in {"q=10": KINDS, "q=50": KINDS, "margins": ("margins",)}.items():
        with tempfile.TemporaryDirectory() as scratch:
            rows = _rows(label, Path(scratch), arguments.rows)
            if label != "margins":
                result["one_pass"][label] = one_pass(rows.X)
                print(f"one pass {label}: {result['one_pass'][label]['seconds']:.4f} s")
            for kind in kinds:
                passed = result["one_pass"].get(label, {}).get("seconds")
                slow = _too_slow(result["cases"].get(f"{kind} q=10", {"runs": {}})["runs"])
                able = {name: command for name, command in launchers.items() if name not in slow}
                case = _case(able, kind, rows, passed, arguments.limit)
                case["runs"] |= slow
                result["cases"][label if kind == label else f"{kind} {label}"] = case
                _print_case(f"{kind}, {rows.X.shape[1]} columns", case)
    result |= {"cannot": CANNOT, "limits": {"seconds": arguments.limit, "gigabytes": GIGABYTES}}
    arguments.out.write_text(json.dumps(result | environment(), indent=2) + "\n")


def _too_slow(runs: dict[str, Any]) -> dict[str, Any]:
    """Return the solvers that ran out of time on fewer columns, which are not tried on more."""
    return {name: run for name, run in runs.items() if run.get("failed", "").startswith("takes")}


def _rows(label: str, directory: Path, n: int) -> Rows:
    if label == "margins":
        return margin_rows(directory, n)
    return numeric_rows(directory, n, int(label.removeprefix("q=")))


def _case(
    launchers: dict[str, list[str]], kind: str, rows: Rows, passed: float | None, limit: float
) -> dict[str, Any]:
    """Return every solver's run, and ours beside the fastest peer that is right and one pass."""
    reference = rows.reference(kind)
    runs = {
        name: _faster_run(launcher, kind, rows, reference, limit)
        for name, launcher in launchers.items()
        if kind in SOLVES[name]
    }
    case: dict[str, Any] = {"runs": runs, "solution": _described(reference, rows)}
    right = {name: run["seconds"] for name, run in runs.items() if run.get("solves")}
    ours = right.pop("fedipw", None)
    if right:
        case["fastest_peer"] = min(right, key=lambda name: right[name])
    if ours is not None and right:
        case["times_faster_than_fastest_peer"] = min(right.values()) / ours
    if ours is not None and passed is not None:
        case["passes"] = ours / passed
    return case


def _described(weights: np.ndarray, rows: Rows) -> dict[str, Any]:
    return {
        "range_of_weights": (float(weights.min()), float(weights.max())),
        "negative": int((weights < 0).sum()),
        "zero": int((weights == 0).sum()),
        "range_of_weights_behind_targets": rows.tilt_range,
    }


def _faster_run(
    launcher: list[str], kind: str, rows: Rows, reference: np.ndarray, limit: float
) -> dict[str, Any]:
    """Return a peer's run with BLAS on two threads or on one, whichever is faster.

    On tall matrices, and beside other work, two threads of OpenBLAS can take twenty times longer.
    """
    given = (launcher, kind, rows, reference, limit)
    if launcher[-1] == "fedipw":
        return _run(*given, threads={})
    one = _run(*given, threads=dict.fromkeys(BLAS, "1"))
    if "failed" in one:
        return one
    two = _run(*given, threads=dict.fromkeys(BLAS, "2"))
    if "failed" in two or (one["solves"], two["seconds"]) > (two["solves"], one["seconds"]):
        return one | {"blas_threads": 1}
    return two | {"blas_threads": 2}


def _run(
    launcher: list[str],
    kind: str,
    rows: Rows,
    reference: np.ndarray,
    limit: float,
    *,
    threads: dict[str, str],
) -> dict[str, Any]:
    """Return a solver's report, with its weights checked here, or why there are none."""
    out = rows.directory / "report.json"
    out.unlink(missing_ok=True)
    report = _report([*launcher, kind, str(rows.directory)], out, limit, threads)
    if "failed" in report:
        return report
    of_r = launcher[0] == "Rscript"
    weights = (np.fromfile if of_r else np.load)(
        rows.directory / f"weights.{'f64' if of_r else 'npy'}"
    )
    violation, error = rows.largest_violation(weights), float(np.abs(weights - reference).max())
    right = violation <= ACCURATE and error <= SAME and report["seconds"] <= limit
    checked = {"violation": violation, "largest_difference": error, "solves": bool(right)}
    return report | checked | {"smallest_weight": float(weights.min())}


def _report(command: list[str], out: Path, limit: float, threads: dict[str, str]) -> dict[str, Any]:
    print(*command[2:4], "...", file=sys.stderr, flush=True)
    try:
        process = subprocess.run(
            command,
            timeout=limit + LOADING,
            env=os.environ | threads,
            preexec_fn=_limit_memory,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"takes more than {limit:g} s"}
    except FileNotFoundError as error:
        return {"failed": str(error)}
    if not out.exists():
        return {"failed": f"ended with code {process.returncode}: {process.stderr[-200:]!r}"}
    return json.loads(out.read_text())


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES * 2**30, GIGABYTES * 2**30))


def _print_case(title: str, case: dict[str, Any]) -> None:
    found = [f"ours {case['passes']:.1f} passes"] if "passes" in case else []
    if "times_faster_than_fastest_peer" in case:
        ratio = case["times_faster_than_fastest_peer"]
        found.append(f"{ratio:.2f} times as fast as {case['fastest_peer']}")
    print(f"\n{title}: {', '.join(found)}")
    print(f"  {'solver':<22}{'seconds':>9}{'violation':>11}{'difference':>12}{'memory':>8}")
    for name, run in case["runs"].items():
        if "failed" in run:
            print(f"  {name:<22}  {run['failed']}")
            continue
        accuracy = f"{run['violation']:>11.1e}{run['largest_difference']:>12.1e}"
        memory = f"{run['peak_over_input']:>8.2f}" if "peak_over_input" in run else ""
        memory += "" if run["solves"] else "  not solved"
        print(f"  {name:<22}{run['seconds']:>9.3f}{accuracy}{memory}", flush=True)


def _launcher(solver: str, environments: Path) -> list[str]:
    if solver in OF_R:
        return ["Rscript", str(HERE / "solve.R"), solver]
    python = Path(sys.executable)
    if solver != "fedipw":
        python = _environment(environments / solver, HERE / f"requirements-{solver}.txt")
    return [str(python), str(HERE / "solve.py"), solver]


def _environment(directory: Path, requirements: Path) -> Path:
    """Return the interpreter of a peer's environment, made if it is not there."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-r", str(requirements)], check=True)
    return python


if __name__ == "__main__":
    main()
