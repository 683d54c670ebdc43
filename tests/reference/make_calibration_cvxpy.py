"""Writes small20_solutions_cvxpy.csv and small20_cvxpy.json from small20.csv.

Needs cvxpy 1.9.3 with Clarabel 0.11.1 and scipy 1.17.1. Run: python make_calibration_cvxpy.py
"""

from __future__ import annotations

import csv
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linprog

FOLDER = Path(__file__).parent
TIGHT = {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12, "max_iter": 200}
MU, MU_BAD = np.array([0.60, 1.20, 0.65]), np.array([2.5, 1.2, 0.65])  # x1 is 1.752 at most


def problems(cp: Any, X: np.ndarray, d: np.ndarray) -> dict[str, tuple[Any, list[Any], Any]]:
    """Return objective, constraints and variable by name; q sums to 1 and w to the sum of d."""
    n, sd = len(X), X.std(axis=0, ddof=1)
    totals = d.sum() * np.append(1.0, MU)
    columns = np.column_stack([np.ones(n), X])
    out: dict[str, tuple[Any, list[Any], Any]] = {}

    def shares(name: str, objective: Any, constraints: list[Any], q: Any) -> None:
        out[name] = objective, [cp.sum(q) == 1, *constraints], q

    def weights(name: str, objective: Any, constraints: list[Any], w: Any) -> None:
        out[name] = objective, [columns.T @ w == totals, *constraints], w

    def chi2(w: Any) -> Any:
        return cp.sum(cp.multiply(1 / d, cp.square(w - d)))

    def miss(q: Any, mu: np.ndarray) -> Any:
        return cp.multiply(1 / sd, X.T @ q - mu)

    q, w = cp.Variable(n), cp.Variable(n)
    spread = cp.sum_squares(q - 1 / n)
    shares("uniform_nonneg_q", spread, [X.T @ q == MU, q >= 0], q)
    shares("uniform_bounded_q_max_0.12", spread, [X.T @ q == MU, q >= 0, q <= 0.12], q)
    shares("entropy_uniform_q", -cp.sum(cp.entr(q)), [X.T @ q == MU], q)
    weights("chi2_nonneg_w", chi2(w), [w >= 0], w)
    weights("raking_w", cp.sum(cp.kl_div(w, d)), [], w)
    for low, high in ((0.2, 2.5), (0.05, 3)):
        name = f"chi2_bounded_g_{low}_{high}_w"
        weights(name, chi2(w), [w >= low * d, w <= high * d], w)
    for lam in (0.01, 0.1, 1.0):
        soft = n * spread + (1 / lam) * cp.sum_squares(miss(q, MU_BAD))
        shares(f"soft_quad_lam{lam}_infeasible_mu_q", soft, [q >= 0], q)
    nearest = cp.sum_squares(miss(q, MU_BAD))
    shares("closest_feasible_to_infeasible_mu_q", nearest, [q >= 0], q)
    for tol in (0.05, 0.1):
        shares(f"sbw_tol{tol}_q", spread, [cp.abs(miss(q, MU)) <= tol, q >= 0], q)
    return out


def feasible(X: np.ndarray, mean: np.ndarray, bounds: list[tuple[float, float | None]]) -> bool:
    """Return whether weights within bounds that sum to 1 have this mean."""
    rows = np.column_stack([np.ones(len(X)), X]).T
    found = linprog(np.zeros(len(X)), A_eq=rows, b_eq=np.append(1.0, mean), bounds=bounds)
    return bool(found.status == 0)


def main() -> None:
    """Solve and write."""
    cp: Any = import_module("cvxpy")
    with (FOLDER / "small20.csv").open() as file:
        rows = list(csv.DictReader(file))
    X = np.array([[float(row[name]) for name in ("x1", "x2", "x3")] for row in rows])
    d = np.array([float(row["d"]) for row in rows])
    solutions: dict[str, np.ndarray] = {}
    meta: dict[str, Any] = {}
    for name, (objective, constraints, variable) in problems(cp, X, d).items():
        variable.value = None
        problem = cp.Problem(cp.Minimize(objective), constraints)
        problem.solve(solver="CLARABEL", **TIGHT)
        meta[name] = {"status": problem.status, "objective": float(problem.value)}
        if variable.value is not None:
            solutions[name] = variable.value
    sign: list[tuple[float, float | None]] = [(0.0, None)] * len(X)
    meta["feasibility"] = {"mu": feasible(X, MU, sign), "mu_bad": feasible(X, MU_BAD, sign)}
    share = d / d.sum()
    meta["feasible_g_0.2_2.5"] = feasible(X, MU, [(0.2 * p, 2.5 * p) for p in share])
    meta |= {"mu": MU.tolist(), "mu_bad": MU_BAD.tolist()}
    meta["sd_ddof1"] = X.std(axis=0, ddof=1).tolist()
    (FOLDER / "small20_cvxpy.json").write_text(json.dumps(meta, indent=1))
    with (FOLDER / "small20_solutions_cvxpy.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", *solutions])
        for i in range(len(X)):
            writer.writerow([i + 1, *(repr(float(x[i])) for x in solutions.values())])


if __name__ == "__main__":
    main()
