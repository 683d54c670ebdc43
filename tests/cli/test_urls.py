"""Commands on URLs write the same bytes as on paths, and never over an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import polars as pl
import pytest

from worlds import World

from .command import Files, contents, fedipw, succeeded

fsspec: Any = pytest.importorskip("fsspec")

WORLD = World(size=200, rounds=3, seed=5, covariates=("age",), metric=pl.col("age"))

# by command: its options for the files in a directory, and what it writes there
COMMANDS: dict[str, tuple[Callable[[str], list[str]], tuple[str, ...]]] = {
    "weights": (
        lambda at: [
            "--population", f"{at}/people.parquet", "--rounds", f"{at}/rounds",
            "--out", f"{at}/out/weights",
        ],
        ("weights/part-000000.parquet",),
    ),
    "calibrate": (
        lambda at: [
            f"{at}/enrolled.parquet", "--targets", f"{at}/targets.csv", "--out", f"{at}/out/q.csv",
        ],
        ("q.csv",),
    ),
    "evaluate": (
        lambda at: [
            "--enrolled", f"{at}/enrolled.parquet", "--targets", f"{at}/targets.csv",
            "--rounds", f"{at}/rounds", "--metrics", f"{at}/loss.parquet",
            "--replicate-weights", f"{at}/out/rep.feather", "--out", f"{at}/out/e.csv",
        ],
        ("e.csv", "rep.feather"),
    ),
    "audit": (
        lambda at: [
            "--population", f"{at}/people.parquet", "--rounds", f"{at}/rounds/",
            "--metrics", f"{at}/loss.parquet", "--out", f"{at}/out/a.html",
            "--json", f"{at}/out/a.json", "--card", f"{at}/out/a.md",
        ],
        ("a.html", "a.json", "a.md"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of inputs, with what commands write of them on a disk."""
    made = Files.of(WORLD, tmp_path_factory.mktemp("world")).put()
    made.targets("age,0.1")
    (made.where / "out").mkdir()
    for command, (options, _) in COMMANDS.items():
        succeeded(command, *options(str(made.where)))
    return made.where


@pytest.fixture
def at(files: Path) -> Iterator[str]:
    """Yield a store in memory that holds the inputs."""
    name, there = uuid4().hex, fsspec.filesystem("memory")
    for path in (p for p in files.rglob("*") if p.is_file() and files / "out" not in p.parents):
        there.pipe_file(f"/{name}/{path.relative_to(files)}", path.read_bytes())
    yield f"memory://{name}"
    there.rm(f"/{name}", recursive=True)


def held(at: str) -> dict[str, bytes]:
    there = fsspec.filesystem("memory")
    return {path: there.cat_file(path) for path in there.find(at.removeprefix("memory:/"))}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_writes_the_same_bytes_to_a_store(files: Path, at: str, command: str) -> None:
    options, written = COMMANDS[command]
    before = held(at)
    said = succeeded(command, *options(at))
    assert f"Wrote {at}/out/" in said
    after = held(at)
    assert before.items() <= after.items()  # inputs are as they were
    found = {path.partition("/out/")[2]: text for path, text in after.items() if path not in before}
    found.pop("weights/_SUCCESS", None)
    assert found == {name: (files / "out" / name).read_bytes() for name in written}


def test_file_urls_are_paths(files: Path, tmp_path: Path) -> None:
    at = f"file://{files}"
    options = [
        word.replace(f"{at}/out", f"file://{tmp_path}") for word in COMMANDS["weights"][0](at)
    ]
    succeeded("weights", *options)
    assert contents(tmp_path / "weights").keys() == {tmp_path / "weights" / "part-000000.parquet"}
    code, _, err = fedipw("weights", *options)
    assert code == 2
    assert f"{tmp_path}/weights is there already" in err


def refused(*arguments: object) -> str:
    code, _, err = fedipw(*arguments)
    assert code == 2, err
    assert "Traceback" not in err
    return " ".join(err.split())


def test_nothing_in_a_store_is_replaced_without_force(at: str) -> None:
    options = COMMANDS["calibrate"][0](at)
    succeeded("calibrate", *options)
    before = held(at)
    assert "out/q.csv is there already: choose another name, or add" in refused(
        "calibrate", *options
    )
    succeeded("calibrate", *options, "--force")
    assert held(at) == before


def test_inputs_in_a_store_are_never_written_over(at: str) -> None:
    given = COMMANDS["weights"][0](at)[:-1]
    before = held(at)
    for out, said in {
        f"{at}/people.parquet": "is an input",
        f"{at}/rounds": "is an input",
        f"{at}/rounds/new.csv": "lies in the ledger",
        at: "holds the input",
    }.items():
        assert said in refused("weights", *given, out, "--force")
    inside = ["--metrics", f"{at}/loss.parquet", "--out", f"{at}/loss.parquet"]
    assert "is an input" in refused("evaluate", *given[:-1], *inside, "--force")
    assert held(at) == before


@pytest.mark.parametrize(
    ("option", "url", "said"),
    [
        ("--population", "{at}/none.csv", "No file {at}/none.csv."),
        ("--population", "odd://b/x.csv", "odd://b/x.csv cannot be read: ValueError: Protocol"),
        ("--rounds", "{at}/none", "No ledger directory {at}/none."),
        ("--out", "odd://b/x.csv", "odd://b/x.csv cannot be read: ValueError: Protocol"),
        ("--out", "{at}/x.txt", "{at}/x.txt: tables are .parquet"),
        ("--save-models", "{at}/models", "a directory of models is on a local disk"),
    ],
)
def test_urls_that_lead_nowhere_are_bad_input(at: str, option: str, url: str, said: str) -> None:
    before = held(at)
    given = [*COMMANDS["weights"][0](at), option, url.format(at=at)]
    assert said.format(at=at) in refused("weights", *given)
    assert held(at) == before


def test_a_directory_holds_what_one_file_would(files: Path, tmp_path: Path) -> None:
    given = COMMANDS["weights"][0](str(files))[:-1]
    succeeded("weights", *given, tmp_path / "w.parquet")
    whole = pl.read_parquet(tmp_path / "w.parquet")
    assert pl.read_parquet(files / "out" / "weights").equals(whole)
    assert whole["round"].is_sorted()
    given = COMMANDS["calibrate"][0](str(files))[:-1]
    succeeded("calibrate", *given, tmp_path / "q")
    assert pl.read_parquet(tmp_path / "q").equals(
        pl.read_csv(files / "out" / "q.csv", schema_overrides={"unit_id": pl.Int64})
    )


def test_an_audit_of_a_server_needs_its_directory(at: str) -> None:
    given = ["--training", "--rounds", f"{at}/rounds", "--out", f"{at}/t.html"]
    assert "is at a URL: a server keeps its ledger and its checkpoint" in refused("audit", *given)


def test_audits_in_a_store_are_compared(files: Path, at: str) -> None:
    succeeded("audit", *COMMANDS["audit"][0](at))
    pair = ["--compare", f"{at}/out/a.html", f"{at}/out/a.json"]
    succeeded("audit", *pair, "--out", f"{at}/both.html")
    here = ["--compare", str(files / "out" / "a.html"), str(files / "out" / "a.json")]
    succeeded("audit", *here, "--out", files / "both.html")
    assert (
        held(at)[f"{at.removeprefix('memory:/')}/both.html"] == (files / "both.html").read_bytes()
    )
