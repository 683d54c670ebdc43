"""Tables: whole and with tabs in a pipe, never cut to another number on a terminal."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from fedipw.cli import terminal

NUMBERS = ("0.000728431", "-1.5e-05", "12345.6")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, width: int, table: Table) -> str:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(terminal, "_console", Console(file=screen, width=width, color_system=None))
    terminal.out.print(table, rows=3, grouped=True)
    return screen.getvalue()


def example(rows: int = 3) -> Table:
    table = Table("group", "estimate", "standard error", "effective n", title="A [b]title[/b]")
    for k in range(rows):
        table.add_row("region = Île-de-France \\[north]", *(NUMBERS[(j + k) % 3] for j in range(3)))
    return table


def test_a_pipe_gets_every_cell_between_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    table = example(rows=5)
    table.add_row("a\tb\x1b[31m\nc", "1", "2", "3")
    terminal.out.print(table, rows=3, grouped=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# A title"
    cells = [line.split("\t") for line in lines[1:]]
    assert cells[0] == ["group", "estimate", "standard error", "effective n"]
    assert cells[1] == ["region = Île-de-France [north]", *NUMBERS]
    assert len(cells) == 7
    assert {len(row) for row in cells} == {4}
    assert cells[-1][0] == r"a\tb\x1b[31m\nc"


@pytest.mark.parametrize("width", range(12, 121, 4))
def test_a_terminal_of_any_width_cuts_no_number(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    text = shown(monkeypatch, width, example())
    drawn = [line for line in text.splitlines() if line.startswith(("┃", "│", "┏", "└"))]
    assert drawn
    assert max(map(len, drawn)) <= width
    assert "…" not in text
    heads = ["estimate", "standard error", "effective n"]
    gone = next((line for line in text.splitlines() if line.startswith("Too narrow")), "")
    left = [head for head in heads if head not in gone]
    assert left == heads[: len(left)]  # those on the right go first
    for k in range(len(left)):  # each of the numbers stands in each column that is left
        assert all(text.count(number) >= k + 1 for number in NUMBERS)


def test_a_wide_terminal_shows_all_columns_and_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, 120, example(rows=5))
    assert "Too narrow" not in text
    assert text.count("region = Île-de-France [north]") == 1  # the same group is named once
    assert "... and 2 more rows" in text


def test_numbers_are_told_from_texts() -> None:
    column = terminal._Column("p", ("<0.0001", "12%", "–", "", "1e-7"), right=False)
    assert not column.is_text
    assert replace(column, cells=("os = ios", "1")).is_text
    assert not replace(column, cells=("os = ios",), right=True).is_text
