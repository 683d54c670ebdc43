"""Weights of enrolled clients by balance: ``python by_balance.py SETTINGS PEOPLE OUT``.

The sample is who is enrolled, the target is everybody. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any


def main(settings: str, people: str, out: str) -> dict[str, Any]:
    import pandas as pd
    from balance import Sample
    from sklearn.linear_model import LogisticRegression

    chosen: dict[str, dict[str, Any]] = {
        "defaults": {},  # 250 penalties, each by ten folds
        "10 penalties": {"num_lambdas": 10},
        "same model": {
            # lbfgs: balance codes all levels beside an intercept, and newton-cholesky needs rank
            "model": LogisticRegression(penalty=None, solver="lbfgs", tol=1e-9, max_iter=1000),
            "transformations": None,
            "weight_trimming_mean_ratio": None,
            "balance_classes": False,
        },
    }
    frame = pd.read_parquet(people)
    enrolled = frame.pop("enrolled")
    sample = Sample.from_frame(frame[enrolled].copy(), id_column="unit_id")
    target = Sample.from_frame(frame, id_column="unit_id")
    adjusted = sample.set_target(target).adjust(method="ipw", **chosen[settings])
    adjusted.df[["unit_id", "weight"]].to_parquet(out)
    return {"version": version("balance")}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
