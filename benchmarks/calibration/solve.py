"""Solve one problem with one solver of Python, in that solver's own environment, and time it.

Needs only NumPy and the solver. Reads X.npy and mu.npy (for margins also codes.npy and shares.npy)
of a directory; writes weights of mean 1 to weights.npy and seconds and memory to report.json there.

    python solve.py SOLVER KIND DIRECTORY
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

LOW, HIGH = 0.05, 8.0
TOLERANCE = 1e-9
BESIDES = {"cvxpy": ("clarabel",), "svy": ("svy_rs",), "survey_kit": ("sparse_dot_mkl", "mkl")}
Solve = Callable[[], tuple[np.ndarray, dict[str, Any]]]  # weights of mean 1, and what to note


class Arrays:
    """Reads the arrays of a problem, and knows their size and the memory held before them."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.bytes, self.resident = directory, 0, 0
        self.columns = np.load(directory / "mu.npy").size

    def __call__(self, name: str) -> np.ndarray:
        self.resident = self.resident or memory("VmRSS")
        array = np.load(self._directory / f"{name}.npy")
        self.bytes += array.nbytes
        return array

    def with_constant(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns and their means, each after a 1."""
        X = self("X")
        return np.column_stack([np.ones(len(X)), X]), np.append(1.0, self("mu"))


def fedipw(arrays: Arrays, kind: str) -> Solve:
    """``calibrated``, with its kernels compiled on a small problem first."""
    from fedipw.calibration import Entropy, Linear, Logit, Margins, Quadratic, calibrated

    rng = np.random.default_rng(0)
    if kind == "margins":
        levels = tuple(tuple(f"{v}={k}" for k in range(6)) for v in range(10))
        small = Margins(rng.integers(0, 6, size=(5000, 10)).astype(np.uint8), levels)
        calibrated(small, np.full(60, 1 / 6), distance=Entropy())
        codes, mu, distance = arrays("codes"), arrays("shares"), Entropy()
    else:
        kinds = {"linear": Linear(), "quadratic": Quadratic(), "entropy": Entropy()}
        distance = kinds.get(kind, Logit(LOW, HIGH))
        small = rng.normal(size=(5000, arrays.columns))
        calibrated(small, np.full(arrays.columns, 0.05), distance=distance)
        X, mu = arrays("X"), arrays("mu")

    def solve() -> tuple[np.ndarray, dict[str, Any]]:
        found = calibrated(
            Margins(codes, levels) if kind == "margins" else X, mu, distance=distance
        )
        notes = {"iterations": int(found.iterations), "status": str(found.status)}
        return found.weights * len(found.weights), notes

    return solve


def empirical_calibration(arrays: Arrays, kind: str) -> Solve:
    """Google's package: scipy's fsolve with a numerical Jacobian, at a tolerance it fixes."""
    from empirical_calibration.core import Objective, calibrate

    X, target = arrays("X"), arrays("mu")[None, :]
    # Without base weights its entropy starts from weights of 1, not 1/n; with them, its quadratic
    # makes an n by n matrix.
    base = None if kind == "quadratic" else np.full(len(X), 1.0 / len(X))
    objective = Objective.QUADRATIC if kind == "quadratic" else Objective.ENTROPY

    def solve() -> tuple[np.ndarray, dict[str, Any]]:
        weights, success = calibrate(X, target, base, objective=objective)
        return weights * len(X), {"reports_success": bool(success)}

    return solve


def survey_kit(arrays: Arrays, kind: str) -> Solve:
    """The solver below ``Calibration(...).run()``, with indicators in its sparse form."""
    from scipy import sparse
    from survey_kit.entropy_balance_weighting.ebw_routines import entropy_balance

    Z, target = arrays.with_constant()
    Z, ones = sparse.csr_array(Z) if kind == "margins" else Z, np.ones(len(Z))
    problem = {"mean_population_moments": target, "x_sample": Z, "weights0": ones}
    # A norm of missed totals and dual residuals, so 1e-3 is 1e-9 of a million rows.
    options = {"optimality_violation": 1e-3, "max_steps": 60}

    def solve() -> tuple[np.ndarray, dict[str, Any]]:
        found = entropy_balance(**problem, options=options)
        return found.new_weights, {"reports_success": bool(found.converged)}

    return solve


def svy(arrays: Arrays, kind: str) -> Solve:
    """Its linear calibration, and the compiled raking below ``weighting.rake``."""
    import polars as pl
    from svy import Design, Sample
    from svy_rs._internal import rake

    if kind == "margins":
        codes = arrays("codes")
        indices = [np.ascontiguousarray(c, dtype=np.int64) for c in codes.T]
        margins, ones = list(len(codes) * arrays("shares").reshape(10, 6)), np.ones((len(codes), 1))
        return lambda: (rake(ones, indices, margins, None, None, TOLERANCE, 1000)[:, 0], {})
    Z, target = arrays.with_constant()
    given = {"aux_vars": Z, "controls": list(len(Z) * target), "weights_only": True}
    sample = Sample(pl.DataFrame({"w": np.ones(len(Z))}), Design(wgt="w"))
    return lambda: (sample.weighting.calibrate_matrix(**given), {})


def ebal(arrays: Arrays, *_: str) -> Solve:
    """The Newton iteration of ``ebal_bin.ebalance``, without its rank check and regression."""
    from ebal import ebal_bin

    Z, target = arrays.with_constant()
    base = np.full(len(Z), 1.0 / len(Z))
    balance = ebal_bin(constraint_tolerance=TOLERANCE, print_level=-1, PCA=False)

    def solve() -> tuple[np.ndarray, dict[str, Any]]:
        balance.coefs = np.zeros(Z.shape[1])
        weights = balance._eb(target, Z, base)
        return weights * len(Z), {"reports_success": bool(balance.converged)}

    return solve


def cvxpy(arrays: Arrays, kind: str) -> Solve:
    """The primal problem by Clarabel, timed with cvxpy's own translation."""
    import cvxpy as cp

    Z, target = arrays.with_constant()
    w = cp.Variable(len(Z), nonneg=kind == "quadratic")
    if kind in ("linear", "quadratic"):
        cost = cp.sum_squares(w - 1.0)
    elif kind == "logit":
        cost = cp.sum(cp.rel_entr(w - LOW, 1.0 - LOW) + cp.rel_entr(HIGH - w, HIGH - 1.0))
    else:
        cost = -cp.sum(cp.entr(w))
    tolerances = {f"tol_{name}": TOLERANCE for name in ("feas", "gap_abs", "gap_rel")}

    def solve() -> tuple[np.ndarray, dict[str, Any]]:
        problem = cp.Problem(cp.Minimize(cost / len(Z)), [Z.T @ w / len(Z) == target])
        problem.solve(solver=cp.CLARABEL, **tolerances)
        return w.value, {"status": problem.status}

    return solve


SOLVERS = (fedipw, empirical_calibration, survey_kit, svy, ebal, cvxpy)


def memory(line: str) -> int:
    """Return the bytes of a line of this process's status: VmRSS now, VmHWM at the most."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(text.split()[1]) for text in status if text.startswith(line))


def solved(solver: str, kind: str, directory: Path) -> dict[str, Any]:
    """Return the seconds of each repeat and the peak of memory over the size of the input."""
    arrays, seconds = Arrays(directory), []
    solve = {f.__name__: f for f in SOLVERS}[solver](arrays, kind)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    while len(seconds) < (3 if not seconds or seconds[0] < 3.0 else 1):
        began = time.perf_counter()
        weights, notes = solve()
        seconds.append(time.perf_counter() - began)
        np.save(directory / "weights.npy", np.asarray(weights, dtype=np.float64))
        del weights
    over = (memory("VmHWM") - arrays.resident) / arrays.bytes
    return {"seconds": min(seconds), "repeats": seconds, "peak_over_input": over, **notes}


def main() -> None:
    solver, kind, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    try:
        report = solved(solver, kind, directory)
    except MemoryError:
        report = {"failed": "needs more memory than allowed"}
    except Exception as error:
        report = {"failed": f"{type(error).__name__}: {error}"[:300]}
    names = (solver, "numpy", *BESIDES.get(solver, ()))
    report["versions"] = {name: metadata.version(name) for name in names}
    (directory / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
