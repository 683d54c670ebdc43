"""Audits with parts left out, with very many lines, and with names that try to break a page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedipw.audit.values import Audit, Histogram, PopulationSource
from fedipw.evaluation.balance import BalanceTable
from fedipw.evaluation.estimators import EVERYONE
from fedipw.selection.coefficients import Coefficient
from fedipw.selection.overlap import Cell

from .audit_example import balance_part, example, rate_part, rounds_part

NASTY = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "long_" * 40,
    "ключ 🗝️ = 東京 «naïve» \u202eabc\u202c",
    """quotes " ' ` & &amp; {{ 7*7 }} {% raw %} \\u003c \\""",
    "]]><!--",
)


def totals_only() -> Audit:
    """Return an audit of someone who knows totals of the population, not its clients."""
    full = example(2)
    assert full.verdict is not None
    return replace(
        full,
        title="Keyboard model, from census totals",
        sizes=replace(
            full.sizes,
            population=None,
            population_known=None,
            population_table=False,
            population_source=PopulationSource.TOTALS,
        ),
        stages=(),
        overlap=None,
    )


def without_rounds() -> Audit:
    """Return an audit of enrollment alone."""
    full = example(3)
    assert full.balance is not None
    assert full.verdict is not None
    return replace(
        full,
        title="Enrollment alone",
        sizes=replace(full.sizes, enrolled=21_930, rounds=0, rows=0, replies=0, clients_replied=0),
        stages=full.stages[:1],
        balance=_groups_kept(full.balance, ("enrolled", "enrolled weighted")),
        weights=full.weights[:1],
        rates=(),
        silent=(),
        heat=(),
        rounds=(),
        metric=None,
        unknown=(),
        notes=(),
    )


def large() -> Audit:
    """Return an audit with many lines of everything."""
    rng = np.random.default_rng(4)
    full = example(4)
    names = tuple(f"column_{k} = level {k % 7}" for k in range(200))
    levels = tuple(f"level {k}" for k in range(60))
    return replace(
        full,
        title="A large audit",
        balance=balance_part(rng, 1.0, names),
        rates=(rate_part("device", levels, rng),),
        rounds=rounds_part(rng, 500),
    )


LEVELS = tuple(f"level number {k:03d}" for k in range(200))
WIDE = (
    *(f"number_{k:03d}" for k in range(290)),
    *(f"category_{k} = {level}" for k in range(10) for level in LEVELS),
)


def wide() -> Audit:
    """Return an audit of 300 columns, ten of them of 200 levels, and 2,000 rounds."""
    rng = np.random.default_rng(6)
    full = example(6)
    assert full.overlap is not None
    assert full.metric is not None
    terms = [name.replace(" = ", "[") + "]" * (" = " in name) for name in WIDE]
    coefficients = tuple(
        Coefficient.of(term, float(rng.normal(0, 0.3)), float(rng.uniform(0.05, 0.2)))
        for term in terms
    )
    rates = tuple(rate_part(f"category_{k}", LEVELS, rng) for k in range(12))
    first = [e for e in full.metric.estimates if e.group == EVERYONE]
    estimates = [
        replace(
            e, group=f"category_0 = {level}", clients=500 - k,
            warning=f"cannot promise 0.95: an effective number of {k / 10:.1f} clients, below 20",
        )
        for k, level in enumerate(LEVELS)
        for e in first
    ]  # fmt: skip
    heat = full.heat[0]
    return replace(
        full,
        title="A wide audit",
        balance=balance_part(rng, 1.0, WIDE),
        stages=tuple(replace(s, coefficients=coefficients) for s in full.stages[:2]),
        overlap=replace(
            full.overlap,
            empty=tuple(Cell(name=f"category_1 = {x}", population=900) for x in LEVELS),
            empty_more=1_234,
        ),
        rates=rates,
        heat=(replace(heat, column="category_0", levels=LEVELS[:6]),),
        rounds=tuple(
            replace(line, first=10 * k + 1, last=10 * k + 10)
            for k, line in enumerate(rounds_part(rng, 200))
        ),
        metric=replace(
            full.metric,
            estimates=(*(replace(e, clients=13_020) for e in first), *estimates),
        ),
    )


