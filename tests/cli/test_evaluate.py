"""``fedipw evaluate`` as a user runs it: tables, JSON, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedipw.api import audit
from fedipw.evaluation.estimators import HajekMean, population_means
from fedipw.evaluation.phases import KnownEnrollment
from fedipw.evaluation.sample import TwoPhase
from worlds import MEASURED

from .command import Files, fedipw

COLUMNS = [
    "group", "statistic", "estimator", "estimate", "se", "low", "high", "confidence",
    "effective_sample_size", "clients", "replies", "se_superpopulation", "freedom", "reason",
    "interval", "warning", "clusters",
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files.of(MEASURED, tmp_path)


def line(found: dict[str, Any], estimator: str, group: str = "everyone") -> dict[str, Any]:
    (one,) = [e for e in found["estimates"] if (e["estimator"], e["group"]) == (estimator, group)]
    assert isinstance(one, dict)
    return one


def test_the_table_says_what_was_found(files: Files) -> None:
    files.put()
    before = files.listing()
    code, out, err = files.evaluate("--by", "rich", "--sensitivity", 2, "--conclusion", 0.5)
    assert (code, err) == (0, "")
    for words in ("everyone", "plain", "HT", "hajek", "greg", "rich = yes", "eff. n",
                  "Weighting moves the mean by", "move the odds of enrollment by up to 2",
                  "The conclusion changes at an odds ratio of enrollment of"):  # fmt: skip
        assert words in out
    assert files.listing() == before


def test_shares_stay_inside_and_few_events_are_said_everywhere(files: Files) -> None:
    rare = (pl.col("value") > files.metrics["value"].quantile(0.99)).cast(pl.Float64)
    files.metrics = files.metrics.with_columns(value=rare)
    found = files.put().evaluated("--by", "rich")
    hajek = line(found, "hajek")
    assert (hajek["interval"], hajek["reason"]) == ("jeffreys", "")
    assert hajek["warning"].startswith("cannot promise 0.95: ")
    assert "with the rarer of 0 and 1, fewer than 10" in hajek["warning"]
    assert all(0.0 <= e["low"] < e["high"] <= 1.0 for e in found["estimates"] if e["low"])
    _, out, _ = files.evaluate()
    assert "Intervals by jeffreys: plain of everyone" in out.replace("\n", " ")
    assert "hajek of everyone" in out
    assert "fewer than 10" in out.replace("\n", " ")
    report = audit(
        files.where / "people.parquet", files.where / "rounds", metrics=files.where / "loss.parquet"
    )
    assert report.audit.metric is not None
    (one,) = [e for e in report.audit.metric.estimates if e.estimator == "hajek"]
    assert one.warning == hajek["warning"]
    page = files.where / "report.html"
    report.save(page)
    assert "with the rarer of 0 and 1, fewer than 10" in page.read_text(encoding="utf-8")
    logit = line(files.evaluated("--interval", "logit"), "hajek")
    assert (logit["interval"], logit["estimate"]) == ("logit", hajek["estimate"])
    t = line(files.evaluated("--interval", "t", "--no-proportion"), "hajek")
    assert t["low"] < 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--interval", "wald"), "There is no interval 'wald'; there are auto, t, logit"),
        (("--interval", "beta"), "beta intervals are for metrics of 0 and 1"),
        (("--proportion",), "A share has values from 0 to 1"),
        (("--interval", "bootstrap", "--resamples", 0), "1 to 1000000 resamples, not 0"),
        (("--cluster", "house"), "has no column 'house' to cluster clients by"),
    ],
)
def test_intervals_that_do_not_fit_are_refused(
    files: Files, options: tuple[object, ...], said: str
) -> None:
    code, _, err = files.put().evaluate(*options)
    assert code == 2
    assert said in " ".join(err.split())


BOOSTING = ("--classifier", "boosting", "--folds", 3)


@pytest.mark.parametrize("scheme", ["fedipw", "calibrated-entropy"])
def test_a_classifier_gives_weights_as_the_weights_command_does_and_known_probabilities(
    files: Files, scheme: str
) -> None:
    files.put()
    found = files.evaluated("--scheme", scheme, *BOOSTING)
    code, _, err = fedipw(
        "weights", "--population", files.where / "people.parquet", "--rounds",
        files.where / "rounds", "--out", files.where / "w.parquet", "--scheme", scheme,
        "--participation-fit", "pooled", *BOOSTING,
    )  # fmt: skip
    assert code == 0, err
    weights = pl.read_parquet(files.where / "w.parquet")
    both = weights.join(files.metrics, on=["unit_id", "round"], maintain_order="left")
    assert both.height == files.metrics.height
    mean = np.average(both["value"], weights=both["weight"])
    assert line(found, "hajek")["estimate"] == pytest.approx(mean, rel=1e-9)
    assert np.isfinite([line(found, e)["se"] for e in ("horvitz-thompson", "hajek", "greg")]).all()
    by = "enrollment and participation" if scheme == "fedipw" else "participation"
    (note,) = (n for n in found["notes"] if "classifier" in n)
    assert note.startswith(f"Probabilities of {by} are by a classifier and taken as known")
    assert note in files.evaluate("--scheme", scheme, *BOOSTING)[1].replace("\n", " ")
    assert not any("classifier" in n for n in files.evaluated("--scheme", scheme)["notes"])
    if scheme == "fedipw":  # the error is that of a sample with these probabilities
        places = {unit: k for k, unit in enumerate(files.inside["unit_id"].to_list())}
        client = both["unit_id"].replace_strict(places).to_numpy()
        kappa = np.ones(len(places))  # of those who never replied nothing is used
        kappa[client] = 1 / both["enrollment_prob"].to_numpy()
        sample = TwoPhase(
            client=client,
            round=both["round"].to_numpy() - 1,
            prob=both["participation_prob"].to_numpy(),
            rounds=4,
            enrollment=KnownEnrollment(weights=kappa, population_size=240),
        )
        (known,) = population_means(sample, both["value"].to_numpy(), [HajekMean()])
        assert line(found, "hajek")["se"] == pytest.approx(known.se, rel=1e-9)


def test_a_jackknife_takes_the_probabilities_of_a_classifier_as_known(files: Files) -> None:
    files.put()
    found = files.evaluated(*BOOSTING, "--jackknife", 12)
    assert line(found, "hajek")["se"] > 0.0
    assert any("those of a jackknife too" in n for n in found["notes"])


def test_json_holds_every_number(files: Files) -> None:
    files.put()
    found = files.evaluated("--confidence", 0.9)
    assert (found["method"], found["rounds"], found["population_size"]) == (
        "fedipw-hajek",
        4,
        240.0,
    )
    names = [e["estimator"] for e in found["estimates"]]
    assert names == ["plain", "horvitz-thompson", "hajek", "greg"]
    plain, hajek = line(found, "plain"), line(found, "hajek")
    assert plain["estimate"] == pytest.approx(files.metrics["value"].mean())
    assert hajek["low"] < hajek["estimate"] < hajek["high"]
    assert (hajek["confidence"], hajek["replies"]) == (0.9, files.metrics.height)
    assert found["moved"]["difference"] == pytest.approx(hajek["estimate"] - plain["estimate"])
    assert found["sensitivity_reason"] == "not asked for"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_out_is_the_table_in_its_columns(files: Files, kind: str) -> None:
    files.put()
    out = files.where / f"means.{kind}"
    code, printed, err = files.evaluate("--by", "rich", "--out", out)
    assert code == 0, err
    assert f"Wrote {out}" in printed
    got = pl.read_csv(out) if kind == "csv" else pl.read_parquet(out)
    assert got.columns == COLUMNS
    expected = files.evaluated("--by", "rich")["estimates"]
    assert got.height == len(expected) == 12
    np.testing.assert_allclose(got["estimate"], [e["estimate"] for e in expected], rtol=1e-12)
    assert got["group"].unique(maintain_order=True).to_list() == [
        "everyone", "rich = no", "rich = yes",
    ]  # fmt: skip


def test_groups_by_a_number_in_fifths_and_by_round(files: Files) -> None:
    files.put()
    found = files.evaluated("--by", "age", "--by", "round")
    names = list(dict.fromkeys(e["group"] for e in found["estimates"]))
    assert [n.split(" in ")[0] for n in names[1:6]] == ["age"] * 5
    assert names[1].startswith("age in (-inf, ")
    assert names[6:] == [f"round = {k}" for k in range(1, 5)]
    means = [line(found, "hajek", name)["estimate"] for name in names[1:6]]
    assert means[0] < means[2] < means[4]  # the metric rises with age
    assert sum(line(found, "plain", n)["replies"] for n in names[6:]) == files.metrics.height


def test_sensitivity_widens_and_a_conclusion_nothing_reaches_is_null(files: Files) -> None:
    files.put()
    options = ("--sensitivity", 1, "--sensitivity", 2, "--sensitivity", 5)
    hajek = line(files.evaluated(), "hajek")["estimate"]
    one, two, five = files.evaluated(*options)["sensitivity"]
    assert one["low"] == pytest.approx(hajek) == one["high"]
    assert five["low"] < two["low"] < hajek < two["high"] < five["high"]
    assert (two["odds_ratio"], two["reverses_at"]) == (2.0, None)
    (near,) = files.evaluated("--sensitivity", 2, "--conclusion", two["low"])["sensitivity"]
    assert near["reverses_at"] == pytest.approx(2.0, rel=1e-6)
    (far,) = files.evaluated("--sensitivity", 2, "--conclusion", -1e6)["sensitivity"]
    assert far["reverses_at"] is None
    code, out, _ = files.evaluate("--sensitivity", 2, "--conclusion", -1e6)
    assert code == 0
    assert "No odds ratio of enrollment changes the conclusion." in out


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_contrast_is_the_mean_of_the_differences(files: Files, kind: str) -> None:
    files.put()
    other = files.metrics.with_columns(pl.col("value") ** 2 / 4)
    path = files.where / f"other.{kind}"
    shuffled = other.sample(fraction=1.0, shuffle=True, seed=1)
    shuffled.write_parquet(path) if kind == "parquet" else shuffled.write_csv(path)
    both = files.evaluated("--against", path)
    files.metrics = files.metrics.with_columns(pl.col("value") - other["value"])
    files.put()
    assert both["estimates"] == files.evaluated()["estimates"]
    code, out, _ = files.evaluate("--against", path)
    assert code == 0
    assert "Values are differences" in out


def test_the_mean_over_samples_and_the_jackknife(files: Files) -> None:
    files.put()
    found = files.evaluated("--samples", "--by", "round")
    assert {e["estimator"] for e in found["estimates"]} == {"plain", "hajek"}
    told = files.metrics
    plain = np.average(told["value"].to_numpy(), weights=told["n"].to_numpy())
    assert line(found, "plain")["estimate"] == pytest.approx(plain)
    linear, jackknife = files.evaluated(), files.evaluated("--jackknife", 60)
    for name in ("horvitz-thompson", "hajek", "greg"):
        assert line(jackknife, name)["estimate"] == line(linear, name)["estimate"]
        ratio = line(jackknife, name)["se"] / line(linear, name)["se"]
        assert ratio != 1.0
        assert 0.6 < ratio < 1.6  # 60 groups of 240 clients know it within a tenth or so
    both = files.evaluated("--samples", "--jackknife", 20)
    assert line(both, "hajek")["estimate"] == line(found, "hajek")["estimate"]


def test_a_penalty_is_that_of_the_weights_command(files: Files) -> None:
    files.put()
    out, free = files.where / "weights.parquet", line(files.evaluated(), "hajek")
    found = line(files.evaluated("--l2", 20), "hajek")
    code, _, err = fedipw(
        "weights", "--population", files.where / "people.parquet", "--rounds",
        files.where / "rounds", "--participation-fit", "pooled", "--l2", 20, "--out", out,
        "--scheme", "fedipw",
    )  # fmt: skip
    assert code == 0, err
    rows = pl.read_parquet(out).join(files.metrics, on=["unit_id", "round"])
    mean = np.average(rows["value"].to_numpy(), weights=rows["weight"].to_numpy())
    assert rows.height == files.metrics.height
    assert found["estimate"] == pytest.approx(mean, rel=1e-9)
    assert abs(found["estimate"] - free["estimate"]) > 0.1 * free["se"]
    assert found["se"] != pytest.approx(free["se"], rel=1e-3)
    code, _, err = files.evaluate("--l2", -1)
    assert code == 2
    assert "l2 must be 0 or more" in err


def test_replies_without_a_metric_are_left_out_on_request(files: Files) -> None:
    files.metrics = files.metrics[3:]
    files.put()
    found = files.evaluated("--missing-metrics")
    assert any("3 replies have no metric" in note for note in found["notes"])
    assert line(found, "horvitz-thompson")["estimate"] is None
    assert "left out" in line(found, "horvitz-thompson")["reason"]
    code, out, _ = files.evaluate("--missing-metrics")
    assert code == 0
    assert "horvitz-thompson of everyone: 3 replies are left out" in out


def test_totals_alone_with_and_without_the_size(files: Files) -> None:
    files.put()
    age = float(files.people["age"].to_numpy().mean())
    files.targets(f"age,{age}", "rich[yes],0.5")
    found = files.evaluated("--by", "rich", source="targets")
    assert (found["method"], found["population_size"]) == ("calibrated-entropy-hajek", None)
    assert line(found, "horvitz-thompson")["estimate"] is None
    sized = files.evaluated("--by", "rich", "--population-size", 240, source="targets")
    parts = [line(sized, "horvitz-thompson", f"rich = {v}")["estimate"] for v in ("no", "yes")]
    assert np.mean(parts) == pytest.approx(line(sized, "horvitz-thompson")["estimate"])
    assert line(sized, "hajek")["se"] < line(found, "hajek")["se"]
    lines = (f"age,{age},0.2", "rich[yes],0.5,0")
    files.targets(*lines, head="name,value,se")
    unsure = files.evaluated("--population-size", 240, source="targets")
    assert line(unsure, "hajek")["se"] > line(sized, "hajek")["se"]


def test_help_has_an_example() -> None:
    code, printed, _ = fedipw("evaluate", "--help")
    assert code == 0
    assert "fedipw evaluate --metrics" in " ".join(printed.split())
