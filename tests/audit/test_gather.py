"""Every number of a gathered audit against plain polars, numpy and scikit-learn."""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cli.command import succeeded
from fedipw.selection.steps import Clock

from .reference import (
    check_coefficients,
    check_stage,
    check_weights,
    close,
    design,
    enrollment_prob,
    expected_rates,
    gathered,
    moments,
    planned,
    reply_probs,
    truths,
    world,
)


@pytest.mark.parametrize("fit", ["past", "pooled", "same-round"])
@pytest.mark.parametrize("steps", [False, True])
def test_stages_are_those_of_scikit_learn(fit: str, steps: bool, tmp_path: Path) -> None:
    given = world(1, steps=steps, rounds=13)
    found = gathered(given, tmp_path, planned(fit=fit))
    enrollment, *parts = found["stages"]
    model, Z, prob = enrollment_prob(given)
    check_stage(enrollment, prob, given.people["enrolled"].to_numpy(), ("population", "enrolled"))
    check_coefficients(enrollment, model, Z, design(given.people, log=False)[0])
    wanted = truths(given, fit)
    assert [part["stage"] for part in parts] == list(wanted)
    for part, (name, truth) in zip(parts, wanted.items(), strict=True):
        told = [k for k, p in enumerate(truth.prob) if p is not None]
        label = "available" if name == "availability" else "replied"
        check_stage(
            part,
            np.concatenate([truth.prob[k] for k in told]),
            np.concatenate([truth.passed[k] for k in told]),
            ("rows", label),
        )
        if fit == "same-round":
            assert part["coefficients"] == []
        else:
            assert truth.last is not None
            assert truth.last_on is not None
            names = design(truth.rows[0], log=name != "availability")[0]
            check_coefficients(part, truth.last, truth.last_on, names)
        rates = sum(truth.constant)
        said = [n for n in found["notes"] if f"{name!r} was given a constant rate" in n]
        assert len(said) == bool(rates)
        assert all(f" {rates} round" in note for note in said)


@pytest.mark.parametrize("fit", ["past", "pooled"])
@pytest.mark.parametrize("steps", [False, True])
def test_rounds_and_sizes_are_those_of_the_ledger(fit: str, steps: bool, tmp_path: Path) -> None:
    given = world(2, steps=steps, clock=True).changed(6, replied=pl.lit(value=False))
    found = gathered(given, tmp_path, planned(fit=fit))
    weights = reply_probs(given, fit)
    assert found["sizes"] == {
        "population": 400.0,
        "population_table": True,
        "population_source": "table of all clients",
        "population_known": 400.0,
        "enrolled": given.inside.height,
        "rounds": 12,
        "rows": given.log.height,
        "replies": int(given.log["replied"].sum()),
        "clients_replied": given.log.filter("replied")["unit_id"].n_unique(),
    }
    for line, table, expected in zip(
        found["rounds"], given.rounds, expected_rates(given, fit), strict=True
    ):
        k = line["first"]
        assert line["last"] == k == table["round"][0]
        assert line["opened_at"] == (datetime(2026, 3, 1) + timedelta(hours=5 * k)).isoformat()
        assert (line["enrolled"], line["invited"]) == (table.height, table["invited"].sum())
        close(line["reply_rate"], table["replied"].mean())
        own = weights.filter(pl.col("round") == k)["weight"].to_numpy()
        if k == 6:
            assert line["skipped"] == 1
            assert line["effective_replies"] is line["weight_sum"] is line["largest_share"] is None
        else:
            assert line["skipped"] == 0
            close(line["replies"], len(own))
            close(line["weight_sum"], own.sum())
            close(line["effective_replies"], own.sum() ** 2 / (own**2).sum())
            close(line["largest_share"], own.max() / own.sum())
        if expected is None:
            assert line["expected_rate"] is line["calibration_ratio"] is None
        else:
            close([line["expected_rate"], line["calibration_ratio"]], expected)
    assert "1 round could not be weighed: nobody replied." in found["notes"]


def test_weights_and_balance_are_those_of_the_groups(tmp_path: Path) -> None:
    given = world(3, steps=True)
    found = gathered(given, tmp_path, planned())
    replies = reply_probs(given, "past")
    inside = given.inside.select("unit_id")
    pi = enrollment_prob(given)[2][given.people["enrolled"].to_numpy()]
    enrolled, weighted = found["weights"]
    assert (enrolled["name"], weighted["name"]) == ("enrollment", "replies")
    check_weights(enrolled, 1 / pi)
    check_weights(weighted, replies["weight"].to_numpy())
    part = found["balance"]
    assert part["scale_from"] == "population"
    groups = ["enrolled", "respondents", "enrolled weighted", "respondents weighted"]
    assert part["groups"] == groups
    names = [line["name"] for line in part["lines"]]
    assert names == ["z1", "os[android]", "os[ios]", "os[web]", "flat", "rooms"]
    everyone, those = moments(given, names, None), moments(given, names, inside)
    again = moments(given, names, replies.select("unit_id"))
    for line in part["lines"]:
        name = line["name"]
        mean, sd = everyone[name].mean(), everyone[name].std(ddof=1)
        close([line["mean"], line["sd"]], [mean, sd])
        wanted = (
            those[name].mean(),
            again[name].mean(),
            np.average(those[name], weights=1 / pi),
            np.average(again[name], weights=replies["weight"]),
        )
        for group, value in zip(groups, wanted, strict=True):
            cell = line["groups"][group]
            close(cell["mean"], value)
            close(cell["smd"], 0.0 if name == "flat" else (value - mean) / sd, rtol=1e-5)


