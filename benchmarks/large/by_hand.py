"""Pooled weights by hand: ``python by_hand.py scikit-learn|glum PEOPLE ROUNDS OUT``; prints JSON.

What one writes without fedipw: polars reads, filters and joins, another package fits both stages.
A matrix is dropped once its fit is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import polars as pl

Prob = Callable[[np.ndarray], np.ndarray]
PEOPLE = ["z1", "z2", "z3", "ios", "web"]
ROUNDS = [*PEOPLE, "battery", "wifi"]


def scikit_learn(X: np.ndarray, y: np.ndarray) -> tuple[Prob, int]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-9, max_iter=100)
    model.fit(X, y)
    return lambda rows: model.predict_proba(rows)[:, 1], int(model.n_iter_[0])


def glum(X: np.ndarray, y: np.ndarray) -> tuple[Prob, int]:
    from glum import GeneralizedLinearRegressor  # type: ignore[import-not-found]

    model = GeneralizedLinearRegressor(family="binomial", alpha=0, gradient_tol=1e-9)
    model.fit(X, y.astype(np.float64))
    return lambda rows: np.asarray(model.predict(rows)), int(model.n_iter_)


# the fit of a package, and the order of a matrix that it takes without a copy
FITS: dict[str, tuple[Callable[..., tuple[Prob, int]], Literal["c", "fortran"]]] = {
    "scikit-learn": (scikit_learn, "c"),
    "glum": (glum, "fortran"),
}


def main(name: str, people: str, rounds: str, out: str) -> dict[str, Any]:
    fit, order = FITS[name]
    population = pl.scan_parquet(people).with_columns(
        ios=(pl.col("os") == "ios").cast(pl.Float64), web=(pl.col("os") == "web").cast(pl.Float64)
    )
    frame = population.select(*PEOPLE, "enrolled").collect()
    X, y = frame.select(PEOPLE).to_numpy(order=order), frame["enrolled"].to_numpy()
    del frame
    prob, first = fit(X, y)
    del X, y
    members = population.filter("enrolled").select("unit_id", *PEOPLE).collect()
    matrix = members.select(PEOPLE).to_numpy(order=order)
    members = members.with_columns(enrollment_prob=pl.Series(prob(matrix)))

    rows = (
        pl.scan_parquet(f"{rounds}/round-*.parquet")
        .select(
            "round", "unit_id", "replied", "battery",
            wifi=(pl.col("network") == "wifi").cast(pl.Float64),
        )
        .join(members.lazy(), on="unit_id")
        .collect()
    )  # fmt: skip
    matrix = rows.select(ROUNDS).to_numpy(order=order)
    prob, second = fit(matrix, rows["replied"].to_numpy())
    del matrix
    replies = rows.filter("replied")
    del rows
    reply = pl.Series(prob(replies.select(ROUNDS).to_numpy(order=order)))
    inclusion = pl.col("enrollment_prob") * pl.col("participation_prob")
    replies.select("unit_id", "round", "enrollment_prob", participation_prob=reply).with_columns(
        inclusion_prob=inclusion
    ).with_columns(
        weight=(1 / pl.col("inclusion_prob")) / (1 / pl.col("inclusion_prob")).sum().over("round")
    ).write_parquet(out)
    return {"version": version(name), "iterations": [first, second]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
