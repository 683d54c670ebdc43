"""What an audit finds, as plain values: the page and the JSON file hold these numbers, no others.

Nothing in here names a client. Subgroups smaller than ``AuditSettings.min_cell`` are left out or
merged before they get here, and counted. A file is read back into the same values and checked once,
by pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from fedipw.errors import InputError
from fedipw.evaluation.balance import BalanceTable
from fedipw.evaluation.dependence import Dependence
from fedipw.evaluation.diagnostics import ReliabilityBin
from fedipw.evaluation.evaluate import Sensitivity
from fedipw.numerics.checks import some, visible
from fedipw.selection.coefficients import Coefficient
from fedipw.selection.overlap import Cell

FORMAT, VERSION = "fedipw-audit", 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """What was asked for."""

    scheme: str  # method of the weights
    enrollment: str  # formula, or the names of the targets
    participation: str
    participation_fit: str
    missing: str  # policy for missing values: error, indicator or drop
    soft: bool  # whether a penalty on fits that separate was asked for
    command: str  # that writes the weights audited, with files to fill in
    threshold: float  # a probability counted as small
    min_cell: int  # subgroups with fewer clients, or rows, are not shown


class PopulationSource(StrEnum):
    """How the population is known beside the enrolled."""

    TABLE = "table of all clients"
    SAMPLE = "reference sample"
    TOTALS = "totals alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many of each."""

    population: float | None  # N; none where only shares are known
    population_table: bool  # whether every client of the population is known
    population_source: PopulationSource
    population_known: float | None  # clients with all values, whom weights stand for
    enrolled: int
    rounds: int
    rows: int  # of the ledger
    replies: int
    clients_replied: int  # at least once


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of groups in shared bins; bins are merged until each group has none or enough."""

    edges: tuple[float, ...]  # (bins + 1,)
    counts: Mapping[str, tuple[int, ...]]  # (bins,) by group
    log_scale: bool  # whether edges are in equal ratios


class FitKind(StrEnum):
    """What the probabilities of a stage are by."""

    LOGISTIC = "logistic regression"
    PENALISED = "penalised logistic regression"
    CLASSIFIER = "classifier"
    RATE = "constant rate"  # which is no model


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Probabilities of a selection stage: enrollment, or a step of participation."""

    stage: str  # enrollment, participation, availability, reply
    kind: FitKind  # as of the last round
    formula: str  # asked for
    note: str  # why the fit has a penalty nobody asked for
    rate_rounds: int  # rounds that were given a constant rate, not a model
    rows: int
    rate: float  # share selected
    auc: float | None
    expected_error: float  # (E14)
    calibration_ratio: float | None  # observed by expected (E18)
    reliability: tuple[ReliabilityBin, ...]
    coefficients: tuple[Coefficient, ...]
    coefficient_notes: tuple[str, ...]  # how they should be taken
    left_out: int  # rows without values
    prob: Histogram  # of the probabilities: all rows, and those selected

    @property
    def is_model(self) -> bool:
        """Whether probabilities depend on covariates."""
        return self.kind is not FitKind.RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPart:
    """Overlap of enrollment and population; probabilities are none where it has no model."""

    threshold: float
    smallest_prob: float | None
    below: int | None
    share_below: float | None
    estimated_size: float | None
    effective_sample_size: float | None
    empty: tuple[Cell, ...]  # with nobody enrolled, the largest first
    empty_small: int  # further cells, too small to be shown
    empty_more: int = 0  # further cells, beyond the largest 200


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """How uneven some weights are."""

    name: str  # "enrollment" (of the enrolled) or "replies" (of all replies)
    count: int
    zeros: int
    negative: int
    effective_sample_size: float
    design_effect: float
    largest_share: float
    top_share: float  # of the total, in the largest 1%
    quantiles: Mapping[str, float]  # "0.5": multiples of the mean weight
    multiples: Histogram  # of weights over their mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLine:
    """Replies of one level."""

    level: str
    rows: int
    replies: int
    rate: float
    clients: int | None = None  # enrolled, of a column that does not change


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePart:
    """Reply rates by the levels of a column, or by fifths of a number."""

    column: str
    lines: tuple[RateLine, ...]
    hidden: int  # levels of too few rows to be shown


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentGroup:
    """Enrolled clients of one level, or fifth, of whom none ever replied."""

    name: str  # "os = web"
    clients: int  # enrolled
    rows: int  # of the ledger
    population: int | None  # in the population, where that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatPart:
    """Reply rates by hour and group; none where there are too few rows."""

    column: str
    clock: str  # "hour" of the day from opened_at, or "round of the day"
    hours: tuple[int, ...]  # (h,)
    levels: tuple[str, ...]  # (l,)
    rate: tuple[tuple[float | None, ...], ...]  # (l, h)
    rows: tuple[tuple[int | None, ...], ...]  # (l, h)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLine:
    """One round, or some rounds in a row where there are many."""

    first: int
    last: int
    opened_at: str | None
    enrolled: float  # mean over the rounds
    invited: float
    replies: float
    reply_rate: float | None  # none where nobody was enrolled
    expected_rate: float | None  # mean fitted probability
    calibration_ratio: float | None  # (E18)
    effective_replies: float | None
    weight_sum: float | None
    largest_share: float | None
    skipped: int  # rounds in which nobody could be weighed
    reliance: float | None = None  # on enrollment weights (O21), where a server wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateLine:
    """A metric of one group by one estimator."""

    group: str  # "everyone", or "column = level"
    estimator: str  # plain, horvitz-thompson, hajek, greg
    estimate: float | None
    standard_error: float | None
    low: float | None
    high: float | None
    effective_sample_size: float | None
    clients: int
    replies: int
    reason: str  # why there is no number
    interval: str = "t"  # its kind
    warning: str = ""  # what it cannot promise, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPart:
    """A metric on the target population."""

    name: str
    rounds: int
    confidence: float
    estimates: tuple[EstimateLine, ...]
    sensitivity: tuple[Sensitivity, ...]
    plain_odds_ratio: float | None  # at which the unweighted mean is inside the bounds
    moved: float | None  # weighted minus plain
    moved_error: float | None  # its standard error
    hidden: int  # groups too small to be shown
    gain: float | None  # of mean squared error by weighting (E32)
    sensitivity_reason: str  # why there are no bounds
    dependence: Dependence | None = None  # of replies on the metric (E64), where it can be seen


