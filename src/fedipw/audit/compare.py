"""Two audits side by side, read back from their files: what changed, and by how much."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fedipw.audit.page import (
    Column,
    Importance,
    Kind,
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
from fedipw.audit.pages import weighed
from fedipw.audit.values import (
    Audit,
    Finding,
    Level,
    MetricPart,
    PopulationSource,
    RatePart,
    StagePart,
)
from fedipw.errors import InputError
from fedipw.evaluation.balance import BalanceTable
from fedipw.evaluation.estimators import EVERYONE
from fedipw.selection.saved import ENROLLMENT

Text = Callable[[float | None], str]
Keyed = Mapping[tuple[str, str], float | None]
PairedLevel = tuple[str, str | None, str | None]  # name of a row, its level before and after

_DATA: Final = re.compile(
    r'<script type="application/json" id="audit-data">(.*?)</script>', re.DOTALL
)
_SIZES: Final = {
    "population": "Population",
    "enrolled": "Enrolled",
    "rounds": "Rounds",
    "replies": "Replies",
    "clients_replied": "Clients that replied",
}
_EVENNESS: Final = {
    "effective_sample_size": ("Effective size", count),
    "design_effect": ("Design effect", significant),
    "largest_share": ("Largest share", share),
}
_IN_TABLE: Final = {
    **{key: word for key, (word, _) in _EVENNESS.items()},
    "top_share": "Share of top 1%",
}


def written_audit(text: str) -> Audit:
    """Return the audit of a file that `fedipw audit` wrote, its page or its JSON."""
    text = text.removeprefix("\ufeff")
    if not text.lstrip().startswith("<"):
        return Audit.from_json(text)
    found = _DATA.search(text)
    if found is None:
        raise InputError("The page holds no audit. Give the HTML page that `fedipw audit` wrote.")
    return Audit.from_json(found.group(1), "the audit in the page")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A number before and after, as text."""

    name: str
    before: str
    after: str
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingChange:
    """What a question was answered before and after; none where it was not asked."""

    question: str
    before: Finding | None
    after: Finding | None

    @property
    def changed(self) -> bool:
        """Whether answer or level differ."""
        old, new = (f and (f.answer, f.level) for f in (self.before, self.after))
        return old != new

    @property
    def comparable(self) -> bool:
        """Whether both are answered, by the same rule and known to both."""
        if self.before is None or self.after is None or self.before.rule != self.after.rule:
            return False
        return Level.UNKNOWN not in {self.before.level, self.after.level}


def information(audit: Audit) -> dict[str, str]:
    """Return what kind of information an audit had, by its subject."""
    sizes, settings, metric = audit.sizes, audit.settings, audit.metric
    many = "" if sizes.population is None else f", N = {sizes.population:,.0f}"
    source = sizes.population_source.value
    if sizes.population_source is PopulationSource.TOTALS:
        source += f" ({beginning(settings.enrollment)})"
    by = {s.stage: f"{s.kind.value} on {_formula(s.formula)}" for s in audit.stages}
    enrollment = by.pop(ENROLLMENT, "no model")
    return {
        "Population": f"{source}{many}",
        "Rounds": f"{sizes.rounds:,} with {sizes.replies:,} replies"
        if sizes.rounds
        else "no ledger",
        "Metric": f"{metric.name}, {metric.rounds} rounds" if metric else "none",
        "Weights": settings.scheme,
        "Enrollment by": enrollment,
        "Participation by": "; ".join(f"{k}: {v}" for k, v in by.items()) or "no model",
        "Missing values": settings.missing,
    }


def _formula(text: str) -> str:
    return "every covariate" if text.strip() == "." else repr(beginning(text))


