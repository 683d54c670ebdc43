"""Habits of the command line: help, version, completion, quiet and verbose, and --force."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from fedipw.cli.main import COMMANDS, app
from fedipw.cli.terminal import manner, notice, say
from fedipw.errors import FedIPWWarning
from worlds import World

from .command import Files, contents, fedipw, succeeded

WORLD = World(size=200, rounds=3, seed=5, covariates=("age",), changing=(), metric=pl.col("age"))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files.of(WORLD, tmp_path).put()
    made.targets("age,0.1")
    return made


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedipw", *arguments],
        check=False, capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip


def test_python_runs_the_package_and_has_its_name() -> None:
    done = process("--version")
    assert (done.returncode, done.stdout) == (0, f"fedipw {version('fedipw')}\n")
    assert "Usage: fedipw " in process("weights", "--wrong").stderr


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_both_words_for_help_say_the_same(command: str) -> None:
    given = [command] if command else []
    short, long = fedipw(*given, "-h"), fedipw(*given, "--help")
    assert short == long
    assert short[0] == 0
    assert "…" not in short[1]  # nothing is cut
    assert "..." not in short[1].replace("[ARGS]...", "")
    if command:
        for option in ("--quiet", "--verbose", "-q", "-v", "-h"):
            assert option in short[1]


def test_the_shell_completes_commands_and_options() -> None:
    script = process("--show-completion", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert script.returncode in {0, 2}, script.stderr
    named = process("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert named.returncode == 0, named.stderr
    assert "_FEDIPW_COMPLETE=complete_bash" in named.stdout
    runner = CliRunner()
    for words, expected in (("fedipw ev", "evaluate"), ("fedipw audit --comp", "--compare")):
        done = runner.invoke(
            app, [], prog_name="fedipw",
            env={"_FEDIPW_COMPLETE": "complete_bash", "COMP_WORDS": words,
                 "COMP_CWORD": str(len(words.split()) - 1)},
        )  # fmt: skip
        assert done.output.split() == [expected]


OUTPUTS: dict[str, Callable[[Files], list[object]]] = {
    "weights": lambda f: [*f.given(), "--save-models", f.where / "models"],
    "evaluate": lambda f: [*f.given(), "--metrics", f.where / "loss.parquet"],
    "audit": lambda f: [*f.given(), "--json", f.where / "more.json"],
    "calibrate": lambda f: [f.where / "enrolled.parquet", "--targets", f.where / "targets.csv"],
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_nothing_is_written_over_without_force(files: Files, command: str) -> None:
    out = files.where / ("page.html" if command == "audit" else "out.csv")
    given = (command, *OUTPUTS[command](files), "--out", out)
    assert "--force" not in fedipw(*given)[2]
    before = contents(files.where)
    code, _, error = fedipw(*given)
    assert code == 2
    assert f"{out} is there already" in error or "models is there already" in error
    assert "--force" in error
    assert contents(files.where) == before
    kept = out.read_bytes()
    out.write_text("another")
    code, _, error = fedipw(*given, "--force")
    assert code == 0, error
    assert f"notice: {out} is there already and will be replaced" in error
    assert out.read_bytes() == kept


def test_a_second_output_and_a_link_are_not_written_over_either(files: Files) -> None:
    (files.where / "more.json").write_text("mine")
    out = files.where / "page.html"
    given = ("audit", *files.given(), "--json", files.where / "more.json", "--out", out)
    assert "more.json is there already" in fedipw(*given)[2]
    (files.where / "more.json").unlink()
    out.symlink_to(files.where / "nowhere")
    assert "page.html is there already" in fedipw(*given)[2]
    assert not (files.where / "more.json").exists()


def test_quiet_leaves_results_and_errors(files: Files) -> None:
    given = ("evaluate", *files.given(), "--metrics", files.where / "loss.parquet")
    said, table = succeeded(*given), succeeded(*given, "-q")
    assert "Weighting moves the mean" in said
    assert said.startswith(table)
    assert all(line.count("\t") == 7 for line in table.splitlines())
    assert succeeded(*given, "-q", "--json") == succeeded(*given, "--json")
    code, out, error = fedipw(*given, "-q", "--confidence", "2")
    assert (code, out) == (2, "")
    assert "--confidence lies between 0 and 1" in error
    audited = ("audit", *files.given(), "--out", files.where / "a.html", "--quiet")
    assert fedipw(*audited) == (0, "", "")
    assert (files.where / "a.html").exists()
    assert fedipw(*audited, "--force") == (0, "", "")


def test_verbose_adds_versions_and_times(files: Files) -> None:
    given = ("weights", *files.given(), "--out", files.where / "w.csv")
    code, out, error = fedipw(*given, "-v")
    assert code == 0
    assert f"fedipw {version('fedipw')}, numpy {version('numpy')}" in error
    assert "s of CPU" in error
    assert "CPU" not in out


def test_warnings_of_libraries_are_counted_or_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def warned(*, quiet: bool = False, verbose: bool = False) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with manner(quiet=quiet, verbose=verbose):
                warnings.warn("of a library\nin two lines", DeprecationWarning, stacklevel=1)
                warnings.warn("row 3 is odd", FedIPWWarning, stacklevel=1)
        return capsys.readouterr().err

    few = warned().splitlines()
    assert few == [
        "notice: row 3 is odd",
        "1 warning(s) of libraries were not shown; -v shows them.",
    ]
    much = warned(verbose=True)
    assert "DeprecationWarning (cli/test_habits.py:" in much
    assert "of a library in two lines" in much
    assert warned(quiet=True) == ""
    say("again")
    notice("and again")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("again\n", "and again\n")


def test_options_of_every_command_go_with_a_comparison(files: Files) -> None:
    for name in ("one", "two"):
        made = ("--out", files.where / f"{name}.html", "--json", files.where / f"{name}.json")
        succeeded("audit", *files.given(), *made)
    out = files.where / "change.html"
    pair = ("--compare", files.where / "one.json", files.where / "two.json")
    assert fedipw("audit", *pair, "--out", out, "-q", "--force") == (0, "", "")


FIRST = {  # what a command needs before it reads anything
    "weights": "fedipw.cli.weights fedipw.weighting.replay fedipw.weighting.settings",
    "evaluate": "fedipw.cli.evaluate fedipw.evaluation.evaluate fedipw.evaluation.logged",
    "audit": "fedipw.cli.audit fedipw.audit.gather fedipw.audit.verdict fedipw.audit.pages",
    "calibrate": "fedipw.cli.calibrate fedipw.calibration fedipw.tables.targets",
    "example": "fedipw.cli.example fedipw.example_world",
    "simulate": "fedipw.lab.commands fedipw.lab.config fedipw.lab.simulate",
    "reproduce": "fedipw.lab.commands fedipw.lab.figure1",
    "study": "fedipw.lab.commands fedipw.lab.study fedipw.lab.study_file",
}
SLOW = ("sklearn", "scipy.stats", "scipy.optimize", "matplotlib", "pandas", "distributed", "jax")


@pytest.mark.parametrize("command", FIRST)
def test_a_command_starts_without_what_is_slow_to_load(command: str) -> None:
    """These took more than half of a command's start; each is loaded where it is first used."""
    code = (
        "import importlib, sys\n"
        f"for name in {FIRST[command].split()!r}: importlib.import_module(name)\n"
        f"print([name for name in {SLOW!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_weights_without_a_classifier_never_load_scikit_learn(files: Files) -> None:
    given = ["weights", *map(str, files.given()), "--out", str(files.where / "w.csv")]
    code = (
        "import sys; from fedipw.cli import main\n"
        f"sys.argv[1:] = {given!r}\n"
        "try: main()\n"
        f"finally: print([name for name in {SLOW[:4]!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("[]\n")
