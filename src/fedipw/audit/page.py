"""Self-contained HTML pages: no network, readable on a phone, light and dark, printable.

A page that draws holds its data as JSON and one script of its own. The content security policy
allows that script by its hash and nothing else; nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import partial
from importlib.resources import files
from statistics import fmean
from typing import Any, Final, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from fedipw.numerics.checks import visible

Kind = Literal["text", "count", "number", "fixed", "share"]
Value = str | float | None

MISSING: Final = "–"
LONG: Final = 60  # rows from which a table is left out of a print, and can be searched
SHOWN_ROWS: Final = 400  # of a table, beyond which rows are shown on demand
MOST_ROUNDS: Final = 400  # shown one by one
MERGED_ROUNDS: Final = 200  # points or lines at most, where there are more
MINUS: Final = "−"
_DIGITS: Final = 3  # significant
_EXACT: Final = Context(prec=800, rounding=ROUND_HALF_UP)  # holds any float


@dataclass(frozen=True, slots=True)
class Column:
    """Head of a column, what its values are, and what the head means."""

    head: str
    kind: Kind = "number"
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A value as text, and the number it is sorted by, if it is one."""

    text: str
    key: float | None
    numeric: bool


@dataclass(frozen=True, slots=True)
class Importance:
    """Which rows of a table come first where not all are shown at once."""

    words: str  # "the largest levels"
    key: Callable[[Sequence[Value]], float]  # of a row; the largest come first


