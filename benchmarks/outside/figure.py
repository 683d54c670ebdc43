"""The figure of published results and ours: two clients, sine and cyclic participation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

from benchmarks.outside import cyclic, sine
from fedipw.lab.style import new_figure, styled

COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7")
DASHES = ("-", "--", "-.", ":", "-")


def draw(saved: Mapping[str, Any], path: Path) -> None:
    """Draw the three panels from saved results."""
    with styled():
        figure = new_figure(11.0, 3.8)
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.0, 1.25, 1.15))
        _surface(figure, left, saved["two-clients"])
        _differences(middle, saved["sine"])
        _curves(right, saved["cyclic"])
        figure.savefig(path, dpi=160)


def _surface(figure: Any, axes: Any, found: Mapping[str, Any]) -> None:
    grid = np.array(found["grid"])
    distance = np.array(found["distance"])  # rows are p1
    levels = np.arange(0.0, 50.1, 5.0)
    drawn = axes.contourf(grid, grid, distance.T, levels=levels, cmap="cividis")
    figure.colorbar(drawn, ax=axes, label="distance from the solution, 50")
    axes.set(title="A  Two clients: FedAvg's bias", xlabel="$p_1$", ylabel="$p_2$")
    axes.set_aspect("equal")
    axes.grid(False)


def _differences(axes: Any, found: Mapping[str, Any]) -> None:
    accuracy, names = found["early"]["accuracy"], {sine.MEAN: "FedAWE", **sine.METHODS}
    shown = [m for m in names if m != "fedavg"]
    shown.sort(key=lambda m: float(np.mean(accuracy[m])))
    for row, m in enumerate(shown):
        off = np.subtract(accuracy[m], accuracy["fedavg"])
        half = t.ppf(0.975, len(off) - 1) * off.std(ddof=1) / np.sqrt(len(off))
        axes.errorbar(
            off.mean(), row, xerr=half, fmt="o", color=COLOURS[2], capsize=2,
            label="digits, early (95%)" if row == 0 else None,
        )  # fmt: skip
    known = [(row, m) for row, m in enumerate(shown) if m in sine.PUBLISHED]
    theirs = [sine.PUBLISHED[m][0] - sine.PUBLISHED["fedavg"][0] for _, m in known]
    axes.plot(theirs, [row for row, _ in known], "D", mfc="none", color=COLOURS[1],
              label="SVHN, published")  # fmt: skip
    axes.axvline(0.0, color="#777777", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [names[m] for m in shown])
    axes.set(title="B  Sine availability", xlabel="test accuracy less FedAvg's, percentage points")
    axes.legend(loc="upper left", fontsize=7)


def _curves(axes: Any, found: Mapping[str, Any]) -> None:
    for colour, dash, (m, label) in zip(COLOURS, DASHES, cyclic.METHODS.items(), strict=True):
        curve = found["methods"][m]["curve"]
        rounds = found["every"] * np.arange(1, len(curve) + 1)
        axes.semilogy(rounds, curve, dash, color=colour, label=label, linewidth=1.6)
    axes.set(title="C  Cyclic participation", xlabel="round", ylabel="objective")
    axes.legend(fontsize=7, loc="lower left")
