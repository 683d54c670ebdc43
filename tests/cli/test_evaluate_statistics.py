"""Quantiles, ratios, totals, differences and replicate weights as a user asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import fedipw as package
from worlds import MEASURED

from .command import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files.of(MEASURED, tmp_path).put()
    under = made.metrics.select("unit_id", "round", value=pl.col("n"))
    under.sample(fraction=1.0, shuffle=True, seed=2).write_csv(tmp_path / "samples.csv")
    return made


def line(
    found: dict[str, Any], statistic: str, estimator: str = "hajek", group: str = "everyone"
) -> dict[str, Any]:
    wanted = (statistic, estimator, group)
    (one,) = [
        e for e in found["estimates"] if (e["statistic"], e["estimator"], e["group"]) == wanted
    ]
    assert isinstance(one, dict)
    return one


def weighed(files: Files) -> pl.DataFrame:
    """Values with weights that sum to about the population's size."""
    found = package.evaluate(
        files.metrics, files.people, files.where / "rounds", replicates=2
    ).replicates
    assert found is not None
    return found.table.join(files.metrics, on=["unit_id", "round"], maintain_order="left").join(
        files.people.select("unit_id", "rich"), on="unit_id", maintain_order="left"
    )


ASKED = ("--by", "rich", "--quantile", 0.5, "--quantile", 0.9, "--total", "--difference", "rich=no")


def test_every_statistic_is_in_the_table_with_its_name(files: Files) -> None:
    found = files.evaluated(*ASKED, "--ratio-to", files.where / "samples.csv")
    kinds = {(e["statistic"], e["estimator"]) for e in found["estimates"]}
    means = {("mean", e) for e in ("plain", "horvitz-thompson", "hajek", "greg")}
    three = ("horvitz-thompson", "hajek", "greg")
    assert kinds == means | {("total", e) for e in three} | {("difference", e) for e in three} | {
        ("ratio", "hajek"), ("quantile 0.5", "hajek"), ("quantile 0.9", "hajek"),
        ("difference of ratios", "hajek"),
    }  # fmt: skip
    rows = weighed(files)
    w, y, n = (rows[name].to_numpy() for name in ("weight", "value", "n"))
    assert line(found, "ratio")["estimate"] == pytest.approx((w @ y) / (w @ n), rel=1e-9)
    assert line(found, "total", "horvitz-thompson")["estimate"] == pytest.approx(w @ y, rel=1e-9)
    assert line(found, "total")["estimate"] == pytest.approx(240 * w @ y / w.sum(), rel=1e-9)
    rich = (rows["rich"] == "yes").to_numpy()
    assert line(found, "total", "horvitz-thompson", "rich = yes")["estimate"] == pytest.approx(
        w[rich] @ y[rich], rel=1e-9
    )
    order = np.argsort(y)
    shares = np.cumsum(w[order]) / w.sum()
    median = y[order][np.searchsorted(shares, 0.5)]
    assert line(found, "quantile 0.5")["estimate"] == median
    means_of = [np.average(y[side], weights=w[side]) for side in (rich, ~rich)]
    apart = line(found, "difference", group="rich = yes less rich = no")
    assert apart["estimate"] == pytest.approx(means_of[0] - means_of[1], rel=1e-9)
    for one in found["estimates"]:
        assert one["low"] <= one["estimate"] <= one["high"]
        assert one["low"] < one["high"]


def test_python_gives_the_same_by_the_same_names(files: Files) -> None:
    out, path = files.where / "r.parquet", files.where / "samples.csv"
    found = files.evaluated(
        *ASKED, "--ratio-to", path, "--replicate-weights", out, "--replicates", 5, "--seed", 7
    )
    again = package.evaluate(
        files.where / "loss.parquet", files.where / "people.parquet", files.where / "rounds",
        by="rich", quantile=(0.5, 0.9), total=True, difference="rich=no", ratio_to=path,
        replicate_weights=files.where / "p.parquet", replicates=5, seed=7,
    )  # fmt: skip
    assert again.to_json() == found
    assert pl.read_parquet(out).equals(pl.read_parquet(files.where / "p.parquet"))
    assert (
        again.of("hajek", statistic="quantile 0.9").estimate
        == line(found, "quantile 0.9")["estimate"]
    )
    assert found["replicates"] | {"scale_finite": None} == {
        "count": 5, "scale": 0.8, "scale_finite": None, "freedom": 4, "seed": 7,
    }  # fmt: skip
    alone = package.evaluate(
        files.metrics, files.people, files.where / "rounds", quantile=0.5, against=files.metrics
    )
    assert alone.of("hajek", statistic="quantile 0.5").estimate == 0.0


