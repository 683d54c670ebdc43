"""``fedipw weights`` as a user runs it: files, exit codes, messages, nothing left behind."""

from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from worlds import World

from .command import Files, fedipw

COLUMNS = [
    "unit_id", "round", "enrollment_prob", "participation_prob", "inclusion_prob", "weight",
]  # fmt: skip
NET = pl.when(pl.col("x") > 0).then(pl.lit("3g")).otherwise(pl.lit("4g"))
FLOATS = dict.fromkeys(COLUMNS[2:], pl.Float64)


WORLD = World(size=160, rounds=5, seed=7, ids=100, covariates=("age", "rich"), reply=pl.col("x"))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files.of(WORLD, tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("out", ["w.parquet", "w.csv"])
def test_one_row_per_reply_in_the_columns_and_types_of_the_contract(
    files: Files, kind: str, out: str
) -> None:
    files.put(kind)
    code, printed, err = files.weights(kind=kind, out=out)
    assert code == 0, err
    assert f"Wrote {files.where / out}" in printed
    path = files.where / out
    got = pl.read_parquet(path) if out == "w.parquet" else pl.read_csv(path)
    assert got.columns == COLUMNS
    kept = pl.String if kind == "csv" and out == "w.parquet" else pl.Int64
    assert dict(got.schema) == {"unit_id": kept, "round": pl.Int64, **FLOATS}
    replies = files.replies
    assert got.select(pl.col("unit_id").cast(pl.Int64), "round").equals(replies)
    for (_,), part in got.group_by(["round"]):
        raw = 1 / part["inclusion_prob"]
        np.testing.assert_allclose(part["weight"], raw / raw.sum(), rtol=1e-12)
    assert {p.name for p in files.where.iterdir()} == {
        "rounds", f"people.{kind}", f"enrolled.{kind}", out,
    }  # fmt: skip


def test_the_same_numbers_from_either_kind_of_file_and_any_order_of_rows(files: Files) -> None:
    files.put("parquet")
    first, _ = files.weighed()
    files.put("csv")
    second, _ = files.weighed(kind="csv")
    files.rounds = [t.sample(fraction=1.0, shuffle=True, seed=1) for t in files.rounds]
    files.people = files.people.sample(fraction=1.0, shuffle=True, seed=2)
    files.put()
    third, _ = files.weighed()
    assert first.drop("unit_id").equals(second.drop("unit_id"))
    third = third.sort("round", "unit_id")
    for name in FLOATS:
        np.testing.assert_allclose(third[name], first.sort("round", "unit_id")[name], rtol=1e-9)


@pytest.mark.parametrize(
    "kind", [pl.UInt16, pl.Int32, pl.String, pl.Categorical], ids=["u16", "i32", "text", "cat"]
)
def test_identifiers_keep_their_type_and_may_be_numbers_here_and_text_there(
    files: Files, kind: Any
) -> None:
    text = pl.col("unit_id").cast(pl.String)
    files.people = files.people.with_columns(text.cast(kind))
    files.edit_all(text.cast(kind) if kind == pl.Categorical else text)
    files.put()
    got, _ = files.weighed()
    assert got["unit_id"].dtype == files.people["unit_id"].dtype


def test_the_summary_as_json_and_for_people(files: Files) -> None:
    files.edit(4, replied=pl.lit(value=False))
    files.put()
    got, summary = files.weighed("--threshold", 0.4)
    assert summary["method"] == "fedipw-hajek"
    assert summary["replies"] == summary["weighed"] == got.height
    assert summary["skipped"] == {"4": "nobody replied"}
    assert sum(summary["sources"].values()) == 4
    assert summary["smallest_participation_prob"] == got["participation_prob"].min()
    assert summary["overlap"]["population"] == 160
    assert summary["overlap"]["below"] > 0
    code, printed, err = files.weights()
    assert code == 0, err
    for words in (f"{got.height} replies of 5 rounds", "Round 4 skipped: nobody replied",
                  "reply rate of this round", "effective"):  # fmt: skip
        assert words in printed
    assert "Smallest participation" not in err


def test_models_are_shown_with_odds_ratios_and_p_values(files: Files) -> None:
    code, printed, err = files.put().weights("--models-table")
    assert code == 0, err
    assert "Model of enrollment: odds ratios (OR) with 95% intervals" in printed
    assert "Model of participation" in printed
    assert "Rows of a client in several rounds are counted as independent" in printed
    _, summary = files.weighed("--models-table")
    models = summary["models"]
    for name in ("enrollment", "participation"):
        lines = {line["name"]: line for line in models[name]["coefficients"]}
        assert "(intercept)" in lines
        for line in lines.values():
            assert line["low"] < line["odds_ratio"] < line["high"]
            assert 0.0 <= line["p_value"] <= 1.0
            # Wald's test and interval agree
            assert (line["p_value"] < 0.05) == (not line["low"] < 1.0 < line["high"])
    _, summary = files.weighed()
    assert "coefficients" not in summary["models"]["enrollment"]


def test_help_has_an_example() -> None:
    code, printed, _ = fedipw("weights", "--help")
    assert code == 0
    assert "fedipw weights --population" in " ".join(printed.split())


def test_targets_give_enrollment_weights_and_no_enrollment_probability(files: Files) -> None:
    files.put()
    files.targets("age,0.0\nrich[yes],0.5")
    got, summary = files.weighed(source="targets")
    assert summary["method"] == "calibrated-entropy-hajek"
    assert got.columns == [*COLUMNS, "enrollment_weight"]
    assert dict(got.schema) == {"unit_id": pl.Int64, "round": pl.Int64, **FLOATS,
                                "enrollment_weight": pl.Float64}  # fmt: skip
    assert got["enrollment_prob"].null_count() == got["inclusion_prob"].null_count() == got.height


def test_missing_values_by_policy_are_recorded(files: Files) -> None:
    files.people = files.people.with_columns(
        age=pl.when(pl.col("unit_id") % 10 == 0).then(None).otherwise(pl.col("age"))
    )
    files.put()
    marked, summary = files.weighed("--missing", "indicator")
    assert summary["left_out"] == 0
    assert marked.height == summary["replies"]
    dropped, summary = files.weighed("--missing", "drop")
    lost = marked.filter(pl.col("unit_id") % 10 == 0).height
    assert summary["left_out"] == lost > 0
    assert dropped.height == summary["weighed"] == summary["replies"] - lost
    assert not (dropped["unit_id"] % 10 == 0).any()
    _, printed, _ = files.weights("--missing", "drop")
    assert f"{lost} replies have a missing value or an unknown level: no weight." in printed


@pytest.mark.parametrize("scheme", ["fedipw", "calibrated-entropy", "greg", "participation-only"])
def test_a_client_dropped_from_enrollment_has_no_weight_in_participation_either(
    files: Files, scheme: str
) -> None:
    files.people = files.people.with_columns(
        age=pl.when(pl.col("unit_id") % 10 == 0).then(None).otherwise(pl.col("age"))
    )
    files.put()
    got, summary = files.weighed("--missing", "drop", "--participation", "x", "--scheme", scheme)
    assert not (got["unit_id"] % 10 == 0).any()
    assert summary["left_out"] == summary["replies"] - got.height > 0


def test_same_round_fits_skip_a_round_whose_replies_lack_a_value(files: Files) -> None:
    files.edit(3, x=pl.when("replied").then(None).otherwise(pl.col("x")))
    files.put()
    _, summary = files.weighed("--missing", "drop", "--participation-fit", "same-round")
    assert summary["skipped"] == {"3": "no reply has all the values needed"}


def test_rounds_before_anybody_enrolled_are_skipped(files: Files) -> None:
    files.people = files.people.with_columns(enrolled_from=pl.when("enrolled").then(3))
    files.rounds[:2] = [table.head(0) for table in files.rounds[:2]]
    files.put()
    got, summary = files.weighed()
    assert summary["skipped"] == {"1": "nobody is enrolled", "2": "nobody is enrolled"}
    assert set(got["round"]) == {3, 4, 5}


@pytest.mark.parametrize(
    "name", ["round", "invited", "replied", "available", "invite_prob", "opened_at"]
)
def test_a_covariate_named_like_a_column_of_the_ledger_is_refused(files: Files, name: str) -> None:
    files.people = files.people.with_columns((pl.col("age") > 0).alias(name))
    files.put()
    code, _, err = files.weights()
    assert code == 2
    assert f"'{name}' stands in the table of clients and in the ledger" in err


def test_a_saved_model_is_used_with_its_own_levels_whatever_the_table_has(files: Files) -> None:
    files.put()
    options = ("--participation-fit", "pooled", "--participation", "x")
    before, _ = files.weighed(*options, "--save-models", files.where / "models")
    files.people = files.people.with_columns(more=pl.lit("a")).filter(
        pl.col("enrolled") | (pl.col("rich") == "no")
    )
    files.put()
    after, _ = files.weighed("--models", files.where / "models")
    assert after["enrollment_prob"].equals(before["enrollment_prob"])
    files.people = files.people.with_columns(pl.col("rich").replace("no", "never"))
    files.put()
    code, _, err = files.weights("--models", files.where / "models")
    assert code == 2
    assert "'rich' has 1 level(s)" in err
    assert "'never'" in err


@pytest.mark.parametrize("options", [(), ("--participation-fit", "same-round"), ("--window", 2)])
def test_a_category_with_one_level_for_some_rounds_is_no_new_level(
    files: Files, options: tuple[object, ...]
) -> None:
    files.edit_all(net=pl.lit("wifi"))
    files.edit(5, net=NET.replace("4g", "wifi"), replied=pl.col("replied") & (pl.col("x") <= 0))
    files.put()
    _, summary = files.weighed(*options)
    assert summary["weighed"] == summary["replies"]


def test_replies_with_a_level_nobody_had_before_are_left_out_under_drop(files: Files) -> None:
    files.edit_all(net=NET)
    files.edit(4, net=NET.replace("3g", "2g"))
    files.put()
    got, summary = files.weighed("--missing", "drop", "--refit-every", 1)
    fresh = files.rounds[3].filter("replied", net="2g")["unit_id"]
    assert summary["left_out"] == len(fresh) > 0
    assert not got.filter(round=4)["unit_id"].is_in(fresh.implode()).any()


# Failures: a code, a message that names what is wrong, and a directory as it was.

Spoil = Callable[[Files], object]  # spoils what is to be written


def _people(*columns: pl.Expr, **named: pl.Expr) -> Spoil:
    def spoil(files: Files) -> None:
        files.people = files.people.with_columns(*columns, **named)

    return spoil


def _round(index: int, **named: pl.Expr) -> Spoil:
    def spoil(files: Files) -> None:
        files.edit(index, **named)

    return spoil


def _every(**named: pl.Expr) -> Spoil:
    def spoil(files: Files) -> None:
        files.edit_all(**named)

    return spoil


def _all(*spoils: Spoil) -> Spoil:
    return lambda files: [spoil(files) for spoil in spoils]


def _is(row: int) -> pl.Expr:
    """Return whether a row is the one at a place."""
    return pl.int_range(pl.len()) == row


def _where(row: int, value: Any, column: str) -> pl.Expr:
    return pl.when(_is(row)).then(pl.lit(value)).otherwise(pl.col(column))


def _steps(**named: pl.Expr) -> Spoil:
    """Return a ledger of three steps, with changes in round 2."""
    return _all(_every(available=pl.lit(value=True), invite_prob=pl.lit(0.5)), _round(2, **named))


def _in_people(change: Callable[[pl.DataFrame], pl.DataFrame]) -> Spoil:
    def spoil(files: Files) -> None:
        files.people = change(files.people)

    return spoil


def _in_round(index: int, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Spoil:
    def spoil(files: Files) -> None:
        files.rounds[index - 1] = change(files.rounds[index - 1])

    return spoil


POST = pl.when("enrolled").then(pl.col("age") ** 2)
CHANGES = {"enrolled_from": pl.lit(date(2024, 1, 1))}
REFUSED: dict[str, tuple[Spoil, tuple[object, ...], tuple[str, ...]]] = {
    "a column that changes type": (
        _round(4, x=pl.col("x").cast(pl.String)), (), ("round-000004", "'x' is String"),
    ),
    "a column that comes": (
        _round(4, y=pl.col("x")), (), ("round-000004.parquet", "also y"),
    ),
    "twice in the population": (
        _people(unit_id=_where(5, 104, "unit_id")), (), ("people.parquet", "unique", "104"),
    ),
    "twice in a round": (
        _in_round(3, lambda t: pl.concat([t, t.head(1)])), (),
        ("round-000003", "unit_id {first} stands more than once"),
    ),
    "replied without invited": (
        _round(2, invited=_where(0, False, "invited"), replied=_where(0, True, "replied")), (),
        ("round-000002", "1 client(s) replied without being invited: {first}"),
    ),
    "invited without available": (
        _steps(available=~_is(0)), (), ("round-000002", "invited without being available: {first}"),
    ),
    "not enrolled": (
        _round(2, unit_id=_where(0, 9999, "unit_id")), (),
        ("round 2", "not enrolled according to the table of clients: 9999"),
    ),
    "no row": (
        _in_round(2, lambda t: t.slice(1)), (),
        ("round 2", "1 enrolled client(s) have no row: {first}"),
    ),
    "before joining": (
        _people(enrolled_from=pl.lit(2)), (), ("round 1", "not enrolled then: {first}"),
    ),
    "dates without moments": (_people(**CHANGES), (), ("enrolled_from", "opened_at", "round 1")),
    "moments that are text": (
        _all(_people(**CHANGES), _every(opened_at=pl.lit("2024-05-01"))), (),
        ("enrolled_from", "2024-05-01", "round 1"),
    ),
    "moments with a time zone": (
        _all(
            _people(enrolled_from=pl.lit(datetime(2024, 1, 1))),
            _every(opened_at=pl.lit(datetime(2024, 5, 1)).dt.replace_time_zone("UTC")),
        ), (), ("enrolled_from", "round 1", "time zone"),
    ),
    "moments that differ": (
        _every(opened_at=pl.date(2024, 1, 1) + pl.duration(days=pl.int_range(pl.len()))), (),
        ("round-000001", "'opened_at'"),
    ),
    "separation": (
        _people(apart=pl.col("enrolled").cast(float) + pl.col("age").abs() / 100), (),
        ("apart", "separate"),
    ),
    "all enrolled": (
        _in_people(lambda t: t.filter("enrolled")), (), ("people.parquet", "all", "enrolled"),
    ),
    "nobody enrolled": (
        _people(enrolled=pl.lit(value=False)), (), ("people.parquet", "no client of 160"),
    ),
    "no covariates": (
        _in_people(lambda t: t.select("unit_id", "enrolled")), (), ("people.parquet", "covariate"),
    ),
    "enrolled unknown": (
        _people(enrolled=_where(3, None, "enrolled")), (), ("people.parquet", "'enrolled'"),
    ),
    "null covariate": (
        _people(age=_where(3, None, "age")), (), ("people.parquet", "'age'", "1 of 160"),
    ),
    "null in a round": (
        _round(3, x=pl.lit(None, dtype=pl.Float64)), (), ("round 3", "'x' is missing"),
    ),
    "NaN covariate": (_people(age=_where(3, np.nan, "age")), (), ("people.parquet", "'age'")),
    "infinite covariate": (
        _people(age=_where(3, np.inf, "age")), (), ("people.parquet", "'age' is infinite"),
    ),
    "infinite in a round": (_round(3, x=_where(3, np.inf, "x")), (), ("round 3", "'x' is inf")),
    "NaN in a round": (_round(3, x=_where(3, np.nan, "x")), (), ("round 3", "'x' is missing")),
    "a date as covariate": (
        _people(born=pl.lit(date(1990, 1, 1))), (), ("people.parquet", "'born' holds Date"),
    ),
    "a date in the ledger": (
        _every(day=pl.lit(date(2024, 1, 1))), (), ("rounds", "'day' holds Date"),
    ),
    "unseen level": (
        _all(_every(net=NET), _round(4, net=NET.replace("3g", "5g"))), (),
        ("round 4", "net[5g]"),
    ),
    "unseen level that sorts first": (
        _all(_every(net=NET), _round(4, net=NET.replace("3g", "2g"))), (),
        ("round 4", "net[2g]"),
    ),
    "unseen level under a penalty": (
        _all(_every(net=NET), _round(4, net=NET.replace("3g", "5g"))), ("--l2", "0.1"),
        ("round 4", "net[5g]"),
    ),
    "in both": (_every(age=pl.col("x")), (), ("'age' stands in",)),
    "post-enrollment, by default": (_people(score=POST), (), ("'score'", "after enrollment")),
    "post-enrollment, named": (
        _people(score=POST), ("--enrollment", "age + score"), ("'score'", "after enrollment"),
    ),
    "a ledger column for enrollment": (
        lambda _: None, ("--enrollment", "age + x"), ("'x'", "stands only in the ledger"),
    ),
    "a threshold that is no probability": (
        lambda _: None, ("--threshold", "-1"), ("--threshold", "-1"),
    ),
    "models of single rounds to save": (
        lambda _: None,
        ("--participation-fit", "same-round", "--save-models", "models"),
        ("same-round", "none to save"),
    ),
    "an unknown scheme": (lambda _: None, ("--scheme", "fedpiw"), ("did you mean fedipw?",)),
    "a rule of training": (
        lambda _: None,
        ("--scheme", "fednova+fedipw"),
        ("'fednova+fedipw' is a way of training", "fedipw study", "calibrated-entropy"),
    ),
    "oracle": (lambda _: None, ("--scheme", "oracle"), ("needs true probabilities",)),
    "strict": (lambda _: None, ("--strict", "1.5"), ("--strict", "1.5")),
    "trim": (lambda _: None, ("--trim", "0.5"), ("0.5 < 1",)),
    "window": (lambda _: None, ("--window", "0"), ("rolling window",)),
    "refit": (lambda _: None, ("--refit-every", "0"), ("refit_every",)),
    "penalty": (lambda _: None, ("--l2", "-1"), ("l2 must be 0 or more",)),
    "size": (lambda _: None, ("--population-size", "10"), ("--population-size",)),
    "formula": (lambda _: None, ("--participation", "x +"), ("'x +'", "empty term")),
    "a model that is not there": (lambda _: None, ("--models", "/none"), ("/none",)),
    "models nowhere": (lambda _: None, ("--save-models", "/dev/null/m"), ("/dev/null/m",)),
    "fit": (lambda _: None, ("--participation-fit", "future"), ("future",)),
    "invite_prob 0": (
        _steps(invite_prob=_where(0, 0.0, "invite_prob")), (),
        ("round-000002", "'invite_prob' must lie in (0, 1]", "unit_id {first}"),
    ),
    "invite_prob above 1": (
        _steps(invite_prob=_where(0, 1.5, "invite_prob")), (), ("round-000002", "1 row(s) do not"),
    ),
    "invite_prob null": (
        _steps(invite_prob=_where(0, None, "invite_prob")), (), ("round-000002", "unit_id {first}"),
    ),
    "no replies at all": (_every(replied=pl.lit(value=False)), (), ("nothing to write",)),
    "nobody ever invited, pooled": (
        _all(
            _every(available=pl.col("x") > 0, invite_prob=pl.lit(0.5)),
            _every(invited=pl.lit(value=False), replied=pl.lit(value=False)),
        ), ("--participation-fit", "pooled"), ("'reply'",),
    ),
    "numbers against text": (
        _every(unit_id=pl.format("u{}", "unit_id")), (), ("round 1", "u{first}"),
    ),
}  # fmt: skip


def refused(
    files: Files, messages: tuple[str, ...], code: int, *options: object, **how: Any
) -> None:
    """Run and expect an exit code, words in the message, and no file more or less than before."""
    before = {p: p.stat().st_size for p in files.listing()}
    got, printed, err = files.weights(*options, **how)
    assert (got, printed) == (code, ""), err
    first = files.inside["unit_id"].first()
    for words in messages:
        assert words.format(first=first) in err, err
    assert "Traceback" not in err
    assert {p: p.stat().st_size for p in files.listing()} == before


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_ends_in_code_two_and_a_message(files: Files, case: str) -> None:
    spoil, options, messages = REFUSED[case]
    spoil(files)
    files.put()
    refused(files, messages, 2, *options)


@pytest.mark.parametrize("name", ["enrolled", "unit_id"])
def test_a_population_without_one_of_its_columns(files: Files, name: str) -> None:
    files.put()
    files.people.drop(name).write_parquet(files.where / "people.parquet")
    refused(files, ("people.parquet", f"no column '{name}'"), 2)


def test_rounds_that_are_damaged_or_missing_are_named(files: Files) -> None:
    files.edit_all(net=pl.lit("wifi"))
    files.put()
    whole = files.round(3).read_bytes()
    files.round(3).write_bytes(whole[: len(whole) // 2])
    refused(files, ("round-000003.parquet", "not a readable parquet table"), 2)
    half = len(whole) // 2
    files.round(3).write_bytes(whole[:8] + b"\xff" * (half - 8) + whole[half:])
    refused(files, ("rounds", "cannot be read"), 2)
    files.round(3).unlink()
    refused(files, ("rounds", "round 3 is missing; rounds 1 to 5"), 2)
    for k in (1, 2, 4, 5):
        files.round(k).unlink()
    refused(files, ("rounds holds no closed round",), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheme", "fedipw"), "fedipw needs a table of the whole population"),
        (("--scheme", "greg"), "greg needs a table of the whole population"),
        (("--scheme", "oracle"), "oracle needs"),
        (("--scheme", "calibrated-inverse-logit"), "needs the population size"),
        (("--scheme", "efficient"), "needs the population size"),
        (("--population-size", "-3"), "population_size must be a finite number above 0"),
    ],
)
def test_what_totals_cannot_give(files: Files, options: tuple[str, ...], message: str) -> None:
    files.put()
    files.targets("age,0.0")
    refused(files, (message,), 2, *options, source="targets")


def test_enrolled_and_targets_go_together(files: Files) -> None:
    files.put()
    files.targets("age,0.0")
    where, before = files.where, files.listing()
    people, inside, goals = where / "people.parquet", where / "enrolled.parquet", "targets.csv"
    for given, words in (
        (("--enrolled", inside), "--enrolled and --targets go together"),
        (("--population", people, "--targets", where / goals), "--enrolled and --targets"),
        (("--population", people, "--enrolled", inside), "Give --population, or --enrolled"),
        ((), "Give --population, or --enrolled"),
    ):
        code, _, err = fedipw(
            "weights", *given, "--rounds", where / "rounds", "--out", where / "w.csv"
        )
        assert code == 2
        assert words in err
    assert files.listing() == before


def test_an_empty_table_of_enrolled_clients(files: Files) -> None:
    files.put()
    files.targets("age,0.0")
    files.inside.head(0).write_parquet(files.where / "enrolled.parquet")
    refused(files, ("enrolled",), 2, source="targets")


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("age,50.0", "age = 50"),
        ("rich[never],0.2", "rich[never]"),
        ("age,3.0\nrich[yes],1.0", "age"),
    ],
)
def test_targets_nobody_can_meet_end_in_code_three(files: Files, targets: str, words: str) -> None:
    files.put()
    files.targets(targets)
    refused(files, (words,), 3, source="targets")


def test_a_probability_below_strict_ends_in_code_four(files: Files) -> None:
    files.put()
    _, summary = files.weighed()
    (files.where / "w.parquet").unlink()
    least = summary["overlap"]["smallest"][0]
    refused(files, ("enrollment probability", f"{least:.3g}"), 4, "--strict", least * 1.01)
    least = summary["smallest_participation_prob"]
    files.targets("age,0.0")
    refused(files, ("participation probability",), 4, "--strict", 0.9, source="targets")
    assert files.weights("--strict", min(least, summary["overlap"]["smallest"][0]))[0] == 0


@pytest.mark.parametrize("out", ["none/w.csv", "w.txt", "rounds"])
def test_an_output_that_cannot_be_written_is_refused(files: Files, out: str) -> None:
    files.put()
    refused(files, (str(files.where / out),), 2, out=out)


def test_a_directory_nothing_can_be_written_in_is_refused(files: Files) -> None:
    files.put()
    code, _, err = files.weights(out="/proc/w.csv")  # not even by root
    assert code == 2
    assert "/proc/w.csv cannot be written" in err


def test_a_failed_run_leaves_the_last_output_as_it_was(files: Files) -> None:
    files.put()
    (files.where / "w.csv").write_text("mine")
    files.round(4).unlink()
    refused(files, ("round 4 is missing",), 2)
    assert (files.where / "w.csv").read_text() == "mine"
