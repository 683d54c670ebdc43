"""Pages of an audit: one point in time, or two side by side; and of a training run.

Each page is one file. It holds its data as JSON, so that it can be read back, and draws it in the
browser; the tables stand without a script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedipw.audit.compare_tables import (
    compare_tables,
    compared_findings,
    compared_sizes,
    paired_rates,
)
from fedipw.audit.interactive import count, number, rendered, share, sortable
from fedipw.audit.page import Table
from fedipw.audit.page_tables import audit_tables
from fedipw.audit.parts import FORMAT, VERSION, Audit
from fedipw.audit.shape import misfits
from fedipw.errors import InputError
from fedipw.evaluation.estimates import EVERYONE
from fedipw.numerics.checks import some

Json = Mapping[str, Any]

_WEIGHED = {"enrollment": "the enrolled", "replies": "the replies"}
_SECTIONS = (
    ("summary", "Summary"),
    ("numbers", "Key numbers"),
    ("balance", "Balance"),
    ("weights", "Weights"),
    ("overlap", "Reach"),
    ("models", "Probabilities"),
    ("replies", "Replies"),
    ("rounds", "Rounds"),
    ("metric", "Metric"),
    ("notes", "Notes"),
    ("settings", "Settings"),
)
_DATA = re.compile(r'<script type="application/json" id="audit-data">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A number to be seen at once."""

    name: str
    value: str
    note: str = ""


def audit_page(audit: Json) -> str:
    """Return the page of ``fedipw audit`` from what `Audit.to_json` gives."""
    audit = _checked(audit, "the audit")
    metric = audit["metric"]
    estimated = [e for e in metric["estimates"] if e["estimate"] is not None] if metric else []
    return rendered(
        "audit.html",
        ("charts.js", "heat.js", "audit.js"),
        {"audit-data": audit},
        title=audit["title"],
        audit=audit,
        tables=audit_tables(audit),
        tiles=_tiles(audit),
        sections=_sections(audit),
        weights=_having(audit["weights"], lambda part: part["multiples"]["counts"]),
        reach=_having(audit["stages"], lambda part: part["prob"]["counts"]),
        reliable=_having(audit["stages"], lambda part: part["reliability"]),
        rates=_having(audit["rates"], lambda part: part["lines"]),
        heat=_having(audit["heat"], lambda part: part["levels"] and part["hours"]),
        confidence=f"{metric['confidence']:.0%}" if metric else "",
        differences=_any_difference(audit["balance"]),
        everyone=any(e["group"] == EVERYONE for e in estimated),
        subgroups=any(e["group"] != EVERYONE for e in estimated),
        hidden=_hidden,
        weighed=_weighed,
        weight_note=_weight_note,
    )


def compare_page(before: Json, after: Json) -> str:
    """Return a page that sets two audits side by side."""
    before, after = _checked(before, "the first audit"), _checked(after, "the second audit")
    rates = paired_rates(before, after)
    return rendered(
        "compare.html",
        ("charts.js", "compare.js"),
        {"audit-before": before, "audit-after": after, "paired-rates": list(rates.items())},
        title=f"{after['title']}: before and after",
        before=before,
        after=after,
        sizes=compared_sizes(before, after),
        findings=compared_findings(before, after),
        tables=compare_tables(before, after),
        rates=list(rates),
        stages=_names(before, after, "stages", "stage"),
    )


def training_page(
    title: str,
    curves: Sequence[Json],
    tables: Sequence[Table],
    notes: Sequence[str],
    settings: Json,
) -> str:
    """Return the page of a training run.

    Parameters
    ----------
    title
        Of the page.
    curves
        Charts, each with ``curves`` (a list of ``name``, ``round``, ``value`` and, or none, ``low``
        and ``high``), ``y_label``, ``log``, and, if wanted, ``title`` and ``caption``.
    tables, notes
        Below the charts.
    settings
        Shown on demand.
    """
    charts = [
        {
            "title": chart.get("title", chart["y_label"]),
            "caption": chart.get("caption", ""),
            **chart,
        }
        for chart in curves
    ]
    return rendered(
        "training.html",
        ("charts.js", "training.js"),
        {"training-data": charts},
        title=title,
        charts=charts,
        tables=[sortable(t) for t in tables if t.rows],
        notes=notes,
        settings=settings,
    )


def embedded_audit(page_text: str) -> dict[str, Any]:
    """Return the audit that a page holds, as `Audit.to_json` gave it."""
    found = _DATA.search(page_text)
    if found is None:
        raise InputError("The page holds no audit. Give the HTML page that `fedipw audit` wrote.")
    return _parsed(found.group(1), "the audit in the page")