_IN_ORDER: Final = Importance("the first", lambda _: 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SortTable:
    """A table whose heads sort it; the first cell of a row is its head.

    ``rest`` are the values of further rows, which the page holds as data and shows on demand, and
    ``first`` says in words which rows come before them.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    rest: tuple[tuple[Value, ...], ...] = ()
    first: str = _IN_ORDER.words

    @property
    def size(self) -> int:
        """Number of rows, those on demand among them."""
        return len(self.rows) + len(self.rest)

    @property
    def long(self) -> bool:
        """Whether it is too long for paper."""
        return self.size > LONG


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Value]],
    importance: Importance = _IN_ORDER,
) -> SortTable:
    """Return a table of plain values, one per column.

    A table of more than 400 rows begins with the most important ones, which are shown at once.
    """
    every = list(rows)
    if len(every) > SHOWN_ROWS:
        every.sort(key=importance.key, reverse=True)  # stable: equal ones stay in order
    return SortTable(
        caption=caption,
        columns=tuple(columns),
        rows=tuple(
            tuple(_cell(value, c.kind) for value, c in zip(row, columns, strict=True))
            for row in every[:SHOWN_ROWS]
        ),
        rest=tuple(tuple(map(_plain, row)) for row in every[SHOWN_ROWS:]),
        first=importance.words,
    )


def beginning(text: str, most: int = 200) -> str:
    """Return a long text's beginning, and where the rest of it is.

    >>> beginning("age + os"), beginning("age + battery + region", most=13)
    ('age + os', 'age + battery… (22 characters, all in the JSON file)')
    """
    return (
        text
        if len(text) <= most
        else (f"{text[:most]}… ({len(text):,} characters, all in the JSON file)")
    )


def size(value: Value) -> float:
    """Return the absolute value of a number, 0 of anything else; to order rows by.

    >>> size(-2.5), size(None), size("text")
    (2.5, 0.0, 0.0)
    """
    return 0.0 if value is None or isinstance(value, str) else abs(value)


def _plain(value: Value) -> Value:
    """Return a value as data: text that can be seen, and numbers with seven digits."""
    if isinstance(value, str):
        return visible(value)
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.7g}")


def count(value: float | None) -> str:
    """Return a number of things, with commas.

    >>> count(48210), count(1864.52), count(None)
    ('48,210', '1,865', '–')
    """
    return _known(value, lambda v: _fixed(v, 0))


def fixed(value: float | None) -> str:
    """Return three decimals.

    >>> fixed(0.0454), fixed(-0.12), fixed(None)
    ('0.045', '−0.120', '–')
    """
    return _known(value, lambda v: _fixed(v, _DIGITS))


def significant(value: float | None) -> str:
    """Return three significant digits, and all digits before the point.

    >>> [significant(x) for x in (0.012345, -1864.5, 0, 1.5e-9, None)]
    ['0.0123', '−1,865', '0', '1.50e−9', '–']
    """
    return _known(value, _significant)


def tidy(value: float | None) -> str:
    """Return a number for a sentence: as `significant`, without zeros at its end.

    >>> tidy(0.01), tidy(1.9), tidy(2.0), tidy(1500)
    ('0.01', '1.9', '2', '1,500')
    """
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def share(value: float | None) -> str:
    """Return a percentage with one decimal, or two significant digits below one percent.

    >>> share(0.4554), share(0.00812), share(0), share(None)
    ('45.5%', '0.81%', '0%', '–')
    """
    return _known(value, _percent)


def options(text: str) -> Markup:
    """Return a sentence in which every option of a command is code, which no line breaks.

    >>> print(options("Merge <levels> (--lump-below), or pass --soft."))
    Merge &lt;levels&gt; (<code>--lump-below</code>), or pass <code>--soft</code>.
    """
    return Markup(_OPTION.sub(r"<code>\g<0></code>", str(escape(visible(text)))))


_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_TEXT: Final[Mapping[str, Callable[[float | None], str]]] = {
    "count": count,
    "number": significant,
    "fixed": fixed,
    "share": share,
}

TEMPLATES = Environment(
    loader=PackageLoader("fedipw.audit"),
    autoescape=True,
    finalize=lambda value: visible(value) if type(value) is str else value,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters.update(
    _TEXT,
    tidy=tidy,
    options=options,
    as_json=partial(htmlsafe_json_dumps, sort_keys=False, allow_nan=False),
)


def rendered(template: str, scripts: Sequence[str], data: Mapping[str, Any], **context: Any) -> str:
    """Return a page: a template with our style, these scripts as one, and data as JSON by id."""
    sources = "\n".join(_source(name) for name in ("core.js", "frame.js", *scripts))
    script = f"(() => {{\n'use strict';\n{sources}\n}})();"
    return TEMPLATES.get_template(template).render(
        style=Markup(_source("audit.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=data,
        **context,
    )


def rounds_a_point(rounds: int) -> int:
    """Return how many rounds in a row are shown as one, of so many in all.

    >>> rounds_a_point(400), rounds_a_point(401), rounds_a_point(2_000)
    (1, 3, 10)
    """
    return 1 if rounds <= MOST_ROUNDS else -(-rounds // MERGED_ROUNDS)


def _merged(chart: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chart whose curves have some hundred points: means of rounds in a row.

    Each curve has a point at the middle of the rounds, if it has a value in one of them; the ends
    of an interval are means of ends.
    """
    rounds = [index for curve in chart["curves"] for index in curve["round"]]
    first = min(rounds, default=0)
    each = rounds_a_point(max(rounds, default=0) - first + 1)
    if each == 1:
        return chart
    curves = []
    for curve in chart["curves"]:
        points: dict[int, list[int]] = {}
        for place, index in enumerate(curve["round"]):
            points.setdefault((index - first) // each, []).append(place)
        made = {"name": curve["name"], "round": [first + k * each + (each - 1) / 2 for k in points]}
        for key in ("value", "low", "high"):
            values = curve[key]
            made[key] = values and [_mean(values[k] for k in p) for p in points.values()]
        curves.append(made)
    caption = f"{chart['caption']} A point is the mean of {each} rounds in a row."
    return {**chart, "caption": caption, "curves": curves, "each": each}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{fmean(known):.7g}") if known else None


def chart_page(
    title: str,
    charts: Sequence[Mapping[str, Any]],
    tables: Sequence[SortTable],
    notes: Sequence[str],
    settings: Mapping[str, Any],
) -> str:
    """Return a page of charts with tables and notes below; settings are shown on demand.

    A chart has ``title``, ``caption``, ``y_label``, ``log`` and ``curves``: each with ``name``,
    ``round``, ``value`` and, or none, ``low`` and ``high``. Above 400 rounds a point is the mean of
    a few, and the caption says so.
    """
    charts = [_merged(chart) for chart in charts]
    return rendered(
        "training.html",
        ("charts.js", "training.js"),
        {"training-data": charts},
        title=title,
        charts=charts,
        tables=tables,
        notes=notes,
        settings=settings,
    )


def _source(name: str) -> str:
    return files("fedipw.audit").joinpath("templates", name).read_text(encoding="utf-8")


def _cell(value: Value, kind: Kind) -> Cell:
    if kind == "text" or isinstance(value, str):
        return Cell(text=MISSING if value in (None, "") else str(value), key=None, numeric=False)
    return Cell(text=_TEXT[kind](value), key=value, numeric=True)


def _known(value: float | None, text: Callable[[float], str]) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return text(value)


def _fixed(value: float | Decimal, digits: int) -> str:
    """Return decimals rounded half away from zero, as JavaScript's `toFixed` does."""
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-digits), context=_EXACT)
    text = f"{abs(rounded):,f}"
    return f"{MINUS}{text}" if rounded < 0 else text


def _significant(value: float, digits: int = _DIGITS) -> str:
    if value == 0:
        return "0"
    exact = Decimal(value)
    unit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    power = exact.quantize(unit, context=_EXACT).adjusted()
    if -6 <= power < 15:
        return _fixed(value, max(0, digits - 1 - power))
    mantissa = _fixed(exact.scaleb(-power, context=_EXACT), digits - 1)
    return f"{mantissa}e{MINUS if power < 0 else '+'}{abs(power)}"


def _percent(value: float) -> str:
    percent = 100.0 * value
    if percent == 0:
        return "0%"
    return f"{_fixed(percent, 1) if abs(percent) >= 1 else _significant(percent, 2)}%"
