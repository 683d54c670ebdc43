"""Drawing of Figure 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from fedipw.report.style import look_of, new_figure, styled

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray

_POSITIVITY_FROM = 1.75  # strengths beyond this leave clients almost no chance to enroll


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One method's line, its band, and the mean over seeds."""

    method: str
    x: FloatArray
    centre: FloatArray
    low: FloatArray
    high: FloatArray
    mean: FloatArray


def draw_figure(
    directory: Path, panels: Mapping[str, Sequence[Curve]], least_prob: Mapping[float, float]
) -> None:
    """Write figure1.png and figure1.svg."""
    with styled():
        figure = new_figure(4.6 * len(panels) + 0.2, 3.9)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, (panel, curves) in zip(axes, panels.items(), strict=True):
            _DRAW[panel](ax, curves, least_prob)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, handlelength=2.6)
        figure.savefig(directory / "figure1.png", dpi=200)
        figure.savefig(directory / "figure1.svg", metadata={"Date": None})


def _panel_a(ax: Axes, curves: Sequence[Curve], least_prob: Mapping[float, float]) -> None:
    del least_prob
    for curve in curves:
        look = look_of(curve.method)
        ax.plot(curve.x, curve.mean, "-", color=look.colour, lw=0.6, alpha=0.35)
        ax.fill_between(curve.x, curve.low, curve.high, color=look.colour, alpha=0.18, lw=0)
        ax.plot(curve.x, curve.centre, look.line, color=look.colour, lw=1.6, label=look.label)
    ax.set_yscale("log")
    ax.set_xlabel("Communication round")
    ax.set_ylabel("Excess target loss  F(θ) − F*  (log scale)")
    ax.set_title("A  Two-stage selection, enrollment strength 1", loc="left", fontsize=9.5)
    ax.margins(x=0.01)


def _panel_b(ax: Axes, curves: Sequence[Curve], least_prob: Mapping[float, float]) -> None:
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
    ax.set_xlabel("Enrollment strength s")
    ax.set_ylabel("Excess target loss, mean of last 20% of rounds")
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


_DRAW = {"A": _panel_a, "B": _panel_b}
