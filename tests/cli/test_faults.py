"""Bad disks, other writers, planted links and kills: outputs are whole or absent."""

from __future__ import annotations

import json
import os
import py_compile
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from benchmarks.faults import COMMANDS, broken, faulty, killed, left_over, write_inputs

from fedipw.cli.main import main
from fedipw.errors import InputError, NotFiniteError, UnwritableError
from fedipw.storage.atomic import write_text, written_path
from fedipw.storage.lock import claimed, locked
from fedipw.tables.table import check_results

from .command import fedipw

BY_NAME = {command.name: command for command in COMMANDS}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    write_inputs(tmp_path, clients=400, rounds=4)
    return tmp_path


@pytest.mark.parametrize("name", BY_NAME)
def test_a_full_disk_ends_in_code_2_with_nothing_left(inputs: Path, name: str) -> None:
    found = faulty(BY_NAME[name], "full disk", inputs)
    assert found["code"] == 2, found
    assert re.search(r"out/\S+ cannot be written", found["error"]), found
    assert found["left"] == []


def test_a_study_without_descriptors_keeps_its_jobs_and_goes_on_from_them(inputs: Path) -> None:
    found = faulty(BY_NAME["study"], "few descriptors", inputs)
    assert found["code"] == 2, found
    assert "out/study cannot be written: Too many open files" in found["error"]
    assert found["left"] == []
    assert sorted(path.name for path in (inputs / "out/study").iterdir()) == ["parts", "study.json"]
    BY_NAME["study"].started(inputs).communicate(timeout=300)
    assert (inputs / "out/study/index.html").exists()


def test_a_study_that_cannot_begin_leaves_no_directory(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise UnwritableError(f"{path} cannot be written: {len(text)} bytes are too many.")

    monkeypatch.setattr("fedipw.lab.study.write_text", full)
    code, _, err = fedipw("study", inputs / "study.toml", "--out", inputs / "out" / "study")
    assert code == 2, err
    assert list((inputs / "out").iterdir()) == []


def test_kills_leave_whole_outputs_and_the_next_run_cleans_up(inputs: Path) -> None:
    """A small part of ``python -m benchmarks.faults``, which kills six commands 20 times each."""
    found = killed(BY_NAME["weights"], inputs, 2)
    assert found["broken"] == []
    assert found["whole"]
    assert found["next"] == 0, found["next_error"]
    assert found["left"] == []


@pytest.mark.parametrize("name", ["weights", "audit", "calibrate", "simulate"])
def test_a_place_that_is_no_directory_is_told(inputs: Path, name: str) -> None:
    (inputs / "out").rmdir()
    (inputs / "out").write_text("a file")
    arguments = [a if not a.startswith(("out/", "people", "rounds", "targets", "scenario"))
                 else str(inputs / a) for a in BY_NAME[name].arguments]  # fmt: skip
    code, _, err = fedipw(*arguments)
    assert code == 2, err
    assert "out" in err
    assert (inputs / "out").read_text() == "a file"


def test_the_second_writer_of_an_output_is_told(inputs: Path) -> None:
    out = inputs / "out" / "c.parquet"
    given = (inputs / "people.parquet", "--targets", inputs / "targets.csv", "--out", out)
    with claimed(out, "tests"):
        code, _, err = fedipw("calibrate", *given)
    assert code == 2
    assert f"{out} is in use: process {os.getpid()} tests" in err
    assert not out.exists()
    assert fedipw("calibrate", *given)[0] == 0
    assert left_over(inputs) == []


def test_links_planted_at_names_of_ours_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".out.txt.lock").symlink_to(victim)
    with pytest.raises(InputError, match="cannot be locked"), claimed(tmp_path / "out.txt", "x"):
        pass
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".lock").symlink_to(victim)
    with pytest.raises(InputError, match="cannot be locked"), locked(tmp_path / "d", "x"):
        pass
    planted = tmp_path / ".out.txt.0000000000000000.partial"
    planted.symlink_to(victim)
    os.utime(planted, (1.0, 1.0), follow_symlinks=False)
    write_text(tmp_path / "out.txt", "ours")
    assert victim.read_text() == "precious"
    assert (tmp_path / "out.txt").read_text() == "ours"


def test_what_a_killed_writer_left_is_removed_and_what_another_writes_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "w.csv"
    dead = tmp_path / ".w.csv.0123456789abcdef.partial"
    dead.write_bytes(b"half")
    stage = tmp_path / ".w.csv-abc.partial"
    stage.mkdir()
    (stage / "part").write_bytes(b"half")
    others = tmp_path / ".v.csv.0123456789abcdef.partial"
    others.write_bytes(b"of another output")
    for made in (dead, stage, others):
        os.utime(made, (time.time() - 60, time.time() - 60))
    with written_path(path) as first:
        os.utime(first, (time.time() - 60, time.time() - 60))
        with written_path(path) as second:
            second.write_text("b")
        assert first.exists()
        first.write_text("a")
    assert path.read_text() == "a"
    assert sorted(p.name for p in tmp_path.iterdir()) == [others.name, "w.csv"]


