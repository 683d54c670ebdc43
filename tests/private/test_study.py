"""The study of private training, in small: coding changes nothing, tables are made."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from benchmarks import private_accuracy as study


def test_coding_does_not_change_a_model() -> None:
    """After eight rounds the excess loss of coded and uncoded sums agree to 1e-5."""
    found = pl.DataFrame(study.trained(("A", 0), rounds=8))
    for kind in ("", ", participation base", ", augmented"):
        (coded,), (plain,) = (
            found.filter(method=f"{form}{kind}")["tail"] for form in ("private", "uncoded")
        )
        assert coded == pytest.approx(plain, abs=1e-5)
    assert found["skipped"].sum() == 0
    table = study.accuracy_table(found)
    assert table.count("\n") == 2 + len(study.BESIDE) + 3 + 1


def test_a_draw_of_a_metric_and_of_missing_clients() -> None:
    """One draw each has finite numbers, and its table a line for each kind."""
    found = pl.DataFrame(study.covered((1, 0)), infer_schema_length=None)
    assert np.isfinite(found["width"].to_numpy()).all()
    assert study.coverage_table(found).count("\n") == 2 + len(study.METRICS)
