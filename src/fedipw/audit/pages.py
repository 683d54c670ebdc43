"""The page of an audit: one file, its data as JSON beside tables that stand without a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final

from fedipw.audit.page import (
    Column,
    Importance,
    SortTable,
    Value,
    beginning,
    count,
    rendered,
    share,
    significant,
    size,
    table,
)
from fedipw.audit.values import (
    Audit,
    HeatPart,
    MetricPart,
    OverlapPart,
    RatePart,
    RoundLine,
    SilentGroup,
    StagePart,
    WeightPart,
)
from fedipw.evaluation.balance import BalanceLine, BalanceTable
from fedipw.evaluation.estimators import EVERYONE
from fedipw.numerics.checks import some

_WARNING: Final = "What the interval cannot promise"
_WEIGHED: Final = {"enrollment": "the enrolled", "replies": "the replies"}
_WARNED: Final = 5  # warnings of intervals that are listed; the table has all
_QUANTILE_NAMES: Final = {"0": "Least", "0.5": "Median", "1": "Largest"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A number to be seen at once."""

    name: str
    value: str
    note: str = ""


def audit_page(audit: Audit) -> str:
    """Return the page of ``fedipw audit``."""
    metric, balance = audit.metric, audit.balance
    estimated = [e for e in metric.estimates if e.estimate is not None] if metric else []
    cells = [cell for x in balance.lines for cell in x.groups.values()] if balance else []
    return rendered(
        "audit.html",
        ("charts.js", "heat.js", "audit.js"),
        {"audit-data": audit.to_json()},
        title=audit.title,
        audit=audit,
        tables=audit_tables(audit),
        tiles=_tiles(audit),
        sections=_sections(audit),
        weights=_having(audit.weights, "multiples.counts"),
        probs=_having(audit.stages, "prob.counts"),
        reliable=_having(audit.stages, "reliability"),
        rates=_having(audit.rates, "lines"),
        heat=[(k, part) for k, part in _having(audit.heat, "levels") if part.hours],
        confidence=f"{metric.confidence:.0%}" if metric else "",
        differences=any(cell.smd is not None for cell in cells),
        everyone=any(e.group == EVERYONE for e in estimated),
        subgroups=any(e.group != EVERYONE for e in estimated),
        hidden=_hidden,
        heat_note=partial(_heat_note, audit),
        rounds_each=audit.rounds[0].last - audit.rounds[0].first + 1 if audit.rounds else 1,
        weighed=weighed,
        weight_note=_weight_note,
        stage_notes=_stage_notes(audit.stages),
        warnings=_warnings(metric),
    )


def _stage_notes(stages: Sequence[StagePart]) -> list[str]:
    """Return what must be known to read the numbers of the stages, a sentence each."""
    out = [f"{s.note[:1].upper()}{s.note[1:]}." for s in stages if s.note]
    out += [
        f"{s.stage.capitalize()} has a constant rate, not a model: nothing tells its clients apart."
        for s in stages
        if not s.is_model
    ]
    notes: dict[str, list[str]] = {}
    for s in stages:
        for note in s.coefficient_notes:
            notes.setdefault(note, []).append(s.stage)
    return out + [f"{' and '.join(who).capitalize()}: {note}" for note, who in notes.items()]


def _warnings(metric: MetricPart | None) -> list[str]:
    """Return why intervals of a metric may not hold, with the estimates that is so of."""
    found: dict[str, list[str]] = {}
    for line in () if metric is None else metric.estimates:
        if line.warning:
            found.setdefault(line.warning, []).append(f"{line.estimator} of {line.group}")
    out = [f"{some(who)}: {warning}" for warning, who in found.items()]
    more = len(out) - _WARNED
    if more > 1:
        rest = f"And {count(more)} more, in the column “{_WARNING}” of the table of estimates."
        return [*out[:_WARNED], rest]
    return out


def _heat_note(audit: Audit, part: HeatPart) -> str:
    """Return which levels a map by the hour leaves out."""
    known = [rates for rates in audit.rates if rates.column == part.column]
    levels = len(known[0].lines) if known else 0
    if levels <= len(part.levels):
        return ""
    return f"The {len(part.levels)} levels of most rows, of {count(levels)}."