@pytest.mark.parametrize("name", ["audit", "calibrate", "simulate"])
def test_an_output_directory_removed_while_it_runs_is_told_or_made_again(
    inputs: Path, name: str
) -> None:
    """The directory goes when the command has put its lock or its first file there."""
    found = faulty(BY_NAME[name], "removed", inputs)
    assert found["left"] == []
    if found["code"]:
        assert found["code"] == 2, found
        assert re.search(r"out/\S+ cannot be written", found["error"]), found
    else:
        assert (inputs / BY_NAME[name].output).exists()


@pytest.mark.parametrize("name", ["audit", "study"])
def test_a_full_file_system_leaves_nothing_not_even_a_lock(inputs: Path, name: str) -> None:
    found = faulty(BY_NAME[name], "full file system", inputs)
    assert found["code"] in {2, None}, found  # none where no file system may be mounted
    assert found["left"] == []


@pytest.mark.parametrize("kind", [ZeroDivisionError, EOFError])
def test_anything_unexpected_is_one_line_with_the_versions_and_a_traceback_in_a_file(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken_solver(*_: object, **__: object) -> None:
        raise kind("a bug\nof two lines")

    monkeypatch.setattr("fedipw.calibration.calibrated_table", broken_solver)
    given = (inputs / "people.parquet", "--targets", inputs / "targets.csv")
    code, out, err = fedipw("calibrate", *given, "--out", inputs / "out" / "c.csv")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "This is a bug of fedipw" in err
    assert f"{kind.__name__}: a bug" in err
    assert f"numpy {np.__version__}" in err
    found = re.search(r"traceback is in (\S+\.txt)", err)
    assert found is not None
    written = Path(found[1]).read_text()
    Path(found[1]).unlink()
    assert "Traceback (most recent call last)" in written
    assert f"{kind.__name__}: a bug" in written
    assert "broken_solver" in written
    assert list((inputs / "out").iterdir()) == []


def test_a_damaged_compiled_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file may not grow, Python gives half of a compiled module its name."""
    (tmp_path / "damaged.py").write_text("def command() -> None:\n    print('done')\n")
    compiled = Path(py_compile.compile(str(tmp_path / "damaged.py"), doraise=True) or "")
    whole = compiled.read_bytes()
    compiled.write_bytes(whole[: len(whole) // 2])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules["fedipw.cli.main"], "COMMANDS", {"example": "damaged:command"})
    code, out, err = fedipw("example")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {compiled}: a compiled module is damaged (")
    compiled.unlink()
    code, out, _ = fedipw("example")
    assert (code, out) == (0, "done\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("Unable to allocate 9 TiB"), "Memory ran out (Unable to allocate 9 TiB)"),
        (MemoryError(), "Memory ran out (no more can be had). Use a smaller table"),
        (
            OSError("Could not find/load shared object file 'x.so'. This could mean that ..."),
            "A library cannot be loaded: Could not find/load shared object file 'x.so'. Use a",
        ),
        (OSError(28, "No space left on device", "x.csv"), "x.csv: No space left on device. Free"),
        (OSError(24, "Too many open files"), "Too many open files. Too many files are open"),
        (pl.exceptions.PanicException("left == right"), "This is a bug of fedipw"),
        (NotFiniteError("w.csv", ("weight",), 3), "w.csv would hold 3 number(s)"),
    ],
)
def test_what_the_system_refuses_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    words: str,
) -> None:
    def failing(**_: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["fedipw.cli.main"], "app", failing)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (1 if "bug" in words else 2)
    message = capsys.readouterr().err
    assert words in message
    for name in re.findall(r"traceback is in (\S+\.txt)", message):
        Path(name).unlink()


def test_no_number_that_is_not_finite_is_written() -> None:
    good = pl.DataFrame({"unit_id": ["a", "b"], "weight": [0.5, None]})
    check_results(good, "w.csv")
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(NotFiniteError, match=r"w\.csv would hold 1 number\(s\).*weight"):
            check_results(good.with_columns(weight=pl.Series([0.5, value])), "w.csv")


OFFLINE = """
import socket, sys
def refused(*_, **__):
    raise OSError("the network is not to be used")
socket.socket.connect = socket.socket.connect_ex = socket.socket.bind = refused
socket.create_connection = socket.getaddrinfo = refused
import json
from fedipw.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["fedipw", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def test_commands_use_no_network(inputs: Path) -> None:
    """All in one process: what one has loaded may not use it either."""
    asked = [command.arguments for command in COMMANDS]
    ended = subprocess.run(
        [sys.executable, "-c", OFFLINE, json.dumps(asked)],
        cwd=inputs, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert all((inputs / command.output).exists() for command in COMMANDS)
    assert broken(inputs) == []
