"""A Parquet file of a population, and its exact maximum-likelihood fit by plain NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from scipy.special import expit

COLUMNS = 20
_FLAGS = 5  # of the columns are 0 or 1
_PART = 1_000_000


def names() -> list[str]:
    """Return the names of the covariates."""
    return [f"z{j + 1}" for j in range(COLUMNS)]


def write_population(path: Path, rows: int, seed: int = 0) -> None:
    """Write a population part by part, then as one file."""
    rng = np.random.default_rng(seed)
    beta = 0.3 * rng.standard_normal(COLUMNS)
    parts = path.with_suffix(".parts")
    parts.mkdir()
    for first in range(0, rows, _PART):
        m = min(_PART, rows - first)
        X = rng.standard_normal((COLUMNS, m))
        X[-_FLAGS:] = X[-_FLAGS:] > 0.5
        enrolled = rng.random(m) < expit(beta @ X - 1.0)
        columns = dict(zip(names(), X, strict=True))
        frame = pl.DataFrame(
            {"unit_id": np.arange(first, first + m), "enrolled": enrolled, **columns}
        )
        frame.write_parquet(parts / f"{first:012d}.parquet")
    pl.scan_parquet(parts / "*.parquet").sink_parquet(path)
    for part in parts.iterdir():
        part.unlink()
    parts.rmdir()


def _batches(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for batch in pl.scan_parquet(path).collect_batches(chunk_size=500_000):
        X = np.column_stack([batch.select(names()).to_numpy(), np.ones(batch.height)])
        yield X, batch["enrolled"].to_numpy().astype(np.float64)


def exact_fit(path: Path) -> np.ndarray:
    """Return coefficients and intercept by Newton's method in NumPy, until steps are rounding."""
    beta = np.zeros(COLUMNS + 1)
    for _ in range(30):
        gradient, hessian = np.zeros(COLUMNS + 1), np.zeros((COLUMNS + 1, COLUMNS + 1))
        for X, y in _batches(path):
            prob = expit(X @ beta)
            gradient += X.T @ (prob - y)
            hessian += (X * (prob * (1.0 - prob))[:, None]).T @ X
        step = np.linalg.solve(hessian, gradient)
        beta -= step
        if np.abs(step).max() < 1e-12:
            return beta
    raise RuntimeError("the reference fit did not settle")
