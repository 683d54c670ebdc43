"""Two audits side by side, read back from their files: what changed, and by how much."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fedipw.audit.page import (
    Column,
    Kind,
    SortTable,
    Value,
    count,
    rendered,
    share,
    significant,
    table,
)
from fedipw.audit.pages import weighed
from fedipw.audit.values import Audit, Finding, RatePart
from fedipw.errors import InputError

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


def compare_page(before: Audit, after: Audit) -> str:
    """Return a page that sets two audits side by side."""
    rates = paired_rates(before.rates, after.rates)
    return rendered(
        "compare.html",
        ("charts.js", "compare.js"),
        {
            "audit-before": before.to_json(),
            "audit-after": after.to_json(),
            "paired-rates": list(rates.items()),
        },
        title=f"{after.title}: before and after",
        before=before,
        after=after,
        sizes=_compared_sizes(before, after),
        findings=_compared_findings(before, after),
        tables=_tables(before, after),
        rates=list(rates),
        stages=list(dict.fromkeys(stage.stage for stage in (*after.stages, *before.stages))),
    )


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


def _tables(before: Audit, after: Audit) -> dict[str, list[SortTable]]:
    """Return the tables of each section; every one ends with the difference."""
    both = (before, after)
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
            map(_coefficients, both),
        ),
        "metric": _table("Estimates", ("Group", "Estimator"), "number", map(_estimates, both)),
    }
    return {name: [t] if t.rows else [] for name, t in sections.items()}


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

    return table(caption, columns, rows())


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
