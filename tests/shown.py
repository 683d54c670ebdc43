"""What a page of the documentation shows, run in order: commands, Python, and what they print.

| block | what is done |
|---|---|
| ``console`` | each ``$ command`` is run, and prints the lines below it, if there are any |
| ``sh``, ``bash`` | each command is run, whatever it prints |
| ``python`` | is run; what it prints is the block ``text`` right after it, if there is one |
| ``python``, ``toml`` that begins with ``# name.py`` or so | is saved as that file |

``py`` and the directive ``{code-block} python`` are ``python`` too: no other spelling keeps code
from being run. ``...`` stands for anything, also for whole lines. A block that begins with
``# not run:`` and why is left out. Other kinds of block are not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

from cli.command import fedipw

ROOT = Path(__file__).parent.parent
NOT_RUN = "# not run: "
_BLOCK = re.compile(r"^```([\w{}-]+)[ \t]*([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_DIRECTIVES = frozenset({"{code-block}", "{code}", "{sourcecode}"})
_PYTHON = frozenset({"py", "py3", "python3"})
_OPTIONS = re.compile(r"(?::[\w-]+:[^\n]*\n)+\n?")
_FRAME = re.compile("[\u2500-\u257f]+")
_FILE = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
_COMMANDS = ("fedipw", "flwr", "make", "pip", "python")
_LOOSE = re.compile(rf" {{4,}}(?:\$ )?(?:{'|'.join(_COMMANDS)}) \S")


class Runs(Protocol):
    """What runs a command in a directory, and returns what it prints."""

    def __call__(self, command: str, folder: Path) -> str: ...


@dataclass(frozen=True)
class Block:
    """Fenced lines of a page."""

    kind: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is saved as."""
        named = _FILE.match(self.text) if self.kind in {"python", "toml"} else None
        return named[1] if named else None

    @property
    def is_run(self) -> bool:
        """Whether something is done with it."""
        if self.text.startswith(NOT_RUN):
            return False
        return self.file is not None or self.kind in {"console", "sh", "bash", "python"}

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Commands with what each prints; lines that end with a backslash go on."""
        joined = self.text.replace("\\\n", "")
        if self.kind != "console":
            lines = (line.split("  #")[0].strip() for line in joined.splitlines())
            return [(line, "") for line in lines if line and not line.startswith("#")]
        parts = re.split(r"^\$ ", joined, flags=re.MULTILINE)
        assert not parts[0].strip(), f"A console block begins with a command: {parts[0]}"
        found = [part.partition("\n") for part in parts[1:]]
        return [(command.strip(), printed.strip("\n")) for command, _, printed in found]


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in their order."""
    return [_block(*found) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def _block(kind: str, argument: str, text: str) -> Block:
    """Return a block by its language, whether a fence or a directive names it."""
    if kind in _DIRECTIVES:
        kind, text = argument.strip(), _OPTIONS.sub("", text, count=1)
    return Block("python" if kind in _PYTHON else kind, text)


def loose_commands(page: Path) -> list[str]:
    """Return commands of a page that are in no block that is run, or says why it is not."""
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(page)
    prints = {id(after) for before, after in pairwise(blocks) if before.is_run}
    plain = re.sub(r"^```\S.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    hidden = [b.text for b in blocks if b.kind == "text" and id(b) not in prints]
    hidden += re.findall(r"^```\n(.*?)^```$", plain, re.DOTALL | re.MULTILINE)
    lines = [*plain.splitlines(), *(f"    {line}" for part in hidden for line in part.splitlines())]
    return [line.strip() for line in lines if _LOOSE.match(line)]


def follow(page: Path, folder: Path, run: Runs) -> int:
    """Do in a directory what a page shows, top to bottom; return how many things it printed."""
    blocks, shared, compared = blocks_of(page), {"__name__": "__main__"}, 0
    for block, after in zip(blocks, [*blocks[1:], Block("", "")], strict=True):
        if not block.is_run:
            continue
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.kind != "python":
            for command, expected in block.commands:
                printed = run(command, folder)
                if expected:
                    assert_prints(printed, expected, command)
                    compared += 1
        else:
            printed = _printed(block.text, page.name, folder, shared)
            if after.kind == "text":
                assert_prints(printed, after.text, block.text)
                compared += 1
    return compared


def assert_prints(printed: str, expected: str, what: str) -> None:
    """Compare line by line, by words; ``...`` is anything, on a line of its own any lines.

    Lines of a table's frame are not compared: they only follow the widths of its columns.
    """
    pattern = "".join(
        r"(?:[^\n]*\n)*?"
        if line == "..."
        else r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n"
        for line in _lines(expected)
    )
    found = "".join(f"{line}\n" for line in _lines(printed))
    assert re.fullmatch(pattern, found), f"{what}\nprinted\n{printed}\nand the page has\n{expected}"


def _lines(text: str) -> list[str]:
    """Return lines with single spaces, without those of a frame."""
    lines = (" ".join(line.split()) for line in text.strip("\n").splitlines())
    return [line for line in lines if not _FRAME.fullmatch(line)]


def in_process(command: str, folder: Path) -> str:
    """Run a command: fedipw's in this process, any other in a terminal."""
    words = shlex.split(command)
    if words[0] == "fedipw" and not {"|", ">", "&&"} & set(words):
        with contextlib.chdir(folder):
            code, out, err = fedipw(*words[1:])
        assert code == 0, f"{command}\n{out}{err}"
        return out
    return in_terminal(command, folder)


def in_terminal(command: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return what a terminal of 100 columns shows of a command's output, without colours."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = {**os.environ, "PATH": paths, "TERM": "xterm", "NO_COLOR": "1"}
    shell |= {"COLUMNS": "100", "LINES": "40"}  # some environments name others
    shell.pop("PYTHONDONTWRITEBYTECODE", None)  # else every command compiles every module
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env={**shell, **(environment or {})},
            stdin=subprocess.DEVNULL, stdout=theirs, stderr=errors,
        )  # fmt: skip
        os.close(theirs)
        shown = _whole(ours).decode()
        errors.seek(0)
        assert process.wait() == 0, f"{command}\n{shown}{errors.read()}"
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown)


def _whole(terminal: int) -> bytes:
    """Return all that is written to a terminal until nobody holds it."""
    parts = []
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while part := os.read(terminal, 65536):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts)


def _printed(text: str, name: str, folder: Path, shared: dict[str, str]) -> str:
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.chdir(folder),
        patch.object(tempfile, "tempdir", str(folder)),
    ):
        exec(compile(text, name, "exec"), shared)
    return printed.getvalue()


def pages() -> list[Path]:
    """Return the README and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
