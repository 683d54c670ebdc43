"""Calibration of the respondents of all rounds together, to population means alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from cli.command import Files, fedipw
from fedipw.calibration import Entropy, calibrated
from worlds import MEASURED

METHOD = ("--scheme", "calibrated-online")
# Values that depend on what the means are of: what calibration as you go corrects.
BY_CLIENT = 1.0 + pl.col("age") + 0.5 * (pl.col("rich") == "yes")


def mean_of(found: dict[str, Any], estimator: str = "hajek") -> dict[str, Any]:
    (line,) = [e for e in found["estimates"] if e["estimator"] == estimator]
    assert isinstance(line, dict)
    return line


def test_the_mean_and_its_error_are_those_of_the_equations(tmp_path: Path) -> None:
    """With F = exp(lambda'b), t the client's sum of values and c its number of replies.

    The mean is sum F t / sum F c; client i adds F_i (t_i - mean c_i - c_i b_i'B), B the regression
    of t - mean c on b with weights F c, and the variance is the sum of squares; each part is over
    one minus the client's own share of the mean, or of the regression.
    """
    files = Files.of(MEASURED, tmp_path).put()
    files.targets("age,0.0", "rich[yes],0.5")
    found = mean_of(files.evaluated(*METHOD, source="targets"))
    people = files.people.select("unit_id", age="age", rich=(pl.col("rich") == "yes").cast(float))
    rows = files.metrics.join(people, on="unit_id", maintain_order="left")
    b = rows.select("age", "rich").to_numpy()
    weights = calibrated(b, np.array([0.0, 0.5]), distance=Entropy()).weights
    assert found["estimate"] == pytest.approx(float(weights @ rows["value"].to_numpy()), rel=1e-9)
    assert mean_of(files.evaluated(*METHOD, source="targets"), "plain")["estimate"] == (
        pytest.approx(rows["value"].mean(), rel=1e-12)
    )
    w = rows.with_columns(w=pl.Series(weights))
    by = w.group_by("unit_id", maintain_order=True).agg(
        pl.col("age", "rich").first(), F=pl.col("w").first(), t=pl.col("value").sum(), c=pl.len()
    )
    F, c = by["F"].to_numpy(), by["c"].to_numpy()
    t = by["t"].to_numpy() - found["estimate"] * c
    z = np.column_stack([np.ones(len(by)), by["age"], by["rich"] - 0.5])
    gram = (z * (F * c)[:, None]).T @ z
    slope = np.linalg.solve(gram, z.T @ (F * t))
    leverage = F * c * np.einsum("ij,jk,ik->i", z, np.linalg.inv(gram), z)
    share = F * c / (F * c).sum()
    added = F * t / (1.0 - share) - F * c * (z @ slope) / (1.0 - leverage)
    assert found["se"] == pytest.approx(float(np.sqrt((added**2).sum())), rel=1e-8)
    assert found["clients"] == by.height


def test_nothing_is_said_of_totals(tmp_path: Path) -> None:
    files = Files.of(MEASURED, tmp_path).put()
    found = files.evaluated(*METHOD)
    line = mean_of(found, "horvitz-thompson")
    assert line["estimate"] is None
    assert "size" in line["reason"]


def test_intervals_hold_the_truth(tmp_path: Path) -> None:
    """Of 30 worlds at 95% fewer than 23 hold it with a chance of 4e-4, were the level right."""
    held, plain = 0, 0
    for seed in range(30):
        where = tmp_path / str(seed)
        where.mkdir()
        world = replace(MEASURED, seed=seed, size=500, rounds=5, metric=BY_CLIENT)
        files = Files.of(world, where).put()
        truth = float(files.people.select(BY_CLIENT.mean()).item())
        found = files.evaluated(*METHOD)
        line, naive = mean_of(found), mean_of(found, "plain")
        held += line["low"] <= truth <= line["high"]
        plain += naive["low"] <= truth <= naive["high"]
    assert held >= 23
    assert plain <= 3


def test_weights_and_audit_take_it(tmp_path: Path) -> None:
    files = Files.of(MEASURED, tmp_path).put()
    code, _, err = fedipw("audit", *files.given(), *METHOD, "--out", tmp_path / "audit.html")
    assert code == 0, err
    got, summary = files.weighed(*METHOD)
    assert summary["method"] == "calibrated-online"
    assert set(summary["imbalance"]) == {"enrolled", "respondents"}
    for _, part in got.group_by("round"):
        assert part["weight"].sum() == pytest.approx(1.0, rel=1e-12)
    code, printed, err = files.weights(*METHOD)
    assert code == 0, err
    assert "Largest standardised difference from the population" in printed
