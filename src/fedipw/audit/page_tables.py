"""Tables of an audit: every number that its plots show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedipw.audit.interactive import Column, SortTable, Value, table

Json = Mapping[str, Any]

QUANTILE_NAMES = {"0": "least", "0.5": "median", "1": "largest"}


def audit_tables(audit: Json) -> dict[str, list[SortTable]]:
    """Return the tables of each section that has any."""
    sections = {
        "balance": _balance(audit["balance"]),
        "weights": _weights(audit["weights"]),
        "empty": _empty(audit["overlap"]),
        "stages": _stages(audit["stages"]),
        "rates": _rates(audit["rates"]),
        "rounds": _rounds(audit["rounds"]),
        "metric": _metric(audit["metric"]),
    }
    return {name: [t for t in tables if t.rows] for name, tables in sections.items()}


def _balance(part: Json | None) -> Iterator[SortTable]:
    if part is None:
        return
    groups = part["groups"]
    columns = [
        Column("Column", "text"),
        Column("Population mean"),
        Column("Population SD", hint="standard deviation"),
        *(Column(f"SMD, {g}", "fixed", "standardised mean difference") for g in groups),
        *(Column(f"Mean, {g}") for g in groups),
    ]

    def row(line: Json) -> list[Value]:
        cells = [line["groups"].get(g) or {"smd": None, "mean": None} for g in groups]
        means = [c["mean"] for c in cells]
        return [line["name"], line["mean"], line["sd"], *(c["smd"] for c in cells), *means]

    yield table(
        "Differences from the population, in units of its standard deviation (SMD)",
        columns,
        map(row, part["lines"]),
    )


def _weights(parts: Sequence[Json]) -> Iterator[SortTable]:
    if not parts:
        return
    quantiles = list(dict.fromkeys(q for part in parts for q in part["quantiles"]))
    columns = [
        Column("Weights of", "text"),
        Column("Count", "count"),
        Column("Zeros", "count"),
        Column("Negative", "count"),
        Column("Effective size", "count", "how many equally weighted ones would tell as much"),
        Column("Design effect", "number", "count over effective size"),
        Column("Largest share", "share", "of the total weight, in one"),
        Column("Share of top 1%", "share"),
        *(Column(quantile_name(q), "number", "multiple of the mean weight") for q in quantiles),
    ]
    yield table("How uneven the weights are", columns, (_weight_row(p, quantiles) for p in parts))


def quantile_name(quantile: str) -> str:
    """Return what people call it.

    >>> quantile_name("0.5"), quantile_name("0.99")
    ('Median', '99% quantile')
    """
    known = QUANTILE_NAMES.get(f"{float(quantile):g}")
    return known.capitalize() if known else f"{100 * float(quantile):g}% quantile"


def _weight_row(part: Json, quantiles: Sequence[str]) -> list[Value]:
    keys = ("name", "count", "zeros", "negative", "effective_sample_size", "design_effect")
    shares = ("largest_share", "top_share")
    return [*(part[k] for k in (*keys, *shares)), *(part["quantiles"].get(q) for q in quantiles)]


def _empty(part: Json | None) -> Iterator[SortTable]:
    if part is None:
        return
    yield table(
        "Parts of the population in which nobody is enrolled",
        [Column("Part", "text"), Column("Clients in the population", "count")],
        ((e["name"], e["population"]) for e in part["empty"]),
    )


def _stages(stages: Sequence[Json]) -> Iterator[SortTable]:
    yield table(
        "Fitted models of selection",
        [column for _, column in _STAGE_COLUMNS],
        ([s[key] for key, _ in _STAGE_COLUMNS] for s in stages),
    )
    yield table(
        "Coefficients, on the scale of log odds",
        [
            Column("Coefficient", "text"),
            Column("Stage", "text"),
            Column("Value"),
            Column("Standard error"),
            Column("Value by standard error"),
        ],
        (
            (c["name"], s["stage"], c["value"], c["standard_error"], _ratio(c))
            for s in stages
            for c in s["coefficients"]
        ),
    )
    yield table(
        "Probabilities against what happened, in groups of similar probability",
        [Column("Stage", "text"), *(column for _, column in _BIN_COLUMNS)],
        (
            (s["stage"], *(r[key] for key, _ in _BIN_COLUMNS))
            for s in stages
            for r in s["reliability"]
        ),
    )


_STAGE_COLUMNS = (
    ("stage", Column("Stage", "text")),
    ("formula", Column("Formula", "text")),
    ("rows", Column("Rows", "count")),
    ("left_out", Column("Left out", "count", "rows without values")),
    ("rate", Column("Rate", "share", "selected")),
    ("auc", Column("AUC", "fixed", "chance that a selected one has the higher probability")),
    ("calibration_ratio", Column("Observed by expected", "fixed")),
    ("expected_error", Column("Mean gap", "fixed", "between probability and share")),
)
_BIN_COLUMNS = (
    ("count", Column("Count", "count")),
    ("mean_prob", Column("Mean probability", "fixed")),
    ("rate", Column("Share selected", "fixed")),
    ("standard_error", Column("Standard error", "fixed")),
)


def _ratio(coefficient: Json) -> float | None:
    error = coefficient["standard_error"]
    return coefficient["value"] / error if error else None


def _rates(parts: Sequence[Json]) -> Iterator[SortTable]:
    yield table(
        "Reply rates",
        [
            Column("Level", "text"),
            Column("Column", "text"),
            Column("Rows", "count"),
            Column("Replies", "count"),
            Column("Reply rate", "share"),
        ],
        (
            (line["level"], part["column"], line["rows"], line["replies"], line["rate"])
            for part in parts
            for line in part["lines"]
        ),
    )


def _rounds(lines: Sequence[Json]) -> Iterator[SortTable]:
    merged = any(line["first"] != line["last"] for line in lines)
    dated = any(line["opened_at"] is not None for line in lines)
    asked = [
        ("first", Column("First round" if merged else "Round", "count")),
        *([("last", Column("Last round", "count"))] if merged else []),
        *([("opened_at", Column("Opened at", "text"))] if dated else []),
        *_ROUND_COLUMNS,
    ]
    rows = ([line[key] for key, _ in asked] for line in lines)
    yield table("Rounds", [column for _, column in asked], rows)


_ROUND_COLUMNS = (
    ("enrolled", Column("Enrolled", "count")),
    ("invited", Column("Invited", "count")),
    ("replies", Column("Replies", "count")),
    ("reply_rate", Column("Reply rate", "share")),
    ("expected_rate", Column("Expected rate", "share", "mean fitted probability")),
    ("calibration_ratio", Column("Observed by expected", "fixed")),
    ("effective_replies", Column("Effective replies", "count")),
    ("weight_sum", Column("Sum of weights", "fixed")),
    ("largest_share", Column("Largest share", "share")),
    ("skipped", Column("Skipped", "count", "rounds in which nobody could be weighed")),
)


def _metric(part: Json | None) -> Iterator[SortTable]:
    if part is None:
        return
    columns = [
        Column("Group", "text"),
        Column("Estimator", "text"),
        Column("Estimate"),
        Column("Standard error"),
        Column(f"Low ({part['confidence']:.0%})"),
        Column(f"High ({part['confidence']:.0%})"),
        Column("Effective size", "count"),
        Column("Clients", "count"),
        Column("Replies", "count"),
    ]
    keys = [
        *("group", "estimator", "estimate", "standard_error", "low", "high"),
        *("effective_sample_size", "clients", "replies"),
    ]
    if any(e["reason"] for e in part["estimates"]):
        columns.append(Column("Why there is no number", "text"))
        keys.append("reason")
    rows = ([e[k] for k in keys] for e in part["estimates"])
    yield table(f"Estimates of {part['name']}", columns, rows)
    yield table(
        "Bounds if something unobserved moves the odds of enrollment",
        [
            Column("Odds ratio"),
            Column("Low"),
            Column("High"),
            Column("Weight error", "number", "centred, at this odds ratio"),
        ],
        ([s[k] for k in _BOUND_KEYS] for s in part["sensitivity"]),
    )


_BOUND_KEYS = ("odds_ratio", "low", "high", "weight_error")
