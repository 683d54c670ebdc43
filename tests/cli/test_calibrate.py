"""``fedipw calibrate`` as a user runs it."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest

from cli import command
from fedipw.tables import read_table, write_table

REFERENCE = Path(__file__).parents[1] / "reference"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def fedipw(*arguments: object) -> Done:
    return Done(*command.fedipw(*arguments))


@pytest.fixture
def api(tmp_path: Path) -> Path:
    frame = pl.read_csv(REFERENCE / "api_apiclus1_weights.csv", schema_overrides={"cds": pl.String})
    frame.rename({"cds": "unit_id"}).write_parquet(tmp_path / "api.parquet")
    total = {"stype[H]": 755, "stype[M]": 1018, "api99": 3914069}
    rows = "".join(f"{name},{value / 6194!r}\n" for name, value in total.items())
    (tmp_path / "targets.csv").write_text(f"name,value\n{rows}")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "column"),
    [
        (("--distance", "linear"), "linear"),
        (("--bounds", "0.6,1.6"), "linear_bounded_0.6_1.6"),
        (("--distance", "entropy"), "raking"),
        (("--distance", "logit", "--bounds", "0.5,2"), "logit_0.5_2"),
    ],
)
def test_weights_of_r_survey(api: Path, options: tuple[str, ...], column: str) -> None:
    out = api / "w.csv"
    common = ("--targets", api / "targets.csv", "--base", "pw", "--population-size", 6194)
    done = fedipw("calibrate", api / "api.parquet", *common, *options, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "converged" in done.stdout
    table = pl.read_csv(out, schema_overrides={"unit_id": pl.String})
    given = pl.read_parquet(api / "api.parquet")
    assert table.columns == ["unit_id", "weight"]
    assert table["unit_id"].to_list() == given["unit_id"].to_list()
    expected = given[f"apiclus1__stype_api99__{column}"].to_numpy()
    np.testing.assert_allclose(table["weight"].to_numpy() * 6194, expected, rtol=1e-9)
    assert table["weight"].to_numpy().sum() == pytest.approx(1.0, rel=1e-12)


def test_json_tells_all_and_slack_misses_within_its_width(api: Path) -> None:
    out = api / "w.parquet"
    done = fedipw(
        "calibrate", api / "api.parquet", "--targets", api / "targets.csv", "--out", out,
        "--slack", 0.05, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["largest_violation"] == pytest.approx(0.05, rel=1e-6)
    assert [c["name"] for c in result["constraints"]] == ["stype[H]", "stype[M]", "api99"]
    assert pl.read_parquet(out)["weight"].sum() == pytest.approx(1.0)


def test_rows_outside_enrollment_are_ignored_and_rare_levels_named(tmp_path: Path) -> None:
    units, targets, out = (tmp_path / n for n in ("u.csv", "t.csv", "w.csv"))
    rows = [f"{i},{'x' if i == 0 else 'y'},{i % 7},{i < 40}" for i in range(60)]
    units.write_text("unit_id,os,age,enrolled\n" + "\n".join(rows) + "\n")
    targets.write_text("name,value\nos[x],0.1\nage,3.2\n")
    done = fedipw("calibrate", units, "--targets", targets, "--out", out)
    assert done.returncode == 0, done.stderr
    assert pl.read_csv(out).height == 40
    assert (
        "Rare: os[x], 1 enrolled client(s) (2.50%) stand for 10.00% of the population."
        in done.stdout
    )


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".csv.gz", ".tsv", ".feather", ""])
def test_tables_are_of_any_suffix_or_directories(api: Path, suffix: str) -> None:
    units, out = api / f"units{suffix}", api / f"weights{suffix or '.parquet'}"
    given = pl.read_parquet(api / "api.parquet").select("unit_id", "stype", "api99")
    if suffix:
        write_table(given, units)
    else:
        units.mkdir()
        given[:100].write_parquet(units / "a.parquet")
        given[100:].write_parquet(units / "b.parquet")
    done = fedipw("calibrate", units, "--targets", api / "targets.csv", "--out", out)
    assert done.returncode == 0, done.stderr
    table = read_table(out)
    assert table["unit_id"].to_list() == given["unit_id"].to_list()
    api99 = given["api99"].to_numpy()
    assert table["weight"].to_numpy() @ api99 == pytest.approx(3914069 / 6194, rel=1e-10)


def test_standard_errors_move_what_is_aimed_at(api: Path) -> None:
    exact, noisy = api / "exact.csv", api / "noisy.csv"
    exact.write_text("name,value\nstype[H],0.2\napi99,650\n")
    noisy.write_text("name,value,se\nstype[H],0.2,0.2\napi99,650,\n")
    aims = []
    for targets in (exact, noisy):
        done = fedipw(
            "calibrate", api / "api.parquet", "--targets", targets, "--out", api / "w.csv",
            "--json", "--force",
        )  # fmt: skip
        aims.append([c["aimed_at"] for c in json.loads(done.stdout)["constraints"]])
    assert aims[0] == [0.2, 650.0]
    enrolled = pl.read_parquet(api / "api.parquet").select(pl.col("stype") == "H").mean().item()
    assert enrolled < aims[1][0] < 0.2
    assert aims[1][1] == pytest.approx(650.0)


@pytest.mark.parametrize(
    ("targets", "options", "code", "message"),
    [
        ("age,1", (), 2, "'age' names no column"),
        ("api99,", (), 2, "value of api99 is missing"),
        ("stype,1", (), 2, r"'stype' holds String"),
        ("api99,650", ("--base", "minus"), 2, "183 negative"),
        ("api99,650", ("--base", "zero"), 2, "sum to 0"),
        ("api99,650", ("--base", "stype"), 2, "row 1, column 'stype': 'H' is not a number"),
        ("api99,650", ("--base", "none"), 2, "No base weight column 'none'"),
        ("gap,650", (), 2, "'gap' is missing in 1 of 183 enrolled rows"),
        ("api99,650", ("--distance", "logit"), 2, "needs --bounds"),
        ("api99,650", ("--distance", "logit", "--bounds", "1.2,3"), 2, "LOW < 1 < HIGH"),
        ("api99,650", ("--distance", "entropy", "--bounds", "0.2,3"), 2, "takes no --bounds"),
        ("api99,650", ("--bounds", "3"), 2, "give two numbers"),
        ("api99,650", ("--distance", "inverse-logit"), 2, "needs the population size"),
        (
            "api99,650",
            ("--distance", "inverse-logit", "--population-size", "6194", "--base", "pw"),
            2,
            "takes no base weights",
        ),
        ("api99,650", ("--slack", "-1"), 2, "slack must be 0 or more"),
        ("api99,2000", (), 3, "api99 = 2000 (enrolled clients span"),
        ("stype[K],0.1", (), 3, "stype[K]"),
        ("stype[H],0.9\nstype[M],0.0999\napi99,900", (), 3, "Nearest that can be met"),
        ("api99,650", ("--bounds", "0.99,1.01"), 3, "with ratios between 0.99 and 1.01"),
        (
            "api99,650",
            ("--distance", "inverse-logit", "--population-size", "100"),
            3,
            "larger than",
        ),
    ],
)
def test_what_cannot_be_done_ends_in_an_exit_code_and_no_file(
    api: Path, targets: str, options: tuple[str, ...], code: int, message: str
) -> None:
    frame = pl.read_parquet(api / "api.parquet").with_columns(
        minus=pl.lit(-1.0),
        zero=pl.lit(0.0),
        gap=pl.when(pl.col("unit_id") == pl.col("unit_id").first()).then(None).otherwise(1.0),
    )
    frame.write_parquet(api / "api.parquet")
    (api / "bad.csv").write_text(f"name,value\n{targets}\n")
    out = api / "w.csv"
    before = sorted(api.iterdir())
    done = fedipw(
        "calibrate", api / "api.parquet", "--targets", api / "bad.csv", "--out", out, *options
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(api.iterdir()) == before


def test_fewer_rows_than_constraints(tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("unit_id,a,b,c\n1,0,1,2\n2,1,0,3\n")
    (tmp_path / "t.csv").write_text("name,value\na,0.5\nb,0.5\nc,2.5\n")
    done = fedipw(
        "calibrate",
        tmp_path / "u.csv",
        "--targets",
        tmp_path / "t.csv",
        "--out",
        tmp_path / "w.csv",
    )
    assert done.returncode == 2
    assert "2 enrolled clients are fewer than 3 constraints" in done.stderr