def test_overlap_counts_small_probabilities_and_parts_nobody_is_enrolled_in(tmp_path: Path) -> None:
    given = world(4)
    gone = (pl.col("os") == "web") & pl.col("rooms").is_in([1, 2])
    given = given.kept(~gone)
    people = given.people
    found = gathered(given, tmp_path, planned(), threshold=0.2, min_cell=10)["overlap"]
    prob = enrollment_prob(given)[2]
    pi = prob[people["enrolled"].to_numpy()]
    close(found["smallest_prob"], prob.min())
    assert found["below"] == (prob < 0.2).sum()
    close(found["share_below"], (prob < 0.2).mean())
    close(found["estimated_size"], (1 / pi).sum())
    close(found["effective_sample_size"], (1 / pi).sum() ** 2 / (1 / pi**2).sum())
    pairs = people.group_by("os", "rooms").agg(pl.len(), pl.col("enrolled").sum())
    empty = pairs.filter(enrolled=0).sort("len", descending=True)
    assert empty.height >= 2
    wanted = {f"os = {o} and rooms = {r}": n for o, r, n, _ in empty.iter_rows()}
    assert {e["name"]: e["population"] for e in found["empty"]} == wanted
    assert found["empty_small"] == 0
    (tmp_path / "small").mkdir()
    limit = int(empty["len"][0])  # only the largest is shown
    small = gathered(given, tmp_path / "small", planned(), min_cell=limit)["overlap"]
    assert [e["population"] for e in small["empty"]] == [n for n in empty["len"] if n >= limit]
    assert small["empty_small"] == empty.filter(pl.col("len") < limit).height


@pytest.mark.parametrize("clock", [True, False])
def test_rates_and_heat_maps_are_plain_counts(clock: bool, tmp_path: Path) -> None:
    given = world(5, clock=clock, steps=True)
    found = gathered(given, tmp_path, planned(clock=Clock(day_length=4.0)))
    log = given.log
    parts = {part["column"]: part for part in found["rates"]}
    assert list(parts) == ["z1", "os", "flat", "rooms", "x", "net"]
    cuts = {}
    sample = pl.concat([given.rounds[k] for k in np.linspace(0, 11, 8).astype(int)])
    for name, frame in (("z1", given.people), ("x", sample.drop_nulls("x"))):
        cut = [0.2, 0.4, 0.6, 0.8]
        edges = np.quantile(frame[name].to_numpy(), cut, method="nearest").tolist()
        text = ["-inf", *(f"{e:.6g}" for e in edges), "inf"]
        labels = [f"({a}, {b}]" for a, b in pairwise(text)]
        level = pl.lit(labels[-1])
        for limit, label in reversed([*zip(edges, labels, strict=False)]):
            level = pl.when(pl.col(name) <= limit).then(pl.lit(label)).otherwise(level)
        cuts[name] = pl.when(pl.col(name).is_null()).then(None).otherwise(level)
    levels = {n: cuts.get(n, pl.col(n).cast(pl.String).str.replace(r"\.0$", "")) for n in parts}
    hour = pl.col("opened_at").dt.hour() if clock else (pl.col("round") - 1) % 4
    log = log.with_columns(e.fill_null("(missing)").alias(f"{n} level") for n, e in levels.items())
    log = log.with_columns(hour.cast(pl.Int64).alias("hour"))
    for name, part in parts.items():
        counts = log.group_by(f"{name} level").agg(pl.len(), pl.col("replied").sum())
        wanted = {level: (n, k) for level, n, k in counts.iter_rows()}
        assert {p["level"]: (p["rows"], p["replies"]) for p in part["lines"]} == wanted
        assert part["hidden"] == 0
        for line in part["lines"]:
            close(line["rate"], line["replies"] / line["rows"])
    assert {m["column"] for m in found["heat"]} <= {*parts}
    assert len(found["heat"]) == 3
    for heat in found["heat"]:
        assert heat["clock"] == ("hour" if clock else "round of the day")
        assert heat["hours"] == sorted(set(log["hour"]))
        assert heat["levels"] == [p["level"] for p in parts[heat["column"]]["lines"]]
        for level, rates, rows in zip(heat["levels"], heat["rate"], heat["rows"], strict=True):
            for hour_, rate, n in zip(heat["hours"], rates, rows, strict=True):
                cell = log.filter(pl.col(f"{heat['column']} level") == level, hour=hour_)["replied"]
                assert n == (len(cell) if len(cell) >= 10 else None)
                assert (rate is None) == (n is None)
                if rate is not None:
                    close(rate, cell.mean())
    spread = {
        name: np.average(
            [(p["rate"] - log["replied"].mean()) ** 2 for p in part["lines"]],
            weights=[p["rows"] for p in part["lines"]],
        )
        for name, part in parts.items()
        if len(part["lines"]) > 1
    }
    chosen = sorted(spread, key=lambda n: -spread[n])[:3]
    assert {m["column"] for m in found["heat"]} == {*chosen}


