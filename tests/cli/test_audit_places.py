"""``fedipw audit --compare``, and where an audit may be written."""

import json
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fedipw.cli import main
from worlds import World, drawn

from .command import contents

Capture = pytest.CaptureFixture[str]


def fedipw(*arguments: object) -> int:
    before = sys.argv
    sys.argv = ["fedipw", "audit", *map(str, arguments)]
    try:
        main()
    except SystemExit as done:
        return int(done.code or 0)
    finally:
        sys.argv = before
    return 0


def put(where: Path, strength: float) -> None:
    """Write a population, its enrolled and a ledger of three rounds in which half reply."""
    odds = strength * pl.col("age")
    world = World(size=200, rounds=3, seed=3, changing=(), enrollment=odds, reply=pl.lit(0.0))
    drawn(world).write(where, targets={"age": 0.0})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the pages and JSON files of two audits, before and after."""
    base = tmp_path_factory.mktemp("made")
    for name, strength in (("before", 1.0), ("after", 0.2)):
        put(base / name, strength)
        given = ("--population", base / name / "people.parquet", "--rounds", base / name / "rounds")
        out = ("--out", base / f"{name}.html", "--json", base / f"{name}.json", "--title", name)
        assert fedipw(*given, *out) == 0
    return base


@pytest.fixture
def files(tmp_path: Path) -> Path:
    put(tmp_path, 0.8)
    return tmp_path


# Two audits side by side.


def test_pages_and_json_files_compare_alike(made: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "change.html"
    texts = []
    for first in ("html", "json"):
        for second in ("html", "json"):
            pair = (made / f"before.{first}", made / f"after.{second}")
            assert fedipw("--compare", *pair, "--out", out, "--force") == 0
            assert capsys.readouterr().out == f"Wrote {out}\n"
            texts.append(out.read_text())
    assert len(set(texts)) == 1
    assert "<title>after: before and after</title>" in texts[0]
    for name in ("before", "after"):
        headline = json.loads((made / f"{name}.json").read_text())["verdict"]["headline"]
        assert headline in texts[0]


def changed(made: Path, **changes: Any) -> str:
    values = json.loads((made / "after.json").read_text())
    return json.dumps(values | changes)


def deep(made: Path, *path: str, value: Any) -> str:
    values = json.loads((made / "after.json").read_text())
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return json.dumps(values)


def spoilt(made: Path) -> dict[str, tuple[str | bytes, str]]:
    whole, page = (made / "after.json").read_text(), (made / "after.html").read_text()
    return {
        "another format": (changed(made, format="else"), "is not of the format fedipw-audit"),
        "another version": (changed(made, version=1), "has version 1 of its format"),
        "cut off": (whole[: len(whole) // 2], "cannot be read"),
        "empty": ("", "cannot be read"),
        "a list": ("[1, 2]", "is not of the format"),
        "a number": ("3", "is not of the format"),
        "nested without end": ("[" * 100_000, "cannot be read"),
        "no text": (b"\xff\xfe\x00PAR1\x80", "cannot be read"),
        "a table": ((made / "after" / "people.parquet").read_bytes(), "cannot be read"),
        "another page": ("<!doctype html><p>hello", "holds no audit"),
        "a page cut off": (page[: page.index("audit-data") + 400], "holds no audit"),
        "without sizes": (deep(made, "sizes", value=None), "is damaged in sizes"),
        "text for a number": (deep(made, "sizes", "replies", value="x"), "in sizes.replies"),
        "no number": (deep(made, "sizes", "replies", value=float("nan")), "in sizes.replies"),
        "a level unheard of": (
            deep(made, "verdict", "findings", value=[{"level": "fine"}]),
            "is damaged in verdict.findings.0.question",
        ),
    }


CASES = (
    "another format", "another version", "cut off", "empty", "a list", "a number",
    "nested without end", "no text", "a table", "another page", "a page cut off", "without sizes",
    "text for a number", "no number", "a level unheard of",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_audit_is_refused_by_name(
    made: Path, tmp_path: Path, capsys: Capture, case: str
) -> None:
    content, words = spoilt(made)[case]
    bad, out = tmp_path / "bad.json", tmp_path / "change.html"
    bad.write_bytes(content.encode() if isinstance(content, str) else content)
    for pair in ((bad, made / "after.json"), (made / "before.html", bad)):
        assert fedipw("--compare", *pair, "--out", out) == 2
        err = capsys.readouterr().err
        assert f"{bad} " in err
        assert words in err
        assert "Traceback" not in err
    assert not out.exists()


def test_every_spoilt_audit_is_tried(made: Path) -> None:
    assert {*spoilt(made)} == {*CASES}


def test_an_audit_that_is_not_there_is_refused(made: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "folder").mkdir()
    for bad in (tmp_path / "none.json", tmp_path / "folder"):
        pair = (made / "before.json", bad)
        assert fedipw("--compare", *pair, "--out", tmp_path / "change.html") == 2
        assert f"{bad} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        ("--population", "people.parquet"),
        ("--rounds", "rounds"),
        ("--metrics", "loss.parquet"),
        ("--json", "{}/audit.json"),
        ("--title", "Mine"),
        ("--by", "os"),
        ("--population-size", "10"),
        ("--strict", "0.1"),
        ("--history",),
        ("--min-cell", "10"),
    ],
)
def test_nothing_but_out_goes_with_compare(
    made: Path, tmp_path: Path, capsys: Capture, more: tuple[str, ...]
) -> None:
    pair, out = (made / "before.json", made / "after.json"), tmp_path / "change.html"
    options = [text.format(tmp_path) for text in more]
    assert fedipw("--compare", *pair, "--out", out, *options) == 2
    assert f"leave out {more[0]}." in " ".join(capsys.readouterr().err.split())
    assert not [*tmp_path.iterdir()]


def test_a_comparison_does_not_write_over_what_it_compares(made: Path, capsys: Capture) -> None:
    before = contents(made)
    pair = (made / "before.html", made / "after.json")
    for out in pair:
        assert fedipw("--compare", *pair, "--out", out) == 2
        assert "is an input: write it elsewhere" in capsys.readouterr().err
    assert contents(made) == before


# Places to write to.


def given(files: Path, source: str = "population") -> tuple[object, ...]:
    known: tuple[object, ...] = ("--population", files / "people.parquet")
    if source == "targets":
        known = ("--enrolled", files / "enrolled.parquet", "--targets", files / "targets.csv")
    return (*known, "--rounds", files / "rounds")


@pytest.mark.parametrize("option", ["--out", "--json"])
@pytest.mark.parametrize(
    ("source", "place", "words"),
    [
        ("population", "people.parquet", "is an input"),
        ("targets", "enrolled.parquet", "is an input"),
        ("targets", "targets.csv", "is an input"),
        ("population", "rounds/page.html", "lies in the ledger"),
        ("population", "../{}/people.parquet", "is an input"),
        ("population", "rounds", "cannot be written"),
        ("population", "none/page.html", "cannot be written"),
        ("population", "/proc/page.html", "cannot be written"),  # not even by root
    ],
)
def test_page_and_json_are_written_together_where_they_may_or_not_at_all(
    files: Path, capsys: Capture, option: str, source: str, place: str, words: str
) -> None:
    (files / "page.html").write_text("mine")
    before = contents(files)
    bad = files / place.format(files.name)
    places = {"--out": files / "page.html", "--json": files / "new.json"} | {option: bad}
    options = [text for pair in places.items() for text in pair]
    assert fedipw(*given(files, source), *options, "--force") == 2
    err = capsys.readouterr().err
    assert str(bad) in err
    assert words in err
    assert contents(files) == before


def test_page_and_json_need_a_file_each(files: Path, capsys: Capture) -> None:
    same = ("--out", files / "a.html", "--json", files / ".." / files.name / "a.html")
    assert fedipw(*given(files), *same) == 2
    assert "the page, the JSON file and the card need a file each" in capsys.readouterr().err
    assert not (files / "a.html").exists()
    both = ("--out", files / "a.html", "--json", files / "a.md", "--card", files / "a.md")
    assert fedipw(*given(files), *both) == 2
    assert "need a file each" in capsys.readouterr().err
    assert not (files / "a.html").exists()


def test_a_table_in_parts_gets_no_part_more(files: Path, capsys: Capture) -> None:
    (files / "parts").mkdir()
    (files / "people.parquet").rename(files / "parts" / "one.parquet")
    out = files / "parts" / "page.html"
    assert fedipw("--population", files / "parts", "--out", out) == 2
    assert "lies in the table" in capsys.readouterr().err
    assert fedipw("--population", files / "parts", "--out", files / "page.html") == 0


def test_a_failed_audit_leaves_the_last_page_as_it_was(files: Path, capsys: Capture) -> None:
    (files / "page.html").write_text("mine")
    (files / "rounds" / "round-000002.parquet").unlink()
    before = contents(files)
    assert fedipw(*given(files), "--out", files / "page.html", "--force") == 2
    assert "round 2 is missing" in capsys.readouterr().err
    assert contents(files) == before


@pytest.mark.parametrize("name", ["enrolled", "unit_id"])
def test_a_population_without_one_of_its_columns_is_refused(
    files: Path, capsys: Capture, name: str
) -> None:
    pl.read_parquet(files / "people.parquet").drop(name).write_parquet(files / "people.parquet")
    assert fedipw(*given(files), "--out", files / "page.html") == 2
    assert f"no column '{name}'" in capsys.readouterr().err


def test_damaged_and_empty_files_are_named(files: Path, capsys: Capture) -> None:
    one = files / "rounds" / "round-000003.parquet"
    whole = one.read_bytes()
    one.write_bytes(whole[: len(whole) // 2])
    assert fedipw(*given(files), "--out", files / "page.html") == 2
    assert "round-000003.parquet" in capsys.readouterr().err
    (files / "people.parquet").write_bytes(b"PAR1 and no more")
    assert fedipw(*given(files), "--out", files / "page.html") == 2
    assert "people.parquet" in capsys.readouterr().err
    (files / "empty").mkdir()
    empty = ("--rounds", files / "empty", "--out", files / "page.html")
    assert fedipw("--enrolled", files / "enrolled.parquet", "--targets", files / "targets.csv",
                  *empty) == 2  # fmt: skip
    assert "holds no closed round" in capsys.readouterr().err
    assert not (files / "page.html").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--metrics", "people.parquet"), "--metrics goes with --rounds"),
        (("--targets", "targets.csv"), "--enrolled and --targets go together"),
        (("--enrolled", "enrolled.parquet"), "Give --population, or --enrolled"),
    ],
)
def test_options_that_need_others_are_refused_alone(
    files: Path, capsys: Capture, options: tuple[str, str], words: str
) -> None:
    known = ("--population", files / "people.parquet", "--out", files / "page.html")
    assert fedipw(*known, options[0], files / options[1]) == 2
    assert words in capsys.readouterr().err


def test_a_formula_of_enrollment_says_nothing_with_totals(files: Path, capsys: Capture) -> None:
    out = ("--enrollment", "age", "--out", files / "page.html")
    assert fedipw(*given(files, "targets"), *out) == 2
    assert "with --targets it is calibrated" in capsys.readouterr().err


def test_no_replies_at_all_leave_enrollment_to_tell_of(files: Path, capsys: Capture) -> None:
    for path in sorted((files / "rounds").glob("*.parquet")):
        pl.read_parquet(path).with_columns(replied=pl.lit(value=False)).write_parquet(path)
    assert fedipw(*given(files), "--out", files / "page.html") == 0
    assert "differ from the enrolled? Unknown. Nobody replied." in capsys.readouterr().out


def test_help_has_an_example(capsys: Capture) -> None:
    assert fedipw("--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "fedipw audit --population people.parquet --rounds rounds --out report.html" in told
