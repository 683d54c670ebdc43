"""Two audits side by side: what changed between them, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedipw.audit.interactive import Column, Kind, SortTable, Value, count, number, share, table

Json = Mapping[str, Any]
Keyed = Mapping[tuple[str, ...], float | None]

_SIZES: tuple[tuple[str, str], ...] = (
    ("population", "Population"),
    ("enrolled", "Enrolled"),
    ("rounds", "Rounds"),
    ("replies", "Replies"),
    ("clients_replied", "Clients that replied"),
)
_EVENNESS: tuple[tuple[str, str, Kind], ...] = (
    ("effective_sample_size", "Effective size", "count"),
    ("design_effect", "Design effect", "number"),
    ("largest_share", "Largest share", "share"),
    ("top_share", "Share of top 1%", "share"),
)
_TEXT = {"count": count, "number": number, "share": share}


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
    before: Json | None
    after: Json | None

    @property
    def changed(self) -> bool:
        """Whether answer or level differ."""
        return self._answer(self.before) != self._answer(self.after)

    @staticmethod
    def _answer(finding: Json | None) -> tuple[str, str] | None:
        return None if finding is None else (finding["answer"], finding["level"])


def compared_sizes(before: Json, after: Json) -> list[tuple[str, list[Change]]]:
    """Return sizes and the evenness of weights, in groups."""
    sizes = [
        _change(name, "count", before["sizes"][key], after["sizes"][key])
        for key, name in _SIZES
        if before["sizes"][key] or after["sizes"][key]
    ]
    old = {part["name"]: part for part in before["weights"]}
    new = {part["name"]: part for part in after["weights"]}
    weights = [
        (
            f"Weights of {'the enrolled' if name == 'enrollment' else f'the {name}'}",
            [
                _change(word, kind, old.get(name, {}).get(key), new.get(name, {}).get(key))
                for key, word, kind in _EVENNESS[:3]
            ],
        )
        for name in {**new, **old}
    ]
    return [("", sizes), *weights]


def compared_findings(before: Json, after: Json) -> list[FindingChange]:
    """Return each question with its two answers."""
    old, new = (
        {f["question"]: f for f in (audit["verdict"] or {"findings": ()})["findings"]}
        for audit in (before, after)
    )
    return [FindingChange(question=q, before=old.get(q), after=new.get(q)) for q in {**new, **old}]


def compare_tables(before: Json, after: Json) -> dict[str, list[SortTable]]:
    """Return the tables of each section; every one ends with the difference."""
    sections = {
        "balance": _table(
            "Differences from the population (SMD)",
            ("Column", "Group"),
            "fixed",
            _smds(before),
            _smds(after),
        ),
        "rates": _table("Reply rates", ("Level", "Column"), "share", *_rate_keys(before, after)),
        "weights": _table(
            "Weights", ("Quantity", "Weights of"), "number", _evenness(before), _evenness(after)
        ),
        "coefficients": _table(
            "Coefficients, on the scale of log odds",
            ("Coefficient", "Stage"),
            "number",
            _coefficients(before),
            _coefficients(after),
        ),
        "metric": _table(
            "Estimates", ("Group", "Estimator"), "number", _estimates(before), _estimates(after)
        ),
    }
    return {name: [t] if t.rows else [] for name, t in sections.items()}


def _change(name: str, kind: Kind, before: float | None, after: float | None) -> Change:
    text = _TEXT[kind]
    if before is None or after is None:
        return Change(name=name, before=text(before), after=text(after), difference="")
    if before == after:
        return Change(name=name, before=text(before), after=text(after), difference="no change")
    sign = "+" if after > before else ""
    relative = f"{sign}{share(after / before - 1)}" if before > 0 else ""
    return Change(name=name, before=text(before), after=text(after), difference=relative)


def _table(
    caption: str, heads: Sequence[str], kind: Kind, before: Keyed, after: Keyed
) -> SortTable:
    columns = [
        *(Column(head, "text") for head in heads),
        *(Column(head, kind) for head in ("Before", "After", "Difference")),
    ]

    def rows() -> Iterator[list[Value]]:
        for key in {**after, **before}:
            old, new = before.get(key), after.get(key)
            yield [*key, old, new, None if old is None or new is None else new - old]

    return table(caption, columns, rows())


def _smds(audit: Json) -> Keyed:
    lines = audit["balance"]["lines"] if audit["balance"] else ()
    return {(x["name"], g): cell["smd"] for x in lines for g, cell in x["groups"].items()}


def paired_rates(before: Json, after: Json) -> dict[str, list[tuple[str, str | None, str | None]]]:
    """Return by column what each row is called, and its level before and after, if there is one.

    A number is cut into fifths of its own in each audit: they are paired in their order.
    """
    old, new = (
        {p["column"]: (p, [x["level"] for x in p["lines"]]) for p in audit["rates"]}
        for audit in (before, after)
    )
    none: tuple[Json, list[str]] = ({"hidden": 0}, [])
    return {name: _paired(old.get(name, none), new.get(name, none)) for name in {**new, **old}}


def _paired(
    old: tuple[Json, list[str]], new: tuple[Json, list[str]]
) -> list[tuple[str, str | None, str | None]]:
    first, second = ([x for x in levels if _is_range(x)] for _, levels in (old, new))
    whole = not old[0]["hidden"] and not new[0]["hidden"] and len(first) == len(second) > 1
    cut = dict(zip(second, first, strict=True)) if whole else {}
    rows: list[tuple[str, str | None, str | None]] = []
    for level in new[1]:
        was = cut.get(level, level if level in old[1] else None)
        rows.append((level if was in {None, level} else f"{level} (was {was})", was, level))
    told = {was for _, was, _ in rows}
    return rows + [(level, level, None) for level in old[1] if level not in told]


def _is_range(level: str) -> bool:
    """Return whether a level reads like a part of the numbers."""
    head, _, tail = level.partition(" to ")
    return level.startswith(("up to ", "above ")) or (_is_number(head) and _is_number(tail))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _rate_keys(before: Json, after: Json) -> tuple[Keyed, Keyed]:
    """Return reply rates by the name of a row and its column."""
    found: tuple[dict[tuple[str, ...], float | None], ...] = ({}, {})
    for column, rows in paired_rates(before, after).items():
        for side, audit, place in ((found[0], before, 1), (found[1], after, 2)):
            lines = [x for p in audit["rates"] if p["column"] == column for x in p["lines"]]
            rates = {x["level"]: x["rate"] for x in lines}
            side |= {(row[0], column): rates[row[place]] for row in rows if row[place] is not None}
    return found[0], found[1]


def _evenness(audit: Json) -> Keyed:
    parts = audit["weights"]
    return {(word, p["name"]): p[key] for key, word, _ in _EVENNESS for p in parts}


def _coefficients(audit: Json) -> Keyed:
    return {(c["name"], s["stage"]): c["value"] for s in audit["stages"] for c in s["coefficients"]}


def _estimates(audit: Json) -> Keyed:
    estimates = audit["metric"]["estimates"] if audit["metric"] else ()
    return {(e["group"], e["estimator"]): e["estimate"] for e in estimates}
