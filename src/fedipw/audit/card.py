"""A card of an audit: who is covered, who is not, what was assumed, what was not tested.

The headings are those of model cards and of data-governance records (relevance,
representativeness, gaps and how they are addressed, as in Article 10 of the EU AI Act). Every
sentence is made of the audit's own values; that a card exists says nothing of compliance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fedipw.audit.values import (
    Audit,
    Card,
    CardSection,
    Finding,
    FitKind,
    Level,
    PopulationSource,
)
from fedipw.evaluation.balance import RESPONDENTS, RESPONDENTS_WEIGHTED
from fedipw.evaluation.estimators import EVERYONE
from fedipw.selection.saved import ENROLLMENT
from fedipw.weighting.methods import method_named

_WORST: Final = 5  # columns named with their differences
DISCLAIMER: Final = (
    "This card is made from the numbers of an audit and from nothing else. It is no statement of "
    "legal compliance."
)


def audit_card(audit: Audit) -> Card:
    """Return the card of an audit that has its verdict."""
    sections = {
        "About this card": _about(audit),
        "Data sources and sizes": _sources(audit),
        "Relevance: what was looked at": _relevance(audit),
        "Intended use of the weights": _use(audit),
        "Who is covered": _covered(audit),
        "Who is not covered": _uncovered(audit),
        "How gaps are addressed": _addressed(audit),
        "What was assumed": _assumed(audit),
        "What was not tested": _untested(audit),
        "Limits": _limits(audit),
    }
    made = tuple(CardSection(title=title, lines=tuple(x)) for title, x in sections.items())
    return Card(title=f"Selection card: {audit.title}", sections=made)


def card_markdown(card: Card) -> str:
    """Return a card as Markdown; names cannot start tags or entities.

    >>> print(card_markdown(Card(title="A <b>", sections=(CardSection(title="S", lines=("x",)),))))
    # A &lt;b&gt;
    <BLANKLINE>
    ## S
    <BLANKLINE>
    - x
    <BLANKLINE>
    """
    out = [f"# {_plain(card.title)}", ""]
    for section in card.sections:
        out += [f"## {_plain(section.title)}", ""]
        out += [f"- {_plain(line)}" for line in section.lines] + [""]
    return "\n".join(out)


def _plain(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _findings(audit: Audit) -> tuple[Finding, ...]:
    return () if audit.verdict is None else audit.verdict.findings


def _about(audit: Audit) -> Iterator[str]:
    yield DISCLAIMER
    if audit.made_with:
        yield "Made with " + ", ".join(f"{k} {v}" for k, v in audit.made_with.items()) + "."


def _sources(audit: Audit) -> Iterator[str]:
    sizes, metric = audit.sizes, audit.metric
    size = "of unknown size" if sizes.population is None else f"of {sizes.population:,.0f} clients"
    yield f"Target population {size}, known by: {sizes.population_source.value}."
    known = sizes.population_known
    if sizes.population is not None and known is not None and known < sizes.population:
        yield (
            f"Of these {known:,.0f} have all values that are needed and are the population that "
            "weights stand for."
        )
    yield f"{sizes.enrolled:,} enrolled clients."
    if sizes.rounds:
        yield (
            f"A ledger of {sizes.rounds:,} rounds with {sizes.rows:,} rows: {sizes.replies:,} "
            f"replies, by {sizes.clients_replied:,} clients."
        )
    else:
        yield "No ledger of rounds."
    if metric is None:
        yield "No metric of the replies."
    else:
        rounds = "1 round" if metric.rounds == 1 else f"{metric.rounds:,} rounds"
        yield f"The metric {metric.name}, reported in {rounds}."


def _relevance(audit: Audit) -> Iterator[str]:
    lines = () if audit.balance is None else audit.balance.lines
    if lines:
        shown = ", ".join(line.name for line in lines[:40])
        more = f" and {len(lines) - 40} more" if len(lines) > 40 else ""
        yield f"Columns and levels compared with the population: {shown}{more}."
    else:
        yield "No column is known of both the enrolled and the population."
    if audit.sizes.population_source is not PopulationSource.TOTALS:
        yield f"Formula of enrollment: {_formula(audit.settings.enrollment)}."
    else:
        yield f"Totals of the population: {audit.settings.enrollment}."
    if audit.settings.participation:
        yield f"Formula of participation: {_formula(audit.settings.participation)}."


def _formula(text: str) -> str:
    return "every covariate" if text.strip() == "." else repr(text)


def _use(audit: Audit) -> Iterator[str]:
    method, sizes = method_named(audit.settings.scheme), audit.sizes
    whole = method.uses_enrollment or bool(method.needs.balance) or method.needs.everyone
    target = "target population" if whole else "enrolled clients"
    yield (
        f"Weights of {audit.settings.scheme}: one per reply, for means of metrics or updates over "
        f"the {target}."
    )
    yield from (f"{f.question} {f.answer}. {f.text}" for f in _findings(audit)[3:4])
    if sizes.rounds:
        yield f"They are written by: {audit.settings.command}"


def _covered(audit: Audit) -> Iterator[str]:
    yield from (f"{f.question} {f.answer}. {f.text}" for f in _findings(audit)[:2])
    balance = audit.balance
    if balance is None or RESPONDENTS not in balance.groups:
        return

    def size(name: str) -> float:
        smds = {line.name: line.groups[RESPONDENTS].smd for line in balance.lines}
        return abs(smds[name] or 0.0)

    worst = sorted(balance.lines, key=lambda line: -size(line.name))[:_WORST]
    for line in worst:
        before, after = (line.groups.get(g) for g in (RESPONDENTS, RESPONDENTS_WEIGHTED))
        text = f"{line.name}: {line.mean:.4g} in the population"
        text += "" if before is None else f", {before.mean:.4g} among respondents"
        yield f"{text}{'' if after is None else f', {after.mean:.4g} after weighting'}."


def _uncovered(audit: Audit) -> Iterator[str]:
    lines = () if audit.verdict is None else audit.verdict.uncorrected
    yield from lines
    small = 0 if audit.overlap is None else audit.overlap.empty_small
    if small:
        yield (
            f"{small:,} further subgroups with nobody enrolled and fewer than "
            f"{audit.settings.min_cell} clients each."
        )
    if not lines and not small:
        yield "No group that was looked at is without enrolled clients and replies."
    if audit.sizes.population_source is PopulationSource.TOTALS:
        yield "With totals alone, groups with nobody enrolled show only among the totals."
    if audit.sizes.population_source is PopulationSource.SAMPLE:
        yield "With a reference sample, groups with nobody enrolled were not looked for."


def _addressed(audit: Audit) -> Iterator[str]:
    yield from (f"{f.question} {f.answer}. {f.text}" for f in _findings(audit)[2:3])
    yield from () if audit.verdict is None else audit.verdict.next_steps


def _assumed(audit: Audit) -> Iterator[str]:
    method = method_named(audit.settings.scheme)
    if method.uses_enrollment:
        yield (
            "Enrollment: clients with the same values of "
            f"{_formula(audit.settings.enrollment)} are as likely, whatever else they are."
        )
    elif method.needs.balance:
        yield (
            "Enrolled clients weighted to the population's means stand for those that are not "
            "enrolled, whatever else those are."
        )
    for stage in audit.stages:
        if stage.stage == ENROLLMENT:
            continue
        if stage.kind is FitKind.RATE:
            yield f"{stage.stage.capitalize()}: all clients are as likely, by a constant rate."
        else:
            yield (
                f"{stage.stage.capitalize()}: clients with the same values of "
                f"{_formula(stage.formula)} are as likely, whatever else they are."
            )
    for stage in audit.stages:
        if stage.kind is FitKind.PENALISED:
            yield f"{stage.stage.capitalize()} is by {stage.kind.value}: probabilities are shrunk."
    if audit.settings.missing == "drop":
        yield "Clients with missing values are left out, as if they were not of the population."
    if audit.settings.missing == "indicator":
        yield "Missing values are levels of their own, or medians with an indicator."


def _untested(audit: Audit) -> Iterator[str]:
    yield from audit.unknown
    for finding in _findings(audit):
        if finding.level is Level.UNKNOWN:
            yield f"{finding.question} {finding.answer}. {finding.text}"


def _limits(audit: Audit) -> Iterator[str]:
    for part in audit.weights:
        who = "enrolled clients" if part.name == "enrollment" else "replies"
        yield (
            f"Weighted, {part.count:,} {who} inform as much as {part.effective_sample_size:,.0f}; "
            f"the largest 1% of the weights hold {part.top_share:.0%} of their sum."
        )
    metric = audit.metric
    for line in () if metric is None else metric.estimates:
        if line.group == EVERYONE and line.estimate is not None and metric is not None:
            ends = "without an interval"
            if line.low is not None and line.high is not None:
                ends = f"{metric.confidence:.0%} interval {line.low:.4g} to {line.high:.4g}"
            warning = f" {line.warning}" if line.warning else ""
            yield f"{metric.name}, {line.estimator}: {line.estimate:.4g}, {ends}.{warning}"
    if metric is not None and metric.plain_odds_ratio is not None:
        yield (
            f"Unobserved drivers of enrollment with an odds ratio of {metric.plain_odds_ratio:.3g} "
            "could explain the whole difference of the weighted from the plain mean."
        )
    yield f"Groups of fewer than {audit.settings.min_cell} clients or rows are not shown."