def written_audit(text: str) -> dict[str, Any]:
    """Return the audit of a file that `fedipw audit` wrote, its page or its JSON."""
    if text.lstrip("\ufeff").lstrip().startswith("<"):
        return embedded_audit(text)
    return _parsed(text.lstrip("\ufeff"), "the audit")


def _parsed(text: str, what: str) -> dict[str, Any]:
    try:
        audit = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what.capitalize()} cannot be read ({error}). Make it again.") from None
    return dict(_checked(audit, what))


def _checked(audit: object, what: str) -> Json:
    if not isinstance(audit, Mapping) or audit.get("format") != FORMAT:
        raise InputError(f"{what.capitalize()} is not of the format {FORMAT}.")
    if audit.get("version") != VERSION:
        raise InputError(
            f"{what.capitalize()} has version {audit.get('version')!r} of its format; this "
            f"release reads version {VERSION}. Make it again with this release."
        )
    absent = [name for name in Audit.__dataclass_fields__ if name not in audit]
    if absent:
        raise InputError(f"{what.capitalize()} lacks {', '.join(absent)}. Make it again.")
    odd = list(misfits(audit, Audit))
    if odd:
        raise InputError(f"{what.capitalize()} is damaged in {some(odd)}. Make it again.")
    return audit


def _having(parts: Sequence[Json], inside: Callable[[Json], Any]) -> list[tuple[int, Json]]:
    """Return the parts with something to draw, by their place in the audit."""
    return [(k, part) for k, part in enumerate(parts) if inside(part)]


def _any_difference(balance: Json | None) -> bool:
    lines = balance["lines"] if balance else ()
    return any(cell["smd"] is not None for line in lines for cell in line["groups"].values())


def _names(before: Json, after: Json, part: str, key: str) -> list[str]:
    return list(dict.fromkeys(x[key] for audit in (after, before) for x in audit[part]))


def _sections(audit: Json) -> list[tuple[str, str]]:
    here = {
        "summary": bool(audit["verdict"] or audit["unknown"]),
        "balance": bool(audit["balance"] and audit["balance"]["lines"]),
        "weights": bool(audit["weights"]),
        "overlap": bool(audit["overlap"] or audit["stages"]),
        "models": bool(audit["stages"]),
        "replies": any(p["lines"] for p in audit["rates"])
        or any(p["hours"] for p in audit["heat"]),
        "rounds": bool(audit["rounds"]),
        "metric": bool(audit["metric"]),
        "notes": bool(audit["notes"]),
    }
    return [s for s in _SECTIONS if here.get(s[0], True)]


def _tiles(audit: Json) -> list[tuple[str, list[Tile]]]:
    """Return tiles in groups: sizes, then each set of weights."""
    sizes = audit["sizes"]
    population, enrolled, rows = sizes["population"], sizes["enrolled"], sizes["rows"]
    part = f"{share(enrolled / population)} of the population" if population else "clients"
    first = [
        Tile(name="Population", value=count(population), note="clients" if population else ""),
        Tile(name="Enrolled", value=count(enrolled), note=part),
    ]
    if sizes["rounds"]:
        rate = f"{share(sizes['replies'] / rows)} of {count(rows)} rows" if rows else ""
        replied = f"{count(sizes['clients_replied'])} clients replied"
        first += [
            Tile(name="Rounds", value=count(sizes["rounds"]), note=replied),
            Tile(name="Replies", value=count(sizes["replies"]), note=rate),
        ]
    weights = [(f"Weights of {_weighed(w['name'])}", _weight_tiles(w)) for w in audit["weights"]]
    return [("", first), *weights]


def _weighed(name: str) -> str:
    return _WEIGHED.get(name, name)


def _weight_tiles(weights: Json) -> list[Tile]:
    size, total = weights["effective_sample_size"], weights["count"]
    return [
        Tile(name="Effective size", value=count(size), note=f"of {count(total)}"),
        Tile(
            name="Design effect",
            value=number(weights["design_effect"]),
            note="1 if all weigh the same",
        ),
        Tile(
            name="Largest share",
            value=share(weights["largest_share"]),
            note="of the weight, in one",
        ),
    ]


def _weight_note(weights: Json) -> str:
    """Return what a histogram of weights does not show."""
    size, total = count(weights["effective_sample_size"]), count(weights["count"])
    note = (
        f"Effective size {size} of {total}; design effect {number(weights['design_effect'])}; "
        f"the largest 1% hold {share(weights['top_share'])} of the weight."
    )
    apart = [
        f"{count(weights[k])} {w}"
        for k, w in (("zeros", "zero"), ("negative", "negative"))
        if weights[k]
    ]
    return f"{note} Not drawn: {' and '.join(apart)}." if apart else note


def _hidden(hidden: int, what: str, of: str) -> str:
    if not hidden:
        return ""
    return f"{count(hidden)} {what}{'' if hidden == 1 else 's'} with too few {of} not shown."