def _having(parts: Sequence[Any], inside: str) -> list[tuple[int, Any]]:
    """Return the parts with something to draw, by their place in the audit."""
    return [(k, part) for k, part in enumerate(parts) if attrgetter(inside)(part)]


def _sections(audit: Audit) -> list[tuple[str, str]]:
    replies = any(p.lines for p in audit.rates) or any(p.hours for p in audit.heat) or audit.silent
    every = (
        ("summary", "Summary", audit.verdict or audit.unknown),
        ("numbers", "Key numbers", True),
        ("balance", "Balance", audit.balance and audit.balance.lines),
        ("weights", "Weights", audit.weights),
        ("overlap", "Overlap", audit.overlap or audit.stages),
        ("models", "Probabilities", audit.stages),
        ("replies", "Replies", replies),
        ("rounds", "Rounds", audit.rounds),
        ("metric", "Metric", audit.metric),
        ("notes", "Notes", audit.notes),
        ("settings", "Settings", True),
    )
    return [(place, name) for place, name, here in every if here]


def _tiles(audit: Audit) -> list[tuple[str, list[Tile]]]:
    sizes, population = audit.sizes, audit.sizes.population
    part = f"{share(sizes.enrolled / population)} of the population" if population else "clients"
    first = [
        Tile(name="Population", value=count(population), note="clients" if population else ""),
        Tile(name="Enrolled", value=count(sizes.enrolled), note=part),
    ]
    if sizes.rounds:
        rate = f"{share(sizes.replies / (sizes.rows or 1))} of {count(sizes.rows)} rows"
        replied = f"{count(sizes.clients_replied)} clients replied"
        first += [
            Tile(name="Rounds", value=count(sizes.rounds), note=replied),
            Tile(name="Replies", value=count(sizes.replies), note=rate if sizes.rows else ""),
        ]
    weights = [(f"Weights of {weighed(w.name)}", _weight_tiles(w)) for w in audit.weights]
    return [("", first), *weights]


def weighed(name: str) -> str:
    """Return who has these weights."""
    return _WEIGHED.get(name, name)


def _weight_tiles(part: WeightPart) -> list[Tile]:
    size, effect = count(part.effective_sample_size), significant(part.design_effect)
    most = share(part.largest_share)
    return [
        Tile(name="Effective size", value=size, note=f"of {count(part.count)}"),
        Tile(name="Design effect", value=effect, note="1 if all weigh the same"),
        Tile(name="Largest share", value=most, note="of the weight, in one"),
    ]


def _weight_note(part: WeightPart) -> str:
    """Return what a histogram of weights does not show."""
    note = (
        f"Effective size {count(part.effective_sample_size)} of {count(part.count)}; design effect "
        f"{significant(part.design_effect)}; the largest 1% hold {share(part.top_share)} of the "
        "weight."
    )
    apart = [
        f"{count(n)} {word}" for n, word in ((part.zeros, "zero"), (part.negative, "negative")) if n
    ]
    return f"{note} Not drawn: {' and '.join(apart)}." if apart else note


def _hidden(hidden: int, what: str, of: str) -> str:
    if not hidden:
        return ""
    return f"{count(hidden)} {what}{'' if hidden == 1 else 's'} with too few {of} not shown."


def audit_tables(audit: Audit) -> dict[str, list[SortTable]]:
    """Return the tables of each section that has any: every number that its plots show."""
    sections = {
        "balance": _balance(audit.balance),
        "weights": _weights(audit.weights),
        "empty": _empty(audit.overlap),
        "stages": _stages(audit.stages),
        "silent": _silent(audit.silent),
        "rates": _rates(audit.rates),
        "rounds": _rounds(audit.rounds),
        "metric": _metric(audit.metric),
    }
    return {name: [t for t in tables if t.rows] for name, tables in sections.items()}


def _fields(
    caption: str, columns: Mapping[str, Column], rows: Sequence[Any], *importance: Importance
) -> SortTable:
    cells = ([getattr(x, k) for k in columns] for x in rows)
    return table(caption, [*columns.values()], cells, *importance)


