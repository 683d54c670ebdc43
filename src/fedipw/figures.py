"""Figures of results: weights, metrics with intervals, balance, overlap.

Each function returns a :class:`matplotlib.figure.Figure` that belongs to nobody else: nothing is
shown, and no global state of matplotlib is read or changed. A notebook draws what a cell returns.
Colours are those of Okabe and Ito, which colour-blind readers can tell apart, with markers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedipw.evaluation.balance import BalanceTable

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
LARGE: Final = 0.1  # a standardised difference beyond which balance is usually called poor
MOST: Final = 40  # groups, or columns, of one figure
_PLAIN, _MEAN = "plain", "mean"
_LOOKS: Final = (
    (BLUE, "D"), ("#56B4E9", "s"), ("#009E73", "^"), ("#CC79A7", "v"), ("#000000", "P"),
)  # fmt: skip
_LABELS: Final = {
    _PLAIN: "plain mean of the replies", "horvitz-thompson": "Horvitz–Thompson", "hajek": "Hájek",
    "greg": "GREG",
}  # fmt: skip
# families with letters that matplotlib's own font lacks, as systems call them
_FAMILIES: Final = (
    "DejaVu Sans", "Noto Sans", "Noto Sans CJK JP", "IPAGothic", "WenQuanYi Zen Hei",
)  # fmt: skip


class Bins(Protocol):
    """Counts of the population and of the enrolled in shared bins."""

    @property
    def edges(self) -> tuple[float, ...]:
        """Of the bins, (bins + 1,)."""

    @property
    def counts(self) -> Mapping[str, tuple[int, ...]]:
        """By group, (bins,)."""

    @property
    def log_scale(self) -> bool:
        """Whether edges are in equal ratios."""


def weights_figure(table: pl.DataFrame) -> Figure:
    """Return the spread of weights, and each round's effective number of replies.

    ``table`` has one row per reply with ``round`` and ``weight``.
    """
    figure = _figure(9.0, 3.4)
    spread, rounds = figure.subplots(1, 2)
    relative = table["weight"] / (table["weight"].mean() or 1.0)
    spread.hist(relative.to_numpy(), bins=40, color=BLUE)
    spread.set(xlabel="weight over the mean weight", ylabel="replies", title="Spread of weights")
    each = table.group_by("round", maintain_order=True).agg(
        pl.len().alias("replies"),
        (pl.col("weight").sum() ** 2 / (pl.col("weight") ** 2).sum()).alias("effective"),
    )
    rounds.plot(each["round"], each["replies"], color=GREY, ls="--", label="replies")
    rounds.plot(each["round"], each["effective"], color=ORANGE, label="effective replies")
    rounds.set(
        xlabel="round", ylabel="replies", title="Effective number of replies", ylim=(0, None)
    )
    rounds.legend(frameon=False)
    return _tidied(figure)


def calibrated_figure(weights: np.ndarray) -> Figure:
    """Return the spread of weights of enrolled clients that sum to one."""
    figure = _figure(5.0, 3.4)
    axes = figure.subplots()
    axes.hist(weights * len(weights), bins=40, color=BLUE)
    axes.axvline(1.0, color=GREY, ls="--", lw=1.0)
    axes.set(
        xlabel="weight over the mean weight", ylabel="enrolled clients",
        title="Spread of calibrated weights",
    )  # fmt: skip
    return _tidied(figure)


def estimates_figure(table: pl.DataFrame, *, name: str = "metric") -> Figure:
    """Return a metric's mean by group and estimator, each with its interval.

    Parameters
    ----------
    table
        One row per estimate, as of :meth:`fedipw.Evaluation.table`.
    name
        What the metric is called.
    """
    if "statistic" in table.columns:
        table = table.filter(pl.col("statistic") == _MEAN)
    known = table.filter(pl.col("estimate").is_not_null())
    if not known.height:
        raise InputError("There is no estimate to draw.")
    groups = known["group"].unique(maintain_order=True).to_list()
    shown = groups[:MOST]
    estimators = known["estimator"].unique(maintain_order=True).to_list()
    looks = dict(zip((e for e in estimators if e != _PLAIN), _cycled(_LOOKS), strict=False))
    looks[_PLAIN] = (ORANGE, "o")
    figure = _figure(7.0, 1.2 + 0.16 * (len(estimators) + 1) * len(shown))
    axes = figure.subplots()
    for k, estimator in enumerate(estimators):
        mine = known.filter((pl.col("estimator") == estimator) & pl.col("group").is_in(shown))
        place = np.array([shown.index(g) for g in mine["group"]])
        y = place + (k - 0.5 * (len(estimators) - 1)) * 0.8 / len(estimators)
        x = mine["estimate"].to_numpy()
        low, high = (mine[n].fill_null(mine["estimate"]).to_numpy() for n in ("low", "high"))
        colour, marker = looks[estimator]
        axes.errorbar(
            x, y, xerr=np.clip([x - low, high - x], 0.0, None), fmt=marker, color=colour, ms=4.5,
            lw=1.3, label=_LABELS.get(estimator, estimator),
        )  # fmt: skip
    _named_rows(axes, shown)
    share = f"{100.0 * float(known['confidence'][0]):g}% intervals"
    more = "" if len(groups) == len(shown) else f" (the first {len(shown)} of {len(groups)} groups)"
    axes.set(xlabel=f"mean of {visible(name)}, with {share}", title=f"Metric by group{more}")
    _legend_beside(axes)
    return _tidied(figure)


def love_figure(balance: BalanceTable) -> Figure:
    """Return standardised differences from the population before and after weighting (E11)."""
    figure = _figure(7.0, 1.9 + 0.26 * min(len(balance.lines), MOST))
    draw_love(figure.subplots(), balance)
    return _tidied(figure)


def draw_love(axes: Axes, balance: BalanceTable) -> None:
    """Draw a love plot: groups as they are hollow, weighted ones filled."""
    worst = sorted(balance.lines, key=lambda one: -_largest(one.groups.values()))
    kept = {id(one) for one in worst[:MOST]}
    lines = [one for one in balance.lines if id(one) in kept]
    for group in balance.groups:
        weighted = group.endswith(" weighted")
        first = group.startswith("enrolled")
        at = [(one.groups[group].smd, k) for k, one in enumerate(lines)]
        points = [(x, k) for x, k in at if x is not None]
        colour = BLUE if weighted else ORANGE
        axes.plot(
            [x for x, _ in points], [k for _, k in points], ls="none", marker="o" if first else "s",
            ms=6, mec=colour, mfc=colour if weighted else "none", label=group,
        )  # fmt: skip
    axes.axvline(0.0, color="#000000", lw=0.8)
    for limit in (-LARGE, LARGE):
        axes.axvline(limit, color=GREY, lw=0.8, ls="--")
    _named_rows(axes, [one.name for one in lines])
    more = "" if len(lines) == len(balance.lines) else f", largest {len(lines)}"
    axes.set(
        xlabel=f"standardised difference from the population (dashed: ±{LARGE:g})",
        title=f"Balance of covariates{more}",
    )
    _legend_below(axes)


def _largest(cells: Any) -> float:
    return max((abs(cell.smd) for cell in cells if cell.smd is not None), default=np.inf)


def overlap_figure(prob: Bins) -> Figure:
    """Return enrollment probabilities of the enrolled and of the others."""
    figure = _figure(5.5, 3.4)
    draw_overlap(figure.subplots(), prob)
    return _tidied(figure)


def draw_overlap(axes: Axes, prob: Bins) -> None:
    """Draw densities of enrollment probabilities; bins are those that may be shown."""
    edges = np.array(prob.edges)
    width = np.diff(np.log(edges) if prob.log_scale else edges)
    inside = np.array(prob.counts["enrolled"], dtype=np.float64)
    others = np.array(prob.counts["population"], dtype=np.float64) - inside
    for counts, colour, line, label in (
        (others, ORANGE, "--", "not enrolled"),
        (inside, BLUE, "-", "enrolled"),
    ):
        if counts.sum() > 0.0:
            height = counts / counts.sum() / width
            axes.stairs(height, edges, color=colour, lw=1.6, ls=line, label=label)
            axes.stairs(height, edges, color=colour, alpha=0.15, fill=True)
    if prob.log_scale:
        axes.set_xscale("log")
        ticks = [x for x in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0) if edges[0] <= x <= edges[-1]]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    unit = "density (of the logarithm)" if prob.log_scale else "density"
    axes.set(xlabel="enrollment probability", ylabel=unit, title="Overlap", ylim=(0, None))
    axes.legend(frameon=False)


def report_figure(balance: BalanceTable | None, prob: Bins | None) -> Figure:
    """Return balance and overlap side by side, those of them that are known."""
    parts = [part for part in (balance, prob) if part is not None]
    if not parts:
        raise InputError("Neither balance nor overlap is known: there is nothing to draw.")
    rows = 0 if balance is None else min(len(balance.lines), MOST)
    figure = _figure(1.5 + 5.0 * len(parts), max(3.4, 1.4 + 0.26 * rows))
    axes = list(np.ravel(np.array(figure.subplots(1, len(parts)), dtype=object)))
    if balance is not None:
        draw_love(axes[0], balance)
    if prob is not None:
        draw_overlap(axes[-1], prob)
    return _tidied(figure)


def _figure(width: float, height: float) -> Figure:
    return _figure_type()(figsize=(width, height), layout="constrained")


@cache
def _figure_type() -> type[Figure]:
    from matplotlib.figure import Figure  # noqa: PLC0415 (slow to load)

    class Shown(Figure):
        """A figure that a notebook draws also where nothing has loaded pyplot."""

        def _repr_png_(self) -> bytes:
            drawn = BytesIO()
            self.savefig(drawn, format="png")
            return drawn.getvalue()

    return Shown


def _tidied(figure: Figure) -> Figure:
    r"""Return a figure without boxes, in letters of as many scripts as the system has.

    What no font has is written as its number, as in ``\u5317``.
    """
    from matplotlib import font_manager  # noqa: PLC0415
    from matplotlib.text import Text  # noqa: PLC0415

    installed = {font.name for font in font_manager.fontManager.ttflist}
    families = [name for name in _FAMILIES if name in installed]
    # of the face that is drawn: a family's oblique ones have fewer letters
    faces = [font_manager.get_font(font_manager.findfont(name)) for name in families]
    letters = {letter for face in faces for letter in face.get_charmap()}
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25, lw=0.6)
        named = [one.get_text() for one in axes.get_yticklabels()]
        if any(_written(one, letters) != one for one in named):
            axes.set_yticks(axes.get_yticks(), [_written(one, letters) for one in named])
    for text in figure.findobj(Text):
        text.set_fontfamily(families)
    return figure


def _written(text: str, letters: Collection[int]) -> str:
    return "".join(c if ord(c) in letters else c.encode("unicode_escape").decode() for c in text)


def _named_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [visible(name).replace("$", r"\$") for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)


def _legend_below(axes: Axes) -> None:
    """Put the legend below the label of the x axis: names of rows may take half of the width."""
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    below = ScaledTranslation(0.0, -0.5, axes.figure.dpi_scale_trans)  # inches
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2,
        bbox_transform=axes.transAxes + below,
    )  # fmt: skip


def _legend_beside(axes: Axes) -> None:
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _cycled(looks: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [*looks] * 10