def not_compared(before: Audit, after: Audit) -> dict[str, str]:
    """Return the sections, or stages, that cannot be compared, with the reason of each.

    They are ``balance``, ``rates``, ``metric`` and ``coefficients of`` a stage.
    """
    found = {
        "balance": _balances_apart(before.balance, after.balance),
        "rates": "" if before.rates and after.rates else _only("reply rates", before.rates),
        "metric": _metrics_apart(before.metric, after.metric),
    }
    if not (before.rates or after.rates):
        found["rates"] = ""
    old, new = ({s.stage: s for s in audit.stages} for audit in (before, after))
    for name in {**new, **old}:
        found[f"coefficients of {name}"] = _stages_apart(name, old.get(name), new.get(name))
    return {name: reason for name, reason in found.items() if reason}


def _only(what: str, before: object) -> str:
    return f"{what.capitalize()} are known only {'before' if before else 'after'}."


def _balances_apart(old: BalanceTable | None, new: BalanceTable | None) -> str:
    if old is None or new is None:
        return "" if old is new else _only("differences from the population", old)
    if old.scale_from == new.scale_from:
        return ""
    return (
        "Differences from the population are in standard deviations of the "
        f"{old.scale_from} before and of the {new.scale_from} after: two units."
    )


def _metrics_apart(old: MetricPart | None, new: MetricPart | None) -> str:
    if old is None or new is None:
        return "" if old is new else _only("estimates of a metric", old)
    same = old.name == new.name
    return "" if same else f"The metric is {old.name} before and {new.name} after."


def _stages_apart(name: str, old: StagePart | None, new: StagePart | None) -> str:
    if old is None or new is None:
        return _only(f"coefficients of {name}", old)
    if old.kind is not new.kind:
        return f"{name.capitalize()} is by {old.kind.value} before and by {new.kind.value} after."
    if old.formula != new.formula:
        first, second = (repr(beginning(stage.formula)) for stage in (old, new))
        return f"The formula of {name} is {first} before and {second} after."
    return ""


def changes(before: Audit, after: Audit) -> list[str]:
    """Return what changed between two audits, a sentence each."""
    out = []
    for one in _compared_findings(before, after):
        if one.comparable and one.changed and one.before and one.after:
            out.append(f"{one.question} {one.before.answer} before, {one.after.answer} after.")
    old, new = information(before), information(after)
    out += [f"{k}: {old[k]} before, {new[k]} after." for k in old if old[k] != new[k]]
    apart = not_compared(before, after)
    if "balance" not in apart:
        smds = [_smds(audit) for audit in (before, after)]
        moved = {
            key: (x, y)
            for key, x in smds[0].items()
            if x is not None and (y := smds[1].get(key)) is not None
        }
        if moved:
            name, group = max(moved, key=lambda key: abs(moved[key][1] - moved[key][0]))
            then, now = moved[name, group]
            out.append(
                f"The difference from the population that moved most is {name} of the group "
                f"{group!r}: {then:.2f} before, {now:.2f} after."
            )
    if "metric" not in apart:
        x, y = (_estimates(audit).get((EVERYONE, "hajek")) for audit in (before, after))
        if x is not None and y is not None and after.metric is not None:
            out.append(f"{after.metric.name} of everyone (Hájek): {x:.4g} before, {y:.4g} after.")
    return out


def compare_page(before: Audit, after: Audit) -> str:
    """Return a page that sets two audits side by side.

    What cannot be compared is named with the reason, and left out.
    """
    apart = not_compared(before, after)
    rates = {} if "rates" in apart else paired_rates(before.rates, after.rates)
    stages = dict.fromkeys(stage.stage for stage in (*after.stages, *before.stages))
    whole = before.to_json(), after.to_json()
    return rendered(
        "compare.html",
        ("charts.js", "compare.js"),
        {
            "audit-before": _drawn(whole[0]),
            "audit-after": _drawn(whole[1]),
            "paired-rates": list(rates.items()),
        },
        title=f"{after.title}: before and after",
        before=before,
        after=after,
        sizes=_compared_sizes(before, after),
        findings=_compared_findings(before, after),
        tables=_tables(before, after, apart),
        rates=list(rates),
        stages=[(k, s) for k, s in enumerate(stages) if f"coefficients of {s}" not in apart],
        knew=_knew(before, after),
        changes=changes(before, after),
        settings=[audit["settings"] for audit in whole],
        apart=list(apart.values()),
    )


