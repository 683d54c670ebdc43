"""Page of a simulated run: charts over rounds, tables, and what theory says in sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from fedipw.audit.page import chart_page
from fedipw.lab.pages import Table, number, sortable
from fedipw.lab.style import look_of


def run_page(
    summary: dict[str, Any], history: pl.DataFrame, settings: Mapping[str, Any], missing: str
) -> str:
    """Return the page of `fedipw simulate`; ``missing`` says why nothing was evaluated, if so."""
    return chart_page(
        "A simulated run under two-stage selection",
        _charts(history, summary["evaluation"]),
        [sortable(table) for table in _tables(summary) if table.rows],
        [*_notes(summary), *([missing] if missing else [])],
        settings,
    )


def _charts(frame: pl.DataFrame, evaluated: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of a run's page: excess loss, distance, and the loss by replies."""
    labels = {
        "excess_loss": ("Excess target loss F(θ) − F*", "Lower is better; 0 is the best model."),
        "distance": ("Distance |θ − θ*|", "How far the model is from the best one."),
    }
    charts: list[dict[str, Any]] = []
    for column, (label, caption) in labels.items():
        curves = [
            _curve(look_of(str(method)).label, part["round"].to_list(), part[column].to_list())
            for (method,), part in frame.group_by(["method"], maintain_order=True)
        ]
        charts.append(
            {"title": label, "caption": caption, "y_label": label, "log": True, "curves": curves}
        )
    adapted = frame.filter(pl.col("reliance").fill_nan(1.0).min().over("method") < 1.0)
    if adapted.height:
        curves = [
            _curve(
                look_of(str(method)).label,
                part["round"].to_list(),
                part["reliance"].fill_nan(None).to_list(),
            )
            for (method,), part in adapted.group_by(["method"], maintain_order=True)
        ]
        charts.append(
            {
                "title": "Reliance on enrollment weights",
                "caption": "As far as updates show that enrollment weights matter: 1 is wholly, 0 "
                "leaves participation weights alone.",
                "y_label": "Reliance Λ",
                "log": False,
                "curves": curves,
            }
        )
    for name in dict.fromkeys(line["method"] for line in evaluated):
        charts.append(_evaluated(name, [line for line in evaluated if line["method"] == name]))
    return charts


def _curve(name: str, rounds: list[int], values: list[float], *band: list[float]) -> dict[str, Any]:
    low, high = band or (None, None)
    return {"name": name, "round": rounds, "value": values, "low": low, "high": high}


def _evaluated(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("round", "estimate", "low", "high", "plain", "truth")
    of = {key: [line[key] for line in lines] for key in keys}
    weighted = (of["estimate"], of["low"], of["high"])
    return {
        "title": f"{look_of(name).label}: target loss as replies estimate it",
        "caption": "Each model is evaluated by the clients that reply in its round, ten rounds "
        "together. The weighted mean estimates the loss of the whole population, with a 95% "
        "interval; the plain mean is about the clients that reply.",
        "y_label": "Loss F(θ)",
        "log": False,
        "curves": [
            _curve("Weighted mean of replies, 95% interval", of["round"], *weighted),
            _curve("Plain mean of replies", of["round"], of["plain"]),
            _curve("Truth", of["round"], of["truth"]),
        ],
    }


def _tables(summary: dict[str, Any]) -> list[Table]:
    methods = summary["methods"]
    keys = ("excess_loss", "distance", "tail_average_excess_loss")

    def table(caption: str, heads: list[str], cells: Callable[[Any], list[str]]) -> Table:
        rows = [[look_of(name).label, *cells(row)] for name, row in methods.items()]
        return Table(caption=caption, heads=["Method", *heads], rows=rows)

    tables = [
        table(
            "After the last round",
            ["excess loss", "distance", "tail-averaged excess", "effective replies"],
            lambda row: [
                *(number(row[k]) for k in keys),
                number(row["mean_effective_replies"], 3),
            ],
        )
    ]
    if all("errors" in row for row in methods.values()):
        tables.append(
            table(
                "The excess loss in its three parts",
                ["optimisation", "enrollment lottery", "bias"],
                lambda row: [number(v) for v in row["errors"].values()],
            )
        )
    if all(row.get("theory") for row in methods.values()):
        tables.append(
            table(
                "Weight errors, the floor they leave (exact and first-order), the bound",
                ["raw", "centred", "rms", "exact floor", "first order", "bound"],
                _theory_cells,
            )
        )
    if summary["theory"].get("sensitivity"):
        tables.append(_sensitivity(summary["theory"]["sensitivity"]))
    return tables


def _theory_cells(row: dict[str, Any]) -> list[str]:
    theory = row["theory"]
    errors = theory.get("weight_error", {})  # none where a limit weight is 0 or below
    return [
        *(number(errors.get(k)) for k in ("raw", "centred", "rms")),
        number(row["errors"]["bias"]),
        number(theory.get("first_order_floor")),
        number(theory["bound"].get("total")),
    ]


def _sensitivity(lines: list[dict[str, Any]]) -> Table:
    keys = ("weight_error", "floor", "largest_floor")
    return Table(
        caption="If something unobserved moves the odds of enrollment: error of the weights, and "
        "the excess loss it can leave (worst found; bound, where there is one)",
        heads=["Odds ratio", "centred error", "floor found", "bound"],
        rows=[[f"{line['odds_ratio']:g}", *(number(line[k]) for k in keys)] for line in lines],
    )


def _notes(summary: dict[str, Any]) -> list[str]:
    return [
        f"{summary['enrolled_size']:,} of {summary['population_size']:,} clients enrolled.",
        f"{summary['mean_replies']:.1f} replies a round on average.",
        f"{summary['skipped_rounds']} of {summary['rounds']} rounds skipped: nobody replied.",
        f"The target is the mean over {summary['target']}s of the whole population.",
        *theory_notes(summary),
    ]


def theory_notes(summary: dict[str, Any]) -> list[str]:
    """Return what theory says of the run, in sentences."""
    problem = summary["theory"]
    if not problem:
        return []
    lottery, least = number(problem["lottery_term"]), number(problem["efficiency_bound"])
    bound = (
        f"Efficiency bound: {least}. In large populations no regular weighting that is consistent "
        "for the target under selection has a smaller mean. One that is not, such as "
        "participation-only, can lie below it where enrollment does not predict updates."
    )
    return [
        f"Mean excess loss over draws of enrollment: {lottery} for the oracle's limit.",
        bound,
        *(
            f"{look_of(name).label}: {row['theory']['bound']['statement']}."
            for name, row in summary["methods"].items()
        ),
    ]