def _balance(part: BalanceTable | None) -> Iterator[SortTable]:
    if part is None:
        return
    groups = part.groups
    columns = [
        Column("Column", "text"),
        Column("Population mean"),
        Column("Population SD", hint="standard deviation"),
        *(Column(f"SMD, {g}", "fixed", "standardised mean difference") for g in groups),
        *(Column(f"Mean, {g}") for g in groups),
    ]

    def row(line: BalanceLine) -> list[Value]:
        cells = [line.groups.get(g) for g in groups]
        smds, means = ([getattr(c, key, None) for c in cells] for key in ("smd", "mean"))
        return [line.name, line.mean, line.sd, *smds, *means]

    caption = "Differences from the population, in units of its standard deviation (SMD)"
    smds = slice(3, 3 + len(groups))
    largest = Importance(
        "those with the largest differences", lambda cells: max(map(size, cells[smds]), default=0.0)
    )
    yield table(caption, columns, map(row, part.lines), largest)


_WEIGHT_COLUMNS: Final = {
    "name": Column("Weights of", "text"),
    "count": Column("Count", "count"),
    "zeros": Column("Zeros", "count"),
    "negative": Column("Negative", "count"),
    "effective_sample_size": Column(
        "Effective size", "count", "number of equal weights that inform as much"
    ),
    "design_effect": Column("Design effect", "number", "count over effective size"),
    "largest_share": Column("Largest share", "share", "of the total weight, in one"),
    "top_share": Column("Share of top 1%", "share"),
}


def _weights(parts: Sequence[WeightPart]) -> Iterator[SortTable]:
    if not parts:
        return
    quantiles = list(dict.fromkeys(q for part in parts for q in part.quantiles))
    hint = "multiple of the mean weight"
    columns = [
        *_WEIGHT_COLUMNS.values(), *(Column(quantile_name(q), "number", hint) for q in quantiles)
    ]  # fmt: skip
    rows = (
        [*(getattr(part, k) for k in _WEIGHT_COLUMNS), *(part.quantiles.get(q) for q in quantiles)]
        for part in parts
    )
    yield table("How uneven the weights are", columns, rows)


def quantile_name(quantile: str) -> str:
    """Return what people call it.

    >>> quantile_name("0.5"), quantile_name("0.99")
    ('Median', '99% quantile')
    """
    known = _QUANTILE_NAMES.get(f"{float(quantile):g}")
    return known or f"{100 * float(quantile):g}% quantile"


def _empty(part: OverlapPart | None) -> Iterator[SortTable]:
    if part is not None:
        columns = {
            "name": Column("Subgroup", "text"),
            "population": Column("Clients in the population", "count"),
        }
        caption = "Subgroups in which nobody is enrolled"
        yield _fields(caption, columns, part.empty)


def _silent(groups: Sequence[SilentGroup]) -> Iterator[SortTable]:
    columns = {
        "name": Column("Subgroup", "text"),
        "clients": Column("Enrolled clients", "count"),
        "rows": Column("Rows", "count"),
        "population": Column("Clients in the population", "count"),
    }
    yield _fields("Enrolled subgroups in which nobody ever replied", columns, groups)


_STAGE_COLUMNS: Final = {
    "stage": Column("Stage", "text"),
    "kind": Column("By", "text"),
    "formula": Column("Formula", "text"),
    "rows": Column("Rows", "count"),
    "left_out": Column("Left out", "count", "rows without values"),
    "rate": Column("Rate", "share", "selected"),
    "auc": Column("AUC", "fixed", "chance that a selected one has the higher probability"),
    "calibration_ratio": Column("Observed by expected", "fixed"),
    "expected_error": Column("Mean gap", "fixed", "between probability and share"),
}
_COEFFICIENT_COLUMNS: Final = {
    "name": Column("Coefficient", "text"),
    "stage": Column("Stage", "text"),
    "value": Column("Value", "number", "on the scale of log odds"),
    "standard_error": Column("Standard error"),
    "odds_ratio": Column("Odds ratio"),
    "low": Column("Low (95%)", "number", "of the odds ratio"),
    "high": Column("High (95%)", "number", "of the odds ratio"),
    "p_value": Column("p-value", "number", "of the coefficient being 0"),
}
_CLEAREST: Final = Importance(
    "those furthest from 0 in standard errors",
    lambda row: size(row[2]) / size(row[3]) if size(row[3]) else 0.0,
)
_BIN_COLUMNS: Final = {
    "count": Column("Count", "count"),
    "mean_prob": Column("Mean probability", "fixed"),
    "rate": Column("Share selected", "fixed"),
    "standard_error": Column("Standard error", "fixed"),
}


