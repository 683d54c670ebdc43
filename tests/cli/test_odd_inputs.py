"""Odd inputs that were once tracebacks, hangs, infinite weights or lost files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import fedipw.selection.enrollment as module
from fedipw.calibration import calibrated
from fedipw.errors import InputError
from fedipw.selection.coded import CodedTable
from fedipw.selection.enrollment import rich_design
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.tables.design import bound_design
from fedipw.tables.ledger import Ledger
from fedipw.tables.table import Table
from worlds import World

from .command import Files, contents, fedipw

WORLD = World(size=200, rounds=3, covariates=("age", "os"))


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """End a test that hangs; what it waits for takes no time."""
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files.of(WORLD, tmp_path)


def refused(ended: tuple[int, str, str], *words: str) -> None:
    code, _, err = ended
    assert code == 2, err
    assert len(err) < 5_000
    for word in words:
        assert word in err


@pytest.mark.parametrize("value", [1e300, 1e308, 1.1e100])
def test_targets_beyond_the_range_of_squares(files: Files, value: float) -> None:
    files.put()
    files.targets(f"age,0.1,{value!r}", head="name,value,se")
    refused(files.weights(source="targets"), "targets.csv", "standard error of age")
    files.targets(f"age,{value!r}")
    refused(files.weights(source="targets"), "targets.csv", "target value of age")


def test_one_target_of_a_large_error_leaves_the_others_believed() -> None:
    """With its error it is not believed; the other one is, whatever the scale of the first."""
    rng = np.random.default_rng(0)
    balance = rng.normal(size=(400, 2))
    alone = calibrated(balance[:, :1], [0.2], se=[0.01])
    both = calibrated(balance, [0.2, 5.0], se=[0.01, 1e9])
    np.testing.assert_allclose(both.achieved[0], alone.achieved[0], atol=1e-3)
    assert abs(both.achieved[0] - 0.2) < 0.01


@pytest.mark.parametrize("distance", ["quadratic", "entropy", "logit", "linear", "inverse-logit"])
@pytest.mark.parametrize("scale", [1e308, 1e160, 1e-308, 1e-160])
def test_calibration_on_columns_at_the_edge_of_numbers(
    files: Files, distance: str, scale: float
) -> None:
    files.people = files.people.with_columns(pl.col("age") * scale)
    files.put()
    files.targets("age,0.1")
    units, more = files.where / "enrolled.parquet", ["--population-size", "200"]
    more += ["--bounds", "0.1,9"] if distance == "logit" else []
    given = (units, "--targets", files.where / "targets.csv", "--out", files.where / "c.csv")
    refused(fedipw("calibrate", *given, "--distance", distance, *more), "age")
    assert not (files.where / "c.csv").exists()


@pytest.mark.parametrize("scale", [1e308, 1e120, 1e-308])
def test_models_on_columns_at_the_edge_of_numbers(files: Files, scale: float) -> None:
    files.people = files.people.with_columns(pl.col("age") * scale)
    refused(files.put().weights(), "people.parquet", "'age'")
    again = Files.of(WORLD, files.where / "again")
    again.edit_all(x=pl.col("x") * scale)
    refused(again.put().weights(), "'x'")


@pytest.mark.parametrize("kind", ["list", "duration", "struct", "date"])
def test_enrolled_of_a_type_that_is_no_flag(files: Files, kind: str) -> None:
    flags = files.people["enrolled"]
    made = {
        "list": pl.Series([[flag] for flag in flags]),
        "duration": flags.cast(pl.Int64).cast(pl.Duration),
        "struct": pl.Series([{"a": flag} for flag in flags]),
        "date": flags.cast(pl.Int32).cast(pl.Date),
    }[kind]
    files.put()
    people = files.people.with_columns(made.alias("enrolled"))
    people.write_parquet(files.where / "people.parquet")
    refused(files.weights(), "people.parquet: 'enrolled' holds", "true or false")


def test_a_column_of_lists_has_no_levels(files: Files) -> None:
    files.people = files.people.with_columns(tags=pl.Series([["a"]] * 200))
    files.put()
    files.targets("tags[a],0.5")
    words = ("'tags' holds List(String), neither numbers nor text",)
    given = (files.where / "enrolled.parquet", "--targets", files.where / "targets.csv")
    refused(fedipw("calibrate", *given, "--out", files.where / "c.csv"), *words)
    refused(files.weights("--enrollment", "age + tags[a]"), *words)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("age**" + "9" * 5000, "the power of 'age' must be 100 at most"),
        ("age**" + "9" * 400, "the power of 'age' must be 100 at most"),
        ("age**٢", "must be a whole number"),
        ("os[" + " " * 8000, "the level of 'os' has no closing ']'"),
        ("[" + " " * 8000, "an empty term"),
        ("[" * 20_000, "an empty term"),
        ("*".join(["age"] * 40), "40 crossed terms"),
        (":".join(["os"] * 40), "more than 10000 columns"),
        ("a" * 100_000, "names no column"),
    ],
    ids=["digits", "overflow", "arabic", "level", "spaces", "brackets", "stars", "colons", "name"],
)
def test_formulas_that_grow_without_end(files: Files, formula: str, words: str) -> None:
    refused(files.put().weights("--enrollment", formula), words)
    refused(files.weights("--participation", formula), words)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("[participation]\nkind = {a = 0.8}", "kind = {'a': 0.8}"),
        ("[population]\nkind = [1]", "kind = [1]"),
        (f"[training]\nbatch_size = 1{'0' * 30}", "batch_size"),
        (f"[training]\nstep_size = 1{'0' * 30}", "step_size"),
        (f"[training]\nlocal_steps = {'9' * 5000}", "not readable TOML"),
        (f"[population]\nsize = {'9' * 40}", "size"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "study"])
def test_settings_of_other_types_and_sizes(
    tmp_path: Path, command: str, lines: str, words: str
) -> None:
    path = tmp_path / "a.toml"
    if command == "study":
        lines = "seeds = [1]\n" + lines.replace("[", "[base.", 1) + "\n[scenarios.a]\n"
    path.write_text(lines + "\n")
    refused(fedipw(command, path, "--out", tmp_path / "o"), "a.toml", words)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("header", [b"[1]", b"{}", b"null", b'{"version": 2}'])
def test_checkpoints_with_a_header_of_another_kind(tmp_path: Path, header: bytes) -> None:
    save_checkpoint(tmp_path, {"a": np.ones(3), "b": [1, {"c": np.zeros(2)}]}, "f")
    assert load_checkpoint(tmp_path, "f") is not None
    path = tmp_path / "checkpoint.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["header"] = np.frombuffer(header, dtype=np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(InputError, match="is damaged"):
        load_checkpoint(tmp_path, "f")


@pytest.mark.parametrize("change", ["array", "compressed", "bit"])
def test_checkpoints_that_were_edited_packed_or_damaged(tmp_path: Path, change: str) -> None:
    save_checkpoint(tmp_path, {"a": np.ones(300), "b": 3}, "f")
    path = tmp_path / "checkpoint.npz"
    with np.load(path) as file:
        arrays = dict(file)
    if change == "array":
        np.savez(path, **{**arrays, "/a": np.zeros(300)})
    elif change == "compressed":
        np.savez_compressed(path, **arrays)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(bytes(data))
    with pytest.raises(InputError, match="is damaged"):
        load_checkpoint(tmp_path, "f")


@pytest.mark.parametrize("prob", [1e-320, 1e-300, 9e-101])
def test_invitations_too_rare_to_be_weighed_write_no_weights(files: Files, prob: float) -> None:
    files = Files.of(
        World(size=200, rounds=3, covariates=("age", "os"), steps=("available", "invite_prob")),
        files.where,
    )
    files.edit_all(invite_prob=pl.when("available").then(pl.lit(prob)))
    refused(files.put().weights(), "'invite_prob'", "1e-100")
    assert not (files.where / "w.csv").exists()


def test_a_stray_file_with_a_large_number_is_told_at_once(files: Files) -> None:
    files.put()
    (files.where / "rounds" / "round-999999999999.parquet").touch()
    refused(files.weights(), "round 4, 5, 6, 7, 8 and 999999999990 more is missing")
    refused(fedipw("audit", *files.given(), "--out", files.where / "a.html"), "is missing")
    with pytest.raises(InputError, match="is missing"):
        list(Ledger(files.where / "rounds"))


@pytest.mark.parametrize("name", ["enrolled.csv", "targets.csv"])
def test_calibrate_never_writes_over_its_inputs(files: Files, name: str) -> None:
    files.put(kind="csv")
    files.targets("age,0.1")
    before = contents(files.where)
    given = (files.where / "enrolled.csv", "--targets", files.where / "targets.csv")
    refused(fedipw("calibrate", *given, "--out", files.where / name), "is an input")
    assert contents(files.where) == before


def wide(columns: int, rows: int) -> pl.DataFrame:
    rng = np.random.default_rng(1)
    made = {f"c{j}": rng.normal(size=rows) for j in range(columns)}
    return pl.DataFrame({"unit_id": range(rows), "enrolled": rng.random(rows) < 0.5, **made})


@pytest.mark.parametrize("command", ["audit", "weights"])
def test_a_table_of_three_thousand_columns_is_told_what_to_do(tmp_path: Path, command: str) -> None:
    people = wide(3000, 150)
    people.write_parquet(tmp_path / "people.parquet")
    inside = people.filter("enrolled")["unit_id"]
    replied = pl.Series(np.arange(len(inside)) % 2 == 0)
    log = {"unit_id": inside, "invited": True, "replied": replied}
    Ledger(tmp_path / "rounds").append(1, pl.DataFrame(log))
    given = ("--population", tmp_path / "people.parquet", "--rounds", tmp_path / "rounds")
    out = tmp_path / ("a.html" if command == "audit" else "w.csv")
    refused(fedipw(command, *given, "--out", out), "3000 columns and 150 rows")
    code, _, err = fedipw(
        command, *given, "--out", out, "--enrollment", "c0 + c1", "--participation", "c2"
    )
    assert code == 0, err


def test_pairs_of_many_columns_are_not_even_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rich design of 600 columns has 180,300 squares and pairs; none is bound in vain."""
    coded = CodedTable.of(Table(wide(600, 700)))
    longest = 0
    bind = bound_design

    def watched(formula: str, *given: Any, **more: Any) -> object:
        nonlocal longest
        longest = max(longest, formula.count("+"))
        return bind(formula, *given, **more)

    monkeypatch.setattr(module, "bound_design", watched)
    assert len(rich_design(coded, 350).terms) == 600
    assert longest < 1300
