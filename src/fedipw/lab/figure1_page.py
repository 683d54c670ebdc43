"""Drawing and page of Figure 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from fedipw.audit.page import TEMPLATES
from fedipw.lab.pages import Table, inline_svg
from fedipw.lab.style import look_of, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from fedipw.numerics import FloatArray

_POSITIVITY_FROM = 1.75  # strengths beyond this leave clients almost no chance to enroll
_TITLES = {
    "A": "A  Two-stage selection, enrollment strength 1",
    "C": "C  Calibration to population means",
}


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One method's line, its band, and the mean over seeds."""

    method: str
    x: FloatArray
    centre: FloatArray
    low: FloatArray
    high: FloatArray
    mean: FloatArray
    infeasible: FloatArray  # seeds without a value


def draw_figure(
    directory: Path, panels: Mapping[str, Sequence[Curve]], least_prob: Mapping[float, float]
) -> None:
    """Write figure1.png and figure1.svg."""
    with styled():
        across = 1 if len(panels) == 1 else 2
        down = -(-len(panels) // across)
        figure = new_figure(4.7 * across + 0.2, 3.4 * down + 0.6)
        axes = figure.subplots(down, across, squeeze=False).ravel()
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        legend: dict[str, Artist] = {}
        for ax, (panel, curves) in zip(axes, panels.items(), strict=False):
            if panel == "B":
                _over_strength(ax, curves, least_prob)
            elif panel == "D":
                _over_noise(ax, curves)
            else:
                _over_rounds(ax, curves, _TITLES[panel])
            handles, labels = ax.get_legend_handles_labels()
            legend |= {str(k): v for k, v in zip(labels, handles, strict=True)}
        figure.legend(
            list(legend.values()),
            list(legend),
            loc="outside lower center",
            ncols=2 * across,
            handlelength=2.6,
        )
        figure.savefig(directory / "figure1.png", dpi=200)
        figure.savefig(directory / "figure1.svg", metadata={"Date": None})


def _over_rounds(ax: Axes, curves: Sequence[Curve], title: str) -> None:
    for curve in curves:
        look = look_of(curve.method)
        ax.plot(curve.x, curve.mean, "-", color=look.colour, lw=0.6, alpha=0.35)
        ax.fill_between(curve.x, curve.low, curve.high, color=look.colour, alpha=0.18, lw=0)
        ax.plot(curve.x, curve.centre, look.line, color=look.colour, lw=1.6, label=look.label)
    ax.set_yscale("log")
    ax.set_xlabel("Communication round")
    ax.set_ylabel("Excess target loss  F(θ) − F*  (log scale)")
    ax.margins(x=0.01)
    ax.set_title(title, loc="left", fontsize=9.5)


def _over_noise(ax: Axes, curves: Sequence[Curve]) -> None:
    _points(ax, curves)
    ax.set_xlabel("Noise of each moment, in standard deviations")
    ax.set_ylabel("Distance to the best model  |θ − θ*|")
    ax.set_title("D  Noisy population moments", loc="left", fontsize=9.5)
    ax.set_ylim(bottom=0.0)
    lost = {c.method: c for c in curves if c.infeasible.any()}
    for k, curve in enumerate(lost.values()):
        for x, count in zip(curve.x, curve.infeasible, strict=True):
            if count:
                ax.text(
                    x,
                    0.035 + 0.05 * k,
                    f"{int(count)}",
                    transform=ax.get_xaxis_transform(),
                    ha="center",
                    fontsize=7,
                    color=look_of(curve.method).colour,
                )
    if lost:
        words, place = "draws no weights can meet:", ax.transAxes
        ax.text(0.02, 0.035, words, transform=place, fontsize=7, color="#444444")


def _points(ax: Axes, curves: Sequence[Curve]) -> None:
    for curve in curves:
        look = look_of(curve.method)
        ax.errorbar(
            curve.x,
            curve.centre,
            yerr=(curve.centre - curve.low, curve.high - curve.centre),
            fmt=look.line,
            marker=look.marker,
            ms=4.5,
            lw=1.5,
            capsize=2.5,
            color=look.colour,
            label=look.label,
        )


def _over_strength(ax: Axes, curves: Sequence[Curve], least_prob: Mapping[float, float]) -> None:
    _points(ax, curves)
    ax.set_xlabel("Enrollment strength s")
    ax.set_ylabel("Excess target loss, last 20% of rounds")
    ax.set_title("B  Stronger enrollment selection", loc="left", fontsize=9.5)
    ax.set_ylim(bottom=0.0)
    ax.set_xticks(curves[0].x)
    beyond = [s for s in least_prob if s > _POSITIVITY_FROM]
    if beyond:
        ax.axvspan(_POSITIVITY_FROM, max(beyond) + 0.1, color="#D55E00", alpha=0.08, lw=0)
        ax.set_xlim(-0.1, max(beyond) + 0.1)
        ax.text(
            0.985,
            0.39,
            f"positivity limit:\nleast enrollment\nprobability {least_prob[max(beyond)]:.4f}",
            transform=ax.transAxes,
            ha="right",
            va="center",
            fontsize=7.5,
            color="#8A3B00",
        )


def figure_page(
    svg: Path, summary: pl.DataFrame, errors: pl.DataFrame, manifest: Mapping[str, Any]
) -> str:
    """Return the page of ``fedipw reproduce``: figure, tables, settings."""
    every = (
        _panel_b(summary),
        _at_rounds(summary, "A"),
        _at_rounds(summary, "C"),
        _panel_d(summary),
        _errors(errors),
    )
    return TEMPLATES.get_template("figure.html").render(
        title="fedipw: federated learning under two-stage selection",
        svg=inline_svg(svg),
        tables=[t for t in every if t.rows],
        manifest=manifest,
        **{name: manifest["settings"][name] for name in ("seeds", "rounds", "panels")},
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


def _at_rounds(summary: pl.DataFrame, panel: str) -> Table:
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
