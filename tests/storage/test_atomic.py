"""Files appear whole or not at all, whoever is killed and whoever else writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fedipw.errors import InputError
from fedipw.storage.atomic import (
    check_directory,
    check_place,
    remove_abandoned,
    write_text,
    write_texts,
    written_directory,
    written_file,
    written_path,
)
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint

KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def killed(program: str, folder: Path) -> None:
    """Run a program that kills itself, in a process of its own."""
    lines = f"import os, signal, sys\nfrom pathlib import Path\nfolder = Path({str(folder)!r})\n"
    run = subprocess.run(
        [sys.executable, "-c", lines + textwrap.dedent(program)], capture_output=True, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_at_the_end_and_with_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    with written_file(str(path)) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    assert names(tmp_path) == ["out.bin", "plain"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_former_file_and_no_temporary(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "out.bin"
    path.write_bytes(b"former")
    for written in (written_path, written_file):
        with pytest.raises(error), written(path):
            raise error
    assert path.read_bytes() == b"former"
    assert names(tmp_path) == ["out.bin"]


@pytest.mark.parametrize(
    "program",
    [
        f"""
        from fedipw.storage.atomic import written_file
        with written_file(folder / "out.txt") as file:
            file.write(b"new")
            file.flush()
            {KILL}
        """,
        f"""
        # between the flush of the file and its renaming
        from fedipw.storage import atomic
        def flushed(made):
            assert [p.read_bytes() for p in made] == [b"new"]
            {KILL}
        atomic._rename = flushed
        atomic.write_text(folder / "out.txt", "new")
        """,
        f"""
        from fedipw.storage import atomic
        def flushed(made):
            assert len(made) == 2
            {KILL}
        atomic._rename = flushed
        atomic.write_texts({{folder / "out.txt": "new", folder / "other.txt": "new"}})
        """,
    ],
)
def test_a_kill_before_the_renaming_leaves_the_former_file(tmp_path: Path, program: str) -> None:
    path = tmp_path / "out.txt"
    path.write_bytes(b"former")
    killed(program, tmp_path)
    assert path.read_bytes() == b"former"
    assert not (tmp_path / "other.txt").exists()
    left = [name for name in names(tmp_path) if name != "out.txt"]
    assert left
    assert all(name.startswith(".o") and name.endswith(".partial") for name in left)
    write_text(path, "again")  # what is left over is in nobody's way
    assert path.read_bytes() == b"again"


def test_a_kill_while_a_checkpoint_is_written_leaves_the_former_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"round": 1}, "settings")
    killed(
        f"""
        import numpy as np
        from fedipw.storage.checkpoint import save_checkpoint
        def half(file, array, **_):
            file.write(bytes(1 << 20))  # more than is held back
            {KILL}
        np.lib.format.write_array = half
        save_checkpoint(folder, {{"round": 2}}, "settings")
        """,
        tmp_path,
    )
    assert load_checkpoint(tmp_path, "settings") == {"round": 1}


def test_two_writers_have_temporaries_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with written_path(path) as one, written_path(path) as other:
        assert one != other
        assert one.parent == other.parent == tmp_path
        one.write_text("one")
        other.write_text("other")
        assert one.read_text() == "one"
    assert path.read_text() == "one"  # the last to end is the last to be written
    assert names(tmp_path) == ["out.txt"]


def test_many_processes_writing_one_file_leave_a_whole_one(tmp_path: Path) -> None:
    path, size = tmp_path / "out.txt", 200_000
    program = f"""
        from fedipw.storage.atomic import write_text
        for _ in range(30):
            write_text({str(path)!r}, sys.argv[1] * {size})
        """
    runs = [
        subprocess.Popen([sys.executable, "-c", "import sys\n" + textwrap.dedent(program), letter])
        for letter in "abc"
    ]
    while any(run.poll() is None for run in runs):
        if path.exists():
            text = path.read_text()
            assert len(text) == size
            assert len(set(text)) == 1
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert names(tmp_path) == ["out.txt"]


def test_files_and_directories_are_flushed_before_and_after_renaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, flush, replace = [], os.fsync, Path.replace

    def watched(descriptor: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        seen.append(f"rename to {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(Path, "replace", renamed)
    write_texts({tmp_path / "a.txt": "a", tmp_path / "b.txt": "b"})
    assert [name[:3] for name in seen[:2]] == [".a.", ".b."]
    assert seen[2:] == ["rename to a.txt", "rename to b.txt", tmp_path.name]


def test_texts_appear_together_or_not_at_all(tmp_path: Path) -> None:
    bad = tmp_path / "none" / "b.txt"
    with pytest.raises(InputError, match="cannot be written"):
        write_texts({tmp_path / "a.txt": "a", bad: "b"})
    assert names(tmp_path) == []


def test_the_system_s_reason_is_in_the_error(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"out cannot be written: No space left on device\."),
        written_file(tmp_path / "out"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    missing = pytest.raises(InputError, match="x cannot be written: No such file")
    with missing, written_file(tmp_path / "none" / "x"):
        pass
    (tmp_path / "t").mkdir()
    taken = pytest.raises(InputError, match="t cannot be written: Is a dir")
    with taken, written_path(tmp_path / "t"):
        pass
    assert names(tmp_path) == ["t"]
    with pytest.raises(InputError, match="it is one"):
        check_place(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="give a directory"):
        check_directory(tmp_path / "file")


def test_a_directory_s_files_move_when_all_are_there(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "first"
    with written_directory(str(out)) as stage:
        (stage / "b.txt").write_text("b")
        (stage / "a.txt").write_text("a")
        assert not out.exists()
    assert names(out) == ["a.txt", "b.txt"]

    def half() -> None:
        with written_directory(out) as stage:
            (stage / "a.txt").write_text("changed")
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        half()
    assert (out / "a.txt").read_text() == "a"
    with written_directory(out) as stage:
        (stage / "a.txt").write_text("changed")
    assert (out / "a.txt").read_text() == "changed"
    assert names(tmp_path / "runs") == ["first"]


def test_only_old_temporaries_are_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".a.12.partial", ".b.34.partial", "c.partial"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    remove_abandoned(tmp_path)
    assert names(tmp_path) == [".b.34.partial", "c.partial"]
