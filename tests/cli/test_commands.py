"""The commands as a user runs them: exit codes, files, a real process killed and resumed."""

import json
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import polars as pl
import pytest

from .command import fedipw

COMMAND = [sys.executable, "-c", "from fedipw.cli import main; main()"]
SCENARIO = """
seed = 2
rounds = {rounds}
methods = ["fedavg", "participation-only", "fedipw", "oracle"]
[population]
size = 300
[training]
local_steps = 2
step_size = 0.2
batch_size = 10
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO.format(rounds=40))
    return path


def test_simulate_writes_history_summary_and_page(config: Path, tmp_path: Path) -> None:
    code, printed, error = fedipw("simulate", config, "--out", tmp_path / "run", "--json")
    assert code == 0, error
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert json.loads(printed) == saved
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {"checkpoint", "history.parquet", "index.html", "summary.json"}
    history = pl.read_parquet(tmp_path / "run" / "history.parquet")
    assert history.height == 4 * 40
    last = history.filter((pl.col("method") == "fedipw") & (pl.col("round") == 40))
    assert last["excess_loss"][0] == saved["methods"]["fedipw"]["excess_loss"]
    for row in saved["methods"].values():
        assert abs(sum(row["errors"].values()) - row["excess_loss"]) < 1e-12
        bound = row["theory"]["bound"]
        terms = ("transient", "variance", "drift", "floor")
        assert abs(sum(bound[t] for t in terms) - bound["total"]) < 1e-9 * bound["total"]
        assert "outside the theorem: effective step" in bound["statement"]
    oracle = saved["methods"]["oracle"]["theory"]["weight_error"]
    assert oracle["raw"] < 1e-9
    assert 2 * saved["theory"]["efficiency_bound"] < saved["theory"]["lottery_term"]
    assert saved["theory"]["constants"]["grades"]["smoothness"] == "exact"


def test_simulate_prints_the_errors_and_what_the_theorem_says(config: Path, tmp_path: Path) -> None:
    code, printed, error = fedipw("simulate", config, "--out", tmp_path / "run")
    assert code == 0, error
    for words in ("optimisation", "lottery", "bias", "Oracle IPW: outside the theorem"):
        assert words in printed
    said = " ".join(printed.split())
    assert "no regular weighting that is consistent for the target under selection" in said
    assert "such as participation-only, can lie below it" in said


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    config = tmp_path / "scenario.toml"
    config.write_text(SCENARIO.format(rounds=400))  # a checkpoint every 20
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert fedipw("simulate", config, "--out", whole)[0] == 0
    process = subprocess.Popen(
        [*COMMAND, "simulate", str(config), "--out", str(killed)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    saved = killed / "checkpoint" / "checkpoint.npz"
    while not saved.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved.exists()
    assert not (killed / "summary.json").exists()  # killed before it was done

    code, _, error = fedipw("simulate", config, "--out", killed)
    assert code == 2
    assert "unfinished run" in error
    assert "--resume" in error

    code, _, error = fedipw("simulate", config, "--out", killed, "--resume")
    assert code == 0, error
    for name in ("history.parquet", "summary.json", "index.html"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def test_resuming_under_other_settings_is_refused(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert fedipw("simulate", config, "--out", out)[0] == 0
    config.write_text(config.read_text().replace("seed = 2", "seed = 3"))
    code, _, error = fedipw("simulate", config, "--out", out, "--resume")
    assert code == 2
    assert "other settings" in error


def test_nothing_to_resume(config: Path, tmp_path: Path) -> None:
    code, _, error = fedipw("simulate", config, "--out", tmp_path / "none", "--resume")
    assert code == 2
    assert "Nothing to resume" in error


def test_bad_input_is_exit_code_two_without_a_traceback_or_output(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("[enrollment]\nstrenght = 1.0\n")
    code, _, error = fedipw("simulate", config, "--out", tmp_path / "out")
    assert code == 2
    assert "[enrollment] unknown key 'strenght'; did you mean 'strength'?" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()
    for arguments in (["simulate"], ["reproduce", "--seeds", "many"], ["dance"]):
        assert fedipw(*arguments)[0] == 2


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    code, _, error = fedipw("reproduce", "--out", tmp_path / "out", "--seeds", "1", "--rounds", "3")
    assert code == 2
    assert "is a file; give a directory" in error
    assert (tmp_path / "out").read_text() == "mine"


def test_reproduce_prints_a_table_and_where_the_page_is(tmp_path: Path) -> None:
    code, printed, error = fedipw(
        "reproduce", "--out", tmp_path / "out", "--seeds", 1, "--rounds", 20, "--workers", 1
    )
    assert code == 0, error
    assert "Participation-only IPW" in printed
    assert "three parts" in printed
    assert str(tmp_path / "out" / "index.html") in printed
    for text in (printed, (tmp_path / "out" / "index.html").read_text()):
        assert re.search(r"regular\s+weighting\s+that\s+is\s+consistent", text)


@pytest.mark.parametrize("command", ["reproduce", "simulate"])
def test_help_has_an_example(command: str) -> None:
    code, printed, _ = fedipw(command, "--help")
    assert code == 0
    assert f"fedipw {command}" in printed
    assert "Example" in printed


def test_version() -> None:
    assert fedipw("--version") == (0, f"fedipw {version('fedipw')}\n", "")


def test_a_mistyped_command_names_the_nearest_once() -> None:
    code, _, error = fedipw("simulat")
    assert code == 2
    assert error.count("Did you mean 'simulate'?") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["simulate", "--help"], ["weights", "--help"]])
def test_help_is_given_without_loading_the_lab(arguments: list[str]) -> None:
    """The help of every command, the lab's too, needs neither its engine nor its plots."""
    script = (
        "import atexit, sys; from fedipw.cli import main\n"
        "heavy = ('numba', 'polars', 'matplotlib', 'fedipw.lab.engine', 'fedipw.lab.scenario')\n"
        "atexit.register(lambda: print('loaded', [m for m in heavy if m in sys.modules]))\n"
        f"sys.argv[1:] = {arguments!r}; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "loaded []" in done.stdout


def test_help_lists_every_command_with_its_first_line() -> None:
    code, printed, _ = fedipw("--help")
    assert code == 0
    for name in ("reproduce", "simulate", "calibrate", "weights", "evaluate", "audit", "study"):
        assert f" {name} " in printed
    assert "Run methods by scenarios by seeds, and compare them." in printed
