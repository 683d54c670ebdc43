"""Drawing of Figure 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from fedipw.lab.style import look_of, new_figure, styled

if TYPE_CHECKING:
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
