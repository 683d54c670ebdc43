"""The problems: seeded rows, feasible targets, reference weights, and the cost of one pass."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg.blas import dsyrk
from threadpoolctl import threadpool_limits

VARIABLES, LEVELS = 10, 6
LOW, HIGH = 0.05, 8.0

Array = np.ndarray


@dataclass(frozen=True)
class Rows:
    """Rows with the means that their weights are to have, on disk for the solvers to read."""

    directory: Path
    X: Array
    mu: Array
    tilt_range: tuple[float, float]

    def reference(self, kind: str) -> Array:
        """Return the minimum distance weights, of mean 1, by Newton's method on the dual."""
        scale = self.X.std(axis=0)
        Z = np.column_stack([np.ones(len(self.X)), (self.X - self.mu) / scale])
        return _newton(Z, kind)

    def largest_violation(self, weights: Array) -> float:
        """Return the largest of |sum q x - mu| / sd(x) and |sum q - 1|, for weights of mean 1."""
        q = weights / len(weights)
        misses = np.abs(q @ self.X - self.mu) / self.X.std(axis=0)
        return float(max(misses.max(), abs(q.sum() - 1.0)))


def numeric_rows(directory: Path, n: int, columns: int) -> Rows:
    """Return correlated normal columns, of which three are made binary and one skewed."""
    rng = np.random.default_rng([7, columns])
    X = rng.normal(size=(n, columns))
    X += 0.5 * rng.normal(size=(n, 1)) + rng.normal(0.0, 0.3, columns)
    X[:, -3:] = X[:, -3:] > np.array([-0.5, 0.0, 0.8])
    X[:, -4] = np.exp(0.6 * X[:, -4])
    direction = rng.normal(size=columns)
    return _tilted(directory, X, direction)


def margin_rows(directory: Path, n: int) -> Rows:
    """Return the indicators of categories, without the first level of each, and write the codes."""
    rng = np.random.default_rng(8)
    cuts = np.sort(rng.uniform(-1.2, 1.2, size=(VARIABLES, LEVELS - 1)), axis=1)
    latent = rng.normal(size=(n, VARIABLES)) + 0.5 * rng.normal(size=(n, 1))
    codes = (latent[:, :, None] > cuts).sum(axis=2).astype(np.uint8)
    X = (codes[:, :, None] == np.arange(1, LEVELS)).reshape(n, -1).astype(np.float64)
    rows = _tilted(directory, X, rng.normal(size=X.shape[1]))
    shares = rows.mu.reshape(VARIABLES, LEVELS - 1)
    np.save(directory / "codes.npy", codes)
    np.save(directory / "shares.npy", np.column_stack([1.0 - shares.sum(axis=1), shares]).ravel())
    return rows


def _tilted(directory: Path, X: Array, direction: Array) -> Rows:
    """Return the rows with the means under weights exp(x'a), clipped so that bounds are feasible.

    The tilt is strong enough to make some weights of the linear distance negative.
    """
    score = X @ direction
    score = (score - score.mean()) / (2.0 * score.std())
    tilt = np.clip(np.exp(score), 0.2, 5.0)
    tilt /= tilt.mean()
    mu = tilt @ X / len(X)
    np.save(directory / "X.npy", X)
    np.save(directory / "mu.npy", mu)
    X.T.tofile(directory / "X.f64")  # by columns, as R wants it
    mu.tofile(directory / "mu.f64")
    return Rows(directory, X, mu, (float(tilt.min()), float(tilt.max())))


def _link(kind: str, u: Array) -> tuple[Array, Array]:
    """Return the weights of a distance and their derivatives, at a linear predictor."""
    if kind == "linear":
        return 1.0 + u, np.ones_like(u)
    if kind == "quadratic":
        return np.maximum(1.0 + u, 0.0), (u > -1.0).astype(float)
    if kind == "logit":
        steepness = (HIGH - LOW) / ((1.0 - LOW) * (HIGH - 1.0))
        e = (1.0 - LOW) * np.exp(np.minimum(steepness * u, 500.0))
        weights = (LOW * (HIGH - 1.0) + HIGH * e) / (HIGH - 1.0 + e)
        return weights, steepness * (HIGH - weights) * (weights - LOW) / (HIGH - LOW)
    weights = np.exp(u)
    return weights, weights


def _newton(Z: Array, kind: str) -> Array:
    target = np.zeros(Z.shape[1])
    target[0] = len(Z)
    multipliers = np.zeros(Z.shape[1])
    weights, slopes = _link(kind, Z @ multipliers)
    miss = target - weights @ Z
    for _ in range(50):
        step = np.linalg.solve((Z * slopes[:, None]).T @ Z, miss)
        size = 1.0
        while size > 1e-6:
            weights, slopes = _link(kind, Z @ (multipliers + size * step))
            left = target - weights @ Z
            if np.linalg.norm(left) < np.linalg.norm(miss):
                break
            size /= 2.0
        multipliers, miss = multipliers + size * step, left
        if np.abs(miss).max() < 1e-11 * len(Z):
            return weights
    raise RuntimeError(f"the reference weights of {kind} did not converge")


def one_pass(X: Array) -> dict[str, Any]:
    """Return the seconds and the form of the fastest X' diag(w) X that blocked BLAS gives."""
    weights = np.random.default_rng(0).uniform(0.2, 5.0, len(X))
    exact, seconds = np.triu((X * weights[:, None]).T @ X), {}
    blocks, products, pools = (1024, 4096, 16384, 65536), ("gemm", "syrk"), (True, False)
    for rows in (X, np.asfortranarray(X)):
        for block, product, pool in itertools.product(blocks, products, pools):
            order = "C" if rows.flags.c_contiguous else "F"
            form = (
                f"{product}, {order} order, {block} rows, threads of {'ours' if pool else 'BLAS'}"
            )
            for _ in range(5):
                began = time.perf_counter()
                gram = _pass(rows, weights, block, product, pool=pool)
                lasted = time.perf_counter() - began
                seconds[form] = min(lasted, seconds.get(form, np.inf))
            if not np.allclose(np.triu(gram), exact):
                raise RuntimeError(f"{form} is wrong")
    fastest = min(seconds, key=lambda form: seconds[form])
    return {"seconds": seconds[fastest], "form": fastest, "seconds_of_forms": seconds}


def _pass(X: Array, w: Array, block: int, product: str, *, pool: bool) -> Array:
    """Return X' diag(w) X, or its upper triangle, in blocks, on our two threads or on BLAS's."""
    n, q = X.shape
    by_rows = X.flags.c_contiguous
    factors = np.sqrt(w) if product == "syrk" else w

    def part(first: int, last: int) -> Array:
        total, scratch = np.zeros((q, q)), np.empty((block, q), order="C" if by_rows else "F")
        for a in range(first, last, block):
            rows = X[a : min(a + block, last)]
            scaled = scratch[: len(rows)]
            np.multiply(rows, factors[a : a + len(rows), None], out=scaled)
            if product == "gemm":
                total += scaled.T @ rows
            else:
                total += dsyrk(1.0, scaled.T) if by_rows else dsyrk(1.0, scaled, trans=1)
        return total

    if not pool:
        return part(0, n)
    with threadpool_limits(1), ThreadPoolExecutor(2) as workers:
        return sum(workers.map(part, (0, n // 2), (n // 2, n)))