def _drawn(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the plots of a comparison need of an audit's JSON, and no more."""
    terms = ("name", "value", "standard_error", "p_value")
    estimates = ("group", "estimator", "estimate", "low", "high")

    def kept(part: Mapping[str, Any], *names: str) -> dict[str, Any]:
        return {name: part[name] for name in names}

    def line(part: Mapping[str, Any]) -> dict[str, Any]:
        cells = {group: kept(cell, "smd") for group, cell in part["groups"].items()}
        return {"name": part["name"], "groups": cells}

    balance, metric = whole["balance"], whole["metric"]
    return {
        "balance": balance
        and {"groups": balance["groups"], "lines": [line(x) for x in balance["lines"]]},
        "rates": [
            {"column": p["column"], "lines": [kept(x, "level", "rate") for x in p["lines"]]}
            for p in whole["rates"]
        ],
        "stages": [
            {"stage": s["stage"], "coefficients": [kept(c, *terms) for c in s["coefficients"]]}
            for s in whole["stages"]
        ],
        "metric": metric
        and {
            "name": metric["name"],
            "estimates": [kept(e, *estimates) for e in metric["estimates"]],
        },
    }


def _knew(before: Audit, after: Audit) -> SortTable:
    old, new = information(before), information(after)
    columns = [Column(head, "text") for head in ("Subject", "Before", "After")]
    return table("What each audit knew", columns, ([k, old[k], new[k]] for k in old))


def _compared_sizes(before: Audit, after: Audit) -> list[tuple[str, list[Change]]]:
    """Return sizes and the evenness of weights, in groups."""
    pairs = [(k, getattr(before.sizes, k), getattr(after.sizes, k)) for k in _SIZES]
    sizes = [_change(_SIZES[k], count, old, new) for k, old, new in pairs if old or new]
    first, second = ({part.name: part for part in audit.weights} for audit in (before, after))
    weights = [
        (
            f"Weights of {weighed(name)}",
            [
                _change(word, text, *(getattr(one.get(name), key, None) for one in (first, second)))
                for key, (word, text) in _EVENNESS.items()
            ],
        )
        for name in {**second, **first}
    ]
    return [("", sizes), *weights]


def _change(name: str, text: Text, before: float | None, after: float | None) -> Change:
    difference = ""
    if before is not None and before == after:
        difference = "no change"
    elif before is not None and after is not None and before > 0:
        difference = f"{'+' if after > before else ''}{share(after / before - 1)}"
    return Change(name=name, before=text(before), after=text(after), difference=difference)


def _compared_findings(before: Audit, after: Audit) -> list[FindingChange]:
    old, new = (
        {f.question: f for f in (audit.verdict.findings if audit.verdict else ())}
        for audit in (before, after)
    )
    return [FindingChange(question=q, before=old.get(q), after=new.get(q)) for q in {**new, **old}]


def _tables(before: Audit, after: Audit, apart: Mapping[str, str]) -> dict[str, list[SortTable]]:
    """Return the tables of each section that can be compared; each ends with the difference."""
    both = (before, after)

    def coefficients(audit: Audit) -> Keyed:
        found = _coefficients(audit).items()
        return {key: value for key, value in found if f"coefficients of {key[1]}" not in apart}

    sections = {
        "balance": _table(
            "Differences from the population (SMD)", ("Column", "Group"), "fixed", map(_smds, both)
        ),
        "rates": _table("Reply rates", ("Level", "Column"), "share", _rates(before, after)),
        "weights": _table("Weights", ("Quantity", "Weights of"), "number", map(_evenness, both)),
        "coefficients": _table(
            "Coefficients, on the scale of log odds",
            ("Coefficient", "Stage"),
            "number",
            map(coefficients, both),
        ),
        "metric": _table("Estimates", ("Group", "Estimator"), "number", map(_estimates, both)),
    }
    return {n: [t] if t.rows and n not in apart else [] for n, t in sections.items()}


def _table(caption: str, heads: Sequence[str], kind: Kind, sides: Iterable[Keyed]) -> SortTable:
    before, after = sides
    columns = [
        *(Column(head, "text") for head in heads),
        *(Column(head, kind) for head in ("Before", "After", "Difference")),
    ]

    def rows() -> Iterator[list[Value]]:
        for key in {**after, **before}:
            old, new = before.get(key), after.get(key)
            yield [*key, old, new, None if old is None or new is None else new - old]

    changed = Importance("those that changed most", lambda row: size(row[-1]))
    return table(caption, columns, rows(), changed)


def _smds(audit: Audit) -> Keyed:
    lines = audit.balance.lines if audit.balance else ()
    return {(x.name, group): cell.smd for x in lines for group, cell in x.groups.items()}


def _evenness(audit: Audit) -> Keyed:
    every = _IN_TABLE.items()
    return {(word, part.name): getattr(part, key) for key, word in every for part in audit.weights}


def _coefficients(audit: Audit) -> Keyed:
    return {(c.name, s.stage): c.value for s in audit.stages for c in s.coefficients}


def _estimates(audit: Audit) -> Keyed:
    estimates = audit.metric.estimates if audit.metric else ()
    return {(e.group, e.estimator): e.estimate for e in estimates}


def _rates(before: Audit, after: Audit) -> tuple[Keyed, Keyed]:
    """Return reply rates by the name of a row and its column."""
    old, new = (
        {(p.column, x.level): x.rate for p in audit.rates for x in p.lines}
        for audit in (before, after)
    )
    rows = [
        (column, *row)
        for column, rows in paired_rates(before.rates, after.rates).items()
        for row in rows
    ]
    return (
        {(name, column): old[column, was] for column, name, was, _ in rows if was is not None},
        {(name, column): new[column, now] for column, name, _, now in rows if now is not None},
    )


def paired_rates(
    before: Sequence[RatePart], after: Sequence[RatePart]
) -> dict[str, list[PairedLevel]]:
    """Return by column what each row is called, and its level before and after, if there is one.

    A number is cut into fifths of its own in each audit: they are paired in their order.
    """
    old, new = ({part.column: part for part in parts} for parts in (before, after))
    none = RatePart(column="", lines=(), hidden=0)
    return {name: _paired(old.get(name, none), new.get(name, none)) for name in {**new, **old}}


def _paired(old: RatePart, new: RatePart) -> list[PairedLevel]:
    first, second = ([line.level for line in part.lines] for part in (old, new))
    cuts = [list(filter(_is_range, levels)) for levels in (first, second)]
    whole = not old.hidden and not new.hidden and len(cuts[0]) == len(cuts[1]) > 1
    cut = dict(zip(cuts[1], cuts[0], strict=True)) if whole else {}
    rows: list[PairedLevel] = []
    for level in second:
        was = cut.get(level, level if level in first else None)
        rows.append((level if was in {None, level} else f"{level} (was {was})", was, level))
    seen = {was for _, was, _ in rows}
    return rows + [(level, level, None) for level in first if level not in seen]


def _is_range(level: str) -> bool:
    """Return whether a level reads like a fifth of the numbers.

    >>> _is_range("(-inf, 28]"), _is_range("(20, 28.5]"), _is_range("(rural, north]")
    (True, True, False)
    """
    found = re.fullmatch(r"\((\S+), (\S+)\]", level)
    try:
        return found is not None and float(found[1]) < float(found[2])
    except ValueError:
        return False