@pytest.mark.parametrize("known", ["population", "totals"])
def test_a_number_is_cut_into_the_same_fifths_wherever_the_page_shows_it(
    known: str, tmp_path: Path
) -> None:
    given = world(17, size=900)
    top = float(given.people["z1"].quantile(0.8) or 0.0)
    given = given.kept(pl.col("z1") <= top)
    values = given.log.filter("replied").select("unit_id", "round", value="z1")
    replace(given, metrics=values).write(tmp_path, targets={"z1": -0.3})
    source: dict[str, Path] = {"--population": tmp_path / "people.parquet"}
    if known == "totals":
        source = {
            "--enrolled": tmp_path / "enrolled.parquet",
            "--targets": tmp_path / "targets.csv",
        }
    succeeded(
        "audit", *(x for pair in source.items() for x in pair), "--rounds", tmp_path / "rounds",
        "--metrics", tmp_path / "loss.parquet", "--by", "z1", "--out", tmp_path / "a.html",
        "--json", tmp_path / "a.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "a.json").read_text())
    (rates,) = (part for part in found["rates"] if part["column"] == "z1")
    levels = [f"z1 in {line['level']}" for line in rates["lines"]]
    groups = [e["group"] for e in found["metric"]["estimates"] if e["estimator"] == "hajek"]
    assert groups == ["everyone", *levels]
    replies = {e["group"]: e["replies"] for e in found["metric"]["estimates"]}
    assert [line["replies"] for line in rates["lines"]] == [replies[level] for level in levels]
    if known == "totals":
        assert len(levels) == 5
        return
    assert [e["name"] for e in found["overlap"]["empty"]] == [f"z1 in ({top:.6g}, inf]"]
    assert len(levels) == 4
    assert levels[-1].endswith(f", {top:.6g}]")


def test_without_a_clock_or_two_days_there_is_no_heat_map(tmp_path: Path) -> None:
    assert gathered(world(6), tmp_path, planned())["heat"] == []


@pytest.mark.parametrize(
    ("method", "fit"),
    [
        ("fedipw", "past"),
        ("fedipw-hajek", "pooled"),
        ("greg", "past"),
        ("calibrated-linear", "same-round"),
        ("participation-only", "past"),
        ("collapsed", "past"),
    ],
)
def test_weights_are_those_of_the_command(method: str, fit: str, tmp_path: Path) -> None:
    given = world(7, steps=True, rounds=14)
    for k in (1, 5, 12):  # rounds without replies are not fitted in
        given = given.changed(k, replied=pl.lit(value=False))
    found = gathered(given, tmp_path, planned(method, fit=fit))
    succeeded(
        "weights", "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "rounds",
        "--out", tmp_path / "w.parquet", "--scheme", method, "--participation-fit", fit,
    )  # fmt: skip
    written = pl.read_parquet(tmp_path / "w.parquet")
    parts = {part["name"]: part for part in found["weights"]}
    check_weights(parts["replies"], written["weight"].to_numpy())
    means = moments(given, ["z1", "os[web]"], written.select("unit_id"))
    lines = {line["name"]: line for line in found["balance"]["lines"]}
    for name, values in means.items():
        wanted = np.average(values, weights=written["weight"])
        close(lines[name]["groups"]["respondents weighted"]["mean"], wanted)
    assert found["settings"]["scheme"] == method
    assert found["settings"]["participation_fit"] == fit


def test_negative_weights_are_counted_and_kept_out_of_the_histogram(tmp_path: Path) -> None:
    given = world(8, size=300, rounds=6)
    found = gathered(given, tmp_path, planned("greg"))
    part = next(p for p in found["weights"] if p["name"] == "replies")
    assert part["negative"] > 0
    assert sum(part["multiples"]["counts"]["replies"]) == part["count"] - part["negative"]
    assert f"{part['negative']} weights of replies are negative." in found["notes"]


def test_the_rounds_of_a_fit_are_named(tmp_path: Path) -> None:
    given = world(1, rounds=4)
    found = gathered(given, tmp_path, planned(decay=0.8, last=3))
    assert found["settings"]["participation_fit"] == "past, the last 3, decay 0.8"
