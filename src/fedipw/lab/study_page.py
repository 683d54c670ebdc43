"""Figures and page of a study: methods by scenarios, with intervals over seeds, and failures."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fedipw.audit.page import TEMPLATES
from fedipw.lab.pages import Table, inline_svg, number
from fedipw.lab.style import look_of, new_figure, styled

if TYPE_CHECKING:
    from fedipw.lab.comparison import StudyTables
    from fedipw.numerics import FloatArray

MOST_CURVES = 10  # methods that can be told apart as lines
_MOST_DOTS = 60  # seeds shown one by one
_ROW = 0.235  # inches of a method
_GREY = "#666666"
_THIN = "xP*X+"  # markers too thin for a white edge
_DECADES = 1e6  # an axis spans at most this ratio; what lies beyond is told in numbers
_PARTS = ("optimisation", "lottery", "bias")
_COMPARED = (
    "difference", "95% interval", "ratio", "95% interval", "better in", "p (Holm)", "verdict",
)  # fmt: skip
_NONE = "–"


def draw_results(directory: Path, found: StudyTables) -> None:
    """Write figure.png and figure.svg: one panel per scenario, one row per method."""
    down, across = _grid(len(found.study.titles))
    methods, ends = found.study.methods, _ends(found)
    high = _ROW * len(methods) + 0.45
    with styled():
        figure = new_figure(2.0 + _wide(across) * across, high * down + 0.6)
        axes = _panels(figure, found, lambda ax, name: _dots(ax, found, name, ends), sharex=True)
        _log_ticks(axes[0], ends)
        axes[0].set_ylim(len(methods) - 0.4, -0.6)
        axes[0].set_yticks(range(len(methods)), [look_of(m).label for m in methods])
        figure.supxlabel(f"{_sentence(found.study.measure.words)} (log scale)", fontsize=9)
        _save(figure, directory, "figure")


def draw_curves(directory: Path, found: StudyTables) -> bool:
    """Write curves.png and curves.svg, unless there are too many methods to tell apart."""
    if len(found.study.methods) > MOST_CURVES or found.curves.is_empty():
        return False
    down, across = _grid(len(found.study.titles))
    with styled():
        columns = min(3, across + 1)
        keys = 0.19 * math.ceil(len(found.study.methods) / columns)
        figure = new_figure(0.9 + (_wide(across) + 0.3) * across, 2.4 * down + 0.5 + keys)
        axes = _panels(figure, found, lambda ax, name: _lines(ax, found, name), sharex=False)
        handles = {str(h.get_label()): h for ax in axes for h in ax.get_lines()}
        labels = [look_of(m).label for m in found.study.methods if look_of(m).label in handles]
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
    """Return a title on lines that fit a panel, broken between words alone."""
    width = int(15.5 * _wide(across))
    words = " ".join(title.split())
    return textwrap.fill(words, width, break_long_words=False, break_on_hyphens=False)


def _ends(found: StudyTables) -> tuple[float, float]:
    """Return the ends of the shared log axis: all means, and intervals as far as they matter."""
    means = found.summary["mean"].drop_nulls().to_numpy()
    positive = means[means > 0.0]
    if len(positive) == 0:
        return 1e-3, 1.0
    lows = found.summary["low"].drop_nulls().to_numpy()
    least = float(positive.min())
    lowest = min([least, *(x for x in lows if x > least / 10.0)])
    highest = max([float(positive.max()), *found.summary["high"].drop_nulls()])
    return lowest / 1.6, min(highest, least * _DECADES) * 1.6


def _dots(ax: Axes, found: StudyTables, scenario: str, ends: tuple[float, float]) -> None:
    ax.set_xscale("log", nonpositive="clip")
    ax.set_xlim(*ends)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    reference = _of(found.summary, scenario, found.study.references[scenario])["mean"]
    for mean in reference.filter(reference > 0.0):
        ax.axvline(mean, color=_GREY, lw=0.8, ls=(0, (4, 3)), zorder=1)
    for row, method in enumerate(found.study.methods):
        if row % 2 == 0:
            ax.axhspan(row - 0.5, row + 0.5, color="#000000", alpha=0.035, lw=0, zorder=0)
        _dot(ax, found, (scenario, method), row, ends)


def _dot(
    ax: Axes, found: StudyTables, who: tuple[str, str], row: int, ends: tuple[float, float]
) -> None:
    mine = _of(found.summary, *who)
    if mine.is_empty():
        return
    line, look = mine.row(0, named=True), look_of(who[1])
    seeds = _of(found.results, *who)[found.study.measure.column].drop_nulls().to_numpy()
    inside = seeds[(seeds > ends[0]) & (seeds < ends[1])]
    if len(found.study.seeds) <= _MOST_DOTS:
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
    failed = f"{line['failures']} of {len(found.study.seeds)} failed" if line["failures"] else ""
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


def _lines(ax: Axes, found: StudyTables, scenario: str) -> None:
    for k, method in enumerate(found.study.methods):
        part = _of(found.curves, scenario, method)
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
            markevery=_marked(x, k / len(found.study.methods)),
            label=look.label,
        )
    ax.set_yscale("log")
    ax.set_xlabel("Communication round")
    ax.margins(x=0.02)


def _marked(x: FloatArray, share: float) -> list[int]:
    """Return places of markers, moved along so that those of other methods lie elsewhere."""
    wanted = x[-1] * (np.arange(4) + share) / 4.0
    return sorted({int(np.argmin(np.abs(x - w))) for w in wanted})


def _panels(
    figure: Figure, found: StudyTables, draw: Callable[[Axes, str], None], *, sharex: bool
) -> list[Axes]:
    """Draw a panel per scenario; those not used are hidden, and those above get their axis."""
    titles = list(found.study.titles.items())
    down, across = _grid(len(titles))
    grid = figure.subplots(down, across, squeeze=False, sharex=sharex, sharey=True)
    axes: list[Axes] = grid.ravel().tolist()
    for k, ax in enumerate(axes):
        if k >= len(titles):
            ax.set_axis_off()
            continue
        name, title = titles[k]
        draw(ax, name)
        ax.set_title(_wrapped(title, across), loc="left", fontsize=9)
        if k + across >= len(titles):
            ax.tick_params(labelbottom=True)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(w_pad=0.06, h_pad=0.05)  # type: ignore[call-arg]
    return axes


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


def study_page(
    directory: Path, found: StudyTables, manifest: Mapping[str, Any], *, curves: bool
) -> str:
    """Return the page of `fedipw study`; ``directory`` holds its drawings, ``curves`` if drawn."""
    return TEMPLATES.get_template("study.html").render(
        title=found.study.title,
        methods=len(found.study.methods),
        seeds=len(found.study.seeds),
        words=found.study.measure.words,
        scenarios=len(found.study.titles),
        rounds=" or ".join(str(r) for r in sorted({c.scenario.rounds for c in found.study.cases})),
        svg=_drawing(directory / "figure.svg"),
        curves=_drawing(directory / "curves.svg") if curves else None,
        most_curves=MOST_CURVES,
        references=", ".join(
            dict.fromkeys(look_of(m).label for m in found.study.references.values())
        ),
        overview=[t for t in (_means(found), _limits(found), _ranks(found)) if t is not None],
        compared=[_compared(found, name) for name in found.study.titles],
        parts=[t for t in (_parts(found, name) for name in found.study.titles) if t.rows],
        failures=list(_failures(found)),
        manifest=manifest,
    )


def _drawing(path: Path) -> Markup:
    """Return a drawing without the names of its groups, which a second one would repeat."""
    return Markup(re.sub(r' id="[A-Za-z]+\.?[A-Za-z0-9]*_\d+"', "", str(inline_svg(path))))


def _means(found: StudyTables) -> Table:
    lost = found.summary["failures"].sum()
    brackets = "; in brackets the seeds in which the method failed, which are left out"
    return _by_scenario(
        found,
        f"{_sentence(found.study.measure.words)}, in thousandths: mean over seeds ± one standard "
        f"error{brackets if lost else ''}",
        lambda row: (
            _mean_se(row["mean"], row["se"]) + (f" ({row['failures']})" if row["failures"] else "")
        ),
    )


def _limits(found: StudyTables) -> Table | None:
    if found.summary["limit_mean"].null_count() == found.summary.height:
        return None
    return _by_scenario(
        found,
        "Excess loss of the limit, in thousandths: what is left after any number of rounds, mean "
        "over seeds ± one standard error",
        lambda row: _mean_se(row["limit_mean"], row["limit_se"]),
    )


def _ranks(found: StudyTables) -> Table:
    table = _by_scenario(
        found,
        "Mean rank over seeds: 1 is best, ties share, a failure ranks last",
        lambda row: f"{row['mean_rank']:.1f}",
    )
    if len(found.study.titles) == 1 or found.ranks.is_empty():
        return table
    overall = dict(found.ranks.select("method", "mean_rank").iter_rows())
    return Table(
        caption=f"{table.caption}; overall among the methods that every scenario has",
        heads=[*table.heads, "Overall"],
        rows=[
            [*row, f"{overall[m]:.1f}" if m in overall else _NONE]
            for m, row in zip(found.study.methods, table.rows, strict=True)
        ],
    )


def _by_scenario(found: StudyTables, caption: str, cell: Callable[[dict[str, Any]], str]) -> Table:
    lines = {(r["scenario"], r["method"]): r for r in found.summary.iter_rows(named=True)}

    def cells(method: str) -> Iterator[str]:
        for name in found.study.titles:
            yield cell(lines[name, method]) if (name, method) in lines else _NONE

    return Table(
        caption=caption,
        heads=["Method", *found.study.titles.values()],
        rows=[[look_of(method).label, *cells(method)] for method in found.study.methods],
    )


def _compared(found: StudyTables, scenario: str) -> Table:
    reference = look_of(found.study.references[scenario]).label
    part = found.comparison.filter(pl.col("scenario") == scenario)
    return Table(
        caption=f"{found.study.titles[scenario]}: each method minus {reference}, seed by seed, in "
        "thousandths, and the ratio of means, with 95% intervals",
        heads=["Method", *_COMPARED],
        rows=[
            [
                look_of(row["method"]).label,
                _thousandths(row["difference"], 3),
                _span(row["low"], row["high"], 1e3),
                number(row["ratio"], 3),
                _span(row["ratio_low"], row["ratio_high"], 1.0),
                _NONE if row["better"] is None else f"{row['better']:.0%} of {row['n']}",
                _p(row["p_holm"]),
                row["verdict"],
            ]
            for row in part.iter_rows(named=True)
        ],
    )


def _parts(found: StudyTables, scenario: str) -> Table:
    part = found.summary.filter((pl.col("scenario") == scenario) & pl.col("bias").is_not_null())
    return Table(
        caption=f"{found.study.titles[scenario]}: excess loss of the last model in its three parts,"
        " in thousandths, mean over seeds",
        heads=["Method", "optimisation", "enrollment lottery", "bias", "effective replies"],
        rows=[
            [
                look_of(row["method"]).label,
                *(_thousandths(row[name], 3) for name in _PARTS),
                number(row["mean_effective_replies"], 3),
            ]
            for row in part.iter_rows(named=True)
        ],
    )


def _failures(found: StudyTables) -> Iterator[str]:
    """Yield what failed and why, and which limits could not be had."""
    for column, what in (("failure", "failed"), ("limit_failure", "has no limit")):
        lost = found.results.filter(pl.col(column).is_not_null())
        groups = lost.group_by("scenario", "method", maintain_order=True)
        for (scenario, method), part in groups:
            first = part.row(0, named=True)
            yield (
                f"{found.study.titles[str(scenario)]}: {look_of(str(method)).label} {what} in "
                f"{part.height} of {len(found.study.seeds)} seeds. Seed {first['seed']}: "
                f"{first[column]}"
            )


def _mean_se(mean: float | None, se: float | None) -> str:
    text = _thousandths(mean, 3)
    return text if se is None else f"{text} ± {_thousandths(se)}"


def _thousandths(value: float | None, digits: int = 2) -> str:
    return number(None if value is None else 1e3 * value, digits).replace("-", "−")


def _span(low: float | None, high: float | None, scale: float) -> str:
    if low is None or high is None:
        return _NONE
    return f"{number(scale * low, 3)} to {number(scale * high, 3)}".replace("-", "−")


def _p(value: float | None) -> str:
    if value is None:
        return _NONE
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
