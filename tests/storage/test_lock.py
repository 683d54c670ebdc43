"""One writer at a time, and never a lock that outlives its holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.storage.lock import locked
from fedipw.tables import Ledger

HOLDER = """
import sys
from pathlib import Path
from fedipw.storage.lock import locked
with locked(sys.argv[1], "trains a model"):
    print("held", flush=True)
    sys.stdin.read()
print("released", flush=True)
"""


@contextmanager
def held_elsewhere(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold a directory in another process."""
    run = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    try:
        assert run.stdout.readline() == "held\n"
        yield run
    finally:
        run.kill()
        run.communicate()


def test_a_second_process_is_told_of_the_first(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as holder:
        for _ in range(2):  # asking does not take it from the holder
            with (
                pytest.raises(InputError, match=f"process {holder.pid} trains a model"),
                locked(tmp_path, "asks"),
            ):
                pass
        holder.communicate(input="")  # its block ends
    with locked(tmp_path, "asks"):
        assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_holder_holds_no_more(tmp_path: Path, sign: signal.Signals) -> None:
    with held_elsewhere(tmp_path) as holder:
        holder.send_signal(sign)
        assert holder.wait() == -sign
        assert (tmp_path / ".lock").exists()
        with locked(tmp_path, "asks"):
            assert f"process {os.getpid()} asks" in (tmp_path / ".lock").read_text()


def test_a_second_use_in_one_process_is_an_error_not_a_deadlock(tmp_path: Path) -> None:
    with (
        locked(tmp_path, "writes first"),
        pytest.raises(InputError, match=f"process {os.getpid()} writes first"),
        locked(str(tmp_path), "writes again"),
    ):
        pass
    with locked(tmp_path, "writes later"):
        pass


def test_an_error_inside_releases_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), locked(tmp_path, "fails"):
        raise ValueError("inside")
    with locked(tmp_path, "asks"):
        pass


def test_at_most_one_of_many_threads_holds_it(tmp_path: Path) -> None:
    inside, most, refused = [0], [0], [0]

    def work() -> None:
        for _ in range(300):
            try:
                with locked(tmp_path, "counts"):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    inside[0] -= 1
            except InputError:
                refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert refused[0] < 1200


def test_no_such_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be locked"), locked(tmp_path / "none", "asks"):
        pass


def some_round() -> pl.DataFrame:
    return pl.DataFrame({"unit_id": [1, 2], "invited": [True, True], "replied": [True, False]})


def test_a_ledger_has_one_writer(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.writing() as writer:
        writer.append(1, some_round())
        with pytest.raises(InputError, match="writes the ledger"):
            ledger.append(2, some_round())
        writer.append(2, some_round())
        assert ledger.read(2).height == 2  # readers ask nobody
    ledger.append(3, some_round())
    with held_elsewhere(tmp_path), pytest.raises(InputError, match="trains a model"):
        ledger.append(4, some_round())
    assert ledger.rounds == (1, 2, 3)
