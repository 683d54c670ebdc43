"""Learning curves of one run."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from fedipw.report.style import look_of, new_figure, styled


def draw_curves(path: Path, history: pl.DataFrame) -> None:
    """Write excess target loss and distance over rounds as SVG."""
    with styled():
        figure = new_figure(9.2, 3.8)
        axes = figure.subplots(1, 2)
        labels = {
            "excess_loss": "Excess target loss  F(θ) − F*",
            "distance": "Distance  |θ − θ*|",
        }
        for ax, (column, label) in zip(axes, labels.items(), strict=True):
            for (method,), part in history.group_by(["method"], maintain_order=True):
                look = look_of(str(method))
                ax.plot(
                    part["round"].to_numpy(),
                    part[column].to_numpy(),
                    look.line,
                    color=look.colour,
                    lw=1.4,
                    label=look.label,
                )
            ax.set_yscale("log")
            ax.set_xlabel("Communication round")
            ax.set_ylabel(f"{label}  (log scale)")
            ax.margins(x=0.01)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, handlelength=2.6)
        figure.savefig(path, metadata={"Date": None})
