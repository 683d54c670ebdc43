"""Figures and page of a study: methods by scenarios, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fedipw.audit.style import look_of, new_figure, styled

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray

MOST_CURVES = 10  # methods that can be told apart as lines
_MOST_DOTS = 60  # seeds shown one by one
_ROW = 0.235  # inches of a method
_GREY = "#666666"
_THIN = "xP*X+"  # markers too thin for a white edge
_DECADES = 1e6  # an axis spans at most this ratio; what lies beyond is told in numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StudyView:
    """What is shown of a study: its tables, and how its parts are called."""

    title: str
    scenarios: Mapping[str, str]  # name to title
    methods: Sequence[str]
    references: Mapping[str, str]  # by scenario
    measure: str  # column of the results
    words: str  # what it is
    seeds: int
    rounds: Mapping[str, int]  # by scenario
    results: pl.DataFrame
    curves: pl.DataFrame
    summary: pl.DataFrame
    comparison: pl.DataFrame
    ranks: pl.DataFrame

    def mean(self, scenario: str, method: str) -> float | None:
        """Return the mean of a method in a scenario."""
        found = _of(self.summary, scenario, method)["mean"]
        return None if found.is_empty() else found[0]


def draw_results(directory: Path, view: StudyView) -> None:
    """Write figure.png and figure.svg: one panel per scenario, one row per method."""
    down, across = _grid(len(view.scenarios))
    high = _ROW * len(view.methods) + 0.45
    with styled():
        figure = new_figure(2.0 + _wide(across) * across, high * down + 0.6)
        axes = (
            figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel().tolist()
        )
        ends = _ends(view)
        for ax, (name, title) in zip(axes, view.scenarios.items(), strict=False):
            _dots(ax, view, name, ends)
            ax.set_title(_wrapped(title, across), loc="left", fontsize=9)
        _finish(figure, axes, len(view.scenarios), across)
        _log_ticks(axes[0], ends)
        axes[0].set_ylim(len(view.methods) - 0.4, -0.6)
        axes[0].set_yticks(range(len(view.methods)), [look_of(m).label for m in view.methods])
        figure.supxlabel(f"{_sentence(view.words)} (log scale)", fontsize=9)
        _save(figure, directory, "figure")


def draw_curves(directory: Path, view: StudyView) -> bool:
    """Write curves.png and curves.svg, unless there are too many methods to tell apart."""
    if len(view.methods) > MOST_CURVES or view.curves.is_empty():
        return False
    down, across = _grid(len(view.scenarios))
    with styled():
        columns = min(3, across + 1)
        keys = 0.19 * math.ceil(len(view.methods) / columns)
        figure = new_figure(0.9 + (_wide(across) + 0.3) * across, 2.4 * down + 0.5 + keys)
        axes = figure.subplots(down, across, squeeze=False, sharey=True).ravel().tolist()
        for ax, (name, title) in zip(axes, view.scenarios.items(), strict=False):
            _lines(ax, view, name)
            ax.set_title(_wrapped(title, across), loc="left", fontsize=9)
        _finish(figure, axes, len(view.scenarios), across)
        handles = {str(h.get_label()): h for ax in axes for h in ax.get_lines()}
        labels = [look_of(m).label for m in view.methods if look_of(m).label in handles]
        figure.legend(
            [handles[label] for label in labels],
            labels,
            loc="outside lower center",
            ncols=columns,
            handlelength=3.0,
        )
        for ax in axes[::across]:
            ax.set_ylabel("Excess target loss (log)")
        _save(figure, directory, "curves")
    return True


def _grid(panels: int) -> tuple[int, int]:
    """Return rows and columns of panels.

    >>> [_grid(n) for n in (1, 3, 4, 6, 8)]
    [(1, 1), (1, 3), (2, 2), (2, 3), (2, 4)]
    """
    across = {1: 1, 2: 2, 4: 2}.get(panels, 3 if panels <= 6 or panels == 9 else 4)
    return math.ceil(panels / across), across


def _wide(across: int) -> float:
    return {1: 4.4, 2: 3.0, 3: 2.4}.get(across, 2.05)


def _wrapped(title: str, across: int) -> str:
    """Return a title on lines that fit a panel."""
    width = int(15.5 * _wide(across))
    lines = [""]
    for word in title.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _ends(view: StudyView) -> tuple[float, float]:
    """Return the ends of the shared log axis: all means, and intervals as far as they matter."""
    means = view.summary["mean"].drop_nulls().to_numpy()
    positive = means[means > 0.0]
    if len(positive) == 0:
        return 1e-3, 1.0
    lows = view.summary["low"].drop_nulls().to_numpy()
    least = float(positive.min())
    lowest = min([least, *(x for x in lows if x > least / 10.0)])
    highest = max([float(positive.max()), *view.summary["high"].drop_nulls()])
    return lowest / 1.6, min(highest, least * _DECADES) * 1.6


def _dots(ax: Axes, view: StudyView, scenario: str, ends: tuple[float, float]) -> None:
    ax.set_xscale("log", nonpositive="clip")
    ax.set_xlim(*ends)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    reference = view.mean(scenario, view.references[scenario])
    if reference is not None and reference > 0.0:
        ax.axvline(reference, color=_GREY, lw=0.8, ls=(0, (4, 3)), zorder=1)
    for row, method in enumerate(view.methods):
        if row % 2 == 0:
            ax.axhspan(row - 0.5, row + 0.5, color="#000000", alpha=0.035, lw=0, zorder=0)
        _dot(ax, view, (scenario, method), row, ends)


def _dot(
    ax: Axes, view: StudyView, who: tuple[str, str], row: int, ends: tuple[float, float]
) -> None:
    found = _of(view.summary, *who)
    if found.is_empty():
        return
    line, look = found.row(0, named=True), look_of(who[1])
    seeds = _of(view.results, *who)[view.measure].drop_nulls().to_numpy()
    inside = seeds[(seeds > ends[0]) & (seeds < ends[1])]
    if view.seeds <= _MOST_DOTS:
        below = np.full(len(inside), row + 0.27)
        ax.scatter(inside, below, s=6, c=look.colour, alpha=0.35, lw=0)
    mean = line["mean"]
    if mean is not None and 0.0 < mean < ends[1]:
        if line["low"] is not None:
            span = [max(line["low"], ends[0]), min(line["high"], ends[1])]
            ax.plot(span, [row, row], color=look.colour, lw=1.6, zorder=3)
        edge = look.colour if look.marker in _THIN else "white"
        ax.plot(mean, row, look.marker, color=look.colour, ms=6, mec=edge, mew=0.7, zorder=4)
    beyond = f"{mean:.1g} →" if mean is not None and mean >= ends[1] else ""
    failed = f"{line['failures']} of {view.seeds} failed" if line["failures"] else ""
    if beyond or failed:
        _remark(ax, ", ".join(filter(None, (beyond, failed))), row)


def _remark(ax: Axes, text: str, row: int) -> None:
    ax.annotate(
        text,
        (1.0, row),
        xycoords=ax.get_yaxis_transform(),
        xytext=(-3, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=7,
        color="#A03000",
        bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 0.6},
        zorder=5,
    )


def _lines(ax: Axes, view: StudyView, scenario: str) -> None:
    for k, method in enumerate(view.methods):
        part = _of(view.curves, scenario, method)
        if part.is_empty():
            continue
        look = look_of(method)
        middle = part.group_by("round").agg(pl.col("excess_loss").median()).sort("round")
        x, y = middle["round"].to_numpy(), middle["excess_loss"].to_numpy()
        ax.plot(
            x,
            np.where(y > 0.0, y, np.nan),
            look.line,
            color=look.colour,
            lw=1.4,
            marker=look.marker,
            ms=4,
            markevery=_marked(x, k / len(view.methods)),
            label=look.label,
        )
    ax.set_yscale("log")
    ax.set_xlabel("Communication round")
    ax.margins(x=0.02)


def _marked(x: FloatArray, share: float) -> list[int]:
    """Return places of markers, moved along so that those of other methods lie elsewhere."""
    wanted = x[-1] * (np.arange(4) + share) / 4.0
    return sorted({int(np.argmin(np.abs(x - w))) for w in wanted})


def _finish(figure: Figure, axes: Sequence[Axes], used: int, across: int) -> None:
    """Hide panels that are not used, and give the axis back to those above them."""
    for k, ax in enumerate(axes):
        if k >= used:
            ax.set_axis_off()
        elif k + across >= used:
            ax.tick_params(labelbottom=True)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(w_pad=0.06, h_pad=0.05)  # type: ignore[call-arg]


def _log_ticks(ax: Axes, ends: tuple[float, float]) -> None:
    decades = math.log10(ends[1] / ends[0])
    if decades > 5.0:
        ax.xaxis.set_major_locator(LogLocator(numticks=5))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _save(figure: Figure, directory: Path, name: str) -> None:
    figure.savefig(directory / f"{name}.png", dpi=180)
    figure.set_layout_engine("none")  # it is laid out; once is enough
    figure.savefig(directory / f"{name}.svg", metadata={"Date": None})


def _of(frame: pl.DataFrame, scenario: str, method: str) -> pl.DataFrame:
    return frame.filter((pl.col("scenario") == scenario) & (pl.col("method") == method))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
