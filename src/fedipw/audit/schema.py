"""The JSON format of audits, documented: a JSON Schema with the meaning of every field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fedipw.audit.values import ADAPTER, FORMAT, VERSION

_SMD: Final = "standardised mean difference from the population (E11)"
_LEVELS: Final = "good: fine; warn: caution; bad: a problem; unknown: open, nothing was checked"
MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "Audit": {
        "title": "title of the page",
        "settings": "what was asked for",
        "sizes": "how many of each",
        "stages": "enrollment and the steps of participation, whose probabilities were checked",
        "overlap": "overlap of enrollment and population; null where only totals are known",
        "balance": "differences of groups of clients from the population, by column",
        "weights": "how uneven the weights of the enrolled and of the replies are",
        "rates": "reply rates by column",
        "silent": "groups of enrolled clients of whom none ever replied, the largest first",
        "heat": "reply rates by hour and group",
        "rounds": "round by round",
        "metric": "a metric on the target population; null if none was given",
        "unknown": "what cannot be known from what was given, a sentence each",
        "notes": "what was skipped, left out or replaced on the way, a sentence each",
        "verdict": "what the numbers say, in words",
        "card": "summary in the manner of a model card, the same as the Markdown file",
        "made_with": "versions, by package",
    },
    "AuditSettings": {
        "scheme": "method of the weights",
        "enrollment": "formula of enrollment, or the names of the targets",
        "participation": "formula of participation; empty without rounds",
        "participation_fit": "rounds it is fitted on: past (or of them the last, or by a decay), "
        "pooled, same-round, or saved",
        "missing": "policy for missing values: error, indicator or drop",
        "soft": "whether a penalty on fits that separate was asked for (--soft)",
        "command": "command that writes the weights audited, with files to fill in",
        "threshold": "enrollment probability counted as small",
        "min_cell": "subgroups with fewer clients, or rows, are not shown",
    },
    "Sizes": {
        "population": "clients of the population as given, N; null where it is not known",
        "population_table": "true if every client of the population is listed",
        "population_source": "how the population is known beside the enrolled",
        "population_known": "clients with all values needed, whom weights stand for",
        "enrolled": "enrolled clients, at some time",
        "rounds": "rounds of the ledger",
        "rows": "rows of the ledger: one per enrolled client and round",
        "replies": "replies in all rounds",
        "clients_replied": "clients that replied at least once",
    },
    "StagePart": {
        "stage": "enrollment, participation, availability or reply",
        "kind": "what probabilities are by, as of the last round; a constant rate is no model",
        "formula": "formula",
        "note": "why the fit has a penalty nobody asked for; empty if it has none",
        "rate_rounds": "rounds that were given a constant rate, not a model",
        "rows": "rows with a probability: clients, or clients in rounds",
        "rate": "share of them selected",
        "auc": "chance that a selected row has a higher probability than another; null if alike",
        "expected_error": "mean gap between probability and share selected (E14)",
        "calibration_ratio": "observed by expected number of selected rows (E18)",
        "reliability": "probabilities against shares selected, in groups of similar probability",
        "coefficients": "of the last fit; none for a classifier or a constant rate",
        "coefficient_notes": "how coefficients should be taken, a sentence each",
        "left_out": "rows without a probability: a value is missing or a level unknown",
        "prob": "histogram of the probabilities: of all rows, and of those selected",
    },
    "Coefficient": {
        "name": "term",
        "value": "coefficient, on the scale of log odds",
        "standard_error": "from the observed information; null if left out of the fit",
        "odds_ratio": "its exponential",
        "low": "lower end of the 95% interval of the odds ratio (P9); null for a penalised fit",
        "high": "upper end",
        "p_value": "of Wald's test that the coefficient is 0 (P9); null for a penalised fit",
    },
    "ReliabilityBin": {
        "count": "rows",
        "mean_prob": "mean probability",
        "rate": "share selected",
        "standard_error": "of that share",
    },
    "Histogram": {
        "edges": "limits of the bins, one more than bins",
        "counts": "counts by group; each has none or at least min_cell in a bin",
        "log_scale": "whether edges are in equal ratios",
    },
    "OverlapPart": {
        "threshold": "probability counted as small",
        "smallest_prob": "smallest enrollment probability of the population; null without a model",
        "below": "clients of the population below the threshold",
        "share_below": "their share",
        "estimated_size": "sum of inverse probabilities of the enrolled, near N if the model holds",
        "effective_sample_size": "of the enrolled under these weights (W10)",
        "empty": "subgroups of the population with nobody enrolled, the largest first",
        "empty_small": "further ones, too small to be shown",
        "empty_more": "further ones, beyond the largest 200",
    },
    "Cell": {"name": "subgroup", "population": "its clients"},
    "BalanceTable": {
        "scale_from": "whose standard deviation is the unit: the population, or a group",
        "groups": "enrolled, respondents, and both weighted",
        "lines": "columns and levels",
        "hidden": "levels of too few clients to be shown",
    },
    "BalanceLine": {
        "name": "column, or level of one",
        "mean": "of the population",
        "sd": "standard deviation that is the unit",
        "groups": "by group",
    },
    "BalanceCell": {"mean": "of the group", "smd": f"{_SMD}; null where the unit is 0"},
    "WeightPart": {
        "name": "enrollment (of the enrolled) or replies (of all replies)",
        "count": "number of weights",
        "zeros": "weights that are 0",
        "negative": "weights below 0",
        "effective_sample_size": "number of equal weights that inform as much (W10)",
        "design_effect": "count over effective size",
        "largest_share": "of the total weight, in one",
        "top_share": "of the total weight, in the largest 1%",
        "quantiles": "multiples of the mean weight, by quantile",
        "multiples": "histogram of weights over their mean",
    },
    "RatePart": {
        "column": "column of the clients or of the ledger",
        "lines": "its levels, or fifths of a number",
        "hidden": "levels of too few rows or clients to be shown",
    },
    "RateLine": {
        "level": "level or fifth",
        "rows": "rows of the ledger",
        "replies": "replies",
        "rate": "replies over rows",
        "clients": "enrolled clients of the level; null for a column of the ledger",
    },
    "SilentGroup": {
        "name": "column and level, or fifth",
        "clients": "enrolled clients",
        "rows": "their rows in the ledger",
        "population": "clients of the population; null where that is not known",
    },
    "HeatPart": {
        "column": "column",
        "clock": "hour of the day, or round of the day",
        "hours": "hours",
        "levels": "levels",
        "rate": "reply rate by level and hour; null where there are too few rows",
        "rows": "rows by level and hour",
    },
    "RoundLine": {
        "first": "first round of the line",
        "last": "last round of the line",
        "opened_at": "when the first opened, where that is known",
        "enrolled": "enrolled clients, mean over the rounds",
        "invited": "invited clients, mean over the rounds",
        "replies": "replies, mean over the rounds",
        "reply_rate": "replies over enrolled; null where nobody was enrolled",
        "expected_rate": "mean fitted probability",
        "calibration_ratio": "observed by expected replies (E18)",
        "effective_replies": "effective number of replies (W10)",
        "weight_sum": "sum of the weights of a round",
        "largest_share": "largest weight over their sum",
        "skipped": "rounds in which nobody could be weighed",
        "reliance": "on enrollment weights (O21), where a server wrote it",
    },
    "MetricPart": {
        "name": "what the metric is called",
        "rounds": "rounds with values",
        "confidence": "of the intervals",
        "estimates": "by group and estimator",
        "sensitivity": "bounds under unobserved drivers of enrollment",
        "plain_odds_ratio": "odds ratio from which on the plain mean is inside the bounds",
        "moved": "weighted minus plain mean",
        "moved_error": "its standard error",
        "hidden": "groups of too few clients to be shown",
        "gain": "of mean squared error by weighting (E32)",
        "sensitivity_reason": "why there are no bounds",
        "dependence": "of replies on the metric itself, where it can be seen (E64)",
    },
    "Dependence": {
        "odds_ratio": "of a reply per standard deviation of the metric, given covariates",
        "low": "lower end of its 95% interval",
        "high": "upper end",
        "errors": "log odds ratio over its standard error",
        "clients": "clients whose metric is known from another round",
    },
    "EstimateLine": {
        "group": "everyone, or column = level",
        "estimator": "plain, horvitz-thompson, hajek, greg or another by its name",
        "estimate": "mean over the population or the group",
        "standard_error": "design-based, two phases",
        "low": "lower end of the interval",
        "high": "upper end",
        "effective_sample_size": "effective number of replies",
        "clients": "clients behind it",
        "replies": "replies behind it",
        "reason": "why there is no number",
        "interval": "kind of interval: t, jeffreys, bootstrap, logit or beta",
        "warning": "what the interval cannot promise, and why",
    },
    "Sensitivity": {
        "odds_ratio": "by which unobserved drivers may move the odds of enrollment",
        "low": "least weighted mean",
        "high": "largest weighted mean",
        "both_low": "least weighted mean if they move the odds of every reply, too",
        "both_high": "largest such mean",
        "weight_error": "largest centred error of the weights at this odds ratio",
    },
    "Verdict": {
        "headline": "one sentence",
        "findings": "questions with answers",
        "uncorrected": "what weights cannot correct, a sentence each",
        "next_steps": "what to do next, a sentence each",
        "training": "which method to train with, and why",
    },
    "Finding": {
        "question": "question",
        "answer": "Yes, No, In part, Not checked, Unknown, ...",
        "level": _LEVELS,
        "text": "the numbers behind the answer",
        "rule": "how the answer was reached",
    },
    "Card": {"title": "title", "sections": "headings with their sentences"},
    "CardSection": {"title": "heading", "lines": "sentences, all made of the audit's values"},
}


def audit_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of an audit's file.

    >>> found = audit_schema()
    >>> found["properties"]["version"]["const"], found["properties"]["title"]["description"]
    (2, 'title of the page')
    """
    made = ADAPTER.json_schema(mode="serialization")
    shapes = made.pop("$defs")
    whole = {name: made[name] for name in ("type", "properties", "required")}
    for name, meanings in MEANINGS.items():
        shape = whole if name == "Audit" else shapes[name]
        shape["additionalProperties"] = False
        shape["required"] = [*shape["properties"]]  # a file holds every field
        shape.pop("title", None)
        for key, part in shape["properties"].items():
            part.pop("title", None)
            part.pop("default", None)
            part["description"] = meanings[key]
    head = {
        "format": {"const": FORMAT, "description": "name of the format"},
        "version": {
            "const": VERSION,
            "description": "of the format; it rises when a field changes or goes",
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FORMAT,
        "type": "object",
        "properties": {**head, **whole["properties"]},
        "required": [*head, *whole["required"]],
        "additionalProperties": False,
        "$defs": shapes,
    }


def schema_markdown() -> str:
    """Return every field with its type and meaning, a table per object."""
    found = audit_schema()
    parts = ["Audit", *(name for name in MEANINGS if name != "Audit")]
    return "\n".join(line for name in parts for line in _table(name, found)) + "\n"


def _table(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    shape = found if name == "Audit" else found["$defs"][name]
    yield f"**{name}**"
    yield ""
    yield "| field | type | meaning |"
    yield "|---|---|---|"
    for key, part in shape["properties"].items():
        yield f"| `{key}` | {_type(part, found)} | {part['description']} |"
    yield ""


def _type(part: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return a type in words.

    >>> _type({"anyOf": [{"type": "number"}, {"type": "null"}]}, {})
    'number or null'
    """
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        choices = found["$defs"][name].get("enum")
        return ", ".join(f"`{c}`" for c in choices) if choices else name
    if "anyOf" in part:
        return " or ".join(_type(one, found) for one in part["anyOf"])
    if part["type"] == "array":
        return f"list of {_type(part['items'], found)}"
    if part["type"] == "object":
        return f"object of {_type(part['additionalProperties'], found)}"
    return str(part["type"])