def bare() -> Audit:
    """Return an audit in which all that may be missing is, and what varies does not."""
    full = example(6)
    assert full.balance is not None
    assert full.metric is not None
    assert full.overlap is not None
    blank = {"estimate": None, "standard_error": None, "low": None, "high": None}
    unknown = dict.fromkeys(("plain_odds_ratio", "moved", "moved_error"))
    blank_rounds = {"opened_at": None, "expected_rate": None, "calibration_ratio": None}
    heat = full.heat[0]
    return replace(
        _without_distributions(full),
        sizes=replace(full.sizes, population=None, rows=0, replies=0),
        overlap=replace(full.overlap, empty=(), empty_small=0),
        balance=replace(
            full.balance,
            lines=tuple(
                replace(x, groups={g: replace(c, smd=None) for g, c in x.groups.items()})
                for x in full.balance.lines[:2]
            ),
        ),
        heat=(replace(heat, rate=tuple((None,) * 24 for _ in heat.levels)),),
        rounds=(replace(full.rounds[0], last=9, **blank_rounds),),  # type: ignore[arg-type]
        metric=replace(
            full.metric,
            estimates=tuple(replace(e, **blank) for e in full.metric.estimates[:5]),  # type: ignore[arg-type]
            sensitivity=full.metric.sensitivity[:1],
            **unknown,  # type: ignore[arg-type]
        ),
        unknown=(),
        verdict=None,
        made_with={},
    )


def _without_distributions(full: Audit) -> Audit:
    nothing = Histogram(edges=(0.1, 0.9), counts={}, log_scale=False)
    one_bin = Histogram(edges=(0.95, 1.05), counts={"replies": (50,)}, log_scale=True)
    first, second = full.stages[:2]
    never = replace(full.rates[0].lines[0], replies=0, rate=0.0)
    return replace(
        full,
        stages=(
            replace(first, prob=nothing, reliability=(), coefficients=(), auc=None),
            replace(second, reliability=second.reliability[:1]),
        ),
        weights=(
            replace(full.weights[0], multiples=nothing, zeros=3, negative=1),
            replace(full.weights[1], multiples=one_bin),
        ),
        rates=(replace(full.rates[0], lines=(never,)), replace(full.rates[1], lines=())),
    )


def hostile() -> Audit:
    """Return an audit whose names try to break the page."""
    rng = np.random.default_rng(5)
    full = example(5)
    assert full.balance is not None
    assert full.verdict is not None
    first = full.verdict.findings[0]
    verdict = replace(
        full.verdict,
        headline=f"{NASTY[0]} {NASTY[2]}",
        findings=tuple(replace(first, question=n, answer=n, text=n, rule=n) for n in NASTY),
        next_steps=NASTY,
    )
    heat = replace(full.heat[0], column=NASTY[0], levels=NASTY)
    assert full.overlap is not None
    assert full.metric is not None
    return replace(
        full,
        title=NASTY[1],
        settings=replace(full.settings, enrollment=NASTY[2], scheme=NASTY[0]),
        stages=tuple(replace(s, formula=NASTY[1] + NASTY[2]) for s in full.stages),
        overlap=replace(full.overlap, empty=tuple(Cell(name=n, population=50) for n in NASTY)),
        balance=balance_part(rng, 1.0, NASTY),
        rates=tuple(rate_part(n, NASTY, rng) for n in NASTY[:3]),
        heat=(heat,),
        metric=replace(
            full.metric,
            name=NASTY[2],
            estimates=tuple(
                replace(e, group=NASTY[0] if e.group != EVERYONE else e.group, reason=NASTY[1])
                for e in full.metric.estimates
            ),
        ),
        unknown=NASTY,
        notes=NASTY,
        verdict=verdict,
        made_with=dict.fromkeys(NASTY, NASTY[1]),
    )


def _groups_kept(balance: BalanceTable, groups: tuple[str, ...]) -> BalanceTable:
    lines = tuple(
        replace(line, groups={g: line.groups[g] for g in groups}) for line in balance.lines
    )
    return replace(balance, groups=groups, lines=lines)