class Level(StrEnum):
    """How a finding should be taken."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One question an audit answers, by a stated rule."""

    question: str  # "Is enrollment biased?"
    answer: str  # "Yes", "No", "In part", "Unknown", ...
    level: Level
    text: str  # a sentence or two with the numbers
    rule: str  # how the answer was reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the numbers say, in words."""

    headline: str
    findings: tuple[Finding, ...]
    uncorrected: tuple[str, ...]  # what weights cannot correct
    next_steps: tuple[str, ...]
    training: tuple[str, ...] = ()  # which method to train with, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSection:
    """One heading of a card and its sentences."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A summary in the manner of a model card, every sentence from the audit's own values."""

    title: str
    sections: tuple[CardSection, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Everything an audit found."""

    __pydantic_config__ = {"strict": True, "allow_inf_nan": False}  # noqa: RUF012

    title: str
    settings: AuditSettings
    sizes: Sizes
    stages: tuple[StagePart, ...] = ()
    overlap: OverlapPart | None = None
    balance: BalanceTable | None = None
    weights: tuple[WeightPart, ...] = ()
    rates: tuple[RatePart, ...] = ()
    silent: tuple[SilentGroup, ...] = ()  # the largest first
    heat: tuple[HeatPart, ...] = ()
    rounds: tuple[RoundLine, ...] = ()
    metric: MetricPart | None = None
    unknown: tuple[str, ...] = ()  # what cannot be known from what was given
    notes: tuple[str, ...] = ()  # what was skipped, left out or replaced on the way
    verdict: Verdict | None = None
    card: Card | None = None
    made_with: Mapping[str, str] = field(default_factory=dict)  # versions

    def to_json(self) -> dict[str, Any]:
        """Return plain values; numbers that are not finite are null."""
        return {"format": FORMAT, "version": VERSION, **json.loads(ADAPTER.dump_json(self))}

    def visible(self) -> Audit:
        """Return the audit with characters written out that are not seen or turn others around."""
        plain = json.loads(ADAPTER.dump_json(self))
        made = _visible(plain)
        return self if made == plain else ADAPTER.validate_json(json.dumps(made))

    @classmethod
    def from_json(cls, text: str, what: str = "the audit") -> Audit:
        """Return the audit of a JSON file; ``what`` names it where it is refused."""
        name = what.capitalize()
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name} cannot be read ({error}). Make it again.") from None
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise InputError(f"{name} is not of the format {FORMAT}.")
        if given.get("version") != VERSION:
            raise InputError(
                f"{name} has version {given.get('version')!r} of its format; this release reads "
                f"version {VERSION}. Make it again with this release."
            )
        absent = [one.name for one in fields(cls) if one.name not in given]
        if absent:
            raise InputError(f"{name} lacks {', '.join(absent)}. Make it again.")
        try:
            return ADAPTER.validate_json(text)
        except ValidationError as error:
            places = dict.fromkeys(".".join(map(str, one["loc"])) for one in error.errors())
            raise InputError(f"{name} is damaged in {some(places)}. Make it again.") from None


ADAPTER: Final = TypeAdapter(Audit)


def _visible(value: Any) -> Any:
    """Return plain values with every text made visible."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): _visible(part) for key, part in value.items()}
    return [_visible(part) for part in value] if isinstance(value, list) else value
