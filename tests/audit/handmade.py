"""Small audits made by hand, to be changed a number at a time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedipw.audit.values import (
    Audit,
    AuditSettings,
    Finding,
    FitKind,
    Histogram,
    MetricPart,
    OverlapPart,
    PopulationSource,
    RoundLine,
    SilentGroup,
    Sizes,
    StagePart,
    WeightPart,
)
from fedipw.audit.verdict import verdict
from fedipw.evaluation.balance import BalanceCell, BalanceLine, BalanceTable
from fedipw.evaluation.diagnostics import ReliabilityBin
from fedipw.selection.overlap import Cell

GROUPS = ("enrolled", "respondents", "enrolled weighted", "respondents weighted")
NO_BINS = Histogram(edges=(0.0, 1.0), counts={}, log_scale=False)
ENROLLMENT = "Do the enrolled differ"
PARTICIPATION = "Do respondents differ"
CORRECTION = "Can weights correct"
WORTH = "Is weighting worth"
MODELS = "Do the models"
Smds = tuple[float | None, ...]


def line(name: str, smds: Smds) -> BalanceLine:
    """Return a column with mean 0 and standard deviation 1, by the groups in order."""
    cells = {
        group: BalanceCell(mean=5.0 if smd is None else smd, smd=smd)
        for group, smd in zip(GROUPS, smds, strict=False)
    }
    return BalanceLine(name=name, mean=0.0, sd=1.0, groups=cells)


def balance(columns: Mapping[str, Smds]) -> BalanceTable:
    groups = GROUPS[: max((len(smds) for smds in columns.values()), default=4)]
    lines = tuple(line(name, smds) for name, smds in columns.items())
    return BalanceTable(scale_from="population", groups=groups, lines=lines, hidden=0)


def weights(name: str = "replies", **changes: Any) -> WeightPart:
    part = WeightPart(
        name=name, count=8_000, zeros=0, negative=0, effective_sample_size=6_400.0,
        design_effect=1.25, largest_share=0.001, top_share=0.03, quantiles={}, multiples=NO_BINS,
    )  # fmt: skip
    return replace(part, **changes)


def stage(name: str, **changes: Any) -> StagePart:
    curve = ReliabilityBin(count=10_000, mean_prob=0.2, rate=0.2, standard_error=0.004)
    part = StagePart(
        stage=name, kind=FitKind.LOGISTIC, formula=".", note="", rate_rounds=0, rows=10_000,
        rate=0.2, auc=0.7, expected_error=0.01, calibration_ratio=1.0, reliability=(curve,),
        coefficients=(), coefficient_notes=(), left_out=0, prob=NO_BINS,
    )  # fmt: skip
    return replace(part, **changes)


def rounds(*ratios: float | None, enrolled: float = 2_000.0) -> tuple[RoundLine, ...]:
    """Return rounds in which a fifth of the enrolled was expected."""
    return tuple(
        RoundLine(
            first=k, last=k, opened_at=None, enrolled=enrolled, invited=enrolled,
            replies=0.2 * enrolled * (ratio or 0.0), reply_rate=0.2 * (ratio or 0.0),
            expected_rate=0.2, calibration_ratio=ratio, effective_replies=100.0, weight_sum=1.0,
            largest_share=0.01, skipped=0,
        )
        for k, ratio in enumerate(ratios, 1)
    )  # fmt: skip


def reach(**changes: Any) -> OverlapPart:
    part = OverlapPart(
        threshold=0.01, smallest_prob=0.05, below=0, share_below=0.0, estimated_size=10_000.0,
        effective_sample_size=1_600.0, empty=(), empty_small=0,
    )  # fmt: skip
    return replace(part, **changes)


def silent(name: str, clients: int) -> SilentGroup:
    return SilentGroup(name=name, clients=clients, rows=20 * clients, population=None)


def empty(name: str, population: int) -> Cell:
    return Cell(name=name, population=population)


def metric(moved: float, error: float, gain: float | None) -> MetricPart:
    return MetricPart(
        name="loss", rounds=20, confidence=0.95, estimates=(), sensitivity=(),
        plain_odds_ratio=None, moved=moved, moved_error=error, hidden=0, gain=gain,
        sensitivity_reason="",
    )  # fmt: skip


SIZES = Sizes(
    population=10_000.0, population_table=True, population_source=PopulationSource.TABLE,
    population_known=10_000.0, enrolled=2_000, rounds=20, rows=40_000, replies=8_000,
    clients_replied=1_500,
)  # fmt: skip
FAIR = Audit(
    title="by hand",
    settings=AuditSettings(
        scheme="fedipw",
        enrollment=".",
        participation=".",
        participation_fit="past",
        missing="error",
        soft=False,
        command="fedipw weights --population FILE --rounds DIR --scheme fedipw --out w.parquet",
        threshold=0.01,
        min_cell=10,
    ),
    sizes=SIZES,
    stages=(stage("enrollment"), stage("participation")),
    overlap=reach(),
    balance=balance({"age": (0.0, 0.0, 0.0, 0.0), "income": (0.02, 0.03, 0.0, 0.01)}),
    weights=(weights("enrollment"), weights()),
    rounds=rounds(*[1.0] * 20),
)
BIASED = replace(
    FAIR, balance=balance({"age": (0.5, 0.7, 0.0, 0.02), "income": (0.02, 0.03, 0.0, 0.01)})
)


TOTALS = {"population_table": False, "population_source": PopulationSource.TOTALS}


def sized(audit: Audit, **changes: Any) -> Audit:
    return replace(audit, sizes=replace(audit.sizes, **changes))


def answer(audit: Audit, question: str) -> Finding:
    return next(f for f in verdict(audit).findings if f.question.startswith(question))
