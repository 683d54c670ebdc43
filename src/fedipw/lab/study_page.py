"""Page of a study: figures, tables, what is compared, and what failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
from markupsafe import Markup

from fedipw.audit.page import TEMPLATES, Table, inline_svg, number
from fedipw.audit.style import look_of
from fedipw.lab.study_figure import MOST_CURVES, StudyView

_PARTS = ("optimisation", "lottery", "bias")
_NONE = "–"


def study_page(
    directory: Path, view: StudyView, manifest: Mapping[str, Any], *, curves: bool
) -> str:
    """Return the page of `fedipw study`; ``directory`` holds its drawings, ``curves`` if drawn."""
    return TEMPLATES.get_template("study.html").render(
        title=view.title,
        view=view,
        scenarios=len(view.scenarios),
        rounds=" or ".join(str(r) for r in sorted(set(view.rounds.values()))),
        svg=_drawing(directory / "figure.svg"),
        curves=_drawing(directory / "curves.svg") if curves else None,
        most_curves=MOST_CURVES,
        references=", ".join(dict.fromkeys(look_of(m).label for m in view.references.values())),
        overview=[t for t in (_means(view), _limits(view), _ranks(view)) if t is not None],
        compared=[_compared(view, name) for name in view.scenarios],
        parts=[t for t in (_parts(view, name) for name in view.scenarios) if t.rows],
        failures=list(_failures(view)),
        manifest=manifest,
    )


def _drawing(path: Path) -> Markup:
    """Return a drawing without the names of its groups, which a second one would repeat."""
    return Markup(re.sub(r' id="[A-Za-z]+\.?[A-Za-z0-9]*_\d+"', "", str(inline_svg(path))))


def _means(view: StudyView) -> Table:
    lost = view.summary["failures"].sum()
    brackets = "; in brackets the seeds in which the method failed, which are left out"
    return _by_scenario(
        view,
        f"{view.words[:1].upper()}{view.words[1:]}, in thousandths: mean over seeds ± one standard "
        f"error{brackets if lost else ''}",
        lambda row: (
            _mean_se(row["mean"], row["se"]) + (f" ({row['failures']})" if row["failures"] else "")
        ),
    )


def _limits(view: StudyView) -> Table | None:
    if view.summary["limit_mean"].null_count() == view.summary.height:
        return None
    return _by_scenario(
        view,
        "Excess loss of the limit, in thousandths: what is left after any number of rounds, mean "
        "over seeds ± one standard error",
        lambda row: _mean_se(row["limit_mean"], row["limit_se"]),
    )


def _ranks(view: StudyView) -> Table:
    table = _by_scenario(
        view,
        "Mean rank over seeds: 1 is best, ties share, a failure ranks last",
        lambda row: f"{row['mean_rank']:.1f}",
    )
    if len(view.scenarios) == 1 or view.ranks.is_empty():
        return table
    overall = dict(view.ranks.select("method", "mean_rank").iter_rows())
    return Table(
        caption=f"{table.caption}; overall among the methods that every scenario has",
        heads=[*table.heads, "Overall"],
        rows=[
            [*row, f"{overall[m]:.1f}" if m in overall else _NONE]
            for m, row in zip(view.methods, table.rows, strict=True)
        ],
    )


def _by_scenario(view: StudyView, caption: str, cell: Callable[[dict[str, Any]], str]) -> Table:
    found = {(r["scenario"], r["method"]): r for r in view.summary.iter_rows(named=True)}
    return Table(
        caption=caption,
        heads=["Method", *view.scenarios.values()],
        rows=[
            [
                look_of(method).label,
                *(
                    cell(found[name, method]) if (name, method) in found else _NONE
                    for name in view.scenarios
                ),
            ]
            for method in view.methods
        ],
    )


def _compared(view: StudyView, scenario: str) -> Table:
    reference = look_of(view.references[scenario]).label
    part = view.comparison.filter(pl.col("scenario") == scenario)
    return Table(
        caption=f"{view.scenarios[scenario]}: each method minus {reference}, seed by seed, in "
        "thousandths, and the ratio of means, with 95% intervals",
        heads=[
            "Method",
            "difference",
            "95% interval",
            "ratio",
            "95% interval",
            "better in",
            "p (Holm)",
            "verdict",
        ],
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


def _parts(view: StudyView, scenario: str) -> Table:
    part = view.summary.filter((pl.col("scenario") == scenario) & pl.col("bias").is_not_null())
    return Table(
        caption=f"{view.scenarios[scenario]}: excess loss of the last model in its three parts, in "
        "thousandths, mean over seeds",
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


def _failures(view: StudyView) -> Iterator[str]:
    """Yield what failed and why, and which limits could not be had."""
    for column, what in (("failure", "failed"), ("limit_failure", "has no limit")):
        lost = view.results.filter(pl.col(column).is_not_null())
        groups = lost.group_by("scenario", "method", maintain_order=True)
        for (scenario, method), part in groups:
            first = part.row(0, named=True)
            yield (
                f"{view.scenarios[str(scenario)]}: {look_of(str(method)).label} {what} in "
                f"{part.height} of {view.seeds} seeds. Seed {first['seed']}: {first[column]}"
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
