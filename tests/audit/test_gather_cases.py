"""Audits of special worlds: totals alone, no ledger, changing enrollment, missing values."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cli.command import succeeded
from fedipw.audit.gather import MetricRequest
from fedipw.audit.rates import coder_of
from fedipw.errors import InputError
from fedipw.evaluation.logged import Metrics
from fedipw.selection.coefficients import PENALISED_NOTE
from fedipw.selection.saved import StageModel
from fedipw.tables.cells import Cells
from worlds import Tables

from .reference import (
    check_coefficients,
    check_stage,
    check_weights,
    close,
    design,
    enrollment_prob,
    gathered,
    moments,
    planned,
    world,
)

TARGETS = {"z1": 0.1, "os[ios]": 0.3, "os[web]": 0.2}


@pytest.mark.parametrize("method", ["calibrated-quadratic", "participation-only"])
def test_totals_alone_give_balance_and_say_what_is_unknown(method: str, tmp_path: Path) -> None:
    given = world(9)
    found = gathered(given, tmp_path, planned(method), targets=TARGETS)
    assert found["overlap"] is None
    assert [part["stage"] for part in found["stages"]] == ["participation"]
    assert found["sizes"]["population"] is None
    assert found["settings"]["enrollment"] == "z1, os[ios], os[web]"
    said = " ".join(found["unknown"])
    for words in ("Enrollment probabilities", "size of the population"):
        assert words in said
    # the columns without a total are named, and those with one are not
    (open_,) = (text for text in found["unknown"] if "not targets (" in text)
    listed = open_.partition("not targets (")[2].partition("):")[0]
    assert {*listed.split(", ")} == {"rooms", "flat"}
    assert not any(name in said for name in TARGETS)
    lines = {line["name"]: line for line in found["balance"]["lines"]}
    assert {n: line["mean"] for n, line in lines.items()} == TARGETS
    those = moments(given, list(TARGETS), given.inside.select("unit_id"))
    calibrated = method != "participation-only"
    assert found["balance"]["scale_from"] == ("enrolled weighted" if calibrated else "enrolled")
    for name, line in lines.items():
        close(line["groups"]["enrolled"]["mean"], those[name].mean())
        smd = (those[name].mean() - TARGETS[name]) / line["sd"]
        close(line["groups"]["enrolled"]["smd"], smd)
        if calibrated:
            close(line["groups"]["enrolled weighted"]["mean"], TARGETS[name])
        else:
            close(line["sd"], those[name].std(ddof=1))
            assert "enrolled weighted" not in line["groups"]
    (tmp_path / "sized").mkdir()
    sized = gathered(
        given, tmp_path / "sized", planned(method), targets=TARGETS, population_size=400.0
    )
    assert sized["sizes"]["population"] == 400.0
    assert "size of the population" not in " ".join(sized["unknown"])


def test_without_a_ledger_there_is_enrollment_alone(tmp_path: Path) -> None:
    found = gathered(world(10), tmp_path, planned(), ledger=False)
    assert [part["stage"] for part in found["stages"]] == ["enrollment"]
    assert found["rates"] == found["heat"] == found["rounds"] == []
    assert [part["name"] for part in found["weights"]] == ["enrollment"]
    assert found["balance"]["groups"] == ["enrolled", "enrolled weighted"]
    assert found["sizes"]["rounds"] == 0
    assert any(text.startswith("Participation:") for text in found["unknown"])


def test_enrollment_that_changes_is_audited_as_of_the_last_round(tmp_path: Path) -> None:
    given = world(11, size=600)
    rng = np.random.default_rng(0)
    n = given.people.height
    start = pl.Series(np.where(rng.random(n) < 0.3, 4, 1))
    end = pl.Series(np.where(rng.random(n) < 0.2, 9, 99))
    people = given.people.with_columns(enrolled_from=start, enrolled_until=end)
    there = people.select("unit_id", "enrolled_from", "enrolled_until")
    rounds = [
        t.join(there, on="unit_id", maintain_order="left")
        .filter(pl.col("enrolled_from") <= k, pl.col("enrolled_until") > k)
        .drop("enrolled_from", "enrolled_until")
        for k, t in enumerate(given.rounds, 1)
    ]
    found = gathered(Tables(people, rounds), tmp_path, planned())
    last = people.with_columns(enrolled=pl.col("enrolled") & (pl.col("enrolled_until") > 12))
    model, Z, prob = enrollment_prob(Tables(last))
    part = found["stages"][0]
    check_stage(part, prob, last["enrolled"].to_numpy(), ("population", "enrolled"))
    check_coefficients(part, model, Z, design(last, log=False)[0])
    pi = prob[last["enrolled"].to_numpy()]
    check_weights(found["weights"][0], 1 / pi)
    close(found["overlap"]["estimated_size"], (1 / pi).sum())
    assert found["sizes"]["enrolled"] == people["enrolled"].sum()
    assert [line["enrolled"] for line in found["rounds"]] == [t.height for t in rounds]
    line = found["balance"]["lines"][0]
    close(line["groups"]["enrolled"]["mean"], last.filter("enrolled")["z1"].mean())
    assert any(f"as of round 12 ({len(pi)} clients)" in note for note in found["notes"])


def test_rounds_nobody_is_enrolled_in_are_lines_without_a_rate(tmp_path: Path) -> None:
    given = world(12, rounds=8)
    people = given.people.with_columns(enrolled_from=pl.lit(4))
    rounds = [t.clear() if k < 4 else t for k, t in enumerate(given.rounds, 1)]
    found = gathered(Tables(people, rounds), tmp_path, planned())
    for line in found["rounds"][:3]:
        assert line["reply_rate"] is line["expected_rate"] is line["weight_sum"] is None
        assert (line["enrolled"], line["skipped"]) == (0.0, 1)
    assert "3 rounds could not be weighed: nobody is enrolled." in found["notes"]
    assert found["rounds"][3]["expected_rate"] is None  # nothing was known before it
    assert found["rounds"][4]["expected_rate"] is not None


def test_missing_values_under_drop_are_left_out_and_counted(tmp_path: Path) -> None:
    given = world(13)
    people = given.people.with_columns(
        z1=pl.when(pl.int_range(pl.len()) % 10 == 0).then(None).otherwise(pl.col("z1"))
    )
    given = replace(given, people=people).changed(
        3, x=pl.when(pl.int_range(pl.len()) % 3 == 0).then(None).otherwise(pl.col("x"))
    )
    found = gathered(given, tmp_path, planned(missing="drop"))
    known = Tables(people.drop_nulls("z1"), given.rounds)
    enrollment, part = found["stages"]
    _, _, prob = enrollment_prob(known)
    check_stage(enrollment, prob, known.people["enrolled"].to_numpy(), ("population", "enrolled"))
    assert enrollment["left_out"] == 40
    assert (found["sizes"]["population"], found["sizes"]["population_known"]) == (400.0, 360.0)
    assert found["notes"][0] == (
        "The target population is now the 360 of 400 clients whose values are known: 40 with a "
        "missing value or an unknown level are left out (--missing drop), and weights and "
        "estimates say nothing of them."
    )
    whole = given.log.filter(pl.col("round") > 1)
    assert part["rows"] == whole.drop_nulls(["z1", "x"]).height
    assert part["left_out"] == whole.height - part["rows"]
    close(part["rate"], whole.drop_nulls(["z1", "x"])["replied"].mean())
    assert found["sizes"]["population"] == 400.0
    inside = known.people.filter("enrolled")
    line = found["balance"]["lines"][0]
    close(line["groups"]["enrolled"]["mean"], inside["z1"].mean())
    close(line["mean"], known.people["z1"].mean())
    missing = {
        p["level"]: p for part in found["rates"] for p in part["lines"] if part["column"] == "z1"
    }
    rows = given.log.filter(pl.col("z1").is_null())
    assert missing["(missing)"]["rows"] == rows.height
    lost = given.log.filter(pl.col("replied") & pl.any_horizontal(pl.col("z1", "x").is_null()))
    assert any(note.startswith(f"{lost.height} of ") for note in found["notes"])


def test_a_level_nobody_enrolled_in_gets_the_penalty_of_soft_and_is_named(tmp_path: Path) -> None:
    """The audit shows what --soft gives, to the last digit, and reads the rounds once."""
    given = world(14)
    given = given.kept(pl.col("os") != "web")
    read: list[int] = []
    found = gathered(given, tmp_path, planned("fedipw"), progress=lambda done, _: read.append(done))
    web = given.people.filter(os="web").height
    assert read == [*range(1, len(given.rounds) + 1)]
    assert {"name": "os = web", "population": web} in found["overlap"]["empty"]
    assert found["settings"]["scheme"] == "fedipw"
    enrollment = found["stages"][0]
    assert enrollment["stage"] == "enrollment"
    assert enrollment["kind"] == "penalised logistic regression"
    assert enrollment["note"].startswith("enrollment by a fit with a penalty of 1: os separate(s)")
    assert all(c["p_value"] is c["low"] is c["high"] is None for c in enrollment["coefficients"])
    assert enrollment["coefficient_notes"] == [PENALISED_NOTE]
    assert not any("no model of enrollment" in text for text in found["unknown"])
    line = next(line for line in found["balance"]["lines"] if line["name"] == "os[web]")
    assert line["groups"]["enrolled"]["mean"] == 0.0
    (tmp_path / "soft").mkdir()
    soft = gathered(given, tmp_path / "soft", planned("fedipw", soft=True))
    assert (found["settings"].pop("soft"), soft["settings"].pop("soft")) == (False, True)
    assert soft == found


def test_a_group_that_never_replies_is_found_among_the_enrolled(tmp_path: Path) -> None:
    given = world(14)
    web = given.people.filter(os="web")
    quiet = pl.col("unit_id").is_in(web["unit_id"].implode())
    rounds = [table.with_columns(replied=pl.col("replied") & ~quiet) for table in given.rounds]
    given = replace(given, rounds=rounds)
    found = gathered(given, tmp_path, planned("fedipw"))
    inside = web.filter("enrolled").height
    assert found["silent"] == [
        {"name": "os = web", "clients": inside, "rows": 12 * inside, "population": web.height}
    ]
    lines = {x["level"]: x for p in found["rates"] for x in p["lines"] if p["column"] == "os"}
    assert (lines["web"]["clients"], lines["web"]["replies"]) == (inside, 0)
    part = found["stages"][-1]
    assert part["kind"] == "penalised logistic regression"
    assert part["note"].startswith("participation by a fit with a penalty of 1: os separate(s)")
    (tmp_path / "large").mkdir()
    hidden = gathered(given, tmp_path / "large", planned(), min_cell=inside + 1)
    assert hidden["silent"] == []  # too few to be named


def test_many_rounds_are_merged_evenly(tmp_path: Path) -> None:
    given = world(15, size=60, rounds=401)
    found = gathered(given, tmp_path, planned(refit_every=100), min_cell=1)
    assert len(found["rounds"]) == 134
    assert [line["first"] for line in found["rounds"]] == list(range(1, 402, 3))
    assert found["rounds"][-1]["last"] == 401
    for line in found["rounds"][:5]:
        tables = given.rounds[line["first"] - 1 : line["last"]]
        close(line["replies"], np.mean([t["replied"].sum() for t in tables]))
        close(line["reply_rate"], pl.concat(tables)["replied"].mean())
        for name in ("effective_replies", "weight_sum"):
            assert line[name] > 0.0


def test_saved_models_are_checked_as_they_are(tmp_path: Path) -> None:
    given = world(16, steps=True)
    pooled = gathered(given, tmp_path, planned(fit="pooled"))
    succeeded(
        "weights", "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "rounds",
        "--out", tmp_path / "w.parquet", "--participation-fit", "pooled",
        "--save-models", tmp_path / "models",
    )  # fmt: skip
    names = ("availability", "reply")
    models = {name: StageModel.load(tmp_path / "models" / f"{name}.json") for name in names}
    (tmp_path / "again").mkdir()
    found = gathered(given, tmp_path / "again", replace(planned(), models=models))
    assert found["settings"]["participation_fit"] == "saved"
    for name in ("stages", "rounds", "balance", "weights", "rates"):
        assert found[name] == pooled[name]
    values = given.log.filter("replied").select("unit_id", "round", value="z1")
    (tmp_path / "metric").mkdir()
    with pytest.raises(InputError, match="needs participation fitted on its rounds"):
        gathered(
            given, tmp_path / "metric", replace(planned(), models=models),
            metric=MetricRequest(values=Metrics(values)),
        )  # fmt: skip


def test_columns_without_text_are_not_counted() -> None:
    spans = pl.Series("span", [1, 2, 2], dtype=pl.Duration("ms"))
    levels = pl.Series("os", ["a", "b", "b"])
    assert coder_of(spans, Cells.of(spans)) is None
    assert coder_of(levels, Cells.of(levels)) is not None
