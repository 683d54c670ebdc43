"""Pages of the lab: tables of text, the paper's figure, and a simulated training run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from markupsafe import Markup

from fedipw.audit.page import MINUS, MISSING, TEMPLATES, Cell, Column, SortTable, rendered
from fedipw.lab.style import look_of


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


def training_page(
    title: str,
    curves: Sequence[Mapping[str, Any]],
    tables: Sequence[Table],
    notes: Sequence[str],
    settings: Mapping[str, Any],
) -> str:
    """Return the page of a training run.

    Parameters
    ----------
    title
        Of the page.
    curves
        Charts, each with ``curves`` (a list of ``name``, ``round``, ``value`` and, or none, ``low``
        and ``high``), ``y_label``, ``log``, and, if wanted, ``title`` and ``caption``.
    tables, notes
        Below the charts.
    settings
        Shown on demand.
    """
    charts = [
        {
            "title": chart.get("title", chart["y_label"]),
            "caption": chart.get("caption", ""),
            **chart,
        }
        for chart in curves
    ]
    return rendered(
        "training.html",
        ("charts.js", "training.js"),
        {"training-data": charts},
        title=title,
        charts=charts,
        tables=[sortable(t) for t in tables if t.rows],
        notes=notes,
        settings=settings,
    )


def figure_page(
    svg: Path, summary: pl.DataFrame, errors: pl.DataFrame, manifest: Mapping[str, Any]
) -> str:
    """Return the page of ``fedipw reproduce``: figure, tables, settings."""
    every = (
        _panel_b(summary),
        _over_rounds(summary, "A"),
        _over_rounds(summary, "C"),
        _panel_d(summary),
        _errors(errors),
    )
    tables = [t for t in every if t.rows]
    return TEMPLATES.get_template("figure.html").render(
        title="fedipw: federated learning under two-stage selection",
        svg=inline_svg(svg),
        tables=tables,
        manifest=manifest,
        seeds=manifest["settings"]["seeds"],
        rounds=manifest["settings"]["rounds"],
        panels=manifest["settings"]["panels"],
    )


def _panel_b(summary: pl.DataFrame) -> Table:
    part = summary.filter(pl.col("panel") == "B")
    caption = (
        "Panel B. Excess target loss in thousandths, mean over the last 20% of rounds and over "
        "seeds (± one standard error), by enrollment strength"
    )
    return _by_method(part, caption, "s = {:g}", part["x"].unique().sort().to_list())


def _panel_d(summary: pl.DataFrame) -> Table:
    part = summary.filter(pl.col("panel") == "D")
    caption = (
        "Panel D. Excess target loss in thousandths of each method's limit, mean over seeds (± one "
        "standard error), by noise of the population moments in standard deviations; in brackets "
        "the draws no weights could meet, which are left out; all levels are in summary.csv"
    )
    levels = [x for x in part["x"].unique().sort() if x in (0.0, 0.1, 0.2, 0.5, 1.0)]
    return _by_method(part, caption, "{:g}", levels)


def _over_rounds(summary: pl.DataFrame, panel: str) -> Table:
    part = summary.filter(pl.col("panel") == panel)
    caption = (
        f"Panel {panel}. Excess target loss in thousandths of the model after a round, mean over "
        "seeds (± one standard error)"
    )
    last = part["x"].to_list()[-1:]
    rounds = [*(x for x in (1.0, 10.0, 100.0, 300.0) if last and x < last[0]), *last]
    return _by_method(part, caption, "round {:g}", rounds)


def _by_method(part: pl.DataFrame, caption: str, head: str, points: Sequence[float]) -> Table:
    """Return mean and standard error at these points, one row per method."""
    return Table(
        caption=caption,
        heads=["Method", *(head.format(x) for x in points)],
        rows=[
            [look_of(m).label, *(_mean_se(part, m, x) for x in points)]
            for m in part["method"].unique(maintain_order=True)
        ],
    )


def _mean_se(part: pl.DataFrame, method: str, x: float) -> str:
    row = part.filter((pl.col("method") == method) & (pl.col("x") == x)).row(0, named=True)
    lost = f" ({row['infeasible']})" if row["infeasible"] else ""
    if row["mean"] is None:
        return f"–{lost}"
    if row["sd"] is None:
        return f"{1e3 * row['mean']:.2f}{lost}"
    return f"{1e3 * row['mean']:.2f} ± {1e3 * row['sd'] / row['n'] ** 0.5:.2f}{lost}"


def _errors(errors: pl.DataFrame) -> Table:
    part = errors.filter(pl.col("strength") == 1.0)
    columns = ("excess_loss", "optimisation", "lottery", "bias")
    means = part.group_by("method", maintain_order=True).agg(pl.col(columns).mean())
    return Table(
        caption="The last model's excess loss (thousandths) in its three parts, mean over seeds, "
        "at strength 1: "
        "optimisation (rounds and averaging remove it), enrollment lottery (one draw of who "
        "enrolled; no number of rounds removes it), bias (wrong or missing correction)",
        heads=["Method", "excess loss", "optimisation", "lottery", "bias"],
        rows=[
            [look_of(row["method"]).label, *(f"{1e3 * row[c]:.2f}" for c in columns)]
            for row in means.iter_rows(named=True)
        ],
    )