def test_the_terminal_names_each_and_says_how_to_use_the_replicates(files: Files) -> None:
    out = files.where / "r.csv"
    code, said, err = files.evaluate(
        "--quantile", 0.5, "--total", "--replicate-weights", out, "--replicates", 4
    )
    assert (code, err) == (0, "")
    for words in ("quantile 0.5", "total HT", "Replicate weights: 4, to be used with scale 0.75",
                  "r.csv"):  # fmt: skip
        assert words in said.replace("\n", " ")
    assert pl.read_csv(out).columns[:4] == ["unit_id", "round", "weight", "rep_1"]
    code, said, _ = files.evaluate("--quantile", 0.999)
    assert code == 0
    assert "quantile 0.999 hajek of everyone: too few values lie beyond it" in said


def test_samples_and_contrasts_go_with_them_where_they_have_a_meaning(files: Files) -> None:
    path = files.where / "samples.csv"
    rows = weighed(files)
    w, y, n = (rows[name].to_numpy() for name in ("weight", "value", "n"))
    found = files.evaluated("--samples", "--quantile", 0.5, "--ratio-to", path)
    expected = ((w * n) @ y) / ((w * n) @ n)
    assert line(found, "ratio")["estimate"] == pytest.approx(expected, rel=1e-9)
    order = np.argsort(y)
    shares = np.cumsum((w * n)[order]) / (w * n).sum()
    assert line(found, "quantile 0.5")["estimate"] == y[order][np.searchsorted(shares, 0.5)]
    other = files.metrics.with_columns(value=pl.lit(0.25))
    other.write_parquet(files.where / "other.parquet")
    against = files.evaluated("--against", files.where / "other.parquet", "--ratio-to", path)
    expected = (w @ (y - 0.25)) / (w @ n)  # the denominator is one of both models
    assert line(against, "ratio")["estimate"] == pytest.approx(expected, rel=1e-9)


def test_totals_need_sizes_and_say_so(files: Files) -> None:
    files.targets("rich[yes],0.5", "age,0.0")
    found = files.evaluated("--total", "--by", "rich", source="targets")
    one = line(found, "total", "hajek", "rich = yes")
    assert one["estimate"] is None
    assert one["reason"] == "the size of the group in the population is not known"
    sized = files.evaluated("--total", "--by", "rich", "--population-size", 240, source="targets")
    parts = [line(sized, "total", "hajek", f"rich = {v}")["estimate"] for v in ("yes", "no")]
    mean = line(sized, "mean", group="rich = yes")["estimate"]
    assert parts[0] == pytest.approx(120 * mean, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--quantile", 1.5), "A quantile is taken between 0 and 1, not at 1.5."),
        (("--difference", "rest"), "name a column to group by (--by)"),
        (("--by", "rich", "--difference", "os=ios"), "no subgroup 'os=ios'"),
        (("--total", "--samples"), "multiply 'value' by 'n' and leave --samples out"),
        (("--replicates", 5), "--replicates goes with --replicate-weights"),
        (("--replicate-weights", "w.csv", "--replicates", 1), "--replicates takes 2 or more"),
        (("--replicate-weights", "w.txt"), "w.txt"),
        (("--ratio-to", "few.parquet"), "must be of the same clients and rounds"),
        (("--replicate-weights", "loss.parquet"), "is an input: write it elsewhere"),
        (("--replicate-weights", "w.csv", "--out", "w.csv"), "both name"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(files: Files, options: tuple[Any, ...], said: str) -> None:
    files.metrics[3:].write_parquet(files.where / "few.parquet")
    before = files.listing()
    named = [files.where / o if str(o).endswith(("csv", "txt", "parquet")) else o for o in options]
    code, _, err = files.evaluate(*named)
    assert code == 2
    assert said in " ".join(err.split())
    assert files.listing() == before


def test_a_denominator_that_is_no_metric_is_named(files: Files) -> None:
    bad = files.metrics.with_columns(value=pl.lit(-1.0))
    bad.write_parquet(files.where / "bad.parquet")
    found = files.evaluated("--ratio-to", files.where / "bad.parquet")
    assert "not above 0" in line(found, "ratio")["reason"]
