"""``fedipw audit`` as a user runs it: page and JSON, exit codes, messages, nothing left behind."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jsonschema
import polars as pl
import pytest

from fedipw.audit.compare import written_audit
from worlds import World

from .command import Files, fedipw, strict_json

WORLD = World(
    size=300, rounds=6, seed=7, ids="zq-{}-qz", covariates=("age", "os"), hours=28,
    enrollment=0.9 * pl.col("age"), metric=0.5 - 0.1 * pl.col("age"), noise=0.05,
)  # fmt: skip


@dataclass
class Audited(Files):
    """The files of a world, to be spoilt and audited."""

    def put(self, kind: str = "parquet") -> Self:
        super().put(kind)
        self.targets("age,0.0", "os[ios],0.3")
        return self

    def leave_out(self, where: pl.Expr) -> None:
        """Let nobody of a part be enrolled."""
        vars(self).update(vars(self.kept(~where)))

    def run(self, *options: object, **given: Any) -> tuple[int, str, str]:
        """Return exit code, output and errors of an audit to page.html, over an earlier one."""
        out = ["--out", self.where / "page.html", "--force"]
        return fedipw("audit", *self.given(**given), *out, *options)

    def audit(self, *options: object, **given: Any) -> tuple[dict[str, Any], str]:
        """Return the audit and what was printed; page and JSON hold the same, and name nobody."""
        code, printed, err = self.run("--json", self.where / "audit.json", *options, **given)
        assert code == 0, err
        page, text = ((self.where / n).read_text() for n in ("page.html", "audit.json"))
        found = strict_json(text)
        assert written_audit(page).to_json() == found
        for place in (page, text, printed):
            assert "zq-" not in place
        assert printed.splitlines()[0] == found["verdict"]["headline"]
        assert f"Wrote {self.where / 'page.html'} and {self.where / 'audit.json'}" in printed
        return found, printed


@pytest.fixture
def files(tmp_path: Path) -> Audited:
    return Audited.of(WORLD, tmp_path)


@pytest.fixture
def loss(files: Audited) -> tuple[object, ...]:
    return ("--metrics", files.where / "loss.parquet", "--metric-name", "loss <per> client")


# What an audit says.


def test_page_and_json_hold_the_same_numbers_and_no_client(files: Audited) -> None:
    found, printed = files.put().audit("--title", "Keyboard & phone")
    assert found["title"] == "Keyboard & phone"
    assert "<h1>Keyboard &amp; phone</h1>" in (files.where / "page.html").read_text()
    assert found["sizes"]["population"] == 300.0
    assert found["sizes"]["enrolled"] == files.inside.height
    assert found["sizes"]["replies"] == files.metrics.height
    assert [s["stage"] for s in found["stages"]] == ["enrollment", "participation"]
    assert found["metric"] is None
    assert found["verdict"]["headline"].startswith("Enrollment is biased, and weights can")
    for finding in found["verdict"]["findings"]:
        assert f"{finding['question']} {finding['answer']}. {finding['text']}" in printed
    assert all(f"Unknown: {line}" in printed for line in found["unknown"])
    assert {p.name for p in files.where.iterdir() if p.is_file()} == {
        "people.parquet", "enrolled.parquet", "loss.parquet", "targets.csv", "page.html",
        "audit.json",
    }  # fmt: skip


def test_the_page_alone_is_written_without_json(files: Audited) -> None:
    code, printed, err = files.put().run()
    assert code == 0, err
    assert printed.splitlines()[-1] == f"Wrote {files.where / 'page.html'}"
    assert not (files.where / "audit.json").exists()


def test_the_same_files_give_the_same_page(files: Audited) -> None:
    files.put().run()
    first = (files.where / "page.html").read_bytes()
    files.run()
    assert (files.where / "page.html").read_bytes() == first


def test_a_metric_is_told_on_the_population_and_by_groups(
    files: Audited, loss: tuple[object, ...]
) -> None:
    found, printed = files.put().audit(*loss, "--by", "os", "--by", "round")
    metric = found["metric"]
    assert metric["name"] == "loss <per> client"
    assert "loss &lt;per&gt; client" in (files.where / "page.html").read_text()
    groups = {line["group"] for line in metric["estimates"]}
    systems = {f"os = {name}" for name in ("android", "ios", "web")}
    assert groups == {"everyone", *systems, *(f"round = {k}" for k in range(1, 7))}
    means = {e["estimator"]: e["estimate"] for e in metric["estimates"] if e["group"] == "everyone"}
    assert means["plain"] == pytest.approx(files.metrics["value"].mean())
    assert metric["moved"] == pytest.approx(means["hajek"] - means["plain"])
    assert metric["moved"] > 2 * metric["moved_error"]  # the young do not reply, and lose more
    assert "Is weighting worth its variance here? Yes. Weighting moves loss <per> client" in printed
    assert not any("no updates or outcomes" in line for line in found["unknown"])


def test_small_parts_are_hidden_and_counted(files: Audited, loss: tuple[object, ...]) -> None:
    found, _ = files.put().audit(*loss, "--by", "os", "--min-cell", 50)
    assert found["settings"]["min_cell"] == 50
    shown = {line["group"]: line["clients"] for line in found["metric"]["estimates"]}
    assert found["metric"]["hidden"] == 3 - (len(shown) - 1) > 0
    assert min(shown.values()) >= 50
    assert any("group(s) of the metric have fewer than 50" in note for note in found["notes"])
    web = files.people.filter(os="web").height
    rows = [line["name"] for line in found["balance"]["lines"]]
    assert ("os[web]" in rows) == (web >= 50)


@pytest.mark.parametrize("size", [None, 300])
def test_totals_alone_say_what_they_cannot_tell(
    files: Audited, loss: tuple[object, ...], size: int | None
) -> None:
    sized = () if size is None else ("--population-size", size)
    found, _ = files.put().audit(*sized, *loss, source="targets")
    assert found["sizes"]["population"] == size
    assert not found["sizes"]["population_table"]
    assert found["settings"]["scheme"] == "calibrated-entropy-hajek"
    unknown = " ".join(found["unknown"])
    assert "Enrollment probabilities" in unknown
    assert ("The size of the population" in unknown) == (size is None)
    correction = found["verdict"]["findings"][2]["text"]
    assert "As far as the given totals show" in correction
    assert any("A population table" in step for step in found["verdict"]["next_steps"])
    models = found["verdict"]["findings"][-1]
    assert models["level"] != "good"  # enrollment has no model to check
    assert "Enrollment has no model to check: only totals" in models["text"]


def test_without_rounds_there_is_enrollment_and_the_rest_is_unknown(files: Audited) -> None:
    found, printed = files.put().audit(rounds=False)
    assert [s["stage"] for s in found["stages"]] == ["enrollment"]
    assert found["rounds"] == []
    assert "Do respondents differ from the enrolled? Unknown. No round is known." in printed
    assert any(step.startswith("Keep a ledger") for step in found["verdict"]["next_steps"])


# Probabilities by a classifier.

BOOSTING = ("--classifier", "boosting", "--folds", 3)


@pytest.mark.parametrize("fit", ["past", "pooled"])
def test_a_classifier_has_no_coefficients_and_its_metric_is_that_of_an_evaluation(
    files: Audited, loss: tuple[object, ...], fit: str
) -> None:
    found, _ = files.put().audit(*loss, "--participation-fit", fit, *BOOSTING)
    assert [s["stage"] for s in found["stages"]] == ["enrollment", "participation"]
    assert all(s["coefficients"] == [] and s["reliability"] for s in found["stages"])
    assert "on the scale of log odds" not in (files.where / "page.html").read_text()
    notes = found["notes"]
    assert not any("coefficients are" in note for note in notes)  # none are hidden, none are last
    shown, known = (note for note in notes if "classifier" in note)
    assert shown == (
        "Probabilities of enrollment and participation are by a classifier: there are no "
        "coefficients to show."
    )
    assert "taken as known: standard errors and intervals" in known
    assert any("calibration is out of sample" in note for note in notes)  # cross-fitted by client
    assert any("each client's probabilities by a fit without it" in n for n in notes) == (
        fit == "pooled"
    )
    code, out, err = fedipw("evaluate", *files.given(), *loss[:2], *BOOSTING, "--json")
    assert code == 0, err
    estimates = json.loads(out)["estimates"]
    assert len(estimates) == len(found["metric"]["estimates"]) == 4
    for one, other in zip(estimates, found["metric"]["estimates"], strict=True):
        for name, its in (("estimate", "estimate"), ("se", "standard_error"), ("low", "low")):
            assert one[name] == pytest.approx(other[its], rel=1e-9)


# Where enrollment does not reach.


def test_a_level_with_nobody_enrolled_is_said_plainly(files: Audited) -> None:
    files.leave_out(pl.col("os") == "web")
    found, printed = files.put().audit()
    web = files.people.filter(os="web").height
    assert (
        f"Nobody is enrolled in os = web ({web} clients): no weight can stand for them" in printed
    )
    assert {"name": "os = web", "population": web} in found["overlap"]["empty"]
    assert found["settings"]["scheme"] == "fedipw-hajek"
    assert (
        f"Not corrected: os = web: none of {web} clients of the population is enrolled" in printed
    )
    steps = found["verdict"]["next_steps"]
    assert steps[0].startswith("Use the weights, for those they can stand for: fedipw weights")
    assert steps[1].startswith("Enroll clients where there are none (os = web)")
    assert steps[2].startswith("Merge or leave out the columns that separate in the model of enrol")


NOTE = (
    "nrollment by a fit with a penalty of 1: os separate(s) selected from non-selected clients, so "
    "that the likelihood has no maximum; no weight stands for clients that can never be selected."
)


def test_separation_is_one_behaviour_and_the_same_words_in_three_commands(
    files: Audited, loss: tuple[object, ...]
) -> None:
    files.leave_out(pl.col("os") == "web")
    files.put()
    out, given = files.where / "weights.parquet", files.given()
    commands = (("weights", *given, "--out", out), ("evaluate", *given, *loss[:2]))
    said = set()
    for command in commands:
        code, printed, err = fedipw(*command)
        assert (code, printed) == (2, "")
        said.add(err)
    assert not out.exists()
    (error,) = said  # the same message, which names the column and both remedies
    for words in ("os[web] separate(s)", "of the stage enrollment", "--lump-below", "--soft"):
        assert words in error
    for command in commands:
        code, printed, err = fedipw(*command, "--soft")
        assert code == 0, err
        assert NOTE in printed
    found, printed = files.audit(*loss)
    assert any(NOTE in note for note in found["notes"])
    models = found["verdict"]["findings"][-1]
    assert (models["answer"], models["level"]) == ("Not quite", "warn")
    assert NOTE in models["text"]
    refused = "Without --soft, fedipw weights and fedipw evaluate end in an error here."
    assert models["text"].endswith(refused)
    assert "has no model" not in printed
    soft, printed = files.audit(*loss, "--soft")
    assert refused not in printed
    assert soft["metric"] == found["metric"]  # the same fallback, asked for or not
    code, printed, err = fedipw(*commands[1], "--soft", "--json")
    estimates = {x["estimator"]: x["estimate"] for x in json.loads(printed)["estimates"]}
    for line in found["metric"]["estimates"]:
        assert line["estimate"] == pytest.approx(estimates[line["estimator"]], rel=1e-9)


def silence(files: Audited, where: pl.Expr) -> None:
    """Let nobody of a part reply."""
    quiet = pl.col("unit_id").is_in(files.people.filter(where)["unit_id"].implode())
    rounds = [t.with_columns(replied=pl.col("replied") & ~quiet) for t in files.rounds]
    vars(files).update(rounds=rounds, metrics=files.metrics.filter(~quiet))


def test_a_group_that_never_replies_is_refused_mended_and_named_alike(
    files: Audited, loss: tuple[object, ...]
) -> None:
    silence(files, pl.col("os") == "web")
    files.put()
    given = files.given()
    out = files.where / "weights.parquet"
    for command in (("weights", *given, "--out", out), ("evaluate", *given, *loss[:2])):
        code, _, err = fedipw(*command)
        assert code == 2
        assert "os[web] separate(s)" in err
        assert "of the stage participation" in err
        code, printed, err = fedipw(*command, "--soft")
        assert code == 0, err
        assert "articipation by a fit with a penalty of 1: os separate(s)" in printed
        assert "web" not in err
    found, printed = files.audit(*loss)
    inside = files.inside.filter(os="web").height
    words = f"Nobody ever replied of os = web ({inside} enrolled clients): no weight can stand"
    assert words in found["verdict"]["findings"][2]["text"]
    assert found["verdict"]["findings"][2]["level"] == "bad"
    (line,) = found["verdict"]["uncorrected"]
    assert line.startswith(f"os = web: none of {inside} enrolled clients")
    assert any(s.startswith("Invite or recruit clients") for s in found["verdict"]["next_steps"])
    assert f"Not corrected: {line}" in printed
    assert "What weights cannot correct" in (files.where / "page.html").read_text()


def test_a_constant_rate_is_never_called_a_model(files: Audited) -> None:
    """Two rounds are too few for a model: the page, the JSON and the terminal say so."""
    files.rounds = files.rounds[:2]
    files.metrics = files.metrics.filter(pl.col("round") <= 2)
    covariates = "age + os + age:os + age**2 + age**3 + age**4 + age**5 + age**6"
    found, printed = files.put().audit("--participation", covariates)
    part = found["stages"][-1]
    assert (part["stage"], part["kind"], part["rate_rounds"]) == (
        "participation", "constant rate", 2,
    )  # fmt: skip
    assert part["coefficients"] == []
    models = found["verdict"]["findings"][-1]
    assert (models["answer"], models["level"]) == ("In part", "unknown")
    words = "Participation was given a constant rate, not a model: there is none to check."
    assert words in models["text"]
    assert words in printed
    assert (
        "The step 'participation' was given a constant rate, not a model, in 2 rounds."
        in (found["notes"])
    )
    page = (files.where / "page.html").read_text()
    assert "Participation has a constant rate, not a model" in page
    assert "probabilities are by constant rate" in page
    code, printed, err = fedipw(
        "weights", *files.given(), "--participation", covariates, "--models-table",
        "--out", files.where / "w.parquet",
    )  # fmt: skip
    assert code == 0, err
    assert "was given a constant rate, not a model, in 2 rounds." in printed
    assert "Participation: a constant rate, not a model" in printed


def test_dropped_values_narrow_the_target_population_and_all_say_so(
    files: Audited, loss: tuple[object, ...]
) -> None:
    lost = pl.int_range(pl.len()) % 10 == 0
    files.people = files.people.with_columns(age=pl.when(~lost).then("age"))
    files.put()
    words = "The target population is now the 270 of 300 clients whose values are known: 30 with a"
    drop = ("--missing", "drop")
    given, out = files.given(), files.where / "weights.parquet"
    for command in (("weights", *given, "--out", out), ("evaluate", *given, *loss[:2])):
        code, printed, err = fedipw(*command, *drop)
        assert code == 0, err
        assert words in printed
    found, printed = files.audit(*loss, *drop)
    assert sum(words in note for note in found["notes"]) == 1
    assert found["sizes"]["population_known"] == 270.0
    assert "30 clients with a missing value" in printed
    assert "The target population is the 270 of them" in (files.where / "page.html").read_text()


# The card and the schema.


def test_a_card_is_the_audits_own_sentences(files: Audited, loss: tuple[object, ...]) -> None:
    files.leave_out(pl.col("os") == "web")
    found, printed = files.put().audit(*loss, "--card", files.where / "card.md")
    text = (files.where / "card.md").read_text()
    assert f"and {files.where / 'card.md'}" in printed
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        section["title"] for section in found["card"]["sections"]
    ]
    sections = {section["title"]: section["lines"] for section in found["card"]["sections"]}
    assert "no statement of legal compliance" in sections["About this card"][0]
    verdict = found["verdict"]
    assert sections["Who is not covered"][: len(verdict["uncorrected"])] == verdict["uncorrected"]
    assert sections["What was not tested"][: len(found["unknown"])] == found["unknown"]
    assert {*verdict["next_steps"]} <= {*sections["How gaps are addressed"]}
    assert f"{found['sizes']['enrolled']:,} enrolled clients." in sections["Data sources and sizes"]
    assert "loss &lt;per&gt; client" in text
    for word in ("compliant", "complies", "guarantee"):
        assert word not in text


def test_an_audit_is_valid_by_its_schema(files: Audited, loss: tuple[object, ...]) -> None:
    code, printed, err = fedipw("audit", "--schema")
    assert code == 0, err
    schema = json.loads(printed)
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    files.put()
    for options in ({}, {"source": "targets"}, {"rounds": False}):
        found, _ = files.audit(*(() if options.get("rounds") is False else loss), **options)
        check.validate(found)
    for spoilt in ({**found, "version": 1}, {**found, "more": 1}, {**found, "title": None}):
        with pytest.raises(jsonschema.ValidationError):
            check.validate(spoilt)


@pytest.mark.parametrize("scheme", ["fedipw", "participation-only"])
@pytest.mark.parametrize("rounds", [True, False])
def test_a_level_too_small_to_show_is_not_named_where_it_leaves_no_model(
    files: Audited, scheme: str, rounds: bool
) -> None:
    tiny = pl.int_range(pl.len()) < 4
    files.people = files.people.with_columns(os=pl.when(tiny).then(pl.lit("zq-os")).otherwise("os"))
    files.leave_out(pl.col("os") == "zq-os")
    found, _ = files.put().audit("--scheme", scheme, rounds=rounds)  # looks for zq- everywhere
    assert found["stages"][0]["note"].startswith("enrollment by a fit with a penalty of 1: os sep")
    assert found["overlap"]["empty_small"] == 1


def test_strict_ends_in_code_four_and_leaves_nothing(files: Audited) -> None:
    found, _ = files.put().audit()
    least = found["overlap"]["smallest_prob"]
    assert files.run("--strict", least * 0.5)[0] == 0
    for name in ("page.html", "audit.json"):
        (files.where / name).unlink()
    refused(files, ("enrollment probability", f"{least:.3g}"), 4, "--strict", least * 1.01)
    refused(files, ("participation probability",), 4, "--strict", 0.9, source="targets")


@pytest.mark.parametrize(
    "where",
    [pl.col("os") == "web", (pl.col("os") == "web") & (pl.col("age") < 9), pl.col("age") < 0],
)
def test_strict_refuses_parts_that_cannot_enroll(files: Audited, where: pl.Expr) -> None:
    files.leave_out(where)
    refused(files.put(), ("smallest enrollment probability of the population is 0,",), 4,
            "--strict", 1e-6)  # fmt: skip


def test_targets_nobody_can_meet_end_in_code_three(files: Audited) -> None:
    files.put()
    (files.where / "targets.csv").write_text("name,value\nage,50\n")
    refused(files, ("age = 50",), 3, source="targets")


# What is refused: a code, a message that names what is wrong, and every file as it was.


def refused(
    files: Audited, words: tuple[str, ...], code: int, *options: object, **given: Any
) -> None:
    before = files.listing()
    got, printed, err = files.run("--json", files.where / "audit.json", *options, **given)
    assert (got, printed) == (code, ""), err
    assert "Traceback" not in err
    for text in words:
        assert text in err, err
    assert files.listing() == before


Spoil = Callable[[Audited], object]


def _people(**named: pl.Expr) -> Spoil:
    return lambda f: setattr(f, "people", f.people.with_columns(**named))


def _loss(change: Callable[[pl.DataFrame], pl.DataFrame]) -> Spoil:
    return lambda f: setattr(f, "metrics", change(f.metrics))


def _round(index: int, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Spoil:
    return lambda f: f.rounds.__setitem__(index - 1, change(f.rounds[index - 1]))


def _first(column: str, value: Any) -> pl.Expr:
    return pl.when(pl.int_range(pl.len()) == 0).then(pl.lit(value)).otherwise(pl.col(column))


def nothing(_: Audited) -> None:
    pass


METRIC = ("--metrics", "{}/loss.parquet")
REFUSED: dict[str, tuple[Spoil, tuple[str, ...], tuple[str, ...]]] = {
    "no covariates": (
        lambda f: setattr(f, "people", f.people.drop("os", "age")), (), ("no covariate",),
    ),
    "NaN": (_people(age=_first("age", math.nan)), (), ("people.parquet", "'age'")),
    "missing": (_people(os=_first("os", None)), (), ("people.parquet", "'os'")),
    "twice": (_people(unit_id=_first("unit_id", "zq-1-qz")), (), ("people.parquet", "unique")),
    "all enrolled": (_people(enrolled=pl.lit(value=True)), (), ("all 300 clients are enrolled",)),
    "nobody enrolled": (_people(enrolled=pl.lit(value=False)), (), ("no client of 300",)),
    "twice in a round": (
        _round(3, lambda t: pl.concat([t, t.head(1)])), (), ("round-000003", "more than once"),
    ),
    "a stranger": (
        _round(2, lambda t: t.with_columns(unit_id=_first("unit_id", "who"))), (),
        ("round 2", "who"),
    ),
    "no replied": (
        _round(1, lambda t: t.drop("replied")), (), ("round-000001", "no column replied"),
    ),
    "scheme": (nothing, ("--scheme", "fedpiw"), ("did you mean fedipw?",)),
    "oracle": (nothing, ("--scheme", "oracle"), ("needs true probabilities",)),
    "formula": (nothing, ("--enrollment", "age +"), ("empty term",)),
    "min-cell": (nothing, ("--min-cell", "0"), ("--min-cell must be 1 or more, not 0",)),
    "threshold 0": (nothing, ("--threshold", "0"), ("--threshold takes a probability",)),
    "threshold 1": (nothing, ("--threshold", "1"), ("--threshold takes a probability",)),
    "strict": (nothing, ("--strict", "1.5"), ("--strict takes a probability", "1.5")),
    "size": (nothing, ("--population-size", "10"), ("--population-size goes with --targets",)),
    "window": (nothing, ("--window", "0"), ("window",)),
    "fit": (nothing, ("--participation-fit", "future"), ("future",)),
    "no metrics": (nothing, ("--metrics", "{}/none.parquet"), ("none.parquet",)),
    "metric of nobody": (_loss(lambda t: t.head(0)), METRIC, ("loss.parquet", "no rows")),
    "metric without value": (_loss(lambda t: t.drop("value")), METRIC, ("no column 'value'",)),
    "metric twice": (_loss(lambda t: pl.concat([t, t.head(1)])), METRIC, ("share unit_id",)),
    "NaN metric": (
        _loss(lambda t: t.with_columns(value=_first("value", math.nan))), METRIC, ("not finite",),
    ),
    "metric of no reply": (_loss(lambda t: t.slice(1)), METRIC, ("replies have no metric",)),
    "metric by nothing": (nothing, (*METRIC, "--by", "size"), ("No column 'size' to group by",)),
    "metric without error": (nothing, (*METRIC, "--scheme", "greg"), ("has no standard error",)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_ends_in_code_two_and_a_message(files: Audited, case: str) -> None:
    spoil, options, words = REFUSED[case]
    spoil(files)
    refused(files.put(), words, 2, *(option.format(files.where) for option in options))
