"""What the pages of the lab share: tables of text, numbers, drawings."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fedipw.audit.page import MINUS, MISSING, Cell, Column, SortTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text: a caption, column heads, and rows whose first cell is their head."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def number(value: float | None, digits: int = 2) -> str:
    """Return a number for people: significant digits, never an exponent above a millionth.

    >>> number(0.013999), number(0.0), number(None)
    ('0.014', '0', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if value == 0 or abs(value) < 5e-7:
        return "0"
    return f"{value:.{digits}g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def inline_svg(svg: Path) -> Markup:
    """Return the drawing without its XML prologue, to stand inside a page we wrote ourselves."""
    text = svg.read_text(encoding="utf-8")
    return Markup(text[text.index("<svg") :])


def sortable(plain: Table) -> SortTable:
    """Return a table of text as one that sorts; cells that start with a number sort by it."""
    keys = [[_leading_number(text) for text in row] for row in plain.rows]
    numeric = [
        k > 0
        and all(
            key is not None or row[k].strip() in ("", MISSING)
            for row, key in zip(plain.rows, (line[k] for line in keys), strict=True)
        )
        for k in range(len(plain.heads))
    ]
    return SortTable(
        caption=plain.caption,
        columns=tuple(
            Column(head, "number" if n else "text")
            for head, n in zip(plain.heads, numeric, strict=True)
        ),
        rows=tuple(
            tuple(
                Cell(text=text, key=key if n else None, numeric=n)
                for text, key, n in zip(row, line, numeric, strict=True)
            )
            for row, line in zip(plain.rows, keys, strict=True)
        ),
    )


def _leading_number(text: str) -> float | None:
    found = re.match(r"\s*([-−+]?[\d,]*\.?\d+(?:[eE][-−+]?\d+)?)", text)
    if found is None:
        return None
    return float(found.group(1).replace(",", "").replace(MINUS, "-"))