def _stages(stages: Sequence[StagePart]) -> Iterator[SortTable]:
    columns = dict(_STAGE_COLUMNS)
    if any(stage.rate_rounds for stage in stages):
        columns["rate_rounds"] = Column("Rounds with a constant rate", "count", "not by a model")
    short = [replace(stage, formula=beginning(stage.formula)) for stage in stages]
    yield _fields("Probabilities of selection", columns, short)
    keys = [key for key in _COEFFICIENT_COLUMNS if key not in {"name", "stage"}]
    rows = (
        (c.name, s.stage, *(getattr(c, key) for key in keys))
        for s in stages
        for c in s.coefficients
    )
    caption = "Coefficients, odds ratios with 95% intervals, p-values"
    yield table(caption, [*_COEFFICIENT_COLUMNS.values()], rows, _CLEAREST)
    yield table(
        "Probabilities against what happened, in groups of similar probability",
        [Column("Stage", "text"), *_BIN_COLUMNS.values()],
        ((s.stage, *(getattr(r, k) for k in _BIN_COLUMNS)) for s in stages for r in s.reliability),
    )


def _rates(parts: Sequence[RatePart]) -> Iterator[SortTable]:
    columns = [
        Column("Level", "text"),
        Column("Column", "text"),
        Column("Rows", "count"),
        Column("Replies", "count"),
        Column("Reply rate", "share"),
    ]
    rows = ((x.level, p.column, x.rows, x.replies, x.rate) for p in parts for x in p.lines)
    yield table(
        "Reply rates", columns, rows, Importance("levels of most rows", lambda row: size(row[2]))
    )


_ROUND_COLUMNS: Final = {
    "enrolled": Column("Enrolled", "count"),
    "invited": Column("Invited", "count"),
    "replies": Column("Replies", "count"),
    "reply_rate": Column("Reply rate", "share"),
    "expected_rate": Column("Expected rate", "share", "mean fitted probability"),
    "calibration_ratio": Column("Observed by expected", "fixed"),
    "effective_replies": Column("Effective replies", "count"),
    "weight_sum": Column("Sum of weights", "fixed"),
    "largest_share": Column("Largest share", "share"),
    "skipped": Column("Skipped", "count", "rounds in which nobody could be weighed"),
}


def _rounds(lines: Sequence[RoundLine]) -> Iterator[SortTable]:
    merged = any(line.first != line.last for line in lines)
    columns = {"first": Column("First round" if merged else "Round", "count")}
    if merged:
        columns["last"] = Column("Last round", "count")
    if any(line.opened_at is not None for line in lines):
        columns["opened_at"] = Column("Opened at", "text")
    columns |= _ROUND_COLUMNS
    if any(line.reliance is not None for line in lines):
        columns["reliance"] = Column("Reliance", "fixed", "on enrollment weights, 1 is wholly")
    yield _fields("Rounds", columns, lines)


def _metric(part: MetricPart | None) -> Iterator[SortTable]:
    if part is None:
        return
    columns = {
        "group": Column("Group", "text"),
        "estimator": Column("Estimator", "text"),
        "estimate": Column("Estimate"),
        "standard_error": Column("Standard error"),
        "low": Column(f"Low ({part.confidence:.0%})"),
        "high": Column(f"High ({part.confidence:.0%})"),
        "effective_sample_size": Column("Effective size", "count"),
        "clients": Column("Clients", "count"),
        "replies": Column("Replies", "count"),
    }
    if any(e.reason for e in part.estimates):
        columns["reason"] = Column("Why there is no number", "text")
    if any(e.warning for e in part.estimates):
        columns["warning"] = Column(_WARNING, "text")
    clients = [*columns].index("clients")
    largest = Importance("the groups of most clients", lambda row: size(row[clients]))
    yield _fields(f"Estimates of {part.name}", columns, part.estimates, largest)
    bounds = {
        "odds_ratio": Column("Odds ratio"),
        "low": Column("Low"),
        "high": Column("High"),
        "weight_error": Column("Weight error", "number", "centred, at this odds ratio"),
        "both_low": Column("Low, replies too", "number", "if it moves the odds of replies, too"),
        "both_high": Column("High, replies too", "number", "if it moves the odds of replies, too"),
    }
    caption = "Bounds if something unobserved moves the odds of enrollment"
    yield _fields(caption, bounds, part.sensitivity)
