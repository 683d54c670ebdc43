"""One fit in a process of its own: ``python solve.py NAME FILE``; prints JSON.

Time runs from the Parquet file to the coefficients; imports are not counted.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

NAMES = [f"z{j + 1}" for j in range(20)]


def _read(path: Path, order: str) -> tuple[Any, Any]:
    frame = pl.read_parquet(path, columns=[*NAMES, "enrolled"])
    return frame.select(NAMES).to_numpy(order=order), frame["enrolled"].to_numpy()


def fedipw(path: Path) -> tuple[float, list[float], dict[str, Any]]:
    from fedipw.selection.coded import table_model
    from fedipw.tables import Table

    began = time.perf_counter()
    fit = table_model(Table(path), " + ".join(NAMES)).logistic()
    seconds = time.perf_counter() - began
    facts = {"passes": fit.passes, "version": version("fedipw")}
    return seconds, [*fit.coefficients, fit.intercept], facts


def scikit(path: Path, solver: str, tol: float) -> tuple[float, list[float], dict[str, Any]]:
    from sklearn.linear_model import LogisticRegression

    began = time.perf_counter()
    X, y = _read(path, "c")
    model = LogisticRegression(C=np.inf, solver=solver, tol=tol, max_iter=1000).fit(X, y)
    seconds = time.perf_counter() - began
    facts = {"iterations": int(model.n_iter_[0]), "version": version("scikit-learn")}
    return seconds, [*model.coef_[0], model.intercept_[0]], facts


def glum(path: Path) -> tuple[float, list[float], dict[str, Any]]:
    from glum import GeneralizedLinearRegressor

    began = time.perf_counter()
    X, y = _read(path, "fortran")
    model = GeneralizedLinearRegressor(family="binomial", alpha=0, gradient_tol=1e-9)
    model.fit(X, y.astype(np.float64))
    seconds = time.perf_counter() - began
    facts = {"iterations": int(model.n_iter_), "version": version("glum")}
    return seconds, [*model.coef_, model.intercept_], facts


SOLVERS = {
    "fedipw": fedipw,
    "scikit-learn newton-cholesky": lambda path: scikit(path, "newton-cholesky", 1e-9),
    "scikit-learn lbfgs": lambda path: scikit(path, "lbfgs", 1e-9),
    "glum": glum,
}


if __name__ == "__main__":
    seconds, point, facts = SOLVERS[sys.argv[1]](Path(sys.argv[2]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        json.dumps(
            {"seconds": seconds, "gigabytes": peak, "point": list(map(float, point)), **facts}
        )
    )
