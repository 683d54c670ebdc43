"""Options that commands share, and targets, reference samples and base weights through them."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import fedipw
from cli.command import Files, strict_json, succeeded
from cli.command import fedipw as command
from fedipw.cli.audit import audit
from fedipw.cli.calibrate import calibrate
from fedipw.cli.evaluate import evaluate
from fedipw.cli.options import flat
from fedipw.cli.weights import weights
from worlds import MEASURED

# options of weights that mean nothing in another command, with the reason
NOT_IN = {
    "evaluate": {
        "method": "it is called scheme there",
        "fit": "participation is fitted on all rounds",
        "window": "participation is fitted on all rounds",
        "decay": "participation is fitted on all rounds",
        "refit_every": "participation is fitted on all rounds",
        "trim": "cut weights have no standard error",
        "models": "a saved model has no rows, which the standard error needs",
        "save_models": "weights saves them",
        "models_table": "weights shows them",
        "threshold": "of the report on overlap",
        "strict": "of the report on overlap",
        "state": "participation is fitted on all rounds",
    },
    "audit": {
        "save_models": "weights saves them",
        "models_table": "its page and JSON hold the coefficients",
    },
}


def names(called: object) -> set[str]:
    assert callable(called)
    return set(inspect.signature(flat(called)).parameters)


@pytest.mark.parametrize(("name", "other"), [("evaluate", evaluate), ("audit", audit)])
def test_what_weights_takes_other_commands_take(name: str, other: object) -> None:
    assert names(weights) - names(other) == set(NOT_IN[name])


def test_targets_are_totals_wherever_they_are_given() -> None:
    for one in (weights, evaluate, audit, calibrate):
        assert {"targets", "totals", "population_size"} <= names(one)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    made = Files.of(MEASURED, tmp_path_factory.mktemp("options"))
    made.put()
    rng = np.random.default_rng(0)
    chosen = pl.Series(rng.permutation(240) < 120)
    sample = made.people.drop("enrolled", "unit_id").filter(chosen)
    sample.with_columns(design_weight=2.0).write_parquet(made.where / "sample.parquet")
    return made


def test_totals_give_the_same_as_means(files: Files) -> None:
    means = files.means("age", "rich[yes]")
    lines = [f"{name},{value!r}" for name, value in means.items()]
    files.targets(*lines)
    by_means = files.evaluated("--population-size", 240, "--by", "rich", source="targets")
    files.targets(*(f"{name},{240 * value!r}" for name, value in means.items()))
    options = ("--population-size", 240, "--totals")
    by_totals = files.evaluated(*options, "--by", "rich", source="targets")
    for a, b in zip(by_totals["estimates"], by_means["estimates"], strict=True):
        assert a["estimate"] == pytest.approx(b["estimate"], rel=1e-9)
        assert a["se"] == pytest.approx(b["se"], rel=1e-9)
    table, _ = files.weighed(*options, source="targets")
    assert table.height == files.replies.height
    out = files.where / "c.csv"
    given = (files.where / "enrolled.parquet", "--targets", files.where / "targets.csv")
    succeeded("calibrate", *given, "--out", out, "--force", *options)
    place = files.where / "a.html"
    succeeded("audit", *files.given("targets"), "--out", place, "--force", *options)
    for name, told in (("weights", files.given("targets")), ("calibrate", given)):
        code, _, err = command(name, *told, "--out", out, "--force", "--totals")
        assert code == 2
        assert "--totals needs --population-size: totals are divided by N." in err
    code, _, err = files.evaluate("--population-size", 240, source="targets")
    assert code == 2
    assert "divide by N or pass --totals" in err
    assert "targets.csv" in err
    code, _, err = files.weights("--totals")
    assert code == 2
    assert "--totals goes with --targets" in err


def test_shares_that_were_rescaled_are_told_of_by_every_command(files: Files) -> None:
    share = files.means("rich[yes]")["rich[yes]"]
    yes = round(share, 2) + 0.005
    files.targets(f"rich[yes],{yes:.3f}", f"rich[no],{1 - yes + 0.001:.3f}")
    said = "The shares of 'rich' sum to 1.001, which rounding to 3 decimals explains: rescaled to "
    said += "sum to 1."
    options = ("--population-size", 240)
    assert said in files.evaluated(*options, source="targets")["notes"]
    _, summary = files.weighed(*options, source="targets")
    assert said in summary["notes"]
    place, numbers = files.where / "a.html", files.where / "a.json"
    succeeded(
        "audit", *files.given("targets"), "--out", place, "--force", "--json", numbers, *options
    )
    assert any(said in note for note in strict_json(numbers.read_text())["notes"])
    given = (files.where / "enrolled.parquet", "--targets", files.where / "targets.csv")
    out = succeeded("calibrate", *given, "--out", files.where / "c.csv", "--force", "--json")
    assert strict_json(out)["notes"] == [said]


def test_an_unknown_level_ends_every_command_with_code_3(files: Files) -> None:
    files.targets("rich[yess],0.4")
    said = "no enrolled client has rich[yess]; did you mean 'yes'? Levels of 'rich': yes, no."
    place = files.where / "a.html"
    for code, _, err in (
        files.weights(source="targets"),
        files.evaluate(source="targets"),
        command("audit", *files.given("targets"), "--out", place, "--force"),
    ):
        assert code == 3
        assert said in " ".join(err.split())


def test_nearly_infeasible_targets_are_warned_of_by_every_command(files: Files) -> None:
    most = float(np.sort(files.inside["age"].to_numpy())[-2])
    files.targets(f"age,{most}")
    assert any(
        note.startswith("Warning: the targets are nearly infeasible. Calibration leaves ")
        for note in files.evaluated(source="targets")["notes"]
    )
    _, summary = files.weighed(source="targets")
    assert any("the targets are nearly infeasible" in note for note in summary["notes"])


def test_groups_of_levels_with_any_character_have_their_sizes(tmp_path: Path) -> None:
    made = Files.of(MEASURED, tmp_path)
    other = pl.col("rich").replace({"yes": "[20,30)", "no": "(0,19]"})
    made.people = made.people.with_columns(rich=other)
    made.put()
    share = made.people.filter(rich="(0,19]").height / made.people.height
    lines = (f"rich[(0,19]],{share!r}", f"age,{made.people['age'].mean()!r}")
    made.targets(*lines)
    code, _, err = made.evaluate(source="targets")
    assert code == 2
    assert 'A name that holds a comma stands in quotes, as in "agecat[(0,19]]",0.2.' in err
    made.targets(f'"rich[(0,19]]",{share!r}', lines[1])
    found = made.evaluated("--population-size", 240, "--by", "rich", source="targets")
    by_group = {(x["group"], x["estimator"]): x for x in found["estimates"]}
    for group in ("rich = (0,19]", "rich = [20,30)"):
        assert by_group[group, "horvitz-thompson"]["estimate"] is not None


def test_a_reference_sample_in_evaluate_and_audit(files: Files) -> None:
    options = ("--enrollment", "age + rich")
    by_table = files.evaluated(*options)
    by_sample = files.evaluated(*options, source="reference")
    pick = {x["estimator"]: x for x in by_sample["estimates"]}
    wide = {x["estimator"]: x for x in by_table["estimates"]}["hajek"]
    assert set(pick) == {"plain", "horvitz-thompson", "hajek"}
    assert pick["hajek"]["se"] > wide["se"]
    assert abs(pick["hajek"]["estimate"] - wide["estimate"]) < 4 * pick["hajek"]["se"]
    notes = " ".join(by_sample["notes"])
    assert "Enrollment by a reference sample." in notes
    assert "Standard errors count the sampling error of the 120 rows of the reference" in notes
    assert "No GREG mean: the population means that it needs are estimates." in notes
    who = fedipw.Population.from_sample(
        files.where / "enrolled.parquet", files.where / "sample.parquet", "design_weight"
    )
    ours = fedipw.evaluate(files.metrics, who, files.where / "rounds", enrollment="age + rich")
    assert ours.of("hajek").se == pick["hajek"]["se"]
    calibrated = files.evaluated("--scheme", "calibrated-entropy", source="reference")
    line = next(x for x in calibrated["estimates"] if x["estimator"] == "hajek")
    assert line["se"] == pytest.approx(pick["hajek"]["se"], rel=0.3)
    place, numbers = files.where / "r.html", files.where / "r.json"
    given = (*files.given("reference"), "--metrics", files.where / "loss.parquet")
    succeeded("audit", *given, *options, "--out", place, "--force", "--json", numbers)
    made = strict_json(numbers.read_text())
    assert {line["name"] for line in made["balance"]["lines"]} == {"age", "rich[no]", "rich[yes]"}
    assert any("reference sample of 120 rows" in text for text in made["unknown"])


def test_penalties_and_lumping_reach_every_command(files: Files) -> None:
    plain, firm = (files.evaluated("--l2", l2)["estimates"] for l2 in (0.0, 50.0))
    assert plain != firm
    lumped = files.evaluated("--lump-below", 0.9)
    assert lumped["estimates"] != plain
    place, numbers = files.where / "l.html", files.where / "l.json"
    found = []
    for l2 in (0.0, 50.0):
        given = (*files.given(), "--out", place, "--force", "--json", numbers, "--l2", l2)
        succeeded("audit", *given)
        found.append(strict_json(numbers.read_text())["stages"][0]["coefficients"])
    assert found[0] != found[1]
